//! Memory registered with the device until it is dropped.
//!
//! Invariant: memory is freed only once it is deregistered; if that fails, it is leaked.

use super::config::VerbsError;
use super::objects::Domain;
use crate::dma::DmaMemory;
use crate::dma::shared::{copy_in, copy_out};
use ibverbs_sys as ibv;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Zeroed memory owned by this value and registered until it is dropped.
pub(super) struct RegisteredBuffer {
    mr: NonNull<ibv::ibv_mr>,
    base: NonNull<u8>,
    layout: std::alloc::Layout,
    domain: Arc<Domain>,
}

// SAFETY: the memory belongs to this value.
unsafe impl Send for RegisteredBuffer {}

fn exposed_access() -> ibv::ibv_access_flags {
    use ibv::ibv_access_flags as access;
    access::IBV_ACCESS_LOCAL_WRITE | access::IBV_ACCESS_REMOTE_WRITE | access::IBV_ACCESS_REMOTE_READ
}

/// Register memory; null on failure.
///
/// # Safety
/// The memory is valid until it is deregistered.
unsafe fn register(
    domain: &Domain,
    base: NonNull<u8>,
    len_bytes: usize,
    access: ibv::ibv_access_flags,
) -> *mut ibv::ibv_mr {
    // SAFETY: the caller ensures that the memory is valid until it is deregistered.
    unsafe { ibv::ibv_reg_mr(domain.raw.as_ptr(), base.as_ptr().cast(), len_bytes, access.0.cast_signed()) }
}

/// Alignment of registered memory. Devices translate addresses per page, so buffers start at a page boundary.
const PAGE_LEN_BYTES: usize = 4096;

impl RegisteredBuffer {
    /// Allocate and register `len_bytes`, more than 0, for the device's own reads and writes.
    pub(super) fn new(domain: &Arc<Domain>, len_bytes: usize) -> Result<Self, VerbsError> {
        Self::with_access(domain, len_bytes, ibv::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE)
    }

    /// Like [`Self::new`], but peers can read and write the memory as well.
    pub(super) fn exposed(domain: &Arc<Domain>, len_bytes: usize) -> Result<Self, VerbsError> {
        Self::with_access(domain, len_bytes, exposed_access())
    }

    fn with_access(domain: &Arc<Domain>, len_bytes: usize, access: ibv::ibv_access_flags) -> Result<Self, VerbsError> {
        let too_long = || VerbsError::Register { len_bytes, source: io::Error::from(io::ErrorKind::OutOfMemory) };
        let layout = std::alloc::Layout::from_size_align(len_bytes.max(1), PAGE_LEN_BYTES).map_err(|_| too_long())?;
        // SAFETY: the size of the layout is at least 1.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(too_long)?;
        // SAFETY: the allocation has this length and is freed in `drop`, after it is deregistered.
        let mr = unsafe { register(domain, base, len_bytes, access) };
        let Some(mr) = NonNull::new(mr) else {
            let source = io::Error::last_os_error();
            // SAFETY: it was allocated with this layout and is not registered.
            unsafe { std::alloc::dealloc(base.as_ptr(), layout) };
            return Err(VerbsError::Register { len_bytes, source });
        };
        Ok(Self { mr, base, layout, domain: Arc::clone(domain) })
    }

    /// Register the memory under a new key, which invalidates the old one.
    pub(super) fn reregister(&mut self) -> Result<(), VerbsError> {
        let len_bytes = self.layout.size();
        let failed = || VerbsError::Register { len_bytes, source: io::Error::last_os_error() };
        // The old registration is released afterwards, so the two keys differ. SAFETY: as in `with_access`.
        let new = unsafe { register(&self.domain, self.base, len_bytes, exposed_access()) };
        let new = NonNull::new(new).ok_or_else(failed)?;
        // SAFETY: registered, and owned by this value.
        if unsafe { ibv::ibv_dereg_mr(self.mr.as_ptr()) } != 0 {
            let error = failed();
            // SAFETY: as above.
            unsafe { ibv::ibv_dereg_mr(new.as_ptr()) };
            return Err(error);
        }
        self.mr = new;
        Ok(())
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: `mr` remains registered until `self` is dropped.
        unsafe { self.mr.as_ref() }.rkey
    }

    pub(super) const fn len_bytes(&self) -> usize {
        self.layout.size()
    }

