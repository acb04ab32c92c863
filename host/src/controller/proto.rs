//! Messages between ranks and a controller, sent in the frames of [`sumac_hal::ctrl`].
//!
//! postcard encodes enum variants by position: append new variants, never reorder them.

mod rail_of;
mod refusal;
mod status;
mod stripes;
mod terms;
mod update;

pub use rail_of::{RailJobs, RailOf, rail_name};
pub use refusal::JoinRefusal;
pub use status::{
    DeviceStatus, FabricStatus, JobStatus, JobTree, PairRole, PairStatus, RankRange, RecoveryOutcome, RecoveryStatus,
    StatusReport, StripeStatus, TenantStatus,
};
pub use stripes::{RailGrant, StripeOf, Striping, stripe_name};
pub use terms::{DEFAULT_TENANT, InvalidTenant, MAX_TENANT_LEN, Terms, Transport, UnknownTransport, check_tenant};
pub use update::{UPDATE_PIECE_MAX_BYTES, UpdateCommand, UpdateDevice, UpdateRefusal, UpdateReply};

/// The old name of [`Transport`].
#[deprecated(since = "0.2.0", note = "renamed to `Transport`")]
pub type Attach = Transport;

use crate::plan::Child;
use crate::schedule::Shape;
use crate::secret::JobSecret;
use crate::select::{CostTable, TreeFacts};
use crate::transport::packets::EndpointConfig;
use crate::transport::path::PathToProbe;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use sumac_hal::ctrl::{AttachPoint, JobTicket, Name, Order, SharedLink, TermClaim, TimersConfig};
use sumac_hal::ids::{ChildIndex, Epoch, GroupId, Rank};
use sumac_hal::op::OpDesc;
use sumac_hal::port::Addr;
use sumac_hal::shm::DeviceUsers;

/// A request from a client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ClientRequest {
    /// Join a job. Answered once all its ranks have joined.
    Join(JoinRequest),
    /// Leave the job. A connection that closes without `Leave` counts as a lost rank.
    Leave,
    /// Request a report of devices and jobs.
    Status,
    /// Join a job on explicitly chosen devices, bypassing the fabric, to test single links. Answered like `Join`.
    JoinOn {
        /// The request of this rank.
        request: JoinRequest,
        /// The tree as a chain of devices, root first; all ranks attach to the last one. Every rank must send the same
        /// list. An empty list is the same as `Join`.
        devices: Vec<String>,
    },
    /// Report that the tree of `view` is lost. The controller notifies all ranks of the job once per view. It ignores
    /// reports for any view but the current one of a running job.
    Suspect {
        /// The view whose tree is lost. A job starts at view 0.
        view: u32,
    },
    /// Request a new tree for the job. Answered with `Replanned` once all ranks have requested one for the same view,
    /// or with `ReplanRefused`.
    Replan {
        /// The view whose tree is lost.
        view: u32,
    },
    /// Request the list of surviving ranks. Answered once every surviving rank has asked; all get the same list.
    Survivors,
    /// Answer `Offer`: this rank starts no call numbered `at` or higher until `MoveAt` or `OfferWithdrawn` arrives.
    Pause {
        /// The view of the offer.
        view: u32,
        /// The call's number: how many calls precede it.
        at: u64,
    },
    /// Decline the job's tree of `view`. The controller releases it, and the job runs without a tree. Effective once
    /// per view; ignored for any view but the current one.
    Decline {
        /// The view of the declined tree.
        view: u32,
        /// The device that this rank failed to attach to, if any. The job is not placed on it again.
        device: Option<String>,
        /// The reason, for logs and `status`.
        why: String,
    },
    /// Abort the job on all its ranks. Only a job's first abort counts.
    Abort(AbortReason),
    /// Resume a job that an earlier incarnation of the controller started. Answered with `Resumed` once all ranks have
    /// come back or the missing ones count as lost, or with `Refused`.
    Resume(Box<ResumeRequest>),
    /// Stop waiting for the answer to `Replan`. If no rank has waited for some seconds, the job runs without a tree.
    AbandonReplan {
        /// The view whose tree is lost.
        view: u32,
    },
    /// A controller reports to the other one of its pair. Answered with `Peer`.
    Peer(PeerReport),
    /// This rank was asked by `LeadHost` to run a device, and cannot.
    HostDeviceFailed {
        /// The reason, for logs.
        why: String,
    },
    /// Answer `ProbePath`.
    PathProbed {
        /// The group.
        group: GroupId,
        /// The longest packet that the path carries in both directions, in bytes; `None` if the leaf does not answer.
        max_packet_len_bytes: Option<u32>,
    },
    /// As `Suspect`, because the path to the leaf has become too narrow for the tree's packets. The next tree may be on
    /// the same devices.
    PathNarrowed {
        /// The view whose tree is lost.
        view: u32,
    },
    /// Update a device, or ask for its slots: for operators. Answered with `Updated`.
    Update(Box<UpdateDevice>),
}

