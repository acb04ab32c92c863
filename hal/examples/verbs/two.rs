//! Two machines: each end in a process of its own, which say over TCP who they are.

use super::{LIMIT, burst_in, burst_out, one_sided};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant as Clock;
use sumac_hal::port::{Addr, Port, VerbsAddr};
use sumac_hal::verbs::{OneSidedEnd, RemoteRegion, VerbsConfig, VerbsDomain, VerbsLink, VerbsPort};

/// The TCP port of the side that waits.
const PORT: u16 = 7700;

/// Packets of a burst, and how many bursts go each way. The emulated wire has small buffers, and what they lose nobody sends
/// again here.
const PACKETS: usize = 4;
const BURSTS: usize = 20;

/// Bytes that are read from the other machine.
const LEN: usize = 1 << 20;

/// The other side, for words.
struct Other {
    reader: BufReader<TcpStream>,
    writer: TcpStream,
}

impl Other {
    /// Wait for the other side, or find it at an address.
    fn meet(at: Option<&str>) -> Self {
        let stream = match at {
            None => TcpListener::bind(("0.0.0.0", PORT)).and_then(|listener| listener.accept()).expect("a peer").0,
            Some(host) => {
                let start = Clock::now();
                loop {
                    match TcpStream::connect((host, PORT)) {
                        Ok(stream) => break stream,
                        Err(error) => assert!(start.elapsed() < 6 * LIMIT, "nobody is there: {error}"),
                    }
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        };
        Self { writer: stream.try_clone().expect("a file"), reader: BufReader::new(stream) }
    }

    /// Say these numbers, and hear as many.
    fn exchange(&mut self, own: &[u64]) -> Vec<u64> {
        let line: Vec<String> = own.iter().map(u64::to_string).collect();
        writeln!(self.writer, "{}", line.join(" ")).expect("it listens");
        let mut line = String::new();
        self.reader.read_line(&mut line).expect("it answers");
        let heard: Vec<u64> = line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        assert_eq!(heard.len(), own.len(), "{line:?}");
        heard
    }
}

fn halves(gid: [u8; 16]) -> [u64; 2] {
    let whole = u128::from_be_bytes(gid);
    [(whole >> 64) as u64, whole as u64]
}

fn gid(halves: &[u64]) -> [u8; 16] {
    (u128::from(halves[0]) << 64 | u128::from(halves[1])).to_be_bytes()
}

/// Exchange bursts of packets, then read the other machine's memory, and let it read this one's.
pub(crate) fn run(link: &VerbsLink, at: Option<&str>) {
    let config = VerbsConfig { link: link.clone(), ..VerbsConfig::default() };
    let mut other = Other::meet(at);
    let mut port = VerbsPort::open(&config).expect("a port");
    let Addr::Verbs(own) = port.local_addr() else { panic!("a verbs port") };
    let [high, low] = halves(own.gid);
    let heard = other.exchange(&[high, low, u64::from(own.lid), u64::from(own.qpn)]);
    let to = Addr::Verbs(VerbsAddr { gid: gid(&heard), lid: heard[2] as u16, qpn: heard[3] as u32 });
    let len = port.capabilities().max_packet_len_bytes;
    for _ in 0..BURSTS {
        burst_out(&mut port, to, PACKETS, len);
        burst_in(&mut port, PACKETS, len);
    }
    println!("{} packets of {len} bytes each way: {:?}", BURSTS * PACKETS, port.stats());
    let domain = VerbsDomain::open(&config).expect("a domain");
    let (mut near, mut far) = (domain.expose(LEN).expect("memory"), domain.expose(LEN).expect("memory"));
    let side = u8::from(at.is_some());
    far.write(0, &vec![10 + side; LEN]).expect("inside");
    let (mut ends, told) = (domain.one_sided().expect("an end"), far.remote());
    let own = ends.end();
    let [high, low] = halves(own.gid);
    let words = [high, low, u64::from(own.lid), u64::from(own.qpn), u64::from(own.psn), u64::from(own.mtu_bytes)];
    let heard = other.exchange(&words);
    let (qpn, psn, mtu_bytes) = (heard[3] as u32, heard[4] as u32, heard[5] as u16);
    ends.connect(&OneSidedEnd { gid: gid(&heard), lid: heard[2] as u16, qpn, psn, mtu_bytes }).expect("connected");
    // The other side is connected when it has said this.
    let heard = other.exchange(&[told.addr, told.len_bytes, u64::from(told.rkey), u64::from(told.generation)]);
    let (rkey, generation) = (heard[2] as u32, heard[3] as u32);
    let theirs = RemoteRegion { addr: heard[0], len_bytes: heard[1], rkey, generation };
    ends.read((&mut near, 0), (&theirs, 0), LEN as u64).expect("room");
    assert_eq!(one_sided::finish(&mut ends, 1).error, None);
    assert!(one_sided::bytes(&near) == vec![10 + (1 - side); LEN], "the other machine's memory");
    // Nobody goes before the other has read.
    other.exchange(&[1]);
    println!("read {LEN} bytes of the other machine's memory");
}
