//! Why operations fail, and why they cannot be posted.

use crate::transport::memory::ProtocolViolation;
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::EntryStatus;
use sumac_hal::op::OpDesc;
use sumac_hal::wire::RankMask;
use thiserror::Error;

/// Why an operation failed. The group is at its end then: its ranks no longer agree on sequence numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// Ranks called different operations.
    #[error(
        "ranks called different operations: one {first}, another {other}; all ranks must make the same \
         calls in the same order"
    )]
    Mismatch {
        /// The operation of the rank that arrived first.
        first: OpDesc,
        /// The operation of another rank.
        other: OpDesc,
    },
    /// A device of the tree does not support the operation.
    #[error("a device of the tree does not support {0}")]
    Unsupported(OpDesc),
    /// The path to the root is lost.
    #[error("the path to the tree's root is lost: no answer within the limit for dead hops")]
    PathLost,
    /// The device does not know the group.
    #[error("the device no longer knows the group: it restarted, or the lease expired")]
    GroupLost,
    /// The device refused a zero-copy contribution.
    #[error("the device refused the zero-copy contribution to {chunk}: {status:?}")]
    Device {
        /// The reported status.
        status: EntryStatus,
        /// The chunk.
        chunk: ChunkNo,
    },
    /// The device of a zero-copy transport is lost.
    #[error("the device that reads and writes this rank's memory is lost")]
    DeviceLost,
    /// Ranks missed the limit of an operation.
    #[error("ranks {missing} did not enter the operation within its limit, and it has no result without them")]
    Stragglers {
        /// The missing ranks.
        missing: RankMask,
    },
    /// This rank missed the limit of an operation and was excluded.
    #[error("this rank was excluded from the group: it did not enter an operation within its limit")]
    Excluded,
    /// The device of a zero-copy transport violated the protocol.
    #[error("protocol violation by the device: {0}")]
    Protocol(#[from] ProtocolViolation),
}

/// Why an operation cannot be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PostError {
    /// An earlier operation failed.
    #[error("the group has failed: {0}")]
    Failed(#[from] EndpointError),
    /// Too many operations are in flight.
    #[error("{limit} operations are already in flight; wait for one to complete")]
    TooMany {
        /// The limit.
        limit: usize,
    },
}
