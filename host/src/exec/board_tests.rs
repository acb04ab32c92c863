//! Short collectives on the board: when it is used, values against the oracle, and ranks that differ, sleep or leave.

use super::round::{Attempt, Round};
use super::tests::{connected_meshes, context, contribution, expected, meshes, on_ranks, secret, with_memory};
use super::*;
use crate::schedule::tree::Tree;
use crate::schedule::{Place, Schedule, Span, one_shot, ring};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::ring::SpinPolicy;
use sumac_hal::shm::Board;

fn flat(place: Place) -> Tree {
    Tree::flat(place.ranks(), Order::TreeFold).expect("a tree")
}

/// Run an operation in one step: half of them, others at each rank, begin with an attempt.
fn run<'b>(
    mesh: &mut Mesh,
    op_index: u64,
    desc: OpDesc,
    schedule: &Schedule,
    buffers: impl Into<Buffers<'b>>,
) -> Result<(), ExecError> {
    run_by(mesh, (op_index, Path::OneShot), desc, schedule, buffers)
}

/// Run an operation by a path, in the same way.
pub(super) fn run_by<'b>(
    mesh: &mut Mesh,
    (op_index, path): (u64, Path),
    desc: OpDesc,
    schedule: &Schedule,
    buffers: impl Into<Buffers<'b>>,
) -> Result<(), ExecError> {
    let kernel = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op));
    let (mut buffers, ctx): (Buffers<'_>, _) = (buffers.into(), context(op_index, desc, path));
    if (op_index + u64::from(mesh.place().rank().0)).is_multiple_of(2) {
        let (operation, is_in_place) = ((&desc, path), matches!(buffers, Buffers::InPlace(_)));
        let round = Round::new(operation, 1, &Arc::new(schedule.clone()), kernel, is_in_place)?;
        if let Some(round) = round.filter(|_| mesh.can_attempt()) {
            let numbers = (op_index, ctx.number);
            match mesh.attempt(&round, numbers, buffers.reborrow()) {
                Attempt::Complete => return Ok(()),
                Attempt::Begun(begun) => {
                    let begun = (&round, begun);
                    let mut execution = Execution::continued(mesh, begun, buffers, (numbers, ctx.deadline));
                    while execution.drive(&mut NoInterrupt)? == Status::Paused {}
                    return Ok(());
                }
            }
        }
    }
    execute(mesh, schedule, kernel.as_ref(), buffers, &ctx, &mut NoInterrupt)
}

pub(super) fn sum(mesh: &mut Mesh, op_index: u64, count: usize) -> Result<Vec<u8>, ExecError> {
    let (place, desc) = (mesh.place(), OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, count as u64));
    let mut buf = (place.rank().0 as i32 + 1).to_le_bytes().repeat(count);
    run(mesh, op_index, desc, &one_shot::all_reduce(place, count, &flat(place)), &mut buf[..])?;
    Ok(buf)
}

pub(super) fn barrier(mesh: &mut Mesh, op_index: u64) -> Result<(), ExecError> {
    let schedule = one_shot::barrier(mesh.place());
    run(mesh, op_index, OpDesc::barrier(), &schedule, &mut [][..])
}

/// Return meshes that use the board, and the number of operations so far.
pub(super) fn on_board(ranks: u32) -> (Vec<Mesh>, u64) {
    let mut meshes = connected_meshes(ranks);
    for op_index in 1..1000 {
        on_ranks(&mut meshes, |mesh| barrier(mesh, op_index).expect("no error"));
        let used: Vec<bool> = meshes.iter().map(Mesh::uses_board).collect();
        assert!(used.iter().all(|uses| *uses == used[0]), "all ranks alike: {used:?}");
        if used[0] {
            return (meshes, op_index + 1);
        }
    }
    panic!("no board: {:?}", meshes.iter().map(|mesh| &mesh.boards).collect::<Vec<_>>());
}

