//! Whether one rank's GPU can access another's memory, and why not.

use super::PeerFacts;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a GPU accesses a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reach {
    /// It is the same GPU.
    SameGpu,
    /// Over NVLink or PCIe, by peer access.
    OtherGpu,
}

/// Why ranks cannot, or should not, access each other's memory directly.
#[derive(Debug, Clone, PartialEq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WhyStaged {
    /// They are on different machines.
    #[error("ranks {a} and {b} are on different machines")]
    OtherHost {
        /// One rank.
        a: u32,
        /// The other.
        b: u32,
    },
    /// A process cannot export its memory.
    #[error("rank {rank} cannot export its memory to other processes: {why}")]
    NoHandles {
        /// The rank.
        rank: u32,
        /// The driver's reason.
        why: String,
    },
    /// There is no peer access between two GPUs.
    #[error("there is no peer access from {from} to {to}")]
    NoPeerAccess {
        /// The GPU that would read.
        from: String,
        /// The GPU whose memory it is.
        to: String,
    },
    /// Opening the memory failed.
    #[error("rank {rank} could not open the memory of rank {peer}: {why}")]
    Opening {
        /// The rank that tried.
        rank: u32,
        /// The owner of the memory.
        peer: u32,
        /// The driver's error.
        why: String,
    },
    /// Direct transfer would be slower.
    #[error("direct: {direct_us:.1} us, staged: {staged_us:.1} us")]
    Cost {
        /// Cost of the cheapest direct algorithm in microseconds.
        direct_us: f64,
        /// Cost of staging in microseconds.
        staged_us: f64,
    },
    /// Requested by the options.
    #[error("requested by the options")]
    Asked,
}

/// Compare the facts of two ranks; other obstacles show only on opening.
pub(super) fn by_facts((a, mine): (u32, &PeerFacts), (b, theirs): (u32, &PeerFacts)) -> Option<WhyStaged> {
    if mine.host != theirs.host {
        return Some(WhyStaged::OtherHost { a, b });
    }
    if mine.process == theirs.process {
        return None;
    }
    let without = |(rank, facts): (u32, &PeerFacts)| {
        facts.shares.as_ref().err().map(|why| WhyStaged::NoHandles { rank, why: why.clone() })
    };
    without((a, mine)).or_else(|| without((b, theirs)))
}
