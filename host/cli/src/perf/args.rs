//! The options of `sumac perf`, which follow nccl-tests.

use crate::chaos::RuleArgs;
use crate::cluster::GivenDevice;
use crate::job::Case;
use crate::options::{self, Algo, Links, OrderName, Transport};
use crate::perf::fault::Fault;
use crate::size::{SizeBytes, sweep};
use crate::workload::{Check, MemoryKind};
use anyhow::{bail, ensure};
use clap::Args;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use sumac::comm::DEFAULT_PORT;
use sumac_hal::op::{Collective, Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The largest operation. A rank allocates twice as much.
const SIZE_MAX: SizeBytes = SizeBytes(16 << 30);

/// The most ranks, each of which is a process on this machine.
const RANKS_MAX: i64 = 1024;

/// `sumac perf`.
#[derive(Debug, Args)]
pub(crate) struct PerfArgs {
    /// Smallest message
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "8")]
    begin: SizeBytes,
    /// Largest message
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "16M")]
    end: SizeBytes,
    /// Factor between one size and the next
    #[arg(short = 'f', long = "stepfactor", value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// Measured iterations per row
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) iterations: u32,
    /// Warm-up iterations before each row, which are not measured
    #[arg(short = 'w', long = "warmup_iters", value_name = "N", default_value_t = 5)]
    pub(super) warmup: u32,
    /// Element types, comma-separated
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", default_value = "f32", value_delimiter = ',',
          value_parser = options::dtype_parser())]
    dtypes: Vec<Dtype>,
    /// Operators, comma-separated
    #[arg(short = 'o', long = "op", value_name = "OP", default_value = "sum", value_delimiter = ',',
          value_parser = options::op_parser())]
    ops: Vec<ReduceOp>,
    /// Number of ranks, each a process
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    pub(super) ranks: u32,
    /// Collectives, comma-separated
    #[arg(long = "collective", value_name = "NAME", default_value = "all_reduce", value_delimiter = ',',
          value_parser = options::collective_parser())]
    collectives: Vec<Collective>,
    /// Algorithms, comma-separated; `auto` selects by the controller's cost table
    #[arg(long = "algo", value_name = "NAME", default_value = "tree,ring,hd", value_delimiter = ',',
          value_parser = options::algo_parser())]
    algos: Vec<Algo>,
    /// Root of rooted collectives
    #[arg(short = 'r', long = "root", value_name = "RANK", default_value_t = 0)]
    root: u32,
    /// Order in which contributions are reduced [default: the library's]
    #[arg(long, value_name = "NAME")]
    pub(super) order: Option<OrderName>,
    /// Transport between ranks and their leaf device
    ///
    /// `udp` sends packets that carry the data. `shm` is zero-copy: the device's DMA engine reads and writes memory
    /// that it shares with the ranks. `verbs` sends packets over RDMA. `rdma` is zero-copy by RDMA READ and WRITE of
    /// the device. `auto` is `shm` where it is available, else `udp`. A transport that is requested explicitly and is
    /// unavailable fails the run.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = options::transport_parser())]
    pub(super) transport: Transport,
    #[command(flatten)]
    pub(super) verbs: Links,
    /// Memory of the ranks' buffers
    #[arg(long, value_name = "KIND", default_value = "registered")]
    pub(super) memory: MemoryKind,
    /// Iterations of which every element is checked
    #[arg(short = 'c', long, value_name = "WHICH", default_value = "every")]
    pub(super) check: Check,
    /// Levels of the tree: 1 for a single device, 2 for leaf devices below a root
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "topology")]
    pub(super) levels: u8,
    /// Shards of each device; each is a thread with a data port of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) shards: u16,
    /// Let ranks and devices run on any processor
    ///
    /// By default, if the tree has several leaves, each leaf device shares an equal part of the processors with its
    /// ranks, as a switch sits next to its hosts. This matters where processors are far apart, on two dies or sockets.
    #[arg(long)]
    pub(super) no_bind: bool,
    /// Plan the tree on this fabric (an ibnetdiscover dump or TOML; `-` reads it from stdin) and build it from emulated
    /// devices
    #[arg(long, value_name = "FILE")]
    pub(super) topology: Option<PathBuf>,
    /// Use an existing device, a board or another machine, instead of an emulated one; may be repeated
    ///
    /// The address is the one at which its first shard receives packets. The device must register with the controller
    /// that this run starts (--listen), under the name of the tree node that it replaces: `leaf0`, or NAME where there
    /// are several. Ranks send it packets.
    #[arg(long = "device", value_name = "[NAME=]IP:PORT", conflicts_with_all = ["fault", "chaos"])]
    pub(super) devices: Vec<GivenDevice>,
    /// Where this run's controller listens for --device; loopback only, because nothing is authenticated yet
    #[arg(long, value_name = "ADDRESS", requires = "devices",
          default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)))]
    pub(super) listen: SocketAddr,
    /// Deadline of each operation, in seconds
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout_s: u64,
    /// Print candidates, costs and the selection for each row; run nothing
    #[arg(long)]
    pub(super) explain: bool,
    /// Algorithms by size that override the cost table for `--algo auto` (see `sumac controller --help`)
    #[arg(long, value_name = "FILE")]
    pub(super) overrides: Option<PathBuf>,
    /// Inject a fault into the running cluster in the middle of an operation of each row
    ///
    /// Each row then runs as a job of its own, and processes that a fault killed are restarted before the next row.
    /// `tree` and `auto` use the tree while there is one; so do the barriers of every row. A line on stderr reports
    /// when the fault was injected and how long detection and recovery took.
    #[arg(long, value_name = "KIND", conflicts_with_all = ["explain", "overrides"])]
    pub(super) fault: Option<Fault>,
    /// Put `sumac chaos` with these options in front of each device, as in "--loss 5% --reorder 1%"
    ///
    /// Applies to packet traffic only: all traffic with --transport udp, else the traffic between devices. Packet
    /// counters are printed on stderr at the end.
    #[arg(long, value_name = "OPTIONS", conflicts_with = "explain", allow_hyphen_values = true)]
    pub(super) chaos: Option<RuleArgs>,
    /// Print one JSON object per row instead of the table
    #[arg(long)]
    pub(super) json: bool,
}

