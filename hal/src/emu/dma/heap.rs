//! Memory of this process that an engine can be given: a card's own, or a rank's where ranks are threads.

use crate::dma::DmaMemory;
use crate::dma::shared::{copy_in, copy_out};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Zeroed, page-aligned memory on the heap.
#[derive(Debug)]
pub struct HeapMemory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to this value and is reached by raw pointers only.
unsafe impl Send for HeapMemory {}
// SAFETY: as above; who reads and writes at the same time gets a mixture, as `DmaMemory` says.
unsafe impl Sync for HeapMemory {}

// SAFETY: the allocation is `layout.size()` bytes at `base`, and stays until `drop`.
unsafe impl DmaMemory for HeapMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn len_bytes(&self) -> usize {
        self.layout.size()
    }
}

impl HeapMemory {
    /// Allocate `len_bytes` zeroes.
    ///
    /// # Panics
    /// If `len_bytes` is 0, or more than an allocation can be.
    pub fn new(len_bytes: usize) -> Self {
        assert!(len_bytes > 0, "an engine is given at least one byte");
        let layout = Layout::from_size_align(len_bytes, 4096).expect("no allocation is that long");
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, layout }
    }

    /// Copy bytes in. What an engine reads there meanwhile is a mixture of old and new.
    ///
    /// # Panics
    /// If they do not fit.
    #[track_caller]
    pub fn write(&self, offset_bytes: usize, bytes: &[u8]) {
        let at = self.at(offset_bytes, bytes.len());
        // SAFETY: `at` has checked the bounds.
        unsafe { copy_in(at, bytes) };
    }

    /// Copy bytes out: a mixture of old and new where an engine writes meanwhile.
    ///
    /// # Panics
    /// If there are not as many.
    #[track_caller]
    pub fn read(&self, offset_bytes: usize, bytes: &mut [u8]) {
        let at = self.at(offset_bytes, bytes.len());
        // SAFETY: as above.
        unsafe { copy_out(bytes, at) };
    }

    #[track_caller]
    fn at(&self, offset_bytes: usize, len_bytes: usize) -> *mut u8 {
        let fits = offset_bytes.checked_add(len_bytes).is_some_and(|end| end <= self.layout.size());
        assert!(fits, "{len_bytes} bytes at {offset_bytes} reach beyond {} bytes", self.layout.size());
        self.base.as_ptr().wrapping_add(offset_bytes)
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
