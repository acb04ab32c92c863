//! Collectives on files: the cluster of `perf` on a user's own arrays, one rank process per file.
//!
//! The supervisor inspects all inputs, starts the cluster and publishes the outputs. The ranks read, run the operations
//! and write ([`rank`]), in buckets of tensors ([`bucket`]).
//!
//! Invariants: all inputs are inspected before anything starts. Outputs are written atomically, and only if all ranks
//! that must hold the same bits do.

mod args;
mod bucket;
mod rank;

pub(crate) use args::{AllGatherArgs, AllReduceArgs, BroadcastArgs, ReduceScatterArgs};
pub(crate) use rank::run as run_rank;

use crate::cluster::{self, ClusterConfig, Limit, Supervisor};
use crate::exit::Failure;
use crate::files::{AgreeError, ArrayFile, Axis0, Format, Output, OutputHead, Shape, inspect_all};
use crate::job::{FileWork, Piece, RankJob, Report, Work};
use crate::layout::Layout;
use crate::options::{MemoryKind, WaitPolicy};
use crate::perf::{Reports, spawn_rank};
use anyhow::{anyhow, bail};
use args::RunArgs;
use bucket::Bucket;
use indicatif::ProgressBar;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use sumac_hal::op::{Collective, Path as OpPath, ReduceOp};
use sumac_hal::reduce::Kernel;

/// How long ranks may take to join, in addition to the deadlines of operations.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// `sumac all-reduce`.
pub(crate) fn all_reduce(args: &AllReduceArgs, verbose: u8) -> Result<(), Failure> {
    let files = Files::inspect(&args.inputs, Axis0::Keep)?;
    reducible(&files.inputs[0], args.op).map_err(Failure::Input)?;
    let ranks = args.inputs.len();
    let summary = format!("{}: {} of {}", args.output.display(), args.op, describe(ranks, &files.inputs[0]));
    let call = Call { collective: Collective::AllReduce, op: args.op, root: 0, run: &args.run };
    let outputs = only(0, &args.output, ranks);
    files.job(call, all(&args.inputs), outputs).run(&files, &summary, verbose)
}

/// `sumac reduce-scatter`.
pub(crate) fn reduce_scatter(args: &ReduceScatterArgs, verbose: u8) -> Result<(), Failure> {
    let files = Files::inspect(&args.inputs, Axis0::Cut)?;
    let first = &files.inputs[0];
    reducible(first, args.op).map_err(Failure::Input)?;
    let ranks = args.inputs.len();
    let paths = args.outputs.paths(first.format, ranks).map_err(Failure::Input)?;
    let part = match &files.head.tensors[..] {
        [array] if first.format == Format::Npy => format!(" of {}", Shape(&array.shape)),
        _ => String::new(),
    };
    let (from, to) = (paths[0].display(), paths[ranks - 1].display());
    let summary = format!("{from} to {to}: {} of {}, in {ranks} parts{part}", args.op, describe(ranks, first));
    let call = Call { collective: Collective::ReduceScatter, op: args.op, root: 0, run: &args.run };
    files.job(call, all(&args.inputs), all(&paths)).run(&files, &summary, verbose)
}

/// `sumac all-gather`.
pub(crate) fn all_gather(args: &AllGatherArgs, verbose: u8) -> Result<(), Failure> {
    let files = Files::inspect(&args.inputs, Axis0::Join)?;
    let ranks = args.inputs.len();
    let joined = ArrayFile { tensors: files.head.tensors.clone(), ..files.inputs[0].clone() };
    let summary = format!("{}: {ranks} files concatenated to {}", args.output.display(), describe(1, &joined));
    let call = Call { collective: Collective::AllGather, op: ReduceOp::Sum, root: 0, run: &args.run };
    let outputs = only(0, &args.output, ranks);
    files.job(call, all(&args.inputs), outputs).run(&files, &summary, verbose)
}

/// `sumac broadcast`.
pub(crate) fn broadcast(args: &BroadcastArgs, verbose: u8) -> Result<(), Failure> {
    let (root, ranks) = (args.root, args.ranks as usize);
    if root >= args.ranks {
        return Err(Failure::Input(anyhow!("--root {root}: the {ranks} ranks count from 0")));
    }
    let files = Files::inspect(std::slice::from_ref(&args.input), Axis0::Keep)?;
    let first = &files.inputs[0];
    let summary = format!("{}: {} from rank {root} to all of {ranks}", args.output.display(), describe(1, first));
    let call = Call { collective: Collective::Broadcast, op: ReduceOp::Sum, root, run: &args.run };
    // A rank other than the root writes the output, if there is one: it has the bytes from the network alone.
    let outputs = only((root as usize + 1) % ranks, &args.output, ranks);
    files.job(call, only(root as usize, &args.input, ranks), outputs).run(&files, &summary, verbose)
}

/// The inputs, which match, and the head of the output.
struct Files {
    inputs: Vec<ArrayFile>,
    head: OutputHead,
}

