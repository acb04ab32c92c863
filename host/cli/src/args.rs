//! The command line: what `--help` says, and which subcommands there are.

use crate::all_reduce::AllReduceArgs;
use crate::devices::DevicesArgs;
use crate::doctor::DoctorArgs;
use crate::flash::FlashArgs;
use crate::flash::worker::WorkerArgs;
use crate::image::ImageArgs;
use crate::perf::PerfArgs;
use crate::plan::PlanArgs;
use crate::server::{ControllerArgs, DeviceArgs};
use crate::status::StatusArgs;
use clap::{ArgAction, Parser, Subcommand};

/// Reductions inside the network: run, measure, plan and inspect
///
/// Sumac runs collectives in the network: devices beside the switches add the ranks' data as it passes, in
/// aggregation trees that a controller plans on the fabric. Where the tree can't be used, ranks reduce among themselves
/// by ring or halving-doubling, and say why.
///
/// `sumac perf` shows all of it on one machine, with devices emulated by ordinary processes.
#[derive(Debug, Parser)]
#[command(name = "sumac", version, after_long_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// Log more to stderr: -v what happens, -vv details, -vvv packets
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = 900)]
    pub(crate) verbose: u8,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure all-reduces through a tree of emulated devices, by ring and by halving-doubling
    ///
    /// Starts a controller, the devices of a tree and the ranks as processes of this machine, runs every
    /// operation through each path, checks every element of every iteration, and prints nccl-tests' columns.
    ///
    /// time is the median over the iterations of the slowest rank's time; algbw is size / time; busbw is algbw times
    /// 2 (N-1) / N for N ranks, nccl-tests' factor, whatever the path. algo is what was asked for, path what was taken.
    #[command(after_long_help = PERF_HELP)]
    Perf(PerfArgs),
    /// Reduce arrays of .npy files, one rank process per file
    ///
    /// All inputs are checked before anything is started: shapes and element types must be the same, in C or Fortran
    /// order. The output has the first input's order. It appears whole or not at all.
    #[command(after_long_help = ALL_REDUCE_HELP)]
    AllReduce(AllReduceArgs),
    /// Run an emulated device: the device runtime as an ordinary process
    ///
    /// Prints `ready NAME` once the controller knows it; serves until SIGINT or SIGTERM.
    ///
    /// Children are known by the address that their packets come from. What stands between them and the device (see
    /// --advertise) must give each child an address of its own, and keep it.
    Device(DeviceArgs),
    /// Run a controller: plans trees, admits jobs, creates and releases their groups
    ///
    /// Prints `listening ADDRESS`; serves until SIGINT or SIGTERM.
    Controller(ControllerArgs),
    /// Show what a controller knows: fabric, devices and jobs
    Status(StatusArgs),
    /// Plan the aggregation tree of some hosts on a fabric
    ///
    /// Picks a root and a tree with the fewest levels and the least link sharing, within each node's limit.
    #[command(after_long_help = PLAN_HELP)]
    Plan(PlanArgs),
    /// Say what this machine can do, and why not
    ///
    /// Every line is ok, warn (works, but worse than it could) or missing, with what to do about it. Exit status 1 if
    /// something that perf needs does not work.
    Doctor(DoctorArgs),
    /// Boot streams for BlueField-class cards: list, verify, build, extract, repack
    Image(ImageArgs),
    /// Push a boot stream to a BlueField-class card over rshim, and follow its boot
    ///
    /// Image and card are checked before anything is changed. The card counts as flashed when it says so, never before.
    /// Ctrl-C stops writing and puts the card's settings back.
    #[command(after_long_help = FLASH_HELP)]
    Flash(FlashArgs),
    /// List the cards that this host can flash, and what they say of themselves
    ///
    /// Reads each card's `misc`, and nothing else: opening its boot node would reset it.
    Devices(DevicesArgs),
    /// What talks to a card's driver for flash and devices
    #[command(hide = true)]
    RshimWorker(WorkerArgs),
    /// One rank of perf or all-reduce; its job comes on stdin
    #[command(hide = true)]
    Rank,
}

