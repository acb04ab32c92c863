//! Joining: how a rank becomes a member of its job and takes its place in a tree.

use super::compare::Comparison;
use super::config::{JoinConfig, JoinError};
use super::connections::{Connections, HostPath};
use super::core::{Core, Members, NO_LEADERS_ASKED, NO_RAILS_ASKED};
use super::data_path::DataPath;
use super::embedded;
use super::membership::MembershipChannel;
use super::notices::Notices;
use super::operations::Operations;
use super::selection::Selection;
use super::tree::{Tree, attach_params};
use super::tree_end::TreeEnd;
use super::watch::Watch;
use crate::controller::proto::{
    ClientRequest, HostLead, JoinRequest, RailOf, StripeOf, Striping, Terms, Transport, TreeMembership,
};
use crate::controller::{Notice, Session, WhileJoining};
use crate::exec::Mesh;
use crate::schedule::Place;
use crate::select::{Declared, SelectionContext, ranks_per_host};
use crate::transport::local::{HostDevice, HostDeviceConfig};
use crate::transport::memory::{Remote, ZeroCopyDriver};
use crate::transport::packets::Endpoint;
use crate::transport::packets::{MAX_OPS, TreeDriver};
use crate::transport::path::PathToProbe;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::MAX_NAME_LEN;
use sumac_hal::hosted::HostedPort;
use sumac_hal::ids::Rank;
use sumac_hal::port::{Addr, MulticastPort, Port};
use sumac_hal::shm::{DEVICE_USER_VARIABLE, DeviceUsers};

/// What a job is of another one, whose ranks join it.
#[derive(Debug)]
pub(crate) enum PartOf {
    /// A further tree.
    Stripe(StripeOf),
    /// A rail.
    Rail(RailOf),
}

/// Join a job, as part of another one if `part` says so: connect to the controller, the other ranks and the
/// leaf device. Returns also the trees that the controller has planned.
pub(crate) fn join_as(mut config: JoinConfig, part: Option<PartOf>) -> Result<(Core, Striping), JoinError> {
    let embedded = embedded::prepare(&mut config)?;
    config.choose_addresses()?;
    let (listener, mesh_addr) = listen(&config)?;
    let (recovery_listener, recovery_addr) = listen(&config)?;
    let mut port = config.open_port()?;
    let (rank, world) = (Rank(config.rank), config.world);
    let mut request = join_request(&config, (mesh_addr, recovery_addr), &port)?;
    match part {
        Some(PartOf::Stripe(of)) => request.terms.stripe = Some(of),
        Some(PartOf::Rail(of)) => request.terms.rail = Some(of),
        None => {}
    }
    let notices = Arc::new(super::notices::Notices::new(port.waker()));
    let watch = Arc::clone(&notices);
    let may_recover = config.recover;
    let on_notice = move |notice| process_notice(&watch, notice, may_recover);
    let controller = config.controller_addr();
    let mut tasks = Tasks { config: &config, port: &mut port, host_device: None };
    let joining = (request, Vec::new());
    let (session, membership) = Session::join_with(controller, joining, config.join_timeout, &mut tasks, on_notice)?;
    let host_device = tasks.host_device;
    notices.init_queue_position(membership.queue);
    let place = Place::new(rank, world).map_err(|error| JoinError::Membership(error.to_string()))?;
    let ranks_here = membership.mesh.iter().filter(|addr| addr.ip() == mesh_addr.ip()).count();
    let ranks_per_host = ranks_per_host(membership.mesh.iter().map(SocketAddr::ip));
    let secret = membership.secret;
    let memory = config.shared_memory();
    let mesh = Mesh::new(place, secret.clone(), listener, membership.mesh, memory)?;
    let connections = Connections::new(mesh.with_wait_policy(config.wait_policy));
    let channel = (may_recover && world > 1).then(|| {
        let caller = Arc::clone(&notices);
        let on_view_change = move |epoch| caller.view_change_requested(epoch);
        let secret = secret.clone();
        MembershipChannel::start((rank, secret), recovery_listener, membership.recovery_mesh, on_view_change)
    });
    let channel = channel.transpose().map_err(|source| JoinError::Listen { addr: config.bind, source })?;
    channel.iter().for_each(|channel| notices.set_inbox(Arc::clone(channel.inbox())));
    let selection = SelectionContext {
        ranks: world,
        ranks_per_host,
        shape: membership.shape,
        order: config.order,
        tree: membership.tree.as_ref().map(|tree| tree.facts).map_err(Clone::clone),
        declared: Declared::new(membership.expression, world, config.order, membership.shape)
            .map_err(|error| JoinError::Membership(error.to_string()))?,
        rails: Err(NO_RAILS_ASKED.into()),
        leaders: Err(NO_LEADERS_ASKED.into()),
        table: membership.table,
        memory: config.memory,
    };
    let table_version = selection.table.version;
    let tree = match membership.tree {
        Ok(tree) => {
            config.host = config.host.or_else(|| tree.host.clone());
            Some(attach_to_tree(&config, &tree, ranks_here, table_version, (port, &notices))?)
        }
        Err(why) => {
            if world > 1 {
                let queue = membership.queue.map(|place| place.to_string());
                crate::log::warn!(job = config.job, %rank, %why, queue, "no tree: using host collectives");
            }
            None
        }
    };
    let data = DataPath {
        comparison: Comparison::default(),
        config,
        place,
        tree: TreeEnd::new(tree),
        host: HostPath::new(connections),
        operations: Operations::new(MAX_OPS),
        selection: Selection::new(selection),
        watch: Watch::new(notices),
        inbox: channel.as_ref().map(|channel| Arc::clone(channel.inbox())),
        progress: None,
        ended: None,
    };
    let members = Members { session: Some(session), channel, secret, ranks_here, embedded, host_device };
    Ok((Core::new(data, members), membership.striping))
}

