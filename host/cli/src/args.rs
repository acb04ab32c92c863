//! The command line: subcommands and the texts of `--help`.

use crate::board::{EmulateArgs, LogArgs};
use crate::calibrate::{self, CalibrateArgs};
use crate::card::CardArgs;
use crate::chaos::ChaosArgs;
use crate::collective::{AllGatherArgs, AllReduceArgs, BroadcastArgs, ReduceScatterArgs};
use crate::doctor::DoctorArgs;
use crate::flash::FlashArgs;
use crate::flash::worker::WorkerArgs;
use crate::generate::{CompletionsArgs, ManArgs};
use crate::image::ImageArgs;
use crate::key::KeyArgs;
use crate::perf::{self, PerfArgs};
use crate::plan::PlanArgs;
use crate::run::{BecomeArgs, RunArgs};
use crate::selftest::SelftestArgs;
use crate::server::{ControllerArgs, DeviceArgs};
use crate::status::StatusArgs;
use crate::topology::TopologyArgs;
use clap::{ArgAction, Parser, Subcommand};

/// In-network reduction: run, measure, plan and inspect
///
/// Sumac runs collectives in the network. Devices beside the switches reduce the ranks' data as it passes, along an
/// aggregation tree that a controller plans on the fabric. When no tree is available, ranks fall back to host
/// collectives such as ring and halving-doubling, and report the reason.
///
/// `sumac perf` runs all of this on one machine, with devices emulated by ordinary processes.
#[derive(Debug, Parser)]
#[command(name = "sumac", version, after_long_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// Log more to stderr: -v events, -vv details, -vvv packets
    #[arg(short, long, action = ArgAction::Count, global = true, display_order = 900)]
    pub(crate) verbose: u8,
    /// Print results and errors only: no progress, notes or warnings. SUMAC_LOG still logs what it names
    #[arg(short, long, global = true, display_order = 901, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The subcommands, in the order in which the help lists them.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure collectives through a tree of emulated devices and through host collectives
    ///
    /// Starts a controller, the devices of a tree and the ranks as processes on this machine, runs every operation with
    /// each algorithm, out of place and in place, checks every element of every iteration, and prints the columns of
    /// nccl-tests.
    ///
    /// time is the median over the iterations of the slowest rank's time. algbw is size / time. busbw is algbw times
    /// the factor of nccl-tests, 2 (N-1) / N for an all-reduce of N ranks, whatever the path. algo is the requested
    /// algorithm, path the one that ran. min, avg and max are over the ranks' own medians, in
    /// place where that is measured.
    #[command(after_long_help = perf::HELP)]
    Perf(Box<PerfArgs>),
    /// Measure a cluster and write the cost table by which `auto` selects
    ///
    /// Every algorithm takes turns at every size. Without a launcher, clusters of emulated devices are started here.
    #[command(after_long_help = calibrate::HELP)]
    Calibrate(CalibrateArgs),
    /// Reduce arrays from .npy or .safetensors files, one rank process per file
    ///
    /// All inputs are checked before anything starts: names, shapes and element types must be the same. Arrays in .npy
    /// files may be in C or Fortran order. The output takes its order and metadata from the first input and is written
    /// atomically.
    #[command(after_long_help = ALL_REDUCE_HELP)]
    AllReduce(AllReduceArgs),
    /// Reduce arrays from files and split the result into one part per rank
    ///
    /// Works like all-reduce, then splits each array along axis 0, whose length must be a multiple of the number of
    /// ranks. Rank r writes part r in C order. Either all parts are written or none.
    #[command(after_long_help = REDUCE_SCATTER_HELP)]
    ReduceScatter(ReduceScatterArgs),
    /// Concatenate arrays from files along axis 0, in the order of the inputs
    ///
    /// The result equals that of numpy.concatenate. Names, element types and all other axes must be the same. The
    /// output is in C order and takes its metadata from the first input.
    #[command(after_long_help = ALL_GATHER_HELP)]
    AllGather(AllGatherArgs),
    /// Send one rank's file to all others and check that all received the same bytes
    ///
    /// The rank after the root writes the output, from the bytes that it received.
    #[command(after_long_help = BROADCAST_HELP)]
    Broadcast(BroadcastArgs),
    /// Run a program as the ranks of a job on this machine
    ///
    /// Starts a controller, devices and the processes of the program, with the variables that JoinConfig::from_env
    /// reads: SUMAC_CONTROLLER, SUMAC_JOB, SUMAC_HOST, SUMAC_RANK, SUMAC_WORLD and SUMAC_LOCAL_RANK, also RANK,
    /// WORLD_SIZE and LOCAL_RANK. Output is passed on line by line; standard input is empty. If a rank fails, the
    /// others are ended: SIGTERM, and SIGKILL after 5 s. Nothing is left when the command ends, also by Ctrl-C.
    #[command(after_long_help = RUN_HELP)]
    Run(RunArgs),
    /// Run an emulated device: the device runtime as an ordinary process
    ///
    /// Prints `ready NAME` once it has registered with the controller, and serves until SIGINT or SIGTERM.
    ///
    /// With one shard it also serves ranks on this machine zero-copy: its DMA engine, emulated by threads, reads and
    /// writes their memory.
    ///
    /// The device identifies children by the source address of their packets. A relay or address translation in between
    /// (see --advertise) must give each child an address of its own that does not change.
    Device(DeviceArgs),
    /// Run a controller: it plans trees, admits jobs, and creates and releases their groups
    ///
    /// Prints `listening ADDRESS` and serves until SIGINT or SIGTERM.
    Controller(ControllerArgs),
    /// Drop, duplicate, reorder, corrupt and delay packets between ranks and devices
    ///
    /// A UDP proxy with the fault rules of the simulator. Each client gets its own socket towards the target, so the
    /// target sees one address per client, as behind address translation. Prints `relaying LISTEN to TARGET` for each
    /// link and relays until SIGINT or SIGTERM. Prints packet counters when it ends, and at each SIGUSR1.
    ///
    /// Start devices with --advertise so that their children send here. Multicast results, which a device sends once
    /// for all its children, bypass the proxy.
    ///
    /// Each packet suffers at most one fault. When the client table is full, clients that got no reply are evicted
    /// first.
    #[command(after_long_help = CHAOS_HELP)]
    Chaos(ChaosArgs),
    /// Show a controller's fabric, devices, tenants, jobs and recoveries
    ///
    /// A device's contributions are those of its children; the zero-copy ones are counted beside packets. A job's path
    /// is the one that calls take which name no algorithm: tree or host. missing are the ranks that have not joined,
    /// have left or are lost. Recoveries are those that this controller has seen, the latest first, also of jobs that
    /// have ended.
    ///
    /// With --watch, the report replaces the one before on a terminal and follows it elsewhere. Ctrl-C ends the command
    /// with status 0.
    #[command(after_long_help = STATUS_HELP)]
    Status(StatusArgs),
    /// Test each link of a cluster: rank to device, and device to device
    ///
    /// Tests the devices of the controller named by --controller, MASTER_ADDR or SUMAC_PORT, from this host. Without
    /// one, starts a controller and devices on this machine, as perf does. Each device is tested alone, then each pair
    /// of devices, by jobs whose tree is pinned to them. The exit status is 1 if a link fails or loses more than
    /// --max-loss.
    ///
    /// round trip is the median time of small operations. For a link between devices, it is the time that the link adds
    /// to the link between this host and the nearer device. bandwidth is that of large operations, in both directions
    /// at once. For a link between devices, it is measured end to end from this host.
    #[command(after_long_help = SELFTEST_HELP)]
    Selftest(SelftestArgs),
    /// Make, list and revoke the keys with which devices, ranks and operators connect to a controller
    ///
    /// A controller with keys serves nobody without one. Connections are encrypted, and each key is good for its
    /// principal only: a device for its names, a tenant's ranks for its jobs, an operator for all of `status`.
    #[command(after_long_help = KEY_HELP)]
    Key(KeyArgs),
    /// Plan an aggregation tree for a set of hosts on a fabric
    ///
    /// Picks the root and the tree with the fewest levels and the least link sharing, within the limits of each node.
    /// With --algo: print or draw what an algorithm between hosts sends, or count what it loads onto links.
    #[command(after_long_help = PLAN_HELP)]
    Plan(PlanArgs),
    /// Show, compare and generate fabrics
    ///
    /// A fabric is what `plan`, `controller` and `perf` take as --topology: raw output of ibnetdiscover, an ibsim .net
    /// file, TOML, Slurm's topology.conf, or NetQ's topology graph in JSON. Its content tells the format.
    Topology(TopologyArgs),
    /// Check this machine's capabilities
    ///
    /// Each line is ok, warn (works below its potential), missing (this machine has none), not built (this build of the
    /// command leaves it out) or BROKEN (perf needs it, and it does not work), with a remedy. The last line counts
    /// them.
    #[command(after_long_help = DOCTOR_HELP)]
    Doctor(DoctorArgs),
    /// Print completions for a shell
    ///
    /// Source the script or store it where the shell looks for completions, as in
    /// `sumac completions bash > ~/.local/share/bash-completion/completions/sumac`.
    Completions(CompletionsArgs),
    /// Write manual pages: one for sumac and one for each subcommand
    Man(ManArgs),
    /// Work with boot streams for BlueField-class cards and with board images
    Image(ImageArgs),
    /// Decode a board's log: time, level, message and source line
    ///
    /// A board writes defmt frames to its serial port. The strings that they refer to are in its image.
    Log(LogArgs),
    /// Run QEMU for `image run` (internal)
    #[command(hide = true)]
    Emulate(EmulateArgs),
    /// Push a boot stream to a BlueField-class card over rshim and follow its boot
    ///
    /// Checks the image and the card before it changes anything. A card counts as flashed only once it reports so
    /// itself. Ctrl-C stops writing and restores the card's settings.
    #[command(after_long_help = FLASH_HELP)]
    Flash(FlashArgs),
    /// Work with the cards that this host can flash, and update those that serve
    Card(CardArgs),
    /// Talk to a card's driver for `flash` and `card list` (internal)
    #[command(hide = true)]
    RshimWorker(WorkerArgs),
    /// Run one rank of perf or of a collective on files; reads its job from stdin (internal)
    #[command(hide = true)]
    Rank,
    /// Become the program of a rank (internal)
    #[command(hide = true)]
    Become(BecomeArgs),
    /// Kill the process groups of `run` when it is killed; reads them from stdin (internal)
    #[command(hide = true)]
    Guard,
}

