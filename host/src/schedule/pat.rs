//! PAT, parallel aggregated trees: reduce-scatter and all-gather in buffers that do not grow with the message.
//!
//! Each block moves along a binomial tree whose far hops carry few blocks (Bruck's dimensions, reversed). With room for
//! all partial values the trees of all blocks run in parallel, as in [`super::nhr`]: ceil(log2 p) steps. With less room
//! only a = 2^j blocks are aggregated, and the rest of the tree is walked in depth: ceil(p/a) - 1 + j steps that need
//! a log2(p/a) blocks, or p - 1 steps and log2 p blocks for a = 1. If one block is still too long, it is cut into
//! segments, each reduced by itself: the room is bounded whatever n is (Jeaugey, "PAT: a new algorithm for all-gather
//! and reduce-scatter operations at scale", arXiv 2506.20252, section 3).
//!
//! | | cost, for r segments and M = 2^ceil(log2 p) / a |
//! |---|---|
//! | reduce-scatter | r (min(M, p) - 1 + j) alpha + (p-1)/p n (beta + gamma) |
//! | all-gather | (min(M, p) - 1 + j) alpha + (p-1)/p n beta |
//!
//! An all-gather needs no room, as blocks land in the caller's output. It bounds its messages instead, in the same way.

use super::circulant::{self, Slots};
use super::{Buffer, Layout, Local, Place, Schedule, Span};

/// Elements of partial values that a rank has room for.
pub const BUFFER_ELEMENTS: usize = 1 << 16;

/// How a size is served with bounded room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aggregation {
    /// M: the number of steps of the walk, plus one. The blocks of a message are at most ceil(p/M).
    pub low: u32,
    /// Segments of a block.
    pub segments: u32,
}

impl Aggregation {
    /// Find the least number of steps for `count` elements in room for `elements`.
    pub fn within(elements: usize, ranks: u32, count: usize) -> Self {
        let block = count.div_ceil(ranks as usize).max(1);
        let powers = (0..=ranks.next_power_of_two().ilog2()).map(|power| 1 << power);
        let fits = |&low: &u32| Slots::number(ranks, low).saturating_mul(block) <= elements;
        if let Some(low) = powers.clone().find(fits) {
            return Self { low, segments: 1 };
        }
        let low = ranks.next_power_of_two();
        let segments = block.div_ceil((elements / Slots::number(ranks, low)).max(1));
        Self { low, segments: u32::try_from(segments).unwrap_or(u32::MAX) }
    }

    /// Return the steps of one segment over `ranks` ranks.
    pub const fn steps(self, ranks: u32) -> u32 {
        let walk = if self.low < ranks { self.low } else { ranks };
        walk - 1 + ranks.next_power_of_two().ilog2() - self.low.ilog2()
    }
}

/// Schedule a reduce-scatter of `count` elements: rank r gets block r of p.
pub fn reduce_scatter(place: Place, count: usize) -> Schedule {
    reduce_scatter_within(BUFFER_ELEMENTS, place, count)
}

/// Schedule the same with room for `elements` partial values, or for one segment of one element of each depth.
pub fn reduce_scatter_within(elements: usize, place: Place, count: usize) -> Schedule {
    let ranks = place.ranks();
    let Aggregation { low, segments } = Aggregation::within(elements, ranks, count);
    let own = Span::of_block(count, ranks, place.rank().0);
    let slot_len = count.div_ceil(ranks as usize).div_ceil(segments as usize);
    let work = if ranks > 2 { Slots::number(ranks, low) * slot_len } else { 0 };
    let layout = Layout { input: count, output: own.len, work, work_in_output: false, in_place_at: Some(own.start) };
    let mut schedule = Schedule::reducing(place, layout);
    if ranks == 1 {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(own), Buffer::Output.at(Span::first(own.len)))]);
    }
    let within = move |segment: u32, block: Span| Span::of_block(block.len, segments, segment);
    let places = move |segment| Slots::new(ranks, low, slot_len, Buffer::Output.at(within(segment, own)));
    let part = move |segment, block: Span| {
        let within = within(segment, block);
        Span { start: block.start + within.start, len: within.len }
    };
    circulant::push_reduce_scatter(&mut schedule, (count, low, segments), places, part);
    schedule
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    all_gather_within(BUFFER_ELEMENTS, place, count)
}

/// Schedule the same with messages as short as room for `elements` would make them.
pub fn all_gather_within(elements: usize, place: Place, count: usize) -> Schedule {
    let mut schedule = circulant::all_gather(place, count);
    circulant::push_all_gather(&mut schedule, count, Aggregation::within(elements, place.ranks(), count).low);
    schedule
}
