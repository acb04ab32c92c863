//! Rings in memory that another process or a device also maps.
//!
//! All words are little-endian atomics: a peer that ignores the protocol can corrupt values, but not this side's memory
//! safety. Entries are copied word by word with relaxed ordering; the indices order them.

use super::Memory;
use crate::atomic::AtomicU64;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, Ordering};

/// The maximum capacity in entries; far below 2^31, so that index distances are unambiguous.
pub const CAPACITY_MAX: u32 = 1 << 16;

/// A word that occupies two cache lines, 128 bytes.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Line {
    /// The word.
    pub word: AtomicU32,
}

/// The two indices of a ring, 256 bytes.
///
/// | offset | size | field | written by |
/// |---|---|---|---|
/// | 0x00 | 4 | `produced`: entries ever published, modulo 2^32 | producer |
/// | 0x80 | 4 | `consumed`: entries ever taken out, modulo 2^32 | consumer |
#[derive(Debug, Default)]
#[repr(C)]
pub struct Indices {
    produced: Line,
    consumed: Line,
}

impl Indices {
    pub(crate) fn produced(&self) -> u32 {
        u32::from_le(self.produced.word.load(Ordering::Acquire))
    }

    pub(crate) fn set_produced(&self, produced: u32) {
        self.produced.word.store(produced.to_le(), Ordering::Release);
    }

    pub(crate) fn consumed(&self) -> u32 {
        u32::from_le(self.consumed.word.load(Ordering::Acquire))
    }

    pub(crate) fn set_consumed(&self, consumed: u32) {
        self.consumed.word.store(consumed.to_le(), Ordering::Release);
    }
}

const _: () = assert!(offset_of!(Indices, produced) == 0);
const _: () = assert!(offset_of!(Indices, consumed) == 0x80);
const _: () = assert!(size_of::<Indices>() == 0x100);

/// The memory of a ring, borrowed from a mapping.
#[derive(Debug, Clone, Copy)]
pub struct SharedRing<'a, const WORDS: usize> {
    indices: &'a Indices,
    entries: &'a [AtomicU64],
    capacity: u32,
}

/// Why memory cannot hold a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The capacity is not a power of two up to [`CAPACITY_MAX`].
    #[error(
        "{words} words for entries of {entry_words} words; the capacity must be a power of two up to {CAPACITY_MAX}"
    )]
    Capacity {
        /// The number of words.
        words: usize,
        /// The number of words per entry.
        entry_words: usize,
    },
}

/// Return the capacity of a ring over `words` words, if it is valid.
pub(super) fn check_capacity<const WORDS: usize>(words: usize) -> Result<u32, RingError> {
    const { assert!(WORDS > 0, "an entry has words") };
    let error = RingError::Capacity { words, entry_words: WORDS };
    let capacity = u32::try_from(words / WORDS).map_err(|_| error)?;
    let fits = words.is_multiple_of(WORDS) && capacity.is_power_of_two() && capacity <= CAPACITY_MAX;
    if fits { Ok(capacity) } else { Err(error) }
}

impl<'a, const WORDS: usize> SharedRing<'a, WORDS> {
    /// Return a ring over its indices and the words of its entries.
    ///
    /// # Errors
    /// [`RingError::Capacity`] unless the number of entries is a power of two up to [`CAPACITY_MAX`].
    pub fn new(indices: &'a Indices, entries: &'a [AtomicU64]) -> Result<Self, RingError> {
        Ok(Self { indices, entries, capacity: check_capacity::<WORDS>(entries.len())? })
    }

    /// Return a ring over memory that [`check_capacity`] has accepted.
    #[cfg(feature = "std")]
    pub(super) fn from_checked(indices: &'a Indices, entries: &'a [AtomicU64]) -> Self {
        Self { indices, entries, capacity: (entries.len() / WORDS) as u32 }
    }

    fn entry(&self, place: u32) -> &'a [AtomicU64] {
        &self.entries[place as usize * WORDS..][..WORDS]
    }
}

impl<const WORDS: usize> Memory<WORDS> for SharedRing<'_, WORDS> {
    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn produced(&self) -> u32 {
        self.indices.produced()
    }

    fn set_produced(&self, produced: u32) {
        self.indices.set_produced(produced);
    }

    fn consumed(&self) -> u32 {
        self.indices.consumed()
    }

    fn set_consumed(&self, consumed: u32) {
        self.indices.set_consumed(consumed);
    }

    fn read(&self, place: u32) -> [u64; WORDS] {
        let mut entry = [0; WORDS];
        for (to, from) in entry.iter_mut().zip(self.entry(place)) {
            *to = u64::from_le(from.load(Ordering::Relaxed));
        }
        entry
    }

    fn write(&self, place: u32, entry: &[u64; WORDS]) {
        for (to, from) in self.entry(place).iter().zip(entry) {
            to.store(from.to_le(), Ordering::Relaxed);
        }
    }
}
