//! The order in which the contributions of one slot combine (PROTOCOL 9).
//!
//! `Arrival` needs one accumulator. The tree orders stage contributions that arrive early, one buffer per child, and
//! combine them as soon as the declared order allows. So the bits of the result do not depend on the order of arrival:
//! - *fold*: ((c0 + c1) + c2) + ..., in stage 0;
//! - *pairwise*: aligned blocks of 1, 2, 4, ... children, the left block first. A block without a right neighbour moves
//!   up unchanged. The value of a block is in the stage of its first child.
//!
//! A child that sent `Empty` is skipped, never replaced by an identity element: a block of such children has no value,
//! and its neighbour moves up unchanged.
//!
//! Invariant: a block is combined once its last child arrives, by that child's contribution.

use crate::sets::ChildSet;
use sumac_hal::ctrl::Order;
use sumac_hal::reduce::Kernel;

/// The chunk buffers of one slot.
pub(crate) struct Stages<'b> {
    /// All stages, consecutively.
    pub(crate) bytes: &'b mut [u8],
    /// Bytes from one stage to the next.
    pub(crate) stride: usize,
    /// Bytes in use per stage: the chunk's elements in the accumulator type.
    pub(crate) len: usize,
}

impl Stages<'_> {
    /// Return the stage that holds, or will hold, the slot's value.
    pub(crate) fn value(&mut self) -> &mut [u8] {
        self.stage(0)
    }

    pub(crate) fn stage(&mut self, i: usize) -> &mut [u8] {
        &mut self.bytes[i * self.stride..][..self.len]
    }

    /// Return stages `left` and `right`, `left < right`.
    fn pair(&mut self, left: usize, right: usize) -> (&mut [u8], &[u8]) {
        let (head, tail) = self.bytes.split_at_mut(right * self.stride);
        (&mut head[left * self.stride..][..self.len], &tail[..self.len])
    }

    /// Combine stage `right` into stage `left`, which may have no value yet.
    fn merge(&mut self, kernel: Kernel, left: usize, right: usize, left_has_value: bool) {
        let (left, right) = self.pair(left, right);
        if left_has_value {
            kernel.combine(left, right, true);
        } else {
            left.copy_from_slice(right);
        }
    }
}

/// One contribution with data.
#[derive(Clone, Copy)]
pub(crate) struct Input<'p> {
    pub(crate) payload: &'p [u8],
    /// Already in the accumulator type.
    pub(crate) partial: bool,
}

/// The children of a slot when another one arrives.
pub(crate) struct Arrived<'s> {
    /// Children that have arrived, including this one.
    pub(crate) bits: &'s ChildSet,
    /// Those of them with data, including this one.
    pub(crate) data: &'s ChildSet,
    /// Number of children.
    pub(crate) children: usize,
    /// The child that arrives.
    pub(crate) child: usize,
}

/// Combine `input` (`None` for Empty) into the stages. `fold_next` is the slot's first child not folded yet.
///
/// When all children have arrived, stage 0 holds the slot's value, if any child brought data.
pub(crate) fn contribute(
    order: Order,
    kernel: Kernel,
    stages: &mut Stages<'_>,
    arrived: &Arrived<'_>,
    input: Option<Input<'_>>,
    fold_next: &mut u16,
) {
    match order {
        Order::TreeFold => fold(kernel, stages, arrived, input, fold_next),
        Order::TreePairwise => pairwise(kernel, stages, arrived, input),
        _ => {
            if let Some(input) = input {
                let first = arrived.data.is_only(arrived.child);
                take(kernel, stages.stage(0), input, !first);
            }
        }
    }
}

/// Load the first value or combine a later one. Never starts from an identity element.
pub(crate) fn take(kernel: Kernel, acc: &mut [u8], input: Input<'_>, has_value: bool) {
    if has_value {
        kernel.combine(acc, input.payload, input.partial);
    } else {
        kernel.load(acc, input.payload, input.partial);
    }
}

