//! Log frames (defmt) into memory that outlives a reset, and from there to the serial port when there is time.
//!
//! A frame costs the data path a copy of some bytes into memory; the serial port is fed by [`drain`], when the board has
//! nothing better to do, so that a slow terminal never holds up a packet. `sumac log --elf IMAGE` makes text of it.

use crate::{cpu, keep, uart};
use core::cell::UnsafeCell;
use critical_section::RestoreState;

/// Bytes handed to the serial port in one go: interrupts are masked meanwhile.
const DRAIN_BYTES: usize = 64;

struct Masks;
critical_section::set_impl!(Masks);

// SAFETY: one core runs; what could interrupt it is masked between `acquire` and `release`. Nested sections restore what
// the outer one had set.
unsafe impl critical_section::Impl for Masks {
    unsafe fn acquire() -> u64 {
        cpu::mask_all()
    }

    unsafe fn release(masks: u64) {
        cpu::restore_masks(masks);
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
