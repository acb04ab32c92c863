//! Test values: special values of each type, and random values whose combinations round.

use super::oracle::Format;
use crate::op::Dtype;

/// Return the special values of a type: zeros, ones, extremes, subnormals, infinities, NaNs of every kind, and
/// numbers half-way between two elements of a narrower type.
pub(super) fn specials(dtype: Dtype) -> Vec<u64> {
    let bits = dtype.size_bytes() as u32 * 8;
    let Some(format) = Format::of(dtype) else {
        let min = 1_u64 << (bits - 1);
        return vec![0, 1, 2, 0x55, min - 2, min - 1, min, min + 1, (min - 1) | min, ((min - 1) | min) - 1];
    };
    let unit = 1 << format.fraction_bits;
    let one = format.infinity() / 2 / unit * unit;
    let mut magnitudes = vec![0, 1, 2, 3, unit - 1, unit, unit + 1, 2 * unit, one - 1, one, one + 1, one + unit];
    magnitudes.extend([format.infinity() - 1, format.infinity() - unit, format.infinity()]);
    // NaNs: signalling with the least and greatest payload, the canonical one, quiet with a payload.
    magnitudes.extend([format.infinity() + 1, format.nan() - 1, format.nan(), format.nan() + 1, format.sign() - 1]);
    magnitudes.retain(|&magnitude| magnitude < format.sign());
    // Values that tie when added to one, and cancel just below it.
    magnitudes.extend([one - unit * u64::from(format.fraction_bits), one - unit * u64::from(format.fraction_bits + 1)]);
    if dtype == Dtype::F32 {
        // Ties of bf16 and f16 and their neighbours, f16's overflow, and its subnormals' ties.
        magnitudes.extend([0x3f80_7fff, 0x3f80_8000, 0x3f80_8001, 0x3f81_8000, 0x7f7f_7fff, 0x7f7f_8000]);
        magnitudes.extend([0x3f80_0fff, 0x3f80_1000, 0x3f80_1001, 0x3f80_3000, 0x477f_efff, 0x477f_f000]);
        magnitudes.extend([0x3300_0000, 0x3300_0001, 0x32ff_ffff, 0x33c0_0000, 0x387f_ffff, 0x387f_e000, 0x387f_f000]);
        // The same for E4M3 (464 is the largest that rounds to 448; 2^-10 ties with zero) and E5M2 (61,440; 2^-17).
        magnitudes.extend([0x43e8_0000, 0x43e8_0001, 0x43e7_ffff, 0x3a80_0000, 0x3a80_0001, 0x3c7f_ffff, 0x3f88_0000]);
        magnitudes.extend([0x4770_0000, 0x4770_0001, 0x476f_ffff, 0x3700_0000, 0x3700_0001, 0x387f_ffff, 0x3f90_0000]);
    }
    magnitudes.iter().flat_map(|&magnitude| [magnitude, magnitude | format.sign()]).collect()
}

/// Return the next number of the SplitMix64 generator (Steele, Lea, Flood, OOPSLA 2014).
pub(super) fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Draw `len` values: special values, arbitrary bits, and floats close to one, whose sums round.
pub(super) fn draw(state: &mut u64, dtype: Dtype, len: usize) -> Vec<u64> {
    let special = specials(dtype);
    let mask = u64::MAX >> (64 - dtype.size_bytes() * 8);
    (0..len)
        .map(|_| {
            let random = next(state);
            match (random >> 62, Format::of(dtype)) {
                (0, _) => special[(random % special.len() as u64) as usize],
                (2 | 3, Some(format)) => {
                    let unit = 1 << format.fraction_bits;
                    let one = format.infinity() / 2 / unit * unit;
                    let exponent = (next(state) % 6) * unit;
                    (random & format.sign()) | (one - 3 * unit + exponent + random % unit)
                }
                _ => random & mask,
            }
        })
        .collect()
}

/// Write values as little-endian elements.
pub(super) fn bytes_of(dtype: Dtype, values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes().into_iter().take(dtype.size_bytes())).collect()
}

/// Read little-endian elements.
pub(super) fn values_of(dtype: Dtype, bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks_exact(dtype.size_bytes())
        .map(|element| element.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
        .collect()
}
