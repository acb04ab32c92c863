//! What ranks and a controller say to each other, in the frames of [`sumac_hal::ctrl`].

use super::books::Quota;
use crate::choice::{CostTable, TreeFacts};
use crate::endpoint::EndpointConfig;
use crate::plan::Child;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use sumac_hal::ctrl::{Bus, DeviceCapabilities, Name, Order, SharedLink, Stats, TimersConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank};
use sumac_hal::op::OpDesc;
use sumac_hal::port::Addr;
use thiserror::Error;

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ClientRequest {
    /// Take part in a job; answered when all its ranks have asked.
    Join(JoinRequest),
    /// Done with the job. A connection that ends without it is a death.
    Leave,
    /// Report devices and jobs.
    Status,
    /// Take part in a job on devices of its choice, for tests of single links: no fabric is asked. Answered as Join.
    JoinOn {
        /// The rank.
        request: JoinRequest,
        /// The nodes of the job's tree, each the parent of the next: the root first, all ranks at the last one. The
        /// same at all ranks; none is as Join.
        devices: Vec<String>,
    },
    /// This rank's tree of that view is lost. All ranks of the job are told, once a view; what is not of the present
    /// view of a running job is ignored.
    Suspect {
        /// The view. A job begins with 0.
        view: u32,
    },
    /// Place the job anew: its tree of that view is lost. Answered by Replanned when all its ranks have asked for the
    /// same view, or by NotReplanned.
    Replan {
        /// The view whose tree is lost.
        view: u32,
    },
    /// Say who is left of the job. Answered, to all alike, when every rank that is left has asked.
    Survivors,
    /// To Offer: this rank begins no call from that number on before it hears more.
    Pause {
        /// The view that is offered.
        view: u32,
        /// The number of the call: how many came before it.
        at: u64,
    },
    /// The ranks do not take the job's tree of that view: it is freed, and the job counts as without a tree. Once a view;
    /// what is not of the present one is ignored.
    Decline {
        /// The view.
        view: u32,
        /// The device that this rank could not attach to, if that is the reason: the job is not put on it again.
        device: Option<String>,
        /// The reason.
        why: String,
    },
    /// The job is over for this rank, and for all others that hear of it, by this. The first of a job counts.
    Over(Over),
}

/// What ends a job at all its ranks though none has died: those that come to it late can't hear of it from ranks that
/// are gone, nor from devices that have forgotten them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Over {
    /// Ranks called different things.
    Mismatch {
        /// One.
        first: OpDesc,
        /// Another.
        other: OpDesc,
    },
    /// Ranks did not come to an operation within its limit.
    Stragglers {
        /// Who, in order of rank.
        missing: Vec<Rank>,
    },
}

/// One rank of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinRequest {
    /// The job's name: ranks with the same name meet.
    pub job: String,
    /// Which rank.
    pub rank: Rank,
    /// Of how many.
    pub world: u32,
    /// Its host in the fabric; `None`: the hosts in natural name order.
    pub host: Option<String>,
    /// The declared order; the same at all ranks.
    pub order: Order,
    /// Where its schedules' connections are accepted.
    pub mesh_addr: SocketAddr,
    /// Where its connections for repairs are accepted, which happen beside schedules that wait.
    pub repair_addr: SocketAddr,
    /// The longest packet of its data port in bytes.
    pub max_packet_len_bytes: u32,
    /// How it is to reach its leaf; each rank as it likes.
    pub attach: Attach,
    /// The machine that it runs on, if it can share memory with the processes there.
    pub machine: Option<Name>,
    /// Whose the job is, and what it does while there is no tree for it; the same at all ranks.
    pub terms: Terms,
}

/// On whose account a job runs, and what it does while there is no tree for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// The tenant: see [`check_tenant`].
    pub tenant: String,
    /// How long joining waits for a tree that others hold, in milliseconds.
    pub wait_ms: u32,
    /// Whether the ranks take a tree that is offered later.
    pub moves: bool,
}

impl Default for Terms {
    /// [`DEFAULT_TENANT`], which does not wait and does not move.
    fn default() -> Self {
        Self { tenant: DEFAULT_TENANT.to_owned(), wait_ms: 0, moves: false }
    }
}

/// The tenant of jobs that name none.
pub const DEFAULT_TENANT: &str = "default";

/// The longest name of a tenant in bytes.
pub const MAX_TENANT_LEN: usize = 64;

/// Check a tenant's name.
///
/// # Errors
/// [`BadTenant`] if it is empty, longer than [`MAX_TENANT_LEN`], or of other characters than letters, digits, `.`, `_` and `-`.
pub fn check_tenant(name: &str) -> Result<(), BadTenant> {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if (1..=MAX_TENANT_LEN).contains(&name.len()) && is_plain {
        return Ok(());
    }
    Err(BadTenant { len: name.len(), begin: name.chars().take(MAX_TENANT_LEN).collect() })
}

/// A name that no tenant can have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error("{begin:?} ({len} bytes) is no tenant; a name has 1 to {MAX_TENANT_LEN} letters, digits, `.`, `_` or `-`")]
pub struct BadTenant {
    /// Its length in bytes.
    pub len: usize,
    /// How it begins.
    pub begin: String,
}

