//! What a call on a communicator can end in.

use crate::choice::RuledOut;
use crate::endpoint::{EndpointError, PostError};
use crate::exec::ExecError;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use thiserror::Error;

/// Why an operation has no result.
///
/// Except for [`Error::Argument`] and [`Error::NotPossible`], which change nothing, an error is the end of the
/// communicator: its ranks may be at different operations, and every later call returns [`Error::Ended`]. The
/// caller's buffer then holds, chunk by chunk, its input or the result (after a schedule: anything).
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Ranks called different things. All of them get this error.
    #[error("ranks called different operations: {}; all ranks must make the same calls in the same order", two(.first, .other))]
    Mismatch {
        /// One of the operations.
        first: OpDesc,
        /// Another. Equal to `first` if only the algorithm or the cost table differs.
        other: OpDesc,
    },
    /// A rank of the job is gone.
    #[error("{rank} is lost")]
    RankLost {
        /// The rank.
        rank: Rank,
    },
    /// The way to the tree's root is dead.
    #[error("the path through the tree is lost: a device stopped answering")]
    PathLost,
    /// The device has no such group any more.
    #[error("a device of the tree no longer knows the group: it restarted, or the lease ran out")]
    GroupLost,
    /// The deadline passed.
    #[error("{desc} did not complete within {} ms", waited.as_millis())]
    Deadline {
        /// The operation.
        desc: OpDesc,
        /// How long it was given.
        waited: Duration,
    },
    /// What was asked for is not possible; nothing was sent.
    #[error("not possible: {0}")]
    NotPossible(#[from] RuledOut),
    /// A device does not know the operation, though it said so.
    #[error("a device of the tree can't do {0}")]
    Unsupported(OpDesc),
    /// The call makes no sense; nothing was sent.
    #[error("{0}")]
    Argument(String),
    /// A schedule failed in another way.
    #[error(transparent)]
    Schedule(ExecError),
    /// This rank's own program ended the communicator.
    #[error("cancelled by this rank's own program; the other ranks are told that it is lost")]
    Cancelled,
    /// An earlier call ended the communicator.
    #[error("the communicator is at its end since an earlier call failed: {0}")]
    Ended(Box<Self>),
}

fn two(first: &OpDesc, other: &OpDesc) -> String {
    if first == other {
        format!("{first}, by different algorithms or cost tables")
    } else {
        format!("one {first}, another {other}")
    }
}

impl Error {
    /// A mismatch, with the two operations in an order that does not depend on who noticed.
    fn mismatch(a: OpDesc, b: OpDesc) -> Self {
        let key = |desc: &OpDesc| (desc.collective, desc.dtype, desc.op, desc.root, desc.count);
        let (first, other) = if key(&a) <= key(&b) { (a, b) } else { (b, a) };
        Self::Mismatch { first, other }
    }

    /// Tell whether the communicator can be used further.
    pub const fn is_harmless(&self) -> bool {
        matches!(self, Self::Argument(_) | Self::NotPossible(_))
    }
}

impl From<EndpointError> for Error {
    fn from(error: EndpointError) -> Self {
        match error {
            EndpointError::Mismatch { first, other } => Self::mismatch(first, other),
            EndpointError::Unsupported(desc) => Self::Unsupported(desc),
            EndpointError::PathLost => Self::PathLost,
            EndpointError::GroupLost => Self::GroupLost,
        }
    }
}

impl From<PostError> for Error {
    fn from(error: PostError) -> Self {
        match error {
            PostError::Failed(error) => error.into(),
            PostError::TooMany { .. } => Self::Argument(error.to_string()),
        }
    }
}

impl From<ExecError> for Error {
    fn from(error: ExecError) -> Self {
        match error {
            ExecError::Mismatch { calls } => {
                let desc = |call: &crate::exec::Call| OpDesc {
                    collective: call.collective,
                    dtype: call.dtype,
                    op: call.op,
                    root: call.root,
                    count: call.count,
                };
                Self::mismatch(desc(&calls[0]), desc(&calls[1]))
            }
            ExecError::RankLost { rank } => Self::RankLost { rank },
            ExecError::Invalid { what } => Self::Argument(what),
            other => Self::Schedule(other),
        }
    }
}
