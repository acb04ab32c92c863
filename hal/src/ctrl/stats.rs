//! The counters that a device keeps from boot on, and its report of them.

use crate::ids::BootId;
use core::fmt;
use serde::{Deserialize, Serialize};

/// Why a packet was dropped. Every dropped packet is counted under one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[non_exhaustive]
pub enum DropReason {
    /// Incomplete or damaged.
    Malformed = 0,
    /// A kind that is not sent in that direction, or fields that contradict each other.
    BadKind = 1,
    /// This node does not have the group.
    UnknownGroup = 2,
    /// Sent in another epoch.
    WrongEpoch = 3,
    /// A child index that the group does not have.
    BadChild = 4,
    /// The key does not belong to the child.
    BadKey = 5,
    /// Sent from an address other than the one that the child is pinned to.
    BadSource = 6,
    /// The seq belongs to another shard.
    BadShard = 7,
    /// `have` is above the seqs that were answered.
    BadMark = 8,
    /// Payload length or element count do not match the seq.
    BadShape = 9,
    /// The slot already holds a later chunk.
    Stale = 10,
    /// The child has already contributed.
    Duplicate = 11,
    /// The slot still holds a result that some child has not received.
    SlotBusy = 12,
    /// Beyond the child's window.
    OverWindow = 13,
    /// A reply that does not belong to any request.
    Unexpected = 14,
    /// The reply queue is full.
    QueueFull = 15,
    /// From a straggler: the group is continuing without this child, or is about to.
    Late = 16,
    /// Of another version of the packet format.
    WrongVersion = 17,
    /// Data of an operation that no child has described yet.
    UnknownOperation = 18,
}

impl DropReason {
    /// Every reason, in numerical order.
    pub const ALL: [Self; 19] = [
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
        Self::WrongVersion,
        Self::UnknownOperation,
    ];

    /// Return the reason's name, as shown in tables.
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
            Self::WrongVersion => "wrong-version",
            Self::UnknownOperation => "unknown-operation",
        }
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A node's counters since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counters {
    /// Packets received, including dropped ones.
    pub packets_in: u64,
    /// Bytes of the packets received.
    pub bytes_in: u64,
    /// Packets sent.
    pub packets_out: u64,
    /// Bytes of the packets sent.
    pub bytes_out: u64,
    /// Contributions accepted.
    pub contributions: u64,
    /// Those of the contributions that arrived zero-copy; the others arrived in packets.
    pub zero_copy_contributions: u64,
    /// Seqs completed at this node.
    pub completed: u64,
    /// Answers (Result, Done) sent for the first time.
    pub answers: u64,
    /// Results sent to all children in one packet. Each also counts as an answer to every child.
    pub answers_shared: u64,
    /// Answers retransmitted.
    pub answers_resent: u64,
    /// Contributions retransmitted to the parent.
    pub contributions_resent: u64,
    /// Naks sent.
    pub naks: u64,
    /// Probes answered.
    pub probes_in: u64,
    /// Probes sent to the parent.
    pub probes_out: u64,
    /// Decisions to continue without stragglers that were carried out.
    pub cuts: u64,
    /// Window halvings.
    pub window_cuts: u64,
    /// Packets received with a congestion mark (ECN's CE, RFC 3168), including dropped ones.
    pub marked: u64,
    /// Groups freed because their lease expired.
    pub leases_expired: u64,
    /// Packets dropped, indexed by [`DropReason`].
    pub dropped: [u64; 19],
}

impl Counters {
    /// Count a dropped packet.
    pub fn drop_packet(&mut self, reason: DropReason) {
        self.dropped[reason as usize] += 1;
    }

    /// Return the number of packets dropped for `reason`.
    pub const fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped[reason as usize]
    }

    /// Add the counters of another shard.
    pub fn merge(&mut self, other: &Self) {
        let Self {
            packets_in,
            bytes_in,
            packets_out,
            bytes_out,
            contributions,
            zero_copy_contributions,
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
            marked,
            leases_expired,
            dropped,
        } = other;
        self.packets_in += packets_in;
        self.bytes_in += bytes_in;
        self.packets_out += packets_out;
        self.bytes_out += bytes_out;
        self.contributions += contributions;
        self.zero_copy_contributions += zero_copy_contributions;
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
        self.marked += marked;
        self.leases_expired += leases_expired;
        for (sum, n) in self.dropped.iter_mut().zip(dropped) {
            *sum += n;
        }
    }
}

/// A device's report of its counters and resource usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The incarnation that the counters belong to.
    pub boot_id: BootId,
    /// Groups on this device.
    pub groups: u16,
    /// Trees installed on this device.
    pub trees: u16,
    /// Slots in use, over all shards.
    pub slots_used: u32,
    /// Slot memory in use, over all shards, in bytes.
    pub slot_memory_used_bytes: u64,
    /// The counters, over all shards.
    pub counters: Counters,
    /// Stack usage of the shard that came closest to its limit; `None` where it is not measured.
    pub stack: Option<StackUsage>,
}

/// The high-water mark of a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackUsage {
    /// The most bytes in use at any time.
    pub used_bytes: u32,
    /// The size of the stack in bytes.
    #[serde(rename = "of_bytes")]
    pub size_bytes: u32,
}
