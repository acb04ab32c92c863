//! What a storm at all ports leaves of a job's pace, compared with the same storm at sockets that discard it.

use crate::data::{data_ports, flood, forge, membership, victim};
use crate::place::{Place, Tools, Way};
use crate::strangers::{Flood, Random};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};
use sumac::Attach;

const PACKETS_A_SECOND: u32 = 100_000;
const CONNECTIONS: usize = 1_000;
/// How many of the connections are made anew.
const CONNECTS_A_SECOND: u32 = 500;
/// One with the storm at the job's ports, one with it elsewhere.
const PAIRS: usize = 9;
const TURN: Duration = Duration::from_millis(500);
/// Until a storm blows, or what it has left has settled.
const SETTLE: Duration = Duration::from_millis(100);

pub(crate) fn by_packets(tools: &Tools) {
    compare(tools, Attach::Udp);
}

pub(crate) fn by_reference(tools: &Tools) {
    compare(tools, Attach::Shm);
}

fn compare(tools: &Tools, attach: Attach) {
    let mut place = Place::start(tools).with_job(Way { attach, schedules: true });
    let (_client, own) = membership(&place, "own");
    let (before, victim, mut random) = (place.count(), victim(&place), Random(7));
    let packets: Vec<Vec<u8>> = (0..4_000).map(|_| forge(&own, victim, &mut random)).collect();
    let mut streams: Vec<SocketAddr> = place.ranks.iter().flat_map(|rank| rank.tcp_ports()).collect();
    streams.push(place.addr);
    let hurts = (data_ports(&place), streams);
    let sinks: Vec<UdpSocket> =
        hurts.0.iter().map(|_| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port")).collect();
    let listeners: Vec<TcpListener> = hurts.1.iter().map(|_| sink()).collect();
    let addr = |listener: &TcpListener| listener.local_addr().expect("a port");
    let discards =
        (sinks.iter().map(|sink| sink.local_addr().expect("a port")).collect(), listeners.iter().map(addr).collect());
    // What a storm at these ports leaves, in rounds a second.
    let mut pace = |(data, streams): &(Vec<SocketAddr>, Vec<SocketAddr>), seed| {
        let packets = flood(packets.clone(), data, PACKETS_A_SECOND);
        let connections = Flood::of_connections(streams.clone(), CONNECTS_A_SECOND, CONNECTIONS, seed);
        thread::sleep(SETTLE);
        let (begun, rounds) = (Instant::now(), place.count().rounds);
        thread::sleep(TURN);
        let pace = (place.count().rounds - rounds) as f64 / begun.elapsed().as_secs_f64();
        drop((packets, connections));
        thread::sleep(SETTLE);
        pace
    };
    let mut pairs: Vec<[f64; 2]> = (0..PAIRS as u64)
        .map(|nth| {
            // In turn first and last.
            if nth % 2 == 0 {
                let hurt = pace(&hurts, nth);
                [hurt, pace(&discards, nth)]
            } else {
                let discarded = pace(&discards, nth);
                [pace(&hurts, nth), discarded]
            }
        })
        .collect();
    pairs.sort_by(|a, b| f64::total_cmp(&(a[0] / a[1]), &(b[0] / b[1])));
    let ratios: Vec<String> = pairs.iter().map(|[a, b]| format!("{:.2}", a / b)).collect();
    let [hurt, discarded] = pairs[PAIRS / 2];
    println!(
        "  {attach}: {hurt:.0} rounds a second beside {PACKETS_A_SECOND} packets a second and {CONNECTIONS} connections, \
         {discarded:.0} where these are discarded: {:.2} of the pace; pairs {}",
        hurt / discarded,
        ratios.join(" "),
    );
    assert!(hurt >= discarded / 2.0, "{attach}: {:.2} of the pace is left", hurt / discarded);
    place.check_unhurt(&before);
}

/// Accepts connections, and keeps them until they end.
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
