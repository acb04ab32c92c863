//! What can be wrong with a set of schedules: one name for each way.

use crate::coll::Span;
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a set of schedules does not implement its collective.
///
/// Steps are those of the rank named first.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The schedules are not those of ranks 0, 1, ... of one communicator over one count.
    #[error("schedule {index} is not that of {index}'s place in the same communicator over the same count")]
    NotOneCollective {
        /// The index of the schedule that does not fit.
        index: usize,
    },
    /// A transfer names its own rank or one outside the communicator.
    #[error("{rank}, step {step}: {peer} is no peer")]
    BadPeer {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
        /// The peer named.
        peer: Rank,
    },
    /// A transfer reaches past the buffer.
    #[error("{rank}, step {step}: elements {}..{} of {count}", span.start, span.end())]
    OutOfBounds {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
        /// The elements named.
        span: Span,
        /// The elements there are.
        count: usize,
    },
    /// A step receives into elements that it also sends or receives: which value travels is a race.
    #[error("{rank}, step {step}: receives into {written:?} while {other:?} is in use")]
    Overlap {
        /// Whose schedule.
        rank: Rank,
        /// Which step.
        step: usize,
        /// The elements received into.
        written: Span,
        /// The elements of the other transfer.
        other: Span,
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
    /// Sender and receiver name different elements.
    #[error("{from}, step {step}: sends {sent:?} to {to}, which receives {received:?}")]
    SpanMismatch {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The sender's step.
        step: usize,
        /// The sender's elements.
        sent: Span,
        /// The receiver's elements.
        received: Span,
    },
    /// Sender and receiver name different actions.
    #[error("{from}, step {step}: {to} means to do something else with what it receives")]
    ActionMismatch {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The sender's step.
        step: usize,
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
    /// A value is read in a form that the rank does not hold: partial as finished, or the other way round.
    #[error("{rank}, step {step}: element {element} is {held} there, and is used as {wanted}")]
    Stale {
        /// Whose value.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned.
        element: usize,
        /// The form held.
        held: &'static str,
        /// The form wanted.
        wanted: &'static str,
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
    /// A reduction says that it completes a value and does not, or completes one without saying so.
    #[error("{rank}, step {step}: element {element} has {contributions} contributions; its completion is misstated")]
    Completion {
        /// Where.
        rank: Rank,
        /// Its step.
        step: usize,
        /// The first element concerned.
        element: usize,
        /// The contributions after the reduction.
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
    /// A rank leaves a barrier that another may not have entered.
    #[error("{rank} leaves the barrier without having heard of {unheard}")]
    NotHeard {
        /// The rank that leaves.
        rank: Rank,
        /// The lowest rank that it has not heard of.
        unheard: Rank,
    },
}
