//! Short collectives of several steps on the board: which ones, values against the oracle, and ranks that differ, leave
//! or give up between two steps.

use super::board::is_for_board;
use super::board_tests::{barrier, on_board, run_by, sum};
use super::tests::{context, contribution, expected, on_ranks};
use super::*;
use crate::schedule::{ALGORITHMS, Place, Schedule, StepBuffer, halving_doubling, recursive_doubling, ring};
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::ring::SpinPolicy;
use sumac_hal::shm::Board;

type Algorithm = fn(Place, usize) -> Schedule;
const STEPWISE: [(Path, Algorithm); 3] = [
    (Path::Ring, ring::all_reduce),
    (Path::HalvingDoubling, halving_doubling::all_reduce),
    (Path::RecursiveDoubling, recursive_doubling::all_reduce),
];

/// As many elements as some blocks of a ring of four have none of.
const COUNT: usize = 3;

fn desc(count: usize) -> OpDesc {
    OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, count as u64)
}

/// Run some steps of an all-reduce.
fn run_steps(
    mesh: &mut Mesh,
    (op_index, path): (u64, Path),
    schedule: &Schedule,
    buf: &mut [u8],
    interrupt: &mut dyn Interrupt,
) -> Result<(), ExecError> {
    let (kernel, ctx) = (Kernel::new(Dtype::I32, ReduceOp::Sum), context(op_index, desc(buf.len() / 4), path));
    execute(mesh, schedule, kernel.as_ref(), buf, &ctx, interrupt)
}

fn reduce(
    mesh: &mut Mesh,
    op_index: u64,
    (path, algorithm): (Path, Algorithm),
    count: usize,
) -> Result<Vec<u8>, ExecError> {
    let mut buf = (mesh.place().rank().0 as i32 + 1).to_le_bytes().repeat(count);
    run_by(mesh, (op_index, path), desc(count), &algorithm(mesh.place(), count), &mut buf[..])?;
    Ok(buf)
}

fn right(ranks: u32, count: usize) -> Vec<u8> {
    ((1..=ranks).sum::<u32>()).to_le_bytes().repeat(count)
}

/// Return the steps of a schedule from one to another as a schedule of their own.
fn part(schedule: &Schedule, steps: std::ops::Range<usize>) -> Schedule {
    let mut part = Schedule::reducing(schedule.place(), *schedule.layout());
    schedule.steps().map(|step| part.push(step)).take(steps.end).for_each(drop);
    let mut rest = Schedule::reducing(schedule.place(), *schedule.layout());
    let mut room = StepBuffer::default();
    (steps.start..part.len()).for_each(|index| rest.push(part.step(index, &mut room).expect("it is there")));
    rest
}

/// What the board is for: all ranks have as many rounds, and what is read in one was posted in it.
#[test]
fn schedules_of_several_steps_on_the_board_exchange_one_message_in_each() {
    let mut found = Vec::new();
    for algorithm in ALGORITHMS.iter().filter(|algorithm| algorithm.path() != Path::OneShot) {
        for (ranks, count) in (1..=64).flat_map(|ranks| [(ranks, 0), (ranks, 1), (ranks, 5), (ranks, 1000)]) {
            for collective in sumac_hal::op::Collective::ALL {
                let desc = OpDesc { collective: *collective, ..desc(count) };
                if !is_for_board(&desc, algorithm.path(), ranks) {
                    continue;
                }
                found.push((algorithm.path(), ranks));
                let (_, of_path) = STEPWISE.iter().find(|(path, _)| *path == algorithm.path()).expect("a known one");
                let all: Vec<Schedule> = Place::all(ranks).map(|place| of_path(place, count)).collect();
                for (schedule, place) in all.iter().zip(Place::all(ranks)) {
                    let mut index = 0;
                    schedule.steps().for_each(|step| {
                        let mut room = StepBuffer::default();
                        if let (&[send], &[recv]) = (step.sends, step.recvs) {
                            let theirs = all[recv.peer.0 as usize].step(index, &mut room).expect("as many steps");
                            let (sent, own) = (theirs.sends[0], place.rank());
                            assert_eq!((sent.peer, sent.from.span.len), (own, recv.landing.to.span.len));
                            assert!(send.from.span.len * desc.partial_bytes() <= Board::CAPACITY_BYTES);
                        } else {
                            assert!(!step.has_messages() && index == schedule.len() - 1, "{schedule:?}");
                        }
                        index += 1;
                    });
                    assert_eq!(schedule.len(), all[0].len());
                }
            }
        }
    }
    for (path, ranks) in [(Path::Ring, 5), (Path::HalvingDoubling, 64), (Path::RecursiveDoubling, 2)] {
        assert!(found.contains(&(path, ranks)), "{path:?} {ranks}");
    }
    assert!(found.iter().all(|(path, ranks)| *path == Path::Ring || ranks.is_power_of_two()));
}

