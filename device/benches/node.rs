//! How many packets per second one device shard handles, and what each costs.
//!
//! ```text
//! cargo bench -p sumac-device --features sumac-hal/std --bench node     packets per second: a table
//! tests/bench/instructions                                             instructions per packet (callgrind)
//! ```
//!
//! One [`Node`], the root of one group, is driven as [`sumac_device::runtime::poll`] does it: handle a burst of
//! packets, check the deadline, poll packets until there are none. There is no port: contributions are prepared packets
//! with the right keys and checksums, and results are dropped. So the numbers cover the protocol, the checksums and the
//! kernels, not an operating system's network stack. Contributions come as a port with receive offload returns them: in
//! trains of [`TRAIN`] consecutive chunks of one child.
//!
//! Two things flatter the numbers. Packets are reused and stay in the cache, as far as [`POOL_BYTES`] and the window
//! allow, whereas a port's packets come from wherever its driver put them. And the group is the first in a table of
//! [`GROUPS`], so looking it up costs nothing; the round robin over the table is paid in full.
//!
//! hal's feature `std` gives hosted devices wide vectors and a fast checksum. Ask for it on the command line, since the
//! device crate's manifest must not name it.
//!
//! Invariant: the counted work was done. After each case the node's counters show that every contribution was accepted
//! and answered and nothing was dropped, and the last result is checked to be the sum.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::process::ExitCode;
use std::time::{Duration, Instant as Clock};
use sumac_device::{Child, Hop, Node, NodeConfig, Slot, Storage};
use sumac_hal::ctrl::{ChildMask, GroupConfig, Order, Request, Response, TreeConfig};
use sumac_hal::driver::{BATCH_PACKETS, Batch};
use sumac_hal::ids::{BootId, ChildIndex, ChunkNo, Epoch, GroupId, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::port::{Addr, Ecn};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::{HopTimers, MAX_WINDOW};
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, Packet, Repr, SHORT_HEADER_LEN, payload_crc};

/// Payloads in bytes: a barrier's Empty, one cache line, what fits Ethernet's 1,500, a jumbo frame's 9,000, and UDP's
/// 64 KiB; each with room for the headers, and a multiple of 16 as chunks are.
const PAYLOADS_BYTES: [usize; 5] = [0, 64, 1344, 8880, 61_424];

/// Children of the root: a leaf of a small tree, and of a large one.
const CHILDREN: [u16; 2] = [4, 32];

/// Children in the mode that counts instructions.
const COUNTED_CHILDREN: u16 = 4;

/// Packets prepared in the mode that counts instructions, whatever part of them it handles: two runs then have the same
/// set-up, and their difference is the handling alone.
const COUNTED_PACKETS: usize = 2048;

/// Packets between two polls; the UDP port returns at most 256.
const BURST: usize = 64;

/// Consecutive chunks of one child, before those of the next. Linux coalesces up to 64 KiB; trains of some eighteen
/// packets were seen.
const TRAIN: usize = 16;

/// Entries of the table of groups, as on an emulated board.
const GROUPS: usize = 64;

/// Approximate bytes of packets handled before they are renumbered.
const POOL_BYTES: usize = 1 << 20;

/// Approximate bytes of one child's window.
const WINDOW_BYTES: usize = 256 << 10;

/// Rounds of a case; the table shows the best.
const ROUNDS: usize = 5;

/// Time spent in the node per round.
const ROUND: Duration = Duration::from_millis(40);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        // `cargo bench` passes --bench; `cargo test --benches` does not, and has nothing to check here.
        [] if !std::env::args().any(|arg| arg == "--bench") => {
            println!("nothing measured: run by `cargo bench`, or with --bench");
        }
        ["--instructions", payload, count] => return counted(payload, count, "64"),
        ["--instructions", payload, count, burst] => return counted(payload, count, burst),
        [_, ..] if args[0].starts_with("--") => {
            eprintln!("usage: node [--instructions PAYLOAD_BYTES CONTRIBUTIONS [BURST]]");
            return ExitCode::from(2);
        }
        _ => table(),
    }
    ExitCode::SUCCESS
}

