//! The aggregation manager: knows fabric and devices, admits jobs, plans their trees, creates, renews and releases
//! their groups, and hands out the cost table.
//!
//! ```text
//!   device --- Greeting::Device ---> +------------+ <--- Greeting::Client --- rank
//!          <-- Request            -- | controller | --- Join ->
//!          --- Response           -> +------------+ <-- Joined (group, key, leaf, table)
//! ```
//!
//! A job begins when all its ranks have joined: they get a tree, or the reason why there is none and the schedules
//! remain. It ends when its last rank has left or died; a death is told to the other ranks at once. Groups are
//! reserved on all nodes of a tree or on none.
//!
//! A running job whose tree is lost is placed anew, on other devices, when all its ranks ask for that: `Replan`.
//!
//! A rank that runs on its leaf's own machine contributes by reference, over the device's bus, unless it asks for
//! packets; one that insists on shared memory and can't have it makes that the reason why there is no tree.
//!
//! What jobs hold of devices is in books, by tenant, each of which may have a quota; who finds too little left runs by
//! schedules and stands in a queue, or waits there to join (`state::place` has the way of a job, `queue` who comes first).
//! Leases are renewed while a job lives, and what a device has freed is freed everywhere (`state::lease`).
//!
//! Control plane only: one thread has all connections (`connections`), one plans (`state::planning`), one makes reports,
//! and one lock is over the state, under which nobody sends, plans or waits. No packet of an operation passes here, and
//! running operations do not need the controller. One that is started again at the same address learns of running jobs from
//! their ranks, which show a secret that the one before has given them (`state::resume`).
//!
//! It listens on loopback only, as nothing is authenticated yet (PROTOCOL 10).

mod admit;
mod books;
mod client;
mod connections;
mod device;
mod entropy;
pub mod limits;
mod line;
pub mod proto;
mod queue;
#[cfg(feature = "snapshot")]
pub mod rehearsal;
mod shape;
mod state;
#[cfg(test)]
mod tests;
mod wakeup;
mod watch;

pub use books::{Quota, Quotas};
pub use client::{ClientError, Notice, Session, status};
pub use limits::{Limits, derived_name};

use crate::select::CostTable;
use crate::topo::Fabric;
use connections::Connections;
use device::{DeviceSession, answer_due};
use entropy::Entropy;
use limits::REPLY_LEN_MAX;
use state::{Client, Draft, State};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use sumac_hal::uplink::{HopTimers, MAX_WINDOW};
use thiserror::Error;
use wakeup::Wakeup;

/// How to set up a controller.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Where to listen; loopback only. Port 0: any free one.
    pub listen: SocketAddr,
    /// The fabric. `None`: every device is a switch that every host hangs on, and jobs get one-level trees.
    pub fabric: Option<Fabric>,
    /// The constants of the choice.
    pub table: CostTable,
    /// What a rank may have in flight, in bytes: the window is as many chunks as that is, at least
    /// [`WINDOW_MIN`] and at most 256, and less where devices have no room for it. Some bandwidth-delay products;
    /// small enough for caches.
    pub window_bytes: u32,
    /// What a rank may have in flight, in chunks, where all ranks contribute by reference: there the device itself moves
    /// the window, and few slots stay in its caches. 1 to 256; less where devices have no room for it.
    pub reference_window_chunks: u16,
    /// The longest payload of a packet in bytes, where the ports would carry more.
    pub chunk_max_bytes: u16,
    /// The longest chunk in bytes where no packet carries one: all ranks contribute by reference, to one device. Whole
    /// pages keep the engine's accesses aligned; at least 64.
    pub reference_chunk_max_bytes: u16,
    /// Whether devices send a result that all children wait for once, to a multicast address, instead of to each. Only
    /// where ranks and devices are all on loopback addresses of one host; as long as a child's port can't listen, its
    /// node answers each child alone. Any user of that host can join the address and read results: turn it off where
    /// that matters. Forging them takes the group's key and the device's address.
    pub shared_answers: bool,
    /// How long a group lives without a packet or a renewal.
    pub lease: Duration,
    /// What each tenant may hold of the devices.
    pub quotas: Quotas,
    /// The timers of the hops.
    pub timers: HopTimers,
    /// What is taken from outside, at most.
    pub limits: Limits,
    /// When this life of the controller began, in milliseconds since 1970: its groups and epochs count on from there, so
    /// that none is one of an earlier life, of which devices and ranks may still hold something. `None`: now.
    pub started_ms: Option<u64>,
    /// What plans wait at.
    #[cfg(test)]
    gate: tests::Gate,
}

