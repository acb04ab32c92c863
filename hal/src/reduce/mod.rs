//! The arithmetic of a reduction: one kernel for every element type and operator.
//!
//! Device, DMA engine and host all combine with these, so that the bits of a result do not depend on who computed
//! it (PROTOCOL 9). The rules, each pinned by `tests`:
//!
//! - The first contribution is copied ([`Kernel::load`]), never added to 0.0: a lone -0.0 stays -0.0.
//! - Float arithmetic rounds to nearest even once an operation; nothing is contracted to a fused multiply-add, and
//!   subnormals are kept as long as the caller's thread has not asked its processor to flush them.
//! - Types narrower than their accumulator are rounded once, to nearest even, at the end ([`Kernel::finish`],
//!   [`Kernel::store`]), where averages are divided too.
//! - Each NaN that leaves a kernel's rounding is the one canonical quiet NaN of its type; a partial may still carry
//!   another payload.
//! - Every operator is commutative: after the rounding, `a op b` and `b op a` have equal bits, so an executor may
//!   put either on the left. Those of integers, minima, maxima and locations are associative to the bit as well;
//!   what is not is told by [`Kernel::depends_on_order`].
//!
//! # Types
//!
//! Values are little-endian bytes at any alignment, as they come out of packets and user memory.
//!
//! | type | element | accumulator, partial | overflow | canonical NaN |
//! |---|---|---|---|---|
//! | i8 u8 i16 u16 i32 u32 i64 u64 | 1, 2, 4 or 8 B | the same | wraps | none |
//! | f64 | binary64, 8 B | the same | infinity | 7ff8 0000 0000 0000 |
//! | f32 | binary32, 4 B | the same | infinity | 7fc0 0000 |
//! | f16 | binary16, 2 B | f32 | in f32; 65,520 and up round to infinity | 7e00 |
//! | bf16 | the upper half of a binary32, 2 B | f32 | in f32; then as f32 | 7fc0 |
//! | f8e5m2 | the upper half of a binary16, 1 B | f32 | in f32; 61,440 and up round to infinity | 7e |
//! | f8e4m3 | 4 exponent bits of bias 7, 3 of fraction, no infinities, 1 B | f32 | in f32; above 464 NaN | 7f |
//!
//! The two fp8 types are those of the OCP 8-bit Floating Point Specification (OFP8), rounded by its *non-saturating*
//! mode, as NumPy's ml_dtypes and PyTorch round. Saturating would give a finite 448 or 57,344 in place of a sum that
//! left the range, which nobody can tell from a result; and -inf + inf has to be a NaN anyway.
//!
//! # Operators
//!
//! What one means for integers, for f32 and f64, and for the narrow floats, which differ from f32 only in that their
//! elements are widened exactly before and rounded after.
//!
//! | operator | integers | floats | NaN, zeros, ties |
//! |---|---|---|---|
//! | sum | modulo 2^bits | one rounding an addition | NaN if any is, or for +inf + -inf; -0 only from -0 + -0 |
//! | prod | modulo 2^bits | one rounding a multiplication | NaN if any is, or for 0 x inf; signs of zeros multiply |
//! | avg | the sum modulo 2^bits, divided by the number of ranks, truncated towards 0 | the sum, one division in the accumulator type | as sum |
//! | premul_sum | sum of what [`Kernel::scale`] gave: scalar x element modulo 2^bits | sum of what it gave: one rounding to the accumulator type, one to the element | as sum |
//! | min, max | by value | IEEE 754-2019 `minimum`, `maximum`: exact | NaN if any is; -0 < +0 |
//! | minloc, maxloc | {value, index} pairs, by value: i32 u32 i64 u64 | the same: f32 f64 | NaN before any number; -0 < +0; equal values and NaNs: the lowest index |
//! | band, bor, bxor | bit by bit | refused | |
//! | land, lor, lxor | any value but 0 is true; the result is 1 or 0 | refused | |
//!
//! A *pair* is a value and an unsigned index of the same size, the value first: 8 B for 32-bit values, 16 B for
//! 64-bit ones. An element of such an operation is a pair, and counts count pairs.
//!
//! Refused, and so answered by [`Kernel::why_not`]:
//! - *bitwise operators on floats*: as in MPI, whose bitwise operators take integers and bytes (MPI 4.1, 6.9.2);
//!   those who mean the bits of floats pass them as unsigned integers.
//! - *logical operators on floats*: as in MPI, whose logical operators take integers only. Whether a rounded sum
//!   is exactly zero is rarely what is meant; a comparison's result, as an integer, says it.
//! - *locations of 8- and 16-bit values and narrow floats*: an index as wide as the value, which keeps pairs
//!   aligned and free of padding, would end at 255 or 65,535. Widened values lose nothing.
//!
//! # Speed
//!
//! The loops (`loops`) are plain Rust over arrays of bytes, which the compiler vectorises for whatever it builds
//! for. With the feature `std` they are compiled for wider vectors too, and the widest that the processor has is
//! picked at run time (`dispatch`). `benches/reduce.rs` prints each pair's speed as a share of the f32 sum's.
#![forbid(unsafe_code)]

