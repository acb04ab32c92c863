//! `sumac controller` and `sumac device`: the two kinds of process that serve until they are told to end.
//!
//! Each prints one line on stdout when it is ready (`listening ADDRESS`, `ready NAME`), and ends with status 0 on SIGINT or
//! SIGTERM, having released what it holds.

use crate::cluster::{LISTENING, READY};
use crate::exit::Failure;
use crate::options;
use crate::quota::{self, TenantQuota};
use anyhow::{Context, anyhow};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use sumac::comm::DEFAULT_PORT;
use sumac::controller::{Controller, ControllerConfig, Limits};
use sumac::select::CostTable;
use sumac::topo::Fabric;
use sumac_firmware::emulated::{Board, BoardConfig, BusConfig};
use sumac_hal::dma::Profile;

/// The longest fabric that is read from stdin, in bytes.
const STDIN_MAX_BYTES: u64 = 64 << 20;

/// `sumac controller`.
#[derive(Debug, Args)]
pub(crate) struct ControllerArgs {
    /// Where to listen; loopback only, as long as nothing is authenticated
    #[arg(long, value_name = "ADDRESS", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)))]
    listen: SocketAddr,
    /// The fabric to plan on (an ibnetdiscover dump or TOML), `-` for TOML on stdin; without it, every device is a
    /// switch that all hosts hang on
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Ways to take by size, whatever they cost: TOML with one `[[override]]` for each, of `path` and, where it is
    /// limited, `collective`, `min_bytes`, `max_bytes`; the first that fits counts
    #[arg(long, value_name = "FILE")]
    overrides: Option<PathBuf>,
    /// What a tenant's jobs may hold: at most so many groups (jobs with a tree) at a time, and of each device so many
    /// slots and bytes of memory, in each of its shards; what is not named has no limit. `*` is every tenant that is not
    /// named. Give it once a tenant
    #[arg(long = "quota", value_name = "TENANT=groups:N,slots:N,memory:SIZE")]
    quotas: Vec<TenantQuota>,
    /// How long a group lives at a device without a packet of its job or a renewal by the controller, in seconds
    #[arg(long = "lease", value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    lease_s: u64,
    /// Connections of ranks and devices at a time; each takes a descriptor of this process
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    max_connections: usize,
    /// Jobs at a time, sub-communicators too
    #[arg(long, value_name = "N", default_value_t = Limits::default().jobs,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    max_jobs: usize,
    /// Devices at a time
    #[arg(long, value_name = "N", default_value_t = Limits::default().devices,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 16))]
    max_devices: usize,
    /// The longest that a device which ends soon after it has come, again and again, is given no job, in seconds; the
    /// back-off begins with one second and doubles. 0: none
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().device_backoff.as_secs(),
          value_parser = clap::value_parser!(u64).range(0..=86_400))]
    device_backoff: u64,
    /// Take the tree where there is one, whatever it costs
    #[arg(long, hide = true, conflicts_with = "overrides")]
    prefer_tree: bool,
}

/// What [`ControllerArgs::prefer_tree`] means.
const TREE_OVERRIDE: &str = "[[override]]\npath = \"tree\"\n";

