//! Anonymous memory shared between processes.
//!
//! Invariants:
//! - A mapping is backed by a `memfd` that no process can shrink, grow or unseal: every byte of it stays accessible.
//! - It keeps its address until it is dropped, even when pages of it are severed.
//! - Severing works on whole pages, whose contents are copied. A write to such a page during the copy may be lost, so
//!   callers sever only pages that no thread of this process writes to.
//! - Memory handed over as read-only can be written only through the mapping that existed before. A descriptor opened
//!   read-only would not ensure this, because its holder can reopen the file through `/proc`.

use crate::dma::shared::{copy_in, copy_out, transfer};
use crate::dma::{Backing, DmaMemory};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mremap_fixed, munmap};
use rustix::param::page_size;
use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::slice;

/// The seals of shared memory once another process has it.
pub(super) const SEALS: SealFlags = SIZE_SEALS.union(SealFlags::SEAL);

/// The seals while no other process has it.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The size of the huge pages that [`Pages::Huge`] asks for.
const HUGE_PAGE_LEN_BYTES: usize = 2 << 20;

/// The page size of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Pages {
    /// The system's page size; transparent huge pages where enabled for shared memory
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    #[default]
    Normal,
    /// Pages of 2 MiB from the system's pool (`/proc/sys/vm/nr_hugepages`); an error if the pool is exhausted.
    Huge,
}

/// Why memory could not be created or mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The length is 0 or above the limit.
    #[error("shared memory must be 1 to {max} bytes long, not {len_bytes}")]
    Length {
        /// The length requested or handed over, in bytes.
        len_bytes: u64,
        /// The limit in bytes.
        max: u64,
    },
    /// The peer could resize its memory, so that an access would fault.
    #[error("the peer's memory is not a memfd sealed against resizing (F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL)")]
    Unsealed,
    /// The memory was already handed over as writable, which cannot be revoked.
    #[error("this memory was already handed over as writable: hand it over as read-only first, or use other memory")]
    Writable,
    /// The memory has no descriptor to hand over.
    #[error("this memory was opened from a descriptor, or severed: it has none to hand over")]
    Private,
    /// A system call failed.
    #[error("{call} failed for {len_bytes} bytes of shared memory: {errno}")]
    System {
        /// The system call.
        call: &'static str,
        /// The length in bytes.
        len_bytes: u64,
        /// Why.
        errno: Errno,
    },
}

/// Return the length of a peer's memory if it is sealed against resizing.
fn sealed_len_bytes(file: BorrowedFd<'_>) -> Result<u64, MemoryError> {
    // A file that is no memfd has no seals: the call fails.
    if !fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(MemoryError::Unsealed);
    }
    let failed = |errno| MemoryError::System { call: "fstat", len_bytes: 0, errno };
    Ok(u64::try_from(fstat(file).map_err(failed)?.st_size).unwrap_or(0))
}

/// Open a file once more, read-only.
fn reopen_to_read(file: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) base: NonNull<u8>,
    pub(super) len_bytes: usize,
    /// The descriptor of memory created here, to hand over. Opened memory keeps none: the mapping holds the memory, and
    /// descriptors are scarce.
    file: Option<OwnedFd>,
    pages: Pages,
    /// The mapped file and offset. Severed pages no longer belong to that file, but no engine uses those any more.
    backing: Backing,
    /// The only process that has the mapping, if forked children do not inherit it.
    owner_pid: Option<u32>,
}

