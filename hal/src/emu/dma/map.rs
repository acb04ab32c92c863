//! The engine's translation table, like that of an IOMMU.
//!
//! A thread that runs a chain *pins* the translations of its regions while it uses them. Unmapping makes new pins fail
//! and then waits until the existing ones are released, so that the region is not accessed afterwards, as with an
//! invalidated rkey or a flushed IOTLB. Pinning takes two atomic operations; only mapping and unmapping take a lock.
//!
//! Invariant: an entry's translation is written only while the entry is neither live nor pinned, and read only while it
//! is pinned.

use crate::dma::{Backing, DmaMemory, RegionKey, Status};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// The layout of an entry's state: the generation in the high half, this bit if the entry is live, and the number of
/// pins.
const LIVE: u64 = 1 << 31;
const PINS: u64 = LIVE - 1;

/// Aligned to cache lines, so that threads that use different regions do not contend.
#[repr(align(128))]
struct Entry {
    state: AtomicU64,
    memory: UnsafeCell<Option<Arc<dyn DmaMemory>>>,
}

/// The translation table.
pub(super) struct Map {
    entries: Box<[Entry]>,
    /// Held while a translation changes.
    changing: Mutex<()>,
}

// SAFETY: `Entry::memory` is written only under `changing`, while the state shows that the entry is not pinned and
// cannot be. It is read only while pinned. Acquire and release ordering of the state order the two.
unsafe impl Sync for Map {}

/// Why memory cannot be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The index is beyond the table.
    #[error("region index {index} is out of range: the DMA engine has {capacity} entries")]
    OutOfRange {
        /// The index.
        index: u16,
        /// The number of entries.
        capacity: usize,
    },
    /// The index is mapped, or was mapped with this or a later generation.
    #[error("cannot map generation {asked} of region {index}: generation {current} is still mapped, or is not older")]
    InUse {
        /// The index.
        index: u16,
        /// The requested generation.
        asked: u32,
        /// The last generation at this index.
        current: u32,
    },
    /// The memory overlaps that of another region, and one of the two is local memory.
    #[error("region {index} overlaps region {other}, and one of them is the device's local memory")]
    Overlap {
        /// The index.
        index: u16,
        /// The other region's index.
        other: u16,
    },
}

impl Map {
    pub(super) fn new(capacity: usize) -> Self {
        let entry = |_| Entry { state: AtomicU64::new(0), memory: UnsafeCell::new(None) };
        Self { entries: (0..capacity).map(entry).collect(), changing: Mutex::new(()) }
    }

    pub(super) fn map(&self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let beyond = MapError::OutOfRange { index: key.index, capacity: self.entries.len() };
        let entry = self.entries.get(usize::from(key.index)).ok_or(beyond)?;
        let state = entry.state.load(Ordering::Acquire);
        let current = (state >> 32) as u32;
        if state & (LIVE | PINS) != 0 || key.generation <= current {
            return Err(MapError::InUse { index: key.index, asked: key.generation, current });
        }
        // SAFETY: the entry is not live, so it cannot be pinned, and `changing` excludes other changes.
        unsafe { *entry.memory.get() = Some(memory) };
        entry.state.store(u64::from(key.generation) << 32 | LIVE, Ordering::Release);
        Ok(())
    }

    /// Remove a translation. When this returns true, it is no longer in use. Returns false if it is not mapped.
    pub(super) fn unmap(&self, key: RegionKey) -> bool {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = self.entries.get(usize::from(key.index)) else { return false };
        let live = |state: u64| state >> 32 == u64::from(key.generation) && state & LIVE != 0;
        let taken =
            entry.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| live(state).then_some(state & !LIVE));
        if taken.is_err() {
            return false;
        }
        // A pin lasts for one chain at most.
        while entry.state.load(Ordering::Acquire) & PINS != 0 {
            thread::yield_now();
        }
        // SAFETY: the entry is neither live nor pinned, and `changing` excludes other changes.
        drop(unsafe { (*entry.memory.get()).take() });
        true
    }

    /// Return the index of a region that overlaps `memory`, if there is one.
    pub(super) fn find_overlap(&self, memory: &dyn DmaMemory) -> Option<u16> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let at = self.entries.iter().position(|entry| {
            // SAFETY: translations change only under `changing`, so this one is not written.
            let mapped = unsafe { &*entry.memory.get() };
            mapped.as_deref().is_some_and(|mapped| {
                mapped.backing().overlaps(mapped.len_bytes(), &memory.backing(), memory.len_bytes())
            })
        });
        at.map(|at| at as u16)
    }

    /// Return the number of pins of a region.
    #[cfg(test)]
    pub(super) fn pins(&self, key: RegionKey) -> u64 {
        self.entries[usize::from(key.index)].state.load(Ordering::Acquire) & PINS
    }

    /// Pin a region's translation.
    pub(super) fn pin(&self, key: RegionKey) -> Result<Pin<'_>, Status> {
        let entry = self.entries.get(usize::from(key.index)).ok_or(Status::BadRegion)?;
        let mut refused = Status::BadRegion;
        let pin = |state: u64| {
            let current = (state >> 32) as u32;
            if key.generation == current && state & LIVE != 0 {
                return Some(state + 1);
            }
            refused = if (1..=current).contains(&key.generation) { Status::StaleRegion } else { Status::BadRegion };
            None
        };
        match entry.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, pin) {
            Ok(_) => Ok(Pin { entry }),
            Err(_) => Err(refused),
        }
    }
}

/// A pinned translation; it stays valid until this is dropped.
pub(super) struct Pin<'a> {
    entry: &'a Entry,
}

impl Pin<'_> {
    /// Return the address and the backing of `len_bytes` bytes at `offset_bytes`, if they are within the region.
    pub(super) fn translate(&self, offset_bytes: u64, len_bytes: u64) -> Result<(*mut u8, Backing), Status> {
        // SAFETY: the entry is pinned.
        let memory = unsafe { &*self.entry.memory.get() }.as_ref().ok_or(Status::StaleRegion)?;
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
        self.entry.state.fetch_sub(1, Ordering::Release);
    }
}
