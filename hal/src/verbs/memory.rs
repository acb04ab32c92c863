//! Registered memory: allocated here, reached by the device until it is dropped.
//!
//! Invariant: memory is freed only when the device has let go of it; what it does not let go of is left to it.

use super::config::VerbsError;
use super::objects::Domain;
use crate::dma::DmaMemory;
use crate::dma::shared::{copy_in, copy_out};
use ibverbs_sys as ibv;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory that the device reaches: zeroed, of this value's own, and registered until it is dropped.
pub(super) struct Registered {
    mr: NonNull<ibv::ibv_mr>,
    base: NonNull<u8>,
    layout: std::alloc::Layout,
    domain: Arc<Domain>,
}

// SAFETY: the memory belongs to this value.
unsafe impl Send for Registered {}

fn exposed_access() -> ibv::ibv_access_flags {
    use ibv::ibv_access_flags as access;
    access::IBV_ACCESS_LOCAL_WRITE | access::IBV_ACCESS_REMOTE_WRITE | access::IBV_ACCESS_REMOTE_READ
}

/// Register memory; null if that can't be.
///
/// # Safety
/// The memory is all there, and stays until it is deregistered.
unsafe fn register(
    domain: &Domain,
    base: NonNull<u8>,
    len_bytes: usize,
    access: ibv::ibv_access_flags,
) -> *mut ibv::ibv_mr {
    // SAFETY: the caller's promise.
    unsafe { ibv::ibv_reg_mr(domain.raw.as_ptr(), base.as_ptr().cast(), len_bytes, access.0.cast_signed()) }
}

/// Where registered memory begins: at a page, as devices like it.
const PAGE_LEN_BYTES: usize = 4096;

impl Registered {
    /// Allocate and register `len_bytes`, more than 0, for the device's own reads and writes.
    pub(super) fn new(domain: &Arc<Domain>, len_bytes: usize) -> Result<Self, VerbsError> {
        Self::with_access(domain, len_bytes, ibv::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE)
    }

    /// The same for reads and writes of peers, too.
    pub(super) fn exposed(domain: &Arc<Domain>, len_bytes: usize) -> Result<Self, VerbsError> {
        Self::with_access(domain, len_bytes, exposed_access())
    }

    fn with_access(domain: &Arc<Domain>, len_bytes: usize, access: ibv::ibv_access_flags) -> Result<Self, VerbsError> {
        let too_long = || VerbsError::Register { len_bytes, source: io::Error::from(io::ErrorKind::OutOfMemory) };
        let layout = std::alloc::Layout::from_size_align(len_bytes.max(1), PAGE_LEN_BYTES).map_err(|_| too_long())?;
        // SAFETY: the layout has a size.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or_else(too_long)?;
        // SAFETY: memory of this length, which stays until it is deregistered in `drop`.
        let mr = unsafe { register(domain, base, len_bytes, access) };
        let Some(mr) = NonNull::new(mr) else {
            let source = io::Error::last_os_error();
            // SAFETY: allocated with this layout, and nobody else knows of it.
            unsafe { std::alloc::dealloc(base.as_ptr(), layout) };
            return Err(VerbsError::Register { len_bytes, source });
        };
        Ok(Self { mr, base, layout, domain: Arc::clone(domain) })
    }

    /// Take the memory away from everybody who has its key: it has another one afterwards.
    pub(super) fn renew(&mut self) -> Result<(), VerbsError> {
        let len_bytes = self.layout.size();
        let failed = || VerbsError::Register { len_bytes, source: io::Error::last_os_error() };
        // The new one first, so that the keys differ. SAFETY: as in `with_access`.
        let fresh = unsafe { register(&self.domain, self.base, len_bytes, exposed_access()) };
        let fresh = NonNull::new(fresh).ok_or_else(failed)?;
        // SAFETY: registered; this is the only one who knows of either.
        if unsafe { ibv::ibv_dereg_mr(self.mr.as_ptr()) } != 0 {
            let error = failed();
            // SAFETY: as above.
            unsafe { ibv::ibv_dereg_mr(fresh.as_ptr()) };
            return Err(error);
        }
        self.mr = fresh;
        Ok(())
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: a registration that is still there.
        unsafe { self.mr.as_ref() }.rkey
    }

    pub(super) const fn len_bytes(&self) -> usize {
        self.layout.size()
    }

    /// Copy bytes out, which peers may be writing: then they are of either time.
    ///
    /// # Panics
    /// If they are not all inside: a bug of the caller.
    pub(super) fn copy_out(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        // SAFETY: inside memory of this value's own. Peers write it through the device whenever they like: nobody has a
        // reference to it, and each byte is copied once, the old one or the new one.
        unsafe { copy_out(into, self.base.as_ptr().add(offset)) };
    }

    /// Copy bytes in, which peers may be reading.
    ///
    /// # Panics
    /// If they do not all fit inside: a bug of the caller.
    pub(super) fn copy_in(&mut self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        // SAFETY: as above.
        unsafe { copy_in(self.base.as_ptr().add(offset), from) };
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: a registration that is still there.
        unsafe { self.mr.as_ref() }.lkey
    }

    /// Return the address of a range for the device.
    ///
    /// # Panics
    /// If the range is not all inside: a bug of the caller.
    pub(super) fn device_addr(&self, offset: usize, len_bytes: usize) -> u64 {
        self.check(offset, len_bytes);
        (self.base.as_ptr() as usize + offset) as u64
    }

    /// Return bytes.
    ///
    /// # Safety
    /// The device must not write them as long as the slice lives.
    pub(super) unsafe fn bytes(&self, offset: usize, len_bytes: usize) -> &[u8] {
        self.check(offset, len_bytes);
        // SAFETY: inside, initialised when allocated; the caller vouches that nobody writes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset), len_bytes) }
    }

    /// Return bytes to write.
    ///
    /// # Safety
    /// The device must neither read nor write them as long as the slice lives.
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

/// Somebody else's memory, registered for the device's own reads and writes until this is dropped.
pub(super) struct Lent {
    mr: NonNull<ibv::ibv_mr>,
    memory: Arc<dyn DmaMemory>,
    _domain: Arc<Domain>,
}

// SAFETY: the registration belongs to this value, and the memory may be reached from any thread.
unsafe impl Send for Lent {}

impl Lent {
    pub(super) fn new(domain: &Arc<Domain>, memory: &Arc<dyn DmaMemory>) -> Result<Self, VerbsError> {
        Self::with_access(domain, memory, ibv::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE)
    }

    /// The same for a peer's reads, and, if it may, for its writes.
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
        // SAFETY: `DmaMemory` is valid until it is dropped, which is after it is deregistered.
        let mr = unsafe { register(domain, memory.base(), len_bytes, access) };
        let failed = || VerbsError::Register { len_bytes, source: io::Error::last_os_error() };
        let mr = NonNull::new(mr).ok_or_else(failed)?;
        Ok(Self { mr, memory: Arc::clone(memory), _domain: Arc::clone(domain) })
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: a registration that is still there.
        unsafe { self.mr.as_ref() }.lkey
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.mr.as_ref() }.rkey
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: registered, once given back. If that fails, the device could still write: the memory is left to it.
        if unsafe { ibv::ibv_dereg_mr(self.mr.as_ptr()) } != 0 {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered, once given back. If that fails, a queue pair could still write: the memory is left to it.
        if unsafe { ibv::ibv_dereg_mr(self.mr.as_ptr()) } == 0 {
            // SAFETY: allocated with this layout, and the device has let go of it.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
        }
    }
}