const AFTER_HELP: &str = "\
EXAMPLES
  sumac perf                                    tree, ring and hd; 8 B to 16 MiB; 4 ranks
  sumac perf -e 1M --algo tree --ranks 8 --json
  sumac run -n 4 -- ./train                     4 ranks of a program on this machine
  sumac plan --topology fabric.txt --hosts 64
  sumac all-reduce --input a.npy --input b.npy --output sum.npy
  sumac reduce-scatter --input a.safetensors --input b.safetensors --output-dir parts
  sumac selftest
  sumac doctor

EXIT STATUS
  0    success; every checked element was correct
  1    the run failed, or a result was wrong
  2    invalid input or usage; nothing was started or written
  10+  flash failed; the status tells how, see `sumac flash --help`
  130  interrupted by Ctrl-C (128 + the signal's number)

ENVIRONMENT
  Read by this command:
  SUMAC_CONFIG         a configuration file, for controller and device; options and variables beat it
  SUMAC_CONTROLLER     the controller as HOST:PORT, for device, image run, status and selftest; beats MASTER_ADDR and
                       SUMAC_PORT
  MASTER_ADDR          the controller's host, for status and selftest [default: 127.0.0.1]
  SUMAC_PORT           the controller's port, for status and selftest [default: 7847]
  SUMAC_KEY_FILE       the file with the key to connect to the controller with, for device, status and selftest;
                       `-` is stdin
  SUMAC_KEY            the key itself
  SUMAC_OPERATOR_KEY_FILE
                       the file with an operator's key, for status and selftest; beats SUMAC_KEY_FILE and SUMAC_KEY there
  SUMAC_DEVICE_USER    the user, by number or name, whose devices may share memory with ranks of other users; set it for
                       device and ranks [default: none; devices of the rank's own user and of root may]
  SUMAC_BIND           the address of this host, as a number or a name, that devices and ranks reach; also for device
                       [default: the one that routes to the controller]. A list: the addresses of the server's
                       adapters, for a tree on each rail; a device takes the first
  SUMAC_IFNAME         interfaces from which that address may be taken, as NCCL_SOCKET_IFNAME: `eth,ib` by the
                       beginnings of their names, `=eth0` by whole names, `^docker,lo` all others; also for device
                       [default: all]
  SUMAC_TRAFFIC_CLASS  traffic class of packets and connections, 0 to 252: four times the DSCP, as 184 for EF; also for
                       controller and device [default: 0]
  SUMAC_SSH            what perf --ssh and flash --host run commands on other hosts with
                       [default: ssh -o BatchMode=yes]
  SUMAC_CARDS          the folder in which flash records the state of each card [default: /var/lib/sumac/cards]
  SUMAC_LOG            log filter, as in `debug` or `sumac::controller=trace`; overrides -v

  Read by programs that join with JoinConfig::from_env, beside the first seven:
  SUMAC_RANK, SUMAC_WORLD, SUMAC_LOCAL_RANK
                       this rank, the number of ranks, and the rank's number on its host [default: what torchrun, Open
                       MPI, MPICH, Intel MPI, Slurm or RANK and WORLD_SIZE say; `sumac doctor --env` shows it]
  SUMAC_JOB            the job's name, the same on all ranks [default: the launcher's, else default]
  SUMAC_EMBEDDED_CONTROLLER
                       1 on all ranks: rank 0 runs the controller [default: 0]
  SUMAC_HOST           this host's name in the fabric, or its server's [default: by order of host]
  SUMAC_TRANSPORT      transport to the leaf device: auto, udp, shm, verbs or rdma [default: auto]
  SUMAC_VERBS          RDMA port for verbs and rdma, as in mlx5_0:1 [default: the first that is active]
  SUMAC_ORDER          order of reduction: arrival, fold or pairwise [default: arrival]
  SUMAC_ALGO           algorithm of calls that name none [default: auto]
  SUMAC_SHAPE          how the ranks lie: line, a grid as 4x8, or servers:4 [default: by machine and fabric]
  SUMAC_DEADLINE       deadline of calls that name none, in seconds [default: 60]
  SUMAC_STRAGGLER      wait, deadline:SECONDS or partial:SECONDS [default: wait]
  SUMAC_MEMORY         memory of most buffers, for the algorithm auto: plain or registered [default: registered]
  SUMAC_WAIT_POLICY    how to wait for processes of this machine: auto, spin, yield or sleep [default: auto]
  SUMAC_HIERARCHICAL   1 to combine ranks that share a host there first, 0 not to [default: 1]
  SUMAC_TREES          most trees to spread large operations over; 0: as many as are faster [default: 0]
  SUMAC_HYBRID         1 to join a tree for each rail of servers, for the algorithm hybrid, 0 not to [default: 0]
  SUMAC_RAB            1 to join a tree of the servers' leaders, for the algorithm rab, 0 not to [default: 0]
  SUMAC_RECOVER        1 to recover from lost devices, 0 to fail [default: 1]
  SUMAC_TENANT         tenant that the job is accounted to [default: default]
  SUMAC_WAIT_FOR_TREE  seconds to queue for a tree while joining [default: 0]
  SUMAC_JOIN_TIMEOUT   seconds to wait for the other ranks [default: 60]
  SUMAC_UDP_*          MAX_PACKET, PEER, RECEIVE_BUFFER, SEND_BUFFER, GSO, GRO and SPIN_US of the data port

