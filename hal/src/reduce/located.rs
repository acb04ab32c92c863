//! Minimum and maximum of {value, index} pairs.
//!
//! A pair is a value followed by an unsigned index of the same size, little-endian. Pairs are totally ordered: NaNs
//! first, then by value (-0 < +0), then by index. So ties, also among NaNs, go to the lowest index, and the operators
//! are commutative and associative bit by bit, except for the payloads of two NaNs with the same index, which
//! [`Element::round`] makes canonical.
//!
//! The order is computed on integers: the bits of a float, with those below the sign inverted if it is negative, are
//! ordered like the float (IEEE 754-2019, 5.10, totalOrder). For the maximum, all bits are inverted.

use super::element::{Accumulator, Element, canonical_f32, canonical_f64};
use super::operator::{Max, Min, Operator};
use core::marker::PhantomData;

/// A 32-bit value in the lower half, and its index in the upper half.
#[derive(Clone, Copy)]
pub(super) struct Pair32<V>(u64, PhantomData<V>);

/// A 64-bit value and its index.
#[derive(Clone, Copy)]
pub(super) struct Pair64<V> {
    value: u64,
    index: u64,
    kind: PhantomData<V>,
}

/// A value type. `B` holds its bits, and `S` is the signed integer of the same size.
pub(super) trait Value<B, S>: Copy {
    /// Return an integer that orders the values other than NaN.
    fn rank(bits: B) -> S;
    /// Return whether the bits are a NaN.
    fn is_nan(bits: B) -> bool;
    /// Return the bits, made canonical if they are a NaN.
    fn canonical(bits: B) -> B;
}

macro_rules! integer_values {
    ($($ty:ident $bits:ident $signed:ident $flip:expr;)*) => {$(
        impl Value<$bits, $signed> for $ty {
            #[inline(always)]
            fn rank(bits: $bits) -> $signed {
                (bits ^ $flip) as $signed
            }

            #[inline(always)]
            fn is_nan(_: $bits) -> bool {
                false
            }

            #[inline(always)]
            fn canonical(bits: $bits) -> $bits {
                bits
            }
        }
    )*};
}

integer_values! {
    i32 u32 i32 0;
    u32 u32 i32 1 << 31;
    i64 u64 i64 0;
    u64 u64 i64 1 << 63;
}

macro_rules! float_values {
    ($($ty:ident $bits:ident $signed:ident $canonical:ident;)*) => {$(
        impl Value<$bits, $signed> for $ty {
            #[inline(always)]
            fn rank(bits: $bits) -> $signed {
                let sign = bits as $signed >> ($bits::BITS - 1);
                bits as $signed ^ (sign as $bits >> 1) as $signed
            }

            #[inline(always)]
            fn is_nan(bits: $bits) -> bool {
                $ty::from_bits(bits).is_nan()
            }

            #[inline(always)]
            fn canonical(bits: $bits) -> $bits {
                $canonical($ty::from_bits(bits)).to_bits()
            }
        }
    )*};
}

float_values! {
    f32 u32 i32 canonical_f32;
    f64 u64 i64 canonical_f64;
}

impl<V: Value<u32, i32>> Pair32<V> {
    /// Return a number that is smallest for the preferred pair.
    #[inline(always)]
    fn key(self, greatest: bool) -> i64 {
        let bits = self.0 as u32;
        let rank = if greatest { !V::rank(bits) } else { V::rank(bits) };
        // Only NaNs have the smallest or the largest rank; inverted, the largest is the smallest.
        let rank = if V::is_nan(bits) { i32::MIN } else { rank };
        i64::from(rank) << 32 | (self.0 >> 32) as i64
    }
}

impl<V: Value<u64, i64>> Pair64<V> {
    /// Return a number that is smallest for the preferred value.
    #[inline(always)]
    fn key(self, greatest: bool) -> i64 {
        let rank = if greatest { !V::rank(self.value) } else { V::rank(self.value) };
        if V::is_nan(self.value) { i64::MIN } else { rank }
    }

    #[inline(always)]
    fn first(a: Self, b: Self, greatest: bool) -> Self {
        let (x, y) = (a.key(greatest), b.key(greatest));
        let keep = (x < y) | ((x == y) & (a.index <= b.index));
        Self {
            value: if keep { a.value } else { b.value },
            index: if keep { a.index } else { b.index },
            kind: PhantomData,
        }
    }
}

macro_rules! located_operators {
    ($($op:ident $greatest:literal;)*) => {$(
        impl<V: Value<u32, i32>> Operator<Pair32<V>> for $op {
            #[inline(always)]
            fn apply(a: Pair32<V>, b: Pair32<V>) -> Pair32<V> {
                if a.key($greatest) <= b.key($greatest) { a } else { b }
            }
        }

        impl<V: Value<u64, i64>> Operator<Pair64<V>> for $op {
            #[inline(always)]
            fn apply(a: Pair64<V>, b: Pair64<V>) -> Pair64<V> {
                Pair64::first(a, b, $greatest)
            }
        }
    )*};
}

located_operators! {
    Min false;
    Max true;
}

impl<V: Copy> Accumulator<8> for Pair32<V> {
    #[inline(always)]
    fn from_le(bytes: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bytes), PhantomData)
    }

    #[inline(always)]
    fn to_le(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }
}

impl<V: Value<u32, i32>> Element<Self, 8> for Pair32<V> {
    #[inline(always)]
    fn widen(bytes: [u8; 8]) -> Self {
        Self::from_le(bytes)
    }

    #[inline(always)]
    fn round(pair: Self) -> [u8; 8] {
        let value = V::canonical(pair.0 as u32);
        (pair.0 >> 32 << 32 | u64::from(value)).to_le_bytes()
    }
}

impl<V: Copy> Accumulator<16> for Pair64<V> {
    #[inline(always)]
    fn from_le(bytes: [u8; 16]) -> Self {
        let bits = u128::from_le_bytes(bytes);
        Self { value: bits as u64, index: (bits >> 64) as u64, kind: PhantomData }
    }

    #[inline(always)]
    fn to_le(self) -> [u8; 16] {
        (u128::from(self.index) << 64 | u128::from(self.value)).to_le_bytes()
    }
}

impl<V: Value<u64, i64>> Element<Self, 16> for Pair64<V> {
    #[inline(always)]
    fn widen(bytes: [u8; 16]) -> Self {
        Self::from_le(bytes)
    }

    #[inline(always)]
    fn round(pair: Self) -> [u8; 16] {
        Self { value: V::canonical(pair.value), ..pair }.to_le()
    }
}
