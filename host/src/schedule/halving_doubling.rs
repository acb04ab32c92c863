//! Recursive halving and doubling: bandwidth-optimal and logarithmic for powers of two.
//!
//! All-reduce, p = 2^k: 2k steps, 2n(p-1)/p elements sent and n(p-1)/p reduced by every rank:
//! `2 log2(p) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma` (Thakur, Rabenseifner and Gropp, "Optimization of
//! collective communication operations in MPICH", IJHPCA 19(1), 2005).
//! Other p, with p' = 2^floor(log2 p): the p - p' extra ranks fold in before and are given the result after:
//! 2 log2(p') + 2 steps; the busiest rank sends 2n(p'-1)/p' + n elements, and the longest path carries
//! 2n(p'-1)/p' + 2n: `(2 log2(p') + 2) alpha + (2 (p'-1)/p' + 2) n beta + ((p'-1)/p' + 1) n gamma`.
//! Reduce-scatter and all-gather are halves of it; they cut the elements into p blocks, so that a survivor with an
//! extra owns two.
//!
//! The all-reduce's distances run 1, 2, 4, ... with the lower block of ranks on the left, so its expression is that of
//! an aligned pairwise tree: ((0+1)+(2+3))+... An aggregation tree of aligned power-of-two blocks whose nodes combine
//! pairwise gives the same bits. For other p the pairs (0,1), (2,3), ... of the first 2(p-p') ranks fold first; every
//! operand remains a run of neighbouring ranks, the lower on the left. That equals pairing all ranks, as in one node,
//! also where the folded pairs are whole halves: p = 3, 6, 7, 12, 14, 15, ...
//!
//! The reduce-scatter's distances run p'/2, ..., 2, 1, because rank r must end with block r and keep a run of blocks
//! until then. Its expression, ((0+4)+(2+6))+((1+5)+(3+7)), is the same for all blocks, but not that of a tree over
//! neighbours: where an order is declared, [`super::pairwise::reduce_scatter`] is used instead.

use super::fold::{Fold, Role};
use super::{Buffer, Landing, Layout, Local, Place, Recv, Region, Schedule, Send, Side, Span, Step};
use sumac_hal::ids::Rank;

/// Schedule an all-reduce of `count` elements by recursive halving and doubling.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let mut schedule = Schedule::reducing(place, Layout::all_reduce(count));
    let fold = Fold::of(place.ranks());
    let whole = Span::first(count);
    match fold.role(place) {
        Role::Extra { survivor } => {
            schedule.exchange(&[Send { peer: survivor, from: Buffer::Input.at(whole) }], &[]);
            schedule.exchange(&[], &[finished(survivor, whole)]);
        }
        Role::Survivor { extra, .. } if fold.levels() == 0 => {
            debug_assert_eq!(extra, None, "a rank alone has no extra");
            schedule.move_locally(&[Local::copy(Buffer::Input.at(whole), Buffer::Output.at(whole))]);
        }
        Role::Survivor { position, extra } => {
            if let Some(peer) = extra {
                schedule.exchange(&[], &[fold_in(peer, whole)]);
            }
            let ranges = Ranges { fold, near_first: true };
            let span = |(first, last)| Span::of_blocks(count, fold.survivors, first, last);
            push_halving(&mut schedule, &ranges, position, &span, |keep| Buffer::Output.at(keep));
            push_doubling(&mut schedule, &ranges, position, &span);
            if let Some(peer) = extra {
                schedule.exchange(&[Send { peer, from: Buffer::Output.at(whole) }], &[]);
            }
        }
    }
    schedule
}

/// Schedule a reduce-scatter of `count` elements by recursive halving: rank r gets block r of p.
///
/// Steps log2 p, n(p-1)/p elements sent and reduced by every rank, for p = 2^k. Other p: log2(p') + 2 steps, n more
/// elements on the way in and n/p on the way out, and up to two blocks where there was one.
pub fn reduce_scatter(place: Place, count: usize) -> Schedule {
    let fold = Fold::of(place.ranks());
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let role = fold.role(place);
    let work = if place.ranks() > 2 && matches!(role, Role::Survivor { .. }) { count } else { 0 };
    let layout = Layout { input: count, output: own.len, work, work_in_output: false, in_place_at: Some(own.start) };
    let mut schedule = Schedule::reducing(place, layout);
    let result = Buffer::Output.at(Span::first(own.len));
    let whole = Span::first(count);
    match role {
        Role::Extra { survivor } => {
            schedule.exchange(&[Send { peer: survivor, from: Buffer::Input.at(whole) }], &[]);
            let landing = Landing::copy(result);
            schedule.exchange(&[], &[Recv { peer: survivor, sent_from: Buffer::Work, landing }]);
        }
        Role::Survivor { .. } if fold.levels() == 0 => {
            schedule.move_locally(&[Local::copy(Buffer::Input.at(own), result)]);
        }
        Role::Survivor { position, extra } => {
            if let Some(peer) = extra {
                schedule.exchange(&[], &[fold_in(peer, whole)]);
            }
            let ranges = Ranges { fold, near_first: false };
            // If an extra's block lies beside it, the own block is rounded separately.
            let last = |keep: Span| if extra.is_some() { Buffer::Work.at(keep) } else { result };
            push_halving(&mut schedule, &ranges, position, &|range| fold.blocks_of(count, range), last);
            if let Some(peer) = extra {
                let block = Span::of_block(count, place.ranks(), peer.0);
                let locals = [Local::copy(Buffer::Work.at(own), result)];
                let sends = [Send { peer, from: Buffer::Work.at(block) }];
                schedule.push(Step { locals: &locals, sends: &sends, recvs: &[] });
            }
        }
    }
    schedule
}

