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

use crate::dma::{Address, RegionKey};
use crate::ids::{ChunkNo, Epoch, GroupId, Rank};
use crate::op::{Collective, Dtype, ReduceOp};
use crate::wire::{RankMask, StragglerLimit};

/// The length of a submission entry in words: one cache line.
pub const SUBMISSION_WORDS: usize = 8;

/// The length of a completion entry in words.
pub const COMPLETION_WORDS: usize = 4;

const REFERENCE: u8 = 1;
const EMPTY: u8 = 2;
const LIMIT: u8 = 3;
const REGISTER: u8 = 16;
const DEREGISTER: u8 = 17;
const FENCE: u8 = 18;

const WANT: u64 = 1 << 8;
const CUTS: u64 = 1 << 8;
const SECOND: u64 = 1 << 16;

/// The largest offset in an entry: 256 TiB, beyond any region.
const OFFSET_MAX: u64 = (1 << 48) - 1;

/// The largest element count of an operation in an entry.
const TOTAL_MAX: u64 = (1 << 40) - 1;

/// An entry that a rank submits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmissionEntry {
    /// On a data queue: a contribution to a run of chunks.
    Contribution(Contribution),
    /// On a data queue, before the operation's contributions: its straggler limit.
    Limit(OperationLimit),
    /// On the admin queue: a command.
    Admin {
        /// Identifies the command's completion.
        cookie: u64,
        /// The command.
        command: AdminCommand,
    },
}

/// A contribution to a run of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contribution {
    /// The group.
    pub group: GroupId,
    /// The group's epoch at the rank.
    pub epoch: Epoch,
    /// The first chunk.
    pub seq: ChunkNo,
    /// The number of consecutive chunks, at least 1.
    pub count: u16,
    /// The number of elements in all of them.
    pub elements: u32,
    /// `seq - have`: the number of chunks before `seq` that have not all landed.
    pub lag: u16,
    /// The collective.
    pub collective: Collective,
    /// The element type, `None` for a barrier.
    pub dtype: Option<Dtype>,
    /// The operator, `None` for a barrier.
    pub op: Option<ReduceOp>,
    /// The operation's root, for mismatch errors.
    pub root: Rank,
    /// The number of elements of the whole operation, for mismatch errors.
    pub total: u64,
    /// The operation's signature.
    pub signature: u32,
    /// Where the rank's data is; `None` if it has nothing to contribute (`Empty`).
    pub src: Option<Address>,
    /// Where the result goes; `None` if the rank does not want it.
    pub dst: Option<Address>,
}

/// The straggler limit of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperationLimit {
    /// The group.
    pub group: GroupId,
    /// The group's epoch at the rank.
    pub epoch: Epoch,
    /// The operation's first chunk.
    pub seq: ChunkNo,
    /// The operation's number of chunks.
    pub chunks: u64,
    /// The limit.
    pub limit: StragglerLimit,
}

/// A command on the admin queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdminCommand {
    /// Register memory that was passed to the device before. The completion's value is the region key.
    Register {
        /// The handle under which the memory was passed.
        handle: u64,
        /// Where the region starts in the memory.
        offset_bytes: u64,
        /// The length of the region in bytes.
        len_bytes: u64,
    },
    /// Deregister a region. Completes when nothing in flight uses the region.
    Deregister {
        /// The region.
        region: RegionKey,
    },
    /// Fence this rank's memory in an epoch of a group (PROTOCOL 6). Completes when no entry that the rank has
    /// submitted there can read or write memory. The rank no longer takes part in the group; the other ranks are not
    /// affected.
    Fence {
        /// The group.
        group: GroupId,
        /// The epoch.
        epoch: Epoch,
    },
}

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

impl SubmissionEntry {
    /// Return the entry's words.
    pub fn emit(&self) -> [u64; SUBMISSION_WORDS] {
        match *self {
            Self::Contribution(contribution) => contribution.emit(),
            Self::Limit(OperationLimit { group, epoch, seq, chunks, limit }) => {
                let head = u64::from(LIMIT) | if limit.cuts { CUTS } else { 0 };
                [head, group_epoch(group, epoch), seq.0, chunks, limit.us.into(), 0, 0, 0]
            }
            Self::Admin { cookie, command } => {
                let (opcode, arguments) = match command {
                    AdminCommand::Register { handle, offset_bytes, len_bytes } => {
                        (REGISTER, [handle, offset_bytes, len_bytes])
                    }
                    AdminCommand::Deregister { region } => (DEREGISTER, [region.to_bits(), 0, 0]),
                    AdminCommand::Fence { group, epoch } => (FENCE, [group_epoch(group, epoch), 0, 0]),
                };
                [u64::from(opcode), cookie, arguments[0], arguments[1], arguments[2], 0, 0, 0]
            }
        }
    }

