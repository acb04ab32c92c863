//! Expected results, computed without the code under test.
//!
//! Inputs are functions of (seed, group, rank, operation, element). Integer elements carry a full-width random weight,
//! so a double, missing or stale contribution changes the sum by a random number and cannot cancel out (except with
//! probability 2^-bits of the type). Float results are evaluated in the declared order by plain recursion over the
//! tree. Under `Order::Arrival`, floats are small integers, whose sums are exact in any order.

use sumac_hal::ctrl::Order;
use sumac_hal::op::{Dtype, ReduceOp};

/// A tree over ranks, as the cluster is wired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// A rank.
    Rank(usize),
    /// A node and its children in declared order.
    Node(Vec<Shape>),
}

/// A counter-based generator: equal coordinates give equal bits, whatever was drawn before (the finaliser of
/// SplitMix64, Steele et al. 2014).
pub fn weight(coordinates: &[u64]) -> u64 {
    coordinates.iter().fold(0x9e37_79b9_7f4a_7c15, |state, &coordinate| {
        let mut z = (state ^ coordinate).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// A value, in a form that represents every type exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Value {
    Int(i128),
    F32(f32),
    F64(f64),
}

/// An element: a value, and its index for operators that use one (otherwise 0).
#[derive(Debug, Clone, Copy, PartialEq)]
struct Element {
    value: Value,
    index: u64,
}

/// Return the bytes of one input element. `exact` selects values whose result does not depend on the order.
pub fn input(dtype: Dtype, op: ReduceOp, exact: bool, coordinates: &[u64]) -> Vec<u8> {
    let weight = weight(coordinates);
    let float = match op {
        // Powers of two have exact products.
        ReduceOp::Prod if exact => [0.5, -1.0, 1.0, 2.0][(weight % 4) as usize],
        _ => float(dtype, weight, exact),
    };
    let mut bytes = match dtype {
        Dtype::F16 => half::f16::from_f32(float).to_le_bytes().to_vec(),
        Dtype::Bf16 => half::bf16::from_f32(float).to_le_bytes().to_vec(),
        Dtype::E4m3 | Dtype::E5m2 => vec![narrow_fp8(dtype, float)],
        Dtype::F32 => float.to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(float).to_le_bytes().to_vec(),
        _ => weight.to_le_bytes()[..dtype.size_bytes()].to_vec(),
    };
    if op.is_located() {
        // Another ten bits of the weight: sometimes two ranks have the same pair.
        bytes.extend(&((weight >> 20) % 1024).to_le_bytes()[..dtype.size_bytes()]);
    }
    bytes
}

/// A float of mixed magnitude, or a small integer.
fn float(dtype: Dtype, weight: u64, exact: bool) -> f32 {
    if exact {
        (weight % 15) as f32 - 7.0
    } else {
        let mantissa = (weight >> 40) as f32 / (1 << 24) as f32 - 0.5;
        // Up to 2^9, or 2^5, so that E4M3 can represent some sums.
        let spread = if dtype.size_bytes() == 1 { 12 } else { 20 };
        mantissa * 2_f32.powi((weight % spread) as i32 - spread as i32 / 2)
    }
}

/// Fraction bits and exponent bias of an 8-bit float.
fn fp8(dtype: Dtype) -> (i32, i32) {
    if dtype == Dtype::E4m3 { (3, 7) } else { (2, 15) }
}

/// Round to an 8-bit float as specified: to nearest even, and beyond the maximum to infinity or (E4M3) NaN.
fn narrow_fp8(dtype: Dtype, x: f32) -> u8 {
    let (fraction_bits, bias) = fp8(dtype);
    let (overflow, nan) = if dtype == Dtype::E4m3 { (0x7f, 0x7f) } else { (0x7c, 0x7e) };
    let magnitude = f64::from(x.abs());
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    let units = (magnitude / 2_f64.powi(exponent - fraction_bits)).round_ties_even();
    // The leading bit of a normal number's units adds 1 to the exponent field.
    let bits = f64::from((exponent - (1 - bias)) << fraction_bits) + units;
    match bits {
        _ if x.is_nan() => nan,
        bits if bits >= f64::from(overflow) && overflow == nan => nan,
        bits => bits.min(f64::from(overflow)) as u8 | u8::from(x.is_sign_negative()) << 7,
    }
}

fn widen_fp8(dtype: Dtype, bits: u8) -> f32 {
    let (fraction_bits, bias) = fp8(dtype);
    let (greatest, infinity) = if dtype == Dtype::E4m3 { (0x7e, u8::MAX) } else { (0x7c, 0x7c) };
    let magnitude = bits & 0x7f;
    let (field, fraction) = (i32::from(magnitude >> fraction_bits), f32::from(magnitude % (1 << fraction_bits)));
    let leading = if field == 0 { 0.0 } else { f32::from(1_u8 << fraction_bits) };
    let value = (leading + fraction) * 2_f32.powi(field.max(1) - bias - fraction_bits);
    let value = match magnitude {
        magnitude if magnitude > greatest => f32::NAN,
        magnitude if magnitude == infinity => f32::INFINITY,
        _ => value,
    };
    if bits & 0x80 == 0 { value } else { -value }
}

fn is_signed(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64)
}

/// Return an integer modulo 2^bits, as a value of the type.
fn wrap(dtype: Dtype, x: i128) -> i128 {
    let modulus = 1_i128 << (8 * dtype.size_bytes());
    let x = x.rem_euclid(modulus);
    if is_signed(dtype) && x >= modulus / 2 { x - modulus } else { x }
}

fn parse(dtype: Dtype, bytes: &[u8]) -> Element {
    let (value, index) = bytes.split_at(dtype.size_bytes());
    let unsigned = |bytes: &[u8]| bytes.iter().rev().fold(0_u64, |n, &byte| n << 8 | u64::from(byte));
    let bits = unsigned(value);
    let value = match dtype {
        Dtype::F16 => Value::F32(half::f16::from_bits(bits as u16).to_f32()),
        Dtype::Bf16 => Value::F32(half::bf16::from_bits(bits as u16).to_f32()),
        Dtype::E4m3 | Dtype::E5m2 => Value::F32(widen_fp8(dtype, bits as u8)),
        Dtype::F32 => Value::F32(f32::from_bits(bits as u32)),
        Dtype::F64 => Value::F64(f64::from_bits(bits)),
        _ => Value::Int(wrap(dtype, bits.into())),
    };
    Element { value, index: unsigned(index) }
}

/// Encode a result: averages are divided, booleans become 1 or 0, floats are rounded and NaNs made canonical.
fn emit(dtype: Dtype, op: ReduceOp, ranks: usize, Element { value, index }: Element) -> Vec<u8> {
    let divisor = if op == ReduceOp::Avg { ranks } else { 1 };
    let mut bytes = match value {
        Value::Int(x) if is_logical(op) => i128::from(x != 0).to_le_bytes()[..dtype.size_bytes()].to_vec(),
        Value::Int(x) => (x / divisor as i128).to_le_bytes()[..dtype.size_bytes()].to_vec(),
        Value::F64(x) if x.is_nan() => 0x7ff8_0000_0000_0000_u64.to_le_bytes().to_vec(),
        Value::F64(x) => (x / divisor as f64).to_le_bytes().to_vec(),
        Value::F32(x) => {
            let x = x / divisor as f32;
            match dtype {
                Dtype::E4m3 | Dtype::E5m2 => vec![narrow_fp8(dtype, x)],
                Dtype::F16 if x.is_nan() => 0x7e00_u16.to_le_bytes().to_vec(),
                Dtype::Bf16 if x.is_nan() => 0x7fc0_u16.to_le_bytes().to_vec(),
                _ if x.is_nan() => 0x7fc0_0000_u32.to_le_bytes().to_vec(),
                Dtype::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                Dtype::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                _ => x.to_le_bytes().to_vec(),
            }
        }
    };
    if op.is_located() {
        bytes.extend(&index.to_le_bytes()[..dtype.size_bytes()]);
    }
    bytes
}

fn is_logical(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Land | ReduceOp::Lor | ReduceOp::Lxor)
}

