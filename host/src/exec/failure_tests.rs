//! Every failure mode: the error is named, all ranks return it, and none hangs.

use super::auth::{Answer, HELLO_BYTES, PROOF_BYTES, verdict};
use super::frame::{AbortFrame, FrameKind, HEADER_BYTES, Header};
use super::link::Link;
use super::tests::{
    BOTH, LONG, all_reduce, both_ways, connected_meshes, context, meshes, meshes_with, on_ranks, secret,
};
use super::*;
use crate::schedule::{Place, Schedule, dissemination, ring};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

both_ways! {
    different_calls_are_a_mismatch_on_every_rank,
    skipped_operation_is_a_mismatch,
    rank_lost_in_any_step_is_named_and_no_result_is_wrong,
    rank_lost_before_connecting_is_named,
    late_rank_gets_the_error_that_ended_the_others,
    connection_flood_makes_no_rank_appear_lost,
    peer_closing_before_the_handshake_is_redialled,
    rank_of_another_job_is_named,
    deadline_fails_on_every_rank,
    interrupt_ends_the_operation_on_every_rank,
    paused_operation_continues_where_it_was_or_ends_with_the_given_error,
    partial_frame_is_completed_before_the_abort,
    invalid_arguments_are_refused_and_the_mesh_stays_usable,
}

fn barrier(mesh: &mut Mesh, op_index: u64, interrupt: &mut dyn Interrupt) -> Result<(), ExecError> {
    let ctx = context(op_index, OpDesc::barrier(), Path::Ring);
    execute(mesh, &dissemination::barrier(mesh.place()), None, &mut [][..], &ctx, interrupt)
}

/// Check that all ranks got the mismatch of `odd`, and that their meshes have ended.
fn assert_mismatch(meshes: &mut [Mesh], odd: Rank, results: &[Result<(), ExecError>]) {
    for (mesh, result) in meshes.iter_mut().zip(results) {
        let Err(ExecError::Mismatch { calls }) = result else { panic!("{:?}: {result:?}", mesh.place()) };
        assert!(calls[0].rank < calls[1].rank);
        assert!(calls.iter().any(|call| call.rank == odd), "{}", result.as_ref().expect_err("seen above"));
        assert_ne!((calls[0].op_index, calls[0].signature), (calls[1].op_index, calls[1].signature));
        assert_eq!(barrier(mesh, 9, &mut NoInterrupt), *result, "a poisoned mesh repeats its error");
    }
}

fn different_calls_are_a_mismatch_on_every_rank() {
    type Odd = fn(&mut Mesh) -> Result<(), ExecError>;
    let odd_calls: [(&str, Odd); 6] = [
        ("count", |mesh| all_reduce(mesh, 0, Path::Ring, Dtype::F32, ReduceOp::Sum, &mut [0; 404])),
        ("no elements", |mesh| all_reduce(mesh, 0, Path::Ring, Dtype::F32, ReduceOp::Sum, &mut [])),
        ("dtype", |mesh| all_reduce(mesh, 0, Path::Ring, Dtype::I32, ReduceOp::Sum, &mut [0; 400])),
        ("operator", |mesh| all_reduce(mesh, 0, Path::Ring, Dtype::F32, ReduceOp::Max, &mut [0; 400])),
        ("algorithm", |mesh| all_reduce(mesh, 0, Path::HalvingDoubling, Dtype::F32, ReduceOp::Sum, &mut [0; 400])),
        ("collective", |mesh| barrier(mesh, 0, &mut NoInterrupt)),
    ];
    for ranks in [2, 4, 5] {
        for odd in (0..ranks).map(Rank) {
            for (what, odd_call) in odd_calls {
                let mut meshes = meshes(ranks);
                let results = on_ranks(&mut meshes, |mesh| {
                    if mesh.place().rank() == odd {
                        return odd_call(mesh);
                    }
                    all_reduce(mesh, 0, Path::Ring, Dtype::F32, ReduceOp::Sum, &mut [0; 400])
                });
                assert_eq!(results.len(), ranks as usize, "{what}");
                assert_mismatch(&mut meshes, odd, &results);
            }
        }
    }
}

fn skipped_operation_is_a_mismatch() {
    let mut meshes = meshes(3);
    let results = on_ranks(&mut meshes, |mesh| {
        all_reduce(mesh, 0, Path::Ring, Dtype::F32, ReduceOp::Sum, &mut [0; 400])?;
        let next = if mesh.place().rank() == Rank(1) { 2 } else { 1 };
        all_reduce(mesh, next, Path::Ring, Dtype::F32, ReduceOp::Sum, &mut [0; 400])
    });
    assert_mismatch(&mut meshes, Rank(1), &results);
}

