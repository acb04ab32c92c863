//! The processor: start-up, translation tables, exceptions, timers and the firmware below (PSCI).
//!
//! Invariants:
//! - the MMU is on before Rust runs, with RAM as normal memory and registers as Device memory: with it off all memory
//!   is Device memory, where unaligned and exclusive accesses fault on hardware (Arm ARM, B2.7.2);
//! - floating point is enabled (`CPACR_EL1.FPEN`), which the reduction kernels use;
//! - interrupts stay masked and only end a wait; the watchdog's is an FIQ, which is not masked, and its handler never
//!   returns;
//! - every fault and panic is recorded and ends this incarnation of the device: nothing hangs silently.

use core::arch::{asm, global_asm};
use core::time::Duration;
use sumac_hal::time::Instant;

/// The maximum number of cores: each has a stack of [`STACK_BYTES`].
pub(crate) const MAX_CORES: usize = 4;

/// The size of a stack; `link.ld` reserves [`MAX_CORES`] of them.
const STACK_BYTES: usize = 256 << 10;

/// The pattern of unused stack memory.
const STACK_PAINT: u64 = 0x5ac5_ac5a_c5ac_5ac5;

/// The configuration space of PCIe (QEMU's hw/arm/virt: its high ECAM, behind 256 GiB of addresses).
pub(crate) const PCI_CONFIG: u64 = 0x40_1000_0000;

/// The bus address of the window for 64-bit BARs.
pub(crate) const PCI_WINDOW: u64 = 0x80_0000_0000;

/// The address at which this core maps the first gigabyte of that window.
pub(crate) const PCI_MEMORY: u64 = 0xc000_0000;

/// The frequency of the system counter in Hz.
fn counter_hz() -> u64 {
    let hz: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) hz, options(nomem, nostack, preserves_flags)) };
    hz.max(1)
}

fn counter() -> u64 {
    let count: u64;
    // SAFETY: reads a register, after what comes before it.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack, preserves_flags)) };
    count
}

