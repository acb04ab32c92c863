//! Tests of [`Kernel::scale`].

use super::super::ScaleError;
use super::values::{bytes_of, draw, specials, values_of};
use super::{Kernel, VERSIONS, oracle};
use crate::op::{Dtype, ReduceOp};
use proptest::prelude::*;

fn check(dtype: Dtype, values: &[u64], scalar: f64) {
    let kernel = Kernel::new(dtype, ReduceOp::PremulSum).expect("supported by every type");
    let right: Vec<u64> = values.iter().map(|&bits| oracle::scale(dtype, bits, scalar)).collect();
    for version in VERSIONS {
        let src = bytes_of(dtype, values);
        let mut dst = vec![0xa5; src.len()];
        (version.scale)(&kernel, &mut dst, &src, scalar);
        assert_eq!(values_of(dtype, &dst), right, "{} {dtype} x {scalar:e}", version.name);
    }
}

#[test]
fn special_values_and_scalars_match_the_oracle() {
    let whole = [0.0, -0.0, 1.0, -1.0, 3.0, 255.0, -129.0, 4_294_967_297.0, -9.223_372_036_854_776e18, 1e19];
    let others = [0.1, -0.5, 1e-40, 1e39, -1e-320, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MIN_POSITIVE];
    for &dtype in Dtype::ALL {
        for &scalar in whole.iter().chain(others.iter().filter(|_| !dtype.is_integer())) {
            check(dtype, &specials(dtype), scalar);
        }
    }
}

proptest! {
    #[test]
    fn random_values_and_scalars_match_the_oracle(
        seed: u64,
        dtype in prop::sample::select(Dtype::ALL),
        len in 0_usize..300,
        float in prop_oneof![-4.0_f64..4.0, any::<f64>()],
        integer: i64,
    ) {
        let mut state = seed;
        let scalar = if dtype.is_integer() { integer as f64 } else { float };
        prop_assume!(scalar < 18_446_744_073_709_551_616.0 || !dtype.is_integer());
        check(dtype, &draw(&mut state, dtype, len), scalar);
    }
}

#[test]
fn scale_refuses_fractions_for_integers_and_other_operators() {
    let kernel = Kernel::new(Dtype::I32, ReduceOp::PremulSum).expect("supported");
    for scalar in [0.5, -0.1, 18_446_744_073_709_551_616.0, -9.3e18, f64::INFINITY, f64::NAN] {
        let mut dst = [7; 4];
        let error = kernel.scale(&mut dst, &[1; 4], scalar).expect_err("no whole number of 64 bits");
        assert!(matches!(error, ScaleError::Scalar { dtype: Dtype::I32, .. }), "{error}");
        assert_eq!(dst, [7; 4]);
    }
    let sum = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
    assert_eq!(sum.scale(&mut [0; 4], &[0; 4], 2.0), Err(ScaleError::Operator(ReduceOp::Sum)));
}

#[test]
#[should_panic(expected = "4 bytes and 8 bytes of f32 are not equally many elements")]
fn scale_panics_if_lengths_differ() {
    let kernel = Kernel::new(Dtype::F32, ReduceOp::PremulSum).expect("supported");
    let _ = kernel.scale(&mut [0; 4], &[0; 8], 1.0);
}
