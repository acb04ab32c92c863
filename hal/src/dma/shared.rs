//! Copies to and from memory that peers access concurrently: ranks' buffers, redo slots, memory that hardware writes.
//!
//! A misbehaving peer, be it another process, a card or a processor across a BAR, can write to this memory at any time.
//! Rust references and plain pointer accesses assume the opposite. All accesses therefore use [`transfer`], which
//! copies single bytes, each read once and written once, atomically and unordered. C++ proposes this as
//! `atomic_load_per_byte_memcpy` (WG21 P1478) and Rust as `AtomicPerByte` (RFC 3301). Neither language has it yet, and
//! compilers do not vectorize a loop of relaxed atomics, so the copy is written in assembly, as those proposals
//! suggest: the compiler cannot see into it, and so cannot read a byte twice or draw conclusions from its value. Other
//! processors, and Miri, use relaxed atomics.
//!
//! A byte that a peer writes during a copy is either the old or the new one, and neighbouring bytes may differ in age.
//! Therefore bytes are copied into private memory before anything is computed from them.

use super::Coverage;
use crate::crc::Crc32c;
use core::sync::atomic::{AtomicU8, Ordering};

/// Copy `len_bytes` bytes between memory that peers may access concurrently.
///
/// # Safety
/// `from` must be readable and `to` writable for `len_bytes` bytes, whatever peers do. Their addresses must not
/// overlap. If they are the same memory at two addresses, the result is a mixture of old and new bytes.
pub(crate) unsafe fn transfer(to: *mut u8, from: *const u8, len_bytes: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { imp::transfer(to, from, len_bytes) }
}

/// Copy `to.len()` bytes out of memory that peers may write concurrently.
///
/// # Safety
/// `from` must be readable for `to.len()` bytes, whatever peers do.
pub(crate) unsafe fn copy_out(to: &mut [u8], from: *const u8) {
    // SAFETY: `to` is borrowed mutably, so it cannot overlap memory without references; the caller guarantees the rest.
    unsafe { imp::read(to.as_mut_ptr(), from, to.len()) }
}

/// Copy `from.len()` bytes into memory that peers may access concurrently.
///
/// # Safety
/// `to` must be writable for `from.len()` bytes, whatever peers do.
pub(crate) unsafe fn copy_in(to: *mut u8, from: &[u8]) {
    // SAFETY: as above.
    unsafe { transfer(to, from.as_ptr(), from.len()) }
}

/// Copy `from.len()` bytes into memory that peers may access concurrently and that is in this core's cache, as
/// [`copy_out`] does.
///
/// # Safety
/// As [`copy_in`].
#[cfg(feature = "shm")]
pub(crate) unsafe fn copy_in_cached(to: *mut u8, from: &[u8]) {
    // SAFETY: as above.
    unsafe { imp::read(to, from.as_ptr(), from.len()) }
}

/// Return [`Coverage::checksum_word`](super::Coverage::checksum_word) of bytes that peers may write concurrently.
///
/// # Safety
/// `from` must be readable for `len_bytes` bytes, whatever peers do.
pub(crate) unsafe fn covers_word(from: *const u8, len_bytes: usize) -> u64 {
    let (mut crc, mut block) = (Crc32c::new(), [0; CRC_BLOCK_LEN_BYTES]);
    for at in (0..len_bytes).step_by(CRC_BLOCK_LEN_BYTES) {
        let block = &mut block[..CRC_BLOCK_LEN_BYTES.min(len_bytes - at)];
        // SAFETY: the block lies within the bytes that the caller guarantees.
        unsafe { copy_out(block, from.wrapping_add(at)) };
        crc.update(block);
    }
    Coverage::checksum_word_of(crc.value(), len_bytes)
}

/// The block size of a checksum, in bytes. The block is on the stack, which is small on boards.
const CRC_BLOCK_LEN_BYTES: usize = if cfg!(feature = "std") { 4096 } else { 512 };

/// [`transfer`] with relaxed atomics: slow, but portable.
///
/// # Safety
/// As [`transfer`].
#[cfg_attr(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)), allow(dead_code))]
unsafe fn transfer_by_atomics(to: *mut u8, from: *const u8, len_bytes: usize) {
    for at in 0..len_bytes {
        // SAFETY: both bytes are among those that the caller guarantees, and a byte is always aligned.
        let (to, from) = unsafe { (AtomicU8::from_ptr(to.add(at)), AtomicU8::from_ptr(from.cast_mut().add(at))) };
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use core::arch::asm;
    #[cfg(feature = "std")]
    use core::arch::x86_64::_mm256_zeroupper;

    /// The length in bytes from which vector instructions pay off.
    #[cfg(feature = "std")]
    const VECTORS_FROM_LEN_BYTES: usize = 256;

    pub(super) unsafe fn read(to: *mut u8, from: *const u8, len_bytes: usize) {
        #[cfg(feature = "std")]
        if len_bytes >= VECTORS_FROM_LEN_BYTES && std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: guaranteed by the caller, and the processor has the instructions.
            unsafe { by_vectors(to, from, len_bytes) };
            return;
        }
        // SAFETY: guaranteed by the caller.
        unsafe { by_string(to, from, len_bytes) };
    }

    /// Uses string instructions, which do not read the destination first.
    pub(super) unsafe fn transfer(to: *mut u8, from: *const u8, len_bytes: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { by_string(to, from, len_bytes) };
    }

    /// # Safety
    /// As `transfer`.
    unsafe fn by_string(to: *mut u8, from: *const u8, len_bytes: usize) {
        // SAFETY: accesses only the bytes that the caller guarantees, and changes only these registers. The calling
        // convention clears the direction flag.
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
            // SAFETY: accesses only the first `whole` bytes, 128 at a time and at any alignment, and changes only these
            // registers.
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
            // The compiler does not look into the assembly. While the upper halves hold anything, the SSE instructions
            // of the rest of the program depend on them, and are slow.
            _mm256_zeroupper();
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
            // SAFETY: accesses only the first `whole` bytes that the caller guarantees, 32 at a time and at any
            // alignment, which normal memory permits. It changes only these registers.
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
    fn transfer_copies_exactly_the_bytes_at_any_length_and_alignment() {
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

    /// SSE instructions are slow while there is something in the upper halves.
    #[cfg(all(target_arch = "x86_64", feature = "std", not(miri)))]
    #[test]
    fn copying_by_vectors_leaves_their_upper_halves_empty() {
        if !std::arch::is_x86_feature_detected!("avx") {
            return;
        }
        let (from, mut to, mut upper) = ([0xff; 256], [0_u8; 256], [0xee_u8; 16]);
        // SAFETY: the vector can be read.
        unsafe { copy_out(&mut to, from.as_ptr()) };
        // SAFETY: the processor has the instructions; they change these registers and the 16 bytes.
        unsafe {
            core::arch::asm!(
                "vorps ymm0, ymm0, ymm1",
                "vextractf128 xmm0, ymm0, 1",
                "vmovups [{}], xmm0",
                in(reg) upper.as_mut_ptr(),
                out("ymm0") _,
                out("ymm1") _,
                options(nostack),
            );
        }
        assert!(to == from, "all bytes are copied");
        assert_eq!(upper, [0; 16]);
    }
}
