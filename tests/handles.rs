//! Dropped and forgotten handles of started operations, the resources that a communicator holds for them, and the ways
//! to end a communicator with operations in flight.

mod common;

use common::{Cluster, over_udp, plain};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};
use sumac::comm::{Departure, OwnedBuffer};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, Path, ReduceOp};
use sumac_hal::ids::Rank;

/// More time than leaving takes.
const SOON: Duration = Duration::from_secs(30);

/// The maximum number of operations in flight.
const IN_FLIGHT: usize = 1024;

/// Start and drop many more operations than fit in flight; check that nothing remains of them and later calls succeed.
fn start_and_drop<B: OwnedBuffer<Element = u32>>(comm: &Communicator, rounds: usize, mut buffer: impl FnMut() -> B) {
    let mut most = 0;
    for _ in 0..rounds {
        drop(comm.start_all_reduce(buffer(), ReduceOp::Sum).expect("room"));
        most = most.max(comm.outstanding().operations);
    }
    assert!(most <= IN_FLIGHT, "{most} operations were owned at once");
    let mut values = [1_u32; 4];
    comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
    assert_eq!(values, [comm.size(); 4]);
    let left = comm.outstanding();
    assert_eq!((left.operations, left.bytes), (0, 0), "dropped operations must be freed once they complete");
}

#[test]
fn dropped_handles_leave_nothing() {
    for (configure, algo) in [(plain as fn(&mut JoinConfig), None), (over_udp, None), (over_udp, Some(Algo::Ring))] {
        let cluster = Cluster::start(1, 2);
        let configure = |config: &mut JoinConfig| {
            configure(config);
            config.algo = algo.unwrap_or(config.algo);
        };
        cluster.run("dropped", 2, configure, |comm| {
            start_and_drop(&comm, 3 * IN_FLIGHT, || vec![1_u32; 256]);
            assert_eq!(comm.leave_within(SOON), Departure::Clean);
        });
    }
}

/// The total is far more than the available registered memory, so dropped operations must release theirs.
#[test]
fn dropped_handles_leave_no_registered_memory() {
    let cluster = Cluster::start(1, 2);
    cluster.run("registered", 2, plain, |comm| {
        for _ in 0..40 {
            start_and_drop(&comm, 100, || comm.alloc::<u32>(1 << 14).expect("registered memory"));
        }
        assert_eq!(comm.leave_within(SOON), Departure::Clean);
    });
}

#[test]
fn forgotten_handle_keeps_its_buffer_alone() {
    let cluster = Cluster::start(1, 2);
    cluster.run("forgotten", 2, plain, |comm| {
        std::mem::forget(comm.start_all_reduce(vec![1_u32; 256], ReduceOp::Sum).expect("room"));
        start_and_drop_beside(&comm);
        let left = comm.outstanding();
        assert_eq!((left.operations, left.bytes), (1, 1024));
        assert_eq!(comm.leave_within(SOON), Departure::Clean);
    });
}

fn start_and_drop_beside(comm: &Communicator) {
    drop(comm.start_all_reduce(vec![1_u32; 64], ReduceOp::Sum).expect("room"));
    let mut values = [1_u32; 4];
    comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
    assert_eq!(values, [2; 4]);
}

/// The call waits for a rank that calls only after the handle has been dropped.
#[test]
fn dropping_a_handle_waits_for_no_call() {
    let cluster = Cluster::start(1, 2);
    let is_dropped = Barrier::new(2);
    cluster.run("beside", 2, plain, |comm| {
        let handle = comm.start_all_reduce(vec![1_u32; 64], ReduceOp::Sum).expect("room");
        if comm.rank() == 0 {
            thread::scope(|scope| {
                let (calls, called) = channel();
                let comm = &comm;
                scope.spawn(move || {
                    calls.send(()).expect("the receiver exists");
                    comm.barrier().expect("the other rank calls");
                });
                called.recv().expect("the call has started");
                drop(handle);
                is_dropped.wait();
            });
        } else {
            is_dropped.wait();
            drop(handle);
            comm.barrier().expect("the other rank calls");
        }
        assert_eq!(comm.outstanding().operations, 0);
        comm.leave();
    });
}

