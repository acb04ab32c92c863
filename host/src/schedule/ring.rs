//! The ring: bandwidth-optimal, latency linear in the number of ranks.
//!
//! All-reduce: steps 2(p-1); every rank sends 2n(p-1)/p elements and reduces n(p-1)/p:
//! `2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma` (Patarasuk and Yuan, "Bandwidth optimal all-reduce
//! algorithms for clusters of workstations", JPDC 69(2), 2009). Reduce-scatter and all-gather are its halves.
//!
//! The order of block b is `b, b+1, ..., b-1` from the left, round the ring: different for each block, so a ring cannot
//! follow a declared tree order (`Order::Tree`).

use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Side, Span, StepBuffer};
use sumac_hal::ids::Rank;

/// Schedule an all-reduce of `count` elements round the ring of all ranks.
///
/// In step s of the first half a rank passes on block `rank - s` and adds its own contribution to block
/// `rank - s - 1`, whose sum is complete after step p-2 at rank b-1. The second half passes finished blocks
/// once round.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let mut schedule = Schedule::reducing(place, Layout::all_reduce(count));
    let ranks = place.ranks();
    if ranks == 1 {
        let whole = Span::first(count);
        schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
    }
    schedule.compute(ranks as usize - 1, move |s, step| {
        let (s, block) = (s as u32, |rank: Rank| Span::of_block(count, ranks, rank.0));
        let from = if s == 0 { Buffer::Input } else { Buffer::Work };
        let to = if s == ranks - 2 { Buffer::Output } else { Buffer::Work };
        let (passed, taken) = (block(place.before(s)), block(place.before(s + 1)));
        let landing = Landing::combine(Buffer::Input.at(taken), Side::Left, to.at(taken));
        pass(step, place, from.at(passed), landing);
    });
    push_all_gather(&mut schedule, count, place.after(1));
    schedule
}

/// Schedule a reduce-scatter of `count` elements: rank r gets block r of p.
///
/// This is the first half of the all-reduce, shifted by one block, so that rank r's block arrives last. Partial blocks
/// alternate between two places in `Work`; `Input` is not modified.
pub fn reduce_scatter(place: Place, count: usize) -> Schedule {
    let ranks = place.ranks();
    let own = Span::of_block(count, ranks, place.rank().0);
    let slot_len = count.div_ceil(ranks as usize);
    let slots = ranks.saturating_sub(2).min(2) as usize;
    let layout = Layout {
        input: count,
        output: own.len,
        work: slots * slot_len,
        work_in_output: false,
        in_place_at: Some(own.start),
    };
    let mut schedule = Schedule::reducing(place, layout);
    let result = Buffer::Output.at(Span::first(own.len));
    if ranks == 1 {
        schedule.move_locally(&[Local::copy(Buffer::Input.at(own), result)]);
    }
    schedule.compute(ranks as usize - 1, move |s, step| {
        let (s, block) = (s as u32, |rank: Rank| Span::of_block(count, ranks, rank.0));
        let slot = |s: u32, len: usize| Buffer::Work.at(Span { start: (s % 2) as usize * slot_len, len });
        let (passed, taken) = (block(place.before(s + 1)), block(place.before(s + 2)));
        let from = if s == 0 { Buffer::Input.at(passed) } else { slot(s - 1, passed.len) };
        let to = if s == ranks - 2 { result } else { slot(s, taken.len) };
        pass(step, place, from, Landing::combine(Buffer::Input.at(taken), Side::Left, to));
    });
    schedule
}

/// Schedule an all-gather of `count` elements in all: rank r contributes block r of p.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(Buffer::Input.at(Span::first(own.len)), Buffer::Output.at(own))]);
    push_all_gather(&mut schedule, count, place.rank());
    schedule
}

/// Pass the blocks of `Output` once round, if this rank has block `own`.
fn push_all_gather(schedule: &mut Schedule, count: usize, own: Rank) {
    let place = schedule.place();
    let ranks = place.ranks();
    schedule.compute(ranks as usize - 1, move |s, step| {
        let block = |s: u32| {
            let index = (u64::from(own.0) + u64::from(ranks) - u64::from(s)) % u64::from(ranks);
            Buffer::Output.at(Span::of_block(count, ranks, index as u32))
        };
        pass(step, place, block(s as u32), Landing::copy(block(s as u32 + 1)));
    });
}

/// Send to the next rank and receive from the previous one, from the same buffer.
fn pass(step: &mut StepBuffer, place: Place, from: Region, landing: Landing) {
    let recv = Recv { peer: place.before(1), sent_from: from.buffer, landing };
    step.exchange(Send { peer: place.after(1), from }, recv);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_reduce_at_rank_0_of_3_matches_hand_computation() {
        let schedule = all_reduce(Place::new(Rank(0), 3).expect("inside"), 7);
        let starts =
            |step: super::super::Step<'_>| (step.sends[0].from.span.start, step.recvs[0].landing.to.span.start);
        let spans: Vec<_> = schedule.steps().map(starts).collect();
        // Blocks [0, 2), [2, 4), [4, 7).
        assert_eq!(spans, [(0, 4), (4, 2), (2, 0), (0, 4)]);
        assert!(
            schedule.steps().map(|step| (step.sends[0].peer, step.recvs[0].peer)).all(|of| of == (Rank(1), Rank(2)))
        );
    }
}
