//! Element types: their bytes, widening to accumulators, and rounding back.
//!
//! Invariant: `round(widen(x)) == x` for every x except NaNs, which become canonical.

use super::narrow;

/// The canonical NaN of binary32.
const F32_NAN: u32 = 0x7fc0_0000;

/// The canonical NaN of binary64.
const F64_NAN: u64 = 0x7ff8_0000_0000_0000;

/// An accumulator type; `N` is its size in bytes.
pub(super) trait Accumulator<const N: usize>: Copy {
    /// Read a little-endian value.
    fn from_le(bytes: [u8; N]) -> Self;
    /// Write a little-endian value.
    fn to_le(self) -> [u8; N];
}

/// An element type in packets and user memory, `N` bytes each, that is accumulated in `A`.
pub(super) trait Element<A, const N: usize> {
    /// Read a little-endian element and widen it exactly.
    fn widen(bytes: [u8; N]) -> A;
    /// Round an accumulator to nearest even, NaNs to the canonical NaN, and write it as little-endian bytes.
    fn round(value: A) -> [u8; N];
}

/// IEEE 754 binary16, accumulated in f32.
pub(super) struct F16;

/// bfloat16, accumulated in f32.
pub(super) struct Bf16;

/// OCP E4M3, accumulated in f32.
pub(super) struct E4m3;

/// OCP E5M2, accumulated in f32.
pub(super) struct E5m2;

/// Return the value, or the canonical NaN if it is a NaN.
#[inline(always)]
pub(super) fn canonical_f32(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(F32_NAN) } else { value }
}

/// Return the value, or the canonical NaN if it is a NaN.
#[inline(always)]
pub(super) fn canonical_f64(value: f64) -> f64 {
    if value.is_nan() { f64::from_bits(F64_NAN) } else { value }
}

#[inline(always)]
fn exact<T>(value: T) -> T {
    value
}

macro_rules! accumulators {
    ($($ty:ident $size:literal $round:ident;)*) => {$(
        impl Accumulator<$size> for $ty {
            #[inline(always)]
            fn from_le(bytes: [u8; $size]) -> Self {
                Self::from_le_bytes(bytes)
            }

            #[inline(always)]
            fn to_le(self) -> [u8; $size] {
                self.to_le_bytes()
            }
        }

        impl Element<$ty, $size> for $ty {
            #[inline(always)]
            fn widen(bytes: [u8; $size]) -> $ty {
                Self::from_le_bytes(bytes)
            }

            #[inline(always)]
            fn round(value: $ty) -> [u8; $size] {
                $round(value).to_le_bytes()
            }
        }
    )*};
}

accumulators! {
    i8 1 exact;
    u8 1 exact;
    i16 2 exact;
    u16 2 exact;
    i32 4 exact;
    u32 4 exact;
    i64 8 exact;
    u64 8 exact;
    f32 4 canonical_f32;
    f64 8 canonical_f64;
}

macro_rules! narrow_elements {
    ($($ty:ident $bits:ident $size:literal $widen:ident $round:ident;)*) => {$(
        impl Element<f32, $size> for $ty {
            #[inline(always)]
            fn widen(bytes: [u8; $size]) -> f32 {
                narrow::$widen($bits::from_le_bytes(bytes))
            }

            #[inline(always)]
            fn round(value: f32) -> [u8; $size] {
                narrow::$round(value).to_le_bytes()
            }
        }
    )*};
}

narrow_elements! {
    F16 u16 2 f16_to_f32 f32_to_f16;
    Bf16 u16 2 bf16_to_f32 f32_to_bf16;
    E4m3 u8 1 e4m3_to_f32 f32_to_e4m3;
    E5m2 u8 1 e5m2_to_f32 f32_to_e5m2;
}
