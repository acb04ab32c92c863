//! The processor: start-up, the clock, sleep, traps and reset, in machine mode (The RISC-V Instruction Set Manual,
//! Volume II: Privileged Architecture).
//!
//! Invariants:
//! - addresses are physical, and the machine's physical memory attributes make RAM cacheable and registers I/O, so that
//!   there is no translation to set up;
//! - floating point is enabled (`mstatus.FS`), which the reduction kernels use;
//! - interrupts stay disabled (`mstatus.MIE`) and only end a wait;
//! - every trap is reported, and ends this incarnation of the device.

use core::arch::{asm, global_asm};
use sumac_hal::time::Instant;

/// The core-local interruptor (QEMU's hw/riscv/virt; SiFive's CLINT): the time at which the timer of hart 0 is due.
const TIMER_DUE: *mut u64 = 0x0200_4000 as *mut u64;
/// Its clock.
const TIME: *const u64 = 0x0200_bff8 as *const u64;
/// The clock's frequency.
const TIME_HZ: u64 = 10_000_000;

/// The machine's reset register (SiFive's test finisher).
const FINISHER: *mut u32 = 0x0010_0000 as *mut u32;

/// The pattern of unused stack memory.
const STACK_PAINT: u64 = 0x5ac5_ac5a_c5ac_5ac5;

/// The part of the stack that must stay unused, longer than any stack frame.
const STACK_RESERVE_BYTES: usize = 16 << 10;

unsafe extern "C" {
    static mut stack_bottom: u64;
    static mut stack_top: u64;
}

/// Return the time since the board was switched on.
pub(crate) fn now() -> Instant {
    // SAFETY: the register is there; reading it has no side effects.
    Instant::from_nanos(unsafe { TIME.read_volatile() } * (1_000_000_000 / TIME_HZ))
}

/// Set the timer: its interrupt is pending from `at` on.
pub(crate) fn set_alarm(at: Instant) {
    let due = at.as_nanos().div_ceil(1_000_000_000 / TIME_HZ);
    // SAFETY: the register of this hart, the only one that runs.
    unsafe { TIMER_DUE.write_volatile(due) };
}

/// Sleep until the timer's or a device's interrupt is pending; returns at once if one is.
pub(crate) fn wait_for_interrupt() {
    // SAFETY: waits. Interrupts that are enabled in `mie` end it, though `mstatus.MIE` is clear (3.3.3).
    unsafe { asm!("fence", "wfi", options(nostack, preserves_flags)) };
}

/// Return the high-water mark and the size of the stack in bytes, from the pattern that start-up wrote.
pub(crate) fn stack_high_water() -> (usize, usize) {
    let (bottom, top) = (&raw const stack_bottom, &raw const stack_top);
    let words = (top.addr() - bottom.addr()) / 8;
    // SAFETY: the words from `bottom` on lie in the stack.
    let untouched = (0..words).take_while(|&word| unsafe { bottom.add(word).read_volatile() } == STACK_PAINT).count();
    ((words - untouched) * 8, words * 8)
}

/// Panic if the stack is about to overflow into variables.
pub(crate) fn check_stack() {
    // SAFETY: the word lies in the stack.
    let word = unsafe { (&raw const stack_bottom).byte_add(STACK_RESERVE_BYTES).read_volatile() };
    assert!(word == STACK_PAINT, "less than {STACK_RESERVE_BYTES} bytes of the stack are left");
}

/// Read from an address that has neither memory nor a device, which is a fault.
#[cfg(feature = "faults")]
pub(crate) fn fault() {
    // SAFETY: the access does not complete.
    unsafe { (0xf000_0000 as *const u32).read_volatile() };
}

/// Reset the machine, which starts another incarnation.
pub(crate) fn reset() -> ! {
    const RESET: u32 = 0x7777;
    // SAFETY: the register is there; the machine resets.
    unsafe { FINISHER.write_volatile(RESET) };
    loop {
        wait_for_interrupt();
    }
}

/// The handler of traps: all are faults, because interrupts are disabled.
extern "C" fn trap(cause: u64, at: u64, value: u64) -> ! {
    crate::fault(cause, at, value)
}

global_asm!(
    r#"
.section .text.start, "ax"
.globl _start
_start:
    csrw    mie, zero
    csrci   mstatus, 8              // MIE
    csrr    t0, mhartid             // other harts sleep
    bnez    t0, 5f
    la      t0, 6f
    csrw    mtvec, t0
    li      t0, 0x2000              // FS: initial
    csrs    mstatus, t0
    fscsr   zero                    // round to nearest, no exceptions

    la      t0, bss_start
    la      t1, bss_end
1:  bgeu    t0, t1, 2f
    sd      zero, 0(t0)
    addi    t0, t0, 8
    j       1b
2:  la      t0, stack_bottom
    la      t1, stack_top
    li      t2, {paint}
3:  bgeu    t0, t1, 4f
    sd      t2, 0(t0)
    addi    t0, t0, 8
    j       3b
4:  la      sp, stack_top
    li      t0, 0x880               // MTIE and MEIE: they end a wait
    csrw    mie, t0
    call    {main}
5:  wfi
    j       5b

.balign 4
6:  la      sp, stack_top           // what is there is of no use any more
    csrr    a0, mcause
    csrr    a1, mepc
    csrr    a2, mtval
    call    {trap}
"#,
    paint = const STACK_PAINT,
    main = sym crate::main,
    trap = sym trap,
);
