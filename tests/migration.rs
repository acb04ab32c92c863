//! Migration of a running job to a device that connects or returns: all ranks move at the same call.

mod common;

use common::{Cluster, checked_sum, over_udp, plain, prefer_tree, sum_until, sum_until_fallback};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::Prepared;
use sumac::controller::ControllerConfig;
use sumac::{Algo, CallOptions, Dtype, JoinConfig, OpDesc, Path, ReduceOp};
use sumac_hal::uplink::HopTimers;

/// The limit of the time until a job moves.
const SOON: Duration = Duration::from_secs(30);

fn by_tree() -> ControllerConfig {
    let timers = HopTimers { dead: Duration::from_millis(700), ..HopTimers::DEFAULT };
    ControllerConfig { timers, ..prefer_tree() }
}

/// Run `job` on a cluster, which gets its first device once the job has told that it has begun.
fn with_late_device<R>(cluster: &Cluster, job: impl FnOnce(&AtomicBool) -> R) -> R {
    let (has_begun, boards) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_begun.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            boards.lock().expect("not poisoned").push(cluster.start_spare_board("late"));
        });
        job(&has_begun)
    })
}

#[test]
fn job_without_device_moves_to_a_tree_when_one_connects() {
    for configure in [plain as fn(&mut JoinConfig), over_udp] {
        let cluster = Cluster::spare(0, by_tree());
        let moved = with_late_device(&cluster, |has_begun| {
            cluster.run("late", 3, configure, |comm| {
                assert!(checked_sum(&comm, 0).path != Path::Tree);
                has_begun.store(true, Ordering::Relaxed);
                let mut op = 1;
                let moved = sum_until(&comm, &mut op, Path::Tree, SOON);
                // The job stays on the tree, without a recovery.
                (0..3).for_each(|nth| assert_eq!(checked_sum(&comm, op + nth).path, Path::Tree));
                comm.leave();
                moved
            })
        });
        assert!(moved.iter().all(|&op| op == moved[0]), "ranks moved at different operations: {moved:?}");
    }
}

/// Runs that are complete at once count as calls, and stop where the job moves.
#[test]
fn job_of_prepared_operations_moves_to_a_tree_when_a_device_connects() {
    let cluster = Cluster::spare(0, by_tree());
    let moved = with_late_device(&cluster, |has_begun| {
        cluster.run("prepared", 2, plain, |comm| {
            let prepare = |algo| {
                let options = CallOptions { algo, ..CallOptions::default() };
                let desc = OpDesc::all_reduce(Dtype::U64, ReduceOp::Sum, 2);
                comm.prepare(&desc, vec![0_u64; 2], None, &options).expect("possible")
            };
            let [mut first, mut second, mut on_board] = [None, None, Some(Algo::OneShot)].map(prepare);
            let run = |prepared: &mut Prepared<Vec<u64>>, op: u64| {
                prepared.buffer().expect("at rest").fill(op + u64::from(comm.rank()));
                let path = prepared.run().expect("a sum").path;
                assert_eq!(prepared.buffer().expect("at rest"), &[2 * op + 1; 2]);
                path
            };
            // Enough of them that nothing but shared memory is used.
            for op in 0..300 {
                assert_eq!([&mut first, &mut second].map(|prepared| run(prepared, op)), [Path::OneShot; 2]);
            }
            has_begun.store(true, Ordering::Relaxed);
            let give_up = Instant::now() + SOON;
            let moved = (300..).find(|&op| {
                assert!(Instant::now() < give_up, "no run used the tree");
                run(&mut first, op) == Path::Tree
            });
            assert!((0..3).all(|op| run(&mut first, op) == Path::Tree));
            // An operation on the board does not keep there what was decided before.
            assert!((0..10).all(|op| run(&mut on_board, op) == Path::OneShot));
            assert_eq!(run(&mut second, 0), Path::Tree);
            comm.leave();
            moved
        })
    });
    assert_eq!(moved[0], moved[1], "ranks moved at different runs");
}

#[test]
fn returning_device_is_used_again() {
    let mut cluster = Cluster::spare(1, by_tree());
    let board = Mutex::new(cluster.boards.pop());
    let (has_begun, has_recovered) = (AtomicBool::new(false), AtomicBool::new(false));
    let wait_for = |flag: &AtomicBool| {
        while !flag.load(Ordering::Relaxed) {
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2 {
                wait_for(&has_begun);
                has_begun.store(false, Ordering::Relaxed);
                drop(board.lock().expect("not poisoned").take());
                wait_for(&has_recovered);
                has_recovered.store(false, Ordering::Relaxed);
                *board.lock().expect("not poisoned") = Some(cluster.start_spare_board("spare0"));
            }
        });
        cluster.run("back", 3, plain, |comm| {
            let mut op = 0;
            for _ in 0..2 {
                sum_until(&comm, &mut op, Path::Tree, SOON);
                if comm.rank() == 0 {
                    has_begun.store(true, Ordering::Relaxed);
                }
                sum_until_fallback(&comm, &mut op, SOON);
                comm.barrier().expect("all are there");
                if comm.rank() == 0 {
                    has_recovered.store(true, Ordering::Relaxed);
                }
            }
            sum_until(&comm, &mut op, Path::Tree, SOON);
            comm.leave();
        });
    });
}

/// A device returns after a rank was lost: the job cannot move and is not delayed by an offer.
#[test]
fn job_with_a_lost_rank_gets_no_offer() {
    let cluster = Cluster::spare(0, by_tree());
    let errors = cluster.run("lost", 3, plain, |comm| {
        checked_sum(&comm, 0);
        if comm.rank() == 2 {
            return None;
        }
        let _board = (comm.rank() == 0).then(|| cluster.start_spare_board("late"));
        comm.all_reduce(&mut [0_u64; 4], ReduceOp::Sum).err().map(|error| error.to_string())
    });
    assert!(errors.iter().flatten().all(|error| error.contains("rank 2 is lost")), "{errors:?}");
}
