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

/// Hops of one step: all of one distance, of offsets at equal intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hops {
    distance: u32,
    /// The lowest offset that moves.
    first: u32,
    interval: usize,
}

/// A reduce-scatter over `ranks` ranks with M = `low`, a power of two that is no larger than the next one from `ranks`.
#[derive(Debug, Clone, Copy)]
struct Walk {
    ranks: u32,
    low: u32,
}

impl Walk {
    /// The number of steps in depth.
    fn deep(self) -> u32 {
        self.low.min(self.ranks) - 1
    }

    /// The number of steps.
    fn steps(self) -> u32 {
        self.deep() + self.ranks.next_power_of_two().ilog2() - self.low.ilog2()
    }

    fn hops(self, step: u32) -> Hops {
        if step < self.deep() {
            let l = self.deep() - step;
            return Hops { distance: lowest_bit(l), first: l, interval: self.low as usize };
        }
        let distance = self.low << (step - self.deep());
        Hops { distance, first: distance, interval: 2 * distance as usize }
    }

    fn offsets(self, hops: Hops) -> impl Iterator<Item = u32> {
        (hops.first..self.ranks).step_by(hops.interval)
    }

    /// The step in which an offset moves. Not for offset 0.
    fn step_of(self, offset: u32) -> u32 {
        match offset % self.low {
            0 => self.deep() + lowest_bit(offset).ilog2() - self.low.ilog2(),
            l => self.deep() - l,
        }
    }

    /// Whether an offset has taken a value before a step.
    fn has_taken(self, offset: u32, step: u32) -> bool {
        let distances =
            (0..32).map(|bit| 1 << bit).take_while(|&distance| offset == 0 || distance < lowest_bit(offset));
        let mut from = distances.map_while(|distance| offset.checked_add(distance).filter(|&from| from < self.ranks));
        from.any(|from| self.step_of(from) < step)
    }
}

const fn lowest_bit(offset: u32) -> u32 {
    offset & offset.wrapping_neg()
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

/// Append `segments` reduce-scatters with M = `low`, one after the other. `places` says where one has its values, and
/// `part` what it reduces of a block.
pub(super) fn push_reduce_scatter<P: Places>(
    schedule: &mut Schedule,
    (count, low, segments): (usize, u32, u32),
    places: impl Fn(u32) -> P + std::marker::Send + Sync + 'static,
    part: impl Fn(u32, Span) -> Span + std::marker::Send + Sync + 'static,
) {
    let place = schedule.place();
    let walk = Walk { ranks: place.ranks(), low };
    let steps = walk.steps();
    schedule.compute(steps as usize * segments as usize, move |index, step| {
        let (segment, nth) = ((index / steps as usize) as u32, (index % steps as usize) as u32);
        let places = places(segment);
        let block = |offset: u32| part(segment, Span::of_block(count, place.ranks(), place.after(offset).0));
        // What an offset has not combined yet is its input.
        let held = |offset: u32| match walk.has_taken(offset, nth) {
            true => places.partial(offset, block(offset).len),
            false => Buffer::Input.at(block(offset)),
        };
        let hops = walk.hops(nth);
        let (to, from) = (place.after(hops.distance), place.before(hops.distance));
        for offset in walk.offsets(hops) {
            let (sent, at) = (held(offset), offset - hops.distance);
            let target = if nth + 1 == steps { places.result() } else { places.partial(at, block(at).len) };
            let landing = Landing::combine(held(at), Side::Left, target);
            step.exchange(Send { peer: to, from: sent }, Recv { peer: from, sent_from: sent.buffer, landing });
        }
    });
}

/// Append the all-gather of `Output`'s blocks, of which this rank has its own, with M = `low`.
pub(super) fn push_all_gather(schedule: &mut Schedule, count: usize, low: u32) {
    let place = schedule.place();
    let walk = Walk { ranks: place.ranks(), low };
    let steps = walk.steps();
    schedule.compute(steps as usize, move |index, step| {
        // Of the block whose owner is `offset` ranks before this one.
        let block = |offset: u32| Buffer::Output.at(Span::of_block(count, place.ranks(), place.before(offset).0));
        let hops = walk.hops(steps - 1 - index as u32);
        let (to, from) = (place.after(hops.distance), place.before(hops.distance));
        for offset in walk.offsets(hops) {
            let recv = Recv { peer: from, sent_from: Buffer::Output, landing: Landing::copy(block(offset)) };
            step.exchange(Send { peer: to, from: block(offset - hops.distance) }, recv);
        }
    });
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
        let found = |low| {
            let walk = Walk { ranks: 6, low };
            let hops = |step| (walk.hops(step).distance, walk.offsets(walk.hops(step)).collect());
            (0..walk.steps()).map(hops).collect::<Vec<(u32, Vec<u32>)>>()
        };
        assert_eq!(found(1), [(1, vec![1, 3, 5]), (2, vec![2]), (4, vec![4])]);
        assert_eq!(found(2), [(1, vec![1, 3, 5]), (2, vec![2]), (4, vec![4])]);
        assert_eq!(found(4), [(1, vec![3]), (2, vec![2]), (1, vec![1, 5]), (4, vec![4])]);
        assert_eq!(found(8), [(1, vec![5]), (4, vec![4]), (1, vec![3]), (2, vec![2]), (1, vec![1])]);
    }
}
