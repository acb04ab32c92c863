//! How a rank becomes a member.

use super::core::{Core, Lines};
use super::lost::Lost;
use super::parley::Parley;
use super::straggler::Straggler;
use super::tree::{Tree, seating};
use crate::controller::proto::{
    Attach, ClientRequest, DEFAULT_TENANT, JoinRequest, Terms, TreeMembership, UnknownAttach, check_tenant,
};
use crate::controller::{ClientError, Notice, Session};
use crate::exec::{JobToken, Mesh, MeshError};
use crate::schedule::Place;
use crate::select::{Algo, Declared, Situation};
use crate::transport::memory::{AttachError, ReferenceDriver, Remote};
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

/// How a rank joins its job.
#[derive(Debug, Clone)]
pub struct JoinConfig {
    /// The controller.
    pub controller: SocketAddr,
    /// The job's name: ranks with the same name meet.
    pub job: String,
    /// Which rank this is.
    pub rank: u32,
    /// How many there are.
    pub world: u32,
    /// This rank's host as the fabric calls it. `None` at all ranks: the hosts in natural name order.
    pub host: Option<String>,
    /// The order in which contributions combine; the same at all ranks.
    pub order: Order,
    /// The algorithm of calls that do not name one.
    pub algo: Algo,
    /// The deadline of calls that do not name one.
    pub deadline: Duration,
    /// How long to wait for the other ranks.
    pub join_timeout: Duration,
    /// The address of this host that devices and other ranks can reach.
    pub bind: IpAddr,
    /// The data port.
    pub udp: UdpConfig,
    /// How to reach the leaf device.
    pub attach: Attach,
    /// The RDMA port for [`Attach::Verbs`] and [`Attach::Rdma`], as `DEVICE[:PORT[:GID-INDEX]]`. `None`: the first that is active.
    pub verbs: Option<String>,
    /// Whether operations whose tree is lost are completed by the ranks, and later ones go on without it or on another
    /// ([`Outcome::repaired`](super::Outcome::repaired) says so). The same at all ranks. Without it, the loss of the tree
    /// is the communicator's end.
    pub repair: bool,
    /// On whose account the job runs, as the controller's quotas name them; the same at all ranks.
    pub tenant: String,
    /// How long joining waits, in the controller's queue, for a tree that others hold; the same at all ranks. Afterwards, or
    /// without waiting by default, the job runs by schedules, and moves to a tree when its turn comes if it may
    /// [repair](Self::repair).
    pub wait_for_tree: Duration,
    /// What becomes of operations to which ranks come late, where the call does not say; the same at all ranks.
    pub straggler: Straggler,
}

impl JoinConfig {
    /// Describe a rank with the defaults: loopback, `Order::Arrival`, the cheapest path, 60 s for a call.
    pub fn new(controller: SocketAddr, job: impl Into<String>, rank: u32, world: u32) -> Self {
        Self {
            controller,
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
            attach: Attach::Auto,
            verbs: None,
            repair: true,
            tenant: DEFAULT_TENANT.to_owned(),
            wait_for_tree: Duration::ZERO,
            straggler: Straggler::Wait,
        }
    }

