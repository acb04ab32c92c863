//! Missing components are named on machines that lack them.

use super::*;
use sumac_hal::op::{Dtype, ReduceOp};

#[test]
fn missing_gpu_is_reported() {
    match Cuda::open(CudaOptions { ordinal: 4096, ..CudaOptions::default() }) {
        Err(error @ GpuError::Unavailable(_)) => {
            assert!(error.to_string().starts_with("CUDA unavailable: "), "{error}");
        }
        other => panic!("no machine has GPU 4096: {other:?}"),
    }
}

#[test]
fn drivers_for_cuda_12_4_and_later_are_supported_and_older_ones_named() {
    for has in [12_040, 12_080, 12_090, 13_000] {
        assert_eq!(supported(has), Ok(()));
    }
    for (has, text) in [(12_030, "CUDA 12.3"), (11_080, "CUDA 11.8")] {
        let error = supported(has).expect_err("too old").to_string();
        assert!(error.contains(text) && error.contains("12.4 is required") && error.contains("R550"), "{error}");
    }
}

/// Code of a compiler that is newer than the driver does not load: what was shipped is used instead.
#[test]
fn code_of_a_compiler_that_is_newer_than_the_driver_is_refused_with_both_versions() {
    let (sass, ptx) = (Target::Sass(90), Target::Ptx(90));
    for (target, compiler, driver) in [
        (sass, 12_040, 12_040),
        (sass, 12_090, 12_040),
        (sass, 12_040, 13_000),
        (ptx, 12_040, 12_040),
        (ptx, 12_040, 13_000),
    ] {
        assert_eq!(compile::check_loadable(target, compiler, driver), Ok(target));
    }
    for (target, compiler, driver) in [(sass, 13_000, 12_090), (ptx, 12_080, 12_040), (ptx, 13_000, 12_090)] {
        let error = compile::check_loadable(target, compiler, driver).expect_err("too new").to_string();
        assert!(error.contains("nvrtc 1") && error.contains("for CUDA 12."), "{error}");
    }
}

/// What `tests/gpu/compile` has written.
#[test]
#[ignore = "needs the folder of compiled kernels in SUMAC_PTX; tests/gpu/compile runs it"]
fn shipped_ptx_has_the_version_that_the_oldest_driver_compiles() {
    let folder = std::env::var_os("SUMAC_PTX").expect("SUMAC_PTX names the folder");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("a file").path();
        let code = CompiledKernel::of_ptx(std::fs::read_to_string(&path).expect("text"));
        assert_eq!(code.ptx_version(), Some(compile::SHIPPED_PTX_VERSION), "{}", path.display());
        count += 1;
    }
    assert!(count > 100, "{count} kernels");
    let version = |text: &str| CompiledKernel::of_ptx(text.into()).ptx_version();
    assert_eq!(version("// by nvrtc\n.version 9.0\n.target sm_80\n"), Some((9, 0)));
    assert_eq!(version("// nothing"), None);
}

#[test]
fn missing_compiler_is_reported() {
    let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
    match compile::compile(&kernel, Target::Sass(90)) {
        Ok(code) => assert!(compile::is_available() && code.registers().is_some_and(|registers| registers > 0)),
        Err(GpuError::Unavailable(Unavailable::Compiler { wanted })) => {
            assert!(!compile::is_available());
            assert_eq!(wanted, "f32-sum.ptx");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn compiler_errors_are_quoted() {
    let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum).expect("supported");
    match compile::compile(&kernel, Target::Sass(1)) {
        Err(GpuError::Kernel { why, .. }) => assert!(why.contains("gpu-architecture"), "{why}"),
        Err(GpuError::Unavailable(Unavailable::Compiler { .. })) => assert!(!compile::is_available()),
        other => panic!("{other:?}"),
    }
}

/// Shipped PTX is used if there is no compiler, or if it is disabled.
#[test]
fn shipped_ptx_is_used_without_a_compiler() {
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
    assert_eq!(provided(options(true, here()), false, "f64-sum.ptx"), Err(Unavailable::Compiler { wanted }.into()));
    let wanted = "f32-sum.ptx".to_owned();
    assert_eq!(provided(options(true, None), false, "f32-sum.ptx"), Err(Unavailable::Compiler { wanted }.into()));
    // A compiler that fails: its own error only where nothing was shipped.
    let failed = || GpuError::Kernel { kernel: "f32 sum".into(), why: "no built-in functions".into() };
    let failing = |options: CudaOptions, name: &str| {
        compile::provide(&options, true, name.into(), || Err(failed())).map(|code| code.bytes().to_vec())
    };
    assert_eq!(failing(options(true, here()), "f32-sum.ptx"), Ok(b"// shipped".to_vec()));
    assert_eq!(failing(options(true, here()), "f64-sum.ptx"), Err(failed()));
    assert_eq!(failing(options(true, None), "f32-sum.ptx"), Err(failed()));
    std::fs::remove_dir_all(&folder).expect("the folder");
}
