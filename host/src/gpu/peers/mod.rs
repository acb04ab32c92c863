//! Ranks in separate processes, each with a GPU or sharing one, that access each other's GPU memory.
//!
//! A [`PeerGroup`] is one rank. On joining, the ranks exchange their facts ([`PeerFacts`]) over existing connections
//! ([`Bootstrap`]; a [`Communicator`] is one), and each tries to open what every other exports. All ranks receive all
//! results, and so reach the same decision:
//! - **direct**, if every rank can access every other: schedules of [`crate::schedule`] over all ranks' memory, where
//!   each rank runs the passes that write to its own;
//! - **staged** through pinned memory and the network ([`Staging`](super::Staging)) otherwise, or where that costs
//!   less, with the reason ([`WhyStaged`]) in each outcome;
//! - **NCCL**, where all ranks have it, if it costs least or is requested.
//!
//! # Ordering between the ranks' streams
//!
//! Each rank has a page of words that the others write, with one counter for each rank. When a rank's stream has passed
//! an operation, it writes its counter in the pages of the ranks that wait for it; they wait on their streams, without
//! the host. An operation begins when all ranks have entered it and ends when all have completed it, so no rank reads
//! memory that its owner already has back.
//!
//! At the end each rank writes the signature of the operation that it ran. A rank that finds another signature in its
//! page fails with [`PeerError::Mismatch`], or with [`PeerError::GivenUp`] if a rank has given up, which that rank
//! writes before it releases its stream.
//!
//! Invariants:
//! - Decisions that all ranks must share depend only on what all have exchanged.
//! - Nothing received from a peer is used before it is checked: versions, lengths, handles.
//! - A wait ends by its deadline; afterwards the group is unusable, and keeps memory that other ranks may still read.

mod error;
mod group;
mod join;
mod link;
mod page;
mod plan;
mod resources;
mod select;
#[cfg(test)]
mod tests;
mod wait;

pub use error::PeerError;
pub use group::{PeerGroup, PeerOptions, PeerOutcome, PeerWork, Shared};
pub use link::{Reach, WhyStaged};
pub use select::{HOST_BETA_S, PeerExplanation, PeerTransport};

use super::error::GpuError;
use super::{Gpu, Part};
use crate::comm::{CallOptions, Communicator, Outcome};
use crate::exec::Buffers;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, Path};

/// A rank's process and GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerFacts {
    /// Identifies the machine: the same for all its processes.
    pub host: String,
    /// Identifies the process on its machine.
    pub process: u64,
    /// Identifies the GPU.
    pub gpu: String,
    /// Whether its memory can be exported to other processes, or why not.
    pub shares: Result<(), String>,
    /// The version of NCCL, or why it is unavailable.
    pub nccl: Result<u32, String>,
}

/// Exports memory to another process or GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// Address of the memory, for the same process.
    pub address: u64,
    /// The driver's handle of the allocation, for other processes, or why there is none.
    pub ipc: Result<Vec<u8>, String>,
    /// Offset of the memory in the allocation.
    pub at: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// A GPU whose memory other processes and GPUs can access.
pub trait Peered: Gpu {
    /// Describe this process and its GPU.
    ///
    /// # Errors
    /// The driver's error, here and below.
    fn facts(&self) -> Result<PeerFacts, GpuError>;

    /// Return how this GPU accesses memory of a peer on the same machine.
    ///
    /// # Errors
    /// Why it cannot.
    fn reach(&self, peer: &PeerFacts) -> Result<Reach, WhyStaged>;

    /// Export memory.
    ///
    /// # Errors
    /// [`GpuError::Handle`] if this memory cannot be exported.
    fn export(&self, memory: &Self::Memory) -> Result<Handle, GpuError>;

    /// Open a peer's memory; dropping the last share closes it.
    ///
    /// # Errors
    /// [`GpuError::Handle`] for handles that are invalid, or whose memory is gone.
    fn open(&self, peer: &PeerFacts, handle: &Handle) -> Result<Self::Memory, GpuError>;

