//! Point-to-point messages: alone, beside schedules, and in every failure mode.

use super::message::{Direction, Message, POSTS_MAX, Ticket, Transfer, poll, take_complete, wait};
use super::tests::{LONG, all_reduce, both_ways, context, meshes, on_ranks};
use super::*;
use crate::schedule::pairwise;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};

both_ways! {
    message_ring_of_any_length_does_not_deadlock,
    nth_send_matches_nth_receive_beside_schedules,
    receive_from_any_rank_takes_each_message_once,
    receive_from_any_rank_leaves_other_tags_and_earlier_receives_their_messages,
    receive_from_any_rank_ends_when_all_others_are_gone,
    late_announcement_does_not_hide_the_end_of_its_rank,
    receive_from_any_rank_takes_what_a_rank_sent_before_its_end,
    deadline_of_a_receive_from_any_rank_names_one_that_may_send,
    receive_from_any_rank_ends_when_only_messages_with_other_tags_are_left,
    receive_before_a_schedule_gets_message_posted_before_it,
    tag_or_length_mismatch_is_the_same_error_on_every_rank,
    message_deadline_fails_on_every_rank,
    lost_peer_fails_sender_and_receiver,
    peer_lost_before_opening_its_channel_is_named,
    invalid_messages_are_refused_and_the_mesh_stays_usable,
    ended_mesh_gives_the_memory_of_its_messages_back,
    differing_all_to_all_counts_are_a_length_error,
}

/// Only a test that fails waits for it.
const SOON: Duration = Duration::from_secs(20);

fn payload(from: Rank, to: Rank, nth: usize, len_bytes: usize) -> Vec<u8> {
    let salt = from.0 as usize * 31 + to.0 as usize * 7 + nth * 3;
    (0..len_bytes).map(|at| (at * 13 + salt) as u8).collect()
}

fn post(mesh: &mut Mesh, peer: Rank, direction: Direction, tag: u32, bytes: Vec<u8>) -> Ticket {
    mesh.post(peer, direction, tag, Box::new(bytes)).expect("posted")
}

fn finish(mesh: &mut Mesh, ticket: Ticket) -> Vec<u8> {
    assert_eq!(wait(mesh, ticket, Instant::now() + LONG, &mut NoInterrupt), Ok(Status::Done));
    let (_, buffer) = take_complete(mesh, ticket).expect("through");
    *buffer.into_any().downcast().expect("a vector of bytes")
}

