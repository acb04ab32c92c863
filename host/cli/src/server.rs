//! `sumac controller` and `sumac device`: the processes that serve until SIGINT or SIGTERM.
//!
//! Each prints one line on stdout when it is ready (`listening ADDRESS`, `ready NAME`). At the signal it releases its
//! resources and exits with status 0.

use crate::address::{self, LocalAddress};
use crate::cluster::{LISTENING, READY};
use crate::config;
use crate::costs;
use crate::exit::Failure;
use crate::fabric;
use crate::key::KeyOption;
use crate::options;
use crate::quota::{self, TenantQuota};
use anyhow::{Context, anyhow};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac::comm::DEFAULT_PORT;
use sumac::controller::keys::KeyStore;
use sumac::controller::{Controller, ControllerConfig, Limits, PairConfig};
use sumac::topo::Fabric;
use sumac_firmware::emulated::{Board, BoardConfig, RegistrationError, ZeroCopyConfig};
use sumac_hal::ctrl::Rejection;
use sumac_hal::dma::Profile;
use sumac_hal::traffic_class::TrafficClass;

/// `sumac controller`.
#[derive(Debug, Args)]
#[command(arg = config::option())]
pub(crate) struct ControllerArgs {
    /// Address to listen on; without --keys it must be a loopback address
    #[arg(long, value_name = "ADDRESS", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)))]
    listen: SocketAddr,
    /// Accept only peers with keys of this store, which `sumac key new` makes; it is read again when it changes
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
    /// The fabric to plan on (see `sumac topology --help`); `-` reads it from stdin. Without it, every device is a
    /// switch to which all hosts are connected
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Where devices are in the fabric: `switches` for one in each switch, `hosts` for a DPU at the port of each host,
    /// named HOST/dpu, or a TOML file that lists them; default: as the fabric's file says
    #[arg(long, value_name = "FILE|switches|hosts", requires = "topology")]
    devices: Option<String>,
    /// The fabric's forwarding tables, as `dump_lfts` prints them: edges of trees are counted on the cables that they
    /// take; default: shortest up*/down* routes
    #[arg(long, value_name = "FILE", requires = "topology")]
    routes: Option<PathBuf>,
    /// Cost table by which `auto` selects, as `sumac calibrate` writes it. Without it, constants of the emulator are
    /// used for jobs on one host and those of data sheets for others
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Algorithms by size that override the cost table: a TOML file of `[[override]]` tables with the key `path` and
    /// the optional keys `collective`, `min_bytes` and `max_bytes`. The first match applies
    #[arg(long, value_name = "FILE")]
    overrides: Option<PathBuf>,
    /// Quota of a tenant: groups (jobs with a tree) at a time, and slots and bytes of memory in each shard of each
    /// device. What is left out is unlimited. `*` stands for every tenant without a quota of its own. Give the option
    /// once per tenant
    #[arg(long = "quota", value_name = "TENANT=groups:N,slots:N,memory:SIZE")]
    quotas: Vec<TenantQuota>,
    /// Lease of a group in seconds: without a packet of its job or a renewal by the controller, it expires
    #[arg(long = "lease", value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    lease_s: u64,
    /// Maximum number of connections of ranks and devices; each takes a file descriptor
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    max_connections: usize,
    /// Maximum number of jobs, including sub-communicators
    #[arg(long, value_name = "N", default_value_t = Limits::default().jobs,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    max_jobs: usize,
    /// Maximum number of devices
    #[arg(long, value_name = "N", default_value_t = Limits::default().devices,
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 16))]
    max_devices: usize,
    /// Maximum backoff in seconds: a device that keeps ending soon after it registers gets no jobs for one second, then
    /// two, four and so on up to this. 0 turns the backoff off
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().device_backoff.as_secs(),
          value_parser = clap::value_parser!(u64).range(0..=86_400))]
    device_backoff: u64,
    /// The other controller of a pair, of which this is the first one: the other one takes over when this one is lost
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "standby")]
    peer: Option<String>,
    /// Start as the standby of this controller, whose --peer names this one: take over when it is lost
    #[arg(long, value_name = "HOST:PORT")]
    standby: Option<String>,
    /// Seconds for which a controller of a pair may be silent before the other one takes over
    #[arg(long = "failover-after", value_name = "SECONDS", default_value_t = 5,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    failover_after_s: u64,
    /// Traffic class of all connections, 0 to 252: four times the DSCP, as 184 for EF
    /// [default: SUMAC_TRAFFIC_CLASS, else 0]
    #[arg(long, value_name = "N", env = "SUMAC_TRAFFIC_CLASS", hide_env = true)]
    traffic_class: Option<TrafficClass>,
    /// Use the tree where there is one, regardless of cost
    #[arg(long, hide = true, conflicts_with = "overrides")]
    prefer_tree: bool,
}

