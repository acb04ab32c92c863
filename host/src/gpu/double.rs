//! A GPU made of ordinary memory, for tests: streams are queues, and what runs next is drawn.
//!
//! It is stricter than the real one: a stream runs ahead or lags as the seed wants, memory that was freed too early is
//! an illegal address, and a captured stream that was not forked off or not joined is an error. Nothing runs by itself:
//! whoever asks whether an event is done lets a drawn number of things happen first, so one seed gives one order.
//!
//! One [`Double`] is one process on one GPU of a machine; [`Double::process`] starts others. They reach each other's
//! memory by handles alone, and end alone.
//!
//! Timers tell what would be, not what was: each stream has a clock, on which a copy or a pass takes a nanosecond a
//! byte and a microsecond more, and which waits move on. So streams overlap where nothing orders them, whatever was
//! drawn.

mod bulk;
mod machine;
mod nccl;
mod peers;
mod state;
mod surface;

use super::error::GpuError;
use super::{Gpu, Part};
pub use nccl::DoubleNccl;
use state::{State, Task};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The double. Clones are the same process on the same GPU.
#[derive(Debug, Clone)]
pub struct Double {
    state: Arc<Mutex<State>>,
    process: u64,
    /// The GPU's number in its machine.
    gpu: u8,
}

/// Memory of the double.
#[derive(Debug, Clone)]
pub struct DoubleMemory {
    block: Arc<Block>,
    at: usize,
    len_bytes: usize,
}

#[derive(Debug)]
struct Block {
    id: u64,
    /// The process that has it, and whether by another's handle.
    process: u64,
    is_opened: bool,
    state: Arc<Mutex<State>>,
}

/// A stream of the double.
#[derive(Debug)]
pub struct DoubleStream(usize);

/// An event of the double.
#[derive(Debug)]
pub struct DoubleEvent(usize);

/// Holds a stream up until it is opened: a producer that takes its time.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    /// Let the streams behind it go on.
    pub fn open(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What was captured.
#[derive(Debug)]
pub struct DoubleGraph(Arc<Vec<(usize, Task)>>);

/// Memory of the process, and the last event that it waits for.
#[derive(Debug)]
pub struct DoublePinned {
    block: Block,
    bytes: Vec<u8>,
    last: DoubleEvent,
}

#[derive(Debug, Clone)]
struct Place {
    id: u64,
    bytes: Range<usize>,
}

fn place(part: &Part<'_, DoubleMemory>) -> Place {
    let start = part.memory.at + part.at;
    Place { id: part.memory.block.id, bytes: start..start + part.len_bytes }
}

impl Double {
    /// Make a machine with a GPU of `room_bytes` bytes whose timing follows from `seed`, and a process on it.
    pub fn new(seed: u64, room_bytes: usize) -> Self {
        Self { state: Arc::new(Mutex::new(State::new(seed, room_bytes))), process: FIRST_PROCESS, gpu: 0 }
    }

    /// Return memory that holds `bytes`.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    pub fn upload_now(&self, bytes: &[u8]) -> Result<DoubleMemory, GpuError> {
        let memory = self.alloc(bytes.len())?;
        if let Some(block) = self.lock().memory.get_mut(&memory.block.id) {
            block.bytes.copy_from_slice(bytes);
        }
        Ok(memory)
    }

    /// Return what memory holds now.
    pub fn download_now(&self, memory: &DoubleMemory) -> Vec<u8> {
        let range = memory.at..memory.at + memory.len_bytes;
        self.lock().memory.get(&memory.block.id).map_or_else(Vec::new, |block| block.bytes[range].to_vec())
    }

    /// Hold a stream up.
    pub fn gate(&self, on: &DoubleStream) -> Gate {
        let gate = Gate::default();
        self.lock().streams[on.0].queue.push_back((0, Task::Gate(gate.clone())));
        gate
    }

    /// Return how many passes ran, and how many did nothing because they were stopped.
    pub fn passes(&self) -> (usize, usize) {
        self.lock().passes
    }

    /// Return the bytes that are allocated, by all processes.
    pub fn allocated_bytes(&self) -> usize {
        self.lock().memory.values().map(|block| block.bytes.len()).sum()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match self.is_opened {
            true => state.close(self.process, self.id),
            false => state.free(self.id),
        }
    }
}

/// The number of the process that a machine begins with.
const FIRST_PROCESS: u64 = 1;