impl PerfArgs {
    /// Return the rows to measure, in the order in which they are printed.
    ///
    /// # Errors
    /// An empty or too large range of sizes, a root that is not a rank, an operator that its type does not have, and
    /// options that exclude each other.
    pub(super) fn cases(&self) -> anyhow::Result<Vec<Case>> {
        ensure!(
            self.begin <= self.end,
            "the smallest message (-b {}) is larger than the largest (-e {})",
            self.begin,
            self.end
        );
        if self.end > SIZE_MAX {
            bail!("-e {} exceeds the limit of {SIZE_MAX} per operation", self.end);
        }
        if let Some(fault) = self.fault {
            ensure!(self.ranks > 1, "--fault needs --ranks 2 or more");
            let is_shm = fault == Fault::CutLink && self.transport == Transport::Shm;
            ensure!(!is_shm, "--fault cut-link drops packets, and --transport shm sends none; use udp or auto");
        }
        if matches!(self.transport, Transport::Verbs | Transport::Rdma) {
            let relayed = self.chaos.is_some() || self.fault == Some(Fault::CutLink);
            ensure!(
                !relayed,
                "--transport {}: --chaos and --fault cut-link relay UDP only; use `tc qdisc` and `ip link`",
                self.transport
            );
            let (none, transport) = (self.devices.is_empty(), self.transport);
            ensure!(none, "--transport {transport} cannot be combined with --device, which names a UDP address");
            options::check_built(transport)?;
        } else {
            ensure!(self.verbs.is_empty(), "--verbs needs --transport verbs or rdma");
        }
        ensure!(self.root < self.ranks, "--root {}: the {} ranks count from 0", self.root, self.ranks);
        let mut cases = Vec::new();
        for &collective in &self.collectives {
            if collective == Collective::Barrier {
                cases.extend(self.sweep(collective, Dtype::F32, ReduceOp::Sum));
            } else if !collective.reduces() {
                self.dtypes.iter().for_each(|&dtype| cases.extend(self.sweep(collective, dtype, ReduceOp::Sum)));
            } else {
                for (&dtype, &op) in self.dtypes.iter().flat_map(|dtype| self.ops.iter().map(move |op| (dtype, op))) {
                    if let Some(why) = Kernel::unsupported_reason(dtype, op) {
                        bail!("-o {op} with -d {dtype}: {why}");
                    }
                    cases.extend(self.sweep(collective, dtype, op));
                }
            }
        }
        Ok(cases)
    }