/// Return the time since the board was switched on.
pub(crate) fn now() -> Instant {
    let nanos = u128::from(counter()) * 1_000_000_000 / u128::from(counter_hz());
    Instant::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// How often to ask the processor for a random number that it does not have at the moment.
const RANDOM_TRIES: u32 = 16;

/// Return a random number from the processor (FEAT_RNG); `None` if it has no generator, or the generator fails.
pub(crate) fn random() -> Option<u64> {
    let features: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, id_aa64isar0_el1", out(reg) features, options(nomem, nostack, preserves_flags)) };
    if features >> 60 == 0 {
        return None;
    }
    (0..RANDOM_TRIES).find_map(|_| {
        let (value, is_good): (u64, u64);
        // SAFETY: reads the register RNDR, which exists; Z is set if the generator has no number (Arm ARM, D24.2.144).
        unsafe {
            asm!("mrs {}, s3_3_c2_c4_0", "cset {}, ne", out(reg) value, out(reg) is_good, options(nomem, nostack))
        };
        (is_good != 0).then_some(value)
    })
}

fn count_at(at: Instant) -> u64 {
    let count = u128::from(at.as_nanos()) * u128::from(counter_hz()) / 1_000_000_000;
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Set the virtual timer: its interrupt is pending from `at` on.
pub(crate) fn set_alarm(at: Instant) {
    // SAFETY: writes the virtual timer's registers, which nothing else uses. The counter rounds down, so one more.
    unsafe {
        asm!("msr cntv_cval_el0, {}", "msr cntv_ctl_el0, {}", "isb", in(reg) count_at(at).saturating_add(1), in(reg) 1_u64,
             options(nomem, nostack, preserves_flags));
    }
}

/// Restart the watchdog, which expires after `limit`.
pub(crate) fn rearm_watchdog(limit: Duration) {
    let ticks = limit.as_micros() as u64 * counter_hz() / 1_000_000;
    let count: u64;
    // SAFETY: reads and writes the physical timer's registers, which nothing else uses.
    unsafe {
        asm!("mrs {}, cntpct_el0", out(reg) count, options(nomem, nostack, preserves_flags));
        asm!("msr cntp_cval_el0, {}", "msr cntp_ctl_el0, {}", "isb", in(reg) count.saturating_add(ticks), in(reg) 1_u64,
             options(nomem, nostack, preserves_flags));
    }
}

/// Unmask the watchdog's interrupt, which is an FIQ.
pub(crate) fn unmask_watchdog() {
    // SAFETY: unmasks FIQs, of which there is one, handled below.
    unsafe { asm!("msr daifclr, #1", options(nomem, nostack, preserves_flags)) };
}

/// Sleep until an interrupt is pending; returns at once if one is.
pub(crate) fn wait_for_interrupt() {
    // SAFETY: waits. Masked interrupts end it as well.
    unsafe { asm!("dsb sy", "wfi", options(nostack, preserves_flags)) };
}

/// Mask interrupts; return the previous masks.
pub(crate) fn mask_all() -> u64 {
    let masks: u64;
    // SAFETY: reads and sets the mask bits.
    unsafe { asm!("mrs {}, daif", "msr daifset, #3", out(reg) masks, options(nomem, nostack, preserves_flags)) };
    masks
}

/// Restore the masks.
pub(crate) fn restore_masks(masks: u64) {
    // SAFETY: sets the mask bits to what they were.
    unsafe { asm!("msr daif, {}", in(reg) masks, options(nomem, nostack, preserves_flags)) };
}

/// Return the number of this core.
pub(crate) fn core() -> usize {
    let affinity: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, mpidr_el1", out(reg) affinity, options(nomem, nostack, preserves_flags)) };
    (affinity & 0xff) as usize
}

/// Power on core `index` (PSCI CPU_ON, DEN0022, 5.6), which then runs `secondary` with its number; false if the machine
/// has no such core, or it is on already.
pub(crate) fn start_core(index: usize) -> bool {
    const CPU_ON: u64 = 0xc400_0003;
    if index >= MAX_CORES {
        return false;
    }
    let status: i64;
    // SAFETY: `_start_secondary` sets the core up on a stack of its own. This core's writes are in memory before.
    unsafe {
        asm!("dsb sy", "ldr x2, =_start_secondary", "hvc #0", inout("x0") CPU_ON => status, inout("x1") index as u64 => _,
             out("x2") _, inout("x3") index as u64 => _);
    }
    status == 0
}

/// Reset the machine (PSCI SYSTEM_RESET, DEN0022, 5.11), which starts another incarnation.
pub(crate) fn reset() -> ! {
    const SYSTEM_RESET: u64 = 0x8400_0009;
    // SAFETY: the call does not return.
    unsafe { asm!("dsb sy", "hvc #0", in("x0") SYSTEM_RESET, options(noreturn)) }
}

unsafe extern "C" {
    static mut stack_bottom: u64;
}

/// Return the high-water mark and the size of this core's stack in bytes, from the pattern that start-up wrote.
pub(crate) fn stack_high_water() -> (usize, usize) {
    // SAFETY: there are `MAX_CORES` stacks of that length, the first core's at the bottom.
    let bottom = unsafe { (&raw const stack_bottom).byte_add(core() * STACK_BYTES) };
    let words = STACK_BYTES / 8;
    // SAFETY: the words from `bottom` on lie in this core's own stack.
    let untouched = (0..words).take_while(|&word| unsafe { bottom.add(word).read_volatile() } == STACK_PAINT).count();
    ((words - untouched) * 8, STACK_BYTES)
}

/// The part of a stack that must stay unused, longer than any stack frame.
const STACK_RESERVE_BYTES: usize = 32 << 10;

/// Panic if this core's stack is about to overflow into another core's, or into variables.
pub(crate) fn check_stack() {
    // SAFETY: the word lies in this core's own stack.
    let word =
        unsafe { (&raw const stack_bottom).byte_add(core() * STACK_BYTES + STACK_RESERVE_BYTES).read_volatile() };
    assert!(word == STACK_PAINT, "less than {STACK_RESERVE_BYTES} of {STACK_BYTES} bytes of the stack are left");
}

/// Wait until register writes have taken effect, before memory is accessed.
pub(crate) fn settle() {
    // SAFETY: waits.
    unsafe { asm!("dsb sy", "isb", options(nostack, preserves_flags)) };
}

/// The handler of faults.
extern "C" fn fault(syndrome: u64, address: u64, at: u64) -> ! {
    crate::crash::fault(syndrome, address, at)
}

/// The handler of FIQs: the watchdog's.
extern "C" fn watchdog_expired(at: u64) -> ! {
    crate::crash::watchdog_expired(at)
}

/// The first-level translation table for 39-bit addresses: one entry a GiB, mapped to itself.
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
    // ivshmem BARs are memory and alone in the window, which is beyond 39-bit addresses, so it is mapped here.
    entries[(PCI_MEMORY >> 30) as usize] = PCI_WINDOW | BLOCK | ACCESSED | NEVER_EXECUTE | INNER_SHAREABLE | NORMAL;
    entries[(PCI_CONFIG >> 30) as usize] = (PCI_CONFIG & !0x3fff_ffff) | BLOCK | ACCESSED | NEVER_EXECUTE | DEVICE;
    Table(entries)
};

global_asm!(
    r#"
// What every core needs before anything else; uses x0.
.macro prepare
    mov     x0, #(3 << 20)          // CPACR_EL1.FPEN: no trap of floating point
    msr     cpacr_el1, x0
    ldr     x0, =vectors
    msr     vbar_el1, x0

    mov     x0, #0xff00             // 0: Device-nGnRnE; 1: normal, write-back
    msr     mair_el1, x0
    ldr     x0, =0x200803519        // T0SZ 25, 4 KiB granule, walks cacheable and shareable, no TTBR1, 40-bit addresses
    msr     tcr_el1, x0
    ldr     x0, ={table}
    msr     ttbr0_el1, x0
    isb
    tlbi    vmalle1
    dsb     sy
    isb
    mrs     x0, sctlr_el1
    orr     x0, x0, #0x1            // M
    orr     x0, x0, #0x4            // C
    orr     x0, x0, #0x1000         // I
    msr     sctlr_el1, x0
    isb
.endm

.section .text.start, "ax"
.globl _start
_start:
    prepare
    ldr     x0, =bss_start
    ldr     x1, =bss_end
0:  cmp     x0, x1
    b.hs    1f
    stp     xzr, xzr, [x0], #16
    b       0b
1:  ldr     x0, =stack_bottom       // all stacks
    ldr     x1, =stack_top
    ldr     x2, ={paint}
2:  cmp     x0, x1
    b.hs    3f
    stp     x2, x2, [x0], #16
    b       2b
3:  ldr     x0, =stack_bottom
    add     x0, x0, #({stack} >> 12), lsl #12
    mov     sp, x0
    bl      {main}
    b       .

// Another core: x0 holds its number.
.globl _start_secondary
_start_secondary:
    mov     x9, x0
    prepare
    ldr     x0, =stack_bottom
    add     x1, x9, #1
    mov     x2, #({stack} >> 12)
    lsl     x2, x2, #12
    madd    x0, x1, x2, x0
    mov     sp, x0
    mov     x0, x9
    bl      {secondary}
    b       .
    .ltorg

.balign 2048
vectors:
.macro entry to
    mrs     x0, esr_el1
    mrs     x1, far_el1
    mrs     x2, elr_el1
    b       \to
    .balign 128
.endm
.rept 4
    entry   {fault}
    entry   {fault}
    mrs     x0, elr_el1
    b       {watchdog}
    .balign 128
    entry   {fault}
.endr
"#,
    table = sym TABLE,
    paint = const STACK_PAINT,
    stack = const STACK_BYTES,
    main = sym crate::main,
    secondary = sym crate::secondary,
    fault = sym fault,
    watchdog = sym watchdog_expired,
);