mod dispatch;
mod element;
mod last;
mod located;
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
/// let kernel = Kernel::new(Dtype::F32, ReduceOp::Avg).expect("f32 averages are supported");
/// let mut acc = [0; 4];
/// kernel.load(&mut acc, &1.5_f32.to_le_bytes(), false);
/// kernel.combine(&mut acc, &2.0_f32.to_le_bytes(), false);
/// assert_eq!(kernel.finish(&mut acc, 1, 2), 4);
/// assert_eq!(f32::from_le_bytes(acc), 1.75);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    dtype: Dtype,
    op: ReduceOp,
}

/// Why elements can't be multiplied ([`Kernel::scale`]).
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScaleError {
    /// Only contributions to a premultiplied sum are multiplied.
    #[error("{0} takes no scalar; only premul_sum does")]
    Operator(ReduceOp),
    /// Integers are multiplied by integers.
    #[error("a scalar of {scalar} for {dtype}: integers take whole numbers from -2^63 to below 2^64")]
    Scalar {
        /// The element type.
        dtype: Dtype,
        /// The scalar.
        scalar: f64,
    },
}

/// Bytes of results that [`Kernel::finish`] keeps in the stack at a time: several of the widest vectors' worth.
const FINISH_BLOCK_BYTES: usize = 512;

/// Bytes of accumulators that [`Kernel::store`] copies and finishes at a time: what stays in any L1 cache.
const STORE_BLOCK_BYTES: usize = 4096;

impl Kernel {
    /// Return the kernel of an element type and an operator, or `None` if the two do not go together.
    ///
    /// [`Kernel::why_not`] says why not.
    pub const fn new(dtype: Dtype, op: ReduceOp) -> Option<Self> {
        if Self::why_not(dtype, op).is_some() { None } else { Some(Self { dtype, op }) }
    }

