//! Mutation testing: bugs planted on purpose, to verify that the tests find them. Only with the feature `planted`.
//!
//! Each node or endpoint is given its own `Bug` (`plant`), so that two of them in one process can differ. Without the
//! feature there is no such field, and [`planted!`](crate::planted!) is the constant `false`.

/// A bug. Each description starts with the component that has it: a device's node, a rank's endpoint, both, or the
/// controller.
#[cfg(feature = "planted")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Bug {
    /// Endpoint: applies each bit of a Status to the chunk after the one that it belongs to.
    OffByOneSeq,
    /// Node: compares only one bit of a chunk's number: the parity of its lap over the slots.
    VersionBit,
    /// All: neither check the epoch nor derive keys from it.
    EpochUnchecked,
    /// Node: combines a child's duplicate contribution.
    DoubleAdd,
    /// Node and controller: allocate as many slots as the window is long, not twice as many, and reuse one once it is
    /// answered, whoever has received the answer. (With twice as many, even that reuse is safe.)
    SlotReusedEarly,
    /// Endpoint: limits the number of chunks in flight instead of their span.
    CountedWindow,
    /// Endpoint: retains nothing of operations that have returned.
    NoRetention,
    /// Controller: gives a job's next group the number and epoch of its last one.
    SameEpoch,
    /// Node: does not free a failed group when its lease expires.
    LeaseLeak,
    /// Endpoint: retains results forever.
    UnboundedQueue,
    /// Node: answers a probe from the slots without checking which chunks they hold.
    StaleProbeBits,
    /// Node: takes the maximum of the children's `have` for their minimum.
    MaximumHaveUsed,
    /// Node: does not check a contribution's key.
    KeyUnchecked,
    /// Node: sends all chunks to the first shard of its parent.
    FirstShardOnly,
    /// Node: takes the numbers that a shard of its parent reports missing for its own.
    LocalNumbersMixed,
    /// Endpoint: treats a contribution as answered once the node has accepted it.
    AcceptedIsAnswered,
    /// Both: send, and accept, a Done in place of a result that is wanted.
    DoneForResult,
    /// Endpoint: counts a duplicate result twice.
    DuplicateCounted,
    /// Both: grant, and use, a window beyond the group's limit.
    WindowUnclamped,
    /// Endpoint: fails the group at once on an error, even if earlier chunks are still open.
    ErrorNotDeferred,
    /// Node: replaces the error of an earlier chunk by that of a later one.
    LaterErrorWins,
    /// Node: combines contributions of different operations.
    SignatureUnchecked,
    /// Node: combines Data of an operation that it does not know, as if it belonged to the operation described last.
    UnknownOperationCombined,
    /// Node: combines contributions in order of arrival where another order was declared.
    ArrivalOrder,
    /// Node: adds the first contribution to the slot's previous content.
    FirstNotCopied,
    /// Both: never declare a silent parent dead.
    DeadHopUndetected,
    /// Endpoint: accepts packets with a wrong checksum.
    ChecksumUnchecked,
    /// Endpoint: reports chunks that have landed as missing to a recovery, so that they are computed again.
    ComputedTwice,
    /// Endpoint: accepts results after it has reported what it holds, as a transport without a fence does.
    MissingFence,
    /// Controller: when one node refuses a group, does not release it on the others.
    ReservationKept,
    /// Controller: admits queued jobs in last-in, first-out order.
    NewestFirst,
    /// Controller: reserves a group's resources before it checks the quota.
    QuotaAfterBooking,
    /// Controller: after a restart, trusts the reservations of its previous incarnation.
    OldReservationTrusted,
    /// Controller: numbers its groups as its predecessor did.
    NumbersReused,
    /// Controller: resumes a job of its predecessor with half of its ranks or fewer.
    MinorityResumed,
    /// Controller: resumes a job in a view that its predecessor has used.
    ViewReused,
    /// Rank: announces a host collective in the next tree that other ranks have begun before it.
    EarlierPathForgotten,
    /// Rank: a call that is refused keeps its number.
    RefusedCallCounted,
    /// Rank: forgets that a controller which has disconnected may have told other ranks where to migrate.
    DoubtForgotten,
    /// Rank: migrates to the tree that it was given, whatever the other ranks were given.
    LoneMigration,
    /// Rank: frees an operation when its handle is dropped, although the tree still works on its buffers.
    DroppedOperationFreed,
    /// Rank: does not note that a handle is dropped while its host collective runs, and keeps the buffers.
    RunningDropMissed,
    /// Rank: waits for an operation without running the host collectives that were started before it.
    EarlierScheduleSkipped,
    /// Rank: runs host collectives that are waited for after the communicator has ended.
    EndedScheduleRun,
    /// Controller: never disconnects a client that does not read, unless its queue is full.
    StalledPeerKept,
    /// Controller: queues any number of messages for a client that does not read.
    OutputUnbounded,
    /// Node: writes a result to ranks before its redo record is published.
    WrittenBeforePublished,
    /// Node: publishes no result that its ranks take out of place, as if intact inputs were all that a recovery needs.
    OutOfPlaceUnpublished,
    /// Node: after a failed chain, pulls contributions again even if the redo record is published.
    RecordIgnored,
    /// Node: after a failed chain, keeps the contributions that were combined before it.
    AccumulatorsKept,
    /// Node: answers a zero-copy child, or confirms its fence, while a chain uses its memory.
    AnsweredInFlight,
    /// Node: does not hold a region while submissions refer to it.
    RegionNotHeld,
    /// Node and controller: allocate as many redo slots as the window is long, and reuse one before all children are
    /// answered.
    RedoReusedEarly,
    /// All: take any answer to a probe about a path for one of the longest length.
    ShortAnswerAccepted,
    /// Rank: accepts answers to probes about its path with any key.
    PathKeyUnchecked,
    /// Both: keep a group whose packets the path no longer carries.
    NarrowingUnreported,
    /// Node: answers a probe about the path by a packet as long as its longest one.
    PathAnswerAmplified,
    /// Controller: publishes a tree with packets that a path does not carry.
    NarrowTreePublished,
    /// Rank (the simulator's zero-copy rank): treats a running device as fenced at once.
    FenceSkipped,
    /// Rank (the simulator's zero-copy rank): accepts answers that a device gives while its memory is being severed.
    LateAnswerAccepted,
}

