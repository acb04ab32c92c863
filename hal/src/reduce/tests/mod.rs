//! Every element type and operator, in every compiled version, against [`oracle`]; the conversions against the
//! `half` crate too; and golden values worked out by hand.

mod convert;
mod oracle;
mod values;

use super::{Kernel, dispatch};
use crate::op::{Dtype, ReduceOp};
use oracle::Format;
use proptest::prelude::*;
use values::{bytes_of, draw, specials, values_of};

/// A kernel's methods, in one compiled version.
struct Version {
    name: &'static str,
    load: fn(&Kernel, &mut [u8], &[u8], bool),
    combine: fn(&Kernel, &mut [u8], &[u8], bool),
    finish: fn(&Kernel, &mut [u8], usize) -> usize,
    store: fn(&Kernel, &mut [u8], &[u8]),
}

macro_rules! version {
    ($name:literal, $($path:ident)::*) => {
        Version {
            name: $name,
            load: |kernel, acc, src, partial| $($path)::*::load(kernel.source(partial), acc, src),
            combine: |kernel, acc, src, partial| $($path)::*::combine(kernel.source(partial), kernel.op(), acc, src),
            finish: |kernel, bytes, count| {
                $($path)::*::finish(kernel.dtype(), bytes);
                count * kernel.dtype().size_bytes()
            },
            store: |kernel, dst, acc| $($path)::*::store(kernel.dtype(), dst, acc),
        }
    };
}

/// What the build's target features give, and, with `std`, what the processor can do: on one with AVX-512 that is
/// three different pieces of machine code.
const VERSIONS: &[Version] = &[
    version!("portable", dispatch::portable),
    Version {
        name: "public",
        load: Kernel::load,
        combine: Kernel::combine,
        finish: Kernel::finish,
        store: Kernel::store,
    },
    #[cfg(feature = "std")]
    version!("without AVX-512", dispatch::avx2),
];

fn kernels() -> impl Iterator<Item = Kernel> {
    Dtype::ALL.iter().flat_map(|&dtype| {
        ReduceOp::ALL.iter().map(move |&op| Kernel::new(dtype, op).expect("every pair is supported"))
    })
}

/// The type of a contribution's elements, by PROTOCOL 9.
fn source(kernel: Kernel, partial: bool) -> Dtype {
    if partial { kernel.dtype().accumulator() } else { kernel.dtype() }
}

/// The one way to look at bits: a NaN is a NaN until it is rounded.
fn canonical(dtype: Dtype, bits: u64) -> u64 {
    Format::of(dtype).filter(|format| format.is_nan(bits)).map_or(bits, Format::nan)
}

/// Reduce the contributions element by element with the oracle; return accumulators and rounded elements.
fn expected(kernel: Kernel, contributions: &[(Vec<u64>, bool)]) -> (Vec<u64>, Vec<u64>) {
    let acc = kernel.accumulator();
    let widened = |(values, partial): &(Vec<u64>, bool)| -> Vec<u64> {
        values.iter().map(|&bits| oracle::widen(source(kernel, *partial), bits)).collect()
    };
    let mut sums = widened(&contributions[0]);
    for contribution in &contributions[1..] {
        for (sum, value) in sums.iter_mut().zip(widened(contribution)) {
            *sum = oracle::apply(acc, kernel.op(), *sum, value);
        }
    }
    let rounded = sums.iter().map(|&bits| oracle::round(kernel.dtype(), bits)).collect();
    (sums, rounded)
}

/// Reduce the contributions with each version, at the given offsets from an aligned address, and compare.
fn check(kernel: Kernel, contributions: &[(Vec<u64>, bool)], acc_offset: usize, src_offset: usize) {
    const GUARD: u8 = 0xa5;
    let (sums, rounded) = expected(kernel, contributions);
    let acc_len = sums.len() * kernel.accumulator().size_bytes();
    for version in VERSIONS {
        let what = format!("{} {} {} x {}", version.name, kernel.dtype(), kernel.op(), sums.len());
        let mut buffer = vec![GUARD; acc_offset + acc_len + 8];
        let (head, rest) = buffer.split_at_mut(acc_offset);
        let (acc, tail) = rest.split_at_mut(acc_len);
        for (i, (values, partial)) in contributions.iter().enumerate() {
            let mut src = vec![GUARD; src_offset];
            src.extend(bytes_of(source(kernel, *partial), values));
            let step = if i == 0 { version.load } else { version.combine };
            step(&kernel, acc, &src[src_offset..], *partial);
        }
        let got = values_of(kernel.accumulator(), acc);
        let got: Vec<u64> = got.into_iter().map(|bits| canonical(kernel.accumulator(), bits)).collect();
        assert_eq!(got, sums, "accumulators: {what}");

        let result_len = sums.len() * kernel.dtype().size_bytes();
        let mut stored = vec![GUARD; src_offset + result_len];
        (version.store)(&kernel, &mut stored[src_offset..], acc);
        assert_eq!(values_of(kernel.dtype(), &stored[src_offset..]), rounded, "stored: {what}");
        assert_eq!((version.finish)(&kernel, acc, sums.len()), result_len);
        assert_eq!(values_of(kernel.dtype(), &acc[..result_len]), rounded, "finished: {what}");
        assert!(head.iter().chain(&*tail).all(|&byte| byte == GUARD), "wrote outside of the accumulators: {what}");
    }
}

