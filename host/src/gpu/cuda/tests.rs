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

/// Shipped PTX is the second way: taken where there is no compiler, and where none is to be used.
#[test]
fn without_a_compiler_shipped_ptx_is_taken() {
    let folder = std::env::temp_dir().join(format!("sumac-ptx-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("f32-sum.ptx"), "// shipped").expect("a file");
    let options = |compiles, kernels| CudaOptions { compiles, kernels, ..CudaOptions::default() };
    let compiled = || Ok(CompiledKernel::of_ptx("// compiled".into()));
    let provided = |options: CudaOptions, has_compiler, name: &str| {
        compile::provide(&options, has_compiler, name.into(), compiled).map(|code| code.bytes().to_vec())
    };
    let here = || Some(folder.clone());
    assert_eq!(provided(options(true, here()), true, "f32-sum.ptx"), Ok(b"// compiled".to_vec()));
    assert_eq!(provided(options(true, here()), false, "f32-sum.ptx"), Ok(b"// shipped".to_vec()));
    assert_eq!(provided(options(false, here()), true, "f32-sum.ptx"), Ok(b"// shipped".to_vec()));
    let wanted = folder.join("f64-sum.ptx").display().to_string();
    assert_eq!(provided(options(true, here()), false, "f64-sum.ptx"), Err(Absent::Compiler { wanted }.into()));
    let wanted = "f32-sum.ptx".to_owned();
    assert_eq!(provided(options(true, None), false, "f32-sum.ptx"), Err(Absent::Compiler { wanted }.into()));
    std::fs::remove_dir_all(&folder).expect("the folder");
}
