//! Collectives in GPU memory, which the host cannot access.
//!
//! A [`Group`] is several ranks on one GPU, each with a stream and buffers of its own. It uses the schedules of
//! [`crate::schedule`] unchanged; a program derived from them determines what each stream does and waits for. The trait
//! [`Gpu`] abstracts the hardware: memory, streams, events, a copy, and one fused pass that receives, reduces and
//! copies. It has a CUDA implementation (`gpu::cuda`, feature `cuda`) and one in ordinary memory for tests
//! ([`FakeGpu`]).
//!
//! ```text
//!   Group::start ─ select, Program ──> hub stream ──┬─ stream of rank 0 ─┬──> Work::done()
//!        ^                                           ├─ stream of rank 1 ─┤
//!     events of                                      └─ ...               ┘
//!     the producers                        landings, and events between them
//! ```
//!
//! [`peers`] connects ranks in separate processes, which access each other's memory directly, stage it through the
//! host, or use NCCL ([`nccl`]). [`direct`] registers GPU memory with network adapters. [`trace`] records what ran
//! concurrently.
//!
//! [`engine`] exposes a GPU's reducing copy engine as a DMA engine of [`sumac_hal::dma`].
//!
//! Only [`Group::wait`] blocks the host. An operation begins when the events of its producers have completed, and its
//! consumers make their streams wait for its own event ([`Work::done`]).
//!
//! Invariants:
//! - Memory is kept until the GPU has released it, whatever happens to the handle ([`Group`] holds a share of it).
//! - [`Group::wait`] returns by its deadline, plus the time to end what is in flight. If that fails, it returns
//!   [`GpuError::Stuck`], and nothing is freed.
//! - Results have the same bits as those of the same schedule over CPU memory: one expression, one arithmetic.

mod bucket;
mod buffers;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod direct;
pub mod engine;
mod error;
mod fake;
mod graveyard;
mod group;
mod in_flight;
pub mod nccl;
pub mod peers;
mod plan;
mod program;
mod staged;
pub mod trace;

#[cfg(test)]
mod tests;

pub use buffers::GpuBuffers;
pub use error::{GpuError, StagedError, Unavailable};
pub use fake::{FakeEvent, FakeGpu, FakeGraph, FakeMemory, FakeNccl, FakePinned, FakeStream, Gate};
pub use group::{Group, GroupOptions, Repeat, Request};
pub use in_flight::{GpuCanceller, Work};
pub use staged::{Staging, all_reduce_staged};

use sumac_hal::reduce::Kernel;

/// Describe the GPU of this machine.
///
/// # Errors
/// [`GpuError::Unavailable`] names what is missing (always the feature, in a build without `cuda`); otherwise the
/// driver's error.
pub fn probe() -> Result<String, GpuError> {
    #[cfg(feature = "cuda")]
    return cuda::Cuda::open(cuda::CudaOptions::default())?.describe();
    #[cfg(not(feature = "cuda"))]
    Err(Unavailable::Feature.into())
}

/// A part of GPU memory.
#[derive(Debug)]
pub struct Part<'a, M> {
    /// The memory.
    pub memory: &'a M,
    /// Offset of the first byte.
    pub at: usize,
    /// Length in bytes.
    pub len_bytes: usize,
}

// Not derived: `M` need not be `Copy`.
impl<M> Clone for Part<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Part<'_, M> {}

/// A fused receive, reduce and copy: `to = round(own op from)`, each element read once and written once.
#[derive(Debug)]
pub struct Fused<'a, M> {
    /// Incoming elements or accumulators.
    pub from: Part<'a, M>,
    /// Whether `from` are accumulators.
    pub is_partial: bool,
    /// The operand to combine with, and whether it is accumulators; without one, incoming elements are converted.
    pub own: Option<(Part<'a, M>, bool)>,
    /// The destination, which may coincide with `own` or `from`.
    pub to: Part<'a, M>,
    /// Whether to store finished elements; otherwise accumulators.
    pub is_finished: bool,
    /// The number of elements.
    pub count: usize,
    /// The number of ranks, for averages.
    pub ranks: u32,
}

/// A GPU. Work enqueued to a stream executes later, in order; only events order streams among each other.
///
/// The caller must keep memory alive until the streams that access it are done.
pub trait Gpu {
    /// Memory, or part of it. Clones are shares of the same memory.
    type Memory: Clone;
    /// A queue of work.
    type Stream;
    /// A point in a stream.
    type Event;
    /// The code for one type and operator.
    type Kernel;
    /// Captured work that can be repeated.
    type Graph;
    /// Host memory that the GPU can copy from and to asynchronously.
    type Pinned;

