//! The configuration of a rank, and why it could not join its job.

use super::options::{Progress, Straggler};
use crate::config_file::ConfigFileError;
use crate::controller::ControllerError;
use crate::controller::proto::{DEFAULT_TENANT, RailGrant, RailJobs, Transport};
use crate::controller::{ClientError, ControllerAddr, TREES_MAX, first_reachable};
use crate::exec::{MeshError, SharedMemory};
use crate::local_address::{self, InterfaceFilter, LocalAddressError};
use crate::memory_kind::MemoryKind;
use crate::schedule::Shape;
use crate::select::Algo;
use crate::transport::local::{HostDevices, default_host_devices};
use crate::transport::memory::AttachError;
use crate::wait_policy::WaitPolicy;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ctrl::secure::Key;
use sumac_hal::hosted::{HostedError, HostedPort};
use sumac_hal::udp::UdpConfig;
use thiserror::Error;

/// How a rank joins its job. Start from [`JoinConfig::new`] or [`JoinConfig::from_env`] and change fields.
#[derive(Debug, Clone)]
pub struct JoinConfig {
    /// The controller's address.
    pub controller: SocketAddr,
    /// Further addresses of the same controller, as a host name may have, or of the other one of a pair. A rank joins
    /// the active controller, and when it is lost the one that takes over.
    pub controller_alternatives: Vec<SocketAddr>,
    /// Whether rank 0 runs the controller, at `controller` or the first alternative that is an address of its host. For
    /// jobs where none is running. Without a [`key`](Self::key), it listens on loopback only; with one, it accepts that
    /// key alone, and so no devices. Must be the same on all ranks. Default false.
    pub embedded_controller: bool,
    /// The key to connect to the controller with: one of the job's tenant. `None` if the controller uses none.
    pub key: Option<Key>,
    /// The job's name. Ranks that give the same name to the same controller form a job.
    pub job: String,
    /// This rank, from 0 to `world - 1`.
    pub rank: u32,
    /// The number of ranks in the job.
    pub world: u32,
    /// The name of this rank's host in the fabric, or of its server, which stands for its first adapter. `None`, on all
    /// ranks, assigns ranks to hosts in natural sort order of their names.
    pub host: Option<String>,
    /// The order in which contributions are combined, which determines the bits of floating-point results. Must be the
    /// same on all ranks.
    pub order: Order,
    /// The default algorithm of calls. Default [`Algo::Auto`], the cheapest path.
    pub algo: Algo,
    /// How the job's ranks lie, for algorithms that use it; it must fit `world`. A communicator that is split or shrunk
    /// from this one has it only if it has as many ranks. `None`, the default: servers, if each machine has equally
    /// many consecutive ranks, otherwise as their hosts lie on the controller's fabric ([`topo::Groups`]), or a line.
    /// Must be the same on all ranks.
    ///
    /// [`topo::Groups`]: crate::topo::Groups
    pub shape: Option<Shape>,
    /// The default time limit of calls. Default 60 s.
    pub deadline: Duration,
    /// How long joining waits for the other ranks. Default 60 s.
    pub join_timeout: Duration,
    /// The address of this host that devices and other ranks reach. Default `0.0.0.0`, which stands for the one that
    /// routes to the controller.
    pub bind: IpAddr,
    /// The addresses of this server's second and further adapters, in the fabric's order; `bind` is that of the first.
    /// Where [`host`](Self::host) is the server or its first adapter, the controller may plan trees over those adapters
    /// for which all ranks have addresses: each takes its packets through the address of its adapter. Connections
    /// between ranks use `bind`. At most
    /// [`TREES_MAX`](crate::controller::TREES_MAX) adapters are used, and one with RDMA. Default: none.
    pub rails: Vec<IpAddr>,
    /// The address of the port to the leaf device, if that is not `bind`. Default `None`.
    pub data_bind: Option<IpAddr>,
    /// The interfaces from which `bind` may be taken if it is not given. If it is that of the interface listed first,
    /// the other ones listed are those of `rails`, unless these are given. Default: all.
    pub interfaces: Option<InterfaceFilter>,
    /// Options of the UDP data port ([`sumac::UdpConfig`](crate::UdpConfig)). Its traffic class is also that of packets
    /// over RDMA and of all TCP connections.
    ///
    /// ```
    /// # let controller = std::net::SocketAddr::from(([127, 0, 0, 1], 7847));
    /// let mut config = sumac::JoinConfig::new(controller, "job", 0, 2);
    /// config.udp = sumac::UdpConfig { gso: sumac::Offload::Off, ..sumac::UdpConfig::default() };
    /// ```
    pub udp: UdpConfig,
    /// How to reach the leaf device.
    pub transport: Transport,
    /// The RDMA port for [`Transport::Verbs`] and [`Transport::Rdma`], as `DEVICE[:PORT[:GID-INDEX]]`. `None`: the
    /// first active one.
    pub verbs: Option<String>,
    /// Whether to recover from the loss of a tree: the ranks complete interrupted operations among themselves
    /// ([`Outcome::recovered`](crate::Outcome::recovered)), and later ones use another tree or host collectives.
    /// Without recovery, the loss of the tree ends the communicator. Must be the same on all ranks. Default true.
    pub recover: bool,
    /// The tenant whose quota the job counts against. Must be the same on all ranks.
    pub tenant: String,
    /// How long joining waits in the controller's queue for a tree, if other jobs hold the resources. Then, or at once
    /// with the default of 0, the job starts with host collectives and migrates to a tree when its turn comes, provided
    /// that [`recover`](Self::recover) is on. Must be the same on all ranks.
    pub wait_for_tree: Duration,
    /// The default straggler policy of calls. Must be the same on all ranks.
    pub straggler: Straggler,
    /// Whether ranks that share a host combine in its memory first, where their leaf device is elsewhere: one
    /// contribution a host goes up. Takes effect on hosts of which all ranks have it, and have
    /// [`host_devices`](Self::host_devices). Must be the same on all ranks. Default true.
    pub hierarchical: bool,
    /// What memory most buffers of calls are in, for [`Algo::Auto`]. Must be the same on all ranks: they could take
    /// different algorithms otherwise, and end with a mismatch. Default [`MemoryKind::Registered`]: taking plain
    /// memory for registered costs little, and the other way round up to half of the speed.
    pub memory: MemoryKind,
    /// How the rank waits for other processes of its machine. Default [`WaitPolicy::Auto`].
    pub wait_policy: WaitPolicy,
    /// The maximum number of trees to spread large operations over; at most
    /// [`TREES_MAX`](crate::controller::TREES_MAX).
    /// Several trees raise the rate where the ports of devices limit it, as where devices are DPUs. With a fabric, the
    /// controller plans only as many as are faster; without one, as many as there are devices. 0 means as many as are
    /// faster with a fabric, and one without. [`Communicator::trees`](crate::Communicator::trees) tells how many
    /// there are. Must be the same on all ranks. Default 0.
    pub trees: u8,
    /// Whether ranks on servers also join their rails: those with the same place on all servers, with a tree of their
    /// own, for [`Algo::Hybrid`]. They do, too, if [`algo`](Self::algo) is that. They need a [`shape`](Self::shape)
    /// with at least two servers of at least two; [`Communicator::explain`](crate::Communicator::explain) tells why
    /// there are no rails. Each rank names its own adapter in [`host`](Self::host). Must be the same on all ranks.
    /// Default false.
    pub hybrid: bool,
    /// Whether the leaders of servers, the first rank of each, also join a tree of their own, for
    /// [`Algo::Rab`]. They do, too, if [`algo`](Self::algo) is that, and with [`hybrid`](Self::hybrid), whose first
    /// rail is theirs. Shape and hosts are as for [`hybrid`](Self::hybrid). Must be the same on all ranks. Default
    /// false.
    pub rab: bool,
    /// Who drives started operations and messages. Ranks may differ. `None`, the default: callers do
    /// ([`Progress::Caller`]). The libraries for C and Python use [`Progress::Thread`] then.
    pub progress: Option<Progress>,
    /// What starts the device on which these ranks combine, should this rank be the lowest of its host. Default: an
    /// emulated device in threads of this process; `None` without the feature `host-devices`.
    pub host_devices: Option<Arc<dyn HostDevices>>,
}

