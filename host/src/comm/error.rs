//! What a call on a communicator can end in.

use crate::controller::proto::Over;
use crate::exec::ExecError;
use crate::select::RuledOut;
use crate::transport::memory::RegisterError;
use crate::transport::packets::EndpointError;
use std::fmt;
use std::ops::Range;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::wire::RankMask;
use thiserror::Error;

/// Why an operation has no result.
///
/// [`Error::Argument`], [`Error::NotPossible`], [`Error::Memory`] and [`Error::TooManyInFlight`] change nothing
/// ([`Error::is_harmless`]): nothing was sent, the call does not count among those of the communicator, and the caller's
/// buffer is as it was, so the call can be made again. [`Error::Forked`] changes nothing either, but it is final in the
/// process that gets it. Any other error is the end of the communicator: its ranks
/// may be at different operations, and every later call returns [`Error::Ended`]. The caller's buffer then holds, chunk
/// by chunk, its input or the result (after a schedule: anything); where ranks have died, [`Fresh`] says which.
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
    /// The rank that a message goes to or comes from is gone; or any rank, in a communicator that does not repair
    /// ([`JoinConfig::repair`](super::JoinConfig)).
    #[error("{rank} is lost")]
    RankLost {
        /// The rank.
        rank: Rank,
    },
    /// Ranks of the job are gone. All that are left agree on which, and on the first call that fails; calls before it are
    /// complete at all of them. Who had returned from that call or a later one, having all of its own result, keeps that.
    #[error("{}: call {operation} fails at all ranks that are left, and all calls behind it; {fresh}", are_lost(.ranks))]
    RanksFailed {
        /// The ranks, in order.
        ranks: Vec<Rank>,
        /// The number of the first call that fails, among the collectives called on this communicator, from 0.
        operation: u64,
        /// What the buffer holds.
        fresh: Fresh,
    },
    /// Too few ranks are in reach of each other to go on without the controller, which is gone; or the others go on
    /// without this one.
    #[error(
        "of {ranks} ranks this one reaches {left}, itself included, which is no majority; the controller, which could say who is dead, is gone or has others go on without this rank; {fresh}"
    )]
    Partitioned {
        /// How many ranks this one reaches, itself included.
        left: u32,
        /// How many there were.
        ranks: u32,
        /// What the buffer holds.
        fresh: Fresh,
    },
    /// The ranks did not agree in time on what became of the operation, or a device went on while memory was taken from
    /// it, and nobody has the result that it wrote; others may have completed the operation.
    #[error(
        "it is not known whether {desc} completed at other ranks: after {} ms they do not agree on its result, or nobody has it any more; {fresh}",
        waited.as_millis()
    )]
    OutcomeUnknown {
        /// The operation.
        desc: OpDesc,
        /// How long it has taken to find out.
        waited: Duration,
        /// What the buffer holds.
        fresh: Fresh,
    },
    /// The way to the tree's root is dead.
    #[error("the path through the tree is lost: a device stopped answering")]
    PathLost,
    /// The device has no such group any more.
    #[error("a device of the tree no longer knows the group: it restarted, or the lease ran out")]
    GroupLost,
    /// The leaf device, which reads and writes this rank's memory, is gone. What it had published was still delivered.
    #[error("device {device} is gone: its process has ended or closed the connection; join again once it is back")]
    DeviceLost {
        /// The device.
        device: String,
    },
    /// The leaf device refused a contribution by reference, or broke the protocol.
    #[error("device {device}: {error}; joining with `attach: udp` does without shared memory")]
    Device {
        /// The device.
        device: String,
        /// What it did.
        error: EndpointError,
    },
    /// There is no memory that the leaf device reaches; nothing else has changed.
    #[error("{len_bytes} bytes for device {device} to reach: {reason}; a slice of any other memory works too")]
    Memory {
        /// The device.
        device: String,
        /// How many.
        len_bytes: usize,
        /// Why not.
        reason: RegisterError,
    },
    /// Ranks did not come to an operation within its limit ([`Straggler`](super::Straggler)). All that did get this error.
    #[error("ranks {missing} had not come to the operation within its limit, and it has no result without them")]
    Stragglers {
        /// Who.
        missing: RankMask,
    },
    /// This rank did not come to an operation within its limit, and the others go on without it.
    #[error("the other ranks go on without this one, which had not come to an operation within its limit")]
    Excluded,
    /// The deadline passed.
    #[error("{desc} did not complete within {} ms", waited.as_millis())]
    Deadline {
        /// The operation.
        desc: OpDesc,
        /// How long it was given.
        waited: Duration,
    },
    /// As many operations are in flight as a communicator takes, and none has completed within the call's time. Nothing
    /// was sent.
    #[error("{limit} operations are in flight, and none has completed within {} ms; wait for one first", waited.as_millis())]
    TooManyInFlight {
        /// How many a communicator takes.
        limit: usize,
        /// How long the call has waited for room.
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
    /// This process was forked from the one that joined. Nothing was done; the communicator goes on there.
    #[error(
        "this process was forked from the one that joined: only that one can use the communicator; this one can join anew"
    )]
    Forked,
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

fn are_lost(ranks: &[Rank]) -> String {
    let numbers: Vec<String> = ranks.iter().map(|rank| rank.0.to_string()).collect();
    match &numbers[..] {
        [] => "ranks are lost".into(),
        [one] => format!("rank {one} is lost"),
        [first @ .., last] => format!("ranks {} and {last} are lost", first.join(", ")),
    }
}

