//! Checks and measures collectives in GPU memory on a machine with a GPU; `tests/gpu/run` runs it.
//!
//! ```text
//! gpu facts                 print the GPU, its driver, NCCL and GPUDirect
//! gpu check                 check every type, operator and algorithm: float64's values, and the fake GPU's bits
//! gpu measure SECTION       measure passes, all-reduce, small or overlap, as a table; --trace FILE traces overlap
//! gpu peers                 run ranks in processes of their own, over CUDA IPC handles
//! gpu killed                kill such a process before and during an operation
//! gpu dry-run               do all of this on a fake GPU, without figures
//! ```
//!
//! With `--seconds N`, nothing new begins after that time. `--kernels FOLDER` takes compiled kernels from there if
//! there is no compiler, `--packed FOLDER` in any case. Exit status: 0; 1 for a wrong result or a failed row; 2 for
//! wrong usage; 3 if something was left out; 77 if there is no GPU.

#[path = "gpu/check.rs"]
mod check;
#[path = "gpu/conversions.rs"]
mod conversions;
#[path = "gpu/engines.rs"]
mod engines;
#[path = "gpu/findings.rs"]
mod findings;
#[path = "gpu/measure.rs"]
mod measure;
#[path = "gpu/out.rs"]
mod out;
#[path = "gpu/peers.rs"]
mod peers;
#[path = "gpu/specials.rs"]
mod specials;

use out::Out;
use std::process::ExitCode;
use std::time::Duration;
use sumac::gpu::cuda::{Cuda, CudaOptions};
use sumac::gpu::nccl::Nccl;
use sumac::gpu::{Gpu, GpuError, Part};

const USAGE: &str = "usage: gpu facts|check|measure SECTION|peers|killed|dry-run [--seconds N] [--trace FILE] \
                     [--kernels FOLDER | --packed FOLDER]";

/// The command line.
struct Arguments {
    command: Vec<String>,
    seconds: u64,
    trace: Option<String>,
    options: CudaOptions,
    /// The arguments that select the kernels, for child processes.
    kernels: Vec<String>,
}

/// Parse the command line; `None` if it is wrong.
fn parse(arguments: impl Iterator<Item = String>) -> Option<Arguments> {
    let mut arguments = arguments.peekable();
    let options = CudaOptions::default();
    let mut args = Arguments { command: Vec::new(), seconds: 600, trace: None, options, kernels: Vec::new() };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => args.seconds = arguments.next()?.parse().ok()?,
            "--trace" => args.trace = Some(arguments.next()?),
            "--kernels" | "--packed" => {
                let folder = arguments.next()?;
                args.options.compiles = argument == "--kernels";
                args.options.kernels = Some(folder.clone().into());
                args.kernels = vec![argument, folder];
            }
            flag if flag.starts_with('-') => return None,
            _ => args.command.push(argument),
        }
    }
    let command: Vec<&str> = args.command.iter().map(String::as_str).collect();
    let is_known = match command.as_slice() {
        ["facts" | "check" | "peers" | "killed" | "dry-run"] => true,
        ["survivor", name] => ["before", "during"].contains(name),
        ["measure", section] => measure::SECTIONS.contains(section),
        ["peer" | "victim", rank, ranks, _] => rank.parse::<u32>().is_ok() && ranks.parse::<u32>().is_ok(),
        _ => false,
    };
    is_known.then_some(args)
}

fn main() -> ExitCode {
    let Some(args) = parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let command: Vec<&str> = args.command.iter().map(String::as_str).collect();
    match command.as_slice() {
        ["dry-run"] => {
            let all = check::dry_run().and_then(|()| measure::dry_run()).and_then(|()| peers::dry_run());
            return exit_code(all.map(|()| 0));
        }
        [command @ ("peer" | "victim"), rank, ranks, addr] => {
            let place = (rank.parse().unwrap_or(0), ranks.parse().unwrap_or(0));
            return exit_code(peers::run_peer(args.options, place, addr, *command == "victim").map(|()| 0));
        }
        _ => {}
    }
    let cuda = match Cuda::open(args.options.clone()) {
        Ok(cuda) => cuda,
        Err(error @ GpuError::Unavailable(_)) => {
            println!("{error}");
            return ExitCode::from(77);
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    exit_code(run(&cuda, &args))
}

/// Run the command; returns how much was left out.
fn run(cuda: &Cuda, args: &Arguments) -> Result<usize, String> {
    let limit = Duration::from_secs(args.seconds);
    let mut out = Out::new(limit);
    match args.command[0].as_str() {
        "facts" => {
            println!("{}", cuda.describe().map_err(|error| error.to_string())?);
            match cuda.nccl_version() {
                Ok(version) => println!("NCCL {version}"),
                Err(error) => println!("NCCL unavailable: {error}"),
            }
            return Ok(0);
        }
        "check" => return check::run(cuda, limit),
        "measure" => measure::run(cuda, &args.command[1], &mut out, args.trace.as_deref())?,
        "killed" => peers::run_killed(&args.kernels, &mut out)?,
        "survivor" => peers::run_survivor(cuda, &args.command[1], &args.kernels)?,
        _ => peers::run(cuda, &args.kernels, &mut out)?,
    }
    match out.failed() {
        0 => Ok(out.left_out()),
        failed => Err(format!("{failed} rows failed")),
    }
}

fn exit_code(result: Result<usize, String>) -> ExitCode {
    match result {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(3),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Allocate GPU memory with these contents.
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

/// Copy GPU memory to the host.
fn get<G: Gpu>(gpu: &G, stream: &G::Stream, memory: &G::Memory, len_bytes: usize) -> Result<Vec<u8>, GpuError> {
    let mut pinned = gpu.pinned(len_bytes)?;
    gpu.download(stream, &mut pinned, Part { memory, at: 0, len_bytes })?;
    Ok(gpu.host(&mut pinned)?[..len_bytes].to_vec())
}

/// A xorshift random number generator.
struct Draws(u64);

impl Draws {
    /// Seed from the system: different data in each run.
    fn fresh() -> Self {
        use std::hash::{BuildHasher, Hasher};
        Self::seeded(std::collections::hash_map::RandomState::new().build_hasher().finish())
    }

    /// Use a fixed seed: the same data in each run.
    const fn seeded(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Put items into random order.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, (self.next() >> 32) as usize % (end + 1));
        }
    }

    /// Draw a value from -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
    }
}
