//! The options of `sumac calibrate`.

use super::turns;
use crate::job::{Case, Turns};
use crate::options::{self, Algo, Transport};
use crate::size::{SizeBytes, Step, sweep};
use anyhow::ensure;
use clap::Args;
use std::path::PathBuf;
use sumac::comm::DEFAULT_PORT;
use sumac_hal::op::{Collective, Dtype, ReduceOp};

/// The most operations that are measured of a job.
const GROUPS_MAX: usize = 1000;

/// The text below the options.
pub(crate) const HELP: &str = "\
EXAMPLES
  sumac calibrate -o costs.toml
  sumac controller --costs costs.toml
  mpirun -np 64 sumac calibrate --controller head:7847 -o costs.toml
  sumac calibrate --check costs.toml

ON A CLUSTER
  Started by torchrun, mpirun, srun or `sumac run`, calibrate is one rank of a job on a running controller, whose devices
  it measures. All ranks measure together, then the first half of them, and so on down to two. Rank 0 writes the table.
  --ranks starts clusters here all the same.

THE TABLE
  The model's constants, in seconds, and measured over modelled time by size, path and number of ranks, by which
  predictions for similar jobs are corrected. Its version is in every operation's signature, so ranks with different
  tables fail with the same error instead of hanging. error is the median error of predictions between measured sizes.

EXIT STATUS
  0  the table was written, or checked
  1  a measurement failed
  2  wrong usage, or an invalid table
";

/// `sumac calibrate`.
#[derive(Debug, Args)]
pub(crate) struct CalibrateArgs {
    /// Write the cost table to this file [default: print it]
    #[arg(short = 'o', long, value_name = "FILE", conflicts_with = "check")]
    pub(super) output: Option<PathBuf>,
    /// Check this table: run what `auto` takes beside all algorithms, and print by how much it misses the best
    #[arg(long, value_name = "FILE")]
    pub(super) check: Option<PathBuf>,
    /// Numbers of ranks of the clusters that are started here, comma-separated [default: 2,4,8, unless a launcher has
    /// started this process as a rank]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(2..=1024))]
    pub(super) ranks: Vec<u32>,
    /// Levels of their trees, comma-separated
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 2],
          value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(super) levels: Vec<u8>,
    /// Transports between ranks and their leaf device, comma-separated [default: udp,shm, or auto under a launcher]
    #[arg(long = "transport", value_name = "NAME", value_delimiter = ',', value_parser = options::transport_parser())]
    pub(super) transports: Vec<Transport>,
    /// Controller of ranks that a launcher has started [default: SUMAC_CONTROLLER, else MASTER_ADDR and SUMAC_PORT]
    #[arg(long, value_name = "HOST:PORT", long_help = format!(
        "Controller of ranks that a launcher has started [default: SUMAC_CONTROLLER, else MASTER_ADDR and SUMAC_PORT, or \
         port {DEFAULT_PORT}]"))]
    pub(super) controller: Option<String>,
    /// Smallest operation
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "8")]
    begin: SizeBytes,
    /// Largest operation
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "32M")]
    end: SizeBytes,
    /// Factor between one size and the next
    #[arg(short = 'f', long = "stepfactor", value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// Collectives, comma-separated
    #[arg(long = "collective", value_name = "NAME", default_value = "all_reduce", value_delimiter = ',',
          value_parser = crate::perf::collective_parser())]
    collectives: Vec<Collective>,
    /// How often each algorithm has its turn; short operations have four times as many
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) rounds: u32,
    /// Deadline of each operation, in seconds
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout_s: u64,
}

impl CalibrateArgs {
    /// Whether clusters are to be started here.
    pub(super) const fn is_local(&self) -> bool {
        !self.ranks.is_empty()
    }

    /// The operations to measure, each by all algorithms in turns.
    pub(super) fn groups(&self, with_auto: bool) -> anyhow::Result<Vec<Turns>> {
        ensure!(self.begin <= self.end, "the smallest size (-b {}) exceeds the largest (-e {})", self.begin, self.end);
        ensure!(self.end <= SizeBytes(4 << 30), "-e {} exceeds the limit of 4G per operation", self.end);
        let mut groups = Vec::new();
        for &collective in &self.collectives {
            let case = Case { collective, dtype: Dtype::F32, op: ReduceOp::Sum, root: 0, count: 0, algo: Algo::Auto };
            let end = if collective == Collective::Barrier { self.begin } else { self.end };
            for size in sweep(self.begin, end, Step::Factor(self.factor)) {
                let count = if collective == Collective::Barrier { 0 } else { size.0 / 4 };
                groups.push(turns(self, Case { count, ..case }, with_auto));
                ensure!(groups.len() <= GROUPS_MAX, "more than {GROUPS_MAX} operations to measure; use fewer sizes");
            }
        }
        Ok(groups)
    }
}
