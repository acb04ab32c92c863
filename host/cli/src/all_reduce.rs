//! `sumac all-reduce`: the cluster of `perf`, on a user's own arrays, one rank process per input.
//!
//! Invariants: inputs are looked at before anything is started; the output file appears whole or not at all, and only
//! if all ranks hold the same result.

use crate::cluster::{self, ClusterConfig, Limit, Parts, Supervisor};
use crate::exit::Failure;
use crate::job::{RankJob, Report, Work};
use crate::layout::Layout;
use crate::npy::Array;
use crate::options::{self, Algo, OrderName};
use crate::perf::{Reports, spawn_rank};
use anyhow::{Context, anyhow};
use clap::Args;
use indicatif::ProgressBar;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use sumac_hal::op::{Dtype, Path as Way, ReduceOp};
use sumac_hal::reduce::Kernel;

/// How long ranks may take to join, besides the operation's own deadline.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// `sumac all-reduce`.
#[derive(Debug, Args)]
pub(crate) struct AllReduceArgs {
    /// How to combine the arrays
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = options::op_parser())]
    op: ReduceOp,
    /// One rank's array, a .npy file of integers (i1 to i8, u1 to u8) or floats (f2, f4, f8); give it once a rank
    #[arg(long = "input", value_name = "FILE", required = true)]
    inputs: Vec<PathBuf>,
    /// Where to write the result; replaced if it exists
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Which way to take
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = options::algo_parser())]
    algo: Algo,
    /// In which order contributions combine [default: the library's]
    #[arg(long, value_name = "NAME")]
    order: Option<OrderName>,
    /// Levels of the tree: one device, or two of which one is the root
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "topology")]
    levels: u8,
    /// Build the tree planned on this fabric (an ibnetdiscover dump or TOML) out of emulated devices
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// How long the operation may take before it fails, in seconds
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
}

/// Reduce the arrays.
pub(crate) fn run(args: &AllReduceArgs, verbose: u8) -> Result<(), Failure> {
    let arrays = Array::inspect_all(&args.inputs).map_err(Failure::input)?;
    let ranks = u32::try_from(arrays.len()).map_err(Failure::input)?;
    check_op(args.op, arrays[0].dtype())?;
    let layout = match &args.topology {
        Some(path) => Layout::from_file(path, ranks),
        None => Layout::generated(args.levels, ranks),
    }
    .map_err(Failure::Input)?;
    let mut supervisor = Supervisor::new(ProgressBar::hidden(), verbose)?;
    let output = Output::create(&args.output, arrays[0].head()).map_err(Failure::Input)?;
    let result = reduce(args, &arrays, &layout, &output, &mut supervisor)?;
    // Nothing that could still write to the file is left when it gets its name.
    drop(supervisor);
    output.publish().map_err(Failure::Run)?;
    let (dtype, shape, op) = (arrays[0].dtype(), arrays[0].shape(), args.op);
    let (path, time_us) = (result.path.name(), result.time_ns as f64 / 1e3);
    let out = args.output.display();
    writeln!(io::stdout(), "{out}: {op} of {ranks} arrays {shape} of {dtype}, path {path}, {time_us:.1} us")?;
    if let Some(why) = result.fallback {
        writeln!(io::stdout(), "# not by the tree: {why}")?;
    }
    Ok(())
}

/// Refuse an operator that the arrays' elements do not go together with, or that needs more than an array.
fn check_op(op: ReduceOp, dtype: Dtype) -> Result<(), Failure> {
    let why = match op {
        ReduceOp::PremulSum => Some("each rank has a scalar of its own, which arrays don't have; use sum"),
        _ if op.is_located() => Some("elements are pairs of a value and an index, which arrays don't have"),
        _ => Kernel::why_not(dtype, op),
    };
    why.map_or(Ok(()), |why| Err(Failure::Input(anyhow!("{op} of {dtype}: {why}"))))
}

/// What the ranks agree on.
struct Reduced {
    path: Way,
    time_ns: u64,
    fallback: Option<String>,
}

