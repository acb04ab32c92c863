//! `sumac selftest`: test each link of a cluster for loss, latency and bandwidth.
//!
//! A link is tested by jobs whose tree is pinned to it: one rank and one device, then one rank, a device and a second
//! device above it. The rank runs in this process. The latency of the link between two devices is the time by which the
//! second job is slower than the first. Its loss comes from the counters of its two ends.
//!
//! Where a launcher has started the command as a rank, each rank tests its own links ([`launched`]).
//!
//! Invariants: a link that fails ends only its own test. A device that is unreachable from here does not affect the
//! rating of other links.

mod launched;
mod link;
mod probe;
mod snapshot;
mod table;

use crate::address::ControllerAddress;
use crate::cluster::{self, ClusterConfig, Supervisor};
use crate::exit::Failure;
use crate::key::KeyOption;
use crate::layout::Layout;
use crate::options::{self, ANY_LINK, Links, Transport};
use crate::size::SizeBytes;
use crate::stats;
use anyhow::{anyhow, ensure};
use clap::Args;
use indicatif::ProgressBar;
use link::{Flows, Link, Measured, Row};
use probe::{Probe, ProbeError, Route};
use snapshot::Snapshot;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;
use sumac::comm::launcher;
use sumac::controller::proto::{DEFAULT_TENANT, Terms};
use sumac::controller::{ControllerAddr, derived_name, status};

/// The largest operation.
const BYTES_MAX: SizeBytes = SizeBytes(1 << 30);

/// The number of large operations, whose median counts.
const LARGE_OPERATIONS: u32 = 3;

/// The length of a small operation in bytes: one packet in each direction.
const SMALL_BYTES: usize = 8;

/// The number of ranks for which a tree is planned unless another is given.
const RANKS_DEFAULT: u32 = 4;

/// `sumac selftest`.
#[derive(Debug, Args)]
pub(crate) struct SelftestArgs {
    #[command(flatten)]
    controller: ControllerAddress,
    #[command(flatten)]
    key: KeyOption,
    /// Test only the links of this device; may be repeated [default: all devices]
    #[arg(long = "device", value_name = "NAME")]
    devices: Vec<String>,
    /// Maximum loss of a good link, in percent of its packets
    #[arg(long, value_name = "PERCENT", default_value_t = 0.1)]
    max_loss: f64,
    /// Number of small operations per link, for the latency
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: u32,
    /// Size of the large operations, for the bandwidth
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "16M")]
    bytes: SizeBytes,
    /// Deadline of each operation in seconds, after which the link counts as broken
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout_s: u64,
    /// Levels of the tree to start if no controller is named
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2),
          conflicts_with = "topology")]
    levels: u8,
    /// Plan the tree to start on this fabric (`sumac topology --help` lists the formats; `-` reads it from stdin)
    #[arg(long, value_name = "FILE")]
    topology: Option<PathBuf>,
    /// Tenant to which the tests are accounted
    #[arg(long, value_name = "NAME", default_value = DEFAULT_TENANT, value_parser = options::tenant)]
    tenant: String,
    /// How long a test may wait in the controller's queue for a device, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=86_400))]
    wait_for_tree: u32,
    /// Number of ranks for which that tree is planned [default: 4, unless a launcher has started this process as a
    /// rank]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// Transport to test: `udp`, `verbs` or `rdma` (zero-copy), which existing devices must offer [default: verbs if
    /// --verbs is given, otherwise udp]
    #[arg(long, value_name = "TRANSPORT", value_parser = options::transport_parser())]
    transport: Option<Transport>,
    /// Test links over RDMA, from the first of these ports
    #[command(flatten)]
    verbs: Links,
    /// Print one JSON object per link instead of the table
    #[arg(long)]
    json: bool,
}

/// Test the links. A bad link is a failure.
pub(crate) fn run(args: &SelftestArgs, verbose: u8) -> Result<(), Failure> {
    args.check().map_err(Failure::Input)?;
    let transport = args.transport();
    if args.ranks.is_none() && launcher::from_env().is_rank() {
        return launched::run(args);
    }
    let ranks = args.ranks.unwrap_or(RANKS_DEFAULT);
    let mut supervisor = None;
    let controller = match args.controller.named()? {
        Some(named) => ControllerAddr { key: args.key.read_operator()?, ..named },
        None => {
            let layout = match &args.topology {
                Some(path) => Layout::from_file(path, ranks),
                None => Layout::generated(args.levels, ranks),
            };
            let layout = layout.map_err(Failure::Input)?;
            let started = supervisor.insert(Supervisor::new(ProgressBar::hidden(), verbose)?);
            let device_options = args.verbs.of_devices(transport, layout.devices.len());
            let config = ClusterConfig { device_options, ..ClusterConfig::new(&layout)? };
            cluster::controller_addr(cluster::start(started, &config)?.addr, config.keys.as_deref())
        }
    };
    let devices = args.devices_of(&controller)?;
    let mut tester = Tester::new(args, controller, format!("selftest-{}", std::process::id()));
    tester.supervisor = supervisor;
    if !args.json {
        table::write_head(&mut io::stdout())?;
    }
    tester.test_all(&devices, true)?;
    if !args.json {
        table::write_summary(&mut io::stdout(), &tester.rows)?;
    }
    if tester.rows.iter().all(|row| row.ok) { Ok(()) } else { Err(Failure::Reported) }
}