#[test]
fn every_type_operator_and_length_gives_the_reduction_on_the_board() {
    for ranks in [2, 3, 7] {
        let (mut meshes, first) = on_board(ranks);
        on_ranks(&mut meshes, |mesh| {
            let (place, mut op_index) = (mesh.place(), first);
            for &dtype in Dtype::ALL {
                for &op in ReduceOp::ALL.iter().filter(|&&op| Kernel::new(dtype, op).is_some()) {
                    // The longest that fits, and one that does not.
                    let desc = |count| OpDesc::all_reduce(dtype, op, count as u64);
                    let most = Board::CAPACITY_BYTES / desc(1).element_bytes();
                    for count in [0, 1, 5, most, most + 1] {
                        let mine: Vec<u8> =
                            (0..count).flat_map(|e| contribution(dtype, op, place.rank().0, e)).collect();
                        let right: Vec<u8> = (0..count).flat_map(|e| expected(dtype, op, ranks, e)).collect();
                        let mut buf = mine.clone();
                        let all = one_shot::all_reduce(place, count, &flat(place));
                        run(mesh, op_index, desc(count), &all, &mut buf[..]).expect("no error");
                        assert!(buf == right, "all-reduce {dtype} {op} x {count} at {}", place.rank());
                        let root = Rank(op_index as u32 % ranks);
                        let desc = OpDesc { root, ..OpDesc::reduce(dtype, op, root, count as u64) };
                        buf.copy_from_slice(&mine);
                        let reduce = one_shot::reduce(place, count, &flat(place), root);
                        run(mesh, op_index + 1, desc, &reduce, &mut buf[..]).expect("no error");
                        assert!(place.rank() != root || buf == right, "reduce {dtype} {op} x {count} to {root}");
                        let desc = OpDesc::reduce_scatter(dtype, op, count as u64);
                        let own = Span::of_block(count, ranks, place.rank().0);
                        let each = desc.element_bytes();
                        let mut out = vec![0; each * own.len];
                        let scatter = one_shot::reduce_scatter(place, count, &flat(place));
                        let buffers = Buffers::Separate { input: &mine, output: &mut out };
                        run(mesh, op_index + 2, desc, &scatter, buffers).expect("no error");
                        assert!(
                            out == right[each * own.start..each * own.end()],
                            "reduce-scatter {dtype} {op} x {count} at {}",
                            place.rank()
                        );
                        op_index += 3;
                    }
                }
            }
        });
    }
}

/// Those on the board, and those over connections, where a root runs ahead.
#[test]
fn broadcasts_gathers_and_other_algorithms_take_turns() {
    let ranks = 4;
    let (mut meshes, first) = on_board(ranks);
    on_ranks(&mut meshes, |mesh| {
        let place = mesh.place();
        for op_index in first..first + 3000 {
            let root = Rank((op_index / 11) as u32 % ranks);
            let sent: Vec<u8> = (0..40).map(|at| (op_index + at) as u8).collect();
            match op_index % 11 {
                8 => {
                    let mut buf = vec![0; 4 * ranks as usize];
                    buf[place.rank().0 as usize * 4..][..4].fill(op_index as u8 ^ place.rank().0 as u8);
                    let desc = OpDesc::all_gather(Dtype::U8, 4 * u64::from(ranks));
                    run(mesh, op_index, desc, &one_shot::all_gather(place, buf.len()), &mut buf[..]).expect("no error");
                    let right = (0..ranks).flat_map(|rank| [op_index as u8 ^ rank as u8; 4]);
                    assert!(buf.iter().copied().eq(right), "{buf:?}");
                }
                9 => {
                    let mut buf = 1_i32.to_le_bytes().repeat(9);
                    let ctx = context(op_index, OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 9), Path::Ring);
                    let kernel = Kernel::new(Dtype::I32, ReduceOp::Sum);
                    let schedule = ring::all_reduce(place, 9);
                    execute(mesh, &schedule, kernel.as_ref(), &mut buf[..], &ctx, &mut NoInterrupt).expect("no error");
                    assert_eq!(buf, 4_i32.to_le_bytes().repeat(9));
                }
                10 => barrier(mesh, op_index).expect("no error"),
                _ => {
                    let mut buf = if place.rank() == root { sent.clone() } else { vec![0; 40] };
                    let desc = OpDesc::broadcast(Dtype::U8, root, 40);
                    run(mesh, op_index, desc, &one_shot::broadcast(place, 40, root), &mut buf[..]).expect("no error");
                    assert_eq!(buf, sent);
                }
            }
        }
    });
}

