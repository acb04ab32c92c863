//! From numbers known at run time to a loop: by element type and operator, and by what the processor can do.
//!
//! With the feature `std`, `multiversion` compiles each function three times, and the first call picks: AVX-512 with
//! 64-byte vectors, AVX2, or what the crate is built for, which on x86-64 is SSE2 and on AArch64 NEON. Without it,
//! the target features of the build decide. Every version gives the same bits: wider vectors do the same operations
//! to more elements, and the compiler never fuses a multiplication with an addition.
//!
//! `multiversion` adds the features of Ice Lake to those that the AVX-512 version names here: older processors lower
//! their clock for 64-byte vectors, and run the AVX2 version. Zen 4 and later have them all. Builds that tune for a
//! processor by name (`-C target-cpu=x86-64-v4`) may ask the compiler for 32-byte vectors even in the AVX-512
//! version; the bench shows what came out.

use super::element::{Accumulator, Bf16, E4m3, E5m2, Element, F16};
use super::last::{Average, Keep, Times, Truth};
use super::located::{Pair32, Pair64};
use super::loops;
use super::operator::{Band, Bor, Bxor, Land, Lxor, Max, Min, Operator, Prod, Sum};
use crate::op::{Dtype, ReduceOp};

/// Define, for each function of [`portable`], one of the same name that picks among its versions; and for the tests
/// a module of the same without AVX-512.
macro_rules! dispatched {
    (@targets $targets:tt $($name:ident($($arg:ident: $ty:ty),*), $doc:literal;)*) => {$(
        #[doc = $doc]
        #[multiversion::multiversion(targets $targets)]
        pub(in crate::reduce) fn $name($($arg: $ty),*) {
            portable::$name($($arg),*);
        }
    )*};
    ($($name:ident $args:tt, $doc:literal;)*) => {
        dispatched! {
            @targets ("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2")
            $($name $args, $doc;)*
        }

        /// What a processor without AVX-512 runs, for tests on one that has it.
        #[cfg(all(test, feature = "std"))]
        pub(in crate::reduce) mod avx2 {
            use super::*;
            dispatched! { @targets ("x86_64+avx2") $($name $args, $doc;)* }
        }
    };
}

dispatched! {
    load(source: Dtype, acc: &mut [u8], src: &[u8]), "Set f32 accumulators to elements of a narrower float type.";
    combine(source: Dtype, op: ReduceOp, acc: &mut [u8], src: &[u8]), "Combine elements of type `source` into accumulators.";
    finish(dtype: Dtype, op: ReduceOp, ranks: u32, acc: &mut [u8]), "Finish accumulators as wide as `dtype`, in place.";
    store(dtype: Dtype, op: ReduceOp, ranks: u32, dst: &mut [u8], acc: &[u8]), "Finish f32 accumulators as a narrower float type.";
    scale(dtype: Dtype, times: Times, dst: &mut [u8], src: &[u8]), "Multiply elements.";
}

/// The choice of a loop by type and operator, to be inlined into each version.
///
/// Few enough loops for a device's flash: integers of a size share what does not depend on their sign, and bits what
/// does not depend on their size.
pub(in crate::reduce) mod portable {
    use super::*;

    /// Run `$f::<element, accumulator, size of each>` for a float type narrower than its accumulator.
    macro_rules! for_narrow {
        ($dtype:expr, $f:ident($($arg:expr),*), $other:pat => $else:expr) => {
            match $dtype {
                Dtype::F16 => loops::$f::<F16, f32, 2, 4>($($arg),*),
                Dtype::Bf16 => loops::$f::<Bf16, f32, 2, 4>($($arg),*),
                Dtype::E4m3 => loops::$f::<E4m3, f32, 1, 4>($($arg),*),
                Dtype::E5m2 => loops::$f::<E5m2, f32, 1, 4>($($arg),*),
                $other => $else,
            }
        };
    }