fn transfer(mesh: &mut Mesh, messages: &mut [Message<'_>], timeout: Duration) -> Result<(), ExecError> {
    let status = Transfer::new(mesh, messages, Instant::now() + timeout)?.drive(&mut NoInterrupt)?;
    assert_eq!(status, Status::Done, "nothing pauses it");
    Ok(())
}

fn group(mesh: &mut Mesh, messages: &mut [Message<'_>]) -> Result<(), ExecError> {
    transfer(mesh, messages, LONG)
}

fn ones(mesh: &mut Mesh, op_index: u64) -> Result<(), ExecError> {
    let mut buf = 1_i32.to_le_bytes().repeat(1000);
    all_reduce(mesh, op_index, Path::Ring, Dtype::I32, ReduceOp::Sum, &mut buf)?;
    assert_eq!(buf, mesh.place().ranks().to_le_bytes().repeat(1000));
    Ok(())
}

fn message_ring_of_any_length_does_not_deadlock() {
    for ranks in [2_u32, 3, 5] {
        on_ranks(&mut meshes(ranks), |mesh| {
            let (own, next, previous) = (mesh.place().rank(), mesh.place().after(1), mesh.place().before(1));
            for (nth, len_bytes) in [0, 1, 1000, 8 << 20, 3].into_iter().enumerate() {
                let sent = payload(own, next, nth, len_bytes);
                let mut received = vec![0xa5; len_bytes];
                let messages = &mut [
                    Message::Send { peer: next, tag: nth as u32, bytes: &sent },
                    Message::Receive { peer: previous, tag: nth as u32, bytes: &mut received },
                ];
                group(mesh, messages).expect("no error");
                assert!(received == payload(previous, own, nth, len_bytes), "{nth} at {own}");
            }
            assert_eq!(mesh.sent_bytes(), (8 << 20) + 1004);
        });
    }
}

fn nth_send_matches_nth_receive_beside_schedules() {
    let ranks = 4_u32;
    on_ranks(&mut meshes(ranks), |mesh| {
        let own = mesh.place().rank();
        let others: Vec<_> = (0..ranks).map(Rank).filter(|&peer| peer != own).collect();
        let mut tickets = Vec::new();
        for nth in 0..20 {
            for &peer in &others {
                let len_bytes = (nth * 37 + 1) * (own.0 + peer.0) as usize * 50;
                post(mesh, peer, Direction::Send, nth as u32, payload(own, peer, nth, len_bytes));
                let ticket = post(mesh, peer, Direction::Receive, nth as u32, vec![0; len_bytes]);
                tickets.push((ticket, payload(peer, own, nth, len_bytes)));
            }
            if nth % 5 == own.0 as usize {
                assert_eq!(poll(mesh, &mut NoInterrupt), Ok(Status::Done));
            }
            if nth % 7 == 0 {
                ones(mesh, nth as u64 / 7).expect("no error");
            }
        }
        // Wait for the last one first.
        for (ticket, right) in tickets.into_iter().rev() {
            assert!(finish(mesh, ticket) == right);
        }
        // A rank that left now might leave sends behind: a schedule at the end drives them too.
        ones(mesh, 3).expect("no error");
        while !mesh.messages.is_idle() {
            assert_eq!(poll(mesh, &mut NoInterrupt), Ok(Status::Done));
        }
        ones(mesh, 4).expect("no error");
    });
}

fn post_any(mesh: &mut Mesh, tag: u32, len_bytes: usize) -> Ticket {
    mesh.post_receive_any(tag, Box::new(vec![0_u8; len_bytes])).expect("posted")
}

/// As [`finish`], with the peer.
fn finish_any(mesh: &mut Mesh, ticket: Ticket) -> (Rank, Vec<u8>) {
    assert_eq!(wait(mesh, ticket, Instant::now() + LONG, &mut NoInterrupt), Ok(Status::Done));
    let (peer, buffer) = take_complete(mesh, ticket).expect("through");
    (peer, *buffer.into_any().downcast().expect("a vector of bytes"))
}

/// Rank 0 receives from whom it may be, before and after the others send, beside schedules.
fn receive_from_any_rank_takes_each_message_once() {
    let (ranks, rounds) = (4_u32, 10);
    on_ranks(&mut meshes(ranks), |mesh| {
        let own = mesh.place().rank();
        for (nth_len, len_bytes) in [0, 5, 100_000].into_iter().enumerate() {
            let count = rounds * (ranks as usize - 1);
            let mut tickets = Vec::new();
            for nth in 0..rounds {
                if own != Rank(0) {
                    tickets.push(post(mesh, Rank(0), Direction::Send, 3, payload(own, Rank(0), nth, len_bytes)));
                } else if nth < rounds / 2 {
                    (0..count / rounds).for_each(|_| tickets.push(post_any(mesh, 3, len_bytes)));
                }
            }
            ones(mesh, 2 * nth_len as u64).expect("no error");
            if own != Rank(0) {
                tickets.into_iter().for_each(|ticket| drop(finish(mesh, ticket)));
            } else {
                while tickets.len() < count {
                    tickets.push(post_any(mesh, 3, len_bytes));
                }
                let mut next = vec![0; ranks as usize];
                for ticket in tickets {
                    let (peer, bytes) = finish_any(mesh, ticket);
                    let nth = &mut next[peer.0 as usize];
                    assert!(bytes == payload(peer, own, *nth, len_bytes), "{nth} from {peer}");
                    *nth += 1;
                }
                assert_eq!(next, [0, rounds, rounds, rounds]);
            }
            ones(mesh, 2 * nth_len as u64 + 1).expect("no error");
        }
    });
}

fn receive_from_any_rank_leaves_other_tags_and_earlier_receives_their_messages() {
    on_ranks(&mut meshes(3), |mesh| {
        let own = mesh.place().rank();
        if own != Rank(0) {
            // Rank 2 sends what only a receive from it takes first; rank 1 the other way round.
            let tags = if own == Rank(1) { [1, 2, 1] } else { [2, 1, 1] };
            for (nth, tag) in tags.into_iter().enumerate() {
                group(mesh, &mut [Message::Send { peer: Rank(0), tag, bytes: &[own.0 as u8, nth as u8] }]).expect("ok");
            }
            return ones(mesh, 0).expect("no error");
        }
        // Earlier than the one from any rank, although that has its tag.
        let first = post(mesh, Rank(1), Direction::Receive, 1, vec![0; 2]);
        let any: Vec<_> = (0..3).map(|_| post_any(mesh, 1, 2)).collect();
        assert_eq!(finish(mesh, first), [1, 0]);
        let named = [1, 2].map(|peer| post(mesh, Rank(peer), Direction::Receive, 2, vec![0; 2]));
        assert_eq!(named.map(|ticket| finish(mesh, ticket)), [vec![1, 1], vec![2, 0]]);
        let mut taken: Vec<_> = any.into_iter().map(|ticket| finish_any(mesh, ticket)).collect();
        taken.sort();
        assert_eq!(taken, [(Rank(1), vec![1, 2]), (Rank(2), vec![2, 1]), (Rank(2), vec![2, 2])]);
        ones(mesh, 0).expect("no error");
    });
}

fn receive_from_any_rank_ends_when_all_others_are_gone() {
    let mut meshes = meshes(3);
    on_ranks(&mut meshes, |mesh| ones(mesh, 0).expect("no error"));
    let mut alive = meshes.remove(0);
    let ticket = post_any(&mut alive, 0, 4);
    drop(meshes.remove(0));
    assert_eq!(poll(&mut alive, &mut NoInterrupt), Ok(Status::Done), "rank 2 may still send");
    drop(meshes);
    let lost = wait(&mut alive, ticket, Instant::now() + LONG, &mut NoInterrupt);
    assert!(matches!(lost, Err(ExecError::RankLost { .. })), "{lost:?}");
    assert_eq!(alive.take_back(ticket).expect("it has ended").bytes().len(), 4);
}

/// A rank that has waited long announces its operation, which may arrive when the operation is over.
fn late_announcement_does_not_hide_the_end_of_its_rank() {
    let mut meshes = meshes(2);
    on_ranks(&mut meshes, |mesh| ones(mesh, 0).expect("no error"));
    let mut other = meshes.pop().expect("two");
    let over = Call::new(Rank(1), 0, 1, &OpDesc::barrier(), Path::Ring);
    other.links[0].tx.announced = false;
    assert!(matches!(other.links[0].write_announce(&over), super::link::IoOutcome::Bytes(_)));
    let mut alive = meshes.pop().expect("two");
    let ticket = post_any(&mut alive, 0, 4);
    assert_eq!(poll(&mut alive, &mut NoInterrupt), Ok(Status::Done), "rank 1 may still send");
    drop(other);
    let lost = wait(&mut alive, ticket, Instant::now() + SOON, &mut NoInterrupt);
    assert!(matches!(lost, Err(ExecError::RankLost { .. })), "{lost:?}");
}

/// Return rank 0's mesh, which knows that rank 1 has ended, after that has sent a message, and another with tag 2.
fn after_the_end_of_rank_1() -> Mesh {
    let mut meshes = meshes(2);
    let mut gone = meshes.pop().expect("rank 1");
    let mut alive = meshes.pop().expect("rank 0");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            group(&mut gone, &mut [Message::Send { peer: Rank(0), tag: 1, bytes: &[1] }]).expect("no error");
            group(&mut gone, &mut [Message::Send { peer: Rank(0), tag: 2, bytes: &[2] }]).expect("no error");
        });
        group(&mut alive, &mut [Message::Receive { peer: Rank(1), tag: 1, bytes: &mut [0] }]).expect("no error");
    });
    // As if a schedule had met the end of the connection.
    alive.links[1].state = super::link::State::Ended;
    alive
}

