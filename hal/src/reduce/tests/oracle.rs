//! The expected values of kernels, computed with wide integers: one element at a time, without float arithmetic, and
//! without code shared with the kernels.
//!
//! Elements and accumulators are the low bits of a u64. A float is decoded to sign x significand x 2^exponent.
//! Operations are exact, or keep a sticky bit where that suffices, and round once, to nearest even by definition. All
//! NaN results are canonical.

use crate::op::{Dtype, ReduceOp};

/// An IEEE 754 binary interchange format, bfloat16 or an OCP 8-bit format.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Bits of the trailing significand field.
    pub(super) fraction_bits: u32,
    /// Bits of the exponent field.
    pub(super) exponent_bits: u32,
    /// E4M3: no infinities, and a NaN only if all bits below the sign are set.
    is_finite: bool,
}

/// A number that is not a NaN.
enum Number {
    Infinite { negative: bool },
    Finite { negative: bool, significand: u128, exponent: i32 },
}

impl Format {
    /// Return the format of a float type, `None` for integers.
    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        let (fraction_bits, exponent_bits) = match dtype {
            Dtype::F16 => (10, 5),
            Dtype::Bf16 => (7, 8),
            Dtype::F32 => (23, 8),
            Dtype::F64 => (52, 11),
            Dtype::E4m3 => (3, 4),
            Dtype::E5m2 => (2, 5),
            _ => return None,
        };
        Some(Self { fraction_bits, exponent_bits, is_finite: dtype == Dtype::E4m3 })
    }

    /// Return the bits with an exponent of all ones: +infinity, if the format has it.
    pub(super) fn infinity(self) -> u64 {
        ((1 << self.exponent_bits) - 1) << self.fraction_bits
    }

    /// Return the bits of the greatest magnitude that is not a NaN.
    pub(super) fn greatest(self) -> u64 {
        if self.is_finite { self.sign() - 2 } else { self.infinity() }
    }

    /// Return the bits of the canonical NaN: positive, quiet, no payload.
    pub(super) fn nan(self) -> u64 {
        if self.is_finite { self.sign() - 1 } else { self.infinity() | 1 << (self.fraction_bits - 1) }
    }

    /// Return the sign bit.
    pub(super) fn sign(self) -> u64 {
        1 << (self.fraction_bits + self.exponent_bits)
    }

    /// Return the bits without the sign.
    pub(super) fn magnitude(self, bits: u64) -> u64 {
        bits & (self.sign() - 1)
    }

    /// Return whether the bits are a NaN, quiet or signalling.
    pub(super) fn is_nan(self, bits: u64) -> bool {
        self.magnitude(bits) > self.greatest()
    }

    /// The exponent of the least subnormal number.
    fn least_exponent(self) -> i32 {
        let bias = (1 << (self.exponent_bits - 1)) - 1;
        1 - bias - self.fraction_bits as i32
    }

    fn decode(self, bits: u64) -> Option<Number> {
        let negative = bits & self.sign() != 0;
        let magnitude = self.magnitude(bits);
        if self.is_nan(bits) {
            return None;
        }
        if magnitude == self.infinity() && !self.is_finite {
            return Some(Number::Infinite { negative });
        }
        let field = (magnitude >> self.fraction_bits) as i32;
        let fraction = u128::from(magnitude & ((1 << self.fraction_bits) - 1));
        let implicit = if field == 0 { 0 } else { 1_u128 << self.fraction_bits };
        let exponent = self.least_exponent() + (field - 1).max(0);
        Some(Number::Finite { negative, significand: implicit | fraction, exponent })
    }

    fn encode(self, number: Number) -> u64 {
        let (negative, magnitude) = match number {
            Number::Infinite { negative } => (negative, u64::MAX),
            Number::Finite { negative, significand, exponent } => (negative, self.round(significand, exponent)),
        };
        if magnitude > self.greatest() && self.is_finite {
            return self.nan();
        }
        let magnitude = magnitude.min(self.greatest());
        if negative { self.sign() | magnitude } else { magnitude }
    }

    /// Round significand x 2^exponent to nearest even, and return the bits without the sign.
    fn round(self, significand: u128, exponent: i32) -> u64 {
        if significand == 0 {
            return 0;
        }
        let top = 127 - significand.leading_zeros() as i32 + exponent;
        // The unit in the last place follows from the leading bit, but is at least that of subnormals.
        let unit = (top - self.fraction_bits as i32).max(self.least_exponent());
        let drop = unit - exponent;
        let rounded = match drop {
            ..=0 => significand << -drop,
            1..=127 => {
                let (kept, rest, half) = (significand >> drop, significand & ((1 << drop) - 1), 1_u128 << (drop - 1));
                kept + u128::from(rest > half || (rest == half && kept & 1 == 1))
            }
            // Less than half a unit: the leading bit lies below bit 127 of the unit.
            _ => 0,
        };
        // The leading bit of a normal significand adds 1 to the exponent field, as does a carry.
        let field = (unit - self.least_exponent()) as u128;
        let bits = (field << self.fraction_bits) + rounded;
        bits.min(u128::from(u64::MAX)) as u64
    }

    fn add(self, a: u64, b: u64) -> u64 {
        let (Some(x), Some(y)) = (self.decode(a), self.decode(b)) else { return self.nan() };
        match (x, y) {
            (Number::Infinite { negative }, Number::Infinite { negative: other }) if negative != other => self.nan(),
            (infinite @ Number::Infinite { .. }, _) | (_, infinite @ Number::Infinite { .. }) => self.encode(infinite),
            (
                Number::Finite { negative: n1, significand: s1, exponent: e1 },
                Number::Finite { negative: n2, significand: s2, exponent: e2 },
            ) => self.encode(add_finite((n1, s1, e1), (n2, s2, e2))),
        }
    }

    fn multiply(self, a: u64, b: u64) -> u64 {
        let (Some(x), Some(y)) = (self.decode(a), self.decode(b)) else { return self.nan() };
        match (x, y) {
            (
                Number::Finite { negative: n1, significand: s1, exponent: e1 },
                Number::Finite { negative: n2, significand: s2, exponent: e2 },
            ) => self.encode(Number::Finite { negative: n1 != n2, significand: s1 * s2, exponent: e1 + e2 }),
            (Number::Infinite { .. }, Number::Finite { significand: 0, .. })
            | (Number::Finite { significand: 0, .. }, Number::Infinite { .. }) => self.nan(),
            _ => self.encode(Number::Infinite { negative: (a ^ b) & self.sign() != 0 }),
        }
    }

    fn divide(self, a: u64, divisor: u32) -> u64 {
        // Extra bits below a significand of 53 bits: more than enough for one rounding with a sticky bit.
        const EXTRA_BITS: u32 = 70;
        match self.decode(a) {
            Some(Number::Finite { negative, significand, exponent }) => {
                let (wide, divisor) = (significand << EXTRA_BITS, u128::from(divisor));
                let significand = (wide / divisor) << 1 | u128::from(!wide.is_multiple_of(divisor));
                self.encode(Number::Finite { negative, significand, exponent: exponent - EXTRA_BITS as i32 - 1 })
            }
            Some(infinite) => self.encode(infinite),
            None => self.nan(),
        }
    }

    fn extreme(self, a: u64, b: u64, greatest: bool) -> u64 {
        if self.is_nan(a) || self.is_nan(b) {
            return self.nan();
        }
        // Maps sign and magnitude to integers in order, with -0 just below +0.
        let rank = |bits: u64| {
            let magnitude = i128::from(self.magnitude(bits));
            if bits & self.sign() == 0 { magnitude } else { -1 - magnitude }
        };
        if (rank(a) > rank(b)) == greatest { a } else { b }
    }
}

