//! Every element type and operator in every compiled version, compared with [`oracle`] and with golden values computed
//! by hand. The conversions are also compared with the `half` crate.

mod convert;
mod laws;
mod located;
mod oracle;
mod scale;
mod values;

use super::epilogue::Scale;
use super::{Kernel, dispatch, modulo_2_64};
use crate::op::{Dtype, ReduceOp};
use oracle::Format;
use proptest::prelude::*;
use values::{bytes_of, draw, specials, values_of};

/// A kernel's methods, in one compiled version.
struct Version {
    name: &'static str,
    load: fn(&Kernel, &mut [u8], &[u8], bool),
    combine: fn(&Kernel, &mut [u8], &[u8], bool),
    finish: fn(&Kernel, &mut [u8], usize, u32) -> usize,
    store: fn(&Kernel, &mut [u8], &[u8], u32),
    scale: fn(&Kernel, &mut [u8], &[u8], f64),
}

macro_rules! version {
    ($name:literal, $($path:ident)::*) => {
        Version {
            name: $name,
            load: |kernel, acc, src, partial| {
                if kernel.source(partial) == kernel.accumulator() {
                    acc.copy_from_slice(src);
                }
                $($path)::*::load(kernel.source(partial), acc, src);
            },
            combine: |kernel, acc, src, partial| $($path)::*::combine(kernel.source(partial), kernel.op(), acc, src),
            finish: |kernel, bytes, count, ranks| {
                let len = count * kernel.element_bytes();
                if len == bytes.len() {
                    $($path)::*::finish(kernel.dtype(), kernel.op(), ranks, bytes);
                } else {
                    let acc = bytes.to_vec();
                    $($path)::*::store(kernel.dtype(), kernel.op(), ranks, &mut bytes[..len], &acc);
                }
                len
            },
            store: |kernel, dst, acc, ranks| {
                if dst.len() == acc.len() {
                    dst.copy_from_slice(acc);
                    $($path)::*::finish(kernel.dtype(), kernel.op(), ranks, dst);
                } else {
                    $($path)::*::store(kernel.dtype(), kernel.op(), ranks, dst, acc);
                }
            },
            scale: |kernel, dst, src, scalar| {
                let scale = Scale { float: scalar, integer: modulo_2_64(scalar).unwrap_or(0) };
                $($path)::*::scale(kernel.dtype(), scale, dst, src);
            },
        }
    };
}

/// The version for the build's target and, with `std`, those for the processor. On one with AVX-512 these are three
/// different versions of the machine code.
const VERSIONS: &[Version] = &[
    version!("portable", dispatch::portable),
    Version {
        name: "public",
        load: Kernel::load,
        combine: Kernel::combine,
        finish: Kernel::finish,
        store: Kernel::store,
        scale: |kernel, dst, src, scalar| kernel.scale(dst, src, scalar).expect("a scalar of the type"),
    },
    #[cfg(feature = "std")]
    version!("without AVX-512", dispatch::avx2),
];

fn kernels() -> impl Iterator<Item = Kernel> {
    Dtype::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().filter_map(move |&op| Kernel::new(dtype, op)))
}

/// The kernels whose elements are values; [`located`] tests those on pairs.
fn plain_kernels() -> Vec<Kernel> {
    kernels().filter(|kernel| !kernel.op().is_located()).collect()
}

/// The type of a contribution's elements, by PROTOCOL 9.
fn source(kernel: Kernel, partial: bool) -> Dtype {
    if partial { kernel.dtype().accumulator() } else { kernel.dtype() }
}

/// Normalize an accumulator for comparison: all NaNs are equal until they are rounded, and logical values are 0 or 1.
fn canonical(kernel: Kernel, bits: u64) -> u64 {
    if matches!(kernel.op(), ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor) {
        return u64::from(bits != 0);
    }
    Format::of(kernel.accumulator()).filter(|format| format.is_nan(bits)).map_or(bits, Format::nan)
}

/// Reduce the contributions with the oracle, element by element, and return accumulators and results.
fn expected(kernel: Kernel, contributions: &[(Vec<u64>, bool)], ranks: u32) -> (Vec<u64>, Vec<u64>) {
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
    let results = sums.iter().map(|&bits| oracle::finish(kernel.dtype(), kernel.op(), ranks, bits)).collect();
    (sums.into_iter().map(|bits| canonical(kernel, bits)).collect(), results)
}

