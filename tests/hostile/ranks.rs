//! Attacks on the ports where ranks wait for each other: of the mesh, and for repairs.

use crate::place::{Place, Tools, Way, wait_until};
use crate::strangers::{Flood, Random, blurt, drip, idle};
use rustix::process::{Resource, Rlimit, prlimit};
use std::net::SocketAddr;
use std::time::Duration;
use sumac::Attach;

/// Ranks that have not met by schedules do so when the device dies.
const NOT_MET: Way = Way { attach: Attach::Shm, schedules: false };
const MET: Way = Way { attach: Attach::Shm, schedules: true };

/// More than a rank may leave room for.
const MANY: usize = 100;

fn rank_ports(place: &Place<'_>) -> Vec<SocketAddr> {
    let ports: Vec<SocketAddr> = place.ranks.iter().flat_map(|rank| rank.tcp_ports()).collect();
    assert!(ports.len() >= 2 * place.ranks.len(), "ranks listen for schedules and for repairs: {ports:?}");
    ports
}

/// Let the job's device die: what it had is repaired, and the job goes on without.
fn kill_device(place: &mut Place<'_>) {
    let before = place.count();
    place.devices[0].kill();
    place.devices.clear();
    wait_until("the job is not repaired", || place.count().repaired > before.repaired);
    place.wait_for_rounds(20);
    place.check_alive();
}

pub(crate) fn idle_connections(tools: &Tools) {
    for way in [MET, NOT_MET] {
        let mut place = Place::start(tools).with_job(way);
        let open: Vec<_> = rank_ports(&place).into_iter().flat_map(|port| idle(port, MANY)).collect();
        kill_device(&mut place);
        drop(open);
        place.finish();
    }
}

pub(crate) fn drip_hellos(tools: &Tools) {
    let mut place = Place::start(tools).with_job(NOT_MET);
    let mut open: Vec<_> = rank_ports(&place).into_iter().flat_map(|port| idle(port, MANY)).collect();
    // The beginning of both kinds of hello is right, and the rest never comes.
    drip(&mut open, b"SMCNSMCN", Duration::from_secs(2), Duration::from_secs(10));
    let mut again: Vec<_> = rank_ports(&place).into_iter().flat_map(|port| idle(port, MANY)).collect();
    drip(&mut again, b"SM", Duration::from_millis(10), Duration::from_secs(1));
    kill_device(&mut place);
    place.finish();
}

pub(crate) fn connect_flood(tools: &Tools) {
    for (way, seed) in [(NOT_MET, 1), (MET, 2)] {
        let mut place = Place::start(tools).with_job(way);
        let flood = Flood::of_connections(rank_ports(&place), 2_000, 600, seed);
        place.wait_for_rounds(5);
        kill_device(&mut place);
        drop(flood);
        place.finish();
    }
}

/// A hello of a rank to another, whose token is not the job's; the last of these kinds is of the connections for repairs.
fn hello(kind: u16, from: u32, to: u32, random: &mut Random) -> Vec<u8> {
    let token = random.next().to_le_bytes();
    let mut bytes = Vec::new();
    if kind == 5 {
        bytes.extend(b"SMCN");
        bytes.extend(1_u32.to_le_bytes());
    } else {
        bytes.extend(b"SMCH");
        bytes.extend(2_u16.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
    }
    bytes.extend(token);
    bytes.extend(from.to_le_bytes());
    bytes.extend(to.to_le_bytes());
    bytes.extend([0; 8]);
    // What would end an operation, were it believed.
    bytes.extend(b"SMCF\x02\0\0\0");
    bytes.extend(random.bytes(200));
    bytes
}

pub(crate) fn garbage(tools: &Tools) {
    for way in [MET, Way { attach: Attach::Udp, ..MET }] {
        let mut place = Place::start(tools).with_job(way);
        let (before, ports, mut random) = (place.count(), rank_ports(&place), Random(3));
        for nth in 0..600_usize {
            let port = ports[nth % ports.len()];
            let ranks = place.ranks.len() as u64;
            let (from, to) = (random.below(ranks + 1) as u32, random.below(ranks) as u32);
            let bytes = match nth % 4 {
                0 => random.bytes(nth),
                1 => hello(1 + random.below(5) as u16, u32::MAX, to, &mut random),
                _ => hello(1 + random.below(5) as u16, from, to, &mut random),
            };
            blurt(port, &bytes);
        }
        place.check_unhurt(&before);
    }
}

/// With no descriptor left to accept with, a rank that only waits does not spin.
pub(crate) fn no_descriptors(tools: &Tools) {
    let mut place = Place::start(tools).with_job(MET);
    let few = Rlimit { current: Some(40), maximum: tools.files.maximum };
    for rank in &place.ranks {
        prlimit(Some(rank.pid()), Resource::Nofile, few).expect("its limit");
    }
    let open: Vec<_> = rank_ports(&place).into_iter().flat_map(|port| idle(port, MANY)).collect();
    place.wait_for_rounds(10);
    // One rank stops: the others wait for it, and have nothing to do.
    let stopped = place.ranks[2].pid();
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).expect("it runs");
    // When what they had begun has come to its end.
    let mut share = 1.0;
    for _ in 0..3 {
        share = f64::min(share, place.ranks[1].busiest(Duration::from_millis(500)));
    }
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).expect("it is there");
    assert!(share < 0.5, "a rank that waits keeps a processor busy to {:.0} %", 100.0 * share);
    drop(open);
    place.wait_for_rounds(10);
    place.check_alive();
    place.finish();
}
