//! What outlives a reset: log frames that were not sent yet, and how the last life ended.
//!
//! The memory is not cleared at start ([`Kept`] lies in a section of its own), so its content is believed only behind a
//! magic number and within bounds: after power-on it is anything.
//!
//! Invariant: every access within [`critical_section`], which one core at a time is in: so no access meets another.

use core::cell::UnsafeCell;
use critical_section::CriticalSection;

/// Bytes of log frames that wait to be sent.
pub(crate) const LOG_BYTES: usize = 16 << 10;

const MAGIC: u64 = u64::from_le_bytes(*b"sumackep");

/// How a life ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum End {
    /// Power-on, or an order from outside.
    None = 0,
    /// A panic.
    Panic = 1,
    /// A fault of the core.
    Fault = 2,
    /// The watchdog.
    Watchdog = 3,
}

/// What is kept. Plain numbers only: any bits are a value.
#[repr(C)]
struct Kept {
    magic: u64,
    lives: u32,
    end: u32,
    /// Where the next byte of the log goes, and how many before it are not sent yet.
    head: u32,
    len: u32,
    /// Bytes that were overwritten before they were sent.
    lost: u32,
    log: [u8; LOG_BYTES],
}

#[repr(transparent)]
struct Cell(UnsafeCell<Kept>);

// SAFETY: accessed within critical sections only, as `with` sees to.
unsafe impl Sync for Cell {}

#[unsafe(link_section = ".keep")]
static KEPT: Cell =
    Cell(UnsafeCell::new(Kept { magic: 0, lives: 0, end: 0, head: 0, len: 0, lost: 0, log: [0; LOG_BYTES] }));

fn with<R>(_section: CriticalSection<'_>, f: impl FnOnce(&mut Kept) -> R) -> R {
    // SAFETY: one core at a time is in a critical section, and nothing interrupts it; no `f` of this module calls `with`.
    f(unsafe { &mut *KEPT.0.get() })
}

/// Begin a life: returns its number, from 1, and how the one before ended. Log frames of lives before stay to be sent.
pub(crate) fn begin() -> (u32, End) {
    critical_section::with(|section| {
        with(section, |kept| {
            let is_kept = kept.magic == MAGIC && kept.head < LOG_BYTES as u32 && kept.len <= LOG_BYTES as u32;
            if !is_kept {
                (kept.lives, kept.end, kept.head, kept.len, kept.lost) = (0, 0, 0, 0, 0);
                kept.magic = MAGIC;
            }
            let end = match kept.end {
                1 => End::Panic,
                2 => End::Fault,
                3 => End::Watchdog,
                _ => End::None,
            };
            kept.end = End::None as u32;
            kept.lives = kept.lives.saturating_add(1);
            (kept.lives, end)
        })
    })
}

/// Return the number of this life.
#[cfg(feature = "faults")]
pub(crate) fn life() -> u32 {
    critical_section::with(|section| with(section, |kept| kept.lives))
}

/// Note how this life ends.
pub(crate) fn end(section: CriticalSection<'_>, end: End) {
    with(section, |kept| kept.end = end as u32);
}

/// Append to the log; what does not fit takes the place of the oldest.
pub(crate) fn log(section: CriticalSection<'_>, bytes: &[u8]) {
    with(section, |kept| {
        for &byte in bytes {
            kept.log[kept.head as usize] = byte;
            kept.head = (kept.head + 1) % LOG_BYTES as u32;
            if kept.len < LOG_BYTES as u32 {
                kept.len += 1;
            } else {
                kept.lost = kept.lost.saturating_add(1);
            }
        }
    });
}

/// Give the oldest bytes of the log to `send`, which says how many of them it took; false if there are none left.
pub(crate) fn drain(section: CriticalSection<'_>, send: impl FnOnce(&[u8]) -> usize) -> bool {
    with(section, |kept| {
        let (head, len) = (kept.head as usize, kept.len as usize);
        let start = (head + LOG_BYTES - len) % LOG_BYTES;
        let oldest = &kept.log[start..(start + len).min(LOG_BYTES)];
        kept.len -= send(oldest).min(oldest.len()) as u32;
        kept.len > 0
    })
}

/// Return how many bytes of the log were overwritten before they were sent.
pub(crate) fn lost() -> u32 {
    critical_section::with(|section| with(section, |kept| kept.lost))
}
