//! Accumulators and the order in which a chain combines contributions (PROTOCOL 9).
//!
//! An engine pulls in order, so `Order::TreePairwise` needs no staging: one accumulator for each block that waits for
//! its right neighbour, like a binary counter. Blocks without a value (all `Empty`) take no accumulator.
//!
//! ```text
//! children 0..=6, pairwise      acc 0          acc 1      acc 2
//! 0: load, 1: reduce            (0 1)
//! 2: load, 3: reduce, merge     (0 1)(2 3)     <- (2 3)
//! 4: load, 5: reduce            (0..4)         (4 5)
//! 6, the last: reduce, merge    everything     <- (4 5)6
//! ```
//!
//! Invariant: the expression is that of [`crate::order`], whatever the order of arrival.

use super::Plan;
use crate::sets::ChildSet;
use heapless::Vec;
use sumac_hal::ctrl::Order;
use sumac_hal::dma::{Capabilities, Step};

/// Maximum number of steps per chain. With more children than fit, a slot takes several chains.
const STEPS_MAX: usize = 64;

/// The minimum number of steps an engine must support per chain: clear the record, pull one child, merge its blocks (at
/// most one per level of 256 children except the first).
pub(super) const STEPS_MIN: u32 = 9;

/// Return how many accumulators a slot with `children` children needs.
pub(super) const fn accumulators(order: Order, children: usize) -> usize {
    match order {
        Order::TreePairwise if children > 2 => (children - 1).ilog2() as usize + 1,
        _ => 1,
    }
}

/// Where the next child's contribution goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Its accumulator.
    pub(super) target: usize,
    /// The accumulator is empty.
    pub(super) first: bool,
    /// How many times the last accumulator is then merged into the one before it.
    pub(super) merges: usize,
}

impl Place {
    /// Return the place of `child` in tree order, once all before it are combined. `data` has the earlier children that
    /// contributed data. (`Arrival` is a fold in order of arrival; `any` tells whether anything arrived before.)
    pub(super) fn of(order: Order, children: usize, data: &ChildSet, child: usize, any: bool) -> Self {
        match order {
            Order::TreePairwise => Self::pairwise(children, data, child),
            _ => Self { target: 0, first: !any, merges: 0 },
        }
    }

    fn pairwise(children: usize, data: &ChildSet, child: usize) -> Self {
        let is_last = child + 1 == children;
        let (mut start, mut width, mut merged) = (child, 1, 0);
        while start > 0 && (start & width != 0 || is_last) {
            if start & width != 0 {
                merged += usize::from(data.has_any(start - width, start));
                start -= width;
            }
            width *= 2;
        }
        let mut blocks = merged;
        while start > 0 {
            let width = 1 << start.trailing_zeros();
            blocks += usize::from(data.has_any(start - width, start));
            start -= width;
        }
        Self { target: blocks - usize::from(merged > 0), first: merged == 0, merges: merged.saturating_sub(1) }
    }

    /// Return the accumulators to merge, as (destination, source), in order.
    pub(super) fn merging(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.merges).map(move |done| (self.target - done - 1, self.target - done))
    }
}

/// A chain under construction.
pub(super) struct Draft {
    pub(super) steps: Vec<Step, STEPS_MAX>,
    limit: usize,
    pub(super) plan: Plan,
}

impl Draft {
    pub(super) fn new(capabilities: &Capabilities) -> Self {
        let limit = STEPS_MAX.min(capabilities.max_steps as usize);
        Self { steps: Vec::new(), limit, plan: Plan::NOTHING }
    }

    /// Return whether `steps` more steps fit.
    pub(super) fn has_room(&self, steps: usize) -> bool {
        self.steps.len() + steps <= self.limit
    }

    /// Add a step; the caller has checked that there is room.
    pub(super) fn push(&mut self, step: Step) {
        let pushed = self.steps.push(step);
        debug_assert!(pushed.is_ok(), "the caller has checked the room");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// The oracle: the declared expression, evaluated literally.
    fn expression(order: Order, values: &[Option<f32>]) -> Option<f32> {
        let plus = |a: Option<f32>, b: Option<f32>| match (a, b) {
            (Some(a), Some(b)) => Some(a + b),
            (a, b) => a.or(b),
        };
        match order {
            Order::TreeFold => values.iter().copied().fold(None, plus),
            _ if values.len() == 1 => values[0],
            _ => {
                let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
                plus(expression(order, left), expression(order, right))
            }
        }
    }

    fn run(order: Order, values: &[Option<f32>]) -> Option<f32> {
        let mut acc: Vec<f32> = std::vec![f32::NAN; accumulators(order, values.len())];
        let mut data = ChildSet::EMPTY;
        for (child, value) in values.iter().enumerate() {
            let place = Place::of(order, values.len(), &data, child, !data.is_empty());
            if let Some(value) = value {
                acc[place.target] = if place.first { *value } else { acc[place.target] + value };
                data.insert(child);
            }
            place.merging().for_each(|(dst, src)| acc[dst] += acc[src]);
            assert!(1 + 1 + place.merges <= STEPS_MIN as usize);
        }
        (!data.is_empty()).then_some(acc[0])
    }

    proptest! {
        #[test]
        fn pulls_in_order_evaluate_the_declared_expression(
            values in prop::collection::vec(prop::option::weighted(0.7, -1e6_f32..1e6), 1..257),
        ) {
            for order in [Order::TreeFold, Order::TreePairwise] {
                prop_assert_eq!(run(order, &values).map(f32::to_bits), expression(order, &values).map(f32::to_bits));
            }
        }
    }

    #[test]
    fn accumulator_count_suffices_for_up_to_256_children() {
        for children in 1..=256 {
            let all: Vec<Option<f32>> = (0..children).map(|n| Some(n as f32)).collect();
            assert_eq!(run(Order::TreePairwise, &all), expression(Order::TreePairwise, &all), "{children}");
        }
        assert_eq!([1, 2, 3, 4, 5, 256].map(|n| accumulators(Order::TreePairwise, n)), [1, 1, 2, 2, 3, 8]);
    }
}
