//! Loss of a device during operations over every transport.

use crate::common::{Cluster, over_udp, plain};
use crate::workload::{
    ATTEMPTS_PER_RUN, Kill, assert_sum, filled, in_small_chunks, mixed, over_shm, prefer_tree, run_until_recovered,
};
use std::time::Duration;
use sumac::{JoinConfig, Path, ReduceOp};
use sumac_firmware::emulated::ZeroCopyConfig;

/// Elements of an operation: several windows.
const LEN: usize = 100_000;

/// The number of moments of the loss.
const MOMENTS: u64 = 6;

/// A moment of the loss, from the start of the third operation.
fn moment(nth: u64) -> Duration {
    Duration::from_micros(271 * (nth % MOMENTS))
}

fn on_one_device(configure: impl Fn(&mut JoinConfig) + Sync, registered: bool) {
    let mut recovered = 0;
    for nth in 0..ATTEMPTS_PER_RUN * MOMENTS {
        if nth >= MOMENTS && recovered > 0 {
            break;
        }
        let kill = Kill { device: 0, after_operations: 3, delay: moment(nth) };
        let mut cluster = Cluster::start_zero_copy(1, 4, ZeroCopyConfig::default(), in_small_chunks());
        let seen = run_until_recovered(&mut cluster, 4, kill, &configure, |comm, op| {
            let mut buffer = filled(comm, op, LEN);
            let outcome = if registered {
                let mut registered = comm.alloc(LEN).expect("memory");
                registered.copy_from_slice(&buffer);
                let outcome = comm.all_reduce(&mut registered, ReduceOp::Sum);
                buffer.copy_from_slice(&registered);
                outcome
            } else {
                comm.all_reduce(&mut buffer, ReduceOp::Sum)
            };
            assert_sum(&buffer, op, 4, LEN);
            outcome.expect("a sum")
        });
        // There is no other device.
        assert!(seen.last.iter().all(|&path| path == seen.last[0] && path != Path::Tree), "{seen:?}");
        recovered += seen.recovered.len();
    }
    assert!(recovered > 0, "no operation was recovered");
}

#[test]
fn packet_operations_survive_device_loss() {
    on_one_device(over_udp, false);
}

#[test]
fn zero_copy_operations_survive_device_loss() {
    on_one_device(over_shm, true);
}

#[test]
fn bounced_operations_survive_device_loss() {
    on_one_device(over_shm, false);
}

#[test]
fn mixed_transports_survive_device_loss() {
    on_one_device(mixed, true);
}

/// One of two devices serves the job; the other one replaces it.
#[test]
fn spare_device_serves_after_device_loss() {
    for configure in [plain as fn(&mut JoinConfig), over_udp] {
        let mut cluster = Cluster::spare(2, prefer_tree());
        let kill = Kill { device: 0, after_operations: 3, delay: Duration::from_micros(300) };
        let seen = run_until_recovered(&mut cluster, 3, kill, configure, |comm, op| {
            let mut buffer = filled(comm, op, LEN);
            let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
            assert_sum(&buffer, op, 3, LEN);
            outcome
        });
        assert!(seen.last.iter().all(|&path| path == Path::Tree), "{seen:?}");
    }
}

/// Two levels: the root or a leaf is lost.
#[test]
fn two_level_tree_survives_device_loss() {
    for configure in [plain as fn(&mut JoinConfig), over_udp] {
        for device in 0..2 {
            let mut cluster = Cluster::start_zero_copy(2, 2, ZeroCopyConfig::default(), in_small_chunks());
            let kill = Kill { device, after_operations: 3, delay: Duration::from_micros(300) };
            run_until_recovered(&mut cluster, 4, kill, configure, |comm, op| {
                let mut buffer = filled(comm, op, LEN);
                let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
                assert_sum(&buffer, op, 4, LEN);
                outcome
            });
        }
    }
}
