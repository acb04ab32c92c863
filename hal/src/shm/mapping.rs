//! Anonymous memory that processes share.
//!
//! Invariants:
//! - A mapping lies over a `memfd` that nobody can shrink, grow or unseal any more: every byte of it stays accessible.
//! - It stays at its address until it is dropped, also where it is severed.
//! - What is severed are whole pages. What is on them meanwhile is copied: whoever writes there during the copy may find
//!   that undone. So a caller severs pages that nobody in this process writes to.
//! - Memory that was handed over to be read is never written but by the mapping that was there before: a descriptor that
//!   is open for reading only would not do, because who has one can open its file again.

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
use std::sync::atomic::AtomicU64;

/// What no process may change about shared memory any more: for those who have it.
const SEALS: SealFlags = SIZE_SEALS.union(SealFlags::SEAL);

/// The same while nobody else has it.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The size of the huge pages that [`Pages::Huge`] asks for.
const HUGE_PAGE_LEN_BYTES: usize = 2 << 20;

/// What memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Pages {
    /// The system's pages; transparent huge pages where it gives them to shared memory
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    #[default]
    Normal,
    /// Pages of 2 MiB from the system's pool (`/proc/sys/vm/nr_hugepages`); an error if it has none.
    Huge,
}

/// Why there is no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The length is 0, or more than is allowed.
    #[error("shared memory of {len_bytes} bytes is not 1 to {max}")]
    Length {
        /// What was asked for, or handed over.
        len_bytes: u64,
        /// The most that there may be.
        max: u64,
    },
    /// The memory of a peer could vanish under an access.
    #[error("the memory that was handed over is not sealed against resizing, or is no memfd")]
    Unsealed,
    /// Others may write to the memory for ever.
    #[error("this memory was handed over to be written: hand it over for reading before that, or take other memory")]
    Writable,
    /// The system refuses.
    #[error("{call} of {len_bytes} bytes of shared memory: {errno}")]
    System {
        /// The system call.
        call: &'static str,
        /// The length.
        len_bytes: u64,
        /// Why.
        errno: Errno,
    },
}

/// Return the length of memory that a peer has handed over, if nobody can change it.
fn sealed_len_bytes(file: BorrowedFd<'_>) -> Result<u64, MemoryError> {
    // Not a memfd: no seals, and an error.
    if !fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS)) {
        return Err(MemoryError::Unsealed);
    }
    let failed = |errno| MemoryError::System { call: "fstat", len_bytes: 0, errno };
    Ok(u64::try_from(fstat(file).map_err(failed)?.st_size).unwrap_or(0))
}

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
    /// To hand over what was made here. What was handed over needs none: the mapping holds the memory, and descriptors
    /// are few.
    file: Option<OwnedFd>,
    pages: Pages,
    /// Which file it maps, and from where on. The mapping keeps the file, but for pages that were severed: those are no
    /// engine's any more.
    backing: Backing,
    /// The process that has it, if those that it forks have it not.
    only_in: Option<u32>,
}

