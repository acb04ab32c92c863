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

/// Divide a magnitude of at most 16 bits, truncated.
///
/// Vector units divide no integers, and truncate floats only in ways that Rust checks: so this rounds. The point
/// (x + 1/2) / n - 1/2 rounds to x / n truncated, and keeps a distance of 1/2n from those where the rounding turns.
/// Multiplying by a rounded 1/n errs by less than 2^-22 of the quotient, which is less than that where x < 2^21. Adding
/// 3 x 2^22, whose unit in the last place is 1, rounds and leaves the integer in the low bits.
#[inline(always)]
fn divide_short(magnitude: i32, ranks: u32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    let reciprocal = 1.0 / ranks.min(SHORT_DIVISOR_MAX) as f32;
    let point = (magnitude as f32 + 0.5) * reciprocal - 0.5;
    ((point + MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32)
}

/// The same for 32 bits: in f64 the error is less than 2^-51 of the quotient, and 3 x 2^51 has zeros in its low bits.
#[inline(always)]
fn divide_long(magnitude: u32, ranks: u32) -> u32 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    let point = (f64::from(magnitude) + 0.5) * (1.0 / f64::from(ranks)) - 0.5;
    (point + MAGIC).to_bits() as u32
}

/// Give a magnitude the sign of `like`.
#[inline(always)]
fn signed(magnitude: i32, like: i32) -> i32 {
    let sign = like >> 31;
    (magnitude ^ sign).wrapping_sub(sign)
}

steps! {
    Average {
        i8 |self, value| signed(divide_short(i32::from(value).abs(), self.ranks), value.into()) as i8;
        u8 |self, value| divide_short(value.into(), self.ranks) as u8;
        i16 |self, value| signed(divide_short(i32::from(value).abs(), self.ranks), value.into()) as i16;
        u16 |self, value| divide_short(value.into(), self.ranks) as u16;
        i32 |self, value| signed(divide_long(value.unsigned_abs(), self.ranks) as i32, value);
        u32 |self, value| divide_long(value, self.ranks);
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