#[test]
fn sleeping_ranks_are_woken_by_posts() {
    let ranks = 3;
    let (mut meshes, first) = on_board(ranks);
    // Each wait sleeps.
    meshes.iter_mut().for_each(|mesh| mesh.waiting = SpinPolicy::NONE);
    on_ranks(&mut meshes, |mesh| {
        let place = mesh.place();
        for op_index in first..first + 400 {
            if op_index % 50 == 7 && place.rank() == Rank((op_index / 50) as u32 % ranks) {
                // Long enough for the others to sleep.
                thread::park_timeout(Duration::from_millis(2));
            }
            if op_index % 10 == 0 {
                assert_eq!(sum(mesh, op_index, 2).expect("no error"), 6_i32.to_le_bytes().repeat(2));
                continue;
            }
            let mut buf = [op_index as u8; 8];
            if place.rank() != Rank(1) {
                buf.fill(0);
            }
            let desc = OpDesc::broadcast(Dtype::U8, Rank(1), 8);
            run(mesh, op_index, desc, &one_shot::broadcast(place, 8, Rank(1)), &mut buf[..]).expect("no error");
            assert_eq!(buf, [op_index as u8; 8]);
        }
    });
}

type Other = fn(&mut Mesh, u64) -> Result<(), ExecError>;

#[test]
fn different_calls_are_a_mismatch_on_all_ranks() {
    let other: [Other; 4] = [
        // On the board as well, with another length, or sending nothing.
        |mesh, op_index| sum(mesh, op_index, 5).map(|_| ()),
        |mesh, op_index| {
            let schedule = one_shot::broadcast(mesh.place(), 8, Rank(0));
            run(mesh, op_index, OpDesc::broadcast(Dtype::U8, Rank(0), 8), &schedule, &mut [0; 8][..])
        },
        // Over the connections: too long, or another algorithm.
        |mesh, op_index| sum(mesh, op_index, 100_000).map(|_| ()),
        |mesh, op_index| {
            let ctx = context(op_index, OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 4), Path::Ring);
            let (schedule, kernel) = (ring::all_reduce(mesh.place(), 4), Kernel::new(Dtype::I32, ReduceOp::Sum));
            execute(mesh, &schedule, kernel.as_ref(), &mut [0; 16][..], &ctx, &mut NoInterrupt)
        },
    ];
    for (nth, other) in other.into_iter().enumerate() {
        for ranks in [2, 3] {
            let (mut meshes, first) = on_board(ranks);
            let results = on_ranks(&mut meshes, |mesh| {
                if mesh.place().rank() == Rank(1) { other(mesh, first) } else { sum(mesh, first, 4).map(|_| ()) }
            });
            for result in results {
                assert!(matches!(result, Err(ExecError::Mismatch { .. })), "call {nth}, {ranks} ranks: {result:?}");
            }
        }
    }
}

