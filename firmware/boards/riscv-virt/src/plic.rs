//! The interrupt controller (RISC-V Platform-Level Interrupt Controller Specification): it tells which device has an
//! interrupt.

use core::ptr;

const BASE: usize = 0x0c00_0000;

/// The registers of context 0: machine mode of hart 0.
const ENABLE: usize = BASE + 0x2000;
const THRESHOLD: usize = BASE + 0x20_0000;
const CLAIM: usize = BASE + 0x20_0004;

fn write(address: usize, value: u32) {
    // SAFETY: a register of the controller (QEMU's hw/riscv/virt), which nothing else uses.
    unsafe { ptr::with_exposed_provenance_mut::<u32>(address).write_volatile(value) };
}

fn read(address: usize) -> u32 {
    // SAFETY: as above.
    unsafe { ptr::with_exposed_provenance::<u32>(address).read_volatile() }
}

/// Enable an interrupt, whose number is below 32.
pub(crate) fn enable(number: u32) {
    write(BASE + 4 * number as usize, 1);
    write(ENABLE, read(ENABLE) | 1 << number);
    write(THRESHOLD, 0);
}

/// Acknowledge all interrupts that are pending. Those that their devices raise later are pending again.
pub(crate) fn acknowledge() {
    loop {
        match read(CLAIM) {
            0 => return,
            number => write(CLAIM, number),
        }
    }
}
