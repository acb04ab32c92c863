//! Ranks in processes of their own, each with a GPU, or several with one: their memory in each other's hands.
//!
//! A [`PeerGroup`] is one rank. At the beginning the ranks tell each other what they have ([`PeerFacts`]) over the
//! connections that they have anyway ([`Bootstrap`]; a [`Communicator`] is one), and each tries
//! to open what every other one shows it. From the verdicts of all, which all have, all decide the same:
//! - **direct**, if each reaches each: the schedules of [`crate::schedule`] over all ranks' memory, each rank with the
//!   passes that write to its own;
//! - **staged** through pinned memory and the network ([`Staging`](super::Staging)) if not, or where that costs less,
//!   with the reason ([`WhyStaged`]) in each outcome;
//! - **NCCL**, where all have it, if it costs least or is asked for.
//!
//! # How the ranks' streams keep their order
//!
//! Each rank has a page of words that the others write, one counter a rank. A rank that is behind an
//! operation says so in the pages of those who wait for it, and they wait for that, on their streams: no host takes
//! part. An operation begins when all have come to it and ends when all have done it; so nobody reads memory whose
//! owner has got it back.
//!
//! Each rank says at the end what it took part in. Who finds something else in its page has not got a sum, and says so:
//! [`PeerError::Mismatch`], or [`PeerError::GivenUp`] where a rank has given up, which it says before it lets its
//! stream go.
//!
//! Invariants:
//! - what all have to do alike is decided from what all have been told, and from nothing else;
//! - nothing that a peer says is used before it is checked: versions, lengths, handles;
//! - a wait ends by its deadline; afterwards the group is of no use, and keeps the memory that others may still read.

mod choose;
mod error;
mod group;
mod hand;
mod join;
mod link;
mod page;
mod room;
#[cfg(test)]
mod tests;
mod wait;

pub use choose::{HOST_BETA_S, PeerExplanation, Way};
pub use error::PeerError;
pub use group::{PeerGroup, PeerOptions, PeerOutcome, PeerWork, Shared};
pub use link::{Reach, WhyStaged};

use super::error::GpuError;
use super::{Gpu, Part};
use crate::comm::{CallOptions, Communicator, Outcome};
use crate::exec::Buffers;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, Path};

/// What a rank says of its process and its GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerFacts {
    /// The running system: the same for all processes of one machine.
    pub host: String,
    /// The process: no other of its machine has this number.
    pub process: u64,
    /// The GPU: no other one has this name.
    pub gpu: String,
    /// Whether other processes can get handles of its memory, or why not.
    pub shares: Result<(), String>,
    /// The version of NCCL, or why there is none.
    pub nccl: Result<u32, String>,
}

/// What opens memory to another process or GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// Where the memory begins, for the same process.
    pub address: u64,
    /// The driver's handle of the allocation, for others, or why there is none.
    pub ipc: Result<Vec<u8>, String>,
    /// Where the memory begins in the allocation.
    pub at: u64,
    /// How long it is.
    pub len_bytes: u64,
}

/// A GPU whose memory other processes and GPUs can reach.
pub trait Peered: Gpu {
    /// Describe this process and its GPU.
    ///
    /// # Errors
    /// The driver's words, here and below.
    fn facts(&self) -> Result<PeerFacts, GpuError>;

    /// Tell how this GPU reaches memory of a peer's on the same machine.
    ///
    /// # Errors
    /// Why it does not.
    fn reach(&self, peer: &PeerFacts) -> Result<Reach, WhyStaged>;

    /// Return what opens memory to others.
    ///
    /// # Errors
    /// [`GpuError::Handle`] if it can't be had for this memory.
    fn export(&self, memory: &Self::Memory) -> Result<Handle, GpuError>;

    /// Open a peer's memory; the last share closes it.
    ///
    /// # Errors
    /// [`GpuError::Handle`] for handles that are wrong, or whose memory is gone.
    fn open(&self, peer: &PeerFacts, handle: &Handle) -> Result<Self::Memory, GpuError>;

    /// Write a word of memory, perhaps a peer's, when the stream gets here; all that the stream did before is seen
    /// first.
    ///
    /// # Errors
    /// As above.
    fn signal(&self, on: &Self::Stream, to: Part<'_, Self::Memory>, value: u32) -> Result<(), GpuError>;

    /// Let a stream wait until a word that counts upwards, and begins anew after its last value, has got to `value`.
    ///
    /// # Errors
    /// As above.
    fn await_signal(&self, on: &Self::Stream, at: Part<'_, Self::Memory>, value: u32) -> Result<(), GpuError>;

    /// Write words of own memory at once, past all streams.
    ///
    /// # Errors
    /// As above.
    fn set_now(&self, to: Part<'_, Self::Memory>, words: &[u32]) -> Result<(), GpuError>;

    /// Read words of own memory at once, past all streams.
    ///
    /// # Errors
    /// As above.
    fn get_now(&self, from: Part<'_, Self::Memory>) -> Result<Vec<u32>, GpuError>;
}

/// The connections that ranks have before they reach each other's GPUs.
pub trait Bootstrap {
    /// Return this rank.
    fn rank(&self) -> u32;

    /// Return the number of ranks.
    fn ranks(&self) -> u32;

    /// Give `bytes`, at most [`MESSAGE_BYTES_MAX`], to all ranks, and return what each gave. All ranks call it.
    ///
    /// # Errors
    /// [`PeerError::Bootstrap`], or [`PeerError::Message`] for what breaks the form.
    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError>;

    /// All-reduce memory of the process, for what is staged.
    ///
    /// # Errors
    /// [`PeerError::Bootstrap`].
    fn all_reduce(&self, desc: &OpDesc, bytes: &mut [u8], deadline: Instant) -> Result<Reduced, PeerError>;

    /// Return what it expects such an operation to take, in seconds. Ranks need not agree: rank 0's word counts.
    fn cost_s(&self, desc: &OpDesc) -> Option<f64>;
}

/// What became of an all-reduce of memory of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reduced {
    /// The path taken.
    pub path: Path,
    /// Why not the tree, if that was not possible.
    pub fallback: Option<String>,
    /// Whether it was repaired on the way; then ranks may name different paths.
    pub repaired: bool,
}

/// The longest message of a [`Bootstrap`].
pub const MESSAGE_BYTES_MAX: usize = 4096 - 4;

impl Bootstrap for Communicator {
    fn rank(&self) -> u32 {
        Self::rank(self)
    }

    fn ranks(&self) -> u32 {
        self.size()
    }

    fn exchange(&self, bytes: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, PeerError> {
        // Blocks of one length: a message's own stands before it.
        let block = MESSAGE_BYTES_MAX + 4;
        if bytes.len() > MESSAGE_BYTES_MAX {
            let why = format!("{} bytes, and {MESSAGE_BYTES_MAX} are the most", bytes.len());
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
        let Outcome { path, fallback, repaired, .. } = self.run(desc, Buffers::InPlace(bytes), &until(deadline))?;
        Ok(Reduced { path, fallback, repaired })
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