#[test]
fn partial_values_that_exceed_a_cell_go_over_the_connections() {
    let most = Board::CAPACITY_BYTES as u64 / 4;
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let longest =
            |count| is_for_board(&OpDesc::all_reduce(dtype, ReduceOp::Sum, count), Path::RecursiveDoubling, 4);
        assert!(longest(most) && !longest(most + 1), "{dtype}");
    }
    assert!(!is_for_board(&desc(1), Path::Ring, 1) && !is_for_board(&desc(1), Path::Ring, Board::MEMBERS_MAX + 1));
}

#[test]
fn every_type_operator_and_length_gives_the_reduction_in_several_steps() {
    for ranks in [2, 4, 5] {
        let (mut meshes, first) = on_board(ranks);
        on_ranks(&mut meshes, |mesh| {
            let (place, mut op_index) = (mesh.place(), first);
            for (path, algorithm) in STEPWISE {
                for &dtype in Dtype::ALL {
                    for &op in ReduceOp::ALL.iter().filter(|&&op| Kernel::new(dtype, op).is_some()) {
                        let desc = |count| OpDesc::all_reduce(dtype, op, count as u64);
                        let most = Board::CAPACITY_BYTES / desc(1).partial_bytes();
                        for count in [0, 1, 5, most, most + 1] {
                            let mut buf: Vec<u8> =
                                (0..count).flat_map(|e| contribution(dtype, op, place.rank().0, e)).collect();
                            let schedule = algorithm(place, count);
                            run_by(mesh, (op_index, path), desc(count), &schedule, &mut buf[..]).expect("no error");
                            let right: Vec<u8> = (0..count).flat_map(|e| expected(dtype, op, ranks, e)).collect();
                            assert!(buf == right, "{} {dtype} {op} x {count} at {}", path.name(), place.rank());
                            op_index += 1;
                        }
                    }
                }
            }
        });
    }
}

/// They take turns on the board, and with those over connections; no rank sends a frame for those on the board.
#[test]
fn collectives_of_one_step_and_of_several_take_turns_on_the_board() {
    let ranks = 4;
    let (mut meshes, first) = on_board(ranks);
    on_ranks(&mut meshes, |mesh| {
        for op_index in first..first + 2000 {
            match op_index % 7 {
                0 => assert_eq!(sum(mesh, op_index, 2), Ok(right(ranks, 2))),
                1 => barrier(mesh, op_index).expect("no error"),
                2 if op_index % 3 == 0 => assert_eq!(reduce(mesh, op_index, STEPWISE[0], 9000), Ok(right(ranks, 9000))),
                nth => assert_eq!(reduce(mesh, op_index, STEPWISE[nth as usize % 3], 5), Ok(right(ranks, 5))),
            }
        }
        for (nth, algorithm) in STEPWISE.into_iter().enumerate() {
            let transfers = |mesh: &Mesh| mesh.links.iter().map(|link| link.tx.transfers).collect::<Vec<_>>();
            let before = mesh.boards.all.rounds();
            let steps = algorithm.1(mesh.place(), 5).steps().map(|step| u64::from(step.has_messages())).sum::<u64>();
            assert_eq!(reduce(mesh, first + 2000 + nth as u64, algorithm, 5), Ok(right(ranks, 5)));
            assert_eq!(mesh.boards.all.rounds() - before, steps);
            assert!(transfers(mesh).iter().all(|transfers| *transfers == 0), "{:?}", transfers(mesh));
        }
    });
}

#[test]
fn sleeping_ranks_are_woken_by_posts_of_each_step() {
    let ranks = 4;
    let (mut meshes, first) = on_board(ranks);
    meshes.iter_mut().for_each(|mesh| mesh.waiting = SpinPolicy::NONE);
    on_ranks(&mut meshes, |mesh| {
        for op_index in first..first + 300 {
            if op_index % 50 == 7 && mesh.place().rank() == Rank((op_index / 50) as u32 % ranks) {
                // Long enough for the others to sleep.
                thread::park_timeout(Duration::from_millis(2));
            }
            let algorithm = STEPWISE[op_index as usize % 3];
            assert_eq!(reduce(mesh, op_index, algorithm, COUNT), Ok(right(ranks, COUNT)));
        }
    });
}

