//! Memory registered with the device until it is dropped.
//!
//! Invariants:
//! - Memory is freed only once it is deregistered; if that fails, it is leaked.
//! - The memory of buffers is a shared mapping. Private memory would be copied when the process writes it after a fork,
//!   and the device would go on with the pages of the child, on kernels that do not copy pinned pages for the child
//!   (before Linux 5.12).

use super::config::VerbsError;
use super::ibv;
use super::objects::Domain;
use crate::dma::DmaMemory;
use crate::dma::shared::{copy_in, copy_out};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Instant;

/// Zeroed memory owned by this value and registered until it is dropped.
pub(super) struct RegisteredBuffer {
    mr: NonNull<ibv::ibv_mr>,
    base: NonNull<u8>,
    len_bytes: usize,
    access: ibv::ibv_access_flags,
    domain: Arc<Domain>,
}

// SAFETY: the memory belongs to this value.
unsafe impl Send for RegisteredBuffer {}

fn exposed_access() -> ibv::ibv_access_flags {
    use ibv::ibv_access_flags as access;
    access::IBV_ACCESS_LOCAL_WRITE | access::IBV_ACCESS_REMOTE_WRITE | access::IBV_ACCESS_REMOTE_READ
}

/// Register memory; if peers can access it, under a key that was not revoked recently.
///
/// The device gives a released key to the next registration. Such a registration is held until there is one with
/// another key; until then, which takes as long as a registration, the old key opens the memory.
///
/// # Safety
/// The memory is valid until it is deregistered.
unsafe fn register(
    domain: &Domain,
    base: NonNull<u8>,
    len_bytes: usize,
    access: ibv::ibv_access_flags,
) -> Result<NonNull<ibv::ibv_mr>, VerbsError> {
    let is_exposed = is_exposed(access);
    let relaxed = ibv::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING;
    let mut held: Vec<NonNull<ibv::ibv_mr>> = Vec::new();
    let registered = loop {
        // SAFETY: the caller ensures that the memory is valid until it is deregistered. Optional flags need the second
        // call, as in verbs.h; kernels that do not have them ignore them.
        let mr = unsafe {
            match domain.is_relaxed {
                false => ibv::ibv_reg_mr(domain.raw.as_ptr(), base.as_ptr().cast(), len_bytes, access.0.cast_signed()),
                true => {
                    let (start, addr) = (base.as_ptr().cast(), base.as_ptr().expose_provenance() as u64);
                    ibv::ibv_reg_mr_iova2(domain.raw.as_ptr(), start, len_bytes, addr, (access | relaxed).0)
                }
            }
        };
        let Some(mr) = NonNull::new(mr) else {
            break Err(VerbsError::Register { len_bytes, source: io::Error::last_os_error() });
        };
        // SAFETY: just registered.
        let rkey = unsafe { mr.as_ref() }.rkey;
        if !is_exposed || !domain.quarantine().has(rkey, Instant::now()) {
            break Ok(mr);
        }
        // Each held registration keeps another key of the bounded quarantine, so this ends.
        held.push(mr);
    };
    for mr in held {
        // SAFETY: registered, and deregistered once. Should that fail, the kernel keeps the pages.
        unsafe { ibv::ibv_dereg_mr(mr.as_ptr()) };
    }
    registered
}

/// Return whether peers get access to memory.
const fn is_exposed(access: ibv::ibv_access_flags) -> bool {
    use ibv::ibv_access_flags as flags;
    access.0 & (flags::IBV_ACCESS_REMOTE_READ.0 | flags::IBV_ACCESS_REMOTE_WRITE.0) != 0
}

/// Deregister memory that was registered with this access, and remember its key if peers may have it.
///
/// # Safety
/// It is registered, and not used afterwards unless this fails.
unsafe fn deregister(
    domain: &Domain,
    mr: NonNull<ibv::ibv_mr>,
    access: ibv::ibv_access_flags,
) -> Result<(), VerbsError> {
    // SAFETY: the caller ensures that it is registered.
    let (rkey, status) = unsafe {
        let rkey = mr.as_ref().rkey;
        (rkey, ibv::ibv_dereg_mr(mr.as_ptr()))
    };
    domain.context.check(status, "deregister memory")?;
    if is_exposed(access) {
        domain.quarantine().add(rkey, Instant::now());
    }
    Ok(())
}

/// The length from which huge pages are requested: one of them.
const HUGE_LEN_BYTES: usize = 2 << 20;