/// The override that [`ControllerArgs::prefer_tree`] stands for.
const TREE_OVERRIDE: &str = "[[override]]\npath = \"tree\"\n";

/// `sumac device`.
#[derive(Debug, Args)]
#[command(arg = config::option())]
pub(crate) struct DeviceArgs {
    /// Name of the device: that of its switch in the fabric
    #[arg(long, value_name = "NAME", value_parser = options::device_name)]
    name: String,
    /// Controller to register with, or both of a pair, comma-separated; all addresses of a host name are tried
    #[arg(long, value_name = "HOST:PORT", env = "SUMAC_CONTROLLER", hide_env = true,
          default_value_t = format!("127.0.0.1:{DEFAULT_PORT}"))]
    controller: String,
    #[command(flatten)]
    local: LocalAddress,
    #[command(flatten)]
    key: KeyOption,
    /// UDP data port of the first shard; the other shards take the next ones [default: any free ports]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    data_port: Option<u16>,
    /// Addresses to which ranks and other devices send, one per shard, if they differ from the data ports: behind
    /// address translation or a relay. Needs --data-port
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', requires = "data_port")]
    advertise: Option<Vec<SocketAddr>>,
    /// Number of shards; each is a thread with a data port and memory of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    shards: u16,
    /// Maximum number of children over all groups [default: the board's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=65_536))]
    children: Option<u32>,
    /// Number of slots per shard, for all groups together [default: the board's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    slots: Option<u32>,
    /// Receive packets over this RDMA port (DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX) instead of UDP; without a
    /// value, over the first active port. Ranks then use the transport `verbs`
    #[arg(long, value_name = "LINK", num_args = 0..=1, default_missing_value = options::ANY_LINK,
          value_parser = options::link, conflicts_with_all = ["data_port", "advertise"])]
    verbs: Option<String>,
    /// Do not share memory with ranks on this machine: they send packets, as all others do
    #[arg(long)]
    no_shm: bool,
    /// Serve ranks of other hosts zero-copy, too: this RDMA port (DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX) reads
    /// and writes their memory; without a value, the first active port does. Ranks then use the transport `rdma`
    #[arg(long, value_name = "LINK", num_args = 0..=1, default_missing_value = options::ANY_LINK,
          value_parser = options::link, conflicts_with = "no_shm")]
    rdma: Option<String>,
    /// Capabilities of the emulated DMA engine; the device's processor does the rest. `sumac doctor` shows which
    /// hardware has which profile
    #[arg(long, value_name = "NAME", default_value = "full", value_parser = options::profile_parser(),
          conflicts_with = "no_shm")]
    dma_profile: Profile,
    /// Number of threads of the DMA engine
    #[arg(long, value_name = "N", default_value_t = 2, conflicts_with = "no_shm",
          value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    dma_threads: usize,
    /// Let the DMA engine reject what hardware might accept: misaligned elements and chains that conflict
    #[arg(long, conflicts_with = "no_shm")]
    dma_strict: bool,
    /// Memory that each rank may register for zero-copy, in GiB; a rank that exceeds it gets `Quota`
    #[arg(long, value_name = "GIB", default_value_t = 256, conflicts_with = "no_shm",
          value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    rank_memory_gib: u64,
    /// Capture all packets to this file, for Wireshark with `hal/wireshark/sumac.lua`. It contains keys and data: only
    /// its owner can read it. Ranks on this machine send packets only with --no-shm
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Keep the highest term of a pair of controllers in this file, so that the device refuses a controller that was
    /// taken over from also after its own restart
    #[arg(long, value_name = "FILE")]
    term_file: Option<PathBuf>,
    /// Traffic class of all packets and connections, 0 to 252: four times the DSCP, as 184 for EF
    /// [default: SUMAC_TRAFFIC_CLASS, else 0]
    #[arg(long, value_name = "N", env = "SUMAC_TRAFFIC_CLASS", hide_env = true)]
    traffic_class: Option<TrafficClass>,
    /// Seconds to wait for the controller
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 30)]
    timeout_s: u64,
}

