//! What a call is given beside its buffers, and what it reports.

use crate::select::Algo;
use crate::transport::memory::Transfer;
use crate::transport::packets::Slowest;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::op::Path;
use sumac_hal::wire::RankMask;

/// Options of one call. Fields that are `None` use the communicator's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CallOptions {
    /// The algorithm. Must be the same on all ranks.
    pub algo: Option<Algo>,
    /// How long the call may take, from now.
    pub deadline: Option<Duration>,
    /// The factor that scales this rank's contribution, for [`ReduceOp::PremulSum`](sumac_hal::op::ReduceOp::PremulSum)
    /// only. Default 1.
    pub scalar: Option<f64>,
    /// What to do if ranks are late. Must be the same on all ranks.
    pub straggler: Option<Straggler>,
}

/// How a completed operation was carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The path taken.
    pub path: Path,
    /// How many trees the operation was spread over; 0 if it took none.
    pub trees: u32,
    /// How the payload moved between this rank and its leaf device; `None` for host collectives.
    pub transfer: Option<Transfer>,
    /// Why the operation did not use the tree, if the algorithm was left open.
    pub fallback: Option<Arc<str>>,
    /// Bytes that this rank sent during the operation, including data-plane headers, or that its leaf device read from
    /// its memory. Concurrent operations count each other's bytes.
    pub wire_bytes: u64,
    /// Contributions that this rank retransmitted during the operation.
    pub retransmits: u64,
    /// Whether the operation was interrupted by a failure and recovered.
    pub recovered: bool,
    /// The rank that entered the operation last, and how late, as measured by the devices. `None` for host collectives
    /// and after a recovery.
    pub slowest: Option<Slowest>,
    /// The ranks that did not contribute to the result. Empty unless [`Straggler::Partial`] has excluded ranks, in this
    /// operation or an earlier one.
    pub missing: RankMask,
}

impl Outcome {
    /// Add what this rank's rail did with its block to the outcome of the operation, if it had one.
    pub(super) fn with_block(mut self, block: Option<Self>) -> Self {
        let Some(block) = block else { return self };
        if block.path != Path::Tree {
            let why = block.fallback.unwrap_or_else(|| Arc::from(block.path.name()));
            self.fallback.get_or_insert(format!("this rank's rail: {why}").into());
        }
        self.trees = block.trees;
        self.transfer = block.transfer;
        self.wire_bytes += block.wire_bytes;
        self.retransmits += block.retransmits;
        self.recovered |= block.recovered;
        self
    }
}

/// What `println!` shows: the path, and whatever else is not as usual.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path.name())?;
        if self.trees > 1 {
            write!(f, " over {} trees", self.trees)?;
        }
        if let Some(transfer) = self.transfer {
            write!(f, ", {}", transfer.name())?;
        }
        write!(f, ", {} bytes on the wire", self.wire_bytes)?;
        if self.retransmits > 0 {
            write!(f, ", {} retransmits", self.retransmits)?;
        }
        if self.recovered {
            f.write_str(", recovered")?;
        }
        if let Some(slowest) = self.slowest {
            write!(f, ", slowest {slowest}")?;
        }
        if !self.missing.is_empty() {
            write!(f, ", without ranks {}", self.missing)?;
        }
        self.fallback.iter().try_for_each(|why| write!(f, "; no tree: {why}"))
    }
}

/// How often a communicator has recovered from failures, and what that cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Recoveries {
    /// The number of recoveries.
    pub count: u32,
    /// Total time spent in recovery, counted from when this rank joined each one.
    pub time: Duration,
    /// Bytes that this rank sent to other ranks for recovery, including failed attempts.
    pub bytes: u64,
}

/// Resources held by started operations and messages: until they are waited for or, if their handle was dropped, until
/// they complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Outstanding {
    /// The number of operations.
    pub operations: usize,
    /// The number of messages.
    pub messages: usize,
    /// The total size of their buffers in bytes.
    pub bytes: usize,
}

/// Who drives started operations and messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Progress {
    /// Callers do, in their calls on the communicator. Nothing goes on between calls, and no thread is needed.
    #[default]
    Caller,
    /// A thread of the communicator does, in the order in which they were started, and recovers. Their deadlines count
    /// from their start. A test never waits, and blocking calls of several threads overlap. A blocking call costs a
    /// hand-over to the thread and back.
    Thread,
}

/// The straggler policy of an operation. Must be the same on all ranks; otherwise they get
/// [`Error::Mismatch`](crate::Error::Mismatch).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Straggler {
    /// Wait for late ranks until the operation's deadline.
    #[default]
    Wait,
    /// Fail on all ranks with [`Error::Stragglers`](crate::Error::Stragglers) if a rank enters the operation later than
    /// this after the first one.
    Deadline(Duration),
    /// Complete without ranks that enter the operation later than this after the first one. [`Outcome::missing`]
    /// reports them. They are removed from the communicator, with [`Error::Excluded`](crate::Error::Excluded).
    ///
    /// Use a call deadline that is longer than this. Ranks that enter in time and then slow down are waited for.
    Partial(Duration),
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::ids::Rank;

    #[test]
    fn outcome_prints_its_path_and_what_is_unusual() {
        let mut outcome = Outcome {
            path: Path::Ring,
            trees: 0,
            transfer: None,
            fallback: Some("no device".into()),
            wire_bytes: 96,
            retransmits: 0,
            recovered: false,
            slowest: None,
            missing: RankMask::EMPTY,
        };
        assert_eq!(outcome.to_string(), "ring, 96 bytes on the wire; no tree: no device");
        outcome.missing.insert(Rank(3));
        outcome = Outcome {
            path: Path::Tree,
            trees: 2,
            transfer: Some(Transfer::ZeroCopy),
            fallback: None,
            retransmits: 4,
            recovered: true,
            slowest: Some(Slowest { rank: Rank(1), late_us: 7 }),
            ..outcome
        };
        let expected = "tree over 2 trees, zero-copy, 96 bytes on the wire, 4 retransmits, recovered, \
                        slowest rank 1 by 7 us, without ranks 3";
        assert_eq!(outcome.to_string(), expected);
    }
}
