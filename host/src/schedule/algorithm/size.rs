//! Sizes of problems, with the terms that formulas of costs have in common.

use super::Cost;
use crate::schedule::{Dims, Shape, chain, double_tree, pat};

/// Problem size of a cost formula.
pub(super) struct Size {
    /// Ranks.
    pub(super) p: f64,
    /// Elements.
    pub(super) n: f64,
    /// The largest power of two that is no larger than p.
    pub(super) floor: f64,
    pub(super) log_floor: f64,
    pub(super) log_ceil: f64,
    pub(super) is_power: bool,
    /// The ranks along each dimension.
    pub(super) dims: Dims,
}

impl Size {
    /// The size of a problem over at least one rank.
    pub(super) fn new(ranks: u32, shape: Shape, count: usize) -> Self {
        let floor = f64::from(1 << ranks.ilog2());
        let is_power = ranks.is_power_of_two();
        let (log_floor, log_ceil) = (f64::from(ranks.ilog2()), f64::from(ranks.ilog2() + u32::from(!is_power)));
        let dims = shape.dims(ranks);
        Self { p: f64::from(ranks), n: count as f64, floor, log_floor, log_ceil, is_power, dims }
    }

    /// n(p-1)/p: all but one block.
    pub(super) fn rest(&self) -> f64 {
        self.n * (self.p - 1.0) / self.p
    }

    /// The same among the survivors of a fold.
    pub(super) fn rest_of_floor(&self) -> f64 {
        self.n * (self.floor - 1.0) / self.floor
    }

    /// What an exchange of p' - 1 pairs of blocks carries: no survivor of a fold has more than two blocks.
    pub(super) fn pairs(&self) -> f64 {
        2.0 * self.n * (self.floor - 1.0) / self.p
    }

    /// n(p-1): what all ranks together send where each result is built and handed on once.
    pub(super) fn once(&self) -> f64 {
        self.n * (self.p - 1.0)
    }

    /// p(p-1): a message of each rank to each other one.
    pub(super) fn pairs_of_ranks(&self) -> f64 {
        self.p * (self.p - 1.0)
    }

    /// The messages of an exchange among the survivors of a fold.
    pub(super) fn exchanges(&self) -> f64 {
        self.floor * self.log_floor
    }

    /// The number of ranks that are folded.
    pub(super) fn folded(&self) -> f64 {
        self.p - self.floor
    }

    /// The blocks that a binomial tree moves, if each rank has one: a block travels as often as its rank's number has
    /// ones.
    pub(super) fn tree_blocks(&self) -> f64 {
        let ranks = self.p as u64;
        let ones = |bit: u32| (ranks >> (bit + 1) << bit) + (ranks & ((2 << bit) - 1)).saturating_sub(1 << bit);
        (0..32).map(ones).sum::<u64>() as f64
    }

    /// 1 if there are other ranks, otherwise 0.
    pub(super) fn others(&self) -> f64 {
        self.log_ceil.min(1.0)
    }

    /// The height of a double tree, and the number of its segments.
    pub(super) fn double_tree(&self) -> (f64, f64) {
        let ranks = self.p as u32;
        let height = f64::from(ranks.saturating_sub(1).max(1).ilog2());
        (height, f64::from(double_tree::segments(ranks, self.n as usize)))
    }

    /// The steps that fill a chain, and the number of its segments.
    pub(super) fn chain(&self) -> (f64, f64) {
        ((self.p - 2.0).max(0.0), f64::from(chain::segments(self.p as u32, self.n as usize)))
    }

    /// The steps of PAT, and its number of segments.
    pub(super) fn pat(&self) -> (f64, f64) {
        let (ranks, count) = (self.p as u32, self.n as usize);
        let aggregation = pat::Aggregation::within(pat::BUFFER_ELEMENTS, ranks, count);
        (f64::from(aggregation.steps(ranks)), f64::from(aggregation.segments))
    }

    /// 1 if there are ranks to fold, otherwise 0.
    pub(super) fn folds(&self) -> f64 {
        f64::from(u8::from(!self.is_power))
    }
}

pub(super) fn cost(steps: f64, path_elements: f64, reduced_elements: f64, sent_elements: f64) -> Cost {
    Cost { steps, path_elements, reduced_elements, sent_elements, ..Cost::default() }
}

impl Cost {
    /// The same, with what all ranks together send.
    pub(super) const fn by_all(self, (messages, moved_elements): (f64, f64)) -> Self {
        Self { messages, moved_elements, ..self }
    }

    /// The same, with messages beyond one for each step and pieces beyond one for each message.
    pub(super) const fn with_extra(self, extra_messages: f64, extra_pieces: f64) -> Self {
        Self { extra_messages, extra_pieces, ..self }
    }

    /// The same figures as bounds.
    pub(super) const fn bound(self) -> Self {
        Self { is_bound: true, ..self }
    }
}
