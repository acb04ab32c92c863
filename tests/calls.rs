//! Calls that are refused, made again or given up, and ranks that leave: nothing is changed that an error calls unchanged,
//! and no rank counts what others do not hear of. Controller, boards and ranks in one process.

mod common;

use common::{Cluster, by_packets, plain};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::controller::ControllerConfig;
use sumac::select::CostTable;
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, Path, ReduceOp, Straggler};
use sumac_hal::ids::Rank;

/// The most operations in flight.
const IN_FLIGHT: usize = 1024;

/// How long a call waits that is to fail.
const SHORT: Duration = Duration::from_millis(300);

fn by_tree() -> ControllerConfig {
    let table = CostTable::EMULATED.with_overrides("[[override]]\npath = \"tree\"\n").expect("an override file");
    ControllerConfig { table, ..ControllerConfig::new() }
}

fn within(deadline: Duration) -> CallOptions {
    CallOptions { deadline: Some(deadline), ..CallOptions::default() }
}

/// Start as many operations as may be in flight, and wait for all of them.
fn fill(comm: &Communicator) -> Vec<sumac::comm::Handle<Vec<u32>>> {
    (0..IN_FLIGHT).map(|_| comm.start_all_reduce(vec![1_u32; 4], ReduceOp::Sum).expect("room")).collect()
}

fn drain(comm: &Communicator, handles: Vec<sumac::comm::Handle<Vec<u32>>>) {
    for handle in handles {
        assert_eq!(handle.wait().expect("a sum").0, [comm.size(); 4]);
    }
}

#[test]
fn premul_sum_without_room_leaves_its_buffer_as_it_was() {
    for configure in [plain as fn(&mut JoinConfig), by_packets] {
        let cluster = Cluster::start_with(1, 2, 1, by_tree());
        let refused = Barrier::new(2);
        cluster.run("room", 2, configure, |comm| {
            let options = CallOptions { scalar: Some(2.0), ..CallOptions::default() };
            let mut values = comm.alloc::<f32>(100).expect("memory");
            values.fill(2.0);
            let handles = if comm.rank() == 0 {
                let handles = fill(&comm);
                let refusal = comm.all_reduce_with(
                    &mut values,
                    ReduceOp::PremulSum,
                    &CallOptions { deadline: Some(SHORT), ..options },
                );
                let error = refusal.expect_err("no room");
                assert!(error.is_harmless(), "{error}");
                assert!(values.iter().all(|&x| x == 2.0), "{:?}", &values[..4]);
                refused.wait();
                handles
            } else {
                refused.wait();
                fill(&comm)
            };
            drain(&comm, handles);
            comm.all_reduce_with(&mut values, ReduceOp::PremulSum, &options).expect("a sum");
            assert!(values.iter().all(|&x| x == 8.0), "{:?}", &values[..4]);
            comm.leave();
        });
    }
}

/// A rank that is ahead waits for those behind it, by any path, and by started operations as by blocking ones.
#[test]
fn call_without_room_waits_for_other_ranks() {
    for (configure, algo) in [(plain as fn(&mut JoinConfig), None), (by_packets, None), (by_packets, Some(Algo::Ring))]
    {
        let cluster = Cluster::start_with(1, 2, 1, by_tree());
        let is_full = Barrier::new(2);
        let configure = |config: &mut JoinConfig| {
            configure(config);
            config.algo = algo.unwrap_or(config.algo);
        };
        cluster.run("ahead", 2, configure, |comm| {
            let mut handles = Vec::new();
            if comm.rank() == 0 {
                handles = fill(&comm);
                is_full.wait();
                for _ in 0..IN_FLIGHT {
                    handles.push(comm.start_all_reduce(vec![1_u32; 4], ReduceOp::Sum).expect("room, in time"));
                }
            } else {
                is_full.wait();
                for _ in 0..2 * IN_FLIGHT {
                    let mut values = [1_u32; 4];
                    comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
                    assert_eq!(values, [2; 4]);
                }
            }
            let mut values = [1_u32; 4];
            comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
            assert_eq!(values, [2; 4]);
            drain(&comm, handles);
            comm.leave();
        });
    }
}

/// Each call that a rank alone makes wrongly, for a reason of its own.
fn make_refused_calls(comm: &Communicator) {
    let refused = |result: Result<sumac::Outcome, Error>| {
        let error = result.expect_err("refused");
        assert!(error.is_harmless(), "{error}");
    };
    let mut values = [1_u64; 12];
    let scalar = CallOptions { scalar: Some(2.0), ..CallOptions::default() };
    refused(comm.all_reduce_with(&mut values, ReduceOp::Sum, &scalar));
    let partial = Straggler::Partial(SHORT);
    let options = CallOptions { algo: Some(Algo::Ring), straggler: Some(partial), ..CallOptions::default() };
    refused(comm.all_reduce_with(&mut values, ReduceOp::Sum, &options));
    refused(comm.broadcast(&mut values, comm.size()));
    let started = comm.start_all_reduce_with(vec![1_u64; 4], ReduceOp::Sum, &options);
    assert!(started.is_err_and(|error| error.is_harmless()));
    let no_barrier = CallOptions { algo: Some(Algo::Ring), ..CallOptions::default() };
    refused(comm.barrier_with(&no_barrier));
    assert_eq!(values, [1; 12]);
}