/// Started operations of tree and ring with blocking calls and messages in between; some handles are dropped, the
/// others are waited for from last to first.
#[test]
fn started_operations_beside_schedules_all_have_their_own_results() {
    for configure in [plain as fn(&mut JoinConfig), over_udp] {
        let cluster = Cluster::start(1, 3);
        cluster.run("mixed", 3, configure, |comm| {
            let (rank, ranks) = (comm.rank(), comm.size());
            let sum = |nth: u32| ranks * nth + 3;
            let mut handles = Vec::new();
            for nth in 0..120_u32 {
                let algo = if nth % 2 == 0 { Algo::Tree } else { Algo::Ring };
                let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
                let mut values = vec![nth + rank; 500];
                match nth % 7 {
                    0 | 3 => {
                        let outcome = comm.all_reduce_with(&mut values, ReduceOp::Sum, &options).expect("a sum");
                        assert_eq!((values, outcome.path == Path::Tree), (vec![sum(nth); 500], nth % 2 == 0));
                    }
                    5 => {
                        let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                        let mut got = vec![0; 500];
                        comm.send_receive((&values, to), (&mut got, from), nth).expect("both are there");
                        assert_eq!(got, vec![nth + from; 500]);
                    }
                    6 => drop(comm.start_all_reduce_with(values, ReduceOp::Sum, &options).expect("room")),
                    _ => {
                        handles.push((nth, comm.start_all_reduce_with(values, ReduceOp::Sum, &options).expect("room")))
                    }
                }
            }
            for (nth, mut handle) in handles.into_iter().rev() {
                if nth % 5 == 0 {
                    while !handle.test() {}
                }
                assert_eq!(handle.wait().expect("a sum").0, vec![sum(nth); 500], "{nth}");
            }
            let mut values = [1_u32];
            comm.all_reduce(&mut values, ReduceOp::Sum).expect("a sum");
            assert_eq!(comm.outstanding().operations, 0);
            assert_eq!(comm.leave_within(SOON), Departure::Clean);
        });
    }
}

/// A rank waits for a host collective before it starts the next operation, which the others wait for: so they must run
/// that host collective, whose handle some of them have dropped.
#[test]
fn ranks_that_wait_in_different_orders_all_get_their_results() {
    let cluster = Cluster::start(1, 4);
    cluster.run("orders", 4, plain, |comm| {
        let by = |algo| CallOptions { algo: Some(algo), ..CallOptions::default() };
        let start = |algo| comm.start_all_reduce_with(vec![1_u32; 64], ReduceOp::Sum, &by(algo)).expect("room");
        let first = start(Algo::Ring);
        match comm.rank() {
            0 => {
                assert_eq!(first.wait().expect("a sum").0, [4; 64]);
                assert_eq!(start(Algo::Tree).wait().expect("a sum").0, [4; 64]);
            }
            1 => {
                drop(first);
                assert_eq!(start(Algo::Tree).wait().expect("a sum").0, [4; 64]);
            }
            2 => {
                let mut second = start(Algo::Tree);
                let begun = Instant::now();
                while !second.test() {
                    assert!(begun.elapsed() < SOON, "nobody runs the first operation");
                    thread::yield_now();
                }
                assert_eq!(second.wait().expect("a sum").0, [4; 64]);
                drop(first);
            }
            _ => {
                let mut values = [1_u32; 64];
                comm.all_reduce_with(&mut values, ReduceOp::Sum, &by(Algo::Tree)).expect("a sum");
                assert_eq!((values, first.wait().expect("a sum").0), ([4; 64], vec![4; 64]));
            }
        }
        assert_eq!(comm.outstanding().operations, 0);
        assert_eq!(comm.leave_within(SOON), Departure::Clean);
    });
}