impl JoinConfig {
    /// Return the controller's address with the key to connect with, for queries beside the job.
    pub fn controller_addr(&self) -> ControllerAddr {
        ControllerAddr {
            addr: self.controller,
            alternatives: self.controller_alternatives.clone(),
            key: self.key.clone(),
            traffic_class: self.udp.traffic_class,
        }
    }

    /// Configure a rank with the defaults: bound to the address that routes to the controller, [`Order::Arrival`],
    /// [`Algo::Auto`], a time limit of 60 s for calls and for joining, and recovery.
    pub fn new(controller: SocketAddr, job: impl Into<String>, rank: u32, world: u32) -> Self {
        Self {
            controller,
            controller_alternatives: Vec::new(),
            embedded_controller: false,
            key: None,
            job: job.into(),
            rank,
            world,
            host: None,
            order: Order::Arrival,
            algo: Algo::Auto,
            shape: None,
            deadline: Duration::from_secs(60),
            join_timeout: Duration::from_secs(60),
            bind: Ipv4Addr::UNSPECIFIED.into(),
            rails: Vec::new(),
            data_bind: None,
            interfaces: None,
            udp: UdpConfig::default(),
            transport: Transport::Auto,
            verbs: None,
            recover: true,
            tenant: DEFAULT_TENANT.to_owned(),
            wait_for_tree: Duration::ZERO,
            straggler: Straggler::Wait,
            hierarchical: true,
            memory: MemoryKind::Registered,
            wait_policy: WaitPolicy::Auto,
            trees: 0,
            hybrid: false,
            rab: false,
            progress: None,
            host_devices: default_host_devices(),
        }
    }

