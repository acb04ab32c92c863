//! Whether this is still the process that made a value.
//!
//! A forked child has copies of all memory and descriptors of its parent, but of its threads only the one that forked, and
//! locks as they were. What would be done there for the parent's connections and devices, be it by a drop, ends the parent's
//! work or waits for ever. So what owns such things asks its mark first.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::process;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

/// Enough for a word; the system makes a page of it.
const LEN_BYTES: usize = size_of::<AtomicU32>();

/// Tells a process from those that it forks.
#[derive(Debug)]
pub struct ProcessMark {
    /// Private memory that reads as 0 in every forked child (`MADV_WIPEONFORK`); `None` where the system has none.
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
    /// Mark this process.
    pub fn new() -> Self {
        Self { page: wiped_on_fork(), pid: process::id() }
    }

    /// Tell whether this process was forked from the one that made the mark. Where the system wipes memory on fork
    /// (Linux 4.14), this is one load.
    pub fn is_forked(&self) -> bool {
        // SAFETY: the page is mapped as long as this value lives, and has room for the word.
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
    // SAFETY: a new mapping, at an address that the system chooses.
    let base = unsafe { mmap_anonymous(ptr::null_mut(), LEN_BYTES, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the range is that of the mapping, to which nobody has a reference.
    if unsafe { madvise(base, LEN_BYTES, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: the mapping was made above, and nobody knows it.
        let _ = unsafe { munmap(base, LEN_BYTES) };
        return None;
    }
    let page = NonNull::new(base.cast::<AtomicU32>())?;
    // SAFETY: mapped above, page-aligned.
    unsafe { page.as_ref() }.store(1, Ordering::Relaxed);
    Some(page)
}