fn reduce(
    args: &AllReduceArgs,
    arrays: &[Array],
    layout: &Layout,
    output: &Output,
    supervisor: &mut Supervisor,
) -> Result<Reduced, Failure> {
    let controller = cluster::start(supervisor, &ClusterConfig { layout, shards: 1, parts: Parts::anywhere() })?;
    let mut ranks = Vec::new();
    for ((rank, input), host) in (0_u32..).zip(&args.inputs).zip(&layout.hosts) {
        let work = Work::Reduce {
            input: input.clone(),
            fortran_order: arrays[0].fortran_order(),
            op: args.op,
            algo: args.algo,
            output: (rank == 0).then(|| output.temporary.clone()),
        };
        let job = RankJob {
            controller,
            job: "all-reduce".into(),
            rank,
            world: arrays.len() as u32,
            host: host.clone(),
            order: args.order.map(Into::into),
            deadline_ms: args.timeout_s.saturating_mul(1000),
            work,
        };
        ranks.push(spawn_rank(supervisor, &job)?);
    }
    let mut reports = Reports::new(ranks.clone());
    reports.next_of_each(supervisor, Limit::new(JOIN_LIMIT), "join")?;
    // Twice: the barrier and the operation. Reading and writing the files come on top.
    let limit = Limit::new(Duration::from_secs(args.timeout_s.saturating_mul(2)) + JOIN_LIMIT);
    let results = reports.next_of_each(supervisor, limit, "report a result")?;
    supervisor.wait_ended(&ranks, Limit::new(JOIN_LIMIT))?;
    agree(results)
}

/// Check that all ranks hold the same bits, and sum up what they say.
fn agree(results: Vec<Report>) -> Result<Reduced, Failure> {
    let mut agreed: Option<(u32, Reduced)> = None;
    for (rank, result) in results.into_iter().enumerate() {
        let Report::Reduced { crc, time_ns, path, fallback } = result else {
            return Err(Failure::Run(anyhow!("rank {rank} reported {result:?} where a result was due")));
        };
        match &mut agreed {
            None => agreed = Some((crc, Reduced { path, time_ns, fallback })),
            Some((first, _)) if *first != crc => {
                let why =
                    format!("rank 0's result has checksum {first:08x}, rank {rank}'s {crc:08x}; nothing is written");
                return Err(Failure::Run(anyhow!(why)));
            }
            Some((_, reduced)) => reduced.time_ns = reduced.time_ns.max(time_ns),
        }
    }
    agreed.map(|(_, reduced)| reduced).ok_or_else(|| Failure::Run(anyhow!("no rank reported a result")))
}

/// A file that gets its name when it is whole, and is gone otherwise.
#[derive(Debug)]
struct Output {
    temporary: PathBuf,
    path: PathBuf,
}

impl Output {
    /// Begin a file beside `path` with `head`.
    fn create(path: &Path, head: &[u8]) -> anyhow::Result<Self> {
        let name = path.file_name().with_context(|| format!("{}: not the name of a file", path.display()))?;
        anyhow::ensure!(!path.is_dir(), "{}: is a directory; name a file in it", path.display());
        let temporary = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        let mut file = File::create_new(&temporary).with_context(|| format!("cannot write {}", path.display()))?;
        let output = Self { temporary, path: path.into() };
        file.write_all(head).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(output)
    }

    /// Give the file its name.
    fn publish(self) -> anyhow::Result<()> {
        let publish = || {
            // A name must not survive a power cut that its bytes do not.
            File::open(&self.temporary)?.sync_all()?;
            fs::rename(&self.temporary, &self.path)
        };
        publish().with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // After `publish` there is no such file any more, which is what is wanted.
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(crc: u32, time_ns: u64) -> Report {
        Report::Reduced { crc, time_ns, path: Way::Tree, fallback: None }
    }

    #[test]
    fn ranks_that_hold_different_bits_fail_the_run() {
        assert!(matches!(agree(vec![result(7, 1), result(7, 3), result(7, 2)]), Ok(Reduced { time_ns: 3, .. })));
        let Err(Failure::Run(error)) = agree(vec![result(7, 1), result(8, 1)]) else { panic!("must fail") };
        assert!(error.to_string().contains("rank 1's 00000008"), "{error}");
        assert!(agree(vec![result(7, 1), Report::Joined]).is_err());
    }

    #[test]
    fn an_output_that_is_not_published_is_gone() {
        let path = std::env::temp_dir().join(format!("sumac-output-{}.npy", std::process::id()));
        let output = Output::create(&path, b"head").expect("a writable temporary directory");
        let temporary = output.temporary.clone();
        assert!(temporary.exists() && !path.exists());
        drop(output);
        assert!(!temporary.exists() && !path.exists());
        Output::create(&path, b"head").and_then(Output::publish).expect("published");
        assert_eq!(fs::read(&path).expect("the output"), b"head");
        assert!(!temporary.exists());
        fs::remove_file(&path).expect("removed");
    }
}
