//! Recursive halving and doubling: bandwidth-optimal and logarithmic for powers of two.
//!
//! p = 2^k: 2k steps, 2n(p-1)/p elements sent and n(p-1)/p reduced by every rank:
//! `2 log2(p) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma` (Thakur, Rabenseifner and Gropp, "Optimization of
//! collective communication operations in MPICH", IJHPCA 19(1), 2005).
//! Other p, with p' = 2^floor(log2 p): the p - p' extra ranks fold in before and are given the result after:
//! 2 log2(p') + 2 steps; the busiest rank sends 2n(p'-1)/p' + n elements, and the longest path carries
//! 2n(p'-1)/p' + 2n: `(2 log2(p') + 2) alpha + (2 (p'-1)/p' + 2) n beta + ((p'-1)/p' + 1) n gamma`.
//!
//! Distances run 1, 2, 4, ... with the lower block of ranks on the left, so the expression is that of an
//! aligned pairwise tree: ((0+1)+(2+3))+... An aggregation tree of aligned power-of-two blocks whose nodes
//! combine pairwise gives the same bits. For other p the pairs (0,1), (2,3), ... of the first 2(p-p') ranks fold
//! first; every operand stays a run of neighbouring ranks, the lower on the left.

use super::{Action, Place, Schedule, Side, Span, Transfer};
use sumac_hal::ids::Rank;

/// Schedule an all-reduce of `count` elements by recursive halving and doubling.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let mut schedule = Schedule::new(place, count);
    let fold = Fold::of(place.ranks());
    let whole = Span { start: 0, len: count };
    let rank = place.rank().0;
    let fold_in = Action::Reduce { received: Side::Right, completes: false };
    let fold_out = Action::Copy;

    if fold.is_extra(rank) {
        let survivor = Rank(rank - 1);
        schedule.push(&[Transfer { peer: survivor, span: whole, action: fold_in }], &[]);
        schedule.push(&[], &[Transfer { peer: survivor, span: whole, action: fold_out }]);
        return schedule;
    }
    let extra = fold.is_extra(rank + 1).then_some(Rank(rank + 1));
    if let Some(peer) = extra {
        schedule.push(&[], &[Transfer { peer, span: whole, action: fold_in }]);
    }
    exchange(&mut schedule, &fold, fold.position_of(rank));
    if let Some(peer) = extra {
        schedule.push(&[Transfer { peer, span: whole, action: fold_out }], &[]);
    }
    schedule
}

/// Append the halving and the doubling among the surviving ranks, as seen from `position`.
fn exchange(schedule: &mut Schedule, fold: &Fold, position: u32) {
    let count = schedule.count();
    let levels = fold.survivors.ilog2();
    let span = |(first, last): (u32, u32)| Span::of_blocks(count, fold.survivors, first, last);
    // After level i this rank is left with 1/2^(i+1) of the blocks.
    let mut own = (0, fold.survivors);
    for level in 0..levels {
        let (keep, give) = halves(own, position, level);
        let peer = fold.rank_at(position ^ (1 << level));
        let completes = level + 1 == levels;
        let received_by = |position: u32| if position >> level & 1 == 0 { Side::Right } else { Side::Left };
        let action = |receiver| Action::Reduce { received: received_by(receiver), completes };
        schedule.push(
            &[Transfer { peer, span: span(give), action: action(position ^ (1 << level)) }],
            &[Transfer { peer, span: span(keep), action: action(position) }],
        );
        own = keep;
    }
    for level in (0..levels).rev() {
        let whole = (0..level).fold((0, fold.survivors), |range, above| halves(range, position, above).0);
        let (own, other) = halves(whole, position, level);
        let peer = fold.rank_at(position ^ (1 << level));
        schedule.push(
            &[Transfer { peer, span: span(own), action: Action::Copy }],
            &[Transfer { peer, span: span(other), action: Action::Copy }],
        );
    }
}

/// Cut a range of blocks into the half that `position` keeps at `level` and the half that it gives away.
const fn halves((first, last): (u32, u32), position: u32, level: u32) -> ((u32, u32), (u32, u32)) {
    let middle = first + (last - first) / 2;
    let (lower, upper) = ((first, middle), (middle, last));
    if position >> level & 1 == 0 { (lower, upper) } else { (upper, lower) }
}

/// How the ranks above the largest power of two fold into their left neighbours.
struct Fold {
    /// The largest power of two that is no larger than the communicator.
    survivors: u32,
    /// The number of ranks beyond it: the odd ones of the first `2 * extras`.
    extras: u32,
}

impl Fold {
    const fn of(ranks: u32) -> Self {
        let survivors = 1 << ranks.ilog2();
        Self { survivors, extras: ranks - survivors }
    }

    const fn is_extra(&self, rank: u32) -> bool {
        rank % 2 == 1 && rank / 2 < self.extras
    }

    const fn position_of(&self, rank: u32) -> u32 {
        if rank / 2 < self.extras { rank / 2 } else { rank - self.extras }
    }

    const fn rank_at(&self, position: u32) -> Rank {
        if position < self.extras { Rank(2 * position) } else { Rank(position + self.extras) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_keeps_the_order_of_ranks() {
        for ranks in 1..200 {
            let fold = Fold::of(ranks);
            let survivors: Vec<_> = (0..ranks).filter(|&rank| !fold.is_extra(rank)).collect();
            assert_eq!(survivors.len(), fold.survivors as usize);
            for (position, &rank) in survivors.iter().enumerate() {
                assert_eq!(fold.position_of(rank) as usize, position);
                assert_eq!(fold.rank_at(position as u32), Rank(rank));
            }
        }
    }

    #[test]
    fn rank_2_of_4_by_hand() {
        let schedule = all_reduce(Place::new(Rank(2), 4).expect("inside"), 8);
        let steps: Vec<_> =
            schedule.steps().map(|step| (step.sends[0].peer.0, step.sends[0].span, step.recvs[0].span)).collect();
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
