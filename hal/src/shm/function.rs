//! A function that owns its memory: rings without a lifetime, for threads and structures of an operating system.

use super::mapping::{BarMemory, MemoryError};
use crate::mmio::{
    Bar, BarError, COMPLETION_WORDS, FunctionConfig, Identity, ProbeError, SUBMISSION_WORDS, bar_len_bytes,
};
use crate::ring::{Doorbell, Memory, SharedRing, Wanted};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// A function in shared memory.
#[derive(Debug, Clone)]
pub struct Function {
    bar: Bar<'static>,
    memory: Arc<BarMemory>,
}

/// A ring of a function.
#[derive(Debug, Clone)]
pub struct FunctionRing<const WORDS: usize> {
    ring: SharedRing<'static, WORDS>,
    _memory: Arc<BarMemory>,
}

/// A queue of a function.
#[derive(Debug, Clone)]
pub struct FunctionQueue {
    /// From host to device.
    pub submissions: FunctionRing<SUBMISSION_WORDS>,
    /// From device to host.
    pub completions: FunctionRing<COMPLETION_WORDS>,
    device_bell: Doorbell<&'static AtomicU32>,
    host_bell: Doorbell<&'static AtomicU32>,
    host_wants: Wanted<&'static AtomicU32>,
    _memory: Arc<BarMemory>,
}

/// Why there is no function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// There is no memory for it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// It can't be as asked for.
    #[error(transparent)]
    Bar(#[from] BarError),
    /// It is none that this version can use.
    #[error(transparent)]
    Probe(#[from] ProbeError),
}

impl Function {
    /// Make a function, as its device.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn create(config: &FunctionConfig) -> Result<Self, FunctionError> {
        // What is out of range is refused below; the length only must not overflow before that.
        let (queues, depth) = (config.queues.min(crate::mmio::QUEUES_MAX), config.depth.min(crate::mmio::DEPTH_MAX));
        let memory = Arc::new(BarMemory::create(bar_len_bytes(queues, depth))?);
        let bar = Bar::create(forever(&memory), config)?;
        Ok(Self { bar, memory })
    }

    /// Use a function that a device has handed over, as its host.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn open(file: OwnedFd) -> Result<(Self, Identity), FunctionError> {
        let max_len_bytes = bar_len_bytes(crate::mmio::QUEUES_MAX, crate::mmio::DEPTH_MAX) as u64;
        let memory = Arc::new(BarMemory::open(file, max_len_bytes)?);
        let (bar, identity) = Bar::probe(forever(&memory))?;
        Ok((Self { bar, memory }, identity))
    }

    /// Return the descriptor, to hand over.
    ///
    /// # Panics
    /// If the function was itself handed over: of that, no descriptor is kept.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// Return the registers.
    pub fn bar(&self) -> Bar<'_> {
        self.bar
    }

    /// Return a queue; 0 is the admin queue. `None` if there are not as many.
    pub fn queue(&self, index: u32) -> Option<FunctionQueue> {
        let queue = self.bar.queue(index)?;
        let memory = || self.memory.clone();
        Some(FunctionQueue {
            submissions: FunctionRing { ring: queue.submissions, _memory: memory() },
            completions: FunctionRing { ring: queue.completions, _memory: memory() },
            device_bell: queue.device_bell,
            host_bell: queue.host_bell,
            host_wants: queue.host_wants,
            _memory: memory(),
        })
    }
}

/// Borrow memory for as long as the program runs.
///
/// Sound only in this module: whatever keeps the borrow keeps the `Arc` beside it, and hands the borrow out for no
/// longer than itself is borrowed.
fn forever(memory: &Arc<BarMemory>) -> &'static [std::sync::atomic::AtomicU64] {
    // SAFETY: see above; the mapping does not move when the `Arc` does.
    unsafe { &*std::ptr::from_ref(memory.words()) }
}

impl FunctionQueue {
    /// Return what wakes the device.
    pub fn device_bell(&self) -> Doorbell<&AtomicU32> {
        self.device_bell
    }

    /// Return what wakes the host.
    pub fn host_bell(&self) -> Doorbell<&AtomicU32> {
        self.host_bell
    }

    /// Return what the host waits for.
    pub fn host_wants(&self) -> Wanted<&AtomicU32> {
        self.host_wants
    }
}

impl<const WORDS: usize> Memory<WORDS> for FunctionRing<WORDS> {
    fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    fn produced(&self) -> u32 {
        self.ring.produced()
    }

    fn set_produced(&self, produced: u32) {
        self.ring.set_produced(produced);
    }

    fn consumed(&self) -> u32 {
        self.ring.consumed()
    }

    fn set_consumed(&self, consumed: u32) {
        self.ring.set_consumed(consumed);
    }

    fn read(&self, place: u32) -> [u64; WORDS] {
        self.ring.read(place)
    }

    fn write(&self, place: u32, entry: &[u64; WORDS]) {
        self.ring.write(place, entry);
    }
}
