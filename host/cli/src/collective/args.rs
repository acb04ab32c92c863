//! The options of the collectives on files.

use crate::layout::Layout;
use crate::options::{self, Algo, OrderName};
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