impl Files {
    fn inspect(paths: &[PathBuf], axis0: Axis0) -> Result<Self, Failure> {
        let inputs = inspect_all(paths, axis0).map_err(Failure::input)?;
        let head = OutputHead::new(&inputs, axis0).map_err(Failure::Input)?;
        Ok(Self { inputs, head })
    }

    fn job<'a>(&self, call: Call<'a>, inputs: Vec<Option<PathBuf>>, outputs: Vec<Option<PathBuf>>) -> Job<'a> {
        let pieces = pieces(&self.inputs, &self.head, inputs.len());
        Job { call, inputs, pieces, outputs }
    }
}

/// Return one file per rank.
fn all(paths: &[PathBuf]) -> Vec<Option<PathBuf>> {
    paths.iter().cloned().map(Some).collect()
}

/// Return a file for one rank and none for the others.
fn only(rank: usize, path: &Path, ranks: usize) -> Vec<Option<PathBuf>> {
    (0..ranks).map(|other| (other == rank).then(|| path.to_owned())).collect()
}

/// A collective and its options.
struct Call<'a> {
    collective: Collective,
    op: ReduceOp,
    root: u32,
    run: &'a RunArgs,
}

/// A collective on files, ready to start.
struct Job<'a> {
    call: Call<'a>,
    /// Each rank's file, if it contributes.
    inputs: Vec<Option<PathBuf>>,
    pieces: Vec<Piece>,
    /// Each rank's output, if it writes one.
    outputs: Vec<Option<PathBuf>>,
}

/// The combined results of the ranks.
#[derive(Debug)]
struct Combined {
    paths: Vec<(OpPath, u32)>,
    time_ns: u64,
    fallback: Option<String>,
}

impl Job<'_> {
    /// Start a cluster, run the job on its ranks, and publish the outputs.
    fn run(&self, files: &Files, summary: &str, verbose: u8) -> Result<(), Failure> {
        let (first, head) = (&files.inputs[0], &files.head);
        self.outputs.iter().flatten().try_for_each(|path| same_format(path, first)).map_err(Failure::input)?;
        let layout = self.call.run.layout(self.inputs.len() as u32).map_err(Failure::Input)?;
        let mut supervisor = Supervisor::new(ProgressBar::hidden(), verbose)?;
        let create = |path: &Option<PathBuf>| path.as_ref().map(|path| Output::create(path, &head.bytes)).transpose();
        let outputs = self.outputs.iter().map(create).collect::<anyhow::Result<Vec<_>>>().map_err(Failure::Input)?;
        let result = self.combine(&layout, &outputs, &mut supervisor)?;
        // End all processes that could still write to a file before it gets its name.
        drop(supervisor);
        Output::publish(outputs.into_iter().flatten().collect()).map_err(Failure::Run)?;
        let time_us = result.time_ns as f64 / 1e3;
        writeln!(io::stdout(), "{summary}, {}, {time_us:.1} us", describe_paths(&result.paths))?;
        if let Some(why) = result.fallback {
            writeln!(io::stdout(), "# fell back from the tree: {why}")?;
        }
        Ok(())
    }

    fn combine(
        &self,
        layout: &Layout,
        outputs: &[Option<Output>],
        supervisor: &mut Supervisor,
    ) -> Result<Combined, Failure> {
        let Call { collective, op, root, run } = self.call;
        let device_options = run.verbs.of_devices(run.transport, layout.devices.len());
        let config = ClusterConfig { device_options, ..ClusterConfig::new(layout)? };
        let controller = cluster::start(supervisor, &config)?.addr;
        let world = self.inputs.len();
        let mut ranks = Vec::new();
        for (((rank, input), output), host) in (0_u32..).zip(&self.inputs).zip(outputs).zip(&layout.hosts) {
            let work = Work::Files(FileWork {
                collective,
                op,
                root,
                algo: run.algo,
                input: input.clone(),
                pieces: self.pieces.clone(),
                output: output.as_ref().map(|output| output.temporary().to_owned()),
            });
            let job = RankJob {
                controller,
                job: collective.name().into(),
                key: config.keys.as_ref().map(|keys| keys.rank().clone()),
                rank,
                world: world as u32,
                host: host.clone(),
                order: run.order.map(Into::into),
                transport: run.transport,
                shape: None,
                hybrid: false,
                rab: false,
                memory: MemoryKind::Plain,
                wait_policy: WaitPolicy::default(),
                verbs: run.verbs.in_turn(rank as usize),
                trees: 0,
                deadline_ms: run.timeout_s.saturating_mul(1000),
                work,
            };
            ranks.push(spawn_rank(supervisor, &job)?);
        }
        let mut reports = Reports::new(ranks.clone());
        reports.next_of_each(supervisor, Limit::new(JOIN_LIMIT), "join")?;
        // Each bucket has a barrier and an operation. JOIN_LIMIT covers reading and writing the files.
        let operations = Bucket::all(collective, world, &self.pieces).len().clamp(1, 1000) as u64;
        let limit = Duration::from_secs(run.timeout_s.saturating_mul(2 * operations)) + JOIN_LIMIT;
        let results = reports.next_of_each(supervisor, Limit::new(limit), "report a result")?;
        supervisor.wait_ended(&ranks, Limit::new(JOIN_LIMIT))?;
        agree(results, collective != Collective::ReduceScatter)
    }
}

