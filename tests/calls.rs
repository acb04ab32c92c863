//! Refused, repeated and timed-out calls, and ranks that leave: refused calls change neither buffers nor sequence
//! numbers.

mod common;

use common::{Cluster, over_udp, plain, prefer_tree};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, Path, ReduceOp, Straggler};
use sumac_hal::ids::Rank;

/// The maximum number of operations in flight.
const IN_FLIGHT: usize = 1024;

/// The deadline of calls that must fail.
const SHORT: Duration = Duration::from_millis(300);

fn within(deadline: Duration) -> CallOptions {
    CallOptions { deadline: Some(deadline), ..CallOptions::default() }
}

/// Start the maximum number of operations in flight.
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
    for configure in [plain as fn(&mut JoinConfig), over_udp] {
        let cluster = Cluster::start_with(1, 2, 1, prefer_tree());
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
                assert!(error.is_rejection(), "{error}");
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

/// A rank that is ahead waits for the others, on every path, in blocking and in started calls.
#[test]
fn call_without_room_waits_for_other_ranks() {
    for (configure, algo) in [(plain as fn(&mut JoinConfig), None), (over_udp, None), (over_udp, Some(Algo::Ring))] {
        let cluster = Cluster::start_with(1, 2, 1, prefer_tree());
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
                    handles
                        .push(comm.start_all_reduce(vec![1_u32; 4], ReduceOp::Sum).expect("room within the deadline"));
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

/// Make calls that this rank alone gets refused, each for another reason.
fn make_refused_calls(comm: &Communicator) {
    let refused = |result: Result<sumac::Outcome, Error>| {
        let error = result.expect_err("refused");
        assert!(error.is_rejection(), "{error}");
    };
    let mut values = [1_u64; 12];
    let scalar = CallOptions { scalar: Some(2.0), ..CallOptions::default() };
    refused(comm.all_reduce_with(&mut values, ReduceOp::Sum, &scalar));
    let partial = Straggler::Partial(SHORT);
    let options = CallOptions { algo: Some(Algo::Ring), straggler: Some(partial), ..CallOptions::default() };
    refused(comm.all_reduce_with(&mut values, ReduceOp::Sum, &options));
    refused(comm.broadcast(&mut values, comm.size()));
    let started = comm.start_all_reduce_with(vec![1_u64; 4], ReduceOp::Sum, &options);
    assert!(started.is_err_and(|refused| refused.error.is_rejection()));
    let no_barrier = CallOptions { algo: Some(Algo::Ring), ..CallOptions::default() };
    refused(comm.barrier_with(&no_barrier));
    assert_eq!(values, [1; 12]);
}

/// Ranks move to a tree at the same call even after one of them had refused calls.
#[test]
fn refused_call_does_not_count() {
    let cluster = Cluster::spare(0, prefer_tree());
    let has_begun = AtomicBool::new(false);
    let is_over = Barrier::new(4);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_begun.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            let _board = cluster.start_spare_board("late");
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

/// Only waiting ranks know the deadline; the others learn of it when the communicator ends.
#[test]
fn rank_past_its_deadline_ends_its_communicator_and_is_named_to_the_others() {
    let cluster = Cluster::start(1, 3);
    let is_over = Barrier::new(3);
    cluster.run("deadline", 3, plain, |comm| {
        comm.barrier().expect("all are there");
        if comm.rank() == 1 {
            let error = comm.barrier_with(&within(SHORT)).expect_err("no other rank calls it");
            assert!(matches!(error, Error::Deadline { .. }), "{error}");
            let error = comm.barrier().expect_err("the communicator has ended");
            assert!(matches!(error, Error::Ended(_)), "{error}");
            drop(comm);
            is_over.wait();
            return;
        }
        is_over.wait();
        // The barrier that rank 1 had entered completes, or fails with its name.
        let error = loop {
            if let Err(error) = comm.barrier() {
                break error;
            }
        };
        assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks[..] == [Rank(1)]), "{error}");
    });
}

/// A leaving rank may hold data that others need: it leaves exactly when they have the result.
#[test]
fn rank_leaves_when_the_others_have_its_last_operation() {
    for configure in [plain as fn(&mut JoinConfig), over_udp] {
        let cluster = Cluster::start_with(1, 3, 1, prefer_tree());
        let (is_started, leaves, has_left) = (Barrier::new(3), Barrier::new(3), AtomicBool::new(false));
        cluster.run("last", 3, configure, |comm| {
            comm.barrier().expect("all are there");
            let handle = comm.start_all_reduce(vec![1_u32; 8], ReduceOp::Sum).expect("room");
            is_started.wait();
            if comm.rank() == 2 {
                // This rank does not poll, so it has no result yet.
                leaves.wait();
                let until = Instant::now() + SHORT;
                while Instant::now() < until {
                    assert!(!has_left.load(Ordering::SeqCst), "a rank has left before this one had the result");
                    thread::yield_now();
                }
                assert_eq!(handle.wait().expect("a sum").0, [3; 8]);
                // From here on it does not delay the leaving ranks.
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

/// The remaining ranks can still exchange messages.
#[test]
fn others_work_on_after_a_rank_has_left() {
    let cluster = Cluster::start_with(1, 3, 1, prefer_tree());
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
            comm.send_receive((&[nth; 100], 3 - rank), (&mut got, 3 - rank), nth).expect("the other rank calls");
            assert_eq!(got, [nth; 100]);
        }
        comm.leave();
    });
}
