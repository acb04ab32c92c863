//! Memory that others read and write at the same time: ranks' buffers, redo slots, what hardware fills.
//!
//! Nobody keeps a peer from writing where this process reads: another process, a card, or another machine's processor does
//! it whenever it misbehaves. A Rust reference to such bytes says that this can't be, and so does a plain read or write
//! through a pointer. So whatever reaches such memory goes through [`transfer`], which is a copy of single bytes, each of
//! them read once and written once, atomically and in no order: what C++ proposes as `atomic_load_per_byte_memcpy` (WG21
//! P1478) and Rust as `AtomicPerByte` (RFC 3301). Neither language has it yet, and a loop of relaxed atomics is not made
//! into vectors, so the copy is in assembler, as those proposals advise: the compiler can't look into it, and so can't
//! read a byte twice, or conclude anything from it. Processors without an implementation here, and Miri, have relaxed
//! atomics.
//!
//! What a byte is that a peer writes meanwhile: the old one or the new one. Bytes that belong together may be of
//! different times. They are copied into memory of this side's own before anything is computed from them.

use super::Covers;
use crate::crc::Crc32c;
use core::sync::atomic::{AtomicU8, Ordering};

/// Copy `len_bytes` bytes between memory that others may read and write at the same time.
///
/// # Safety
/// As many bytes from `from` on can be read, and from `to` on written, by this process, whatever its peers do. The two do
/// not overlap, by addresses; where both are one memory under two addresses, what is read is a mixture.
pub(crate) unsafe fn transfer(to: *mut u8, from: *const u8, len_bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { imp::transfer(to, from, len_bytes) }
}

/// Copy bytes out of memory that others may write at the same time.
///
/// # Safety
/// As many bytes from `from` on can be read by this process, whatever its peers do.
pub(crate) unsafe fn copy_out(to: &mut [u8], from: *const u8) {
    // SAFETY: `to` is borrowed for writing, so it can't overlap what has no reference; the rest the caller promises.
    unsafe { imp::read(to.as_mut_ptr(), from, to.len()) }
}

/// Copy bytes into memory that others may read and write at the same time.
///
/// # Safety
/// As many bytes from `to` on can be written by this process, whatever its peers do.
pub(crate) unsafe fn copy_in(to: *mut u8, from: &[u8]) {
    // SAFETY: as above.
    unsafe { transfer(to, from.as_ptr(), from.len()) }
}

/// Return [`Covers::word`](super::Covers::word) of bytes that others may write at the same time.
///
/// # Safety
/// As many bytes from `from` on can be read by this process, whatever its peers do.
pub(crate) unsafe fn covers_word(from: *const u8, len_bytes: usize) -> u64 {
    let (mut crc, mut block) = (Crc32c::new(), [0; CRC_BLOCK_LEN_BYTES]);
    for at in (0..len_bytes).step_by(CRC_BLOCK_LEN_BYTES) {
        let block = &mut block[..CRC_BLOCK_LEN_BYTES.min(len_bytes - at)];
        // SAFETY: the caller's promise, as the block ends before `len_bytes` do.
        unsafe { copy_out(block, from.wrapping_add(at)) };
        crc.update(block);
    }
    Covers::word_of(crc.value(), len_bytes)
}

/// Bytes that a checksum is taken of at a time: on the stack, which boards have little of.
const CRC_BLOCK_LEN_BYTES: usize = if cfg!(feature = "std") { 4096 } else { 512 };

