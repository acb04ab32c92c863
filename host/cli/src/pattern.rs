//! What ranks put into their buffers, and what must come out: values that no error can leave unchanged.
//!
//! Element e of rank r in iteration i is `own_r[(e + i * STRIDE) mod PERIOD]`, where `own_r` is a table of hashed
//! values; the expected result is the same index into one table of reductions. So filling is a copy and checking a
//! comparison of memory, which leaves the machine to what is measured, and still:
//!
//! - values depend on rank, element and iteration: a missing, doubled or stale contribution shows;
//! - [`PERIOD`] is prime: a chunk that lands in another chunk's place shows, unless the two are a multiple of
//!   65,521 elements apart;
//! - sums are exact whatever their order, as every partial sum is an integer that the type holds; integers are hashed
//!   over their whole range and wrap.

use half::{bf16, f16};
use sumac_hal::op::{Dtype, ReduceOp};

/// After how many elements values repeat: the largest prime below 2^16.
const PERIOD: usize = 65_521;

/// How far an iteration shifts the values: a prime, so that the shifts of 65,521 iterations in a row differ.
const STRIDE: usize = 7919;

/// One rank's values, and everybody's result, of an element type and operator.
#[derive(Debug)]
pub(crate) struct Pattern {
    size_bytes: usize,
    own: Vec<u8>,
    expected: Vec<u8>,
}

impl Pattern {
    /// Compute the tables of `rank` among `ranks`.
    pub(crate) fn new(dtype: Dtype, op: ReduceOp, rank: u32, ranks: u32) -> Self {
        let size_bytes = dtype.size_bytes();
        let (mut own, mut expected) = (Vec::new(), Vec::new());
        for index in 0..PERIOD as u64 {
            let values = (0..ranks).map(|r| value(dtype, r, ranks, index));
            let result = values.reduce(|a, b| match op {
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                _ => a.wrapping_add(b),
            });
            push(dtype, value(dtype, rank, ranks, index), &mut own);
            push(dtype, result.unwrap_or(0), &mut expected);
        }
        Self { size_bytes, own, expected }
    }

    /// Write this rank's contribution to `iteration`; `buffer` holds whole elements.
    pub(crate) fn fill(&self, buffer: &mut [u8], iteration: u64) {
        let mut at = 0;
        for part in self.parts(&self.own, iteration, buffer.len()) {
            buffer[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }

    /// Return how many elements of `buffer` are not the result of `iteration`.
    pub(crate) fn wrong(&self, buffer: &[u8], iteration: u64) -> u64 {
        let (mut at, mut wrong) = (0, 0);
        for part in self.parts(&self.expected, iteration, buffer.len()) {
            let found = &buffer[at..at + part.len()];
            at += part.len();
            if found != part {
                let pairs = found.chunks(self.size_bytes).zip(part.chunks(self.size_bytes));
                wrong += pairs.filter(|(found, expected)| found != expected).count() as u64;
            }
        }
        wrong
    }

    /// Return the runs of `table` that `len_bytes` bytes of `iteration` consist of.
    fn parts<'a>(&self, table: &'a [u8], iteration: u64, len_bytes: usize) -> impl Iterator<Item = &'a [u8]> {
        let shift = (iteration % PERIOD as u64) as usize * STRIDE % PERIOD * self.size_bytes;
        let (mut from, mut left) = (shift, len_bytes);
        std::iter::from_fn(move || {
            let part = &table[from..table.len().min(from + left)];
            (from, left) = (0, left - part.len());
            (!part.is_empty()).then_some(part)
        })
    }
}

/// Return the greatest integer up to which the type holds all of them, `None` where it wraps instead.
fn exact_max(dtype: Dtype) -> Option<i64> {
    match dtype {
        Dtype::F16 => Some(1 << f16::MANTISSA_DIGITS),
        Dtype::Bf16 => Some(1 << bf16::MANTISSA_DIGITS),
        Dtype::F32 => Some(1 << f32::MANTISSA_DIGITS),
        Dtype::F64 => Some(1 << f64::MANTISSA_DIGITS),
        _ => None,
    }
}