fn receive_from_any_rank_takes_what_a_rank_sent_before_its_end() {
    let mut mesh = after_the_end_of_rank_1();
    let ticket = post_any(&mut mesh, 2, 1);
    assert_eq!(finish_any(&mut mesh, ticket), (Rank(1), vec![2]));
}

fn deadline_of_a_receive_from_any_rank_names_one_that_may_send() {
    let mut meshes = meshes(2);
    let ticket = post_any(&mut meshes[0], 3, 1);
    let late = wait(&mut meshes[0], ticket, Instant::now() + Duration::from_millis(50), &mut NoInterrupt);
    assert_eq!(late, Err(ExecError::MessageDeadline { rank: Rank(0), peer: Rank(1) }));
}

fn receive_from_any_rank_ends_when_only_messages_with_other_tags_are_left() {
    let mut mesh = after_the_end_of_rank_1();
    let ticket = post_any(&mut mesh, 3, 1);
    let lost = wait(&mut mesh, ticket, Instant::now() + LONG, &mut NoInterrupt);
    assert_eq!(lost, Err(ExecError::RankLost { rank: Rank(1) }));
}

fn receive_before_a_schedule_gets_message_posted_before_it() {
    // On a single stream the message would wait behind frames that rank 1 cannot accept yet.
    let len_bytes = 8 << 20;
    on_ranks(&mut meshes(2), |mesh| {
        if mesh.place().rank() == Rank(0) {
            let ticket = post(mesh, Rank(1), Direction::Send, 0, payload(Rank(0), Rank(1), 0, len_bytes));
            ones(mesh, 0).expect("no error");
            ones(mesh, 1).expect("no error");
            finish(mesh, ticket);
        } else {
            ones(mesh, 0).expect("no error");
            let mut received = vec![0; len_bytes];
            group(mesh, &mut [Message::Receive { peer: Rank(0), tag: 0, bytes: &mut received }]).expect("no error");
            assert!(received == payload(Rank(0), Rank(1), 0, len_bytes));
            ones(mesh, 1).expect("no error");
        }
    });
}

