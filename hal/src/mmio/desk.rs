//! How a board behind a BAR lets ranks in: what it and the broker on its host say to each other.
//!
//! Ranks of the host dial a socket, which a board without an operating system can't hear. A broker on the host hears it, and
//! asks the board, which alone knows the keys, over a function of their own: these entries go through its queue 0. The
//! board gives a rank a *seat*: memory that both reach, with the rank's function at its beginning and, from
//! [`ARENA_OFFSET_BYTES`] on, the arena that the rank takes its memory from.
//!
//! Invariants:
//! - a seat is one rank's, from the answer [`DeskAnswer::Seated`] until [`DeskAnswer::Left`];
//! - a board that begins another life has forgotten all seats; its boot id in the function says so.

use super::entry::{COMPLETION_WORDS, SUBMISSION_WORDS};
use crate::ids::{ChildIndex, GroupId};

/// Where the arena begins in a seat, in bytes: behind a function of two queues as deep as [`SEAT_DEPTH`].
pub const ARENA_OFFSET_BYTES: usize = 128 << 10;

/// The depth of a seat's queues.
pub const SEAT_DEPTH: u32 = 256;

/// The depth of the desk's own queues.
pub const DESK_DEPTH: u32 = 16;

/// The most seats that a board gives.
pub const SEATS_MAX: usize = 16;

const _: () = assert!(super::bar_len_bytes(2, SEAT_DEPTH) <= ARENA_OFFSET_BYTES);

/// Why a rank can't attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[repr(u64)]
#[non_exhaustive]
pub enum AttachRefusal {
    /// No such link, or another key.
    #[error("the device expects no such child to attach: its group is gone, or the key is wrong")]
    Stranger = 1,
    /// Somebody is there already.
    #[error("this child has attached already")]
    Attached = 2,
    /// The device has no function to give.
    #[error("the device has no memory for another function")]
    NoRoom = 3,
}

impl AttachRefusal {
    const ALL: [Self; 3] = [Self::Stranger, Self::Attached, Self::NoRoom];

    /// Return the refusal of a number, if this version knows it.
    pub fn from_wire(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|&reason| reason as u64 == number)
    }
}

/// What a broker asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeskRequest {
    /// Give a rank this seat, which is free.
    Seat {
        /// The seat.
        seat: u16,
        /// The group that the rank says that it is of.
        group: GroupId,
        /// Which child of the device it says that it is.
        child: ChildIndex,
        /// What proves it.
        key: u64,
    },
    /// The rank of this seat is gone.
    Leave {
        /// The seat.
        seat: u16,
    },
}

/// What a board answers, in the order in which it was asked; [`DeskAnswer::Left`] may come later, or unasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeskAnswer {
    /// The rank's function is in its seat. Where the group's redo slots are in the redo memory:
    Seated {
        /// The seat.
        seat: u16,
        /// Where they begin.
        offset_bytes: u64,
        /// The length of each.
        slot_len_bytes: u32,
        /// How many there are.
        slots: u32,
    },
    /// The rank gets no seat.
    Refused {
        /// The seat that was asked for.
        seat: u16,
        /// Why.
        reason: AttachRefusal,
    },
    /// The board has done with the seat: its engine touches nothing of it any more, and another rank may have it. Unasked,
    /// the rank has broken its rings, and is to be hung up on.
    Left {
        /// The seat.
        seat: u16,
    },
}

const SEAT: u64 = 1;
const LEAVE: u64 = 2;
const REFUSED: u64 = 3;

impl DeskRequest {
    /// Return the words that travel.
    pub fn emit(&self) -> [u64; SUBMISSION_WORDS] {
        match *self {
            Self::Seat { seat, group, child, key } => {
                [SEAT, seat.into(), u64::from(group.0) | u64::from(child.0) << 32, key, 0, 0, 0, 0]
            }
            Self::Leave { seat } => [LEAVE, seat.into(), 0, 0, 0, 0, 0, 0],
        }
    }

    /// Read a request; `None` if no request of this version has these words.
    pub fn parse(words: &[u64; SUBMISSION_WORDS]) -> Option<Self> {
        let seat = words[1] as u16;
        let request = match words[0] {
            SEAT => Self::Seat {
                seat,
                group: GroupId(words[2] as u32),
                child: ChildIndex((words[2] >> 32) as u16),
                key: words[3],
            },
            LEAVE => Self::Leave { seat },
            _ => return None,
        };
        (request.emit() == *words).then_some(request)
    }
}

impl DeskAnswer {
    /// Return the words that travel.
    pub fn emit(&self) -> [u64; COMPLETION_WORDS] {
        match *self {
            Self::Seated { seat, offset_bytes, slot_len_bytes, slots } => {
                [SEAT, seat.into(), offset_bytes, u64::from(slot_len_bytes) | u64::from(slots) << 32]
            }
            Self::Left { seat } => [LEAVE, seat.into(), 0, 0],
            Self::Refused { seat, reason } => [REFUSED, seat.into(), reason as u64, 0],
        }
    }

    /// Read an answer; `None` if no answer of this version has these words.
    pub fn parse(words: &[u64; COMPLETION_WORDS]) -> Option<Self> {
        let seat = words[1] as u16;
        let answer = match words[0] {
            SEAT => Self::Seated {
                seat,
                offset_bytes: words[2],
                slot_len_bytes: words[3] as u32,
                slots: (words[3] >> 32) as u32,
            },
            LEAVE => Self::Left { seat },
            REFUSED => Self::Refused { seat, reason: AttachRefusal::from_wire(words[2])? },
            _ => return None,
        };
        (answer.emit() == *words).then_some(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_they_were_written_and_nothing_else_is() {
        let requests = [
            DeskRequest::Seat { seat: 3, group: GroupId(u32::MAX), child: ChildIndex(7), key: u64::MAX },
            DeskRequest::Leave { seat: u16::MAX },
        ];
        for request in requests {
            let mut words = request.emit();
            assert_eq!(DeskRequest::parse(&words), Some(request));
            words[7] = 1;
            assert_eq!(DeskRequest::parse(&words), None);
        }
        let reason = AttachRefusal::NoRoom;
        let answers = [
            DeskAnswer::Seated { seat: 3, offset_bytes: 1 << 40, slot_len_bytes: u32::MAX, slots: 5 },
            DeskAnswer::Refused { seat: 0, reason },
            DeskAnswer::Left { seat: 9 },
        ];
        for answer in answers {
            let mut words = answer.emit();
            assert_eq!(DeskAnswer::parse(&words), Some(answer));
            words[1] |= 1 << 16;
            assert_eq!(DeskAnswer::parse(&words), None);
        }
        assert_eq!(DeskAnswer::parse(&[REFUSED, 0, 9, 0]), None);
    }
}
