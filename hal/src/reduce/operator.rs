//! Operators on two accumulators.
//!
//! All are branch-free, so that the loops around them vectorize.
//!
//! Invariant: `apply(a, b)` and `apply(b, a)` are bitwise equal, or both NaN.

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

/// Bitwise or; also used for the logical or, whose result the epilogue converts to 0 or 1
/// ([`super::epilogue::ToBool`]).
pub(super) struct Bor;

/// Bitwise exclusive or.
pub(super) struct Bxor;

/// Logical and: 1 if neither operand is 0, else 0.
pub(super) struct Land;

/// Logical exclusive or: 1 if exactly one operand is 0, else 0.
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

// Sums, products and logical operators have the same bits for signed and unsigned integers.
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

// `if a < b { a } else { b }` is one instruction on most vector units. It returns b if neither is less: for zeros that
// differ in sign, and for NaNs. Evaluated in both orders, it gives the same bits twice, two zeros, or both operands,
// one of which is a NaN. The bitwise or of the magnitudes keeps a NaN a NaN and leaves other values unchanged. The or
// of the signs prefers the negative zero, the and the positive zero.
macro_rules! float_operators {
    ($($ty:ident)*) => {
        operators! {$(
            $ty {
                Sum |a, b| a + b;
                Prod |a, b| a * b;
                Min |a, b| {
                    let (x, y) = (if a < b { a } else { b }, if b < a { b } else { a });
                    $ty::from_bits(x.to_bits() | y.to_bits())
                };
                Max |a, b| {
                    let (x, y) = (if a > b { a } else { b }, if b > a { b } else { a });
                    let (x, y, magnitude) = (x.to_bits(), y.to_bits(), $ty::MAX.to_bits() | $ty::INFINITY.to_bits());
                    $ty::from_bits((x & y) | ((x | y) & magnitude))
                };
            }
        )*}
    };
}

integer_operators!(u8 i8 u16 i16 u32 i32 u64 i64);
float_operators!(f32 f64);

operators! {
    u8 {
        Band |a, b| a & b;
        Bor |a, b| a | b;
        Bxor |a, b| a ^ b;
    }
}
