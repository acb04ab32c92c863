//! Errors of calls on a communicator.

use crate::controller::proto::AbortReason;
use crate::exec::ExecError;
use crate::select::RuledOut;
use crate::transport::memory::RegisterError;
use crate::transport::packets::EndpointError;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::wire::RankMask;
use thiserror::Error;

/// Why a call failed.
///
/// Four errors reject a call before it has any effect ([`Error::is_rejection`]): [`Error::Argument`],
/// [`Error::NotPossible`], [`Error::Memory`] and [`Error::TooManyInFlight`]. Nothing was sent, the caller's buffer is
/// unchanged, and the call does not count in the common order of calls, so you can correct it and call again.
/// [`Error::Forked`] has no effect either, but it is final for the process that gets it; [`Error::Left`] is for the
/// communicator.
///
/// Any other error ends the communicator, because its ranks may be at different operations; every later call returns
/// [`Error::Ended`]. The caller's buffer then holds, chunk by chunk, its input or the result; after a host collective
/// it is unspecified. If ranks failed, [`OutputState`] says which elements hold results.
///
/// Programs may return it from `main`: `{:?}` prints the message, as `{}` does, and causes that it does not contain.
/// `{:#?}` puts the variant's name before it. Joining, splitting and shrinking have errors of their own, which `?`
/// converts to [`Error::Creation`].
#[derive(Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// Ranks called different operations. All of them get this error.
    #[error(
        "ranks called different operations: {}; all ranks must make the same calls in the same order",
        describe_mismatch(.first, .other)
    )]
    Mismatch {
        /// One of the operations.
        first: OpDesc,
        /// Another one. Equal to `first` if only the algorithm or the cost table differs.
        other: OpDesc,
    },
    /// The peer of a message is lost; or any rank, in a communicator without recovery
    /// ([`JoinConfig::recover`](crate::comm::JoinConfig)).
    #[error("{rank} is lost")]
    RankLost {
        /// The rank.
        rank: Rank,
    },
    /// Ranks failed. All survivors agree on which, and on the first call that failed. Earlier calls are complete on all
    /// of them. A rank that had already returned from this call or a later one, because it needed nothing more, keeps
    /// its result.
    #[error(
        "{}: collective #{operation} and all later ones were aborted on all surviving ranks; {output}",
        describe_lost(.ranks)
    )]
    RanksFailed {
        /// The failed ranks in ascending order.
        ranks: Vec<Rank>,
        /// The first call that failed: its number among the collectives on this communicator, from 0.
        operation: u64,
        /// What the buffer holds.
        output: OutputState,
    },
    /// This rank can reach too few ranks to continue without a controller, or the others continue without this rank.
    #[error(
        "this rank reaches {reachable} of {ranks} ranks, itself included, which is no majority, \
         and no controller lets it continue: it is unreachable, or has excluded this rank; {output}"
    )]
    Partitioned {
        /// The number of ranks that this one reaches, itself included.
        reachable: u32,
        /// The number of ranks of the communicator.
        ranks: u32,
        /// What the buffer holds.
        output: OutputState,
    },
    /// The outcome cannot be determined: the ranks did not agree on it in time, or a device kept writing while its
    /// memory was taken away, and no rank has the result. Other ranks may have completed the operation.
    #[error(
        "cannot tell whether {desc} completed on other ranks: after {} ms they have not agreed on its \
         result, or no rank has it any more; {output}",
        waited.as_millis()
    )]
    OutcomeUnknown {
        /// The operation.
        desc: OpDesc,
        /// How long this rank waited for an agreement.
        waited: Duration,
        /// What the buffer holds.
        output: OutputState,
    },
    /// A device on the path to the tree's root stopped answering.
    #[error("the path through the tree is lost: a device stopped answering")]
    PathLost,
    /// A device of the tree no longer knows the job's group.
    #[error("a device of the tree no longer knows the group: it restarted, or the lease expired")]
    GroupLost,
    /// The leaf device, which reads and writes this rank's memory, is gone. Results that it had published were still
    /// delivered.
    #[error("device {device} is gone: its process exited or closed the connection; join again once it is back")]
    DeviceLost {
        /// The device.
        device: String,
    },
    /// The leaf device rejected a zero-copy contribution, or violated the protocol.
    #[error("device {device}: {error}; join with `transport: udp` to avoid shared memory")]
    Device {
        /// The device.
        device: String,
        /// What the device did.
        error: EndpointError,
    },
    /// Memory could not be registered with the leaf device. Nothing else has changed.
    #[error("cannot register {len_bytes} bytes for device {device}: {reason}; a slice of any other memory works too")]
    Memory {
        /// The device.
        device: String,
        /// The size of the allocation in bytes.
        len_bytes: usize,
        /// Why it failed.
        reason: RegisterError,
    },
    /// Ranks did not enter an operation within its straggler limit ([`Straggler`](crate::comm::Straggler)). All ranks
    /// that did get this error.
    #[error(
        "ranks {missing} did not enter the operation within its straggler limit, and it has no result without them"
    )]
    Stragglers {
        /// The ranks that were late.
        missing: RankMask,
    },
    /// This rank did not enter an operation within its straggler limit, and the others go on without it.
    #[error("this rank did not enter an operation within its straggler limit, and the other ranks go on without it")]
    Excluded,
    /// The deadline passed.
    #[error("{desc} did not complete within {} ms", waited.as_millis())]
    Deadline {
        /// The operation.
        desc: OpDesc,
        /// The deadline of the call, as a duration.
        waited: Duration,
    },
    /// The limit of operations in flight is reached, and none completed before the call's deadline. Nothing was sent.
    #[error(
        "{limit} operations are in flight, and none completed within {} ms; wait for one first",
        waited.as_millis()
    )]
    TooManyInFlight {
        /// The limit.
        limit: usize,
        /// How long the call waited for room.
        waited: Duration,
    },
    /// The requested path is not available. Nothing was sent.
    #[error("not possible: {0}")]
    NotPossible(#[from] RuledOut),
    /// A device of the tree does not support the operation, although it had announced that it does.
    #[error("a device of the tree does not support {0}")]
    Unsupported(OpDesc),
    /// An argument is invalid. Nothing was sent.
    #[error("{0}")]
    Argument(String),
    /// A host collective failed for another reason.
    #[error(transparent)]
    Schedule(ExecError),
    /// This process was forked from the one that joined. The call had no effect; the communicator goes on in the
    /// parent.
    #[error(
        "this process was forked from the one that joined, and cannot use its communicator; \
         join a job from this process"
    )]
    Forked,
    /// This rank's own program ended the communicator ([`Canceller`](crate::comm::Canceller)).
    #[error("cancelled by this rank's own program; the other ranks see it as lost")]
    Cancelled,
    /// This rank has left the job. Prepared operations and handles may outlive a communicator.
    #[error("this rank has left the communicator; call leave after the last operation")]
    Left,
    /// An earlier call ended the communicator.
    #[error("the communicator has ended, because an earlier call failed: {0}")]
    Ended(Box<Self>),
    /// There is no communicator: joining, splitting or shrinking failed. No call returns it.
    #[error(transparent)]
    Creation(CreationError),
}

