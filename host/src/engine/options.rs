//! What a call is given beside its buffers, and what it reports.

use crate::select::Algo;
use crate::transport::memory::Transfer;
use crate::transport::packets::Slowest;
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
    pub fallback: Option<String>,
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
