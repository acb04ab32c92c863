//! What goes through the queues: 64 bytes to the device, 32 bytes back, in little-endian words.
//!
//! A contribution (opcode 1 by reference, 2 empty):
//!
//! | word | bits | field |
//! |---|---|---|
//! | 0 | 0..8 | opcode |
//! | 0 | 8..16 | flags: 1 the rank wants the result at `dst` |
//! | 0 | 16..24, 24..32, 32..40 | collective, element type, operator; 0 for none |
//! | 0 | 40..48 | bits 32..40 of the operation's elements |
//! | 0 | 48..64 | count: how many chunks in a row, at least 1 |
//! | 1 | 0..32, 32..64 | group, epoch |
//! | 2 | 0..64 | seq of the first chunk |
//! | 3 | 0..32 | elements of all of them |
//! | 3 | 32..48 | lag: seq - `have`; every seq below `have` has landed here (PROTOCOL 1) |
//! | 3 | 48..64 | root |
//! | 4 | 0..32 | signature of the operation |
//! | 4 | 32..48, 48..64 | index of the source's region, of the destination's |
//! | 5 | 0..32, 32..64 | generation of the source's region, of the destination's |
//! | 6, 7 | 0..48 | offset in the source's region, in the destination's, in bytes |
//! | 6, 7 | 48..64 | bits 0..16 of the operation's elements, bits 16..32 |
//!
//! The operation's root and elements are there to name it where ranks differ; what does not fit is told as the most that
//! does. An offset that does not fit is none that a region has, and stays none.
//!
//! How long an operation waits for ranks (3), before its first contribution on the same queue: word 0 bit 8 it goes on
//! without who is missing then; word 1 as of the contribution; word 2 the operation's first seq, word 3 how many seqs it
//! has, word 4 the limit in microseconds. It is not answered: what is wrong with it is wrong with what follows, too.
//!
//! An admin command (on queue 0): word 0 the opcode, word 1 a cookie, then register (16): handle of the memory, offset
//! and length in bytes; deregister (17): the region's key; fence (18): group and epoch as in word 1 above.
//!
//! A completion: word 0 bits 0..8 the opcode, 8..16 the status, 16..32 count, 32..48 window, 48..64 the slowest rank's
//! number and one, 0 if none is known; words 1 and 2 as of the contribution; word 3 bits 0..32 `stable` - seq as a signed
//! number, 32..64 how late the slowest rank was in microseconds. For an admin command (16): words 1 the cookie, 2 the value. Before an answer of
//! mismatch or of what is unsupported, the operations that it speaks of (2): words 1 and 2, each packed by
//! [`pack_op`](crate::wire::pack_op); nothing else in word 0. Half of a set of ranks (3), always followed by the other:
//! word 0 bit 16 it is the second, bits 32..48 the number of the decision to go on without them, or 0 before an answer of
//! [`EntryStatus::Stragglers`]; word 1 the first seq that they have no part in; words 2 and 3 a bit for each rank.
//!
//! By reference there is no `have` of more than 2^16 behind, because windows are shorter; so 16 bits of distance do.
//! Invariant: `parse` gives back what `emit` was given, and takes nothing else: what has no meaning is 0.

use crate::dma::{Address, RegionKey};
use crate::ids::{ChunkNo, Epoch, GroupId, Rank};
use crate::op::{Collective, Dtype, ReduceOp};
use crate::wire::{Limit, RankMask};

/// The words of a submission entry: one cache line.
pub const SUBMISSION_WORDS: usize = 8;

/// The words of a completion entry.
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

/// The highest offset of an entry: 256 TiB, which no region has.
const OFFSET_MAX: u64 = (1 << 48) - 1;

/// The most elements of an operation that an entry tells.
const TOTAL_MAX: u64 = (1 << 40) - 1;

/// What a rank submits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SubmissionEntry {
    /// On a data queue: a contribution to a run of chunks.
    Contribution(Contribution),
    /// On a data queue, before the contributions to the operation.
    Limit(OperationLimit),
    /// On the admin queue.
    Admin {
        /// What its completion is recognised by.
        cookie: u64,
        /// What to do.
        command: AdminCommand,
    },
}

/// A contribution to a run of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contribution {
    /// The group.
    pub group: GroupId,
    /// Its epoch, as the rank knows it.
    pub epoch: Epoch,
    /// The first chunk.
    pub seq: ChunkNo,
    /// How many chunks in a row, at least 1.
    pub count: u16,
    /// The elements of all of them together.
    pub elements: u32,
    /// `seq - have`: how many chunks before this have not landed yet.
    pub lag: u16,
    /// The collective.
    pub collective: Collective,
    /// The element type, `None` for a barrier.
    pub dtype: Option<Dtype>,
    /// The operator, `None` for a barrier.
    pub op: Option<ReduceOp>,
    /// The root, to name the operation.
    pub root: Rank,
    /// The elements of the whole operation, to name it.
    pub total: u64,
    /// The operation's signature.
    pub signature: u32,
    /// Where the rank's data is; `None` if it has nothing to add (`Empty`).
    pub src: Option<Address>,
    /// Where the result goes; `None` if the rank does not want it.
    pub dst: Option<Address>,
}