/// Reduce the contributions with each version, at these offsets from an aligned address, and compare.
fn check(kernel: Kernel, contributions: &[(Vec<u64>, bool)], ranks: u32, acc_offset: usize, src_offset: usize) {
    const GUARD: u8 = 0xa5;
    let (sums, results) = expected(kernel, contributions, ranks);
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
        let got: Vec<u64> = got.into_iter().map(|bits| canonical(kernel, bits)).collect();
        assert_eq!(got, sums, "accumulators: {what}");

        let result_len = sums.len() * kernel.dtype().size_bytes();
        let mut stored = vec![GUARD; src_offset + result_len];
        (version.store)(&kernel, &mut stored[src_offset..], acc, ranks);
        assert_eq!(values_of(kernel.dtype(), &stored[src_offset..]), results, "stored: {what}");
        assert_eq!((version.finish)(&kernel, acc, sums.len(), ranks), result_len);
        assert_eq!(values_of(kernel.dtype(), &acc[..result_len]), results, "finished: {what}");
        assert!(head.iter().chain(&*tail).all(|&byte| byte == GUARD), "wrote outside of the accumulators: {what}");
    }
}

/// Combines every special value with every other, as elements and as partial results, in both orders.
#[test]
fn every_pair_of_special_values_matches_the_oracle() {
    for (kernel, ranks) in plain_kernels().into_iter().zip([2, 3, 7, 1, 640_000].into_iter().cycle()) {
        for partial in [false, true] {
            let all = specials(source(kernel, partial));
            let (a, b): (Vec<u64>, Vec<u64>) = all.iter().flat_map(|&a| all.iter().map(move |&b| (a, b))).unzip();
            let forwards = [(a.clone(), partial), (b.clone(), partial)];
            let backwards = [(b, partial), (a, partial)];
            assert_eq!(expected(kernel, &forwards, ranks), expected(kernel, &backwards, ranks), "the oracle commutes");
            check(kernel, &forwards, ranks, 0, 0);
            check(kernel, &backwards, ranks, 0, 0);
        }
    }
}

/// Lengths with every remainder after whole vectors, at unaligned addresses.
#[test]
fn every_length_and_alignment_matches_the_oracle() {
    let mut state = 1;
    for kernel in plain_kernels() {
        for len in (0..=17).chain(30..=34).chain(62..=67).chain(126..=131).chain([255, 511, 513]) {
            let contributions =
                [false, true, false].map(|partial| (draw(&mut state, source(kernel, partial), len), partial));
            check(kernel, &contributions, 3, len % 7, (len + 3) % 5);
        }
    }
}

proptest! {
    /// Long reductions of elements and partial results, in all versions.
    #[test]
    fn random_reductions_match_the_oracle(
        seed: u64,
        kernel in prop::sample::select(plain_kernels()),
        len in 0_usize..3000,
        partials in prop::collection::vec(any::<bool>(), 1..6),
        ranks in prop_oneof![1_u32..300, Just(65_535), Just(65_536), Just(1 << 17), 1_u32..1 << 31],
        acc_offset in 0_usize..64,
        src_offset in 0_usize..64,
    ) {
        let mut state = seed;
        let contributions: Vec<_> =
            partials.iter().map(|&partial| (draw(&mut state, source(kernel, partial), len), partial)).collect();
        // f32 averages divide by the number of ranks rounded to f32, which is exact up to 2^24.
        let ranks = if kernel.accumulator() == Dtype::F32 { ranks as f32 as u32 } else { ranks };
        check(kernel, &contributions, ranks, acc_offset, src_offset);
    }
}

/// Reduce contributions of one element each, in place and out of place, and return the bits.
fn reduce(dtype: Dtype, op: ReduceOp, contributions: &[u64]) -> u64 {
    let kernel = Kernel::new(dtype, op).expect("supported");
    let ranks = contributions.len() as u32;
    let mut acc = vec![0xff; kernel.accumulator().size_bytes()];
    for (i, &bits) in contributions.iter().enumerate() {
        let step = if i == 0 { Kernel::load } else { Kernel::combine };
        step(&kernel, &mut acc, &bytes_of(dtype, &[bits]), false);
    }
    let mut stored = vec![0xff; dtype.size_bytes()];
    kernel.store(&mut stored, &acc, ranks);
    assert_eq!(kernel.finish(&mut acc, 1, ranks), stored.len());
    assert_eq!(acc[..stored.len()], stored);
    values_of(dtype, &stored)[0]
}

