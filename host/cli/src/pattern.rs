//! What ranks put into their buffers, and what must come out: values that no error can leave unchanged.
//!
//! Element e of rank r in iteration i is `own_r[(e + i * STRIDE) mod PERIOD]`, where `own_r` is a table of hashed
//! values; the expected result is the same index into one table of reductions. So filling is a copy and checking a
//! comparison of memory, which leaves the machine to what is measured, and still:
//!
//! - values depend on rank, element and iteration: a missing, doubled or stale contribution shows;
//! - [`PERIOD`] is prime: a chunk that lands in another chunk's place shows, unless the two are a multiple of
//!   65,521 elements apart;
//! - sums and products are exact whatever their order, as every partial one is an integer that the type holds;
//!   integers are hashed over their whole range and wrap.

use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// After how many elements values repeat: the largest prime below 2^16.
const PERIOD: usize = 65_521;

/// How far an iteration shifts the values: a prime, so that the shifts of 65,521 iterations in a row differ.
const STRIDE: usize = 7919;

/// One rank's values, and everybody's result, of an element type and operator.
#[derive(Debug)]
pub(crate) struct Pattern {
    /// The size of an element.
    size_bytes: usize,
    own: Vec<u8>,
    expected: Vec<u8>,
}

impl Pattern {
    /// Compute the tables of `rank` among `ranks`, for a type and an operator that go together.
    pub(crate) fn new(dtype: Dtype, op: ReduceOp, rank: u32, ranks: u32) -> Self {
        let size_bytes = if op.is_located() { 2 * dtype.size_bytes() } else { dtype.size_bytes() };
        let (mut own, mut expected) = (Vec::new(), Vec::new());
        for index in 0..PERIOD as u64 {
            let value = |rank| value(dtype, op, rank, ranks, index);
            // The index of a pair is the rank: of equal values the lowest rank's is kept.
            let result = (0..ranks).map(|r| (value(r), r)).reduce(|a, b| combine(dtype, op, a, b));
            let (result, index) = result.unwrap_or((0, 0));
            push(dtype, value(rank), 1, &mut own);
            push(dtype, result, if op == ReduceOp::Avg { ranks } else { 1 }, &mut expected);
            if op.is_located() {
                push_integer(dtype, rank.into(), &mut own);
                push_integer(dtype, index.into(), &mut expected);
            }
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
fn exact_max(dtype: Dtype) -> Option<i128> {
    let significand_bits = match dtype {
        Dtype::E5m2 => 3,
        Dtype::E4m3 => 4,
        Dtype::Bf16 => 8,
        Dtype::F16 => 11,
        Dtype::F32 => 24,
        Dtype::F64 => 53,
        _ => return None,
    };
    Some(1 << significand_bits)
}

/// Return a value of a rank: for floats as large as lets all ranks' values add up exactly, or, for products, a power
/// of two.
///
/// Beyond `exact_max` ranks (256 of bf16) there is no such value but 0: later ranks give that.
fn value(dtype: Dtype, op: ReduceOp, rank: u32, ranks: u32, index: u64) -> i128 {
    let hash = splitmix64(index ^ (u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    match (op, exact_max(dtype)) {
        (ReduceOp::Prod, Some(_)) => (if rank < 4 && hash & 2 != 0 { 2 } else { 1 }) * (1 - 2 * i128::from(hash & 1)),
        // Odd, or a product of many would be 0.
        (ReduceOp::Prod, None) => wrap(dtype, i128::from(hash | 1)),
        // One in eight is false.
        (ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor, _) if hash & 7 == 0 => 0,
        (_, Some(max)) if i128::from(rank) >= max => 0,
        (_, Some(max)) => {
            let most = (max / i128::from(ranks.max(1))).max(1);
            i128::from(hash) % (2 * most + 1) - most
        }
        (_, None) => wrap(dtype, hash.into()),
    }
}

/// Return an integer as the type holds it, modulo 2^bits.
fn wrap(dtype: Dtype, value: i128) -> i128 {
    let modulus = 1_i128 << (8 * dtype.size_bytes());
    let value = value.rem_euclid(modulus);
    let is_signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
    if is_signed && value >= modulus / 2 { value - modulus } else { value }
}

/// Combine two (value, index).
fn combine(dtype: Dtype, op: ReduceOp, (a, i): (i128, u32), (b, j): (i128, u32)) -> (i128, u32) {
    let value = match op {
        ReduceOp::Prod => a.wrapping_mul(b),
        ReduceOp::Min | ReduceOp::MinLoc => a.min(b),
        ReduceOp::Max | ReduceOp::MaxLoc => a.max(b),
        ReduceOp::Band => a & b,
        ReduceOp::Bor => a | b,
        ReduceOp::Bxor => a ^ b,
        ReduceOp::Land => i128::from(a != 0 && b != 0),
        ReduceOp::Lor => i128::from(a != 0 || b != 0),
        ReduceOp::Lxor => i128::from((a != 0) != (b != 0)),
        _ => a + b,
    };
    let index = match (value == a, value == b) {
        (true, true) => i.min(j),
        (true, false) => i,
        _ => j,
    };
    (if dtype.is_integer() { wrap(dtype, value) } else { value }, index)
}

/// Append the little-endian bytes of a quotient, as the type rounds it; of integers truncated.
fn push(dtype: Dtype, dividend: i128, divisor: u32, bytes: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => bytes.extend((dividend as f32 / divisor as f32).to_le_bytes()),
        Dtype::F64 => bytes.extend((dividend as f64 / f64::from(divisor)).to_le_bytes()),
        _ if dtype.is_integer() => push_integer(dtype, dividend / i128::from(divisor), bytes),
        _ => {
            // Narrow floats: what is checked here is the way of the values, so the kernels may round them.
            let at = bytes.len();
            bytes.resize(at + dtype.size_bytes(), 0);
            if let Some(kernel) = Kernel::new(dtype, ReduceOp::Sum) {
                kernel.store(&mut bytes[at..], &(dividend as f32 / divisor as f32).to_le_bytes(), 1);
            }
        }
    }
}

/// Append an integer as wide as the type.
fn push_integer(dtype: Dtype, value: i128, bytes: &mut Vec<u8>) {
    bytes.extend(&value.to_le_bytes()[..dtype.size_bytes()]);
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

    fn patterns(dtype: Dtype, op: ReduceOp) -> (Vec<Pattern>, Kernel) {
        let patterns = (0..RANKS).map(|rank| Pattern::new(dtype, op, rank, RANKS)).collect();
        (patterns, Kernel::new(dtype, op).expect("they go together"))
    }

    /// Reduce the ranks' buffers with the project's kernels, in the order given.
    fn reduce(patterns: &[Pattern], kernel: Kernel, order: &[usize], iteration: u64) -> Vec<u8> {
        let mut acc = vec![0; COUNT * kernel.accumulator_bytes()];
        for (nth, &rank) in order.iter().enumerate() {
            let mut source = vec![0; COUNT * kernel.element_bytes()];
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
            // Tables take long without optimisation: every operator on an integer and a float, two on every type.
            let is_basic = |op| matches!(op, ReduceOp::Sum | ReduceOp::Prod);
            let has_all = matches!(dtype, Dtype::I16 | Dtype::F32);
            let fits = |op| Kernel::new(dtype, op).is_some() && (has_all || is_basic(op));
            for &op in ReduceOp::ALL.iter().filter(|&&op| fits(op)) {
                let (patterns, kernel) = patterns(dtype, op);
                for order in [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]] {
                    assert_eq!(patterns[1].wrong(&reduce(&patterns, kernel, &order, 9), 9), 0, "{dtype} {op}");
                }
                if is_basic(op) {
                    let missing = reduce(&patterns, kernel, &[0, 1, 2, 4], 9);
                    assert!(patterns[1].wrong(&missing, 9) > COUNT as u64 / 3, "{dtype} {op}: a missing contribution");
                    let stale = reduce(&patterns, kernel, &[0, 1, 2, 3, 4], 8);
                    assert!(patterns[1].wrong(&stale, 9) > COUNT as u64 / 3, "{dtype} {op}: a stale result");
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
        let total: i128 = (0..600).map(|rank| value(Dtype::Bf16, ReduceOp::Sum, rank, 600, 3).abs()).sum();
        assert!(total <= 256 && total > 100, "{total}");
    }
}