    /// Return why an element type and an operator do not go together, for messages; `None` if they do.
    pub const fn why_not(dtype: Dtype, op: ReduceOp) -> Option<&'static str> {
        match op {
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor if !dtype.is_integer() => {
                Some("bitwise operators take integers; pass the bits of floats as unsigned integers")
            }
            ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor if !dtype.is_integer() => {
                Some("logical operators take integers, as in MPI; pass a comparison's result")
            }
            ReduceOp::MinLoc | ReduceOp::MaxLoc if dtype.size_bytes() < 4 => {
                Some("locations need 32- or 64-bit values, whose index is as wide; widen the values")
            }
            _ => None,
        }
    }

    /// Return the element type of the operation; of the value, where an element is a pair.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Return the operator.
    pub const fn op(&self) -> ReduceOp {
        self.op
    }

    /// Return the type of accumulators and partials; of their value, where an element is a pair.
    pub const fn accumulator(&self) -> Dtype {
        self.dtype.accumulator()
    }

    /// Return the type of a source's elements: the accumulator type if it is a partial, `dtype` otherwise.
    pub const fn source(&self, partial: bool) -> Dtype {
        if partial { self.accumulator() } else { self.dtype }
    }

    /// Return the size of an element in bytes: of a value, or of a pair.
    pub const fn element_bytes(&self) -> usize {
        self.source_bytes(false)
    }

    /// Return the size of an accumulator, and of an element of a partial, in bytes.
    pub const fn accumulator_bytes(&self) -> usize {
        self.source_bytes(true)
    }

    /// Return the size of a source's element in bytes: of a partial's, or of a contribution's.
    pub const fn source_bytes(&self, partial: bool) -> usize {
        self.source(partial).size_bytes() * if self.op.is_located() { 2 } else { 1 }
    }

    /// Return whether the bits of a result depend on the order in which contributions combine: where they round.
    pub const fn depends_on_order(&self) -> bool {
        let rounds = matches!(self.op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg | ReduceOp::PremulSum);
        rounds && !self.dtype.is_integer()
    }

    /// Return how many elements a source of `len_bytes` bytes holds, or `None` if that is not a whole number.
    pub const fn count(&self, len_bytes: usize, partial: bool) -> Option<usize> {
        let size_bytes = self.source_bytes(partial);
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

    /// Make results of the first `count` accumulators in `bytes`, in place, and return their length.
    ///
    /// An average is divided by `ranks`, the number of ranks that the operation is over; other operators don't look
    /// at it. Accumulators are rounded to `dtype`. The result lies at the head of `bytes`, `count` x
    /// [`Kernel::element_bytes`] long; where `dtype` is narrower than its accumulator, the bytes between it and the
    /// accumulators' end are left in no particular state. Bytes behind the accumulators are not touched.
    ///
    /// # Panics
    /// If `bytes` is shorter than `count` accumulators, or `ranks` is 0.
    #[track_caller]
    pub fn finish(&self, bytes: &mut [u8], count: usize, ranks: u32) -> usize {
        let (size_bytes, acc_bytes) = (self.element_bytes(), self.accumulator_bytes());
        assert!(
            count <= bytes.len() / acc_bytes,
            "{count} {} accumulators do not fit {} bytes: pass their whole buffer",
            self.accumulator(),
            bytes.len()
        );
        assert!(ranks > 0, "a result is of one rank or more");
        if size_bytes == acc_bytes {
            dispatch::finish(self.dtype, self.op, ranks, &mut bytes[..count * acc_bytes]);
            return count * size_bytes;
        }
        // In blocks through the stack: a result lands on accumulators that were read in its own block or before.
        let mut block = [0; FINISH_BLOCK_BYTES];
        let each = FINISH_BLOCK_BYTES / size_bytes;
        for first in (0..count).step_by(each) {
            let end = count.min(first + each);
            let done = &mut block[..(end - first) * size_bytes];
            dispatch::store(self.dtype, self.op, ranks, done, &bytes[first * acc_bytes..end * acc_bytes]);
            bytes[first * size_bytes..end * size_bytes].copy_from_slice(done);
        }
        count * size_bytes
    }

    /// Make results of the accumulators `acc` in `dst`: [`Kernel::finish`] out of place.
    ///
    /// # Panics
    /// If `dst` is not a whole number of elements of `dtype`, `acc` does not hold exactly as many accumulators, or
    /// `ranks` is 0.
    #[track_caller]
    pub fn store(&self, dst: &mut [u8], acc: &[u8], ranks: u32) {
        self.check(acc.len(), dst.len(), false);
        assert!(ranks > 0, "a result is of one rank or more");
        if self.element_bytes() != self.accumulator_bytes() {
            return dispatch::store(self.dtype, self.op, ranks, dst, acc);
        }
        for (dst, acc) in dst.chunks_mut(STORE_BLOCK_BYTES).zip(acc.chunks(STORE_BLOCK_BYTES)) {
            dst.copy_from_slice(acc);
            dispatch::finish(self.dtype, self.op, ranks, dst);
        }
    }

    /// Make a contribution to a premultiplied sum: `dst = src x scalar`, element by element.
    ///
    /// Both slices hold elements of `dtype`. Floats are multiplied in the accumulator type, to which `scalar` is
    /// rounded first, and the product is rounded to `dtype`. Integers are multiplied modulo 2^bits.
    ///
    /// # Errors
    /// [`ScaleError`]; nothing is written then.
    ///
    /// # Panics
    /// If `src` is not a whole number of elements, or `dst` is not as long.
    #[track_caller]
    pub fn scale(&self, dst: &mut [u8], src: &[u8], scalar: f64) -> Result<(), ScaleError> {
        if self.op != ReduceOp::PremulSum {
            return Err(ScaleError::Operator(self.op));
        }
        let integer = modulo_2_64(scalar).ok_or(ScaleError::Scalar { dtype: self.dtype, scalar });
        let integer = if self.dtype.is_integer() { integer? } else { 0 };
        assert!(
            dst.len() == src.len() && self.count(src.len(), false).is_some(),
            "{} bytes and {} bytes of {} are not equally many elements",
            dst.len(),
            src.len(),
            self.dtype
        );
        dispatch::scale(self.dtype, last::Times { float: scalar, integer }, dst, src);
        Ok(())
    }

    #[track_caller]
    fn check(&self, acc_len_bytes: usize, other_len_bytes: usize, partial: bool) {
        let acc_size_bytes = self.accumulator_bytes();
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

/// Return a whole number from -2^63 to below 2^64 modulo 2^64, `None` for any other number.
fn modulo_2_64(scalar: f64) -> Option<u64> {
    const TWO_63: f64 = (1_u64 << 63) as f64;
    if (-TWO_63..0.0).contains(&scalar) {
        let integer = scalar as i64;
        (integer as f64 == scalar).then_some(integer as u64)
    } else if (0.0..2.0 * TWO_63).contains(&scalar) {
        let integer = scalar as u64;
        (integer as f64 == scalar).then_some(integer)
    } else {
        None
    }
}
