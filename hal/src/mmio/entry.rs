//! Queue entries: 64 bytes to the device and 32 bytes back, in little-endian 64-bit words.
//!
//! A contribution (opcode 1: zero-copy, 2: empty):
//!
//! | word | bits | field |
//! |---|---|---|
//! | 0 | 0..8 | opcode |
//! | 0 | 8..16 | flags: 1 = the rank wants the result at `dst` |
//! | 0 | 16..24, 24..32, 32..40 | collective, element type, operator; 0 for none |
//! | 0 | 40..48 | bits 32..40 of the operation's element count |
//! | 0 | 48..64 | count: the number of consecutive chunks, at least 1 |
//! | 1 | 0..32, 32..64 | group, epoch |
//! | 2 | 0..64 | seq of the first chunk |
//! | 3 | 0..32 | the number of elements in these chunks |
//! | 3 | 32..48 | lag: seq - `have` (PROTOCOL 1) |
//! | 3 | 48..64 | root |
//! | 4 | 0..32 | signature of the operation |
//! | 4 | 32..48, 48..64 | region index of the source, of the destination |
//! | 5 | 0..32, 32..64 | region generation of the source, of the destination |
//! | 6, 7 | 0..48 | offset in bytes in the source region, in the destination region |
//! | 6, 7 | 48..64 | bits 0..16 of the operation's element count, bits 16..32 |
//!
//! The operation's root and element count only serve to describe it in mismatch errors, and saturate. An offset that
//! does not fit saturates as well; it is beyond any region, so the entry is refused as out of bounds.
//!
//! A straggler limit (opcode 3), before the operation's first contribution on the same queue. Word 0 bit 8: the
//! operation completes without the missing ranks; word 1: group and epoch, as in a contribution; word 2: the
//! operation's first seq; word 3: its number of seqs; word 4: the limit in microseconds. It has no completion: whatever
//! is wrong with it is also wrong with the contributions that follow.
//!
//! An admin command, on queue 0. Word 0: the opcode; word 1: a cookie. Then for register (16): the memory's handle, the
//! offset and the length in bytes; for deregister (17): the region key; for fence (18): group and epoch, as in word 1
//! above.
//!
//! A completion has its opcode in bits 0..8 of word 0:
//! - an answer (1). Word 0: bits 8..16 status, 16..32 count, 32..48 window, 48..64 the slowest rank plus one, or 0 if
//!   unknown; words 1 and 2 as in the contribution; word 3: bits 0..32 `stable` - seq as a signed number, 32..64 how
//!   late the slowest rank was, in microseconds;
//! - operations (2), before an answer of mismatch or unsupported. Words 1 and 2: the operations concerned, each packed
//!   by [`pack_op`](crate::wire::pack_op);
//! - half of a set of ranks (3), always followed by the other half. Word 0: bit 16 it is the second half, bits 32..48
//!   the number of the decision to continue without these ranks, or 0 before an answer of [`EntryStatus::Stragglers`];
//!   word 1: the first seq that they do not take part in; words 2 and 3: one bit per rank;
//! - the reply to an admin command (16). Word 0: bits 8..16 status; word 1: the cookie; word 2: the value.
//!
//! The lag fits 16 bits because windows are shorter.
//!
//! Invariant: `parse` is the exact inverse of `emit`. Unused bits must be 0.

mod completion;
mod submission;

pub use completion::CompletionEntry;
pub use submission::{AdminCommand, Contribution, OperationLimit, SubmissionEntry};

use crate::ids::{Epoch, GroupId};

/// The length of a submission entry in words: one cache line.
pub const SUBMISSION_WORDS: usize = 8;

/// The length of a completion entry in words.
pub const COMPLETION_WORDS: usize = 4;

/// The outcome of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum EntryStatus {
    /// The result is at `dst`, or the admin command was carried out.
    Result = 0,
    /// All ranks have contributed, and the result is not wanted here.
    Done = 1,
    /// The entry is malformed, or on the wrong queue.
    Malformed = 16,
    /// The device does not know the group.
    UnknownGroup = 17,
    /// The group is in another epoch.
    StaleEpoch = 18,
    /// A seq is beyond the window.
    Window = 19,
    /// Ranks have called different operations.
    Mismatch = 20,
    /// A region does not exist, or belongs to another rank.
    BadRegion = 21,
    /// A region has been deregistered.
    StaleRegion = 22,
    /// An address range reaches beyond its region.
    OutOfBounds = 23,
    /// An address does not have the alignment that the DMA engine requires.
    Misaligned = 24,
    /// The device supports the operation neither in its DMA engine nor in its kernels.
    Unsupported = 25,
    /// A table of the device is full, or the rank's share of it is.
    NoResources = 26,
    /// A node or a rank in the tree is silent.
    PathLost = 27,
    /// The rank was fenced before the entry completed.
    Fenced = 28,
    /// The DMA engine failed.
    Hardware = 29,
    /// Ranks did not post the operation within its limit, and it fails because of them.
    Stragglers = 30,
    /// The group continues without this rank, which did not post an operation within its limit.
    Excluded = 31,
    /// The rank's regions would exceed its quota of registered bytes.
    Quota = 32,
}

impl EntryStatus {
    /// Every status.
    pub const ALL: [Self; 19] = [
        Self::Result,
        Self::Done,
        Self::Malformed,
        Self::UnknownGroup,
        Self::StaleEpoch,
        Self::Window,
        Self::Mismatch,
        Self::BadRegion,
        Self::StaleRegion,
        Self::OutOfBounds,
        Self::Misaligned,
        Self::Unsupported,
        Self::NoResources,
        Self::PathLost,
        Self::Fenced,
        Self::Hardware,
        Self::Stragglers,
        Self::Excluded,
        Self::Quota,
    ];

    /// Return the status with this wire number, if this version knows it.
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&status| status as u8 == number)
    }
}

/// Why words are not a valid entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// This version does not know the opcode.
    #[error("unknown opcode {0}")]
    Opcode(u8),
    /// A field has an unknown value, or reserved bits are not 0.
    #[error("word {word} of the entry is {value:#x}, which is not valid in this version")]
    Field {
        /// The word's index.
        word: u8,
        /// The word's value.
        value: u64,
    },
}

/// Return `parsed` if its encoding equals the words that it was parsed from.
fn exact<T, const N: usize>(parsed: T, emitted: [u64; N], words: &[u64; N]) -> Result<T, EntryError> {
    match (0..N).find(|&word| emitted[word] != words[word]) {
        None => Ok(parsed),
        Some(word) => Err(EntryError::Field { word: word as u8, value: words[word] }),
    }
}

fn group_epoch(group: GroupId, epoch: Epoch) -> u64 {
    u64::from(group.0) | u64::from(epoch.to_bits()) << 32
}

fn parse_group_epoch(word: u64) -> (GroupId, Epoch) {
    (GroupId(word as u32), Epoch::from_bits((word >> 32) as u32))
}