fn tag_or_length_mismatch_is_the_same_error_on_every_rank() {
    for (tag, len_bytes) in [(8, 100), (7, 101), (7, 0)] {
        let mut meshes = meshes(3);
        let results = on_ranks(&mut meshes, |mesh| match mesh.place().rank() {
            Rank(0) => group(mesh, &mut [Message::Send { peer: Rank(1), tag: 7, bytes: &[0; 100] }])
                .and_then(|()| ones(mesh, 0)),
            Rank(1) => {
                let bytes = &mut vec![0; len_bytes];
                group(mesh, &mut [Message::Receive { peer: Rank(0), tag, bytes }]).and_then(|()| ones(mesh, 0))
            }
            _ => ones(mesh, 0),
        });
        let (from, to) = (Rank(0), Rank(1));
        let expected = (tag, len_bytes as u64);
        let error = Err(ExecError::Message { from, to, number: 0, sent: (7, 100), expected });
        assert_eq!(results, [error.clone(), error.clone(), error.clone()]);
        assert_eq!(group(&mut meshes[0], &mut [Message::Send { peer: to, tag: 7, bytes: &[] }]), error);
    }
}

fn message_deadline_fails_on_every_rank() {
    let mut meshes = meshes(3);
    let results = on_ranks(&mut meshes[..2], |mesh| {
        let peer = Rank(1 - mesh.place().rank().0);
        let timeout = if peer == Rank(0) { Duration::from_millis(50) } else { LONG };
        let bytes = &mut [0; 4];
        transfer(mesh, &mut [Message::Receive { peer, tag: 0, bytes }], timeout)
    });
    let error = Err(ExecError::MessageDeadline { rank: Rank(1), peer: Rank(0) });
    assert_eq!(results, [error.clone(), error.clone()]);
    assert_eq!(ones(&mut meshes[2], 0), error);
}

fn lost_peer_fails_sender_and_receiver() {
    for direction in [Direction::Send, Direction::Receive] {
        let mut meshes = meshes(2);
        let dead = meshes.pop().expect("rank 1");
        let mut alive = meshes.pop().expect("rank 0");
        let result = std::thread::scope(|scope| {
            let rank_1 = scope.spawn(move || {
                let mut dead = dead;
                ones(&mut dead, 0).expect("no error");
                // The first message succeeds; then the mesh is dropped with the second in flight.
                let mut byte = [0];
                group(&mut dead, &mut [Message::Receive { peer: Rank(0), tag: 0, bytes: &mut byte }])
                    .expect("no error");
                group(&mut dead, &mut [Message::Send { peer: Rank(0), tag: 0, bytes: &byte }]).expect("no error");
            });
            ones(&mut alive, 0).expect("no error");
            let mut byte = [0];
            let mut first = [
                Message::Send { peer: Rank(1), tag: 0, bytes: &[1] },
                Message::Receive { peer: Rank(1), tag: 0, bytes: &mut byte },
            ];
            group(&mut alive, &mut first).expect("no error");
            rank_1.join().expect("no panic");
            let mut large = vec![0; 64 << 20];
            let mut second = match direction {
                Direction::Send => [Message::Send { peer: Rank(1), tag: 0, bytes: &large }],
                Direction::Receive => [Message::Receive { peer: Rank(1), tag: 0, bytes: &mut large }],
            };
            group(&mut alive, &mut second)
        });
        assert_eq!(result, Err(ExecError::RankLost { rank: Rank(1) }));
    }
}

