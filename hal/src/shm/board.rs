//! A board in shared memory: each process of a group posts bytes for all others, round by round.
//!
//! A round costs each process one cache line of its own and one of each other process, where what it posts is short:
//! nothing is sent to each of them. MPI libraries run small collectives that way (Graham and Shipman, "MPI support for
//! multi-core architectures", EuroPVM/MPI 2008; Open MPI's `coll/sm` and `coll/xhc`).
//!
//! | bytes of a member's part | |
//! |---|---|
//! | 0..8 | the last round that it is done with |
//! | 128.. | [`ROUNDS`] cells, which its rounds use in turn |
//!
//! | bytes of a cell | |
//! |---|---|
//! | 0..8 | the round; stored last |
//! | 8..16 | tag |
//! | 16.. | what is posted, at most [`Board::CAPACITY_BYTES`] |
//! | the last 64 | a description, which others read if the tag is not what they expect |
//!
//! All numbers are little-endian. Rounds count from 1.
//!
//! Invariants:
//! - A cell is written again only when all members are done with its round, so a correct member reads what was posted.
//! - What a process that breaks the rules writes is read as bytes, and corrupts values only.

use super::{BarMemory, MemoryError};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The number of rounds that a member may be ahead of the slowest.
const ROUNDS: u64 = Board::ROUNDS_AHEAD;

/// Processors fetch lines in pairs.
const LINES_BYTES: usize = 128;

/// Where a cell's bytes begin.
const BYTES_AT: usize = 16;

/// The length of a description in bytes.
const DESCRIPTION_BYTES: usize = 64;

const CELL_BYTES: usize = (BYTES_AT + Board::CAPACITY_BYTES + DESCRIPTION_BYTES).next_multiple_of(LINES_BYTES);

const MEMBER_BYTES: usize = LINES_BYTES + ROUNDS as usize * CELL_BYTES;

/// From here on, copying takes fewer instructions than storing words.
const WORDS_MAX_BYTES: usize = 128;

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

/// One member's view of a board.
#[derive(Debug)]
pub struct Board {
    memory: BarMemory,
    members: u32,
    own: u32,
    /// The current round.
    round: u64,
    /// All members are done with this round, and those before.
    all_done: u64,
}

impl Board {
    /// The maximum number of bytes that a member can post.
    pub const CAPACITY_BYTES: usize = 2048;

    /// The number of rounds that a member may be ahead of the slowest.
    pub const ROUNDS_AHEAD: u64 = 4;

    /// The maximum number of members.
    pub const MEMBERS_MAX: u32 = 64;

    /// Create a board, as member 0.
    ///
    /// # Errors
    /// [`BoardError`].
    pub fn create(members: u32) -> Result<Self, BoardError> {
        let memory = BarMemory::create(len_bytes(members)?)?;
        Ok(Self { memory, members, own: 0, round: 1, all_done: 0 })
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
        let memory = BarMemory::open(file, len_bytes(Self::MEMBERS_MAX)? as u64)?;
        let found = size_of_val(memory.words());
        if found != len_bytes(members)? {
            return Err(BoardError::Length { len_bytes: found, members });
        }
        Ok(Self { memory, members, own, round: 1, all_done: 0 })
    }

    /// Return the descriptor to hand over.
    ///
    /// # Panics
    /// If this member opened the board.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    /// Return whether this member's cell is free: all are done with what it posted there before.
    pub fn can_post(&mut self) -> bool {
        if self.all_done + ROUNDS < self.round {
            let done = |member| u64::from_le(self.done(member).load(Ordering::Acquire));
            // A member that is ahead of this one does not exist; one that says so breaks the rules, and harms itself.
            self.all_done = (0..self.members).filter(|member| *member != self.own).map(done).min().unwrap_or(0);
        }
        self.all_done.saturating_add(ROUNDS) >= self.round
    }

