//! A fake GPU in ordinary memory, for tests: streams are queues, and the next task to run is drawn at random.
//!
//! It is stricter than hardware: a stream runs ahead or lags as the seed decides, memory freed too early is an illegal
//! address, and a captured stream that was not forked or not joined is an error. Nothing runs by itself: each query of
//! an event first lets a drawn number of tasks run, so one seed gives one order.
//!
//! One [`FakeGpu`] is one process on one GPU of a machine; [`FakeGpu::process`] starts others. They access each other's
//! memory only by handles, and end independently.
//!
//! As on hardware, freeing memory and aborting NCCL wait for the process's streams. Where a stream waits for another
//! process that never comes, they return after a while nevertheless, and [`FakeGpu::blocked`] names them.
//!
//! Timers are simulated: each stream has a clock, which advances by a nanosecond for each byte and a microsecond for
//! each copy or pass, and by waits. So streams overlap where nothing orders them, whatever order was drawn.

mod bulk;
mod gpu;
mod machine;
mod nccl;
mod peers;
mod state;

use super::error::GpuError;
use super::{Gpu, Part};
pub use nccl::FakeNccl;
use state::{Dead, State, Task};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A fake GPU. Clones are the same process on the same GPU.
#[derive(Debug, Clone)]
pub struct FakeGpu {
    state: Arc<Mutex<State>>,
    process: u64,
    /// The GPU's number in its machine.
    gpu: u8,
}

/// Memory of a fake GPU.
#[derive(Debug, Clone)]
pub struct FakeMemory {
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

/// A stream of a fake GPU.
#[derive(Debug)]
pub struct FakeStream(usize);

/// An event of a fake GPU.
#[derive(Debug)]
pub struct FakeEvent(usize);

/// Holds up a stream until opened: a slow producer.
#[derive(Debug, Clone, Default)]
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    /// Let the streams behind it continue.
    pub fn open(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Captured work.
#[derive(Debug)]
pub struct FakeGraph(Arc<Vec<(usize, Task)>>);

/// Pinned memory, and the last event that uses it.
#[derive(Debug)]
pub struct FakePinned {
    block: Block,
    bytes: Vec<u8>,
    last: FakeEvent,
}

#[derive(Debug, Clone)]
struct Place {
    id: u64,
    bytes: Range<usize>,
}

fn place(part: &Part<'_, FakeMemory>) -> Place {
    let start = part.memory.at + part.at;
    Place { id: part.memory.block.id, bytes: start..start + part.len_bytes }
}

impl FakeGpu {
    /// Create a machine with a GPU of `room_bytes` bytes whose timing derives from `seed`, and a process on it.
    pub fn new(seed: u64, room_bytes: usize) -> Self {
        Self { state: Arc::new(Mutex::new(State::new(seed, room_bytes))), process: FIRST_PROCESS, gpu: 0 }
    }

    /// Allocate memory that holds `bytes`.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    pub fn upload_now(&self, bytes: &[u8]) -> Result<FakeMemory, GpuError> {
        let memory = self.alloc(bytes.len())?;
        if let Some(block) = self.lock().memory.get_mut(&memory.block.id) {
            block.bytes.copy_from_slice(bytes);
        }
        Ok(memory)
    }

    /// Return the current contents of memory.
    pub fn download_now(&self, memory: &FakeMemory) -> Vec<u8> {
        let range = memory.at..memory.at + memory.len_bytes;
        self.lock().memory.get(&memory.block.id).map_or_else(Vec::new, |block| block.bytes[range].to_vec())
    }

    /// Hold up a stream.
    pub fn gate(&self, on: &FakeStream) -> Gate {
        let gate = Gate::default();
        self.lock().streams[on.0].queue.push_back((0, Task::Gate(gate.clone())));
        gate
    }

    /// Return the number of passes that ran, and of those that were disabled.
    pub fn passes(&self) -> (usize, usize) {
        self.lock().passes
    }

    /// Return the number of launches of captured work.
    pub fn launches(&self) -> usize {
        self.lock().launches
    }

    /// Return the bytes allocated by all processes.
    pub fn allocated_bytes(&self) -> usize {
        self.lock().memory.values().map(|block| block.bytes.len()).sum()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let lock = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let dead = Dead { id: self.id, is_opened: self.is_opened };
        let free = lock().graveyards.entry(self.process).or_default().bury(dead);
        if let Some(dead) = free {
            let is_free = machine::block(&self.state, self.process, Instant::now() + machine::BLOCKED);
            let mut state = lock();
            if !is_free {
                state.blocked.push(format!("a free of process {}", self.process));
            }
            state.release(self.process, dead);
        }
    }
}

/// The number of a machine's first process.
const FIRST_PROCESS: u64 = 1;
