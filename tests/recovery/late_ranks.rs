//! Ranks that are late, or in no call, when the others need them for recovery.

use crate::common::{Cluster, plain};
use crate::loss::{DeviceLoss, TRANSPORTS, with_deadline};
use crate::workload::{assert_sum, filled, in_small_chunks, value};
use std::thread;
use sumac::{Algo, Communicator, JoinConfig, ReduceOp};
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::op::{Dtype, OpDesc};

const RANKS: u32 = 3;
const LEN: usize = 60_000;

/// Wait, without a call that makes progress, until the communicator has recovered.
fn wait_until_recovered(comm: &Communicator) {
    let desc = OpDesc::all_reduce(Dtype::I64, ReduceOp::Sum, LEN as u64);
    while comm.explain(&desc, Algo::Tree).chosen.is_some() {
        thread::yield_now();
    }
}

fn sum(comm: &Communicator, op: u64) -> bool {
    let mut buffer = filled(comm, op, LEN);
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    assert_sum(&buffer, op, RANKS, LEN);
    outcome.recovered
}

/// The device has written all results to the last rank's memory and reused its slots. That rank has not polled yet; its
/// recovery thread must find the results, because the other ranks have returned and hold nothing any more.
#[test]
fn result_delivered_before_the_loss_is_kept() {
    let mut cluster = Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig::default(), in_small_chunks());
    let loss = DeviceLoss::of(&mut cluster, RANKS);
    cluster.run("delivered", RANKS, with_deadline(plain), |comm| {
        let mut buffer = comm.alloc::<i64>(LEN).expect("memory");
        (0..LEN).for_each(|i| buffer[i] = value(0, comm.rank(), i));
        let started = comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started");
        let is_last = comm.rank() == RANKS - 1;
        let finish = |started: sumac::Handle<sumac::Buffer<i64>>| {
            assert_sum(&started.wait().expect("a sum").0, 0, RANKS, LEN);
        };
        if is_last {
            loss.strike(comm.rank());
            wait_until_recovered(&comm);
            finish(started);
        } else {
            finish(started);
            loss.strike(comm.rank());
        }
        sum(&comm, 1);
    });
}

/// As above, but the others have left the job, so the last rank has no peers to recover with.
#[test]
fn result_delivered_before_the_others_left_is_kept() {
    let mut cluster = Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig::default(), in_small_chunks());
    let loss = DeviceLoss::of(&mut cluster, RANKS);
    cluster.run("left", RANKS, with_deadline(plain), |comm| {
        let mut buffer = comm.alloc::<i64>(LEN).expect("memory");
        (0..LEN).for_each(|i| buffer[i] = value(0, comm.rank(), i));
        let started = comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started");
        let rank = comm.rank();
        if rank < RANKS - 1 {
            assert_sum(&started.wait().expect("a sum").0, 0, RANKS, LEN);
            comm.leave();
            return loss.strike(rank);
        }
        loss.strike(rank);
        assert_sum(&started.wait().expect("a sum").0, 0, RANKS, LEN);
    });
}

/// One rank enters the operation only after all ranks have recovered.
#[test]
fn late_rank_takes_part_in_recovery() {
    for configure in TRANSPORTS {
        let mut cluster = Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig::default(), in_small_chunks());
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        let recovered = cluster.run("late", RANKS, with_deadline(configure), |comm| {
            sum(&comm, 0);
            loss.strike(comm.rank());
            if comm.rank() == 1 {
                wait_until_recovered(&comm);
            }
            sum(&comm, 1)
        });
        // The first of the other ranks to call starts the recovery, perhaps before the second one calls.
        assert!(
            !recovered[1] && (recovered[0] || recovered[2]),
            "{recovered:?}: the recovery must end before the late rank calls"
        );
    }
}

/// The controller stops before the device is lost: there is no other tree, and host collectives complete the operation.
#[test]
fn device_loss_without_controller_is_recovered() {
    for configure in TRANSPORTS {
        let mut cluster = Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig::default(), in_small_chunks());
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        let controller = cluster.controller.local_addr();
        let joined = std::sync::Barrier::new(RANKS as usize + 1);
        thread::scope(|scope| {
            let (loss, joined) = (&loss, &joined);
            for rank in 0..RANKS {
                scope.spawn(move || {
                    let mut config = JoinConfig::new(controller, "alone", rank, RANKS);
                    with_deadline(configure)(&mut config);
                    let comm = Communicator::join(config).expect("join");
                    sum(&comm, 0);
                    joined.wait();
                    // The controller stops here.
                    joined.wait();
                    let started = comm.start_all_reduce(filled(&comm, 1, LEN), ReduceOp::Sum).expect("started");
                    loss.strike(rank);
                    let (buffer, _) = started.wait().expect("a sum");
                    assert_sum(&buffer, 1, RANKS, LEN);
                    sum(&comm, 2);
                });
            }
            joined.wait();
            drop(cluster);
            joined.wait();
        });
    }
}
