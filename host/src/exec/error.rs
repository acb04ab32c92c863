//! Errors of the executor. They travel in abort frames, so that every rank returns the same one.

use serde::{Deserialize, Serialize};
use std::fmt;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use thiserror::Error;

/// A rank's call, as far as all ranks must agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// The caller.
    pub rank: Rank,
    /// The number of the operation in its communicator.
    pub op_index: u64,
    /// The operation's signature ([`OpDesc::signature`]).
    pub signature: u32,
    /// The collective.
    pub collective: Collective,
    /// The element type.
    pub dtype: Option<Dtype>,
    /// The operator.
    pub op: Option<ReduceOp>,
    /// The root.
    pub root: Rank,
    /// The number of elements.
    pub count: u64,
    /// The algorithm.
    pub path: Path,
}

impl Call {
    pub(super) const fn new(rank: Rank, op_index: u64, signature: u32, desc: &OpDesc, path: Path) -> Self {
        let OpDesc { collective, dtype, op, root, count } = *desc;
        Self { rank, op_index, signature, collective, dtype, op, root, count, path }
    }

    /// Return the operation.
    pub(super) const fn desc(&self) -> OpDesc {
        let Self { collective, dtype, op, root, count, .. } = *self;
        OpDesc { collective, dtype, op, root, count }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: operation {}, {}", self.rank, self.op_index, self.desc())?;
        if self.root != Rank(0) {
            write!(f, " to {}", self.root)?;
        }
        write!(f, " by {} (signature {:08x})", self.path.name(), self.signature)
    }
}

/// Why a rank refused a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The peer uses another version of the frame format.
    #[error("protocol version differs; run the same build on all ranks")]
    Version,
    /// The peer does not know the job's secret.
    #[error("it does not know the job's secret, so it belongs to another job; check the address list")]
    Secret,
    /// The peer is not the rank at that place in the address list, or is already connected.
    #[error("rank and address do not match; check the address list")]
    Rank,
}

impl Refusal {
    /// Return what the log of the refusing rank says of refused connections.
    pub(super) const fn of_unknown_peers(self) -> &'static str {
        match self {
            Self::Version => "they speak another version",
            Self::Secret => "they do not know the job's secret",
            Self::Rank => "they are for another rank, or from a connected one",
        }
    }
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ExecError {
    /// Two ranks called different operations.
    #[error("ranks called different operations: {}; {}", calls[0], calls[1])]
    Mismatch {
        /// The two calls, lower rank first.
        calls: Box<[Call; 2]>,
    },
    /// A rank's connection or process ended while it was needed.
    #[error("{rank} is lost: its connection or its process ended in the middle of an operation")]
    RankLost {
        /// The lost rank.
        rank: Rank,
    },
    /// The operation missed its deadline.
    #[error("operation {op_index} passed its deadline while {rank} waited for {peer}")]
    Deadline {
        /// The operation.
        op_index: u64,
        /// The rank whose deadline passed first.
        rank: Rank,
        /// A rank that it was waiting for.
        peer: Rank,
    },
    /// Sent and expected lengths differ: the counts of an all-to-all do not agree.
    #[error(
        "operation {op_index}: {from} sends {to} {sent_bytes} bytes where {expected_bytes} are expected; what one rank \
         sends must be what the other receives"
    )]
    Length {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The operation.
        op_index: u64,
        /// Length sent.
        sent_bytes: u64,
        /// Length expected.
        expected_bytes: u64,
    },
    /// A message does not match its receive: the n-th send matches the n-th receive.
    #[error(
        "message {number} from {from} to {to} has tag {} and {} bytes; the receive that it meets has tag {} and {} \
         bytes", sent.0, sent.1, expected.0, expected.1
    )]
    Message {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The number of the message among those from this sender to this receiver, from 0.
        number: u64,
        /// Its tag and length in bytes.
        sent: (u32, u64),
        /// Tag and length of the receive.
        expected: (u32, u64),
    },
    /// A message missed its deadline.
    #[error("{rank} passed its deadline waiting for a message to or from {peer}")]
    MessageDeadline {
        /// The rank whose deadline passed first.
        rank: Rank,
        /// A rank that it was waiting for.
        peer: Rank,
    },
    /// A rank refused another's connection.
    #[error("{by} refused the connection of {rank}: {reason}")]
    Refused {
        /// The rank that was refused.
        rank: Rank,
        /// The rank that refused.
        by: Rank,
        /// The reason.
        reason: Refusal,
    },
    /// Whoever listens at a rank's address is not the rank. Another process may have taken over the port of a rank that
    /// has ended.
    #[error(
        "{rank} found another process at the address of {peer}: it does not know the job's secret; {peer} may have ended, \
         or the address list belongs to another job"
    )]
    Unproven {
        /// The rank that connected.
        rank: Rank,
        /// The rank that should be there.
        peer: Rank,
    },
    /// A peer violated the protocol.
    #[error("protocol violation: {rank} sent {what}")]
    Protocol {
        /// The sender.
        rank: Rank,
        /// What was wrong.
        what: String,
    },
    /// A system call failed on this host.
    #[error("{rank}: {what}")]
    Io {
        /// The rank whose host it was.
        rank: Rank,
        /// What was attempted, and the system's error.
        what: String,
    },
    /// The caller's [`Interrupt`](super::Interrupt) ended the operation.
    #[error("{rank} was interrupted: {reason}")]
    Interrupted {
        /// The rank that was interrupted.
        rank: Rank,
        /// The caller's reason.
        reason: String,
    },
    /// The arguments of a call are invalid. Nothing was sent, and the mesh stays usable.
    #[error("invalid call: {what}")]
    Invalid {
        /// The contradiction, with both values.
        what: String,
    },
}

impl ExecError {
    pub(super) fn mismatch(a: Call, b: Call) -> Self {
        Self::Mismatch { calls: Box::new(if a.rank <= b.rank { [a, b] } else { [b, a] }) }
    }

    pub(super) fn protocol(rank: Rank, what: impl Into<String>) -> Self {
        Self::Protocol { rank, what: what.into() }
    }
}

/// Why a mesh cannot be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The number of addresses differs from the number of ranks.
    #[error("{addresses} addresses given for {ranks} ranks")]
    Addresses {
        /// The number of addresses.
        addresses: usize,
        /// The number of ranks.
        ranks: u32,
    },
    /// The listener is unusable.
    #[error("cannot make the listener non-blocking")]
    Listener(#[source] std::io::Error),
}
