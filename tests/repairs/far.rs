//! Ranks on other hosts than their device, which dies, or to which the links go down: nobody can read what it had published.

use crate::common::Cluster;
use crate::work::{Kill, assert_sum, filled, from_afar, in_small_chunks, until_repaired};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::ReduceOp;
use sumac_firmware::emulated::BusConfig;
use sumac_hal::remote::Exchange;

/// Elements of an operation: several windows.
const LEN: usize = 100_000;

/// Moments after the beginning of an operation.
fn moments() -> impl Iterator<Item = (u32, Duration)> {
    (0..6).map(|nth| (nth, Duration::from_micros(271) * nth))
}

#[test]
fn a_device_that_dies_with_its_redo_slots_is_got_over() {
    for (leaves, registered) in [(1, true), (1, false), (2, true)] {
        let mut repaired = 0;
        for (nth, delay) in moments() {
            let exchange = format!("exchange:death-{leaves}-{registered}-{nth}");
            let bus = (BusConfig::default(), &*exchange);
            let mut cluster = Cluster::start_remote(leaves, 4 / leaves, bus, in_small_chunks());
            let kill = Kill { device: leaves - 1, after_operations: 3, delay };
            let seen = until_repaired(&mut cluster, 4, kill, from_afar(&exchange), |comm, op| {
                let values = filled(comm, op, LEN);
                let outcome = if registered {
                    // In place: nothing else has the inputs.
                    let mut buffer = comm.alloc(LEN).expect("memory");
                    buffer.copy_from_slice(&values);
                    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum);
                    assert_sum(&buffer, op, 4, LEN);
                    outcome
                } else {
                    let mut buffer = values;
                    let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum);
                    assert_sum(&buffer, op, 4, LEN);
                    outcome
                };
                outcome.expect("a sum")
            });
            repaired += seen.repaired.len();
        }
        assert!(repaired > 0, "no device has died under one of the long operations");
    }
}

/// The device lives, and so do the ranks; nothing arrives any more.
#[test]
fn links_that_go_down_under_an_operation_are_got_over() {
    const OPERATIONS: u64 = 12;
    let repaired = AtomicU32::new(0);
    for (nth, delay) in moments() {
        let exchange = format!("exchange:cut-{nth}");
        let cluster = Cluster::start_remote(1, 3, (BusConfig::default(), &exchange), in_small_chunks());
        cluster.run("cut", 3, from_afar(&exchange), |comm| {
            for op in 0..OPERATIONS {
                let mut buffer = comm.alloc(LEN).expect("memory");
                buffer.copy_from_slice(&filled(&comm, op, LEN));
                let outcome = thread::scope(|scope| {
                    if op == 3 && comm.rank() == 0 {
                        scope.spawn(|| {
                            // The moment is what is tested.
                            let at = Instant::now() + delay;
                            while Instant::now() < at {
                                thread::yield_now();
                            }
                            Exchange::named(&exchange).expect("one of this process").cut();
                        });
                    }
                    comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum")
                });
                assert_sum(&buffer, op, 3, LEN);
                repaired.fetch_add(u32::from(outcome.repaired), Ordering::Relaxed);
            }
            comm.leave();
        });
    }
    assert!(repaired.into_inner() > 0, "no operation was hit");
}
