//! Registered memory: what a program allocates for the device to reach, and the lookup of slices in it.
//!
//! A [`Buffer`] and the registry both hold the mapping. It is unmapped once the buffer is dropped *and* the device has
//! released the region (or its driver is gone). Where the memory belongs to an arena that the device later gives to
//! another rank, they hold the connection to the device too: its end tells the device that the arena is no longer in
//! use here. A dropped buffer adds its key to a list that the driver processes on its next call. Only memory allocated
//! here is ever looked up, so an address cannot belong to anything else by then (PROTOCOL 10).
//!
//! Soundness: the device writes only to destinations of operations in flight, and those hold the buffer, by `&mut` or
//! as its owner, until their chunks are answered or fenced. To this process the device is like a system call that fills
//! a buffer.

use crate::region_exports::{Export, RegionExports};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use sumac_hal::dma::{Address, DmaMemory, RegionKey, Span};
use sumac_hal::shm::{Connection, ProcessMark, Region};

/// Memory for operations, allocated by [`Communicator::alloc`](crate::Communicator::alloc): a slice that the leaf
/// device reads and writes itself if the communicator uses the zero-copy transport, and ordinary memory if not.
///
/// Any part of it may be passed to a call. It outlives its communicator, as plain memory. A forked process shares
/// memory that the device can reach and has its own copy of memory that it cannot; it may read and drop either, and its
/// writes to shared memory are visible to the process that allocated it.
///
/// Several threads and several operations may use parts of it at once (`split_at_mut`): whatever happens to one, a lost
/// device included, does not affect the others' parts. To guarantee that, the device writes only to pages (usually 4
/// KiB) that hold nothing but an operation's own results. Where an output begins or ends within a page, the chunks
/// there are copied through the bounce buffer: one at either end, or more if a chunk is shorter than a page. Whole
/// buffers, and parts that begin and end on page boundaries, have no such edges.
pub struct Buffer<T: bytemuck::Pod> {
    backing: Backing<T>,
}

enum Backing<T> {
    Plain(Vec<T>),
    Registered(Lease<T>),
}

/// A buffer's share of a region.
struct Lease<T> {
    base: NonNull<T>,
    len: usize,
    key: RegionKey,
    export: Option<Arc<Export>>,
    /// Keeps the mapping alive.
    _region: SharedRegion,
    dropped: Arc<Dropped>,
}

// SAFETY: a lease is the only owner of the elements in its region, as a `Vec` is of its own.
unsafe impl<T: Send> Send for Lease<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Lease<T> {}

/// A region held by its buffer and the registry. The lock is for [`Region::sever`] and for copies after a fence;
/// neither moves the memory.
pub(super) type SharedRegion = Arc<Mutex<Region>>;

/// Keys of regions whose buffers have been dropped.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    any: AtomicBool,
    keys: Mutex<Vec<RegionKey>>,
    /// The driver's process.
    process: ProcessMark,
    /// Keeps the connection open where its end would give the memory to another rank.
    _connection: Option<Arc<Connection>>,
}

impl<T: bytemuck::Pod> Buffer<T> {
    /// Return zeroed memory that no device reaches.
    pub(crate) fn plain(len: usize) -> Self {
        Self { backing: Backing::Plain(vec![T::zeroed(); len]) }
    }

    /// Return whether a device can reach the memory.
    pub const fn is_registered(&self) -> bool {
        matches!(self.backing, Backing::Registered(_))
    }
}

impl<T: bytemuck::Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.backing {
            Backing::Plain(values) => values,
            // SAFETY: `Registry::insert` checked that the region holds `len` elements; it is page-aligned, stays mapped
            // while the lease lives, and all its bytes are values. Nobody writes meanwhile: see the head of this file.
            Backing::Registered(lease) => unsafe { slice::from_raw_parts(lease.base.as_ptr(), lease.len) },
        }
    }
}