/// What the controller may ask of this rank while it joins.
struct Tasks<'j> {
    config: &'j JoinConfig,
    port: &'j mut HostedPort,
    host_device: Option<HostDevice>,
}

impl WhileJoining for Tasks<'_> {
    fn lead(&mut self, host: HostLead) -> Result<(), String> {
        // One that was started for another controller goes first.
        self.host_device = None;
        self.host_device = Some(start_host_device(self.config, host)?);
        Ok(())
    }

    fn probe(&mut self, path: &PathToProbe) -> Option<u32> {
        path.probe(self.port, PROBE_LIMIT)
    }
}

/// How long this rank probes the path to its leaf. The controller waits longer.
pub(super) const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// Describe this rank to the controller.
fn join_request(
    config: &JoinConfig,
    (mesh_addr, recovery_addr): (SocketAddr, SocketAddr),
    port: &HostedPort,
) -> Result<JoinRequest, JoinError> {
    let device_users = DeviceUsers::from_env()
        .map_err(|error| JoinError::Environment { name: DEVICE_USER_VARIABLE, why: error.to_string() })?;
    Ok(JoinRequest {
        job: config.job.clone(),
        rank: Rank(config.rank),
        world: config.world,
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
            hierarchical: config.hierarchical && config.host_devices.is_some(),
            trees: config.trees,
            rails: config.rails_len(),
            stripe: None,
            rail_jobs: config.rail_jobs(),
            rail: None,
            shape: config.shape,
        },
    })
}

/// Start the device of this host's ranks, as the controller asks.
fn start_host_device(config: &JoinConfig, host: HostLead) -> Result<HostDevice, String> {
    let starter = config.host_devices.as_ref().ok_or("this program starts no devices")?;
    let ticket = host.ticket(&config.job, Rank(config.rank));
    let ticket = ticket.ok_or_else(|| format!("the job's name is longer than {MAX_NAME_LEN}"))?;
    let controllers = config.controller_addr().all().collect();
    let device = HostDeviceConfig {
        key: config.key.clone(),
        udp: config.udp,
        verbs: host.over_verbs.then(|| config.verbs.clone().unwrap_or_else(|| "auto".into())),
        ..HostDeviceConfig::new(host.device, ticket, controllers, config.bind)
    };
    starter.start(device).map_err(|error| error.to_string())
}