fn rank_lost_in_any_step_is_named_and_no_result_is_wrong() {
    let (ranks, dead, count) = (4, Rank(2), 300_000);
    for (path, algorithm) in BOTH {
        let steps = algorithm(Place::new(dead, ranks).expect("inside"), count).len();
        for last_words in 0..steps {
            let meshes = connected_meshes(ranks);
            let results: Vec<_> = thread::scope(|scope| {
                let rank = |mut mesh: Mesh| {
                    scope.spawn(move || {
                        let mut buf = 1_i32.to_le_bytes().repeat(count);
                        let whole = algorithm(mesh.place(), count);
                        let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, count as u64);
                        let kernel = Kernel::new(Dtype::I32, ReduceOp::Sum);
                        if mesh.place().rank() != dead {
                            let ctx = context(0, desc, path);
                            let result =
                                execute(&mut mesh, &whole, kernel.as_ref(), &mut buf[..], &ctx, &mut NoInterrupt);
                            return (mesh.place().rank(), result.map(|()| buf), Some(mesh));
                        }
                        let mut part = Schedule::reducing(mesh.place(), *whole.layout());
                        whole.steps().map(|step| part.push(step)).take(last_words).for_each(drop);
                        let ctx = context(0, desc, path);
                        // The mesh is dropped here without notice.
                        let result = execute(&mut mesh, &part, kernel.as_ref(), &mut buf[..], &ctx, &mut NoInterrupt);
                        (mesh.place().rank(), result.map(|()| Vec::new()), None)
                    })
                };
                let threads: Vec<_> = meshes.into_iter().map(rank).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            let lost = Err(ExecError::RankLost { rank: dead });
            let survivors = || results.iter().filter(|(.., mesh)| mesh.is_some());
            assert!(survivors().any(|(_, result, _)| *result == lost), "{} {last_words}", path.name());
            let right = ranks.to_le_bytes().repeat(count);
            for (rank, result, _) in survivors() {
                let error = result.as_ref().err();
                assert!(
                    *result == lost || *result == Ok(right.clone()),
                    "{} {last_words}: {rank} {error:?}",
                    path.name()
                );
            }
        }
    }
}

fn rank_lost_before_connecting_is_named() {
    for dead in [Rank(0), Rank(2)] {
        let mut meshes = meshes(3);
        meshes.remove(dead.0 as usize);
        let results = on_ranks(&mut meshes, |mesh| barrier(mesh, 0, &mut NoInterrupt));
        assert_eq!(results, [Err(ExecError::RankLost { rank: dead }), Err(ExecError::RankLost { rank: dead })]);
    }
}

/// Ranks dial each other while unknown peers connect and disconnect, or stay idle.
/// Nobody listens at the others' addresses any more, to which ranks 0 and 1 connect.
fn late_rank_gets_the_error_that_ended_the_others() {
    for late in (0..3).map(Rank) {
        let sum = |mesh: &mut Mesh, bytes: &mut [u8]| all_reduce(mesh, 0, Path::Ring, Dtype::F32, ReduceOp::Sum, bytes);
        let mut early = meshes(3);
        let mut last = early.remove(late.0 as usize);
        let results = on_ranks(&mut early, |mesh| sum(mesh, &mut vec![0; 400 + 4 * mesh.place().rank().0 as usize]));
        drop(early);
        let error = sum(&mut last, &mut [0; 400]).expect_err("the others are gone");
        assert!(matches!(error, ExecError::Mismatch { .. }), "{late}: {error}");
        assert_eq!(results, [Err(error.clone()), Err(error)], "{late}");
    }
}

fn connection_flood_makes_no_rank_appear_lost() {
    let ranks = 4;
    let mut meshes = meshes(ranks);
    let addresses: Vec<_> = meshes.iter().map(|mesh| mesh.acceptor.listener().local_addr().expect("bound")).collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (addresses, is_over) = (&addresses, &is_over);
        let mut idle = Vec::new();
        for address in addresses {
            idle.extend((0..200).map(|_| TcpStream::connect(address).expect("listening")));
        }
        let flood = scope.spawn(move || {
            let mut connections = 0;
            while connections < 50_000 && !is_over.load(Ordering::Acquire) {
                let address = addresses[connections % addresses.len()];
                // The meshes may be gone.
                let _ = TcpStream::connect(address);
                connections += 1;
            }
        });
        for round in 0..20 {
            let results = on_ranks(&mut meshes, |mesh| barrier(mesh, 0, &mut NoInterrupt));
            assert!(results.iter().all(Result::is_ok), "round {round}: {results:?}");
            // The next round's ranks must dial again.
            for mesh in &mut meshes {
                mesh.links.iter_mut().for_each(|link| *link = Link::default());
                mesh.sharing.iter_mut().for_each(|sharing| sharing.offers.clear());
            }
        }
        is_over.store(true, Ordering::Release);
        flood.join().expect("no panic");
    });
}

