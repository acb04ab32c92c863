//! Memory that an engine may be told to read and write.

use core::ptr::NonNull;

/// Memory that stays where it is, for engines that reach it by the processor's addresses.
///
/// # Safety
/// From `base`, `len_bytes` bytes are valid for reads and writes from any thread, and stay so, at that address, until
/// the value is dropped, whatever anybody else does (a shared mapping must be sealed against truncation). No Rust
/// reference to them may live while an engine uses them: to this process they are like a device's memory, and what a
/// read gives while somebody writes is any mixture of old and new.
pub unsafe trait DmaMemory: Send + Sync {
    /// Return where the memory begins.
    fn base(&self) -> NonNull<u8>;

    /// Return how long it is.
    fn len_bytes(&self) -> usize;

    /// Return what the memory is a part of, by which engines tell what is the same: a mapping of something that can be
    /// mapped twice has to say what it maps. Fixed until the value is dropped.
    fn backing(&self) -> Backing {
        Backing::of_address(self.base())
    }
}

/// What memory is a part of, and where it begins in it: the same bytes under two addresses have one backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Backing {
    /// A file, by its device and its number there; `None`: this process's own memory.
    file: Option<(u64, u64)>,
    offset_bytes: u64,
}

impl Backing {
    /// Describe memory of this process that is mapped once.
    pub fn of_address(base: NonNull<u8>) -> Self {
        Self { file: None, offset_bytes: base.addr().get() as u64 }
    }

    /// Describe a part of a file, by its device and its number there (`st_dev`, `st_ino`). The file is to stay while the
    /// memory does: numbers of files that are gone are given again.
    pub const fn of_file(device: u64, inode: u64, offset_bytes: u64) -> Self {
        Self { file: Some((device, inode)), offset_bytes }
    }

    /// Return what begins `offset_bytes` later.
    #[must_use]
    pub const fn at(self, offset_bytes: u64) -> Self {
        Self { offset_bytes: self.offset_bytes.wrapping_add(offset_bytes), ..self }
    }

    /// Tell whether `len_bytes` from here on and `other_len_bytes` from `other` on have bytes in common.
    pub fn overlaps(&self, len_bytes: usize, other: &Self, other_len_bytes: usize) -> bool {
        // Wider than both, so that the end of an address space is no end.
        let span =
            |of: &Self, len_bytes| (u128::from(of.offset_bytes), u128::from(of.offset_bytes) + len_bytes as u128);
        let (a, b) = (span(self, len_bytes), span(other, other_len_bytes));
        self.file == other.file && a.0 < b.1 && b.0 < a.1
    }
}
