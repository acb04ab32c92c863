//! Ranks that are in no call, or late, when the others need them.

use crate::common::{Cluster, plain};
use crate::death::{Death, WAYS, soon};
use crate::work::{assert_sum, filled, in_small_chunks, value};
use std::thread;
use sumac::{Algo, Communicator, JoinConfig, ReduceOp};
use sumac_firmware::emulated::BusConfig;
use sumac_hal::op::{Dtype, OpDesc};

const RANKS: u32 = 3;
const LEN: usize = 60_000;

/// Wait, without a call that would drive anything, until the communicator has been repaired.
fn until_repaired(comm: &Communicator) {
    let desc = OpDesc::all_reduce(Dtype::I64, ReduceOp::Sum, LEN as u64);
    while comm.explain(&desc, Algo::Tree).chosen.is_some() {
        thread::yield_now();
    }
}

fn sum(comm: &Communicator, op: u64) -> bool {
    let mut buffer = filled(comm, op, LEN);
    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
    assert_sum(&buffer, op, RANKS, LEN);
    outcome.repaired
}

/// The device has written all results to the last rank's memory, and has used its slots again; the rank has not looked
/// yet, and does not before its thread for repairs does. The others have returned, and have nothing any more.
#[test]
fn what_was_delivered_and_not_looked_at_is_not_lost() {
    let mut cluster = Cluster::start_on(1, RANKS as usize, BusConfig::default(), in_small_chunks());
    let death = Death::of(&mut cluster, RANKS);
    cluster.run("delivered", RANKS, soon(plain), |comm| {
        let mut buffer = comm.alloc::<i64>(LEN).expect("memory");
        (0..LEN).for_each(|i| buffer[i] = value(0, comm.rank(), i));
        let started = comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started");
        let is_last = comm.rank() == RANKS - 1;
        let finish = |started: sumac::Handle<sumac::Buffer<i64>>| {
            assert_sum(&started.wait().expect("a sum").0, 0, RANKS, LEN);
        };
        if is_last {
            death.strikes(comm.rank());
            until_repaired(&comm);
            finish(started);
        } else {
            finish(started);
            death.strikes(comm.rank());
        }
        sum(&comm, 1);
    });
}

/// The same where the others have left the job, so that nobody is there to repair anything with.
#[test]
fn what_was_delivered_is_there_though_the_others_have_left() {
    let mut cluster = Cluster::start_on(1, RANKS as usize, BusConfig::default(), in_small_chunks());
    let death = Death::of(&mut cluster, RANKS);
    cluster.run("left", RANKS, soon(plain), |comm| {
        let mut buffer = comm.alloc::<i64>(LEN).expect("memory");
        (0..LEN).for_each(|i| buffer[i] = value(0, comm.rank(), i));
        let started = comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started");
        let rank = comm.rank();
        if rank < RANKS - 1 {
            assert_sum(&started.wait().expect("a sum").0, 0, RANKS, LEN);
            comm.leave();
            return death.strikes(rank);
        }
        death.strikes(rank);
        assert_sum(&started.wait().expect("a sum").0, 0, RANKS, LEN);
    });
}

/// One rank has not entered the operation, which it does only when all have got over the death.
#[test]
fn a_rank_that_is_late_takes_part() {
    for configure in WAYS {
        let mut cluster = Cluster::start_on(1, RANKS as usize, BusConfig::default(), in_small_chunks());
        let death = Death::of(&mut cluster, RANKS);
        let repaired = cluster.run("late", RANKS, soon(configure), |comm| {
            sum(&comm, 0);
            death.strikes(comm.rank());
            if comm.rank() == 1 {
                until_repaired(&comm);
            }
            sum(&comm, 1)
        });
        // The first of the others to call has asked for the repair, perhaps before the second one called.
        assert!(
            !repaired[1] && (repaired[0] || repaired[2]),
            "{repaired:?}: it was repaired before the late rank came"
        );
    }
}

/// The controller has gone before the device does: nobody is told, nobody is given another tree, and schedules do.
#[test]
fn ranks_get_over_a_device_without_a_controller() {
    for configure in WAYS {
        let mut cluster = Cluster::start_on(1, RANKS as usize, BusConfig::default(), in_small_chunks());
        let death = Death::of(&mut cluster, RANKS);
        let controller = cluster.controller.local_addr();
        let joined = std::sync::Barrier::new(RANKS as usize + 1);
        thread::scope(|scope| {
            let (death, joined) = (&death, &joined);
            for rank in 0..RANKS {
                scope.spawn(move || {
                    let mut config = JoinConfig::new(controller, "alone", rank, RANKS);
                    soon(configure)(&mut config);
                    let comm = Communicator::join(config).expect("join");
                    sum(&comm, 0);
                    joined.wait();
                    // The controller goes.
                    joined.wait();
                    let started = comm.start_all_reduce(filled(&comm, 1, LEN), ReduceOp::Sum).expect("started");
                    death.strikes(rank);
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