/// A connection that ends before it was answered says nothing about the rank behind it.
fn peer_closing_before_the_handshake_is_redialled() {
    let mut meshes = meshes(2);
    let by_hand = meshes.pop().expect("rank 1");
    let mut mesh = meshes.pop().expect("rank 0");
    thread::scope(|scope| {
        let call = scope.spawn(move || (barrier(&mut mesh, 0, &mut NoInterrupt), mesh));
        let listener = by_hand.acceptor.listener();
        listener.set_nonblocking(false).expect("a socket");
        for _ in 0..5 {
            let (mut stream, _) = listener.accept().expect("rank 0 dials");
            stream.read_exact(&mut [0; HELLO_BYTES]).expect("a hello");
        }
        listener.set_nonblocking(true).expect("a socket");
        let mut by_hand = by_hand;
        assert_eq!(barrier(&mut by_hand, 0, &mut NoInterrupt), Ok(()));
        assert_eq!(call.join().expect("no panic").0, Ok(()));
    });
}

fn rank_of_another_job_is_named() {
    let mut meshes = meshes_with(&[secret(), JobSecret::new([7; 32])]);
    let results = on_ranks(&mut meshes, |mesh| {
        let desc = OpDesc::barrier();
        let mut ctx = context(0, desc, Path::Ring);
        if mesh.place().rank() == Rank(1) {
            ctx.deadline = Instant::now() + Duration::from_millis(500);
        }
        execute(mesh, &dissemination::barrier(mesh.place()), None, &mut [][..], &ctx, &mut NoInterrupt)
    });
    assert_eq!(results[0], Err(ExecError::Unproven { rank: Rank(0), peer: Rank(1) }));
    assert_eq!(results[1], Err(ExecError::Deadline { op_index: 0, rank: Rank(1), peer: Rank(0) }));
    assert!(meshes[1].foreign_dropped() >= 1);
}

fn deadline_fails_on_every_rank() {
    let mut meshes = meshes(3);
    let (late, in_time) = meshes.split_at_mut(1);
    let results = on_ranks(in_time, |mesh| {
        let mut ctx = context(4, OpDesc::barrier(), Path::Ring);
        let timeout = if mesh.place().rank() == Rank(1) { Duration::from_millis(50) } else { LONG };
        ctx.deadline = Instant::now() + timeout;
        execute(mesh, &dissemination::barrier(mesh.place()), None, &mut [][..], &ctx, &mut NoInterrupt)
    });
    let error = Err(ExecError::Deadline { op_index: 4, rank: Rank(1), peer: Rank(0) });
    assert_eq!(results, [error.clone(), error.clone()]);
    // Rank 0 was not connected to anyone: a one-shot connection delivered the abort.
    assert_eq!(barrier(&mut late[0], 4, &mut NoInterrupt), error);
}

/// An interrupt that ends the operation by its socket or its time.
struct Bell {
    socket: UnixStream,
    wake_at: Option<Instant>,
    rank: Rank,
}

impl Interrupt for Bell {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        Err(ExecError::Interrupted { rank: self.rank, reason: "the bell has rung".into() })
    }

    fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }
}

fn interrupt_ends_the_operation_on_every_rank() {
    for by_time in [false, true] {
        let mut meshes = meshes(4);
        // Rank 3 never calls, so only the interrupt can end the operation.
        let results = on_ranks(&mut meshes[..3], |mesh| {
            let (mut ringer, socket) = UnixStream::pair().expect("a pair");
            let rank = mesh.place().rank();
            if rank == Rank(1) && !by_time {
                ringer.write_all(b"!").expect("small");
            }
            let wake_at = (rank == Rank(1) && by_time).then(Instant::now);
            barrier(mesh, 0, &mut Bell { socket, wake_at, rank })
        });
        let error = ExecError::Interrupted { rank: Rank(1), reason: "the bell has rung".into() };
        assert_eq!(results, [Err(error.clone()), Err(error.clone()), Err(error)]);
    }
}