/// A job's place among those that wait for a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePlace {
    /// Its number; the first is 1.
    pub position: u32,
    /// How many wait.
    pub of: u32,
}

impl fmt::Display for QueuePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "number {} of {} in the queue for a tree", self.position, self.of)
    }
}

/// How a rank reaches its leaf device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Attach {
    /// By shared memory if the leaf is on the same machine and has a bus, else by packets.
    #[default]
    Auto,
    /// By packets, which carry the data.
    Udp,
    /// By shared memory, which the device's engine reads and writes; or there is no tree, for that reason.
    Shm,
    /// By packets over RDMA verbs, to a device that receives them so; or there is no tree, for that reason.
    Verbs,
    /// By reference over RDMA verbs: the device's engine reads this rank's memory, and writes to it; or there is no tree, for
    /// that reason.
    Rdma,
}

impl Attach {
    /// Every way.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Udp, Self::Shm, Self::Verbs, Self::Rdma];

    /// Return its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Udp => "udp",
            Self::Shm => "shm",
            Self::Verbs => "verbs",
            Self::Rdma => "rdma",
        }
    }

    /// Whether a rank contributes by reference, or there is no tree.
    pub const fn insists_on_reference(self) -> bool {
        matches!(self, Self::Shm | Self::Rdma)
    }

    /// Whether a rank may contribute by reference, over memory that it shares with its leaf.
    pub const fn may_share_memory(self) -> bool {
        matches!(self, Self::Auto | Self::Shm)
    }
}

impl fmt::Display for Attach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no way to reach a leaf.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no way to attach; known are {known}", known = Attach::ALL.map(Attach::name).join(", "))]
pub struct UnknownAttach(String);

impl FromStr for Attach {
    type Err = UnknownAttach;

    fn from_str(text: &str) -> Result<Self, UnknownAttach> {
        Self::ALL.into_iter().find(|attach| attach.name() == text).ok_or_else(|| UnknownAttach(text.to_owned()))
    }
}

/// What a controller answers, or says by itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ClientReply {
    /// To Join: the job is complete.
    Joined(Box<Membership>),
    /// To Join: it can't be.
    Refused(JoinRefusal),
    /// To Leave.
    Left,
    /// To Status.
    Status(StatusReport),
    /// By itself: a rank of the job is gone without leaving.
    RankLost(Rank),
    /// By itself: the job is over, as a rank says; whoever said so may be lost from then on.
    Over(Over),
    /// By itself: a rank of the job says that its tree of that view is lost.
    Repair {
        /// The view.
        view: u32,
    },
    /// To Replan: the job is placed anew.
    Replanned {
        /// The new view: the one asked about and one.
        view: u32,
        /// The rank's new place. Mesh and token are as they were at first.
        membership: Box<Membership>,
    },
    /// To Replan: the job stays where it is.
    NotReplanned {
        /// The view asked about.
        view: u32,
        /// Why.
        reason: String,
    },
    /// To Survivors.
    Survivors {
        /// How often that was answered before in this job.
        round: u32,
        /// Who is left, in order of rank, or why nobody can say.
        ranks: Result<Vec<Rank>, String>,
    },
    /// By itself: the job has no tree in that view, and may have one now. Each rank answers with Pause.
    Offer {
        /// The view.
        view: u32,
    },
    /// To Pause, when all ranks have answered: ask for another tree, by Replan, right before that call.
    MoveAt {
        /// The view that was offered.
        view: u32,
        /// The number of the call.
        call: u64,
    },
    /// By itself: the offer is off.
    Withdrawn,
    /// By itself: the job's place in the queue has changed; `None`: it waits no more.
    Queued(Option<QueuePlace>),
}

/// Why a rank can't join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum JoinRefusal {
    /// Not a rank of the world.
    #[error("{rank} of {world}: ranks are numbered from 0, and there is at least one")]
    Rank {
        /// The rank.
        rank: Rank,
        /// The world's size.
        world: u32,
    },
    /// The rank is there already.
    #[error("{rank} of job {job:?} is there already")]
    Taken {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
    /// Ranks disagree on what the job is.
    #[error("ranks of job {job:?} disagree on {what}: {first} here, {other} at {rank}")]
    Disagree {
        /// The job.
        job: String,
        /// What they disagree on.
        what: String,
        /// The first rank's.
        first: String,
        /// The other's.
        other: String,
        /// The other.
        rank: Rank,
    },
    /// The tenant has no proper name.
    #[error(transparent)]
    Tenant(#[from] BadTenant),
    /// A job of that name runs.
    #[error("job {job:?} is running; take another name")]
    Running {
        /// The job.
        job: String,
    },
    /// A rank died before the job was complete.
    #[error("{rank} of job {job:?} is gone before the job was complete")]
    Gone {
        /// The rank.
        rank: Rank,
        /// The job.
        job: String,
    },
}

/// A rank's place in a complete job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Membership {
    /// Its place in the tree, or why there is no tree.
    pub tree: Result<TreeMembership, String>,
    /// The job's place in the queue, if it could have a tree but for what others hold.
    pub queue: Option<QueuePlace>,
    /// Where each rank's schedules' connections are accepted, in order of rank.
    pub mesh: Vec<SocketAddr>,
    /// The same of the connections for repairs.
    pub repair_mesh: Vec<SocketAddr>,
    /// What those connections say first.
    pub mesh_token: u64,
    /// The declared expression, for a declared order: each node's children in order, root first. The tree's, or, where
    /// there is none, all ranks below one node.
    pub expression: Vec<Vec<Child>>,
    /// The cost table.
    pub table: CostTable,
}