// SAFETY: the mapping belongs to this value; what is done through its address, its users answer for.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn create(name: &str, len_bytes: usize, pages: Pages, seals: SealFlags) -> Result<Self, MemoryError> {
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
        // No page faults later. The system may not know the hint, and need not follow it.
        mapping.advise(Advice::LinuxPopulateWrite);
        mapping.file = Some(file);
        Ok(mapping)
    }

    /// Map memory that a peer has handed over.
    fn open(file: OwnedFd, max_len_bytes: u64, protection: ProtFlags) -> Result<Self, MemoryError> {
        let len_bytes = sealed_len_bytes(file.as_fd())?;
        let max = max_len_bytes.min(isize::MAX as u64);
        if len_bytes == 0 || len_bytes > max {
            return Err(MemoryError::Length { len_bytes, max });
        }
        // Its pages are touched when they are used: to touch all at once would take as long, and as much memory, as the
        // peer likes. An honest one has them already.
        Self::map(&file, len_bytes as usize, Pages::Normal, protection)
    }

    /// Map a part of memory that a peer has handed over.
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
        // SAFETY: a new mapping, at an address that the system chooses.
        let base = unsafe { mmap(ptr::null_mut(), len_bytes, protection, MapFlags::SHARED, file, offset_bytes) };
        let failed = |errno| MemoryError::System { call: "mmap", len_bytes: len_bytes as u64, errno };
        let base = NonNull::new(base.map_err(failed)?.cast()).ok_or(failed(Errno::INVAL))?;
        let mapping = Self { base, len_bytes, file: None, pages, backing, only_in: None };
        mapping.advise(Advice::LinuxHugepage);
        Ok(mapping)
    }

    /// Give the system a hint that changes no contents, which it need not follow.
    fn advise(&self, hint: Advice) {
        // SAFETY: the range is the mapping's; the advice changes no contents.
        let _ = unsafe { madvise(self.base.as_ptr().cast::<c_void>(), self.len_bytes, hint) };
    }

    /// Keep it from processes that this one forks: they would write where a peer takes it for this one's doing.
    fn keep_from_forks(mut self) -> Self {
        // SAFETY: the range is the mapping's, and nothing changes in this process.
        let kept = unsafe { madvise(self.base.as_ptr().cast::<c_void>(), self.len_bytes, Advice::LinuxDontFork) };
        self.only_in = kept.is_ok().then(std::process::id);
        self
    }

    #[track_caller]
    fn file(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("memory that was made here, neither handed over nor severed").as_fd()
    }

    /// Return the length of its pages.
    fn page_len_bytes(&self) -> usize {
        match self.pages {
            Pages::Normal => page_size(),
            Pages::Huge => HUGE_PAGE_LEN_BYTES,
        }
    }

    /// Put fresh memory with the same contents at the same addresses, for these pages.
    fn sever(&mut self, ranges: &[Range<usize>]) -> Result<(), MemoryError> {
        let (page, whole) = (self.page_len_bytes(), self.len_bytes);
        for range in ranges {
            let is_pages = range.start.is_multiple_of(page) && (range.end.is_multiple_of(page) || range.end == whole);
            let is_inside = range.start < range.end && range.end <= whole;
            assert!(is_pages && is_inside, "{range:?} of {whole} bytes is no range of whole pages of {page}");
        }
        let rounded = |range: &Range<usize>| range.len().next_multiple_of(page);
        let len_bytes: usize = ranges.iter().map(rounded).sum();
        if len_bytes == 0 {
            return Ok(());
        }
        let mut fresh = Self::create("sumac-severed", len_bytes, self.pages, SIZE_SEALS)?;
        // What is at its addresses is this memory's from here on, piece by piece; what holds it is the mappings.
        drop((self.file.take(), fresh.file.take()));
        for range in ranges {
            let len_bytes = rounded(range);
            let to = self.base.as_ptr().wrapping_add(range.start);
            // SAFETY: both ranges are mapped, as pages are mapped whole, and are `range.len()` long. That a device still
            // writes to one of them makes the copy a mixture of old and new where it does, as any read of such memory is.
            unsafe { transfer(fresh.base.as_ptr(), to, range.len()) };
            let (from, flags) = (fresh.base.as_ptr(), MremapFlags::MAYMOVE);
            // SAFETY: the first pages of the fresh mapping move over these, in one step; both are equally long, and
            // nobody else knows the fresh ones.
            let moved = unsafe { mremap_fixed(from.cast(), len_bytes, len_bytes, flags, to.cast()) };
            moved.map_err(|errno| MemoryError::System { call: "mremap", len_bytes: len_bytes as u64, errno })?;
            // They are not the fresh mapping's any more: what it unmaps in the end is the rest.
            fresh.len_bytes -= len_bytes;
            // SAFETY: inside of the mapping, or at its end.
            fresh.base = unsafe { fresh.base.add(len_bytes) };
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A forked child has something else there by now, or nothing; and all of it may have been moved elsewhere.
        if self.len_bytes == 0 || self.only_in.is_some_and(|pid| pid != std::process::id()) {
            return;
        }
        // SAFETY: the mapping is this value's own. It can fail only for a range that is none.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}

/// Memory for data, which a device's engine reads and writes.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
}

// SAFETY: the mapping is sealed, so it stays accessible, and `Region` gives out no reference unless its user promises.
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
    /// Make zeroed memory; huge pages make its length a multiple of 2 MiB.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn create(len_bytes: usize, pages: Pages) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::create("sumac-region", len_bytes, pages, SIZE_SEALS)? })
    }

    /// Map what a peer has handed over, if it is at most `max_len_bytes` long and nobody can resize it.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open(file: OwnedFd, max_len_bytes: u64) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open(file, max_len_bytes, ProtFlags::READ | ProtFlags::WRITE)? })
    }

    /// Map `len_bytes` bytes at `offset_bytes` of what a peer has handed over, a multiple of the page's length, if nobody
    /// can resize it.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open_at(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open_at(file, offset_bytes, len_bytes)? })
    }

    /// Return the descriptor, to hand over: others may write from now on, unless it was handed over for reading before.
    ///
    /// # Panics
    /// If the memory was itself handed over, or severed: of that, no descriptor is kept.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        let file = self.mapping.file();
        // It fails where that was done before. Whoever the memory is handed over to finds out if it ever fails else.
        let _ = fcntl_add_seals(file, SealFlags::SEAL);
        file
    }

    /// Return the descriptor, for a device in another process that is to write to the memory: its file is still to be handed
    /// over for [`ReadOnly`], once the device has mapped it, and until then to nobody else.
    ///
    /// # Panics
    /// As [`Region::file`].
    #[track_caller]
    pub fn device_file(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }

    /// Return a descriptor to hand over for [`ReadOnly`]. From now on nobody can write to the memory but through this
    /// value, whichever way the file is opened.
    ///
    /// # Errors
    /// [`MemoryError::Writable`] after [`Region::file`], or what the system refuses.
    pub fn read_only_file(&self) -> Result<OwnedFd, MemoryError> {
        let (file, len_bytes) = (self.mapping.file(), self.mapping.len_bytes as u64);
        let failed = |call| move |errno| MemoryError::System { call, len_bytes, errno };
        let seals = fcntl_get_seals(file).map_err(failed("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::FUTURE_WRITE) {
            if seals.contains(SealFlags::SEAL) {
                return Err(MemoryError::Writable);
            }
            // The mapping that is there stays as it is; no other one can be made to write.
            fcntl_add_seals(file, SealFlags::FUTURE_WRITE | SealFlags::SEAL).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed("open"))
    }

    /// Return the length of the pages that [`Region::sever`] takes away.
    pub fn page_len_bytes(&self) -> usize {
        self.mapping.page_len_bytes()
    }

    /// Cut these bytes off from everybody who has mapped the memory: afterwards it has the same contents at the same
    /// address, and what others write goes elsewhere. It is the fence of PROTOCOL 6 against a device that can't be ended;
    /// what the device was writing meanwhile is a mixture of old and new.
    ///
    /// Nobody in this process may write to these bytes meanwhile: the write may be undone. Other bytes are not touched.
    ///
    /// # Errors
    /// [`MemoryError`], and then the contents are as they were, and others may reach some of it.
    ///
    /// # Panics
    /// If a range is empty, reaches beyond the memory, or does not begin and end between pages
    /// ([`Region::page_len_bytes`]) or at the memory's end.
    #[track_caller]
    pub fn sever(&mut self, ranges: &[Range<usize>]) -> Result<(), MemoryError> {
        self.mapping.sever(ranges)
    }

    /// Copy bytes in. What an engine reads there meanwhile is a mixture of old and new.
    ///
    /// # Panics
    /// If they do not fit.
    #[track_caller]
    pub fn write(&self, offset_bytes: usize, bytes: &[u8]) {
        let at = self.at(offset_bytes, bytes.len());
        // SAFETY: `at` has checked the bounds, and the mapping is sealed, so that peers can't take it away.
        unsafe { copy_in(at, bytes) };
    }

    /// Copy bytes out: a mixture of old and new where an engine writes meanwhile.
    ///
    /// # Panics
    /// If there are not as many.
    #[track_caller]
    pub fn read(&self, offset_bytes: usize, bytes: &mut [u8]) {
        let at = self.at(offset_bytes, bytes.len());
        // SAFETY: as above. A peer that writes meanwhile makes each byte the old one or the new one.
        unsafe { copy_out(bytes, at) };
    }

    /// Borrow the memory.
    ///
    /// # Safety
    /// For as long as the slice lives, nobody else writes to the memory: no descriptor that names it is in flight, in
    /// this process or another.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: the mapping is valid, and the caller keeps writers out.
        unsafe { slice::from_raw_parts(self.mapping.base.as_ptr(), self.mapping.len_bytes) }
    }

    /// Borrow the memory to write to it.
    ///
    /// # Safety
    /// For as long as the slice lives, nobody else reads or writes the memory: no descriptor that names it is in
    /// flight, in this process or another.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is valid, and the caller keeps everybody else out.
        unsafe { slice::from_raw_parts_mut(self.mapping.base.as_ptr(), self.mapping.len_bytes) }
    }

    #[track_caller]
    fn at(&self, offset_bytes: usize, len_bytes: usize) -> *mut u8 {
        let whole = self.mapping.len_bytes;
        let fits = offset_bytes.checked_add(len_bytes).is_some_and(|end| end <= whole);
        assert!(fits, "{len_bytes} bytes at {offset_bytes} reach beyond {whole} bytes");
        self.mapping.base.as_ptr().wrapping_add(offset_bytes)
    }
}