/// Pauses the operation each time that it runs.
struct Pause {
    wake_at: Instant,
}

impl Interrupt for Pause {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        Ok(ControlFlow::Break(()))
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.wake_at)
    }
}

/// Rank 1 enters the operation only once rank 0 is paused in it.
fn paused_operation_continues_where_it_was_or_ends_with_the_given_error() {
    for cancels in [false, true] {
        let mut meshes = meshes(2);
        let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 1000);
        let (schedule, kernel) =
            (|mesh: &Mesh| ring::all_reduce(mesh.place(), 1000), Kernel::new(Dtype::I32, ReduceOp::Sum));
        let (entered, enters) = mpsc::channel();
        let enters = std::sync::Mutex::new(enters);
        let results = on_ranks(&mut meshes, |mesh| {
            let (ctx, schedule) = (context(0, desc, Path::Ring), schedule(mesh));
            let mut buf = 1_i32.to_le_bytes().repeat(1000);
            if mesh.place().rank() == Rank(1) {
                enters.lock().expect("no panic").recv().expect("rank 0 is there");
            }
            let mut execution = Execution::new(mesh, &schedule, kernel.as_ref(), &mut buf[..], &ctx)?;
            if schedule.place().rank() == Rank(0) {
                let paused = execution.drive(&mut Pause { wake_at: Instant::now() });
                assert_eq!(paused, Ok(Status::Paused));
                entered.send(()).expect("rank 1 is there");
                if cancels {
                    execution.cancel(ExecError::RankLost { rank: Rank(7) });
                }
            }
            let result = execution.drive(&mut NoInterrupt);
            if cancels {
                return result.map(|_| ());
            }
            assert_eq!(result?, Status::Done);
            drop(execution);
            assert_eq!(buf, 2_i32.to_le_bytes().repeat(1000));
            Ok(())
        });
        let error = ExecError::RankLost { rank: Rank(7) };
        assert_eq!(results, if cancels { [Err(error.clone()), Err(error)] } else { [Ok(()), Ok(())] });
    }
}

/// Ends the operation when its socket is readable, and notifies the test.
struct Alarm {
    socket: UnixStream,
    rung: mpsc::Sender<()>,
}

impl Interrupt for Alarm {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        self.rung.send(()).expect("the test listens");
        Err(ExecError::Interrupted { rank: Rank(0), reason: "alarm".into() })
    }
}

/// Play the accepting rank of a handshake.
fn accept_by_hand(stream: &mut TcpStream) {
    let (mut hello, mut proof) = ([0; HELLO_BYTES], [0; PROOF_BYTES]);
    stream.read_exact(&mut hello).expect("a hello");
    let answer = Answer::new(&secret(), Rank(1), &hello, None).expect("random bytes");
    stream.write_all(answer.bytes()).expect("small");
    stream.read_exact(&mut proof).expect("a proof");
    assert!(answer.is_proven(&secret(), &proof));
    stream.write_all(&verdict(None)).expect("small");
}

fn partial_frame_is_completed_before_the_abort() {
    // Rank 1 is played by the test: it reads nothing until rank 0, its socket full, has failed.
    let mut meshes = meshes(2);
    let by_hand = meshes.pop().expect("rank 1");
    let mut mesh = meshes.pop().expect("rank 0");
    let count = 8 << 20;
    let (rung, alarm) = mpsc::channel();
    let (mut ringer, socket) = UnixStream::pair().expect("a pair");
    thread::scope(|scope| {
        let call = scope.spawn(move || {
            let mut buf: Vec<u8> = (0..count as u32).flat_map(u32::to_le_bytes).collect();
            let ctx = context(0, OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, count as u64), Path::Ring);
            let mut alarm = Alarm { socket, rung };
            let (schedule, kernel) = (ring::all_reduce(mesh.place(), count), Kernel::new(Dtype::I32, ReduceOp::Sum));
            execute(&mut mesh, &schedule, kernel.as_ref(), &mut buf[..], &ctx, &mut alarm)
        });
        by_hand.acceptor.listener().set_nonblocking(false).expect("a socket");
        let (mut stream, _) = by_hand.acceptor.listener().accept().expect("rank 0 dials");
        accept_by_hand(&mut stream);
        stream.peek(&mut [0]).expect("a frame has begun");
        ringer.write_all(b"!").expect("small");
        alarm.recv().expect("the alarm rings");
        let mut received = Vec::new();
        stream.read_to_end(&mut received).expect("an end after the abort");
        let error = call.join().expect("no panic").expect_err("the alarm");
        let (mut at, mut next) = (0, 0_u32);
        loop {
            let header = received[at..at + HEADER_BYTES].try_into().expect("a whole header");
            let Header { kind, len_bytes, .. } = Header::parse(Rank(0), &header).expect("a header where one belongs");
            let payload = &received[at + HEADER_BYTES..at + HEADER_BYTES + len_bytes];
            at += HEADER_BYTES + len_bytes;
            if kind == FrameKind::Abort {
                assert_eq!(AbortFrame::parse(Rank(0), payload), error);
                break;
            }
            for element in payload.chunks(4) {
                assert_eq!(element, next.to_le_bytes());
                next += 1;
            }
        }
        assert_eq!(at, received.len());
        assert!(next > 0 && (next as usize) < count / 2, "the alarm rang in the middle");
    });
}

