//! A job's throughput under a flood at all of its ports, relative to the same flood at sockets that discard it.

use crate::data::{data_ports, flood, forge, membership, victim};
use crate::testbed::{JobConfig, TestBed, Tools};
use crate::traffic::{Flood, Random};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};
use sumac::Transport;

const PACKETS_A_SECOND: u32 = 100_000;
const CONNECTIONS: usize = 1_000;
/// The rate of new connections.
const CONNECTS_A_SECOND: u32 = 500;
/// The number of pairs of measurements, one with the flood at the job's ports and one elsewhere.
const PAIRS: usize = 9;
/// How often all pairs are measured until a series shows what must remain: a fault lowers every series, another load on
/// this machine only some.
const SERIES_MAX: usize = 3;
/// What must remain of the throughput.
const LEAST_RATIO: f64 = 0.5;
const TURN: Duration = Duration::from_millis(500);
/// The time for a flood to start, or for its effects to end.
const SETTLE: Duration = Duration::from_millis(100);

pub(crate) fn over_udp(tools: &Tools) {
    compare(tools, Transport::Udp);
}

pub(crate) fn over_shm(tools: &Tools) {
    compare(tools, Transport::Shm);
}

fn compare(tools: &Tools, transport: Transport) {
    let mut testbed = TestBed::start(tools).with_job(JobConfig { transport, schedules: true });
    let (_client, own) = membership(&testbed, "own");
    let (before, victim, mut random) = (testbed.count(), victim(&testbed), Random(7));
    let packets: Vec<Vec<u8>> = (0..4_000).map(|_| forge(&own, victim, &mut random)).collect();
    let mut streams: Vec<SocketAddr> = testbed.ranks.iter().flat_map(|rank| rank.tcp_ports()).collect();
    streams.push(testbed.addr);
    let hurts = (data_ports(&testbed), streams);
    let sinks: Vec<UdpSocket> =
        hurts.0.iter().map(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port")).collect();
    let listeners: Vec<TcpListener> = hurts.1.iter().map(|_| sink()).collect();
    let addr = |listener: &TcpListener| listener.local_addr().expect("a port");
    let discards =
        (sinks.iter().map(|sink| sink.local_addr().expect("a port")).collect(), listeners.iter().map(addr).collect());
    // Rounds a second under a flood at these ports.
    let mut pace = |(data, streams): &(Vec<SocketAddr>, Vec<SocketAddr>), seed| {
        let packets = flood(packets.clone(), data, PACKETS_A_SECOND);
        let connections = Flood::of_connections(streams.clone(), CONNECTS_A_SECOND, CONNECTIONS, seed);
        thread::sleep(SETTLE);
        let (begun, rounds) = (Instant::now(), testbed.count().rounds);
        thread::sleep(TURN);
        let pace = (testbed.count().rounds - rounds) as f64 / begun.elapsed().as_secs_f64();
        drop((packets, connections));
        thread::sleep(SETTLE);
        pace
    };
    let mut pace = |is_hurt: bool, seed| pace(if is_hurt { &hurts } else { &discards }, seed);
    assert!(
        (0..SERIES_MAX).any(|_| median_ratio(transport, &mut pace) >= LEAST_RATIO),
        "{transport}: less than {LEAST_RATIO} of the throughput remains in each of {SERIES_MAX} series"
    );
    testbed.check_unaffected(&before);
}

/// Measure all pairs and return their median ratio. `pace` measures the rounds a second with the flood at the job's
/// ports or elsewhere, by its first argument.
fn median_ratio(transport: Transport, mut pace: impl FnMut(bool, u64) -> f64) -> f64 {
    let mut pairs: Vec<[f64; 2]> = (0..PAIRS as u64)
        .map(|nth| {
            // Alternate the order of the pair.
            if nth % 2 == 0 {
                let hurt = pace(true, nth);
                [hurt, pace(false, nth)]
            } else {
                let discarded = pace(false, nth);
                [pace(true, nth), discarded]
            }
        })
        .collect();
    pairs.sort_by(|a, b| f64::total_cmp(&(a[0] / a[1]), &(b[0] / b[1])));
    let ratios: Vec<String> = pairs.iter().map(|[a, b]| format!("{:.2}", a / b)).collect();
    let [hurt, discarded] = pairs[PAIRS / 2];
    println!(
        "  {transport}: {hurt:.0} rounds a second beside {PACKETS_A_SECOND} packets a second and {CONNECTIONS} connections, \
         {discarded:.0} where these are discarded: {:.2} of the pace; pairs {}",
        hurt / discarded,
        ratios.join(" "),
    );
    hurt / discarded
}

/// Accepts connections and keeps them until they end.
fn sink() -> TcpListener {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let accepts = listener.try_clone().expect("a descriptor");
    thread::spawn(move || {
        let mut open = std::collections::VecDeque::new();
        for stream in accepts.incoming().map_while(Result::ok) {
            open.push_back(stream);
            if open.len() > CONNECTIONS {
                open.pop_front();
            }
        }
    });
    listener
}
