//! A cluster of processes, and the statistics of a test.

use super::{Ending, Member, Memory, Sockets, Task, dev_shm};
use crate::common::{Server, TWO_LEAVES, children, serve, serve_with};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac::controller::{ControllerConfig, status};

/// Elements of each all-reduce: 4 MiB, in 69 chunks of which the last is shorter.
const ELEMENTS: usize = 1 << 20;

/// The deadline of a call.
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);

/// Serialises the tests, so that all child processes belong to one cluster.
static ALONE: Mutex<()> = Mutex::new(());

/// A controller and its jobs.
pub(crate) struct Cluster {
    controller: Option<Server>,
    addr: SocketAddr,
    has_fabric: bool,
    jobs: u32,
    shm: Vec<String>,
    _alone: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Start a controller without a fabric: jobs have trees of one device.
    pub(crate) fn start() -> Self {
        Self::on("")
    }

    /// Start a controller with a fabric of two leaves: jobs of four ranks have trees of both.
    pub(crate) fn start_with_two_leaves() -> Self {
        Self::on(TWO_LEAVES)
    }

    fn on(fabric: &str) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (shm, has_fabric) = (dev_shm(), !fabric.is_empty());
        let topology: &[_] = if has_fabric { &["--topology", "-"] } else { &[] };
        // Ranks prefer the tree while there is one. Devices are killed repeatedly and must be usable again at once.
        let own = ["controller", "--listen", "127.0.0.1:0", "--prefer-tree", "--device-backoff", "0"];
        let mut controller = serve_with(&[&own, topology].concat(), fabric);
        let line = controller.line();
        let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok()).expect("an address");
        Self { controller: Some(controller), addr, has_fabric, jobs: 0, shm, _alone: alone }
    }

    /// Start a device, and wait until it has registered.
    pub(crate) fn device(&self, name: &str) -> Server {
        self.device_with(name, "full")
    }

    /// Start a device with another profile of the DMA engine.
    pub(crate) fn device_with(&self, name: &str, profile: &str) -> Server {
        let controller = self.addr.to_string();
        let mut device = serve(&["device", "--name", name, "--controller", &controller, "--dma-profile", profile]);
        assert_eq!(device.line(), format!("ready {name}"));
        device
    }

    /// Return the task of the first rank of a new job.
    pub(crate) fn task(&mut self, ranks: u32, memory: Memory, rounds: u64, deadline: Duration) -> Task {
        self.jobs += 1;
        let limits = ControllerConfig::new();
        // As the controller does: whole cache lines if an engine is involved.
        let chunk_bytes = usize::from(match (memory, self.has_fabric) {
            (Memory::Packets, _) => limits.chunk_max_bytes,
            (_, true) => limits.chunk_max_bytes / 64 * 64,
            (_, false) => limits.zero_copy_chunk_max_bytes,
        });
        let (controller, job, deadline_ms) = (self.addr, format!("job{}", self.jobs), deadline.as_millis() as u64);
        let (elements, rounds_values) = (ELEMENTS, false);
        let recovery = false;
        Task {
            controller,
            job,
            rank: 0,
            ranks,
            memory,
            elements,
            rounds_values,
            chunk_bytes,
            rounds,
            deadline_ms,
            recovery,
        }
    }

    /// Start a job's ranks.
    pub(crate) fn job(&mut self, ranks: u32, memory: Memory, rounds: u64, deadline: Duration) -> Vec<Member> {
        start(&self.task(ranks, memory, rounds, deadline))
    }

    /// Run a job of two ranks, and assert that it succeeds.
    pub(crate) fn run_successfully(&mut self, memory: Memory, context: &str) {
        let mut members = self.job(2, memory, 2, DEADLINE);
        let endings: Vec<_> = members.iter_mut().map(Member::ending).collect();
        assert!(endings.iter().all(|ending| ending.error.is_none() && ending.rounds == 2), "{context}: {endings:?}");
        members.into_iter().for_each(Member::end);
    }

    /// Return the devices of the only job with a tree, the root first.
    pub(crate) fn devices_of_the_job(&self) -> Vec<String> {
        let report = status(self.addr).expect("a report");
        let trees: Vec<_> = report.jobs.into_iter().filter_map(|job| job.tree?.ok()).collect();
        assert_eq!(trees.len(), 1, "{trees:?}");
        trees.into_iter().next().expect("one").devices
    }

    pub(crate) fn kill_controller(&mut self) {
        self.controller.take().expect("killed once").kill();
    }

    /// End the remaining processes in order, and assert that no others remain.
    pub(crate) fn end(mut self, devices: Vec<Server>) {
        let sockets: Vec<_> = devices.iter().map(|device| Sockets::of(device.pid())).collect();
        for mut server in devices.into_iter().chain(self.controller.take()) {
            server.interrupt_and_expect_success();
        }
        sockets.iter().for_each(|sockets| sockets.wait_until_gone("at the end"));
        let left: Vec<_> = children(std::process::id()).into_iter().map(|child| child.command).collect();
        assert!(left.is_empty(), "left: {left:?}");
        assert_eq!(dev_shm(), self.shm, "files are left");
    }
}

/// Start all ranks of a job, given the task of its first rank.
pub(crate) fn start(task: &Task) -> Vec<Member> {
    (0..task.ranks).map(|rank| Member::start(&Task { rank, ..task.clone() })).collect()
}

/// The statistics of a test, for its summary.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    endings: usize,
    /// Ranks whose buffer held both old and new chunks.
    pub(crate) mixed: usize,
    old: usize,
    new: usize,
    /// The number of each error, and the milliseconds of the slowest one.
    errors: BTreeMap<String, (usize, u64)>,
}

impl Seen {
    /// Check how a rank's work ended after a fault, and count it.
    pub(crate) fn note(&mut self, ending: &Ending, since_ns: u64, limit: Duration, expected: &[&str], context: &str) {
        let error = ending.error.as_deref().unwrap_or("none");
        assert!(expected.contains(&error), "{context}: {ending:?}");
        assert_eq!(ending.torn, 0, "{context}: {ending:?}");
        let took = Duration::from_nanos(ending.at_ns.saturating_sub(since_ns));
        assert!(took < limit, "{context}: {took:?}: {ending:?}");
        self.endings += 1;
        self.mixed += usize::from(ending.old > 0 && ending.new > 0);
        self.old += ending.old;
        self.new += ending.new;
        let (count, slowest_ms) = self.errors.entry(error.to_owned()).or_default();
        (*count, *slowest_ms) = (*count + 1, (*slowest_ms).max(took.as_millis() as u64));
    }
}
