//! The same three mistakes in each algorithm: a swapped partner, a wrong block and a missing piece.

use super::*;

/// A message piece: its sender, the step there, and its index in the step.
type At = (usize, usize, usize);

/// Rebuild a schedule with changed messages.
fn changed(schedule: &Schedule, mut edit: impl FnMut(usize, &mut Vec<Send>, &mut Vec<Recv>)) -> Schedule {
    let new = if schedule.reduces() { Schedule::reducing } else { Schedule::moving };
    let mut result = new(schedule.place(), *schedule.layout());
    for (index, step) in schedule.steps().enumerate() {
        let (mut sends, mut recvs) = (step.sends.to_vec(), step.recvs.to_vec());
        edit(index, &mut sends, &mut recvs);
        result.push(Step { locals: step.locals, sends: &sends, recvs: &recvs });
    }
    result
}

/// Swap the receiver of a piece with the next rank.
fn with_swapped_partner(schedules: &[Schedule], (rank, step, piece): At) -> Vec<Schedule> {
    let ranks = schedules.len() as u32;
    let mut broken = schedules.to_vec();
    broken[rank] = changed(&schedules[rank], |at, sends, _| {
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
    let from = schedules[rank].step(step)?.sends[piece].from;
    let room = schedules[rank].layout().len(from.buffer) - from.span.len;
    let start = if from.span.start == 0 { 1 } else { from.span.start - 1 };
    let mut broken = schedules.to_vec();
    broken[rank] = changed(&schedules[rank], |at, sends, _| {
        if at == step {
            sends[piece].from.span.start = start;
        }
    });
    (start <= room && from.span.len > 0).then_some(broken)
}

/// Drop a piece at both ends.
fn with_missing_piece(schedules: &[Schedule], (rank, step, piece): At) -> Vec<Schedule> {
    let send = schedules[rank].step(step).expect("a step").sends[piece];
    let to_peer = |schedule: &Schedule| {
        let sends = schedule.steps().enumerate().flat_map(|(at, step)| step.sends.iter().map(move |send| (at, *send)));
        sends.filter(|(_, other)| other.peer == send.peer).map(|(at, _)| at).collect::<Vec<_>>()
    };
    let within = schedules[rank].step(step).expect("a step").sends[..piece].iter();
    let nth = to_peer(&schedules[rank]).iter().filter(|&&at| at < step).count()
        + within.filter(|other| other.peer == send.peer).count();
    let mut broken = schedules.to_vec();
    broken[rank] = changed(&schedules[rank], |at, sends, _| {
        if at == step {
            sends.remove(piece);
        }
    });
    let (mut seen, receiver) = (0, send.peer.0 as usize);
    broken[receiver] = changed(&broken[receiver].clone(), |_, _, recvs| {
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
        let pieces = good[rank].steps().enumerate().flat_map(|(step, parts)| {
            let last = parts.sends.len().saturating_sub(1);
            [0, last].into_iter().take(parts.sends.len().min(2)).map(move |piece| (rank, step, piece))
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
