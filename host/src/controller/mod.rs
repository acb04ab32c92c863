//! The aggregation manager: tracks the fabric and its devices, admits jobs, plans their trees, creates, renews and
//! releases their groups, and hands out the cost table.
//!
//! ```text
//!   device --- Hello::Device      -> +------------+ <- Hello::Client --- rank
//!          <-- Request            -- | controller | --- Join ->
//!          --- Response           -> +------------+ <-- Joined (group, key, leaf, table)
//! ```
//!
//! A job starts once all its ranks have joined. They get a tree or the reason why there is none, in which case they use
//! host collectives. The job ends when its last rank has left or is lost; other ranks are notified of a lost rank at
//! once. A group is reserved on all nodes of its tree or on none.
//!
//! A running job that loses its tree gets another one, on other devices, once all its ranks request it (`Replan`).
//!
//! A rank on its leaf's machine uses zero-copy unless it requests packets. If a rank requires shared memory and cannot
//! use it, the job gets no tree, with that reason.
//!
//! A ledger (`resources`) tracks what each tenant's jobs hold on each device, and enforces quotas. Jobs that cannot be
//! admitted use host collectives and are queued for a tree, or wait in the queue before they start (`state::placement`
//! has the life cycle of a job's tree, `queue` the order). Leases are renewed while a job runs; an expired lease tears
//! the group down on every device (`state::lease`).
//!
//! The controller is control plane only: no packet of an operation passes through it, and running operations do not
//! depend on it. It is a sans-I/O state machine ([`machine`]) behind one lock. One thread moves bytes between it and
//! the sockets (`connections`), one makes plans, one encodes reports; nobody reads, writes, plans or waits while
//! holding the lock. A controller that is restarted at the same address learns about running jobs from their ranks,
//! which authenticate with a secret from its predecessor (`state::resume`). So does the second controller of a pair
//! when it takes over (`pair`).
//!
//! What belongs here: how a controller decides, and how it is reached. What a rank does with its answers is in
//! [`comm`](crate::comm).
//!
//! With keys ([`keys`]), connections are authenticated and encrypted (PROTOCOL 10): a key exchange precedes everything
//! else (`connections::channel`), and the machine checks what each principal may do. Without keys, the controller
//! listens on loopback only and serves whoever connects.

mod address;
mod admit;
mod connect;
mod connections;
mod device;
mod entropy;
pub mod keys;
pub mod limits;
#[doc(hidden)]
pub mod machine;
mod notifier;
mod outbox;
mod output;
mod pair;
mod peer;
pub mod proto;
mod queue;
mod resources;
mod session;
mod session_reader;
mod shape;
mod state;
#[cfg(test)]
mod tests;
mod updates;

pub use address::{AddressError, first_reachable, resolve, resolve_all};
pub use limits::{Limits, TREES_MAX, derived_name};
pub use pair::PairConfig;
pub use resources::{Quota, Quotas, is_host_device};
pub use session::{ClientError, ControllerAddr, Notice, Session, WhileJoining, status};
pub use updates::UpdateClient;

use crate::select::CostTable;
use crate::topo::{Fabric, Routes};
use connections::serve::Server;
use entropy::Entropy;
use keys::KeyStore;
use machine::Machine;
use notifier::Notifier;
use peer::{PeerLink, operator_key};
use proto::JoinRefusal;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use sumac_hal::time::Instant;
use sumac_hal::traffic_class::TrafficClass;
use sumac_hal::uplink::{HopTimers, MAX_WINDOW};
use thiserror::Error;

/// Configuration of a controller.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// The address to listen on, which must be a loopback address if there are no keys. Port 0 selects any free port.
    pub listen: SocketAddr,
    /// The keys of all principals. With keys, connections without one are refused, also on loopback.
    pub keys: Option<Arc<KeyStore>>,
    /// The file of [`keys`](Self::keys), which the controller reads again when it changes: new keys become valid, and
    /// connections by keys that are revoked or gone end.
    pub keys_file: Option<PathBuf>,
    /// The fabric. `None` treats every device as a switch that connects all hosts, so jobs get one-level trees.
    pub fabric: Option<Fabric>,
    /// The fabric's forwarding tables. `None` assumes shortest up*/down* routes.
    pub routes: Option<Arc<Routes>>,
    /// The constants of the cost model for path selection.
    pub table: CostTable,
    /// The window of a rank, in bytes. In chunks, it is at least [`WINDOW_MIN`] and at most 256, or less if devices
    /// lack slots or memory. Choose a few bandwidth-delay products, small enough for caches.
    pub window_bytes: u32,
    /// The window of a rank in chunks, 1 to 256, for trees of one device whose ranks all use zero-copy. The device
    /// itself moves that window, and few slots stay in its caches. Smaller if devices lack slots or memory.
    pub zero_copy_window_chunks: u16,
    /// The maximum payload of a packet in bytes, at least 64, even if the ports would carry more.
    pub chunk_max_bytes: u16,
    /// The maximum chunk in bytes, at least 64, for trees of one device whose ranks all use zero-copy. Whole pages keep
    /// the engine's accesses aligned.
    pub zero_copy_chunk_max_bytes: u16,
    /// Whether a device sends a result once to a multicast address instead of to each child. Used only if ranks and
    /// devices are all on loopback addresses of one host. A node falls back to one packet per child while a child's
    /// port cannot listen. Any user of the host can join the address and read results: turn it off where that matters.
    /// Forging a result takes the group's key and the device's address.
    pub multicast_results: bool,
    /// How long a group lives without a packet or a renewal; at least one second.
    pub lease: Duration,
    /// The quotas of tenants.
    pub quotas: Quotas,
    /// The timers of the hops.
    pub timers: HopTimers,
    /// Limits on input from clients and devices.
    pub limits: Limits,
    /// The controller's part in a pair, in which the other one takes over when one is lost.
    pub pair: Option<PairConfig>,
    /// The traffic class of all connections.
    pub traffic_class: TrafficClass,
    /// When this incarnation of the controller started, in milliseconds since 1970; `None` means now. Groups and epochs
    /// are numbered from there, so that they differ from those of an earlier incarnation, which devices and ranks may
    /// still hold.
    pub started_ms: Option<u64>,
    /// Blocks the planner in tests.
    #[cfg(test)]
    gate: tests::Gate,
}