/// Run a controller until a signal.
pub(crate) fn run_controller(args: &ControllerArgs) -> Result<(), Failure> {
    let signals = signals()?;
    let mut config = ControllerConfig::new();
    config.listen = args.listen;
    config.keys = args.keys.as_deref().map(KeyStore::read).transpose().map_err(Failure::input)?.map(Arc::new);
    config.keys_file = args.keys.clone();
    config.fabric = args.fabric()?;
    if let (Some(file), Some(fabric)) = (&args.routes, &config.fabric) {
        let text = fabric::read_text(file).context("--routes").map_err(Failure::Input)?;
        config.routes = Some(Arc::new(fabric::routes(fabric, file, &text)?));
    }
    config.table = costs::with_overrides(args.costs.as_deref(), args.overrides.as_deref()).map_err(Failure::Input)?;
    if args.prefer_tree {
        config.table = config.table.with_overrides(TREE_OVERRIDE).map_err(Failure::input)?;
    }
    config.lease = Duration::from_secs(args.lease_s);
    config.quotas = quota::all(&args.quotas).map_err(Failure::Input)?;
    let (connections, jobs, devices) = (args.max_connections, args.max_jobs, args.max_devices);
    let device_backoff = Duration::from_secs(args.device_backoff);
    config.limits = Limits { connections, jobs, devices, device_backoff, ..config.limits };
    config.pair = args.pair()?;
    config.traffic_class = args.traffic_class.unwrap_or_default();
    raise_descriptor_limit(connections);
    let controller = Controller::start(config).map_err(Failure::input)?;
    announce(&format!("{LISTENING}{}", controller.local_addr()))?;
    wait(signals);
    Ok(())
}

/// Run an emulated device until a signal.
pub(crate) fn run_device(args: DeviceArgs) -> Result<(), Failure> {
    let mut signals = signals()?;
    let controllers = address::all("--controller", &args.controller, DEFAULT_PORT)?;
    let timeout = Duration::from_secs(args.timeout_s);
    let controller = first_up(&controllers, &mut signals, timeout)?;
    let mut config = BoardConfig::new(args.name.clone(), controller);
    config.controller_alternatives = controllers.into_iter().filter(|addr| *addr != controller).collect();
    config.key = args.key.read()?;
    config.zero_copy = args.zero_copy();
    config.bind = args.local.choose(controller)?;
    config.data_port = args.data_port;
    config.udp.traffic_class = args.traffic_class.unwrap_or_default();
    config.advertise = args.advertise;
    config.shards = args.shards;
    config.verbs = args.verbs;
    config.rdma = args.rdma;
    config.pcap = args.pcap;
    config.term_file = args.term_file;
    config.children = args.children.unwrap_or(config.children);
    config.slots = args.slots.unwrap_or(config.slots);
    let name = config.name.clone();
    let board = Board::start(config).map_err(Failure::input)?;
    register(&board, &mut signals, timeout).map_err(|failure| match failure {
        Unregistered::Signal(signal) => Failure::Signal(signal),
        Unregistered::Error(error) => Failure::Run(describe(&name, &args.controller, timeout, error)),
    })?;
    announce(&format!("{READY}{name}"))?;
    loop {
        if let Some(signal) = signals.pending().next() {
            tracing::info!(?signal, "ending");
            return Ok(());
        }
        if board.has_ended() {
            return Err(Failure::run(anyhow!("device {name} has ended; its log says why. Start it again")));
        }
        std::thread::sleep(SIGNAL_INTERVAL);
    }
}

/// Return the first of a controller's addresses that accepts a connection. It determines the family of the device's own
/// address, so a device that could choose waits for it, and takes the first address at the end of `timeout`.
fn first_up(controllers: &[SocketAddr], signals: &mut Signals, timeout: Duration) -> Result<SocketAddr, Failure> {
    let end = Instant::now() + timeout;
    let is_alone = controllers.len() == 1;
    while !is_alone && Instant::now() < end {
        if let Some(found) = controllers.iter().copied().find(address::is_reachable) {
            return Ok(found);
        }
        if let Some(signal) = signals.pending().next() {
            return Err(Failure::Signal(signal));
        }
        std::thread::sleep(SIGNAL_INTERVAL);
    }
    Ok(controllers[0])
}

/// Why a device is not registered.
enum Unregistered {
    Signal(i32),
    Error(RegistrationError),
}

/// Wait until the device is registered, until that is hopeless, or until a signal.
fn register(board: &Board, signals: &mut Signals, timeout: Duration) -> Result<(), Unregistered> {
    let end = Instant::now() + timeout;
    loop {
        if let Some(signal) = signals.pending().next() {
            return Err(Unregistered::Signal(signal));
        }
        let left = end.saturating_duration_since(Instant::now());
        match board.wait_registration(left.min(SIGNAL_INTERVAL)) {
            Ok(()) => return Ok(()),
            Err(RegistrationError::Rejected(rejection)) if rejection.is_final() => {
                return Err(Unregistered::Error(rejection.into()));
            }
            Err(error) if left.is_zero() => return Err(Unregistered::Error(error)),
            Err(_) => {}
        }
    }
}

