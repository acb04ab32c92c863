//! Unplanned ends of an incarnation: recorded, logged, and followed by a reset into the next incarnation, with a boot
//! id of its own.
//!
//! Log frames not sent yet are in memory that the reset preserves, so they are sent by the next incarnation.

use crate::cpu;
use crate::keep::{self, End};

fn end(end: End) -> ! {
    critical_section::with(|section| keep::end(section, end));
    cpu::reset()
}

/// A fault of the core: exception syndrome, the address it was about, and where it happened.
pub(crate) fn fault(syndrome: u64, address: u64, at: u64) -> ! {
    defmt::error!("fault: ESR {=u64:#x}, FAR {=u64:#x}, ELR {=u64:#x}", syndrome, address, at);
    end(End::Fault)
}

/// The main loop made no progress in time.
pub(crate) fn watchdog_expired(at: u64) -> ! {
    defmt::error!("watchdog: no progress, at ELR {=u64:#x}", at);
    end(End::Watchdog)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    defmt::error!("panic: {}", defmt::Display2Format(info));
    end(End::Panic)
}