/// Every special value with every other, as elements and as partials, in both orders.
#[test]
fn special_values_meet_each_other() {
    for kernel in kernels() {
        for partial in [false, true] {
            let all = specials(source(kernel, partial));
            let (a, b): (Vec<u64>, Vec<u64>) = all.iter().flat_map(|&a| all.iter().map(move |&b| (a, b))).unzip();
            let forwards = [(a.clone(), partial), (b.clone(), partial)];
            let backwards = [(b, partial), (a, partial)];
            assert_eq!(expected(kernel, &forwards), expected(kernel, &backwards), "the oracle commutes");
            check(kernel, &forwards, 0, 0);
            check(kernel, &backwards, 0, 0);
        }
    }
}

/// Whole vectors, what is left behind them, and addresses that no vector is aligned to.
#[test]
fn every_length_at_odd_addresses() {
    let mut state = 1;
    for kernel in kernels() {
        for len in 0..=130 {
            let contributions =
                [false, true, false].map(|partial| (draw(&mut state, source(kernel, partial), len), partial));
            check(kernel, &contributions, len % 7, (len + 3) % 5);
        }
    }
}

proptest! {
    /// Long random reductions, elements and partials mixed, in all versions.
    #[test]
    fn random_reductions(
        seed: u64,
        which in 0..Dtype::ALL.len() * ReduceOp::ALL.len(),
        len in 0_usize..3000,
        partials in prop::collection::vec(any::<bool>(), 1..6),
        acc_offset in 0_usize..64,
        src_offset in 0_usize..64,
    ) {
        let kernel = kernels().nth(which).expect("in range");
        let mut state = seed;
        let contributions: Vec<_> =
            partials.iter().map(|&partial| (draw(&mut state, source(kernel, partial), len), partial)).collect();
        check(kernel, &contributions, acc_offset, src_offset);
    }
}

/// Reduce contributions of one element each, in place and out of place; return the bits.
fn reduce(dtype: Dtype, op: ReduceOp, contributions: &[u64]) -> u64 {
    let kernel = Kernel::new(dtype, op).expect("every pair is supported");
    let mut acc = vec![0xff; kernel.accumulator().size_bytes()];
    for (i, &bits) in contributions.iter().enumerate() {
        let step = if i == 0 { Kernel::load } else { Kernel::combine };
        step(&kernel, &mut acc, &bytes_of(dtype, &[bits]), false);
    }
    let mut stored = vec![0xff; dtype.size_bytes()];
    kernel.store(&mut stored, &acc);
    assert_eq!(kernel.finish(&mut acc, 1), stored.len());
    assert_eq!(acc[..stored.len()], stored);
    values_of(dtype, &stored)[0]
}

#[test]
fn golden_sums() {
    let sum = |dtype, contributions: &[u64]| reduce(dtype, ReduceOp::Sum, contributions);
    assert_eq!(sum(Dtype::I32, &[0x7fff_ffff, 1]), 0x8000_0000, "wraps");
    assert_eq!(sum(Dtype::I64, &[u64::MAX, 1]), 0, "-1 + 1");
    assert_eq!(sum(Dtype::F32, &[0x8000_0000]), 0x8000_0000, "a lone -0 is copied");
    assert_eq!(sum(Dtype::F32, &[0x8000_0000, 0x8000_0000]), 0x8000_0000, "-0 + -0");
    assert_eq!(sum(Dtype::F32, &[0x0000_0001, 0x0000_0001]), 0x0000_0002, "subnormals are kept");
    assert_eq!(sum(Dtype::F32, &[0x0080_0000, 0x8000_0001]), 0x007f_ffff, "a subnormal difference of normals is kept");
    assert_eq!(sum(Dtype::F32, &[0xffa0_0001]), 0x7fc0_0000, "a lone signalling NaN");
    assert_eq!(sum(Dtype::F32, &[0x7f80_0000, 0xff80_0000]), 0x7fc0_0000, "inf - inf");
    assert_eq!(sum(Dtype::F32, &[0x7f7f_ffff, 0x7f7f_ffff]), 0x7f80_0000, "overflow");
    assert_eq!(sum(Dtype::F64, &[0x3ff0_0000_0000_0000, 0x3ca0_0000_0000_0000]), 0x3ff0_0000_0000_0000, "1 + 2^-53");
    assert_eq!(sum(Dtype::Bf16, &[0x4380, 0x3f80, 0x3f80]), 0x4381, "256 + 1 + 1 = 258; rounding twice gives 256");
    assert_eq!(sum(Dtype::F16, &[0x6800, 0x3c00, 0x3c00]), 0x6801, "2048 + 1 + 1 = 2050; rounding twice gives 2048");
    assert_eq!(sum(Dtype::F16, &[0x7bff, 0x4b80]), 0x7bff, "65504 + 15 stays finite");
    assert_eq!(sum(Dtype::F16, &[0x7bff, 0x4c00]), 0x7c00, "65504 + 16 is a tie, and even is infinity");
    assert_eq!(sum(Dtype::F16, &[0x7bff, 0x7bff, 0xfbff]), 0x7bff, "no overflow on the way");
    assert_eq!(sum(Dtype::F16, &[0xfc01]), 0x7e00, "a lone negative signalling NaN");
    assert_eq!(sum(Dtype::Bf16, &[0xff81]), 0x7fc0, "a lone negative signalling NaN");
}

