//! The options of `sumac perf`, in the manner of nccl-tests.

use crate::chaos::RuleArgs;
use crate::cluster::GivenDevice;
use crate::job::Case;
use crate::options::{self, Algo, Attach, Links, OrderName};
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

/// The largest operation: what a rank allocates twice.
const SIZE_MAX: SizeBytes = SizeBytes(16 << 30);

/// The most ranks: each is a process here.
const RANKS_MAX: i64 = 1024;

/// `sumac perf`.
#[derive(Debug, Args)]
pub(crate) struct PerfArgs {
    /// The smallest message
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "8")]
    begin: SizeBytes,
    /// The largest message
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "16M")]
    end: SizeBytes,
    /// Each size is this many times the one before
    #[arg(short = 'f', long = "stepfactor", value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,
    /// Measured iterations of each row
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) iterations: u32,
    /// Iterations before each row that are not measured
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
    /// Rank processes
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    pub(super) ranks: u32,
    /// Collectives, comma-separated
    #[arg(long = "collective", value_name = "NAME", default_value = "all_reduce", value_delimiter = ',',
          value_parser = options::collective_parser())]
    collectives: Vec<Collective>,
    /// Ways to take, comma-separated; `auto` is the choice of the controller's cost table
    #[arg(long = "algo", value_name = "NAME", default_value = "tree,ring,hd", value_delimiter = ',',
          value_parser = options::algo_parser())]
    algos: Vec<Algo>,
    /// The root of rooted collectives
    #[arg(short = 'r', long = "root", value_name = "RANK", default_value_t = 0)]
    root: u32,
    /// In which order contributions combine [default: the library's]
    #[arg(long, value_name = "NAME")]
    pub(super) order: Option<OrderName>,
    /// How ranks reach their leaf device: `shm` by shared memory, which the device's DMA engine reads and writes, or the
    /// run fails; `udp` by packets that carry the data; `verbs` by packets over RDMA, and `rdma` by RDMA READ and WRITE of
    /// the device, or the run fails; `auto` by shared memory where that is possible, else by packets
    #[arg(long, value_name = "WAY", default_value = "auto", value_parser = options::attach_parser())]
    pub(super) attach: Attach,
    #[command(flatten)]
    pub(super) verbs: Links,
    /// Which memory the ranks' buffers are in
    #[arg(long, value_name = "KIND", default_value = "registered")]
    pub(super) memory: MemoryKind,
    /// Which iterations are checked, all their elements
    #[arg(short = 'c', long, value_name = "WHICH", default_value = "every")]
    pub(super) check: Check,
    /// Levels of the tree: one device, or two of which one is the root
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "topology")]
    pub(super) levels: u8,
    /// Worker threads of each device
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) shards: u16,
    /// Let ranks and devices run on any processor
    ///
    /// Unasked, each leaf device shares an equal part of the processors with its ranks, as a switch sits next to its
    /// hosts, if the tree has several leaves. It matters where processors are far from each other, on two dies or
    /// sockets.
    #[arg(long)]
    pub(super) no_bind: bool,
    /// Build the tree planned on this fabric (an ibnetdiscover dump or TOML) out of emulated devices
    #[arg(long, value_name = "FILE")]
    pub(super) topology: Option<PathBuf>,
    /// Measure a device that is there already, a board or another machine, in the place of an emulated one: where its
    /// first shard receives packets; may be given several times
    ///
    /// It is to dial the controller that this run starts (--listen), under the name of the tree's node that it is:
    /// `leaf0`, or, where there are several, NAME. Ranks send it packets.
    #[arg(long = "device", value_name = "[NAME=]IP:PORT", conflicts_with_all = ["fault", "chaos"])]
    pub(super) devices: Vec<GivenDevice>,
    /// Where the run's controller listens if a device is to find it; loopback only, as long as nothing is authenticated
    #[arg(long, value_name = "ADDRESS", requires = "devices",
          default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)))]
    pub(super) listen: SocketAddr,
    /// How long one operation may take before it fails, in seconds
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout_s: u64,
    /// Say of each row which ways there are, what each would cost or why it is not possible, and which is taken; run
    /// nothing
    #[arg(long)]
    pub(super) explain: bool,
    /// Ways to take by size, whatever they cost, where `--algo auto` leaves it open (see `sumac controller --help`)
    #[arg(long, value_name = "FILE")]
    pub(super) overrides: Option<PathBuf>,
    /// Do this to the running cluster in the middle of an operation of each row
    ///
    /// The ranks of a row are a job of their own then, and what was killed is started again before; `tree` and `auto` are
    /// the tree while there is one, which barriers go through in every row. A line on stderr says what was done when, and
    /// how long it took to notice and to repair.
    #[arg(long, value_name = "KIND", conflicts_with_all = ["explain", "overrides"])]
    pub(super) fault: Option<Fault>,
    /// Put `sumac chaos` with these options before each device, as in "--loss 5% --reorder 1%"
    ///
    /// What is in packets meets it: all with --attach udp, else what goes between devices. Lines on stderr say at the end
    /// what was done to how many.
    #[arg(long, value_name = "OPTIONS", conflicts_with = "explain", allow_hyphen_values = true)]
    pub(super) chaos: Option<RuleArgs>,
    /// Print one JSON object a row instead of the table
    #[arg(long)]
    pub(super) json: bool,
}

