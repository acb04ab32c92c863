//! Joining: the configuration of a rank, and how it becomes a member of its job and takes its place in a tree.

use super::core::{Connections, Core};
use super::environment;
use super::membership::MembershipChannel;
use super::notices::Notices;
use super::straggler::Straggler;
use super::tree::{Tree, attach_params};
use crate::controller::proto::{ClientRequest, DEFAULT_TENANT, JoinRequest, Terms, Transport, TreeMembership};
use crate::controller::{ClientError, Notice, Session, first_reachable};
use crate::exec::{JobToken, Mesh, MeshError};
use crate::schedule::Place;
use crate::select::{Algo, Declared, SelectionContext};
use crate::transport::memory::{AttachError, Remote, ZeroCopyDriver};
use crate::transport::packets::Endpoint;
use crate::transport::packets::TreeDriver;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::hosted::{HostedError, HostedPort};
use sumac_hal::ids::Rank;
use sumac_hal::port::{Addr, Port};
use sumac_hal::shm::{DEVICE_USER_VARIABLE, DeviceUsers};
use sumac_hal::udp::UdpConfig;
use thiserror::Error;

/// How a rank joins its job. Start from [`JoinConfig::new`] or [`JoinConfig::from_env`] and change fields.
#[derive(Debug, Clone)]
pub struct JoinConfig {
    /// The controller's address.
    pub controller: SocketAddr,
    /// Further addresses of the same controller, as a host name may have. Joining uses the first address, beginning with
    /// `controller`, that accepts a connection.
    pub controller_alternatives: Vec<SocketAddr>,
    /// The job's name. Ranks that give the same name to the same controller form a job.
    pub job: String,
    /// This rank, from 0 to `world - 1`.
    pub rank: u32,
    /// The number of ranks in the job.
    pub world: u32,
    /// The name of this rank's host in the fabric. `None`, on all ranks, assigns ranks to hosts in natural sort order
    /// of their names.
    pub host: Option<String>,
    /// The order in which contributions are combined, which determines the bits of floating-point results. Must be the
    /// same on all ranks.
    pub order: Order,
    /// The default algorithm of calls. Default [`Algo::Auto`], the cheapest path.
    pub algo: Algo,
    /// The default time limit of calls. Default 60 s.
    pub deadline: Duration,
    /// How long joining waits for the other ranks. Default 60 s.
    pub join_timeout: Duration,
    /// The local address to bind to; devices and other ranks must be able to reach it.
    pub bind: IpAddr,
    /// Options of the UDP data port.
    pub udp: UdpConfig,
    /// How to reach the leaf device.
    pub transport: Transport,
    /// The RDMA port for [`Transport::Verbs`] and [`Transport::Rdma`], as `DEVICE[:PORT[:GID-INDEX]]`. `None`: the
    /// first active one.
    pub verbs: Option<String>,
    /// Whether to recover from the loss of a tree: the ranks complete interrupted operations among themselves
    /// ([`Outcome::recovered`](super::Outcome::recovered)), and later ones use another tree or host collectives. Without
    /// recovery, the loss of the tree ends the communicator. Must be the same on all ranks. Default true.
    pub recover: bool,
    /// The tenant whose quota the job counts against. Must be the same on all ranks.
    pub tenant: String,
    /// How long joining waits in the controller's queue for a tree, if other jobs hold the resources. Then, or at once
    /// with the default of 0, the job starts with host collectives and migrates to a tree when its turn comes, provided
    /// that [`recover`](Self::recover) is on. Must be the same on all ranks.
    pub wait_for_tree: Duration,
    /// The default straggler policy of calls. Must be the same on all ranks.
    pub straggler: Straggler,
}

impl JoinConfig {
    /// Configure a rank with the defaults: bound to the controller's IP address, [`Order::Arrival`], [`Algo::Auto`], a
    /// time limit of 60 s for calls and for joining, and recovery.
    pub fn new(controller: SocketAddr, job: impl Into<String>, rank: u32, world: u32) -> Self {
        Self {
            controller,
            controller_alternatives: Vec::new(),
            job: job.into(),
            rank,
            world,
            host: None,
            order: Order::Arrival,
            algo: Algo::Auto,
            deadline: Duration::from_secs(60),
            join_timeout: Duration::from_secs(60),
            bind: controller.ip(),
            udp: UdpConfig::default(),
            transport: Transport::Auto,
            verbs: None,
            recover: true,
            tenant: DEFAULT_TENANT.to_owned(),
            wait_for_tree: Duration::ZERO,
            straggler: Straggler::Wait,
        }
    }