const AFTER_HELP: &str = "\
EXAMPLES
  sumac perf                                    every path, 8 B to 16 MiB, 4 ranks
  sumac perf -e 1M --algo tree --ranks 8 --json
  sumac plan --topology fabric.txt --hosts 64
  sumac all-reduce --input a.npy --input b.npy --output sum.npy
  sumac doctor

EXIT STATUS
  0    done; every element was right
  1    the run failed, or a result was wrong
  2    bad input or usage; nothing was written
  10+  flash failed; each way has its own, see `sumac flash --help`
  130  interrupted by Ctrl-C (128 + the number of the signal)

ENVIRONMENT
  RANK, WORLD_SIZE  this rank and how many there are, as launchers set them (library)
  MASTER_ADDR       the controller's host [default: 127.0.0.1] (library, status)
  SUMAC_PORT        the controller's port [default: 7847] (library, status)
  SUMAC_JOB         the job's name: ranks of the same name meet [default: default] (library)
  SUMAC_CARDS       where flash keeps what each card has had [default: /var/lib/sumac/cards]
  SUMAC_LOG         log filter, as in `debug` or `sumac::controller=trace`; wins over -v

Results go to stdout, logs and errors to stderr. Control ports listen on loopback only, as nothing is authenticated yet.";

const PERF_HELP: &str = "\
EXAMPLES
  sumac perf
  sumac perf -b 1K -e 64M -f 4 -n 50 --algo tree,ring
  sumac perf --levels 1 --ranks 8 -d bf16 -o max
  sumac perf --collective barrier --algo tree
  sumac perf --topology fabric.ibnetdiscover --ranks 16

JSON
  One object a row: collective dtype op ranks size_bytes count algo path attach time_us p99_us algbw_gbytes_s
  busbw_gbytes_s wrong wire_bytes cpu_us retransmits repaired. wire_bytes and cpu_us are the most of any rank, per
  operation; wrong and retransmits are sums over ranks and iterations; dtype and op of a barrier are null.

EXIT STATUS
  0 all elements right, 1 wrong elements or a failed run, 2 bad usage or topology, 130 interrupted";

const ALL_REDUCE_HELP: &str = "\
EXAMPLES
  sumac all-reduce --op sum --input r0.npy --input r1.npy --output out.npy
  sumac all-reduce --op max --algo ring --input r0.npy --input r1.npy --output out.npy

EXIT STATUS
  0 written, 1 the run failed, 2 bad input; there is no output file unless the status is 0";

const PLAN_HELP: &str = "\
EXAMPLES
  sumac plan --topology fabric.ibnetdiscover --hosts 16
  sumac plan --topology fabric.toml --hosts n1,n2,n7 --json
  sumac plan --topology fabric.ibnetdiscover --hosts all --dot | dot -Tsvg > tree.svg

JSON
  levels root max_children max_link_sharing nodes[{name,level,parent,children}] ranks[{rank,host,leaf}]; the root is
  level 0 and its parent null; children are names of nodes and `rank N`.";

const FLASH_HELP: &str = "\
EXAMPLES
  sumac flash sumac.bfb --key pub.pem
  sumac flash sumac.bfb --rshim rshim1 --key pub.pem --dry-run
  sumac flash bf-bundle.bfb --allow-unsigned --until rebooting

JSON
  outcome (ready, dry-run, refused, or the failure's name) exit_status card seen message advice
  written_bytes restored not_restored boot_log[]

EXIT STATUS
  0 the card is ready   1 the run failed   2 bad usage or image, nothing was written
  10 not-found     11 not-attached  12 nic-mode       13 secure-mode  14 drop-mode
  15 busy          16 other-writer  17 not-draining   18 gone         19 time-limit
  20 log-error     21 log-panic     22 log-exception  23 log-assert   24 log-critical
  25 setting       26 locked        27 permission     28 image-changed
  29 image         30 io            128 + n interrupted by signal n, as 130 for Ctrl-C

What to do in each case is printed with the failure, and in the documentation of sumac_firmware::flash.";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use sumac::comm::DEFAULT_PORT;

    #[test]
    fn the_options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_names_the_ports_that_the_library_uses() {
        assert!(AFTER_HELP.contains(&format!("[default: {DEFAULT_PORT}]")));
    }
}
