//! What happens to one value besides combining: the division of an average, the truth of a logical result, the
//! multiplication of a premultiplied sum.
//!
//! Each happens once, in the accumulator type, right before the rounding to the element type.

/// A step on one accumulator of type `A`.
pub(super) trait Last<A>: Copy {
    /// Return what becomes of `value`.
    fn apply(self, value: A) -> A;
}

/// Nothing.
#[derive(Clone, Copy)]
pub(super) struct Keep;

/// Division by the number of ranks; of integers truncated towards zero.
#[derive(Clone, Copy)]
pub(super) struct Average {
    /// At least 1.
    pub(super) ranks: u32,
}

/// 1 for whatever is not 0.
#[derive(Clone, Copy)]
pub(super) struct Truth;

/// Multiplication by a scalar; of integers wrapping.
#[derive(Clone, Copy)]
pub(super) struct Times {
    /// The scalar for floats.
    pub(super) float: f64,
    /// The scalar for integers, modulo 2^64.
    pub(super) integer: u64,
}

impl<A> Last<A> for Keep {
    #[inline(always)]
    fn apply(self, value: A) -> A {
        value
    }
}

macro_rules! steps {
    ($($step:ident { $($ty:ident |$self:ident, $value:ident| $result:expr;)* })*) => {$($(
        impl Last<$ty> for $step {
            #[inline(always)]
            fn apply($self, $value: $ty) -> $ty {
                $result
            }
        }
    )*)*};
}

/// The first divisor that makes 0 of every 16-bit integer: no greater one need be told from it.
const SHORT_DIVISOR_MAX: u32 = 1 << 17;

// Vector units divide floats only. Truncating the rounded quotient is exact as long as rounding can't reach the next
// integer: the exact quotient stays 1/ranks below it, while half a unit of an f32 is less than 2^-24 of a quotient
// of at most 2^16 / ranks, and of an f64 2^-53 of 2^32 / ranks.
macro_rules! divide {
    ($value:ident, $self:ident, short $wide:ident) => {
        ($value as f32 / $self.ranks.min(SHORT_DIVISOR_MAX) as f32) as $wide as _
    };
    ($value:ident, $self:ident, long $wide:ident) => {
        ($value as f64 / f64::from($self.ranks)) as $wide
    };
}

steps! {
    Average {
        i8 |self, value| divide!(value, self, short i32);
        u8 |self, value| divide!(value, self, short i32);
        i16 |self, value| divide!(value, self, short i32);
        u16 |self, value| divide!(value, self, short i32);
        i32 |self, value| divide!(value, self, long i32);
        u32 |self, value| divide!(value, self, long u32);
        i64 |self, value| value / i64::from(self.ranks);
        u64 |self, value| value / u64::from(self.ranks);
        f32 |self, value| value / self.ranks as f32;
        f64 |self, value| value / f64::from(self.ranks);
    }
    Truth {
        u8 |self, value| u8::from(value != 0);
        u16 |self, value| u16::from(value != 0);
        u32 |self, value| u32::from(value != 0);
        u64 |self, value| u64::from(value != 0);
    }
    Times {
        u8 |self, value| value.wrapping_mul(self.integer as u8);
        u16 |self, value| value.wrapping_mul(self.integer as u16);
        u32 |self, value| value.wrapping_mul(self.integer as u32);
        u64 |self, value| value.wrapping_mul(self.integer);
        f32 |self, value| value * self.float as f32;
        f64 |self, value| value * self.float;
    }
}
