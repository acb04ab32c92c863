//! Ranks in a process without free descriptors: connections wait, no rank is reported lost, and no thread spins.
//!
//! The only test of this program, because it uses up the descriptors of the process.

mod common;

use common::{Cluster, over_udp};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};
use sumac::{Algo, Communicator, JoinConfig, ReduceOp};

const RANKS: u32 = 3;
const LEN: usize = 10_000;
/// The number of connections that wait at each port.
const WAITING: usize = 4;
/// How long they wait. A spinning thread would use all of this processor time.
const WHILE: Duration = Duration::from_secs(1);

/// Return the processor time of this process.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a valid timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Return the TCP addresses at which this process listens, except the controller's.
fn ports(controller: SocketAddr) -> Vec<SocketAddr> {
    let links = std::fs::read_dir("/proc/self/fd").expect("a list").flatten();
    let own: Vec<_> =
        links.filter_map(|fd| std::fs::read_link(fd.path()).ok()?.into_os_string().into_string().ok()).collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("a table");
    let listens = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let listens = listens.filter(|fields| fields[3] == "0A" && own.contains(&format!("socket:[{}]", fields[9])));
    let port = |fields: Vec<&str>| u16::from_str_radix(fields[1].rsplit(':').next()?, 16).ok();
    let addresses = listens.filter_map(port).map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    addresses.filter(|address| *address != controller).collect()
}

fn socket() -> OwnedFd {
    socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("a socket")
}

/// Open files until the process has no descriptor left.
fn take_all() -> Vec<File> {
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

fn sum(comm: &Communicator) {
    let mut values = vec![comm.rank() + 1; LEN];
    comm.all_reduce(&mut values, ReduceOp::Sum).expect("no rank is lost");
    assert_eq!(values, [RANKS * (RANKS + 1) / 2; LEN]);
}

#[test]
fn accept_loops_without_descriptors_rest_and_recover() {
    let limit = libc::rlimit { rlim_cur: 512, rlim_max: 512 };
    // SAFETY: the limit is only read.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let cluster = Cluster::start(1, RANKS as usize);
    let controller = cluster.controller.local_addr();
    let gate = Barrier::new(RANKS as usize + 1);
    let configure = |config: &mut JoinConfig| {
        over_udp(config);
        config.algo = Algo::Ring;
        config.deadline = Duration::from_secs(60);
    };
    let rank = |comm: Communicator| {
        gate.wait();
        gate.wait();
        // With descriptors again, the ranks connect to each other among unknown peers.
        sum(&comm);
        sum(&comm);
        comm.leave();
    };
    thread::scope(|scope| {
        let job = scope.spawn(|| cluster.run("short", RANKS, configure, rank));
        gate.wait();
        let ports = ports(controller);
        assert!(ports.len() >= 2 * RANKS as usize, "{ports:?}");
        // Reserve the descriptors of this end before the rest are taken.
        let unknown_peers: Vec<_> =
            ports.iter().flat_map(|port| [port; WAITING]).map(|port| (socket(), port)).collect();
        let taken = take_all();
        for (unknown_peer, port) in &unknown_peers {
            connect(unknown_peer, *port).expect("it listens");
        }
        let before = (Instant::now(), cpu_time());
        thread::sleep(WHILE);
        let used = (before.0.elapsed(), cpu_time() - before.1);
        drop(taken);
        gate.wait();
        job.join().expect("a rank panicked");
        assert!(used.1 < used.0 / 4, "{:?} of {:?} of processor time while idle", used.1, used.0);
    });
}