#[test]
fn sums_match_golden_values() {
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
    assert_eq!(sum(Dtype::I8, &[0x7f, 1]), 0x80, "wraps in its own type");
    assert_eq!(sum(Dtype::U16, &[0xffff, 2]), 1, "wraps in its own type");
    assert_eq!(sum(Dtype::E4m3, &[0x7e, 0x58]), 0x7e, "448 + 16 is a tie, and goes to even");
    assert_eq!(sum(Dtype::E4m3, &[0x7e, 0x59]), 0x7f, "448 + 18 is beyond the range: NaN");
    assert_eq!(sum(Dtype::E4m3, &[0xfe, 0xfe]), 0x7f, "-448 - 448: NaN, whose sign is lost");
    assert_eq!(sum(Dtype::E4m3, &[0x7e, 0x7e, 0xfe]), 0x7e, "no overflow on the way");
    assert_eq!(sum(Dtype::E4m3, &[0x01, 0x07]), 0x08, "2^-9 + 7 x 2^-9: from subnormal to normal");
    assert_eq!(sum(Dtype::E5m2, &[0x7b, 0x6b]), 0x7b, "57344 + 3584 stays finite");
    assert_eq!(sum(Dtype::E5m2, &[0x7b, 0x6c]), 0x7c, "57344 + 4096 is a tie, and even is infinity");
    assert_eq!(sum(Dtype::E5m2, &[0x7c, 0xfc]), 0x7e, "inf - inf");
}

#[test]
fn averages_match_golden_values() {
    let average = |dtype, contributions: &[u64]| reduce(dtype, ReduceOp::Avg, contributions);
    assert_eq!(average(Dtype::I32, &[7, 0]), 3, "truncated");
    assert_eq!(average(Dtype::I32, &[-7_i32 as u32 as u64, 0]), -3_i32 as u32 as u64, "towards zero");
    assert_eq!(average(Dtype::I8, &[0x7f, 1]), 0xc0, "127 + 1 wraps to -128, of which half is -64");
    assert_eq!(average(Dtype::U8, &[0xff, 1]), 0, "255 + 1 wraps to 0");
    assert_eq!(average(Dtype::F32, &[0x3f80_0000, 0x4000_0000, 0x4000_0000]), 0x3fd5_5555, "5/3");
    assert_eq!(average(Dtype::Bf16, &[0x3f80, 0x3f80]), 0x3f80, "(1 + 1) / 2");
    assert_eq!(average(Dtype::F16, &[0x7bff, 0x7bff]), 0x7bff, "the sum is beyond f16, the average is not");
    assert_eq!(average(Dtype::E4m3, &[0x7e, 0x7e, 0x7e]), 0x7e, "448");
}

#[test]
fn products_match_golden_values() {
    let product = |dtype, contributions: &[u64]| reduce(dtype, ReduceOp::Prod, contributions);
    assert_eq!(product(Dtype::I8, &[0x80, 0xff]), 0x80, "-128 x -1 wraps");
    assert_eq!(product(Dtype::U64, &[u64::MAX, u64::MAX]), 1, "-1 x -1 modulo 2^64");
    assert_eq!(product(Dtype::F32, &[0x8000_0000, 0x3f80_0000]), 0x8000_0000, "-0 x 1");
    assert_eq!(product(Dtype::F32, &[0x7f80_0000, 0]), 0x7fc0_0000, "inf x 0");
    assert_eq!(product(Dtype::F16, &[0x5c00, 0x5c00, 0x1400]), 0x5400, "256 x 256 x 2^-10 = 64, by way of 65,536");
    assert_eq!(product(Dtype::E4m3, &[0x58, 0x58, 0x30]), 0x70, "16 x 16 x 0.5");
}

#[test]
fn logical_operators_match_golden_values() {
    let one = |op, value| reduce(Dtype::I16, op, &[value]);
    assert_eq!(one(ReduceOp::Land, 5), 1, "a single contribution becomes 0 or 1 too");
    assert_eq!(one(ReduceOp::Lor, 0x8000), 1);
    assert_eq!(one(ReduceOp::Lxor, 0), 0);
    assert_eq!(reduce(Dtype::U8, ReduceOp::Land, &[2, 1]), 1, "2 and 1 are both true, although 2 & 1 is 0");
    assert_eq!(reduce(Dtype::U8, ReduceOp::Lxor, &[2, 1]), 0, "so their exclusive or is false");
    assert_eq!(reduce(Dtype::U8, ReduceOp::Lxor, &[2, 1, 4]), 1);
    assert_eq!(reduce(Dtype::U8, ReduceOp::Band, &[6, 3]), 2);
}

