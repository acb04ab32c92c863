//! The self-test of a version: its reductions on this processor give the results that arithmetic demands.
//!
//! The kernels are chosen by the processor's vector extensions, so that a build for another processor would fail here
//! or be ended by a signal. Sums and maxima of small whole numbers are exact in every type.

use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The number of elements: whole vectors of every width, and a rest.
const COUNT: usize = 1031;
/// The number of contributions.
const RANKS: usize = 3;

/// Run it; the error names what differs.
///
/// # Errors
/// The type and the operator.
pub fn run() -> Result<(), String> {
    for dtype in [Dtype::I32, Dtype::F32, Dtype::F64, Dtype::Bf16] {
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            let kernel = Kernel::new(dtype, op).ok_or_else(|| format!("{op} of {dtype} is not supported"))?;
            if result(&kernel) != expected(dtype, op) {
                return Err(format!("{op} of {dtype} is wrong on this processor"));
            }
        }
    }
    Ok(())
}

fn result(kernel: &Kernel) -> Vec<u8> {
    let contribution =
        |rank| (0..COUNT).flat_map(move |at| encode(kernel.dtype(), value(at, rank))).collect::<Vec<u8>>();
    let mut acc = vec![0; COUNT * kernel.accumulator_bytes()];
    kernel.load(&mut acc, &contribution(0), false);
    for rank in 1..RANKS {
        kernel.combine(&mut acc, &contribution(rank), false);
    }
    let len = kernel.finish(&mut acc, COUNT, RANKS as u32);
    acc.truncate(len);
    acc
}

fn expected(dtype: Dtype, op: ReduceOp) -> Vec<u8> {
    let element = |at| {
        let values = (0..RANKS).map(|rank| value(at, rank));
        if op == ReduceOp::Sum { values.sum() } else { values.max().unwrap_or(0) }
    };
    (0..COUNT).flat_map(|at| encode(dtype, element(at))).collect()
}

/// Return a small whole number, negative for some.
fn value(at: usize, rank: usize) -> i16 {
    ((at * 7 + rank * 13) % 61) as i16 - 20
}

fn encode(dtype: Dtype, value: i16) -> Vec<u8> {
    match dtype {
        Dtype::I32 => i32::from(value).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
        // The upper half, which holds whole numbers up to 256 exactly.
        Dtype::Bf16 => f32::from(value).to_le_bytes()[2..].to_vec(),
        _ => f32::from(value).to_le_bytes().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_processor_passes_and_a_wrong_result_is_found() {
        run().expect("passes");
        let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
        assert_ne!(result(&kernel), expected(Dtype::F32, ReduceOp::Max));
        assert_eq!(result(&kernel)[..4], (-20.0_f32 + -7.0 + 6.0).to_le_bytes());
    }
}
