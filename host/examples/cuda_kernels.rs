//! Compiles the GPU kernels and reports their registers and sizes; `tests/gpu/compile` runs it.
//!
//! `cuda_kernels [--some] ARCH...` compiles every kernel for each architecture (80, 90, 100) and prints registers and
//! sizes. `--some` selects one operator of every type, and every operator of one integer and one float type.
//! `cuda_kernels --ptx FOLDER ARCH` writes every kernel's PTX, for machines without a compiler.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use sumac::gpu::cuda::compile::{self, CompiledKernel, Target};
use sumac::gpu::engine::bulk_instruction;
use sumac::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (folder, is_some, archs) = match arguments.as_slice() {
        [flag, folder, archs @ ..] if flag == "--ptx" => (Some(folder.as_str()), false, archs),
        [flag, archs @ ..] if flag == "--some" => (None, true, archs),
        archs => (None, false, archs),
    };
    let archs: Option<Vec<u32>> = archs.iter().map(|arch| arch.parse().ok()).collect();
    let archs = archs.filter(|archs| !archs.is_empty() && (folder.is_none() || archs.len() == 1));
    let Some(archs) = archs else {
        eprintln!("usage: cuda_kernels [--some] ARCH... | cuda_kernels --ptx FOLDER ARCH; an ARCH is 80, 90, 100");
        return ExitCode::from(2);
    };
    match run(folder, is_some, &archs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn kernels() -> Vec<Kernel> {
    Dtype::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().filter_map(move |&op| Kernel::new(dtype, op))).collect()
}

fn run(folder: Option<&str>, is_some: bool, archs: &[u32]) -> Result<(), String> {
    let mut kernels = kernels();
    // Types and operators have separate code, and operators one version for integers and one for floats: these kernels
    // compile all of it.
    let is_one =
        |kernel: &Kernel| kernel.op() == ReduceOp::PremulSum || matches!(kernel.dtype(), Dtype::I32 | Dtype::F32);
    kernels.retain(|kernel| !is_some || is_one(kernel));
    for &arch in archs {
        let begun = Instant::now();
        let target = if folder.is_some() { Target::Ptx(arch) } else { Target::Sass(arch) };
        let compiled = compile_all(&kernels, target)?;
        if let Some(folder) = folder {
            let named = compiled.iter().map(|(kernel, code)| (CompiledKernel::file_name(kernel), code));
            write(folder, named)?;
        } else {
            print(arch, &compiled)?;
        }
        bulk(folder, arch)?;
        let product = compile::compile_product(target).map_err(|error| error.to_string())?;
        if let Some(folder) = folder {
            write(folder, std::iter::once((CompiledKernel::PRODUCT_FILE_NAME.to_owned(), &product)))?;
        }
        println!("{} kernels for {target:?} in {:.1} s", compiled.len(), begun.elapsed().as_secs_f64());
    }
    Ok(())
}

type Compiled = (Kernel, CompiledKernel);

/// Compile on all cores.
fn compile_all(kernels: &[Kernel], target: Target) -> Result<Vec<Compiled>, String> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || -> Result<(), String> {
        while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
            let code = compile::compile(kernel, target).map_err(|error| error.to_string())?;
            done.lock().unwrap_or_else(PoisonError::into_inner).push((*kernel, code));
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| "a compiler's thread panicked".to_owned())?)
    })?;
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(kernel, _)| (kernel.dtype(), kernel.op()));
    Ok(done)
}

fn write<'a>(folder: &str, compiled: impl Iterator<Item = (String, &'a CompiledKernel)>) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{folder}: {error}"))?;
    for (name, code) in compiled {
        let path = std::path::Path::new(folder).join(name);
        let text = code.bytes().split(|&byte| byte == 0).next().unwrap_or_default();
        std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Compile the copy engine's reductions: for the architecture if its engine reduces, or as PTX for the first one that
/// does.
fn bulk(folder: Option<&str>, arch: u32) -> Result<(), String> {
    if folder.is_none() && arch < compile::BULK_ARCH {
        return Ok(());
    }
    let target = if folder.is_some() { Target::Ptx(compile::BULK_ARCH) } else { Target::Sass(arch) };
    let (mut count, mut registers, mut bytes) = (0, 0, 0);
    for &dtype in Dtype::ALL {
        for &op in ReduceOp::ALL.iter().filter(|&&op| bulk_instruction(dtype, op).is_some()) {
            let code = compile::compile_bulk(dtype, op, target).map_err(|error| error.to_string())?;
            if let Some(folder) = folder {
                write(folder, std::iter::once((CompiledKernel::bulk_file_name(dtype, op), &code)))?;
            }
            count += 1;
            registers = registers.max(code.registers().unwrap_or(0));
            bytes = bytes.max(code.bytes().len());
        }
    }
    match folder {
        Some(_) => println!("{count} copy engine reductions for {target:?}"),
        None => println!("  copy engine {bytes} bytes: {count} reductions, {registers} registers at most"),
    }
    Ok(())
}

/// Allowed spill for the calls in a division's rare cases. More would mean a loop that does not fit its registers.
const SPILLED_BYTES_MAX: u32 = 64;

/// Print a line for each type with its operators' registers and the largest code. Fails if a kernel spills.
fn print(arch: u32, compiled: &[Compiled]) -> Result<(), String> {
    let mut lines: BTreeMap<Dtype, (Vec<String>, usize)> = BTreeMap::new();
    for (kernel, code) in compiled {
        let usage = code.registers().zip(code.spilled_bytes());
        let (registers, spilled) = usage.ok_or_else(|| format!("{kernel:?}: the compiler reports no registers"))?;
        if spilled > SPILLED_BYTES_MAX {
            return Err(format!("{kernel:?} for sm_{arch} spills {spilled} bytes of registers to memory"));
        }
        let (operators, bytes) = lines.entry(kernel.dtype()).or_default();
        operators.push(format!("{} {registers}", kernel.op()));
        *bytes = code.bytes().len().max(*bytes);
    }
    println!("sm_{arch}: registers of a thread by type and operator, and the largest code in bytes");
    for (dtype, (operators, bytes)) in lines {
        println!("  {:<8} {bytes:>7}  {}", dtype.name(), operators.join(", "));
    }
    Ok(())
}
