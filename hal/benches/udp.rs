//! The throughput of UDP ports over loopback, by datagram size, with and without the kernel's offloads.
//!
//! It prints two tables. *One flow*: one thread sends and another receives. *Device*: one port receives a packet from
//! each of four senders and then sends one to each, as an aggregation node does; bytes are counted in both directions.
//! Credits limit the packets in flight to the receive buffers, so that none is lost. The length of every packet is
//! checked. Run it with `cargo bench -p sumac-hal --features udp --bench udp`. An argument such as `2000` is the time
//! per cell in milliseconds.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant as Clock};
use sumac_hal::port::{Addr, Port, RxToken, TxToken, WaitPort};
use sumac_hal::time::Instant;
use sumac_hal::udp::{Offload, UdpConfig, UdpPort};

const LENGTHS: [usize; 5] = [1472, 8 << 10, 16 << 10, 32 << 10, 60 << 10];
const CHILDREN: usize = 4;
const WAIT: Option<Duration> = Some(Duration::from_millis(100));
/// The time, which these ports ignore.
const NOW: Instant = Instant::ZERO;

struct Row {
    packets: u64,
    seconds: f64,
    calls: u64,
}

fn main() {
    let cell_ms = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(500);
    let cell = Duration::from_millis(cell_ms);
    for (title, run) in [
        ("one flow: 1 sender -> 1 receiver", one_flow as fn(usize, Offload, Duration) -> Row),
        ("device: 4 senders -> 1 -> 4", device as fn(usize, Offload, Duration) -> Row),
    ] {
        println!("\n{title}");
        println!("{:>8} {:>8} {:>10} {:>8} {:>14}", "bytes", "offload", "kpackets/s", "GB/s", "packets/call");
        for len_bytes in LENGTHS {
            for offload in [Offload::Auto, Offload::Off] {
                let row = run(len_bytes, offload, cell);
                let rate = row.packets as f64 / row.seconds;
                println!(
                    "{len_bytes:>8} {:>8} {:>10.0} {:>8.2} {:>14.1}",
                    if offload == Offload::Auto { "on" } else { "off" },
                    rate / 1e3,
                    rate * len_bytes as f64 / 1e9,
                    row.packets as f64 / row.calls.max(1) as f64,
                );
            }
        }
    }
}

fn open(len_bytes: usize, offload: Offload) -> UdpPort {
    let config =
        UdpConfig { max_packet_len_bytes: Some(len_bytes), gso: offload, gro: offload, ..UdpConfig::default() };
    UdpPort::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &config).expect("a free port on loopback")
}

/// Queue one packet; only its first byte is written.
fn send(port: &mut UdpPort, to: Addr, len_bytes: usize) {
    loop {
        if let Some(token) = port.transmit(NOW) {
            return token.consume(to, |buffer| {
                buffer[0] = 1;
                (len_bytes, ())
            });
        }
        port.flush(NOW);
    }
}

/// Receive all packets that have arrived. `each` gets the sender, and whether it is a bulk packet rather than a credit.
fn take(port: &mut UdpPort, len_bytes: usize, mut each: impl FnMut(Addr, bool)) {
    while let Some(token) = port.receive(NOW) {
        token.consume(|from, bytes| {
            assert!(bytes.len() == len_bytes || bytes.len() == 1, "a packet of {} bytes", bytes.len());
            each(from, bytes.len() == len_bytes);
        });
    }
}

/// Return how many packets may be in flight to one port, and how many a credit of one byte stands for.
fn window(port: &UdpPort, len_bytes: usize) -> (u64, u64) {
    let window = (port.capabilities().receive_buffer_bytes / len_bytes / 2).min(1024) as u64;
    (window, (window / 4).max(1))
}

fn one_flow(len_bytes: usize, offload: Offload, cell: Duration) -> Row {
    let (mut tx, mut rx) = (open(len_bytes, offload), open(len_bytes, offload));
    let (window, credit) = window(&rx, len_bytes);
    let (to, back) = (rx.local_addr(), tx.local_addr());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut room = window;
            while !done.load(Ordering::Relaxed) {
                for _ in 0..room.min(tx.capabilities().burst_packets as u64) {
                    send(&mut tx, to, len_bytes);
                    room -= 1;
                }
                tx.flush(NOW);
                if room == 0 {
                    tx.wait(WAIT);
                }
                take(&mut tx, len_bytes, |_, _| room += credit);
            }
        });
        let start = Clock::now();
        let (mut packets, mut unacknowledged) = (0, 0);
        while start.elapsed() < cell {
            take(&mut rx, len_bytes, |_, _| {
                packets += 1;
                unacknowledged += 1;
            });
            while unacknowledged >= credit {
                send(&mut rx, back, 1);
                unacknowledged -= credit;
            }
            rx.flush(NOW);
            rx.wait(WAIT);
        }
        let seconds = start.elapsed().as_secs_f64();
        done.store(true, Ordering::Relaxed);
        Row { packets, seconds, calls: rx.stats().receive_calls }
    })
}

fn device(len_bytes: usize, offload: Offload, cell: Duration) -> Row {
    let mut device = open(len_bytes, offload);
    let to = device.local_addr();
    let window = (window(&device, len_bytes).0 / CHILDREN as u64).max(1);
    let mut children: Vec<UdpPort> = (0..CHILDREN).map(|_| open(len_bytes, offload)).collect();
    let addrs: Vec<Addr> = children.iter().map(UdpPort::local_addr).collect();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for mut child in children.drain(..) {
            let done = &done;
            scope.spawn(move || {
                let mut room = window;
                while !done.load(Ordering::Relaxed) {
                    for _ in 0..room {
                        send(&mut child, to, len_bytes);
                    }
                    child.flush(NOW);
                    room = 0;
                    child.wait(WAIT);
                    take(&mut child, len_bytes, |_, _| room += 1);
                }
            });
        }
        let start = Clock::now();
        let (mut packets, mut sent) = (0, 0);
        let mut arrived = [0_u64; CHILDREN];
        while start.elapsed() < cell {
            take(&mut device, len_bytes, |from, _| {
                let child = addrs.iter().position(|&addr| addr == from).expect("only children send");
                arrived[child] += 1;
                packets += 1;
            });
            while arrived.iter().all(|&count| count > sent) {
                sent += 1;
                addrs.iter().for_each(|&addr| send(&mut device, addr, len_bytes));
                packets += CHILDREN as u64;
            }
            device.flush(NOW);
            device.wait(WAIT);
        }
        let seconds = start.elapsed().as_secs_f64();
        done.store(true, Ordering::Relaxed);
        let stats = device.stats();
        Row { packets, seconds, calls: stats.receive_calls + stats.send_calls }
    })
}
