//! The device's runtime without an operating system, a heap or std, on QEMU's virt board.
//!
//! Linking is half of the test: the program contains the node, its storage (a `static`), its loop and a port, but no
//! allocator. The other half is an all-reduce of two children over more chunks than slots, so that every slot is
//! reused; every element is checked. Exit status 0 if all results are correct.
#![no_std]
#![no_main]

mod board;
mod queue;

use board::Console;
use core::fmt::{self, Write};
use core::num::NonZeroU32;
use queue::{DEPTH, MAX_PACKET_LEN_BYTES, QueuePort};
use sumac_device::{Memory, Node, NodeConfig, runtime};
use sumac_hal::ctrl::{ChildMask, GroupConfig, Order, Refusal, Request, Response, TreeConfig};
use sumac_hal::ids::{BootId, ChildIndex, ChunkNo, Epoch, GroupId, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, Packet, Repr, payload_crc};

const CHILDREN: u16 = 2;
const RANKS: NonZeroU32 = NonZeroU32::new(CHILDREN as u32).unwrap();
const SLOTS: u16 = 4;
const CHUNKS: u64 = 3 * SLOTS as u64;
const ELEMENTS: usize = 64;
const CHUNK_LEN_BYTES: usize = ELEMENTS * size_of::<f32>();

const GROUP: GroupId = GroupId(1);
const EPOCH: Epoch = Epoch { term: 1, counter: 1 };
const SECRET: GroupSecret = GroupSecret([7; 16]);

/// One group, with staging for a declared order: `CHILDREN` chunk buffers a slot.
type BoardMemory =
    Memory<1, { CHILDREN as usize }, { SLOTS as usize }, { SLOTS as usize * CHILDREN as usize * CHUNK_LEN_BYTES }>;

static mut MEMORY: BoardMemory = BoardMemory::new();

/// The entry point; `board` calls it once there is a stack.
extern "C" fn main() -> ! {
    let memory = &raw mut MEMORY;
    // SAFETY: called once, on the only core, and nothing else accesses MEMORY.
    match all_reduce(unsafe { &mut *memory }) {
        Ok(elements) => {
            let _ = writeln!(
                Console,
                "sumac: {CHUNKS} chunks of {CHILDREN} children, {elements} elements right; storage {} B",
                BoardMemory::SIZE_BYTES
            );
            board::exit(0)
        }
        Err(failure) => {
            let _ = writeln!(Console, "sumac: {failure}");
            board::exit(1)
        }
    }
}

/// Why the test failed.
enum Failure {
    Refused(Refusal),
    Full,
    Silent { chunk: u64, child: u16 },
    Foreign { chunk: u64 },
    Element { chunk: u64, index: usize, found: f32, expected: f32 },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => write!(f, "the node refuses a group: {refusal}"),
            Self::Full => write!(f, "the port's queue of {DEPTH} packets is full"),
            Self::Silent { chunk, child } => write!(f, "chunk {chunk}: child {child} got no answer"),
            Self::Foreign { chunk } => write!(f, "chunk {chunk}: a packet came that is not its result"),
            Self::Element { chunk, index, found, expected } => {
                write!(f, "chunk {chunk}: element {index} is {found}, expected {expected}")
            }
        }
    }
}

/// Reduce `CHUNKS` chunks of two children, in the role of their ranks; return the number of elements compared.
fn all_reduce(memory: &mut BoardMemory) -> Result<usize, Failure> {
    let mut port = QueuePort::new();
    let config = NodeConfig {
        shard: Shard::WHOLE,
        boot_id: BootId(1),
        max_packet_len_bytes: MAX_PACKET_LEN_BYTES,
        receive_buffer_bytes: DEPTH * MAX_PACKET_LEN_BYTES,
    };
    let mut node = Node::new(config, memory.storage());
    admit(&mut node)?;
    let mut compared = 0;
    for chunk in 0..CHUNKS {
        for child in 0..CHILDREN {
            contribute(&mut port, chunk, child)?;
        }
        runtime::poll(&mut node, &mut port, Instant::from_nanos(chunk * 1_000));
        for child in 0..CHILDREN {
            compared += check(&mut port, chunk, child)?;
        }
    }
    Ok(compared)
}

