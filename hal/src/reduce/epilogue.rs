//! Epilogues: the last step on each accumulator, such as the division of an average.
//!
//! An epilogue is applied once, in the accumulator type, right before rounding to the element type.

/// An epilogue for accumulators of type `A`.
pub(super) trait Epilogue<A>: Copy {
    /// Apply the epilogue to `value`.
    fn apply(self, value: A) -> A;
}

/// Leaves the value unchanged.
#[derive(Clone, Copy)]
pub(super) struct Identity;

/// Divides by the number of ranks; integers are truncated towards zero.
#[derive(Clone, Copy)]
pub(super) struct Average {
    /// At least 1.
    pub(super) ranks: u32,
}

/// Maps every value other than 0 to 1: the result of a logical operator.
#[derive(Clone, Copy)]
pub(super) struct ToBool;

/// Multiplies by a scalar; integers wrap.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    /// The scalar for floats.
    pub(super) float: f64,
    /// The scalar for integers, modulo 2^64.
    pub(super) integer: u64,
}

impl<A> Epilogue<A> for Identity {
    #[inline(always)]
    fn apply(self, value: A) -> A {
        value
    }
}

macro_rules! epilogues {
    ($($epilogue:ident { $($ty:ident |$self:ident, $value:ident| $result:expr;)* })*) => {$($(
        impl Epilogue<$ty> for $epilogue {
            #[inline(always)]
            fn apply($self, $value: $ty) -> $ty {
                $result
            }
        }
    )*)*};
}

/// Every 16-bit integer divided by this or a greater divisor is 0, so greater ones are clamped to it.
const SHORT_DIVISOR_MAX: u32 = 1 << 17;

/// Divide a magnitude of at most 16 bits, truncating.
///
/// Vector units have no integer division, and Rust's float-to-integer conversion adds checks, so this rounds instead.
/// The point (x + 1/2) / n - 1/2 rounds to x / n truncated, and is at least 1/2n away from where the rounding changes.
/// Multiplying by a rounded 1/n has an error below 2^-22 of the quotient, which is less than that for x < 2^21. Adding
/// 3 x 2^22, whose unit in the last place is 1, rounds and leaves the integer in the low bits.
#[inline(always)]
fn divide_short(magnitude: i32, ranks: u32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    let reciprocal = 1.0 / ranks.min(SHORT_DIVISOR_MAX) as f32;
    let point = (magnitude as f32 + 0.5) * reciprocal - 0.5;
    ((point + MAGIC).to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32)
}

/// Like [`divide_short`], for 32 bits: in f64 the error is below 2^-51 of the quotient, and 3 x 2^51 has zeros in its
/// low bits.
#[inline(always)]
fn divide_long(magnitude: u32, ranks: u32) -> u32 {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    let point = (f64::from(magnitude) + 0.5) * (1.0 / f64::from(ranks)) - 0.5;
    (point + MAGIC).to_bits() as u32
}

/// Return the magnitude with the sign of `like`.
#[inline(always)]
fn signed(magnitude: i32, like: i32) -> i32 {
    let sign = like >> 31;
    (magnitude ^ sign).wrapping_sub(sign)
}

epilogues! {
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
    ToBool {
        u8 |self, value| u8::from(value != 0);
        u16 |self, value| u16::from(value != 0);
        u32 |self, value| u32::from(value != 0);
        u64 |self, value| u64::from(value != 0);
    }
    Scale {
        u8 |self, value| value.wrapping_mul(self.integer as u8);
        u16 |self, value| value.wrapping_mul(self.integer as u16);
        u32 |self, value| value.wrapping_mul(self.integer as u32);
        u64 |self, value| value.wrapping_mul(self.integer);
        f32 |self, value| value * self.float as f32;
        f64 |self, value| value * self.float;
    }
}
