//! The options of the collectives on files.

use crate::files::Format;
use crate::layout::Layout;
use crate::options::{self, Algo, Links, OrderName, Transport};
use anyhow::ensure;
use clap::Args;
use std::path::PathBuf;
use sumac_hal::op::ReduceOp;

/// Options of all collectives on files.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Algorithm; `auto` selects by the controller's cost table
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = options::algo_parser())]
    pub(super) algo: Algo,
    /// Order in which contributions are reduced [default: the library's]
    #[arg(long, value_name = "NAME")]
    pub(super) order: Option<OrderName>,
    /// Transport between ranks and their leaf device; `auto` is shared memory where it is available, else UDP
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = options::transport_parser(),
          long_help = options::transport_help())]
    pub(super) transport: Transport,
    #[command(flatten)]
    pub(super) verbs: Links,
    /// Levels of the tree: 1 for a single device, 2 for leaf devices below a root
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "topology")]
    levels: u8,
    /// Plan the tree on this fabric (an ibnetdiscover dump or TOML; `-` reads it from stdin) and build it from emulated
    /// devices
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Deadline of each operation, in seconds
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout_s: u64,
}

impl RunArgs {
    /// Return the layout of the requested cluster.
    pub(super) fn layout(&self, ranks: u32) -> anyhow::Result<Layout> {
        match &self.topology {
            Some(path) => Layout::from_file(path, ranks),
            None => Layout::generated(self.levels, ranks),
        }
    }
}

/// `sumac all-reduce`.
#[derive(Debug, Args)]
pub(crate) struct AllReduceArgs {
    /// Operator
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = options::array_op_parser())]
    pub(super) op: ReduceOp,
    /// One rank's arrays, a .npy or .safetensors file; give the option once per rank
    #[arg(long = "input", value_name = "FILE", required = true)]
    pub(super) inputs: Vec<PathBuf>,
    /// File for the result; replaced if it exists
    #[arg(long, value_name = "FILE")]
    pub(super) output: PathBuf,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// `sumac reduce-scatter`.
#[derive(Debug, Args)]
pub(crate) struct ReduceScatterArgs {
    /// Operator
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = options::array_op_parser())]
    pub(super) op: ReduceOp,
    /// One rank's arrays, a .npy or .safetensors file; give the option once per rank
    #[arg(long = "input", value_name = "FILE", required = true)]
    pub(super) inputs: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) outputs: PartsArgs,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// Where the parts are written.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PartsArgs {
    /// File for each rank's part: a name that contains {rank}, as in part-{rank}.npy; replaced if it exists
    #[arg(long, value_name = "PATTERN")]
    output: Option<String>,
    /// Directory for the parts, which are named part-0, part-1, ...
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
}

impl PartsArgs {
    /// Return the path of each rank's part.
    ///
    /// # Errors
    /// A pattern that names a single file, or a directory that does not exist.
    pub(super) fn paths(&self, format: Format, ranks: usize) -> anyhow::Result<Vec<PathBuf>> {
        if let Some(dir) = &self.output_dir {
            ensure!(dir.is_dir(), "{}: no such directory; create it first", dir.display());
            return Ok((0..ranks).map(|rank| dir.join(format!("part-{rank}{format}"))).collect());
        }
        let pattern = self.output.as_deref().unwrap_or_default();
        ensure!(
            pattern.contains(RANK),
            "--output {pattern}: must contain {RANK}, because each of {ranks} ranks writes a part; try part-{RANK}{format}"
        );
        Ok((0..ranks).map(|rank| pattern.replace(RANK, &rank.to_string()).into()).collect())
    }
}

/// The placeholder for a rank's number in a name.
const RANK: &str = "{rank}";

/// `sumac all-gather`.
#[derive(Debug, Args)]
pub(crate) struct AllGatherArgs {
    /// One rank's arrays, a .npy or .safetensors file; give the option once per rank
    #[arg(long = "input", value_name = "FILE", required = true)]
    pub(super) inputs: Vec<PathBuf>,
    /// File for the concatenated arrays; replaced if it exists
    #[arg(long, value_name = "FILE")]
    pub(super) output: PathBuf,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// `sumac broadcast`.
#[derive(Debug, Args)]
pub(crate) struct BroadcastArgs {
    /// The root's arrays, a .npy or .safetensors file
    #[arg(long, value_name = "FILE")]
    pub(super) input: PathBuf,
    /// File to which another rank writes what it received; replaced if it exists
    #[arg(long, value_name = "FILE")]
    pub(super) output: PathBuf,
    /// Rank that sends the file
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) root: u32,
    /// Number of ranks, each a process
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) ranks: u32,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_names_come_from_a_pattern_or_a_directory() {
        let pattern = PartsArgs { output: Some("out/{rank}/p-{rank}.npy".into()), output_dir: None };
        let paths = pattern.paths(Format::Npy, 2).expect("names");
        assert_eq!(paths, [PathBuf::from("out/0/p-0.npy"), PathBuf::from("out/1/p-1.npy")]);
        let dir = std::env::temp_dir();
        let parts = PartsArgs { output: None, output_dir: Some(dir.clone()) };
        let paths = parts.paths(Format::Safetensors, 1).expect("names");
        assert_eq!(paths, [dir.join("part-0.safetensors")]);
    }

    #[test]
    fn pattern_without_rank_and_missing_directory_are_refused() {
        let one = PartsArgs { output: Some("out.npy".into()), output_dir: None };
        let error = one.paths(Format::Npy, 3).expect_err("one name").to_string();
        assert!(error.contains("--output out.npy") && error.contains("3 ranks"), "{error}");
        let gone = PartsArgs { output: None, output_dir: Some("/nonexistent".into()) };
        assert!(gone.paths(Format::Npy, 3).expect_err("no directory").to_string().contains("/nonexistent"));
    }
}
