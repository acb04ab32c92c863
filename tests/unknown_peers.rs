//! Unknown peers at the ports of a running job, idle or connecting in a loop, while the job loses its device.
//!
//! The only test of this program, because it finds the ports of the ranks by listing the sockets of the process.

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
/// The number of idle connections at each port.
const IDLE: usize = 70;
/// The maximum number of connections that a thread makes in a row.
const FLOOD_MAX: usize = 200_000;
/// Fails a rank that cannot connect to the others.
const DEADLINE: Duration = Duration::from_secs(30);
/// The time that a recovery beside unknown peers may take in addition: far less than the deadline, and enough for a
/// busy machine.
const ALLOWANCE: Duration = Duration::from_secs(8);

/// Return the addresses at which this process listens on TCP.
fn listening() -> BTreeSet<SocketAddr> {
    let links = fs::read_dir("/proc/self/fd").expect("a list").flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
    let own: BTreeSet<String> = links.filter_map(|link| link.to_str().map(String::from)).collect();
    let table = fs::read_to_string("/proc/self/net/tcp").expect("a table");
    let sockets = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let listening = sockets.filter(|fields| fields[3] == "0A" && own.contains(&format!("socket:[{}]", fields[9])));
    let port = |fields: Vec<&str>| fields[1].rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
    listening.map(|fields| SocketAddr::from((Ipv4Addr::LOCALHOST, port(fields).expect("a port")))).collect()
}

/// Lose a device under a job, with unknown peers if `is_crowded`; return the duration of the recovered operation.
fn recovery_time(job: &str, is_crowded: bool) -> Duration {
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
            let outcome = comm.all_reduce(&mut buffer, ReduceOp::Sum).expect("no rank is lost");
            assert_eq!(buffer, [RANKS * (RANKS + 1) / 2; LEN]);
            outcome
        };
        sum();
        // Start the unknown peers.
        gate.wait();
        gate.wait();
        if comm.rank() == 0 {
            boards.lock().expect("not poisoned").clear();
        }
        let began = Instant::now();
        let outcome = sum();
        assert!(outcome.recovered || outcome.fallback.is_some(), "{outcome:?}");
        let mut longest = took.lock().expect("not poisoned");
        *longest = began.elapsed().max(*longest);
        drop(longest);
        (0..20).for_each(|_| drop(sum()));
        assert!(comm.recoveries().count > 0);
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
            // The ports for host collectives and for recovery.
            assert!(ports.len() >= 2 * RANKS as usize, "{ports:?}");
            for port in &ports {
                idle.extend((0..IDLE).map(|_| TcpStream::connect(port).expect("it listens")));
            }
            scope.spawn(move || {
                for port in ports.iter().cycle().take(FLOOD_MAX) {
                    if is_over.load(Ordering::Acquire) {
                        return;
                    }
                    // The port may be closed, or its queue full.
                    let _ = TcpStream::connect_timeout(port, Duration::from_millis(100));
                }
            });
        }
        gate.wait();
        job.join().expect("a rank panicked");
        is_over.store(true, Ordering::Release);
    });
    took.into_inner().expect("not poisoned")
}

#[test]
fn unknown_peers_at_every_port_neither_delay_recovery_nor_lose_ranks() {
    let alone = recovery_time("alone", false);
    let crowded = recovery_time("crowded", true);
    println!("{alone:?} without unknown peers, {crowded:?} with them");
    assert!(crowded < alone + ALLOWANCE, "{alone:?} without unknown peers, {crowded:?} with them");
}
