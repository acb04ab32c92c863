//! The command line: what `--help` says, and which subcommands there are.

use crate::board::{EmulateArgs, LogArgs};
use crate::chaos::ChaosArgs;
use crate::collective::{AllGatherArgs, AllReduceArgs, BroadcastArgs, ReduceScatterArgs};
use crate::devices::DevicesArgs;
use crate::doctor::DoctorArgs;
use crate::flash::FlashArgs;
use crate::flash::worker::WorkerArgs;
use crate::image::ImageArgs;
use crate::perf::PerfArgs;
use crate::plan::PlanArgs;
use crate::selftest::SelftestArgs;
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
    /// Reduce the arrays of .npy or .safetensors files, one rank process per file
    ///
    /// All inputs are checked before anything is started: names, shapes and element types must be the same; .npy
    /// arrays may be in C or Fortran order. The output has the first input's order and metadata. It appears whole or not at
    /// all.
    #[command(after_long_help = ALL_REDUCE_HELP)]
    AllReduce(AllReduceArgs),
    /// Reduce the arrays of files, and cut the result into one part a rank
    ///
    /// As all-reduce; each array is cut along axis 0, which must be a multiple of the number of ranks, and rank r writes
    /// the r-th part, in C order. The parts appear all or none.
    #[command(after_long_help = REDUCE_SCATTER_HELP)]
    ReduceScatter(ReduceScatterArgs),
    /// Join the arrays of files along axis 0, as numpy.concatenate does, in order of the inputs
    ///
    /// Names, element types and the other axes must be the same. The output is in C order and has the first input's
    /// metadata.
    #[command(after_long_help = ALL_GATHER_HELP)]
    AllGather(AllGatherArgs),
    /// Send one rank's file to all others, and check that all got the same bytes
    ///
    /// The output is written by the rank behind the root, from what it got.
    #[command(after_long_help = BROADCAST_HELP)]
    Broadcast(BroadcastArgs),
    /// Run an emulated device: the device runtime as an ordinary process
    ///
    /// Prints `ready NAME` once the controller knows it; serves until SIGINT or SIGTERM.
    ///
    /// With one worker it also takes contributions by reference of ranks on this machine: its DMA engine, emulated by
    /// threads, reads and writes their memory.
    ///
    /// Children are known by the address that their packets come from. What stands between them and the device (see
    /// --advertise) must give each child an address of its own, and keep it.
    Device(DeviceArgs),
    /// Run a controller: plans trees, admits jobs, creates and releases their groups
    ///
    /// Prints `listening ADDRESS`; serves until SIGINT or SIGTERM.
    Controller(ControllerArgs),
    /// Lose, double, reorder, damage and delay packets between ranks and devices, as the simulator's links do
    ///
    /// A proxy over UDP. Each client gets a socket of its own towards the target, so that the target sees one address a
    /// client, as behind address translation. Prints `relaying LISTEN to TARGET` for each link; relays until SIGINT or
    /// SIGTERM, and prints what it did to packets then, and at each SIGUSR1.
    ///
    /// Devices tell their children to send here with --advertise. What a device sends once for all its children, by
    /// multicast, does not come by.
    ///
    /// Each packet suffers one fault at most. A place in the table of clients is kept by those that the target answers;
    /// when it is full, others lose theirs to whoever comes.
    #[command(after_long_help = CHAOS_HELP)]
    Chaos(ChaosArgs),
    /// Show what a controller knows: fabric, devices and jobs
    Status(StatusArgs),
    /// Test every link of a cluster on its own: rank to device, and device to device
    ///
    /// Asks the controller that --controller, MASTER_ADDR or SUMAC_PORT name, and tests from here; where none is
    /// named, starts devices on this machine as perf does. Every device is tested alone, then every pair of devices, by
    /// jobs whose tree is pinned to them. Exit status 1 if a link loses more than --max-loss, or does not work.
    ///
    /// round trip is the median of small operations; of a link between devices, what it adds to the link of the
    /// device that is reached from here. bandwidth is that of large operations, each way at once; between devices, that
    /// of the whole way from here.
    #[command(after_long_help = SELFTEST_HELP)]
    Selftest(SelftestArgs),
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
    /// Boot streams for BlueField-class cards and images of boards: list, verify, build, run, extract, repack
    Image(ImageArgs),
    /// Print a board's log as text: time, level, message and source line
    ///
    /// A board's serial port carries log frames (defmt); their texts are in its image.
    Log(LogArgs),
    /// Become an emulator, as `image run` has it
    #[command(hide = true)]
    Emulate(EmulateArgs),
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
    /// One rank of perf or a collective on files; its job comes on stdin
    #[command(hide = true)]
    Rank,
}

