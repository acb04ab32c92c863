//! Memory that a reset preserves: log frames that were not sent yet, and how the last incarnation ended.
//!
//! The memory is not cleared at start ([`Retained`] is in a section of its own), and is arbitrary after power-on, so
//! its contents are used only if the magic number and the bounds are valid.
//!
//! Invariant: every access is within [`critical_section`], which one core at a time can be in.

use core::cell::UnsafeCell;
use critical_section::CriticalSection;

/// The size of the buffer of unsent log frames, in bytes.
pub(crate) const LOG_BYTES: usize = 16 << 10;

const MAGIC: u64 = u64::from_le_bytes(*b"sumackep");

/// How an incarnation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum End {
    /// Power-on, or a reset from outside.
    None = 0,
    /// A panic.
    Panic = 1,
    /// A fault of the core.
    Fault = 2,
    /// The watchdog.
    Watchdog = 3,
}

/// The preserved memory. Plain integers only, for which any bits are valid.
#[repr(C)]
struct Retained {
    magic: u64,
    incarnations: u32,
    end: u32,
    /// The offset of the next byte of the log, and the number of unsent bytes before it.
    head: u32,
    len: u32,
    /// Bytes that were overwritten before they were sent.
    lost: u32,
    log: [u8; LOG_BYTES],
}

#[repr(transparent)]
struct Cell(UnsafeCell<Retained>);

// SAFETY: accessed only within critical sections, as `with` ensures.
unsafe impl Sync for Cell {}

#[unsafe(link_section = ".keep")]
static RETAINED: Cell = Cell(UnsafeCell::new(Retained {
    magic: 0,
    incarnations: 0,
    end: 0,
    head: 0,
    len: 0,
    lost: 0,
    log: [0; LOG_BYTES],
}));

fn with<R>(_section: CriticalSection<'_>, f: impl FnOnce(&mut Retained) -> R) -> R {
    // SAFETY: one core at a time is in a critical section, which nothing interrupts; no `f` in this module calls
    // `with`.
    f(unsafe { &mut *RETAINED.0.get() })
}

/// Start an incarnation; returns its number, from 1, and how the previous one ended. Unsent log frames of earlier
/// incarnations are preserved.
pub(crate) fn begin() -> (u32, End) {
    critical_section::with(|section| {
        with(section, |retained| {
            let is_valid =
                retained.magic == MAGIC && retained.head < LOG_BYTES as u32 && retained.len <= LOG_BYTES as u32;
            if !is_valid {
                (retained.incarnations, retained.end, retained.head, retained.len, retained.lost) = (0, 0, 0, 0, 0);
                retained.magic = MAGIC;
            }
            let end = match retained.end {
                1 => End::Panic,
                2 => End::Fault,
                3 => End::Watchdog,
                _ => End::None,
            };
            retained.end = End::None as u32;
            retained.incarnations = retained.incarnations.saturating_add(1);
            (retained.incarnations, end)
        })
    })
}

/// Return the number of this incarnation.
#[cfg(feature = "faults")]
pub(crate) fn incarnation() -> u32 {
    critical_section::with(|section| with(section, |retained| retained.incarnations))
}

/// Record how this incarnation ends.
pub(crate) fn end(section: CriticalSection<'_>, end: End) {
    with(section, |retained| retained.end = end as u32);
}

/// Append to the log; if it is full, the oldest bytes are overwritten.
pub(crate) fn log(section: CriticalSection<'_>, bytes: &[u8]) {
    with(section, |retained| {
        for &byte in bytes {
            retained.log[retained.head as usize] = byte;
            retained.head = (retained.head + 1) % LOG_BYTES as u32;
            if retained.len < LOG_BYTES as u32 {
                retained.len += 1;
            } else {
                retained.lost = retained.lost.saturating_add(1);
            }
        }
    });
}

/// Pass the oldest bytes of the log to `send`, which returns how many it sent; false if none are left.
pub(crate) fn drain(section: CriticalSection<'_>, send: impl FnOnce(&[u8]) -> usize) -> bool {
    with(section, |retained| {
        let (head, len) = (retained.head as usize, retained.len as usize);
        let start = (head + LOG_BYTES - len) % LOG_BYTES;
        let oldest = &retained.log[start..(start + len).min(LOG_BYTES)];
        retained.len -= send(oldest).min(oldest.len()) as u32;
        retained.len > 0
    })
}

/// Return how many bytes of the log were overwritten before they were sent.
pub(crate) fn lost() -> u32 {
    critical_section::with(|section| with(section, |retained| retained.lost))
}
