//! Completion entries: answers, their supplements, and replies to admin commands.

use super::{COMPLETION_WORDS, EntryError, EntryStatus, exact, group_epoch, parse_group_epoch};
use crate::ids::{ChunkNo, Epoch, GroupId, Rank};
use crate::wire::RankMask;

const ANSWER: u8 = 1;
const OPERATIONS: u8 = 2;
const MISSING: u8 = 3;
const ADMIN: u8 = 16;

const SECOND: u64 = 1 << 16;

/// A completion from a device. Each contribution's chunks and each admin command are completed exactly once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionEntry {
    /// Completes a contribution, or a part of its run.
    Answer {
        /// The outcome.
        status: EntryStatus,
        /// The group.
        group: GroupId,
        /// The device's epoch of the group.
        epoch: Epoch,
        /// The first chunk.
        seq: ChunkNo,
        /// The number of consecutive chunks.
        count: u16,
        /// The granted window, in chunks (PROTOCOL 3).
        window: u16,
        /// Every seq below has landed at every rank. Encoded as the distance from `seq`, clamped to 32 bits.
        stable: ChunkNo,
        /// The last rank to contribute to `seq`, and how many microseconds after the first. Only for the first 65,535
        /// ranks.
        slowest: Option<(Rank, u32)>,
    },
    /// Completes an admin command.
    Admin {
        /// The outcome.
        status: EntryStatus,
        /// The command's cookie.
        cookie: u64,
        /// The command's value: for a registration, the region key.
        value: u64,
    },
    /// Completes nothing; names the operations of the next answer of [`EntryStatus::Mismatch`] or
    /// [`EntryStatus::Unsupported`], each packed by [`pack_op`](crate::wire::pack_op).
    Operations {
        /// The operation that is unsupported, or that was called first.
        first: u64,
        /// A different operation that was called.
        other: u64,
    },
    /// Completes nothing; one half of a set of ranks that did not post an operation in time. See
    /// [`CompletionEntry::missing`].
    Missing {
        /// The number of the decision to continue without them, counted from 1. 0: they are the ranks of the next
        /// answer of [`EntryStatus::Stragglers`].
        decision: u16,
        /// Whether this is the second half: ranks from 128 on.
        second: bool,
        /// The first chunk that they do not take part in.
        seq: ChunkNo,
        /// The half of the set, see [`RankMask::halves`].
        ranks: [u64; 2],
    },
}

impl CompletionEntry {
    /// Return the two entries, in order, that report that `ranks` take no part from `seq` on.
    pub fn missing(decision: u16, seq: ChunkNo, ranks: &RankMask) -> [Self; 2] {
        let [first, second] = ranks.halves();
        [(false, first), (true, second)].map(|(second, ranks)| Self::Missing { decision, second, seq, ranks })
    }

    /// Return the entry's words.
    pub fn emit(&self) -> [u64; COMPLETION_WORDS] {
        let head = |opcode: u8, status: EntryStatus| u64::from(opcode) | u64::from(status as u8) << 8;
        match *self {
            Self::Answer { status, group, epoch, seq, count, window, stable, slowest } => {
                let named = slowest.and_then(|(rank, late_us)| Some((u16::try_from(rank.0 + 1).ok()?, late_us)));
                let (rank, late_us) = named.unwrap_or_default();
                let run = u64::from(count) << 16 | u64::from(window) << 32 | u64::from(rank) << 48;
                let behind = stable.0.wrapping_sub(seq.0) as i64;
                let behind = behind.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
                let ahead = u64::from(late_us) << 32 | u64::from(behind as u32);
                [head(ANSWER, status) | run, group_epoch(group, epoch), seq.0, ahead]
            }
            Self::Admin { status, cookie, value } => [head(ADMIN, status), cookie, value, 0],
            Self::Operations { first, other } => [u64::from(OPERATIONS), first, other, 0],
            Self::Missing { decision, second, seq, ranks: [low, high] } => {
                let head = u64::from(MISSING) | if second { SECOND } else { 0 } | u64::from(decision) << 32;
                [head, seq.0, low, high]
            }
        }
    }

    /// Parse an entry from its words.
    ///
    /// # Errors
    /// [`EntryError`] if the words are not a valid entry of this version.
    pub fn parse(words: &[u64; COMPLETION_WORDS]) -> Result<Self, EntryError> {
        let head = words[0];
        let status = EntryStatus::from_wire((head >> 8) as u8).ok_or(EntryError::Field { word: 0, value: head })?;
        let entry = match head as u8 {
            ANSWER => {
                let (group, epoch) = parse_group_epoch(words[1]);
                Self::Answer {
                    status,
                    group,
                    epoch,
                    seq: ChunkNo(words[2]),
                    count: (head >> 16) as u16,
                    window: (head >> 32) as u16,
                    stable: ChunkNo(words[2].wrapping_add(i64::from(words[3] as u32 as i32) as u64)),
                    slowest: ((head >> 48) as u32).checked_sub(1).map(|rank| (Rank(rank), (words[3] >> 32) as u32)),
                }
            }
            ADMIN => Self::Admin { status, cookie: words[1], value: words[2] },
            OPERATIONS => Self::Operations { first: words[1], other: words[2] },
            MISSING => Self::Missing {
                decision: (head >> 32) as u16,
                second: head & SECOND != 0,
                seq: ChunkNo(words[1]),
                ranks: [words[2], words[3]],
            },
            opcode => return Err(EntryError::Opcode(opcode)),
        };
        exact(entry, entry.emit(), words)
    }
}
