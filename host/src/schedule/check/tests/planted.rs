//! The same three mistakes in each algorithm: a swapped partner, a wrong block and a missing piece.

use super::mutations::edited;
use super::*;

/// A message piece: its sender, the step there, and its index in the step.
type At = (usize, usize, usize);

/// Return the messages that a rank sends in a step.
fn sends_of(schedule: &Schedule, step: usize) -> Vec<Send> {
    schedule.step(step, &mut StepBuffer::default()).map_or_else(Vec::new, |step| step.sends.to_vec())
}

/// Swap the receiver of a piece with the next rank.
fn with_swapped_partner(schedules: &[Schedule], (rank, step, piece): At) -> Vec<Schedule> {
    let ranks = schedules.len() as u32;
    let mut broken = schedules.to_vec();
    broken[rank] = edited(&schedules[rank], |at, StepBuffer { sends, .. }| {
        if at == step {
            let next = |peer: Rank| Rank((peer.0 + 1) % ranks);
            let peer = next(sends[piece].peer);
            sends[piece].peer = if peer.0 as usize == rank { next(peer) } else { peer };
        }
    });
    broken
}

/// Send other elements of the same buffer, as many of them. `None` if there are none.
fn with_wrong_block(schedules: &[Schedule], (rank, step, piece): At) -> Option<Vec<Schedule>> {
    let from = sends_of(&schedules[rank], step)[piece].from;
    let room = schedules[rank].layout().len(from.buffer) - from.span.len;
    let start = if from.span.start == 0 { 1 } else { from.span.start - 1 };
    let mut broken = schedules.to_vec();
    broken[rank] = edited(&schedules[rank], |at, StepBuffer { sends, .. }| {
        if at == step {
            sends[piece].from.span.start = start;
        }
    });
    (start <= room && from.span.len > 0).then_some(broken)
}

/// Drop a piece at both ends.
fn with_missing_piece(schedules: &[Schedule], (rank, step, piece): At) -> Vec<Schedule> {
    let send = sends_of(&schedules[rank], step)[piece];
    // Which of the pieces to its receiver it is.
    let before = (0..step).flat_map(|step| sends_of(&schedules[rank], step));
    let before = before.chain(sends_of(&schedules[rank], step)[..piece].to_vec());
    let nth = before.filter(|other| other.peer == send.peer).count();
    let mut broken = schedules.to_vec();
    broken[rank] = edited(&schedules[rank], |at, StepBuffer { sends, .. }| {
        if at == step {
            sends.remove(piece);
        }
    });
    let (mut seen, receiver) = (0, send.peer.0 as usize);
    broken[receiver] = edited(&broken[receiver].clone(), |_, StepBuffer { recvs, .. }| {
        recvs.retain(|recv| {
            let is_of_pair = recv.peer.0 as usize == rank;
            seen += usize::from(is_of_pair);
            !(is_of_pair && seen == nth + 1)
        });
    });
    broken
}

/// Check that each mistake is found in the messages of some ranks.
pub(super) fn assert_mistakes_are_found(algorithm: &Algorithm, goal: Goal<'_>, good: &[Schedule]) {
    check(goal, good).expect("proved");
    let mut wrong_blocks = 0;
    for rank in [0, 1, good.len() - 1] {
        let pieces = (0..good[rank].len()).flat_map(|step| {
            let sends = sends_of(&good[rank], step).len();
            [0, sends.saturating_sub(1)].into_iter().take(sends.min(2)).map(move |piece| (rank, step, piece))
        });
        for at in pieces {
            let found = check(goal, &with_swapped_partner(good, at));
            assert!(found.is_err(), "{algorithm:?}: partner of {at:?}");
            // Ranks that have passed on blocks in the scatter get them again in the all-gather.
            let is_needed = algorithm.path() != Path::VanDeGeijn || at.1 == 0;
            let found = check(goal, &with_missing_piece(good, at));
            assert!(found.is_err() || !is_needed, "{algorithm:?}: piece {at:?}");
            if let Some(broken) = with_wrong_block(good, at) {
                assert!(check(goal, &broken).is_err(), "{algorithm:?}: block of {at:?}");
                wrong_blocks += 1;
            }
        }
    }
    let sends_whole_buffers = matches!(algorithm.pattern, Pattern::AllReduce | Pattern::Reduce | Pattern::Broadcast)
        || algorithm.pattern == Pattern::Gather;
    assert!(wrong_blocks > 0 || sends_whole_buffers, "{algorithm:?}");
}

#[test]
fn planted_mistakes_are_found_in_every_algorithm() {
    // Several segments of the double tree, and several of PAT's steps.
    let (ranks, count, root) = (6, 60_000, Rank(1));
    for algorithm in ALGORITHMS.iter().filter(|algorithm| algorithm.pattern != Pattern::Barrier) {
        let good = schedules(algorithm, ranks, count, root);
        assert_mistakes_are_found(algorithm, Goal::of(algorithm.pattern, root), &good);
    }
}