/// Each sends to the other and receives nothing: noticed by the next operation in which one hears of the other.
#[test]
fn broadcasts_from_different_roots_are_a_mismatch() {
    for broadcasts in 1..7 {
        let (mut meshes, first) = on_board(2);
        let results = on_ranks(&mut meshes, |mesh| {
            let own = mesh.place().rank();
            let schedule = one_shot::broadcast(mesh.place(), 8, own);
            for op_index in first..first + broadcasts {
                run(mesh, op_index, OpDesc::broadcast(Dtype::U8, own, 8), &schedule, &mut [0; 8][..])?;
            }
            sum(mesh, first + broadcasts, 3).map(|_| ())
        });
        for result in results {
            let Err(ExecError::Mismatch { calls }) = result else { panic!("{broadcasts} broadcasts: {result:?}") };
            let named = [calls[0].root, calls[1].root];
            assert_eq!(named, [Rank(0), Rank(1)], "those that differ are named, not {calls:?}");
        }
    }
}

/// A rank of the job that does not keep to the rules: it is named.
#[test]
fn garbage_on_the_board_ends_the_operation_with_a_named_rank() {
    for description in [[0xff; 64], [0; 64]] {
        let (mut meshes, first) = on_board(2);
        let (mut mesh, mut hostile) = (meshes.remove(0), meshes.remove(0));
        assert!(hostile.boards.all.board.as_mut().expect("it is agreed").post(7, &description, &[1; 99]));
        let result = sum(&mut mesh, first, 3);
        assert!(matches!(&result, Err(ExecError::Protocol { rank: Rank(1), .. })), "{result:?}");
    }
}

#[test]
fn rank_that_leaves_after_its_post_is_no_error_and_before_it_is_named() {
    let (mut meshes, first) = on_board(2);
    let (mut left, mut stays) = (meshes.pop().expect("rank 1"), meshes.pop().expect("rank 0"));
    thread::scope(|scope| {
        scope.spawn(move || {
            sum(&mut left, first, 3).expect("no error");
            drop(left);
        });
        // It has read rank 0's post, and rank 0 reads its post even when it is gone.
        assert_eq!(sum(&mut stays, first, 3).expect("no error"), 3_i32.to_le_bytes().repeat(3));
    });
    assert_eq!(sum(&mut stays, first + 1, 3), Err(ExecError::RankLost { rank: Rank(1) }));
}

/// An earlier operation has found its connection closed, which is not found again.
#[test]
fn rank_known_to_have_left_is_named_by_the_next_operation_that_needs_it() {
    let operations: [Other; 3] = [
        |mesh, op_index| sum(mesh, op_index, 3).map(|_| ()),
        barrier,
        |mesh, op_index| {
            let schedule = one_shot::broadcast(mesh.place(), 8, Rank(1));
            run(mesh, op_index, OpDesc::broadcast(Dtype::U8, Rank(1), 8), &schedule, &mut [0; 8][..])
        },
    ];
    for operation in operations {
        let (mut meshes, first) = on_board(2);
        drop(meshes.pop());
        meshes[0].links[1].state = link::State::Ended;
        assert_eq!(operation(&mut meshes[0], first), Err(ExecError::RankLost { rank: Rank(1) }));
    }
    // A root that only sends: until there is no room for what the other one never reads.
    let (mut meshes, first) = on_board(2);
    drop(meshes.pop());
    meshes[0].links[1].state = link::State::Ended;
    let root = |op_index| {
        let (desc, place) = (OpDesc::broadcast(Dtype::U8, Rank(0), 8), meshes[0].place());
        run(&mut meshes[0], op_index, desc, &one_shot::broadcast(place, 8, Rank(0)), &mut [1; 8][..])
    };
    let ahead = 2 * Board::ROUNDS_AHEAD;
    assert_eq!((first..first + ahead).try_for_each(root), Err(ExecError::RankLost { rank: Rank(1) }));
}