#[test]
fn unsupported_combinations_have_a_reason_and_advice() {
    for &dtype in Dtype::ALL {
        for &op in ReduceOp::ALL {
            let why = Kernel::unsupported_reason(dtype, op);
            assert_eq!(Kernel::new(dtype, op).is_none(), why.is_some(), "{dtype} {op}");
            assert!(why.is_none_or(|why| why.contains("; ")), "no advice for {dtype} {op}");
        }
    }
    assert_eq!(kernels().count(), 14 * 6 + 8 * 6 + 6 * 2);
    assert_eq!(Kernel::new(Dtype::F32, ReduceOp::Band), None);
    assert_eq!(Kernel::new(Dtype::Bf16, ReduceOp::Lor), None);
    assert_eq!(Kernel::new(Dtype::U16, ReduceOp::MinLoc), None);
    assert!(Kernel::new(Dtype::U32, ReduceOp::MinLoc).is_some());
}

#[test]
fn minima_and_maxima_match_golden_values() {
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
fn finish_leaves_bytes_after_the_accumulators_unchanged() {
    // Non-canonical NaNs, which would change if they were rounded too.
    let tail = 0xffa0_0001_u32.to_le_bytes().repeat(4);
    for (dtype, result) in [(Dtype::F32, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0x40][..]), (Dtype::Bf16, &[0x80, 0x3f, 0, 0x40])]
    {
        let kernel = Kernel::new(dtype, ReduceOp::Sum).expect("supported");
        let mut bytes = [&1.0_f32.to_le_bytes(), &2.0_f32.to_le_bytes(), &tail[..]].concat();
        assert_eq!(kernel.finish(&mut bytes, 2, 1), result.len());
        assert_eq!(bytes[..result.len()], *result);
        assert_eq!(bytes[8..], tail);
    }
}

#[test]
fn count_is_in_elements_of_the_source() {
    let kernel = Kernel::new(Dtype::Bf16, ReduceOp::Sum).expect("supported");
    assert_eq!(kernel.count(6, false), Some(3));
    assert_eq!(kernel.count(6, true), None);
    assert_eq!(kernel.count(7, false), None);
    assert_eq!(kernel.count(0, true), Some(0));
}

#[test]
#[should_panic(expected = "8 bytes of f32 accumulators and 6 bytes of bf16 are not equally many elements")]
fn combine_panics_if_source_is_longer() {
    let kernel = Kernel::new(Dtype::Bf16, ReduceOp::Sum).expect("supported");
    kernel.combine(&mut [0; 8], &[0; 6], false);
}

#[test]
#[should_panic(expected = "8 bytes of f32 accumulators and 2 bytes of bf16 are not equally many elements")]
fn combine_panics_if_source_is_shorter() {
    let kernel = Kernel::new(Dtype::Bf16, ReduceOp::Sum).expect("supported");
    kernel.combine(&mut [0; 8], &[0; 2], false);
}

#[test]
#[should_panic(expected = "2 bytes of f32 are not equally many")]
fn load_panics_on_half_an_element() {
    let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
    kernel.load(&mut [0; 2], &[0; 2], false);
}

#[test]
#[should_panic(expected = "3 f64 accumulators do not fit 23 bytes")]
fn finish_panics_if_buffer_is_too_short() {
    let kernel = Kernel::new(Dtype::F64, ReduceOp::Max).expect("supported");
    kernel.finish(&mut [0; 23], 3, 1);
}

/// Averages multiply by a reciprocal. Tests all 16-bit integers with many numbers of ranks, and 32-bit integers whose
/// quotients are whole or just not.
#[test]
fn averages_of_integers_are_exact() {
    let average = |dtype: Dtype, values: &[u64], ranks: u32| {
        let kernel = Kernel::new(dtype, ReduceOp::Avg).expect("every type has averages");
        let mut acc = bytes_of(dtype, values);
        kernel.finish(&mut acc, values.len(), ranks);
        let right: Vec<u64> = values.iter().map(|&bits| oracle::finish(dtype, ReduceOp::Avg, ranks, bits)).collect();
        assert_eq!(values_of(dtype, &acc), right, "{dtype} / {ranks}");
    };
    let all: Vec<u64> = (0..=0xffff).collect();
    for ranks in (1..40).chain([127, 255, 256, 257, 1000, 32_767, 32_768, 32_769, 65_535, 65_536, 131_071, 1 << 31]) {
        average(Dtype::I16, &all, ranks);
        average(Dtype::U16, &all, ranks);
        let mut state = u64::from(ranks);
        let near = |offset: i64| {
            let quotients = (0..400).map(|_| values::next(&mut state) % (u64::from(u32::MAX) / u64::from(ranks) + 1));
            quotients.map(|q| (q * u64::from(ranks)).wrapping_add_signed(offset) & 0xffff_ffff).collect::<Vec<_>>()
        };
        for values in [-1, 0, 1].map(near) {
            average(Dtype::I32, &values, ranks);
            average(Dtype::U32, &values, ranks);
        }
    }
}
