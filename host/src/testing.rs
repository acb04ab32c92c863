//! Clusters for your own tests: a controller, emulated devices and ranks in one process. Needs the feature `testing`.
//!
//! ```
//! use sumac::testing::LocalCluster;
//! use sumac::{Path, ReduceOp};
//!
//! let cluster = LocalCluster::start(3)?;
//! let sums = cluster.run(|comm| {
//!     let mut value = [comm.rank()];
//!     let outcome = comm.all_reduce(&mut value, ReduceOp::Sum).expect("a sum");
//!     assert_eq!(outcome.path, Path::Tree);
//!     comm.leave();
//!     value[0]
//! });
//! assert_eq!(sums, [3, 3, 3]);
//! # Ok::<(), sumac::testing::LocalClusterError>(())
//! ```
//!
//! Everything is production code over real sockets and memory; only the devices' hardware is emulated. Calls use a tree
//! whenever there is one, whatever it costs, so that small tests cover it. Dropping the cluster stops everything.
//!
//! To test what your program does when a device dies, call [`LocalCluster::kill_device`] at any moment, also from a
//! rank.
//!
//! All parts have keys that are made for the cluster, since every user of the machine reaches its controller.
//!
//! This module alone composes hosts and devices (`sumac-firmware`); the rest of the crate knows no device.

use crate::controller::keys::{InvalidPrincipal, KeyStore, Principal, PrivateMemory};
use crate::controller::proto::DEFAULT_TENANT;
use crate::controller::{Controller, ControllerAddr, ControllerConfig, status};
use crate::select::CostTable;
use crate::topo::{Fabric, LeafSpine};
use crate::{Communicator, JoinConfig, JoinError, Transport};
use std::any::Any;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, thread};
use sumac_firmware::emulated::{Board, BoardConfig, ZeroCopyConfig};
use sumac_hal::ctrl::secure::Key;
use thiserror::Error;
use zeroize::Zeroizing;

/// How long a device may take to register. It takes milliseconds on an idle machine.
const REGISTRATION_LIMIT: Duration = Duration::from_secs(20);

/// The memory of each device for operations in flight.
const SLOT_MEMORY_BYTES: usize = 16 << 20;

/// Selects the tree at any size.
const PREFER_TREE: &str = "[[override]]\npath = \"tree\"\n";

/// The shape of a [`LocalCluster`]. Start from [`LocalClusterConfig::new`] and change fields.
#[derive(Debug, Clone)]
pub struct LocalClusterConfig {
    /// The number of ranks.
    pub ranks: u32,
    /// The levels of the tree, 1 or 2. With 2, half of the ranks are below each of two leaf devices.
    pub levels: u8,
    /// The number of devices, at least 2 for two levels. Those that a tree does not need are spares, which the
    /// controller can use when others die. With none, jobs run on host collectives.
    pub devices: usize,
    /// How ranks reach their leaf device: [`Transport::Auto`], which shares memory, [`Transport::Shm`] or
    /// [`Transport::Udp`]. The others need RDMA ports.
    pub transport: Transport,
}

impl LocalClusterConfig {
    /// Configure one device that shares memory with `ranks` ranks.
    pub const fn new(ranks: u32) -> Self {
        Self { ranks, levels: 1, devices: 1, transport: Transport::Auto }
    }

    /// Return the fabric and the names of the devices; one level needs no fabric.
    fn layout(&self) -> Result<(Option<Fabric>, Vec<String>), LocalClusterError> {
        let invalid = LocalClusterError::Config;
        if self.ranks == 0 {
            return Err(invalid("0 ranks; a job has at least one".into()));
        }
        if !matches!(self.transport, Transport::Auto | Transport::Shm | Transport::Udp) {
            return Err(invalid(format!("transport {}; a local cluster has auto, shm and udp", self.transport)));
        }
        match (self.levels, self.devices) {
            (1, devices) => Ok((None, (0..devices).map(|nth| format!("device{nth}")).collect())),
            (2, devices @ 2..) => {
                let hosts_per_leaf = self.ranks.div_ceil(2) as usize;
                let spines = (devices - 2).max(1);
                let shape = LeafSpine { leaves: 2, spines, hosts_per_leaf, cables: 1, rate: None };
                let fabric = Fabric::leaf_spine(shape).map_err(|error| invalid(error.to_string()))?;
                let leaves = (0..2).map(|leaf| format!("leaf{leaf}"));
                let spines = (0..devices - 2).map(|spine| format!("spine{spine}"));
                Ok((Some(fabric), leaves.chain(spines).collect()))
            }
            (2, devices) => Err(invalid(format!("{devices} device(s); two levels take at least 2"))),
            (levels, _) => Err(invalid(format!("{levels} levels; choose 1 or 2"))),
        }
    }
}

