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
use super::{Board, BoardError, BoardMemory, Cell};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Processors fetch lines in pairs.
const LINES_BYTES: usize = 128;

/// Where a cell's bytes begin.
const BYTES_AT: usize = 16;

/// The length of a description in bytes.
pub(super) const DESCRIPTION_BYTES: usize = 64;

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
    fn store(&self, at: usize, bytes: &[u8]) {
        if bytes.len() > WORDS_MAX_BYTES {
            self.0.write(at, bytes);
            return;
        }
        let words = &self.0.words()[at / 8..];
        let (whole, rest) = bytes.as_chunks::<8>();
        if let ([piece], true) = (whole, rest.is_empty()) {
            words[0].store(u64::from_ne_bytes(*piece), Ordering::Relaxed);
            return;
        }
        for (word, piece) in words.iter().zip(whole) {
            word.store(u64::from_ne_bytes(*piece), Ordering::Relaxed);
        }
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            words[whole.len()].store(u64::from_ne_bytes(last), Ordering::Relaxed);
        }
    }

    #[inline]
    fn load(&self, at: usize, bytes: &mut [u8]) {
        if bytes.len() > WORDS_MAX_BYTES || !at.is_multiple_of(8) {
            self.0.read(at, bytes);
            return;
        }
        let words = &self.0.words()[at / 8..];
        let (whole, rest) = bytes.as_chunks_mut::<8>();
        for (word, piece) in words.iter().zip(whole.iter_mut()) {
            *piece = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        if !rest.is_empty() {
            let last = words[whole.len()].load(Ordering::Relaxed).to_ne_bytes();
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }

    #[inline]
    fn word(&self, at_bytes: usize) -> &AtomicU64 {
        &self.0.words()[at_bytes / 8]
    }
}

const fn member_at(member: u32) -> usize {
    member as usize * MEMBER_BYTES
}

const fn cell_at(Cell { member, index }: Cell) -> usize {
    member_at(member) + LINES_BYTES + index * CELL_BYTES
}

impl BoardMemory for Cells {
    const CELLS: u64 = Board::ROUNDS_AHEAD;

    #[inline]
    fn done(&self, member: u32) -> u64 {
        u64::from_le(self.word(member_at(member)).load(Ordering::Acquire))
    }

    #[inline]
    fn set_done(&self, member: u32, round: u64) {
        self.word(member_at(member)).store(round.to_le(), Ordering::Release);
    }

    #[inline]
    fn round(&self, at: Cell) -> u64 {
        u64::from_le(self.word(cell_at(at)).load(Ordering::Acquire))
    }

    #[inline]
    fn round_after_loads(&self, at: Cell) -> u64 {
        fence(Ordering::Acquire);
        u64::from_le(self.word(cell_at(at)).load(Ordering::Relaxed))
    }

    #[inline]
    fn clear_round(&self, at: Cell) {
        self.word(cell_at(at)).store(0, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    #[inline]
    fn set_round(&self, at: Cell, round: u64) {
        self.word(cell_at(at)).store(round.to_le(), Ordering::Release);
    }

    #[inline]
    fn tag(&self, at: Cell) -> u64 {
        u64::from_le(self.word(cell_at(at) + 8).load(Ordering::Relaxed))
    }

    #[inline]
    fn set_tag(&self, at: Cell, tag: u64) {
        self.word(cell_at(at) + 8).store(tag.to_le(), Ordering::Relaxed);
    }

    #[inline]
    fn description(&self, at: Cell) -> [u8; DESCRIPTION_BYTES] {
        let mut description = [0; DESCRIPTION_BYTES];
        self.load(cell_at(at) + CELL_BYTES - DESCRIPTION_BYTES, &mut description);
        description
    }

    #[inline]
    fn set_description(&self, at: Cell, description: &[u8; DESCRIPTION_BYTES]) {
        const WORDS: usize = DESCRIPTION_BYTES / 8;
        let first = (cell_at(at) + CELL_BYTES - DESCRIPTION_BYTES) / 8;
        // Arrays of known length, so that the bounds are checked once.
        let (Some(words), Some(pieces)) =
            (self.0.words()[first..].first_chunk::<WORDS>(), description.as_chunks::<8>().0.first_chunk::<WORDS>())
        else {
            return;
        };
        for index in 0..WORDS {
            words[index].store(u64::from_ne_bytes(pieces[index]), Ordering::Relaxed);
        }
    }

    #[inline]
    fn read(&self, at: Cell, start: usize, bytes: &mut [u8]) {
        self.load(cell_at(at) + BYTES_AT + start, bytes);
    }

    #[inline]
    fn write(&self, at: Cell, bytes: &[u8]) {
        self.store(cell_at(at) + BYTES_AT, bytes);
    }
}

fn len_bytes(members: u32) -> Result<usize, BoardError> {
    let is_valid = (2..=Board::MEMBERS_MAX).contains(&members);
    is_valid.then_some(members as usize * MEMBER_BYTES).ok_or(BoardError::Members { members })
}