fn peer_lost_before_opening_its_channel_is_named() {
    let results = on_ranks(&mut meshes(2), |mesh| {
        ones(mesh, 0)?;
        if mesh.place().rank() == Rank(0) {
            return group(mesh, &mut [Message::Receive { peer: Rank(1), tag: 0, bytes: &mut [0; 4] }]);
        }
        // It disappears without notice, like a killed rank.
        mesh.links.iter_mut().for_each(|link| link.state = super::link::State::Ended);
        Ok(())
    });
    assert_eq!(results, [Err(ExecError::RankLost { rank: Rank(1) }), Ok(())]);
}

fn invalid_messages_are_refused_and_the_mesh_stays_usable() {
    let results = on_ranks(&mut meshes(2), |mesh| {
        let own = mesh.place().rank();
        for peer in [own, Rank(2)] {
            let refused = group(mesh, &mut [Message::Send { peer, tag: 0, bytes: &[] }]);
            assert!(matches!(refused, Err(ExecError::Invalid { .. })), "{refused:?}");
            let refused = mesh.post(peer, Direction::Send, 0, Box::new(vec![7])).expect_err("no such peer");
            assert!(matches!(refused.error, ExecError::Invalid { .. }) && refused.buffer.bytes() == [7], "{refused:?}");
        }
        let peer = Rank(1 - own.0);
        let sent = post(mesh, peer, Direction::Send, 0, vec![1, 2, 3]);
        let received = post(mesh, peer, Direction::Receive, 0, vec![0; 3]);
        assert!(mesh.take(received).is_none());
        assert_eq!((finish(mesh, received), finish(mesh, sent)), (vec![1, 2, 3], vec![1, 2, 3]));
        let again = take_complete(mesh, received);
        assert!(matches!(again.err(), Some(ExecError::Invalid { .. })));
        group(mesh, &mut []).expect("nothing to do");
        ones(mesh, 0)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
    let mut alone = meshes(2);
    for _ in 0..POSTS_MAX {
        post(&mut alone[0], Rank(1), Direction::Receive, 0, Vec::new());
    }
    let refused = alone[0].post(Rank(1), Direction::Receive, 0, Box::new(Vec::new()));
    assert!(matches!(refused.map_err(|refused| refused.error), Err(ExecError::Invalid { .. })));
}

fn ended_mesh_gives_the_memory_of_its_messages_back() {
    let mut alone = meshes(2);
    let mesh = &mut alone[0];
    let sent = post(mesh, Rank(1), Direction::Send, 0, vec![1, 2, 3]);
    let received = post(mesh, Rank(1), Direction::Receive, 0, vec![0; 2]);
    assert!(mesh.take_back(sent).is_none(), "the mesh may still send from it");
    super::message::cancel(mesh, ExecError::RankLost { rank: Rank(1) });
    assert_eq!(mesh.owned_by_messages(), (2, 5));
    assert_eq!(mesh.take_back(sent).expect("it has ended").bytes(), [1, 2, 3]);
    assert_eq!(mesh.take_back(received).expect("it has ended").bytes().len(), 2);
    assert!(mesh.take_back(sent).is_none() && mesh.owned_by_messages() == (0, 0));
}

fn differing_all_to_all_counts_are_a_length_error() {
    for expected in [0_usize, 3, 5, 500_000] {
        let results = on_ranks(&mut meshes(3), |mesh| {
            let rank = mesh.place().rank().0 as usize;
            let (sends, mut recvs) = ([4; 3], [4; 3]);
            if rank == 2 {
                recvs[0] = expected;
            }
            let schedule = pairwise::all_to_all_v(mesh.place(), &sends, &recvs).expect("consistent");
            let ctx = context(7, OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 1), Path::Ring);
            let mut output = vec![0; schedule.layout().output * 4];
            let buffers = Buffers::Separate { input: &[0; 48], output: &mut output };
            execute(mesh, &schedule, None, buffers, &ctx, &mut NoInterrupt)
        });
        let (from, to, expected_bytes) = (Rank(0), Rank(2), expected as u64 * 4);
        let error = ExecError::Length { from, to, op_index: 7, sent_bytes: 16, expected_bytes };
        assert_eq!(results[2], Err(error.clone()));
        assert!(results.iter().all(|result| *result == Ok(()) || *result == Err(error.clone())), "{results:?}");
    }
}