/// In the role of the controller, create a tree of this node alone and a group on it.
fn admit(node: &mut Node<'_>) -> Result<(), Failure> {
    let tree = TreeConfig { tree: TreeId(1), parent: None, children: CHILDREN, ranks: Default::default() };
    let group = GroupConfig {
        group: GROUP,
        tree: TreeId(1),
        epoch: EPOCH,
        order: Order::TreePairwise,
        secret: SECRET,
        parent_key: 0,
        shared: None,
        parent_shared: None,
        window_max: SLOTS / 2,
        slots: SLOTS,
        chunk_len_bytes: CHUNK_LEN_BYTES as u16,
        ranks: RANKS,
        lease_ms: 1_000,
        timers: HopTimers::DEFAULT.into(),
        zero_copy: ChildMask::EMPTY,
    };
    for request in [Request::InstallTree(tree), Request::CreateGroup(group)] {
        match node.control(&request, Instant::ZERO) {
            Response::Done => {}
            Response::Refused(refusal) => return Err(Failure::Refused(refusal)),
            _ => return Err(Failure::Refused(Refusal::Unknown)),
        }
    }
    Ok(())
}

/// Element `index` of a child's contribution: a small integer, so that f32 represents the sums exactly.
fn input(chunk: u64, child: u16, index: usize) -> f32 {
    (u64::from(child + 1) * (chunk * 100 + index as u64)) as f32
}

/// Deliver a child's contribution; the child has every result before `chunk`.
fn contribute(port: &mut QueuePort, chunk: u64, child: u16) -> Result<(), Failure> {
    let op = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, CHUNKS * ELEMENTS as u64);
    let key = SECRET.child_key(GROUP, EPOCH, ChildIndex(child));
    let repr = Repr {
        flags: Flags::WANT,
        collective: Some(op.collective),
        dtype: op.dtype,
        op: op.op,
        count: 1,
        seq: ChunkNo(chunk),
        mark: ChunkNo(chunk),
        signature: op.signature(Path::Tree, 1),
        payload_len_bytes: CHUNK_LEN_BYTES as u16,
        bits: op.count,
        ..Repr::new(Kind::Data, GROUP, EPOCH, ChildIndex(child), key)
    };
    let pushed = port.push(addr(child), HEADER_LEN + CHUNK_LEN_BYTES, |bytes| {
        let mut packet = Packet::new_unchecked(bytes);
        for (index, element) in packet.payload_mut().chunks_exact_mut(size_of::<f32>()).enumerate() {
            element.copy_from_slice(&input(chunk, child, index).to_le_bytes());
        }
        let crc = payload_crc(packet.payload());
        repr.emit(&mut packet, crc);
    });
    if pushed { Ok(()) } else { Err(Failure::Full) }
}

/// Compare the answer to one child with the sum; return the number of its elements.
fn check(port: &mut QueuePort, chunk: u64, child: u16) -> Result<usize, Failure> {
    let frame = port.pop().ok_or(Failure::Silent { chunk, child })?;
    let foreign = Failure::Foreign { chunk };
    let Ok(packet) = Packet::new_checked(frame.packet()) else { return Err(foreign) };
    let Ok(repr) = Repr::parse(&packet) else { return Err(foreign) };
    let fits = repr.kind == Kind::Result && repr.seq == ChunkNo(chunk) && repr.child == ChildIndex(child);
    if !fits || frame.peer != addr(child) || packet.payload().len() != CHUNK_LEN_BYTES {
        return Err(foreign);
    }
    for (index, element) in packet.payload().as_chunks().0.iter().enumerate() {
        let found = f32::from_le_bytes(*element);
        let expected: f32 = (0..CHILDREN).map(|child| input(chunk, child, index)).sum();
        if found != expected {
            return Err(Failure::Element { chunk, index, found, expected });
        }
    }
    Ok(ELEMENTS)
}

fn addr(child: u16) -> Addr {
    Addr::Emu(1 + u32::from(child))
}
