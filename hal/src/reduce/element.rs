//! What the loops know of an element type: its bytes, how it becomes an accumulator, and how it is rounded back.
//!
//! Invariant: `round(widen(x)) == x` for every x but NaN, which becomes the canonical one.

use super::narrow;

/// The canonical NaN of binary32.
pub(super) const F32_NAN: u32 = 0x7fc0_0000;

/// The canonical NaN of binary64.
pub(super) const F64_NAN: u64 = 0x7ff8_0000_0000_0000;

/// A type that sums, minima and maxima are computed in; `N` is its size in bytes.
pub(super) trait Accumulator<const N: usize>: Copy {
    /// Read a little-endian value.
    fn from_le(bytes: [u8; N]) -> Self;
    /// Write a little-endian value.
    fn to_le(self) -> [u8; N];
}

/// A type of elements in packets and user memory, `N` bytes each, that accumulates in `A`.
pub(super) trait Element<A, const N: usize> {
    /// Read a little-endian element, exactly.
    fn widen(bytes: [u8; N]) -> A;
    /// Round an accumulator to nearest even, NaNs to the canonical one, and write it little-endian.
    fn round(value: A) -> [u8; N];
}

/// IEEE 754 binary16, accumulated in f32.
pub(super) struct F16;

/// bfloat16, accumulated in f32.
pub(super) struct Bf16;

macro_rules! accumulators {
    ($($ty:ident $size:literal $round:expr;)*) => {$(
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
                let round: fn($ty) -> $ty = $round;
                round(value).to_le_bytes()
            }
        }
    )*};
}

accumulators! {
    i32 4 |value| value;
    i64 8 |value| value;
    f32 4 |value| if value.is_nan() { f32::from_bits(F32_NAN) } else { value };
    f64 8 |value| if value.is_nan() { f64::from_bits(F64_NAN) } else { value };
}

macro_rules! narrow_elements {
    ($($ty:ident $widen:ident $round:ident;)*) => {$(
        impl Element<f32, 2> for $ty {
            #[inline(always)]
            fn widen(bytes: [u8; 2]) -> f32 {
                narrow::$widen(u16::from_le_bytes(bytes))
            }

            #[inline(always)]
            fn round(value: f32) -> [u8; 2] {
                narrow::$round(value).to_le_bytes()
            }
        }
    )*};
}

narrow_elements! {
    F16 f16_to_f32 f32_to_f16;
    Bf16 bf16_to_f32 f32_to_bf16;
}
