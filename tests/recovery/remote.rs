//! Remote ranks whose device is lost, or whose links go down: no rank can read the device's redo slots.

use crate::common::Cluster;
use crate::workload::{ATTEMPTS_PER_RUN, Kill, assert_sum, filled, in_small_chunks, over_rdma, run_until_recovered};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use sumac::ReduceOp;
use sumac_firmware::emulated::ZeroCopyConfig;
use sumac_hal::remote::Exchange;

/// Elements of an operation: several windows.
const LEN: usize = 100_000;

/// The number of moments of the loss.
const MOMENTS: u64 = 6;

/// A moment of the loss, after the start of an operation.
fn moment(nth: u64) -> Duration {
    Duration::from_micros(271 * (nth % MOMENTS))
}

#[test]
fn remote_device_lost_with_its_redo_slots_is_recovered() {
    for (leaves, registered) in [(1, true), (1, false), (2, true)] {
        let mut recovered = 0;
        for nth in 0..ATTEMPTS_PER_RUN * MOMENTS {
            if nth >= MOMENTS && recovered > 0 {
                break;
            }
            let exchange = format!("exchange:death-{leaves}-{registered}-{nth}");
            let bus = (ZeroCopyConfig::default(), &*exchange);
            let mut cluster = Cluster::start_remote(leaves, 4 / leaves, bus, in_small_chunks());
            let kill = Kill { device: leaves - 1, after_operations: 3, delay: moment(nth) };
            let seen = run_until_recovered(&mut cluster, 4, kill, over_rdma(&exchange), |comm, op| {
                let values = filled(comm, op, LEN);
                let outcome = if registered {
                    // In place: this buffer is the only copy of the input.
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
            recovered += seen.recovered.len();
        }
        assert!(recovered > 0, "no operation was recovered");
    }
}

/// Device and ranks stay alive, but their messages no longer arrive.
#[test]
fn remote_links_cut_in_an_operation_are_recovered() {
    const OPERATIONS: u64 = 12;
    let recovered = AtomicU32::new(0);
    for nth in 0..ATTEMPTS_PER_RUN * MOMENTS {
        if nth >= MOMENTS && recovered.load(Ordering::Relaxed) > 0 {
            break;
        }
        let exchange = format!("exchange:cut-{nth}");
        let cluster = Cluster::start_remote(1, 3, (ZeroCopyConfig::default(), &exchange), in_small_chunks());
        cluster.run("cut", 3, over_rdma(&exchange), |comm| {
            for op in 0..OPERATIONS {
                let mut buffer = comm.alloc(LEN).expect("memory");
                buffer.copy_from_slice(&filled(&comm, op, LEN));
                let outcome = thread::scope(|scope| {
                    if op == 3 && comm.rank() == 0 {
                        scope.spawn(|| {
                            // Spin: the moment of the cut matters.
                            let at = Instant::now() + moment(nth);
                            while Instant::now() < at {
                                thread::yield_now();
                            }
                            Exchange::named(&exchange).expect("one of this process").cut();
                        });
                    }
                    comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum")
                });
                assert_sum(&buffer, op, 3, LEN);
                recovered.fetch_add(u32::from(outcome.recovered), Ordering::Relaxed);
            }
            comm.leave();
        });
    }
    assert!(recovered.into_inner() > 0, "no operation was recovered");
}