/// Return a value of a rank: for floats as large as lets all ranks' values add up exactly.
///
/// Beyond `exact_max` ranks (256 of bf16) there is no such value but 0: later ranks give that.
fn value(dtype: Dtype, rank: u32, ranks: u32, index: u64) -> i64 {
    let hash = splitmix64(index ^ (u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    match (dtype, exact_max(dtype)) {
        (_, Some(max)) if i64::from(rank) >= max => 0,
        (_, Some(max)) => {
            let most = (max / i64::from(ranks.max(1))).max(1);
            (hash % (2 * most as u64 + 1)) as i64 - most
        }
        (Dtype::I32, None) => i64::from(hash as i32),
        (_, None) => hash as i64,
    }
}

/// Append a value's little-endian bytes; integers wrap.
fn push(dtype: Dtype, value: i64, bytes: &mut Vec<u8>) {
    match dtype {
        Dtype::I32 => bytes.extend((value as i32).to_le_bytes()),
        Dtype::F16 => bytes.extend(f16::from_f64(value as f64).to_le_bytes()),
        Dtype::Bf16 => bytes.extend(bf16::from_f64(value as f64).to_le_bytes()),
        Dtype::F32 => bytes.extend((value as f32).to_le_bytes()),
        Dtype::F64 => bytes.extend((value as f64).to_le_bytes()),
        _ => bytes.extend(value.to_le_bytes()),
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
    use sumac_hal::reduce::Kernel;

    const RANKS: u32 = 5;
    /// More than one period.
    const COUNT: usize = PERIOD + 1000;

    fn patterns(dtype: Dtype, op: ReduceOp) -> (Vec<Pattern>, Kernel) {
        let patterns = (0..RANKS).map(|rank| Pattern::new(dtype, op, rank, RANKS)).collect();
        (patterns, Kernel::new(dtype, op).expect("all pairs exist"))
    }

    /// Reduce the ranks' buffers with the project's kernels, in the order given.
    fn reduce(patterns: &[Pattern], kernel: Kernel, order: &[usize], iteration: u64) -> Vec<u8> {
        let mut acc = vec![0; COUNT * kernel.accumulator().size_bytes()];
        for (nth, &rank) in order.iter().enumerate() {
            let mut source = vec![0; COUNT * kernel.dtype().size_bytes()];
            patterns[rank].fill(&mut source, iteration);
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
    fn any_order_gives_the_expected_result_and_errors_show() {
        for &dtype in Dtype::ALL {
            for &op in ReduceOp::ALL {
                let (patterns, kernel) = patterns(dtype, op);
                for order in [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]] {
                    assert_eq!(patterns[1].wrong(&reduce(&patterns, kernel, &order, 9), 9), 0, "{dtype} {op}");
                }
                if op == ReduceOp::Sum {
                    let missing = reduce(&patterns, kernel, &[0, 1, 2, 4], 9);
                    assert!(patterns[1].wrong(&missing, 9) > COUNT as u64 / 2, "{dtype}: a missing contribution");
                    let stale = reduce(&patterns, kernel, &[0, 1, 2, 3, 4], 8);
                    assert!(patterns[1].wrong(&stale, 9) > COUNT as u64 / 2, "{dtype}: a stale result");
                }
            }
        }
    }

    #[test]
    fn one_wrong_byte_is_one_wrong_element() {
        let (patterns, kernel) = patterns(Dtype::F32, ReduceOp::Sum);
        let mut bytes = reduce(&patterns, kernel, &[0, 1, 2, 3, 4], 0);
        bytes[801] ^= 1;
        assert_eq!(patterns[2].wrong(&bytes, 0), 1);
    }

    #[test]
    fn many_ranks_of_a_narrow_type_still_add_up() {
        let total: i64 = (0..600).map(|rank| value(Dtype::Bf16, rank, 600, 3).abs()).sum();
        assert!(total <= 256 && total > 100, "{total}");
    }
}
