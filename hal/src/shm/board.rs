//! A board in shared memory: each process of a group posts bytes for all others, round by round.
//!
//! A round costs each process one cache line of its own and one of each other process, where what it posts is short:
//! nothing is sent to each of them. MPI libraries run small collectives that way (Graham and Shipman, "MPI support for
//! multi-core architectures", EuroPVM/MPI 2008; Open MPI's `coll/sm` and `coll/xhc`).
//!
//! Each member has some cells, which its rounds use in turn; [`cells`] has their layout. Rounds count from 1. The rules
//! are generic over the memory, so that the tests try every interleaving of two members ([`interleavings`]).
//!
//! Invariants:
//! - A cell is written again only when all members are done with its round, so a correct member reads what was posted.
//! - A description is that of its round, also for a member that is done with the round and looks back: while the cell
//!   is written, it has no round.
//! - What a process that breaks the rules writes is read as bytes, and corrupts values only.

mod cells;
#[cfg(test)]
mod interleavings;

use super::MemoryError;
use cells::{Cells, DESCRIPTION_BYTES};
use std::os::fd::{BorrowedFd, OwnedFd};

/// Why the memory of a board could not be created or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BoardError {
    /// Its memory could not be allocated or mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// There are too few or too many members.
    #[error("a board is for 2 to {} members, not {members}", Board::MEMBERS_MAX)]
    Members {
        /// The number of members.
        members: u32,
    },
    /// The memory has another length than that of a board for so many members.
    #[error("{len_bytes} bytes are no board for {members} members")]
    Length {
        /// The length of the memory in bytes.
        len_bytes: usize,
        /// The number of members.
        members: u32,
    },
}

/// The memory of a board.
pub trait BoardMemory {
    /// The number of cells of a member.
    const CELLS: u64;

    /// A cell.
    type Cell<'m>: BoardCell
    where
        Self: 'm;

    /// Return a cell of a member.
    ///
    /// # Panics
    /// If there is no such member.
    #[track_caller]
    fn cell(&self, member: u32, index: usize) -> Self::Cell<'_>;

    /// Load the last round that a member is done with, with acquire ordering.
    fn done(&self, member: u32) -> u64;

    /// Publish that a member is done with a round, with release ordering.
    fn set_done(&self, member: u32, round: u64);
}

/// A cell of a member.
pub trait BoardCell {
    /// Load its round, with acquire ordering; 0 while it is written.
    fn round(&self) -> u64;

    /// Load its round, after all that was loaded before.
    fn round_after_loads(&self) -> u64;

    /// Take its round away, before all that is stored afterwards.
    fn clear_round(&self);

    /// Publish it, with release ordering.
    fn set_round(&self, round: u64);

    /// Load its tag.
    fn tag(&self) -> u64;

    /// Store its tag.
    fn set_tag(&self, tag: u64);

    /// Load its description. Another member may write it meanwhile.
    fn description(&self) -> [u8; DESCRIPTION_BYTES];

    /// Store its description.
    fn set_description(&self, description: &[u8; DESCRIPTION_BYTES]);

    /// Load what was posted in it, from byte `start` on.
    fn read(&self, start: usize, bytes: &mut [u8]);

    /// Store what is posted in it.
    fn write(&self, bytes: &[u8]);
}

/// One member's view of a board.
#[derive(Debug)]
pub struct Board<M = Cells> {
    memory: M,
    members: u32,
    own: u32,
    /// The current round.
    round: u64,
    /// All members are done with this round, and those before.
    all_done: u64,
}

impl Board {
    /// The maximum number of bytes that a member can post.
    pub const CAPACITY_BYTES: usize = 8192;

    /// The number of rounds that a member may be ahead of the slowest.
    pub const ROUNDS_AHEAD: u64 = 4;

    /// The maximum number of members.
    pub const MEMBERS_MAX: u32 = 64;

    /// Create a board, as member 0.
    ///
    /// # Errors
    /// [`BoardError`].
    pub fn create(members: u32) -> Result<Self, BoardError> {
        Ok(Self::on(Cells::create(members)?, members, 0))
    }

    /// Open a board that another process has created, as member `own`.
    ///
    /// # Errors
    /// [`BoardError`].
    ///
    /// # Panics
    /// If there are not more than `own` members.
    #[track_caller]
    pub fn open(file: OwnedFd, members: u32, own: u32) -> Result<Self, BoardError> {
        assert!(own < members, "member {own} of {members}");
        Ok(Self::on(Cells::open(file, members)?, members, own))
    }