/// [`transfer`] by relaxed atomics: slow, and for every processor.
///
/// # Safety
/// As [`transfer`].
#[cfg_attr(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)), allow(dead_code))]
unsafe fn transfer_by_atomics(to: *mut u8, from: *const u8, len_bytes: usize) {
    for at in 0..len_bytes {
        // SAFETY: both bytes are among those that the caller has promised; bytes have no alignment.
        let (to, from) = unsafe { (AtomicU8::from_ptr(to.add(at)), AtomicU8::from_ptr(from.cast_mut().add(at))) };
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use core::arch::asm;

    /// Bytes from which on vectors pay.
    #[cfg(feature = "std")]
    const VECTORS_FROM_LEN_BYTES: usize = 256;

    pub(super) unsafe fn read(to: *mut u8, from: *const u8, len_bytes: usize) {
        #[cfg(feature = "std")]
        if len_bytes >= VECTORS_FROM_LEN_BYTES && std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the caller's promise, and the processor has the instructions.
            unsafe { by_vectors(to, from, len_bytes) };
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { by_string(to, from, len_bytes) };
    }

    /// By strings: what is written is not read before.
    pub(super) unsafe fn transfer(to: *mut u8, from: *const u8, len_bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { by_string(to, from, len_bytes) };
    }

    /// # Safety
    /// As `transfer`.
    unsafe fn by_string(to: *mut u8, from: *const u8, len_bytes: usize) {
        // SAFETY: reads and writes the bytes that the caller has promised, and changes these registers only. The direction
        // flag is clear by the calling convention.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") len_bytes => _,
                inout("rdi") to => _,
                inout("rsi") from => _,
                options(nostack, preserves_flags),
            );
        }
    }

    /// # Safety
    /// As `transfer`, and the processor has AVX.
    #[cfg(feature = "std")]
    #[target_feature(enable = "avx")]
    unsafe fn by_vectors(to: *mut u8, from: *const u8, len_bytes: usize) {
        let whole = len_bytes & !127;
        if whole > 0 {
            // SAFETY: reads and writes the first `whole` bytes, 128 at a time, at any alignment, and changes these
            // registers only.
            unsafe {
                asm!(
                    "2:",
                    "vmovdqu {a}, [{from} + {at}]",
                    "vmovdqu {b}, [{from} + {at} + 32]",
                    "vmovdqu {c}, [{from} + {at} + 64]",
                    "vmovdqu {d}, [{from} + {at} + 96]",
                    "prefetcht1 [{from} + {at} + 2048]",
                    "prefetcht1 [{from} + {at} + 2112]",
                    "vmovdqu [{to} + {at}], {a}",
                    "vmovdqu [{to} + {at} + 32], {b}",
                    "vmovdqu [{to} + {at} + 64], {c}",
                    "vmovdqu [{to} + {at} + 96], {d}",
                    "add {at}, 128",
                    "cmp {at}, {end}",
                    "jb 2b",
                    from = in(reg) from,
                    to = in(reg) to,
                    at = inout(reg) 0_usize => _,
                    end = in(reg) whole,
                    a = out(ymm_reg) _,
                    b = out(ymm_reg) _,
                    c = out(ymm_reg) _,
                    d = out(ymm_reg) _,
                    options(nostack),
                );
            }
        }
        // SAFETY: the rest of the bytes.
        unsafe { by_string(to.add(whole), from.add(whole), len_bytes - whole) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod imp {
    use core::arch::asm;

    pub(super) use transfer as read;

    pub(super) unsafe fn transfer(to: *mut u8, from: *const u8, len_bytes: usize) {
        let whole = len_bytes & !31;
        if whole > 0 {
            // SAFETY: reads and writes the first `whole` of the bytes that the caller has promised, 32 at a time, at any
            // alignment, which normal memory grants; it changes these registers only.
            unsafe {
                asm!(
                    "2:",
                    "ldp {a}, {b}, [{from}], #16",
                    "ldp {c}, {d}, [{from}], #16",
                    "stp {a}, {b}, [{to}], #16",
                    "stp {c}, {d}, [{to}], #16",
                    "subs {left}, {left}, #32",
                    "b.ne 2b",
                    from = inout(reg) from => _,
                    to = inout(reg) to => _,
                    left = inout(reg) whole => _,
                    a = out(reg) _,
                    b = out(reg) _,
                    c = out(reg) _,
                    d = out(reg) _,
                    options(nostack),
                );
            }
        }
        let rest = len_bytes - whole;
        if rest > 0 {
            // SAFETY: the rest of the bytes, one at a time.
            unsafe {
                asm!(
                    "2:",
                    "ldrb {a:w}, [{from}], #1",
                    "strb {a:w}, [{to}], #1",
                    "subs {left}, {left}, #1",
                    "b.ne 2b",
                    from = inout(reg) from.add(whole) => _,
                    to = inout(reg) to.add(whole) => _,
                    left = inout(reg) rest => _,
                    a = out(reg) _,
                    options(nostack),
                );
            }
        }
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod imp {
    pub(super) use super::transfer_by_atomics as transfer;
    pub(super) use super::transfer_by_atomics as read;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn transfer_copies_every_length_at_every_alignment_and_nothing_else() {
        let from: Vec<u8> = (0..700_u32).map(|at| (at * 7 + 1) as u8).collect();
        let lens = (0..70).chain([127, 128, 129, 255, 256, 257, 300, 511, 512, 640]);
        for len in lens {
            for (to_at, from_at) in [(0, 0), (1, 0), (0, 1), (3, 5), (31, 17)] {
                for copy in [transfer, transfer_by_atomics] {
                    let mut to = std::vec![0xee; 700];
                    // SAFETY: both lie in the vectors: at most 31 + 640 of 700 bytes.
                    unsafe { copy(to.as_mut_ptr().add(to_at), from.as_ptr().add(from_at), len) };
                    assert_eq!(to[to_at..][..len], from[from_at..][..len], "{len} bytes");
                    let rest = to[..to_at].iter().chain(&to[to_at + len..]);
                    assert!(rest.copied().all(|byte| byte == 0xee), "beyond {len} bytes");
                }
            }
        }
    }
}
