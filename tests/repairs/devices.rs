//! A device dies under operations of ranks that are attached in all ways.

use crate::common::{Cluster, by_packets, plain};
use crate::work::{Kill, assert_sum, by_both, by_reference, by_tree, filled, in_small_chunks, until_repaired};
use std::time::Duration;
use sumac::{JoinConfig, Path, ReduceOp};
use sumac_firmware::emulated::BusConfig;

/// Elements of an operation: several windows.
const LEN: usize = 100_000;

/// Moments at which the device dies, from the beginning of the third operation on.
fn moments() -> impl Iterator<Item = Kill> {
    (0..6).map(|nth| Kill { device: 0, after_operations: 3, delay: Duration::from_micros(271 * nth) })
}

fn on_one_device(configure: impl Fn(&mut JoinConfig) + Sync, registered: bool) {
    let mut repaired = 0;
    for kill in moments() {
        let mut cluster = Cluster::start_on(1, 4, BusConfig::default(), in_small_chunks());
        let seen = until_repaired(&mut cluster, 4, kill, &configure, |comm, op| {
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
        repaired += seen.repaired.len();
    }
    assert!(repaired > 0, "no device has died under one of the long operations");
}

#[test]
fn a_device_that_dies_under_packets_is_got_over() {
    on_one_device(by_packets, false);
}

#[test]
fn a_device_that_dies_under_references_is_got_over() {
    on_one_device(by_reference, true);
}

#[test]
fn a_device_that_dies_under_bounced_memory_is_got_over() {
    on_one_device(by_reference, false);
}

#[test]
fn a_device_that_dies_under_packets_and_references_is_got_over() {
    on_one_device(by_both, true);
}

/// Of two devices without a fabric one serves the job; the other takes over.
#[test]
fn another_device_takes_over() {
    for configure in [plain as fn(&mut JoinConfig), by_packets] {
        let mut cluster = Cluster::spare(2, by_tree());
        let kill = Kill { device: 0, after_operations: 3, delay: Duration::from_micros(300) };
        let seen = until_repaired(&mut cluster, 3, kill, configure, |comm, op| {
            let mut buffer = filled(comm, op, LEN);
            let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
            assert_sum(&buffer, op, 3, LEN);
            outcome
        });
        assert!(seen.last.iter().all(|&path| path == Path::Tree), "{seen:?}");
    }
}

/// A leaf, or the root, of two levels.
#[test]
fn a_device_of_two_levels_is_got_over() {
    for configure in [plain as fn(&mut JoinConfig), by_packets] {
        for device in 0..2 {
            let mut cluster = Cluster::start_on(2, 2, BusConfig::default(), in_small_chunks());
            let kill = Kill { device, after_operations: 3, delay: Duration::from_micros(300) };
            until_repaired(&mut cluster, 4, kill, configure, |comm, op| {
                let mut buffer = filled(comm, op, LEN);
                let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
                assert_sum(&buffer, op, 4, LEN);
                outcome
            });
        }
    }
}