#[test]
fn golden_extremes() {
    let f64s = |op, a: f64, b: f64| reduce(Dtype::F64, op, &[a.to_bits(), b.to_bits()]);
    for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
        assert_eq!(f64s(ReduceOp::Min, a, b), 0x8000_0000_0000_0000);
        assert_eq!(f64s(ReduceOp::Max, a, b), 0);
    }
    for (a, b) in [(f64::NAN, f64::NEG_INFINITY), (f64::INFINITY, -f64::NAN)] {
        assert_eq!(f64s(ReduceOp::Min, a, b), 0x7ff8_0000_0000_0000);
        assert_eq!(f64s(ReduceOp::Max, a, b), 0x7ff8_0000_0000_0000);
    }
    let i64s = |op, a: i64, b: i64| reduce(Dtype::I64, op, &[a as u64, b as u64]) as i64;
    assert_eq!(i64s(ReduceOp::Min, -1, 1), -1);
    assert_eq!(i64s(ReduceOp::Max, i64::MIN, -1), -1);
}

#[test]
fn finish_leaves_what_lies_behind() {
    // NaNs that rounding would change, as many as would reach into the bytes behind if they were rounded too.
    let behind = 0xffa0_0001_u32.to_le_bytes().repeat(4);
    for (dtype, result) in [(Dtype::F32, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0x40][..]), (Dtype::Bf16, &[0x80, 0x3f, 0, 0x40])]
    {
        let kernel = Kernel::new(dtype, ReduceOp::Sum).expect("every pair is supported");
        let mut bytes = [&1.0_f32.to_le_bytes(), &2.0_f32.to_le_bytes(), &behind[..]].concat();
        assert_eq!(kernel.finish(&mut bytes, 2), result.len());
        assert_eq!(bytes[..result.len()], *result);
        assert_eq!(bytes[8..], behind);
    }
}

#[test]
fn lengths_are_counted_in_elements_of_the_source() {
    let kernel = Kernel::new(Dtype::Bf16, ReduceOp::Sum).expect("supported");
    assert_eq!(kernel.count(6, false), Some(3));
    assert_eq!(kernel.count(6, true), None);
    assert_eq!(kernel.count(7, false), None);
    assert_eq!(kernel.count(0, true), Some(0));
}

#[test]
#[should_panic(expected = "8 bytes of f32 accumulators and 6 bytes of bf16 are not equally many elements")]
fn combine_refuses_more_elements() {
    let kernel = Kernel::new(Dtype::Bf16, ReduceOp::Sum).expect("supported");
    kernel.combine(&mut [0; 8], &[0; 6], false);
}

#[test]
#[should_panic(expected = "8 bytes of f32 accumulators and 2 bytes of bf16 are not equally many elements")]
fn combine_refuses_fewer_elements() {
    let kernel = Kernel::new(Dtype::Bf16, ReduceOp::Sum).expect("supported");
    kernel.combine(&mut [0; 8], &[0; 2], false);
}

#[test]
#[should_panic(expected = "2 bytes of f32 are not equally many")]
fn load_refuses_half_an_element() {
    let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
    kernel.load(&mut [0; 2], &[0; 2], false);
}

#[test]
#[should_panic(expected = "3 f64 accumulators do not fit 23 bytes")]
fn finish_refuses_a_short_buffer() {
    let kernel = Kernel::new(Dtype::F64, ReduceOp::Max).expect("supported");
    kernel.finish(&mut [0; 23], 3);
}
