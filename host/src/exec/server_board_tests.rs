//! Parts of operations inside servers on the servers' boards: when they are used, values against the oracle, and ranks
//! that differ, sleep or leave.

use super::tests::{context, contribution, expected, meshes, on_ranks, with_memory};
use super::*;
use crate::schedule::server_step::{all_gather, broadcast, reduce, reduce_scatter};
use crate::schedule::tree::Tree;
use crate::schedule::{Place, Schedule, one_shot, ring};
use std::thread;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::ring::SpinPolicy;
use sumac_hal::shm::Board;

type Make = fn(Place, usize, u32) -> Schedule;

/// The parts of an all-reduce inside servers, by its path.
fn parts(path: Path) -> [Make; 2] {
    match path {
        Path::Rab => [reduce, broadcast],
        _ => [reduce_scatter, all_gather],
    }
}

const PATHS: [Path; 2] = [Path::Rab, Path::Hybrid];

/// Run both parts of an all-reduce in place, without its rails: it is one of each server. Takes two indices.
fn run(mesh: &mut Mesh, op_index: u64, desc: OpDesc, path: Path, each: u32, buf: &mut [u8]) -> Result<(), ExecError> {
    let kernel = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op));
    for (part, op_index) in parts(path).into_iter().zip(op_index..) {
        let schedule = part(mesh.place(), desc.count as usize, each);
        let ctx = context(op_index, desc, path);
        execute(mesh, &schedule, kernel.as_ref(), &mut *buf, &ctx, &mut NoInterrupt)?;
    }
    Ok(())
}

/// The sum of this rank's server, of `count` elements that are the ranks' numbers from 1.
fn sum(mesh: &mut Mesh, op_index: u64, (path, count): (Path, usize), each: u32) -> Result<Vec<u8>, ExecError> {
    let mut buf = (mesh.place().rank().0 as i32 + 1).to_le_bytes().repeat(count);
    let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, count as u64);
    run(mesh, op_index, desc, path, each, &mut buf)?;
    Ok(buf)
}

fn right_sum(mesh: &Mesh, count: usize, each: u32) -> Vec<u8> {
    let first = mesh.place().rank().0 / each * each;
    let sum: u32 = (first..first + each).map(|rank| rank + 1).sum();
    (sum as i32).to_le_bytes().repeat(count)
}

/// Return meshes of which these servers use their boards, after calls by a path, and the next index. At each call, all
/// ranks of a server are alike.
fn on_boards(mut meshes: Vec<Mesh>, each: u32, path: Path, servers: &[u32]) -> (Vec<Mesh>, u64) {
    for call in 0..1000 {
        let op_index = 1 + 2 * call;
        on_ranks(&mut meshes, |mesh| {
            let found = sum(mesh, op_index, (path, 3), each).expect("no error");
            assert_eq!(found, right_sum(mesh, 3, each));
        });
        let used: Vec<bool> = meshes.iter().map(Mesh::uses_server_board).collect();
        assert!(used.chunks(each as usize).all(|server| server.iter().all(|uses| *uses == server[0])), "{used:?}");
        if servers.iter().all(|server| used[(server * each) as usize]) {
            return (meshes, op_index + 2);
        }
    }
    panic!("no boards: {:?}", meshes.iter().map(|mesh| &mesh.boards).collect::<Vec<_>>());
}

fn two_servers(each: u32, path: Path) -> (Vec<Mesh>, u64) {
    on_boards(meshes(2 * each), each, path, &[0, 1])
}

