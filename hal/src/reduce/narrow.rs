//! Conversion between f32 and its two 16-bit relatives, as the bits of each.
//!
//! Written without branches, in 32-bit integer and float operations that every vector unit has: the `half` crate
//! asks the processor's features at each element, which no compiler vectorises. Widening is exact. Narrowing rounds
//! to nearest even, overflows to infinity, keeps subnormals, and makes every NaN canonical. No operation here
//! gives a subnormal f32 from a normal one, so that nothing is slow or lost where the processor flushes those.
//!
//! The method for f16 is Fabian Giesen's: a re-biased exponent for normal numbers, and one float addition that
//! aligns the significand of subnormal ones ("Half to float done quic" and "Float->half variants", public domain).

/// The canonical NaN of binary16.
pub(super) const F16_NAN: u16 = 0x7e00;

/// The canonical NaN of bfloat16.
pub(super) const BF16_NAN: u16 = 0x7fc0;

const F32_MAGNITUDE: u32 = 0x7fff_ffff;
const F32_INFINITY: u32 = 0x7f80_0000;
const F32_EXPONENT_SHIFT: u32 = 23;

/// How much longer f32's significand is than f16's.
const F16_SHIFT: u32 = 13;

/// f16's infinity: an exponent of all ones.
const F16_INFINITY: u32 = 0x7c00;

/// What turns f16's exponent bias (15) into f32's (127), in place.
const F16_REBIAS: u32 = (127 - 15) << F32_EXPONENT_SHIFT;

/// 2^-14, the least normal f16, as the bits of an f32.
const F16_LEAST_NORMAL: u32 = (127 - 14) << F32_EXPONENT_SHIFT;

/// 2^16, from where on every number rounds to f16's infinity, as the bits of an f32. (Below it, from 65520 on, the
/// carry of the rounding does the same.)
const F16_OVERFLOW: u32 = (127 + 16) << F32_EXPONENT_SHIFT;

/// Return the f32 of equal value to a binary16.
#[inline(always)]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let sign = (u32::from(bits) & 0x8000) << 16;
    let shifted = (u32::from(bits) & 0x7fff) << F16_SHIFT;
    let normal = shifted + F16_REBIAS;
    // 2^-14 x (1 + m) - 2^-14 = 2^-14 x m: exact, and no operand is a subnormal f32.
    let subnormal = (f32::from_bits(shifted + F16_LEAST_NORMAL) - f32::from_bits(F16_LEAST_NORMAL)).to_bits();
    let special = shifted | F32_INFINITY;
    let magnitude = if shifted >= F16_INFINITY << F16_SHIFT {
        special
    } else if shifted < 0x0400 << F16_SHIFT {
        subnormal
    } else {
        normal
    };
    f32::from_bits(sign | magnitude)
}

/// Round an f32 to a binary16.
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & F32_MAGNITUDE;
    // Half a unit minus one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
    let odd = (magnitude >> F16_SHIFT) & 1;
    let normal =
        magnitude.wrapping_sub(F16_REBIAS).wrapping_add((1 << (F16_SHIFT - 1)) - 1).wrapping_add(odd) >> F16_SHIFT;
    // A unit of f32 in [0.5, 1) is 2^-24, f16's least subnormal: the addition does the rounding.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let finite = if magnitude < F16_LEAST_NORMAL { subnormal } else { normal };
    let signed = ((bits >> 16) & 0x8000) | if magnitude >= F16_OVERFLOW { F16_INFINITY } else { finite };
    if magnitude > F32_INFINITY { F16_NAN } else { signed as u16 }
}

/// Return the f32 of equal value to a bfloat16.
#[inline(always)]
pub(super) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Round an f32 to a bfloat16.
#[inline(always)]
pub(super) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    // As for f16; a carry out of the significand raises the exponent, in the end to infinity. Only NaNs wrap.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if bits & F32_MAGNITUDE > F32_INFINITY { BF16_NAN } else { rounded as u16 }
}
