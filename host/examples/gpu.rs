//! Checks and measures the GPU's side on a machine that has a GPU; see `tests/gpu/run`.
//!
//! ```text
//! gpu facts                 what there is: the GPU, its driver, NCCL, GPUDirect
//! gpu check                 every type, operator and algorithm: float64's values, the double's bits
//! gpu measure SECTION       passes, all-reduce, small or overlap: a table; with --trace FILE overlap's trace
//! gpu peers                 ranks in processes of their own, by CUDA's handles
//! gpu rehearse              all of this on the double, without a figure
//! ```
//!
//! With `--seconds N` nothing new begins after that. `--kernels FOLDER` takes compiled kernels from there where there
//! is no compiler, `--packed FOLDER` in any case. Exit status: 0, 1 for a wrong result or a failed row, 2 for wrong
//! usage, 3 if something was left out, 77 where there is no GPU.

#[path = "gpu/check.rs"]
mod check;
#[path = "gpu/measure.rs"]
mod measure;
#[path = "gpu/out.rs"]
mod out;
#[path = "gpu/peers.rs"]
mod peers;

use out::Out;
use std::process::ExitCode;
use std::time::Duration;
use sumac::gpu::cuda::{Cuda, CudaOptions};
use sumac::gpu::nccl::Nccl;
use sumac::gpu::{Gpu, GpuError, Part};

const USAGE: &str = "usage: gpu facts|check|measure SECTION|peers|rehearse [--seconds N] [--trace FILE] \
                     [--kernels FOLDER | --packed FOLDER]";

/// What is asked for.
struct Asked {
    what: Vec<String>,
    seconds: u64,
    trace: Option<String>,
    options: CudaOptions,
    /// The arguments that say where kernels come from.
    kernels: Vec<String>,
}

/// Read the command line; `None` if it is wrong.
fn asked(arguments: impl Iterator<Item = String>) -> Option<Asked> {
    let mut arguments = arguments.peekable();
    let options = CudaOptions::default();
    let mut asked = Asked { what: Vec::new(), seconds: 600, trace: None, options, kernels: Vec::new() };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => asked.seconds = arguments.next()?.parse().ok()?,
            "--trace" => asked.trace = Some(arguments.next()?),
            "--kernels" | "--packed" => {
                let folder = arguments.next()?;
                asked.options.compiles = argument == "--kernels";
                asked.options.kernels = Some(folder.clone().into());
                asked.kernels = vec![argument, folder];
            }
            flag if flag.starts_with('-') => return None,
            _ => asked.what.push(argument),
        }
    }
    let words: Vec<&str> = asked.what.iter().map(String::as_str).collect();
    let is_known = match words.as_slice() {
        ["facts" | "check" | "peers" | "rehearse"] => true,
        ["measure", section] => measure::SECTIONS.contains(section),
        ["peer", rank, ranks, _] => rank.parse::<u32>().is_ok() && ranks.parse::<u32>().is_ok(),
        _ => false,
    };
    is_known.then_some(asked)
}

fn main() -> ExitCode {
    let Some(asked) = asked(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let words: Vec<&str> = asked.what.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["rehearse"] => {
            let all = check::rehearse().and_then(|()| measure::rehearse()).and_then(|()| peers::rehearse());
            return ended(all.map(|()| 0));
        }
        ["peer", rank, ranks, addr] => {
            let (rank, ranks) = (rank.parse().unwrap_or(0), ranks.parse().unwrap_or(0));
            return ended(peers::follow(asked.options, rank, ranks, addr).map(|()| 0));
        }
        _ => {}
    }
    let cuda = match Cuda::open(asked.options.clone()) {
        Ok(cuda) => cuda,
        Err(error @ GpuError::Absent(_)) => {
            println!("{error}");
            return ExitCode::from(77);
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    ended(run(&cuda, &asked))
}

/// Do what is asked for; return how much was left out.
fn run(cuda: &Cuda, asked: &Asked) -> Result<usize, String> {
    let limit = Duration::from_secs(asked.seconds);
    let mut out = Out::new(limit);
    match asked.what[0].as_str() {
        "facts" => {
            println!("{}", cuda.describe().map_err(|error| error.to_string())?);
            match cuda.nccl_version() {
                Ok(version) => println!("NCCL {version}"),
                Err(error) => println!("no NCCL: {error}"),
            }
            return Ok(0);
        }
        "check" => return check::run(cuda, limit),
        "measure" => measure::run(cuda, &asked.what[1], &mut out, asked.trace.as_deref())?,
        _ => peers::run(cuda, &asked.kernels, &mut out)?,
    }
    match out.failed() {
        0 => Ok(out.left_out()),
        failed => Err(format!("{failed} rows failed")),
    }
}

fn ended(result: Result<usize, String>) -> ExitCode {
    match result {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(3),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Return memory with these bytes.
fn put<G: Gpu>(gpu: &G, stream: &G::Stream, bytes: &[u8]) -> Result<G::Memory, GpuError> {
    let memory = gpu.alloc(bytes.len())?;
    write(gpu, stream, &memory, bytes)?;
    Ok(memory)
}

fn write<G: Gpu>(gpu: &G, stream: &G::Stream, memory: &G::Memory, bytes: &[u8]) -> Result<(), GpuError> {
    let mut pinned = gpu.pinned(bytes.len())?;
    gpu.host(&mut pinned)?[..bytes.len()].copy_from_slice(bytes);
    gpu.upload(stream, Part { memory, at: 0, len_bytes: bytes.len() }, &mut pinned)?;
    gpu.host(&mut pinned).map(|_| ())
}

/// Return the bytes of memory.
fn get<G: Gpu>(gpu: &G, stream: &G::Stream, memory: &G::Memory, len_bytes: usize) -> Result<Vec<u8>, GpuError> {
    let mut pinned = gpu.pinned(len_bytes)?;
    gpu.download(stream, &mut pinned, Part { memory, at: 0, len_bytes })?;
    Ok(gpu.host(&mut pinned)?[..len_bytes].to_vec())
}

/// A drawn number after the other.
struct Draws(u64);

impl Draws {
    /// Draw from what the system calls random: fresh data each time.
    fn fresh() -> Self {
        use std::hash::{BuildHasher, Hasher};
        Self::seeded(std::collections::hash_map::RandomState::new().build_hasher().finish())
    }

    /// Draw the same each time.
    const fn seeded(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Draw from -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    }
}