    /// Describe a rank by the environment, as launchers set it: `RANK`, `WORLD_SIZE`, `MASTER_ADDR` (default
    /// 127.0.0.1), `SUMAC_PORT` (default [`DEFAULT_PORT`]), `SUMAC_JOB` (default `default`), `SUMAC_ATTACH` (`auto`,
    /// `udp`, `shm`, `verbs` or `rdma`; default `auto`), `SUMAC_VERBS` (the RDMA port), `SUMAC_TENANT` (default `default`) and
    /// `SUMAC_WAIT_FOR_TREE` (seconds; default 0).
    ///
    /// # Errors
    /// [`JoinError::Environment`] names the variable that is missing or makes no sense.
    pub fn from_env() -> Result<Self, JoinError> {
        Self::from_variables(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, JoinError> {
        let number = |name| -> Result<u32, JoinError> {
            let value = variable(name).ok_or_else(|| environment(name, "it is not set; launchers set it"))?;
            value.parse().map_err(|_| environment(name, format!("{value:?} is not a number")))
        };
        let (rank, world) = (number("RANK")?, number("WORLD_SIZE")?);
        let host = variable("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".into());
        let port = match variable("SUMAC_PORT") {
            Some(value) => {
                value.parse().map_err(|_| environment("SUMAC_PORT", format!("{value:?} is not a port number")))?
            }
            None => DEFAULT_PORT,
        };
        let resolved = std::net::ToSocketAddrs::to_socket_addrs(&(host.as_str(), port));
        let addr = resolved.ok().and_then(|mut addrs| addrs.next());
        let addr = addr.ok_or_else(|| environment("MASTER_ADDR", format!("{host:?} is no address")))?;
        let job = variable("SUMAC_JOB").unwrap_or_else(|| "default".into());
        let attach = match variable("SUMAC_ATTACH") {
            Some(value) => value.parse().map_err(|why: UnknownAttach| environment("SUMAC_ATTACH", why.to_string()))?,
            None => Attach::Auto,
        };
        let tenant = variable("SUMAC_TENANT").unwrap_or_else(|| DEFAULT_TENANT.to_owned());
        check_tenant(&tenant).map_err(|why| environment("SUMAC_TENANT", why.to_string()))?;
        let wait_for_tree = match variable("SUMAC_WAIT_FOR_TREE") {
            Some(_) => Duration::from_secs(u64::from(number("SUMAC_WAIT_FOR_TREE")?)),
            None => Duration::ZERO,
        };
        let verbs = variable("SUMAC_VERBS");
        Ok(Self { attach, verbs, tenant, wait_for_tree, ..Self::new(addr, job, rank, world) })
    }

    /// Open a data port for the way to the leaf.
    fn open_port(&self) -> Result<HostedPort, HostedError> {
        let verbs = (self.attach == Attach::Verbs).then(|| self.verbs.as_deref().unwrap_or("auto"));
        HostedPort::open(SocketAddr::new(self.bind, 0), &self.udp, verbs)
    }
}

fn environment(name: &'static str, why: impl Into<String>) -> JoinError {
    JoinError::Environment { name, why: why.into() }
}

/// The port of controllers that are not told another.
pub const DEFAULT_PORT: u16 = 7847;

/// Why a rank is not a member.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// An environment variable.
    #[error("environment variable {name}: {why}")]
    Environment {
        /// Which.
        name: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The controller, or the job there.
    #[error(transparent)]
    Controller(#[from] ClientError),
    /// The data port.
    #[error("data port: {0}")]
    Port(#[from] HostedError),
    /// The port for schedules.
    #[error("listen for other ranks on {addr}: {source}")]
    Listen {
        /// The address.
        addr: IpAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The connections for schedules.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The leaf device, by reference.
    #[error("attach to device {device} by reference: {reason}; joining with `attach: udp` avoids it")]
    Attach {
        /// The device.
        device: String,
        /// What went wrong.
        reason: AttachError,
    },
    /// The controller gave something that makes no sense.
    #[error("the controller's answer makes no sense: {0}")]
    Membership(String),
}

/// Join: returns what a communicator is made of.
pub(super) fn join(mut config: JoinConfig) -> Result<Core, JoinError> {
    let (listener, mesh_addr) = listen(config.bind)?;
    let (repair_listener, repair_addr) = listen(config.bind)?;
    let port = config.open_port()?;
    let (rank, world) = (Rank(config.rank), config.world);
    let device_users = DeviceUsers::from_env().map_err(|error| environment(DEVICE_USER_VARIABLE, error.to_string()))?;
    let request = JoinRequest {
        job: config.job.clone(),
        rank,
        world,
        host: config.host.clone(),
        order: config.order,
        mesh_addr,
        repair_addr,
        max_packet_len_bytes: u32::try_from(port.capabilities().max_packet_len_bytes).unwrap_or(u32::MAX),
        attach: config.attach,
        machine: config.attach.may_share_memory().then(sumac_hal::shm::machine).flatten(),
        device_users,
        terms: Terms {
            tenant: config.tenant.clone(),
            wait_ms: u32::try_from(config.wait_for_tree.as_millis()).unwrap_or(u32::MAX),
            moves: config.repair,
        },
    };
    let lost = Arc::new(super::lost::Lost::new(port.waker()));
    let watch = Arc::clone(&lost);
    let may_repair = config.repair;
    let on_notice = move |notice| match notice {
        Notice::Offer { view } if may_repair => watch.offers.offer(view).map(|at| ClientRequest::Pause { view, at }),
        other => {
            match other {
                Notice::RankLost(rank) => watch.set(rank),
                Notice::Over(over) => watch.over(over),
                Notice::ControllerLost => watch.controller_gone(),
                Notice::ControllerBack { view } => watch.controller_back(view),
                Notice::NotResumed(refusal) => watch.refused(refusal.to_string()),
                Notice::Repair { view } => watch.repair(view),
                Notice::MoveAt { view, call } => watch.offers.move_at(view, call),
                Notice::Withdrawn => watch.offers.withdraw(),
                Notice::Queued(place) => watch.set_queue_place(place),
                // Without an answer of this rank nobody moves.
                Notice::Offer { .. } => {}
            }
            None
        }
    };
    let (session, membership) = Session::join(config.controller, request, config.join_timeout, on_notice)?;
    lost.begin_queue(membership.queue);
    let place = Place::new(rank, world).map_err(|error| JoinError::Membership(error.to_string()))?;
    let ranks_here = membership.mesh.iter().filter(|addr| addr.ip() == mesh_addr.ip()).count();
    let token = JobToken(membership.mesh_token);
    let calls = Lines::new(Mesh::new(place, token, listener, membership.mesh)?);
    let parley = (may_repair && world > 1).then(|| {
        let caller = Arc::clone(&lost);
        let on_call = move |epoch| caller.call(epoch);
        Parley::start((rank, token), repair_listener, membership.repair_mesh, on_call)
    });
    let parley = parley.transpose().map_err(|source| JoinError::Listen { addr: config.bind, source })?;
    parley.iter().for_each(|parley| lost.set_inbox(Arc::clone(parley.inbox())));
    let situation = Situation {
        ranks: world,
        order: config.order,
        tree: membership.tree.as_ref().map(|tree| tree.facts).map_err(Clone::clone),
        declared: Declared::new(membership.expression, world, config.order)
            .map_err(|error| JoinError::Membership(error.to_string()))?,
        table: membership.table,
    };
    let table_version = situation.table.version;
    let tree = match membership.tree {
        Ok(tree) => {
            if tree.parents.is_empty() || tree.window_max == 0 {
                return Err(JoinError::Membership(format!("a tree with leaf {:?} but no way to it", tree.leaf)));
            }
            config.host = config.host.or_else(|| tree.host.clone());
            Some(take_seat(&config, &tree, ranks_here, table_version, (port, &lost))?)
        }
        Err(why) => {
            if world > 1 {
                let queue = membership.queue.map(|place| place.to_string());
                tracing::warn!(job = config.job, %rank, %why, queue, "no tree: schedules only");
            }
            None
        }
    };
    Ok(Core::new((config, place, ranks_here), situation, tree, (calls, parley, token), session, lost))
}

/// Listen for the connections of other ranks.
pub(super) fn listen(addr: IpAddr) -> Result<(TcpListener, SocketAddr), JoinError> {
    let bound = TcpListener::bind((addr, 0)).and_then(|listener| Ok((listener.local_addr()?, listener)));
    bound.map(|(addr, listener)| (listener, addr)).map_err(|source| JoinError::Listen { addr, source })
}

/// Take this rank's seat in a tree.
fn take_seat(
    config: &JoinConfig,
    tree: &TreeMembership,
    ranks_here: usize,
    table_version: u32,
    (port, lost): (HostedPort, &Lost),
) -> Result<Tree, JoinError> {
    let Some(mut seating) = seating(tree, (Rank(config.rank), config.world), ranks_here, table_version) else {
        return Ok(by_packets(config, tree, port, table_version));
    };
    if config.attach == Attach::Rdma {
        let addr = tree.bus.as_ref().and_then(|bus| bus.remote);
        let addr = addr.ok_or_else(|| JoinError::Membership(format!("{:?} lets nobody in by RDMA", tree.leaf)))?;
        let link = config.verbs.clone().unwrap_or_else(|| "auto".into());
        seating.remote = Some(Remote { addr, link, prefer: config.bind });
    }
    let driver = ReferenceDriver::attach(&seating);
    let driver = driver.map_err(|reason| JoinError::Attach { device: seating.device, reason })?;
    lost.attach(driver.waker());
    Ok(Tree::Reference(Box::new(driver)))
}

/// Take this rank's seat in a later tree of its communicator.
pub(super) fn enter(
    config: &JoinConfig,
    ranks_here: usize,
    tree: TreeMembership,
    table_version: u32,
    lost: &Lost,
) -> Result<Tree, JoinError> {
    if tree.parents.is_empty() || tree.window_max == 0 {
        return Err(JoinError::Membership(format!("a tree with leaf {:?} but no way to it", tree.leaf)));
    }
    let port = config.open_port()?;
    lost.set_wakers(Some(port.waker()), None);
    take_seat(config, &tree, ranks_here, table_version, (port, lost))
}

/// Put an endpoint on the data port.
fn by_packets(config: &JoinConfig, tree: &TreeMembership, mut port: HostedPort, table_version: u32) -> Tree {
    let (rank, world) = (Rank(config.rank), config.world);
    if let Some(why) = &tree.by_packets {
        tracing::info!(job = config.job, %rank, device = tree.leaf, why, "contributes by packets, not by reference");
    }
    // First listen, then say so: contributions do.
    let shared_key =
        tree.shared.filter(|shared| listen_to(&mut port, shared.addr, tree.parents.len())).map(|shared| shared.key);
    if tree.shared.is_some() && shared_key.is_none() {
        tracing::info!(job = config.job, %rank, "can't listen to the shared address: results come one by one");
    }
    let endpoint = tree.endpoint((rank, world), shared_key, table_version);
    Tree::Packets(Box::new(TreeDriver::new(Endpoint::new(endpoint), port)))
}

/// Listen to the shared address of each of the leaf's shards, the first at `first`; false, and to none, if that can't be.
fn listen_to(port: &mut HostedPort, first: Addr, shards: usize) -> bool {
    let shards = 0..u16::try_from(shards).unwrap_or(u16::MAX);
    let joined = shards.clone().take_while(|&shard| first.behind(shard).is_some_and(|addr| port.join(addr))).count();
    if joined < shards.len() {
        shards.take(joined).filter_map(|shard| first.behind(shard)).for_each(|addr| port.leave(addr));
        return false;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<JoinConfig, JoinError> {
        let all = [("RANK", "1"), ("WORLD_SIZE", "2")].iter().chain(variables).rev();
        JoinConfig::from_variables(|name| {
            all.clone().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
        })
    }

    #[test]
    fn the_environment_describes_a_rank() {
        let plain = read(&[]).expect("all that is needed");
        assert_eq!((plain.rank, plain.world, plain.job.as_str(), plain.attach), (1, 2, "default", Attach::Auto));
        assert_eq!(plain.controller, SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)));
        let told = read(&[("SUMAC_PORT", "9"), ("SUMAC_JOB", "j"), ("SUMAC_ATTACH", "shm")]).expect("in their forms");
        assert_eq!((told.controller.port(), told.job.as_str(), told.attach), (9, "j", Attach::Shm));
        let over = read(&[("SUMAC_ATTACH", "verbs"), ("SUMAC_VERBS", "mlx5_0:1")]).expect("in their forms");
        assert_eq!((over.attach, over.verbs.as_deref()), (Attach::Verbs, Some("mlx5_0:1")));
    }

    #[test]
    fn the_environment_says_whose_the_job_is() {
        let plain = read(&[]).expect("all that is needed");
        assert_eq!((plain.tenant.as_str(), plain.wait_for_tree), ("default", Duration::ZERO));
        let told = read(&[("SUMAC_TENANT", "team-a"), ("SUMAC_WAIT_FOR_TREE", "90")]).expect("in their forms");
        assert_eq!((told.tenant.as_str(), told.wait_for_tree), ("team-a", Duration::from_secs(90)));
    }

    #[test]
    fn a_variable_that_makes_no_sense_is_named_with_its_value() {
        for (name, value, known) in [
            ("SUMAC_ATTACH", "roce", "auto, udp, shm, verbs, rdma"),
            ("SUMAC_PORT", "70000", "port"),
            ("RANK", "first", "number"),
            ("SUMAC_TENANT", "a=b", "letters, digits"),
            ("SUMAC_WAIT_FOR_TREE", "soon", "number"),
        ] {
            let error = read(&[(name, value)]).expect_err("refused").to_string();
            assert!(error.contains(name) && error.contains(value) && error.contains(known), "{error}");
        }
    }
}
