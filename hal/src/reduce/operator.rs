//! What an operator does to two accumulators.
//!
//! Each is a value computed without branches, so that the loops around it vectorise. Invariant: `apply(a, b)` and
//! `apply(b, a)` are equal bits, or both NaN.

use super::element::{F32_NAN, F64_NAN};

/// An operator on accumulators of type `A`.
pub(super) trait Operator<A> {
    /// Return `a op b`.
    fn apply(a: A, b: A) -> A;
}

/// Addition: integers wrap, floats round once.
pub(super) struct Sum;

/// Multiplication: integers wrap, floats round once.
pub(super) struct Prod;

/// The lesser of two; floats by IEEE 754-2019 `minimum` (section 9.6).
pub(super) struct Min;

/// The greater of two; floats by IEEE 754-2019 `maximum` (section 9.6).
pub(super) struct Max;

/// Bitwise and.
pub(super) struct Band;

/// Bitwise or. It serves the logical or too, whose result becomes 0 or 1 at the end ([`super::last::Truth`]).
pub(super) struct Bor;

/// Bitwise exclusive or.
pub(super) struct Bxor;

/// Logical and: 1 where neither is 0, else 0.
pub(super) struct Land;

/// Logical exclusive or: 1 where one is 0 and the other not, else 0.
pub(super) struct Lxor;

macro_rules! operators {
    ($($ty:ident { $($op:ident |$a:ident, $b:ident| $value:expr;)* })*) => {$($(
        impl Operator<$ty> for $op {
            #[inline(always)]
            fn apply($a: $ty, $b: $ty) -> $ty {
                $value
            }
        }
    )*)*};
}

// Sums, products and bits of signed integers are those of unsigned ones.
macro_rules! integer_operators {
    ($($unsigned:ident $signed:ident)*) => {
        operators! {$(
            $unsigned {
                Sum |a, b| a.wrapping_add(b);
                Prod |a, b| a.wrapping_mul(b);
                Min |a, b| a.min(b);
                Max |a, b| a.max(b);
                Land |a, b| $unsigned::from((a != 0) & (b != 0));
                Lxor |a, b| $unsigned::from((a != 0) ^ (b != 0));
            }
            $signed {
                Min |a, b| a.min(b);
                Max |a, b| a.max(b);
            }
        )*}
    };
}

// Where neither is less, and neither NaN, the two are equal: the same bits, or zeros that differ in the sign bit.
// Or-ing them prefers the negative zero, and-ing the positive.
macro_rules! float_operators {
    ($($ty:ident $nan:ident;)*) => {
        operators! {$(
            $ty {
                Sum |a, b| a + b;
                Prod |a, b| a * b;
                Min |a, b| {
                    let equal = $ty::from_bits(a.to_bits() | b.to_bits());
                    let lesser = if a < b { a } else if b < a { b } else { equal };
                    if a.is_nan() | b.is_nan() { $ty::from_bits($nan) } else { lesser }
                };
                Max |a, b| {
                    let equal = $ty::from_bits(a.to_bits() & b.to_bits());
                    let greater = if a > b { a } else if b > a { b } else { equal };
                    if a.is_nan() | b.is_nan() { $ty::from_bits($nan) } else { greater }
                };
            }
        )*}
    };
}

integer_operators!(u8 i8 u16 i16 u32 i32 u64 i64);
float_operators! { f32 F32_NAN; f64 F64_NAN; }

operators! {
    u8 {
        Band |a, b| a & b;
        Bor |a, b| a | b;
        Bxor |a, b| a ^ b;
    }
}
