//! Detects whether the current process is a fork of the one that created a value.
//!
//! A forked child has copies of its parent's memory and descriptors, but only the thread that forked, and locks in
//! whatever state they were. If a drop in the child acted on the parent's connections and devices, it would end the
//! parent's work or block for ever. Owners of such resources therefore check a [`ProcessMark`] first.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::process;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

/// One word; the kernel rounds it up to a page.
const LEN_BYTES: usize = size_of::<AtomicU32>();

/// Distinguishes a process from its forked children.
#[derive(Debug)]
pub struct ProcessMark {
    /// Private memory that reads as 0 in every forked child (`MADV_WIPEONFORK`); `None` if the kernel lacks it.
    page: Option<NonNull<AtomicU32>>,
    pid: u32,
}

// SAFETY: the page belongs to this value, and is read and written atomically.
unsafe impl Send for ProcessMark {}
// SAFETY: as above.
unsafe impl Sync for ProcessMark {}

impl Default for ProcessMark {
    fn default() -> Self {
        Self::new()
    }
}

impl ProcessMark {
    /// Mark the current process.
    pub fn new() -> Self {
        Self { page: wiped_on_fork(), pid: process::id() }
    }

    /// Return whether this process was forked from the one that created the mark. With `MADV_WIPEONFORK` (Linux 4.14)
    /// this is one load.
    #[inline]
    pub fn is_forked(&self) -> bool {
        // SAFETY: the page is mapped for as long as this value exists, and has room for the word.
        self.page
            .map_or_else(|| process::id() != self.pid, |page| unsafe { page.as_ref() }.load(Ordering::Relaxed) == 0)
    }
}

impl Drop for ProcessMark {
    fn drop(&mut self) {
        if let Some(page) = self.page {
            // SAFETY: the mapping is this value's own, in a forked child too.
            let _ = unsafe { munmap(page.as_ptr().cast(), LEN_BYTES) };
        }
    }
}

/// Map a word that is 1 here and 0 in every forked child.
fn wiped_on_fork() -> Option<NonNull<AtomicU32>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let base = unsafe { mmap_anonymous(ptr::null_mut(), LEN_BYTES, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the range is the mapping's, and no reference to it exists.
    if unsafe { madvise(base, LEN_BYTES, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: the mapping was created above and was not shared.
        let _ = unsafe { munmap(base, LEN_BYTES) };
        return None;
    }
    let page = NonNull::new(base.cast::<AtomicU32>())?;
    // SAFETY: mapped above, page-aligned.
    unsafe { page.as_ref() }.store(1, Ordering::Relaxed);
    Some(page)
}
