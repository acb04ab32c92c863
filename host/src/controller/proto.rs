//! What ranks and a controller say to each other, in the frames of [`sumac_hal::ctrl`].

mod refusal;
mod status;
mod terms;

pub use refusal::JoinRefusal;
pub use status::{DeviceStatus, FabricStatus, JobStatus, JobTree, StatusReport, TenantStatus};
pub use terms::{Attach, BadTenant, DEFAULT_TENANT, MAX_TENANT_LEN, Terms, UnknownAttach, check_tenant};

use crate::plan::Child;
use crate::select::{CostTable, TreeFacts};
use crate::transport::packets::EndpointConfig;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use sumac_hal::ctrl::{Bus, Name, Order, SharedLink, TimersConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank};
use sumac_hal::op::OpDesc;
use sumac_hal::port::Addr;
use sumac_hal::shm::DeviceUsers;

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
    /// Go on as this rank of a job that an earlier life of the controller has begun. Answered by Resumed when all its
    /// ranks have asked, or when those that have not count as lost; or by Refused.
    Resume(Box<Resumption>),
    /// This rank waits no more for the answer to Replan. When for some seconds no rank does, the job counts as without a tree.
    Forgo {
        /// The view whose tree is lost.
        view: u32,
    },
}

/// What a rank knows of its job, for a controller that does not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resumption {
    /// As it joined.
    pub request: JoinRequest,
    /// The devices that the job is pinned to; empty where the controller plans.
    pub devices: Vec<String>,
    /// The job's view as this rank heard it last.
    pub view: u32,
    /// How often it was told who is left.
    pub shrunk: u32,
    /// What the job's connections between ranks say first.
    pub mesh_token: u64,
    /// What a declared order means, as on joining.
    pub expression: Vec<Vec<Child>>,
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
    /// Whose devices it shares memory with.
    pub device_users: DeviceUsers,
    /// Whose the job is, and what it does while there is no tree for it; the same at all ranks.
    pub terms: Terms,
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
    /// To Resume: the job goes on with this controller.
    Resumed {
        /// In this view, which no controller before has spoken of.
        view: u32,
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
    /// Why a rank that may contribute by reference contributes by packets.
    pub by_packets: Option<String>,
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
