//! Sums that are added while shared memory is read, for the most common types.
//!
//! A copy by [`shared`](super::shared), followed by a combination in `reduce`, moves data through the nearest cache
//! twice. The loops here, written in assembly for the same reason as there, read each source byte once, into a
//! register, and add it to private accumulators.
//!
//! Invariant: the result is bitwise that of [`Kernel::combine`], except for the payloads of NaNs, which partial results
//! leave open (`reduce`): the same additions, each rounded once, in Rust's rounding mode. Other processors, and Miri,
//! add nothing here.

use crate::reduce::Kernel;

/// Combine a prefix of the elements in shared memory into accumulators, and return its number of elements.
///
/// The caller combines the rest: a few elements, or all if there is no loop for this kernel or processor.
///
/// # Safety
/// `from` must be readable for as many elements as there are accumulators, whatever peers do.
pub(crate) unsafe fn combine(kernel: Kernel, acc: &mut [u8], from: *const u8) -> usize {
    // SAFETY: guaranteed by the caller.
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
        // Processors without VBMI2 lower their clock for 64-byte vectors (`reduce::dispatch`).
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vbmi2") {
            // SAFETY: guaranteed by the caller, and the processor has the instructions.
            unsafe { add_by_64(kernel, acc, from) }
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            // SAFETY: the same.
            unsafe { add_by_32(kernel, acc, from) }
        } else {
            0
        }
    }

    /// Add four vectors of elements per iteration to the accumulators from `$to` to `$end`. `$read` loads `$size` bytes
    /// of elements into a vector of `$len` bytes, `$widen` converts four of them to accumulators, and `$add` adds.
    ///
    /// `$line` are the offsets of cache lines in the elements of an iteration. Later lines are prefetched, because
    /// sources are read in parts that are too short for the hardware prefetcher.
    macro_rules! add_loop {
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

    /// Define a function that adds vectors of `$len` bytes; vectors of narrow elements are half as long.
    macro_rules! add_by {
        (
            $name:ident, $features:literal, $class:ident, $len:literal $lines:tt, $half:literal $half_lines:tt
        ) => {
            /// Add elements to the accumulators of all whole iterations, and return their number.
            ///
            /// # Safety
            /// As `combine`; the processor must support the instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(kernel: Kernel, acc: &mut [u8], from: *const u8) -> usize {
                let whole = acc.len() / (4 * $len) * (4 * $len);
                if whole == 0 {
                    return 0;
                }
                let to = acc.as_mut_ptr();
                let end = to.wrapping_add(whole);
                // SAFETY: each loop reads the elements for `whole` bytes of accumulators, which the caller guarantees,
                // and reads and writes those accumulators, which are borrowed, both at any alignment. It changes only
                // these registers and the flags. Concurrent writes of a peer change sums, not addresses or lengths.
                // Prefetched addresses need not be valid.
                unsafe {
                    match kernel.dtype() {
                        Dtype::F32 => add_loop!($class, $len, (to, end, from), "vmovups" $len $lines [] "vaddps"),
                        Dtype::F64 => add_loop!($class, $len, (to, end, from), "vmovups" $len $lines [] "vaddpd"),
                        Dtype::I32 | Dtype::U32 => {
                            add_loop!($class, $len, (to, end, from), "vmovups" $len $lines [] "vpaddd");
                        }
                        Dtype::I64 | Dtype::U64 => {
                            add_loop!($class, $len, (to, end, from), "vmovups" $len $lines [] "vpaddq");
                        }
                        Dtype::F16 => {
                            add_loop!($class, $len, (to, end, from), "vcvtph2ps" $half $half_lines [] "vaddps");
                        }
                        Dtype::Bf16 => add_loop!(
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
                // SAFETY: the processor has the instructions; the caller guarantees the rest.
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

    /// Return the accumulators with canonical NaNs.
    fn finished(kernel: Kernel, mut acc: Vec<u8>) -> Vec<u8> {
        let wide = Kernel::new(kernel.accumulator(), ReduceOp::Sum).expect("sums of accumulators");
        let count = acc.len() / wide.element_bytes();
        wide.finish(&mut acc, count, 1);
        acc
    }

    fn check(kernel: Kernel, acc: &[u8], src: &[u8]) {
        for (name, stride, add) in adds() {
            let mut fused = acc.to_vec();
            // SAFETY: `src` has an element for each accumulator.
            let count = unsafe { add(kernel, &mut fused, src.as_ptr()) };
            let done = count * kernel.accumulator_bytes();
            assert_eq!(done, acc.len() / stride * stride, "{name}");
            assert_eq!(fused[done..], acc[done..], "{name} changed accumulators beyond the last iteration");
            let mut expected = acc[..done].to_vec();
            kernel.combine(&mut expected, &src[..count * kernel.element_bytes()], false);
            fused.truncate(done);
            assert_eq!(finished(kernel, fused), finished(kernel, expected), "{name} of {kernel:?}");
        }
    }

    /// Return little-endian values from random bits. Some become a zero, an infinity, a NaN or a subnormal, of either
    /// sign, of the float type with this many exponent and fraction bits.
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
            // Start at any alignment.
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
    fn kernels_without_a_loop_combine_nothing() {
        for (dtype, op) in [(Dtype::F32, ReduceOp::Max), (Dtype::F32, ReduceOp::Prod), (Dtype::I8, ReduceOp::Sum)] {
            let kernel = Kernel::new(dtype, op).expect("a kernel");
            let (mut acc, src) = ([1; 1024], [1; 1024]);
            // SAFETY: `src` has as many elements.
            assert_eq!(unsafe { combine(kernel, &mut acc, src.as_ptr()) }, 0);
            assert_eq!(acc, [1; 1024]);
        }
    }
}