    /// Run `$f::<element, accumulator, size of each, operator>` where integers' signs don't matter.
    macro_rules! for_number {
        ($dtype:expr, $f:ident($($arg:expr),*)) => {
            match $dtype {
                Dtype::I8 | Dtype::U8 => loops::$f::<u8, u8, 1, 1, _>($($arg),*),
                Dtype::I16 | Dtype::U16 => loops::$f::<u16, u16, 2, 2, _>($($arg),*),
                Dtype::I32 | Dtype::U32 => loops::$f::<u32, u32, 4, 4, _>($($arg),*),
                Dtype::I64 | Dtype::U64 => loops::$f::<u64, u64, 8, 8, _>($($arg),*),
                other => for_float!(other, $f($($arg),*)),
            }
        };
    }

    /// Run `$f::<element, accumulator, size of each, operator>` where they do.
    macro_rules! for_ordered {
        ($dtype:expr, $f:ident($($arg:expr),*)) => {
            match $dtype {
                Dtype::I8 => loops::$f::<i8, i8, 1, 1, _>($($arg),*),
                Dtype::U8 => loops::$f::<u8, u8, 1, 1, _>($($arg),*),
                Dtype::I16 => loops::$f::<i16, i16, 2, 2, _>($($arg),*),
                Dtype::U16 => loops::$f::<u16, u16, 2, 2, _>($($arg),*),
                Dtype::I32 => loops::$f::<i32, i32, 4, 4, _>($($arg),*),
                Dtype::U32 => loops::$f::<u32, u32, 4, 4, _>($($arg),*),
                Dtype::I64 => loops::$f::<i64, i64, 8, 8, _>($($arg),*),
                Dtype::U64 => loops::$f::<u64, u64, 8, 8, _>($($arg),*),
                other => for_float!(other, $f($($arg),*)),
            }
        };
    }

    macro_rules! for_float {
        ($dtype:expr, $f:ident($($arg:expr),*)) => {
            match $dtype {
                Dtype::F16 => loops::$f::<F16, f32, 2, 4, _>($($arg),*),
                Dtype::Bf16 => loops::$f::<Bf16, f32, 2, 4, _>($($arg),*),
                Dtype::E4m3 => loops::$f::<E4m3, f32, 1, 4, _>($($arg),*),
                Dtype::E5m2 => loops::$f::<E5m2, f32, 1, 4, _>($($arg),*),
                Dtype::F32 => loops::$f::<f32, f32, 4, 4, _>($($arg),*),
                _ => loops::$f::<f64, f64, 8, 8, _>($($arg),*),
            }
        };
    }

    /// Run `$f::<unsigned integer, its size>` for any type of that size.
    macro_rules! for_size {
        ($dtype:expr, $f:ident($($arg:expr),*)) => {
            match $dtype.size_bytes() {
                1 => $f::<u8, 1>($($arg),*),
                2 => $f::<u16, 2>($($arg),*),
                4 => $f::<u32, 4>($($arg),*),
                _ => $f::<u64, 8>($($arg),*),
            }
        };
    }

    /// Run `$f::<pair, its size>` for the type of the value.
    macro_rules! for_pair {
        ($dtype:expr, $f:ident($($arg:expr),*)) => {
            match $dtype {
                Dtype::I32 => $f::<Pair32<i32>, 8>($($arg),*),
                Dtype::U32 => $f::<Pair32<u32>, 8>($($arg),*),
                Dtype::F32 => $f::<Pair32<f32>, 8>($($arg),*),
                Dtype::I64 => $f::<Pair64<i64>, 16>($($arg),*),
                Dtype::U64 => $f::<Pair64<u64>, 16>($($arg),*),
                _ => $f::<Pair64<f64>, 16>($($arg),*),
            }
        };
    }

    /// `acc = src`; nothing where the accumulators are of type `source`.
    #[inline(always)]
    pub(in crate::reduce) fn load(source: Dtype, acc: &mut [u8], src: &[u8]) {
        for_narrow!(source, load(acc, src), _ => {});
    }