// SAFETY: the mapping belongs to this value. Code that accesses memory through its address ensures that the access is
// sound.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn create(name: &str, len_bytes: usize, pages: Pages, seals: SealFlags) -> Result<Self, MemoryError> {
        let max = isize::MAX as u64 - HUGE_PAGE_LEN_BYTES as u64;
        if len_bytes == 0 || len_bytes as u64 > max {
            return Err(MemoryError::Length { len_bytes: len_bytes as u64, max });
        }
        let (len_bytes, extra) = match pages {
            Pages::Normal => (len_bytes, MemfdFlags::empty()),
            Pages::Huge => {
                (len_bytes.next_multiple_of(HUGE_PAGE_LEN_BYTES), MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
            }
        };
        let failed = |call| move |errno| MemoryError::System { call, len_bytes: len_bytes as u64, errno };
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra)
            .map_err(failed("memfd_create"))?;
        ftruncate(&file, len_bytes as u64).map_err(failed("ftruncate"))?;
        fcntl_add_seals(&file, seals).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        let mut mapping = Self::map(&file, len_bytes, pages, ProtFlags::READ | ProtFlags::WRITE)?;
        // Populate the pages now, so that none faults later. The kernel may ignore the hint.
        mapping.advise(Advice::LinuxPopulateWrite);
        mapping.file = Some(file);
        Ok(mapping)
    }

    /// Map all of a peer's memory.
    pub(super) fn open(file: OwnedFd, max_len_bytes: u64, protection: ProtFlags) -> Result<Self, MemoryError> {
        let len_bytes = sealed_len_bytes(file.as_fd())?;
        let max = max_len_bytes.min(isize::MAX as u64);
        if len_bytes == 0 || len_bytes > max {
            return Err(MemoryError::Length { len_bytes, max });
        }
        // Pages are not populated: the peer could choose a length that takes long and much memory. A correct
        // peer has populated them already.
        Self::map(&file, len_bytes as usize, Pages::Normal, protection)
    }

    /// Map a part of a peer's memory.
    fn open_at(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> Result<Self, MemoryError> {
        let len = len_bytes as u64;
        let whole = sealed_len_bytes(file)?;
        if len == 0 || offset_bytes.checked_add(len).is_none_or(|end| end > whole) {
            return Err(MemoryError::Length { len_bytes: len, max: whole.saturating_sub(offset_bytes) });
        }
        Self::map_at(file, offset_bytes, len_bytes, Pages::Normal, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map(file: &OwnedFd, len_bytes: usize, pages: Pages, protection: ProtFlags) -> Result<Self, MemoryError> {
        Self::map_at(file.as_fd(), 0, len_bytes, pages, protection)
    }

    fn map_at(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
        pages: Pages,
        protection: ProtFlags,
    ) -> Result<Self, MemoryError> {
        let unknown = |errno| MemoryError::System { call: "fstat", len_bytes: len_bytes as u64, errno };
        let status = fstat(file).map_err(unknown)?;
        let backing = Backing::of_file(status.st_dev, status.st_ino, offset_bytes);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe { mmap(ptr::null_mut(), len_bytes, protection, MapFlags::SHARED, file, offset_bytes) };
        let failed = |errno| MemoryError::System { call: "mmap", len_bytes: len_bytes as u64, errno };
        let base = NonNull::new(base.map_err(failed)?.cast()).ok_or(failed(Errno::INVAL))?;
        let mapping = Self { base, len_bytes, file: None, pages, backing, owner_pid: None };
        mapping.advise(Advice::LinuxHugepage);
        Ok(mapping)
    }

    /// Advise the kernel; the hint changes no contents and may be ignored.
    fn advise(&self, hint: Advice) {
        // SAFETY: the range is the mapping's; the advice changes no contents.
        let _ = unsafe { madvise(self.base.as_ptr().cast::<c_void>(), self.len_bytes, hint) };
    }

    /// Exclude the mapping from forked children: what they wrote there, a peer would take for this process's doing.
    pub(super) fn keep_from_forks(mut self) -> Self {
        // SAFETY: the range is the mapping's, and nothing changes in this process.
        let excluded = unsafe { madvise(self.base.as_ptr().cast::<c_void>(), self.len_bytes, Advice::LinuxDontFork) };
        self.owner_pid = excluded.is_ok().then(std::process::id);
        self
    }

    /// Return the address of a range.
    #[track_caller]
    pub(super) fn at(&self, offset_bytes: usize, len_bytes: usize) -> *mut u8 {
        let whole = self.len_bytes;
        let fits = offset_bytes.checked_add(len_bytes).is_some_and(|end| end <= whole);
        assert!(fits, "{len_bytes} bytes at {offset_bytes} reach beyond {whole} bytes");
        self.base.as_ptr().wrapping_add(offset_bytes)
    }

    #[track_caller]
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("only memory created here and not severed has a descriptor").as_fd()
    }

    /// Return the page size in bytes.
    fn page_len_bytes(&self) -> usize {
        match self.pages {
            Pages::Normal => page_size(),
            Pages::Huge => HUGE_PAGE_LEN_BYTES,
        }
    }

    /// Replace these pages with private memory of the same contents at the same addresses.
    fn sever(&mut self, ranges: &[Range<usize>]) -> Result<(), MemoryError> {
        let (page, whole) = (self.page_len_bytes(), self.len_bytes);
        for range in ranges {
            let is_pages = range.start.is_multiple_of(page) && (range.end.is_multiple_of(page) || range.end == whole);
            let is_inside = range.start < range.end && range.end <= whole;
            assert!(is_pages && is_inside, "{range:?} of {whole} bytes is not a range of whole pages of {page} bytes");
        }
        let rounded = |range: &Range<usize>| range.len().next_multiple_of(page);
        let len_bytes: usize = ranges.iter().map(rounded).sum();
        if len_bytes == 0 {
            return Ok(());
        }
        let mut replacement = Self::create("sumac-severed", len_bytes, self.pages, SIZE_SEALS)?;
        // The new pages move to this mapping's addresses one range at a time. The mappings keep the memory alive, so
        // neither descriptor is needed any more.
        drop((self.file.take(), replacement.file.take()));
        for range in ranges {
            let len_bytes = rounded(range);
            let to = self.base.as_ptr().wrapping_add(range.start);
            // SAFETY: both ranges are mapped, because pages are mapped whole, and are `range.len()` long. If a device
            // still writes to the source, the copy is a mixture of old and new, as any read of such memory is.
            unsafe { transfer(replacement.base.as_ptr(), to, range.len()) };
            let (from, flags) = (replacement.base.as_ptr(), MremapFlags::MAYMOVE);
            // SAFETY: the first pages of the new mapping atomically replace these; both ranges are equally long, and
            // only this function has the new one's address.
            let moved = unsafe { mremap_fixed(from.cast(), len_bytes, len_bytes, flags, to.cast()) };
            moved.map_err(|errno| MemoryError::System { call: "mremap", len_bytes: len_bytes as u64, errno })?;
            // The new mapping keeps only the rest, which it unmaps when dropped.
            replacement.len_bytes -= len_bytes;
            // SAFETY: inside the mapping, or at its end.
            replacement.base = unsafe { replacement.base.add(len_bytes) };
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a forked child, or after all pages were moved away, there is nothing to unmap.
        if self.len_bytes == 0 || self.owner_pid.is_some_and(|pid| pid != std::process::id()) {
            return;
        }
        // SAFETY: the mapping belongs to this value. The call fails only for an invalid range.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

/// Memory for data that a device's DMA engine reads and writes.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
}

// SAFETY: the mapping is sealed, so it stays accessible, and `Region` gives out references only through unsafe
// functions.
unsafe impl DmaMemory for Region {
    fn base(&self) -> NonNull<u8> {
        self.mapping.base
    }

    fn len_bytes(&self) -> usize {
        self.mapping.len_bytes
    }

    fn backing(&self) -> Backing {
        self.mapping.backing
    }
}

impl Region {
    /// Create zeroed memory. With huge pages its length is rounded up to a multiple of 2 MiB.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn create(len_bytes: usize, pages: Pages) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::create("sumac-region", len_bytes, pages, SIZE_SEALS)? })
    }

    /// Map the memory that a peer has handed over, if it is at most `max_len_bytes` long and sealed against resizing.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open(file: OwnedFd, max_len_bytes: u64) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open(file, max_len_bytes, ProtFlags::READ | ProtFlags::WRITE)? })
    }

    /// Map `len_bytes` bytes at `offset_bytes`, a multiple of the page size, of the memory that a peer has handed over,
    /// if it is sealed against resizing.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open_at(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open_at(file, offset_bytes, len_bytes)? })
    }

    /// Return the descriptor to hand over as writable, unless the memory was handed over as read-only before.
    ///
    /// # Panics
    /// If the memory was opened from a descriptor, or severed: neither keeps one.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        let file = self.mapping.file();
        // This fails if the seal was set before. If it fails for another reason, the receiver notices the missing seal.
        let _ = fcntl_add_seals(file, SealFlags::SEAL);
        file
    }

    /// Return the descriptor for a device in another process that writes to the memory. Once the device has mapped it,
    /// the file is handed over as [`ReadOnly`]; until then, pass it to no other process.
    ///
    /// # Panics
    /// As [`Region::file`].
    #[track_caller]
    pub fn device_file(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }

    /// Return a descriptor to hand over as [`ReadOnly`]. From now on only existing mappings can write to the memory,
    /// however the file is reopened.
    ///
    /// # Errors
    /// [`MemoryError::Writable`] after [`Region::file`], or [`MemoryError::System`].
    pub fn read_only_file(&self) -> Result<OwnedFd, MemoryError> {
        let (file, len_bytes) = (self.mapping.file(), self.mapping.len_bytes as u64);
        let failed = |call| move |errno| MemoryError::System { call, len_bytes, errno };
        let seals = fcntl_get_seals(file).map_err(failed("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::FUTURE_WRITE) {
            if seals.contains(SealFlags::SEAL) {
                return Err(MemoryError::Writable);
            }
            // Existing mappings stay writable; no new writable one can be created.
            fcntl_add_seals(file, SealFlags::FUTURE_WRITE | SealFlags::SEAL).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        }
        reopen_to_read(file).map_err(failed("open"))
    }

    /// Return a read-only descriptor to hand over as [`ReadOnly`] while this process, and others that have the memory,
    /// write to it. It keeps the holder from writing by accident only: a process of the same user can reopen the file.
    ///
    /// # Errors
    /// [`MemoryError`]; [`MemoryError::Private`] if the memory was opened from a descriptor, or severed.
    pub fn reader_file(&self) -> Result<OwnedFd, MemoryError> {
        let file = self.mapping.file.as_ref().ok_or(MemoryError::Private)?;
        let failed = |call| move |errno| MemoryError::System { call, len_bytes: self.mapping.len_bytes as u64, errno };
        if !fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SEAL)) {
            fcntl_add_seals(file, SealFlags::SEAL).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        }
        reopen_to_read(file.as_fd()).map_err(failed("open"))
    }

    /// Return the size in bytes of the pages that [`Region::sever`] replaces.
    pub fn page_len_bytes(&self) -> usize {
        self.mapping.page_len_bytes()
    }

    /// Replace these bytes with private memory of the same contents at the same address, so that writes of other
    /// processes no longer reach them. This is the fence of PROTOCOL 6 against a device whose process cannot be ended;
    /// bytes that the device writes during the call are a mixture of old and new.
    ///
    /// No thread of this process may write to these bytes during the call, because the write may be lost. Other bytes
    /// are not touched.
    ///
    /// # Errors
    /// [`MemoryError`]. The contents are unchanged, but other processes may still reach some of the bytes.
    ///
    /// # Panics
    /// If a range is empty, exceeds the memory, or is not aligned to [`Region::page_len_bytes`] (its end may be the
    /// memory's end).
    #[track_caller]
    pub fn sever(&mut self, ranges: &[Range<usize>]) -> Result<(), MemoryError> {
        self.mapping.sever(ranges)
    }

    /// Copy bytes in. An engine that reads them concurrently sees a mixture of old and new.
    ///
    /// # Panics
    /// If they exceed the memory.
    #[track_caller]
    pub fn write(&self, offset_bytes: usize, bytes: &[u8]) {
        let at = self.mapping.at(offset_bytes, bytes.len());
        // SAFETY: `at` has checked the bounds, and the mapping is sealed, so peers cannot shrink it.
        unsafe { copy_in(at, bytes) };
    }

    /// Copy bytes out. They are a mixture of old and new if an engine writes concurrently.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    #[track_caller]
    pub fn read(&self, offset_bytes: usize, bytes: &mut [u8]) {
        let at = self.mapping.at(offset_bytes, bytes.len());
        // SAFETY: as above. For each byte, a concurrent write yields the old or the new value.
        unsafe { copy_out(bytes, at) };
    }

    /// Borrow the memory.
    ///
    /// # Safety
    /// While the slice exists, nothing else writes to the memory: no descriptor that refers to it is in flight, in this
    /// process or another.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: the mapping is valid, and the caller keeps writers out.
        unsafe { slice::from_raw_parts(self.mapping.base.as_ptr(), self.mapping.len_bytes) }
    }

    /// Borrow the memory to write to it.
    ///
    /// # Safety
    /// While the slice exists, nothing else reads or writes the memory: no descriptor that refers to it is in flight,
    /// in this process or another.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is valid, and the caller keeps everybody else out.
        unsafe { slice::from_raw_parts_mut(self.mapping.base.as_ptr(), self.mapping.len_bytes) }
    }
}

/// A peer's memory, mapped read-only: the redo slots that outlive a device, or registered memory of another rank.
#[derive(Debug)]
pub struct ReadOnly {
    mapping: Mapping,
}

impl ReadOnly {
    /// Map the memory that a peer has handed over, if it is at most `max_len_bytes` long and sealed against resizing.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open(file: OwnedFd, max_len_bytes: u64) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open(file, max_len_bytes, ProtFlags::READ)? })
    }

    /// Copy bytes out; they are a mixture of old and new if the owner writes concurrently. Returns false, and copies
    /// nothing, if the range exceeds the memory.
    pub fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        let end = offset_bytes.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.mapping.len_bytes as u64) {
            return false;
        }
        let at = self.mapping.base.as_ptr().wrapping_add(offset_bytes as usize);
        // SAFETY: the bounds were checked, and the mapping is sealed. For each byte, a concurrent write yields the old
        // or the new value.
        unsafe { copy_out(bytes, at) };
        true
    }
}