fn fold(kernel: Kernel, stages: &mut Stages<'_>, arrived: &Arrived<'_>, input: Option<Input<'_>>, fold_next: &mut u16) {
    let mut next = usize::from(*fold_next);
    if arrived.child != next {
        if let Some(input) = input {
            take(kernel, stages.stage(arrived.child), input, false);
        }
        return;
    }
    if let Some(input) = input {
        let has_value = arrived.data.has_any(0, next);
        take(kernel, stages.stage(0), input, has_value);
    }
    next += 1;
    while next < arrived.children && arrived.bits.contains(next) {
        if arrived.data.contains(next) {
            stages.merge(kernel, 0, next, arrived.data.has_any(0, next));
        }
        next += 1;
    }
    *fold_next = next as u16;
}

fn pairwise(kernel: Kernel, stages: &mut Stages<'_>, arrived: &Arrived<'_>, input: Option<Input<'_>>) {
    let Arrived { bits, data, children, child } = *arrived;
    let mut start = child;
    let mut width = 1;
    match input {
        // The left child of this pair has arrived: combine directly instead of staging.
        Some(input) if child % 2 == 1 && bits.contains(child - 1) => {
            take(kernel, stages.stage(child - 1), input, data.contains(child - 1));
            (start, width) = (child - 1, 2);
        }
        Some(input) => take(kernel, stages.stage(child), input, false),
        None => {}
    }
    while width < children {
        let left = start & !width;
        let right = left + width;
        let neighbour = if start == left { right } else { left };
        let end = (neighbour + width).min(children);
        if right < children {
            if !bits.has_all(neighbour, end) {
                return;
            }
            if data.has_any(right, (right + width).min(children)) {
                stages.merge(kernel, left, right, data.has_any(left, right));
            }
        }
        start = left;
        width *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;
    use std::vec::Vec;
    use sumac_hal::op::{Dtype, ReduceOp};

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
                let half = values.len().next_power_of_two() / 2;
                let (left, right) = values.split_at(half);
                plus(expression(order, left), expression(order, right))
            }
        }
    }

    fn run(order: Order, values: &[Option<f32>], arrival: &[usize]) -> Option<f32> {
        let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).unwrap();
        let (mut bits, mut data, mut fold_next) = (ChildSet::EMPTY, ChildSet::EMPTY, 0);
        let mut bytes = vec![0xff; values.len() * 16];
        for &child in arrival {
            let payload = values[child].map(f32::to_le_bytes);
            bits.insert(child);
            if payload.is_some() {
                data.insert(child);
            }
            let mut stages = Stages { bytes: &mut bytes, stride: 16, len: 4 };
            let arrived = Arrived { bits: &bits, data: &data, children: values.len(), child };
            let input = payload.as_ref().map(|bytes| Input { payload: bytes, partial: false });
            contribute(order, kernel, &mut stages, &arrived, input, &mut fold_next);
        }
        (!data.is_empty()).then(|| f32::from_le_bytes(bytes[..4].try_into().unwrap()))
    }

    proptest! {
        /// Any order of arrival and any set of empty children yields the bits of the declared expression.
        #[test]
        fn result_bits_follow_the_declared_order(
            values in prop::collection::vec(prop::option::weighted(0.8, -1e6_f32..1e6), 1..24),
            keys in prop::collection::vec(any::<u32>(), 24),
        ) {
            let mut arrival: Vec<usize> = (0..values.len()).collect();
            arrival.sort_by_key(|&i| keys[i]);
            for order in [Order::TreeFold, Order::TreePairwise] {
                let (found, expected) = (run(order, &values, &arrival), expression(order, &values));
                prop_assert_eq!(found.map(f32::to_bits), expected.map(f32::to_bits), "{:?} {:?}", order, arrival);
            }
        }
    }

    #[test]
    fn fold_and_pairwise_round_differently() {
        let values = [1e8, 1.0, -1e8, 1.0].map(Some);
        let arrival = [3, 1, 2, 0];
        assert_eq!(run(Order::TreeFold, &values, &arrival), Some(1.0));
        assert_eq!(run(Order::TreePairwise, &values, &arrival), Some(0.0));
    }
}
