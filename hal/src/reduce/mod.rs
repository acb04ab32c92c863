//! The arithmetic of reductions: one kernel for each element type and operator.
//!
//! Devices, DMA engines and hosts all use these kernels, so that a result is bitwise the same wherever it is computed
//! (PROTOCOL 9). The rules, each covered by `tests`:
//!
//! - The first contribution is copied ([`Kernel::load`]), not added to 0.0: a single -0.0 stays -0.0.
//! - Each float operation rounds once, to nearest even. Nothing is contracted to a fused multiply-add. Subnormals are
//!   kept unless the caller's thread has set its processor to flush them.
//! - Types narrower than their accumulator are rounded once, to nearest even, at the end ([`Kernel::finish`],
//!   [`Kernel::store`]). Averages are divided there as well.
//! - Rounding turns every NaN into the canonical quiet NaN of its type. A partial result may carry any payload.
//! - Every operator is commutative: after rounding, `a op b` and `b op a` are bitwise equal, so either may be the left
//!   operand. Integer operators, minima, maxima and locations are also associative bit by bit; see
//!   [`Kernel::depends_on_order`].
//!
//! # Types
//!
//! Values are little-endian bytes at any alignment, as in packets and user memory.
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
//! The two fp8 types are those of the OCP 8-bit Floating Point Specification (OFP8), rounded in its *non-saturating*
//! mode, like NumPy's ml_dtypes and PyTorch. In saturating mode, a sum out of range would become a finite 448 or
//! 57,344, which cannot be told from a correct result.
//!
//! # Operators
//!
//! The table defines each operator for integers and for f32 and f64. Narrow floats differ from f32 only in that
//! elements are widened exactly before and rounded afterwards.
//!
//! | operator | integers | floats | NaN, zeros, ties |
//! |---|---|---|---|
//! | sum | modulo 2^bits | one rounding per addition | NaN if any is, or for +inf + -inf; -0 only from -0 + -0 |
//! | prod | modulo 2^bits | one rounding per multiplication | NaN if any is, or for 0 x inf; signs of zeros multiply |
//! | avg | the sum modulo 2^bits, divided by the number of ranks, truncated towards 0 | the sum, one division in the accumulator type | as sum |
//! | premul_sum | sum of the results of [`Kernel::scale`]: scalar x element modulo 2^bits | sum of its results, each rounded to the accumulator type, then to the element type | as sum |
//! | min, max | by value | IEEE 754-2019 `minimum`, `maximum`: exact | NaN if any is; -0 < +0 |
//! | minloc, maxloc | {value, index} pairs, by value: i32 u32 i64 u64 | the same: f32 f64 | NaN before any number; -0 < +0; equal values and NaNs: the lowest index |
//! | band, bor, bxor | bit by bit | refused | |
//! | land, lor, lxor | any value but 0 is true; the result is 1 or 0 | refused | |
//!
//! A *pair* is a value followed by an unsigned index of the same size: 8 B for 32-bit values, 16 B for 64-bit values.
//! For these operators an element is a pair, and counts are in pairs.
//!
//! Not supported; [`Kernel::unsupported_reason`] returns the reason:
//! - *bitwise operators on floats*. MPI's bitwise operators also take only integers and bytes (MPI 4.1, 6.9.2). To
//!   combine the bits of floats, pass them as unsigned integers.
//! - *logical operators on floats*. MPI's logical operators also take only integers. Pass the result of a comparison.
//! - *locations of 8- and 16-bit values and narrow floats*. The index is as wide as the value, which keeps pairs
//!   aligned and free of padding, so it would end at 255 or 65,535. Widen the values, which is exact.
//!
//! # Speed
//!
//! The loops (`loops`) are plain Rust over arrays of bytes, which the compiler vectorizes for its target. With the
//! feature `std` they are also compiled for wider vectors, and the widest that the processor supports is selected at
//! run time (`dispatch`). `benches/reduce.rs` prints the speed of each type and operator relative to the f32 sum.
#![forbid(unsafe_code)]

mod dispatch;
mod element;
mod epilogue;
mod located;
mod loops;
mod narrow;
mod operator;
#[cfg(test)]
mod tests;

use crate::op::{Dtype, ReduceOp};

