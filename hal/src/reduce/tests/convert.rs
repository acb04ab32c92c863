//! The conversions of f16 and bf16: exhaustive where that is possible, against the oracle and the `half` crate.

use super::super::narrow::{BF16_NAN, F16_NAN, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::oracle;
use crate::op::Dtype;
use half::{bf16, f16};

/// Round by `half`, whose NaNs keep their payload.
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

/// As [`check_rounding`], and against the oracle, which is slow.
fn check_rounding_thrice(bits: u32) {
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

/// The ties: between each 16-bit value and the next lies an f32 exactly half-way.
#[test]
fn ties_go_to_even_and_their_neighbours_to_the_nearest() {
    for bits in 0..=u16::MAX {
        let next = bits.wrapping_add(1);
        for (value, after) in [(f16_to_f32(bits), f16_to_f32(next)), (bf16_to_f32(bits), bf16_to_f32(next))] {
            // In f64 the sum is exact, and so is its half in f32, unless bf16 overflows: then any value will do.
            let tie = ((f64::from(value) + f64::from(after)) / 2.0) as f32;
            for near in [tie.to_bits().wrapping_sub(1), tie.to_bits(), tie.to_bits().wrapping_add(1)] {
                check_rounding_thrice(near);
            }
        }
    }
}

/// A walk over all exponents and, with an odd step, all residues of the low bits.
#[test]
fn rounding_agrees_with_half_all_over_f32() {
    for bits in (0..=u32::MAX).step_by(2053) {
        check_rounding(bits);
    }
}

#[test]
#[ignore = "all 2^32 values: half a minute in a release build, an hour without optimisation"]
fn rounding_agrees_with_half_everywhere() {
    for bits in 0..=u32::MAX {
        check_rounding(bits);
    }
}
