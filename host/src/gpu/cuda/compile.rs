//! Compiles `kernels.cu`, `bulk.cu` and `product.cu` with nvrtc, if available, for the GPU at hand, one kernel at a
//! time.
//!
//! A kernel is compiled for the GPU's own architecture if the compiler supports it, otherwise to PTX for the newest
//! older one, which the driver compiles. PTX in files ([`CompiledKernel::file_name`]) serves machines without nvrtc.

use super::CudaOptions;
use crate::gpu::engine::bulk_instruction;
use crate::gpu::{GpuError, Unavailable};
use cudarc::nvrtc::{Ptx, result, sys};
use std::ffi::{CStr, CString, c_char};
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The first architecture with a reducing copy engine.
pub const BULK_ARCH: u32 = 90;

/// The version of shipped PTX: the newest that drivers for CUDA 12.4 compile ("PTX ISA", release notes).
pub const SHIPPED_PTX_VERSION: (u32, u32) = (8, 4);

/// A source, its name, and the definitions of a kernel.
struct Source {
    text: &'static str,
    name: &'static CStr,
    defines: Vec<String>,
    /// For error messages.
    what: String,
}

/// Compilation target: compute capability times ten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Machine code of one architecture.
    Sass(u32),
    /// PTX that drivers compile for this architecture and later ones.
    Ptx(u32),
}

/// A compiled kernel.
#[derive(Debug, Clone)]
pub struct CompiledKernel {
    bytes: Vec<u8>,
    is_ptx: bool,
    log: String,
}

impl CompiledKernel {
    pub(super) fn of_ptx(ptx: String) -> Self {
        Self { bytes: ptx.into_bytes(), is_ptx: true, log: String::new() }
    }

    /// Return the file name of a kernel's PTX.
    pub fn file_name(kernel: &Kernel) -> String {
        format!("{}-{}.ptx", kernel.dtype(), kernel.op())
    }

    /// Return the file name of the copy engine's PTX.
    pub fn bulk_file_name(dtype: Dtype, op: ReduceOp) -> String {
        format!("bulk-{dtype}-{op}.ptx")
    }

    /// File name of the matrix product's PTX.
    pub const PRODUCT_FILE_NAME: &str = "product.ptx";

    /// Return the version in the text of PTX, as in `.version 8.4`.
    pub fn ptx_version(&self) -> Option<(u32, u32)> {
        let text = String::from_utf8_lossy(&self.bytes);
        let (major, minor) = text.lines().find_map(|line| line.strip_prefix(".version "))?.trim().split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// Return the code.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Return the registers of a thread, as reported by the compiler for [`Target::Sass`].
    pub fn registers(&self) -> Option<u32> {
        self.log_number("Used ", " registers")
    }

    /// Return the bytes that a thread spills, as reported by the compiler for [`Target::Sass`].
    pub fn spilled_bytes(&self) -> Option<u32> {
        self.log_number(" bytes stack frame, ", " bytes spill stores")
    }

    /// Return the largest number between two texts in the compiler's log.
    fn log_number(&self, before: &str, after: &str) -> Option<u32> {
        let numbers = self.log.split(before).skip(1).filter_map(|rest| rest.split_once(after)?.0.trim().parse().ok());
        numbers.max()
    }

    pub(super) fn into_module(self) -> Ptx {
        match self.is_ptx {
            true => Ptx::from_src(String::from_utf8_lossy(&self.bytes).replace('\0', "")),
            false => Ptx::from_binary(self.bytes),
        }
    }
}

/// Return code from the compiler, if available and enabled, otherwise from the folder of compiled kernels: also where
/// the compiler fails, as without its library of built-in functions.
pub(super) fn provide(
    options: &CudaOptions,
    has_compiler: bool,
    file_name: String,
    compile: impl FnOnce() -> Result<CompiledKernel, GpuError>,
) -> Result<CompiledKernel, GpuError> {
    let compiled = (options.compiles && has_compiler).then(compile);
    if let Some(Ok(compiled)) = compiled {
        return Ok(compiled);
    }
    let path = options.kernels.as_ref().map_or_else(|| file_name.clone().into(), |folder| folder.join(&file_name));
    let shipped = options.kernels.as_ref().and_then(|_| std::fs::read_to_string(&path).ok());
    match (shipped, compiled) {
        (Some(ptx), _) => Ok(CompiledKernel::of_ptx(ptx)),
        (None, Some(compiled)) => compiled,
        (None, None) => Err(Unavailable::Compiler { wanted: path.display().to_string() }.into()),
    }
}

/// Return whether the compiler is available.
pub fn is_available() -> bool {
    // SAFETY: loading the compiler runs its initialisers, as any use of it does.
    unsafe { sys::is_culib_present() }
}

/// Return the CUDA version of the compiler, as the driver counts: 12040 for 12.4.
///
/// # Errors
/// The compiler's error. It must be available.
fn version() -> Result<i32, GpuError> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: it writes two integers.
    named(unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }, "its version")?;
    Ok(1000 * major + 10 * minor)
}

/// Check that a driver for CUDA `driver` loads what a compiler of CUDA `compiler` makes: machine code within a major
/// version, PTX up to its own version ("CUDA Compatibility", minor version compatibility).
pub(super) fn check_loadable(target: Target, compiler: i32, driver: i32) -> Result<Target, GpuError> {
    let is_loadable = match target {
        Target::Sass(_) => compiler / 1000 <= driver / 1000,
        Target::Ptx(_) => compiler <= driver,
    };
    if is_loadable {
        return Ok(target);
    }
    let name = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    Err(GpuError::Kernel {
        kernel: format!("{target:?}"),
        why: format!(
            "the driver, for CUDA {}, does not load code of nvrtc {}; update the driver, or install an nvrtc of its \
             version or older (nvidia-cuda-nvrtc-cu12)",
            name(driver),
            name(compiler)
        ),
    })
}