/// How often a device that waits for its controller looks for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Describe why a device is not registered, and what to do.
fn describe(name: &str, controller: &str, timeout: Duration, error: RegistrationError) -> anyhow::Error {
    let seconds = timeout.as_secs();
    match error {
        RegistrationError::Rejected(rejection @ Rejection::NameTaken { .. }) => anyhow!(
            "device {name} is not registered at {controller}: {rejection}; end that device, or choose another --name"
        ),
        RegistrationError::Rejected(rejection) => {
            anyhow!("device {name} is not registered at {controller}: {rejection}")
        }
        RegistrationError::Key(error) => {
            anyhow!("device {name} is not registered at {controller} after {seconds} s: {error}")
        }
        RegistrationError::Version(error) => {
            anyhow!("device {name} is not registered at {controller} after {seconds} s: {error}")
        }
        _ => anyhow!(
            "device {name} found no controller at {controller} within {seconds} s; start one with `sumac controller`"
        ),
    }
}

impl ControllerArgs {
    /// Read the fabric, with the devices that are placed in it.
    fn fabric(&self) -> Result<Option<Fabric>, Failure> {
        let Some(file) = &self.topology else { return Ok(None) };
        let (fabric, _) = fabric::read(file).map_err(Failure::Input)?;
        let Some(devices) = &self.devices else { return Ok(Some(fabric)) };
        fabric::with_devices(&fabric, devices, fabric.host_ids()).map(Some)
    }

    /// Return this controller's part in a pair, if it has one.
    fn pair(&self) -> Result<Option<PairConfig>, Failure> {
        let (option, text, is_second) = match (&self.peer, &self.standby) {
            (Some(text), _) => ("--peer", text, false),
            (None, Some(text)) => ("--standby", text, true),
            (None, None) => return Ok(None),
        };
        let addrs = address::all(option, text, DEFAULT_PORT)?;
        let peer = addrs.iter().find(|addr| addr.is_ipv4() == self.listen.is_ipv4()).unwrap_or(&addrs[0]);
        Ok(Some(PairConfig { peer: *peer, is_second, silence: Duration::from_secs(self.failover_after_s) }))
    }
}

impl DeviceArgs {
    /// Return the configuration of the bus, or `None` with --no-shm.
    fn zero_copy(&self) -> Option<ZeroCopyConfig> {
        let (profile, threads, strict) = (self.dma_profile, self.dma_threads, self.dma_strict);
        let rank_memory_bytes = self.rank_memory_gib << 30;
        (!self.no_shm).then(|| ZeroCopyConfig {
            profile,
            threads,
            strict,
            rank_memory_bytes,
            ..ZeroCopyConfig::default()
        })
    }
}

/// Raise the limit of open files to one for each connection, as far as the system allows.
fn raise_descriptor_limit(connections: usize) {
    let wanted = connections as u64 + OTHER_DESCRIPTORS;
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
            "the limit of open files (ulimit -Hn) allows fewer connections than --max-connections"
        );
    }
}

/// An upper bound of what a controller has open besides its connections.
const OTHER_DESCRIPTORS: u64 = 64;

fn announce(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Install handlers before anything starts, so that a signal always ends it in order.
fn signals() -> Result<Signals, Failure> {
    Signals::new([SIGINT, SIGTERM]).context("cannot install signal handlers").map_err(Failure::Run)
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
        let bus = parsed.map_err(|error| error.to_string())?.device.zero_copy();
        Ok(bus.map(|bus| (bus.profile, bus.threads, bus.strict)))
    }

    #[test]
    fn dma_options_configure_the_bus() {
        let board = ZeroCopyConfig::default();
        assert_eq!(
            bus(&[]),
            Ok(Some((board.profile, board.threads, board.strict))),
            "the default is that of the board"
        );
        assert_eq!(bus(&["--no-shm"]), Ok(None));
        let given = bus(&["--dma-profile", "copy-only", "--dma-threads", "64", "--dma-strict"]);
        assert_eq!(given, Ok(Some((Profile::CopyOnly, 64, true))));
    }

    #[test]
    fn invalid_dma_option_error_names_the_option_or_its_values() {
        let cases: [(&[&str], &str); 4] = [
            (&["--dma-profile", "fast"], "copy-only, inline-reduce, full"),
            (&["--dma-threads", "0"], "1..=64"),
            (&["--dma-threads", "65"], "1..=64"),
            (&["--no-shm", "--dma-strict"], "--no-shm"),
        ];
        for (options, named) in cases {
            let error = bus(options).expect_err("refused");
            assert!(error.contains(named), "{options:?}: {error}");
        }
    }
}
