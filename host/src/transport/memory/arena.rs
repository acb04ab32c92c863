//! Allocation of memory that the device can reach: from this process, or from the arena that came with the function if
//! the device reaches nothing else.
//!
//! Invariant: regions of an arena do not overlap, and a place is reused only after the device has released it and no
//! buffer of this process lies there.

use super::error::RegisterError;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use sumac_hal::dma::RegionKey;
use sumac_hal::shm::{MemoryError, Pages, Region};

/// Alignment and granularity of regions: a multiple of every page size in use, 64 KiB pages included.
const PAGE_LEN_BYTES: u64 = 64 << 10;

/// Bytes cleared at a time.
const CLEAR_LEN_BYTES: usize = 64 << 10;

/// An allocated range of the arena.
#[derive(Debug, Clone, Copy)]
struct Place {
    start: u64,
    len_bytes: u64,
    /// Its region key, once registered.
    key: Option<RegionKey>,
}

/// Memory that a device has provided to this rank.
pub(super) struct Arena {
    file: OwnedFd,
    offset_bytes: u64,
    len_bytes: u64,
    /// Sorted by start.
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

    /// Allocate zeroed memory, and return it with its offset in the arena.
    pub(super) fn take(&mut self, len_bytes: usize) -> Result<(Region, u64), RegisterError> {
        let full = RegisterError::Memory(MemoryError::Length { len_bytes: len_bytes as u64, max: self.largest() });
        let Some(len) = (len_bytes as u64).checked_next_multiple_of(PAGE_LEN_BYTES) else { return Err(full) };
        let Some((at, start)) = self.gaps().find(|&(_, _, gap)| gap >= len).map(|(at, start, _)| (at, start)) else {
            return Err(full);
        };
        // The offset comes from the device and may be anything; mapping checks that it lies within the file.
        let Some(offset_bytes) = self.offset_bytes.checked_add(start) else { return Err(full) };
        let region = Region::open_at(self.file.as_fd(), offset_bytes, len as usize)?;
        let zeros = [0; CLEAR_LEN_BYTES];
        (0..len as usize).step_by(CLEAR_LEN_BYTES).for_each(|offset| region.write(offset, &zeros));
        self.places.insert(at, Place { start, len_bytes: len, key: None });
        Ok((region, start))
    }

    /// Record the key under which the memory at `start` was registered. `None`: the device refused it and never had
    /// access.
    pub(super) fn note(&mut self, start: u64, key: Option<RegionKey>) {
        match (self.places.iter().position(|place| place.start == start), key) {
            (Some(at), Some(key)) => self.places[at].key = Some(key),
            (Some(at), None) => drop(self.places.remove(at)),
            (None, _) => {}
        }
    }

    /// Free a region that the device has released and that no buffer uses.
    pub(super) fn give_back(&mut self, key: RegionKey) {
        self.places.retain(|place| place.key != Some(key));
    }

    /// Return the longest allocation that [`Arena::take`] could satisfy.
    fn largest(&self) -> u64 {
        self.gaps().map(|(_, _, gap)| gap / PAGE_LEN_BYTES * PAGE_LEN_BYTES).max().unwrap_or(0)
    }

    /// Return the free ranges: the index of the allocated one behind each, its start and its length.
    fn gaps(&self) -> impl Iterator<Item = (usize, u64, u64)> + '_ {
        let begins = [0].into_iter().chain(self.places.iter().map(|place| place.start + place.len_bytes));
        let ends = self.places.iter().map(|place| place.start).chain([self.len_bytes]);
        begins.zip(ends).enumerate().map(|(at, (begin, end))| (at, begin, end.saturating_sub(begin)))
    }
}

/// Allocate shared memory in this process.
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
    fn allocations_are_zeroed_and_stay_inside_the_arena() {
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
        assert_eq!(found, [7; 5], "outside the arena");
    }

    #[test]
    fn freed_and_refused_places_are_reused() {
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
        // Refused by the device, so it was never registered.
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
    fn severed_region_keeps_its_contents_apart_from_the_arena() {
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