/// Process a notice of the controller. Returns the reply, if there is one.
fn process_notice(notices: &Notices, notice: Notice, may_recover: bool) -> Option<ClientRequest> {
    match notice {
        Notice::Offer { view } if may_recover => {
            let at = notices.migration.update(|migration, begun| migration.offer(view, begun));
            return at.map(|at| ClientRequest::Pause { view, at });
        }
        // Without a reply from this rank, no rank migrates.
        Notice::Offer { .. } => {}
        Notice::RankLost(rank) => notices.rank_lost(rank),
        Notice::Aborted(reason) => notices.job_aborted(reason),
        Notice::ControllerLost => notices.controller_lost(),
        Notice::ControllerBack { view } => notices.controller_back(view),
        Notice::ResumeRefused(refusal) => notices.rejoin_refused(refusal.to_string()),
        Notice::TreeLost { view } => notices.tree_lost(view),
        Notice::MoveAt { view, call } => notices.migration.update(|migration, _| migration.move_at(view, call)),
        Notice::OfferWithdrawn => notices.migration.update(|migration, _| migration.withdraw()),
        Notice::Queued(place) => notices.set_queue_position(place),
    }
    None
}

/// Listen for the connections of other ranks. Those that this rank dials have the listener's traffic class, too.
pub(super) fn listen(config: &JoinConfig) -> Result<(TcpListener, SocketAddr), JoinError> {
    let addr = config.bind;
    let bound = TcpListener::bind((addr, 0)).and_then(|listener| {
        config.udp.traffic_class.apply(&listener)?;
        Ok((listener.local_addr()?, listener))
    });
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
    if tree.parents.is_empty() || tree.window_max == 0 {
        return Err(JoinError::Membership(format!("a tree with leaf {:?} but no address of it", tree.leaf)));
    }
    let Some(mut attach_params) =
        attach_params(tree, (Rank(config.rank), config.world), (ranks_here, config.wait_policy), table_version)
    else {
        return Ok(packet_tree(config, tree, port, table_version));
    };
    if config.transport == Transport::Rdma {
        let addr = tree.attach.as_ref().and_then(|bus| bus.remote);
        let addr = addr.ok_or_else(|| JoinError::Membership(format!("device {:?} does not accept RDMA", tree.leaf)))?;
        let link = config.verbs.clone().unwrap_or_else(|| "auto".into());
        attach_params.remote =
            Some(Remote { addr, link, prefer: config.bind, traffic_class: config.udp.traffic_class });
    }
    let driver = ZeroCopyDriver::attach(&attach_params);
    let driver = driver.map_err(|reason| JoinError::Attach { device: attach_params.device, reason })?;
    notices.set_memory_waker(driver.waker());
    Ok(Tree::ZeroCopy(Box::new(driver)))
}

/// Attach to a later tree of the communicator, with the port from which the path to it was probed.
pub(super) fn attach_to_new_tree(
    config: &JoinConfig,
    ranks_here: usize,
    tree: TreeMembership,
    table_version: u32,
    (port, notices): (HostedPort, &Notices),
) -> Result<Tree, JoinError> {
    notices.set_wakers(Some(port.waker()), None);
    attach_to_tree(config, &tree, ranks_here, table_version, (port, notices))
}

/// Make an endpoint on the data port.
fn packet_tree(config: &JoinConfig, tree: &TreeMembership, mut port: HostedPort, table_version: u32) -> Tree {
    let (rank, world) = (Rank(config.rank), config.world);
    if let Some(why) = &tree.packets_reason {
        let device = &tree.leaf;
        crate::log::info!(job = config.job, %rank, device, why, "contributes by packets instead of zero-copy");
    }
    // Listen before announcing it: contributions carry the key.
    let shared_key =
        tree.shared.filter(|shared| join_shared(&mut port, shared.addr, tree.parents.len())).map(|shared| shared.key);
    if tree.shared.is_some() && shared_key.is_none() {
        crate::log::info!(job = config.job, %rank, "cannot join the leaf's multicast address: results arrive by unicast");
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
