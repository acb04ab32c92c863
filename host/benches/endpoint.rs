//! What each chunk of an all-reduce costs a rank: the contribution that it sends, and the result that it receives.
//!
//! ```text
//! cargo bench -p sumac --bench endpoint     nanoseconds per chunk
//! tests/bench/instructions                  instructions per packet (callgrind)
//! ```
//!
//! One [`Endpoint`] of a group of four, driven as its driver does it: handle a burst of packets, poll packets until
//! there are none. There is no port: results are prepared packets with the right key and checksum, and contributions
//! are dropped. So the numbers cover the protocol, the checksums and the copy into the caller's buffer, not an
//! operating system's network stack. Packets and buffers stay in the cache as far as it is large enough.
//!
//! Invariant: the counted work was done. At the end the operation is complete, its buffer holds the result, and no
//! packet was dropped.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant as Clock};
use sumac::transport::packets::{Buffers, Endpoint, EndpointConfig, Event, OpId};
use sumac_hal::driver::{BATCH_PACKETS, Batch};
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::time::Instant;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{Flags, Kind, Packet, Repr, payload_crc};

/// Payloads in bytes: one cache line, what fits Ethernet's 1,500, and a jumbo frame's 9,000.
const PAYLOADS_BYTES: [usize; 3] = [64, 1344, 8880];

/// Chunks of the operation, however many of their results are handled: two runs that count instructions then have the
/// same set-up.
const CHUNKS: usize = 2048 + WINDOW as usize;

/// Packets between two polls.
const BURST: usize = 64;

/// The window in chunks.
const WINDOW: u16 = 256;

const LEAF: Addr = Addr::Emu(50);
const GROUP: GroupId = GroupId(7);
const EPOCH: Epoch = Epoch { term: 1, counter: 1 };
const KEY: u64 = 0x1234_5678;
const TABLE_VERSION: u32 = 1;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        // `cargo bench` passes --bench; `cargo test --benches` does not, and has nothing to check here.
        [] if !std::env::args().any(|arg| arg == "--bench") => {
            println!("nothing measured: run by `cargo bench`, or with --bench");
        }
        ["--instructions", payload, count, burst] => return counted(payload, count, burst),
        [_, ..] if args[0].starts_with("--") => {
            eprintln!("usage: endpoint [--instructions PAYLOAD_BYTES RESULTS BURST]");
            return ExitCode::from(2);
        }
        _ => table(),
    }
    ExitCode::SUCCESS
}

/// Measure every payload and print a row for each.
fn table() {
    println!("one rank, f32 sum, {BURST} packets a burst, window {WINDOW}");
    println!("{:>10} {:>12}", "payload B", "ns per chunk");
    for payload_len_bytes in PAYLOADS_BYTES {
        let best = (0..5).map(|_| {
            let mut rig = Rig::new(payload_len_bytes);
            let start = Clock::now();
            rig.drive(CHUNKS, BURST);
            let spent = start.elapsed();
            rig.check();
            spent
        });
        let ns = best.min().unwrap_or_default().as_nanos() as f64 / CHUNKS as f64;
        println!("{payload_len_bytes:>10} {ns:>12.0}");
    }
}

/// Handle exactly `count` results after a set-up that does not depend on `count`.
fn counted(payload: &str, count: &str, burst: &str) -> ExitCode {
    let (Ok(payload_len_bytes), Ok(count), Ok(burst)) = (payload.parse(), count.parse(), burst.parse()) else {
        eprintln!("'{payload}', '{count}' and '{burst}' must be numbers: payload in bytes, results, burst");
        return ExitCode::from(2);
    };
    if !PAYLOADS_BYTES.contains(&payload_len_bytes)
        || count > CHUNKS - usize::from(WINDOW)
        || !(1..=usize::from(WINDOW)).contains(&burst)
    {
        eprintln!("payload {payload_len_bytes}: must be one of {PAYLOADS_BYTES:?}");
        eprintln!(
            "results {count}: at most {} allowed; burst {burst}: must be 1 to {WINDOW}",
            CHUNKS - usize::from(WINDOW)
        );
        return ExitCode::from(2);
    }
    let mut rig = Rig::new(payload_len_bytes);
    rig.drive(count, burst);
    assert_eq!(rig.endpoint.have(), ChunkNo(count as u64), "every result landed");
    ExitCode::SUCCESS
}