impl ControllerConfig {
    /// The default configuration: no fabric, any free loopback port.
    pub fn new() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            keys: None,
            keys_file: None,
            fabric: None,
            routes: None,
            table: CostTable::emulated(),
            window_bytes: 1 << 20,
            zero_copy_window_chunks: 32,
            chunk_max_bytes: 60 * 1024 - 16,
            zero_copy_chunk_max_bytes: 60 * 1024,
            multicast_results: true,
            lease: Duration::from_secs(30),
            quotas: Quotas::default(),
            timers: HopTimers::DEFAULT,
            limits: Limits::default(),
            pair: None,
            traffic_class: TrafficClass::default(),
            started_ms: None,
            #[cfg(test)]
            gate: tests::Gate::default(),
        }
    }
}

impl Default for ControllerConfig {
    fn default() -> Self {
        Self::new()
    }
}

/// The minimum window in chunks: enough to keep both directions of a hop busy.
pub const WINDOW_MIN: u16 = 8;

/// Why a controller cannot start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// The address is reachable from other hosts.
    #[error(
        "{0} is not a loopback address, and without keys whoever reaches the controller commands it: make keys with \
         `sumac key new` and name their store with --keys, or listen on 127.0.0.1"
    )]
    NotLoopback(SocketAddr),
    /// A value is out of range.
    #[error("{what} is {value}; it must be {limit}")]
    Config {
        /// The name of the value.
        what: &'static str,
        /// The value.
        value: u64,
        /// The valid range.
        limit: &'static str,
    },
    /// Cannot listen on the address.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The other controller of the pair cannot be at this address.
    #[error("{0} is not the address of another controller; name the other one of the pair")]
    Peer(SocketAddr),
    /// The controllers of a pair cannot authenticate to each other.
    #[error(
        "the controllers of a pair report to each other by an operator's key, and the store has none that is valid; \
             make one with `sumac key new --operator`"
    )]
    NoOperatorKey,
    /// The other controller of the pair is on the same side, or has no pair.
    #[error("the other controller of the pair, at {peer}, refuses: {refusal}")]
    PairRefused {
        /// Its address.
        peer: SocketAddr,
        /// What it answers.
        refusal: Box<JoinRefusal>,
    },
    /// The system refused a thread or a file descriptor.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// How often [`Controller::wait_until_idle`] looks.
const IDLE_INTERVAL: Duration = Duration::from_millis(10);

/// A running controller. Dropping it stops the controller and releases all groups.
#[derive(Debug)]
pub struct Controller {
    addr: SocketAddr,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    pid: u32,
}

/// What the controller's threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    config: Arc<ControllerConfig>,
    machine: Mutex<Machine>,
    /// The zero of the machine's time.
    began: std::time::Instant,
    /// Wakes the threads that make plans and encode reports.
    work: Condvar,
    /// Wakes the connection thread.
    notifier: Notifier,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Machine> {
        // A panic under the lock is a bug, but the state stays consistent: each change is one insertion or removal.
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Instant {
        Instant::ZERO + self.began.elapsed()
    }
}