/// A rank's place in its tree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TreeMembership {
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// The rank's leaf, by name.
    pub leaf: String,
    /// The rank's host, where the controller knows a fabric: where its sub-communicators find it again.
    pub host: Option<String>,
    /// Which child of the leaf it is.
    pub child: ChildIndex,
    /// The key of that link.
    pub key: u64,
    /// Where the leaf sends results to all its children at once, if it does and this one is to listen there: to a rank
    /// that contributes by reference no packet brings a result.
    pub shared: Option<SharedLink>,
    /// Where the leaf's shards receive.
    pub parents: Vec<Addr>,
    /// The most contributions in flight.
    pub window_max: u16,
    /// How many to begin with.
    pub window_start: u16,
    /// The payload limit in bytes.
    pub chunk_len_bytes: u16,
    /// The timers of the hop.
    pub timers: TimersConfig,
    /// What the choice of a path needs.
    pub facts: TreeFacts,
    /// The leaf's bus, if the rank contributes by reference: then the leaf takes nothing from its packets.
    pub bus: Option<Bus>,
}

impl TreeMembership {
    /// Describe the endpoint of rank `rank` of `ranks` in a life of its own; `shared_key` if its port listens to the
    /// shared address.
    pub fn endpoint(&self, (rank, ranks): (Rank, u32), shared_key: Option<u64>, table_version: u32) -> EndpointConfig {
        let mut salt = [0; 4];
        // Tells lives apart; without randomness the key, which differs by group, still does.
        let _ = rustix::rand::getrandom(&mut salt, rustix::rand::GetRandomFlags::empty());
        EndpointConfig {
            group: self.group,
            epoch: self.epoch,
            rank,
            ranks,
            child: self.child,
            key: self.key,
            shared_key,
            parents: self.parents.clone(),
            window_max: self.window_max,
            window_start: self.window_start,
            chunk_len_bytes: self.chunk_len_bytes,
            timers: self.timers.into(),
            table_version,
            salt: u32::from_le_bytes(salt) ^ self.key as u32,
        }
    }
}

/// The state of the controller's world.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// Switches, hosts and aggregation nodes of the fabric, if one was given.
    pub fabric: Option<FabricStatus>,
    /// The devices that are connected, by name.
    pub devices: Vec<DeviceStatus>,
    /// The jobs, by name.
    pub jobs: Vec<JobStatus>,
    /// The tenants that have jobs or a quota, by name.
    pub tenants: Vec<TenantStatus>,
}

/// One tenant: what its groups hold, and what they may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Its name.
    pub name: String,
    /// Groups.
    pub groups: u64,
    /// Slots, in each shard of the device where it has the most.
    pub slots: u64,
    /// Memory for slots and redo slots, in each shard of the device where it has the most, in bytes.
    pub memory_bytes: u64,
    /// Its quota.
    pub quota: Quota,
}

/// The size of a fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricStatus {
    /// Switches.
    pub switches: u32,
    /// Hosts.
    pub hosts: u32,
    /// Aggregation nodes.
    pub aggregation_nodes: u32,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Its name.
    pub name: String,
    /// Whether the fabric has an aggregation node of that name.
    pub in_fabric: bool,
    /// Where it receives packets.
    pub data_addrs: Vec<Addr>,
    /// What it can do.
    pub capabilities: DeviceCapabilities,
    /// How ranks on its own machine contribute by reference; `None` if they can't.
    pub bus: Option<Bus>,
    /// What it says of itself, or why it does not.
    pub stats: Result<Stats, String>,
}

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Its name.
    pub name: String,
    /// Whose it is.
    pub tenant: String,
    /// Ranks that are there.
    pub joined: u32,
    /// Ranks that it has.
    pub world: u32,
    /// Whether it is complete.
    pub running: bool,
    /// How often it was placed anew since it began.
    pub view: u32,
    /// The group and its devices, root first, or why there is none; `None` before the job is complete.
    pub tree: Option<Result<JobTree, String>>,
    /// Its place among those that wait for a tree.
    pub queue: Option<QueuePlace>,
    /// Whether a tree is offered to it, or about to be made for it.
    pub is_offered: bool,
}

/// A job's tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobTree {
    /// The group.
    pub group: GroupId,
    /// Node levels.
    pub levels: u32,
    /// The devices, root first.
    pub devices: Vec<String>,
    /// How many of the ranks contribute by reference; the others by packets.
    pub by_reference: u32,
}
