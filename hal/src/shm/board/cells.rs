//! The cells of a board in shared memory.
//!
//! | bytes of a member's part | |
//! |---|---|
//! | 0..8 | the last round that it is done with |
//! | 128.. | [`Board::ROUNDS_AHEAD`] cells |
//!
//! | bytes of a cell | |
//! |---|---|
//! | 0..8 | the round; 0 while it is written |
//! | 8..16 | tag |
//! | 16.. | what is posted, at most [`Board::CAPACITY_BYTES`] |
//! | the last 64 | a description, which others read if the tag is not what they expect |
//!
//! All numbers are little-endian.

use super::super::BarMemory;
use super::{Board, BoardCell, BoardError, BoardMemory};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Processors fetch lines in pairs.
const LINES_BYTES: usize = 128;

/// Where a cell's bytes begin.
const BYTES_AT: usize = 16;

/// The length of a description in bytes.
pub(super) const DESCRIPTION_BYTES: usize = 64;

const DESCRIPTION_AT: usize = CELL_BYTES - DESCRIPTION_BYTES;

const CELL_BYTES: usize = (BYTES_AT + Board::CAPACITY_BYTES + DESCRIPTION_BYTES).next_multiple_of(LINES_BYTES);

const MEMBER_BYTES: usize = LINES_BYTES + Board::ROUNDS_AHEAD as usize * CELL_BYTES;

/// From here on, copying takes fewer instructions than storing words.
const WORDS_MAX_BYTES: usize = 128;

/// The memory of a board that processes share. Members that write against the rules mix up bytes, no more.
#[derive(Debug)]
pub struct Cells(BarMemory);

impl Cells {
    pub(super) fn create(members: u32) -> Result<Self, BoardError> {
        Ok(Self(BarMemory::create(len_bytes(members)?)?))
    }

    pub(super) fn open(file: OwnedFd, members: u32) -> Result<Self, BoardError> {
        let memory = BarMemory::open(file, len_bytes(Board::MEMBERS_MAX)? as u64)?;
        let found = size_of_val(memory.words());
        if found != len_bytes(members)? {
            return Err(BoardError::Length { len_bytes: found, members });
        }
        Ok(Self(memory))
    }

    #[track_caller]
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.0.file()
    }

    #[inline]
    fn word(&self, at_bytes: usize) -> &AtomicU64 {
        &self.0.words()[at_bytes / 8]
    }
}

const fn member_at(member: u32) -> usize {
    member as usize * MEMBER_BYTES
}

impl BoardMemory for Cells {
    const CELLS: u64 = Board::ROUNDS_AHEAD;

    type Cell<'m> = CellWords<'m>;

    #[inline]
    #[track_caller]
    fn cell(&self, member: u32, index: usize) -> CellWords<'_> {
        let at_bytes = member_at(member) + LINES_BYTES + index * CELL_BYTES;
        let words = self.0.words()[at_bytes / 8..].first_chunk().expect("the memory has cells for all members");
        CellWords { words, memory: &self.0, at_bytes }
    }

    #[inline]
    fn done(&self, member: u32) -> u64 {
        u64::from_le(self.word(member_at(member)).load(Ordering::Acquire))
    }

    #[inline]
    fn set_done(&self, member: u32, round: u64) {
        self.word(member_at(member)).store(round.to_le(), Ordering::Release);
    }
}

/// A cell. Its words are found once for all accesses.
#[derive(Debug, Clone, Copy)]
pub struct CellWords<'m> {
    words: &'m [AtomicU64; CELL_BYTES / 8],
    memory: &'m BarMemory,
    at_bytes: usize,
}

impl BoardCell for CellWords<'_> {
    #[inline]
    fn round(&self) -> u64 {
        u64::from_le(self.words[0].load(Ordering::Acquire))
    }

    #[inline]
    fn round_after_loads(&self) -> u64 {
        fence(Ordering::Acquire);
        u64::from_le(self.words[0].load(Ordering::Relaxed))
    }

    #[inline]
    fn clear_round(&self) {
        self.words[0].store(0, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    #[inline]
    fn set_round(&self, round: u64) {
        self.words[0].store(round.to_le(), Ordering::Release);
    }

    #[inline]
    fn tag(&self) -> u64 {
        u64::from_le(self.words[1].load(Ordering::Relaxed))
    }

    #[inline]
    fn set_tag(&self, tag: u64) {
        self.words[1].store(tag.to_le(), Ordering::Relaxed);
    }

    #[inline]
    fn description(&self) -> [u8; DESCRIPTION_BYTES] {
        let mut description = [0; DESCRIPTION_BYTES];
        for (index, piece) in description.as_chunks_mut().0.iter_mut().enumerate() {
            *piece = self.words[DESCRIPTION_AT / 8 + index].load(Ordering::Relaxed).to_ne_bytes();
        }
        description
    }

    #[inline]
    fn set_description(&self, description: &[u8; DESCRIPTION_BYTES]) {
        for (index, piece) in description.as_chunks().0.iter().enumerate() {
            self.words[DESCRIPTION_AT / 8 + index].store(u64::from_ne_bytes(*piece), Ordering::Relaxed);
        }
    }

    #[inline]
    fn read(&self, start: usize, bytes: &mut [u8]) {
        let (whole, rest) = bytes.as_chunks_mut::<8>();
        if let ([piece], true, true) = (whole, rest.is_empty(), start == 0) {
            *piece = self.words[BYTES_AT / 8].load(Ordering::Relaxed).to_ne_bytes();
            return;
        }
        self.load(start, bytes);
    }

    #[inline]
    fn write(&self, bytes: &[u8]) {
        if let ([piece], true) = (bytes.as_chunks().0, bytes.len() == 8) {
            self.words[BYTES_AT / 8].store(u64::from_ne_bytes(*piece), Ordering::Relaxed);
            return;
        }
        self.store(bytes);
    }
}

impl CellWords<'_> {
    fn store(&self, bytes: &[u8]) {
        if bytes.len() > WORDS_MAX_BYTES {
            self.memory.write(self.at_bytes + BYTES_AT, bytes);
            return;
        }
        let words = &self.words[BYTES_AT / 8..];
        let (whole, rest) = bytes.as_chunks::<8>();
        for (word, piece) in words.iter().zip(whole) {
            word.store(u64::from_ne_bytes(*piece), Ordering::Relaxed);
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            words[whole.len()].store(u64::from_ne_bytes(last), Ordering::Relaxed);
        }
    }

    fn load(&self, start: usize, bytes: &mut [u8]) {
        if bytes.len() > WORDS_MAX_BYTES || !start.is_multiple_of(8) {
            self.memory.read(self.at_bytes + BYTES_AT + start, bytes);
            return;
        }
        let words = &self.words[(BYTES_AT + start) / 8..];
        let (whole, rest) = bytes.as_chunks_mut::<8>();
        for (word, piece) in words.iter().zip(whole.iter_mut()) {
            *piece = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        if !rest.is_empty() {
            let last = words[whole.len()].load(Ordering::Relaxed).to_ne_bytes();
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }
}

fn len_bytes(members: u32) -> Result<usize, BoardError> {
    let is_valid = (2..=Board::MEMBERS_MAX).contains(&members);
    is_valid.then_some(members as usize * MEMBER_BYTES).ok_or(BoardError::Members { members })
}