impl ControllerConfig {
    /// Describe a controller without a fabric on any free loopback port.
    pub fn new() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            fabric: None,
            table: CostTable::EMULATED,
            window_bytes: 1 << 20,
            reference_window_chunks: 32,
            chunk_max_bytes: 60 * 1024 - 16,
            reference_chunk_max_bytes: 60 * 1024,
            shared_answers: true,
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

/// The fewest chunks that a window is given: enough for both directions of a hop to be busy.
pub const WINDOW_MIN: u16 = 8;

/// Why a controller can't start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// Reachable from elsewhere.
    #[error("{0} is not a loopback address; control ports are not authenticated yet and listen on loopback only")]
    NotLoopback(SocketAddr),
    /// A value out of range.
    #[error("{what} is {value}; it must be {limit}")]
    Config {
        /// Which.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What it may be.
        limit: &'static str,
    },
    /// The address can't be listened on.
    #[error("listen on {addr}: {source}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The system would not start a thread, or give a descriptor for one to wait at.
    #[error("start a thread: {0}")]
    Thread(std::io::Error),
}

/// A running controller. Dropping it ends it; groups are released.
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
    config: ControllerConfig,
    state: Mutex<State>,
    /// Nothing more is begun.
    stopping: AtomicBool,
    /// Everything is released: nobody has to be told anything any more.
    ended: AtomicBool,
    /// Wakes the renewal thread when the controller stops.
    stopped: Condvar,
    /// Wakes who plans, and who attends to what is due.
    wake: Arc<Condvar>,
    /// Wakes who has the connections.
    wakeup: Arc<Wakeup>,
    /// Threads that ask devices for a tree.
    placing: AtomicUsize,
    /// Those that wait for a report.
    reports: Mutex<Vec<Arc<Client>>>,
    /// Wakes who makes it.
    report: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is a bug; the others go on with what is consistent by construction: each change
        // of the state is one insertion or removal.
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

    /// Clients ask for a report.
    fn ask_for_reports(&self, clients: &mut Vec<Arc<Client>>) {
        if !clients.is_empty() {
            self.reports.lock().unwrap_or_else(PoisonError::into_inner).append(clients);
            self.report.notify_all();
        }
    }
}

impl Controller {
    /// Listen, and serve in threads of its own.
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
            wakeup: Arc::new(Wakeup::new().map_err(ControllerError::Thread)?),
            placing: AtomicUsize::new(0),
            reports: Mutex::default(),
            report: Condvar::new(),
        });
        let pid = std::process::id();
        let mut controller = Self { addr, shared: Arc::clone(&shared), threads: Vec::new(), pid };
        let connections = Connections::new(Arc::clone(&shared), listener).map_err(ControllerError::Thread)?;
        let [attended, planned, reported] = [(); 3].map(|()| Arc::clone(&shared));
        controller.spawn("connections", move || connections.run())?;
        controller.spawn("queue", move || attend(&attended))?;
        controller.spawn("report", move || report(&reported))?;
        controller.spawn("renew", move || renew(&shared))?;
        // Nobody waits for its end: a plan may take long.
        let planner = std::thread::Builder::new().name("plan".into());
        planner.spawn(move || plan(&planned)).map_err(ControllerError::Thread)?;
        Ok(controller)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), ControllerError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(run).map_err(ControllerError::Thread)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Return where it listens.
    pub const fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serve until the process ends.
    pub fn serve(mut self) {
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so on its way.
            let _ = thread.join();
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child has none of the threads.
            return self.threads.drain(..).for_each(std::mem::forget);
        }
        let released = {
            let mut state = self.shared.lock();
            self.shared.stopping.store(true, Ordering::Release);
            self.shared.stopped.notify_all();
            self.shared.wake.notify_all();
            state.release_all()
        };
        // Under the lock of what it waits with: it has seen that the controller stops, or waits by now.
        drop(self.shared.reports.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.report.notify_all();
        let due = answer_due();
        for (device, asked) in released {
            if let Err(error) = device.done(&asked, due) {
                tracing::debug!(device = device.name(), %error, "not released");
            }
        }
        self.shared.lock().devices.values().for_each(|device| device.hang_up());
        self.shared.ended.store(true, Ordering::Release);
        self.shared.wakeup.wake();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Return the milliseconds since 1970; 0 by a clock that is before that.
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
    let chunk = u64::from(config.reference_chunk_max_bytes);
    range("reference_chunk_max_bytes", chunk, chunk >= 64, "at least 64")?;
    let window = u64::from(config.reference_window_chunks);
    range("reference_window_chunks", window, (1..=MAX_WINDOW).contains(&window), "1 to 256")?;
    let lease = config.lease.as_millis() as u64;
    range("lease in ms", lease, (1000..u64::from(u32::MAX)).contains(&lease), "at least 1000")
}

