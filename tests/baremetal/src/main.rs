//! The device's runtime without an operating system, a heap or std, on QEMU's virt board.
//!
//! Linking is half of the test: the program contains the node, its storage (a `static`), its loop and a port, but no
//! allocator. The other half is an all-reduce of two children over more chunks than slots, so that every slot is
//! reused; every element is checked; and a secure channel of the control plane. Exit status 0 if all is correct.
#![no_std]
#![no_main]

mod board;
mod channel;
mod queue;

use board::Console;
use core::fmt::{self, Write};
use queue::{DEPTH, MAX_PACKET_LEN_BYTES, QueuePort};
use sumac_device::{Memory, Node, NodeConfig, runtime, testing};
use sumac_hal::ctrl::{Order, Refusal};
use sumac_hal::ids::BootId;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;

const CHILDREN: u16 = 2;
const SLOTS: u16 = 4;
const CHUNKS: u64 = 3 * SLOTS as u64;
const ELEMENTS: usize = 64;
const CHUNK_LEN_BYTES: usize = ELEMENTS * size_of::<f32>();

const GROUP: testing::Group =
    testing::Group { order: Order::TreePairwise, ..testing::Group::new(CHILDREN, SLOTS, CHUNK_LEN_BYTES as u16) };
const OP: OpDesc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, CHUNKS * ELEMENTS as u64);

/// One group, with staging for a declared order: `CHILDREN` chunk buffers a slot.
type BoardMemory =
    Memory<1, { CHILDREN as usize }, { SLOTS as usize }, { SLOTS as usize * CHILDREN as usize * CHUNK_LEN_BYTES }>;

static mut MEMORY: BoardMemory = BoardMemory::new();

/// The entry point; `board` calls it once there is a stack.
extern "C" fn main() -> ! {
    let memory = &raw mut MEMORY;
    // SAFETY: called once, on the only core, and nothing else accesses MEMORY.
    let reduced = all_reduce(unsafe { &mut *memory });
    match reduced.and_then(|elements| if channel::carries_frames() { Ok(elements) } else { Err(Failure::Channel) }) {
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
    Channel,
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
            Self::Channel => write!(f, "the secure channel does not carry frames"),
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
    GROUP.install(&mut node, Instant::ZERO).map_err(Failure::Refused)?;
    let mut compared = 0;
    for chunk in 0..CHUNKS {
        for child in 0..CHILDREN {
            contribute(&mut port, chunk, child)?;
        }
        let _ = runtime::poll(&mut node, &mut port, Instant::from_nanos(chunk * 1_000));
        for child in 0..CHILDREN {
            compared += check(&mut port, chunk, child)?;
        }
    }
    Ok(compared)
}

/// Element `index` of a child's contribution: a small integer, so that f32 represents the sums exactly.
fn input(chunk: u64, child: u16, index: usize) -> f32 {
    (u64::from(child + 1) * (chunk * 100 + index as u64)) as f32
}

/// Deliver a child's contribution; the child has every result before `chunk`.
fn contribute(port: &mut QueuePort, chunk: u64, child: u16) -> Result<(), Failure> {
    let mut elements = [[0; size_of::<f32>()]; ELEMENTS];
    for (index, element) in elements.iter_mut().enumerate() {
        *element = input(chunk, child, index).to_le_bytes();
    }
    let mut buffer = [0; MAX_PACKET_LEN_BYTES];
    let packet = GROUP.child(child, OP).contribute(chunk, elements.as_flattened(), &mut buffer);
    if port.push(addr(child), packet.len(), |bytes| bytes.copy_from_slice(packet)) {
        Ok(())
    } else {
        Err(Failure::Full)
    }
}

/// Compare the answer to one child with the sum; return the number of its elements.
fn check(port: &mut QueuePort, chunk: u64, child: u16) -> Result<usize, Failure> {
    let frame = port.pop().ok_or(Failure::Silent { chunk, child })?;
    let result = GROUP.child(child, OP).result(chunk, frame.packet()).filter(|_| frame.peer == addr(child));
    let result = result.filter(|result| result.len() == CHUNK_LEN_BYTES).ok_or(Failure::Foreign { chunk })?;
    for (index, element) in result.as_chunks().0.iter().enumerate() {
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
