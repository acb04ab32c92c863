//! Selection of the loop for an element type, an operator and the processor, at run time.
//!
//! With the feature `std`, `multiversion` compiles each function three times, and the first call selects one: AVX-512
//! with 64-byte vectors, AVX2, or the crate's target, which is SSE2 on x86-64 and NEON on AArch64. Without the feature,
//! the target features of the build decide. All versions give bitwise equal results: wider vectors run the same
//! operations on more elements, and the compiler never fuses a multiplication with an addition.
//!
//! `multiversion` adds the features of Ice Lake to those listed here for AVX-512, because older processors lower their
//! clock for 64-byte vectors; they run the AVX2 version. Zen 4 and later have all features. Builds for a named
//! processor (`-C target-cpu=x86-64-v4`) may use 32-byte vectors even in the AVX-512 version; the benchmark shows the
//! effect.

use super::element::{Accumulator, Bf16, E4m3, E5m2, Element, F16};
use super::epilogue::{Average, Identity, Scale, ToBool};
use super::located::{Pair32, Pair64};
use super::loops;
use super::operator::{Band, Bor, Bxor, Land, Lxor, Max, Min, Operator, Prod, Sum};
use crate::op::{Dtype, ReduceOp};

/// Define, for each function of [`portable`], one of the same name that selects among its versions, and for the tests a
/// module of the same functions without AVX-512.
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

        /// The versions for a processor without AVX-512, for tests on one that has it.
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
    sum_last(acc: &mut [u8], src: &[u8]), "Add the last contribution of f32, and finish.";
    finish(dtype: Dtype, op: ReduceOp, ranks: u32, acc: &mut [u8]), "Finish accumulators as wide as `dtype`, in place.";
    store(dtype: Dtype, op: ReduceOp, ranks: u32, dst: &mut [u8], acc: &[u8]), "Finish f32 accumulators as a narrower float type.";
    scale(dtype: Dtype, scale: Scale, dst: &mut [u8], src: &[u8]), "Multiply elements.";
}

/// The selection of a loop by type and operator, inlined into each version.
///
/// To save flash on devices, integers of the same size share loops that do not depend on their sign, and bitwise
/// operators share one loop for all sizes.
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

    /// Run `$f::<element, accumulator, size of each, operator>` for operators that ignore the sign of integers.
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

    /// Run `$f::<element, accumulator, size of each, operator>` for operators that depend on the sign of integers.
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

    /// `acc = widen(src)`. Does nothing if the accumulators have type `source`.
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

    /// `acc = round(acc + src)`.
    #[inline(always)]
    pub(in crate::reduce) fn sum_last(acc: &mut [u8], src: &[u8]) {
        loops::combine_last::<f32, f32, 4, 4, _>(Sum, acc, src);
    }

    /// `acc = round(epilogue(acc))`. Does nothing if that has no effect or `dtype` is narrower than its accumulator.
    #[inline(always)]
    pub(in crate::reduce) fn finish(dtype: Dtype, op: ReduceOp, ranks: u32, acc: &mut [u8]) {
        use loops::finish;
        match (op, dtype) {
            (ReduceOp::Avg, _) => average(dtype, Average { ranks }, acc),
            (ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor, _) => for_size!(dtype, finish(ToBool, acc)),
            (ReduceOp::MinLoc | ReduceOp::MaxLoc, Dtype::F32) => finish::<Pair32<f32>, 8>(Identity, acc),
            (ReduceOp::MinLoc | ReduceOp::MaxLoc, Dtype::F64) => finish::<Pair64<f64>, 16>(Identity, acc),
            (ReduceOp::MinLoc | ReduceOp::MaxLoc, _) => {}
            (_, Dtype::F32) => finish::<f32, 4>(Identity, acc),
            (_, Dtype::F64) => finish::<f64, 8>(Identity, acc),
            _ => {}
        }
    }

    /// `dst = round(epilogue(acc))` for types narrower than their f32 accumulators. Does nothing for other types.
    #[inline(always)]
    pub(in crate::reduce) fn store(dtype: Dtype, op: ReduceOp, ranks: u32, dst: &mut [u8], acc: &[u8]) {
        if op == ReduceOp::Avg {
            for_narrow!(dtype, store(Average { ranks }, dst, acc), _ => {});
        } else {
            for_narrow!(dtype, store(Identity, dst, acc), _ => {});
        }
    }

    /// `dst = round(src x scalar)`.
    #[inline(always)]
    pub(in crate::reduce) fn scale(dtype: Dtype, scale: Scale, dst: &mut [u8], src: &[u8]) {
        for_number!(dtype, map(scale, dst, src));
    }

    #[inline(always)]
    fn average(dtype: Dtype, epilogue: Average, acc: &mut [u8]) {
        use loops::finish;
        match dtype {
            Dtype::I8 => finish::<i8, 1>(epilogue, acc),
            Dtype::U8 => finish::<u8, 1>(epilogue, acc),
            Dtype::I16 => finish::<i16, 2>(epilogue, acc),
            Dtype::U16 => finish::<u16, 2>(epilogue, acc),
            Dtype::I32 => finish::<i32, 4>(epilogue, acc),
            Dtype::U32 => finish::<u32, 4>(epilogue, acc),
            Dtype::I64 => finish::<i64, 8>(epilogue, acc),
            Dtype::U64 => finish::<u64, 8>(epilogue, acc),
            Dtype::F32 => finish::<f32, 4>(epilogue, acc),
            Dtype::F64 => finish::<f64, 8>(epilogue, acc),
            Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::E5m2 => {}
        }
    }

    /// [`loops::combine`] for types that are their own accumulators.
    #[inline(always)]
    fn same<A, const N: usize>(op: impl Operator<A>, acc: &mut [u8], src: &[u8])
    where
        A: Accumulator<N> + Element<A, N>,
    {
        loops::combine::<A, A, N, N, _>(op, acc, src);
    }
}
