//! Prepared operations that were complete at once when they last ran: the next run notices what has changed since.

use std::sync::Barrier;
use std::time::Duration;
use sumac::comm::Prepared;
use sumac::testing::LocalCluster;
use sumac::{Algo, CallOptions, Communicator, Dtype, Error, OpDesc, ReduceOp};
use sumac_hal::ids::Rank;

const LEN: usize = 3;

/// Runs until nothing but the board is used: connections are made and shared memory takes over.
const RUNS: u32 = 200;

/// The deadline of runs that must fail.
const SHORT: Duration = Duration::from_millis(300);

fn at_once() -> CallOptions {
    CallOptions { algo: Some(Algo::OneShot), ..CallOptions::default() }
}

fn sum_of(len: usize) -> OpDesc {
    OpDesc::all_reduce(Dtype::U32, ReduceOp::Sum, len as u64)
}

fn prepare(comm: &Communicator, desc: &OpDesc) -> Prepared<Vec<u32>> {
    comm.prepare(desc, vec![0; desc.count as usize], None, &at_once()).expect("possible")
}

/// Run a sum, and check it.
fn run_sum(comm: &Communicator, prepared: &mut Prepared<Vec<u32>>, round: u32) -> Result<(), Error> {
    prepared.buffer().expect("at rest").fill(round + comm.rank());
    prepared.run()?;
    assert_eq!(prepared.buffer().expect("at rest"), &[2 * round + 1; LEN], "round {round}");
    Ok(())
}

/// Return a sum that has been run until it is settled.
fn settled_sum(comm: &Communicator) -> Prepared<Vec<u32>> {
    let mut prepared = prepare(comm, &sum_of(LEN));
    (0..RUNS).for_each(|round| run_sum(comm, &mut prepared, round).expect("a sum"));
    prepared
}

/// Run on two ranks, each with a sum that is settled.
fn on_two(check: impl Fn(Communicator, Prepared<Vec<u32>>) + Sync) {
    LocalCluster::start(2).expect("a cluster").run(|comm| {
        let prepared = settled_sum(&comm);
        check(comm, prepared);
    });
}

#[test]
fn other_operations_between_two_runs_keep_their_turn() {
    on_two(|comm, mut prepared| {
        let own = comm.rank();
        let mut broadcast = prepare(&comm, &OpDesc::broadcast(Dtype::U32, Rank(1), 2));
        for round in 0..RUNS {
            run_sum(&comm, &mut prepared, round).expect("a sum");
            *broadcast.buffer().expect("at rest") = vec![round * own; 2];
            broadcast.run().expect("a broadcast");
            assert_eq!(broadcast.buffer(), Some(&mut vec![round; 2]));
            let mut values = [round + own; 4];
            let algo = [Algo::Ring, Algo::OneShot, Algo::Tree][round as usize % 3];
            let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
            comm.all_reduce_with(&mut values, ReduceOp::Sum, &options).expect("a sum");
            assert_eq!(values, [2 * round + 1; 4], "{algo}");
            run_sum(&comm, &mut prepared, round).expect("a sum");
            let mut received = [0];
            comm.send_receive((&[round], 1 - own), (&mut received, 1 - own), round).expect("a message");
            assert_eq!(received, [round]);
        }
        comm.leave();
    });
}

/// One rank starts what the other calls: for both, it comes first.
#[test]
fn operation_that_was_started_runs_before_a_settled_one() {
    on_two(|comm, mut prepared| {
        let ring = CallOptions { algo: Some(Algo::Ring), ..CallOptions::default() };
        for round in 0..RUNS {
            let mut values = vec![round + comm.rank(); 4];
            if comm.rank() == 0 {
                let handle = comm.start_all_reduce_with(values, ReduceOp::Sum, &ring).expect("room");
                run_sum(&comm, &mut prepared, round).expect("a sum");
                values = handle.wait().expect("a sum").0;
            } else {
                comm.all_reduce_with(&mut values, ReduceOp::Sum, &ring).expect("a sum");
                run_sum(&comm, &mut prepared, round).expect("a sum");
            }
            assert_eq!(values, [2 * round + 1; 4]);
            run_sum(&comm, &mut prepared, round).expect("a sum");
        }
        comm.leave();
    });
}

#[test]
fn settled_operations_that_differ_are_a_mismatch_on_both_ranks() {
    on_two(|comm, mut prepared| {
        let mut product = prepare(&comm, &OpDesc { op: Some(ReduceOp::Prod), ..sum_of(LEN) });
        (0..RUNS).for_each(|_| drop(product.run().expect("a product")));
        run_sum(&comm, &mut prepared, 1).expect("a sum");
        let result = if comm.rank() == 0 { prepared.run() } else { product.run() };
        let error = result.expect_err("a sum and a product");
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let error = prepared.run().expect_err("the communicator has ended");
        assert!(matches!(error, Error::Ended(_)), "{error}");
    });
}