#[test]
fn parts_on_boards_give_each_server_the_reduction_of_every_type() {
    for (servers, each) in [(2, 2), (3, 3), (2, 5)] {
        let all: Vec<u32> = (0..servers).collect();
        // The path by which the ranks agreed does not matter.
        let (mut meshes, first) = on_boards(meshes(servers * each), each, PATHS[(each % 2) as usize], &all);
        on_ranks(&mut meshes, |mesh| {
            let (rank, mut op_index) = (mesh.place().rank().0, first);
            for &dtype in Dtype::ALL {
                // Sums are scaled before, and averages divided after all parts.
                let ops = ReduceOp::ALL.iter().filter(|op| !matches!(op, ReduceOp::Avg | ReduceOp::PremulSum));
                for &op in ops.filter(|&&op| Kernel::new(dtype, op).is_some()) {
                    let desc = |count: usize| OpDesc::all_reduce(dtype, op, count as u64);
                    let most = Board::CAPACITY_BYTES / desc(1).element_bytes();
                    for (path, count) in PATHS.into_iter().flat_map(|path| [0, 1, 7, most, most + 1].map(|n| (path, n)))
                    {
                        // Ranks of a server count from 0, as the oracle's do.
                        let mut buf: Vec<u8> =
                            (0..count).flat_map(|e| contribution(dtype, op, rank % each, e)).collect();
                        let right: Vec<u8> = (0..count).flat_map(|e| expected(dtype, op, each, e)).collect();
                        run(mesh, op_index, desc(count), path, each, &mut buf).expect("no error");
                        assert!(buf == right, "{} {dtype} {op} x {count} at rank {rank}", path.name());
                        op_index += 2;
                    }
                }
            }
            assert!(mesh.uses_server_board() && !mesh.uses_board());
        });
    }
}

/// No bytes of a part on the board go through the connections.
#[test]
fn parts_on_a_board_send_no_frames() {
    for path in PATHS {
        let (mut meshes, first) = two_servers(2, path);
        let transfers =
            |meshes: &[Mesh]| -> u32 { meshes.iter().flat_map(|mesh| &mesh.links).map(|link| link.rx.transfers).sum() };
        on_ranks(&mut meshes, |mesh| _ = sum(mesh, first, (path, 3), 2).expect("no error"));
        assert_eq!(transfers(&meshes), 0, "{}", path.name());
        // One that is too long for it does.
        let count = Board::CAPACITY_BYTES / 4 + 1;
        on_ranks(&mut meshes, |mesh| _ = sum(mesh, first + 2, (path, count), 2).expect("no error"));
        assert_ne!(transfers(&meshes), 0, "{}", path.name());
    }
}

/// The two boards of a mesh, and its connections.
#[test]
fn parts_inside_servers_and_operations_of_all_ranks_take_turns() {
    let each = 2;
    let (mut meshes, first) = two_servers(each, Path::Rab);
    let used = on_ranks(&mut meshes, |mesh| {
        let (place, mut op_index) = (mesh.place(), first);
        for call in 0..1500 {
            let count = [3, 100, 3000][call % 3];
            let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, count as u64);
            let (path, schedule) = match call % 5 {
                0 => (Path::Ring, ring::all_reduce(place, count)),
                1 | 2 => {
                    let flat = Tree::flat(place.ranks(), Order::TreeFold).expect("a tree");
                    (Path::OneShot, one_shot::all_reduce(place, count, &flat))
                }
                by => {
                    let found = sum(mesh, op_index, (PATHS[by - 3], count), each).expect("no error");
                    assert_eq!(found, right_sum(mesh, count, each));
                    op_index += 2;
                    continue;
                }
            };
            let mut buf = (place.rank().0 as i32).to_le_bytes().repeat(count);
            let kernel = Kernel::new(Dtype::I32, ReduceOp::Sum);
            let ctx = context(op_index, desc, path);
            execute(mesh, &schedule, kernel.as_ref(), &mut buf[..], &ctx, &mut NoInterrupt).expect("no error");
            assert_eq!(buf, 6_i32.to_le_bytes().repeat(count));
            op_index += 1;
        }
        (mesh.uses_board(), mesh.uses_server_board())
    });
    assert_eq!(used, [(true, true); 4]);
}

#[test]
fn sleeping_ranks_of_a_server_are_woken_by_posts() {
    let each = 3;
    for path in PATHS {
        let (mut meshes, first) = two_servers(each, path);
        // Each wait sleeps.
        meshes.iter_mut().for_each(|mesh| mesh.waiting = SpinPolicy::NONE);
        on_ranks(&mut meshes, |mesh| {
            let rank = mesh.place().rank().0;
            for call in 0..200 {
                if call % 20 == 7 && u64::from(rank % each) == call / 20 % u64::from(each) {
                    // Long enough for the others to sleep.
                    thread::park_timeout(Duration::from_millis(2));
                }
                let found = sum(mesh, first + 2 * call, (path, 5), each).expect("no error");
                assert_eq!(found, right_sum(mesh, 5, each));
            }
        });
    }
}

