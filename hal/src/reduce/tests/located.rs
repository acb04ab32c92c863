//! Minimum and maximum of {value, index} pairs, compared with an oracle that compares values as numbers.

use super::values::{draw, next};
use super::{Kernel, VERSIONS};
use crate::op::{Dtype, ReduceOp};
use proptest::prelude::*;
use std::cmp::Ordering;

const VALUES: [Dtype; 6] = [Dtype::I32, Dtype::U32, Dtype::F32, Dtype::I64, Dtype::U64, Dtype::F64];

/// Draw pairs with many special values and NaNs and with few different indices, so that ties are frequent.
pub(super) fn pairs(state: &mut u64, dtype: Dtype, len: usize) -> Vec<u8> {
    let size = dtype.size_bytes();
    let values = draw(state, dtype, len);
    let pair = |value: u64| {
        let random = next(state);
        // Sometimes one of the two greatest, which a signed comparison would treat as the smallest.
        let index = if random & 7 == 0 { u64::MAX - (random >> 63) } else { random >> 62 };
        [value.to_le_bytes(), index.to_le_bytes()].map(|bytes| bytes[..size].to_vec()).concat()
    };
    values.into_iter().flat_map(pair).collect()
}

/// A value as a number.
#[derive(Clone, Copy, PartialEq)]
enum Meaning {
    Integer(i128),
    Float(f64),
}

/// Return a pair's value and index, and its bytes with a canonical NaN.
fn read(dtype: Dtype, pair: &[u8]) -> (Meaning, u64, Vec<u8>) {
    let (value, index) = pair.split_at(dtype.size_bytes());
    let four = || value.try_into().expect("4 bytes");
    let eight = || value.try_into().expect("8 bytes");
    let meaning = match dtype {
        Dtype::I32 => Meaning::Integer(i32::from_le_bytes(four()).into()),
        Dtype::U32 => Meaning::Integer(u32::from_le_bytes(four()).into()),
        Dtype::F32 => Meaning::Float(f32::from_le_bytes(four()).into()),
        Dtype::I64 => Meaning::Integer(i64::from_le_bytes(eight()).into()),
        Dtype::U64 => Meaning::Integer(u64::from_le_bytes(eight()).into()),
        _ => Meaning::Float(f64::from_le_bytes(eight())),
    };
    let canonical = match meaning {
        Meaning::Float(x) if x.is_nan() && dtype == Dtype::F32 => 0x7fc0_0000_u32.to_le_bytes().to_vec(),
        Meaning::Float(x) if x.is_nan() => 0x7ff8_0000_0000_0000_u64.to_le_bytes().to_vec(),
        _ => value.to_vec(),
    };
    let wide = index.iter().rev().fold(0, |wide, &byte| wide << 8 | u64::from(byte));
    (meaning, wide, [canonical, index.to_vec()].concat())
}

/// Return the pair that wins, with canonical NaNs.
fn kept(dtype: Dtype, op: ReduceOp, a: &[u8], b: &[u8]) -> Vec<u8> {
    let (x, i, a) = read(dtype, a);
    let (y, j, b) = read(dtype, b);
    let order = match (x, y) {
        (Meaning::Integer(x), Meaning::Integer(y)) => x.cmp(&y),
        (Meaning::Float(x), Meaning::Float(y)) => match (x.is_nan(), y.is_nan()) {
            (true, true) => Ordering::Equal,
            (true, false) => return a,
            (false, true) => return b,
            // -0 < +0.
            _ => x.partial_cmp(&y).expect("numbers").then(y.is_sign_negative().cmp(&x.is_sign_negative())),
        },
        _ => unreachable!("both of one type"),
    };
    let order = if op == ReduceOp::MaxLoc { order.reverse() } else { order };
    if order.then(i.cmp(&j)).is_le() { a } else { b }
}

fn check(dtype: Dtype, op: ReduceOp, len: usize, contributions: &[Vec<u8>]) {
    let kernel = Kernel::new(dtype, op).expect("values of 4 or 8 bytes");
    let size = kernel.element_bytes();
    assert_eq!((size, kernel.accumulator_bytes()), (2 * dtype.size_bytes(), 2 * dtype.size_bytes()));
    let right: Vec<u8> = (0..len)
        .flat_map(|i| {
            let mut each = contributions.iter().map(|bytes| bytes[i * size..][..size].to_vec());
            let first = each.next().expect("a contribution");
            let first = kept(dtype, op, &first, &first);
            each.fold(first, |a, b| kept(dtype, op, &a, &b))
        })
        .collect();
    for version in VERSIONS {
        let what = format!("{} {dtype} {op} x {len}", version.name);
        let mut acc = vec![0; len * size];
        (version.load)(&kernel, &mut acc, &contributions[0], false);
        for (partial, src) in [false, true].into_iter().cycle().zip(&contributions[1..]) {
            (version.combine)(&kernel, &mut acc, src, partial);
        }
        let mut stored = vec![0; acc.len()];
        (version.store)(&kernel, &mut stored, &acc, 3);
        assert!(stored == right, "stored: {what}");
        assert_eq!((version.finish)(&kernel, &mut acc, len, 3), len * size);
        assert!(acc == right, "finished: {what}");
    }
}

proptest! {
    #[test]
    fn random_pairs_match_the_oracle(
        seed: u64,
        dtype in prop::sample::select(&VALUES[..]),
        op in prop::sample::select(&[ReduceOp::MinLoc, ReduceOp::MaxLoc][..]),
        len in 0_usize..300,
        count in 1_usize..5,
    ) {
        let mut state = seed;
        let contributions: Vec<_> = (0..count).map(|_| pairs(&mut state, dtype, len)).collect();
        check(dtype, op, len, &contributions);
    }
}

#[test]
fn pairs_match_golden_values() {
    let kernel = |op| Kernel::new(Dtype::F32, op).expect("supported");
    let keep = |op, a: (f32, u32), b: (f32, u32)| {
        let bytes = |(value, index): (f32, u32)| [value.to_le_bytes(), index.to_le_bytes()].concat();
        let mut acc = bytes(a);
        kernel(op).combine(&mut acc, &bytes(b), false);
        kernel(op).finish(&mut acc, 1, 2);
        let word = |at: usize| u32::from_le_bytes(acc[at..at + 4].try_into().expect("4 bytes"));
        (word(0), word(4))
    };
    for op in [ReduceOp::MinLoc, ReduceOp::MaxLoc] {
        assert_eq!(keep(op, (1.0, 9), (1.0, 4)), (0x3f80_0000, 4), "a tie: the lowest index");
        assert_eq!(keep(op, (f32::NAN, 9), (f32::INFINITY, 4)), (0x7fc0_0000, 9), "NaN wins");
        assert_eq!(keep(op, (f32::NEG_INFINITY, 4), (-f32::NAN, u32::MAX)), (0x7fc0_0000, u32::MAX), "NaN wins");
        assert_eq!(keep(op, (f32::NAN, u32::MAX), (-f32::NAN, 1)), (0x7fc0_0000, 1), "of NaNs the lowest index");
    }
    assert_eq!(keep(ReduceOp::MinLoc, (0.0, 1), (-0.0, 2)), (0x8000_0000, 2), "-0 < +0");
    assert_eq!(keep(ReduceOp::MaxLoc, (-0.0, 1), (0.0, 2)), (0, 2), "-0 < +0");
    assert_eq!(keep(ReduceOp::MinLoc, (2.0, 1), (-2.0, 2)), (0xc000_0000, 2));
    assert_eq!(keep(ReduceOp::MaxLoc, (2.0, 1), (-2.0, 2)), (0x4000_0000, 1));
}