/// Add two numbers (negative, significand of at most 53 bits, exponent). Keeps 64 bits below the greater exponent and a
/// sticky bit, which is more than enough for one rounding to 53 bits.
fn add_finite(a: (bool, u128, i32), b: (bool, u128, i32)) -> Number {
    let ((n1, s1, e1), (n2, s2, e2)) = if a.2 >= b.2 { (a, b) } else { (b, a) };
    let shift = (e1 - e2) as u32;
    let (high, wide) = (s1 << 64, s2 << 64);
    let low = match wide.checked_shr(shift) {
        Some(low) if low << shift == wide => low,
        Some(low) => low | 1,
        None => u128::from(wide != 0),
    };
    let (negative, significand) = match (n1 == n2, high >= low) {
        (true, _) => (n1, high + low),
        (false, true) => (n1 && high != low, high - low),
        (false, false) => (n2, low - high),
    };
    Number::Finite { negative, significand, exponent: e1 - 64 }
}

/// Return an element as an accumulator: its exact value, or a NaN.
pub(super) fn widen(dtype: Dtype, bits: u64) -> u64 {
    let (Some(from), Some(to)) = (Format::of(dtype), Format::of(dtype.accumulator())) else { return bits };
    from.decode(bits).map_or(to.nan(), |number| to.encode(number))
}