impl PerfArgs {
    /// Return the rows to measure, in the order in which they are printed.
    ///
    /// # Errors
    /// Sizes that leave nothing to measure, or that no rank could hold; a root that is no rank; a type and an operator
    /// that do not go together.
    pub(super) fn cases(&self) -> anyhow::Result<Vec<Case>> {
        ensure!(
            self.begin <= self.end,
            "the smallest message (-b {}) is larger than the largest (-e {}); swap them",
            self.begin,
            self.end
        );
        if self.end > SIZE_MAX {
            bail!("-e {} is more than the {SIZE_MAX} that a rank may hold; choose a smaller one", self.end);
        }
        if let Some(fault) = self.fault {
            ensure!(self.ranks > 1, "--fault needs ranks that something can come between; ask for 2 or more");
            let is_shm = fault == Fault::CutLink && self.attach == Attach::Shm;
            ensure!(!is_shm, "--fault cut-link loses packets, and with --attach shm there are none; use udp or auto");
        }
        if matches!(self.attach, Attach::Verbs | Attach::Rdma) {
            let relayed = self.chaos.is_some() || self.fault == Some(Fault::CutLink);
            ensure!(
                !relayed,
                "--attach {}: --chaos and --fault cut-link relay UDP; use `tc qdisc` and `ip link`",
                self.attach
            );
            let (none, attach) = (self.devices.is_empty(), self.attach);
            ensure!(none, "--attach {attach}: --device names where a device receives over UDP");
            options::check_built(attach)?;
        } else {
            ensure!(self.verbs.is_empty(), "--verbs goes with --attach verbs or rdma");
        }
        ensure!(self.root < self.ranks, "root {} of {} ranks; they count from 0", self.root, self.ranks);
        let mut cases = Vec::new();
        for &collective in &self.collectives {
            if collective == Collective::Barrier {
                cases.extend(self.sweep(collective, Dtype::F32, ReduceOp::Sum));
            } else if !collective.reduces() {
                self.dtypes.iter().for_each(|&dtype| cases.extend(self.sweep(collective, dtype, ReduceOp::Sum)));
            } else {
                for (&dtype, &op) in self.dtypes.iter().flat_map(|dtype| self.ops.iter().map(move |op| (dtype, op))) {
                    if let Some(why) = Kernel::why_not(dtype, op) {
                        bail!("-o {op} of -d {dtype}: {why}");
                    }
                    cases.extend(self.sweep(collective, dtype, op));
                }
            }
        }
        Ok(cases)
    }

    /// Return how ranks are to reach their leaf.
    pub(super) fn attach(&self) -> Attach {
        if self.fault == Some(Fault::CutLink) { Attach::Udp } else { self.attach }
    }

    /// Return the rows of one collective, element type and operator: size by size, all algorithms of a size together.
    fn sweep(&self, collective: Collective, dtype: Dtype, op: ReduceOp) -> Vec<Case> {
        let case = |algo| Case { collective, dtype, op, root: self.root, count: 0, algo };
        if collective == Collective::Barrier {
            // Through the tree, or as the communicator chooses; it has no algorithm to name beside these.
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
    fn no_option_means_8_bytes_to_16_mib_in_three_ways() {
        let cases = parse("").cases().expect("rows");
        assert_eq!(cases.len(), 8 * 3);
        assert_eq!(cases.iter().map(Case::size_bytes).max(), Some(16 << 20));
        assert_eq!(cases[..3].iter().map(|case| case.algo.name()).collect::<Vec<_>>(), ["tree", "ring", "hd"]);
    }

    #[test]
    fn lists_multiply_and_barriers_have_no_size() {
        let cases = parse("-b 4 -e 16 -f 2 -d f32,f64 -o sum,max --algo tree --collective all_reduce,barrier").cases();
        let cases = cases.expect("rows");
        assert_eq!(cases.len(), 3 * 2 * 2 + 1);
        assert_eq!(cases.iter().find(|case| case.dtype == Dtype::F64).map(|case| case.count), Some(0));
    }

    #[test]
    fn ranks_attach_as_they_are_told() {
        let defaults = parse("");
        assert_eq!((defaults.attach, defaults.memory), (Attach::Auto, MemoryKind::Registered));
        let told = parse("--attach shm --memory plain");
        assert_eq!((told.attach, told.memory), (Attach::Shm, MemoryKind::Plain));
        assert_eq!(parse("--attach udp").attach, Attach::Udp);
        let error = Command::try_parse_from(["perf", "--attach", "roce"]).map(|_| ()).expect_err("no such way");
        assert!(error.to_string().contains("auto, udp, shm, verbs, rdma"), "{error}");
    }

    #[test]
    fn faults_that_nothing_can_suffer_are_refused() {
        let refused = |args: &str| parse(args).cases().expect_err("refused").to_string();
        assert!(refused("--fault kill-rank --ranks 1").contains("2 or more"));
        assert!(refused("--fault cut-link --attach shm").contains("udp or auto"));
        assert!(refused("--fault cut-link --attach verbs").contains("ip link"));
        assert!(refused("--fault cut-link --attach rdma").contains("ip link"));
        assert!(refused("--verbs mlx5_0").contains("--attach verbs"));
        assert_eq!(parse("--fault cut-link").attach(), Attach::Udp);
        assert_eq!(parse("--fault kill-device").attach(), Attach::Auto);
        assert!(Command::try_parse_from(["perf", "--fault", "kill-device", "--explain"]).is_err());
    }

    #[test]
    fn sizes_that_make_no_sense_are_refused_with_both_values() {
        let error = parse("-b 1M -e 8").cases().expect_err("reversed").to_string();
        assert!(error.contains("-b 1M") && error.contains("-e 8"), "{error}");
        assert!(parse("-e 32G").cases().is_err());
    }
}
