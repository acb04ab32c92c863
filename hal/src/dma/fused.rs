//! Sums of shared memory that are added as they are read, for the commonest types.
//!
//! What [`shared`](super::shared) copies first and `reduce` combines then goes through the nearest cache twice. Here a
//! loop, in assembler for the same reason as there, reads each byte of a source once, straight into a register, and adds
//! to accumulators of this side's own.
//!
//! Invariant: the bits are those of [`Kernel::combine`], but for payloads of NaNs, of which partials may have any
//! (`reduce`): the same additions, rounded once each, in the mode that Rust runs in. Processors without an implementation
//! here, and Miri, add nothing.

use crate::reduce::Kernel;

/// Combine the first elements of shared memory into accumulators; return how many.
///
/// The rest is up to who calls: a few, or all, where there is no loop for this kernel or this processor.
///
/// # Safety
/// As many elements from `from` on as there are accumulators can be read by this process, whatever its peers do.
pub(crate) unsafe fn combine(kernel: Kernel, acc: &mut [u8], from: *const u8) -> usize {
    // SAFETY: the caller's promise.
    unsafe { imp::combine(kernel, acc, from) }
}

#[cfg(all(feature = "std", target_arch = "x86_64", not(miri)))]
mod imp {
    use crate::op::{Dtype, ReduceOp};
    use crate::reduce::Kernel;
    use core::arch::asm;
    use std::arch::is_x86_feature_detected;

    pub(super) unsafe fn combine(kernel: Kernel, acc: &mut [u8], from: *const u8) -> usize {
        if !matches!(kernel.op(), ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum) {
            return 0;
        }
        // Processors before those with VBMI2 lower their clock for 64-byte vectors (`reduce::dispatch`).
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vbmi2") {
            // SAFETY: the caller's promise, and the processor has the instructions.
            unsafe { add_by_64(kernel, acc, from) }
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            // SAFETY: the same.
            unsafe { add_by_32(kernel, acc, from) }
        } else {
            0
        }
    }

    /// Add four vectors of elements a turn to the accumulators from `$to` to `$end`. `$read` takes `$size` bytes of elements
    /// to a vector of `$len` bytes, `$widen` makes accumulators of four of them, and `$add` adds.
    ///
    /// `$line`s are where cache lines begin in the elements of a turn. Those of one soon to come are prefetched: sources
    /// are read by parts too short for a processor to notice the stream.
    macro_rules! turns {
        (
            $class:ident, $len:literal, ($to:ident, $end:ident, $from:ident),
            $read:literal $size:literal [$($line:literal)*] [$($widen:literal)*] $add:literal
        ) => {
            asm!(
                "2:",
                concat!($read, " {a}, [{from}]"),
                concat!($read, " {b}, [{from} + ", $size, "]"),
                concat!($read, " {c}, [{from} + 2 * ", $size, "]"),
                concat!($read, " {d}, [{from} + 3 * ", $size, "]"),
                $(concat!("prefetcht1 [{from} + 2048 + ", $line, "]"),)*
                $($widen,)*
                concat!($add, " {a}, {a}, [{to}]"),
                concat!($add, " {b}, {b}, [{to} + ", $len, "]"),
                concat!($add, " {c}, {c}, [{to} + 2 * ", $len, "]"),
                concat!($add, " {d}, {d}, [{to} + 3 * ", $len, "]"),
                "vmovups [{to}], {a}",
                concat!("vmovups [{to} + ", $len, "], {b}"),
                concat!("vmovups [{to} + 2 * ", $len, "], {c}"),
                concat!("vmovups [{to} + 3 * ", $len, "], {d}"),
                concat!("add {from}, 4 * ", $size),
                concat!("add {to}, 4 * ", $len),
                "cmp {to}, {end}",
                "jb 2b",
                from = inout(reg) $from => _,
                to = inout(reg) $to => _,
                end = in(reg) $end,
                a = out($class) _,
                b = out($class) _,
                c = out($class) _,
                d = out($class) _,
                options(nostack),
            )
        };
    }

    /// Define a function that adds by vectors of `$len` bytes; narrow elements are half as long.
    macro_rules! add_by {
        (
            $name:ident, $features:literal, $class:ident, $len:literal $lines:tt, $half:literal $half_lines:tt
        ) => {
            /// Add elements to as many accumulators as are whole turns; return how many.
            ///
            /// # Safety
            /// As `combine`, and the processor has the instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(kernel: Kernel, acc: &mut [u8], from: *const u8) -> usize {
                let whole = acc.len() / (4 * $len) * (4 * $len);
                if whole == 0 {
                    return 0;
                }
                let to = acc.as_mut_ptr();
                let end = to.wrapping_add(whole);
                // SAFETY: every loop reads the elements of `whole` bytes of accumulators, which the caller has promised,
                // reads and writes those accumulators, which are borrowed, both at any alignment, and changes these
                // registers and the flags only. What a peer writes meanwhile changes the sums and neither addresses
                // nor lengths. What is prefetched need not exist.
                unsafe {
                    match kernel.dtype() {
                        Dtype::F32 => turns!($class, $len, (to, end, from), "vmovups" $len $lines [] "vaddps"),
                        Dtype::F64 => turns!($class, $len, (to, end, from), "vmovups" $len $lines [] "vaddpd"),
                        Dtype::I32 | Dtype::U32 => {
                            turns!($class, $len, (to, end, from), "vmovups" $len $lines [] "vpaddd");
                        }
                        Dtype::I64 | Dtype::U64 => {
                            turns!($class, $len, (to, end, from), "vmovups" $len $lines [] "vpaddq");
                        }
                        Dtype::F16 => {
                            turns!($class, $len, (to, end, from), "vcvtph2ps" $half $half_lines [] "vaddps");
                        }
                        Dtype::Bf16 => turns!(
                            $class, $len, (to, end, from),
                            "vpmovzxwd" $half $half_lines
                            ["vpslld {a}, {a}, 16" "vpslld {b}, {b}, 16" "vpslld {c}, {c}, 16" "vpslld {d}, {d}, 16"]
                            "vaddps"
                        ),
                        _ => return 0,
                    }
                }
                whole / kernel.accumulator_bytes()
            }
        };
    }

    add_by!(add_by_64, "avx512f", zmm_reg, 64 [0 64 128 192], 32 [0 64]);
    add_by!(add_by_32, "avx2,f16c", ymm_reg, 32 [0 64], 16 [0]);
}

