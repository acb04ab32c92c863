//! Attacks on the ports at which ranks accept each other: of the mesh, and for recovery.

use crate::shm;
use crate::testbed::{JobConfig, TestBed, Tools, wait_until};
use crate::traffic::{Flood, Random, drip, idle, send_once};
use rustix::net::{SendFlags, send};
use rustix::process::{Resource, Rlimit, prlimit};
use std::net::SocketAddr;
use std::time::Duration;
use sumac::Transport;

/// Ranks connect the mesh only when the device is lost.
const NOT_MET: JobConfig = JobConfig { transport: Transport::Shm, schedules: false };
const MET: JobConfig = JobConfig { transport: Transport::Shm, schedules: true };

/// More connections than a rank has room for.
const MANY: usize = 100;

fn rank_ports(testbed: &TestBed<'_>) -> Vec<SocketAddr> {
    let ports: Vec<SocketAddr> = testbed.ranks.iter().flat_map(|rank| rank.tcp_ports()).collect();
    assert!(ports.len() >= 2 * testbed.ranks.len(), "ranks must listen for the mesh and for recovery: {ports:?}");
    ports
}

/// Lose the job's device: the ranks recover and continue without it.
fn kill_device(testbed: &mut TestBed<'_>) {
    let before = testbed.count();
    testbed.devices[0].kill();
    testbed.devices.clear();
    wait_until("the job recovers", || testbed.count().repaired > before.repaired);
    testbed.wait_for_rounds(20);
    testbed.check_alive();
}

pub(crate) fn idle_connections(tools: &Tools) {
    for way in [MET, NOT_MET] {
        let mut testbed = TestBed::start(tools).with_job(way);
        let open: Vec<_> = rank_ports(&testbed).into_iter().flat_map(|port| idle(port, MANY)).collect();
        kill_device(&mut testbed);
        drop(open);
        testbed.finish();
    }
}

pub(crate) fn drip_hellos(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(NOT_MET);
    let mut open: Vec<_> = rank_ports(&testbed).into_iter().flat_map(|port| idle(port, MANY)).collect();
    // The start of the hello is valid; the rest never arrives.
    drip(&mut open, b"SMCHSMCH", Duration::from_secs(2), Duration::from_secs(10));
    let mut again: Vec<_> = rank_ports(&testbed).into_iter().flat_map(|port| idle(port, MANY)).collect();
    drip(&mut again, b"SM", Duration::from_millis(10), Duration::from_secs(1));
    kill_device(&mut testbed);
    testbed.finish();
}

pub(crate) fn connect_flood(tools: &Tools) {
    for (way, seed) in [(NOT_MET, 1), (MET, 2)] {
        let mut testbed = TestBed::start(tools).with_job(way);
        let flood = Flood::of_connections(rank_ports(&testbed), 2_000, 600, seed);
        testbed.wait_for_rounds(5);
        kill_device(&mut testbed);
        drop(flood);
        testbed.finish();
    }
}

/// Return a rank's hello, and what would follow in a handshake, without knowledge of the secret.
fn hello(purpose: u16, from: u32, to: u32, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(b"SMCH");
    bytes.extend(4_u16.to_le_bytes());
    bytes.extend(purpose.to_le_bytes());
    bytes.extend(from.to_le_bytes());
    bytes.extend(to.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend(random.bytes(32));
    // A one-shot connection has no proof before its frame.
    if purpose != 2 {
        bytes.extend(random.bytes(32));
    }
    // Messages that would end an operation if accepted.
    bytes.extend(b"SMCF\x02\0\0\0");
    bytes.extend(random.bytes(200));
    bytes
}

pub(crate) fn garbage(tools: &Tools) {
    for way in [MET, JobConfig { transport: Transport::Udp, ..MET }] {
        let mut testbed = TestBed::start(tools).with_job(way);
        let (before, ports, mut random) = (testbed.count(), rank_ports(&testbed), Random(3));
        for nth in 0..600_usize {
            let port = ports[nth % ports.len()];
            let ranks = testbed.ranks.len() as u64;
            let (from, to) = (random.below(ranks + 1) as u32, random.below(ranks) as u32);
            let bytes = match nth % 4 {
                0 => random.bytes(nth),
                1 => hello(1 + random.below(5) as u16, u32::MAX, to, &mut random),
                _ => hello(1 + random.below(5) as u16, from, to, &mut random),
            };
            send_once(port, &bytes);
        }
        testbed.check_unaffected(&before);
    }
}

/// Return the names of the sockets over which ranks share memory. Any process of this network namespace can list them.
fn memory_sockets() -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/unix").expect("a table");
    let names = table.lines().filter_map(|line| line.split_whitespace().nth(7)?.strip_prefix('@'));
    let mut names: Vec<String> = names.filter(|name| name.starts_with("sumac-rank-")).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    assert!(names.len() > 1, "ranks must listen for each other: {names:?}");
    names
}

/// A process of the ranks' user that does not know their job's secret, at the sockets over which they share memory.
pub(crate) fn garbage_at_memory_sockets(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(MET);
    let (before, names, mut random) = (testbed.count(), memory_sockets(), Random(6));
    let mut idle = Vec::new();
    for nth in 0..600_usize {
        let Some(socket) = shm::raw(&names[nth % names.len()]) else { continue };
        for _ in 0..1 + nth % 4 {
            let mut bytes = random.bytes([0, 1, 31, 32, 33, 4_000][nth % 6]);
            if nth % 2 == 0 && bytes.len() >= 32 {
                // A valid header of any kind; an attach of any rank, with a key of any kind.
                bytes[..8].copy_from_slice(&[b'S', b'U', b'M', b'S', 1, 0, random.below(9) as u8, 0]);
                bytes[8..16].copy_from_slice(&[random.below(5) as u8, 0, 0, 0, random.below(6) as u8, 0, 0, 0]);
            }
            // The rank may have disconnected.
            let _ = send(&socket, &bytes, SendFlags::NOSIGNAL);
        }
        idle.extend((nth % 3 == 0).then_some(socket));
    }
    testbed.wait_for_rounds(20);
    kill_device(&mut testbed);
    drop(idle);
    assert!(testbed.count().repaired > before.repaired);
    testbed.finish();
}

/// Without descriptors to accept connections, a waiting rank does not spin.
pub(crate) fn no_descriptors(tools: &Tools) {
    let mut testbed = TestBed::start(tools).with_job(MET);
    let few = Rlimit { current: Some(40), maximum: tools.files.maximum };
    for rank in &testbed.ranks {
        prlimit(Some(rank.pid()), Resource::Nofile, few).expect("its limit");
    }
    let open: Vec<_> = rank_ports(&testbed).into_iter().flat_map(|port| idle(port, MANY)).collect();
    let names = memory_sockets();
    let sockets: Vec<_> = names.iter().flat_map(|name| (0..MANY).filter_map(|_| shm::raw(name))).collect();
    testbed.wait_for_rounds(10);
    // Stop one rank, so that the others wait idle.
    let stopped = testbed.ranks[2].pid();
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).expect("it runs");
    // Once pending work has ended.
    let mut share = 1.0;
    for _ in 0..3 {
        share = f64::min(share, testbed.ranks[1].busiest(Duration::from_millis(500)));
    }
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).expect("it is there");
    assert!(share < 0.5, "a rank that waits keeps a processor busy to {:.0} %", 100.0 * share);
    drop((open, sockets));
    testbed.wait_for_rounds(10);
    testbed.check_alive();
    testbed.finish();
}
