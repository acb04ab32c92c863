//! A GPU's buffer through the network: staged through pinned memory of this process, in chunks, double-buffered.
//!
//! While the host reduces chunk k with the other ranks, chunk k+1 comes down and chunk k-1 goes back up, each on a
//! stream of its own:
//!
//! ```text
//! down   0 1   2   3                      a buffer's next chunk comes down when its last has gone up
//! host     0   1   2   3
//! up           0   1   2   3
//! ```
//!
//! What the host does with a chunk is an ordinary all-reduce of a [`Communicator`]: through the tree where there is
//! one, repaired where repair is on, by schedules otherwise. All ranks use chunks of one size.

use super::direct::NoDirect;
use super::error::{GpuError, StagedError};
use super::group::Patience;
use super::{Gpu, Part};
use crate::comm::{CallOptions, Communicator, Outcome};
use crate::exec::Buffers;
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// Two pinned buffers, and the streams that fill and empty them.
pub struct Staging<G: Gpu> {
    down: G::Stream,
    up: G::Stream,
    lanes: [Lane<G>; 2],
    chunk_bytes: usize,
}

struct Lane<G: Gpu> {
    pinned: G::Pinned,
    /// Its chunk has come down.
    filled: G::Event,
    /// Its chunk has gone up.
    emptied: G::Event,
}

impl<G: Gpu> Staging<G> {
    /// Set up two buffers of `chunk_bytes` bytes each: a multiple of the size of every element that goes through them.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's words.
    pub fn new(gpu: &G, chunk_bytes: usize) -> Result<Self, GpuError> {
        if chunk_bytes == 0 {
            return Err(GpuError::Invalid("chunks of 0 bytes".into()));
        }
        let lane = || {
            let (filled, emptied) = (gpu.event()?, gpu.event()?);
            Ok::<_, GpuError>(Lane { pinned: gpu.pinned(chunk_bytes)?, filled, emptied })
        };
        Ok(Self { down: gpu.stream()?, up: gpu.stream()?, lanes: [lane()?, lane()?], chunk_bytes })
    }

    /// Return why the network does not reach the GPU's memory by itself.
    pub const fn why_pinned(&self) -> &NoDirect {
        &NoDirect::Network
    }

    /// Let `reduce` work on each chunk of `memory` in turn, when the event `after` has come; return when all is back
    /// up.
    ///
    /// # Errors
    /// The first error of `reduce`, or the GPU's: then every chunk is wholly old or wholly new, and nothing moves any
    /// more. [`GpuError::Deadline`] if the GPU has not got there by `deadline`; chunks that came late may still be on
    /// their way.
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
            fill(gpu, &self.down, &mut self.lanes[index % 2], chunk(index))?;
        }
        let mut result = Ok(());
        for index in 0..chunks {
            let part = chunk(index);
            let lane = &mut self.lanes[index % 2];
            result = until(gpu, &lane.filled, deadline).map_err(E::from);
            if result.is_ok() {
                result = reduce(&mut gpu.host(&mut lane.pinned)?[..part.len_bytes]);
            }
            if result.is_err() {
                break;
            }
            gpu.upload(&self.up, part, &mut lane.pinned)?;
            gpu.record(&lane.emptied, &self.up)?;
            if index + 2 < chunks {
                gpu.wait(&self.down, &lane.emptied)?;
                fill(gpu, &self.down, lane, chunk(index + 2))?;
            }
        }
        let quiet = self.lanes.iter().try_for_each(|lane| {
            until(gpu, &lane.filled, deadline)?;
            until(gpu, &lane.emptied, deadline)
        });
        result.and(quiet.map_err(E::from))
    }
}

/// Let a chunk come down.
fn fill<G: Gpu>(gpu: &G, down: &G::Stream, lane: &mut Lane<G>, from: Part<'_, G::Memory>) -> Result<(), GpuError> {
    gpu.download(down, &mut lane.pinned, from)?;
    gpu.record(&lane.filled, down)
}

/// Wait until an event has come.
fn until<G: Gpu>(gpu: &G, event: &G::Event, deadline: Instant) -> Result<(), GpuError> {
    let mut patience = Patience::default();
    while !gpu.is_done(event)? {
        if Instant::now() >= deadline {
            return Err(GpuError::Deadline);
        }
        patience.wait();
    }
    Ok(())
}

/// All-reduce a GPU's buffer over the ranks of `comm`, in place, chunk by chunk; it begins when the event `after` has
/// come. Every rank calls it with chunks of the same size. Returns what became of each chunk.
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
        let what = format!("chunks of {} bytes cut elements of {each}", staging.chunk_bytes);
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
