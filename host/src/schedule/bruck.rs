//! Bruck's all-gather: logarithmic and bandwidth-optimal for every number of ranks.
//!
//! Steps ceil(log2 p), n(p-1)/p elements: `ceil(log2 p) alpha + (p-1)/p n beta` (Bruck, Ho, Kipnis, Upfal and
//! Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS
//! 8(11), 1997). The original collects blocks `rank, rank + 1, ...` at the start of a buffer and rotates it at the end.
//! Here they go to their places at once, and a run that wraps around block p-1 is two messages of one step.

use super::{Buffer, Landing, Layout, Local, Place, Recv, Schedule, Send, Span};

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(Buffer::Input.at(Span::first(own.len)), Buffer::Output.at(own))]);
    push_all_gather(&mut schedule, count);
    schedule
}

/// Append the exchange of `Output`'s blocks, of which this rank has its own.
pub(super) fn push_all_gather(schedule: &mut Schedule, count: usize) {
    let place = schedule.place();
    let ranks = place.ranks();
    let mut have = 1;
    while have < ranks {
        let blocks = have.min(ranks - have);
        let (to, from) = (place.before(have), place.after(have));
        let (given, taken) = (run(count, ranks, place.rank().0, blocks), run(count, ranks, from.0, blocks));
        let sends = given.map(|span| Send { peer: to, from: Buffer::Output.at(span) });
        let recvs = taken.map(|span| Recv {
            peer: from,
            sent_from: Buffer::Output,
            landing: Landing::copy(Buffer::Output.at(span)),
        });
        let parts = |first: u32| if first > ranks - blocks { 2 } else { 1 };
        schedule.exchange(&sends[..parts(place.rank().0)], &recvs[..parts(from.0)]);
        have = have.saturating_mul(2);
    }
}

/// Return `blocks` blocks from block `first` on, wrapping around; the second part is empty if they do not wrap.
fn run(count: usize, ranks: u32, first: u32, blocks: u32) -> [Span; 2] {
    let end = u64::from(first) + u64::from(blocks);
    let (last, rest) = (end.min(u64::from(ranks)) as u32, end.saturating_sub(u64::from(ranks)) as u32);
    [Span::of_blocks(count, ranks, first, last), Span::of_blocks(count, ranks, 0, rest)]
}
