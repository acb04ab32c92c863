//! The log: defmt frames are written to memory that a reset preserves, and sent to the serial port from there.
//!
//! A frame costs the data path a short copy into memory; [`drain`] feeds the serial port when the board is idle, so
//! that a slow terminal never delays a packet. `sumac log --elf IMAGE` decodes the frames.

use crate::{cpu, keep, uart};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicUsize, Ordering};
use critical_section::RestoreState;

/// Bytes sent to the serial port at a time, with interrupts masked.
const DRAIN_BYTES: usize = 64;

/// A lock across all cores: the core that holds it, or [`NO_CORE`].
static OWNER: AtomicUsize = AtomicUsize::new(NO_CORE);
const NO_CORE: usize = usize::MAX;

/// A flag in the result of `acquire`, beside the masks: the core already held the lock.
const NESTED: u64 = 1;

struct Masks;
critical_section::set_impl!(Masks);

// SAFETY: between `acquire` and `release`, interrupts of this core are masked, and other cores wait for the lock.
// Nested sections neither take nor release it.
unsafe impl critical_section::Impl for Masks {
    unsafe fn acquire() -> u64 {
        let (masks, own) = (cpu::mask_all(), cpu::core());
        // The masks are bits 6 to 9.
        if OWNER.load(Ordering::Relaxed) == own {
            return masks | NESTED;
        }
        while OWNER.compare_exchange_weak(NO_CORE, own, Ordering::Acquire, Ordering::Relaxed).is_err() {
            core::hint::spin_loop();
        }
        masks
    }

    unsafe fn release(masks: u64) {
        if masks & NESTED == 0 {
            OWNER.store(NO_CORE, Ordering::Release);
        }
        cpu::restore_masks(masks & !NESTED);
    }
}

struct State {
    encoder: UnsafeCell<defmt::Encoder>,
    masks: UnsafeCell<RestoreState>,
}

// SAFETY: accessed between `acquire` and `release` of the logger only, which is a critical section.
unsafe impl Sync for State {}

static STATE: State =
    State { encoder: UnsafeCell::new(defmt::Encoder::new()), masks: UnsafeCell::new(RestoreState::invalid()) };

#[defmt::global_logger]
struct Logger;

fn put(bytes: &[u8]) {
    // SAFETY: defmt calls this between `acquire` and `release`, within a critical section.
    keep::log(unsafe { critical_section::CriticalSection::new() }, bytes);
}

// SAFETY: as defmt requires, `acquire` begins a critical section that `release` ends, and frames begin and end in it.
unsafe impl defmt::Logger for Logger {
    fn acquire() {
        // SAFETY: paired with `release`; the state is this section's.
        unsafe {
            let masks = critical_section::acquire();
            *STATE.masks.get() = masks;
            (*STATE.encoder.get()).start_frame(put);
        }
    }

    unsafe fn flush() {}

    unsafe fn release() {
        // SAFETY: within the section that `acquire` began.
        unsafe {
            (*STATE.encoder.get()).end_frame(put);
            critical_section::release(*STATE.masks.get());
        }
    }

    unsafe fn write(bytes: &[u8]) {
        // SAFETY: within the section that `acquire` began.
        unsafe { (*STATE.encoder.get()).write(bytes, put) };
    }
}

defmt::timestamp!("{=u64:us}", cpu::now().as_nanos() / 1_000);

/// Send some of the logged bytes; false if none are left.
pub(crate) fn drain() -> bool {
    critical_section::with(|section| keep::drain(section, |bytes| uart::send(&bytes[..bytes.len().min(DRAIN_BYTES)])))
}
