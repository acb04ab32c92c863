//! Coverage of a run: transitions of the state machines, drop reasons, points of a recovery.
//!
//! The code under test records nothing for this. Devices and ranks are observed from outside each time they are polled
//! for output, and a change is traced through the states in between. Packets are observed on delivery.

use std::collections::BTreeMap;
use sumac::transport::packets::{EndpointError, Progress};
use sumac_device::{Event, Node, Phase};
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::GroupId;
use sumac_hal::wire::{Flags, Kind, NakReason, Repr};

/// Define the marks, each with its name in tables.
macro_rules! marks {
    ($($(#[$doc:meta])* $mark:ident = $name:literal,)*) => {
        /// A transition or event that a run can cover.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Mark {
            $($(#[$doc])* $mark,)*
        }

        impl Mark {
            /// All marks, in table order.
            pub const ALL: &[Self] = &[$(Self::$mark,)*];

            /// Return the mark's name in tables.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$mark => $name,)*
                }
            }
        }
    };
}

marks! {
    /// A slot starts its first chunk.
    SlotStarted = "slot: free > filling",
    /// A slot starts another chunk.
    SlotAgain = "slot: answered > filling",
    /// All children have contributed, at an inner node.
    SlotUp = "slot: filling > up",
    /// All children have contributed, at the root.
    SlotDone = "slot: filling > answered",
    /// The parent has answered.
    SlotAnswered = "slot: up > answered",
    /// The calls differ, or the node does not support the operation.
    SlotRefused = "slot: filling > refused",
    /// A group is created.
    GroupCreated = "group: created",
    /// A group is released.
    GroupReleased = "group: released",
    /// All groups of a device are closed at once.
    GroupReset = "group: reset",
    /// A lease expires.
    GroupExpired = "group: lease expired",
    /// A group fails because calls differ.
    GroupMismatch = "group: failed, mismatch",
    /// A group fails because a device does not support the operation.
    GroupUnsupported = "group: failed, unsupported",
    /// A group fails because the link to the parent is lost.
    GroupPathLost = "group: failed, path lost",
    /// An operation is posted.
    OpPosted = "operation: posted",
    /// The first contribution of an operation is sent.
    OpSent = "operation: posted > sent",
    /// An operation completes and returns.
    OpReturned = "operation: sent > returned",
    /// Results that other ranks may lack are kept.
    OpKept = "operation: returned > kept",
    /// Every rank has the results.
    OpForgotten = "operation: kept > forgotten",
    /// The end of the tree is known, and earlier chunks are open.
    EndpointEnding = "endpoint: open > ending",
    /// Failed because calls differ.
    EndpointMismatch = "endpoint: failed, mismatch",
    /// Failed because a device does not support the operation.
    EndpointUnsupported = "endpoint: failed, unsupported",
    /// Failed because the path is lost.
    EndpointPathLost = "endpoint: failed, path lost",
    /// Failed because the group is lost.
    EndpointGroupLost = "endpoint: failed, group lost",
    /// A contribution.
    UpData = "up: data",
    /// A contribution without data.
    UpEmpty = "up: empty",
    /// A zero-copy contribution as a packet. Only an attacker sends these: real ones go through rings.
    UpRef = "up: ref, by an attacker",
    /// A probe.
    UpProbe = "up: probe",
    /// A request for a missing answer.
    UpMissing = "up: nak, missing",
    /// A mismatch in a subtree.
    UpMismatch = "up: nak, mismatch",
    /// An operation that a subtree does not support.
    UpUnsupported = "up: nak, unsupported",
    /// Data that names its operation by signature.
    UpShort = "up: data, short",
    /// The description of an operation.
    UpOperation = "up: operation",
    /// A result.
    DownResult = "down: result",
    /// An answer without a result.
    DownDone = "down: done",
    /// The answer to a probe.
    DownStatus = "down: status",
    /// A request for a missing contribution.
    DownMissing = "down: nak, missing",
    /// A request to resend a contribution.
    DownResend = "down: nak, resend",
    /// The packet was of another epoch.
    DownWrongEpoch = "down: nak, wrong epoch",
    /// The group does not exist.
    DownUnknownGroup = "down: nak, unknown group",
    /// A mismatch.
    DownMismatch = "down: nak, mismatch",
    /// The link to the parent is lost.
    DownPathLost = "down: nak, path lost",
    /// An unsupported operation.
    DownUnsupported = "down: nak, unsupported",
    /// Data named an operation that the node does not know.
    DownUnknownOperation = "down: nak, unknown operation",
    /// A device dies for good.
    LossDevice = "loss: device",
    /// A device restarts.
    LossRestart = "loss: device, which restarts",
    /// One direction of a link is cut.
    LossLink = "loss: link",
    /// The controller stops.
    LossController = "loss: controller",
    /// Paths become narrower or wider.
    PathChanged = "loss: path changes",
    /// The path of a rank carries the packets of a reserved tree.
    PathKnown = "path: wide enough for a reserved tree",
    /// A device has probed its path.
    PathKnownBelow = "path: known to a device",
    /// A rank does not find out about its path.
    PathUnknown = "path: leaf is silent",
    /// It does not, and the tree is given up.
    PathTooNarrow = "path: too narrow for a reserved tree",
    /// A rank finds that its path has become narrower.
    PathNarrowed = "endpoint: failed, path narrow",
    /// A loss during a recovery.
    LossInRecovery = "loss: during a recovery",
    /// A rank freezes because its own endpoint has failed.
    FrozenByLoss = "recovery: frozen by its own loss",
    /// The controller makes a rank freeze during an operation.
    FrozenByController = "recovery: frozen by the controller",
    /// A rank freezes between operations.
    FrozenIdle = "recovery: frozen between operations",
    /// A rank sends a result that it holds.
    ChunkHeld = "recovery: chunk, held > landed",
    /// A chunk is recomputed.
    ChunkComputed = "recovery: chunk, recomputed > landed",
    /// An operation of the lost tree returns.
    OpRecovered = "operation: sent > recovered",
    /// An operation restarts.
    OpRestarted = "operation: sent > restarted",
    /// An operation runs as a host collective.
    OpByHost = "operation: by a host collective",
    /// All ranks continue with another tree.
    CommitTree = "recovery: committed, another tree",
    /// All ranks continue with host collectives.
    CommitSchedules = "recovery: committed, host collectives",
    /// The controller finds no tree.
    NoTree = "controller: no tree",
    /// A place is reserved and another is unavailable.
    RolledBack = "controller: reserved > rolled back",
    /// The controller does not answer in time.
    ControllerLate = "controller: no answer",
    /// The controller restarts.
    ControllerRestarted = "controller: restarted",
    /// The controller is gone for good.
    ControllerGone = "controller: gone",
    /// A rank dies outside of a view change.
    RankDied = "loss: rank",
    /// A rank dies in a view change.
    RankDiedInChange = "loss: rank, in a view change",
    /// Ranks cannot reach each other for a while.
    RanksSplit = "loss: link between ranks",
    /// A message is lost to a partition.
    MessageCut = "loss: message between ranks",
    /// A rank learns of a death for certain.
    DeathConfirmed = "death: known for certain",
    /// A rank only suspects a death from silence.
    DeathSuspected = "death: suspected",
    /// A rank takes part in a view change.
    ViewChange = "view change: begun",
    /// The chunks of an attempt do not arrive.
    AttemptFailed = "view change: attempt > failed",
    /// A rank that is behind learns the result of a view change.
    LateAnswered = "view change: learned afterwards",
    /// The communicator fails because of dead ranks.
    CommitRanksFailed = "view change: committed, ranks failed",
    /// A rank fails as part of a minority.
    EndPartitioned = "view change: partitioned",
    /// A tenants run without losses.
    NothingLost = "tenants: nothing lost",
    /// A device does not answer its controller for a while.
    DeviceStalls = "tenants: device does not answer",
    /// A device refuses a group although it fits.
    DeviceRefuses = "tenants: device refuses",
    /// A device refuses a group that does not fit.
    DeviceFull = "tenants: device is full",
    /// A rank joins without a tree, and its job waits for one.
    Queued = "tenants: queued",
    /// A job's place in the queue changes.
    PositionReported = "tenants: queue position reported",
    /// A rank is offered a tree.
    Offered = "tenants: tree offered",
    /// All ranks move to the tree.
    MovedBack = "tenants: moved to the offered tree",
    /// The move does not happen after all.
    OfferDeclined = "tenants: offered tree not taken",
    /// A rank's controller is gone, and may have told other ranks where to move: the view changes.
    OfferInDoubt = "tenants: offer in doubt",
    /// A controller starts while another one still runs.
    TwoControllers = "tenants: two controllers",
    /// A rank's job continues with the next controller.
    TakenOver = "tenants: taken over",
    /// A rank comes back too late, or never.
    TakeoverMissed = "tenants: takeover missed",
    /// The next controller refuses a rank.
    TakeoverRefused = "tenants: takeover refused",
    /// A rank does not read what the controller sends.
    ClientBlocked = "tenants: client does not read",
    /// The controller disconnects such a rank.
    ClientShed = "tenants: client that does not read is cut",
    /// The handle of a started operation is dropped while its rank changes the view.
    DroppedInChange = "tenants: handle dropped in a view change",
    /// A rank has joined a further tree of its job.
    StripeJoined = "tenants: stripe joined",
    /// A communicator has several trees.
    SeveralTrees = "tenants: several trees",
    /// A rank starts the device of its host.
    HostDeviceStarted = "tenants: host device started",
    /// It fails to, does so too late, or never.
    HostDeviceMissing = "tenants: host device fails or is late",
    /// A host device contributes for the ranks of its host.
    HostContributed = "tenants: host contributes once",
    /// A host device, which has one shard, contributes to a later shard of the device above it.
    HostShards = "tenants: host contributes to several shards",
    /// A shard of a device is silent for a while.
    ShardMute = "tenants: shard silent",
    /// A host device ends, and its rank goes on.
    HostDeviceLost = "tenants: host device lost",
    /// A rank dies, and its host device with it.
    HostLeaderDied = "tenants: rank with host device dies",
    /// A host device dials the next controller.
    HostDeviceBack = "tenants: host device taken over",
    /// A rank has left, and its host device goes on until the other ranks have.
    HostLeaderWaits = "tenants: leader waits for its host",
    /// A host device that outlives its job is refused.
    HostDeviceRefused = "tenants: host device of no job refused",
    /// A buffer is registered.
    RefRegistered = "memory: registered",
    /// A buffer is deregistered, and nothing uses it.
    RefDeregistered = "memory: registered > free",
    /// A rank is gone while its memory is in use.
    RefOrphaned = "memory: orphaned",
    /// A dead rank's memory is revoked while the engine uses it.
    RefRevoked = "memory: revoked in use",
    /// A run of chunks is submitted.
    RefSubmitted = "zero-copy: posted > submitted",
    /// Its input is first copied to the bounce buffer.
    RefFilled = "zero-copy: input > bounce",
    /// A result is copied from the bounce buffer.
    RefDrained = "zero-copy: bounce > output",
    /// The submission ring is full.
    RefRingFull = "zero-copy: ring full",
    /// The device takes a run.
    RefTaken = "zero-copy: submitted > absent",
    /// The device holds a run back: beyond the window, or no room for the answers.
    RefParked = "zero-copy: held back",
    /// The device refuses a run, or answers it with an error.
    RefRefused = "zero-copy: refused",
    /// The engine fetches a contribution.
    RefPulled = "zero-copy: pulling > in",
    /// A chain fails before anything is published.
    RefPoisoned = "zero-copy: pulling > poisoned",
    /// A chunk is answered.
    RefAnswered = "zero-copy: answered",
    /// A result is published in its redo slot.
    RedoPublished = "redo slot: published",
    /// A result is written to a rank.
    RedoWritten = "redo slot: published > written",
    /// A chain fails after publication, and the missing writes are repeated.
    RedoWriteFailed = "redo slot: write failed",
    /// The engine has no room for a chain.
    EngineFull = "engine: full",
    /// A device dies after a contribution was fetched.
    CrashPulled = "crash: after a pull",
    /// A device dies after all are combined.
    CrashReduced = "crash: after the reduction",
    /// A device dies between publication and result writes.
    CrashPublished = "crash: after redo-publish",
    /// A device dies during result writes.
    CrashWriting = "crash: in a result write",
    /// A device dies after them, before the engine completes the chain.
    CrashWritten = "crash: after result writes",
    /// A device dies before the answer is in the completion ring.
    CrashAnswering = "crash: before the completion",
    /// A device restarts with another boot id and its redo memory.
    RefBootedAgain = "device: restarted",
    /// A device's runtime stalls while its engine continues.
    RefStands = "device: stalled",
    /// A rank leaves a group with nothing in flight.
    FenceNothing = "fence: nothing in flight",
    /// The device confirms the fence.
    FenceConfirmed = "fence: confirmed",
    /// The device's process has ended.
    FenceEnded = "fence: process ended",
    /// The rank's memory is severed from the device.
    FenceSevered = "fence: severed",
    /// A device answers while memory is being severed from it.
    RefAnsweredSevered = "salvage: answered meanwhile",
    /// No rank has the result of such an answer.
    RefUnknown = "salvage: outcome unknown",
    /// Answers are recovered from the ring.
    RefSalvagedRing = "salvage: from the ring",
    /// Results are recovered from redo slots.
    RefSalvagedRedo = "salvage: from redo slots",
}

impl Mark {
    /// Marks that no run of the simulator can cover, and why.
    pub const UNREACHABLE: &[(Self, &str)] =
        &[(Self::DownResend, "nodes keep inline contributions and never request a resend")];
}

/// Drop reasons that no run of the simulator can cover, and why.
pub(super) const DROPS_UNREACHABLE: &[(DropReason, &str)] =
    &[(DropReason::SlotBusy, "the window limits children, and there are twice as many slots")];

/// How often each [`Mark`] was covered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coverage([u64; Mark::ALL.len()]);

impl Default for Coverage {
    fn default() -> Self {
        Self([0; Mark::ALL.len()])
    }
}

impl Coverage {
    pub(super) fn note(&mut self, mark: Mark) {
        self.0[mark as usize] += 1;
    }

    /// Return how often a mark was covered.
    pub const fn count(&self, mark: Mark) -> u64 {
        self.0[mark as usize]
    }

    /// Add another run's counts.
    pub fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, n)| *sum += n);
    }

    /// Trace a slot from its last observed state to the current one.
    fn walk(&mut self, (was_local, was): (u64, Phase), (local, phase): (u64, Phase), is_root: bool) {
        let again = was == Phase::Free || was_local != local;
        if phase == Phase::Free || !again && was == phase {
            return;
        }
        if again {
            self.note(if was == Phase::Free { Mark::SlotStarted } else { Mark::SlotAgain });
        }
        let from = if again { Phase::Filling } else { was };
        match (from, phase) {
            (Phase::Filling, Phase::Up) => self.note(Mark::SlotUp),
            (Phase::Filling, Phase::Refused) => self.note(Mark::SlotRefused),
            (Phase::Filling, Phase::Answered) if is_root => self.note(Mark::SlotDone),
            (Phase::Filling, Phase::Answered) => {
                self.note(Mark::SlotUp);
                self.note(Mark::SlotAnswered);
            }
            (Phase::Up, Phase::Answered) => self.note(Mark::SlotAnswered),
            _ => {}
        }
    }

    /// Record a packet by its header, which has been validated; `is_up` if it came from a child.
    pub(super) fn packet(&mut self, repr: &Repr, is_up: bool) {
        let mark = match (repr.kind, repr.reason) {
            (Kind::Data, _) if repr.flags.contains(Flags::SHORT) => Mark::UpShort,
            (Kind::Data, _) => Mark::UpData,
            (Kind::Operation, _) => Mark::UpOperation,
            (Kind::Ref, _) => Mark::UpRef,
            (Kind::Empty, _) => Mark::UpEmpty,
            (Kind::Probe, _) => Mark::UpProbe,
            (Kind::Result, _) => Mark::DownResult,
            (Kind::Done, _) => Mark::DownDone,
            (Kind::Status, _) => Mark::DownStatus,
            (Kind::Nak, Some(NakReason::Missing)) if is_up => Mark::UpMissing,
            (Kind::Nak, Some(NakReason::Mismatch)) if is_up => Mark::UpMismatch,
            (Kind::Nak, Some(NakReason::Unsupported)) if is_up => Mark::UpUnsupported,
            // Only an attacker sends downward kinds upwards.
            (Kind::Nak, _) if is_up => return,
            (Kind::Nak, Some(NakReason::Missing)) => Mark::DownMissing,
            (Kind::Nak, Some(NakReason::Resend)) => Mark::DownResend,
            (Kind::Nak, Some(NakReason::WrongEpoch)) => Mark::DownWrongEpoch,
            (Kind::Nak, Some(NakReason::UnknownGroup)) => Mark::DownUnknownGroup,
            (Kind::Nak, Some(NakReason::Mismatch)) => Mark::DownMismatch,
            (Kind::Nak, Some(NakReason::PathLost)) => Mark::DownPathLost,
            (Kind::Nak, Some(NakReason::Unsupported)) => Mark::DownUnsupported,
            (Kind::Nak, Some(NakReason::UnknownOperation)) => Mark::DownUnknownOperation,
            _ => return,
        };
        self.note(mark);
    }

    /// Record why a group of a device failed.
    pub(super) fn device_event(&mut self, event: Event) {
        match event {
            Event::LeaseExpired(_) => self.note(Mark::GroupExpired),
            Event::GroupFailed { reason: NakReason::Mismatch, .. } => self.note(Mark::GroupMismatch),
            Event::GroupFailed { reason: NakReason::Unsupported, .. } => self.note(Mark::GroupUnsupported),
            Event::GroupFailed { .. } => self.note(Mark::GroupPathLost),
            _ => {}
        }
    }

    /// Record how a rank's endpoint failed.
    pub(super) fn endpoint_error(&mut self, error: EndpointError) {
        self.note(match error {
            EndpointError::Mismatch { .. } => Mark::EndpointMismatch,
            EndpointError::Unsupported(_) => Mark::EndpointUnsupported,
            EndpointError::PathLost => Mark::EndpointPathLost,
            _ => Mark::EndpointGroupLost,
        });
    }

    /// Record an endpoint's progress between two observations.
    pub(super) fn endpoint(&mut self, was: &Progress, is: &Progress) {
        let steps = [
            (is.posted > was.posted, Mark::OpPosted),
            (is.sent > was.sent, Mark::OpSent),
            (is.kept > was.kept, Mark::OpKept),
            (is.kept < was.kept, Mark::OpForgotten),
            (is.is_ending && !was.is_ending, Mark::EndpointEnding),
        ];
        steps.into_iter().filter(|(happened, _)| *happened).for_each(|(_, mark)| self.note(mark));
    }
}

