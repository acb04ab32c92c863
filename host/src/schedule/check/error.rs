//! What can be wrong with a set of schedules: one name for each way.

use crate::schedule::{Buffer, Region};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a set of schedules does not implement its collective.
///
/// Steps are those of the rank named first.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The schedules are not those of ranks 0, 1, ... of one communicator for one such collective.
    #[error("schedule {index} is not that of {index}'s place in the same communicator for the same collective")]
    NotOneCollective {
        /// The index of the schedule that does not fit.
        index: usize,
    },
    /// Buffers that are declared to share memory don't fit into each other.
    #[error("{rank}: the shorter buffer sticks out of the longer one, in which it is declared to lie")]
    Layout {
        /// Whose schedule.
        rank: Rank,
    },
    /// A message names its own rank or one outside the communicator.
    #[error("{rank}, step {step}: {peer} is no peer")]
    BadPeer {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
        /// The peer named.
        peer: Rank,
    },
    /// A region reaches past its buffer.
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
    #[error("{rank}, step {step}: an operand that does not fit what it goes with")]
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
    /// A step writes elements that it also uses: which value travels is a race.
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
    /// Ranks wait for each other in a circle.
    #[error("{rank}, step {step}: waits for {peer} for ever")]
    Deadlock {
        /// The lowest rank that is stuck.
        rank: Rank,
        /// Its step.
        step: usize,
        /// A peer that it waits for.
        peer: Rank,
    },
    /// A value is read in a form that the rank does not hold, as partial for finished, or where there is none.
    #[error("{rank}, step {step}: element {element} of {wanted:?} holds {held:?} (None: nothing) there")]
    Stale {
        /// Whose value.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned, in its buffer.
        element: usize,
        /// The form held: the buffer through which it was written last.
        held: Option<Buffer>,
        /// The buffer read.
        wanted: Buffer,
    },
    /// A reduction combines different elements.
    #[error("{rank}, step {step}: element {own} would be combined with element {other}")]
    Mixed {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// An element, by its place in the inputs.
        own: usize,
        /// The other.
        other: usize,
    },
    /// A reduction takes a finished value for a contribution.
    #[error("{rank}, step {step}: element {element} is finished, and would be reduced further")]
    Refined {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned.
        element: usize,
    },
    /// A reduction adds a contribution that is already in.
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
    /// A value is rounded before every contribution is in.
    #[error("{rank}, step {step}: element {element} is finished with {contributions} contributions")]
    Completion {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned.
        element: usize,
        /// The contributions in.
        contributions: usize,
    },
    /// A rank ends without a contribution that it should have.
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
    /// A rank ends with another element than it should.
    #[error("{rank} ends with the wrong thing in element {element} of its output")]
    Misplaced {
        /// Where.
        rank: Rank,
        /// The first element concerned.
        element: usize,
    },
    /// Two ranks end with different expressions of one element, and so, perhaps, with different bits.
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
    #[error("{rank} leaves the barrier without having heard of {unheard}")]
    NotHeard {
        /// The rank that leaves.
        rank: Rank,
        /// The lowest rank that it has not heard of.
        unheard: Rank,
    },
}
