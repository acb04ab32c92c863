//! A DMA engine: it copies between registered memory, and some reduce in flight.
//!
//! A [`Chain`] is a list of [`Step`]s over registered memory, with one [`Tag`] and one [`Completion`]. It is what a
//! device submits for one chunk: pull the first contribution into the redo slot, reduce the others into it, publish
//! the slot, and write the result to those who want it.
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
//! (For f32 the result takes the place of the accumulators: the `Store` is from and to the same address.)
//!
//! Why a chain and not single descriptors: it says which steps share an accumulator, so an engine may run them
//! *segment by segment* and keep the accumulator in its nearest cache; each source is read once and each destination
//! written once. An engine without that runs them one after the other, as a fenced list (DSA's batch, an RDMA work
//! request with a fence, a stream of Ascend's), with the same bytes as result.
//!
//! Rules that every engine keeps:
//! - The steps of a chain take effect in order, as if each was done before the next began, and no step runs after one
//!   that failed. Chains take effect in any order.
//! - [`Step::Publish`] is visible after everything before it in the chain, and before everything behind it.
//! - A chain that was taken completes exactly once. Its memory is quiet from then on, and not before.
//! - What a step may touch is checked against the regions as they are when it runs; nothing else is ever touched.
//!
//! Engines differ in what they can ([`Capabilities`]): copy only (NVIDIA BlueField's DMA and mlx5's MMO, Intel DSA);
//! reduce in the element type (Huawei Ascend's SDMA: sum, min, max of i8, i16, i32, f16, bf16, f32); or all of it, with
//! wider accumulators. A descriptor names source, accumulator and output types, because 256 + 1 + 1 in bf16 and in f32
//! are different numbers (PROTOCOL 9).

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
    Address, Chain, Covers, DESCRIPTOR_WORDS, Descriptor, DescriptorError, RegionKey, Scope, Step, Tag,
};
pub use memory::{Backing, DmaMemory};
pub use processor::Processor;
pub use region::{RegionError, RegionTable, RegisterError, Span};

use core::fmt;
use core::time::Duration;

/// How a chain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Status {
    /// All steps have taken effect.
    Done = 0,
    /// A step names a region that does not exist.
    BadRegion = 1,
    /// A step names a region that was deregistered, or that another took the place of.
    StaleRegion = 2,
    /// A step reaches beyond the end of its region.
    OutOfBounds = 3,
    /// An address or a length is not a multiple of what the engine or the element type asks for.
    Misaligned = 4,
    /// The engine does not have this step, or not for these types.
    Unsupported = 5,
    /// A length is 0 or more than the engine takes, or the chain has more steps.
    TooLong = 6,
    /// What a step writes overlaps what it reads, or (strict mode) what another chain in flight touches.
    Overlap = 7,
    /// [`Engine::abort`] came first. Some steps may have taken effect.
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

    /// Return the status of a number, if this version knows it.
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
            Self::TooLong => "length 0, or longer than the engine takes",
            Self::Overlap => "overlapping memory",
            Self::Aborted => "aborted",
            Self::Hardware => "the engine failed",
        })
    }
}

/// The end of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The chain's tag.
    pub tag: Tag,
    /// How it ended.
    pub status: Status,
    /// The step that failed, 0-based; the number of steps if none did.
    pub step: u16,
}

/// Why an engine did not take a chain. Nothing of it runs, and no completion comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Poll for completions and try again.
    #[error("the engine's queue of {depth} descriptors is full: poll, then submit again")]
    Full {
        /// The descriptors that the queue holds.
        depth: u32,
    },
    /// No queue would ever hold it.
    #[error("a chain of {steps} steps is not 1 to {max}: cut it")]
    Length {
        /// The steps of the chain.
        steps: usize,
        /// The most that the engine takes.
        max: u32,
    },
    /// The engine is gone; what it had taken completes as [`Status::Hardware`].
    #[error("the engine has stopped: start it anew")]
    Stopped,
}

/// A DMA engine's queue.
pub trait Engine {
    /// Return what this engine can do; fixed for its life.
    fn capabilities(&self) -> &Capabilities;

    /// Take a chain. It starts at once, and its completion comes through [`Engine::poll`]: also for descriptors that
    /// are wrong.
    ///
    /// # Errors
    /// [`SubmitError`], and then nothing was taken.
    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError>;

    /// Take completions, as many as there are and fit, and return how many.
    fn poll(&mut self, completions: &mut [Completion]) -> usize;

    /// Make every chain of `scope` that was taken before end soon, as [`Status::Aborted`] if it was not done.
    ///
    /// The memory of a scope is quiet when all its tags have come back, which takes an engine that is alive no longer
    /// than the segment at hand. This is the fence of PROTOCOL 6 as far as an engine can give it; one that is dead
    /// needs its function reset.
    fn abort(&mut self, scope: Scope);
}

/// An engine whose user can sleep until there is something to poll.
pub trait WaitEngine: Engine {
    /// Sleep until a completion is there or `timeout` has passed; true if one is there.
    fn wait(&mut self, timeout: Option<Duration>) -> bool;
}

/// A device's own memory: the engine reaches it under keys like any other, and the device's processor works on it
/// between two chains. This is how a [`Profile::CopyOnly`] engine reduces: it copies contributions into this memory,
/// the runtime's kernels combine them there, and it copies the result out.
pub trait LocalMemory {
    /// Let `work` write to `dst` and read `src`.
    ///
    /// # Errors
    /// [`Status::BadRegion`] if either is not the device's own, [`Status::OutOfBounds`], and [`Status::Overlap`] if
    /// they overlap, or a chain in flight writes one of them or reads `dst`. Then `work` was not called.
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status>;
}