impl<T: bytemuck::Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.backing {
            Backing::Plain(values) => values,
            // SAFETY: as above, and nobody reads it either.
            Backing::Registered(lease) => unsafe { slice::from_raw_parts_mut(lease.base.as_ptr(), lease.len) },
        }
    }
}

impl<T: bytemuck::Pod + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T> Drop for Lease<T> {
    fn drop(&mut self) {
        if self.dropped.process.is_forked() {
            // The attached process tells the device; its lock may be held for ever in this copy.
            return;
        }
        self.export.iter().for_each(|export| export.withdraw());
        self.dropped.keys.lock().unwrap_or_else(PoisonError::into_inner).push(self.key);
        self.dropped.any.store(true, Ordering::Release);
    }
}

/// The registered regions of one driver.
#[derive(Debug)]
pub(super) struct Registry {
    entries: Vec<Entry>,
    dropped: Arc<Dropped>,
    /// Where new regions are exported to other ranks of this machine.
    exports: Option<Arc<RegionExports>>,
}

#[derive(Debug)]
struct Entry {
    start: usize,
    len_bytes: usize,
    /// The bytes that are elements; nothing uses what lies behind.
    used_bytes: usize,
    page_len_bytes: usize,
    key: RegionKey,
    /// What lets other ranks of this machine map it.
    export: Option<Arc<Export>>,
    region: SharedRegion,
}

impl Registry {
    /// Create an empty registry. It and its buffers keep `connection` open.
    pub(super) fn new(connection: Option<Arc<Connection>>) -> Self {
        let dropped = Arc::new(Dropped { _connection: connection, ..Dropped::default() });
        Self { entries: Vec::new(), dropped, exports: None }
    }

    /// Return whether this process was forked from the driver's.
    pub(super) fn is_forked(&self) -> bool {
        self.dropped.process.is_forked()
    }

    /// Add a registered region, and return a buffer of `len` elements in it.
    ///
    /// # Panics
    /// If the region is too short.
    pub(super) fn insert<T: bytemuck::Pod>(&mut self, region: Region, key: RegionKey, len: usize) -> Buffer<T> {
        let (base, len_bytes) = (region.base(), region.len_bytes());
        let base = base.cast::<T>();
        assert!(len.checked_mul(size_of::<T>()).is_some_and(|needed| needed <= len_bytes) && base.is_aligned());
        let (page_len_bytes, used_bytes) = (region.page_len_bytes(), len * size_of::<T>());
        let region = Arc::new(Mutex::new(region));
        let start = base.as_ptr().expose_provenance();
        let export = self.exports.as_ref().map(|exports| Arc::new(exports.add(&region)));
        let shared = (export.clone(), Arc::clone(&region));
        let entry = Entry { start, len_bytes, used_bytes, page_len_bytes, key, export: shared.0, region: shared.1 };
        self.entries.push(entry);
        let dropped = Arc::clone(&self.dropped);
        Buffer { backing: Backing::Registered(Lease { base, len, key, export, _region: region, dropped }) }
    }

    /// Export the regions that follow to other ranks of this machine.
    pub(super) fn export_to(&mut self, exports: &Arc<RegionExports>) {
        if self.exports.is_none() {
            self.exports = Some(Arc::clone(exports));
        }
    }

    /// Let no rank read a region any more, whose pages are about to be severed from what they have mapped.
    pub(super) fn withdraw_export(&self, key: RegionKey) {
        let exports = self.entries.iter().filter(|entry| entry.key == key).filter_map(|entry| entry.export.as_ref());
        exports.for_each(|export| export.withdraw());
    }