impl Controller {
    /// Start listening and serve on background threads.
    ///
    /// # Errors
    /// [`ControllerError`]; nothing is left running.
    pub fn start(config: ControllerConfig) -> Result<Self, ControllerError> {
        check(&config)?;
        let listen = |source| ControllerError::Listen { addr: config.listen, source };
        let listener = TcpListener::bind(config.listen).map_err(listen)?;
        config.traffic_class.apply(&listener).map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        let started_ms = config.started_ms.unwrap_or_else(now_ms);
        let config = Arc::new(config);
        let machine = Machine::new(Arc::clone(&config), started_ms, Entropy::System, Instant::ZERO)?;
        let peer = PeerLink::new(&config);
        // Also refused later, with a line in the log only.
        if let Some((peer, refusal)) = peer.as_ref().and_then(|peer| Some((peer.addr(), peer.ask_first(&machine)?))) {
            return Err(ControllerError::PairRefused { peer, refusal: Box::new(refusal) });
        }
        let shared = Arc::new(Shared {
            config,
            machine: Mutex::new(machine),
            began: std::time::Instant::now(),
            work: Condvar::new(),
            notifier: Notifier::new().map_err(ControllerError::Thread)?,
        });
        let pid = std::process::id();
        let mut controller = Self { addr, shared: Arc::clone(&shared), threads: Vec::new(), pid };
        let server = Server::new(Arc::clone(&shared), listener, started_ms).map_err(ControllerError::Thread)?;
        let reported = Arc::clone(&shared);
        controller.spawn("connections", move || server.run())?;
        controller.spawn("report", move || run_reports(&reported))?;
        if let Some(peer) = peer {
            let shared = Arc::clone(&shared);
            // Not joined at shutdown: an attempt to connect may take long.
            let thread = std::thread::Builder::new().name("peer".into());
            thread.spawn(move || peer.run(&shared)).map_err(ControllerError::Thread)?;
        }
        // Not joined at shutdown: a plan may take long.
        let planner = std::thread::Builder::new().name("plan".into());
        planner.spawn(move || run_planner(&shared)).map_err(ControllerError::Thread)?;
        Ok(controller)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), ControllerError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(run).map_err(ControllerError::Thread)?;
        self.threads.push(thread);
        Ok(())
    }

    /// The address that it listens on.
    pub const fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Wait until there are no jobs, at most for `limit`. Returns whether there are none.
    pub fn wait_until_idle(&self, limit: Duration) -> bool {
        let end = std::time::Instant::now() + limit;
        let mut machine = self.shared.lock();
        while machine.has_jobs() {
            let left = end.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return false;
            }
            // Not each end of a job wakes.
            let waited = self.shared.work.wait_timeout(machine, left.min(IDLE_INTERVAL));
            machine = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Serve until the process ends.
    pub fn serve(mut self) {
        for thread in self.threads.drain(..) {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // The threads exist only in the parent of a fork.
            return self.threads.drain(..).for_each(std::mem::forget);
        }
        let mut machine = self.shared.lock();
        machine.stop(self.shared.now());
        drop(machine);
        self.shared.work.notify_all();
        self.shared.notifier.wake();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The time in milliseconds since 1970; 0 if the clock is set before that.
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn check(config: &ControllerConfig) -> Result<(), ControllerError> {
    if !config.listen.ip().is_loopback() && config.keys.is_none() {
        return Err(ControllerError::NotLoopback(config.listen));
    }
    let range = |what, value: u64, ok, limit| {
        if ok { Ok(()) } else { Err(ControllerError::Config { what, value, limit }) }
    };
    let chunk = u64::from(config.chunk_max_bytes);
    range("chunk_max_bytes", chunk, chunk >= 64, "at least 64")?;
    let chunk = u64::from(config.zero_copy_chunk_max_bytes);
    range("zero_copy_chunk_max_bytes", chunk, chunk >= 64, "at least 64")?;
    let window = u64::from(config.zero_copy_window_chunks);
    range("zero_copy_window_chunks", window, (1..=MAX_WINDOW).contains(&window), "1 to 256")?;
    let lease = config.lease.as_millis() as u64;
    range("lease in ms", lease, (1000..u64::from(u32::MAX)).contains(&lease), "at least 1000")?;
    if let Some(pair) = &config.pair {
        let silence = pair.silence.as_millis() as u64;
        range("pair.silence in ms", silence, (1000..=3_600_000).contains(&silence), "1000 to 3600000")?;
        if pair.peer.port() == 0 || pair.peer == config.listen {
            return Err(ControllerError::Peer(pair.peer));
        }
        if let Some(keys) = &config.keys {
            operator_key(keys).ok_or(ControllerError::NoOperatorKey)?;
        }
    }
    Ok(())
}

/// Make plans, on snapshots of the state.
fn run_planner(shared: &Shared) {
    let mut machine = shared.lock();
    while !machine.is_stopping() {
        if !machine.has_plan() {
            machine = shared.work.wait(machine).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let Some(plan) = machine.poll_plan() else {
            shared.notifier.wake();
            continue;
        };
        drop(machine);
        let result = plan.run(&shared.config);
        machine = shared.lock();
        machine.handle_plan(result, shared.now());
        shared.notifier.wake();
    }
}

/// Encode reports.
fn run_reports(shared: &Shared) {
    let mut machine = shared.lock();
    while !machine.is_stopping() {
        let Some(report) = machine.poll_report() else {
            machine = shared.work.wait(machine).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(machine);
        let encoded = report.run();
        machine = shared.lock();
        machine.handle_report(encoded, shared.now());
        shared.notifier.wake();
    }
}