/// Return the target for a GPU of this capability, which a driver for CUDA `driver` loads.
pub(super) fn best_target(capability: u32, driver: i32) -> Result<Target, GpuError> {
    let mut count = 0;
    // SAFETY: it writes one integer.
    named(unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }, "its architectures")?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many as it has said.
    named(unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }, "its architectures")?;
    let known = known.into_iter().filter_map(|arch| u32::try_from(arch).ok());
    match known.filter(|&arch| arch <= capability).max() {
        Some(arch) if arch == capability => check_loadable(Target::Sass(arch), version()?, driver),
        Some(arch) => check_loadable(Target::Ptx(arch), version()?, driver),
        None => Err(GpuError::Kernel {
            kernel: format!("a GPU of capability {}.{}", capability / 10, capability % 10),
            why: "the compiler supports only newer ones; use an older nvrtc".into(),
        }),
    }
}

/// Compile a kernel.
///
/// # Errors
/// [`GpuError::Unavailable`] without a compiler, [`GpuError::Kernel`] with its message.
pub fn compile(kernel: &Kernel, target: Target) -> Result<CompiledKernel, GpuError> {
    let (dtype, op) = (kernel.dtype(), kernel.op());
    let source = Source {
        text: include_str!("kernels.cu"),
        name: c"kernels.cu",
        defines: vec![format!("-DSUMAC_DTYPE={}", dtype.to_wire()), format!("-DSUMAC_OP={}", op.to_wire())],
        what: format!("{dtype} {op}"),
    };
    run(&source, target, CompiledKernel::file_name(kernel))
}

/// Compile the copy engine's kernel, for [`BULK_ARCH`] or later.
///
/// # Errors
/// As for [`compile`]; [`GpuError::Kernel`] if the engine does not support this reduction.
pub fn compile_bulk(dtype: Dtype, op: ReduceOp, target: Target) -> Result<CompiledKernel, GpuError> {
    let what = format!("the copy engine's {dtype} {op}");
    let Some(instruction) = bulk_instruction(dtype, op) else {
        return Err(GpuError::Kernel { kernel: what, why: "it does not support this reduction".into() });
    };
    let defines = vec![format!("-DSUMAC_BULK=\"{instruction}\"")];
    let source = Source { text: include_str!("bulk.cu"), name: c"bulk.cu", defines, what };
    run(&source, target, CompiledKernel::bulk_file_name(dtype, op))
}

/// Compile the matrix product.
///
/// # Errors
/// As for [`compile`].
pub fn compile_product(target: Target) -> Result<CompiledKernel, GpuError> {
    let (text, name) = (include_str!("product.cu"), c"product.cu");
    let source = Source { text, name, defines: Vec::new(), what: "the matrix product".into() };
    run(&source, target, CompiledKernel::PRODUCT_FILE_NAME.into())
}

fn run(source: &Source, target: Target, file_name: String) -> Result<CompiledKernel, GpuError> {
    if !is_available() {
        return Err(Unavailable::Compiler { wanted: file_name }.into());
    }
    let arch = match target {
        Target::Sass(arch) => format!("sm_{arch}"),
        Target::Ptx(arch) => format!("compute_{arch}"),
    };
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        // Same bits as the CPU kernels: no contraction, no flushing, IEEE division.
        "--fmad=false".into(),
        "--ftz=false".into(),
        "--prec-div=true".into(),
    ];
    options.extend_from_slice(&source.defines);
    if matches!(target, Target::Sass(_)) {
        options.push("--ptxas-options=-v".into());
    }
    let failed = |why: String| GpuError::Kernel { kernel: format!("{} for {arch}", source.what), why };
    let program = Program::new(source)?;
    // SAFETY: the program was created, and is not destroyed yet.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    compiled.map_err(|error| failed(format!("{error}: {log}")))?;
    let bytes = match target {
        Target::Sass(_) => program.sass(),
        // SAFETY: it was compiled.
        Target::Ptx(_) => unsafe { result::get_ptx(program.0) }
            .map(|ptx| ptx.into_iter().map(|byte| byte as u8).collect())
            .map_err(|error| failed(error.to_string())),
    }?;
    Ok(CompiledKernel { bytes, is_ptx: matches!(target, Target::Ptx(_)), log })
}

/// An nvrtc program.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &Source) -> Result<Self, GpuError> {
        let named = |why: String| GpuError::Kernel { kernel: source.what.clone(), why };
        let text = CString::new(source.text).map_err(|error| named(error.to_string()))?;
        // The compiler copies the text.
        result::create_program(&text, Some(source.name)).map(Self).map_err(|error| named(error.to_string()))
    }

    fn log(&self) -> String {
        // SAFETY: the program was created, and is not destroyed yet.
        let log: Vec<c_char> = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
        CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::new(), |log| log.to_string_lossy().into_owned())
    }

    /// Return machine code; the program must have been compiled for one architecture.
    fn sass(&self) -> Result<Vec<u8>, GpuError> {
        let mut len = 0;
        // SAFETY: it writes one length.
        named(unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut len) }, "the code")?;
        let mut code = vec![0_u8; len];
        // SAFETY: there is room for as much as it has said.
        named(unsafe { sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()) }, "the code")?;
        Ok(code)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created, and nobody else has it.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Convert an error of the compiler.
fn named(status: sys::nvrtcResult, what: &str) -> Result<(), GpuError> {
    status.result().map_err(|error| GpuError::Kernel { kernel: what.into(), why: error.to_string() })
}