/// `sumac device`.
#[derive(Debug, Args)]
pub(crate) struct DeviceArgs {
    /// The device's name: that of its switch in the fabric
    #[arg(long, value_name = "NAME")]
    name: String,
    /// The controller to serve
    #[arg(long, value_name = "ADDRESS", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)))]
    controller: SocketAddr,
    /// The address of this host that ranks and other devices reach
    #[arg(long, value_name = "IP", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    bind: IpAddr,
    /// UDP port of the first worker's data port; the other workers take the next ones [default: any that are free]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    data_port: Option<u16>,
    /// Addresses that ranks and other devices are told to send to, one for each worker, where they are not those of
    /// the data ports: behind address translation or a relay. Goes with --data-port
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', requires = "data_port")]
    advertise: Option<Vec<SocketAddr>>,
    /// Worker threads, each with a port and memory of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    shards: u16,
    /// Most children that it takes, over all its groups [default: the board's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=65_536))]
    children: Option<u32>,
    /// Slots of all groups, in each shard [default: the board's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    slots: Option<u32>,
    /// Receive packets over this RDMA port, DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX, instead of over UDP; without a
    /// name, over the first that is active. Ranks then attach as `verbs`
    #[arg(long, value_name = "LINK", num_args = 0..=1, default_missing_value = options::ANY_LINK,
          conflicts_with_all = ["data_port", "advertise"])]
    verbs: Option<String>,
    /// Take no contributions by reference: ranks on this machine send packets, as all others do
    #[arg(long)]
    no_bus: bool,
    /// Let ranks of other hosts contribute by reference, too: the engine is that of this RDMA port, DEVICE, DEVICE:PORT or
    /// DEVICE:PORT:GID-INDEX, which reads and writes their memory; without a name, of the first that is active. Ranks then
    /// attach as `rdma`
    #[arg(long, value_name = "LINK", num_args = 0..=1, default_missing_value = options::ANY_LINK, conflicts_with = "no_bus")]
    rdma: Option<String>,
    /// What the emulated DMA engine can do, and so what the device's processor has left to do; `sumac doctor` says which
    /// hardware has which
    #[arg(long, value_name = "NAME", default_value = "full", value_parser = options::profile_parser(),
          conflicts_with = "no_bus")]
    dma_profile: Profile,
    /// Threads of the DMA engine
    #[arg(long, value_name = "N", default_value_t = 2, conflicts_with = "no_bus",
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    dma_threads: usize,
    /// Let the DMA engine refuse what hardware would let pass: misaligned elements, chains that get in each other's way
    #[arg(long, conflicts_with = "no_bus")]
    dma_strict: bool,
    /// Memory that each rank may register for contributions by reference, in GiB; more is refused (`Quota`)
    #[arg(long, value_name = "GIB", default_value_t = 256, conflicts_with = "no_bus",
          value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    rank_memory_gib: u64,
    /// Seconds to wait for the controller before giving up
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 30)]
    timeout_s: u64,
}

/// Run a controller until a signal.
pub(crate) fn run_controller(args: &ControllerArgs) -> Result<(), Failure> {
    let signals = signals()?;
    let mut config = ControllerConfig::new();
    config.listen = args.listen;
    config.fabric = args.topology.as_deref().map(read_fabric).transpose().map_err(Failure::Input)?;
    if let Some(path) = &args.overrides {
        config.table = read_overrides(config.table, path).map_err(Failure::Input)?;
    } else if args.prefer_tree {
        config.table = config.table.with_overrides(TREE_OVERRIDE).map_err(Failure::input)?;
    }
    config.lease = Duration::from_secs(args.lease_s);
    config.quotas = quota::all(&args.quotas).map_err(Failure::Input)?;
    let (connections, jobs, devices) = (args.max_connections, args.max_jobs, args.max_devices);
    let device_backoff = Duration::from_secs(args.device_backoff);
    config.limits = Limits { connections, jobs, devices, device_backoff, ..config.limits };
    take_descriptors(connections);
    let controller = Controller::start(config).map_err(Failure::input)?;
    announce(&format!("{LISTENING}{}", controller.local_addr()))?;
    wait(signals);
    Ok(())
}

/// Run an emulated device until a signal.
pub(crate) fn run_device(args: DeviceArgs) -> Result<(), Failure> {
    let signals = signals()?;
    let mut config = BoardConfig::new(args.name.clone(), args.controller);
    config.bus = args.bus();
    config.bind = args.bind;
    config.data_port = args.data_port;
    config.advertise = args.advertise;
    config.shards = args.shards;
    config.verbs = args.verbs;
    config.rdma = args.rdma;
    config.children = args.children.unwrap_or(config.children);
    config.slots = args.slots.unwrap_or(config.slots);
    let name = config.name.clone();
    let board = Board::start(config).map_err(Failure::input)?;
    if !board.wait_registered(Duration::from_secs(args.timeout_s)) {
        let (controller, seconds) = (args.controller, args.timeout_s);
        return Err(Failure::Run(anyhow!(
            "device {name} has not reached a controller at {controller} within {seconds} s; start one with `sumac controller`"
        )));
    }
    announce(&format!("{READY}{name}"))?;
    wait(signals);
    Ok(())
}