/// The arithmetic of one operator on elements of one type.
///
/// A kernel is four bytes and `Copy`. Its methods panic if the lengths of slices do not match, like
/// [`slice::copy_from_slice`]. Check untrusted lengths with [`Kernel::count`] first.
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
    /// The size of an element, and of an accumulator, as a power of two.
    element_log2: u8,
    accumulator_log2: u8,
}

/// Why elements cannot be scaled ([`Kernel::scale`]).
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ScaleError {
    /// The operator does not take a scalar.
    #[error("{0} does not take a scalar; only premul_sum does")]
    Operator(ReduceOp),
    /// The scalar for an integer type is not a whole number in range.
    #[error("scalar {scalar} for {dtype}: integers take whole numbers from -2^63 to below 2^64")]
    Scalar {
        /// The element type.
        dtype: Dtype,
        /// The scalar.
        scalar: f64,
    },
}

/// The size of the block of results that [`Kernel::finish`] keeps on the stack, in bytes: several of the widest
/// vectors.
const FINISH_BLOCK_BYTES: usize = 512;

/// The size of the block of accumulators that [`Kernel::store`] copies and finishes at a time, in bytes. It fits any L1
/// cache.
const STORE_BLOCK_BYTES: usize = 4096;

impl Kernel {
    /// Return the kernel for an element type and an operator, or `None` if the combination is not supported; see
    /// [`Kernel::unsupported_reason`].
    #[inline]
    pub const fn new(dtype: Dtype, op: ReduceOp) -> Option<Self> {
        if Self::unsupported_reason(dtype, op).is_some() {
            return None;
        }
        let values = if op.is_located() { 2 } else { 1 };
        let element_log2 = (dtype.size_bytes() * values).trailing_zeros() as u8;
        let accumulator_log2 = (dtype.accumulator().size_bytes() * values).trailing_zeros() as u8;
        Some(Self { dtype, op, element_log2, accumulator_log2 })
    }

    /// Return why an element type and an operator are not supported together, for error messages; `None` if they are.
    pub const fn unsupported_reason(dtype: Dtype, op: ReduceOp) -> Option<&'static str> {
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

    /// Return the element type; for pairs, the type of the value.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Return the operator.
    pub const fn op(&self) -> ReduceOp {
        self.op
    }

    /// Return the type of accumulators and partial results; for pairs, the type of the value.
    pub const fn accumulator(&self) -> Dtype {
        self.dtype.accumulator()
    }

    /// Return the type of a source's elements: the accumulator type if it is a partial result, else the element type.
    #[inline]
    pub const fn source(&self, partial: bool) -> Dtype {
        if partial { self.accumulator() } else { self.dtype }
    }

    /// Return the size of an element, a value or a pair, in bytes.
    pub const fn element_bytes(&self) -> usize {
        self.source_bytes(false)
    }

    /// Return the size of an accumulator, and of an element of a partial result, in bytes.
    #[inline]
    pub const fn accumulator_bytes(&self) -> usize {
        self.source_bytes(true)
    }

    /// Return the size of a source's element, in a partial result or a contribution, in bytes.
    #[inline]
    pub const fn source_bytes(&self, partial: bool) -> usize {
        1 << self.source_log2(partial)
    }

    #[inline]
    const fn source_log2(&self, partial: bool) -> u8 {
        if partial { self.accumulator_log2 } else { self.element_log2 }
    }

    /// Return whether the bits of a result depend on the order in which contributions are combined, because they round.
    pub const fn depends_on_order(&self) -> bool {
        let rounds = matches!(self.op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg | ReduceOp::PremulSum);
        rounds && !self.dtype.is_integer()
    }

    /// Return the number of elements in a source of `len_bytes` bytes, or `None` if it is not a whole number.
    #[inline]
    pub const fn count(&self, len_bytes: usize, partial: bool) -> Option<usize> {
        let log2 = self.source_log2(partial);
        if len_bytes & ((1 << log2) - 1) == 0 { Some(len_bytes >> log2) } else { None }
    }

    /// Set the accumulators to the first contribution: `acc = src`, element by element.
    ///
    /// `acc` holds accumulators; `src` holds as many elements of type [`Kernel::source`].
    ///
    /// # Panics
    /// If `src` is not a whole number of elements, or `acc` does not hold exactly as many.
    #[track_caller]
    #[inline]
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
    #[inline]
    pub fn combine(&self, acc: &mut [u8], src: &[u8], partial: bool) {
        self.check(acc.len(), src.len(), partial);
        dispatch::combine(self.source(partial), self.op, acc, src);
    }

