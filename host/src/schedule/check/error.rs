//! Errors of the schedule checker.

use crate::schedule::{Buffer, Region};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a set of schedules does not implement its collective.
///
/// Steps are those of the rank named first.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The schedules are not those of ranks 0, 1, ... of one communicator for the same collective.
    #[error("schedule {index} does not belong to rank {index} of the same communicator and collective")]
    NotOneCollective {
        /// The index of the schedule that does not fit.
        index: usize,
    },
    /// Buffers declared to share memory do not fit into each other.
    #[error("{rank}: a buffer exceeds the longer one that it is declared to share")]
    Layout {
        /// Whose schedule.
        rank: Rank,
    },
    /// A message names its own rank or one outside the communicator.
    #[error("{rank}, step {step}: {peer} is not a valid peer")]
    BadPeer {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
        /// The peer named.
        peer: Rank,
    },
    /// A region exceeds its buffer.
    #[error("{rank}, step {step}: elements {}..{} of {len} in {:?}", region.span.start, region.span.end(), region.buffer)]
    OutOfBounds {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
        /// The elements named.
        region: Region,
        /// The elements there are.
        len: usize,
    },
    /// The two ends of a combination or of a local move differ in length, or a schedule that only moves combines.
    #[error("{rank}, step {step}: operand lengths differ, or a move-only schedule combines")]
    BadOperand {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
    },
    /// A step writes to the caller's input.
    #[error("{rank}, step {step}: writes to the input")]
    WritesInput {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
    },
    /// A step writes elements that it also uses: a race.
    #[error("{rank}, step {step}: writes {written:?} while {other:?} is in use")]
    Overlap {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
        /// The elements written.
        written: Region,
        /// The elements in use.
        other: Region,
    },
    /// A send that no receive waits for.
    #[error("{from}, step {step}: sends to {to}, which does not receive it")]
    UnmatchedSend {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The sender's step.
        step: usize,
    },
    /// A receive that no send feeds.
    #[error("{to}, step {step}: waits for {from}, which does not send it")]
    UnmatchedReceive {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The receiver's step.
        step: usize,
    },
    /// Sender and receiver name different lengths.
    #[error("{from}, step {step}: sends {sent:?} to {to}, which receives {received:?}")]
    LengthMismatch {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The sender's step.
        step: usize,
        /// The sender's elements.
        sent: Region,
        /// Where they land.
        received: Region,
    },
    /// The receiver expects elements in another form.
    #[error("{from}, step {step}: sends from {sent:?}; {to} takes it for something else")]
    FormMismatch {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The sender's step.
        step: usize,
        /// The sender's buffer.
        sent: Buffer,
    },
    /// Ranks wait for each other in a cycle.
    #[error("{rank}, step {step}: waits for {peer} forever")]
    Deadlock {
        /// The lowest rank that is stuck.
        rank: Rank,
        /// Its step.
        step: usize,
        /// A peer that it waits for.
        peer: Rank,
    },
    /// A value is read in a form that the rank does not hold: partial for finished, or absent.
    #[error("{rank}, step {step}: element {element} of {expected:?} holds {held:?} (None: nothing) there")]
    WrongForm {
        /// Whose value.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned, in its buffer.
        element: usize,
        /// The form held: the buffer through which it was written last.
        held: Option<Buffer>,
        /// The buffer read.
        expected: Buffer,
    },
    /// A reduction combines different elements.
    #[error("{rank}, step {step}: element {own} would be combined with element {other}")]
    ElementMismatch {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// An element, by its place in the inputs.
        own: usize,
        /// The other.
        other: usize,
    },
    /// A reduction uses a finished value as a contribution.
    #[error("{rank}, step {step}: element {element} is finished, and would be reduced further")]
    FinishedOperand {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned.
        element: usize,
    },
    /// A reduction adds a contribution twice.
    #[error("{rank}, step {step}: element {element} would get the contribution of {twice} twice")]
    Doubled {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned.
        element: usize,
        /// A rank whose contribution is on both sides.
        twice: Rank,
    },
    /// A value is rounded before every contribution is included.
    #[error("{rank}, step {step}: element {element} is finished with {contributions} contributions")]
    RoundedEarly {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned.
        element: usize,
        /// The contributions in.
        contributions: usize,
    },
    /// A rank ends without a required contribution.
    #[error("{rank} ends without the contribution of {missing} to element {element}")]
    Missing {
        /// Where.
        rank: Rank,
        /// The first element concerned.
        element: usize,
        /// The lowest rank missing.
        missing: Rank,
    },
    /// A rank ends without an element, or with it in another form.
    #[error("{rank} ends with {held:?} (None: nothing) in element {element} of its output")]
    Unfinished {
        /// Where.
        rank: Rank,
        /// The first element concerned.
        element: usize,
        /// The form held.
        held: Option<Buffer>,
    },
    /// A rank ends with the wrong element.
    #[error("{rank} ends with the wrong value in element {element} of its output")]
    Misplaced {
        /// Where.
        rank: Rank,
        /// The first element concerned.
        element: usize,
    },
    /// Two ranks end with different expressions of one element, and so perhaps with different bits.
    #[error("{rank} and {other} have combined element {element} in different orders")]
    Differs {
        /// A rank.
        rank: Rank,
        /// The element.
        element: usize,
        /// A rank with the same element before it.
        other: Rank,
    },
    /// A rank leaves a barrier that another may not have entered.
    #[error("{rank} leaves the barrier although {missing} may not have entered")]
    BarrierNotSynchronized {
        /// The rank that leaves.
        rank: Rank,
        /// The lowest such rank.
        missing: Rank,
    },
}
