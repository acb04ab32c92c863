//! The processor: start-up from 32-bit mode, ports, the clock, and reset.
//!
//! Invariants:
//! - the first four gigabytes are identity-mapped, the last of them, where devices are, uncached;
//! - interrupts stay off: this board polls;
//! - without an interrupt table, an exception resets the machine, as a panic does after it was logged.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU64, Ordering};
use sumac_hal::time::Instant;

/// Write a byte to a port.
pub(crate) fn write_port(port: u16, byte: u8) {
    // SAFETY: the ports that this board uses are QEMU's serial port, timer and fw_cfg, which nothing else uses.
    unsafe { asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack, preserves_flags)) };
}

/// Write a word to a port.
pub(crate) fn write_port_u16(port: u16, word: u16) {
    // SAFETY: as `write_port`.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") word, options(nomem, nostack, preserves_flags)) };
}

/// Read a byte from a port.
pub(crate) fn read_port(port: u16) -> u8 {
    let byte: u8;
    // SAFETY: as `write_port`.
    unsafe { asm!("in al, dx", in("dx") port, out("al") byte, options(nomem, nostack, preserves_flags)) };
    byte
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has a time stamp counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Ticks of the time stamp counter in a second.
static TICKS_PER_S: AtomicU64 = AtomicU64::new(0);

/// Measure the frequency of the time stamp counter: count its ticks while channel 0 of the interval timer (Intel 8254)
/// counts down for about 30 ms.
pub(crate) fn start_clock() {
    const PIT_HZ: u64 = 1_193_182;
    const CONTROL: u16 = 0x43;
    const CHANNEL: u16 = 0x40;
    const FROM: u16 = u16::MAX;
    const STEPS: u16 = 36_000;
    let count = || {
        // Latch, then low byte and high byte.
        write_port(CONTROL, 0);
        u16::from_le_bytes([read_port(CHANNEL), read_port(CHANNEL)])
    };
    // Channel 0, both bytes, mode 0: counts down once.
    write_port(CONTROL, 0b0011_0000);
    FROM.to_le_bytes().into_iter().for_each(|byte| write_port(CHANNEL, byte));
    let (first, before) = (count(), ticks());
    let (last, after) = loop {
        let (count, now) = (count(), ticks());
        if first.wrapping_sub(count) >= STEPS {
            break (count, now);
        }
    };
    let steps = u128::from(first.wrapping_sub(last));
    let per_s = u128::from(after - before) * u128::from(PIT_HZ) / steps;
    TICKS_PER_S.store(u64::try_from(per_s).unwrap_or(u64::MAX).max(1), Ordering::Relaxed);
}

/// Return the time since the board was switched on.
pub(crate) fn now() -> Instant {
    let per_s = u128::from(TICKS_PER_S.load(Ordering::Relaxed).max(1));
    Instant::from_nanos(u64::try_from(u128::from(ticks()) * 1_000_000_000 / per_s).unwrap_or(u64::MAX))
}

/// How often to ask the processor for a random number that it does not have at the moment.
const RANDOM_TRIES: u32 = 16;

/// Return a random number from the processor (RDRAND); `None` if it has no generator, or the generator fails.
pub(crate) fn random() -> Option<u64> {
    /// CPUID.1:ECX.RDRAND
    const RDRAND: u32 = 1 << 30;
    if core::arch::x86_64::__cpuid(1).ecx & RDRAND == 0 {
        return None;
    }
    (0..RANDOM_TRIES).find_map(|_| {
        let (value, is_good): (u64, u8);
        // SAFETY: the instruction exists; the carry flag is clear if the generator has no number (Intel SDM, 7.3.17).
        unsafe { asm!("rdrand {}", "setc {}", out(reg) value, out(reg_byte) is_good, options(nomem, nostack)) };
        (is_good != 0).then_some(value)
    })
}

/// Reset the machine, through an exception without an interrupt table, which starts another incarnation.
pub(crate) fn reset() -> ! {
    #[repr(C, packed)]
    struct Empty {
        limit: u16,
        base: u64,
    }
    let empty = Empty { limit: 0, base: 0 };
    // SAFETY: does not return: the breakpoint has no handler, and neither has the resulting fault, so the processor
    // resets.
    unsafe { asm!("lidt [{}]", "int3", "2: hlt", "jmp 2b", in(reg) &raw const empty, options(noreturn)) }
}

global_asm!(
    r#"
.section .note.pvh, "a", @note
    .long 4, 4, 18                  // XEN_ELFNOTE_PHYS32_ENTRY (Xen's public/elfnote.h)
    .asciz "Xen"
    .long _start

.section .text.start, "ax"
.code32
.globl _start
_start:
    cli
    cld
    mov     edi, offset bss_start
    mov     ecx, offset stack_top
    sub     ecx, edi
    shr     ecx, 2
    xor     eax, eax
    rep stosd
    mov     esp, offset stack_top

    mov     eax, offset table_3     // one entry for 512 GiB
    or      eax, 3
    mov     [table_4], eax
    mov     edi, offset table_3     // four for 1 GiB each
    mov     eax, offset table_2
    or      eax, 3
    mov     ecx, 4
2:  mov     [edi], eax
    add     eax, 4096
    add     edi, 8
    loop    2b
    mov     edi, offset table_2     // 2,048 for 2 MiB each: present, writable, large
    mov     eax, 0x83
    mov     ecx, 2048
3:  cmp     eax, 0xc0000000
    jb      4f
    or      eax, 0x18               // where devices are: uncached
4:  mov     [edi], eax
    add     eax, 0x200000
    add     edi, 8
    loop    3b

    mov     eax, offset table_4
    mov     cr3, eax
    mov     eax, cr4
    or      eax, 0x620              // physical address extension; SSE and its exceptions
    mov     cr4, eax
    mov     ecx, 0xc0000080         // EFER
    rdmsr
    or      eax, 0x100              // long mode
    wrmsr
    mov     eax, cr0
    or      eax, 0x80000003         // paging, protection, no emulated coprocessor
    and     eax, 0xfffffffb
    mov     cr0, eax
    lgdt    [descriptors]
    push    8
    mov     eax, offset long
    push    eax
    retf

.code64
long:
    xor     eax, eax
    mov     ds, eax
    mov     es, eax
    mov     ss, eax
    call    {main}
5:  hlt
    jmp     5b

.balign 8
segments:
    .quad   0
    .quad   0x00209a0000000000      // 64-bit code
descriptors:
    .word   15
    .long   segments
"#,
    main = sym crate::main,
);
