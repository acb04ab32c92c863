//! Memory that this board shares with its host: QEMU's `ivshmem-plain`, a PCIe function whose BAR 2 is a file of the host.
//!
//! No firmware runs before the board, so it places the BARs itself: bus 0 alone, in the order of the devices' numbers.
//!
//! Invariants:
//! - a function decodes its BARs only when they have their places, which do not overlap;
//! - the memory is given out once, and as atomics, as the host writes there at the same time.

use crate::cpu::{self, PCI_CONFIG, PCI_MEMORY, PCI_WINDOW};
use bitflags::bitflags;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use volatile::access::ReadWrite;
use volatile::{VolatileFieldAccess, VolatilePtr};

/// Vendor (Red Hat) and device of ivshmem (QEMU's documentation, "Device Specification for Inter-VM shared memory device").
const IVSHMEM: u32 = 0x1110_1af4;

/// Devices of a bus.
const DEVICES: u64 = 32;

/// How far apart the configurations of two devices are: eight functions of 4 KiB.
const DEVICE_STRIDE: u64 = 8 << 12;

/// How much of the window this core maps.
const WINDOW_LEN_BYTES: u64 = 1 << 30;

/// Where registers go, which nobody uses: the window for 32-bit BARs.
const REGISTERS: u32 = 0x1000_0000;

/// Room for the registers of one function.
const REGISTERS_STRIDE: u32 = 0x1000;

bitflags! {
    /// What a function does.
    struct Command: u16 {
        /// It decodes its memory BARs.
        const MEMORY = 1 << 1;
    }
}

bitflags! {
    /// The lowest bits of a memory BAR.
    struct Kind: u32 {
        /// It takes two words.
        const WIDE = 1 << 2;
        /// All of them.
        const ALL = 0xf;
    }
}

/// The beginning of a function's configuration (PCI Local Bus 3.0, 6.1).
#[derive(VolatileFieldAccess)]
#[repr(C)]
struct Configuration {
    id: u32,
    command: u16,
    status: u16,
    class: u32,
    layout: u32,
    bar0: u32,
    bar1: u32,
    bar2: u32,
    bar3: u32,
}

/// Find the memory of all ivshmem functions, in their order, and call `each` with it. Once in a life.
pub(crate) fn shared_memory(mut each: impl FnMut(&'static [AtomicU64])) {
    static DONE: AtomicBool = AtomicBool::new(false);
    assert!(!DONE.swap(true, Ordering::AcqRel), "shared memory is given out once");
    let mut next = 0;
    for device in 0..DEVICES {
        let at = (PCI_CONFIG + device * DEVICE_STRIDE) as usize as *mut Configuration;
        // SAFETY: the configuration is there for every device of bus 0, mapped as Device memory; one that there is not reads
        // as all ones. Nobody else uses it.
        let configuration = unsafe { VolatilePtr::new(NonNull::new_unchecked(at)) };
        if configuration.id().read() != IVSHMEM {
            continue;
        }
        let registers = REGISTERS + device as u32 * REGISTERS_STRIDE;
        let Some((start, len_bytes)) = place(configuration, registers, next) else { continue };
        next = start + len_bytes;
        let base = (PCI_MEMORY + start) as usize as *const AtomicU64;
        // SAFETY: the BAR lies there, as normal memory, for as long as this life of the board; no other BAR does, and the
        // check above gives it out once. Any bytes are atomics.
        each(unsafe { slice::from_raw_parts(base, len_bytes as usize / 8) });
    }
}

/// Place a function's BARs, the memory at or behind `free` in the window, and let it decode them; returns where it is in the
/// window, and how long. `None` if it has none that fits.
fn place(configuration: VolatilePtr<'_, Configuration, ReadWrite>, registers: u32, free: u64) -> Option<(u64, u64)> {
    if configuration.bar2().read() & Kind::WIDE.bits() == 0 {
        return None;
    }
    // The bits that stay 0 are its length's.
    configuration.bar2().write(u32::MAX);
    configuration.bar3().write(u32::MAX);
    let low = configuration.bar2().read() & !Kind::ALL.bits();
    let mask = u64::from(configuration.bar3().read()) << 32 | u64::from(low);
    let len_bytes = mask.wrapping_neg();
    let start = free.checked_next_multiple_of(len_bytes)?;
    if mask == 0 || start.checked_add(len_bytes).is_none_or(|end| end > WINDOW_LEN_BYTES) {
        return None;
    }
    let address = PCI_WINDOW + start;
    configuration.bar0().write(registers);
    configuration.bar2().write(address as u32);
    configuration.bar3().write((address >> 32) as u32);
    configuration.command().write(configuration.command().read() | Command::MEMORY.bits());
    // Registers and memory are of two kinds, which nothing else orders; to read what was written has it arrive.
    let _ = configuration.command().read();
    cpu::settle();
    Some((start, len_bytes))
}
