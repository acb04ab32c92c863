//! Exchanges along a circulant graph, which [`super::nhr`] and [`super::pat`] share.
//!
//! A block at *offset* d lies d ranks before its owner: in a reduce-scatter rank r's partial value of block r + d. Each
//! offset d > 0 moves once, to d - h where h is its lowest one bit, after all that moves to d. So a block's partial
//! values flow along a binomial tree to offset 0, for any number of ranks, and every rank sends each block but its own
//! once. The all-gather runs the same hops backward, from each block's owner to the others.
//!
//! *Aggregation* decides which offsets move together. Offsets are H M + L with L < M. Those with the same L > 0 move in
//! one step, L from M - 1 down: a walk in depth, during which few partial values wait. Offsets with L = 0 follow, in
//! steps of distance M, 2M, 4M, ... So M = 1 takes ceil(log2 p) steps, and M >= p takes p - 1 of one block each.

use super::{Buffer, Landing, Layout, Place, Recv, Region, Schedule, Send, Side, Span};
use std::collections::BTreeSet;
use sumac_hal::ids::Rank;

/// Hops of one step: all of one distance.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hops {
    distance: u32,
    /// The offsets that move, in rising order.
    offsets: Vec<u32>,
}

/// The steps of a reduce-scatter over `ranks` ranks with `low` = M.
fn hops(ranks: u32, low: u32) -> Vec<Hops> {
    let with_low = |l: u32| (l..ranks).step_by(low as usize).collect::<Vec<_>>();
    let walk = (1..low.min(ranks)).rev().map(|l| Hops { distance: l & l.wrapping_neg(), offsets: with_low(l) });
    let levels = (low.ilog2()..ranks.next_power_of_two().ilog2()).map(|level| {
        let distance = 1 << level;
        Hops { distance, offsets: (distance..ranks).step_by(2 * distance as usize).collect() }
    });
    walk.chain(levels).collect()
}

/// Where partial values and elements lie.
pub(super) trait Places {
    /// The partial value of the block at an offset.
    fn partial(&self, offset: u32, len: usize) -> Region;
    /// The result of the block at offset 0.
    fn result(&self) -> Region;
}

/// Partial values of an all-reduce: each in its place.
#[derive(Debug)]
pub(super) struct InPlace {
    pub(super) place: Place,
    pub(super) count: usize,
}

impl Places for InPlace {
    fn partial(&self, offset: u32, _: usize) -> Region {
        Buffer::Work.at(Span::of_block(self.count, self.place.ranks(), self.place.after(offset).0))
    }

    fn result(&self) -> Region {
        Buffer::Output.at(Span::of_block(self.count, self.place.ranks(), self.place.rank().0))
    }
}

/// Partial values in slots of `Work`: one for each depth of the walk and each H.
#[derive(Debug)]
pub(super) struct Slots {
    low: u32,
    high: u32,
    slot_len: usize,
    result: Region,
}

impl Slots {
    /// Slots for blocks, or parts of blocks, of at most `slot_len` elements.
    pub(super) const fn new(ranks: u32, low: u32, slot_len: usize, result: Region) -> Self {
        Self { low, high: ranks.div_ceil(low), slot_len, result }
    }

    /// The number of slots: log2 M + 1 depths, of which the deepest moves inputs only.
    pub(super) const fn number(ranks: u32, low: u32) -> usize {
        let depths = if low == 1 { 1 } else { low.ilog2() };
        depths as usize * ranks.div_ceil(low) as usize
    }
}

impl Places for Slots {
    fn partial(&self, offset: u32, len: usize) -> Region {
        let (h, l) = (offset / self.low, offset % self.low);
        let slot = l.count_ones() as usize * self.high as usize + h as usize;
        Buffer::Work.at(Span { start: slot * self.slot_len, len })
    }

    fn result(&self) -> Region {
        self.result
    }
}

/// Append a reduce-scatter with M = `low`; `part` selects what is reduced of a block.
pub(super) fn push_reduce_scatter(
    schedule: &mut Schedule,
    count: usize,
    low: u32,
    places: &dyn Places,
    part: &dyn Fn(Span) -> Span,
) {
    let place = schedule.place();
    let block = |offset: u32| part(Span::of_block(count, place.ranks(), place.after(offset).0));
    let steps = hops(place.ranks(), low);
    // The offsets that have taken a value: what others hold is their input.
    let mut taken: BTreeSet<u32> = BTreeSet::new();
    let last = steps.len().saturating_sub(1);
    for (index, step) in steps.iter().enumerate() {
        let held = |offset: u32| match taken.contains(&offset) {
            true => places.partial(offset, block(offset).len),
            false => Buffer::Input.at(block(offset)),
        };
        let (to, from) = (place.after(step.distance), place.before(step.distance));
        let sends: Vec<Send> = step.offsets.iter().map(|&offset| Send { peer: to, from: held(offset) }).collect();
        let recv = |&offset: &u32| {
            let at = offset - step.distance;
            let target = if index == last { places.result() } else { places.partial(at, block(at).len) };
            Recv { peer: from, sent_from: held(offset).buffer, landing: Landing::combine(held(at), Side::Left, target) }
        };
        let recvs: Vec<Recv> = step.offsets.iter().map(recv).collect();
        schedule.exchange(&sends, &recvs);
        taken.extend(step.offsets.iter().map(|offset| offset - step.distance));
    }
}

/// Append the all-gather of `Output`'s blocks, of which this rank has its own, with M = `low`.
pub(super) fn push_all_gather(schedule: &mut Schedule, count: usize, low: u32) {
    let place = schedule.place();
    // Of the block whose owner is `offset` ranks before this one.
    let block = |offset: u32| Buffer::Output.at(Span::of_block(count, place.ranks(), place.before(offset).0));
    for step in hops(place.ranks(), low).iter().rev() {
        let (to, from): (Rank, Rank) = (place.after(step.distance), place.before(step.distance));
        let sends: Vec<Send> =
            step.offsets.iter().map(|offset| Send { peer: to, from: block(offset - step.distance) }).collect();
        let landed =
            |&offset: &u32| Recv { peer: from, sent_from: Buffer::Output, landing: Landing::copy(block(offset)) };
        let recvs: Vec<Recv> = step.offsets.iter().map(landed).collect();
        schedule.exchange(&sends, &recvs);
    }
}

/// An empty all-gather of `count` elements in all, with the own block in its place.
pub(super) fn all_gather(place: Place, count: usize) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    let input = Buffer::Input.at(Span::first(own.len));
    schedule.move_locally(&[super::Local::copy(input, Buffer::Output.at(own))]);
    schedule
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hops_of_6_ranks_match_hand_computation() {
        let found = |low| hops(6, low).into_iter().map(|hops| (hops.distance, hops.offsets)).collect::<Vec<_>>();
        assert_eq!(found(1), [(1, vec![1, 3, 5]), (2, vec![2]), (4, vec![4])]);
        assert_eq!(found(2), [(1, vec![1, 3, 5]), (2, vec![2]), (4, vec![4])]);
        assert_eq!(found(4), [(1, vec![3]), (2, vec![2]), (1, vec![1, 5]), (4, vec![4])]);
        assert_eq!(found(8), [(1, vec![5]), (4, vec![4]), (1, vec![3]), (2, vec![2]), (1, vec![1])]);
    }
}
