//! The loops over elements, generic in element type, accumulator and operator.
//!
//! All are `inline(always)`: each instance becomes part of the caller that `dispatch` compiles for one set of vector
//! instructions. They read and write arrays of bytes, which the compiler turns into unaligned vector accesses.
//! Invariant: the slices hold equally many elements; [`Kernel`](super::Kernel) has checked that, and an excess would
//! be left alone.

use super::element::{Accumulator, Element};
use super::operator::Operator;

/// Elements that [`finish_narrow`] rounds at a time, in the stack: several of the widest vectors' worth.
const BLOCK: usize = 64;

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
pub(super) fn combine<E, A, O, const NE: usize, const NA: usize>(acc: &mut [u8], src: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
    O: Operator<A>,
{
    for (a, s) in acc.as_chunks_mut::<NA>().0.iter_mut().zip(src.as_chunks::<NE>().0) {
        *a = O::apply(A::from_le(*a), E::widen(*s)).to_le();
    }
}

/// `dst = round(acc)`.
#[inline(always)]
pub(super) fn store<E, A, const NE: usize, const NA: usize>(dst: &mut [u8], acc: &[u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
{
    for (d, a) in dst.as_chunks_mut::<NE>().0.iter_mut().zip(acc.as_chunks::<NA>().0) {
        *d = E::round(A::from_le(*a));
    }
}

/// `acc = round(acc)`, for elements as wide as their accumulators.
#[inline(always)]
pub(super) fn finish<A, const N: usize>(acc: &mut [u8])
where
    A: Accumulator<N> + Element<A, N>,
{
    for a in acc.as_chunks_mut::<N>().0 {
        *a = A::round(A::from_le(*a));
    }
}

/// `acc = round(acc)`, for narrower elements, which end up side by side at the head of `acc`.
///
/// In blocks through the stack: a result lands on accumulators that were read in its own block or before.
#[inline(always)]
pub(super) fn finish_narrow<E, A, const NE: usize, const NA: usize>(acc: &mut [u8])
where
    E: Element<A, NE>,
    A: Accumulator<NA>,
{
    const { assert!(NE <= NA, "an element is no wider than its accumulator") };
    let mut rounded = [[0; NE]; BLOCK];
    let mut written_bytes = 0;
    let count = acc.len() / NA;
    for first in (0..count).step_by(BLOCK) {
        let block = &mut rounded[..BLOCK.min(count - first)];
        let end = first + block.len();
        store::<E, A, NE, NA>(block.as_flattened_mut(), &acc[first * NA..end * NA]);
        acc[written_bytes..end * NE].copy_from_slice(block.as_flattened());
        written_bytes = end * NE;
    }
}
