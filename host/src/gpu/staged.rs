//! Staged transfers: a GPU's buffer through pinned host memory and the network, in chunks, double-buffered.
//!
//! While the host reduces chunk k with the other ranks, chunk k+1 is downloaded and chunk k-1 uploaded, on separate
//! streams:
//!
//! ```text
//! down   0 1   2   3                      a buffer's next download waits for its last upload
//! host     0   1   2   3
//! up           0   1   2   3
//! ```
//!
//! Each chunk is an ordinary all-reduce of a [`Communicator`]: through the tree if there is one, recovered if recovery
//! is on, otherwise as a host collective. All ranks must use the same chunk size.

use super::direct::WhyPinned;
use super::error::{GpuError, StagedError};
use super::group::SpinWait;
use super::{Gpu, Part};
use crate::comm::{CallOptions, Communicator, Outcome};
use crate::exec::Buffers;
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// Two pinned buffers, and the streams that fill and drain them.
pub struct Staging<G: Gpu> {
    down: G::Stream,
    up: G::Stream,
    slots: [Slot<G>; 2],
    chunk_bytes: usize,
}

struct Slot<G: Gpu> {
    pinned: G::Pinned,
    /// Its chunk has been downloaded.
    filled: G::Event,
    /// Its chunk has been uploaded.
    emptied: G::Event,
}

impl<G: Gpu> Staging<G> {
    /// Create two buffers of `chunk_bytes` bytes each: a multiple of the size of every element that passes through.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's error.
    pub fn new(gpu: &G, chunk_bytes: usize) -> Result<Self, GpuError> {
        if chunk_bytes == 0 {
            return Err(GpuError::Invalid("chunks of 0 bytes".into()));
        }
        let slot = || {
            let (filled, emptied) = (gpu.event()?, gpu.event()?);
            Ok::<_, GpuError>(Slot { pinned: gpu.pinned(chunk_bytes)?, filled, emptied })
        };
        Ok(Self { down: gpu.stream()?, up: gpu.stream()?, slots: [slot()?, slot()?], chunk_bytes })
    }

    /// Return why the network cannot access GPU memory directly.
    pub const fn why_pinned(&self) -> &WhyPinned {
        &WhyPinned::Network
    }

    /// Call `reduce` on each chunk of `memory` in turn, once the event `after` has completed; returns when all are
    /// uploaded.
    ///
    /// # Errors
    /// The first error of `reduce` or of the GPU: then each chunk is wholly old or wholly new, and no more copies are
    /// made. [`GpuError::Deadline`] if the GPU missed `deadline`; late chunks may still be in flight.
    pub fn run<E: From<GpuError>>(
        &mut self,
        gpu: &G,
        memory: &G::Memory,
        after: &G::Event,
        deadline: Instant,
        mut reduce: impl FnMut(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let range = gpu.addresses(memory);
        let len_bytes = (range.end - range.start) as usize;
        let chunk = |index: usize| {
            let at = index * self.chunk_bytes;
            Part { memory, at, len_bytes: self.chunk_bytes.min(len_bytes - at) }
        };
        let chunks = len_bytes.div_ceil(self.chunk_bytes);
        gpu.wait(&self.down, after)?;
        for index in 0..chunks.min(2) {
            download_chunk(gpu, &self.down, &mut self.slots[index % 2], chunk(index))?;
        }
        let mut result = Ok(());
        for index in 0..chunks {
            let part = chunk(index);
            let slot = &mut self.slots[index % 2];
            result = wait_event(gpu, &slot.filled, deadline).map_err(E::from);
            if result.is_ok() {
                result = reduce(&mut gpu.host(&mut slot.pinned)?[..part.len_bytes]);
            }
            if result.is_err() {
                break;
            }
            gpu.upload(&self.up, part, &mut slot.pinned)?;
            gpu.record(&slot.emptied, &self.up)?;
            if index + 2 < chunks {
                gpu.wait(&self.down, &slot.emptied)?;
                download_chunk(gpu, &self.down, slot, chunk(index + 2))?;
            }
        }
        let quiet = self.slots.iter().try_for_each(|slot| {
            wait_event(gpu, &slot.filled, deadline)?;
            wait_event(gpu, &slot.emptied, deadline)
        });
        result.and(quiet.map_err(E::from))
    }
}

/// Download a chunk.
fn download_chunk<G: Gpu>(
    gpu: &G,
    down: &G::Stream,
    slot: &mut Slot<G>,
    from: Part<'_, G::Memory>,
) -> Result<(), GpuError> {
    gpu.download(down, &mut slot.pinned, from)?;
    gpu.record(&slot.filled, down)
}

/// Wait for an event.
fn wait_event<G: Gpu>(gpu: &G, event: &G::Event, deadline: Instant) -> Result<(), GpuError> {
    let mut spin = SpinWait::default();
    while !gpu.is_done(event)? {
        if Instant::now() >= deadline {
            return Err(GpuError::Deadline);
        }
        spin.wait();
    }
    Ok(())
}

/// All-reduce a GPU's buffer over the ranks of `comm`, in place, chunk by chunk, starting when the event `after` has
/// completed. Every rank must pass chunks of the same size. Returns the outcome of each chunk.
///
/// # Errors
/// [`StagedError`].
pub fn all_reduce_staged<G: Gpu>(
    (gpu, staging): (&G, &mut Staging<G>),
    comm: &Communicator,
    memory: &G::Memory,
    (dtype, op): (Dtype, ReduceOp),
    after: &G::Event,
    deadline: Instant,
) -> Result<Vec<Outcome>, StagedError> {
    let each = OpDesc::all_reduce(dtype, op, 1).element_bytes();
    if !staging.chunk_bytes.is_multiple_of(each) {
        let what =
            format!("the chunk size of {} bytes is not a multiple of the element size of {each}", staging.chunk_bytes);
        return Err(GpuError::Invalid(what).into());
    }
    let mut outcomes = Vec::new();
    staging.run(gpu, memory, after, deadline, |bytes| {
        let desc = OpDesc::all_reduce(dtype, op, (bytes.len() / each) as u64);
        let options = CallOptions {
            deadline: Some(deadline.saturating_duration_since(Instant::now())),
            ..CallOptions::default()
        };
        outcomes.push(comm.run(&desc, Buffers::InPlace(bytes), &options)?);
        Ok::<_, StagedError>(())
    })?;
    Ok(outcomes)
}