    /// Return the descriptor to hand over.
    ///
    /// # Panics
    /// If this member opened the board.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }
}

impl<M: BoardMemory> Board<M> {
    const fn on(memory: M, members: u32, own: u32) -> Self {
        Self { memory, members, own, round: 1, all_done: 0 }
    }

    /// Return whether this member's cell is free: all are done with what it posted there before.
    #[inline]
    pub fn can_post(&mut self) -> bool {
        self.is_free() || self.is_free_now()
    }

    /// Return whether this member's cell was free when it last looked.
    #[inline]
    const fn is_free(&self) -> bool {
        self.all_done.saturating_add(M::CELLS) >= self.round
    }

    fn is_free_now(&mut self) -> bool {
        let done = |member| self.memory.done(member);
        // A member that is ahead of this one does not exist; one that says so breaks the rules, and harms itself.
        self.all_done = (0..self.members).filter(|member| *member != self.own).map(done).min().unwrap_or(0);
        self.is_free()
    }

    /// Post bytes in this round, if the cell is free. Returns whether it was. A member posts at most once a round.
    ///
    /// # Panics
    /// If there are more than [`Board::CAPACITY_BYTES`].
    #[inline]
    #[track_caller]
    pub fn post(&mut self, tag: u64, description: &[u8; DESCRIPTION_BYTES], bytes: &[u8]) -> bool {
        assert!(bytes.len() <= Board::CAPACITY_BYTES, "{} bytes exceed a cell", bytes.len());
        if !self.can_post() {
            return false;
        }
        let cell = self.cell(self.own, self.round);
        cell.clear_round();
        cell.set_description(description);
        cell.write(bytes);
        cell.set_tag(tag);
        cell.set_round(self.round);
        true
    }

    /// Return the tag of what a member has posted in this round.
    ///
    /// # Panics
    /// If there is no such member.
    #[inline]
    #[track_caller]
    pub fn tag_of(&self, member: u32) -> Option<u64> {
        let cell = self.cell(member, self.round);
        (cell.round() == self.round).then(|| cell.tag())
    }

    /// Return whether a member has posted in the round so many after this one: it may be ahead of this member by
    /// [`Board::ROUNDS_AHEAD`].
    ///
    /// # Panics
    /// If there is no such member.
    #[inline]
    #[track_caller]
    pub fn has_posted(&self, member: u32, rounds: u64) -> bool {
        let round = self.round.saturating_add(rounds);
        rounds < M::CELLS && self.cell(member, round).round() == round
    }

    /// Read what a member has posted in this round, from byte `start` of it on.
    ///
    /// # Panics
    /// If there is no such member, or it is more than a cell holds.
    #[inline]
    #[track_caller]
    pub fn read(&self, member: u32, start: usize, bytes: &mut [u8]) {
        let fits = start.checked_add(bytes.len()).is_some_and(|end| end <= Board::CAPACITY_BYTES);
        assert!(fits, "{} bytes from {start} on exceed a cell", bytes.len());
        self.cell(member, self.round).read(start, bytes);
    }

    /// Return the description of what a member has posted in this round, or so many rounds `before` it. `None` if it
    /// has posted nothing in that round, or its cell was written again.
    ///
    /// # Panics
    /// If there is no such member.
    #[track_caller]
    pub fn description_of(&self, member: u32, before: u64) -> Option<[u8; DESCRIPTION_BYTES]> {
        let round = self.round.checked_sub(before).filter(|round| *round > 0)?;
        let cell = self.cell(member, round);
        if cell.round() != round {
            return None;
        }
        let description = cell.description();
        (cell.round_after_loads() == round).then_some(description)
    }

    /// End this round, once everything is read. `all_posted`: this member has seen a post of each other one.
    #[inline]
    pub fn finish_round(&mut self, all_posted: bool) {
        self.memory.set_done(self.own, self.round);
        if all_posted {
            // Who has posted in this round is done with the one before.
            self.all_done = self.all_done.max(self.round - 1);
        }
        self.round += 1;
    }

    #[inline]
    #[track_caller]
    fn cell(&self, member: u32, round: u64) -> M::Cell<'_> {
        assert!(member < self.members, "member {member} of {}", self.members);
        self.memory.cell(member, (round % M::CELLS) as usize)
    }
}
