//! Host collectives beside the tree, which only some ranks have begun when the tree is lost and another one replaces
//! it.

use crate::common::Cluster;
use crate::loss::{DeviceLoss, TRANSPORTS, with_deadline};
use crate::workload::{assert_sum, filled, prefer_tree};
use std::sync::mpsc::channel;
use std::thread;
use sumac::{Algo, CallOptions, Communicator, Path, ReduceOp};

const RANKS: u32 = 3;

const LEN: usize = 30_000;

/// Wait, without a call that makes progress, until the communicator has recovered.
fn wait_until_recovered(comm: &Communicator) {
    while comm.recoveries().count == 0 {
        thread::yield_now();
    }
}

fn by(algo: Algo) -> CallOptions {
    CallOptions { algo: Some(algo), ..CallOptions::default() }
}

fn sum_in_tree(comm: &Communicator, op: u64) {
    let mut buffer = filled(comm, op, LEN);
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    assert_sum(&buffer, op, RANKS, LEN);
    assert_eq!(outcome.path, Path::Tree, "operation {op}");
}

fn sum_by_ranks(comm: &Communicator, op: u64) {
    let mut buffer = filled(comm, op, LEN);
    comm.all_reduce_with(&mut buffer, ReduceOp::Sum, &by(Algo::Ring)).expect("a sum");
    assert_sum(&buffer, op, RANKS, LEN);
}

/// Run `first` on the first `ahead` ranks, lose the tree's device, wait until all have another tree, and run `first` on
/// the other ranks; then `then` on all.
fn with_ranks_ahead<R>(ahead: u32, first: impl Fn(&Communicator) -> R + Sync, then: impl Fn(&Communicator, R) + Sync) {
    for configure in TRANSPORTS {
        let mut cluster = Cluster::spare(2, prefer_tree());
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        cluster.run("ahead", RANKS, with_deadline(configure), |comm| {
            sum_in_tree(&comm, 0);
            let is_ahead = comm.rank() < ahead;
            let begun = is_ahead.then(|| first(&comm));
            loss.strike_root(comm.rank());
            wait_until_recovered(&comm);
            loss.sync();
            let begun = begun.unwrap_or_else(|| first(&comm));
            then(&comm, begun);
            sum_in_tree(&comm, 3);
            sum_by_ranks(&comm, 4);
            sum_in_tree(&comm, 5);
            comm.leave();
        });
    }
}

#[test]
fn host_collective_started_by_some_ranks_before_the_loss_completes() {
    for ahead in 1..RANKS {
        with_ranks_ahead(
            ahead,
            |comm| comm.start_all_reduce_with(filled(comm, 2, LEN), ReduceOp::Sum, &by(Algo::Ring)).expect("started"),
            |_, started| assert_sum(&started.wait().expect("a sum").0, 2, RANKS, LEN),
        );
    }
}

/// An operation of the tree that was started behind a host collective starts again behind it.
#[test]
fn operation_started_behind_a_host_collective_before_the_loss_completes() {
    for ahead in 1..RANKS {
        with_ranks_ahead(
            ahead,
            |comm| {
                let ring = comm.start_all_reduce_with(filled(comm, 1, LEN), ReduceOp::Sum, &by(Algo::Ring));
                let in_tree = comm.start_all_reduce(filled(comm, 2, LEN), ReduceOp::Sum);
                (ring.expect("started"), in_tree.expect("started"))
            },
            |_, (ring, in_tree)| {
                assert_sum(&in_tree.wait().expect("a sum").0, 2, RANKS, LEN);
                assert_sum(&ring.wait().expect("a sum").0, 1, RANKS, LEN);
            },
        );
    }
}

/// One rank blocks in a host collective when the only device is lost; it has started an operation before it. The others
/// have called neither. The earlier operation is a host collective now, and must not run behind the later one.
#[test]
fn operation_started_before_a_running_host_collective_stays_before_it() {
    for configure in TRANSPORTS {
        let mut cluster = Cluster::spare(1, prefer_tree());
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        cluster.run("blocked", RANKS, with_deadline(configure), |comm| {
            sum_in_tree(&comm, 0);
            let (begun, has_begun) = channel();
            let in_order = |comm: &Communicator| {
                let started = comm.start_all_reduce(filled(comm, 1, LEN), ReduceOp::Sum).expect("started");
                begun.send(()).expect("it listens");
                sum_by_ranks(comm, 2);
                assert_sum(&started.wait().expect("a sum").0, 1, RANKS, LEN);
            };
            thread::scope(|scope| {
                let is_ahead = comm.rank() == 0;
                if is_ahead {
                    scope.spawn(|| in_order(&comm));
                    has_begun.recv().expect("the first has been started");
                }
                loss.strike(comm.rank());
                if !is_ahead {
                    wait_until_recovered(&comm);
                    in_order(&comm);
                }
            });
            sum_by_ranks(&comm, 3);
            comm.leave();
        });
    }
}
