//! The options of `sumac perf`, which follow nccl-tests where these have the same.

use super::fault::Fault;
use super::names::{self, Choice, Root};
use super::ssh::{FOLLOW, Host};
use crate::chaos::RuleArgs;
use crate::cluster::GivenDevice;
use crate::options::{self, Algo, Links, OrderName, Transport};
use crate::size::SizeBytes;
use crate::workload::{Check, Placements};
use clap::Args;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use sumac::comm::DEFAULT_PORT;
use sumac::controller::TREES_MAX;
use sumac::{MemoryKind, Shape, WaitPolicy};
use sumac_hal::op::{Collective, Dtype, ReduceOp};

/// The most ranks, each of which is a process on this machine.
const RANKS_MAX: i64 = 1024;

/// The number of ranks that are started unless another is given.
const RANKS_DEFAULT: u32 = 4;

/// `sumac perf`.
///
/// Options that only some collectives have are `None` or empty unless they are given, so that those without effect can
/// be refused.
#[derive(Debug, Args)]
pub(crate) struct PerfArgs {
    /// Smallest message [default: 8]
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE")]
    pub(super) begin: Option<SizeBytes>,
    /// Largest message [default: 16M]
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE")]
    pub(super) end: Option<SizeBytes>,
    /// Difference between one size and the next
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", conflicts_with = "factor")]
    pub(super) step: Option<SizeBytes>,
    /// Factor between one size and the next [default: 8]
    #[arg(short = 'f', long = "stepfactor", value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(super) factor: Option<u32>,
    /// Measured iterations per row, in place and out of place each
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) iterations: u32,
    /// Warm-up iterations before these, which are not measured
    #[arg(short = 'w', long = "warmup_iters", alias = "warmup-iters", value_name = "N", default_value_t = 5)]
    pub(super) warmup: u32,
    /// Element types, comma-separated, or `all`; nccl-tests' names work, too [default: f32]
    #[arg(short = 'd', long = "datatype", value_name = "TYPE", value_delimiter = ',',
          value_parser = names::dtype_parser())]
    pub(super) dtypes: Vec<Choice<Dtype>>,
    /// Operators, comma-separated, or `all` that the type has [default: sum]
    #[arg(short = 'o', long = "op", value_name = "OP", value_delimiter = ',', value_parser = names::op_parser())]
    pub(super) ops: Vec<Choice<ReduceOp>>,
    /// Number of ranks, each a process that is started here [default: 4, unless a launcher has started this process as
    /// a rank]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    pub(super) ranks: Option<u32>,
    /// The number of ranks that a launcher has started, if this process is one of them.
    #[arg(skip)]
    pub(super) launched: Option<u32>,
    /// Controller of ranks that a launcher has started; all addresses of a host name are tried [default:
    /// SUMAC_CONTROLLER, else MASTER_ADDR and SUMAC_PORT]
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) controller: Option<String>,
    /// Start the ranks on these hosts by ssh, where there is no launcher: comma-separated, HOST or HOST:RANKS
    ///
    /// Needs a running controller. SUMAC_SSH replaces `ssh -o BatchMode=yes`. A key that SUMAC_KEY_FILE or SUMAC_KEY
    /// gives here is sent to the ranks through ssh; other variables that begin with SUMAC_ are passed on.
    #[arg(long, value_name = "HOSTS", value_delimiter = ',', conflicts_with = "ranks")]
    pub(super) ssh: Vec<Host>,
    /// The `sumac` on the hosts of --ssh [default: the path of this one]
    #[arg(long, value_name = "PATH", requires = "ssh")]
    pub(super) sumac_path: Option<String>,
    /// This is a rank of --ssh.
    #[arg(long = FOLLOW, hide = true)]
    pub(super) follow_stdin: bool,
    /// Collectives, comma-separated
    #[arg(long = "collective", value_name = "NAME", default_value = "all_reduce", value_delimiter = ',',
          value_parser = names::collective_parser())]
    pub(super) collectives: Vec<Collective>,
    /// Algorithms, comma-separated, or `all` that the collective has; `auto` selects by the controller's cost table
    /// [default: those of tree, ring and hd that the collective has, or auto]
    #[arg(long = "algo", value_name = "NAME", value_delimiter = ',', value_parser = names::algo_parser())]
    pub(super) algos: Vec<Choice<Algo>>,
    /// Root of rooted collectives, or `all` for a row each [default: 0]
    #[arg(short = 'r', long = "root", value_name = "RANK")]
    pub(super) root: Option<Root>,
    /// Order in which contributions are reduced [default: the library's]
    #[arg(long, value_name = "NAME")]
    pub(super) order: Option<OrderName>,
    /// Transport between ranks and their leaf device
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = options::transport_parser(),
          long_help = options::transport_help())]
    pub(super) transport: Transport,
    #[command(flatten)]
    pub(super) verbs: Links,
    /// Most trees to spread large operations over, by packets; 0 for as many as are faster [default: SUMAC_TREES, or
    /// 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=i64::from(TREES_MAX)))]
    pub(super) trees: Option<u8>,
    /// How the ranks lie, for algorithms that use it: line, a grid as 4x8, or servers:4 [default: SUMAC_SHAPE, or line]
    #[arg(long, value_name = "SHAPE")]
    pub(super) shape: Option<Shape>,
    /// How ranks wait for other processes of their machine [default: SUMAC_WAIT_POLICY, or auto]
    ///
    /// `auto` spins while each rank has a core, then yields, then sleeps. `spin` and `yield` never sleep.
    #[arg(long, value_name = "POLICY", value_parser = options::wait_policy_parser())]
    pub(super) wait_policy: Option<WaitPolicy>,
    /// Memory of the ranks' buffers: that of the communicator, which devices access zero-copy, or plain memory of the
    /// process [default: registered]
    #[arg(long, value_name = "KIND", value_parser = options::memory_parser())]
    pub(super) memory: Option<MemoryKind>,
    /// Where inputs and outputs lie [default: both, or in-place with --fault]
    ///
    /// `all_to_all` runs out of place only, because in place it is another algorithm.
    #[arg(long, value_name = "WHICH")]
    pub(super) buffers: Option<Placements>,
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
    /// Plan the tree on this fabric (`sumac topology --help` lists the formats; `-` reads it from stdin) and build it
    /// from emulated devices
    #[arg(long, value_name = "FILE")]
    pub(super) topology: Option<PathBuf>,
    /// Use an existing device, a board or another machine, instead of an emulated one; may be repeated
    ///
    /// The address is the one at which its first shard receives packets. The device must register with the controller
    /// that this run starts (--listen) within 120 s, under the name of the tree node that it replaces: `leaf0`, or NAME
    /// where there are several. Ranks send it packets. It needs no key unless --keys is given.
    #[arg(long = "device", value_name = "[NAME=]IP:PORT", conflicts_with_all = ["fault", "chaos"])]
    pub(super) devices: Vec<GivenDevice>,
    /// Store with the keys of these devices, made by `sumac key new --keys FILE --device NAME`
    ///
    /// All others get keys for this run, as without --device. Without a store the controller uses no keys, because it
    /// knows none of these devices: while it runs, every user of this machine can use it.
    #[arg(long, value_name = "FILE", requires = "devices")]
    pub(super) keys: Option<PathBuf>,
    /// Where this run's controller listens for --device; without --keys loopback only
    #[arg(long, value_name = "ADDRESS", requires = "devices",
          default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)))]
    pub(super) listen: SocketAddr,
    /// Deadline of each operation, in seconds
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(super) timeout_s: u64,
    /// Print candidates, costs and the selection for each row; run nothing
    #[arg(long, conflicts_with_all = ["iterations", "warmup", "buffers", "check", "timeout_s", "csv"])]
    pub(super) explain: bool,
    /// Algorithms by size that override the cost table for `--algo auto` (see `sumac controller --help`)
    #[arg(long, value_name = "FILE")]
    pub(super) overrides: Option<PathBuf>,
    /// Cost table for `--algo auto`, as `sumac calibrate` writes it
    #[arg(long, value_name = "FILE")]
    pub(super) costs: Option<PathBuf>,
    /// Inject a fault into the running cluster in the middle of an operation of each row
    ///
    /// Each row then runs as a job of its own, and processes that a fault killed are restarted before the next row.
    /// `tree` and `auto` use the tree while there is one; so do the barriers of every row. A line on stderr reports
    /// when the fault was injected and how long detection and recovery took.
    #[arg(long, value_name = "KIND", conflicts_with_all = ["explain", "overrides", "costs"])]
    pub(super) fault: Option<Fault>,
    /// Put `sumac chaos` with these options in front of each device, as in "--loss 5% --reorder 1%"
    ///
    /// Applies to packet traffic only: all traffic with --transport udp, else the traffic between devices. Packet
    /// counters are printed on stderr at the end.
    #[arg(long, value_name = "OPTIONS", conflicts_with = "explain", allow_hyphen_values = true)]
    pub(super) chaos: Option<RuleArgs>,
    /// Capture the packets of all devices to this file, for Wireshark with `hal/wireshark/sumac.lua`
    ///
    /// It contains keys and data: only its owner can read it. Ranks send packets only with --transport udp or verbs;
    /// with others, these are the packets between devices. Capturing costs time, so the figures are not those of a run
    /// without it. An existing --device is not captured.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["explain", "fault", "devices"])]
    pub(super) pcap: Option<PathBuf>,
    /// Print one JSON object per row instead of the table
    #[arg(long, conflicts_with = "csv")]
    pub(super) json: bool,
    /// Print comma-separated values instead of the table: a line of column names, then one line per row
    #[arg(long)]
    pub(super) csv: bool,
}

impl PerfArgs {
    /// Return the number of ranks.
    pub(super) fn world(&self) -> u32 {
        self.launched.or(self.ranks).unwrap_or(RANKS_DEFAULT)
    }

    /// Return the transport that ranks are to use: packets if their link is to be cut.
    pub(super) fn transport(&self) -> Transport {
        if self.fault == Some(Fault::CutLink) { Transport::Udp } else { self.transport }
    }

    /// Return the memory of the ranks' buffers.
    pub(super) fn memory(&self) -> MemoryKind {
        self.memory.unwrap_or(MemoryKind::Registered)
    }

    /// Return where inputs and outputs lie. A fault is injected into one operation of a row, so there it is one kind.
    pub(super) fn placements(&self) -> Placements {
        self.buffers.unwrap_or(if self.fault.is_some() { Placements::InPlace } else { Placements::Both })
    }

    /// Whether rows are printed for programs instead of people.
    pub(super) fn is_machine_readable(&self) -> bool {
        self.json || self.csv
    }

    /// Whether nothing but rows and errors is printed.
    pub(super) fn is_quiet(&self) -> bool {
        crate::exit::is_quiet()
    }
}