/// Map zeroed memory that children of this process share.
fn map(len_bytes: usize) -> io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let base = unsafe { mmap_anonymous(ptr::null_mut(), len_bytes, protection, MapFlags::SHARED)? };
    if len_bytes >= HUGE_LEN_BYTES {
        // SAFETY: just mapped with this length. Without huge pages it works as well.
        let _ = unsafe { madvise(base, len_bytes, Advice::LinuxHugepage) };
    }
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Unmap memory.
///
/// # Safety
/// It was mapped by [`map`] with this length, and nobody accesses it any more.
unsafe fn unmap(base: NonNull<u8>, len_bytes: usize) {
    // SAFETY: the caller ensures it. This fails only for ranges that are none of a mapping.
    let _ = unsafe { munmap(base.as_ptr().cast(), len_bytes) };
}

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
        let len_bytes = len_bytes.max(1);
        let base = map(len_bytes).map_err(|source| VerbsError::Register { len_bytes, source })?;
        // SAFETY: the mapping has this length and is unmapped in `drop`, after it is deregistered.
        match unsafe { register(domain, base, len_bytes, access) } {
            Ok(mr) => Ok(Self { mr, base, len_bytes, access, domain: Arc::clone(domain) }),
            Err(error) => {
                // SAFETY: mapped with this length, and not registered.
                unsafe { unmap(base, len_bytes) };
                Err(error)
            }
        }
    }

    /// Register the memory under a new key, which invalidates the old one.
    pub(super) fn reregister(&mut self) -> Result<(), VerbsError> {
        // The old registration is released afterwards, so the two keys differ. SAFETY: as in `with_access`.
        let new = unsafe { register(&self.domain, self.base, self.len_bytes, self.access)? };
        // SAFETY: registered, and replaced below.
        if let Err(error) = unsafe { deregister(&self.domain, self.mr, self.access) } {
            // SAFETY: just registered, and dropped.
            let _ = unsafe { deregister(&self.domain, new, self.access) };
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
        self.len_bytes
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
        // SAFETY: inside memory that is zeroed when mapped; the caller ensures that the device does not write
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
        assert!(end.is_some_and(|end| end <= self.len_bytes), "{len_bytes} bytes at {offset} of {}", self.len_bytes);
    }
}

/// Registration of memory that others own, for the device's local access, until it is dropped.
pub(super) struct Registration {
    /// `None` once it is deregistered.
    mr: Option<NonNull<ibv::ibv_mr>>,
    lkey: u32,
    rkey: u32,
    access: ibv::ibv_access_flags,
    memory: Arc<dyn DmaMemory>,
    domain: Arc<Domain>,
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
        let mr = unsafe { register(domain, memory.base(), len_bytes, access)? };
        // SAFETY: just registered.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        Ok(Self { mr: Some(mr), lkey, rkey, access, memory: Arc::clone(memory), domain: Arc::clone(domain) })
    }

    pub(super) const fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(super) const fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Deregister the memory. If that fails, its keys still open it, and it is leaked when this value is dropped.
    pub(super) fn deregister(&mut self) -> Result<(), VerbsError> {
        let Some(mr) = self.mr else { return Ok(()) };
        // SAFETY: registered, and forgotten once it is not.
        unsafe { deregister(&self.domain, mr, self.access)? };
        self.mr = None;
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The device could still write it.
        if self.deregister().is_err() {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        // SAFETY: registered, and deregistered once. If that fails, a queue pair could still write: leak the memory.
        if unsafe { deregister(&self.domain, self.mr, self.access) }.is_ok() {
            // SAFETY: mapped with this length, and deregistered.
            unsafe { unmap(self.base, self.len_bytes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::machine;
    use crate::verbs::objects::Context;
    use std::net::Ipv4Addr;

    /// The flags of the mapping at `addr`, as in `rw-s`.
    fn flags_at(addr: u64) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("the kernel's list");
        let line = maps.lines().find(|line| {
            let bound = |text: &str| u64::from_str_radix(text, 16).expect("an address");
            let (range, _) = line.split_once(' ').expect("columns");
            let (start, end) = range.split_once('-').expect("a range");
            (bound(start)..bound(end)).contains(&addr)
        });
        line.and_then(|line| line.split(' ').nth(1)).expect("mapped").to_owned()
    }

    #[test]
    fn buffers_are_shared_with_children() {
        machine(|machine| _ = machine.add("mlx5_0", Ipv4Addr::LOCALHOST));
        let domain = Domain::new(&Context::open("mlx5_0").expect("a card"), false).expect("a domain");
        for len_bytes in [4096, 3 << 20] {
            let buffer = RegisteredBuffer::new(&domain, len_bytes).expect("memory");
            assert_eq!(flags_at(buffer.device_addr(0, len_bytes)), "rw-s");
            // SAFETY: no card has this address.
            assert!(unsafe { buffer.bytes(0, len_bytes) }.iter().all(|byte| *byte == 0));
        }
    }
}
