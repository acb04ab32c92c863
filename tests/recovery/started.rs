//! Started operations beside host collectives and messages when the device is lost.

use crate::common::{Cluster, plain};
use crate::loss::{DeviceLoss, TRANSPORTS, with_deadline};
use crate::workload::{assert_sum, filled, in_small_chunks, value};
use sumac::{Algo, CallOptions, Communicator, Error, JoinConfig, ReduceOp};
use sumac_firmware::emulated::ZeroCopyConfig;

const RANKS: u32 = 3;

/// Elements of an operation longer than a window: it cannot end before a rank waits for it.
const LONG: usize = 200_000;

fn cluster() -> Cluster {
    Cluster::start_zero_copy(1, RANKS as usize, ZeroCopyConfig::default(), in_small_chunks())
}

fn start(comm: &Communicator, op: u64, len: usize) -> sumac::Handle<Vec<i64>> {
    comm.start_all_reduce(filled(comm, op, len), ReduceOp::Sum).expect("started")
}

/// All ranks have started an operation. Two ranks block in `between`, which the third enters only after it has waited
/// for the operation. So the two must take part in the recovery from within `between`.
fn recovers_during(between: impl Fn(&Communicator) + Sync) {
    for configure in TRANSPORTS {
        let mut cluster = cluster();
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        cluster.run("within", RANKS, with_deadline(configure), |comm| {
            let started = start(&comm, 0, LONG);
            loss.strike(comm.rank());
            let finish = |started: sumac::Handle<Vec<i64>>| {
                let (sum, outcome) = started.wait().expect("a sum");
                assert_sum(&sum, 0, RANKS, LONG);
                assert!(outcome.recovered);
            };
            if comm.rank() == RANKS - 1 {
                finish(started);
                between(&comm);
            } else {
                between(&comm);
                finish(started);
            }
            comm.barrier().expect("all are there");
            comm.leave();
        });
    }
}

#[test]
fn rank_inside_a_schedule_takes_part_in_recovery() {
    recovers_during(|comm| {
        let input: Vec<u64> = (0..u64::from(RANKS)).map(|to| u64::from(comm.rank()) * 10 + to).collect();
        let mut output = vec![0; RANKS as usize];
        comm.all_to_all(&input, &mut output).expect("blocks");
        assert!((0..).zip(&output).all(|(from, &block)| block == from * 10 + u64::from(comm.rank())), "{output:?}");
    });
}

#[test]
fn rank_waiting_for_a_message_takes_part_in_recovery() {
    recovers_during(|comm| {
        let last = RANKS - 1;
        if comm.rank() == last {
            (0..last).for_each(|to| comm.send(&[u64::from(to) + 7; 100], to, 1).expect("a receiver"));
        } else {
            let mut values = [0_u64; 100];
            comm.receive(&mut values, last, 1).expect("a message");
            assert_eq!(values, [u64::from(comm.rank()) + 7; 100]);
        }
    });
}

/// Ranks wait for a ring and two operations of the tree in different orders.
#[test]
fn different_wait_orders_survive_device_loss() {
    for configure in TRANSPORTS {
        let mut cluster = cluster();
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        cluster.run("orders", RANKS, with_deadline(configure), |comm| {
            let ring = CallOptions { algo: Some(Algo::Ring), ..CallOptions::default() };
            let long = start(&comm, 0, LONG);
            let by_ring = comm.start_all_reduce_with(filled(&comm, 1, 999), ReduceOp::Sum, &ring).expect("started");
            let behind = start(&comm, 2, LONG);
            loss.strike(comm.rank());
            let finish = |handle: sumac::Handle<Vec<i64>>, op, len| {
                assert_sum(&handle.wait().expect("a sum").0, op, RANKS, len);
            };
            if comm.rank() == 0 {
                finish(behind, 2, LONG);
                finish(long, 0, LONG);
                finish(by_ring, 1, 999);
            } else {
                finish(by_ring, 1, 999);
                finish(long, 0, LONG);
                finish(behind, 2, LONG);
            }
        });
    }
}

/// Operations that completed before the loss keep their results, whether or not the rank has tested them, though it
/// waits only after the loss.
#[test]
fn operation_completed_before_the_loss_keeps_its_buffer() {
    for configure in TRANSPORTS {
        let mut cluster = cluster();
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        cluster.run("ended", RANKS, with_deadline(configure), |comm| {
            let mut ended = start(&comm, 0, 1000);
            while !ended.test() {
                std::thread::yield_now();
            }
            let unseen = start(&comm, 1, 1000);
            let forgotten = start(&comm, 2, LONG);
            std::mem::forget(forgotten);
            loss.strike(comm.rank());
            let mut last = start(&comm, 3, LONG);
            while !last.test() {
                std::thread::yield_now();
            }
            for (handle, op, len) in [(ended, 0, 1000), (unseen, 1, 1000), (last, 3, LONG)] {
                let (sum, _) = handle.wait().expect("a sum");
                assert_sum(&sum, op, RANKS, len);
            }
        });
    }
}

/// Allocating memory for the lost device detects the loss before the operation starts.
#[test]
fn operation_started_after_the_loss_runs_on_the_replacement() {
    let mut cluster = cluster();
    let loss = DeviceLoss::of(&mut cluster, RANKS);
    cluster.run("start", RANKS, with_deadline(plain), |comm| {
        comm.barrier().expect("all are there");
        loss.strike(comm.rank());
        let mut buffer = comm.alloc::<i64>(1000).expect("memory");
        let values: Vec<i64> = (0..1000).map(|i| value(5, comm.rank(), i)).collect();
        buffer.copy_from_slice(&values);
        let started = comm.start_all_reduce(buffer, ReduceOp::Sum).expect("started");
        let (sum, _) = started.wait().expect("a sum");
        assert_sum(&sum, 5, RANKS, 1000);
    });
}

/// With recovery disabled, every rank gets an error that names the loss, at once.
#[test]
fn disabled_recovery_ends_the_communicator_on_loss() {
    for configure in TRANSPORTS {
        let mut cluster = cluster();
        let loss = DeviceLoss::of(&mut cluster, RANKS);
        let off = move |config: &mut JoinConfig| {
            with_deadline(configure)(config);
            config.recover = false;
        };
        cluster.run("off", RANKS, off, |comm| {
            let started = start(&comm, 0, LONG);
            loss.strike(comm.rank());
            let failed = started.wait().expect_err("no device");
            assert_eq!(failed.buffer.map(|buffer| buffer.len()), Some(LONG));
            let error = failed.error;
            assert!(matches!(error, Error::PathLost | Error::DeviceLost { .. } | Error::GroupLost), "{error}");
            assert!(matches!(comm.barrier(), Err(Error::Ended(_))));
            loss.sync();
        });
    }
}