#[cfg(not(all(feature = "std", target_arch = "x86_64", not(miri))))]
mod imp {
    use crate::reduce::Kernel;

    pub(super) unsafe fn combine(_: Kernel, _: &mut [u8], _: *const u8) -> usize {
        0
    }
}

#[cfg(all(test, feature = "std", target_arch = "x86_64", not(miri)))]
mod tests {
    use super::*;
    use crate::op::{Dtype, ReduceOp};
    use proptest::prelude::*;
    use std::arch::is_x86_feature_detected;
    use std::vec::Vec;

    const DTYPES: [Dtype; 8] =
        [Dtype::F32, Dtype::F64, Dtype::I32, Dtype::U32, Dtype::I64, Dtype::U64, Dtype::F16, Dtype::Bf16];

    type Add = unsafe fn(Kernel, &mut [u8], *const u8) -> usize;

    fn adds() -> Vec<(&'static str, usize, Add)> {
        let mut adds: Vec<(_, _, Add)> = Vec::new();
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            adds.push(("by 32", 128, |kernel, acc, from| {
                // SAFETY: the processor has the instructions, and the rest is this function's promise.
                unsafe { imp::add_by_32(kernel, acc, from) }
            }));
        }
        if is_x86_feature_detected!("avx512f") {
            adds.push(("by 64", 256, |kernel, acc, from| {
                // SAFETY: the same.
                unsafe { imp::add_by_64(kernel, acc, from) }
            }));
        }
        adds
    }

    /// Return accumulators with each NaN made canonical.
    fn finished(kernel: Kernel, mut acc: Vec<u8>) -> Vec<u8> {
        let wide = Kernel::new(kernel.accumulator(), ReduceOp::Sum).expect("sums of accumulators");
        let count = acc.len() / wide.element_bytes();
        wide.finish(&mut acc, count, 1);
        acc
    }

    fn check(kernel: Kernel, acc: &[u8], src: &[u8]) {
        for (name, turn, add) in adds() {
            let mut fused = acc.to_vec();
            // SAFETY: `src` has an element for each accumulator.
            let count = unsafe { add(kernel, &mut fused, src.as_ptr()) };
            let done = count * kernel.accumulator_bytes();
            assert_eq!(done, acc.len() / turn * turn, "{name}");
            assert_eq!(fused[done..], acc[done..], "{name} went beyond the last turn");
            let mut expected = acc[..done].to_vec();
            kernel.combine(&mut expected, &src[..count * kernel.element_bytes()], false);
            fused.truncate(done);
            assert_eq!(finished(kernel, fused), finished(kernel, expected), "{name} of {kernel:?}");
        }
    }

    /// Return little-endian values out of random bits, of which some are made special: zero, infinity, NaN, or a
    /// subnormal, of either sign, of the type whose exponent and fraction have so many bits.
    fn values(bits: &[u64], size_bytes: usize, (exponent, fraction): (u32, u32)) -> Vec<u8> {
        let (ones, sign) = (((1_u64 << exponent) - 1) << fraction, 1_u64 << (exponent + fraction));
        let each = bits.iter().map(|&bits| match bits % 8 {
            0 => bits & sign,
            1 => (bits & sign) | ones,
            2 => bits | ones,
            3 => bits & !ones,
            _ => bits,
        });
        each.flat_map(|value| value.to_le_bytes().into_iter().take(size_bytes)).collect()
    }

    fn parts(dtype: Dtype) -> (u32, u32) {
        match dtype {
            Dtype::F16 => (5, 10),
            Dtype::Bf16 => (8, 7),
            Dtype::F64 => (11, 52),
            _ => (8, 23),
        }
    }

    proptest! {
        #[test]
        fn fused_sum_equals_kernel(
            bits in proptest::collection::vec(any::<(u64, u64)>(), 0..400),
            dtype in 0..DTYPES.len(),
            skip in 0..9_usize,
        ) {
            let kernel = Kernel::new(DTYPES[dtype], ReduceOp::Sum).expect("sums");
            let (acc, src): (Vec<u64>, Vec<u64>) = bits.into_iter().unzip();
            let acc = values(&acc, kernel.accumulator_bytes(), parts(kernel.accumulator()));
            // At any alignment.
            let mut unaligned = std::vec![0; skip];
            unaligned.extend(values(&src, kernel.element_bytes(), parts(kernel.dtype())));
            check(kernel, &acc, &unaligned[skip..]);
        }
    }

    #[test]
    fn fused_sum_of_every_narrow_value_equals_kernel() {
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let kernel = Kernel::new(dtype, ReduceOp::Sum).expect("sums");
            let src: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            for acc in [0.0_f32, -0.0, 1.0, f32::INFINITY, f32::from_bits(1), f32::NAN] {
                check(kernel, &acc.to_le_bytes().repeat(src.len() / 2), &src);
            }
        }
    }

    #[test]
    fn other_kernels_are_not_fused() {
        for (dtype, op) in [(Dtype::F32, ReduceOp::Max), (Dtype::F32, ReduceOp::Prod), (Dtype::I8, ReduceOp::Sum)] {
            let kernel = Kernel::new(dtype, op).expect("a kernel");
            let (mut acc, src) = ([1; 1024], [1; 1024]);
            // SAFETY: `src` is as long.
            assert_eq!(unsafe { combine(kernel, &mut acc, src.as_ptr()) }, 0);
            assert_eq!(acc, [1; 1024]);
        }
    }
}
