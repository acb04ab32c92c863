//! What a communicator is given to do, and how it ends: the same whether callers drive it or the progress thread.

use super::counts::Counts;
use super::element::ErasedBuffer;
use super::error::{Error, StartError, WaitError};
use super::extent::Extent;
use super::options::{CallOptions, Outcome};
use super::owned::Owned;
use crate::exec::Mesh;
use crate::exec::message::{Direction, MessageBuffer, PostError, Ticket};
use crate::schedule::Place;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, ReduceOp};

/// An operation to be started, with the memory that it works on.
pub(crate) struct Operation {
    pub(crate) desc: OpDesc,
    /// Set if the blocks are uneven.
    pub(crate) counts: Option<Counts>,
    /// The input, and also the output unless that is separate.
    pub(crate) memory: Box<dyn ErasedBuffer>,
    pub(crate) output: Option<Box<dyn ErasedBuffer>>,
    pub(crate) options: CallOptions,
}

impl Operation {
    fn check(&self, place: Place) -> Result<(), Error> {
        let (memory, output) = (self.memory.bytes().len(), self.output.as_ref().map(|output| output.bytes().len()));
        // The schedule of uneven blocks says what their counts allow.
        if self.counts.is_none() {
            Extent::of(&self.desc, place)?.check_lens(&self.desc, memory, output)?;
        }
        check_scalar(&self.desc, &self.options)
    }

    /// Return its memory, as that of an operation that was not started.
    pub(super) fn into_owned(self) -> Owned {
        Owned { memory: self.memory, output: self.output, scaled: None, extent: Extent::NONE }
    }
}

/// A message to be posted.
pub(crate) struct Post {
    /// `None` for a receive from any other rank.
    pub(crate) peer: Option<Rank>,
    pub(crate) direction: Direction,
    pub(crate) tag: u32,
    pub(crate) buffer: Box<dyn MessageBuffer>,
}

impl Post {
    pub(super) fn post_on(self, mesh: &mut Mesh) -> Result<Ticket, PostError> {
        match self.peer {
            Some(peer) => mesh.post(peer, self.direction, self.tag, self.buffer),
            None => mesh.post_receive_any(self.tag, self.buffer),
        }
    }
}

/// What a communicator is given to do.
pub(crate) enum Work {
    Operation(Operation),
    Message(Post),
}

impl Work {
    /// Return the length of its memory.
    pub(super) fn len_bytes(&self) -> usize {
        match self {
            Self::Operation(Operation { memory, output, .. }) => {
                memory.bytes().len() + output.as_ref().map_or(0, |output| output.bytes().len())
            }
            Self::Message(post) => post.buffer.bytes().len(),
        }
    }

    /// Check what can be known without the communicator.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub(super) fn check(&self, place: Place) -> Result<(), Error> {
        match self {
            Self::Operation(operation) => operation.check(place),
            Self::Message(Post { peer: None, .. }) if place.ranks() < 2 => {
                Err(Error::Argument("a receive from any rank, and there is no other".into()))
            }
            Self::Message(Post { peer: Some(peer), .. }) if *peer == place.rank() || peer.0 >= place.ranks() => {
                let (own, ranks) = (place.rank(), place.ranks());
                Err(Error::Argument(format!("a message between {own} and {peer} of {ranks} ranks")))
            }
            Self::Message(_) => Ok(()),
        }
    }

    /// Return the buffer that an operation was given, without its separate output.
    pub(crate) fn into_memory(self) -> Option<Box<dyn ErasedBuffer>> {
        match self {
            Self::Operation(operation) => Some(operation.memory),
            Self::Message(_) => None,
        }
    }

    /// Return the memory of a message.
    pub(crate) fn into_message(self) -> Option<Box<dyn MessageBuffer>> {
        match self {
            Self::Operation(_) => None,
            Self::Message(post) => Some(post.buffer),
        }
    }
}

/// What has been begun, to be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// A started operation that callers drive.
    Operation(u64),
    /// A posted message that callers drive.
    Message(Ticket),
    /// What was submitted to the progress thread.
    Submitted(u64),
}

/// The other rank of a message and its memory, or why it failed.
pub(super) type EndOfMessage = Result<(Rank, Box<dyn MessageBuffer>), WaitError<Box<dyn MessageBuffer>>>;

/// How a task ended, with its memory.
pub(crate) enum Finished {
    Operation(Option<Owned>, Result<Outcome, Error>),
    /// With the other rank.
    Message(Option<Box<dyn MessageBuffer>>, Result<Rank, Error>),
}

impl Finished {
    /// Return the other rank of a message that is complete.
    pub(crate) const fn peer(&self) -> Option<Rank> {
        match self {
            Self::Message(_, Ok(peer)) => Some(*peer),
            Self::Message(_, Err(_)) | Self::Operation(..) => None,
        }
    }

    /// Return the result: the outcome of an operation, nothing of a message.
    pub(crate) fn into_result(self) -> Result<Option<Outcome>, Error> {
        match self {
            Self::Operation(_, result) => result.map(Some),
            Self::Message(_, result) => result.map(|_| None),
        }
    }

    /// Return the result of an operation, and its memory.
    pub(crate) fn into_operation(self) -> (Option<Owned>, Result<Outcome, Error>) {
        match self {
            Self::Operation(owned, result) => (owned, result),
            Self::Message(_, Err(error)) => (None, Err(error)),
            Self::Message(..) => (None, Err(Error::Argument("this is a message, not an operation".into()))),
        }
    }

    /// Return the other rank of a message, and its memory.
    pub(crate) fn into_message(self) -> EndOfMessage {
        match self {
            Self::Message(Some(buffer), Ok(peer)) => Ok((peer, buffer)),
            Self::Message(buffer, Err(error)) => Err(WaitError { error, buffer }),
            Self::Operation(_, Err(error)) => Err(WaitError { error, buffer: None }),
            Self::Operation(..) | Self::Message(None, Ok(_)) => {
                Err(WaitError { error: Error::Argument("the memory of this message is gone".into()), buffer: None })
            }
        }
    }
}

/// Why work was refused, and the work, with its memory unchanged.
pub(crate) type Refused = Box<StartError<Work>>;

/// Check that only a premultiplied sum has a scalar.
///
/// # Errors
/// [`Error::Argument`].
pub(super) fn check_scalar(desc: &OpDesc, options: &CallOptions) -> Result<(), Error> {
    match options.scalar.filter(|_| desc.op != Some(ReduceOp::PremulSum)) {
        Some(scalar) => {
            Err(Error::Argument(format!("{desc} with a scalar of {scalar}: only premul_sum takes a scalar")))
        }
        None => Ok(()),
    }
}
