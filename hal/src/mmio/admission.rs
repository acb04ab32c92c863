//! The admission queue: how a board behind a BAR attaches ranks, through a broker on its host.
//!
//! Ranks connect to a socket, which a board without an operating system cannot serve. A broker on the host accepts the
//! connections and forwards the requests to the board, which alone knows the keys. These entries go through queue 0 of
//! a function of their own. The board assigns each rank a *rank slot*: shared memory with the rank's function at its
//! start and, from [`ARENA_OFFSET_BYTES`] on, the arena from which the rank allocates registered memory.
//!
//! Invariants:
//! - a rank slot belongs to one rank, from [`AdmissionReply::Attached`] to [`AdmissionReply::Detached`];
//! - a new incarnation of the board starts with all rank slots free; the boot id in its function identifies it.

use super::entry::{COMPLETION_WORDS, SUBMISSION_WORDS};
use crate::ids::{ChildIndex, GroupId};

/// The offset of the arena in a rank slot, in bytes: after a function with two queues of depth [`RANK_QUEUE_DEPTH`].
pub const ARENA_OFFSET_BYTES: usize = 128 << 10;

/// The depth of the queues in a rank slot.
pub const RANK_QUEUE_DEPTH: u32 = 256;

/// The depth of the admission queue.
pub const ADMISSION_DEPTH: u32 = 16;

/// The maximum number of rank slots on a board.
pub const RANK_SLOTS_MAX: usize = 16;

const _: () = assert!(super::bar_len_bytes(2, RANK_QUEUE_DEPTH) <= ARENA_OFFSET_BYTES);

/// Why a rank cannot attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[repr(u64)]
#[non_exhaustive]
pub enum AttachRefusal {
    /// The device does not expect this child, or its key is wrong.
    #[error("the device does not expect this child to attach: its group is gone, or the key is wrong")]
    UnknownChild = 1,
    /// The child is already attached.
    #[error("this child is already attached")]
    AlreadyAttached = 2,
    /// The device has no free function.
    #[error("the device has no memory for another function")]
    NoMemory = 3,
}

impl AttachRefusal {
    const ALL: [Self; 3] = [Self::UnknownChild, Self::AlreadyAttached, Self::NoMemory];

    /// Return the refusal with this wire number, if this version knows it.
    pub fn from_wire(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&reason| reason as u64 == number)
    }
}

/// A request from the broker to the board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdmissionRequest {
    /// Attach a rank to this rank slot, which is free.
    Attach {
        /// The rank slot.
        rank_slot: u16,
        /// The group that the rank claims.
        group: GroupId,
        /// The child index that the rank claims.
        child: ChildIndex,
        /// The key that proves the claim.
        key: u64,
    },
    /// The rank in this rank slot has disconnected.
    Detach {
        /// The rank slot.
        rank_slot: u16,
    },
}

/// A reply from the board, in the order of the requests. [`AdmissionReply::Detached`] may be delayed, or unsolicited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdmissionReply {
    /// The rank is attached; its function is in the rank slot. The other fields locate the group's redo slots in the
    /// redo memory.
    Attached {
        /// The rank slot.
        rank_slot: u16,
        /// Where the redo slots start.
        offset_bytes: u64,
        /// The length of each redo slot in bytes.
        slot_len_bytes: u32,
        /// The number of redo slots.
        slots: u32,
    },
    /// The rank is not attached.
    Refused {
        /// The rank slot of the request.
        rank_slot: u16,
        /// Why.
        reason: AttachRefusal,
    },
    /// The rank slot is free: the engine no longer accesses its memory. If this is unsolicited, the rank has violated
    /// the ring protocol, and the broker closes its connection.
    Detached {
        /// The rank slot.
        rank_slot: u16,
    },
}

const ATTACH: u64 = 1;
const DETACH: u64 = 2;
const REFUSED: u64 = 3;

impl AdmissionRequest {
    /// Return the entry's words.
    pub fn emit(&self) -> [u64; SUBMISSION_WORDS] {
        match *self {
            Self::Attach { rank_slot, group, child, key } => {
                [ATTACH, rank_slot.into(), u64::from(group.0) | u64::from(child.0) << 32, key, 0, 0, 0, 0]
            }
            Self::Detach { rank_slot } => [DETACH, rank_slot.into(), 0, 0, 0, 0, 0, 0],
        }
    }

    /// Parse a request; `None` if the words are not a valid request of this version.
    pub fn parse(words: &[u64; SUBMISSION_WORDS]) -> Option<Self> {
        let rank_slot = words[1] as u16;
        let request = match words[0] {
            ATTACH => Self::Attach {
                rank_slot,
                group: GroupId(words[2] as u32),
                child: ChildIndex((words[2] >> 32) as u16),
                key: words[3],
            },
            DETACH => Self::Detach { rank_slot },
            _ => return None,
        };
        (request.emit() == *words).then_some(request)
    }
}

impl AdmissionReply {
    /// Return the entry's words.
    pub fn emit(&self) -> [u64; COMPLETION_WORDS] {
        match *self {
            Self::Attached { rank_slot, offset_bytes, slot_len_bytes, slots } => {
                [ATTACH, rank_slot.into(), offset_bytes, u64::from(slot_len_bytes) | u64::from(slots) << 32]
            }
            Self::Detached { rank_slot } => [DETACH, rank_slot.into(), 0, 0],
            Self::Refused { rank_slot, reason } => [REFUSED, rank_slot.into(), reason as u64, 0],
        }
    }

    /// Parse a reply; `None` if the words are not a valid reply of this version.
    pub fn parse(words: &[u64; COMPLETION_WORDS]) -> Option<Self> {
        let rank_slot = words[1] as u16;
        let reply = match words[0] {
            ATTACH => Self::Attached {
                rank_slot,
                offset_bytes: words[2],
                slot_len_bytes: words[3] as u32,
                slots: (words[3] >> 32) as u32,
            },
            DETACH => Self::Detached { rank_slot },
            REFUSED => Self::Refused { rank_slot, reason: AttachRefusal::from_wire(words[2])? },
            _ => return None,
        };
        (reply.emit() == *words).then_some(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_round_trip_and_invalid_words_are_refused() {
        let requests = [
            AdmissionRequest::Attach { rank_slot: 3, group: GroupId(u32::MAX), child: ChildIndex(7), key: u64::MAX },
            AdmissionRequest::Detach { rank_slot: u16::MAX },
        ];
        for request in requests {
            let mut words = request.emit();
            assert_eq!(AdmissionRequest::parse(&words), Some(request));
            words[7] = 1;
            assert_eq!(AdmissionRequest::parse(&words), None);
        }
        let reason = AttachRefusal::NoMemory;
        let replies = [
            AdmissionReply::Attached { rank_slot: 3, offset_bytes: 1 << 40, slot_len_bytes: u32::MAX, slots: 5 },
            AdmissionReply::Refused { rank_slot: 0, reason },
            AdmissionReply::Detached { rank_slot: 9 },
        ];
        for reply in replies {
            let mut words = reply.emit();
            assert_eq!(AdmissionReply::parse(&words), Some(reply));
            words[1] |= 1 << 16;
            assert_eq!(AdmissionReply::parse(&words), None);
        }
        assert_eq!(AdmissionReply::parse(&[REFUSED, 0, 9, 0]), None);
    }
}
