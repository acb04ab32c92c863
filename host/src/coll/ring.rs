//! The ring: bandwidth-optimal, latency linear in the number of ranks.
//!
//! Steps 2(p-1); every rank sends 2n(p-1)/p elements and reduces n(p-1)/p, so an all-reduce costs
//! `2(p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma` (Patarasuk and Yuan, "Bandwidth optimal all-reduce
//! algorithms for clusters of workstations", JPDC 69(2), 2009).
//!
//! The order of block b is `b, b+1, ..., b-1` from the left, round the ring: another one for each block, so a
//! ring can't follow a declared tree order (`Order::Tree`).

use super::{Action, Place, Schedule, Side, Span, Transfer};

/// Schedule an all-reduce of `count` elements round the ring of all ranks.
///
/// In step s of the first half a rank passes on block `rank - s` and adds its own contribution to block
/// `rank - s - 1`, whose sum is complete after step p-2 at rank b-1. The second half passes finished blocks
/// once round.
pub fn all_reduce(place: Place, count: usize) -> Schedule {
    let mut schedule = Schedule::new(place, count);
    let ranks = place.ranks();
    let (next, previous) = (place.after(1), place.before(1));
    let block = |index: u32| Span::of_blocks(count, ranks, index, index + 1);
    for s in 0..ranks - 1 {
        let action = Action::Reduce { received: Side::Left, completes: s == ranks - 2 };
        schedule.push(
            &[Transfer { peer: next, span: block(place.before(s).0), action }],
            &[Transfer { peer: previous, span: block(place.before(s + 1).0), action }],
        );
    }
    for s in 0..ranks - 1 {
        let action = Action::Copy;
        schedule.push(
            &[Transfer { peer: next, span: block(place.before(s + ranks - 1).0), action }],
            &[Transfer { peer: previous, span: block(place.before(s).0), action }],
        );
    }
    schedule
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::ids::Rank;

    #[test]
    fn rank_0_of_3_by_hand() {
        let schedule = all_reduce(Place::new(Rank(0), 3).expect("inside"), 7);
        let spans: Vec<_> = schedule.steps().map(|step| (step.sends[0].span.start, step.recvs[0].span.start)).collect();
        // Blocks [0, 2), [2, 4), [4, 7).
        assert_eq!(spans, [(0, 4), (4, 2), (2, 0), (0, 4)]);
        assert!(schedule.steps().all(|step| step.sends[0].peer == Rank(1) && step.recvs[0].peer == Rank(2)));
    }
}