#[test]
fn different_calls_are_a_mismatch_in_whatever_steps_ranks_are() {
    type Other = fn(&mut Mesh, u64) -> Result<(), ExecError>;
    let other: [Other; 5] = [
        |mesh, op_index| reduce(mesh, op_index, STEPWISE[0], COUNT + 1).map(drop),
        |mesh, op_index| reduce(mesh, op_index, STEPWISE[1], COUNT).map(drop),
        |mesh, op_index| reduce(mesh, op_index, STEPWISE[2], COUNT).map(drop),
        |mesh, op_index| sum(mesh, op_index, COUNT).map(drop),
        // Over the connections: too long.
        |mesh, op_index| reduce(mesh, op_index, STEPWISE[0], 100_000).map(drop),
    ];
    for (nth, other) in other.into_iter().enumerate() {
        for (ranks, odd) in [(2, Rank(0)), (4, Rank(1)), (4, Rank(3)), (5, Rank(2))] {
            let (mut meshes, first) = on_board(ranks);
            let results = on_ranks(&mut meshes, |mesh| {
                reduce(mesh, first, STEPWISE[0], COUNT)?;
                if mesh.place().rank() == odd {
                    return other(mesh, first + 1);
                }
                reduce(mesh, first + 1, STEPWISE[0], COUNT).map(drop)
            });
            for result in results {
                let Err(ExecError::Mismatch { calls }) = &result else { panic!("call {nth}, {odd}: {result:?}") };
                assert!(calls.iter().any(|call| call.rank == odd), "call {nth}, {odd}: {calls:?}");
            }
        }
    }
}

/// It has posted all that the others need of it, some of it several steps ahead of a slow one.
#[test]
fn rank_that_leaves_after_its_last_post_is_no_error_for_one_that_is_steps_behind() {
    let ranks = 4;
    let (mut meshes, first) = on_board(ranks);
    let mut slow = meshes.remove(0);
    let whole = ring::all_reduce(slow.place(), COUNT);
    let mut buf = 1_i32.to_le_bytes().repeat(COUNT);
    // Rank 3, from which it receives, completes once it has sent so much. The others need the rest of it.
    let behind = ranks as usize;
    assert!(behind + 1 < whole.len());
    thread::scope(|scope| {
        let run = |mut mesh: Mesh| {
            move || {
                assert_eq!(reduce(&mut mesh, first, STEPWISE[0], COUNT), Ok(right(ranks, COUNT)));
                mesh
            }
        };
        let mut threads: Vec<_> = meshes.into_iter().map(|mesh| scope.spawn(run(mesh))).collect();
        let begun = part(&whole, 0..behind);
        run_steps(&mut slow, (first, Path::Ring), &begun, &mut buf, &mut NoInterrupt).expect("no error");
        drop(threads.pop().expect("that of rank 3").join().expect("no panic"));
        // The rest begins with a look at the sockets: rank 3 has left, and two of its posts are still to be read.
        slow.expect_memory();
        let rest = part(&whole, behind..whole.len());
        run_steps(&mut slow, (first, Path::Ring), &rest, &mut buf, &mut NoInterrupt).expect("no error");
        threads.into_iter().for_each(|thread| drop(thread.join().expect("no panic")));
    });
    assert_eq!(buf, right(ranks, COUNT));
}