/// Measure every case and print a row for each.
fn table() {
    println!("one shard, root of one group, f32 sum, {BURST} packets a burst; payload 0 is a barrier");
    println!("{:>10} {:>9} {:>10} {:>10} {:>9} {:>9}", "payload", "children", "in", "out", "in", "per contr.");
    println!("{:>10} {:>9} {:>10} {:>10} {:>9} {:>9}", "B", "", "Mpackets/s", "Mpackets/s", "GB/s", "ns");
    for children in CHILDREN {
        for payload_len_bytes in PAYLOADS_BYTES {
            let mut rig = Rig::new(children, payload_len_bytes);
            let best = (0..ROUNDS).map(|_| rig.round()).max_by(|a, b| a.rate_in().total_cmp(&b.rate_in()));
            rig.check();
            let Some(best) = best else { continue };
            println!(
                "{payload_len_bytes:>10} {children:>9} {:>10.3} {:>10.3} {:>9.2} {:>9.0}",
                best.rate_in() * 1e3,
                best.packets_out as f64 / best.ns * 1e3,
                best.rate_in() * (header_len(payload_len_bytes) + payload_len_bytes) as f64,
                1.0 / best.rate_in(),
            );
        }
    }
}

/// Handle exactly `count` contributions after a set-up that does not depend on `count`.
fn counted(payload: &str, count: &str, burst: &str) -> ExitCode {
    let (Ok(payload_len_bytes), Ok(count), Ok(burst)) = (payload.parse(), count.parse(), burst.parse()) else {
        eprintln!("'{payload}', '{count}' and '{burst}' must be numbers: payload in bytes, contributions, burst");
        return ExitCode::from(2);
    };
    if !PAYLOADS_BYTES.contains(&payload_len_bytes) || count > COUNTED_PACKETS || burst == 0 {
        eprintln!("payload {payload_len_bytes}: must be one of {PAYLOADS_BYTES:?}");
        eprintln!("contributions {count}: at most {COUNTED_PACKETS} allowed; burst {burst}: at least 1 needed");
        return ExitCode::from(2);
    }
    let mut rig = Rig::new(COUNTED_CHILDREN, payload_len_bytes);
    let pool = rig.make(COUNTED_PACKETS / usize::from(COUNTED_CHILDREN));
    rig.drive(&pool[..count], burst);
    rig.check();
    ExitCode::SUCCESS
}

/// The result of one round.
struct Round {
    packets_in: u64,
    packets_out: u64,
    ns: f64,
}

impl Round {
    /// Packets in per nanosecond.
    fn rate_in(&self) -> f64 {
        self.packets_in as f64 / self.ns
    }
}

/// A packet to handle, and its sender.
struct Inbound {
    from: Addr,
    repr: Repr,
    bytes: Vec<u8>,
}

/// A root node, its children's position in the sequence, and the clock.
struct Rig {
    node: Node<'static>,
    children: u16,
    payload: Vec<u8>,
    payload_crc: u32,
    train: usize,
    window: usize,
    keys: Vec<u64>,
    next_seq: u64,
    now: Instant,
}

const GROUP: GroupId = GroupId(7);
const EPOCH: Epoch = Epoch { term: 1, counter: 1 };
const SECRET: GroupSecret = GroupSecret([9; 16]);

impl Rig {
    /// Set up a node with one group; its children contribute ones.
    fn new(children: u16, payload_len_bytes: usize) -> Self {
        let chunk_len_bytes = payload_len_bytes.max(64);
        let window = (WINDOW_BYTES / chunk_len_bytes).clamp(1, MAX_WINDOW as usize);
        let train = TRAIN.min(window);
        // No train lies in two windows.
        let window = window - window % train;
        let payload: Vec<u8> = 1_f32.to_le_bytes().into_iter().cycle().take(payload_len_bytes).collect();
        let mut node = empty_node(children, chunk_len_bytes, 2 * window);
        let config = GroupConfig {
            group: GROUP,
            tree: TreeId(1),
            epoch: EPOCH,
            order: Order::Arrival,
            secret: SECRET,
            parent_key: 0,
            shared: None,
            parent_shared: None,
            window_max: window as u16,
            slots: 2 * window as u16,
            chunk_len_bytes: chunk_len_bytes as u16,
            ranks: NonZeroU32::MIN,
            lease_ms: 60_000,
            timers: HopTimers::DEFAULT.into(),
            zero_copy: ChildMask::EMPTY,
        };
        let now = Instant::ZERO;
        let tree = TreeConfig { tree: TreeId(1), parent: None, children, ranks: Default::default() };
        assert_eq!(node.control(&Request::InstallTree(tree), now), Response::Done);
        assert_eq!(node.control(&Request::CreateGroup(config), now), Response::Done);
        let keys = (0..children).map(|child| SECRET.child_key(GROUP, EPOCH, ChildIndex(child))).collect();
        let mut rig =
            Self { node, children, payload_crc: payload_crc(&payload), payload, train, window, keys, next_seq: 0, now };
        rig.describe();
        rig
    }