/// Write an error and its causes, without causes that the text contains already.
pub(crate) fn write_chain(error: &dyn std::error::Error, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    let text = causes
        .map(ToString::to_string)
        .fold(error.to_string(), |text, cause| if text.contains(&cause) { text } else { format!("{text}: {cause}") });
    f.write_str(&text)
}

/// A [`JoinError`](super::JoinError), [`SplitError`](crate::SplitError) or [`ShrinkError`](crate::ShrinkError) as part
/// of an [`Error`](enum@Error). It equals its clones only.
#[derive(Clone)]
pub struct CreationError(Arc<dyn std::error::Error + Send + Sync>);

impl CreationError {
    pub(crate) fn new(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }

    /// Return the original error, to be downcast.
    pub fn get(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        &*self.0
    }
}

impl PartialEq for CreationError {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Display for CreationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for CreationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_chain(self, f)
    }
}

impl std::error::Error for CreationError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// Why an operation could not be started, and its buffer, which is unchanged. `?` converts it to
/// [`Error`](enum@Error) and drops the buffer.
pub struct StartError<B> {
    /// What went wrong.
    pub error: Error,
    /// The buffer of the call.
    pub buffer: B,
}

/// Why a started operation or message failed, and its buffer. `?` converts it to [`Error`](enum@Error) and drops the
/// buffer.
pub struct WaitError<B> {
    /// What went wrong.
    pub error: Error,
    /// The buffer; `None` in a forked process, and if an earlier call panicked while it had the connections to other
    /// ranks. An input with an output of its own, and what was to be sent, is unchanged; the error tells which elements
    /// of other buffers hold results ([`OutputState`]), where it does.
    pub buffer: Option<B>,
}

