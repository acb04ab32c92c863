//! Memory shared with the host: QEMU's `ivshmem-plain`, a PCIe function whose BAR 2 is a file on the host.
//!
//! No firmware runs before the board, so it assigns the BARs itself: of bus 0 only, in the order of the devices'
//! numbers.
//!
//! Invariants:
//! - a function decodes its BARs only once they are assigned, to ranges that do not overlap;
//! - the memory is handed out once, and as atomics, because the host writes to it concurrently.

use crate::cpu::{self, PCI_CONFIG, PCI_MEMORY, PCI_WINDOW};
use bitflags::bitflags;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use volatile::access::ReadWrite;
use volatile::{VolatileFieldAccess, VolatilePtr};

/// Vendor (Red Hat) and device of ivshmem (QEMU's documentation, "Device Specification for Inter-VM shared memory
/// device").
const IVSHMEM: u32 = 0x1110_1af4;

/// The number of devices of a bus.
const DEVICES: u64 = 32;

/// The distance of two devices' configurations: eight functions of 4 KiB.
const DEVICE_STRIDE: u64 = 8 << 12;

/// The size of the window that this core maps.
const WINDOW_LEN_BYTES: u64 = 1 << 30;

/// The window for 32-bit BARs, for register BARs, which are not used.
const REGISTERS: u32 = 0x1000_0000;

/// The space for the registers of one function.
const REGISTERS_STRIDE: u32 = 0x1000;

bitflags! {
    /// The command register of a function.
    struct Command: u16 {
        /// It decodes its memory BARs.
        const MEMORY = 1 << 1;
    }
}

bitflags! {
    /// The lowest bits of a memory BAR.
    struct Kind: u32 {
        /// A 64-bit BAR, which takes two words.
        const WIDE = 1 << 2;
        /// All type bits.
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

/// Call `each` with the memory of every ivshmem function, in order. To be called once per incarnation.
pub(crate) fn shared_memory(mut each: impl FnMut(&'static [AtomicU64])) {
    static DONE: AtomicBool = AtomicBool::new(false);
    assert!(!DONE.swap(true, Ordering::AcqRel), "shared memory is handed out only once");
    let mut next = 0;
    for device in 0..DEVICES {
        let at = (PCI_CONFIG + device * DEVICE_STRIDE) as usize as *mut Configuration;
        // SAFETY: every device of bus 0 has its configuration there, mapped as Device memory; an absent one reads as
        // all ones. Nothing else uses it.
        let configuration = unsafe { VolatilePtr::new(NonNull::new_unchecked(at)) };
        if configuration.id().read() != IVSHMEM {
            continue;
        }
        let registers = REGISTERS + device as u32 * REGISTERS_STRIDE;
        let Some((start, len_bytes)) = place(configuration, registers, next) else { continue };
        next = start + len_bytes;
        let base = (PCI_MEMORY + start) as usize as *const AtomicU64;
        // SAFETY: the BAR is mapped there, as normal memory, for this incarnation; no other BAR overlaps it, and the
        // check above ensures that it is handed out once. Any bytes are valid atomics.
        each(unsafe { slice::from_raw_parts(base, len_bytes as usize / 8) });
    }
}

/// Assign a function's BARs, its memory at or after `free` in the window, and enable decoding; returns the offset in
/// the window, and the length. `None` if the function has no memory that fits.
fn place(configuration: VolatilePtr<'_, Configuration, ReadWrite>, registers: u32, free: u64) -> Option<(u64, u64)> {
    if configuration.bar2().read() & Kind::WIDE.bits() == 0 {
        return None;
    }
    // The bits that stay 0 encode the length.
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
    // Device and normal memory are not ordered with each other; reading the register back completes the writes.
    let _ = configuration.command().read();
    cpu::settle();
    Some((start, len_bytes))
}
