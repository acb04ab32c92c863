//! Errors between GPUs of several processes.

use super::WhyStaged;
use crate::gpu::GpuError;
use std::fmt::Write;
use sumac_hal::op::OpDesc;
use thiserror::Error;

/// Why an operation between GPUs of several processes failed.
///
/// After any error except [`PeerError::Staged`] and an invalid call ([`GpuError::Invalid`], [`GpuError::Kernel`]) the
/// group is unusable: its ranks may be at different operations.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PeerError {
    /// On this rank's GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Between the ranks.
    #[error("between the ranks: {0}")]
    Bootstrap(#[from] crate::comm::Error),
    /// A rank sent an invalid message.
    #[error("invalid message from rank {rank}: {why}; do all ranks run the same version?")]
    Message {
        /// The rank.
        rank: u32,
        /// What is invalid about it.
        why: String,
    },
    /// A direct operation was requested where only staging is possible. Nothing was enqueued.
    #[error("direct transfer impossible: {0}")]
    Staged(WhyStaged),
    /// Ranks called different operations.
    #[error(
        "rank {rank} ran another operation than {desc} by {path}; all ranks must make the same calls in the same order"
    )]
    Mismatch {
        /// The first such rank.
        rank: u32,
        /// The operation of this rank.
        desc: OpDesc,
        /// The algorithm of this rank.
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
    /// The deadline passed. Nothing of the operation runs on this rank any more.
    #[error("{desc} missed its deadline: {}", late(missing))]
    Deadline {
        /// The operation.
        desc: OpDesc,
        /// The ranks that had not entered it; empty if all had, or if unknown.
        missing: Vec<u32>,
    },
    /// An earlier error ended the group.
    #[error("the group has failed; set up another")]
    Ended,
}

fn late(missing: &[u32]) -> String {
    if missing.is_empty() {
        return "all ranks had entered it".into();
    }
    let mut words = String::from(if missing.len() == 1 { "rank " } else { "ranks " });
    for (index, rank) in missing.iter().enumerate() {
        // Writing to a string does not fail.
        let _ = write!(words, "{}{rank}", if index == 0 { "" } else { ", " });
    }
    words + " had not entered it"
}