    /// Add the last contribution and finish, in one pass: what [`Kernel::combine`] does, and then [`Kernel::finish`]
    /// with the whole of `acc`. Returns false, and does nothing, where that takes two passes: it takes one for sums of
    /// f32.
    ///
    /// # Panics
    /// As [`Kernel::load`].
    #[track_caller]
    #[inline]
    pub fn combine_last(&self, acc: &mut [u8], src: &[u8], partial: bool) -> bool {
        let takes_one = self.dtype as u8 == Dtype::F32 as u8 && self.op as u8 == ReduceOp::Sum as u8;
        if takes_one {
            self.check(acc.len(), src.len(), partial);
            dispatch::sum_last(acc, src);
        }
        takes_one
    }

    /// Convert the first `count` accumulators in `bytes` to results, in place, and return the length of the results.
    ///
    /// Averages are divided by `ranks`, the number of ranks of the operation; other operators ignore it. Accumulators
    /// are rounded to the element type. The results are at the start of `bytes`, `count` x [`Kernel::element_bytes`]
    /// long. The bytes between their end and the end of the accumulators are unspecified; bytes after the accumulators
    /// are unchanged.
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
        assert!(ranks > 0, "ranks must not be 0");
        if size_bytes == acc_bytes {
            dispatch::finish(self.dtype, self.op, ranks, &mut bytes[..count * acc_bytes]);
            return count * size_bytes;
        }
        // In blocks through the stack: results overwrite only accumulators that have been read.
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

    /// Convert the accumulators `acc` to results in `dst`: [`Kernel::finish`] out of place.
    ///
    /// # Panics
    /// If `dst` is not a whole number of elements, `acc` does not hold exactly as many accumulators, or `ranks` is 0.
    #[track_caller]
    pub fn store(&self, dst: &mut [u8], acc: &[u8], ranks: u32) {
        self.check(acc.len(), dst.len(), false);
        assert!(ranks > 0, "ranks must not be 0");
        if self.element_bytes() != self.accumulator_bytes() {
            return dispatch::store(self.dtype, self.op, ranks, dst, acc);
        }
        for (dst, acc) in dst.chunks_mut(STORE_BLOCK_BYTES).zip(acc.chunks(STORE_BLOCK_BYTES)) {
            dst.copy_from_slice(acc);
            dispatch::finish(self.dtype, self.op, ranks, dst);
        }
    }

    /// Scale a contribution to a premultiplied sum: `dst = src x scalar`, element by element.
    ///
    /// Both slices hold elements of the element type. Floats are multiplied in the accumulator type, to which `scalar`
    /// is rounded first, and the product is rounded to the element type. Integers are multiplied modulo 2^bits.
    ///
    /// # Errors
    /// [`ScaleError`] if the operator or the type does not take the scalar. Nothing is written then.
    ///
    /// # Panics
    /// If `src` is not a whole number of elements, or `dst` has another length.
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
        dispatch::scale(self.dtype, epilogue::Scale { float: scalar, integer }, dst, src);
        Ok(())
    }

    #[track_caller]
    #[inline]
    fn check(&self, acc_len_bytes: usize, other_len_bytes: usize, partial: bool) {
        let (acc_log2, log2) = (self.accumulator_log2, self.source_log2(partial));
        // Most elements are as long as their accumulators.
        let is_whole = acc_len_bytes & ((1 << acc_log2) - 1) == 0;
        let is_same = acc_len_bytes == other_len_bytes && acc_log2 == log2;
        if !is_whole || !is_same && self.count(other_len_bytes, partial) != Some(acc_len_bytes >> acc_log2) {
            self.mismatch(acc_len_bytes, other_len_bytes, partial);
        }
    }

    #[cold]
    #[track_caller]
    fn mismatch(&self, acc_len_bytes: usize, other_len_bytes: usize, partial: bool) -> ! {
        panic!(
            "{acc_len_bytes} bytes of {} accumulators and {other_len_bytes} bytes of {} are not equally many elements: \
             check untrusted lengths with Kernel::count",
            self.accumulator(),
            self.source(partial)
        )
    }
}

/// Return a whole number from -2^63 to below 2^64 modulo 2^64, or `None` for any other number.
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
