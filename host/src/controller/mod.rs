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
//! depend on it. One thread serves all connections (`connections`), one plans (`state::planning`), one makes reports.
//! They share the state behind one lock; nobody sends, plans or waits while holding it. A controller that is restarted
//! at the same address learns about running jobs from their ranks, which authenticate with a secret from its
//! predecessor (`state::resume`).
//!
//! It listens on loopback only, because the control protocol is not authenticated yet (PROTOCOL 10).

mod address;
mod admit;
mod connections;
mod device;
mod entropy;
#[cfg(feature = "snapshot")]
pub mod harness;
pub mod limits;
mod notifier;
mod outbox;
pub mod proto;
mod queue;
mod resources;
mod session;
mod session_reader;
mod shape;
mod state;
#[cfg(test)]
mod tests;

pub use address::{AddressError, first_reachable, resolve};
pub use limits::{Limits, derived_name};
pub use resources::{Quota, Quotas};
pub use session::{ClientError, Notice, Session, status};

use crate::select::CostTable;
use crate::topo::Fabric;
use connections::Connections;
use device::{DeviceSession, reply_deadline};
use entropy::Entropy;
use limits::REPLY_LEN_MAX;
use notifier::ConnectionNotifier;
use state::{Client, Draft, State};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use sumac_hal::uplink::{HopTimers, MAX_WINDOW};
use thiserror::Error;

/// Configuration of a controller.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// The address to listen on, which must be a loopback address. Port 0 selects any free port.
    pub listen: SocketAddr,
    /// The fabric. `None` treats every device as a switch that connects all hosts, so jobs get one-level trees.
    pub fabric: Option<Fabric>,
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
            fabric: None,
            table: CostTable::EMULATED,
            window_bytes: 1 << 20,
            zero_copy_window_chunks: 32,
            chunk_max_bytes: 60 * 1024 - 16,
            zero_copy_chunk_max_bytes: 60 * 1024,
            multicast_results: true,
            lease: Duration::from_secs(30),
            quotas: Quotas::default(),
            timers: HopTimers::DEFAULT,
            limits: Limits::default(),
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
    #[error("{0} is not a loopback address; the control protocol is not authenticated yet, so listen on loopback only")]
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
    /// The system refused a thread or a file descriptor.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// A running controller. Dropping it stops the controller and releases all groups.
#[derive(Debug)]
pub struct Controller {
    addr: SocketAddr,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    pid: u32,
}

