//! Checks and measures the GPU's side on a machine that has a GPU; see `tests/gpu/run`.
//!
//! `gpu check` compares every type, operator and algorithm with float64 references and with the bits of the double;
//! `gpu rehearse` does the same to the double, where there is no GPU; `gpu measure` prints tables. `--kernels FOLDER`
//! takes compiled kernels from there where there is no compiler, `--packed FOLDER` in any case. Exit status: 0, 1 for
//! a wrong result, 2 for wrong usage, 77 where there is no GPU.

#[path = "gpu/check.rs"]
mod check;
#[path = "gpu/measure.rs"]
mod measure;

use std::process::ExitCode;
use sumac::exec::cuda::{Cuda, CudaOptions};
use sumac::exec::gpu::GpuError;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (what, options) = match arguments.as_slice() {
        [what] => (*what, CudaOptions::default()),
        [what, which @ ("--kernels" | "--packed"), folder] => {
            let kernels = Some((*folder).into());
            (*what, CudaOptions { compiles: *which == "--kernels", kernels, ..CudaOptions::default() })
        }
        _ => ("", CudaOptions::default()),
    };
    if what == "rehearse" {
        return ended(check::rehearse());
    }
    let run: fn(&Cuda) -> Result<(), String> = match what {
        "check" => check::run,
        "measure" => measure::run,
        _ => {
            eprintln!("usage: gpu check|measure|rehearse [--kernels FOLDER | --packed FOLDER]");
            return ExitCode::from(2);
        }
    };
    let opened = Cuda::open(options).and_then(|cuda| cuda.describe().map(|description| (cuda, description)));
    let (cuda, description) = match opened {
        Ok(opened) => opened,
        Err(error @ GpuError::Absent(_)) => {
            println!("{error}");
            return ExitCode::from(77);
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{description}");
    ended(run(&cuda))
}

fn ended(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// A drawn number after the other.
struct Draws(u64);

impl Draws {
    /// Draw from what the system calls random: fresh data each time.
    fn fresh() -> Self {
        use std::hash::{BuildHasher, Hasher};
        Self(std::collections::hash_map::RandomState::new().build_hasher().finish() | 1)
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