    /// Post bytes in this round, if the cell is free. Returns whether it was. A member posts at most once a round.
    ///
    /// # Panics
    /// If there are more than [`Board::CAPACITY_BYTES`].
    #[track_caller]
    pub fn post(&mut self, tag: u64, description: &[u8; DESCRIPTION_BYTES], bytes: &[u8]) -> bool {
        assert!(bytes.len() <= Self::CAPACITY_BYTES, "{} bytes exceed a cell", bytes.len());
        if !self.can_post() {
            return false;
        }
        let cell = self.cell_at(self.own);
        self.write(cell + CELL_BYTES - DESCRIPTION_BYTES, description);
        self.write(cell + BYTES_AT, bytes);
        self.word(cell + 8).store(tag.to_le(), Ordering::Relaxed);
        self.word(cell).store(self.round.to_le(), Ordering::Release);
        true
    }

    /// Return the tag of what a member has posted in this round.
    ///
    /// # Panics
    /// If there is no such member.
    #[track_caller]
    pub fn tag_of(&self, member: u32) -> Option<u64> {
        let cell = self.cell_at(member);
        let is_posted = u64::from_le(self.word(cell).load(Ordering::Acquire)) == self.round;
        is_posted.then(|| u64::from_le(self.word(cell + 8).load(Ordering::Relaxed)))
    }

    /// Read what a member has posted in this round, from byte `start` of it on.
    ///
    /// # Panics
    /// If there is no such member, or it is more than a cell holds.
    #[track_caller]
    pub fn read(&self, member: u32, start: usize, bytes: &mut [u8]) {
        let fits = start.checked_add(bytes.len()).is_some_and(|end| end <= Self::CAPACITY_BYTES);
        assert!(fits, "{} bytes from {start} on exceed a cell", bytes.len());
        let at = self.cell_at(member) + BYTES_AT + start;
        if bytes.len() > WORDS_MAX_BYTES || !start.is_multiple_of(8) {
            self.memory.read(at, bytes);
            return;
        }
        for (nth, piece) in bytes.chunks_mut(8).enumerate() {
            let word = self.word(at + 8 * nth).load(Ordering::Relaxed).to_ne_bytes();
            piece.copy_from_slice(&word[..piece.len()]);
        }
    }

    /// Return the description of what a member has posted in this round, or so many rounds `before` it. `None` if it
    /// has posted nothing in that round, or its cell was written again.
    ///
    /// # Panics
    /// If there is no such member.
    #[track_caller]
    pub fn description_of(&self, member: u32, before: u64) -> Option<[u8; DESCRIPTION_BYTES]> {
        let round = self.round.checked_sub(before)?;
        let cell = self.cell_of(member, round);
        let is_of_round = || u64::from_le(self.word(cell).load(Ordering::Acquire)) == round;
        let mut description = [0; DESCRIPTION_BYTES];
        let was_of_round = is_of_round();
        self.memory.read(cell + CELL_BYTES - DESCRIPTION_BYTES, &mut description);
        fence(Ordering::Acquire);
        (was_of_round && is_of_round()).then_some(description)
    }

    /// End this round, once everything is read. `all_posted`: this member has seen a post of each other one.
    pub fn finish_round(&mut self, all_posted: bool) {
        self.done(self.own).store(self.round.to_le(), Ordering::Release);
        if all_posted {
            // Who has posted in this round is done with the one before.
            self.all_done = self.all_done.max(self.round - 1);
        }
        self.round += 1;
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        if bytes.len() > WORDS_MAX_BYTES {
            self.memory.write(at, bytes);
            return;
        }
        for (nth, piece) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.word(at + 8 * nth).store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
    }

    fn done(&self, member: u32) -> &AtomicU64 {
        self.word(self.member_at(member))
    }

    fn cell_at(&self, member: u32) -> usize {
        self.cell_of(member, self.round)
    }

    fn cell_of(&self, member: u32, round: u64) -> usize {
        self.member_at(member) + LINES_BYTES + (round % ROUNDS) as usize * CELL_BYTES
    }

    fn member_at(&self, member: u32) -> usize {
        assert!(member < self.members, "member {member} of {}", self.members);
        member as usize * MEMBER_BYTES
    }

    fn word(&self, at_bytes: usize) -> &AtomicU64 {
        &self.memory.words()[at_bytes / 8]
    }
}

fn len_bytes(members: u32) -> Result<usize, BoardError> {
    let is_valid = (2..=Board::MEMBERS_MAX).contains(&members);
    is_valid.then_some(members as usize * MEMBER_BYTES).ok_or(BoardError::Members { members })
}