fn combine(dtype: Dtype, op: ReduceOp, a: Element, b: Element) -> Element {
    if op.is_located() {
        let (x, y) = if op == ReduceOp::MinLoc { (a.value, b.value) } else { (b.value, a.value) };
        let a_first = if a.value == b.value { a.index <= b.index } else { less(x, y) };
        return if a_first { a } else { b };
    }
    let value = match (a.value, b.value) {
        (Value::Int(a), Value::Int(b)) => Value::Int(wrap(dtype, integers(op, a, b))),
        (Value::F32(a), Value::F32(b)) => Value::F32(match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => a + b,
            ReduceOp::Prod => a * b,
            _ => floats(op, f64::from(a), f64::from(b)) as f32,
        }),
        (Value::F64(a), Value::F64(b)) => Value::F64(floats(op, a, b)),
        (a, b) => panic!("the oracle does not know {a:?} {op} {b:?}"),
    };
    Element { value, index: 0 }
}

fn less(a: Value, b: Value) -> bool {
    match (a, b) {
        (Value::Int(a), Value::Int(b)) => a < b,
        (Value::F32(a), Value::F32(b)) => a < b,
        (Value::F64(a), Value::F64(b)) => a < b,
        (a, b) => panic!("{a:?} and {b:?} are not of one type"),
    }
}