    /// Parse an entry from its words.
    ///
    /// # Errors
    /// [`EntryError`] if the words are not a valid entry of this version.
    pub fn parse(words: &[u64; SUBMISSION_WORDS]) -> Result<Self, EntryError> {
        let admin = |command| Self::Admin { cookie: words[1], command };
        let entry = match words[0] as u8 {
            REFERENCE | EMPTY => Self::Contribution(Contribution::parse(words)?),
            LIMIT => {
                let (group, epoch) = parse_group_epoch(words[1]);
                let limit = StragglerLimit { us: words[4] as u32, cuts: words[0] & CUTS != 0 };
                Self::Limit(OperationLimit { group, epoch, seq: ChunkNo(words[2]), chunks: words[3], limit })
            }
            REGISTER => admin(AdminCommand::Register { handle: words[2], offset_bytes: words[3], len_bytes: words[4] }),
            DEREGISTER => {
                let region = RegionKey::from_bits(words[2]);
                admin(AdminCommand::Deregister {
                    region: region.ok_or(EntryError::Field { word: 2, value: words[2] })?,
                })
            }
            FENCE => {
                let (group, epoch) = parse_group_epoch(words[2]);
                admin(AdminCommand::Fence { group, epoch })
            }
            opcode => return Err(EntryError::Opcode(opcode)),
        };
        exact(entry, entry.emit(), words)
    }
}

impl Contribution {
    fn emit(&self) -> [u64; SUBMISSION_WORDS] {
        let opcode = if self.src.is_some() { REFERENCE } else { EMPTY };
        let (src, dst) = (self.src.unwrap_or_default(), self.dst.unwrap_or_default());
        let total = self.total.min(TOTAL_MAX);
        let offset = |address: Address| address.offset_bytes.min(OFFSET_MAX);
        let head = u64::from(opcode)
            | total >> 32 << 40
            | if self.dst.is_some() { WANT } else { 0 }
            | u64::from(self.collective.to_wire()) << 16
            | u64::from(self.dtype.map_or(0, Dtype::to_wire)) << 24
            | u64::from(self.op.map_or(0, ReduceOp::to_wire)) << 32
            | u64::from(self.count) << 48;
        let regions = u64::from(src.region.index) << 32 | u64::from(dst.region.index) << 48;
        [
            head,
            group_epoch(self.group, self.epoch),
            self.seq.0,
            u64::from(self.elements) | u64::from(self.lag) << 32 | u64::from(self.root.0.min(0xffff)) << 48,
            u64::from(self.signature) | regions,
            u64::from(src.region.generation) | u64::from(dst.region.generation) << 32,
            offset(src) | total << 48,
            offset(dst) | total >> 16 << 48,
        ]
    }

    fn parse(words: &[u64; SUBMISSION_WORDS]) -> Result<Self, EntryError> {
        let head = words[0];
        let unknown = EntryError::Field { word: 0, value: head };
        let (group, epoch) = parse_group_epoch(words[1]);
        let address = |index: u64, generation: u64, offset: u64| Address {
            region: RegionKey { index: index as u16, generation: generation as u32 },
            offset_bytes: offset & OFFSET_MAX,
        };
        let src = address(words[4] >> 32, words[5], words[6]);
        let dst = address(words[4] >> 48, words[5] >> 32, words[7]);
        let known = |number: u8, known: bool| if number == 0 || known { Ok(()) } else { Err(unknown) };
        let (dtype, op) = ((head >> 24) as u8, (head >> 32) as u8);
        known(dtype, Dtype::from_wire(dtype).is_some())?;
        known(op, ReduceOp::from_wire(op).is_some())?;
        let count = (head >> 48) as u16;
        if count == 0 {
            return Err(unknown);
        }
        Ok(Self {
            group,
            epoch,
            seq: ChunkNo(words[2]),
            count,
            elements: words[3] as u32,
            lag: (words[3] >> 32) as u16,
            collective: Collective::from_wire((head >> 16) as u8).ok_or(unknown)?,
            dtype: Dtype::from_wire(dtype),
            op: ReduceOp::from_wire(op),
            root: Rank((words[3] >> 48) as u32),
            total: words[6] >> 48 | words[7] >> 48 << 16 | (head >> 40 & 0xff) << 32,
            signature: words[4] as u32,
            src: (head as u8 == REFERENCE).then_some(src),
            dst: (head & WANT != 0).then_some(dst),
        })
    }
}

const ANSWER: u8 = 1;
const OPERATIONS: u8 = 2;
const MISSING: u8 = 3;
const ADMIN: u8 = 16;

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

fn group_epoch(group: GroupId, epoch: Epoch) -> u64 {
    u64::from(group.0) | u64::from(epoch.to_bits()) << 32
}

fn parse_group_epoch(word: u64) -> (GroupId, Epoch) {
    (GroupId(word as u32), Epoch::from_bits((word >> 32) as u32))
}