Results go to stdout, logs and errors to stderr. A controller without keys listens on loopback only (see `sumac key`).";

const ALL_REDUCE_HELP: &str = "\
EXAMPLES
  sumac all-reduce --op sum --input r0.npy --input r1.npy --output out.npy
  sumac all-reduce --op max --algo ring --input r0.npy --input r1.npy --output out.npy
  sumac all-reduce --op avg --input a.safetensors --input b.safetensors --output mean.safetensors

FILES
  .safetensors: every tensor, matched by name. A tensor that an input lacks is an error that names it. Tensors of one
  element type share operations of up to 25 MiB. Types: I8 U8 I16 U16 I32 U32 I64 U64 F16 BF16 F32 F64 F8_E4M3 F8_E5M2.
  Any other name: .npy with elements of type |i1 |u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8.

EXIT STATUS
  0 written; 1 the run failed; 2 invalid input. Unless the status is 0, there is no output file.";

const REDUCE_SCATTER_HELP: &str = "\
EXAMPLES
  sumac reduce-scatter --input r0.npy --input r1.npy --output 'part-{rank}.npy'
  sumac reduce-scatter --op max --input a.safetensors --input b.safetensors --output-dir parts

FILES
  See `sumac all-reduce --help`. In .safetensors files every tensor is split.