fn integers(op: ReduceOp, a: i128, b: i128) -> i128 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => a + b,
        ReduceOp::Prod => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Band => a & b,
        ReduceOp::Bor => a | b,
        ReduceOp::Bxor => a ^ b,
        ReduceOp::Land => i128::from(a != 0 && b != 0),
        ReduceOp::Lor => i128::from(a != 0 || b != 0),
        ReduceOp::Lxor => i128::from((a != 0) != (b != 0)),
        other => panic!("the oracle does not know {other} of integers"),
    }
}

/// Minimum and maximum of NaN are covered by the kernels' own tests. Of equal zeros, the negative one is smaller.
fn floats(op: ReduceOp, a: f64, b: f64) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => a + b,
        ReduceOp::Prod => a * b,
        ReduceOp::Min if a < b || a == b && a.is_sign_negative() => a,
        ReduceOp::Max if a > b || a == b && a.is_sign_positive() => a,
        ReduceOp::Min | ReduceOp::Max => b,
        other => panic!("the oracle does not know {other} of floats"),
    }
}

/// Evaluate the declared expression for one element over the tree, given each rank's input bytes of it.
pub fn expected(shape: &Shape, order: Order, dtype: Dtype, op: ReduceOp, inputs: &dyn Fn(usize) -> Vec<u8>) -> Vec<u8> {
    emit(dtype, op, ranks(shape), evaluate(shape, order, dtype, op, inputs))
}

fn ranks(shape: &Shape) -> usize {
    match shape {
        Shape::Rank(_) => 1,
        Shape::Node(children) => children.iter().map(ranks).sum(),
    }
}

fn evaluate(shape: &Shape, order: Order, dtype: Dtype, op: ReduceOp, inputs: &dyn Fn(usize) -> Vec<u8>) -> Element {
    match shape {
        Shape::Rank(rank) => parse(dtype, &inputs(*rank)),
        Shape::Node(children) => {
            let values: Vec<Element> = children.iter().map(|child| evaluate(child, order, dtype, op, inputs)).collect();
            let combine = |a, b| combine(dtype, op, a, b);
            match order {
                Order::TreePairwise => pairwise(&combine, &values),
                _ => values.into_iter().reduce(combine).expect("a node has children"),
            }
        }
    }
}

/// The left block has the largest power of two below the number of values; both halves likewise.
fn pairwise(combine: &dyn Fn(Element, Element) -> Element, values: &[Element]) -> Element {
    if let [value] = values {
        return *value;
    }
    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
    combine(pairwise(combine, left), pairwise(combine, right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_rounding_follows_the_specification() {
        assert_eq!(widen_fp8(Dtype::E4m3, 0x7e), 448.0);
        assert_eq!(widen_fp8(Dtype::E4m3, 0x01), 1.0 / 512.0);
        assert_eq!(widen_fp8(Dtype::E5m2, 0x7b), 57_344.0);
        assert_eq!(widen_fp8(Dtype::E5m2, 0xfc), f32::NEG_INFINITY);
        assert_eq!(narrow_fp8(Dtype::E4m3, -464.0), 0xfe);
        assert_eq!(narrow_fp8(Dtype::E4m3, -464.1), 0x7f);
        assert_eq!(narrow_fp8(Dtype::E5m2, 61_440.0), 0x7c);
        for dtype in [Dtype::E4m3, Dtype::E5m2] {
            for bits in (0..=u8::MAX).filter(|&bits| !widen_fp8(dtype, bits).is_nan()) {
                assert_eq!(narrow_fp8(dtype, widen_fp8(dtype, bits)), bits, "{dtype} {bits:#04x}");
            }
        }
    }
}