#[test]
fn rank_lost_between_two_steps_on_the_board_is_named_and_no_result_is_wrong() {
    let (ranks, dead) = (4, Rank(2));
    for (path, algorithm) in STEPWISE {
        let steps = algorithm(Place::new(dead, ranks).expect("inside"), COUNT);
        let steps = steps.steps().map(|step| usize::from(step.has_messages())).sum();
        for last_words in 0..steps {
            let (meshes, first) = on_board(ranks);
            let rank = |mut mesh: Mesh| {
                move || {
                    let mut buf = (mesh.place().rank().0 as i32 + 1).to_le_bytes().repeat(COUNT);
                    let whole = algorithm(mesh.place(), COUNT);
                    if mesh.place().rank() != dead {
                        let result = run_steps(&mut mesh, (first, path), &whole, &mut buf, &mut NoInterrupt);
                        return (result.map(|()| buf), Some(mesh));
                    }
                    // The mesh is dropped here without notice.
                    let begun = part(&whole, 0..last_words);
                    let result = run_steps(&mut mesh, (first, path), &begun, &mut buf, &mut NoInterrupt);
                    (result.map(|()| Vec::new()), None)
                }
            };
            let results: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = meshes.into_iter().map(|mesh| scope.spawn(rank(mesh))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            let lost = Err(ExecError::RankLost { rank: dead });
            let survivors = || results.iter().filter(|(_, mesh)| mesh.is_some()).map(|(result, _)| result);
            assert!(survivors().any(|result| *result == lost), "{} {last_words}", path.name());
            for result in survivors() {
                let is_right = *result == lost || *result == Ok(right(ranks, COUNT));
                assert!(is_right, "{} {last_words}: {result:?}", path.name());
            }
        }
    }
}

#[test]
fn rank_that_gives_up_between_two_steps_ends_the_operation_on_all() {
    let (ranks, odd) = (4, Rank(1));
    for (path, algorithm) in STEPWISE {
        let steps = algorithm(Place::new(odd, ranks).expect("inside"), COUNT).len();
        for done in 0..steps {
            let (mut meshes, first) = on_board(ranks);
            let results = on_ranks(&mut meshes, |mesh| {
                let mut buf = (mesh.place().rank().0 as i32 + 1).to_le_bytes().repeat(COUNT);
                let whole = algorithm(mesh.place(), COUNT);
                if mesh.place().rank() != odd {
                    return run_steps(mesh, (first, path), &whole, &mut buf, &mut NoInterrupt).map(|()| buf);
                }
                run_steps(mesh, (first, path), &part(&whole, 0..done), &mut buf, &mut NoInterrupt)?;
                let (rest, kernel) = (part(&whole, done..steps), Kernel::new(Dtype::I32, ReduceOp::Sum));
                let ctx = context(first, desc(COUNT), path);
                let mut rest = Execution::new(mesh, &rest, kernel.as_ref(), &mut buf[..], &ctx)?;
                let error = ExecError::Interrupted { rank: odd, reason: "enough".into() };
                rest.cancel(error.clone());
                Err(error)
            });
            let given_up = Err(ExecError::Interrupted { rank: odd, reason: "enough".into() });
            assert_eq!(results[odd.0 as usize], given_up);
            assert!(done == steps - 1 || results.contains(&given_up), "{} {done}", path.name());
            for result in results {
                assert!(result == given_up || result == Ok(right(ranks, COUNT)), "{} {done}: {result:?}", path.name());
            }
        }
    }
}

/// Pauses whenever it is asked.
struct Pauses(Instant);

impl Interrupt for Pauses {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        Ok(ControlFlow::Break(()))
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.0)
    }
}

#[test]
fn operation_paused_between_two_steps_on_the_board_continues_there() {
    let ranks = 4;
    for algorithm in STEPWISE {
        let (mut meshes, first) = on_board(ranks);
        meshes.iter_mut().for_each(|mesh| mesh.waiting = SpinPolicy::NONE);
        let pauses = on_ranks(&mut meshes, |mesh| {
            let (place, kernel) = (mesh.place(), Kernel::new(Dtype::I32, ReduceOp::Sum));
            let mut buf = (place.rank().0 as i32 + 1).to_le_bytes().repeat(COUNT);
            let (schedule, ctx) = (algorithm.1(place, COUNT), context(first, desc(COUNT), algorithm.0));
            let mut execution =
                Execution::new(mesh, &schedule, kernel.as_ref(), &mut buf[..], &ctx).expect("valid arguments");
            let mut pauses = 0;
            while execution.drive(&mut Pauses(Instant::now())).expect("no error") == Status::Paused {
                pauses += 1;
                // Whoever pauses first lets the others begin, and then waits for them at most so often.
                assert!(pauses < 1_000_000);
                thread::yield_now();
            }
            drop(execution);
            assert_eq!(buf, right(ranks, COUNT));
            pauses
        });
        // Each waits for the others in its first step at the latest, but for those that come last.
        assert!(pauses.iter().any(|pauses| *pauses > 0), "{pauses:?}");
    }
}
