//! Loops over elements, generic over element type, accumulator and operator.
//!
//! All are `inline(always)`, so that each becomes part of a function that `dispatch` compiles for one instruction set.
//! They access arrays of bytes, which the compiler turns into unaligned vector accesses.
//!
//! Invariant: the slices hold equally many elements, which [`Kernel`](super::Kernel) has checked. Excess elements would
//! be ignored.

use super::element::{Accumulator, Element};
use super::epilogue::Epilogue;
use super::operator::Operator;

/// `acc = widen(src)`.
#[inline(always)]
pub(super) fn load<E, A, const NE: usize, const NA: usize>(acc: &mut [u8], src: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
{
    for (a, s) in acc.as_chunks_mut::<NA>().0.iter_mut().zip(src.as_chunks::<NE>().0) {
        *a = E::widen(*s).to_le();
    }
}

/// `acc = acc op widen(src)`.
#[inline(always)]
pub(super) fn combine<E, A, const NE: usize, const NA: usize, O>(_: O, acc: &mut [u8], src: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
    O: Operator<A>,
{
    for (a, s) in acc.as_chunks_mut::<NA>().0.iter_mut().zip(src.as_chunks::<NE>().0) {
        *a = O::apply(A::from_le(*a), E::widen(*s)).to_le();
    }
}

/// `acc = round(acc op widen(src))`, for elements as wide as their accumulators.
#[inline(always)]
pub(super) fn combine_last<E, A, const NE: usize, const NA: usize, O>(_: O, acc: &mut [u8], src: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA> + Element<A, NA>,
    O: Operator<A>,
{
    for (a, s) in acc.as_chunks_mut::<NA>().0.iter_mut().zip(src.as_chunks::<NE>().0) {
        *a = A::round(O::apply(A::from_le(*a), E::widen(*s)));
    }
}

/// `dst = round(epilogue(acc))`.
#[inline(always)]
pub(super) fn store<E, A, const NE: usize, const NA: usize>(epilogue: impl Epilogue<A>, dst: &mut [u8], acc: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
{
    for (d, a) in dst.as_chunks_mut::<NE>().0.iter_mut().zip(acc.as_chunks::<NA>().0) {
        *d = E::round(epilogue.apply(A::from_le(*a)));
    }
}

/// `acc = round(epilogue(acc))`, for elements as wide as their accumulators.
#[inline(always)]
pub(super) fn finish<A, const N: usize>(epilogue: impl Epilogue<A>, acc: &mut [u8])
where
    A: Accumulator<N> + Element<A, N>,
{
    for a in acc.as_chunks_mut::<N>().0 {
        *a = A::round(epilogue.apply(A::from_le(*a)));
    }
}

/// `dst = round(epilogue(widen(src)))`, from elements to elements.
#[inline(always)]
pub(super) fn map<E, A, const NE: usize, const NA: usize, L>(epilogue: L, dst: &mut [u8], src: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
    L: Epilogue<A>,
{
    for (d, s) in dst.as_chunks_mut::<NE>().0.iter_mut().zip(src.as_chunks::<NE>().0) {
        *d = E::round(epilogue.apply(E::widen(*s)));
    }
}
