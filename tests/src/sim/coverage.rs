//! What a run went through: which steps of the state machines, which reasons, which points of a repair.
//!
//! Nothing in the code under test notes this. Devices and ranks are looked at from outside, after each time that they
//! are asked for output, and what changed since is walked along the states in between; packets are looked at as they
//! arrive.

use std::collections::BTreeMap;
use sumac::transport::packets::{EndpointError, Progress};
use sumac_device::{Event, Node, Phase};
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::GroupId;
use sumac_hal::wire::{Kind, NakReason, Repr};

/// Make the list of marks, each with its name in tables.
macro_rules! marks {
    ($($(#[$doc:meta])* $mark:ident = $name:literal,)*) => {
        /// Something that a run can go through.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Mark {
            $($(#[$doc])* $mark,)*
        }

        impl Mark {
            /// All of them, in the order of tables.
            pub const ALL: &[Self] = &[$(Self::$mark,)*];

            /// Return its name in tables.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$mark => $name,)*
                }
            }
        }
    };
}

marks! {
    /// A slot takes its first chunk.
    SlotBegun = "slot: free > filling",
    /// A slot takes another chunk.
    SlotAgain = "slot: answered > filling",
    /// All children are in, at an inner node.
    SlotUp = "slot: filling > up",
    /// All children are in, at the root.
    SlotDone = "slot: filling > answered",
    /// The parent has answered.
    SlotAnswered = "slot: up > answered",
    /// The children do not agree, or the node can't do it.
    SlotRefused = "slot: filling > refused",
    /// A group is created.
    GroupCreated = "group: created",
    /// A group is released.
    GroupReleased = "group: released",
    /// All groups of a device are closed at once.
    GroupReset = "group: reset",
    /// A lease runs out.
    GroupExpired = "group: lease expired",
    /// A group ends because ranks called different things.
    GroupMismatch = "group: failed, mismatch",
    /// A group ends because a device can't do what was called.
    GroupUnsupported = "group: failed, unsupported",
    /// A group ends because the way up is lost.
    GroupPathLost = "group: failed, path lost",
    /// An operation is posted.
    OpPosted = "operation: posted",
    /// Its first contribution goes out.
    OpSent = "operation: posted > sent",
    /// It is complete, and returns.
    OpReturned = "operation: sent > returned",
    /// What others may lack of it is kept.
    OpKept = "operation: returned > kept",
    /// Everybody has it.
    OpForgotten = "operation: kept > forgotten",
    /// The tree's end was told, chunks before it are open.
    EndpointEnding = "endpoint: open > ending",
    /// Ended for different calls.
    EndpointMismatch = "endpoint: failed, mismatch",
    /// Ended for an operation that a device can't do.
    EndpointUnsupported = "endpoint: failed, unsupported",
    /// Ended for a lost path.
    EndpointPathLost = "endpoint: failed, path lost",
    /// Ended for a lost group.
    EndpointGroupLost = "endpoint: failed, group lost",
    /// A contribution.
    UpData = "up: data",
    /// A contribution of nothing.
    UpEmpty = "up: empty",
    /// A contribution by reference, as a packet: only an attacker sends one, as they come through rings.
    UpRef = "up: ref, by an attacker",
    /// A question.
    UpProbe = "up: probe",
    /// An answer did not come.
    UpMissing = "up: nak, missing",
    /// A subtree's ranks called different things.
    UpMismatch = "up: nak, mismatch",
    /// A subtree can't do it.
    UpUnsupported = "up: nak, unsupported",
    /// A result.
    DownResult = "down: result",
    /// An answer without a result.
    DownDone = "down: done",
    /// The answer to a probe.
    DownStatus = "down: status",
    /// A contribution did not come.
    DownMissing = "down: nak, missing",
    /// A contribution is wanted again.
    DownResend = "down: nak, resend",
    /// Of another epoch.
    DownWrongEpoch = "down: nak, wrong epoch",
    /// No such group.
    DownUnknownGroup = "down: nak, unknown group",
    /// Ranks called different things.
    DownMismatch = "down: nak, mismatch",
    /// The way up is lost.
    DownPathLost = "down: nak, path lost",
    /// A device can't do it.
    DownUnsupported = "down: nak, unsupported",
    /// A device dies for good.
    LossDevice = "loss: device",
    /// A device restarts.
    LossRestart = "loss: device, which restarts",
    /// A link is cut, one way.
    LossLink = "loss: link",
    /// The controller stops.
    LossController = "loss: controller",
    /// Something is lost while ranks repair.
    LossInRepair = "loss: during a repair",
    /// A rank freezes because its own endpoint has failed.
    FrozenByLoss = "repair: frozen by its own loss",
    /// A rank freezes in an operation, told by the controller.
    FrozenByWord = "repair: frozen by the controller's word",
    /// A rank freezes outside of all operations.
    FrozenIdle = "repair: frozen between operations",
    /// A rank gives a result that it holds.
    ChunkHeld = "repair: chunk, held > landed",
    /// A chunk is computed again.
    ChunkComputed = "repair: chunk, recomputed > landed",
    /// An operation of the lost tree returns.
    OpRepaired = "operation: sent > repaired",
    /// An operation begins again.
    OpBegunAgain = "operation: sent > begun again",
    /// An operation runs by a schedule.
    OpScheduled = "operation: by a schedule",
    /// All go on by another tree.
    CommitTree = "repair: committed, another tree",
    /// All go on by schedules.
    CommitSchedules = "repair: committed, schedules",
    /// The controller finds no tree.
    NoTree = "controller: no tree",
    /// A place is reserved, another is not to be had.
    RolledBack = "controller: reserved > rolled back",
    /// The controller does not answer in time.
    ControllerLate = "controller: no answer",
    /// The controller starts again.
    ControllerAgain = "controller: started again",
    /// The controller is gone for good.
    ControllerGone = "controller: gone",
    /// A rank dies outside of a view change.
    RankDied = "loss: rank",
    /// A rank dies in a view change.
    RankDiedInChange = "loss: rank, in a view change",
    /// Ranks do not hear each other for a while.
    RanksSplit = "loss: way between ranks",
    /// A letter does not arrive for that.
    LetterCut = "loss: letter between ranks",
    /// A rank is told of a death for certain.
    DeathByWord = "death: known for certain",
    /// A rank only hears nothing of another.
    DeathBySilence = "death: suspected",
    /// A rank takes part in a view change.
    ViewChange = "view change: begun",
    /// What an attempt moves does not come.
    AttemptFailed = "view change: attempt > failed",
    /// Who is behind is told how the view was changed.
    LateAnswered = "view change: told afterwards",
    /// The communicator ends with who is dead.
    CommitRanksFailed = "view change: committed, ranks failed",
    /// A rank is out, with a minority.
    EndPartitioned = "view change: partitioned",
    /// A world of tenants in which nothing is lost.
    NothingLost = "tenants: nothing lost",
    /// A device does not answer its controller for a while.
    DeviceStalls = "tenants: device does not answer",
    /// A device refuses a group for no good reason.
    DeviceRefuses = "tenants: device refuses",
    /// A device refuses a group that does not fit.
    DeviceFull = "tenants: device is full",
    /// A rank joins without a tree, and its job waits for one.
    Queued = "tenants: in the queue",
    /// A job's place in the queue changes.
    PlaceTold = "tenants: place in the queue told",
    /// A rank is offered a tree.
    Offered = "tenants: tree offered",
    /// All ranks move to the tree.
    MovedBack = "tenants: moved to the offered tree",
    /// They do not, after all.
    MovedNot = "tenants: offered tree not taken",
    /// A buffer is registered.
    RefRegistered = "memory: registered",
    /// It is given back, and nothing uses it.
    RefDeregistered = "memory: registered > free",
    /// A rank is gone, and its memory is in use.
    RefStranded = "memory: stranded",
    /// A dead rank's memory is taken from under the engine.
    RefRevoked = "memory: revoked in use",
    /// A run of chunks is submitted.
    RefSubmitted = "reference: posted > submitted",
    /// Its input is copied to the bounce buffer before.
    RefFilled = "reference: input > bounce",
    /// A result is copied from the bounce buffer.
    RefDrained = "reference: bounce > output",
    /// The ring for submissions has no place.
    RefRingFull = "reference: ring full",
    /// The device takes a run.
    RefTaken = "reference: submitted > absent",
    /// It does not yet: beyond the window, or no place for the answers.
    RefParked = "reference: held back",
    /// It does not take it, or answers that it comes to nothing.
    RefRefused = "reference: refused",
    /// The engine fetches a contribution.
    RefPulled = "reference: pulling > in",
    /// A chain has failed before anything was published.
    RefPoisoned = "reference: pulling > poisoned",
    /// A chunk is answered.
    RefAnswered = "reference: answered",
    /// A result is published in its redo slot.
    RedoPublished = "redo slot: published",
    /// It is written back to a rank.
    RedoWritten = "redo slot: published > written",
    /// A chain has failed after that: what is missing is written again.
    RedoWriteFailed = "redo slot: write failed",
    /// The engine has no room for a chain.
    EngineFull = "engine: full",
    /// A device dies when a contribution was fetched.
    CrashPulled = "crash: after a pull",
    /// When all are combined.
    CrashReduced = "crash: after the reduction",
    /// Between redo-publish and result write.
    CrashPublished = "crash: after redo-publish",
    /// In the middle of result writes.
    CrashWriting = "crash: in a result write",
    /// Behind them, before the engine says so.
    CrashWritten = "crash: after result writes",
    /// Before the answer is in the completion ring.
    CrashAnswering = "crash: before the completion",
    /// A device is up again, with another boot id and its redo memory.
    RefBootedAgain = "device: booted again",
    /// A device's runtime stands still, and its engine goes on.
    RefStands = "device: stands still",
    /// A rank ends a group with nothing in flight.
    FenceNothing = "fence: nothing in flight",
    /// The device says that it is quiet.
    FenceConfirmed = "fence: confirmed",
    /// The device's process has ended.
    FenceEnded = "fence: process ended",
    /// The device's memory is taken away.
    FenceSevered = "fence: severed",
    /// A device goes on while its memory is taken away, and answers.
    RefAnsweredSevered = "salvage: answered meanwhile",
    /// Nobody has the result of such an answer any more.
    RefUnknown = "salvage: outcome unknown",
    /// Answers were in the ring still.
    RefSalvagedRing = "salvage: from the ring",
    /// Results were published and not answered.
    RefSalvagedRedo = "salvage: from redo slots",
}

impl Mark {
    /// What no run of the simulator goes through, and why.
    pub const UNREACHABLE: &[(Self, &str)] =
        &[(Self::DownResend, "nodes keep what came inline, and never ask for it again")];
}

/// Reasons to drop that no run of the simulator meets, and why.
pub(super) const DROPS_UNREACHABLE: &[(DropReason, &str)] =
    &[(DropReason::SlotBusy, "children are policed to a window, and slots are twice as many")];

/// How often each [`Mark`] was hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen([u64; Mark::ALL.len()]);

impl Default for Seen {
    fn default() -> Self {
        Self([0; Mark::ALL.len()])
    }
}

impl Seen {
    pub(super) fn note(&mut self, mark: Mark) {
        self.0[mark as usize] += 1;
    }

    /// Return how often a mark was hit.
    pub const fn count(&self, mark: Mark) -> u64 {
        self.0[mark as usize]
    }

    /// Add another run's.
    pub fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, n)| *sum += n);
    }

    /// Walk a slot from where it was seen last to where it is.
    fn walk(&mut self, (was_local, was): (u64, Phase), (local, phase): (u64, Phase), is_root: bool) {
        let again = was == Phase::Free || was_local != local;
        if phase == Phase::Free || !again && was == phase {
            return;
        }
        if again {
            self.note(if was == Phase::Free { Mark::SlotBegun } else { Mark::SlotAgain });
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

    /// Note a packet by what its header says, which has been checked; `is_up` if it came from a child.
    pub(super) fn packet(&mut self, repr: &Repr, is_up: bool) {
        let mark = match (repr.kind, repr.reason) {
            (Kind::Data, _) => Mark::UpData,
            (Kind::Ref, _) => Mark::UpRef,
            (Kind::Empty, _) => Mark::UpEmpty,
            (Kind::Probe, _) => Mark::UpProbe,
            (Kind::Result, _) => Mark::DownResult,
            (Kind::Done, _) => Mark::DownDone,
            (Kind::Status, _) => Mark::DownStatus,
            (Kind::Nak, Some(NakReason::Missing)) if is_up => Mark::UpMissing,
            (Kind::Nak, Some(NakReason::Mismatch)) if is_up => Mark::UpMismatch,
            (Kind::Nak, Some(NakReason::Unsupported)) if is_up => Mark::UpUnsupported,
            // Nobody but an attacker says up what is said down.
            (Kind::Nak, _) if is_up => return,
            (Kind::Nak, Some(NakReason::Missing)) => Mark::DownMissing,
            (Kind::Nak, Some(NakReason::Resend)) => Mark::DownResend,
            (Kind::Nak, Some(NakReason::WrongEpoch)) => Mark::DownWrongEpoch,
            (Kind::Nak, Some(NakReason::UnknownGroup)) => Mark::DownUnknownGroup,
            (Kind::Nak, Some(NakReason::Mismatch)) => Mark::DownMismatch,
            (Kind::Nak, Some(NakReason::PathLost)) => Mark::DownPathLost,
            (Kind::Nak, Some(NakReason::Unsupported)) => Mark::DownUnsupported,
            _ => return,
        };
        self.note(mark);
    }

    /// Note why a group of a device ended.
    pub(super) fn device_event(&mut self, event: Event) {
        match event {
            Event::LeaseExpired(_) => self.note(Mark::GroupExpired),
            Event::GroupFailed { reason: NakReason::Mismatch, .. } => self.note(Mark::GroupMismatch),
            Event::GroupFailed { reason: NakReason::Unsupported, .. } => self.note(Mark::GroupUnsupported),
            Event::GroupFailed { .. } => self.note(Mark::GroupPathLost),
            _ => {}
        }
    }

    /// Note how a rank's endpoint ended.
    pub(super) fn endpoint_error(&mut self, error: EndpointError) {
        self.note(match error {
            EndpointError::Mismatch { .. } => Mark::EndpointMismatch,
            EndpointError::Unsupported(_) => Mark::EndpointUnsupported,
            EndpointError::PathLost => Mark::EndpointPathLost,
            _ => Mark::EndpointGroupLost,
        });
    }

    /// Note what an endpoint has done between two looks.
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

/// What the slots of a device were like when they were looked at last.
#[derive(Debug, Default)]
pub(super) struct Slots(BTreeMap<(GroupId, u32), Vec<(u64, Phase)>>);

impl Slots {
    /// Look at a group's slots, and note what they went through since. `life` tells one life of the group from the next.
    pub(super) fn look(&mut self, node: &Node<'_>, (group, life): (GroupId, u32), is_root: bool, seen: &mut Seen) {
        let slots = self.0.entry((group, life)).or_default();
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

    /// A slot that is looked at late has gone through all that lies between.
    #[test]
    fn steps_between_two_looks_are_counted() {
        let mut seen = Seen::default();
        seen.walk((0, Phase::Free), (3, Phase::Answered), false);
        seen.walk((3, Phase::Answered), (7, Phase::Refused), false);
        seen.walk((0, Phase::Filling), (0, Phase::Answered), true);
        let hit: Vec<Mark> = Mark::ALL.iter().copied().filter(|&mark| seen.count(mark) > 0).collect();
        let expected =
            [Mark::SlotBegun, Mark::SlotAgain, Mark::SlotUp, Mark::SlotDone, Mark::SlotAnswered, Mark::SlotRefused];
        assert_eq!(hit, expected);
        seen.walk((7, Phase::Filling), (7, Phase::Filling), true);
        assert_eq!(seen.0.iter().sum::<u64>(), 6, "nothing has changed");
    }
}