/// Ranks move to a tree at the same call, however many calls one of them was refused before.
#[test]
fn refused_call_does_not_count() {
    let cluster = Cluster::spare(0, by_tree());
    let has_begun = AtomicBool::new(false);
    let is_over = Barrier::new(4);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_begun.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            let _board = cluster.board_on_a_bus("late");
            is_over.wait();
        });
        let moved = cluster.run("skew", 3, plain, |comm| {
            let add = |nth: u64| {
                let mut values = [nth, u64::from(comm.rank())];
                let path = comm.all_reduce(&mut values, ReduceOp::Sum).map(|outcome| outcome.path);
                path.inspect(|_| assert_eq!(values, [3 * nth, 3]))
            };
            let begun = add(0);
            if comm.rank() == 1 {
                make_refused_calls(&comm);
            }
            has_begun.store(true, Ordering::Relaxed);
            let give_up = Instant::now() + Duration::from_secs(30);
            let mut nth = 0;
            let moved = loop {
                nth += 1;
                match add(nth) {
                    Ok(Path::Tree) => break Ok(nth),
                    Ok(_) if Instant::now() > give_up => break Err("no tree".to_string()),
                    Ok(_) => {}
                    Err(error) => break Err(error.to_string()),
                }
            };
            is_over.wait();
            comm.leave();
            begun.map_err(|error| error.to_string()).and(moved)
        });
        assert!(moved.iter().all(|nth| nth.is_ok() && *nth == moved[0]), "{moved:?}");
    });
}

/// Only the ranks that wait know of the deadline; the others learn it from the end of the communicator.
#[test]
fn one_ranks_deadline_ends_its_communicator_and_names_it_to_the_others() {
    let cluster = Cluster::start(1, 3);
    let is_over = Barrier::new(3);
    cluster.run("deadline", 3, plain, |comm| {
        comm.barrier().expect("all are there");
        if comm.rank() == 1 {
            let error = comm.barrier_with(&within(SHORT)).expect_err("nobody else calls it");
            assert!(matches!(error, Error::Deadline { .. }), "{error}");
            let error = comm.barrier().expect_err("it is over");
            assert!(matches!(error, Error::Ended(_)), "{error}");
            drop(comm);
            is_over.wait();
            return;
        }
        is_over.wait();
        // The barrier that rank 1 had entered completes, or fails by its name.
        let error = loop {
            if let Err(error) = comm.barrier() {
                break error;
            }
        };
        assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks[..] == [Rank(1)]), "{error}");
    });
}

/// It holds what the others may need, so it goes when they have it: not before, and no later.
#[test]
fn rank_leaves_when_the_others_have_its_last_operation() {
    for configure in [plain as fn(&mut JoinConfig), by_packets] {
        let cluster = Cluster::start_with(1, 3, 1, by_tree());
        let (is_started, leaves, has_left) = (Barrier::new(3), Barrier::new(3), AtomicBool::new(false));
        cluster.run("last", 3, configure, |comm| {
            comm.barrier().expect("all are there");
            let handle = comm.start_all_reduce(vec![1_u32; 8], ReduceOp::Sum).expect("room");
            is_started.wait();
            if comm.rank() == 2 {
                // It takes nothing in meanwhile, and so has no result.
                leaves.wait();
                let until = Instant::now() + SHORT;
                while Instant::now() < until {
                    assert!(!has_left.load(Ordering::SeqCst), "a rank has left before this one had the result");
                    thread::yield_now();
                }
                assert_eq!(handle.wait().expect("a sum").0, [3; 8]);
                // What it does now is of no matter to those that leave.
                while !has_left.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            } else {
                assert_eq!(handle.wait().expect("a sum").0, [3; 8]);
                leaves.wait();
                comm.leave();
                has_left.store(true, Ordering::SeqCst);
                return;
            }
            comm.leave();
        });
    }
}

/// What one rank does beside the others' work does not hold it.
#[test]
fn others_work_on_after_a_rank_has_left() {
    let cluster = Cluster::start_with(1, 3, 1, by_tree());
    let has_left = Barrier::new(3);
    cluster.run("early", 3, plain, |comm| {
        comm.barrier().expect("all are there");
        let rank = comm.rank();
        if rank == 0 {
            comm.leave();
            has_left.wait();
            return;
        }
        has_left.wait();
        for nth in 0..50_u32 {
            let mut got = [0_u32; 100];
            comm.send_receive((&[nth; 100], 3 - rank), (&mut got, 3 - rank), nth).expect("the other is there");
            assert_eq!(got, [nth; 100]);
        }
        comm.leave();
    });
}
