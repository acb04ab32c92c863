//! DMA engines, which copy between registered memory; some also reduce in flight.
//!
//! A [`Chain`] is a list of [`Step`]s over registered memory, with one [`Tag`] and one [`Completion`]. A device submits
//! one chain per chunk: it pulls the first contribution into the redo slot, reduces the others into it, publishes the
//! slot, and writes the result to the ranks that want it.
//!
//! ```text
//! step                      redo slot, in L2     registered memory of ranks
//! Publish  0                header: nothing
//! Load     bf16 -> f32      acc  =              <- input of child 0
//! Reduce   sum, bf16, f32   acc +=              <- input of child 1
//! Store    f32 -> bf16      result = round(acc)
//! Publish  (epoch, seq)     header: result k, and its checksum
//! Copy                      result ->              output of rank 0 (in place: where input 0 was)
//! Copy                      result ->              output of rank 1
//! ```
//!
//! (For f32 the result replaces the accumulators: source and destination of the `Store` are the same.)
//!
//! A chain, unlike single descriptors, tells which steps share an accumulator. An engine can therefore run it *segment
//! by segment* and keep the accumulator in its nearest cache, reading each source and writing each destination once.
//! Other engines run the steps one after the other as a fenced list (a DSA batch, RDMA work requests with a fence, an
//! Ascend stream), with bitwise the same result.
//!
//! Every engine follows these rules:
//! - The steps of a chain take effect in order, as if each completed before the next started. No step runs after a
//!   failed one. Different chains take effect in any order.
//! - [`Step::Publish`] becomes visible after the effects of all earlier steps and before those of all later steps.
//! - An accepted chain completes exactly once. The engine accesses its memory until then, and not afterwards.
//! - Each step is checked against the regions as they are when it runs. The engine accesses nothing else.
//!
//! Engines differ in their [`Capabilities`]. Some only copy (NVIDIA BlueField's DMA and mlx5's MMO, Intel DSA), some
//! reduce in the element type (Huawei Ascend's SDMA: sum, min, max of i8, i16, i32, f16, bf16, f32), and some do
//! everything, with wider accumulators. A descriptor names source, accumulator and output types, because 256 + 1 + 1
//! has different results in bf16 and f32 (PROTOCOL 9).

mod capabilities;
mod descriptor;
mod fused;
pub(crate) mod kernels;
mod memory;
mod processor;
mod region;
pub(crate) mod shared;
#[cfg(test)]
mod tests;

pub use capabilities::{Capabilities, DtypeSet, OpSet, Profile};
pub use descriptor::{
    Address, Chain, Coverage, DESCRIPTOR_WORDS, Descriptor, DescriptorError, RegionKey, Scope, Step, Tag,
};
pub use memory::{Backing, DmaMemory};
pub use processor::Processor;
pub use region::{RegionError, RegionTable, RegisterError, Span};

use core::fmt;
use core::time::Duration;

/// The status of a completed chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// All steps have taken effect.
    Done = 0,
    /// A step names a region that does not exist.
    BadRegion = 1,
    /// A step names a region that was deregistered or replaced.
    StaleRegion = 2,
    /// A step reaches beyond the end of its region.
    OutOfBounds = 3,
    /// An address or a length violates the alignment of the engine or the element type.
    Misaligned = 4,
    /// The engine does not support the step, or not for these types.
    Unsupported = 5,
    /// A length is 0 or exceeds the engine's limit, or the chain has too many steps.
    TooLong = 6,
    /// A step's destination overlaps its source or, in strict mode, memory of another chain in flight.
    Overlap = 7,
    /// [`Engine::abort`] ended the chain. Some steps may have taken effect.
    Aborted = 8,
    /// The hardware failed: a bus error, a fault, a dead engine.
    Hardware = 9,
}

impl Status {
    /// Every status, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::Done,
        Self::BadRegion,
        Self::StaleRegion,
        Self::OutOfBounds,
        Self::Misaligned,
        Self::Unsupported,
        Self::TooLong,
        Self::Overlap,
        Self::Aborted,
        Self::Hardware,
    ];

    /// Return the status with this wire number, if this version knows it.
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Done => "done",
            Self::BadRegion => "no such region",
            Self::StaleRegion => "the region was deregistered",
            Self::OutOfBounds => "beyond the end of the region",
            Self::Misaligned => "misaligned address or length",
            Self::Unsupported => "not supported by this engine",
            Self::TooLong => "length is 0 or exceeds the engine's limit",
            Self::Overlap => "overlapping memory",
            Self::Aborted => "aborted",
            Self::Hardware => "the engine failed",
        })
    }
}

/// The completion of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The chain's tag.
    pub tag: Tag,
    /// The chain's status.
    pub status: Status,
    /// The index of the step that failed; the number of steps if none did.
    pub step: u16,
}

/// Why an engine did not accept a chain. No step runs, and there is no completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The queue is full. Poll for completions and submit again.
    #[error("the DMA engine's queue of {depth} descriptors is full; poll for completions and submit again")]
    Full {
        /// The queue's capacity in descriptors.
        depth: u32,
    },
    /// The chain is empty or exceeds the engine's limit.
    #[error("chain of {steps} steps; the DMA engine supports 1 to {max}")]
    Length {
        /// The steps of the chain.
        steps: usize,
        /// The maximum number of steps.
        max: u32,
    },
    /// The engine has stopped. Accepted chains complete with [`Status::Hardware`].
    #[error("the DMA engine has stopped; restart it")]
    Stopped,
}

/// A DMA engine's queue.
pub trait Engine {
    /// Return the engine's capabilities. They never change.
    fn capabilities(&self) -> &Capabilities;

    /// Submit a chain. It starts at once and completes through [`Engine::poll`], even if its steps are invalid.
    ///
    /// # Errors
    /// [`SubmitError`] if the chain was not accepted.
    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError>;

    /// Take up to `completions.len()` completions, and return their number.
    fn poll(&mut self, completions: &mut [Completion]) -> usize;

    /// Abort all chains of `scope` that were submitted so far. Unfinished ones complete soon, with [`Status::Aborted`].
    ///
    /// The engine has stopped accessing a scope's memory once all its tags have completed, which takes a working engine
    /// no longer than its current segment. This is the engine's part of the fence of PROTOCOL 6. A dead engine needs a
    /// function reset.
    fn abort(&mut self, scope: Scope);
}

/// An engine that can block until there is a completion.
pub trait WaitEngine: Engine {
    /// Block until there is a completion or `timeout` expires. Returns whether there is one.
    fn wait(&mut self, timeout: Option<Duration>) -> bool;
}

/// A device's local memory. The engine accesses it by key like any other, and the device's processor works on it
/// between chains. This is how a device with a [`Profile::CopyOnly`] engine reduces: the engine copies contributions
/// into local memory, the runtime's kernels combine them there, and the engine copies the result out.
pub trait LocalMemory {
    /// Call `work` with `dst` for writing and `src` for reading.
    ///
    /// # Errors
    /// [`Status::BadRegion`] if either is not local memory, [`Status::OutOfBounds`], or [`Status::Overlap`] if they
    /// overlap, or a chain in flight writes either of them or reads `dst`. `work` is not called then.
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status>;
}
