//! More than one death, and more than one communicator on what dies.

use crate::common::Cluster;
use crate::death::{WAYS, soon};
use crate::work::{assert_sum, by_tree, filled, in_small_chunks};
use std::sync::{Barrier, Mutex};
use std::time::Duration;
use sumac::controller::{ControllerConfig, status};
use sumac::{Communicator, Path, ReduceOp};
use sumac_firmware::emulated::{Board, BusConfig};

const RANKS: u32 = 3;
/// Longer than a window, and than what a device is given in advance: it does not end before somebody waits for it.
const LONG: usize = 200_000;

fn small() -> ControllerConfig {
    ControllerConfig { chunk_max_bytes: 4096, reference_chunk_max_bytes: 4096, ..by_tree() }
}

fn start(comm: &Communicator, op: u64) -> sumac::Handle<Vec<i64>> {
    comm.start_all_reduce(filled(comm, op, LONG), ReduceOp::Sum).expect("started")
}

fn finish(comm: &Communicator, started: sumac::Handle<Vec<i64>>, op: u64) -> bool {
    let (sum, outcome) = started.wait().expect("a sum");
    assert_sum(&sum, op, comm.size(), LONG);
    outcome.repaired
}

/// Devices die one after the other, each while it serves, and come back with their names and nothing else.
#[test]
fn devices_that_come_back_serve_and_die_again() {
    for configure in WAYS {
        let mut cluster = Cluster::spare(2, small());
        let mut boards = std::mem::take(&mut cluster.boards).into_iter();
        let boards: Mutex<Vec<_>> = Mutex::new((0..).map(|nth| format!("spare{nth}")).zip(&mut boards).collect());
        let gate = Barrier::new(RANKS as usize);
        cluster.run("again", RANKS, soon(configure), |comm| {
            for round in 0..4 {
                let started = start(&comm, round);
                gate.wait();
                if comm.rank() == 0 {
                    let mut boards = boards.lock().expect("nobody panicked");
                    let name = serving(&cluster);
                    let nth = boards.iter().position(|(other, _)| *other == name).expect("a board of that name");
                    drop(boards.remove(nth));
                }
                gate.wait();
                assert!(finish(&comm, started, round), "round {round} was hit");
                gate.wait();
                if comm.rank() == 0 {
                    let mut boards = boards.lock().expect("nobody panicked");
                    let name =
                        ["spare0", "spare1"].into_iter().find(|name| boards.iter().all(|(other, _)| other != name));
                    let name = name.expect("one has died");
                    boards.push((name.into(), cluster.board_on_a_bus(name)));
                }
                gate.wait();
                let mut buffer = filled(&comm, 100 + round, 1000);
                let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("a sum");
                assert_sum(&buffer, 100 + round, RANKS, 1000);
                assert_eq!(outcome.path, Path::Tree, "there is always another device: round {round}");
            }
        });
    }
}

/// Return the name of the device that serves the only job.
fn serving(cluster: &Cluster) -> String {
    let report = status(cluster.controller.local_addr()).expect("a report");
    report.jobs[0].tree.as_ref().expect("a job that runs").as_ref().expect("a tree").devices[0].clone()
}

/// Both devices die, the second while the first is got over.
#[test]
fn two_deaths_in_a_row_are_got_over() {
    for configure in WAYS {
        for pause in [0, 1, 10, 50].map(Duration::from_millis) {
            let mut cluster = Cluster::spare(2, small());
            let boards = Mutex::new(std::mem::take(&mut cluster.boards));
            let gate = Barrier::new(RANKS as usize + 1);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    gate.wait();
                    let mut boards: Vec<Board> = std::mem::take(&mut *boards.lock().expect("nobody panicked"));
                    drop(boards.pop());
                    // The moment is what is tested.
                    std::thread::sleep(pause);
                    drop(boards);
                });
                cluster.run("two", RANKS, soon(configure), |comm| {
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

/// A communicator and what it was split into, each with operations on the same device, and each repaired by itself.
#[test]
fn communicators_on_one_device_are_repaired_each_by_itself() {
    for configure in WAYS {
        let mut cluster = Cluster::start_on(1, 4, BusConfig::default(), in_small_chunks());
        let boards = Mutex::new(std::mem::take(&mut cluster.boards));
        let gate = Barrier::new(4);
        cluster.run("parts", 4, soon(configure), |comm| {
            let part = comm.split(Some(comm.rank() % 2), 0).expect("split").expect("a color");
            let (of_all, of_part) = (start(&comm, 0), start(&part, 1));
            gate.wait();
            if comm.rank() == 0 {
                boards.lock().expect("nobody panicked").clear();
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