/// Print an error with a buffer as its cause, and convert it to that.
macro_rules! error_with_buffer {
    ($($ty:ident)*) => {$(
        impl<B> From<$ty<B>> for Error {
            fn from(failed: $ty<B>) -> Self {
                failed.error
            }
        }

        impl<B> fmt::Display for $ty<B> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.error.fmt(f)
            }
        }

        impl<B> fmt::Debug for $ty<B> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.error, f)
            }
        }

        impl<B> std::error::Error for $ty<B> {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                self.error.source()
            }
        }
    )*};
}

error_with_buffer!(StartError WaitError);

/// Print in `{:?}` what `Display` does, with the causes, and in `{:#?}` the variant's name before it.
macro_rules! readable_debug {
    ($ty:ty: $($variant:ident)*) => {
        impl std::fmt::Debug for $ty {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                if f.alternate() {
                    let name = match self {
                        $(Self::$variant { .. } => stringify!($variant),)*
                    };
                    write!(f, "{name}: ")?;
                }
                $crate::engine::error::write_chain(self, f)
            }
        }
    };
}

/// Make an error of creating a communicator readable, and convert it to [`Error`].
macro_rules! creation_error {
    ($ty:ty: $($variant:ident)*) => {
        $crate::engine::error::readable_debug!($ty: $($variant)*);

        impl From<$ty> for $crate::engine::error::Error {
            fn from(error: $ty) -> Self {
                Self::Creation($crate::engine::error::CreationError::new(error))
            }
        }
    };
}

pub(crate) use {creation_error, readable_debug};

readable_debug!(Error: Mismatch RankLost RanksFailed Partitioned OutcomeUnknown PathLost GroupLost DeviceLost Device
    Memory Stragglers Excluded Deadline TooManyInFlight NotPossible Unsupported Argument Schedule Forked Cancelled Left
    Ended Creation);

fn describe_mismatch(first: &OpDesc, other: &OpDesc) -> String {
    if first == other {
        format!("{first}, with different algorithms or cost tables")
    } else {
        format!("one {first}, another {other}")
    }
}

fn describe_lost(ranks: &[Rank]) -> String {
    let numbers: Vec<String> = ranks.iter().map(|rank| rank.0.to_string()).collect();
    match &numbers[..] {
        [] => "ranks are lost".into(),
        [one] => format!("rank {one} is lost"),
        [first @ .., last] => format!("ranks {} and {last} are lost", first.join(", ")),
    }
}

/// What the output buffer of a failed call holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OutputState {
    /// These elements hold results, and all others are unchanged. Ranges are in ascending order, in elements from the
    /// beginning of the output. Empty if the call had not begun.
    Elements(Vec<Range<u64>>),
    /// A host collective was writing to it: the contents are unspecified, also of a buffer that is both input and
    /// output.
    #[default]
    Unspecified,
}

impl fmt::Display for OutputState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Elements(runs) = self else { return f.write_str("the output is unspecified") };
        match &runs[..] {
            [] => f.write_str("the output is unchanged"),
            [run] => write!(f, "output elements {}..{} hold results, all others are unchanged", run.start, run.end),
            [first, .., last] => write!(
                f,
                "{} ranges of output elements within {}..{} hold results, all others are unchanged",
                runs.len(),
                first.start,
                last.end
            ),
        }
    }
}

impl Error {
    /// Return whether the error describes the output.
    pub(super) const fn describes_output(&self) -> bool {
        matches!(self, Self::RanksFailed { .. } | Self::Partitioned { .. } | Self::OutcomeUnknown { .. })
    }

