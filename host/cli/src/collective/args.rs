//! The options of the collectives on files.

use crate::files::Format;
use crate::layout::Layout;
use crate::options::{self, Algo, Attach, Links, OrderName};
use anyhow::ensure;
use clap::Args;
use std::path::PathBuf;
use sumac_hal::op::ReduceOp;

/// What all collectives on files take.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Which way to take
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = options::algo_parser())]
    pub(super) algo: Algo,
    /// In which order contributions combine [default: the library's]
    #[arg(long, value_name = "NAME")]
    pub(super) order: Option<OrderName>,
    /// How ranks reach their leaf device: by shared memory, by packets, or by shared memory where that is possible
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = options::attach_parser())]
    pub(super) attach: Attach,
    #[command(flatten)]
    pub(super) verbs: Links,
    /// Levels of the tree: one device, or two of which one is the root
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "topology")]
    levels: u8,
    /// Build the tree planned on this fabric (an ibnetdiscover dump or TOML) out of emulated devices
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// How long an operation may take before it fails, in seconds
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout_s: u64,
}

impl RunArgs {
    /// Lay out the cluster that is asked for.
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
    /// How to combine the arrays
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = options::array_op_parser())]
    pub(super) op: ReduceOp,
    /// One rank's arrays, a .npy or .safetensors file; give it once a rank
    #[arg(long = "input", value_name = "FILE", required = true)]
    pub(super) inputs: Vec<PathBuf>,
    /// Where to write the result; replaced if it exists
    #[arg(long, value_name = "FILE")]
    pub(super) output: PathBuf,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// `sumac reduce-scatter`.
#[derive(Debug, Args)]
pub(crate) struct ReduceScatterArgs {
    /// How to combine the arrays
    #[arg(long, value_name = "OP", default_value = "sum", value_parser = options::array_op_parser())]
    pub(super) op: ReduceOp,
    /// One rank's arrays, a .npy or .safetensors file; give it once a rank
    #[arg(long = "input", value_name = "FILE", required = true)]
    pub(super) inputs: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) outputs: PartsArgs,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

/// Where parts are written to.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PartsArgs {
    /// Where each rank writes its part: a name with {rank} in it, as in part-{rank}.npy; replaced if it exists
    #[arg(long, value_name = "PATTERN")]
    output: Option<String>,
    /// A directory for the parts, which are named part-0, part-1, ... there
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
}

impl PartsArgs {
    /// Return the name of each rank's part.
    ///
    /// # Errors
    /// A pattern that names one file only, or a directory that is not there.
    pub(super) fn paths(&self, format: Format, ranks: usize) -> anyhow::Result<Vec<PathBuf>> {
        if let Some(dir) = &self.output_dir {
            ensure!(dir.is_dir(), "{}: no such directory; make it first", dir.display());
            return Ok((0..ranks).map(|rank| dir.join(format!("part-{rank}{format}"))).collect());
        }
        let pattern = self.output.as_deref().unwrap_or_default();
        ensure!(
            pattern.contains(RANK),
            "--output {pattern}: needs {RANK} in it, as each of {ranks} ranks writes its part; part-{RANK}{format}"
        );
        Ok((0..ranks).map(|rank| pattern.replace(RANK, &rank.to_string()).into()).collect())
    }
}

/// What stands for a rank's number in a name.
const RANK: &str = "{rank}";

/// `sumac all-gather`.
#[derive(Debug, Args)]
pub(crate) struct AllGatherArgs {
    /// One rank's arrays, a .npy or .safetensors file; give it once a rank
    #[arg(long = "input", value_name = "FILE", required = true)]
    pub(super) inputs: Vec<PathBuf>,
    /// Where to write the joined arrays; replaced if it exists
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
    /// Where another rank writes what it got; replaced if it exists
    #[arg(long, value_name = "FILE")]
    pub(super) output: PathBuf,
    /// The rank that has the file
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) root: u32,
    /// Rank processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(super) ranks: u32,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_by_pattern_or_in_a_directory() {
        let pattern = PartsArgs { output: Some("out/{rank}/p-{rank}.npy".into()), output_dir: None };
        let paths = pattern.paths(Format::Npy, 2).expect("names");
        assert_eq!(paths, [PathBuf::from("out/0/p-0.npy"), PathBuf::from("out/1/p-1.npy")]);
        let dir = std::env::temp_dir();
        let parts = PartsArgs { output: None, output_dir: Some(dir.clone()) };
        let paths = parts.paths(Format::Safetensors, 1).expect("names");
        assert_eq!(paths, [dir.join("part-0.safetensors")]);
    }

    #[test]
    fn one_name_for_all_parts_is_refused() {
        let one = PartsArgs { output: Some("out.npy".into()), output_dir: None };
        let error = one.paths(Format::Npy, 3).expect_err("one name").to_string();
        assert!(error.contains("--output out.npy") && error.contains("3 ranks"), "{error}");
        let gone = PartsArgs { output: None, output_dir: Some("/nonexistent".into()) };
        assert!(gone.paths(Format::Npy, 3).expect_err("no directory").to_string().contains("/nonexistent"));
    }
}
