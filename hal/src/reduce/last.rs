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

// Vector units divide no integers, and floats slowly. Truncating (x + 1/2) / n gives x / n truncated, and keeps a
// distance of 1/2n from the integers on both sides. Multiplying by a rounded 1/n errs by less than 2^-22 of the quotient
// in f32, and 2^-51 in f64, which is less than that distance where x < 2^21, and x < 2^50.
macro_rules! divide {
    ($value:ident, $float:ident, $divisor:expr, $wide:ident) => {{
        let dividend = $value as $float;
        ((dividend + (0.5 as $float).copysign(dividend)) * (1.0 / $divisor as $float)) as $wide
    }};
}

steps! {
    Average {
        i8 |self, value| divide!(value, f32, self.ranks.min(SHORT_DIVISOR_MAX), i32) as i8;
        u8 |self, value| divide!(value, f32, self.ranks.min(SHORT_DIVISOR_MAX), i32) as u8;
        i16 |self, value| divide!(value, f32, self.ranks.min(SHORT_DIVISOR_MAX), i32) as i16;
        u16 |self, value| divide!(value, f32, self.ranks.min(SHORT_DIVISOR_MAX), i32) as u16;
        i32 |self, value| divide!(value, f64, self.ranks, i32);
        u32 |self, value| divide!(value, f64, self.ranks, u32);
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