impl SelftestArgs {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (0.0..=100.0).contains(&self.max_loss),
            "--max-loss {} is not a percentage from 0 to 100",
            self.max_loss
        );
        let least = SizeBytes(SMALL_BYTES as u64);
        ensure!(
            self.bytes >= least && self.bytes <= BYTES_MAX,
            "-e {}: the size must be {least} to {BYTES_MAX}",
            self.bytes
        );
        let is_link = matches!(self.transport(), Transport::Udp | Transport::Verbs | Transport::Rdma);
        ensure!(is_link, "--transport {}: links are tested over udp, verbs or rdma", self.transport());
        let is_rdma = self.transport() != Transport::Udp;
        ensure!(is_rdma || self.verbs.is_empty(), "--transport udp takes no RDMA port; leave out --verbs");
        Ok(())
    }

    fn transport(&self) -> Transport {
        self.transport.unwrap_or(if self.verbs.is_empty() { Transport::Udp } else { Transport::Verbs })
    }

    /// Return the devices of a controller to test.
    fn devices_of(&self, controller: &ControllerAddr) -> Result<Vec<String>, Failure> {
        let report = status(controller.clone()).map_err(Failure::run)?;
        let known: Vec<String> = report.devices.into_iter().map(|device| device.name).collect();
        let devices = self.chosen(known).map_err(Failure::Input)?;
        if !report.jobs.is_empty() {
            let jobs = report.jobs.len();
            note!("# {jobs} jobs are running; their traffic affects loss, latency and bandwidth");
        }
        Ok(devices)
    }

    /// Return the devices to test out of the registered ones.
    fn chosen(&self, known: Vec<String>) -> anyhow::Result<Vec<String>> {
        ensure!(!known.is_empty(), "no device has registered with the controller; start one with `sumac device`");
        let unknown = self.devices.iter().find(|name| !known.contains(name));
        if let Some(name) = unknown {
            return Err(anyhow!("--device {name} has not registered; registered devices: {}", known.join(", ")));
        }
        let wanted = |name: &String| self.devices.is_empty() || self.devices.contains(name);
        Ok(known.into_iter().filter(wanted).collect())
    }
}

/// The state of the test.
struct Tester<'a> {
    args: &'a SelftestArgs,
    controller: ControllerAddr,
    /// The supervisor of the cluster, if one was started for the test.
    supervisor: Option<Supervisor>,
    rows: Vec<Row>,
    /// The measurements of the link to each reachable device.
    alone: BTreeMap<String, Measured>,
    jobs: u32,
    /// The beginning of the names of its jobs.
    name: String,
    /// Whether rows are not printed.
    is_silent: bool,
}

impl<'a> Tester<'a> {
    fn new(args: &'a SelftestArgs, controller: ControllerAddr, name: String) -> Self {
        let (supervisor, rows, alone) = (None, Vec::new(), BTreeMap::new());
        Self { args, controller, supervisor, rows, alone, jobs: 0, name, is_silent: false }
    }

    /// Test the links to these devices, and those between them if `pairs`.
    fn test_all(&mut self, devices: &[String], pairs: bool) -> Result<(), Failure> {
        devices.iter().try_for_each(|device| self.test_device(device))?;
        for (nth, one) in devices.iter().enumerate().filter(|_| pairs) {
            devices[nth + 1..].iter().try_for_each(|other| self.test_pair(one, other))?;
        }
        Ok(())
    }

    /// Test the link from this host to a device.
    fn test_device(&mut self, device: &str) -> Result<(), Failure> {
        let link = Link::ToDevice(device.to_owned());
        let tested = self.run(vec![device.to_owned()], |before, after| Flows::to_device(before, after, device));
        if let Ok(measured) = &tested {
            self.alone.insert(device.to_owned(), *measured);
        }
        self.rate(&link, tested)
    }

