//! Memory that both sides access concurrently through atomics, and copy bytes in and out of.

use super::mapping::{Mapping, MemoryError, Pages, SEALS};
use crate::dma::shared::{copy_in_cached, copy_out};
use rustix::mm::ProtFlags;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::slice;
use std::sync::atomic::AtomicU64;

/// Memory of registers, rings and doorbells, which both sides access concurrently through atomics. Forked children do
/// not inherit it (`MADV_DONTFORK`): an access there faults.
#[derive(Debug)]
pub struct BarMemory {
    mapping: Mapping,
}

impl BarMemory {
    /// Create zeroed memory for a BAR, on the device's side.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn create(len_bytes: usize) -> Result<Self, MemoryError> {
        let len_bytes = len_bytes.next_multiple_of(8);
        Ok(Self { mapping: Mapping::create("sumac-bar", len_bytes, Pages::Normal, SEALS)?.keep_from_forks() })
    }

    /// Map the BAR that a device has handed over, if it is at most `max_len_bytes` long and sealed against resizing.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open(file: OwnedFd, max_len_bytes: u64) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open(file, max_len_bytes, ProtFlags::READ | ProtFlags::WRITE)?.keep_from_forks() })
    }

    /// Return the descriptor to hand over.
    ///
    /// # Panics
    /// If the memory was opened from a descriptor, which it does not keep.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }

    /// Copy bytes in. Who reads them concurrently sees a mixture of old and new.
    ///
    /// # Panics
    /// If they exceed the memory.
    #[track_caller]
    pub fn write(&self, offset_bytes: usize, bytes: &[u8]) {
        let at = self.mapping.at(offset_bytes, bytes.len());
        // SAFETY: `at` has checked the bounds, and the mapping is sealed, so peers cannot shrink it. No reference but
        // to atomics points into it.
        unsafe { copy_in_cached(at, bytes) };
    }

    /// Copy bytes out. They are a mixture of old and new if the peer writes concurrently.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    #[track_caller]
    pub fn read(&self, offset_bytes: usize, bytes: &mut [u8]) {
        let at = self.mapping.at(offset_bytes, bytes.len());
        // SAFETY: as above. For each byte, a concurrent write yields the old or the new value.
        unsafe { copy_out(bytes, at) };
    }

    /// Return the memory.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned and stays accessible. Both sides access it through atomics; a peer that
        // does not can corrupt values only.
        unsafe { slice::from_raw_parts(self.mapping.base.as_ptr().cast(), self.mapping.len_bytes / 8) }
    }
}