    /// Copy bytes out; they are a mixture of old and new if a peer writes concurrently.
    ///
    /// # Panics
    /// If the range exceeds the memory: a bug of the caller.
    pub(super) fn copy_out(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        // SAFETY: inside memory owned by this value. Peers may write it through the device at any time: no code has a
        // reference to it, and each byte is copied once, its old or its new value.
        unsafe { copy_out(into, self.base.as_ptr().add(offset)) };
    }

    /// Copy bytes in; peers may read them concurrently.
    ///
    /// # Panics
    /// If the range exceeds the memory: a bug of the caller.
    pub(super) fn copy_in(&mut self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        // SAFETY: as above.
        unsafe { copy_in(self.base.as_ptr().add(offset), from) };
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: `mr` remains registered until `self` is dropped.
        unsafe { self.mr.as_ref() }.lkey
    }

    /// Return the device's address of a range.
    ///
    /// # Panics
    /// If the range exceeds the memory: a bug of the caller.
    pub(super) fn device_addr(&self, offset: usize, len_bytes: usize) -> u64 {
        self.check(offset, len_bytes);
        (self.base.as_ptr() as usize + offset) as u64
    }

    /// Borrow a range.
    ///
    /// # Safety
    /// The device must not write the range while the slice exists.
    pub(super) unsafe fn bytes(&self, offset: usize, len_bytes: usize) -> &[u8] {
        self.check(offset, len_bytes);
        // SAFETY: inside memory that was initialised when allocated; the caller ensures that the device does not write
        // it.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len_bytes) }
    }

    /// Borrow a range to write to it.
    ///
    /// # Safety
    /// The device must neither read nor write the range while the slice exists.
    pub(super) unsafe fn bytes_mut(&mut self, offset: usize, len_bytes: usize) -> &mut [u8] {
        self.check(offset, len_bytes);
        // SAFETY: as above, and this value is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(offset), len_bytes) }
    }

    fn check(&self, offset: usize, len_bytes: usize) {
        let end = offset.checked_add(len_bytes);
        assert!(end.is_some_and(|end| end <= self.layout.size()), "{len_bytes} bytes at {offset} of {:?}", self.layout);
    }
}

/// Registration of memory that others own, for the device's local access, until it is dropped.
pub(super) struct Registration {
    mr: NonNull<ibv::ibv_mr>,
    memory: Arc<dyn DmaMemory>,
    _domain: Arc<Domain>,
}

// SAFETY: the registration belongs to this value, and the memory may be reached from any thread.
unsafe impl Send for Registration {}

impl Registration {
    pub(super) fn new(domain: &Arc<Domain>, memory: &Arc<dyn DmaMemory>) -> Result<Self, VerbsError> {
        Self::with_access(domain, memory, ibv::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE)
    }

    /// As [`Registration::new`], also for a peer's reads and, if `may_write`, its writes.
    pub(super) fn exposed(
        domain: &Arc<Domain>,
        memory: &Arc<dyn DmaMemory>,
        may_write: bool,
    ) -> Result<Self, VerbsError> {
        let read = ibv::ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        Self::with_access(domain, memory, if may_write { exposed_access() } else { read })
    }

    fn with_access(
        domain: &Arc<Domain>,
        memory: &Arc<dyn DmaMemory>,
        access: ibv::ibv_access_flags,
    ) -> Result<Self, VerbsError> {
        let len_bytes = memory.len_bytes();
        // SAFETY: `DmaMemory` is valid until it is dropped, which is after its deregistration.
        let mr = unsafe { register(domain, memory.base(), len_bytes, access) };
        let failed = || VerbsError::Register { len_bytes, source: io::Error::last_os_error() };
        let mr = NonNull::new(mr).ok_or_else(failed)?;
        Ok(Self { mr, memory: Arc::clone(memory), _domain: Arc::clone(domain) })
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: `mr` remains registered until `self` is dropped.
        unsafe { self.mr.as_ref() }.lkey
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.mr.as_ref() }.rkey
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered, and deregistered once. If that fails, the device could still write: leak the memory.
        if unsafe { ibv::ibv_dereg_mr(self.mr.as_ptr()) } != 0 {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        // SAFETY: registered, and deregistered once. If that fails, a queue pair could still write: leak the memory.
        if unsafe { ibv::ibv_dereg_mr(self.mr.as_ptr()) } == 0 {
            // SAFETY: allocated with this layout, and deregistered.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
        }
    }
}