/// Another thread drops the handle, in most rounds while the host collective waits for a rank.
#[test]
fn handle_dropped_while_its_host_collective_runs_leaves_nothing() {
    let cluster = Cluster::start(1, 2);
    let is_dropped = Barrier::new(2);
    cluster.run("running", 2, plain, |comm| {
        let by_ring = CallOptions { algo: Some(Algo::Ring), ..CallOptions::default() };
        let start = || comm.start_all_reduce_with(vec![1_u32; 64], ReduceOp::Sum, &by_ring).expect("room");
        for round in 0..40 {
            let (first, second) = (start(), start());
            if comm.rank() == 0 {
                thread::scope(|scope| {
                    let (waits, waiting) = channel();
                    scope.spawn(move || {
                        waits.send(()).expect("the receiver exists");
                        assert_eq!(second.wait().expect("a sum").0, [2; 64]);
                    });
                    waiting.recv().expect("it waits");
                    drop(first);
                    is_dropped.wait();
                });
            } else {
                is_dropped.wait();
                drop(first);
                assert_eq!(second.wait().expect("a sum").0, [2; 64]);
            }
            assert_eq!(comm.outstanding().operations, 0, "round {round}");
        }
        comm.leave();
    });
}

/// Outside the result, an in-place buffer still holds the unscaled input.
#[test]
fn started_premul_sum_scales_no_buffer_twice() {
    let cluster = Cluster::start(1, 2);
    cluster.run("premul", 2, plain, |comm| {
        let options = CallOptions { scalar: Some(3.0), ..CallOptions::default() };
        for algo in [Algo::Tree, Algo::Ring] {
            let options = CallOptions { algo: Some(algo), ..options };
            let handle = comm.start_all_reduce_with(vec![2.0_f64; 9], ReduceOp::PremulSum, &options).expect("room");
            assert_eq!(handle.wait().expect("a sum").0, [12.0; 9]);
        }
        let handle = comm.start_reduce(vec![2.0_f32; 9], ReduceOp::PremulSum, 1).expect("room");
        assert_eq!(handle.wait().expect("a sum").0, [if comm.rank() == 1 { 4.0 } else { 2.0 }; 9]);
        comm.leave();
    });
}

#[test]
fn cancelled_communicator_gives_everything_back() {
    for configure in [plain as fn(&mut JoinConfig), over_udp] {
        let cluster = Cluster::start(1, 2);
        let is_cancelled = Barrier::new(2);
        cluster.run("cancelled", 2, configure, |comm| {
            comm.barrier().expect("both are there");
            if comm.rank() == 1 {
                is_cancelled.wait();
                // The operation that both ranks started may have completed.
                let error = loop {
                    if let Err(error) = comm.all_reduce(&mut [7_u32; 256], ReduceOp::Sum) {
                        break error;
                    }
                };
                assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks[..] == [Rank(0)]), "{error}");
                return;
            }
            let mut handles: Vec<_> =
                (0..10).map(|_| comm.start_all_reduce(vec![7_u32; 256], ReduceOp::Sum).expect("room")).collect();
            comm.canceller().cancel();
            assert_eq!(handles.pop().expect("ten").wait().expect_err("cancelled").error, Error::Cancelled);
            handles.truncate(5);
            assert_eq!(comm.outstanding().operations, 5);
            drop(handles);
            assert_eq!((comm.outstanding().operations, comm.outstanding().bytes), (0, 0));
            assert!(matches!(comm.leave_within(SOON), Departure::Failed(_)));
            is_cancelled.wait();
        });
    }
}

