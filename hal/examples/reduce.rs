//! Reduces raw contributions from stdin to stdout, so that other programs can compare their arithmetic with the
//! kernels': `tests/mldtypes` does.
//!
//! `reduce TYPE OPERATOR RANKS [partial]`: stdin holds the contributions of `RANKS` ranks one behind the other, equally
//! long, as little-endian elements of the type, or of its accumulator type with `partial`. Exit status 2: wrong usage.

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
    let dtype = Dtype::from_name(dtype).ok_or_else(|| format!("{dtype} is no type"))?;
    let op = ReduceOp::from_name(op).ok_or_else(|| format!("{op} is no operator"))?;
    let ranks: u32 = ranks.parse()?;
    let kernel =
        Kernel::new(dtype, op).ok_or_else(|| Kernel::why_not(dtype, op).unwrap_or("the two do not go together"))?;
    let mut input = Vec::new();
    io::stdin().read_to_end(&mut input)?;
    let each = input.len().checked_div(ranks as usize).ok_or("0 ranks; a result is of one rank or more")?;
    let count = kernel.count(each, partial).filter(|_| each * ranks as usize == input.len());
    let count = count.ok_or_else(|| format!("{} bytes are not whole elements of {ranks} ranks", input.len()))?;

    let mut acc = vec![0; count * kernel.accumulator_bytes()];
    for (rank, contribution) in input.chunks_exact(each.max(1)).enumerate() {
        let step = if rank == 0 { Kernel::load } else { Kernel::combine };
        step(&kernel, &mut acc, contribution, partial);
    }
    let len = kernel.finish(&mut acc, count, ranks);
    io::stdout().write_all(&acc[..len])?;
    Ok(())
}
