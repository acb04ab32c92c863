//! The report behind `sumac status`.

use super::QueuePosition;
use crate::controller::resources::Quota;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use sumac_hal::ctrl::update::SlotsStatus;
use sumac_hal::ctrl::{AttachPoint, DeviceCapabilities, Stats};
use sumac_hal::ids::GroupId;
use sumac_hal::port::Addr;

/// The state of a controller.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// Switches, hosts and aggregation nodes of the fabric, if one was given.
    pub fabric: Option<FabricStatus>,
    /// The connected devices, by name.
    pub devices: Vec<DeviceStatus>,
    /// The jobs, by name.
    pub jobs: Vec<JobStatus>,
    /// How many jobs were left out to keep the report within its size limit.
    pub jobs_left_out: u32,
    /// The tenants that have jobs or a quota, by name.
    pub tenants: Vec<TenantStatus>,
    /// The latest recoveries of all jobs, also of those that have ended; the latest comes first.
    pub recoveries: Vec<RecoveryStatus>,
    /// The controller's part in a pair, if it has one.
    pub pair: Option<PairStatus>,
}

/// The role of a controller of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PairRole {
    /// It serves devices and ranks.
    Active,
    /// It waits to take over.
    Standby,
}

impl fmt::Display for PairRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Active => "active",
            Self::Standby => "standby",
        })
    }
}

/// A controller's part in a pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairStatus {
    /// Its role.
    pub role: PairRole,
    /// The highest term that it has seen: its own, if it is active.
    pub term: u64,
    /// The other controller.
    pub peer: SocketAddr,
    /// The other one's role; `None` if it does not answer.
    pub peer_role: Option<PairRole>,
}

/// One recovery of a job: from the loss of a tree or of ranks, or from the end of an earlier controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryStatus {
    /// The job.
    pub job: String,
    /// The view that ended.
    pub view: u32,
    /// What was lost, and how that was noticed.
    pub cause: String,
    /// How long ago the controller learned of it, in milliseconds.
    pub began_ms_ago: u64,
    /// How long it took until the ranks could continue, in milliseconds; `None` while it lasts.
    pub took_ms: Option<u64>,
    /// How it ended; `None` while it lasts.
    pub outcome: Option<RecoveryOutcome>,
}

/// How a recovery ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RecoveryOutcome {
    /// The job has another tree.
    NewTree,
    /// The job continues without a tree.
    NoTree {
        /// Why there is none.
        reason: String,
    },
    /// The surviving ranks continue among themselves.
    Survivors {
        /// How many they are.
        ranks: u32,
    },
    /// The job ended meanwhile.
    JobEnded,
}

/// Consecutive ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRange {
    /// The first of them.
    pub first: u32,
    /// The last of them.
    pub last: u32,
}

impl fmt::Display for RankRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { first, last } if first == last => write!(f, "{first}"),
            Self { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

/// A tenant: what its groups hold, and its quota.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Its name.
    pub name: String,
    /// Groups held.
    pub groups: u64,
    /// Slots held per shard, on the device where the tenant holds most.
    pub slots: u64,
    /// Memory held per shard for slots and redo slots, on the device where the tenant holds most, in bytes.
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
    /// Where its shards receive packets.
    pub data_addrs: Vec<Addr>,
    /// Its capabilities.
    pub capabilities: DeviceCapabilities,
    /// Where ranks attach for zero-copy; `None` if the device does not support it.
    #[serde(rename = "bus")]
    pub attach: Option<AttachPoint>,
    /// Its counters, or why they are missing.
    pub stats: Result<Stats, String>,
    /// The slots that it boots from; `None` if it cannot update itself.
    pub slots: Option<SlotsStatus>,
}

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// Its name.
    pub name: String,
    /// Its tenant.
    pub tenant: String,
    /// How many ranks are connected.
    pub joined: u32,
    /// How many ranks it has.
    pub world: u32,
    /// The ranks that are not connected, in order: they have not joined, have left, or are lost. Of many ranges, the
    /// first ones.
    pub missing: Vec<RankRange>,
    /// Whether it has started.
    pub running: bool,
    /// The current view: how often it was placed anew since it started.
    pub view: u32,
    /// The tree, or why there is none. A lost tree, or one with a disconnected device, counts as none. `None` before
    /// the job has started.
    pub tree: Option<Result<JobTree, String>>,
    /// Its position in the queue for a tree.
    pub queue: Option<QueuePosition>,
    /// Whether a tree is on offer to the job, or being reserved for it.
    pub is_offered: bool,
    /// The further trees that its operations are spread over.
    pub stripes: Vec<StripeStatus>,
}

/// A further tree of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StripeStatus {
    /// The tree's number. The job's own tree has 0.
    pub index: u8,
    /// Its relative rate.
    pub share: u16,
    /// Its view: how often it was placed anew.
    pub view: u32,
    /// The tree, or why there is none.
    pub tree: Result<JobTree, String>,
}

impl JobStatus {
    /// How many trees the job's operations are spread over.
    pub fn trees(&self) -> u32 {
        let further = self.stripes.iter().filter(|stripe| stripe.tree.is_ok()).count();
        further as u32 + u32::from(matches!(self.tree, Some(Ok(_))))
    }
}

/// A job's tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobTree {
    /// The group.
    pub group: GroupId,
    /// Levels of nodes.
    pub levels: u32,
    /// The devices, root first.
    pub devices: Vec<String>,
    /// How many ranks use zero-copy; the others use packets.
    #[serde(rename = "by_reference")]
    pub zero_copy_ranks: u32,
    /// How the ranks reach the tree: a name of [`TreeTransport`](crate::select::TreeTransport).
    pub transport: String,
}