/// Memory of others, to read: what a device leaves behind.
#[derive(Debug)]
pub struct ReadOnly {
    mapping: Mapping,
}

impl ReadOnly {
    /// Map what a peer has handed over, if it is at most `max_len_bytes` long and nobody can resize it.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open(file: OwnedFd, max_len_bytes: u64) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open(file, max_len_bytes, ProtFlags::READ)? })
    }

    /// Copy bytes out: a mixture of old and new where its owner writes meanwhile. False, and nothing, if there are not
    /// as many.
    pub fn read(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        let end = offset_bytes.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.mapping.len_bytes as u64) {
            return false;
        }
        let at = self.mapping.base.as_ptr().wrapping_add(offset_bytes as usize);
        // SAFETY: the bounds were checked, and the mapping is sealed. Its owner's writes meanwhile make each byte the old
        // one or the new one.
        unsafe { copy_out(bytes, at) };
        true
    }
}

/// Memory of registers, rings and doorbells, which both sides write at the same time: atomics. A forked child has none of
/// it (`MADV_DONTFORK`), and an access there is a fault.
#[derive(Debug)]
pub struct BarMemory {
    mapping: Mapping,
}

impl BarMemory {
    /// Make zeroed memory for a BAR, as its device.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn create(len_bytes: usize) -> Result<Self, MemoryError> {
        let len_bytes = len_bytes.next_multiple_of(8);
        Ok(Self { mapping: Mapping::create("sumac-bar", len_bytes, Pages::Normal, SEALS)?.keep_from_forks() })
    }

    /// Map the BAR that a device has handed over, if it is at most `max_len_bytes` long and nobody can resize it.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn open(file: OwnedFd, max_len_bytes: u64) -> Result<Self, MemoryError> {
        Ok(Self { mapping: Mapping::open(file, max_len_bytes, ProtFlags::READ | ProtFlags::WRITE)?.keep_from_forks() })
    }

    /// Return the descriptor, to hand over.
    ///
    /// # Panics
    /// If the memory was itself handed over: of that, no descriptor is kept.
    #[track_caller]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.mapping.file()
    }

    /// Return the memory.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned and stays accessible; all access to it, here and elsewhere, is to be by
        // atomics, and what a peer does instead can spoil values only.
        unsafe { slice::from_raw_parts(self.mapping.base.as_ptr().cast(), self.mapping.len_bytes / 8) }
    }
}
