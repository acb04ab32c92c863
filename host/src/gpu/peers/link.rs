//! Whether one rank's GPU reaches another's memory, and why not.

use super::PeerFacts;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a GPU reaches a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reach {
    /// It is its own.
    SameGpu,
    /// Over NVLink or PCIe, by peer access.
    OtherGpu,
}

/// Why ranks don't reach each other's memory directly, or should not.
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
    /// A process can't hand its memory to others.
    #[error("rank {rank} can't hand its memory to other processes: {why}")]
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
        /// The GPU whose memory it would be.
        to: String,
    },
    /// It was tried, and did not work.
    #[error("rank {rank} could not open the memory of rank {peer}: {why}")]
    Opening {
        /// Who tried.
        rank: u32,
        /// Whose memory it is.
        peer: u32,
        /// The driver's words.
        why: String,
    },
    /// It would take longer.
    #[error("directly it takes {direct_us:.1} us, staged {staged_us:.1} us")]
    Cost {
        /// The cheapest direct way.
        direct_us: f64,
        /// The staged way.
        staged_us: f64,
    },
    /// The caller wants it so.
    #[error("the options ask for it")]
    Asked,
}

/// Judge two ranks by what they say; what else it takes only trying shows.
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
