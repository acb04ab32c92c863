//! Registered memory of this rank that other ranks of its machine may map, and read without the kernel's help.
//!
//! A communicator's memory is entered here when it is allocated, and removed before its address can belong to anything
//! else: when its buffer is dropped, or when its pages are severed from what a device, or another rank, has mapped
//! ([`Region::sever`]). Links hand regions over when they are first used (`exec::regions`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use sumac_hal::dma::DmaMemory;
use sumac_hal::shm::{ProcessMark, Region};

/// The regions of a rank that others may map.
#[derive(Debug, Default)]
pub(crate) struct RegionExports {
    table: Mutex<Table>,
    /// The number of regions removed so far, modulo 2^32.
    removals: AtomicU32,
    process: ProcessMark,
}

#[derive(Debug, Default)]
struct Table {
    /// By the address of their first byte.
    entries: BTreeMap<usize, Entry>,
    last_number: u64,
}

#[derive(Debug)]
struct Entry {
    number: u64,
    len_bytes: usize,
    region: Weak<Mutex<Region>>,
}

/// Where bytes are in an exported region.
#[derive(Debug)]
pub(crate) struct ExportPlace {
    /// The region's number, which no other region of this rank has or had.
    pub(crate) number: u64,
    pub(crate) offset_bytes: u64,
    pub(crate) region: Weak<Mutex<Region>>,
}

/// An entry of [`RegionExports`], which ends with it.
#[derive(Debug)]
pub(crate) struct Export {
    exports: Arc<RegionExports>,
    start: usize,
    number: u64,
}

impl RegionExports {
    /// Enter a region.
    pub(crate) fn add(self: &Arc<Self>, region: &Arc<Mutex<Region>>) -> Export {
        let (start, len_bytes) = {
            let region = region.lock().unwrap_or_else(PoisonError::into_inner);
            (region.base().as_ptr().addr(), region.len_bytes())
        };
        let mut table = self.table();
        table.last_number += 1;
        let number = table.last_number;
        table.entries.insert(start, Entry { number, len_bytes, region: Arc::downgrade(region) });
        drop(table);
        Export { exports: Arc::clone(self), start, number }
    }

    /// Return the place of these bytes; `None` if they are in no region.
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<ExportPlace> {
        let start = bytes.as_ptr().addr();
        let table = self.table();
        let (base, entry) = table.entries.range(..=start).next_back()?;
        let offset = start - base;
        let is_inside = offset.checked_add(bytes.len())? <= entry.len_bytes;
        is_inside.then(|| ExportPlace {
            number: entry.number,
            offset_bytes: offset as u64,
            region: Weak::clone(&entry.region),
        })
    }

    /// Return whether a region is still there.
    pub(crate) fn has(&self, number: u64) -> bool {
        self.table().entries.values().any(|entry| entry.number == number)
    }

    /// Return the number of regions removed so far, modulo 2^32.
    #[inline]
    pub(crate) fn removals(&self) -> u32 {
        self.removals.load(Ordering::Acquire)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Export {
    /// Remove the region: nothing in it is sent by its place any more, and peers are told to unmap it.
    pub(crate) fn withdraw(&self) {
        // In a forked child the lock may be held for ever.
        if self.exports.process.is_forked() {
            return;
        }
        let mut table = self.exports.table();
        if table.entries.get(&self.start).is_some_and(|entry| entry.number == self.number) {
            table.entries.remove(&self.start);
            self.exports.removals.fetch_add(1, Ordering::Release);
        }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.withdraw();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::shm::Pages;

    #[test]
    fn bytes_are_found_in_their_region_until_it_is_withdrawn() {
        let exports = Arc::new(RegionExports::default());
        let regions =
            [3 * 4096, 4096].map(|len| Arc::new(Mutex::new(Region::create(len, Pages::Normal).expect("memory"))));
        let guards = regions.each_ref().map(|region| exports.add(region));
        let bytes = |nth: usize, from: usize, len: usize| {
            let base = regions[nth].lock().expect("no panic").base().as_ptr();
            // SAFETY: nobody writes, and the ranges that are read lie in the mapping; others are only compared.
            unsafe { std::slice::from_raw_parts(base.add(from), len) }
        };
        let place = |bytes: &[u8]| exports.find(bytes).map(|place| (place.number, place.offset_bytes));
        assert_eq!(place(bytes(0, 0, 3 * 4096)), Some((1, 0)));
        assert_eq!(place(bytes(0, 4097, 5)), Some((1, 4097)));
        assert_eq!(place(bytes(1, 4095, 1)), Some((2, 4095)));
        assert_eq!(place(&[0; 8]), None);
        guards[0].withdraw();
        guards[0].withdraw();
        assert_eq!((place(bytes(0, 0, 1)), exports.removals(), exports.has(1), exports.has(2)), (None, 1, false, true));
        let again = exports.add(&regions[0]);
        drop(guards);
        assert_eq!((place(bytes(0, 0, 1)), place(bytes(1, 0, 1))), (Some((3, 0)), None));
        drop(again);
        assert_eq!((place(bytes(0, 0, 1)), exports.removals()), (None, 3));
    }
}
