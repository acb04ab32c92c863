//! The errors of the executor. They travel in abort frames, so that every rank returns the same one.

use serde::{Deserialize, Serialize};
use std::fmt;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use thiserror::Error;

/// What one rank called, as far as all ranks must call the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// Who called.
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
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, dtype, op, root, count, .. } = *self;
        let desc = OpDesc { collective, dtype, op, root, count };
        write!(f, "{}: operation {}, {desc}", self.rank, self.op_index)?;
        if root != Rank(0) {
            write!(f, " to {root}")?;
        }
        write!(f, " by {} (signature {:08x})", self.path.name(), self.signature)
    }
}

/// Why a rank refused a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The other end speaks another version of the frames.
    #[error("it speaks another version; run the same build on all ranks")]
    Version,
    /// The other end carries another job's token.
    #[error("it belongs to another job; check the address book")]
    Token,
    /// The other end is not the rank that the address book says, or is connected already.
    #[error("the ranks of the two ends do not fit; check the address book")]
    Rank,
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ExecError {
    /// Two ranks called different things.
    #[error("ranks called different operations: {}; {}", calls[0], calls[1])]
    Mismatch {
        /// The two calls that met, lower rank first.
        calls: Box<[Call; 2]>,
    },
    /// A rank's connection or process ended while it was still needed.
    #[error("{rank} is lost: its connection or its process ended in the middle of an operation")]
    RankLost {
        /// The rank that is gone.
        rank: Rank,
    },
    /// The deadline passed.
    #[error("operation {op_index} passed its deadline while {rank} waited for {peer}")]
    Deadline {
        /// The operation.
        op_index: u64,
        /// The rank whose deadline passed first.
        rank: Rank,
        /// A rank that it waited for.
        peer: Rank,
    },
    /// A rank sent another more or less than that expects: their counts of an all-to-all differ.
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
        /// What is sent.
        sent_bytes: u64,
        /// What is expected.
        expected_bytes: u64,
    },
    /// A message and its receive differ: the n-th sent meets the n-th received.
    #[error(
        "message {number} from {from} to {to} has tag {} and {} bytes; the receive that it meets has tag {} and {} \
         bytes", sent.0, sent.1, expected.0, expected.1
    )]
    Message {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// Which message of this sender to this receiver, from 0.
        number: u64,
        /// Its tag and length in bytes.
        sent: (u32, u64),
        /// Tag and length of the receive.
        expected: (u32, u64),
    },
    /// A message was not through by the deadline.
    #[error("{rank} has waited until its deadline for a message to or from {peer}")]
    MessageDeadline {
        /// The rank whose deadline passed first.
        rank: Rank,
        /// A rank that it waited for.
        peer: Rank,
    },
    /// A rank refused the connection of another.
    #[error("{by} refused the connection of {rank}: {reason}")]
    Refused {
        /// The rank that was refused.
        rank: Rank,
        /// The rank that refused.
        by: Rank,
        /// Why.
        reason: Refusal,
    },
    /// A peer sent what no executor sends.
    #[error("{rank} sent {what}; its stream can't be used further")]
    Protocol {
        /// The sender.
        rank: Rank,
        /// What was wrong.
        what: String,
    },
    /// The operating system refused something on this host.
    #[error("{rank}: {what}")]
    Io {
        /// The rank whose host it was.
        rank: Rank,
        /// What was tried, and the system's answer.
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
    /// The arguments of a call contradict each other. Nothing was sent, and the mesh stays usable.
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

/// Why a mesh can't be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The address book has another size than the communicator.
    #[error("the address book has {addresses} entries for {ranks} ranks")]
    Addresses {
        /// The entries.
        addresses: usize,
        /// The ranks.
        ranks: u32,
    },
    /// The listener can't be used.
    #[error("the listener can't be made non-blocking")]
    Listener(#[source] std::io::Error),
}