/// How long an operation waits for ranks to come to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperationLimit {
    /// The group.
    pub group: GroupId,
    /// Its epoch, as the rank knows it.
    pub epoch: Epoch,
    /// The operation's first chunk.
    pub seq: ChunkNo,
    /// How many chunks it has.
    pub chunks: u64,
    /// How long, and what then.
    pub limit: Limit,
}

/// What only the admin queue takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdminCommand {
    /// Let the device reach memory that was handed over before; the completion's value is the region's key.
    Register {
        /// The name that the memory was handed over with.
        handle: u64,
        /// Where the region begins in it.
        offset_bytes: u64,
        /// How long the region is.
        len_bytes: u64,
    },
    /// Take a region back. It completes when nothing in flight uses the region any more.
    Deregister {
        /// The region.
        region: RegionKey,
    },
    /// Let go of this rank's memory in an epoch of a group: it completes when nothing that the rank has submitted there
    /// can read or write any more (PROTOCOL 6). The rank takes no further part; the others go on without it.
    Fence {
        /// The group.
        group: GroupId,
        /// The epoch.
        epoch: Epoch,
    },
}

/// How an entry ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum EntryStatus {
    /// The result is at `dst`; or the admin command is done.
    Result = 0,
    /// Everybody has contributed, and nobody below wants the result.
    Done = 1,
    /// The entry is malformed, or on a queue that does not take it.
    Malformed = 16,
    /// The device does not know the group.
    UnknownGroup = 17,
    /// The group is of another epoch.
    StaleEpoch = 18,
    /// A seq is beyond the window.
    Window = 19,
    /// Ranks have called different operations.
    Mismatch = 20,
    /// A region does not exist, or is not the rank's.
    BadRegion = 21,
    /// A region has been deregistered.
    StaleRegion = 22,
    /// A reference reaches beyond its region.
    OutOfBounds = 23,
    /// The engine asks for another alignment.
    Misaligned = 24,
    /// The device's engine and kernels do not have the operation.
    Unsupported = 25,
    /// A table of the device is full, or the rank has its share.
    NoRoom = 26,
    /// A node or a rank on the way is silent.
    PathLost = 27,
    /// A fence came first.
    Fenced = 28,
    /// The engine failed.
    Hardware = 29,
    /// Ranks did not come to the operation within its limit, and it has no result without them.
    Stragglers = 30,
    /// The group goes on without this rank, which did not come to an operation within its limit.
    Excluded = 31,
    /// The rank's regions would have more bytes, together, than the device lets a rank have.
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
        Self::NoRoom,
        Self::PathLost,
        Self::Fenced,
        Self::Hardware,
        Self::Stragglers,
        Self::Excluded,
        Self::Quota,
    ];

    /// Return the status of a number, if this version knows it.
    pub fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&status| status as u8 == number)
    }
}

/// What a device answers; each entry that was submitted is answered once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompletionEntry {
    /// To a contribution, or to a part of its run.
    Answer {
        /// How it ended.
        status: EntryStatus,
        /// The group.
        group: GroupId,
        /// The device's epoch of the group.
        epoch: Epoch,
        /// The first chunk.
        seq: ChunkNo,
        /// How many chunks in a row.
        count: u16,
        /// How many chunks may be in flight (PROTOCOL 3).
        window: u16,
        /// Every seq below has landed at every rank. It travels as its distance from `seq`, of 2^31 at most.
        stable: ChunkNo,
        /// Which rank was the last to contribute to `seq`, and how many microseconds after the first; of the first 65,535
        /// ranks.
        slowest: Option<(Rank, u32)>,
    },
    /// To an admin command.
    Admin {
        /// How it ended.
        status: EntryStatus,
        /// The command's cookie.
        cookie: u64,
        /// What it gave: the key of a region.
        value: u64,
    },
    /// To nothing: which operations the next answer of [`EntryStatus::Mismatch`] or [`EntryStatus::Unsupported`] speaks
    /// of, each packed by [`pack_op`](crate::wire::pack_op).
    Operations {
        /// The operation that is unsupported, or that was called first.
        first: u64,
        /// Another that was called.
        other: u64,
    },
    /// To nothing: one half of a set of ranks that did not come to an operation; see [`CompletionEntry::missing`].
    Missing {
        /// The number of the decision to go on without them, from 1 on; 0: the next answer of
        /// [`EntryStatus::Stragglers`] speaks of them.
        decision: u16,
        /// The half for ranks from 128 on, which comes behind the other.
        second: bool,
        /// The first chunk that they have no part in.
        seq: ChunkNo,
        /// The half.
        ranks: [u64; 2],
    },
}