/// Schedule an all-gather of `count` elements in all by recursive doubling: rank r contributes block r of p.
///
/// Steps log2 p, n(p-1)/p elements, for p = 2^k. Other p: log2(p') + 2 steps, and n/p more elements on the way in
/// and n on the way out, which [`super::bruck::all_gather`] does not need.
pub fn all_gather(place: Place, count: usize) -> Schedule {
    let fold = Fold::of(place.ranks());
    let own = Span::of_block(count, place.ranks(), place.rank().0);
    let mut schedule = Schedule::moving(place, Layout::moves(own.len, count, Some(own.start)));
    schedule.move_locally(&[Local::copy(Buffer::Input.at(Span::first(own.len)), Buffer::Output.at(own))]);
    let whole = Span::first(count);
    match fold.role(place) {
        Role::Extra { survivor } => {
            schedule.exchange(&[Send { peer: survivor, from: Buffer::Output.at(own) }], &[]);
            schedule.exchange(&[], &[finished(survivor, whole)]);
        }
        Role::Survivor { position, extra } => {
            if let Some(peer) = extra {
                schedule.exchange(&[], &[finished(peer, Span::of_block(count, place.ranks(), peer.0))]);
            }
            let ranges = Ranges { fold, near_first: false };
            push_doubling(&mut schedule, &ranges, position, &|range| fold.blocks_of(count, range));
            if let Some(peer) = extra {
                schedule.exchange(&[Send { peer, from: Buffer::Output.at(whole) }], &[]);
            }
        }
    }
    schedule
}

/// Receive an extra's contribution.
fn fold_in(peer: Rank, whole: Span) -> Recv {
    let landing = Landing::combine(Buffer::Input.at(whole), Side::Right, Buffer::Work.at(whole));
    Recv { peer, sent_from: Buffer::Input, landing }
}

/// Receive finished elements.
fn finished(peer: Rank, span: Span) -> Recv {
    Recv { peer, sent_from: Buffer::Output, landing: Landing::copy(Buffer::Output.at(span)) }
}

/// Append the halving among the survivors, as seen from `position`; the range kept at the end goes to `last`.
fn push_halving(
    schedule: &mut Schedule,
    ranges: &Ranges,
    position: u32,
    span: &dyn Fn((u32, u32)) -> Span,
    last: impl Fn(Span) -> Region,
) {
    let levels = ranges.fold.levels();
    for done in 0..levels {
        let peer = ranges.peer(position, done);
        // A position's first operand is its input, unless an extra has been added to it.
        let operand =
            |position| if done == 0 && !ranges.fold.has_extra(position) { Buffer::Input } else { Buffer::Work };
        let give = span(ranges.kept(peer, done + 1));
        let keep = span(ranges.kept(position, done + 1));
        let received = if position < peer { Side::Right } else { Side::Left };
        let to = if done + 1 == levels { last(keep) } else { Buffer::Work.at(keep) };
        let landing = Landing::combine(operand(position).at(keep), received, to);
        let rank = ranges.fold.rank_at(peer);
        schedule.exchange(
            &[Send { peer: rank, from: operand(position).at(give) }],
            &[Recv { peer: rank, sent_from: operand(peer), landing }],
        );
    }
}

/// Append the doubling among the survivors, as seen from `position`.
fn push_doubling(schedule: &mut Schedule, ranges: &Ranges, position: u32, span: &dyn Fn((u32, u32)) -> Span) {
    for done in (0..ranges.fold.levels()).rev() {
        let peer = ranges.peer(position, done);
        let (own, other) = (span(ranges.kept(position, done + 1)), span(ranges.kept(peer, done + 1)));
        let rank = ranges.fold.rank_at(peer);
        schedule.exchange(&[Send { peer: rank, from: Buffer::Output.at(own) }], &[finished(rank, other)]);
    }
}

/// The range of the p' blocks that a position keeps after some halvings.
struct Ranges {
    fold: Fold,
    /// Distances run 1, 2, 4, ...; otherwise p'/2, ..., 2, 1, which leaves position i with block i.
    near_first: bool,
}

impl Ranges {
    const fn bit(&self, done: u32) -> u32 {
        if self.near_first { done } else { self.fold.levels() - 1 - done }
    }

    const fn peer(&self, position: u32, done: u32) -> u32 {
        position ^ (1 << self.bit(done))
    }

    fn kept(&self, position: u32, done: u32) -> (u32, u32) {
        (0..done).fold((0, self.fold.survivors), |(first, last), done| {
            let middle = first + (last - first) / 2;
            if position >> self.bit(done) & 1 == 0 { (first, middle) } else { (middle, last) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_reduce_at_rank_2_of_4_matches_hand_computation() {
        let schedule = all_reduce(Place::new(Rank(2), 4).expect("inside"), 8);
        let parts = |step: Step<'_>| (step.sends[0].peer.0, step.sends[0].from.span, step.recvs[0].landing.to.span);
        let steps: Vec<_> = schedule.steps().map(parts).collect();
        let span = |start, len| Span { start, len };
        assert_eq!(
            steps,
            [
                (3, span(4, 4), span(0, 4)),
                (0, span(0, 2), span(2, 2)),
                (0, span(2, 2), span(0, 2)),
                (3, span(0, 4), span(4, 4))
            ]
        );
    }
}