/// List the tensors for `ranks` ranks; if there are fewer files, ranks share the last one.
fn pieces(files: &[ArrayFile], head: &OutputHead, ranks: usize) -> Vec<Piece> {
    let piece = |tensor: &crate::files::Tensor| {
        let count = |file: &ArrayFile| file.tensor(&tensor.name).map_or(0, crate::files::Tensor::count);
        Piece {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            fortran_order: tensor.fortran_order,
            counts: (0..ranks).map(|rank| count(&files[rank.min(files.len() - 1)])).collect(),
            offset: tensor.offset,
        }
    };
    head.tensors.iter().map(piece).collect()
}

/// Check that a file's elements can be reduced by an operator.
fn reducible(file: &ArrayFile, op: ReduceOp) -> anyhow::Result<()> {
    for tensor in &file.tensors {
        if let Some(why) = Kernel::unsupported_reason(tensor.dtype, op) {
            bail!("{}: {}cannot apply {op} to {}: {why}", file.path.display(), tensor.label(), tensor.dtype);
        }
    }
    Ok(())
}

/// Check that an output's name stands for the same format as the inputs'.
fn same_format(path: &Path, first: &ArrayFile) -> Result<(), AgreeError> {
    let found = Format::of(path);
    if found == first.format {
        return Ok(());
    }
    Err(AgreeError::Format { path: path.into(), first: first.path.clone(), found, expected: first.format })
}

/// Describe the contents of `count` files by the first of them.
fn describe(count: usize, file: &ArrayFile) -> String {
    let (number, s) = if count == 1 { (String::new(), "") } else { (format!("{count} "), "s") };
    match &file.tensors[..] {
        [array] if file.format == Format::Npy => {
            format!("{number}array{s} {} of {}", Shape(&array.shape), array.dtype)
        }
        tensors => {
            let len_bytes: usize = tensors.iter().map(|tensor| tensor.len_bytes).sum();
            format!("{number}file{s} of {} tensors, {len_bytes} bytes", tensors.len())
        }
    }
}

/// Describe the paths taken, with their numbers if there were several operations.
fn describe_paths(paths: &[(OpPath, u32)]) -> String {
    match paths {
        [] => "no operation".into(),
        [(path, 1)] => format!("path {}", path.name()),
        many => {
            let many: Vec<_> = many.iter().map(|(path, count)| format!("{} x {count}", path.name())).collect();
            format!("paths {}", many.join(", "))
        }
    }
}

/// Combine the ranks' reports. If `same` is set, all ranks must hold the same bits.
fn agree(results: Vec<Report>, same: bool) -> Result<Combined, Failure> {
    let mut agreed: Option<(u32, Combined)> = None;
    for (rank, result) in results.into_iter().enumerate() {
        let Report::Combined { crc, time_ns, paths, fallback } = result else {
            return Err(Failure::Run(anyhow!("unexpected report of rank {rank} instead of a result: {result:?}")));
        };
        match &mut agreed {
            None => agreed = Some((crc, Combined { paths, time_ns, fallback })),
            Some((first, _)) if same && *first != crc => {
                let why =
                    format!("checksums differ: rank 0's {first:08x}, rank {rank}'s {crc:08x}; nothing was written");
                return Err(Failure::Run(anyhow!(why)));
            }
            Some((_, combined)) => combined.time_ns = combined.time_ns.max(time_ns),
        }
    }
    agreed.map(|(_, combined)| combined).ok_or_else(|| Failure::Run(anyhow!("no rank reported a result")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(crc: u32, time_ns: u64) -> Report {
        Report::Combined { crc, time_ns, paths: vec![(OpPath::Tree, 1)], fallback: None }
    }

    #[test]
    fn different_checksums_fail_unless_ranks_hold_parts() {
        let agreed = agree(vec![result(7, 1), result(7, 3), result(7, 2)], true);
        assert!(matches!(agreed, Ok(Combined { time_ns: 3, .. })));
        let Err(Failure::Run(error)) = agree(vec![result(7, 1), result(8, 1)], true) else { panic!("must fail") };
        assert!(error.to_string().contains("rank 1's 00000008"), "{error}");
        assert!(agree(vec![result(7, 1), Report::Joined { transport: None }], true).is_err());
        assert!(agree(vec![result(7, 1), result(8, 1)], false).is_ok(), "each rank holds its own part");
    }

    #[test]
    fn paths_are_counted_if_there_are_several_operations() {
        assert_eq!(describe_paths(&[(OpPath::Tree, 1)]), "path tree");
        assert_eq!(describe_paths(&[(OpPath::Tree, 3), (OpPath::Ring, 1)]), "paths tree x 3, ring x 1");
        assert_eq!(describe_paths(&[]), "no operation");
    }
}
