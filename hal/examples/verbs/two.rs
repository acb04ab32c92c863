//! Two machines, one end on each; the ends exchange their addresses over TCP.
//!
//! Besides `ok two`, the side that connects prints a line for each rate and each latency:
//! `rate WHAT LEN B GBIT Gbit/s` and `latency WHAT LEN B MEDIAN us, p99 P99 us`.

mod device;
mod rank;
mod rates;

pub(crate) use rank::victim;

use super::{LIMIT, burst_in, burst_out, one_sided};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant as Clock;
use sumac_hal::port::{Addr, Port, VerbsAddr};
use sumac_hal::remote::{LINK_END_LEN_BYTES, LinkEnd};
use sumac_hal::verbs::{OneSidedEnd, RemoteRegion, VerbsConfig, VerbsDomain, VerbsLink, VerbsPort};

/// The TCP ports of the listening side: for the other machine's process, and for the one that gets killed.
const PORT: u16 = 7700;
const VICTIM_PORT: u16 = 7701;

/// Packets per burst, and bursts in each direction. The emulated wire has small buffers, and this check does not
/// retransmit.
const PACKETS: usize = 4;
const BURSTS: usize = 20;

/// The number of bytes read from the other machine.
const LEN: usize = 1 << 20;

/// The TCP connection to the other side.
struct Other {
    reader: BufReader<TcpStream>,
    writer: TcpStream,
}

impl Other {
    /// Accept the other side, or connect to it at an address.
    fn connect(at: Option<&str>, port: u16) -> Self {
        let stream = match at {
            None => TcpListener::bind(("0.0.0.0", port)).and_then(|listener| listener.accept()).expect("a peer").0,
            Some(host) => {
                let start = Clock::now();
                loop {
                    match TcpStream::connect((host, port)) {
                        Ok(stream) => break stream,
                        Err(error) => assert!(start.elapsed() < 6 * LIMIT, "no peer: {error}"),
                    }
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        };
        Self { writer: stream.try_clone().expect("a file"), reader: BufReader::new(stream) }
    }

    /// Return whether the other side has sent something that was not received.
    fn has_written(&self) -> bool {
        self.writer.set_nonblocking(true).expect("a socket");
        let has_written = self.writer.peek(&mut [0]).is_ok();
        self.writer.set_nonblocking(false).expect("a socket");
        has_written
    }

    /// Send these numbers, and receive as many.
    fn exchange(&mut self, own: &[u64]) -> Vec<u64> {
        let line: Vec<String> = own.iter().map(u64::to_string).collect();
        writeln!(self.writer, "{}", line.join(" ")).expect("the other side is connected");
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("a reply");
        let received: Vec<u64> = line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        assert_eq!(received.len(), own.len(), "{line:?}");
        received
    }
}

/// Wait until the other side has come as far.
fn meet(other: &mut Other) {
    other.exchange(&[1]);
}

fn halves(gid: [u8; 16]) -> [u64; 2] {
    let whole = u128::from_be_bytes(gid);
    [(whole >> 64) as u64, whole as u64]
}

fn gid(halves: &[u64]) -> [u8; 16] {
    (u128::from(halves[0]) << 64 | u128::from(halves[1])).to_be_bytes()
}

/// Exchange bursts of packets, access the other machine's memory in every way, and lose a peer.
pub(crate) fn run(link: &VerbsLink, at: Option<&str>) {
    let config = VerbsConfig { link: link.clone(), ..VerbsConfig::default() };
    let mut other = Other::connect(at, PORT);
    packets(&config, at.is_some(), &mut other);
    reads_and_rates(&config, at.is_some(), &mut other);
    match at {
        None => device::check(link, &mut other),
        Some(host) => rank::check(link, host, &mut other),
    }
    // Neither side exits before the other has finished.
    meet(&mut other);
}

/// Send bursts of packets each way.
fn packets(config: &VerbsConfig, is_second: bool, other: &mut Other) {
    let mut port = VerbsPort::open(config).expect("a port");
    let Addr::Verbs(own) = port.local_addr() else { panic!("a verbs port") };
    let [high, low] = halves(own.gid);
    let received = other.exchange(&[high, low, u64::from(own.lid), u64::from(own.qpn)]);
    let to = Addr::Verbs(VerbsAddr { gid: gid(&received), lid: received[2] as u16, qpn: received[3] as u32 });
    let len = port.capabilities().max_packet_len_bytes;
    for _ in 0..BURSTS {
        burst_out(&mut port, to, PACKETS, len);
        burst_in(&mut port, PACKETS, len);
    }
    println!("{} packets of {len} bytes each way: {:?}", BURSTS * PACKETS, port.stats());
    if is_second {
        rates::packets(&mut port, to);
    } else {
        rates::echo(&mut port, to, || other.has_written());
    }
    meet(other);
}

/// Connect, read the other machine's memory, and let the second side measure rates.
fn reads_and_rates(config: &VerbsConfig, is_second: bool, other: &mut Other) {
    let domain = VerbsDomain::open(config).expect("a domain");
    let (mut near, mut far) = (domain.expose(LEN).expect("memory"), domain.expose(LEN).expect("memory"));
    let side = u8::from(is_second);
    far.write(0, &vec![10 + side; LEN]).expect("inside");
    let (mut ends, region) = (domain.one_sided().expect("an end"), far.remote());
    let own = ends.end();
    let [high, low] = halves(own.gid);
    let port = [own.lid, own.mtu_bytes, own.reads.into()].map(u64::from);
    let numbers = [high, low, port[0], u64::from(own.qpn), u64::from(own.psn), port[1], port[2]];
    let received = other.exchange(&numbers);
    let (qpn, psn, mtu_bytes) = (received[3] as u32, received[4] as u32, received[5] as u16);
    let (gid, lid, reads) = (gid(&received), received[2] as u16, received[6] as u8);
    ends.connect(&OneSidedEnd { gid, lid, qpn, psn, mtu_bytes, reads }).expect("connected");
    // The other side has connected before it sends this.
    let received = other.exchange(&numbers_of(&region));
    let theirs = region_of(&received);
    ends.read((&mut near, 0), (&theirs, 0), LEN as u64).expect("room");
    assert_eq!(one_sided::finish(&mut ends, 1).error, None);
    assert!(one_sided::bytes(&near) == vec![10 + (1 - side); LEN], "the other machine's memory");
    println!("read {LEN} bytes of the other machine's memory");
    // Neither side writes before the other has read.
    meet(other);
    if is_second {
        rates::one_sided(&mut ends, &mut near, &theirs);
    }
    meet(other);
}

fn numbers_of_end(end: &LinkEnd) -> [u64; 4] {
    let mut bytes = [0; 32];
    bytes[..LINK_END_LEN_BYTES].copy_from_slice(&end.0);
    std::array::from_fn(|nth| u64::from_le_bytes(std::array::from_fn(|at| bytes[8 * nth + at])))
}

fn link_end_of(numbers: &[u64]) -> LinkEnd {
    LinkEnd(std::array::from_fn(|at| numbers[at / 8].to_le_bytes()[at % 8]))
}

fn numbers_of(region: &RemoteRegion) -> [u64; 4] {
    [region.addr, region.len_bytes, u64::from(region.rkey), u64::from(region.generation)]
}

fn region_of(numbers: &[u64]) -> RemoteRegion {
    let (rkey, generation) = (numbers[2] as u32, numbers[3] as u32);
    RemoteRegion { addr: numbers[0], len_bytes: numbers[1], rkey, generation }
}