    /// Return the transport that ranks are to use: packets if their link is to be cut.
    pub(super) fn transport(&self) -> Transport {
        if self.fault == Some(Fault::CutLink) { Transport::Udp } else { self.transport }
    }

    /// Return the rows of one collective, element type and operator: size by size, all algorithms of a size together.
    fn sweep(&self, collective: Collective, dtype: Dtype, op: ReduceOp) -> Vec<Case> {
        let case = |algo| Case { collective, dtype, op, root: self.root, count: 0, algo };
        if collective == Collective::Barrier {
            // A barrier has no other algorithms: it takes the tree, or what the communicator selects.
            let tree = self.algos.contains(&Algo::Tree).then_some(Algo::Tree);
            let other = self.algos.iter().any(|algo| *algo != Algo::Tree).then_some(Algo::Auto);
            return tree.into_iter().chain(other).map(case).collect();
        }
        let each = case(Algo::Auto).desc().element_bytes() as u64;
        let sizes = sweep(self.begin, self.end, self.factor).into_iter();
        sizes.flat_map(|size| self.algos.iter().map(move |&algo| Case { count: size.0 / each, ..case(algo) })).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        perf: PerfArgs,
    }

    fn parse(args: &str) -> PerfArgs {
        Command::try_parse_from(std::iter::once("perf").chain(args.split_whitespace())).expect("valid options").perf
    }

    #[test]
    fn default_sweep_is_8_bytes_to_16_mib_by_three_algorithms() {
        let cases = parse("").cases().expect("rows");
        assert_eq!(cases.len(), 8 * 3);
        assert_eq!(cases.iter().map(Case::size_bytes).max(), Some(16 << 20));
        assert_eq!(cases[..3].iter().map(|case| case.algo.name()).collect::<Vec<_>>(), ["tree", "ring", "hd"]);
    }

    #[test]
    fn types_and_operators_multiply_rows_and_barriers_have_no_size() {
        let cases = parse("-b 4 -e 16 -f 2 -d f32,f64 -o sum,max --algo tree --collective all_reduce,barrier").cases();
        let cases = cases.expect("rows");
        assert_eq!(cases.len(), 3 * 2 * 2 + 1);
        assert_eq!(cases.iter().find(|case| case.dtype == Dtype::F64).map(|case| case.count), Some(0));
    }

    #[test]
    fn transport_and_memory_options_are_parsed() {
        let defaults = parse("");
        assert_eq!((defaults.transport, defaults.memory), (Transport::Auto, MemoryKind::Registered));
        let given = parse("--transport shm --memory plain");
        assert_eq!((given.transport, given.memory), (Transport::Shm, MemoryKind::Plain));
        assert_eq!(parse("--transport udp").transport, Transport::Udp);
        let error =
            Command::try_parse_from(["perf", "--transport", "roce"]).map(|_| ()).expect_err("no such transport");
        assert!(error.to_string().contains("auto, udp, shm, verbs, rdma"), "{error}");
    }

    #[test]
    fn faults_without_effect_are_refused() {
        let refused = |args: &str| parse(args).cases().expect_err("refused").to_string();
        assert!(refused("--fault kill-rank --ranks 1").contains("2 or more"));
        assert!(refused("--fault cut-link --transport shm").contains("udp or auto"));
        assert!(refused("--fault cut-link --transport verbs").contains("ip link"));
        assert!(refused("--fault cut-link --transport rdma").contains("ip link"));
        assert!(refused("--verbs mlx5_0").contains("--transport verbs"));
        assert_eq!(parse("--fault cut-link").transport(), Transport::Udp);
        assert_eq!(parse("--fault kill-device").transport(), Transport::Auto);
        assert!(Command::try_parse_from(["perf", "--fault", "kill-device", "--explain"]).is_err());
    }

    #[test]
    fn reversed_size_range_error_names_both_sizes() {
        let error = parse("-b 1M -e 8").cases().expect_err("reversed").to_string();
        assert!(error.contains("-b 1M") && error.contains("-e 8"), "{error}");
        assert!(parse("-e 32G").cases().is_err());
    }
}