    /// Return the address of these bytes in registered memory; `None` if they are elsewhere, or empty.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<Address> {
        let (entry, offset) = self.entry_of(bytes)?;
        Some(Address { region: entry.key, offset_bytes: offset as u64 })
    }

    fn entry_of(&self, bytes: &[u8]) -> Option<(&Entry, usize)> {
        let start = bytes.as_ptr().addr();
        self.entries.iter().find_map(|entry| {
            let offset = start.checked_sub(entry.start)?;
            let fits = !bytes.is_empty() && offset.checked_add(bytes.len())? <= entry.len_bytes;
            fits.then_some((entry, offset))
        })
    }

    /// Return the pages that hold nothing but these bytes of registered memory; `None` if they are elsewhere.
    pub(super) fn whole_pages(&self, bytes: &[u8]) -> Option<Span> {
        let (entry, offset) = self.entry_of(bytes)?;
        let (page, end) = (entry.page_len_bytes, offset + bytes.len());
        let start = offset.next_multiple_of(page);
        let end = if end >= entry.used_bytes { entry.len_bytes } else { end / page * page };
        let address = Address { region: entry.key, offset_bytes: start as u64 };
        Some(Span { address, len_bytes: end.saturating_sub(start) as u64 })
    }

    pub(super) fn region(&self, key: RegionKey) -> Option<&SharedRegion> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| &entry.region)
    }

    /// Return the key of a region whose buffer has been dropped.
    pub(super) fn next_dropped(&self) -> Option<RegionKey> {
        if !self.dropped.any.load(Ordering::Acquire) {
            return None;
        }
        let mut keys = self.dropped.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let key = keys.pop();
        if key.is_none() {
            self.dropped.any.store(false, Ordering::Release);
        }
        key
    }

    /// Put back a key for which the admin queue had no room.
    pub(super) fn put_back(&self, key: RegionKey) {
        self.dropped.keys.lock().unwrap_or_else(PoisonError::into_inner).push(key);
    }

    /// Remove a region that the device has released.
    pub(super) fn remove(&mut self, key: RegionKey) {
        self.entries.retain(|entry| entry.key != key);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use sumac_hal::shm::{Listener, Pages, SocketError};

    const LONG: Duration = Duration::from_secs(20);
    const KEY: RegionKey = RegionKey { index: 1, generation: 1 };

    #[test]
    fn whole_pages_exclude_pages_shared_with_neighbours() {
        let region = Region::create(5 * 65_536 + 100, Pages::Normal).expect("memory");
        let page = region.page_len_bytes();
        let mut registry = Registry::new(None);
        // The region is longer than its elements.
        let buffer = registry.insert::<u8>(region, KEY, 5 * 65_536);
        let of = |range: std::ops::Range<usize>| {
            let Span { address, len_bytes } = registry.whole_pages(&buffer[range]).expect("registered");
            assert_eq!(address.region, KEY);
            (address.offset_bytes as usize, len_bytes as usize)
        };
        assert_eq!(of(0..5 * 65_536), (0, 5 * 65_536 + 100));
        assert_eq!(of(1..5 * 65_536), (page, 5 * 65_536 + 100 - page));
        assert_eq!(of(0..3 * page), (0, 3 * page));
        assert_eq!(of(1..3 * page - 1), (page, page));
        assert_eq!((of(1..page).1, of(page + 1..2 * page - 1).1), (0, 0));
        assert_eq!(registry.whole_pages(&[0; 4]), None);
    }

    #[test]
    fn connection_stays_open_until_last_buffer_is_dropped() {
        let name = format!("sumac-memory-{}", std::process::id());
        let listener = Listener::bind(&name).expect("a free name");
        let rank = Arc::new(Connection::open(&name, LONG).expect("it listens"));
        let device = listener.accept(LONG).expect("a connection").expect("it waits");
        let is_closed = || match device.receive(Duration::ZERO) {
            Err(SocketError::Timeout(_)) => false,
            Err(SocketError::Closed) => true,
            other => panic!("{other:?}"),
        };
        let mut registry = Registry::new(Some(Arc::clone(&rank)));
        drop(rank);
        let region = Region::create(4096, Pages::Normal).expect("memory");
        let mut buffer = registry.insert::<u32>(region, KEY, 8);
        drop(registry);
        assert!(!is_closed());
        buffer.fill(7);
        drop(buffer);
        assert!(is_closed());
    }
}