/// The root of a broadcast waits for nobody, so that only what it has been told can stop it.
#[test]
fn settled_run_fails_once_the_communicator_is_cancelled() {
    on_two(|comm, mut prepared| {
        let mut broadcast = prepare(&comm, &OpDesc::broadcast(Dtype::U32, Rank(0), 2));
        (0..RUNS).for_each(|_| drop(broadcast.run().expect("a broadcast")));
        run_sum(&comm, &mut prepared, 1).expect("a sum");
        if comm.rank() == 0 {
            comm.canceller().cancel();
            assert_eq!(broadcast.run().expect_err("it is cancelled"), Error::Cancelled);
            let error = broadcast.run().expect_err("the communicator has ended");
            assert!(matches!(error, Error::Ended(_)), "{error}");
        } else {
            let error = run_sum(&comm, &mut prepared, 2).expect_err("the other rank has ended");
            assert!(matches!(&error, Error::RanksFailed { ranks, .. } if ranks[..] == [Rank(0)]), "{error}");
        }
    });
}

/// The rank that is alone fails by its deadline; the other one, which comes too late, is told of it.
#[test]
fn settled_run_ends_at_its_deadline_and_the_other_rank_hears_of_it() {
    let has_ended = Barrier::new(2);
    on_two(|comm, mut prepared| {
        let options = CallOptions { deadline: Some(SHORT), ..at_once() };
        let mut limited = comm.prepare(&sum_of(LEN), vec![0; LEN], None, &options).expect("possible");
        (0..RUNS).for_each(|round| run_sum(&comm, &mut limited, round).expect("a sum"));
        run_sum(&comm, &mut prepared, 1).expect("a sum");
        if comm.rank() == 0 {
            let error = limited.run().expect_err("the other rank does not call it");
            assert!(matches!(error, Error::Deadline { waited, .. } if waited >= SHORT), "{error}");
            drop((comm, limited, prepared));
            has_ended.wait();
            return;
        }
        has_ended.wait();
        // What the other rank has posted is there: one run may complete.
        let error = (0..2).find_map(|_| prepared.run().err()).expect("the other rank has ended");
        // By the controller, or by the other rank.
        let names_other = matches!(&error, Error::RanksFailed { ranks, .. } if ranks[..] == [Rank(0)]);
        assert!(names_other || matches!(error, Error::Schedule(_) | Error::Deadline { .. }), "{error}");
    });
}

/// The owner of a vector may change its length between two runs.
#[test]
fn settled_run_on_a_buffer_of_another_length_is_refused_and_has_no_effect() {
    on_two(|comm, mut prepared| {
        for round in 0..RUNS {
            if round % 2 == comm.rank() {
                for len in [LEN - 1, LEN + 1, 0] {
                    prepared.buffer().expect("at rest").resize(len, 1);
                    let refused = prepared.run();
                    assert!(matches!(refused, Err(Error::Argument(_))), "{len}: {refused:?}");
                }
                *prepared.buffer().expect("at rest") = vec![0; LEN];
            }
            run_sum(&comm, &mut prepared, round).expect("a sum");
            run_sum(&comm, &mut prepared, round).expect("a sum");
        }
        comm.leave();
    });
}

/// Two threads use one communicator in turns.
#[test]
fn settled_run_notices_what_other_threads_have_done() {
    on_two(|comm, mut prepared| {
        let (turn, own) = (Barrier::new(2), comm.rank());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..RUNS {
                    turn.wait();
                    let mut values = [round + own; 2];
                    comm.all_reduce_with(&mut values, ReduceOp::Sum, &at_once()).expect("a sum");
                    assert_eq!(values, [2 * round + 1; 2]);
                    turn.wait();
                }
            });
            for round in 0..RUNS {
                run_sum(&comm, &mut prepared, round).expect("a sum");
                turn.wait();
                turn.wait();
                run_sum(&comm, &mut prepared, round).expect("a sum");
            }
        });
        comm.leave();
    });
}

/// A prepared operation holds the communicator, so it may outlive the call to leave.
#[test]
fn settled_run_after_its_rank_has_left_is_refused() {
    on_two(|comm, mut prepared| {
        let mut broadcast = prepare(&comm, &OpDesc::broadcast(Dtype::U32, Rank(comm.rank()), 2));
        comm.leave();
        for prepared in [&mut prepared, &mut broadcast] {
            assert_eq!(prepared.run().expect_err("it has left"), Error::Left);
            let started = prepared.start().and_then(|()| prepared.wait());
            assert_eq!(started.expect_err("it has left"), Error::Left);
        }
    });
}
