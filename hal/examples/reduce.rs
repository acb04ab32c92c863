//! Reduces raw contributions from stdin to stdout, so that other programs can compare their arithmetic with the
//! kernels. `tests/mldtypes` uses it.
//!
//! Usage: `reduce TYPE OPERATOR RANKS [partial]`. stdin holds the contributions of `RANKS` ranks, concatenated and of
//! equal length, as little-endian elements of the type or, with `partial`, of its accumulator type. The exit status is
//! 2 on invalid usage.

use std::error::Error;
use std::io::{self, Read, Write};
use std::process::ExitCode;
use sumac_hal::op::{Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("reduce: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (dtype, op, ranks, partial) = match &args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [dtype, op, ranks] => (*dtype, *op, *ranks, false),
        [dtype, op, ranks, "partial"] => (*dtype, *op, *ranks, true),
        _ => return Err("usage: reduce TYPE OPERATOR RANKS [partial]".into()),
    };
    let dtype = Dtype::from_name(dtype).ok_or_else(|| format!("unknown element type {dtype}"))?;
    let op = ReduceOp::from_name(op).ok_or_else(|| format!("unknown operator {op}"))?;
    let ranks: u32 = ranks.parse()?;
    let kernel = Kernel::new(dtype, op).ok_or_else(|| {
        Kernel::unsupported_reason(dtype, op).unwrap_or("the type and the operator are not supported together")
    })?;
    let mut input = Vec::new();
    io::stdin().read_to_end(&mut input)?;
    let each = input.len().checked_div(ranks as usize).ok_or("RANKS must not be 0")?;
    let count = kernel.count(each, partial).filter(|_| each * ranks as usize == input.len());
    let count = count
        .ok_or_else(|| format!("{} bytes are not a whole number of elements for each of {ranks} ranks", input.len()))?;

    let mut acc = vec![0; count * kernel.accumulator_bytes()];
    for (rank, contribution) in input.chunks_exact(each.max(1)).enumerate() {
        let step = if rank == 0 { Kernel::load } else { Kernel::combine };
        step(&kernel, &mut acc, contribution, partial);
    }
    let len = kernel.finish(&mut acc, count, ranks);
    io::stdout().write_all(&acc[..len])?;
    Ok(())
}