    /// Return which rails ranks join, too.
    pub(super) fn rail_jobs(&self) -> RailJobs {
        match self.algo {
            _ if self.hybrid => RailJobs::All,
            Algo::Hybrid => RailJobs::All,
            _ if self.rab => RailJobs::Leaders,
            Algo::Rab => RailJobs::Leaders,
            _ => RailJobs::None,
        }
    }

    /// Become another rank of another number of ranks. A shape is that of all ranks together: others have none.
    pub(crate) fn become_rank(&mut self, rank: u32, world: u32) {
        if world != self.world {
            self.shape = None;
        }
        (self.rank, self.world) = (rank, world);
    }

    /// Return whether connections to ranks of this machine go through shared memory.
    pub(super) const fn shared_memory(&self) -> SharedMemory {
        if matches!(self.transport, Transport::Udp) { SharedMemory::Avoid } else { SharedMemory::Use }
    }

    /// Choose among the controller's addresses, and the address to bind to.
    pub(super) fn choose_addresses(&mut self) -> Result<(), LocalAddressError> {
        let reachable = first_reachable(self.controller, &self.controller_alternatives);
        if let Some(other) = self.controller_alternatives.iter_mut().find(|addr| **addr == reachable) {
            std::mem::swap(other, &mut self.controller);
        }
        let is_given = !self.bind.is_unspecified();
        self.bind = local_address::choose(self.controller, self.bind, self.interfaces.as_ref())?;
        if let Some(filter) = self.interfaces.as_ref().filter(|_| !is_given && self.rails.is_empty()) {
            self.rails = local_address::choose_rails(self.controller, self.bind, filter)?;
        }
        for addr in self.rails.iter_mut().chain(&mut self.data_bind) {
            *addr = local_address::choose(self.controller, *addr, None)?;
        }
        Ok(())
    }

    /// For how many adapters of its server this rank has addresses.
    pub(super) fn rails_len(&self) -> u8 {
        // RDMA ports are not chosen by address.
        let rails = if matches!(self.transport, Transport::Auto | Transport::Udp) { self.rails.len() } else { 0 };
        u8::try_from(1 + rails).unwrap_or(u8::MAX).min(TREES_MAX)
    }

    /// Enter the tree of a stripe where the controller has planned it. `own`: where the job's own tree is entered.
    pub(super) fn enter_at(&mut self, grant: &RailGrant, own: &RailGrant) -> Result<(), String> {
        self.host = Some(grant.adapter.clone());
        if grant == own {
            return Ok(());
        }
        let addr = usize::from(grant.index).checked_sub(1).and_then(|further| self.rails.get(further));
        self.data_bind = Some(*addr.ok_or_else(|| {
            let (RailGrant { adapter, index }, known) = (grant, 1 + self.rails.len());
            format!(
                "it was planned at adapter {adapter:?}, number {index} of its server, and this rank has addresses for \
                 {known}; list one for each adapter in SUMAC_BIND"
            )
        })?);
        Ok(())
    }