/// What the output of a call that failed holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Fresh {
    /// These elements of it hold the result, and all others are as they were: runs in rising order, counted from the
    /// output's beginning. None, if the call had not begun.
    Elements(Vec<Range<u64>>),
    /// A schedule was at work on it: anything, also where an input and it are the same buffer.
    #[default]
    Unspecified,
}

impl fmt::Display for Fresh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Elements(runs) = self else { return f.write_str("the output may hold anything") };
        match &runs[..] {
            [] => f.write_str("the output is as it was"),
            [run] => write!(f, "of the output, elements {}..{} are new and all others old", run.start, run.end),
            [first, .., last] => write!(
                f,
                "of the output, {} runs of elements from {} to below {} are new and all others old",
                runs.len(),
                first.start,
                last.end
            ),
        }
    }
}

impl Error {
    /// Tell whether it says what the output holds.
    pub(super) const fn says_fresh(&self) -> bool {
        matches!(self, Self::RanksFailed { .. } | Self::Partitioned { .. } | Self::OutcomeUnknown { .. })
    }

    /// The same for a call whose output is like this.
    pub(super) fn with_fresh(mut self, known: Fresh) -> Self {
        if let Self::RanksFailed { fresh, .. } | Self::Partitioned { fresh, .. } | Self::OutcomeUnknown { fresh, .. } =
            &mut self
        {
            *fresh = known;
        }
        self
    }

    /// A mismatch, with the two operations in an order that does not depend on who noticed.
    pub(super) fn mismatch(a: OpDesc, b: OpDesc) -> Self {
        let key = |desc: &OpDesc| (desc.collective, desc.dtype, desc.op, desc.root, desc.count);
        let (first, other) = if key(&a) <= key(&b) { (a, b) } else { (b, a) };
        Self::Mismatch { first, other }
    }

    /// Tell whether the communicator can be used further, as the call has changed nothing.
    pub const fn is_harmless(&self) -> bool {
        matches!(self, Self::Argument(_) | Self::NotPossible(_) | Self::Memory { .. } | Self::TooManyInFlight { .. })
    }
}

impl Error {
    /// What a group's end is to a caller; `device` is the rank's leaf.
    pub(super) fn in_tree(error: EndpointError, device: &str) -> Self {
        match error {
            EndpointError::Mismatch { first, other } => Self::mismatch(first, other),
            EndpointError::Unsupported(desc) => Self::Unsupported(desc),
            EndpointError::PathLost => Self::PathLost,
            EndpointError::GroupLost => Self::GroupLost,
            EndpointError::Stragglers { missing } => Self::Stragglers { missing },
            EndpointError::Excluded => Self::Excluded,
            EndpointError::DeviceLost => Self::DeviceLost { device: device.into() },
            error @ (EndpointError::Device { .. } | EndpointError::Broken(_)) => {
                Self::Device { device: device.into(), error }
            }
        }
    }

    /// The same as the end of a communicator: what is harmless before anything was done is not any more.
    pub(super) fn ending(self) -> Self {
        if !self.is_harmless() {
            return self;
        }
        Self::Schedule(ExecError::Invalid { what: format!("an operation that had begun can't go on: {self}") })
    }

    /// Tell whether it is what the tree says of the ranks' calls: that counts for what runs beside the tree, too.
    pub(super) const fn is_word_of_tree(&self) -> bool {
        matches!(self, Self::Mismatch { .. } | Self::Stragglers { .. } | Self::Excluded)
    }

    /// The same as what ranks are told that have not heard of it yet; `None` if it is this rank's alone, or they notice.
    pub(super) fn to_all(&self) -> Option<Over> {
        match *self {
            Self::Mismatch { first, other } => Some(Over::Mismatch { first, other }),
            Self::Stragglers { missing } => Some(Over::Stragglers { missing: missing.iter().collect() }),
            _ => None,
        }
    }

    /// Tell whether it is the tree that is lost, which a schedule does not need.
    pub(super) const fn is_loss_of_tree(&self) -> bool {
        matches!(self, Self::PathLost | Self::GroupLost | Self::DeviceLost { .. } | Self::Device { .. })
    }
}

impl From<Over> for Error {
    fn from(over: Over) -> Self {
        match over {
            Over::Mismatch { first, other } => Self::mismatch(first, other),
            Over::Stragglers { missing } => {
                let mut mask = RankMask::default();
                missing.into_iter().for_each(|rank| mask.insert(rank));
                Self::Stragglers { missing: mask }
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_lost_and_what_is_new_is_said() {
        let failed = |ranks: &[u32], fresh| Error::RanksFailed {
            ranks: ranks.iter().copied().map(Rank).collect(),
            operation: 7,
            fresh,
        };
        let text = failed(&[3], Fresh::Elements(std::iter::once(0..64).collect())).to_string();
        assert!(text.starts_with("rank 3 is lost: call 7 fails at all ranks that are left"), "{text}");
        assert!(text.ends_with("elements 0..64 are new and all others old"), "{text}");
        let text = failed(&[1, 2, 5], Fresh::Elements(vec![4..8, 12..16])).to_string();
        assert!(text.starts_with("ranks 1, 2 and 5 are lost: "), "{text}");
        assert!(text.ends_with("2 runs of elements from 4 to below 16 are new and all others old"), "{text}");
    }

    /// A repair that fails has left ranks at different points, whatever it failed with.
    #[test]
    fn what_ends_a_repair_ends_the_communicator() {
        for error in [Error::Argument("no schedule".into()), Error::PathLost, Error::Cancelled] {
            let text = error.to_string();
            let ending = error.ending();
            assert!(!ending.is_harmless() && ending.to_string().contains(&text), "{ending}");
        }
    }
}