/// Reserve a drafted tree on its devices, and others instead where that can't be. The state is not locked meanwhile.
fn carry_out(shared: &Shared, mut draft: Option<Draft>) {
    while let Some(next) = draft {
        let reserved = next.reserve(&shared.config);
        draft = shared.lock().settle(&shared.config, next, reserved);
    }
}

/// Carry out what is drafted, and give up what was waited for too long.
fn attend(shared: &Arc<Shared>) {
    let mut state = shared.lock();
    while !shared.stopping() {
        state.now = Instant::now();
        let due = state.expire_all();
        if shared.placing.load(Ordering::Acquire) < PLACING_MAX
            && let Some(draft) = state.ready.pop_front()
        {
            drop(state);
            carry_out_aside(shared, draft);
            state = shared.lock();
            continue;
        }
        let waited = due.map(|due| due.saturating_duration_since(Instant::now())).unwrap_or(Duration::MAX);
        let woken = shared.wake.wait_timeout(state, waited.min(shared.config.lease));
        state = woken.unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// The same on a thread of its own: a device that has stopped takes seconds.
fn carry_out_aside(shared: &Arc<Shared>, draft: Draft) {
    let (to, from) = std::sync::mpsc::channel();
    let there = Arc::clone(shared);
    shared.placing.fetch_add(1, Ordering::AcqRel);
    let carry = move || {
        carry_out(&there, from.recv().ok());
        there.placing.fetch_sub(1, Ordering::AcqRel);
        // Under the lock: who looked before it waits by now.
        drop(there.lock());
        there.wake.notify_all();
    };
    if let Err(error) = std::thread::Builder::new().name("place".into()).spawn(carry) {
        tracing::error!(%error, "no thread to place a job; the queue waits meanwhile");
        shared.placing.fetch_sub(1, Ordering::AcqRel);
        return carry_out(shared, Some(draft));
    }
    // It lives until it has it.
    let _ = to.send(draft);
}

/// Plan what is to be planned, on copies of the state.
fn plan(shared: &Shared) {
    let mut state = shared.lock();
    while !shared.stopping() {
        state.now = Instant::now();
        match state.next_plan() {
            Some(plan) => {
                drop(state);
                let planned = plan.run(&shared.config);
                state = shared.lock();
                if !shared.stopping() {
                    state.planned(&shared.config, planned);
                }
            }
            None => state = shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// Make reports: one for all who have asked by then, so that many who ask cost what one does.
fn report(shared: &Shared) {
    loop {
        let reports = shared.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = shared.report.wait_while(reports, |reports| reports.is_empty() && !shared.stopping());
        let clients = std::mem::take(&mut *waited.unwrap_or_else(PoisonError::into_inner));
        if shared.stopping() {
            return;
        }
        // In a statement of its own: the lock is held until its end, and devices answer by a thread that takes the lock.
        let asked = shared.lock().report(&shared.config);
        let report = asked.ask_devices();
        let len_max = REPLY_LEN_MAX.min(shared.config.limits.peer_output_bytes / 2);
        match state::encode_report(report, len_max) {
            Ok(frames) => clients.iter().for_each(|client| client.put(std::slice::from_ref(&frames))),
            Err(error) => tracing::error!(%error, "no report can be made"),
        }
    }
}

/// How many jobs devices are asked for at a time.
const PLACING_MAX: usize = 32;

/// Extend the leases of all running jobs, a third of the lease apart.
fn renew(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        let waited = shared.stopped.wait_timeout_while(state, shared.config.lease / 3, |_| !shared.stopping());
        let round = waited.unwrap_or_else(PoisonError::into_inner).0.round();
        if shared.stopping() {
            return;
        }
        let renewed = round.ask().answered(answer_due());
        state = shared.lock();
        state.renewed(renewed);
    }
}
