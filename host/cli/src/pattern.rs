//! Test values and expected results: missing, duplicated, stale and misplaced contributions change the result.
//!
//! Element e of rank r in iteration i is `own_r[(e + i * STRIDE) mod PERIOD]`, where `own_r` is a table of hashed
//! values. The expected result is the same index into a table of reductions. Filling a buffer is thus a copy and
//! checking it a memory comparison, which takes little time away from the measurement. Still:
//!
//! - Values depend on rank, element and iteration, so missing, duplicated and stale contributions are detected.
//! - [`PERIOD`] is prime, so a chunk in another chunk's place is detected, unless the two are a multiple of 65,521
//!   elements apart.
//! - Results are exact in any order of reduction: floats are integers whose partial sums the type represents exactly,
//!   or powers of two; integers are hashed over their whole range and wrap.
//!
//! For collectives that only move data, the expected result is another rank's table. Tables are computed on first use.

use half::{bf16, f16};
use std::cell::OnceCell;
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The number of elements after which values repeat: the largest prime below 2^16.
const PERIOD: usize = 65_521;

/// The shift of values per iteration: a prime, so that 65,521 consecutive iterations all differ.
const STRIDE: usize = 7919;

/// The scalar by which each rank multiplies its contribution to a premultiplied sum.
pub(crate) const SCALE: f64 = 2.0;

/// The values of all ranks and their reduction, for an element type and operator.
#[derive(Debug)]
pub(crate) struct Pattern {
    dtype: Dtype,
    op: ReduceOp,
    tables: Vec<OnceCell<Vec<u8>>>,
    reduced: OnceCell<Vec<u8>>,
}

/// The expected contents of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    /// The reduction of all ranks' values.
    Reduced,
    /// One rank's values.
    Of(u32),
}

impl Pattern {
    /// Describe the values of `ranks` ranks.
    pub(crate) fn new(dtype: Dtype, op: ReduceOp, ranks: u32) -> Self {
        let tables = (0..ranks).map(|_| OnceCell::new()).collect();
        Self { dtype, op, tables, reduced: OnceCell::new() }
    }

    /// Return the length of an element in bytes: of a value, or of a value with its index.
    pub(crate) fn element_bytes(&self) -> usize {
        self.dtype.size_bytes() * if self.op.is_located() { 2 } else { 1 }
    }

    /// Write the contribution of `rank` to `iteration`, from element `first` on; `buffer` holds whole elements.
    pub(crate) fn fill(&self, buffer: &mut [u8], rank: u32, iteration: u64, first: usize) {
        let mut at = 0;
        for part in self.parts(self.table(rank), iteration, first, buffer.len()) {
            buffer[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }

    /// Return the number of elements of `buffer` that differ from those of `iteration`, from element `first` on.
    pub(crate) fn wrong(&self, buffer: &[u8], expected: Expected, iteration: u64, first: usize) -> u64 {
        let table = match expected {
            Expected::Reduced => self.reduced.get_or_init(|| self.reduce()),
            Expected::Of(rank) => self.table(rank),
        };
        let (mut at, mut wrong) = (0, 0);
        for part in self.parts(table, iteration, first, buffer.len()) {
            let found = &buffer[at..at + part.len()];
            at += part.len();
            if found != part {
                let size = self.element_bytes();
                let pairs = found.chunks(size).zip(part.chunks(size));
                wrong += pairs.filter(|(found, expected)| found != expected).count() as u64;
            }
        }
        wrong
    }

    /// Return the slices of `table` that make up `len_bytes` bytes of `iteration`.
    fn parts<'a>(
        &self,
        table: &'a [u8],
        iteration: u64,
        first: usize,
        len_bytes: usize,
    ) -> impl Iterator<Item = &'a [u8]> {
        let shift = ((iteration % PERIOD as u64) as usize * STRIDE + first % PERIOD) % PERIOD * self.element_bytes();
        let (mut from, mut left) = (shift, len_bytes);
        std::iter::from_fn(move || {
            let part = &table[from..table.len().min(from + left)];
            (from, left) = (0, left - part.len());
            (!part.is_empty()).then_some(part)
        })
    }

    fn table(&self, rank: u32) -> &[u8] {
        self.tables[rank as usize].get_or_init(|| {
            let mut bytes = Vec::new();
            (0..PERIOD as u64).for_each(|index| self.push(self.value(rank, index), 1, &mut bytes));
            bytes
        })
    }