/// One buffer, input and output alike.
struct Memory(Vec<u8>);

impl Buffers for Memory {
    fn input(&self, _: OpId) -> &[u8] {
        &self.0
    }

    fn output(&mut self, _: OpId) -> &mut [u8] {
        &mut self.0
    }
}

/// An endpoint with one operation in flight, and the results of all its chunks.
struct Rig {
    endpoint: Endpoint,
    memory: Memory,
    results: Vec<Vec<u8>>,
    now: Instant,
}

impl Rig {
    /// Post an operation that contributes ones; the results are fours.
    fn new(payload_len_bytes: usize) -> Self {
        let mut endpoint = Endpoint::new(EndpointConfig {
            group: GROUP,
            epoch: EPOCH,
            rank: Rank(1),
            ranks: 4,
            child: ChildIndex(1),
            key: KEY,
            shared_key: None,
            parents: vec![LEAF],
            window_max: WINDOW,
            window_start: WINDOW,
            chunk_len_bytes: payload_len_bytes as u16,
            timers: HopTimers::DEFAULT,
            table_version: TABLE_VERSION,
            salt: 9,
        });
        let elements = payload_len_bytes / size_of::<f32>() * CHUNKS;
        let op = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, elements as u64);
        endpoint.post(op, Path::Tree, None).expect("there is room for one operation");
        let signature = op.tree_signature(Path::Tree, TABLE_VERSION, ChunkNo(0));
        let payload = 4_f32.to_le_bytes().repeat(payload_len_bytes / size_of::<f32>());
        let crc = payload_crc(&payload);
        let result = |chunk: usize| {
            let repr = Repr {
                flags: Flags::SHORT,
                seq: ChunkNo(chunk as u64),
                mark: ChunkNo((chunk - chunk % usize::from(WINDOW)) as u64),
                signature,
                window: WINDOW,
                payload_len_bytes: payload_len_bytes as u16,
                ..Repr::new(Kind::Result, GROUP, EPOCH, ChildIndex(1), KEY)
            };
            let mut bytes = vec![0; repr.packet_len()];
            bytes[repr.header_len()..].copy_from_slice(&payload);
            repr.emit(&mut Packet::new_unchecked(&mut bytes[..]), crc);
            bytes
        };
        let results = (0..CHUNKS).map(result).collect();
        let memory = Memory(1_f32.to_le_bytes().repeat(elements));
        Self { endpoint, memory, results, now: Instant::ZERO }
    }

    /// Do what a rank does with the first `count` results.
    fn drive(&mut self, count: usize, burst: usize) {
        self.send();
        for first in (0..count).step_by(burst) {
            self.now = self.now + Duration::from_micros(1);
            self.receive(first..count.min(first + burst));
            self.send();
        }
    }

    /// Handle a burst. Not inlined: the instructions in here are counted.
    #[inline(never)]
    fn receive(&mut self, results: std::ops::Range<usize>) {
        let packets = self.results[results].iter().map(|packet| &packet[..]);
        self.endpoint.handle_train(self.now, LEAF, Ecn::Unmarked, packets, &mut self.memory);
    }

    /// Take what is to be sent. Not inlined: the instructions in here are counted.
    #[inline(never)]
    fn send(&mut self) {
        loop {
            let mut batch = Batch::new();
            self.endpoint.poll_batch(self.now, &self.memory, BATCH_PACKETS, &mut batch);
            if batch.is_empty() {
                break;
            }
            batch.iter().for_each(|out| _ = black_box(out));
        }
    }

    /// Check that all work was done correctly.
    fn check(&mut self) {
        assert!(matches!(self.endpoint.poll_event(), Some(Event::Completed(_))), "the operation is complete");
        assert_eq!(self.endpoint.stats().dropped, 0, "no packet was dropped");
        let sum = 4_f32.to_le_bytes();
        assert!(self.memory.0.chunks_exact(sum.len()).all(|element| element == sum), "the buffer holds the sums");
    }
}