/// State shared by the controller's threads.
#[derive(Debug)]
pub(crate) struct Shared {
    config: ControllerConfig,
    state: Mutex<State>,
    /// No new work is started.
    stopping: AtomicBool,
    /// All groups are released; connections may close.
    ended: AtomicBool,
    /// Wakes the renewal thread when the controller stops.
    stopped: Condvar,
    /// Wakes the planner and the reservation thread.
    wake: Arc<Condvar>,
    /// Wakes the connection thread.
    notifier: Arc<ConnectionNotifier>,
    /// Running reservation threads.
    placing: AtomicUsize,
    /// Clients waiting for a report.
    reports: Mutex<Vec<Arc<Client>>>,
    /// Wakes the report thread.
    report: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is a bug, but the state stays consistent: each change is one insertion or removal.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.now = Instant::now();
        state
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Queue clients for the next report.
    fn queue_reports(&self, clients: &mut Vec<Arc<Client>>) {
        if !clients.is_empty() {
            self.reports.lock().unwrap_or_else(PoisonError::into_inner).append(clients);
            self.report.notify_all();
        }
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
        let addr = listener.local_addr().map_err(listen)?;
        let wake = Arc::new(Condvar::new());
        let started_ms = config.started_ms.unwrap_or_else(now_ms);
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(&config, started_ms, Entropy::System, Arc::clone(&wake))),
            config,
            stopping: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            stopped: Condvar::new(),
            wake,
            notifier: Arc::new(ConnectionNotifier::new().map_err(ControllerError::Thread)?),
            placing: AtomicUsize::new(0),
            reports: Mutex::default(),
            report: Condvar::new(),
        });
        let pid = std::process::id();
        let mut controller = Self { addr, shared: Arc::clone(&shared), threads: Vec::new(), pid };
        let connections = Connections::new(Arc::clone(&shared), listener).map_err(ControllerError::Thread)?;
        let [queue, planned, reported] = [(); 3].map(|()| Arc::clone(&shared));
        controller.spawn("connections", move || connections.run())?;
        controller.spawn("queue", move || run_reservations(&queue))?;
        controller.spawn("report", move || run_reports(&reported))?;
        controller.spawn("renew", move || run_renewals(&shared))?;
        // Not joined at shutdown: a plan may take long.
        let planner = std::thread::Builder::new().name("plan".into());
        planner.spawn(move || run_planner(&planned)).map_err(ControllerError::Thread)?;
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
        let released = {
            let mut state = self.shared.lock();
            self.shared.stopping.store(true, Ordering::Release);
            self.shared.stopped.notify_all();
            self.shared.wake.notify_all();
            state.release_all()
        };
        // Taking the lock ensures that the report thread has either seen `stopping` or is waiting for this
        // notification.
        drop(self.shared.reports.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.report.notify_all();
        let due = reply_deadline();
        for (device, asked) in released {
            if let Err(error) = device.wait_done(&asked, due) {
                tracing::debug!(device = device.name(), %error, "group not released; its lease expires instead");
            }
        }
        self.shared.lock().devices.values().for_each(|device| device.disconnect());
        self.shared.ended.store(true, Ordering::Release);
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
    if !config.listen.ip().is_loopback() {
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
    range("lease in ms", lease, (1000..u64::from(u32::MAX)).contains(&lease), "at least 1000")
}

/// Reserve a drafted tree on its devices, or alternatives if that fails. The state is not locked meanwhile.
fn reserve_draft(shared: &Shared, mut draft: Option<Draft>) {
    while let Some(next) = draft {
        let reserved = next.reserve(&shared.config);
        draft = shared.lock().finish_reservation(&shared.config, next, reserved);
    }
}

/// Reserve drafted trees, and expire whatever is overdue.
fn run_reservations(shared: &Arc<Shared>) {
    let mut state = shared.lock();
    while !shared.stopping() {
        state.now = Instant::now();
        let due = state.expire_all();
        if shared.placing.load(Ordering::Acquire) < RESERVATIONS_MAX
            && let Some(draft) = state.ready.pop_front()
        {
            drop(state);
            reserve_on_thread(shared, draft);
            state = shared.lock();
            continue;
        }
        let waited = due.map(|due| due.saturating_duration_since(Instant::now())).unwrap_or(Duration::MAX);
        let woken = shared.wake.wait_timeout(state, waited.min(shared.config.lease));
        state = woken.unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Reserve on a separate thread, since an unresponsive device takes seconds to time out.
fn reserve_on_thread(shared: &Arc<Shared>, draft: Draft) {
    let (to, from) = std::sync::mpsc::channel();
    let there = Arc::clone(shared);
    shared.placing.fetch_add(1, Ordering::AcqRel);
    let carry = move || {
        reserve_draft(&there, from.recv().ok());
        there.placing.fetch_sub(1, Ordering::AcqRel);
        // Taking the lock ensures that the reservation thread has either seen the count or is waiting.
        drop(there.lock());
        there.wake.notify_all();
    };
    if let Err(error) = std::thread::Builder::new().name("place".into()).spawn(carry) {
        tracing::error!(%error, "cannot start a thread to reserve a tree; the queue is blocked meanwhile");
        shared.placing.fetch_sub(1, Ordering::AcqRel);
        return reserve_draft(shared, Some(draft));
    }
    // The thread lives until it has received the draft.
    let _ = to.send(draft);
}

/// Run pending plans on snapshots of the state.
fn run_planner(shared: &Shared) {
    let mut state = shared.lock();
    while !shared.stopping() {
        state.now = Instant::now();
        match state.next_plan() {
            Some(plan) => {
                drop(state);
                let apply_plan = plan.run(&shared.config);
                state = shared.lock();
                if !shared.stopping() {
                    state.apply_plan(&shared.config, apply_plan);
                }
            }
            None => state = shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// Make reports. One report serves all clients that are waiting, so many requests cost as much as one.
fn run_reports(shared: &Shared) {
    loop {
        let reports = shared.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = shared.report.wait_while(reports, |reports| reports.is_empty() && !shared.stopping());
        let clients = std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner));
        if shared.stopping() {
            return;
        }
        // A separate statement, so that the lock is dropped: the thread that delivers the devices' replies takes it.
        let asked = shared.lock().report(&shared.config);
        let report = asked.ask_devices();
        let len_max = REPLY_LEN_MAX.min(shared.config.limits.peer_output_bytes / 2);
        match state::encode_report(report, len_max) {
            Ok(frames) => clients.iter().for_each(|client| client.put(std::slice::from_ref(&frames))),
            Err(error) => tracing::error!(%error, "cannot encode a report"),
        }
    }
}

/// Maximum number of concurrent reservations.
const RESERVATIONS_MAX: usize = 32;

/// Renew the leases of all running jobs every third of a lease.
fn run_renewals(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        let waited = shared.stopped.wait_timeout_while(state, shared.config.lease / 3, |_| !shared.stopping());
        let round = waited.unwrap_or_else(PoisonError::into_inner).0.lease_round();
        if shared.stopping() {
            return;
        }
        let renewed = round.send().wait(reply_deadline());
        state = shared.lock();
        state.renewed(renewed);
    }
}