EXIT STATUS
  0 written; 1 the run failed; 2 invalid input. Unless the status is 0, there are no output files.";

const ALL_GATHER_HELP: &str = "\
EXAMPLES
  sumac all-gather --input part-0.npy --input part-1.npy --output whole.npy

FILES
  See `sumac all-reduce --help`. Where lengths of axis 0 differ, shorter arrays are padded to the longest in transit.

EXIT STATUS
  0 written; 1 the run failed; 2 invalid input. Unless the status is 0, there is no output file.";

const BROADCAST_HELP: &str = "\
EXAMPLES
  sumac broadcast --input model.safetensors --ranks 8 --output copy.safetensors
  sumac broadcast --input a.npy --root 2 --ranks 3 --output b.npy

EXIT STATUS
  0 written, and all ranks received the same bytes; 1 the run failed; 2 invalid input. Unless the status is 0, there is
  no output file.";

const RUN_HELP: &str = "\
EXAMPLES
  sumac run -n 4 -- ./train --epochs 3
  sumac run -n 8 --devices 2 --label -- python3 train.py
  sumac run -n 4 -- sumac perf

KEYS
  The controller serves only who has a key. Ranks find theirs by SUMAC_KEY_FILE, and `sumac status` and `selftest` among them
  that of an operator by SUMAC_OPERATOR_KEY_FILE: names of memory that this user alone can open, as long as the command runs.
  Stderr names the controller and the `sumac status` that watches it from elsewhere. The ranks' key is good for the tenant that
  SUMAC_TENANT names.