/// Handles keep a dropped communicator alive. When the last one is dropped without a leave, the rank is lost to the
/// others.
#[test]
fn dropped_communicator_is_a_lost_rank_when_its_last_handle_is_gone() {
    let cluster = Cluster::start(1, 2);
    let is_there = Barrier::new(2);
    cluster.run("gone", 2, plain, |comm| {
        let handle = comm.start_all_reduce(vec![1_u32; 64], ReduceOp::Sum).expect("room");
        if comm.rank() == 1 {
            drop(comm);
            assert_eq!(handle.wait().expect("a sum").0, [2; 64]);
            is_there.wait();
            return;
        }
        assert_eq!(handle.wait().expect("a sum").0, [2; 64]);
        is_there.wait();
        let error = comm.barrier().expect_err("the other rank is lost");
        assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks[..] == [Rank(1)]), "{error}");
        assert!(matches!(comm.leave_within(SOON), Departure::Failed(_)));
    });
}

/// Also those that the survivors wait for only after the communicator has ended.
#[test]
fn all_started_operations_end_with_the_error_of_a_dead_rank() {
    let cluster = Cluster::start(1, 3);
    for algos in [[Algo::Ring; 3], [Algo::Ring, Algo::Tree, Algo::Pairwise], [Algo::Tree, Algo::Ring, Algo::Tree]] {
        let have_started = Barrier::new(3);
        let errors = cluster.run("dead", 3, plain, |comm| {
            comm.barrier().expect("all are there");
            if comm.rank() == 1 {
                have_started.wait();
                return Vec::new();
            }
            let start = |algo| {
                let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
                comm.start_all_reduce_with(vec![1_u32; 1000], ReduceOp::Sum, &options).expect("started")
            };
            let mut handles = algos.map(start).map(Some);
            have_started.wait();
            let orders: [[usize; 3]; 2] = [[0, 1, 2], [2, 0, 1]];
            let waited = orders[comm.rank() as usize / 2].map(|k| handles[k].take().expect("waited for once").wait());
            waited.map(|result| Error::from(result.expect_err("rank 1 is dead"))).to_vec()
        });
        for error in errors.iter().flatten() {
            let is_named = matches!(error, Error::RanksFailed { ranks, operation: 1, .. } if ranks[..] == [Rank(1)]);
            assert!(is_named, "{algos:?}: {error}");
        }
    }
}

/// A rank that does not fetch its result delays the others' leave until its timeout, and no longer.
#[test]
fn rank_leaves_unsettled_when_its_time_is_over() {
    let cluster = Cluster::start(1, 2);
    let has_left = Barrier::new(2);
    cluster.run("unsettled", 2, plain, |comm| {
        let options = CallOptions { algo: Some(Algo::Tree), ..CallOptions::default() };
        let handle = comm.start_all_reduce_with(vec![1_u32; 8], ReduceOp::Sum, &options).expect("room");
        if comm.rank() == 1 {
            has_left.wait();
            assert_eq!(handle.wait().expect("a sum").0, [2; 8]);
            return;
        }
        assert_eq!(handle.wait().expect("a sum").0, [2; 8]);
        let limit = Duration::from_millis(200);
        let departure = comm.leave_within(limit);
        assert!(matches!(departure, Departure::Unconfirmed { waited } if waited >= limit), "{departure:?}");
        has_left.wait();
    });
}

/// Messages with dropped handles are still delivered, and then free their memory. A sender far ahead waits for room.
#[test]
fn messages_wait_for_room_and_leave_nothing() {
    const MESSAGES: u32 = 5000;
    let cluster = Cluster::start(1, 2);
    cluster.run("messages", 2, over_udp, |comm| {
        if comm.rank() == 0 {
            for nth in 0..MESSAGES {
                drop(comm.start_send(vec![nth; 1000], 1, 0).expect("room within the deadline"));
            }
            comm.send(&[MESSAGES], 1, 0).expect("the last message");
        } else {
            for nth in 0..MESSAGES {
                let mut values = [0; 1000];
                comm.receive(&mut values, 0, 0).expect("the next message");
                assert_eq!(values, [nth; 1000]);
            }
            let last = comm.start_receive::<u32>(1, 0, 0).expect("room");
            assert_eq!(last.wait().expect("the last message"), [MESSAGES]);
        }
        let left = comm.outstanding();
        assert_eq!((left.messages, left.bytes), (0, 0));
        comm.leave();
    });
}
