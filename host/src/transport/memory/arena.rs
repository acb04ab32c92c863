//! Where a rank's memory comes from: of its own making, or, with a device that reaches nothing else, out of the arena that
//! came with its function.
//!
//! Invariant: no two regions of an arena overlap, and a place is given out again only when the device has let go of it and
//! no buffer of this process lies there.

use super::error::RegisterError;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use sumac_hal::dma::RegionKey;
use sumac_hal::shm::{MemoryError, Pages, Region};

/// What regions begin at multiples of, and are mapped in: pages, also where they are of 64 KiB.
const PAGE_LEN_BYTES: u64 = 64 << 10;

/// What is written at a time to clear memory.
const CLEAR_LEN_BYTES: usize = 64 << 10;

/// A place of the arena.
#[derive(Debug, Clone, Copy)]
struct Place {
    start: u64,
    len_bytes: u64,
    /// What it is registered as.
    key: Option<RegionKey>,
}

/// Memory that a device has given to this rank.
pub(super) struct Arena {
    file: OwnedFd,
    offset_bytes: u64,
    len_bytes: u64,
    /// In order of their starts.
    places: Vec<Place>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("len_bytes", &self.len_bytes)
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}

impl Arena {
    pub(super) const fn new(file: OwnedFd, offset_bytes: u64, len_bytes: u64) -> Self {
        Self { file, offset_bytes, len_bytes, places: Vec::new() }
    }

    /// Take zeroed memory out, and return it with where it lies.
    pub(super) fn take(&mut self, len_bytes: usize) -> Result<(Region, u64), RegisterError> {
        let full = RegisterError::Memory(MemoryError::Length { len_bytes: len_bytes as u64, max: self.largest() });
        let Some(len) = (len_bytes as u64).checked_next_multiple_of(PAGE_LEN_BYTES) else { return Err(full) };
        let Some((at, start)) = self.gaps().find(|&(_, _, gap)| gap >= len).map(|(at, start, _)| (at, start)) else {
            return Err(full);
        };
        // Whoever gave the arena may have said anything of where it lies: that it is within the file, the mapping checks.
        let Some(offset_bytes) = self.offset_bytes.checked_add(start) else { return Err(full) };
        let region = Region::open_at(self.file.as_fd(), offset_bytes, len as usize)?;
        let zeros = [0; CLEAR_LEN_BYTES];
        (0..len as usize).step_by(CLEAR_LEN_BYTES).for_each(|offset| region.write(offset, &zeros));
        self.places.insert(at, Place { start, len_bytes: len, key: None });
        Ok((region, start))
    }

    /// Note what the memory at `start` is registered as; `None` if the device refuses, so that it never had it.
    pub(super) fn note(&mut self, start: u64, key: Option<RegionKey>) {
        match (self.places.iter().position(|place| place.start == start), key) {
            (Some(at), Some(key)) => self.places[at].key = Some(key),
            (Some(at), None) => drop(self.places.remove(at)),
            (None, _) => {}
        }
    }

    /// The device has let go of a region, and nobody has it here.
    pub(super) fn give_back(&mut self, key: RegionKey) {
        self.places.retain(|place| place.key != Some(key));
    }

    /// Return the longest memory that [`Arena::take`] would find room for.
    fn largest(&self) -> u64 {
        self.gaps().map(|(_, _, gap)| gap / PAGE_LEN_BYTES * PAGE_LEN_BYTES).max().unwrap_or(0)
    }

    /// Return the free places: which taken one each precedes, where it begins, and its length.
    fn gaps(&self) -> impl Iterator<Item = (usize, u64, u64)> + '_ {
        let begins = [0].into_iter().chain(self.places.iter().map(|place| place.start + place.len_bytes));
        let ends = self.places.iter().map(|place| place.start).chain([self.len_bytes]);
        begins.zip(ends).enumerate().map(|(at, (begin, end))| (at, begin, end.saturating_sub(begin)))
    }
}

/// Return memory of this process's own making.
pub(super) fn own(len_bytes: usize) -> Result<Region, RegisterError> {
    Ok(Region::create(len_bytes, Pages::Normal)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn arena() -> (Region, Arena) {
        let whole = Region::create(4 * MIB, Pages::Normal).expect("memory");
        let file = whole.file().try_clone_to_owned().expect("a descriptor");
        (whole, Arena::new(file, MIB as u64, 3 * MIB as u64))
    }

    fn key(index: u16) -> RegionKey {
        RegionKey { index, generation: 1 }
    }

    #[test]
    fn memory_is_where_it_is_said_to_be_and_nowhere_else() {
        let (whole, mut arena) = arena();
        whole.write(0, &[7; 4 * MIB]);
        let (first, start) = arena.take(5).expect("room");
        let (second, next) = arena.take(MIB).expect("room");
        assert_eq!((start, next), (0, PAGE_LEN_BYTES));
        let mut found = [1; 5];
        first.read(0, &mut found);
        assert_eq!(found, [0; 5], "zeroed");
        second.write(0, &[9; 5]);
        whole.read(MIB + PAGE_LEN_BYTES as usize, &mut found);
        assert_eq!(found, [9; 5]);
        whole.read(MIB - 5, &mut found);
        assert_eq!(found, [7; 5], "what is not of the arena");
    }

    #[test]
    fn a_place_is_given_out_again_when_it_was_given_back() {
        let (_whole, mut arena) = arena();
        let starts = [1, 2, 3].map(|index| {
            let (_, start) = arena.take(MIB).expect("room");
            arena.note(start, Some(key(index)));
            start
        });
        assert_eq!(starts, [0, MIB as u64, 2 * MIB as u64]);
        let error = arena.take(1).map(drop).expect_err("it is full");
        assert!(error.to_string().contains("1 to 0"), "{error}");
        arena.give_back(key(2));
        assert_eq!(arena.take(MIB).expect("room").1, MIB as u64);
        // Refused by the device: never registered.
        arena.note(MIB as u64, None);
        assert_eq!(arena.take(1).expect("room").1, MIB as u64);
    }

    #[test]
    fn arena_beyond_its_file_is_refused() {
        let whole = Region::create(MIB, Pages::Normal).expect("memory");
        for (offset_bytes, len_bytes) in [(u64::MAX - MIB as u64 + 1, u64::MAX), (MIB as u64, u64::MAX), (0, u64::MAX)]
        {
            let file = whole.file().try_clone_to_owned().expect("a descriptor");
            let mut arena = Arena::new(file, offset_bytes, len_bytes);
            let taken = (0..3).map(|_| arena.take(MIB).map(drop)).filter(Result::is_ok).count();
            assert!(taken <= 1, "{offset_bytes}: {taken} MiB of one");
            assert!(arena.take(2 * MIB).is_err() && arena.take(usize::MAX).is_err());
        }
    }

    #[test]
    fn severed_memory_keeps_its_contents_and_lets_go_of_the_place() {
        let (whole, mut arena) = arena();
        let (mut region, _) = arena.take(100).expect("room");
        region.write(0, b"mine");
        let pages = 0..region.page_len_bytes();
        region.sever(std::slice::from_ref(&pages)).expect("memory");
        whole.write(MIB, b"else");
        let mut found = [0; 4];
        region.read(0, &mut found);
        assert_eq!(&found, b"mine");
    }
}