    /// Return what the error says of the output.
    pub(super) fn output(&self) -> OutputState {
        match self {
            Self::RanksFailed { output, .. }
            | Self::Partitioned { output, .. }
            | Self::OutcomeUnknown { output, .. } => output.clone(),
            Self::Left | Self::Ended(_) => OutputState::Elements(Vec::new()),
            error if error.is_rejection() => OutputState::Elements(Vec::new()),
            _ => OutputState::Unspecified,
        }
    }

    /// Return the error with this description of the output, if it has one.
    pub(super) fn with_output(mut self, state: OutputState) -> Self {
        if let Self::RanksFailed { output, .. }
        | Self::Partitioned { output, .. }
        | Self::OutcomeUnknown { output, .. } = &mut self
        {
            *output = state;
        }
        self
    }

    /// Make a [`Error::Mismatch`] with the operations in a canonical order, so that it is the same whoever noticed it.
    pub(super) fn mismatch(a: OpDesc, b: OpDesc) -> Self {
        let key = |desc: &OpDesc| (desc.collective, desc.dtype, desc.op, desc.root, desc.count);
        let (first, other) = if key(&a) <= key(&b) { (a, b) } else { (b, a) };
        Self::Mismatch { first, other }
    }

    /// Return whether the call was rejected before it had any effect. The communicator remains usable.
    pub const fn is_rejection(&self) -> bool {
        matches!(self, Self::Argument(_) | Self::NotPossible(_) | Self::Memory { .. } | Self::TooManyInFlight { .. })
    }
}

impl Error {
    /// Convert the error of a group in the tree; `device` is the rank's leaf.
    pub(super) fn in_tree(error: EndpointError, device: &str) -> Self {
        match error {
            EndpointError::Mismatch { first, other } => Self::mismatch(first, other),
            EndpointError::Unsupported(desc) => Self::Unsupported(desc),
            EndpointError::PathLost => Self::PathLost,
            EndpointError::GroupLost => Self::GroupLost,
            EndpointError::Stragglers { missing } => Self::Stragglers { missing },
            EndpointError::Excluded => Self::Excluded,
            EndpointError::DeviceLost => Self::DeviceLost { device: device.into() },
            error @ (EndpointError::Device { .. } | EndpointError::Protocol(_)) => {
                Self::Device { device: device.into(), error }
            }
        }
    }

    /// Turn a rejection into an error that ends the communicator: the operation had already begun.
    pub(crate) fn ending(self) -> Self {
        if !self.is_rejection() {
            return self;
        }
        Self::Schedule(ExecError::Invalid { what: format!("an operation that had begun cannot continue: {self}") })
    }

    /// Return whether the tree's root reports this error to all ranks. It then also ends what runs beside the tree.
    pub(super) const fn is_group_error(&self) -> bool {
        matches!(self, Self::Mismatch { .. } | Self::Stragglers { .. } | Self::Excluded)
    }

    /// Return what the controller reports to ranks that do not know of the error yet; `None` if it concerns only this
    /// rank, or if they notice it themselves.
    pub(super) fn abort_reason(&self) -> Option<AbortReason> {
        match *self {
            Self::Mismatch { first, other } => Some(AbortReason::Mismatch { first, other }),
            Self::Stragglers { missing } => Some(AbortReason::Stragglers { missing: missing.iter().collect() }),
            _ => None,
        }
    }

    /// Return whether the tree is lost. Host collectives do not need it.
    pub(super) const fn is_loss_of_tree(&self) -> bool {
        matches!(self, Self::PathLost | Self::GroupLost | Self::DeviceLost { .. } | Self::Device { .. })
    }
}

impl From<AbortReason> for Error {
    fn from(over: AbortReason) -> Self {
        match over {
            AbortReason::Mismatch { first, other } => Self::mismatch(first, other),
            AbortReason::Stragglers { missing } => {
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
            // Another process has the address of a rank that is gone.
            ExecError::RankLost { rank } | ExecError::Unproven { peer: rank, .. } => Self::RankLost { rank },
            ExecError::Invalid { what } => Self::Argument(what),
            other => Self::Schedule(other),
        }
    }
}

#[cfg(test)]
mod tests;