#[test]
fn abort_of_a_rank_reaches_those_on_the_board() {
    struct GivesUp(Instant);
    impl Interrupt for GivesUp {
        fn poll_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            None
        }
        fn check(&mut self) -> Result<std::ops::ControlFlow<()>, ExecError> {
            Err(ExecError::Interrupted { rank: Rank(2), reason: "enough".into() })
        }
        fn wake_at(&self) -> Option<Instant> {
            Some(self.0)
        }
    }
    let (mut meshes, first) = on_board(3);
    // Rank 1 stays away: the others wait for it, until rank 2 gives up.
    let _away = meshes.remove(1);
    let results = on_ranks(&mut meshes, |mesh| {
        if mesh.place().rank() == Rank(0) {
            return sum(mesh, first, 3);
        }
        let (place, desc) = (mesh.place(), OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 3));
        let (schedule, kernel) = (one_shot::all_reduce(place, 3, &flat(place)), Kernel::new(Dtype::I32, ReduceOp::Sum));
        let ctx = context(first, desc, Path::OneShot);
        execute(mesh, &schedule, kernel.as_ref(), &mut [0; 12][..], &ctx, &mut GivesUp(Instant::now()))
            .map(|()| Vec::new())
    });
    let error = Err(ExecError::Interrupted { rank: Rank(2), reason: "enough".into() });
    assert_eq!(results, [error.clone(), error]);
}

#[test]
fn ranks_without_shared_memory_use_no_board() {
    with_memory(SharedMemory::Avoid, || {
        let mut meshes = connected_meshes(3);
        on_ranks(&mut meshes, |mesh| (1..100).for_each(|op_index| barrier(mesh, op_index).expect("no error")));
        assert!(meshes.iter().all(|mesh| !mesh.uses_board()));
    });
    // One of them shares none.
    let mut meshes = meshes(3);
    meshes[2].sharing = Err("not in this test".into());
    for op_index in 0..100 {
        on_ranks(&mut meshes, |mesh| barrier(mesh, op_index).expect("no error"));
    }
    assert!(meshes.iter().all(|mesh| !mesh.uses_board()));
}

#[test]
fn board_of_a_stranger_or_of_another_rank_is_refused() {
    use super::auth::{Purpose, shared_key, shared_name};
    use sumac_hal::ids::{ChildIndex, GroupId};
    use sumac_hal::shm::{Connection, Message};
    let mut meshes = connected_meshes(3);
    let name = shared_name(&secret(), Rank(2), meshes[2].addresses[2]);
    let key = |purpose, from| shared_key(&secret(), purpose, Rank(from), Rank(2));
    let offers = [
        (key(Purpose::Board, 0) ^ 1, 0, 3, 3),
        (key(Purpose::Peer, 0), 0, 3, 3),
        // Of ranks that do not exist, of another number than it says, without this rank, or of none.
        (key(Purpose::Board, 1), 1, 3, 3),
        (key(Purpose::Board, 0), 0, 4, 3),
        (key(Purpose::Board, 0), 0, 2, 2),
        (key(Purpose::Board, 0), 0, 3, 0),
        (key(Purpose::Board, 0), 0, 3, 3 << 32 | 3),
    ];
    let connections: Vec<_> = offers
        .into_iter()
        .map(|(key, from, members, handle)| {
            let connection = Connection::open(&name, Duration::from_secs(60)).expect("rank 2 listens");
            let (board, child) = (Board::create(members).expect("memory"), ChildIndex(Purpose::Board.to_wire()));
            let _ = connection.send(&Message::Attach { group: GroupId(from), child, key }, None);
            let _ = connection.send(&Message::Memory { handle }, Some(board.file()));
            connection
        })
        .collect();
    for op_index in 1..=200 {
        on_ranks(&mut meshes, |mesh| {
            let ctx = context(op_index, OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 3), Path::Ring);
            let (schedule, kernel) = (ring::all_reduce(mesh.place(), 3), Kernel::new(Dtype::I32, ReduceOp::Sum));
            execute(mesh, &schedule, kernel.as_ref(), &mut [0; 12][..], &ctx, &mut NoInterrupt).expect("no error");
        });
    }
    assert!(meshes[2].boards.all.board.is_none(), "none of these is rank 0's");
    assert!(meshes[2].boards.server.board.is_none(), "nor that of a server");
    assert_eq!(meshes[2].foreign_dropped(), offers.len() as u64);
    drop(connections);
}