    /// Describe the operation that the short headers name.
    fn describe(&mut self) {
        let repr = Repr { kind: Kind::Operation, flags: Flags::empty(), payload_len_bytes: 0, ..self.contribution(0) };
        self.node.handle(self.now, Addr::Emu(0), Ecn::Unmarked, &repr.header(0));
    }

    /// Make every child's contribution to the next `chunks` chunks.
    fn make(&mut self, chunks: usize) -> Vec<Inbound> {
        let mut pool: Vec<Inbound> = (0..chunks)
            .flat_map(|_| 0..self.children)
            .map(|child| {
                let repr = self.contribution(child);
                let mut bytes = vec![0; repr.packet_len()];
                bytes[repr.header_len()..].copy_from_slice(&self.payload);
                Inbound { from: Addr::Emu(u32::from(child)), repr, bytes }
            })
            .collect();
        let children = usize::from(self.children);
        for trains in pool.chunks_mut(self.train * children) {
            trains.sort_by_key(|inbound| inbound.repr.child);
        }
        self.number(&mut pool);
        pool
    }

    /// A child's contribution, without its position in the sequence.
    fn contribution(&self, child: u16) -> Repr {
        let (kind, op) = match self.payload.len() {
            0 => (Kind::Empty, OpDesc::barrier()),
            _ => (Kind::Data, OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 1 << 30)),
        };
        Repr {
            collective: Some(op.collective),
            dtype: op.dtype,
            op: op.op,
            bits: op.count,
            signature: op.signature(Path::Tree, 1),
            flags: match (kind, header_len(self.payload.len())) {
                (Kind::Data, SHORT_HEADER_LEN) => Flags::WANT | Flags::SHORT,
                (Kind::Data, _) => Flags::WANT,
                _ => Flags::empty(),
            },
            count: 1,
            payload_len_bytes: self.payload.len() as u16,
            ..Repr::new(kind, GROUP, EPOCH, ChildIndex(child), self.keys[usize::from(child)])
        }
    }

    /// Number the packets. A child advances `have` once per window, the least often that keeps the sequence going.
    fn number(&mut self, pool: &mut [Inbound]) {
        for trains in pool.chunks_mut(self.train * usize::from(self.children)) {
            let chunks = trains.len() / usize::from(self.children);
            for (at, inbound) in trains.iter_mut().enumerate() {
                let seq = self.next_seq + (at % chunks) as u64;
                inbound.repr.seq = ChunkNo(seq);
                inbound.repr.mark = ChunkNo(seq - seq % self.window as u64);
                inbound.repr.emit(&mut Packet::new_unchecked(&mut inbound.bytes[..]), self.payload_crc);
            }
            self.next_seq += chunks as u64;
        }
    }

    /// Handle a pool repeatedly until [`ROUND`] has passed; it is renumbered between passes, outside the measured time.
    fn round(&mut self) -> Round {
        let chunk_bytes = usize::from(self.children) * (header_len(self.payload.len()) + self.payload.len());
        let chunks = (POOL_BYTES / chunk_bytes).clamp(self.train, self.window);
        let mut pool = self.make(chunks - chunks % self.train);
        let before = *self.node.counters();
        let mut spent = Duration::ZERO;
        loop {
            let start = Clock::now();
            self.drive(&pool, BURST);
            spent += start.elapsed();
            if spent >= ROUND {
                break;
            }
            self.number(&mut pool);
        }
        let after = self.node.counters();
        Round {
            packets_in: after.packets_in - before.packets_in,
            packets_out: after.packets_out - before.packets_out,
            ns: spent.as_nanos() as f64,
        }
    }

    /// What a shard does with these packets. No burst is longer than all children's windows: no child sends the next
    /// packet before its first result has arrived.
    fn drive(&mut self, packets: &[Inbound], burst: usize) {
        for packets in packets.chunks(burst.min(self.window * usize::from(self.children))) {
            self.now = self.now + Duration::from_micros(1);
            self.receive(packets);
            self.send();
        }
    }

    /// Handle a burst. Not inlined: the instructions in here are counted.
    #[inline(never)]
    fn receive(&mut self, packets: &[Inbound]) {
        for train in packets.chunk_by(|inbound, next| inbound.repr.child == next.repr.child) {
            let bytes = train.iter().map(|inbound| &inbound.bytes[..]);
            self.node.handle_train(self.now, train[0].from, Ecn::Unmarked, bytes);
        }
    }

    /// Handle what is due, and take what is to be sent. Not inlined: the instructions in here are counted.
    #[inline(never)]
    fn send(&mut self) {
        if self.node.poll_timeout().is_some_and(|at| at <= self.now) {
            self.node.handle_timeout(self.now);
        }
        loop {
            let mut batch = Batch::new();
            self.node.poll_batch(self.now, BATCH_PACKETS, &mut batch);
            if batch.is_empty() {
                break;
            }
            batch.iter().for_each(|out| _ = black_box(self.node.payload(out)));
        }
    }

    /// Check that all work was done correctly: complete the last chunk and check its result.
    fn check(&mut self) {
        let counters = *self.node.counters();
        let children = u64::from(self.children);
        // One packet described the operation.
        assert_eq!(counters.contributions, counters.packets_in - 1, "every packet was an accepted contribution");
        assert_eq!(counters.answers, counters.contributions / children * children, "every contribution was answered");
        if self.payload.is_empty() {
            // One Done answers a run of chunks, as far as they are complete together.
            assert!((1..=counters.answers).contains(&counters.packets_out), "{} packets", counters.packets_out);
        } else {
            assert_eq!(counters.packets_out, counters.answers, "one packet per answer");
        }
        // A run that was cut short leaves packets that were numbered but not handled.
        self.next_seq = counters.completed;
        let last = self.make(1);
        last.iter().for_each(|inbound| self.node.handle(self.now, inbound.from, Ecn::Unmarked, &inbound.bytes));
        let sum: Vec<u8> =
            f32::from(self.children).to_le_bytes().into_iter().cycle().take(self.payload.len()).collect();
        for _ in 0..self.children {
            let out = self.node.poll_transmit(self.now).expect("one answer per child");
            assert!(self.node.payload(&out) == sum, "the result is the sum");
        }
    }
}

/// Return the length of a contribution's header: a short payload travels under a full one.
const fn header_len(payload_len_bytes: usize) -> usize {
    if payload_len_bytes < HEADER_LEN - SHORT_HEADER_LEN { HEADER_LEN } else { SHORT_HEADER_LEN }
}

/// Return a node without groups, with the tables of an emulated board.
fn empty_node(children: u16, chunk_len_bytes: usize, slots: usize) -> Node<'static> {
    let config = NodeConfig {
        shard: Shard::WHOLE,
        boot_id: BootId(42),
        max_packet_len_bytes: HEADER_LEN + chunk_len_bytes,
        receive_buffer_bytes: 8 << 20,
    };
    let storage = Storage {
        groups: Vec::leak((0..GROUPS).map(|_| None).collect()),
        trees: Vec::leak(vec![None; GROUPS]),
        children: Vec::leak(vec![Child::EMPTY; usize::from(children)]),
        hops: Vec::leak(vec![Hop::EMPTY; GROUPS]),
        slots: Vec::leak(vec![Slot::EMPTY; slots]),
        bytes: Vec::leak(vec![0; slots * chunk_len_bytes]),
    };
    Node::new(config, storage)
}
