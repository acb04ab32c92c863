//! A function that owns its memory, so that threads and long-lived structures can hold its rings without a lifetime.

use super::bar_memory::BarMemory;
use super::mapping::MemoryError;
use crate::mmio::{
    Bar, BarError, COMPLETION_WORDS, FunctionConfig, Identity, ProbeError, SUBMISSION_WORDS, bar_len_bytes,
};
use crate::ring::{Doorbell, Memory, SharedRing, WakeThreshold};
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
    host_threshold: WakeThreshold<&'static AtomicU32>,
    _memory: Arc<BarMemory>,
}

/// Why a function could not be created or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// Its memory could not be allocated or mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The configuration is invalid.
    #[error(transparent)]
    Bar(#[from] BarError),
    /// The device's function is not one that this version supports.
    #[error(transparent)]
    Probe(#[from] ProbeError),
}

impl Function {
    /// Create a function, on the device's side.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn create(config: &FunctionConfig) -> Result<Self, FunctionError> {
        // `Bar::create` below refuses values that are out of range; the clamp only keeps the length from overflowing.
        let (queues, depth) = (config.queues.min(crate::mmio::QUEUES_MAX), config.depth.min(crate::mmio::DEPTH_MAX));
        let memory = Arc::new(BarMemory::create(bar_len_bytes(queues, depth))?);
        let bar = Bar::create(extend_lifetime(&memory), config)?;
        Ok(Self { bar, memory })
    }

    /// Open a function that a device has handed over, on the host's side.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn open(file: OwnedFd) -> Result<(Self, Identity), FunctionError> {
        let max_len_bytes = bar_len_bytes(crate::mmio::QUEUES_MAX, crate::mmio::DEPTH_MAX) as u64;
        let memory = Arc::new(BarMemory::open(file, max_len_bytes)?);
        let (bar, identity) = Bar::probe(extend_lifetime(&memory))?;
        Ok((Self { bar, memory }, identity))
    }

    /// Return the descriptor to hand over.
    ///
    /// # Panics
    /// If the function was opened from a descriptor, which it does not keep.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// Return the registers.
    pub fn bar(&self) -> Bar<'_> {
        self.bar
    }

    /// Return queue `index`, where 0 is the admin queue, or `None` if it does not exist.
    pub fn queue(&self, index: u32) -> Option<FunctionQueue> {
        let queue = self.bar.queue(index)?;
        let memory = || self.memory.clone();
        Some(FunctionQueue {
            submissions: FunctionRing { ring: queue.submissions, _memory: memory() },
            completions: FunctionRing { ring: queue.completions, _memory: memory() },
            device_bell: queue.device_bell,
            host_bell: queue.host_bell,
            host_threshold: queue.host_threshold,
            _memory: memory(),
        })
    }
}

/// Extend a borrow of the memory to `'static`.
///
/// Sound only in this module: every structure that stores the borrow also stores the `Arc`, and lends the memory out
/// for no longer than the structure itself is borrowed.
fn extend_lifetime(memory: &Arc<BarMemory>) -> &'static [std::sync::atomic::AtomicU64] {
    // SAFETY: see above; the mapping does not move when the `Arc` does.
    unsafe { &*std::ptr::from_ref(memory.words()) }
}

impl FunctionQueue {
    /// Return the doorbell that wakes the device.
    pub fn device_bell(&self) -> Doorbell<&AtomicU32> {
        self.device_bell
    }

    /// Return the doorbell that wakes the host.
    pub fn host_bell(&self) -> Doorbell<&AtomicU32> {
        self.host_bell
    }

    /// Return the completion index that the host waits for.
    pub fn host_threshold(&self) -> WakeThreshold<&AtomicU32> {
        self.host_threshold
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
