//! Conversions of the narrow floats, exhaustive where possible, compared with the oracle and, for f16 and bf16, with
//! the `half` crate. `tests/mldtypes` compares fp8 and bf16 with ml_dtypes.

use super::super::narrow::{
    BF16_NAN, E4M3_NAN, E5M2_NAN, F16_NAN, bf16_to_f32, e4m3_to_f32, e5m2_to_f32, f16_to_f32, f32_to_bf16, f32_to_e4m3,
    f32_to_e5m2, f32_to_f16,
};
use super::oracle;
use crate::op::Dtype;
use half::{bf16, f16};

/// Round with `half`, whose NaNs keep their payload.
fn half_f16(value: f32) -> u16 {
    if value.is_nan() { F16_NAN } else { f16::from_f32(value).to_bits() }
}

fn half_bf16(value: f32) -> u16 {
    if value.is_nan() { BF16_NAN } else { bf16::from_f32(value).to_bits() }
}

fn check_rounding(bits: u32) {
    let value = f32::from_bits(bits);
    assert_eq!(f32_to_f16(value), half_f16(value), "f16 of {bits:#010x}");
    assert_eq!(f32_to_bf16(value), half_bf16(value), "bf16 of {bits:#010x}");
}

/// Like [`check_rounding`], and also compare with the oracle, which is slow.
fn check_rounding_with_oracle(bits: u32) {
    check_rounding(bits);
    let value = f32::from_bits(bits);
    assert_eq!(u64::from(f32_to_f16(value)), oracle::round(Dtype::F16, bits.into()), "f16 of {bits:#010x}");
    assert_eq!(u64::from(f32_to_bf16(value)), oracle::round(Dtype::Bf16, bits.into()), "bf16 of {bits:#010x}");
}

#[test]
fn every_16_bit_value_widens_exactly_and_rounds_back() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
        if half.is_nan() {
            assert!(f16_to_f32(bits).is_nan(), "f16 {bits:#06x}");
            assert_eq!(f32_to_f16(f16_to_f32(bits)), F16_NAN, "f16 {bits:#06x}");
        } else {
            assert_eq!(f16_to_f32(bits).to_bits(), half.to_f32().to_bits(), "f16 {bits:#06x}");
            assert_eq!(
                u64::from(f16_to_f32(bits).to_bits()),
                oracle::widen(Dtype::F16, bits.into()),
                "f16 {bits:#06x}"
            );
            assert_eq!(f32_to_f16(f16_to_f32(bits)), bits);
        }
        if brain.is_nan() {
            assert!(bf16_to_f32(bits).is_nan(), "bf16 {bits:#06x}");
            assert_eq!(f32_to_bf16(bf16_to_f32(bits)), BF16_NAN, "bf16 {bits:#06x}");
        } else {
            assert_eq!(bf16_to_f32(bits).to_bits(), brain.to_f32().to_bits(), "bf16 {bits:#06x}");
            assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits);
        }
    }
}

/// Tests the f32 half-way between each 16-bit value and the next, and its neighbours.
#[test]
fn sixteen_bit_ties_round_to_even_and_neighbours_to_nearest() {
    for bits in 0..=u16::MAX {
        let next = bits.wrapping_add(1);
        for (value, after) in [(f16_to_f32(bits), f16_to_f32(next)), (bf16_to_f32(bits), bf16_to_f32(next))] {
            // The sum is exact in f64, and its half in f32, unless bf16 overflows; then any value serves.
            let tie = ((f64::from(value) + f64::from(after)) / 2.0) as f32;
            for near in [tie.to_bits().wrapping_sub(1), tie.to_bits(), tie.to_bits().wrapping_add(1)] {
                check_rounding_with_oracle(near);
            }
        }
    }
}

/// Samples all exponents and, with an odd step, all residues of the low bits.
#[test]
fn rounding_agrees_with_half_across_f32() {
    for bits in (0..=u32::MAX).step_by(2053) {
        check_rounding(bits);
    }
}

#[test]
fn every_8_bit_value_widens_exactly_and_rounds_back() {
    for bits in 0..=u8::MAX {
        for (dtype, nan, value) in
            [(Dtype::E4m3, E4M3_NAN, e4m3_to_f32(bits)), (Dtype::E5m2, E5M2_NAN, e5m2_to_f32(bits))]
        {
            let back = if dtype == Dtype::E4m3 { f32_to_e4m3(value) } else { f32_to_e5m2(value) };
            let right = f32::from_bits(oracle::widen(dtype, bits.into()) as u32);
            if right.is_nan() {
                assert!(value.is_nan() && back == nan, "{dtype} {bits:#04x}");
            } else {
                assert_eq!((value.to_bits(), back), (right.to_bits(), bits), "{dtype} {bits:#04x}");
            }
        }
    }
    // The limits in the specification's table.
    assert_eq!(e4m3_to_f32(0x7e), 448.0);
    assert_eq!(e4m3_to_f32(0x01), 1.0 / 512.0);
    assert!(e4m3_to_f32(0xff).is_nan());
    assert_eq!(e5m2_to_f32(0x7b), 57_344.0);
    assert_eq!(e5m2_to_f32(0x01), 1.0 / 65_536.0);
    assert_eq!(e5m2_to_f32(0xfc), f32::NEG_INFINITY);
}

/// Tests the f32 half-way between each 8-bit value and the next, its neighbours, and values beyond the greatest.
#[test]
fn eight_bit_ties_round_to_even_and_other_values_to_nearest() {
    let check = |bits: u32| {
        let value = f32::from_bits(bits);
        assert_eq!(u64::from(f32_to_e4m3(value)), oracle::round(Dtype::E4m3, bits.into()), "e4m3 of {bits:#010x}");
        assert_eq!(u64::from(f32_to_e5m2(value)), oracle::round(Dtype::E5m2, bits.into()), "e5m2 of {bits:#010x}");
    };
    for value in (0..=u8::MAX).flat_map(|bits| [e4m3_to_f32(bits), e5m2_to_f32(bits)]).chain([464.0, 61_440.0]) {
        let spacing = [16, 17, 18, 19, 20, 21, 22].map(|shift| value.to_bits().wrapping_add(1 << shift));
        for near in spacing.into_iter().chain([value.to_bits()]) {
            [near.wrapping_sub(1), near, near.wrapping_add(1)].into_iter().for_each(check);
        }
    }
    (0..=u32::MAX).step_by(20_011).for_each(check);
}

#[test]
#[ignore = "all 2^32 values: half a minute in a release build, an hour without optimization"]
fn rounding_agrees_with_half_for_all_f32() {
    for bits in 0..=u32::MAX {
        check_rounding(bits);
    }
}
