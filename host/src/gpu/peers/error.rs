//! What can go wrong between GPUs of several processes.

use super::WhyStaged;
use crate::gpu::GpuError;
use std::fmt::Write;
use sumac_hal::op::OpDesc;
use thiserror::Error;

/// Why ranks with a GPU each have no result.
///
/// After all but [`PeerError::Staged`] and an invalid call ([`GpuError::Invalid`], [`GpuError::Kernel`]) the group is
/// of no use any more: its ranks may be at different operations.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// On this rank's GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// On the way between the ranks.
    #[error("between the ranks: {0}")]
    Bootstrap(#[from] crate::comm::Error),
    /// A rank said something that can't be.
    #[error("rank {rank} says what can't be: {why}; do all ranks run the same version?")]
    Message {
        /// The rank.
        rank: u32,
        /// What.
        why: String,
    },
    /// Something that only the direct way has was asked for where there is none. Nothing has begun.
    #[error("not directly: {0}")]
    Staged(WhyStaged),
    /// Ranks called different things.
    #[error(
        "rank {rank} took part in something else than {desc} by {path}: all ranks make the same calls in one order"
    )]
    Mismatch {
        /// The first such rank.
        rank: u32,
        /// What this one called.
        desc: OpDesc,
        /// The way that this one went.
        path: &'static str,
    },
    /// Another rank has given up the operation.
    #[error("rank {rank} has given up {desc}, by its deadline or because it was cancelled")]
    GivenUp {
        /// The first such rank.
        rank: u32,
        /// The operation.
        desc: OpDesc,
    },
    /// The deadline passed. Nothing of the operation runs at this rank any more.
    #[error("{desc} was not done by its deadline: {}", late(missing))]
    Deadline {
        /// The operation.
        desc: OpDesc,
        /// The ranks that had not come to it; empty if all had, or if nobody can say.
        missing: Vec<u32>,
    },
    /// An earlier error ended the group.
    #[error("an earlier error ended the group: set up another")]
    Ended,
}

fn late(missing: &[u32]) -> String {
    if missing.is_empty() {
        return "all ranks had come to it".into();
    }
    let mut words = String::from(if missing.len() == 1 { "rank " } else { "ranks " });
    for (index, rank) in missing.iter().enumerate() {
        // Writing to a string does not fail.
        let _ = write!(words, "{}{rank}", if index == 0 { "" } else { ", " });
    }
    words + " had not come to it"
}
