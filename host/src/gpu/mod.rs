//! Runs schedules over memory that this process can't look at: a GPU's.
//!
//! A [`Group`] is several ranks on one GPU, each with a stream and buffers of its own. The schedules are those of
//! [`crate::schedule`], as they are; a program makes of them what each stream has to do and to wait for. [`Gpu`] is all
//! that differs between a real one (`gpu::cuda`, with the feature `cuda`) and the one made of ordinary memory that
//! tests run on ([`Double`]): memory, streams, events, a copy, and one fused pass that receives, reduces and copies.
//!
//! ```text
//!   Group::start ── choice, Program ──> hub stream ──┬─ stream of rank 0 ─┬──> Work::done()
//!        ^                                           ├─ stream of rank 1 ─┤
//!     events of                                      └─ ...               ┘
//!     the producers                        landings, and events between them
//! ```
//!
//! [`peers`] are ranks in processes of their own, which reach each other's memory or stage it, with NCCL as one more
//! way ([`nccl`]); [`direct`] is about network adapters that reach it; [`trace`] shows what ran beside what.
//!
//! [`engine`] is a GPU's copy engine that reduces on the way, as a DMA engine of [`sumac_hal::dma`].
//!
//! Nothing here blocks the host but [`Group::wait`]: an operation begins when the events of its producers have come,
//! and its consumers wait for its own ([`Work::done`]), on their streams.
//!
//! Invariants:
//! - memory is kept until the GPU has let go of it, whatever becomes of the handle ([`Group`] holds a share of it);
//! - [`Group::wait`] returns by its deadline, plus the time that it takes to end what is on its way; if that can't be
//!   ended, [`GpuError::Stuck`] says so, and nothing is freed;
//! - the bits of a result are those that the same schedule gives over CPU memory: one expression, one arithmetic.

mod bucket;
mod buffers;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod direct;
mod double;
pub mod engine;
mod error;
mod flight;
mod group;
pub mod nccl;
pub mod peers;
mod plan;
mod program;
mod staged;
pub mod trace;

#[cfg(test)]
mod tests;

pub use buffers::GpuBuffers;
pub use double::{Double, DoubleEvent, DoubleGraph, DoubleMemory, DoubleNccl, DoublePinned, DoubleStream, Gate};
pub use error::{Absent, GpuError, StagedError};
pub use flight::{GpuCanceller, Work};
pub use group::{Group, GroupOptions, Repeat, Request};
pub use staged::{Staging, all_reduce_staged};

use sumac_hal::reduce::Kernel;

/// Tell which GPU there is.
///
/// # Errors
/// [`GpuError::Absent`] says what is missing, without the feature `cuda` that; else what the driver says.
pub fn probe() -> Result<String, GpuError> {
    #[cfg(feature = "cuda")]
    return cuda::Cuda::open(cuda::CudaOptions::default())?.describe();
    #[cfg(not(feature = "cuda"))]
    Err(Absent::Feature.into())
}

/// Some bytes of a GPU's memory.
#[derive(Debug)]
pub struct Part<'a, M> {
    /// The memory.
    pub memory: &'a M,
    /// Where the bytes begin in it.
    pub at: usize,
    /// How many there are.
    pub len_bytes: usize,
}

// Not derived: a share of memory need not be copied for this.
impl<M> Clone for Part<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Part<'_, M> {}

/// A fused receive, reduce and copy: `to = round(own op from)`, each element read once and written once.
#[derive(Debug)]
pub struct Fused<'a, M> {
    /// What arrives: elements, or accumulators.
    pub from: Part<'a, M>,
    /// Whether `from` are accumulators.
    pub is_partial: bool,
    /// With what it combines, and whether that is accumulators; without it, what arrives is converted.
    pub own: Option<(Part<'a, M>, bool)>,
    /// Where it goes; this may be where `own` or `from` is.
    pub to: Part<'a, M>,
    /// Whether elements are to be made of it, or accumulators.
    pub is_finished: bool,
    /// The number of elements.
    pub count: usize,
    /// The number of ranks, for averages.
    pub ranks: u32,
}

