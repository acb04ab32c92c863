//! The serial port (PL011, DDI 0183), which carries only log frames.

use core::ptr::NonNull;
use volatile::access::{ReadOnly, ReadWrite};
use volatile::{VolatileFieldAccess, VolatilePtr};

bitflags::bitflags! {
    /// UARTFR (DDI 0183, 3.3.3).
    #[derive(Clone, Copy)]
    struct Flags: u32 {
        const TRANSMIT_FULL = 1 << 5;
    }
}

/// The registers that are used (DDI 0183, 3.2).
#[repr(C)]
#[derive(VolatileFieldAccess)]
struct Registers {
    #[access(ReadWrite)]
    data: u32,
    reserved: [u32; 5],
    #[access(ReadOnly)]
    flags: u32,
}

const UART: NonNull<Registers> = NonNull::new(0x0900_0000 as *mut Registers).unwrap();

/// Send as many of `bytes` as fit without waiting; returns how many.
pub(crate) fn send(bytes: &[u8]) -> usize {
    // SAFETY: QEMU's virt board has the PL011 there, mapped as Device memory; one core uses it.
    let registers = unsafe { VolatilePtr::new(UART) };
    let is_full = || Flags::from_bits_retain(registers.flags().read()).contains(Flags::TRANSMIT_FULL);
    let mut sent = 0;
    for &byte in bytes {
        if is_full() {
            break;
        }
        registers.data().write(u32::from(byte));
        sent += 1;
    }
    sent
}