    /// Allocate memory with unspecified contents.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's error.
    fn alloc(&self, len_bytes: usize) -> Result<Self::Memory, GpuError>;

    /// Return a part of memory; `at + len_bytes` must lie within it.
    fn part(&self, memory: &Self::Memory, at: usize, len_bytes: usize) -> Self::Memory;

    /// Return the address range of memory, to detect overlaps.
    fn addresses(&self, memory: &Self::Memory) -> std::ops::Range<u64>;

    /// Create a stream that waits for no other.
    ///
    /// # Errors
    /// The driver's error, here and below.
    fn stream(&self) -> Result<Self::Stream, GpuError>;

    /// Create an event, which counts as complete until it is recorded.
    ///
    /// # Errors
    /// As above.
    fn event(&self) -> Result<Self::Event, GpuError>;

    /// Return the code of a kernel.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] or [`GpuError::Unavailable`] if there is none.
    fn load(&self, kernel: &Kernel) -> Result<Self::Kernel, GpuError>;

    /// Copy bytes; `to` is as long as `from`, and they do not overlap.
    ///
    /// # Errors
    /// As above.
    fn copy(&self, on: &Self::Stream, to: Part<'_, Self::Memory>, from: Part<'_, Self::Memory>)
    -> Result<(), GpuError>;

    /// Run one fused pass.
    ///
    /// # Errors
    /// As above.
    fn land(&self, on: &Self::Stream, kernel: &Self::Kernel, fused: &Fused<'_, Self::Memory>) -> Result<(), GpuError>;

    /// Multiply elements, for a premultiplied sum: `to = from x scalar`. `to` may be `from`.
    ///
    /// # Errors
    /// As above; also if the scalar does not go with the type.
    fn scale(
        &self,
        on: &Self::Stream,
        kernel: &Self::Kernel,
        to: Part<'_, Self::Memory>,
        from: Part<'_, Self::Memory>,
        scalar: f64,
    ) -> Result<(), GpuError>;

    /// Record in an event everything enqueued to the stream so far.
    ///
    /// # Errors
    /// As above.
    fn record(&self, event: &Self::Event, on: &Self::Stream) -> Result<(), GpuError>;

    /// Make a stream wait for what the event records now.
    ///
    /// # Errors
    /// As above.
    fn wait(&self, on: &Self::Stream, event: &Self::Event) -> Result<(), GpuError>;

    /// Return whether what an event records is complete. Errors of executed work surface here.
    ///
    /// # Errors
    /// [`GpuError::IllegalAddress`], [`GpuError::Lost`].
    fn is_done(&self, event: &Self::Event) -> Result<bool, GpuError>;

    /// Create an event that also records the time.
    ///
    /// # Errors
    /// As above.
    fn timer(&self) -> Result<Self::Event, GpuError>;

    /// Return the microseconds between two events of [`Gpu::timer`] that are done; below 0 if `to` was earlier.
    ///
    /// # Errors
    /// As above.
    fn elapsed_us(&self, from: &Self::Event, to: &Self::Event) -> Result<f64, GpuError>;

    /// Capture what `body` enqueues to `on`, and to streams that wait for it, instead of executing it.
    ///
    /// # Errors
    /// As above, and those of `body`.
    fn capture(
        &self,
        on: &Self::Stream,
        body: &mut dyn FnMut() -> Result<(), GpuError>,
    ) -> Result<Self::Graph, GpuError>;

    /// Launch captured work.
    ///
    /// # Errors
    /// As above.
    fn launch(&self, graph: &Self::Graph, on: &Self::Stream) -> Result<(), GpuError>;

    /// Disable passes that have not begun, or enable them again.
    ///
    /// # Errors
    /// As above; [`GpuError::Stuck`] if streams hold it up.
    fn stop(&self, is_stopped: bool) -> Result<(), GpuError>;

    /// Allocate pinned host memory with unspecified contents.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's error.
    fn pinned(&self, len_bytes: usize) -> Result<Self::Pinned, GpuError>;

    /// Wait until no copy uses `pinned`, and return its bytes.
    ///
    /// # Errors
    /// As [`Gpu::is_done`].
    fn host<'p>(&self, pinned: &'p mut Self::Pinned) -> Result<&'p mut [u8], GpuError>;

    /// Copy from the GPU to the beginning of `to`.
    ///
    /// # Errors
    /// As above.
    fn download(&self, on: &Self::Stream, to: &mut Self::Pinned, from: Part<'_, Self::Memory>) -> Result<(), GpuError>;

    /// Copy the beginning of `from` to the GPU.
    ///
    /// # Errors
    /// As above.
    fn upload(&self, on: &Self::Stream, to: Part<'_, Self::Memory>, from: &mut Self::Pinned) -> Result<(), GpuError>;
}
