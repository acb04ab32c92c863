//! Heap memory for an engine: a card's local memory, or a rank's memory if ranks are threads.

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

// SAFETY: the memory belongs to this value and is accessed only through raw pointers.
unsafe impl Send for HeapMemory {}
// SAFETY: see above; concurrent accesses see a mixture of old and new bytes, as `DmaMemory` permits.
unsafe impl Sync for HeapMemory {}

// SAFETY: `layout.size()` bytes are allocated at `base` until `drop`.
unsafe impl DmaMemory for HeapMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn len_bytes(&self) -> usize {
        self.layout.size()
    }
}

impl HeapMemory {
    /// Allocate `len_bytes` zero bytes.
    ///
    /// # Panics
    /// If `len_bytes` is 0 or exceeds the maximum size of an allocation.
    pub fn new(len_bytes: usize) -> Self {
        assert!(len_bytes > 0, "len_bytes must not be 0");
        let layout =
            Layout::from_size_align(len_bytes, 4096).expect("len_bytes exceeds the maximum size of an allocation");
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        Self { base, layout }
    }

    /// Copy bytes in. Concurrent reads of an engine see a mixture of old and new bytes.
    ///
    /// # Panics
    /// If they reach beyond the end.
    #[track_caller]
    pub fn write(&self, offset_bytes: usize, bytes: &[u8]) {
        let at = self.at(offset_bytes, bytes.len());
        // SAFETY: `at` has checked the bounds.
        unsafe { copy_in(at, bytes) };
    }

    /// Copy bytes out. During a concurrent write of an engine this returns a mixture of old and new bytes.
    ///
    /// # Panics
    /// If they reach beyond the end.
    #[track_caller]
    pub fn read(&self, offset_bytes: usize, bytes: &mut [u8]) {
        let at = self.at(offset_bytes, bytes.len());
        // SAFETY: see above.
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
