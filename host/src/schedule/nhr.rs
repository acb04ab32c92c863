//! NHR, the nonuniform hierarchical ring: logarithmic and bandwidth-optimal for every number of ranks.
//!
//! | | cost |
//! |---|---|
//! | reduce-scatter | ceil(log2 p) alpha + (p-1)/p n (beta + gamma) |
//! | all-gather | ceil(log2 p) alpha + (p-1)/p n beta |
//! | all-reduce | 2 ceil(log2 p) alpha + (p-1)/p n (2 beta + gamma) |
//!
//! (Formulas of the introduction to algorithms in HCCL's user guide.) In step k of the reduce-scatter every rank sends
//! floor((p-1+2^k) / 2^(k+1)) blocks to the rank 2^k further: half of all blocks go to the neighbour, and few go far.
//! The all-gather runs backward, from far to near. Blocks of a step do not lie side by side, so they are separate
//! pieces of one message.

use super::circulant::{self, InPlace, Slots};
use super::{Buffer, Layout, Local, Place, Schedule, Span};

/// Schedule an all-reduce of `count` elements.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let mut schedule = Schedule::reducing(place, Layout::all_reduce(count));
    if place.ranks() == 1 {
        let whole = Span::first(count);
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    circulant::push_reduce_scatter(&mut schedule, (count, 1, 1), move |_| InPlace { place, count }, |_, block| block);
    circulant::push_all_gather(&mut schedule, count, 1);
    schedule
}

/// Schedule a reduce-scatter of `count` elements: rank r gets block r of p. `Work` has room for p blocks.
pub fn reduce_scatter(place: Place, count: usize) -> Schedule {
    let ranks = place.ranks();
    let own = Span::of_block(count, ranks, place.rank().0);
    let slot_len = count.div_ceil(ranks as usize);
    let work = if ranks > 2 { Slots::number(ranks, 1) * slot_len } else { 0 };
    let layout = Layout { input: count, output: own.len, work, work_in_output: false, in_place_at: Some(own.start) };
    let mut schedule = Schedule::reducing(place, layout);
    let result = Buffer::Output.at(Span::first(own.len));
    if ranks == 1 {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(own), result)]);
    }
    let slots = move |_| Slots::new(ranks, 1, slot_len, result);
    circulant::push_reduce_scatter(&mut schedule, (count, 1, 1), slots, |_, block| block);
    schedule
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    let mut schedule = circulant::all_gather(place, count);
    circulant::push_all_gather(&mut schedule, count, 1);
    schedule
}
