//! Bugs planted on purpose, to measure what finds them: only with the feature `planted`, which is for tests of tests.
//!
//! A node or an endpoint is given one `Bug` (`plant`), so that two of them in one process can differ; without the
//! feature there is no such field, and what asks for a bug ([`planted!`](crate::planted!)) is the constant `false`.

/// A bug. Who has it is said first: a node of a device, a rank's endpoint, both, or the controller.
#[cfg(feature = "planted")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Bug {
    /// Endpoint: what a Status says of a chunk is taken for the next one's.
    OffByOneSeq,
    /// Node: of a chunk's number it compares only by which of two laps of the slots it is.
    VersionBit,
    /// All: the epoch is neither checked nor part of the keys.
    EpochForgotten,
    /// Node: a second contribution of a child is combined like the first.
    DoubleAdd,
    /// Node and controller: there are as many slots as the window is long, not twice as many, and one is used again once
    /// it has its answer, whoever has that. (Twice as many are safe even then.)
    SlotReusedEarly,
    /// Endpoint: the window limits how many chunks are in flight, not how far they are apart.
    CountedWindow,
    /// Endpoint: operations return without anything of them being kept.
    NoRetention,
    /// Controller: after a restart the group begins again in the epoch that it had.
    SameEpoch,
    /// Node: a group that failed is not freed when its lease runs out.
    LeaseLeak,
    /// Endpoint: what is kept of operations is kept for good.
    UnboundedQueue,
    /// Node: a probe is answered by what is in the slots, whichever chunks these hold.
    StaleProbeBits,
    /// Node: what the fastest child has is taken for what all have.
    MinHaveIsMax,
    /// Node: a contribution's key is not compared.
    KeyUnchecked,
    /// Endpoint: a contribution that the node has is taken for answered.
    AcceptedIsAnswered,
    /// Both: a Done may cover chunks that somebody wants the result of, and is taken for it.
    DoneForResult,
    /// Endpoint: a result that comes twice counts twice.
    LandsTwice,
    /// Both: a window beyond the group's limit is granted, and used.
    WindowUnclamped,
    /// Endpoint: an error ends the group at once, also where chunks before it are still open.
    ErrorAtOnce,
    /// Node: a refusal of a later chunk takes the place of an earlier one's.
    LaterRefusal,
    /// Node: contributions of different operations combine.
    SignatureUnchecked,
    /// Node: contributions combine as they come where another order was declared.
    OrderOfArrival,
    /// Node: the first contribution is added to what the slot held before.
    FirstNotCopied,
    /// Both: a parent that is silent is never given up.
    DeadHopUnnoticed,
    /// Endpoint: a packet whose checksum is wrong is taken.
    ChecksumUnchecked,
    /// Endpoint: a repair is told that chunks which have landed lack their results, so that they are computed again.
    ComputedTwice,
    /// Endpoint: results are taken in after others were told what is here, as by a port without a fence.
    MissingFence,
    /// Controller: where a node refuses a tree, the other nodes keep their part of it.
    ReservationKept,
    /// Controller: of those that wait in the queue, who came last comes first.
    NewestFirst,
    /// Controller: a group is booked first, and then compared with what is left.
    QuotaAfterBooking,
    /// Controller: after a restart it believes what was booked before.
    OldLeaseBelieved,
    /// Node: a result is written to ranks before its redo slot says that it is there.
    WrittenUnpublished,
    /// Node: whatever a redo slot's record says, contributions are pulled again once a chain has failed.
    RecordIgnored,
    /// Node: contributions that were combined before a chain failed count as combined after it.
    AccumulatorsKept,
    /// Node: a child by reference is answered, or told that it is fenced, while a chain has its memory.
    AnsweredInFlight,
    /// Node: memory is not held while submissions name it.
    RegionNotHeld,
    /// Node and controller: there are as many redo slots as the window is long, and one is used again while children have
    /// yet to be answered.
    RedoReusedEarly,
    /// Rank (as which the simulator acts, by reference): a device that lives is taken for fenced at once.
    FenceForgotten,
    /// Rank (as above): what a device answers while its memory is taken away counts, as what it answered before does.
    LateAnswerTaken,
}

#[cfg(feature = "planted")]
impl Bug {
    /// All of them.
    pub const ALL: [Self; 38] = [
        Self::OffByOneSeq,
        Self::VersionBit,
        Self::EpochForgotten,
        Self::DoubleAdd,
        Self::SlotReusedEarly,
        Self::CountedWindow,
        Self::NoRetention,
        Self::SameEpoch,
        Self::LeaseLeak,
        Self::UnboundedQueue,
        Self::StaleProbeBits,
        Self::MinHaveIsMax,
        Self::KeyUnchecked,
        Self::AcceptedIsAnswered,
        Self::DoneForResult,
        Self::LandsTwice,
        Self::WindowUnclamped,
        Self::ErrorAtOnce,
        Self::LaterRefusal,
        Self::SignatureUnchecked,
        Self::OrderOfArrival,
        Self::FirstNotCopied,
        Self::DeadHopUnnoticed,
        Self::ChecksumUnchecked,
        Self::ComputedTwice,
        Self::MissingFence,
        Self::WrittenUnpublished,
        Self::RecordIgnored,
        Self::AccumulatorsKept,
        Self::AnsweredInFlight,
        Self::RegionNotHeld,
        Self::RedoReusedEarly,
        Self::FenceForgotten,
        Self::LateAnswerTaken,
        Self::ReservationKept,
        Self::NewestFirst,
        Self::QuotaAfterBooking,
        Self::OldLeaseBelieved,
    ];

    /// Those that only contributions by reference can show.
    pub const BY_REFERENCE: [Self; 8] = [
        Self::WrittenUnpublished,
        Self::RecordIgnored,
        Self::AccumulatorsKept,
        Self::AnsweredInFlight,
        Self::RegionNotHeld,
        Self::RedoReusedEarly,
        Self::FenceForgotten,
        Self::LateAnswerTaken,
    ];
}

/// Tell whether somebody (`self.common`, say: whatever has the field `bug`) was given a bug. Whether there is such a
/// field is up to the feature `planted` of the crate that asks; without it this is `false`.
#[macro_export]
macro_rules! planted {
    ($somebody:expr, $bug:ident) => {{
        #[cfg(feature = "planted")]
        let planted = $somebody.bug == Some($crate::planted::Bug::$bug);
        #[cfg(not(feature = "planted"))]
        let planted = false;
        planted
    }};
}