/// Return `a op b` of two accumulators of type `acc`.
pub(super) fn apply(acc: Dtype, op: ReduceOp, a: u64, b: u64) -> u64 {
    if let Some(format) = Format::of(acc) {
        return match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => format.add(a, b),
            ReduceOp::Prod => format.multiply(a, b),
            ReduceOp::Min => format.extreme(a, b, false),
            ReduceOp::Max => format.extreme(a, b, true),
            other => panic!("{other} of {acc}"),
        };
    }
    let (x, y) = (integer(acc, a), integer(acc, b));
    wrap(
        acc,
        match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => x + y,
            ReduceOp::Prod => x.wrapping_mul(y),
            ReduceOp::Min => x.min(y),
            ReduceOp::Max => x.max(y),
            ReduceOp::Band => x & y,
            ReduceOp::Bor => x | y,
            ReduceOp::Bxor => x ^ y,
            ReduceOp::Land => i128::from(x != 0 && y != 0),
            ReduceOp::Lor => i128::from(x != 0 || y != 0),
            ReduceOp::Lxor => i128::from((x != 0) != (y != 0)),
            other => panic!("{other} of {acc}"),
        },
    )
}

/// Return the result element of an accumulator.
pub(super) fn finish(dtype: Dtype, op: ReduceOp, ranks: u32, acc: u64) -> u64 {
    let accumulator = dtype.accumulator();
    let value = match (op, Format::of(accumulator)) {
        (ReduceOp::Avg, Some(format)) => format.divide(acc, ranks),
        // Truncating, like Rust's integer division.
        (ReduceOp::Avg, None) => wrap(accumulator, integer(accumulator, acc) / i128::from(ranks)),
        (ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor, _) => u64::from(acc != 0),
        _ => acc,
    };
    round(dtype, value)
}

/// Return an element times a scalar.
pub(super) fn scale(dtype: Dtype, bits: u64, scalar: f64) -> u64 {
    let acc = dtype.accumulator();
    let Some(format) = Format::of(acc) else {
        return wrap(dtype, integer(dtype, bits).wrapping_mul(scalar as i128));
    };
    let double = Format::of(Dtype::F64).expect("a float");
    let scalar = double.decode(scalar.to_bits()).map_or(format.nan(), |number| format.encode(number));
    round(dtype, format.multiply(widen(dtype, bits), scalar))
}

/// Return an accumulator rounded to an element.
pub(super) fn round(dtype: Dtype, acc: u64) -> u64 {
    let (Some(from), Some(to)) = (Format::of(dtype.accumulator()), Format::of(dtype)) else { return acc };
    from.decode(acc).map_or(to.nan(), |number| to.encode(number))
}

/// Return the value of an integer type's bits.
fn integer(dtype: Dtype, bits: u64) -> i128 {
    let is_signed = matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
    let len = dtype.size_bytes() as u32 * 8;
    // Sign-extend by subtracting 2^len from the upper half, in a type in which sums do not wrap.
    i128::from(bits) - if is_signed && bits >> (len - 1) == 1 { 1_i128 << len } else { 0 }
}

/// Return an integer's bits modulo 2^bits.
fn wrap(dtype: Dtype, value: i128) -> u64 {
    value.rem_euclid(1 << (dtype.size_bytes() as u32 * 8)) as u64
}