/// What a rank needs to run a device for the ranks of its job on its host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostLead {
    /// The name of the device.
    pub device: String,
    /// Proves to the controller that it has asked this rank.
    pub proof: JobSecret,
    /// Whether the device has to receive over RDMA verbs, as those above it do.
    pub over_verbs: bool,
}

impl HostLead {
    /// Return what the device shows to the controller, or `None` if the job's name is longer than
    /// [`MAX_NAME_LEN`](sumac_hal::ctrl::MAX_NAME_LEN).
    pub fn ticket(&self, job: &str, rank: Rank) -> Option<JobTicket> {
        Some(JobTicket { job: Name::try_from(job).ok()?, rank: rank.0, proof: self.proof.bytes() })
    }
}

/// What the controllers of a pair tell each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerReport {
    /// The highest term that the controller has seen: its own, if it is active.
    pub seen: u64,
    /// Whether it is the active one.
    pub is_active: bool,
    /// Whether it is the second one of the pair.
    pub is_second: bool,
}

/// What a rank tells a restarted controller about its running job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResumeRequest {
    /// The request that the rank joined with.
    pub request: JoinRequest,
    /// The devices that the job is pinned to, root first; empty if the controller plans the tree.
    pub devices: Vec<String>,
    /// The latest view that this rank knows of.
    pub view: u32,
    /// How many lists of survivors this rank has received.
    pub shrink_count: u32,
    /// The job's secret, which authenticates connections between its ranks.
    pub secret: JobSecret,
    /// The expression of a declared order, as in [`Membership::expression`].
    pub expression: Vec<Vec<Child>>,
}

/// Why a job is aborted on all ranks although none was lost.
///
/// The controller forwards it because a late rank may find its peers gone and its group released.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AbortReason {
    /// Ranks made mismatched calls.
    Mismatch {
        /// One of the calls.
        first: OpDesc,
        /// A call that differs from it.
        other: OpDesc,
    },
    /// Ranks did not reach an operation within its time limit.
    Stragglers {
        /// The missing ranks, in order.
        missing: Vec<Rank>,
    },
}

/// One rank's request to join a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinRequest {
    /// The job's name. Ranks that use the same name join the same job.
    pub job: String,
    /// This rank.
    pub rank: Rank,
    /// The number of ranks in the job; the same on all ranks.
    pub world: u32,
    /// The rank's host in the fabric. `None` on all ranks assigns hosts in natural name order.
    pub host: Option<String>,
    /// The declared reduction order; the same on all ranks.
    pub order: Order,
    /// Where the rank accepts connections for host collectives.
    pub mesh_addr: SocketAddr,
    /// Where the rank accepts connections for recovery, which runs beside blocked host collectives.
    pub recovery_addr: SocketAddr,
    /// The longest packet of the rank's data port, in bytes.
    pub max_packet_len_bytes: u32,
    /// How the rank reaches its leaf device. May differ between ranks.
    pub transport: Transport,
    /// The machine that the rank runs on, if it can share memory with processes there.
    pub machine: Option<Name>,
    /// The users whose devices this rank shares memory with.
    pub device_users: DeviceUsers,
    /// The job's tenant, and what it does while no tree is available; the same on all ranks.
    pub terms: Terms,
}

impl JoinRequest {
    /// The job whose communicator this one serves: itself, or that of which it is a stripe or a rail.
    pub(super) fn communicator(&self) -> &str {
        let rail = self.terms.rail.as_ref().map(|rail| &rail.job);
        self.terms.stripe.as_ref().map(|stripe| &stripe.job).or(rail).unwrap_or(&self.job)
    }
}

/// A job's position in the queue for a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePosition {
    /// The position; the first is 1.
    pub position: u32,
    /// The length of the queue.
    pub of: u32,
}

impl fmt::Display for QueuePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "position {} of {} in the queue for a tree", self.position, self.of)
    }
}