/// Why a cluster could not be started. Nothing keeps running then.
#[derive(Error)]
#[non_exhaustive]
pub enum LocalClusterError {
    /// The configuration is impossible.
    #[error("invalid local cluster: {0}")]
    Config(String),
    /// The controller could not be started.
    #[error("cannot start a controller: {0}")]
    Controller(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// There can be no keys.
    #[error("cannot make keys: {0}")]
    Keys(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A device could not be started.
    #[error("cannot start {device}: {source}")]
    Device {
        /// Its name.
        device: String,
        /// What went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A device did not register with the controller in time.
    #[error("{device} did not register with the controller within {} s", REGISTRATION_LIMIT.as_secs())]
    Registration {
        /// Its name.
        device: String,
    },
}

impl fmt::Debug for LocalClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a rank of [`LocalCluster::try_run`] returned no result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RankError {
    /// It could not join.
    #[error("rank {rank} could not join: {source}")]
    Join {
        /// The rank.
        rank: u32,
        /// What went wrong.
        source: JoinError,
    },
    /// It panicked. The panic dropped its communicator, so the other ranks saw it die.
    #[error("rank {rank} panicked: {message}")]
    Panic {
        /// The rank.
        rank: u32,
        /// The panic's message.
        message: String,
    },
}

/// The keys of a cluster.
struct Keys {
    store: KeyStore,
    /// Of all devices, which are in this process.
    device: Option<Key>,
    rank: Key,
    rank_file: PrivateMemory,
    operator: Key,
    operator_file: PrivateMemory,
}

impl Keys {
    fn new(devices: &[String]) -> Result<Self, LocalClusterError> {
        let mut store = KeyStore::default();
        let mut add = |principal| {
            let added = store.add_random(principal).cloned();
            added.map_err(|error: InvalidPrincipal| LocalClusterError::Keys(error.into()))
        };
        let file = |key: &Key| {
            let text = Zeroizing::new(key.reveal().to_string());
            PrivateMemory::new(&text).map_err(|error| LocalClusterError::Keys(error.into()))
        };
        let device = (!devices.is_empty()).then(|| add(Principal::Device { names: devices.to_vec() })).transpose()?;
        let rank = add(Principal::Tenant { name: DEFAULT_TENANT.into() })?;
        let operator = add(Principal::Operator)?;
        let (rank_file, operator_file) = (file(&rank)?, file(&operator)?);
        Ok(Self { store, device, rank, rank_file, operator, operator_file })
    }
}

/// A controller and emulated devices in this process, and the ranks of the jobs that run on them.
pub struct LocalCluster {
    config: LocalClusterConfig,
    /// The next job's number.
    next_job: AtomicU32,
    names: Vec<String>,
    keys: Keys,
    // Dropped before the controller.
    devices: Mutex<Vec<Option<Board>>>,
    controller: Controller,
}

impl LocalCluster {
    /// Start a cluster of one device that shares memory with `ranks` ranks.
    ///
    /// # Errors
    /// [`LocalClusterError`] if a part cannot be started.
    pub fn start(ranks: u32) -> Result<Self, LocalClusterError> {
        Self::start_with(LocalClusterConfig::new(ranks))
    }

    /// Start a cluster, and wait until its devices have registered with its controller.
    ///
    /// # Errors
    /// [`LocalClusterError`] if the configuration is invalid or a part cannot be started.
    pub fn start_with(config: LocalClusterConfig) -> Result<Self, LocalClusterError> {
        let (fabric, names) = config.layout()?;
        let table = CostTable::emulated().with_overrides(PREFER_TREE);
        let table = table.map_err(|error| LocalClusterError::Config(error.to_string()))?;
        let mut controller = ControllerConfig::new();
        (controller.fabric, controller.table) = (fabric, table);
        let keys = Keys::new(&names)?;
        controller.keys = Some(Arc::new(keys.store.clone()));
        let controller = Controller::start(controller);
        let controller = controller.map_err(|error| LocalClusterError::Controller(Box::new(error)))?;
        let devices = Mutex::new(names.iter().map(|_| None).collect());
        let cluster = Self { config, next_job: AtomicU32::new(0), names, keys, devices, controller };
        (0..cluster.names.len()).try_for_each(|device| cluster.start_device(device))?;
        Ok(cluster)
    }

    /// Return the controller's address, for `sumac status`.
    pub const fn controller_addr(&self) -> SocketAddr {
        self.controller.local_addr()
    }

    /// Return the file with an operator's key, for `sumac status --key-file`. Only this user can read it.
    pub fn operator_key_file(&self) -> PathBuf {
        self.keys.operator_file.path()
    }

    /// Return the controller's address with an operator's key, for [`crate::controller::status`].
    pub fn operator_addr(&self) -> ControllerAddr {
        ControllerAddr { key: Some(self.keys.operator.clone()), ..self.controller_addr().into() }
    }

    /// Return the devices' names, in the order of their numbers.
    pub fn device_names(&self) -> &[String] {
        &self.names
    }

    /// Return the numbers of the devices that trees of running jobs use, in ascending order.
    pub fn devices_in_use(&self) -> Vec<usize> {
        let jobs = status(self.operator_addr()).map(|report| report.jobs).unwrap_or_default();
        let trees = jobs.into_iter().flat_map(|job| {
            let further = job.stripes.into_iter().filter_map(|stripe| stripe.tree.ok());
            job.tree.and_then(Result::ok).into_iter().chain(further)
        });
        let used: Vec<String> = trees.flat_map(|tree| tree.devices).collect();
        (0..self.names.len()).filter(|&device| used.contains(&self.names[device])).collect()
    }

    /// Return the configurations of the ranks of a new job, in their order. Join each on a thread of its own, since
    /// joining waits for all of them; [`LocalCluster::run`] does.
    pub fn join_configs(&self) -> Vec<JoinConfig> {
        let job = self.next_job();
        let config = |rank| {
            let mut config = JoinConfig::new(self.controller_addr(), job.clone(), rank, self.config.ranks);
            config.transport = self.config.transport;
            config.key = Some(self.keys.rank.clone());
            config
        };
        (0..self.config.ranks).map(config).collect()
    }

    /// Return the environments of the ranks of a new job, in their order, for programs that call
    /// [`JoinConfig::from_env`]. `SUMAC_KEY_FILE` is there as long as the cluster.
    pub fn environments(&self) -> Vec<Vec<(&'static str, String)>> {
        let (job, addr) = (self.next_job(), self.controller_addr());
        let key_file = self.keys.rank_file.path().display().to_string();
        let variables = |rank: u32| {
            vec![
                ("SUMAC_KEY_FILE", key_file.clone()),
                ("RANK", rank.to_string()),
                ("WORLD_SIZE", self.config.ranks.to_string()),
                ("MASTER_ADDR", addr.ip().to_string()),
                ("SUMAC_PORT", addr.port().to_string()),
                ("SUMAC_JOB", job.clone()),
                ("SUMAC_TRANSPORT", self.config.transport.name().to_owned()),
            ]
        };
        (0..self.config.ranks).map(variables).collect()
    }

    fn next_job(&self) -> String {
        format!("local-{}", self.next_job.fetch_add(1, Ordering::Relaxed))
    }

    /// Run a new job: `rank` on a thread for each rank, with its communicator. Returns the results in the order of
    /// ranks.
    ///
    /// # Panics
    /// If ranks could not join or panicked, once all have ended, with what happened to each.
    pub fn run<R: Send>(&self, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
        let (mut results, mut failures) = (Vec::new(), Vec::new());
        for result in self.try_run(rank) {
            match result {
                Ok(result) => results.push(result),
                Err(error) => failures.push(error.to_string()),
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("; "));
        results
    }

    /// Run a new job as [`LocalCluster::run`] does, and return what became of each rank.
    pub fn try_run<R: Send>(&self, rank: impl Fn(Communicator) -> R + Sync) -> Vec<Result<R, RankError>> {
        let run = |config: JoinConfig| {
            let number = config.rank;
            let comm = Communicator::join(config).map_err(|source| RankError::Join { rank: number, source })?;
            // What a rank that panics leaves in memory is its caller's, as with threads.
            catch_unwind(AssertUnwindSafe(|| rank(comm)))
                .map_err(|panic| RankError::Panic { rank: number, message: message(&*panic) })
        };
        thread::scope(|scope| {
            let ranks = self.join_configs().into_iter().map(|config| (config.rank, scope.spawn(|| run(config))));
            let ranks: Vec<_> = ranks.collect();
            let ended = |(rank, thread): (u32, thread::ScopedJoinHandle<'_, Result<R, RankError>>)| {
                thread.join().unwrap_or_else(|panic| Err(RankError::Panic { rank, message: message(&*panic) }))
            };
            ranks.into_iter().map(ended).collect()
        })
    }

    /// Kill a device: its threads end and its connections close, as if its process had died. No effect on a device that
    /// is dead already. [`LocalCluster::devices_in_use`] says which devices serve a job.
    ///
    /// # Panics
    /// If there is no device of this number.
    pub fn kill_device(&self, device: usize) {
        let board = self.boards()[device].take();
        drop(board);
    }

    /// Start a device again that was killed, and wait until it has registered. It has lost its state.
    ///
    /// # Errors
    /// [`LocalClusterError`] if it cannot be started.
    ///
    /// # Panics
    /// If there is no device of this number.
    pub fn start_device(&self, device: usize) -> Result<(), LocalClusterError> {
        if self.boards()[device].is_some() {
            return Ok(());
        }
        let name = self.names[device].clone();
        let zero_copy = (self.config.transport != Transport::Udp).then(ZeroCopyConfig::default);
        let config = BoardConfig::new(name.clone(), self.controller_addr());
        let key = self.keys.device.clone();
        let board = Board::start(BoardConfig { slot_memory_bytes: SLOT_MEMORY_BYTES, zero_copy, key, ..config });
        let board =
            board.map_err(|error| LocalClusterError::Device { device: name.clone(), source: Box::new(error) })?;
        if !board.wait_registered(REGISTRATION_LIMIT) {
            return Err(LocalClusterError::Registration { device: name });
        }
        self.boards()[device] = Some(board);
        Ok(())
    }

    fn boards(&self) -> MutexGuard<'_, Vec<Option<Board>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LocalCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalCluster")
            .field("config", &self.config)
            .field("controller", &self.controller_addr())
            .finish_non_exhaustive()
    }
}

/// Return the message of a panic.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(change: impl FnOnce(&mut LocalClusterConfig)) -> String {
        let mut config = LocalClusterConfig::new(4);
        change(&mut config);
        config.layout().expect_err("an impossible cluster").to_string()
    }

    #[test]
    fn impossible_config_error_names_value_and_choices() {
        assert_eq!(refusal(|config| config.ranks = 0), "invalid local cluster: 0 ranks; a job has at least one");
        assert_eq!(refusal(|config| config.levels = 3), "invalid local cluster: 3 levels; choose 1 or 2");
        let text = refusal(|config| config.levels = 2);
        assert_eq!(text, "invalid local cluster: 1 device(s); two levels take at least 2");
        let text = refusal(|config| config.transport = Transport::Rdma);
        assert_eq!(text, "invalid local cluster: transport rdma; a local cluster has auto, shm and udp");
    }

    #[test]
    fn two_levels_have_two_leaves_and_spare_spines() {
        let config = LocalClusterConfig { levels: 2, devices: 4, ..LocalClusterConfig::new(5) };
        let (fabric, names) = config.layout().expect("possible");
        assert_eq!(names, ["leaf0", "leaf1", "spine0", "spine1"]);
        assert_eq!(fabric.expect("a fabric").hosts().len(), 6);
    }
}
