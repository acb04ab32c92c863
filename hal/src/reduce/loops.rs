//! The loops over elements, generic in element type, accumulator and operator.
//!
//! All are `inline(always)`: each instance becomes part of the caller that `dispatch` compiles for one set of vector
//! instructions. They read and write arrays of bytes, which the compiler turns into unaligned vector accesses.
//! Invariant: the slices hold equally many elements; [`Kernel`](super::Kernel) has checked that, and an excess would
//! be left alone.

use super::element::{Accumulator, Element};
use super::last::Last;
use super::operator::Operator;

/// `acc = src`.
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

/// `acc = acc op src`.
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

/// `dst = round(last(acc))`.
#[inline(always)]
pub(super) fn store<E, A, const NE: usize, const NA: usize>(last: impl Last<A>, dst: &mut [u8], acc: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
{
    for (d, a) in dst.as_chunks_mut::<NE>().0.iter_mut().zip(acc.as_chunks::<NA>().0) {
        *d = E::round(last.apply(A::from_le(*a)));
    }
}

/// `acc = round(last(acc))`, for elements as wide as their accumulators.
#[inline(always)]
pub(super) fn finish<A, const N: usize>(last: impl Last<A>, acc: &mut [u8])
where
    A: Accumulator<N> + Element<A, N>,
{
    for a in acc.as_chunks_mut::<N>().0 {
        *a = A::round(last.apply(A::from_le(*a)));
    }
}

/// `dst = round(last(src))`, for elements on both sides.
#[inline(always)]
pub(super) fn map<E, A, const NE: usize, const NA: usize, L>(last: L, dst: &mut [u8], src: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
    L: Last<A>,
{
    for (d, s) in dst.as_chunks_mut::<NE>().0.iter_mut().zip(src.as_chunks::<NE>().0) {
        *d = E::round(last.apply(E::widen(*s)));
    }
}