/// The last observed slot states of a device.
#[derive(Debug, Default)]
pub(super) struct Slots(BTreeMap<(GroupId, u32), Vec<(u64, Phase)>>);

impl Slots {
    /// Observe a group's slots and record their transitions. `incarnation` distinguishes incarnations of the group.
    pub(super) fn look(
        &mut self,
        node: &Node<'_>,
        (group, incarnation): (GroupId, u32),
        is_root: bool,
        seen: &mut Coverage,
    ) {
        let slots = self.0.entry((group, incarnation)).or_default();
        for (index, now) in node.phases(group).enumerate() {
            if index == slots.len() {
                slots.push((0, Phase::Free));
            }
            if slots[index] != now {
                seen.walk(slots[index], now, is_root);
                slots[index] = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slot observed late has gone through all states in between.
    #[test]
    fn steps_between_two_looks_are_counted() {
        let mut seen = Coverage::default();
        seen.walk((0, Phase::Free), (3, Phase::Answered), false);
        seen.walk((3, Phase::Answered), (7, Phase::Refused), false);
        seen.walk((0, Phase::Filling), (0, Phase::Answered), true);
        let hit: Vec<Mark> = Mark::ALL.iter().copied().filter(|&mark| seen.count(mark) > 0).collect();
        let expected =
            [Mark::SlotStarted, Mark::SlotAgain, Mark::SlotUp, Mark::SlotDone, Mark::SlotAnswered, Mark::SlotRefused];
        assert_eq!(hit, expected);
        seen.walk((7, Phase::Filling), (7, Phase::Filling), true);
        assert_eq!(seen.0.iter().sum::<u64>(), 6, "nothing has changed");
    }
}