    /// Write a word of memory, possibly a peer's, when the stream gets there; all earlier work of the stream is visible
    /// before.
    ///
    /// # Errors
    /// As above.
    fn signal(&self, on: &Self::Stream, to: Part<'_, Self::Memory>, value: u32) -> Result<(), GpuError>;

    /// Make a stream wait until a word, which counts up and wraps around, has reached `value`.
    ///
    /// # Errors
    /// As above.
    fn await_signal(&self, on: &Self::Stream, at: Part<'_, Self::Memory>, value: u32) -> Result<(), GpuError>;

    /// Keep memory that is dropped from here on, since an operation waits for other processes: a free would wait with
    /// it. Calls nest.
    fn hold_frees(&self);

    /// End one [`Peered::hold_frees`]; the last frees what was kept.
    fn release_frees(&self);

    /// Write words of own memory immediately, bypassing all streams.
    ///
    /// # Errors
    /// As above; [`GpuError::Stuck`] if streams hold it up.
    fn set_now(&self, to: Part<'_, Self::Memory>, words: &[u32]) -> Result<(), GpuError>;

    /// Read words of own memory immediately, bypassing all streams.
    ///
    /// # Errors
    /// As for [`Peered::set_now`].
    fn get_now(&self, from: Part<'_, Self::Memory>) -> Result<Vec<u32>, GpuError>;
}

/// Connections of the ranks that exist before they access each other's GPUs.
pub trait Bootstrap {
    /// Return this rank.
    fn rank(&self) -> u32;

    /// Return the number of ranks.
    fn ranks(&self) -> u32;

    /// Send `bytes`, at most [`MESSAGE_BYTES_MAX`], to all ranks, and return the bytes of each. All ranks must call it.
    ///
    /// # Errors
    /// [`PeerError::Bootstrap`], or [`PeerError::Message`] for malformed messages.
    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError>;

    /// All-reduce host memory, for staged transfers.
    ///
    /// # Errors
    /// [`PeerError::Bootstrap`].
    fn all_reduce(&self, desc: &OpDesc, bytes: &mut [u8], deadline: Instant) -> Result<Reduced, PeerError>;

    /// Return the estimated time of such an operation in seconds. Ranks need not agree: rank 0's estimate is used.
    fn cost_s(&self, desc: &OpDesc) -> Option<f64>;
}

/// Outcome of an all-reduce of host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduced {
    /// The path taken.
    pub path: Path,
    /// Why the tree was not used, if it could not be.
    pub fallback: Option<String>,
    /// Whether it was recovered; ranks may then report different paths.
    pub recovered: bool,
}

/// Maximum length of a message of a [`Bootstrap`].
pub const MESSAGE_BYTES_MAX: usize = 4096 - 4;

impl Bootstrap for Communicator {
    fn rank(&self) -> u32 {
        Self::rank(self)
    }

    fn ranks(&self) -> u32 {
        self.size()
    }

    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError> {
        // Blocks of equal length, each prefixed with the message's length.
        let block = MESSAGE_BYTES_MAX + 4;
        if bytes.len() > MESSAGE_BYTES_MAX {
            let why = format!("{} bytes exceed the maximum of {MESSAGE_BYTES_MAX}", bytes.len());
            return Err(PeerError::Message { rank: self.rank(), why });
        }
        let mut own = vec![0; block];
        own[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        own[4..4 + bytes.len()].copy_from_slice(bytes);
        let mut all = vec![0; block * self.size() as usize];
        let desc = OpDesc::all_gather(Dtype::U8, all.len() as u64);
        self.run(&desc, Buffers::Separate { input: &own, output: &mut all }, &until(deadline))?;
        let message = |(rank, block): (usize, &[u8])| {
            let (len, rest) = block.split_first_chunk().ok_or("a block without a length").unwrap_or((&[0; 4], &[]));
            let len = u32::from_le_bytes(*len) as usize;
            let bytes = rest.get(..len).map(<[u8]>::to_vec);
            bytes.ok_or_else(|| PeerError::Message { rank: rank as u32, why: format!("{len} bytes in {block:?}") })
        };
        all.chunks(block).enumerate().map(message).collect()
    }

    fn all_reduce(&self, desc: &OpDesc, bytes: &mut [u8], deadline: Instant) -> Result<Reduced, PeerError> {
        let Outcome { path, fallback, recovered, .. } = self.run(desc, Buffers::InPlace(bytes), &until(deadline))?;
        Ok(Reduced { path, fallback: fallback.map(|why| why.to_string()), recovered })
    }

    fn cost_s(&self, desc: &OpDesc) -> Option<f64> {
        let explanation = self.explain(desc, crate::select::Algo::Auto);
        let chosen = explanation.candidates.iter().find(|candidate| Some(candidate.path) == explanation.chosen)?;
        chosen.cost_s.as_ref().ok().copied()
    }
}

fn until(deadline: Instant) -> CallOptions {
    CallOptions { deadline: Some(deadline.saturating_duration_since(Instant::now())), ..CallOptions::default() }
}