#[cfg(feature = "planted")]
impl Bug {
    /// Every bug.
    pub const ALL: [Self; 60] = [
        Self::OffByOneSeq,
        Self::VersionBit,
        Self::EpochUnchecked,
        Self::DoubleAdd,
        Self::SlotReusedEarly,
        Self::CountedWindow,
        Self::NoRetention,
        Self::SameEpoch,
        Self::LeaseLeak,
        Self::UnboundedQueue,
        Self::StaleProbeBits,
        Self::MaximumHaveUsed,
        Self::KeyUnchecked,
        Self::FirstShardOnly,
        Self::LocalNumbersMixed,
        Self::AcceptedIsAnswered,
        Self::DoneForResult,
        Self::DuplicateCounted,
        Self::WindowUnclamped,
        Self::ErrorNotDeferred,
        Self::LaterErrorWins,
        Self::SignatureUnchecked,
        Self::UnknownOperationCombined,
        Self::ArrivalOrder,
        Self::FirstNotCopied,
        Self::DeadHopUndetected,
        Self::ChecksumUnchecked,
        Self::ComputedTwice,
        Self::MissingFence,
        Self::WrittenBeforePublished,
        Self::OutOfPlaceUnpublished,
        Self::RecordIgnored,
        Self::AccumulatorsKept,
        Self::AnsweredInFlight,
        Self::RegionNotHeld,
        Self::RedoReusedEarly,
        Self::FenceSkipped,
        Self::LateAnswerAccepted,
        Self::ReservationKept,
        Self::NewestFirst,
        Self::QuotaAfterBooking,
        Self::OldReservationTrusted,
        Self::NumbersReused,
        Self::MinorityResumed,
        Self::ViewReused,
        Self::EarlierPathForgotten,
        Self::RefusedCallCounted,
        Self::DoubtForgotten,
        Self::LoneMigration,
        Self::DroppedOperationFreed,
        Self::RunningDropMissed,
        Self::EarlierScheduleSkipped,
        Self::EndedScheduleRun,
        Self::StalledPeerKept,
        Self::OutputUnbounded,
        Self::ShortAnswerAccepted,
        Self::PathKeyUnchecked,
        Self::NarrowingUnreported,
        Self::PathAnswerAmplified,
        Self::NarrowTreePublished,
    ];

    /// The bugs that only paths of different widths can reveal.
    pub const OF_PATHS: [Self; 5] = [
        Self::ShortAnswerAccepted,
        Self::PathKeyUnchecked,
        Self::NarrowingUnreported,
        Self::PathAnswerAmplified,
        Self::NarrowTreePublished,
    ];

    /// The bugs that only zero-copy children can reveal.
    pub const ZERO_COPY: [Self; 9] = [
        Self::WrittenBeforePublished,
        Self::OutOfPlaceUnpublished,
        Self::RecordIgnored,
        Self::AccumulatorsKept,
        Self::AnsweredInFlight,
        Self::RegionNotHeld,
        Self::RedoReusedEarly,
        Self::FenceSkipped,
        Self::LateAnswerAccepted,
    ];
}

/// Return whether a component has a bug. `$component` is any expression with a field `bug`, such as `self.common`.
/// Without the feature `planted` of the calling crate there is no such field, and this is `false`.
#[macro_export]
macro_rules! planted {
    ($component:expr, $bug:ident) => {{
        #[cfg(feature = "planted")]
        let planted = $component.bug == Some($crate::planted::Bug::$bug);
        #[cfg(not(feature = "planted"))]
        let planted = false;
        planted
    }};
}
