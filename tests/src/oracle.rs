//! What the answer has to be, worked out without the code under test.
//!
//! Inputs are functions of (seed, group, rank, operation, element). Integer elements carry such a weight in full,
//! so a double, missing or stale contribution changes the sum by a random number and can't cancel out (but with
//! probability 2^-64, or 2^-32 for 32-bit types). Float results are evaluated in the declared order by a plain
//! recursion over the tree; under `Order::Arrival`, floats are small integers, whose sums are exact in any order.

use sumac_hal::ctrl::Order;
use sumac_hal::op::{Dtype, ReduceOp};

/// A tree over ranks, as the cluster was wired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// A rank.
    Rank(usize),
    /// A node and its children in declared order.
    Node(Vec<Shape>),
}

/// A small counter-based generator: the same bits for the same coordinates, whatever was asked before
/// (the finaliser of SplitMix64, Steele et al. 2014).
pub fn weight(coordinates: &[u64]) -> u64 {
    coordinates.iter().fold(0x9e37_79b9_7f4a_7c15, |state, &coordinate| {
        let mut z = (state ^ coordinate).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// One element, in a form that holds every type's values exactly.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Value {
    Int(i64),
    F32(f32),
    F64(f64),
}

/// Return the bytes of one input element.
pub fn input(dtype: Dtype, exact: bool, coordinates: &[u64]) -> Vec<u8> {
    let weight = weight(coordinates);
    match dtype {
        Dtype::I32 => (weight as u32).to_le_bytes().to_vec(),
        Dtype::I64 => weight.to_le_bytes().to_vec(),
        Dtype::F16 => narrow_f16(float(weight, exact)).to_le_bytes().to_vec(),
        Dtype::Bf16 => narrow_bf16(float(weight, exact)).to_le_bytes().to_vec(),
        Dtype::F32 => float(weight, exact).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(float(weight, exact)).to_le_bytes().to_vec(),
        other => panic!("the oracle does not know {other}"),
    }
}

/// A float of mixed size, or a small integer.
fn float(weight: u64, exact: bool) -> f32 {
    if exact {
        (weight % 15) as f32 - 7.0
    } else {
        let mantissa = (weight >> 40) as f32 / (1 << 24) as f32 - 0.5;
        mantissa * 2_f32.powi((weight % 20) as i32 - 10)
    }
}

fn narrow_f16(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

fn narrow_bf16(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

fn parse(dtype: Dtype, bytes: &[u8]) -> Value {
    match dtype {
        Dtype::I32 => Value::Int(i64::from(i32::from_le_bytes(bytes.try_into().expect("4 bytes")))),
        Dtype::I64 => Value::Int(i64::from_le_bytes(bytes.try_into().expect("8 bytes"))),
        Dtype::F16 => Value::F32(half::f16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f32()),
        Dtype::Bf16 => Value::F32(half::bf16::from_le_bytes(bytes.try_into().expect("2 bytes")).to_f32()),
        Dtype::F32 => Value::F32(f32::from_le_bytes(bytes.try_into().expect("4 bytes"))),
        Dtype::F64 => Value::F64(f64::from_le_bytes(bytes.try_into().expect("8 bytes"))),
        other => panic!("the oracle does not know {other}"),
    }
}

fn emit(dtype: Dtype, value: Value) -> Vec<u8> {
    match (dtype, value) {
        (Dtype::I32, Value::Int(x)) => (x as i32).to_le_bytes().to_vec(),
        (Dtype::I64, Value::Int(x)) => x.to_le_bytes().to_vec(),
        (Dtype::F16, Value::F32(x)) => narrow_f16(x).to_le_bytes().to_vec(),
        (Dtype::Bf16, Value::F32(x)) => narrow_bf16(x).to_le_bytes().to_vec(),
        (Dtype::F32, Value::F32(x)) => x.to_le_bytes().to_vec(),
        (Dtype::F64, Value::F64(x)) => x.to_le_bytes().to_vec(),
        (dtype, value) => panic!("{value:?} is not of type {dtype}"),
    }
}

fn combine(op: ReduceOp, a: Value, b: Value) -> Value {
    match (op, a, b) {
        (ReduceOp::Sum, Value::Int(a), Value::Int(b)) => Value::Int(a.wrapping_add(b)),
        (ReduceOp::Min, Value::Int(a), Value::Int(b)) => Value::Int(a.min(b)),
        (ReduceOp::Max, Value::Int(a), Value::Int(b)) => Value::Int(a.max(b)),
        (ReduceOp::Sum, Value::F32(a), Value::F32(b)) => Value::F32(a + b),
        (ReduceOp::Min, Value::F32(a), Value::F32(b)) => Value::F32(if a < b { a } else { b }),
        (ReduceOp::Max, Value::F32(a), Value::F32(b)) => Value::F32(if a > b { a } else { b }),
        (ReduceOp::Sum, Value::F64(a), Value::F64(b)) => Value::F64(a + b),
        (ReduceOp::Min, Value::F64(a), Value::F64(b)) => Value::F64(if a < b { a } else { b }),
        (ReduceOp::Max, Value::F64(a), Value::F64(b)) => Value::F64(if a > b { a } else { b }),
        (op, a, b) => panic!("the oracle does not know {a:?} {op} {b:?}"),
    }
}

/// Evaluate the declared expression for one element over the tree, given each rank's input bytes of it.
pub fn expected(shape: &Shape, order: Order, dtype: Dtype, op: ReduceOp, inputs: &dyn Fn(usize) -> Vec<u8>) -> Vec<u8> {
    emit(dtype, evaluate(shape, order, dtype, op, inputs))
}

fn evaluate(shape: &Shape, order: Order, dtype: Dtype, op: ReduceOp, inputs: &dyn Fn(usize) -> Vec<u8>) -> Value {
    match shape {
        Shape::Rank(rank) => parse(dtype, &inputs(*rank)),
        Shape::Node(children) => {
            let values: Vec<Value> = children.iter().map(|child| evaluate(child, order, dtype, op, inputs)).collect();
            match order {
                Order::TreePairwise => pairwise(op, &values),
                _ => values.into_iter().reduce(|a, b| combine(op, a, b)).expect("a node has children"),
            }
        }
    }
}

/// Left block: the largest power of two below the number of values; both halves likewise.
fn pairwise(op: ReduceOp, values: &[Value]) -> Value {
    if let [value] = values {
        return *value;
    }
    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
    combine(op, pairwise(op, left), pairwise(op, right))
}
