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

use super::element::{Accumulator, Bf16, Element, F16};
use super::loops;
use super::operator::{Max, Min, Operator, Sum};
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
    load(source: Dtype, acc: &mut [u8], src: &[u8]), "Set accumulators to elements of type `source`.";
    combine(source: Dtype, op: ReduceOp, acc: &mut [u8], src: &[u8]), "Combine elements of type `source` into accumulators.";
    finish(dtype: Dtype, acc: &mut [u8]), "Round accumulators to `dtype`, in place.";
    store(dtype: Dtype, dst: &mut [u8], acc: &[u8]), "Round accumulators to `dtype`.";
}

/// The choice of a loop by type and operator, to be inlined into each version.
pub(in crate::reduce) mod portable {
    use super::*;

    /// Run `$f::<element, accumulator, size of each>` for a [`Dtype`].
    macro_rules! for_element {
        ($dtype:expr, $f:ident($($arg:expr),*)) => {
            match $dtype {
                Dtype::I32 => $f::<i32, i32, 4, 4>($($arg),*),
                Dtype::I64 => $f::<i64, i64, 8, 8>($($arg),*),
                Dtype::F16 => $f::<F16, f32, 2, 4>($($arg),*),
                Dtype::Bf16 => $f::<Bf16, f32, 2, 4>($($arg),*),
                Dtype::F32 => $f::<f32, f32, 4, 4>($($arg),*),
                Dtype::F64 => $f::<f64, f64, 8, 8>($($arg),*),
            }
        };
    }

    /// `acc = src`.
    #[inline(always)]
    pub(in crate::reduce) fn load(source: Dtype, acc: &mut [u8], src: &[u8]) {
        use loops::load;
        for_element!(source, load(acc, src));
    }

    /// `acc = acc op src`.
    #[inline(always)]
    pub(in crate::reduce) fn combine(source: Dtype, op: ReduceOp, acc: &mut [u8], src: &[u8]) {
        for_element!(source, combine_by(op, acc, src));
    }

    /// `acc = round(acc)`, the results side by side at its head.
    #[inline(always)]
    pub(in crate::reduce) fn finish(dtype: Dtype, acc: &mut [u8]) {
        match dtype {
            // No integer needs rounding.
            Dtype::I32 | Dtype::I64 => {}
            Dtype::F16 => loops::finish_narrow::<F16, f32, 2, 4>(acc),
            Dtype::Bf16 => loops::finish_narrow::<Bf16, f32, 2, 4>(acc),
            Dtype::F32 => loops::finish::<f32, 4>(acc),
            Dtype::F64 => loops::finish::<f64, 8>(acc),
        }
    }

    /// `dst = round(acc)`.
    #[inline(always)]
    pub(in crate::reduce) fn store(dtype: Dtype, dst: &mut [u8], acc: &[u8]) {
        use loops::store;
        for_element!(dtype, store(dst, acc));
    }

    #[inline(always)]
    fn combine_by<E, A, const NE: usize, const NA: usize>(op: ReduceOp, acc: &mut [u8], src: &[u8])
    where
        E: Element<A, NE>,
        A: Accumulator<NA>,
        Sum: Operator<A>,
        Min: Operator<A>,
        Max: Operator<A>,
    {
        match op {
            ReduceOp::Sum => loops::combine::<E, A, Sum, NE, NA>(acc, src),
            ReduceOp::Min => loops::combine::<E, A, Min, NE, NA>(acc, src),
            ReduceOp::Max => loops::combine::<E, A, Max, NE, NA>(acc, src),
        }
    }
}