EXIT STATUS
  0 all ranks returned 0; 1 a rank failed, which is named, or the controller or a device did; 2 invalid usage or
  program; 130 interrupted";

const CHAOS_HELP: &str = "\
EXAMPLES
  sumac device --name leaf0 --data-port 7900 --advertise 127.0.0.1:7950
  sumac chaos --listen 127.0.0.1:7950 --to 127.0.0.1:7900 --loss 5% --duplicate 1% --reorder 2% --corrupt 0.1%
  sumac chaos --listen 127.0.0.1:7950 --to 127.0.0.1:7900 --delay 1ms..5ms --cut up --at 2s --for 500ms
  sumac chaos --listen [::1]:0 --to [::1]:7900 --listen [::1]:0 --to [::1]:7901 --rules rules.toml --seed 7 --json

RULES
  A TOML file of [[rule]] tables with the keys link (number of the --listen, from 1) direction (up, down, both) at for
  loss duplicate corrupt reorder late delay. Each packet passes through the rules in order; the first fault decides, and
  delays add up. Rates are percentages in steps of 0.1%, times are whole numbers of us, ms or s.

JSON
  One object per link: listen to clients replaced up{} down{}, each of received sent lost duplicated corrupted reordered
  overflowed refused stray unsent.

EXIT STATUS
  0 ended by SIGINT or SIGTERM; 1 a system call failed while relaying; 2 invalid usage, rules or addresses";

const SELFTEST_HELP: &str = "\
EXAMPLES
  sumac selftest                                  devices that it starts on this machine
  sumac selftest --controller 127.0.0.1:7847
  mpirun -np 4 sumac selftest --controller head:7847        each rank's own links, one table
  sumac selftest --device leaf0 --device spine0 --max-loss 0.01 --json

JSON
  One object per link: from to ok packets lost loss_percent latency_us bandwidth_gbytes_s problem. from is `rank`,
  under a launcher `rank N`, or a device. Figures are null for a link over which no result came back.
  problem is null if ok is true.

EXIT STATUS
  0 all links good; 1 a bad link or an unreachable controller; 2 invalid usage; 130 interrupted";

const KEY_HELP: &str = "\
EXAMPLES
  sumac key new --keys keys.toml --device leaf0 --output leaf0.key
  sumac key new --keys keys.toml --tenant ml --expires-days 90 --output ml.key
  sumac key new --keys keys.toml --operator --output operator.key
  sumac controller --listen 10.0.0.1:7847 --keys keys.toml
  sumac device --name leaf0 --controller 10.0.0.1 --key-file leaf0.key
  SUMAC_KEY_FILE=ml.key SUMAC_TENANT=ml mpirun ./program
  sumac status --controller 10.0.0.1 --key-file operator.key
  sumac selftest --controller 10.0.0.1 --key-file operator.key

FILES
  Store and keys are secrets: they are made with mode 0600, and a file that others can read is refused. A controller reads
  its store again when it changes. The data plane is not encrypted: whoever can read the wire can read the ranks' data.