#[test]
fn different_calls_inside_a_server_are_a_mismatch_on_its_ranks() {
    let each = 2;
    for path in PATHS {
        for (nth, other) in [0, 1, 2].into_iter().enumerate() {
            for who in [0, 1] {
                let (mut meshes, first) = two_servers(each, path);
                let results = on_ranks(&mut meshes, |mesh| {
                    let place = mesh.place();
                    match other {
                        _ if place.rank() != Rank(who) => sum(mesh, first, (path, 4), each).map(|_| ()),
                        0 => sum(mesh, first, (path, 5), each).map(|_| ()),
                        // Over the connections: too long, or another algorithm, which all ranks take part in.
                        1 => sum(mesh, first, (path, 5000), each).map(|_| ()),
                        _ => {
                            let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 4);
                            let kernel = Kernel::new(Dtype::I32, ReduceOp::Sum);
                            let (schedule, ctx) = (ring::all_reduce(place, 4), context(first, desc, Path::Ring));
                            execute(mesh, &schedule, kernel.as_ref(), &mut [0; 16][..], &ctx, &mut NoInterrupt)
                        }
                    }
                });
                // The other server has no part in this one's: it may be through before it hears of it.
                for result in &results[..each as usize] {
                    let is_mismatch = matches!(result, Err(ExecError::Mismatch { .. }));
                    assert!(is_mismatch, "{} {nth}, rank {who}: {results:?}", path.name());
                }
            }
        }
    }
}

#[test]
fn rank_that_has_left_is_named_by_the_ranks_of_its_server() {
    let each = 3;
    for (path, who) in PATHS.into_iter().flat_map(|path| [(path, 0), (path, 1)]) {
        let (mut meshes, first) = two_servers(each, path);
        drop(meshes.remove(who));
        let results = on_ranks(&mut meshes, |mesh| sum(mesh, first, (path, 3), each).map(|_| ()));
        let lost = Err(ExecError::RankLost { rank: Rank(who as u32) });
        let (server, other) = results.split_at(each as usize - 1);
        assert!(server.iter().all(|result| *result == lost), "{}: {results:?}", path.name());
        // It is through before it is told.
        assert!(other.iter().all(|result| *result == Ok(()) || *result == lost), "{}: {results:?}", path.name());
    }
}

/// Such ranks, as those of other containers, keep to the connections, and so do those of their server.
#[test]
fn server_with_a_rank_that_shares_no_memory_uses_no_board() {
    let each = 2;
    for path in PATHS {
        let mut meshes = meshes(2 * each);
        meshes[1].sharing = Err("not in this test".into());
        let (mut meshes, first) = on_boards(meshes, each, path, &[1]);
        on_ranks(&mut meshes, |mesh| {
            for op_index in (first..first + 200).step_by(2) {
                assert_eq!(sum(mesh, op_index, (path, 3), each).expect("no error"), right_sum(mesh, 3, each));
            }
        });
        assert_eq!(meshes.iter().map(Mesh::uses_server_board).collect::<Vec<_>>(), [false, false, true, true]);
    }
    with_memory(SharedMemory::Avoid, || {
        let mut meshes = super::tests::meshes(2 * each);
        on_ranks(&mut meshes, |mesh| {
            for op_index in (1..200).step_by(2) {
                assert_eq!(sum(mesh, op_index, (Path::Rab, 3), each).expect("no error"), right_sum(mesh, 3, each));
            }
            assert!(!mesh.uses_server_board());
        });
    });
}

/// The ranks that have it learn from their leader that one does not.
#[test]
fn board_that_a_rank_of_the_server_lacks_is_used_by_none() {
    let (each, mut meshes) = (3, meshes(6));
    let mut since_others_have_it = 0;
    for call in 0..1000 {
        on_ranks(&mut meshes, |mesh| {
            let found = sum(mesh, 1 + 2 * call, (Path::Rab, 3), each).expect("no error");
            assert_eq!(found, right_sum(mesh, 3, each));
        });
        assert!(meshes[..3].iter().all(|mesh| !mesh.uses_server_board()), "call {call}");
        // As if it were on its way: it arrives in one of these calls.
        meshes[2].boards.server.board = None;
        let others_have_it = meshes[..2].iter().all(|mesh| mesh.boards.server.board.is_some());
        since_others_have_it += u32::from(others_have_it && meshes[3..].iter().all(Mesh::uses_server_board));
        if since_others_have_it == 50 {
            return;
        }
    }
    panic!("no boards: {:?}", meshes.iter().map(|mesh| &mesh.boards).collect::<Vec<_>>());
}