    /// Compute the result in integers that hold the values of every type.
    fn reduce(&self) -> Vec<u8> {
        let ranks = self.tables.len() as u32;
        let divisor = if self.op == ReduceOp::Avg { ranks } else { 1 };
        let factor = if self.op == ReduceOp::PremulSum { SCALE as i128 } else { 1 };
        let mut bytes = Vec::new();
        for index in 0..PERIOD as u64 {
            let mut values = (0..ranks).map(|rank| self.value(rank, index));
            let result = match self.op {
                // Logical operators reduce truth values.
                ReduceOp::Land => (i128::from(values.all(|value| value.0 != 0)), 0),
                ReduceOp::Lor => (i128::from(values.any(|value| value.0 != 0)), 0),
                ReduceOp::Lxor => (i128::from(values.filter(|value| value.0 != 0).count() % 2 == 1), 0),
                _ => values.reduce(|a, b| self.combine(a, b)).unwrap_or((0, 0)),
            };
            self.push((result.0.wrapping_mul(factor), result.1), divisor, &mut bytes);
        }
        bytes
    }

    fn combine(&self, a: (i128, u64), b: (i128, u64)) -> (i128, u64) {
        match self.op {
            ReduceOp::Min => (a.0.min(b.0), 0),
            ReduceOp::Max => (a.0.max(b.0), 0),
            ReduceOp::MinLoc => a.min(b),
            ReduceOp::MaxLoc => {
                if (a.0, b.1) > (b.0, a.1) {
                    a
                } else {
                    b
                }
            }
            ReduceOp::Band => (a.0 & b.0, 0),
            ReduceOp::Bor => (a.0 | b.0, 0),
            ReduceOp::Bxor => (a.0 ^ b.0, 0),
            ReduceOp::Prod => (a.0.wrapping_mul(b.0), 0),
            _ => (a.0.wrapping_add(b.0), 0),
        }
    }