EXIT STATUS
  0 done; 1 the store cannot be written; 2 invalid usage or input, and nothing is changed";

const STATUS_HELP: &str = "\
EXAMPLES
  sumac status
  sumac status --controller localhost:7847 --watch 1
  sumac status --json | jq '.jobs[] | {name, path, missing}'

JSON
  fabric devices[] tenants[] jobs[] jobs_left_out recoveries[] pair interval_s. A device has stats{Ok{counters{}}} or
  stats{Err}, drops{} by reason without zeros, and rates{} per second. A job has joined, world, missing[{first,last}],
  path, tree, queue and view. A recovery has job view cause began_ms_ago took_ms outcome; the last two are null while it
  lasts. interval_s and rates are null except with --watch, from the second report on; there each report is one line.

EXIT STATUS
  0 reported, or watched until Ctrl-C; 1 no answer from the controller; 2 invalid usage or address";

const DOCTOR_HELP: &str = "\
EXAMPLES
  sumac doctor
  sumac doctor --json | jq -r '.findings[] | select(.health != \"ok\") | .what'
  mpirun -np 4 sumac doctor --env

JSON
  findings[{health,what,found,advice}] summary{ok,warn,missing,not_built,broken} dma_profiles[{name,capabilities,hardware}].
  health is a key of summary. With --env: variables[{name,value,source,launcher,role,used}] launcher rank world local_rank
  job controller address error config_file. source is environment or file.

EXIT STATUS
  0 nothing is broken; 1 something that perf needs does not work; 2 invalid usage, or with --env an environment that
  does not describe a rank";

const PLAN_HELP: &str = "\
EXAMPLES
  sumac plan --topology fabric.ibnetdiscover --hosts 16 --exclude '*-login-*'
  sumac plan --topology topology.conf --hosts 'n[0-63]'
  sumac plan --topology fabric.toml --hosts n1,n2,n7 --json
  sumac plan --topology fabric.ibnetdiscover --hosts 16 --size 64K --without leaf3
  sumac plan --topology fabric.ibnetdiscover --hosts all --dot | dot -Tsvg > tree.svg
  sumac plan --algo swing --ranks 16 --shape 4x4 --svg > swing.svg
  sumac plan --algo all --ranks 256 --links dragonfly:16

JSON
  levels root max_children max_link_sharing aligned optimal gap gbits times[{bytes,seconds}]
  nodes[{name,guid,level,parent,children}] ranks[{rank,host,guid,leaf}] selected[] assumptions[]. The root is level 0 and
  has a null parent. children are names of nodes and `rank N`. gap: how much faster another tree may be at most, as a
  fraction. selected says what was taken of the fabric and what was left out, assumptions what its file does not say; both
  are sentences.
  With --algo: algo collective ranks shape count steps[[{from,to,elements,first,combined}]] links{busiest[],congestion}.
  first is null where elements are not those of the collective in its order, links is there with --links only.";

const FLASH_HELP: &str = "\
EXAMPLES
  sumac flash sumac.bfb --key pub.pem
  sumac flash sumac.bfb --rshim rshim1 --key pub.pem --dry-run
  sumac flash bf-bundle.bfb --allow-unsigned --until rebooting
  sumac flash sumac.bfb --key pub.pem --host root@node1,root@node2 --all
  sumac flash sumac.bfb --key pub.pem --redfish https://bmc1 --credentials bmc.txt --ca ca.pem

JSON
  outcome (ready, dry-run, refused, or the failure's name) exit_status card seen message advice
  written_bytes restored not_restored boot_log[]

EXIT STATUS
  0 the card is ready   1 the run failed   2 invalid usage or image, nothing was written
  10 not-found     11 not-attached  12 nic-mode       13 secure-mode  14 drop-mode
  15 busy          16 other-writer  17 not-draining   18 gone         19 time-limit
  20 log-error     21 log-panic     22 log-exception  23 log-assert   24 log-critical
  25 setting       26 locked        27 permission     28 image-changed
  29 image         30 io            128 + n interrupted by signal n, as 130 for Ctrl-C

Each failure is printed with its remedy, which the documentation of sumac_firmware::flash lists, too.";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use sumac::comm::DEFAULT_PORT;

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_shows_the_library_default_port() {
        assert!(AFTER_HELP.contains(&format!("[default: {DEFAULT_PORT}]")));
    }
}