    /// Open the data port towards the leaf device.
    pub(super) fn open_port(&self) -> Result<HostedPort, HostedError> {
        let verbs = (self.transport == Transport::Verbs).then(|| self.verbs.as_deref().unwrap_or("auto"));
        let addr = SocketAddr::new(self.data_bind.unwrap_or(self.bind), 0);
        HostedPort::open_beside(addr, &self.udp, verbs, self.rank)
    }
}

/// The default TCP port of controllers.
pub const DEFAULT_PORT: u16 = 7847;

/// Why a rank could not join its job.
#[derive(Error)]
#[non_exhaustive]
pub enum JoinError {
    /// An environment variable is missing or invalid.
    #[error("environment variable {name}: {why}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The configuration file that `SUMAC_CONFIG` names is invalid.
    #[error(transparent)]
    ConfigFile(#[from] ConfigFileError),
    /// This host has no address to bind to.
    #[error(transparent)]
    Address(#[from] LocalAddressError),
    /// The controller cannot be reached, or refused the rank.
    #[error(transparent)]
    Controller(#[from] ClientError),
    /// Rank 0 cannot run the job's controller.
    #[error("cannot start the job's controller: {0}")]
    EmbeddedController(#[source] ControllerError),
    /// The data port could not be opened.
    #[error("data port: {0}")]
    Port(#[from] HostedError),
    /// The port for connections between ranks could not be opened.
    #[error("cannot listen for other ranks on {addr}: {source}")]
    Listen {
        /// The address.
        addr: IpAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// The connections between ranks failed.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// Attaching to the leaf device for zero-copy operations failed.
    #[error("cannot attach to device {device}: {reason}; join with `transport: udp` to use packets instead")]
    Attach {
        /// The device.
        device: String,
        /// What went wrong.
        reason: AttachError,
    },
    /// The progress thread could not be started.
    #[error("cannot start the progress thread: {source}; join with `Progress::Caller`")]
    ProgressThread {
        /// The system's error.
        source: std::io::Error,
    },
    /// The controller's reply is invalid.
    #[error("invalid reply from the controller: {0}")]
    Membership(String),
}

super::error::creation_error!(JoinError: Environment ConfigFile Address Controller EmbeddedController Port Listen Mesh Attach ProgressThread Membership);

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> JoinConfig {
        let mut config = JoinConfig::new(([127, 0, 0, 1], 7847).into(), "job", 0, 2);
        config.rails = vec![[10, 1, 0, 7].into(), [10, 2, 0, 7].into()];
        config
    }

    fn grant(index: u16) -> RailGrant {
        RailGrant { adapter: format!("n0 rail{index}"), index }
    }

    #[test]
    fn stripe_enters_at_the_address_of_its_adapter() {
        for (index, addr) in [(0, None), (1, Some([10, 1, 0, 7].into())), (2, Some([10, 2, 0, 7].into()))] {
            let mut config = config();
            config.enter_at(&grant(index), &grant(0)).expect("it has an address");
            assert_eq!((config.data_bind, config.host), (addr, Some(format!("n0 rail{index}"))));
        }
    }

    #[test]
    fn adapter_without_an_address_is_refused_by_name_and_number() {
        for (index, own) in [(3, 0), (u16::MAX, 0), (0, 1)] {
            let why = config().enter_at(&grant(index), &grant(own)).expect_err("no address");
            assert!(why.contains(&format!("number {index} of its server")) && why.contains("for 3;"), "{why}");
        }
    }

    #[test]
    fn shape_is_kept_by_as_many_ranks_and_by_no_others() {
        let mut config = JoinConfig { shape: "1x2".parse().ok(), ..config() };
        config.become_rank(1, 2);
        assert_eq!((config.rank, config.shape), (1, "1x2".parse().ok()));
        config.become_rank(1, 4);
        assert_eq!((config.world, config.shape), (4, None));
    }

    #[test]
    fn rails_are_counted_up_to_the_limit_and_not_with_rdma() {
        let mut many = config();
        assert_eq!(many.rails_len(), 3);
        many.rails = vec![many.bind; 1000];
        assert_eq!(many.rails_len(), TREES_MAX);
        many.transport = Transport::Verbs;
        assert_eq!(many.rails_len(), 1);
    }
}
