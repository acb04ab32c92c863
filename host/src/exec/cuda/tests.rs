//! What is missing is named, on machines where it is.

use super::*;
use sumac_hal::op::{Dtype, ReduceOp};

#[test]
fn a_machine_without_a_gpu_is_told_what_is_missing() {
    match Cuda::open(CudaOptions { ordinal: 4096, ..CudaOptions::default() }) {
        Err(error @ GpuError::Absent(_)) => {
            assert!(error.to_string().starts_with("no CUDA here, because "), "{error}");
        }
        other => panic!("no machine has GPU 4096: {other:?}"),
    }
}

#[test]
fn without_a_compiler_its_absence_is_named() {
    let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
    match compile::compile(&kernel, Target::Sass(90)) {
        Ok(code) => assert!(compile::is_there() && code.registers().is_some_and(|registers| registers > 0)),
        Err(GpuError::Absent(Absent::Compiler { wanted })) => {
            assert!(!compile::is_there());
            assert_eq!(wanted, "f32-sum.ptx");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn what_the_compiler_refuses_is_in_its_words() {
    let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
    match compile::compile(&kernel, Target::Sass(1)) {
        Err(GpuError::Kernel { why, .. }) => assert!(why.contains("gpu-architecture"), "{why}"),
        Err(GpuError::Absent(Absent::Compiler { .. })) => assert!(!compile::is_there()),
        other => panic!("{other:?}"),
    }
}
