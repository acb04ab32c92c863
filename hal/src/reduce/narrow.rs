//! Conversion between f32 and the narrow floats f16, bf16, fp8 E4M3 and fp8 E5M2.
//!
//! The code is branch-free and uses only 32-bit integer and float operations that every vector unit has. The `half`
//! crate checks the processor's features for each element, which compilers cannot vectorize, and a table of 256 entries
//! needs gathers. Widening is exact. Narrowing rounds to nearest even, keeps subnormals and makes NaNs canonical. It
//! overflows to infinity, or in E4M3, which has none, to NaN: the non-saturating conversions of the OCP 8-bit Floating
//! Point Specification (OFP8, section 5.2.1). No operation makes a subnormal f32 from a normal one, so
//! nothing is slow, or lost on processors that flush subnormals.
//!
//! The method for the formats with fewer exponent bits than f32 is Fabian Giesen's: a re-biased exponent for normal
//! numbers, and one float addition that aligns the significand of subnormal ones ("Half to float done quic" and
//! "Float->half variants", public domain).

/// The canonical NaN of binary16.
pub(super) const F16_NAN: u16 = 0x7e00;

/// The canonical NaN of bfloat16.
pub(super) const BF16_NAN: u16 = 0x7fc0;

/// The canonical NaN of E4M3; its negative is the only other NaN. It follows the greatest number, 448 = 0x7e.
pub(super) const E4M3_NAN: u8 = 0x7f;

/// The canonical NaN of E5M2.
pub(super) const E5M2_NAN: u8 = 0x7e;

const F32_MAGNITUDE: u32 = 0x7fff_ffff;
const F32_INFINITY: u32 = 0x7f80_0000;
const F32_NAN: u32 = 0x7fc0_0000;
const F32_FRACTION_BITS: u32 = 23;
const F32_BIAS: u32 = 127;

const F16_FRACTION_BITS: u32 = 10;
const F16_BIAS: u32 = 15;
const F16_INFINITY: u32 = 0x7c00;

const E4M3_FRACTION_BITS: u32 = 3;
const E4M3_BIAS: u32 = 7;

// E5M2 is the upper half of binary16.
const E5M2_FRACTION_BITS: u32 = 2;
const E5M2_INFINITY: u32 = 0x7c;

/// Return the bits of the f32 2^exponent, a normal number.
const fn power_of_two(exponent: i32) -> u32 {
    ((F32_BIAS as i32 + exponent) as u32) << F32_FRACTION_BITS
}

/// Widen a finite magnitude of a narrower format to the bits of an f32.
#[inline(always)]
fn widen<const FRACTION_BITS: u32, const BIAS: u32>(magnitude: u32) -> u32 {
    let least_normal = const { power_of_two(1 - BIAS as i32) };
    let shifted = magnitude << (F32_FRACTION_BITS - FRACTION_BITS);
    let normal = shifted + const { (F32_BIAS - BIAS) << F32_FRACTION_BITS };
    // 2^(1-bias) x (1 + m) - 2^(1-bias) = 2^(1-bias) x m: exact, and no operand is a subnormal f32.
    let subnormal = (f32::from_bits(shifted + least_normal) - f32::from_bits(least_normal)).to_bits();
    if shifted < 1 << F32_FRACTION_BITS { subnormal } else { normal }
}

/// Round the magnitude of an f32, as bits, to a narrower format. Overflow and NaNs give `most`: its infinity or NaN.
#[inline(always)]
fn narrow<const FRACTION_BITS: u32, const BIAS: u32>(magnitude: u32, most: u32) -> u32 {
    let shift = const { F32_FRACTION_BITS - FRACTION_BITS };
    // Half a unit minus one, plus the lowest kept bit, carries exactly where nearest-even rounds up.
    let odd = (magnitude >> shift) & 1;
    let rebias = const { (F32_BIAS - BIAS) << F32_FRACTION_BITS };
    let normal = magnitude.wrapping_sub(rebias).wrapping_add((1 << (shift - 1)) - 1).wrapping_add(odd) >> shift;
    // A unit of f32 at this magnitude is the narrower format's least subnormal: the addition does the rounding.
    let align = const { power_of_two(1 - BIAS as i32 + (F32_FRACTION_BITS - FRACTION_BITS) as i32) };
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(align)).to_bits().wrapping_sub(align);
    let finite = if magnitude < const { power_of_two(1 - BIAS as i32) } { subnormal } else { normal };
    // Compared as signed numbers, which both fit: old vector units support no other comparison.
    (finite as i32).min(most as i32) as u32
}

/// Return the f32 of equal value to a binary16.
#[inline(always)]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let sign = (u32::from(bits) & 0x8000) << 16;
    let shifted = (u32::from(bits) & 0x7fff) << (F32_FRACTION_BITS - F16_FRACTION_BITS);
    let rebias = const { (F32_BIAS - F16_BIAS) << F32_FRACTION_BITS };
    let least_normal = const { power_of_two(1 - F16_BIAS as i32) };
    let infinity = const { F16_INFINITY << (F32_FRACTION_BITS - F16_FRACTION_BITS) };
    // Adding twice the difference of the biases maps an exponent of all ones to one of all ones.
    let normal = shifted + if shifted >= infinity { 2 * rebias } else { rebias };
    // As in `widen`.
    let subnormal = (f32::from_bits(shifted + least_normal) - f32::from_bits(least_normal)).to_bits();
    f32::from_bits(sign | if shifted < 1 << F32_FRACTION_BITS { subnormal } else { normal })
}

/// Round an f32 to a binary16.
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & F32_MAGNITUDE;
    let signed = ((bits >> 16) & 0x8000) | narrow::<F16_FRACTION_BITS, F16_BIAS>(magnitude, F16_INFINITY);
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
    // As in `narrow`. A carry out of the significand increments the exponent, up to infinity. Only NaNs wrap around.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if bits & F32_MAGNITUDE > F32_INFINITY { BF16_NAN } else { rounded as u16 }
}

/// Return the f32 of equal value to an E4M3.
#[inline(always)]
pub(super) fn e4m3_to_f32(bits: u8) -> f32 {
    let sign = (u32::from(bits) & 0x80) << 24;
    let magnitude = u32::from(bits) & 0x7f;
    let finite = widen::<E4M3_FRACTION_BITS, E4M3_BIAS>(magnitude);
    f32::from_bits(sign | if magnitude == u32::from(E4M3_NAN) { F32_NAN } else { finite })
}

/// Round an f32 to an E4M3. Values that round to more than 448 become NaN.
#[inline(always)]
pub(super) fn f32_to_e4m3(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = narrow::<E4M3_FRACTION_BITS, E4M3_BIAS>(bits & F32_MAGNITUDE, u32::from(E4M3_NAN));
    // 448 + 32 would have the bits of E4M3_NAN. Overflow and NaN share them, without a sign.
    let sign = (bits >> 24) & 0x80;
    (if magnitude == u32::from(E4M3_NAN) { magnitude } else { sign | magnitude }) as u8
}

/// Return the f32 of equal value to an E5M2.
#[inline(always)]
pub(super) fn e5m2_to_f32(bits: u8) -> f32 {
    f16_to_f32(u16::from(bits) << 8)
}

/// Round an f32 to an E5M2.
#[inline(always)]
pub(super) fn f32_to_e5m2(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & F32_MAGNITUDE;
    let signed = ((bits >> 24) & 0x80) | narrow::<E5M2_FRACTION_BITS, F16_BIAS>(magnitude, E5M2_INFINITY);
    if magnitude > F32_INFINITY { E5M2_NAN } else { signed as u8 }
}
