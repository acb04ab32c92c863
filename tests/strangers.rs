//! Strangers at the ports of a live job: idle connections, and connections without end, while its device dies.
//!
//! One test, alone in its process: it floods every port that the ranks listen at, and finds them by looking at the process.

mod common;

use common::{Cluster, plain};
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use sumac::{JoinConfig, ReduceOp};

const RANKS: u32 = 3;
const LEN: usize = 100_000;
/// Idle connections at each port.
const IDLE: usize = 70;
/// The most connections that a thread makes, one after the other.
const FLOOD_MAX: usize = 200_000;
/// A rank that finds no way to the others runs into it.
const DEADLINE: Duration = Duration::from_secs(30);
/// What the strangers may cost beyond what a repair takes without them: far less than the deadline, and enough for a machine
/// that has other things to do.
const ALLOWANCE: Duration = Duration::from_secs(8);

/// Return where this process listens on TCP.
fn listening() -> BTreeSet<SocketAddr> {
    let links = fs::read_dir("/proc/self/fd").expect("a list").flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
    let own: BTreeSet<String> = links.filter_map(|link| link.to_str().map(String::from)).collect();
    let table = fs::read_to_string("/proc/self/net/tcp").expect("a table");
    let sockets = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let listening = sockets.filter(|fields| fields[3] == "0A" && own.contains(&format!("socket:[{}]", fields[9])));
    let port = |fields: Vec<&str>| fields[1].rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
    listening.map(|fields| SocketAddr::from((Ipv4Addr::LOCALHOST, port(fields).expect("a port")))).collect()
}

/// Let a device die under a job, perhaps in a crowd of strangers; return how long the operation took that it hit.
fn repair(job: &str, is_crowded: bool) -> Duration {
    let mut cluster = Cluster::start(1, RANKS as usize);
    let before = listening();
    let boards = Mutex::new(std::mem::take(&mut cluster.boards));
    let (gate, is_over, took) = (Barrier::new(RANKS as usize + 1), AtomicBool::new(false), Mutex::new(Duration::ZERO));
    let configure = |config: &mut JoinConfig| {
        plain(config);
        config.deadline = DEADLINE;
    };
    let run = |comm: sumac::Communicator| {
        let sum = || {
            let mut buffer = vec![comm.rank() + 1; LEN];
            let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("nobody is lost");
            assert_eq!(buffer, [RANKS * (RANKS + 1) / 2; LEN]);
            outcome
        };
        sum();
        // The strangers come.
        gate.wait();
        gate.wait();
        if comm.rank() == 0 {
            boards.lock().expect("nobody panicked").clear();
        }
        let began = Instant::now();
        let outcome = sum();
        assert!(outcome.repaired || outcome.fallback.is_some(), "{outcome:?}");
        let mut longest = took.lock().expect("nobody panicked");
        *longest = began.elapsed().max(*longest);
        drop(longest);
        (0..20).for_each(|_| drop(sum()));
        assert!(comm.repairs().count > 0);
        comm.barrier().expect("all are there");
        comm.leave();
    };
    thread::scope(|scope| {
        let (cluster, configure, run, gate, is_over) = (&cluster, &configure, &run, &gate, &is_over);
        let job = scope.spawn(move || cluster.run(job, RANKS, configure, run));
        gate.wait();
        let ports: Vec<SocketAddr> = listening().difference(&before).copied().collect();
        let mut idle = Vec::new();
        if is_crowded {
            // For schedules, and for what ranks say to each other.
            assert!(ports.len() >= 2 * RANKS as usize, "{ports:?}");
            for port in &ports {
                idle.extend((0..IDLE).map(|_| TcpStream::connect(port).expect("it listens")));
            }
            scope.spawn(move || {
                for port in ports.iter().cycle().take(FLOOD_MAX) {
                    if is_over.load(Ordering::Acquire) {
                        return;
                    }
                    // A port may be closed, or its queue full.
                    let _ = TcpStream::connect_timeout(port, Duration::from_millis(100));
                }
            });
        }
        gate.wait();
        job.join().expect("a rank panicked");
        is_over.store(true, Ordering::Release);
    });
    took.into_inner().expect("nobody panicked")
}

#[test]
fn strangers_at_every_port_delay_no_repair_and_make_no_rank_appear_lost() {
    let alone = repair("alone", false);
    let crowded = repair("crowded", true);
    println!("{alone:?} without strangers, {crowded:?} with them");
    assert!(crowded < alone + ALLOWANCE, "{alone:?} without strangers, {crowded:?} with them");
}