    /// Return a value of a rank and, for operators with a location, its index.
    fn value(&self, rank: u32, index: u64) -> (i128, u64) {
        let ranks = self.tables.len() as u32;
        let hash = splitmix64(index ^ (u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let location = if self.op.is_located() { splitmix64(hash) % 100 } else { 0 };
        let value = match (self.dtype, exact_max(self.dtype)) {
            // One rank contributes 2 or -2, the others 1 or -1: every product is 2 or -2.
            (_, Some(_)) if self.op == ReduceOp::Prod => {
                let sign = if hash & 1 == 0 { 1 } else { -1 };
                if index % u64::from(ranks.max(1)) == u64::from(rank) { 2 * sign } else { sign }
            }
            // Beyond `exact_max` ranks (256 for bf16), only zeros add up exactly.
            (_, Some(max)) if i64::from(rank) >= max => 0,
            (_, Some(max)) => {
                let most = (max / i64::from(ranks.max(1))).max(1);
                i128::from((hash % (2 * most as u64 + 1)) as i64 - most)
            }
            (Dtype::I8, None) => i128::from(hash as i8),
            (Dtype::U8, None) => i128::from(hash as u8),
            (Dtype::I16, None) => i128::from(hash as i16),
            (Dtype::U16, None) => i128::from(hash as u16),
            (Dtype::I32, None) => i128::from(hash as i32),
            (Dtype::U32, None) => i128::from(hash as u32),
            (Dtype::I64, None) => i128::from(hash as i64),
            (_, None) => i128::from(hash),
        };
        (value, location)
    }

    /// Append a value divided by `divisor` in the type's bytes, and its index if there is one. Integers wrap before the
    /// division.
    fn push(&self, (value, location): (i128, u64), divisor: u32, bytes: &mut Vec<u8>) {
        let size = self.dtype.size_bytes();
        let divisor = i128::from(divisor);
        match self.dtype {
            Dtype::F16 => bytes.extend(f16::from_f32(value as f32 / divisor as f32).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(bf16::from_f32(value as f32 / divisor as f32).to_le_bytes()),
            Dtype::F32 => bytes.extend((value as f32 / divisor as f32).to_le_bytes()),
            Dtype::F64 => bytes.extend((value as f64 / divisor as f64).to_le_bytes()),
            Dtype::E4m3 | Dtype::E5m2 => {
                let mut byte = [0];
                let kernel = Kernel::new(self.dtype, ReduceOp::Sum).expect("every type has sums");
                kernel.store(&mut byte, &(value as f32 / divisor as f32).to_le_bytes(), 1);
                bytes.extend(byte);
            }
            dtype => bytes.extend(&(wrap(dtype, value) / divisor).to_le_bytes()[..size]),
        }
        if self.op.is_located() {
            bytes.extend(&location.to_le_bytes()[..size]);
        }
    }
}

/// Wrap an integer to its type.
fn wrap(dtype: Dtype, value: i128) -> i128 {
    match dtype {
        Dtype::I8 => i128::from(value as i8),
        Dtype::U8 => i128::from(value as u8),
        Dtype::I16 => i128::from(value as i16),
        Dtype::U16 => i128::from(value as u16),
        Dtype::I32 => i128::from(value as i32),
        Dtype::U32 => i128::from(value as u32),
        Dtype::I64 => i128::from(value as i64),
        _ => i128::from(value as u64),
    }
}

/// Return the greatest integer up to which the type represents all integers exactly; `None` for integer types, which
/// wrap.
fn exact_max(dtype: Dtype) -> Option<i64> {
    match dtype {
        Dtype::E5m2 => Some(1 << 3),
        Dtype::E4m3 => Some(1 << 4),
        Dtype::F16 => Some(1 << f16::MANTISSA_DIGITS),
        Dtype::Bf16 => Some(1 << bf16::MANTISSA_DIGITS),
        Dtype::F32 => Some(1 << f32::MANTISSA_DIGITS),
        Dtype::F64 => Some(1 << f64::MANTISSA_DIGITS),
        _ => None,
    }
}

/// Mix 64 bits (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
fn splitmix64(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKS: u32 = 5;
    /// More than one period.
    const COUNT: usize = PERIOD + 1000;

    /// Reduce the ranks' buffers in the given order with the library's kernels.
    fn reduce(pattern: &Pattern, order: &[u32], iteration: u64) -> Vec<u8> {
        let kernel = Kernel::new(pattern.dtype, pattern.op).expect("they go together");
        let mut acc = vec![0; COUNT * kernel.accumulator_bytes()];
        for (nth, &rank) in order.iter().enumerate() {
            let mut source = vec![0; COUNT * kernel.element_bytes()];
            pattern.fill(&mut source, rank, iteration, 0);
            if pattern.op == ReduceOp::PremulSum {
                let plain = source.clone();
                kernel.scale(&mut source, &plain, SCALE).expect("a whole number");
            }
            if nth == 0 {
                kernel.load(&mut acc, &source, false);
            } else {
                kernel.combine(&mut acc, &source, false);
            }
        }
        let len = kernel.finish(&mut acc, COUNT, RANKS);
        acc.truncate(len);
        acc
    }

    #[test]
    fn results_are_exact_in_any_order_and_errors_are_detected() {
        for &dtype in Dtype::ALL {
            for &op in ReduceOp::ALL.iter().filter(|&&op| Kernel::new(dtype, op).is_some()) {
                let pattern = Pattern::new(dtype, op, RANKS);
                let wrong = |bytes: &[u8]| pattern.wrong(bytes, Expected::Reduced, 9, 0);
                for order in [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]] {
                    assert_eq!(wrong(&reduce(&pattern, &order, 9)), 0, "{dtype} {op}");
                }
                if op == ReduceOp::Sum {
                    // Few values of fp8 add up exactly, so some of them are 0.
                    assert!(
                        wrong(&reduce(&pattern, &[0, 1, 2, 4], 9)) > COUNT as u64 / 2,
                        "{dtype}: a missing contribution"
                    );
                    assert!(
                        wrong(&reduce(&pattern, &[0, 1, 2, 3, 4], 8)) > COUNT as u64 / 2,
                        "{dtype}: a stale contribution"
                    );
                }
            }
        }
    }

    #[test]
    fn one_wrong_byte_counts_as_one_wrong_element() {
        let pattern = Pattern::new(Dtype::F32, ReduceOp::Sum, RANKS);
        let mut bytes = reduce(&pattern, &[0, 1, 2, 3, 4], 0);
        bytes[801] ^= 1;
        assert_eq!(pattern.wrong(&bytes, Expected::Reduced, 0, 0), 1);
    }

    #[test]
    fn block_equals_its_part_of_the_whole_buffer_and_differs_between_ranks() {
        let pattern = Pattern::new(Dtype::U16, ReduceOp::Max, RANKS);
        let (mut whole, mut part) = (vec![0; COUNT * 2], vec![0; 500]);
        pattern.fill(&mut whole, 3, 7, 0);
        pattern.fill(&mut part, 3, 7, PERIOD - 100);
        assert_eq!(part, whole[(PERIOD - 100) * 2..][..500]);
        assert_eq!(pattern.wrong(&part, Expected::Of(3), 7, PERIOD - 100), 0);
        assert!(pattern.wrong(&part, Expected::Of(2), 7, PERIOD - 100) > 200);
    }

    #[test]
    fn sums_of_600_bf16_ranks_stay_exact() {
        let pattern = Pattern::new(Dtype::Bf16, ReduceOp::Sum, 600);
        let total: i128 = (0..600).map(|rank| pattern.value(rank, 3).0.abs()).sum();
        assert!(total <= 256 && total > 100, "{total}");
    }
}
