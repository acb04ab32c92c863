//! Memory that engines can access.

use core::ptr::NonNull;

/// Memory at a fixed address, for engines that use the processor's addresses.
///
/// # Safety
/// From `base` on, `len_bytes` bytes must be valid for reads and writes from any thread, at that address, until the
/// value is dropped, whatever other processes do; a shared mapping must be sealed against truncation. No Rust reference
/// to the bytes may exist while an engine uses them. They behave like device memory: a read during a write returns any
/// mixture of old and new bytes.
pub unsafe trait DmaMemory: Send + Sync {
    /// Return the address of the memory.
    fn base(&self) -> NonNull<u8>;

    /// Return the length of the memory in bytes.
    fn len_bytes(&self) -> usize;

    /// Return what backs the memory. Engines use it to detect that two mappings share bytes, so a mapping of an object
    /// that can be mapped twice must override this method. The value must not change until the memory is dropped.
    fn backing(&self) -> Backing {
        Backing::of_address(self.base())
    }
}

/// The object behind a mapping and the offset in it. The same bytes have the same backing at every address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Backing {
    /// A file, by device and inode; `None` for private memory of this process.
    file: Option<(u64, u64)>,
    offset_bytes: u64,
}

impl Backing {
    /// Return the backing of memory that is mapped only at `base`.
    pub fn of_address(base: NonNull<u8>) -> Self {
        Self { file: None, offset_bytes: base.addr().get() as u64 }
    }

    /// Return the backing of a mapped file (`st_dev`, `st_ino`). The file must exist as long as the memory, because
    /// inodes are reused.
    pub const fn of_file(device: u64, inode: u64, offset_bytes: u64) -> Self {
        Self { file: Some((device, inode)), offset_bytes }
    }

    /// Return the backing at `offset_bytes` after this one.
    #[must_use]
    pub const fn at(self, offset_bytes: u64) -> Self {
        Self { offset_bytes: self.offset_bytes.wrapping_add(offset_bytes), ..self }
    }

    /// Return whether `len_bytes` bytes from here on overlap `other_len_bytes` bytes from `other` on.
    pub fn overlaps(&self, len_bytes: usize, other: &Self, other_len_bytes: usize) -> bool {
        // In 128 bits the ends cannot overflow.
        let span =
            |of: &Self, len_bytes| (u128::from(of.offset_bytes), u128::from(of.offset_bytes) + len_bytes as u128);
        let (a, b) = (span(self, len_bytes), span(other, other_len_bytes));
        self.file == other.file && a.0 < b.1 && b.0 < a.1
    }
}
