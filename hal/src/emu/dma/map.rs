//! What the engine can reach: its table of translations, as an IOMMU's.
//!
//! A descriptor names a region; whoever runs it *pins* the region's translation, uses it, and lets go. Unmapping first
//! makes new pins fail and then waits for those that there are, so after it nothing of the region is touched: as an
//! invalidated rkey or a flushed IOTLB. Pinning is two atomic operations; only mapping and unmapping lock.
//!
//! Invariant: a place's translation is written while the place is neither live nor pinned, and read while it is pinned.

use crate::dma::{Backing, DmaMemory, RegionKey, Status};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A place's state: the generation above, this bit if it is live, and the number of pins below.
const LIVE: u64 = 1 << 31;
const PINS: u64 = LIVE - 1;

/// On cache lines of its own: threads that work on different regions do not meet here.
#[repr(align(128))]
struct Place {
    state: AtomicU64,
    memory: UnsafeCell<Option<Arc<dyn DmaMemory>>>,
}

/// The table.
pub(super) struct Map {
    places: Box<[Place]>,
    /// Held while a place's translation changes.
    changing: Mutex<()>,
}

// SAFETY: `Place::memory` is written only under `changing`, while the state says that nobody has it pinned and nobody
// can pin it; it is read only between `pin` and `unpin`. The state's acquire and release order the two.
unsafe impl Sync for Map {}

/// Why memory was not mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The table is shorter.
    #[error("region {index} is beyond the engine's {capacity} regions")]
    Beyond {
        /// The index.
        index: u16,
        /// The table's length.
        capacity: usize,
    },
    /// Something is mapped there, or was with that generation or a later one.
    #[error("generation {asked} of region {index} comes after generation {now}, or that one is still mapped")]
    Taken {
        /// The index.
        index: u16,
        /// The generation asked for.
        asked: u32,
        /// The last generation there.
        now: u32,
    },
    /// The memory is, in part, what the device's processor works on, or other memory would become that.
    #[error("region {index} has bytes in common with region {other}, and one of them is the device's own memory")]
    Shared {
        /// The index.
        index: u16,
        /// The other's.
        other: u16,
    },
}

impl Map {
    pub(super) fn new(capacity: usize) -> Self {
        let place = |_| Place { state: AtomicU64::new(0), memory: UnsafeCell::new(None) };
        Self { places: (0..capacity).map(place).collect(), changing: Mutex::new(()) }
    }

    pub(super) fn map(&self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let beyond = MapError::Beyond { index: key.index, capacity: self.places.len() };
        let place = self.places.get(usize::from(key.index)).ok_or(beyond)?;
        let state = place.state.load(Ordering::Acquire);
        let now = (state >> 32) as u32;
        if state & (LIVE | PINS) != 0 || key.generation <= now {
            return Err(MapError::Taken { index: key.index, asked: key.generation, now });
        }
        // SAFETY: the place is not live, so nobody pins it, and `changing` keeps other changes out.
        unsafe { *place.memory.get() = Some(memory) };
        place.state.store(u64::from(key.generation) << 32 | LIVE, Ordering::Release);
        Ok(())
    }

    /// Take a translation away; when this returns true, nobody uses it any more. False if it is not there.
    pub(super) fn unmap(&self, key: RegionKey) -> bool {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = self.places.get(usize::from(key.index)) else { return false };
        let live = |state: u64| state >> 32 == u64::from(key.generation) && state & LIVE != 0;
        let taken =
            place.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| live(state).then_some(state & !LIVE));
        if taken.is_err() {
            return false;
        }
        // A pin lasts for a chain at most.
        while place.state.load(Ordering::Acquire) & PINS != 0 {
            thread::yield_now();
        }
        // SAFETY: the place is neither live nor pinned, and `changing` keeps other changes out.
        drop(unsafe { (*place.memory.get()).take() });
        true
    }

    /// Return which region has bytes in common with `memory`, if one has.
    pub(super) fn find_overlap(&self, memory: &dyn DmaMemory) -> Option<u16> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.places.iter().position(|place| {
            // SAFETY: translations change under `changing` only, so this one is not written meanwhile.
            let mapped = unsafe { &*place.memory.get() };
            mapped.as_deref().is_some_and(|mapped| {
                mapped.backing().overlaps(mapped.len_bytes(), &memory.backing(), memory.len_bytes())
            })
        });
        at.map(|at| at as u16)
    }

    /// Return how often a region is pinned now.
    #[cfg(test)]
    pub(super) fn pins(&self, key: RegionKey) -> u64 {
        self.places[usize::from(key.index)].state.load(Ordering::Acquire) & PINS
    }

    /// Keep a region's translation, and return it.
    pub(super) fn pin(&self, key: RegionKey) -> Result<Pin<'_>, Status> {
        let place = self.places.get(usize::from(key.index)).ok_or(Status::BadRegion)?;
        let mut refused = Status::BadRegion;
        let pin = |state: u64| {
            let now = (state >> 32) as u32;
            if key.generation == now && state & LIVE != 0 {
                return Some(state + 1);
            }
            refused = if (1..=now).contains(&key.generation) { Status::StaleRegion } else { Status::BadRegion };
            None
        };
        match place.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, pin) {
            Ok(_) => Ok(Pin { place }),
            Err(_) => Err(refused),
        }
    }
}

/// A translation that stays until this is dropped.
pub(super) struct Pin<'a> {
    place: &'a Place,
}

impl Pin<'_> {
    /// Return where `len_bytes` bytes at `offset_bytes` of the region are, and of what they are a part, if they are in it.
    pub(super) fn translate(&self, offset_bytes: u64, len_bytes: u64) -> Result<(*mut u8, Backing), Status> {
        // SAFETY: the place is pinned.
        let memory = unsafe { &*self.place.memory.get() }.as_ref().ok_or(Status::StaleRegion)?;
        let end = offset_bytes.checked_add(len_bytes).ok_or(Status::OutOfBounds)?;
        if end > memory.len_bytes() as u64 {
            return Err(Status::OutOfBounds);
        }
        // SAFETY: the offset is within the memory, by the check above.
        let base = unsafe { memory.base().as_ptr().add(offset_bytes as usize) };
        Ok((base, memory.backing().at(offset_bytes)))
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.place.state.fetch_sub(1, Ordering::Release);
    }
}
