//! GPU memory, and pinned host memory for copies.
//!
//! The driver frees either only when everything enqueued before is done. While an operation waits for another process
//! ([`hold_frees`]), what is dropped is kept instead.

use super::{driver, no_room};
use crate::gpu::GpuError;
use crate::gpu::graveyard::Graveyard;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, PinnedHostSlice, result, sys};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory to free.
enum Dead {
    /// An allocation, or a peer's opened one.
    Device { context: Arc<CudaContext>, address: u64, is_opened: bool },
    /// Pinned memory, and the last copy that uses it.
    Pinned(PinnedHostSlice<u8>, CudaEvent),
}

impl Dead {
    /// Free it, or keep it while an operation waits.
    fn bury(self) {
        // The lock is released before anything is freed.
        let free = graveyard().bury(self);
        free.into_iter().for_each(Self::free);
    }

    fn free(self) {
        match self {
            Self::Device { context, address, is_opened } => {
                if context.bind_to_thread().is_err() {
                    return;
                }
                // SAFETY: it was allocated or opened here, and nobody has a share any more. An error is the context's,
                // which is gone then.
                let _ = unsafe {
                    match is_opened {
                        true => sys::cuIpcCloseMemHandle(address).result(),
                        false => result::free_sync(address),
                    }
                };
            }
            Self::Pinned(memory, last) => {
                // Copies must end before the memory is released; if the context is broken, nothing copies.
                let _ = last.synchronize();
                drop(memory);
            }
        }
    }
}

/// What this process frees later. All of its GPUs together: freeing memory that several access waits for them all.
static GRAVEYARD: Mutex<Graveyard<Dead>> = Mutex::new(Graveyard::new());

fn graveyard() -> MutexGuard<'static, Graveyard<Dead>> {
    GRAVEYARD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keep what is dropped from here on; calls nest.
pub(super) fn hold_frees() {
    graveyard().hold();
}

/// End one [`hold_frees`].
pub(super) fn release_frees() {
    let dead = graveyard().release();
    dead.into_iter().for_each(Dead::free);
}

/// GPU memory, or part of it. Clones are shares; dropping the last one frees what was allocated here.
#[derive(Debug, Clone)]
pub struct CudaMemory {
    block: Arc<Block>,
    at: usize,
    len_bytes: usize,
}

#[derive(Debug)]
pub(super) struct Block {
    context: Arc<CudaContext>,
    address: u64,
    whose: Ownership,
}

/// How memory is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ownership {
    /// Freed.
    Ours,
    /// Borrowed: not released here.
    Borrowed,
    /// Opened by a peer's handle: closed.
    Opened,
}

impl Block {
    pub(super) fn alloc(context: &Arc<CudaContext>, len_bytes: usize) -> Result<CudaMemory, GpuError> {
        context.bind_to_thread().map_err(|error| driver("its context", error))?;
        // SAFETY: what it holds is never read before it is written: results are, and work by the schedules' proof.
        let address = unsafe { result::malloc_sync(len_bytes.max(1)) };
        let address = address.map_err(|error| no_room("an allocation", len_bytes, error))?;
        let block = Arc::new(Self { context: Arc::clone(context), address, whose: Ownership::Ours });
        Ok(CudaMemory { block, at: 0, len_bytes })
    }

    pub(super) fn borrow(context: &Arc<CudaContext>, address: u64, len_bytes: usize) -> CudaMemory {
        let block = Arc::new(Self { context: Arc::clone(context), address, whose: Ownership::Borrowed });
        CudaMemory { block, at: 0, len_bytes }
    }

    /// Take over an opened allocation of a peer.
    pub(super) fn opened(context: &Arc<CudaContext>, address: u64) -> OpenedBlock {
        OpenedBlock(Arc::new(Self { context: Arc::clone(context), address, whose: Ownership::Opened }))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.whose != Ownership::Borrowed {
            let (context, is_opened) = (Arc::clone(&self.context), self.whose == Ownership::Opened);
            Dead::Device { context, address: self.address, is_opened }.bury();
        }
    }
}

/// A peer's allocation.
pub(super) struct OpenedBlock(Arc<Block>);