    /// Test the link between two devices, from the one that is reached with less loss: that leaves the least loss to be
    /// mistaken for that of the tested link.
    fn test_pair(&mut self, one: &str, other: &str) -> Result<(), Failure> {
        let loss = |device: &str| self.alone.get(device).map_or(f64::INFINITY, |alone| alone.flows.loss());
        let (child, parent) = if loss(one) <= loss(other) { (one, other) } else { (other, one) };
        let link = Link::Between(child.to_owned(), parent.to_owned());
        let Some(alone_ns) = self.alone.get(child).map(|alone| alone.latency_ns) else {
            return self.print(Row::untested(&link));
        };
        let devices = vec![parent.to_owned(), child.to_owned()];
        let tested = self.run(devices, |before, after| Flows::between(before, after, child, parent));
        // The difference of two noisy medians may be negative.
        let own = |measured: Measured| Measured { latency_ns: (measured.latency_ns - alone_ns).max(0.0), ..measured };
        self.rate(&link, tested.map(own))
    }

    /// Run one job on these devices, the root first.
    fn run(
        &mut self,
        devices: Vec<String>,
        flows: impl FnOnce(&Snapshot, &Snapshot) -> Flows,
    ) -> Result<Measured, ProbeError> {
        self.jobs += 1;
        let job = derived_name(&self.name, &format!("-{}", self.jobs));
        let timeout = Duration::from_secs(self.args.timeout_s);
        let terms =
            Terms { tenant: self.args.tenant.clone(), wait_ms: self.args.wait_for_tree * 1000, ..Terms::default() };
        let link = self.args.verbs.in_turn(0).unwrap_or_else(|| ANY_LINK.into());
        let route = Route { transport: self.args.transport(), link };
        let mut probe = Probe::join(self.controller.clone(), (job.clone(), terms), devices, (timeout, &route))?;
        let before = Snapshot::take(&self.controller, &job, &mut probe)?;
        let len_bytes = self.args.bytes.0 as usize / SMALL_BYTES * SMALL_BYTES;
        let small = self.times(&mut probe, SMALL_BYTES, self.args.iterations)?;
        let large = self.times(&mut probe, len_bytes, LARGE_OPERATIONS)?;
        let after = Snapshot::take(&self.controller, &job, &mut probe)?;
        Ok(Measured {
            flows: flows(&before, &after),
            latency_ns: stats::median_ns(&small),
            bandwidth_gbytes_s: stats::algbw_gbytes_s(len_bytes as u64, stats::median_ns(&large)),
        })
    }

    /// Run `count` operations and return their times in nanoseconds.
    fn times(&mut self, probe: &mut Probe, len_bytes: usize, count: u32) -> Result<Vec<u64>, ProbeError> {
        let mut times = Vec::with_capacity(count as usize);
        for _ in 0..count {
            self.supervisor.as_mut().map_or(Ok(()), Supervisor::check)?;
            let time = probe.round_trip(len_bytes)?;
            times.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        }
        Ok(times)
    }

    fn rate(&mut self, link: &Link, tested: Result<Measured, ProbeError>) -> Result<(), Failure> {
        self.print(match tested {
            Ok(measured) => Row::measured(link, &measured, self.args.max_loss),
            Err(ProbeError::Cluster(error)) => return Err(error.into()),
            Err(error) => Row::unreachable(link, &error.to_string()),
        })
    }

    fn print(&mut self, row: Row) -> Result<(), Failure> {
        if !self.is_silent {
            write_row(&row, self.args.json)?;
        }
        self.rows.push(row);
        Ok(())
    }
}

/// Print a link on stdout.
fn write_row(row: &Row, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, row)?;
        writeln!(out)?;
    } else {
        table::write_row(&mut out, row)?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    fn parsed(words: &[&str]) -> SelftestArgs {
        let command = SelftestArgs::augment_args(clap::Command::new("selftest").no_binary_name(true));
        SelftestArgs::from_arg_matches(&command.get_matches_from(words)).expect("known options")
    }

    #[test]
    fn transport_is_udp_unless_named_and_only_links_are_tested() {
        assert_eq!(parsed(&[]).transport(), Transport::Udp);
        parsed(&["--transport", "udp"]).check().expect("a link");
        for name in ["shm", "auto"] {
            let error = parsed(&["--transport", name]).check().expect_err("no link").to_string();
            assert!(error.contains(name) && error.contains("udp, verbs or rdma"), "{error}");
        }
    }

    #[test]
    #[cfg(feature = "verbs")]
    fn rdma_ports_select_verbs_unless_zero_copy_is_named() {
        assert_eq!(parsed(&["--verbs", "mlx5_0"]).transport(), Transport::Verbs);
        let zero_copy = parsed(&["--verbs", "mlx5_0", "--transport", "rdma"]);
        zero_copy.check().expect("a link");
        assert_eq!(zero_copy.transport(), Transport::Rdma);
        let error = parsed(&["--verbs", "mlx5_0", "--transport", "udp"]).check().expect_err("no port").to_string();
        assert!(error.contains("leave out --verbs"), "{error}");
    }
}