fn invalid_arguments_are_refused_and_the_mesh_stays_usable() {
    let mut meshes = meshes(2);
    let elsewhere = ring::all_reduce(Place::new(Rank(0), 3).expect("inside"), 4);
    let here = |mesh: &Mesh| ring::all_reduce(mesh.place(), 4);
    let results = on_ranks(&mut meshes, |mesh| {
        let ctx = context(0, OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4), Path::Ring);
        let wide = Kernel::new(Dtype::F64, ReduceOp::Sum);
        let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum);
        let here = here(mesh);
        let calls = [(&elsewhere, &kernel, 16), (&here, &kernel, 15), (&here, &wide, 16), (&here, &None, 16)];
        for (schedule, kernel, len_bytes) in calls {
            let result = execute(mesh, schedule, kernel.as_ref(), &mut vec![0; len_bytes][..], &ctx, &mut NoInterrupt);
            assert!(matches!(result, Err(ExecError::Invalid { .. })), "{result:?}");
        }
        execute(mesh, &here, kernel.as_ref(), &mut [0; 16][..], &ctx, &mut NoInterrupt)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
    assert!(meshes.iter().all(|mesh| mesh.error().is_none()));
}

/// Ranks that are told in a later call, or by a rank that is in one, know which call has failed.
#[test]
fn abort_keeps_the_number_of_the_call_that_failed() {
    for connect in [meshes as fn(u32) -> Vec<Mesh>, connected_meshes] {
        let mut meshes = connect(3);
        let results = on_ranks(&mut meshes, |mesh| {
            if mesh.place().rank() != Rank(2) {
                return barrier(mesh, 6, &mut NoInterrupt);
            }
            let (schedule, desc) = (dissemination::barrier(mesh.place()), OpDesc::barrier());
            let ctx = context(4, desc, Path::Ring);
            let error = ExecError::Interrupted { rank: Rank(2), reason: "enough".into() };
            Execution::new(mesh, &schedule, None, &mut [][..], &ctx)?.cancel(error.clone());
            Err(error)
        });
        let error = ExecError::Interrupted { rank: Rank(2), reason: "enough".into() };
        assert_eq!(results, [Err(error.clone()), Err(error.clone()), Err(error)]);
        let aborted: Vec<_> = meshes.iter().map(Mesh::aborted_call).collect();
        assert_eq!(aborted, [Some(5), Some(5), None], "the context of operation 4 is of call 5");
    }
}

/// In a ring, the rank opposite hears of the error only from its neighbours.
#[test]
fn forwarded_abort_keeps_the_number_of_the_call_that_failed() {
    let ring =
        |mesh: &mut Mesh, op_index| all_reduce(mesh, op_index, Path::Ring, Dtype::I32, ReduceOp::Sum, &mut [0; 64]);
    let mut meshes = meshes(4);
    let error = ExecError::Interrupted { rank: Rank(2), reason: "enough".into() };
    let results = on_ranks(&mut meshes, |mesh| {
        ring(mesh, 3)?;
        if mesh.place().rank() != Rank(2) {
            return ring(mesh, 6);
        }
        let (schedule, ctx) = (dissemination::barrier(mesh.place()), context(4, OpDesc::barrier(), Path::Ring));
        Execution::new(mesh, &schedule, None, &mut [][..], &ctx)?.cancel(error.clone());
        Err(error.clone())
    });
    assert_eq!(results, [(); 4].map(|()| Err(error.clone())));
    let aborted: Vec<_> = meshes.iter().map(Mesh::aborted_call).collect();
    assert_eq!(aborted, [Some(5), Some(5), None, Some(5)], "the context of operation 4 is of call 5");
}