impl OpenedBlock {
    /// Return part of it; it is within the allocation.
    pub(super) fn part(self, at: u64, len_bytes: u64) -> CudaMemory {
        CudaMemory { block: self.0, at: at as usize, len_bytes: len_bytes as usize }
    }
}

impl CudaMemory {
    /// Return its address.
    pub fn address(&self) -> u64 {
        self.block.address + self.at as u64
    }

    /// Return its length in bytes.
    pub const fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    pub(super) fn part(&self, at: usize, len_bytes: usize) -> Self {
        let end = at.checked_add(len_bytes);
        assert!(end.is_some_and(|end| end <= self.len_bytes), "{len_bytes} bytes at {at} of {}", self.len_bytes);
        Self { block: Arc::clone(&self.block), at: self.at + at, len_bytes }
    }
}

/// Pinned host memory for asynchronous copies.
#[derive(Debug)]
pub struct CudaPinned {
    memory: ManuallyDrop<PinnedHostSlice<u8>>,
    /// The last copy that uses it.
    last: ManuallyDrop<CudaEvent>,
}

impl CudaPinned {
    pub(super) fn new(context: &Arc<CudaContext>, len_bytes: usize) -> Result<Self, GpuError> {
        let last = context.new_event(None).map_err(|error| driver("an event", error))?;
        // SAFETY: it is written before anybody sees it.
        let memory = unsafe { context.alloc_pinned_with_flags::<u8>(len_bytes.max(1), 0) };
        let memory = memory.map_err(|error| no_room("pinned memory", len_bytes, error))?;
        let mut pinned = Self { memory: ManuallyDrop::new(memory), last: ManuallyDrop::new(last) };
        let start = pinned.start()?;
        // SAFETY: as many bytes were allocated, and nobody else knows of them.
        unsafe { start.write_bytes(0, len_bytes.max(1)) };
        Ok(pinned)
    }

    fn start(&mut self) -> Result<*mut u8, GpuError> {
        self.memory.as_mut_ptr().map_err(|error| driver("pinned memory", error))
    }

    fn quiet(&self) -> Result<(), GpuError> {
        self.last.synchronize().map_err(|error| driver("a copy", error))
    }

    pub(super) fn host(&mut self) -> Result<&mut [u8], GpuError> {
        self.quiet()?;
        self.memory.as_mut_slice().map_err(|error| driver("pinned memory", error))
    }

    pub(super) fn download(&mut self, on: &CudaStream, from: u64, len_bytes: usize) -> Result<(), GpuError> {
        let start = self.checked(len_bytes)?;
        // SAFETY: `len_bytes` are within the memory, which nobody looks at before `last` has come.
        let to = unsafe { std::slice::from_raw_parts_mut(start, len_bytes) };
        // SAFETY: as above, and the caller's memory is as long.
        unsafe { result::memcpy_dtoh_async(to, from, on.cu_stream()) }.map_err(|error| driver("a copy", error))?;
        self.last.record(on).map_err(|error| driver("an event", error))
    }

    pub(super) fn upload(&mut self, on: &CudaStream, to: u64, len_bytes: usize) -> Result<(), GpuError> {
        let start = self.checked(len_bytes)?;
        // SAFETY: `len_bytes` are within the memory, which nobody writes before `last` has come.
        let from = unsafe { std::slice::from_raw_parts(start, len_bytes) };
        // SAFETY: as above, and the caller's memory is as long.
        unsafe { result::memcpy_htod_async(to, from, on.cu_stream()) }.map_err(|error| driver("a copy", error))?;
        self.last.record(on).map_err(|error| driver("an event", error))
    }

    fn checked(&mut self, len_bytes: usize) -> Result<*mut u8, GpuError> {
        if len_bytes > self.memory.len() {
            let what = format!("{len_bytes} bytes through {} pinned ones", self.memory.len());
            return Err(GpuError::Invalid(what));
        }
        let context = Arc::clone(self.memory.context());
        context.bind_to_thread().map_err(|error| driver("its context", error))?;
        self.start()
    }
}

impl Drop for CudaPinned {
    fn drop(&mut self) {
        // SAFETY: neither is used after this.
        let (memory, last) = unsafe { (ManuallyDrop::take(&mut self.memory), ManuallyDrop::take(&mut self.last)) };
        Dead::Pinned(memory, last).bury();
    }
}