    /// `acc = acc op src`.
    #[inline(always)]
    pub(in crate::reduce) fn combine(source: Dtype, op: ReduceOp, acc: &mut [u8], src: &[u8]) {
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => for_number!(source, combine(Sum, acc, src)),
            ReduceOp::Prod => for_number!(source, combine(Prod, acc, src)),
            ReduceOp::Min => for_ordered!(source, combine(Min, acc, src)),
            ReduceOp::Max => for_ordered!(source, combine(Max, acc, src)),
            ReduceOp::Band => same::<u8, 1>(Band, acc, src),
            ReduceOp::Bor | ReduceOp::Lor => same::<u8, 1>(Bor, acc, src),
            ReduceOp::Bxor => same::<u8, 1>(Bxor, acc, src),
            ReduceOp::Land => for_size!(source, same(Land, acc, src)),
            ReduceOp::Lxor => for_size!(source, same(Lxor, acc, src)),
            ReduceOp::MinLoc => for_pair!(source, same(Min, acc, src)),
            ReduceOp::MaxLoc => for_pair!(source, same(Max, acc, src)),
        }
    }

    /// `acc = round(last(acc))`; nothing where that changes nothing, or `dtype` is narrower than its accumulator.
    #[inline(always)]
    pub(in crate::reduce) fn finish(dtype: Dtype, op: ReduceOp, ranks: u32, acc: &mut [u8]) {
        use loops::finish;
        match (op, dtype) {
            (ReduceOp::Avg, _) => average(dtype, Average { ranks }, acc),
            (ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor, _) => for_size!(dtype, finish(Truth, acc)),
            (ReduceOp::MinLoc | ReduceOp::MaxLoc, Dtype::F32) => finish::<Pair32<f32>, 8>(Keep, acc),
            (ReduceOp::MinLoc | ReduceOp::MaxLoc, Dtype::F64) => finish::<Pair64<f64>, 16>(Keep, acc),
            (ReduceOp::MinLoc | ReduceOp::MaxLoc, _) => {}
            (_, Dtype::F32) => finish::<f32, 4>(Keep, acc),
            (_, Dtype::F64) => finish::<f64, 8>(Keep, acc),
            _ => {}
        }
    }

    /// `dst = round(last(acc))` for f32 accumulators of a narrower type; nothing for others.
    #[inline(always)]
    pub(in crate::reduce) fn store(dtype: Dtype, op: ReduceOp, ranks: u32, dst: &mut [u8], acc: &[u8]) {
        if op == ReduceOp::Avg {
            for_narrow!(dtype, store(Average { ranks }, dst, acc), _ => {});
        } else {
            for_narrow!(dtype, store(Keep, dst, acc), _ => {});
        }
    }

    /// `dst = round(src x scalar)`.
    #[inline(always)]
    pub(in crate::reduce) fn scale(dtype: Dtype, times: Times, dst: &mut [u8], src: &[u8]) {
        for_number!(dtype, map(times, dst, src));
    }

    #[inline(always)]
    fn average(dtype: Dtype, last: Average, acc: &mut [u8]) {
        use loops::finish;
        match dtype {
            Dtype::I8 => finish::<i8, 1>(last, acc),
            Dtype::U8 => finish::<u8, 1>(last, acc),
            Dtype::I16 => finish::<i16, 2>(last, acc),
            Dtype::U16 => finish::<u16, 2>(last, acc),
            Dtype::I32 => finish::<i32, 4>(last, acc),
            Dtype::U32 => finish::<u32, 4>(last, acc),
            Dtype::I64 => finish::<i64, 8>(last, acc),
            Dtype::U64 => finish::<u64, 8>(last, acc),
            Dtype::F32 => finish::<f32, 4>(last, acc),
            Dtype::F64 => finish::<f64, 8>(last, acc),
            Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::E5m2 => {}
        }
    }

    /// [`loops::combine`] for elements that are their own accumulators.
    #[inline(always)]
    fn same<A, const N: usize>(op: impl Operator<A>, acc: &mut [u8], src: &[u8])
    where
        A: Accumulator<N> + Element<A, N>,
    {
        loops::combine::<A, A, N, N, _>(op, acc, src);
    }
}
