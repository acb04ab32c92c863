//! QEMU's virt board, as little of it as a test needs: boot, a console, an exit status.
//!
//! Invariants:
//! - the MMU is on before Rust runs, with RAM as normal memory: with it off all memory is Device memory, where
//!   unaligned and exclusive accesses fault on hardware (Arm ARM, B2.7.2), and packets are read at any alignment;
//! - floating point is on (`CPACR_EL1.FPEN`), which the kernels use;
//! - every fault and every panic stops the machine with a nonzero status, so that no failure hangs silently.

use core::arch::{asm, global_asm};
use core::fmt;

/// The board's first serial port (PL011).
#[derive(Debug)]
pub(crate) struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        const DATA: *mut u32 = 0x0900_0000 as *mut u32;
        for byte in text.bytes() {
            // SAFETY: the board has the PL011's data register there, mapped as Device memory (`TABLE`), and
            // nothing else uses it. QEMU's transmit FIFO is never full.
            unsafe { DATA.write_volatile(u32::from(byte)) };
        }
        Ok(())
    }
}

/// Stop the machine; `status` becomes the emulator's exit status (semihosting, SYS_EXIT).
pub(crate) fn exit(status: u64) -> ! {
    const SYS_EXIT: u64 = 0x18;
    const APPLICATION_EXIT: u64 = 0x2_0026;
    let reason = [APPLICATION_EXIT, status];
    // SAFETY: the semihosting call reads two words at x1 and does not return.
    unsafe { asm!("hlt #0xf000", in("x0") SYS_EXIT, in("x1") reason.as_ptr(), options(noreturn)) }
}

/// The handler of all exceptions, none of which is expected.
extern "C" fn fault(syndrome: u64, address: u64, at: u64) -> ! {
    use fmt::Write;
    let _ = writeln!(Console, "fault: ESR {syndrome:#x}, FAR {address:#x}, ELR {at:#x}");
    exit(102)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    use fmt::Write;
    let _ = writeln!(Console, "{info}");
    exit(101)
}

/// The first-level translation table for 39-bit addresses: one identity-mapped entry per GiB.
#[repr(C, align(4096))]
struct Table([u64; 512]);

static TABLE: Table = {
    const BLOCK: u64 = 0b01;
    const ACCESSED: u64 = 1 << 10;
    const INNER_SHAREABLE: u64 = 0b11 << 8;
    const NEVER_EXECUTE: u64 = 0b11 << 53;
    // Indices into MAIR_EL1 as `_start` sets it.
    const DEVICE: u64 = 0 << 2;
    const NORMAL: u64 = 1 << 2;
    let mut entries = [0; 512];
    entries[0] = BLOCK | ACCESSED | NEVER_EXECUTE | DEVICE;
    entries[1] = 0x4000_0000 | BLOCK | ACCESSED | INNER_SHAREABLE | NORMAL;
    Table(entries)
};

global_asm!(
    r#"
.section .text.start, "ax"
.globl _start
_start:
    mov     x0, #(3 << 20)          // CPACR_EL1.FPEN: no trap of floating point
    msr     cpacr_el1, x0
    ldr     x0, =vectors
    msr     vbar_el1, x0

    mov     x0, #0xff00             // 0: Device-nGnRnE; 1: normal, write-back
    msr     mair_el1, x0
    ldr     x0, =0x100803519        // T0SZ 25, 4 KiB granule, walks cacheable and shareable, no TTBR1, 36-bit addresses
    msr     tcr_el1, x0
    ldr     x0, ={table}
    msr     ttbr0_el1, x0
    isb
    tlbi    vmalle1
    dsb     sy
    isb
    mrs     x0, sctlr_el1
    mov     x1, #0x1005             // M, C, I
    orr     x0, x0, x1
    msr     sctlr_el1, x0
    isb

    ldr     x0, =stack_top
    mov     sp, x0
    ldr     x0, =bss_start
    ldr     x1, =bss_end
0:  cmp     x0, x1
    b.hs    1f
    stp     xzr, xzr, [x0], #16
    b       0b
1:  bl      {main}
    b       .
    .ltorg

.balign 2048
vectors:
.rept 16
    mrs     x0, esr_el1
    mrs     x1, far_el1
    mrs     x2, elr_el1
    b       {fault}
    .balign 128
.endr
"#,
    table = sym TABLE,
    main = sym crate::main,
    fault = sym fault,
);
