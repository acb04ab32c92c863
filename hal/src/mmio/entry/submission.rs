//! Submission entries: contributions, straggler limits and admin commands.

use super::{EntryError, SUBMISSION_WORDS, exact, group_epoch, parse_group_epoch};
use crate::dma::{Address, RegionKey};
use crate::ids::{ChunkNo, Epoch, GroupId, Rank};
use crate::op::{Collective, Dtype, ReduceOp};
use crate::wire::StragglerLimit;

const REFERENCE: u8 = 1;
const EMPTY: u8 = 2;
const LIMIT: u8 = 3;
const REGISTER: u8 = 16;
const DEREGISTER: u8 = 17;
const FENCE: u8 = 18;

const WANT: u64 = 1 << 8;
const CUTS: u64 = 1 << 8;

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
