//! Log frames (defmt) into memory that outlives a reset, and from there to the serial port when there is time.
//!
//! A frame costs the data path a copy of some bytes into memory; the serial port is fed by [`drain`], when the board has
//! nothing better to do, so that a slow terminal never holds up a packet. `sumac log --elf IMAGE` makes text of it.

use crate::{cpu, keep, uart};
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicUsize, Ordering};
use critical_section::RestoreState;

/// Bytes handed to the serial port in one go: interrupts are masked meanwhile.
const DRAIN_BYTES: usize = 64;

/// A lock over all cores: who holds it, or [`NOBODY`].
static OWNER: AtomicUsize = AtomicUsize::new(NOBODY);
const NOBODY: usize = usize::MAX;

/// In what `acquire` returns, beside the masks: the core held the lock before.
const NESTED: u64 = 1;

struct Masks;
critical_section::set_impl!(Masks);

// SAFETY: between `acquire` and `release`, what could interrupt this core is masked, and other cores wait for the lock.
// Nested sections take nothing and give nothing back.
unsafe impl critical_section::Impl for Masks {
    unsafe fn acquire() -> u64 {
        let (masks, own) = (cpu::mask_all(), cpu::core());
        // The masks are bits 6 to 9.
        if OWNER.load(Ordering::Relaxed) == own {
            return masks | NESTED;
        }
        while OWNER.compare_exchange_weak(NOBODY, own, Ordering::Acquire, Ordering::Relaxed).is_err() {
            core::hint::spin_loop();
        }
        masks
    }

    unsafe fn release(masks: u64) {
        if masks & NESTED == 0 {
            OWNER.store(NOBODY, Ordering::Release);
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

// SAFETY: as defmt asks, `acquire` begins a critical section that `release` ends, and frames begin and end in them.
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

/// Send some of what was logged; false if there is nothing left.
pub(crate) fn drain() -> bool {
    critical_section::with(|section| keep::drain(section, |bytes| uart::send(&bytes[..bytes.len().min(DRAIN_BYTES)])))
}