const AFTER_HELP: &str = "\
EXAMPLES
  sumac perf                                    every path, 8 B to 16 MiB, 4 ranks
  sumac perf -e 1M --algo tree --ranks 8 --json
  sumac plan --topology fabric.txt --hosts 64
  sumac all-reduce --input a.npy --input b.npy --output sum.npy
  sumac reduce-scatter --input a.safetensors --input b.safetensors --output-dir parts
  sumac selftest
  sumac doctor

EXIT STATUS
  0    done; every element was right
  1    the run failed, or a result was wrong
  2    bad input or usage; nothing was written
  10+  flash failed; each way has its own, see `sumac flash --help`
  130  interrupted by Ctrl-C (128 + the number of the signal)

ENVIRONMENT
  RANK, WORLD_SIZE  this rank and how many there are, as launchers set them (library)
  MASTER_ADDR       the controller's host [default: 127.0.0.1] (library, status, selftest)
  SUMAC_PORT        the controller's port [default: 7847] (library, status, selftest)
  SUMAC_JOB         the job's name: ranks of the same name meet [default: default] (library)
  SUMAC_ATTACH      how the rank reaches its leaf device: auto, udp, shm, verbs or rdma
                    [default: auto] (library)
  SUMAC_DEVICE_USER  the user, by number or name, whose devices share memory with ranks of other users: set it for both
                    [default: none; devices of the rank's own user and of root do] (library, perf, device)
  SUMAC_VERBS       the RDMA port for verbs and rdma, as in mlx5_0:1 [default: the first that is active] (library)
  SUMAC_TENANT      on whose account the job runs, where the controller has quotas [default: default] (library)
  SUMAC_WAIT_FOR_TREE  seconds that joining waits in the controller's queue for a tree [default: 0] (library)
  SUMAC_CARDS       where flash keeps what each card has had [default: /var/lib/sumac/cards]
  SUMAC_LOG         log filter, as in `debug` or `sumac::controller=trace`; wins over -v

Results go to stdout, logs and errors to stderr. Control ports listen on loopback only, as nothing is authenticated yet.";

const PERF_HELP: &str = "\
EXAMPLES
  sumac perf
  sumac perf -b 1K -e 64M -f 4 -n 50 --algo tree,ring
  sumac perf --levels 1 --ranks 8 -d bf16 -o max
  sumac perf --collective reduce_scatter,all_gather,barrier --algo tree,auto
  sumac perf --explain --algo auto --order fold -b 8 -e 16M
  sumac perf --topology fabric.ibnetdiscover --ranks 16
  sumac perf --attach udp --algo tree
  sumac perf --fault kill-device -b 1M -e 16M --algo tree

JSON
  One object a row: collective dtype op ranks size_bytes count algo path attach time_us p99_us algbw_gbytes_s
  busbw_gbytes_s wrong wire_bytes cpu_us retransmits repaired repair_bytes slowest_rank late_us. wire_bytes and cpu_us
  are the most of any rank, per operation; repair_bytes is the most that a rank sent to others to repair; wrong and
  retransmits are sums over ranks and iterations; op is null where nothing combines, dtype too of a barrier. attach is
  how ranks reach the tree, shm, udp, verbs, rdma or mixed; host on other paths. With --explain: operation
  requested overridden chosen attach candidates[{path cost_us ruled_out}]; attach is null where there is no tree.

FAULTS
  kill-device, restart-device and cut-link take rank 0's leaf device, or the link to it, out of the tree: the ranks
  complete what was on its way among themselves, and repaired is true; in rows by a schedule, that may be the next
  barrier. A dead device is noticed by what it shared or, a second later, by its connection to the controller; a cut
  link, where only packets are lost, after 5 s. A killed controller is missed by no operation; one that is started
  again at once (restart-controller) is told of the job by its ranks, which move to a tree of its own later, and nothing
  is repaired. A killed rank ends the run: the others say who it was.

EXIT STATUS
  0 all elements right, 1 wrong elements, a failed run or a killed rank, 2 bad usage or topology, 130 interrupted";

const ALL_REDUCE_HELP: &str = "\
EXAMPLES
  sumac all-reduce --op sum --input r0.npy --input r1.npy --output out.npy
  sumac all-reduce --op max --algo ring --input r0.npy --input r1.npy --output out.npy
  sumac all-reduce --op avg --input a.safetensors --input b.safetensors --output mean.safetensors

FILES
  .safetensors: every tensor, by name; tensors that only some inputs have are an error that names them. Tensors of one
  element type share operations of up to 25 MiB. I8 U8 I16 U16 I32 U32 I64 U64 F16 BF16 F32 F64 F8_E4M3 F8_E5M2.
  Any other name: .npy of |i1 |u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8.

EXIT STATUS
  0 written, 1 the run failed, 2 bad input; there is no output file unless the status is 0";

const REDUCE_SCATTER_HELP: &str = "\
EXAMPLES
  sumac reduce-scatter --input r0.npy --input r1.npy --output 'part-{rank}.npy'
  sumac reduce-scatter --op max --input a.safetensors --input b.safetensors --output-dir parts

FILES
  As in `sumac all-reduce --help`. In parts of .safetensors files every tensor is cut.

EXIT STATUS
  0 written, 1 the run failed, 2 bad input; there are no parts unless the status is 0";

const ALL_GATHER_HELP: &str = "\
EXAMPLES
  sumac all-gather --input part-0.npy --input part-1.npy --output whole.npy

FILES
  As in `sumac all-reduce --help`. Where axis 0 differs, shorter arrays travel padded to the longest.

EXIT STATUS
  0 written, 1 the run failed, 2 bad input; there is no output file unless the status is 0";

const BROADCAST_HELP: &str = "\
EXAMPLES
  sumac broadcast --input model.safetensors --ranks 8 --output copy.safetensors
  sumac broadcast --input a.npy --root 2 --ranks 3 --output b.npy

EXIT STATUS
  0 written, and all ranks got the same; 1 the run failed; 2 bad input; there is no output file unless the status is 0";

const CHAOS_HELP: &str = "\
EXAMPLES
  sumac device --name leaf0 --data-port 7900 --advertise 127.0.0.1:7950
  sumac chaos --listen 127.0.0.1:7950 --to 127.0.0.1:7900 --loss 5% --duplicate 1% --reorder 2% --corrupt 0.1%
  sumac chaos --listen 127.0.0.1:7950 --to 127.0.0.1:7900 --delay 1ms..5ms --cut up --at 2s --for 500ms
  sumac chaos --listen [::1]:0 --to [::1]:7900 --listen [::1]:0 --to [::1]:7901 --rules rules.toml --seed 7 --json

RULES
  [[rule]] in TOML, of: link (which --listen, from 1) direction (up, down, both) at for loss duplicate corrupt reorder
  late delay. Each packet is shown to the rules in order, and the first that does something to it decides; delays come on
  top. Shares are in steps of 0.1%, times whole numbers of us, ms or s.

JSON
  One object a link: listen to clients replaced up{} down{}, each of received sent lost duplicated corrupted reordered
  overflowed refused stray unsent.

EXIT STATUS
  0 ended by SIGINT or SIGTERM, 1 the system did not let it relay, 2 bad usage, rules or addresses";

const SELFTEST_HELP: &str = "\
EXAMPLES
  sumac selftest                                  the links of devices that it starts here
  sumac selftest --controller 127.0.0.1:7847
  sumac selftest --device leaf0 --device spine0 --max-loss 0.01 --json

JSON
  One object a link: from to ok packets lost loss_percent latency_us bandwidth_gbytes_s problem. from is `rank` or a
  device; figures of a link over which nothing came back are null; problem is null if ok.

EXIT STATUS
  0 all links good, 1 a link is bad or the controller is not reached, 2 bad usage, 130 interrupted";

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
