//! The arithmetic of a reduction: one kernel for every element type and operator.
//!
//! Device, DMA engine and host all combine with these, so that the bits of a result do not depend on who computed
//! it (PROTOCOL 9). The rules, each pinned by `tests`:
//!
//! - The first contribution is copied ([`Kernel::load`]), never added to 0.0: a lone -0.0 stays -0.0.
//! - Integer sums wrap. Float sums round to nearest even once an addition; nothing is contracted to a fused
//!   multiply-add, and subnormals are kept as long as the caller's thread has not asked its processor to flush them.
//! - Min and max are IEEE 754-2019 `minimum` and `maximum`: NaN wins, -0 < +0.
//! - f16 and bf16 accumulate in f32, which also is the type of a *partial* on the wire ([`Dtype::accumulator`]), and
//!   are rounded once, to nearest even, at the end ([`Kernel::finish`], [`Kernel::store`]).
//! - Each NaN that leaves a kernel's rounding is the one canonical quiet NaN of its type; a partial may still carry
//!   another payload. After the rounding, `a op b` and `b op a` have equal bits.
//!
//! Values are little-endian bytes at any alignment, as they come out of packets and user memory.
//!
//! The loops (`loops`) are plain Rust over arrays of bytes, which the compiler vectorises for whatever it builds
//! for. With the feature `std` they are compiled for wider vectors too, and the widest that the processor has is
//! picked at run time (`dispatch`).
#![forbid(unsafe_code)]

mod dispatch;
mod element;
mod loops;
mod narrow;
mod operator;
#[cfg(test)]
mod tests;

use crate::op::{Dtype, ReduceOp};

/// How elements of one type combine under one operator.
///
/// A kernel is two bytes and copies freely. Its methods panic where slices disagree in length, as
/// [`slice::copy_from_slice`] does: lengths that come from outside go through [`Kernel::count`] first.
///
/// ```
/// use sumac_hal::{op::{Dtype, ReduceOp}, reduce::Kernel};
///
/// let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("f32 sums are supported");
/// let mut acc = [0; 4];
/// kernel.load(&mut acc, &1.5_f32.to_le_bytes(), false);
/// kernel.combine(&mut acc, &2.0_f32.to_le_bytes(), false);
/// assert_eq!(kernel.finish(&mut acc, 1), 4);
/// assert_eq!(f32::from_le_bytes(acc), 3.5);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    dtype: Dtype,
    op: ReduceOp,
}

impl Kernel {
    /// Return the kernel of an element type and an operator, or `None` if the two do not go together.
    ///
    /// Every pair of this version does; callers answer `None` with a refusal all the same, because a later version
    /// has pairs that do not (bitwise operators on floats).
    pub const fn new(dtype: Dtype, op: ReduceOp) -> Option<Self> {
        Some(Self { dtype, op })
    }

    /// Return the element type of the operation.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Return the operator.
    pub const fn op(&self) -> ReduceOp {
        self.op
    }

    /// Return the type of accumulators and partials.
    pub const fn accumulator(&self) -> Dtype {
        self.dtype.accumulator()
    }

    /// Return the type of a source's elements: the accumulator type if it is a partial, `dtype` otherwise.
    pub const fn source(&self, partial: bool) -> Dtype {
        if partial { self.accumulator() } else { self.dtype }
    }

    /// Return how many elements a source of `len_bytes` bytes holds, or `None` if that is not a whole number.
    pub const fn count(&self, len_bytes: usize, partial: bool) -> Option<usize> {
        let size_bytes = self.source(partial).size_bytes();
        if len_bytes.is_multiple_of(size_bytes) { Some(len_bytes / size_bytes) } else { None }
    }

    /// Set the accumulators to the first contribution: `acc = src`, element by element.
    ///
    /// `acc` holds accumulators; `src` holds as many elements of [`Kernel::source`].
    ///
    /// # Panics
    /// If `src` is not a whole number of elements, or `acc` does not hold exactly as many.
    #[track_caller]
    pub fn load(&self, acc: &mut [u8], src: &[u8], partial: bool) {
        self.check(acc.len(), src.len(), partial);
        let source = self.source(partial);
        if source == self.accumulator() {
            acc.copy_from_slice(src);
        } else {
            dispatch::load(source, acc, src);
        }
    }

    /// Add a contribution: `acc = acc op src`, element by element.
    ///
    /// # Panics
    /// As [`Kernel::load`].
    #[track_caller]
    pub fn combine(&self, acc: &mut [u8], src: &[u8], partial: bool) {
        self.check(acc.len(), src.len(), partial);
        dispatch::combine(self.source(partial), self.op, acc, src);
    }

    /// Round the first `count` accumulators in `bytes` to `dtype`, in place, and return the length of the result.
    ///
    /// The result lies at the head of `bytes`, `count * dtype.size_bytes()` bytes long; where `dtype` is narrower
    /// than its accumulator, the bytes between it and the accumulators' end are left in no particular state. Bytes
    /// behind the accumulators are not touched.
    ///
    /// # Panics
    /// If `bytes` is shorter than `count` accumulators.
    #[track_caller]
    pub fn finish(&self, bytes: &mut [u8], count: usize) -> usize {
        let size_bytes = self.accumulator().size_bytes();
        assert!(
            count <= bytes.len() / size_bytes,
            "{count} {} accumulators do not fit {} bytes: pass their whole buffer",
            self.accumulator(),
            bytes.len()
        );
        dispatch::finish(self.dtype, &mut bytes[..count * size_bytes]);
        count * self.dtype.size_bytes()
    }

    /// Round the accumulators `acc` to `dtype` into `dst`: [`Kernel::finish`] out of place.
    ///
    /// # Panics
    /// If `dst` is not a whole number of elements of `dtype`, or `acc` does not hold exactly as many accumulators.
    #[track_caller]
    pub fn store(&self, dst: &mut [u8], acc: &[u8]) {
        self.check(acc.len(), dst.len(), false);
        dispatch::store(self.dtype, dst, acc);
    }

    #[track_caller]
    fn check(&self, acc_len_bytes: usize, other_len_bytes: usize, partial: bool) {
        let acc_size_bytes = self.accumulator().size_bytes();
        let fits = self.count(other_len_bytes, partial).is_some_and(|count| {
            acc_len_bytes.is_multiple_of(acc_size_bytes) && acc_len_bytes / acc_size_bytes == count
        });
        assert!(
            fits,
            "{acc_len_bytes} bytes of {} accumulators and {other_len_bytes} bytes of {} are not equally many elements: \
             check outside lengths with Kernel::count",
            self.accumulator(),
            self.source(partial)
        );
    }
}