    /// Describe a rank by environment variables. Variables that are not set leave the defaults of [`JoinConfig::new`].
    ///
    /// | field | variable | value |
    /// |---|---|---|
    /// | `rank` | `RANK` | required |
    /// | `world` | `WORLD_SIZE` | required |
    /// | `controller` | `SUMAC_CONTROLLER` | `HOST:PORT`; all addresses of a host name are tried |
    /// | | `MASTER_ADDR`, `SUMAC_PORT` | host and port if that is not set; default 127.0.0.1 and [`DEFAULT_PORT`] |
    /// | `job` | `SUMAC_JOB` | default `default` |
    /// | `host` | `SUMAC_HOST` | the host's name in the fabric; set it on all ranks or on none |
    /// | `order` | `SUMAC_ORDER` | `arrival`, `fold` or `pairwise` |
    /// | `algo` | `SUMAC_ALGO` | the name of an [`Algo`], as `auto`, `tree` or `ring` |
    /// | `deadline` | `SUMAC_DEADLINE` | seconds |
    /// | `join_timeout` | `SUMAC_JOIN_TIMEOUT` | seconds |
    /// | `bind` | `SUMAC_BIND` | an IP address |
    /// | `udp` | `SUMAC_UDP_MAX_PACKET`, `SUMAC_UDP_RECEIVE_BUFFER`, `SUMAC_UDP_SEND_BUFFER` | bytes |
    /// | | `SUMAC_UDP_GSO`, `SUMAC_UDP_GRO` | `auto` or `off` |
    /// | | `SUMAC_UDP_PEER`, `SUMAC_UDP_SPIN_US` | `IP:PORT`; microseconds |
    /// | `transport` | `SUMAC_TRANSPORT` | `auto`, `udp`, `shm`, `verbs` or `rdma` |
    /// | `verbs` | `SUMAC_VERBS` | `DEVICE[:PORT[:GID-INDEX]]` |
    /// | `recover` | `SUMAC_RECOVER` | `1` or `0` |
    /// | `tenant` | `SUMAC_TENANT` | default `default` |
    /// | `wait_for_tree` | `SUMAC_WAIT_FOR_TREE` | seconds |
    /// | `straggler` | `SUMAC_STRAGGLER` | `wait`, `deadline:SECONDS` or `partial:SECONDS` |
    ///
    /// Seconds may have decimals. [`UdpConfig::loopback_at`], which only emulated machines need, has no variable.
    ///
    /// The first call in a process logs a warning for each variable that begins with `SUMAC_` and is unknown or
    /// deprecated ([`environment::check`]).
    ///
    /// # Errors
    /// [`JoinError::Environment`] names the variable that is missing or invalid.
    pub fn from_env() -> Result<Self, JoinError> {
        environment::warn_once();
        environment::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Choose among the controller's addresses. A rank that is bound to the first one is then bound to the chosen one,
    /// which may be of the other family.
    fn choose_controller(&mut self) {
        let chosen = first_reachable(self.controller, &self.controller_alternatives);
        if self.bind == self.controller.ip() {
            self.bind = chosen.ip();
        }
        self.controller = chosen;
    }

    /// Open the data port towards the leaf device.
    fn open_port(&self) -> Result<HostedPort, HostedError> {
        let verbs = (self.transport == Transport::Verbs).then(|| self.verbs.as_deref().unwrap_or("auto"));
        HostedPort::open(SocketAddr::new(self.bind, 0), &self.udp, verbs)
    }
}

/// The default TCP port of controllers.
pub const DEFAULT_PORT: u16 = 7847;

/// Why a rank could not join its job.
#[derive(Debug, Error)]
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
    /// The controller cannot be reached, or refused the rank.
    #[error(transparent)]
    Controller(#[from] ClientError),
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
    /// The controller's reply is invalid.
    #[error("invalid reply from the controller: {0}")]
    Membership(String),
}

/// Join a job: connect to the controller, the other ranks and the leaf device.
pub(super) fn join(mut config: JoinConfig) -> Result<Core, JoinError> {
    config.choose_controller();
    let (listener, mesh_addr) = listen(config.bind)?;
    let (recovery_listener, recovery_addr) = listen(config.bind)?;
    let port = config.open_port()?;
    let (rank, world) = (Rank(config.rank), config.world);
    let device_users =
        DeviceUsers::from_env().map_err(|error| environment::invalid(DEVICE_USER_VARIABLE, error.to_string()))?;
    let request = JoinRequest {
        job: config.job.clone(),
        rank,
        world,
        host: config.host.clone(),
        order: config.order,
        mesh_addr,
        recovery_addr,
        max_packet_len_bytes: u32::try_from(port.capabilities().max_packet_len_bytes).unwrap_or(u32::MAX),
        transport: config.transport,
        machine: config.transport.may_share_memory().then(sumac_hal::shm::machine).flatten(),
        device_users,
        terms: Terms {
            tenant: config.tenant.clone(),
            wait_ms: u32::try_from(config.wait_for_tree.as_millis()).unwrap_or(u32::MAX),
            accepts_migration: config.recover,
        },
    };
    let notices = Arc::new(super::notices::Notices::new(port.waker()));
    let watch = Arc::clone(&notices);
    let may_recover = config.recover;
    let on_notice = move |notice| match notice {
        Notice::Offer { view } if may_recover => {
            watch.migration.offer(view).map(|at| ClientRequest::Pause { view, at })
        }
        other => {
            match other {
                Notice::RankLost(rank) => watch.rank_lost(rank),
                Notice::Aborted(reason) => watch.job_aborted(reason),
                Notice::ControllerLost => watch.controller_lost(),
                Notice::ControllerBack { view } => watch.controller_back(view),
                Notice::ResumeRefused(refusal) => watch.rejoin_refused(refusal.to_string()),
                Notice::TreeLost { view } => watch.tree_lost(view),
                Notice::MoveAt { view, call } => watch.migration.move_at(view, call),
                Notice::OfferWithdrawn => watch.migration.withdraw(),
                Notice::Queued(place) => watch.set_queue_position(place),
                // Without a reply from this rank, no rank migrates.
                Notice::Offer { .. } => {}
            }
            None
        }
    };
    let (session, membership) = Session::join(config.controller, request, config.join_timeout, on_notice)?;
    notices.init_queue_position(membership.queue);
    let place = Place::new(rank, world).map_err(|error| JoinError::Membership(error.to_string()))?;
    let ranks_here = membership.mesh.iter().filter(|addr| addr.ip() == mesh_addr.ip()).count();
    let token = JobToken(membership.mesh_token);
    let connections = Connections::new(Mesh::new(place, token, listener, membership.mesh)?);
    let channel = (may_recover && world > 1).then(|| {
        let caller = Arc::clone(&notices);
        let on_view_change = move |epoch| caller.view_change_requested(epoch);
        MembershipChannel::start((rank, token), recovery_listener, membership.recovery_mesh, on_view_change)
    });
    let channel = channel.transpose().map_err(|source| JoinError::Listen { addr: config.bind, source })?;
    channel.iter().for_each(|channel| notices.set_inbox(Arc::clone(channel.inbox())));
    let selection = SelectionContext {
        ranks: world,
        order: config.order,
        tree: membership.tree.as_ref().map(|tree| tree.facts).map_err(Clone::clone),
        declared: Declared::new(membership.expression, world, config.order)
            .map_err(|error| JoinError::Membership(error.to_string()))?,
        table: membership.table,
    };
    let table_version = selection.table.version;
    let tree = match membership.tree {
        Ok(tree) => {
            if tree.parents.is_empty() || tree.window_max == 0 {
                return Err(JoinError::Membership(format!("a tree with leaf {:?} but no address of it", tree.leaf)));
            }
            config.host = config.host.or_else(|| tree.host.clone());
            Some(attach_to_tree(&config, &tree, ranks_here, table_version, (port, &notices))?)
        }
        Err(why) => {
            if world > 1 {
                let queue = membership.queue.map(|place| place.to_string());
                tracing::warn!(job = config.job, %rank, %why, queue, "no tree: using host collectives");
            }
            None
        }
    };
    Ok(Core::new((config, place, ranks_here), selection, tree, (connections, channel, token), session, notices))
}

/// Listen for the connections of other ranks.
pub(super) fn listen(addr: IpAddr) -> Result<(TcpListener, SocketAddr), JoinError> {
    let bound = TcpListener::bind((addr, 0)).and_then(|listener| Ok((listener.local_addr()?, listener)));
    bound.map(|(addr, listener)| (listener, addr)).map_err(|source| JoinError::Listen { addr, source })
}

/// Attach to the leaf device of a tree.
fn attach_to_tree(
    config: &JoinConfig,
    tree: &TreeMembership,
    ranks_here: usize,
    table_version: u32,
    (port, notices): (HostedPort, &Notices),
) -> Result<Tree, JoinError> {
    let Some(mut attach_params) = attach_params(tree, (Rank(config.rank), config.world), ranks_here, table_version)
    else {
        return Ok(packet_tree(config, tree, port, table_version));
    };
    if config.transport == Transport::Rdma {
        let addr = tree.attach.as_ref().and_then(|bus| bus.remote);
        let addr = addr.ok_or_else(|| JoinError::Membership(format!("device {:?} does not accept RDMA", tree.leaf)))?;
        let link = config.verbs.clone().unwrap_or_else(|| "auto".into());
        attach_params.remote = Some(Remote { addr, link, prefer: config.bind });
    }
    let driver = ZeroCopyDriver::attach(&attach_params);
    let driver = driver.map_err(|reason| JoinError::Attach { device: attach_params.device, reason })?;
    notices.set_memory_waker(driver.waker());
    Ok(Tree::ZeroCopy(Box::new(driver)))
}

/// Attach to a later tree of the communicator.
pub(super) fn attach_to_new_tree(
    config: &JoinConfig,
    ranks_here: usize,
    tree: TreeMembership,
    table_version: u32,
    notices: &Notices,
) -> Result<Tree, JoinError> {
    if tree.parents.is_empty() || tree.window_max == 0 {
        return Err(JoinError::Membership(format!("a tree with leaf {:?} but no address of it", tree.leaf)));
    }
    let port = config.open_port()?;
    notices.set_wakers(Some(port.waker()), None);
    attach_to_tree(config, &tree, ranks_here, table_version, (port, notices))
}

/// Make an endpoint on the data port.
fn packet_tree(config: &JoinConfig, tree: &TreeMembership, mut port: HostedPort, table_version: u32) -> Tree {
    let (rank, world) = (Rank(config.rank), config.world);
    if let Some(why) = &tree.packets_reason {
        let device = &tree.leaf;
        tracing::info!(job = config.job, %rank, device, why, "contributes by packets: zero-copy is not available");
    }
    // Listen before announcing it: contributions carry the key.
    let shared_key =
        tree.shared.filter(|shared| join_shared(&mut port, shared.addr, tree.parents.len())).map(|shared| shared.key);
    if tree.shared.is_some() && shared_key.is_none() {
        tracing::info!(job = config.job, %rank, "cannot join the leaf's multicast address: results arrive by unicast");
    }
    let endpoint = tree.endpoint((rank, world), shared_key, table_version);
    Tree::Packets(Box::new(TreeDriver::new(Endpoint::new(endpoint), port)))
}

/// Join the shared (multicast) address of each of the leaf's shards, the first of which is `first`. Joins all, or none
/// and returns false.
fn join_shared(port: &mut HostedPort, first: Addr, shards: usize) -> bool {
    let shards = 0..u16::try_from(shards).unwrap_or(u16::MAX);
    let joined = shards.clone().take_while(|&shard| first.offset_by(shard).is_some_and(|addr| port.join(addr))).count();
    if joined < shards.len() {
        shards.take(joined).filter_map(|shard| first.offset_by(shard)).for_each(|addr| port.leave(addr));
        return false;
    }
    true
}