/// A GPU. What is handed to a stream happens later, in order; streams are ordered among each other by events alone.
///
/// Calls must not outlive what they name: memory that a stream still has to touch must be kept by the caller.
pub trait Gpu {
    /// Memory, or part of it. Clones are shares of the same.
    type Memory: Clone;
    /// An order of things to do.
    type Stream;
    /// A point in a stream.
    type Event;
    /// The code for one type and operator.
    type Kernel;
    /// Things to do that were handed over once and can be repeated.
    type Graph;
    /// Memory of this process that the GPU copies from and to while the process does something else.
    type Pinned;

    /// Return new memory, of no particular contents.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's words.
    fn alloc(&self, len_bytes: usize) -> Result<Self::Memory, GpuError>;

    /// Return part of memory. `at + len_bytes` is within it.
    fn part(&self, memory: &Self::Memory, at: usize, len_bytes: usize) -> Self::Memory;

    /// Return where memory lies, to tell what overlaps.
    fn addresses(&self, memory: &Self::Memory) -> std::ops::Range<u64>;

    /// Return a new stream, which waits for no other.
    ///
    /// # Errors
    /// The driver's words, here and below.
    fn stream(&self) -> Result<Self::Stream, GpuError>;

    /// Return a new event, which counts as done until it is recorded.
    ///
    /// # Errors
    /// As above.
    fn event(&self) -> Result<Self::Event, GpuError>;

    /// Return the code for a kernel.
    ///
    /// # Errors
    /// [`GpuError::Kernel`] or [`GpuError::Absent`] if there is none.
    fn load(&self, kernel: &Kernel) -> Result<Self::Kernel, GpuError>;

    /// Copy bytes: `to` is as long as `from`, and they don't overlap.
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

    /// Let an event stand for everything that the stream has been handed so far.
    ///
    /// # Errors
    /// As above.
    fn record(&self, event: &Self::Event, on: &Self::Stream) -> Result<(), GpuError>;

    /// Let a stream wait for what the event stands for now.
    ///
    /// # Errors
    /// As above.
    fn wait(&self, on: &Self::Stream, event: &Self::Event) -> Result<(), GpuError>;

    /// Tell whether what an event stands for is done. This is where errors of what has run come out.
    ///
    /// # Errors
    /// [`GpuError::IllegalAddress`], [`GpuError::Lost`].
    fn is_done(&self, event: &Self::Event) -> Result<bool, GpuError>;

    /// Return a new event that also tells the time.
    ///
    /// # Errors
    /// As above.
    fn timer(&self) -> Result<Self::Event, GpuError>;

    /// Return the microseconds between two events of [`Gpu::timer`] that are done; below 0 if `to` was earlier.
    ///
    /// # Errors
    /// As above.
    fn elapsed_us(&self, from: &Self::Event, to: &Self::Event) -> Result<f64, GpuError>;

    /// Keep what `body` hands to `on`, and to streams that wait for it there, instead of doing it.
    ///
    /// # Errors
    /// As above, and those of `body`.
    fn capture(
        &self,
        on: &Self::Stream,
        body: &mut dyn FnMut() -> Result<(), GpuError>,
    ) -> Result<Self::Graph, GpuError>;

    /// Do what was kept.
    ///
    /// # Errors
    /// As above.
    fn launch(&self, graph: &Self::Graph, on: &Self::Stream) -> Result<(), GpuError>;

    /// Let the passes that have not begun do nothing from now on, or something again.
    ///
    /// # Errors
    /// As above.
    fn stop(&self, is_stopped: bool) -> Result<(), GpuError>;

    /// Return memory of this process for copies from and to the GPU, of no particular contents.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`], or the driver's words.
    fn pinned(&self, len_bytes: usize) -> Result<Self::Pinned, GpuError>;

    /// Wait until nothing copies from or to `pinned`, and return it.
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