impl DeviceArgs {
    /// Describe the bus that is asked for.
    fn bus(&self) -> Option<BusConfig> {
        let (profile, threads, strict) = (self.dma_profile, self.dma_threads, self.dma_strict);
        let rank_memory_bytes = self.rank_memory_gib << 30;
        (!self.no_bus).then(|| BusConfig { profile, threads, strict, rank_memory_bytes, ..BusConfig::default() })
    }
}

/// Let this process have a descriptor for each connection, as far as the system lets it.
fn take_descriptors(connections: usize) {
    let wanted = connections as u64 + DESCRIPTORS_BESIDE;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return;
    }
    let current = limit.maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit });
    if raised.is_err() || current < wanted {
        tracing::info!(
            connections,
            descriptors = getrlimit(Resource::Nofile).current,
            "the limit of open files (ulimit -Hn) leaves fewer connections than --max-connections"
        );
    }
}

/// What a controller has open beside its connections, generously.
const DESCRIPTORS_BESIDE: u64 = 64;

fn read_fabric(path: &Path) -> anyhow::Result<Fabric> {
    if path.as_os_str() != "-" {
        return Ok(Fabric::read(path)?);
    }
    let mut text = String::new();
    io::stdin().take(STDIN_MAX_BYTES).read_to_string(&mut text).context("cannot read the fabric from stdin")?;
    Fabric::from_toml(&text).context("stdin")
}

/// Read an override file into a cost table.
pub(crate) fn read_overrides(table: CostTable, path: &Path) -> anyhow::Result<CostTable> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    table.with_overrides(&text).with_context(|| path.display().to_string())
}

fn announce(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Take over the signals before anything is started that they should end in order.
fn signals() -> Result<Signals, Failure> {
    Signals::new([SIGINT, SIGTERM]).context("watch for signals").map_err(Failure::Run)
}

/// Wait for the first signal.
fn wait(mut signals: Signals) {
    let signal = signals.forever().next();
    tracing::info!(?signal, "ending");
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        device: DeviceArgs,
    }

    fn bus(options: &[&str]) -> Result<Option<(Profile, usize, bool)>, String> {
        let parsed = Command::try_parse_from(["device", "--name=d"].iter().chain(options));
        let bus = parsed.map_err(|error| error.to_string())?.device.bus();
        Ok(bus.map(|bus| (bus.profile, bus.threads, bus.strict)))
    }

    #[test]
    fn a_device_has_the_bus_that_is_asked_for() {
        let board = BusConfig::default();
        assert_eq!(bus(&[]), Ok(Some((board.profile, board.threads, board.strict))), "unasked, the board's own");
        assert_eq!(bus(&["--no-bus"]), Ok(None));
        let told = bus(&["--dma-profile", "copy-only", "--dma-threads", "64", "--dma-strict"]);
        assert_eq!(told, Ok(Some((Profile::CopyOnly, 64, true))));
    }

    #[test]
    fn an_engine_that_cannot_be_is_refused_by_name() {
        let cases: [(&[&str], &str); 4] = [
            (&["--dma-profile", "fast"], "copy-only, inline-reduce, full"),
            (&["--dma-threads", "0"], "1..=64"),
            (&["--dma-threads", "65"], "1..=64"),
            (&["--no-bus", "--dma-strict"], "--no-bus"),
        ];
        for (options, named) in cases {
            let error = bus(options).expect_err("refused");
            assert!(error.contains(named), "{options:?}: {error}");
        }
    }
}