/// Why words are no entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// The opcode is none of this version's.
    #[error("opcode {0} is unknown")]
    Opcode(u8),
    /// A field holds what this version does not know, or bits that must be 0 are not.
    #[error("word {word} of the entry, {value:#x}, has bits that no entry of this version has")]
    Field {
        /// The word's index.
        word: u8,
        /// What it holds.
        value: u64,
    },
}

/// Compare what was parsed, emitted again, with what came.
fn exact<T, const N: usize>(parsed: T, emitted: [u64; N], words: &[u64; N]) -> Result<T, EntryError> {
    match (0..N).find(|&word| emitted[word] != words[word]) {
        None => Ok(parsed),
        Some(word) => Err(EntryError::Field { word: word as u8, value: words[word] }),
    }
}

impl SubmissionEntry {
    /// Return the words that travel.
    pub fn emit(&self) -> [u64; SUBMISSION_WORDS] {
        match *self {
            Self::Contribution(contribution) => contribution.emit(),
            Self::Limit(OperationLimit { group, epoch, seq, chunks, limit }) => {
                let head = u64::from(LIMIT) | if limit.cuts { CUTS } else { 0 };
                [head, view(group, epoch), seq.0, chunks, limit.us.into(), 0, 0, 0]
            }
            Self::Admin { cookie, command } => {
                let (opcode, arguments) = match command {
                    AdminCommand::Register { handle, offset_bytes, len_bytes } => {
                        (REGISTER, [handle, offset_bytes, len_bytes])
                    }
                    AdminCommand::Deregister { region } => (DEREGISTER, [region.to_bits(), 0, 0]),
                    AdminCommand::Fence { group, epoch } => (FENCE, [view(group, epoch), 0, 0]),
                };
                [u64::from(opcode), cookie, arguments[0], arguments[1], arguments[2], 0, 0, 0]
            }
        }
    }

    /// Read an entry from the words that travel.
    ///
    /// # Errors
    /// [`EntryError`], if no entry of this version has these words.
    pub fn parse(words: &[u64; SUBMISSION_WORDS]) -> Result<Self, EntryError> {
        let admin = |command| Self::Admin { cookie: words[1], command };
        let entry = match words[0] as u8 {
            REFERENCE | EMPTY => Self::Contribution(Contribution::parse(words)?),
            LIMIT => {
                let (group, epoch) = from_view(words[1]);
                let limit = Limit { us: words[4] as u32, cuts: words[0] & CUTS != 0 };
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
                let (group, epoch) = from_view(words[2]);
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
            view(self.group, self.epoch),
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
        let (group, epoch) = from_view(words[1]);
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
    /// Return what tells of ranks that have no part in `seq` and what follows it, in this order.
    pub fn missing(decision: u16, seq: ChunkNo, ranks: &RankMask) -> [Self; 2] {
        let [first, second] = ranks.halves();
        [(false, first), (true, second)].map(|(second, ranks)| Self::Missing { decision, second, seq, ranks })
    }

    /// Return the words that travel.
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
                [head(ANSWER, status) | run, view(group, epoch), seq.0, ahead]
            }
            Self::Admin { status, cookie, value } => [head(ADMIN, status), cookie, value, 0],
            Self::Operations { first, other } => [u64::from(OPERATIONS), first, other, 0],
            Self::Missing { decision, second, seq, ranks: [low, high] } => {
                let head = u64::from(MISSING) | if second { SECOND } else { 0 } | u64::from(decision) << 32;
                [head, seq.0, low, high]
            }
        }
    }

    /// Read an entry from the words that travel.
    ///
    /// # Errors
    /// [`EntryError`], if no entry of this version has these words.
    pub fn parse(words: &[u64; COMPLETION_WORDS]) -> Result<Self, EntryError> {
        let head = words[0];
        let status = EntryStatus::from_wire((head >> 8) as u8).ok_or(EntryError::Field { word: 0, value: head })?;
        let entry = match head as u8 {
            ANSWER => {
                let (group, epoch) = from_view(words[1]);
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

fn view(group: GroupId, epoch: Epoch) -> u64 {
    u64::from(group.0) | u64::from(epoch.to_bits()) << 32
}

fn from_view(word: u64) -> (GroupId, Epoch) {
    (GroupId(word as u32), Epoch::from_bits((word >> 32) as u32))
}
