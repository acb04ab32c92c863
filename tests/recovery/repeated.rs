//! Several losses, and several communicators on the lost device.

use crate::common::Cluster;
use crate::loss::{TRANSPORTS, with_deadline};
use crate::workload::{assert_sum, filled, in_small_chunks, prefer_tree};
use std::sync::{Barrier, Mutex};
use std::time::Duration;
use sumac::controller::{ControllerConfig, status};
use sumac::{Communicator, Path, ReduceOp};
use sumac_firmware::emulated::{Board, ZeroCopyConfig};

const RANKS: u32 = 3;
/// More than a window and than ranks submit in advance, so that the operation cannot end before a rank waits for it.
const LONG: usize = 200_000;

fn small() -> ControllerConfig {
    ControllerConfig { chunk_max_bytes: 4096, zero_copy_chunk_max_bytes: 4096, ..prefer_tree() }
}

fn start(comm: &Communicator, op: u64) -> sumac::Handle<Vec<i64>> {
    comm.start_all_reduce(filled(comm, op, LONG), ReduceOp::Sum).expect("started")
}

fn finish(comm: &Communicator, started: sumac::Handle<Vec<i64>>, op: u64) -> bool {
    let (sum, outcome) = started.wait().expect("a sum");
    assert_sum(&sum, op, comm.size(), LONG);
    outcome.recovered
}

/// Devices are lost in turn, each while it serves, and return with the same name but no state.
#[test]
fn returning_devices_serve_and_may_be_lost_again() {
    for configure in TRANSPORTS {
        let mut cluster = Cluster::spare(2, small());
        let mut boards = std::mem::take(&mut cluster.boards).into_iter();
        let boards: Mutex<Vec<_>> = Mutex::new((0..).map(|nth| format!("spare{nth}")).zip(&mut boards).collect());
        let gate = Barrier::new(RANKS as usize);
        cluster.run("again", RANKS, with_deadline(configure), |comm| {
            for round in 0..4 {
                let started = start(&comm, round);
                gate.wait();
                if comm.rank() == 0 {
                    let mut boards = boards.lock().expect("not poisoned");
                    let name = serving(&cluster);
                    let nth = boards.iter().position(|(other, _)| *other == name).expect("a board of that name");
                    drop(boards.remove(nth));
                }
                gate.wait();
                assert!(finish(&comm, started, round), "round {round} was not recovered");
                gate.wait();
                if comm.rank() == 0 {
                    let mut boards = boards.lock().expect("not poisoned");
                    let name =
                        ["spare0", "spare1"].into_iter().find(|name| boards.iter().all(|(other, _)| other != name));
                    let name = name.expect("a lost device");
                    boards.push((name.into(), cluster.start_spare_board(name)));
                }
                gate.wait();
                let mut buffer = filled(&comm, 100 + round, 1000);
                let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
                assert_sum(&buffer, 100 + round, RANKS, 1000);
                assert_eq!(outcome.path, Path::Tree, "round {round}: no tree, though a device is available");
            }
        });
    }
}

/// Return the name of the device that serves the only job.
fn serving(cluster: &Cluster) -> String {
    let report = status(cluster.controller.local_addr()).expect("a report");
    report.jobs[0].tree.as_ref().expect("a job that runs").as_ref().expect("a tree").devices[0].clone()
}

/// Both devices are lost, the second during the recovery from the first loss.
#[test]
fn two_device_losses_in_a_row_are_recovered() {
    for configure in TRANSPORTS {
        for pause in [0, 1, 10, 50].map(Duration::from_millis) {
            let mut cluster = Cluster::spare(2, small());
            let boards = Mutex::new(std::mem::take(&mut cluster.boards));
            let gate = Barrier::new(RANKS as usize + 1);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    gate.wait();
                    let mut boards: Vec<Board> = std::mem::take(&mut *boards.lock().expect("not poisoned"));
                    drop(boards.pop());
                    // The moment of the second loss matters.
                    std::thread::sleep(pause);
                    drop(boards);
                });
                cluster.run("two", RANKS, with_deadline(configure), |comm| {
                    let started: Vec<_> = (0..3).map(|op| start(&comm, op)).collect();
                    gate.wait();
                    for (op, started) in (0..).zip(started) {
                        finish(&comm, started, op);
                    }
                    let last = start(&comm, 9);
                    finish(&comm, last, 9);
                });
            });
        }
    }
}

/// A communicator and its split have operations on the same device; each recovers by itself.
#[test]
fn communicators_on_one_device_recover_independently() {
    for configure in TRANSPORTS {
        let mut cluster = Cluster::start_zero_copy(1, 4, ZeroCopyConfig::default(), in_small_chunks());
        let boards = Mutex::new(std::mem::take(&mut cluster.boards));
        let gate = Barrier::new(4);
        cluster.run("parts", 4, with_deadline(configure), |comm| {
            let part = comm.split(Some(comm.rank() % 2), 0).expect("split").expect("a color");
            let (of_all, of_part) = (start(&comm, 0), start(&part, 1));
            gate.wait();
            if comm.rank() == 0 {
                boards.lock().expect("not poisoned").clear();
            }
            gate.wait();
            if comm.rank() < 2 {
                assert!(finish(&comm, of_all, 0) & finish(&part, of_part, 1));
            } else {
                assert!(finish(&part, of_part, 1) & finish(&comm, of_all, 0));
            }
            gate.wait();
        });
    }
}
