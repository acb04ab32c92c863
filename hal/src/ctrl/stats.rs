//! Counters: what a device has seen and done since it booted.

use crate::ids::BootId;
use core::fmt;
use serde::{Deserialize, Serialize};

/// Why a packet was dropped. Every drop has a reason and is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[non_exhaustive]
pub enum DropReason {
    /// Not a whole packet of this version, or damaged.
    Malformed = 0,
    /// A kind that nobody sends in that direction, or fields that contradict each other.
    BadKind = 1,
    /// No such group here.
    UnknownGroup = 2,
    /// Of another epoch.
    WrongEpoch = 3,
    /// A child index that the group does not have.
    BadChild = 4,
    /// The key is not the child's.
    BadKey = 5,
    /// From another address than the child is pinned to.
    BadSource = 6,
    /// A seq of another shard.
    BadShard = 7,
    /// `have` is above what was sent down.
    BadMark = 8,
    /// Payload length or element count do not fit the seq.
    BadShape = 9,
    /// The slot has moved on.
    Stale = 10,
    /// Already in.
    Duplicate = 11,
    /// The slot still holds something that a child has not got.
    SlotBusy = 12,
    /// Beyond the child's window.
    OverWindow = 13,
    /// An answer to nothing that was asked.
    Unexpected = 14,
    /// The queue of replies is full.
    QueueFull = 15,
    /// From who was not there in an operation's time: the group goes on without, or is about to.
    Late = 16,
}

impl DropReason {
    /// Every reason, in order of number.
    pub const ALL: [Self; 17] = [
        Self::Malformed,
        Self::BadKind,
        Self::UnknownGroup,
        Self::WrongEpoch,
        Self::BadChild,
        Self::BadKey,
        Self::BadSource,
        Self::BadShard,
        Self::BadMark,
        Self::BadShape,
        Self::Stale,
        Self::Duplicate,
        Self::SlotBusy,
        Self::OverWindow,
        Self::Unexpected,
        Self::QueueFull,
        Self::Late,
    ];

    /// Return its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::BadKind => "bad-kind",
            Self::UnknownGroup => "unknown-group",
            Self::WrongEpoch => "wrong-epoch",
            Self::BadChild => "bad-child",
            Self::BadKey => "bad-key",
            Self::BadSource => "bad-source",
            Self::BadShard => "bad-shard",
            Self::BadMark => "bad-mark",
            Self::BadShape => "bad-shape",
            Self::Stale => "stale",
            Self::Duplicate => "duplicate",
            Self::SlotBusy => "slot-busy",
            Self::OverWindow => "over-window",
            Self::Unexpected => "unexpected",
            Self::QueueFull => "queue-full",
            Self::Late => "late",
        }
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a node counts; all since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Packets received, dropped ones too.
    pub packets_in: u64,
    /// Their bytes.
    pub bytes_in: u64,
    /// Packets sent.
    pub packets_out: u64,
    /// Their bytes.
    pub bytes_out: u64,
    /// Contributions taken in.
    pub contributions: u64,
    /// Seqs completed at this node.
    pub completed: u64,
    /// Answers (Result, Done) sent for the first time.
    pub answers: u64,
    /// Results sent to all children in one packet; each counts as an answer to each of them.
    pub answers_shared: u64,
    /// Answers sent again.
    pub answers_resent: u64,
    /// Contributions sent up again.
    pub contributions_resent: u64,
    /// Naks sent.
    pub naks: u64,
    /// Probes answered.
    pub probes_in: u64,
    /// Probes sent up.
    pub probes_out: u64,
    /// Decisions to go on without ranks that were carried out.
    pub cuts: u64,
    /// Window halvings.
    pub window_cuts: u64,
    /// Groups ended by their lease.
    pub leases_expired: u64,
    /// Packets dropped, by [`DropReason`] number.
    pub dropped: [u64; 17],
}

impl Counters {
    /// Count a drop.
    pub fn drop_packet(&mut self, reason: DropReason) {
        self.dropped[reason as usize] += 1;
    }

    /// Return how many packets were dropped for `reason`.
    pub const fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped[reason as usize]
    }

    /// Add another shard's counters.
    pub fn merge(&mut self, other: &Self) {
        let Self {
            packets_in,
            bytes_in,
            packets_out,
            bytes_out,
            contributions,
            completed,
            answers,
            answers_shared,
            answers_resent,
            contributions_resent,
            naks,
            probes_in,
            probes_out,
            cuts,
            window_cuts,
            leases_expired,
            dropped,
        } = other;
        self.packets_in += packets_in;
        self.bytes_in += bytes_in;
        self.packets_out += packets_out;
        self.bytes_out += bytes_out;
        self.contributions += contributions;
        self.completed += completed;
        self.answers += answers;
        self.answers_shared += answers_shared;
        self.answers_resent += answers_resent;
        self.contributions_resent += contributions_resent;
        self.naks += naks;
        self.probes_in += probes_in;
        self.probes_out += probes_out;
        self.cuts += cuts;
        self.window_cuts += window_cuts;
        self.leases_expired += leases_expired;
        for (sum, n) in self.dropped.iter_mut().zip(dropped) {
            *sum += n;
        }
    }
}

/// A device's report of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The life that the counters belong to.
    pub boot_id: BootId,
    /// Groups that live here.
    pub groups: u16,
    /// Trees installed here.
    pub trees: u16,
    /// Slots in use, over all shards.
    pub slots_used: u32,
    /// Slot memory in use, over all shards, in bytes.
    pub slot_memory_used_bytes: u64,
    /// The counters, over all shards.
    pub counters: Counters,
    /// The stack of the shard that has come nearest to its end; `None` where nobody measures it.
    pub stack: Option<StackUse>,
}

/// How far a stack was ever used: its high-water mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackUse {
    /// How many bytes of it were ever used.
    pub used_bytes: u32,
    /// How long it is.
    pub of_bytes: u32,
}