/// A message from the controller to a client: a reply to a request, or a notification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ClientReply {
    /// Reply to `Join`: all ranks have joined.
    Joined(Box<Membership>),
    /// Reply to `Join`, `JoinOn` and `Resume`: refused.
    Refused(JoinRefusal),
    /// Reply to `Leave`.
    Left,
    /// Reply to `Status`.
    Status(StatusReport),
    /// Notification: a rank's connection closed without `Leave`.
    RankLost(Rank),
    /// Notification: a rank aborted the job. It precedes any `RankLost` that follows from the abort.
    Aborted(AbortReason),
    /// Notification: the tree of `view` is lost.
    TreeLost {
        /// The view whose tree is lost.
        view: u32,
    },
    /// Reply to `Replan`: the job has moved to a new view.
    Replanned {
        /// The new view: the requested one plus one.
        view: u32,
        /// The rank's new place. Addresses and token are those of the first view.
        membership: Box<Membership>,
    },
    /// Reply to `Replan`: the job's view does not change.
    ReplanRefused {
        /// The view of the request.
        view: u32,
        /// The reason.
        reason: String,
    },
    /// Reply to `Survivors`.
    Survivors {
        /// How many lists the job received before this one.
        round: u32,
        /// The surviving ranks in order, or why the controller cannot tell.
        ranks: Result<Vec<Rank>, String>,
    },
    /// Notification: a tree is available for a job that runs without one. Each rank answers with `Pause`.
    Offer {
        /// The job's current view.
        view: u32,
    },
    /// Reply to `Pause` once all ranks have answered: send `Replan` right before call number `call`.
    MoveAt {
        /// The view of the offer.
        view: u32,
        /// The call before which all ranks move: the highest that any rank named.
        call: u64,
    },
    /// Notification: the offer is withdrawn.
    OfferWithdrawn,
    /// Notification: the job's position in the queue has changed. `None`: it is no longer queued.
    Queued(Option<QueuePosition>),
    /// Reply to `Resume`: this controller has taken the job over.
    Resumed {
        /// The job's new view, which no earlier controller has used.
        view: u32,
    },
    /// To clients that know several addresses: the controller's term, at once and repeatedly. A controller without a
    /// pair sends it once, with term 0.
    Leading(TermClaim),
    /// Reply to `Peer`.
    Peer(PeerReport),
    /// Before `Joined`: run a device for the ranks on this rank's host. If it fails, answer with `HostDeviceFailed`. To
    /// a rank that runs one, `Left` arrives once these ranks have left, too.
    LeadHost(HostLead),
    /// Before `Joined` or `Replanned`: probe the path to the leaf of the tree that is planned. Answered with
    /// `PathProbed`.
    ProbePath(Box<PathToProbe>),
    /// Reply to `Update`.
    Updated(Box<UpdateReply>),
}

/// A rank's place in a complete job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Membership {
    /// The rank's place in the tree, or why there is no tree.
    pub tree: Result<TreeMembership, String>,
    /// The job's position in the queue, if it waits for resources that other jobs hold.
    pub queue: Option<QueuePosition>,
    /// The trees that were planned when the job started.
    pub striping: Striping,
    /// Where each rank accepts connections for host collectives, in order of rank.
    pub mesh: Vec<SocketAddr>,
    /// Where each rank accepts connections for recovery, in order of rank.
    pub recovery_mesh: Vec<SocketAddr>,
    /// The job's secret, which authenticates connections between its ranks.
    pub secret: JobSecret,
    /// The expression of a declared order: each node's children in order, root first. That of the tree or, without a
    /// tree, one node with all ranks.
    pub expression: Vec<Vec<Child>>,
    /// The constants of the cost model.
    pub table: CostTable,
    /// How the job's ranks lie. They keep what they got when the job started.
    pub shape: Shape,
}

/// A rank's place in its tree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TreeMembership {
    /// The aggregation group.
    pub group: GroupId,
    /// The group's epoch.
    pub epoch: Epoch,
    /// The name of the rank's leaf device.
    pub leaf: String,
    /// The rank's host, if the controller knows a fabric. Sub-communicators join with it.
    pub host: Option<String>,
    /// The rank's index among the leaf's children.
    pub child: ChildIndex,
    /// The key of the link to the leaf.
    pub key: u64,
    /// The multicast address of the leaf's results, if this rank is to listen there. `None` for zero-copy ranks, whose
    /// results do not arrive in packets.
    pub shared: Option<SharedLink>,
    /// The receive addresses of the leaf's shards.
    pub parents: Vec<Addr>,
    /// The maximum window, in chunks.
    pub window_max: u16,
    /// The initial window, in chunks.
    pub window_start: u16,
    /// The maximum payload of a chunk, in bytes.
    pub chunk_len_bytes: u16,
    /// The timers of the hop.
    pub timers: TimersConfig,
    /// The tree's properties that path selection uses.
    pub facts: TreeFacts,
    /// Where to attach for zero-copy. If set, the leaf ignores contributions in packets from this rank.
    pub attach: Option<AttachPoint>,
    /// Why a rank that may use zero-copy uses packets.
    pub packets_reason: Option<String>,
}

impl TreeMembership {
    /// Configure the endpoint of rank `rank` of `ranks`, with a fresh salt. Pass `shared_key` if the port listens on
    /// the multicast address.
    pub fn endpoint(&self, (rank, ranks): (Rank, u32), shared_key: Option<u64>, table_version: u32) -> EndpointConfig {
        let mut salt = [0; 4];
        // The salt distinguishes incarnations. If the system has no randomness, the key, which differs by group, does.
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
