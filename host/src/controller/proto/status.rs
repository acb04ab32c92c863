//! What a controller says of itself.

use super::QueuePlace;
use crate::controller::books::Quota;
use serde::{Deserialize, Serialize};
use sumac_hal::ctrl::{Bus, DeviceCapabilities, Stats};
use sumac_hal::ids::GroupId;
use sumac_hal::port::Addr;

/// The state of the controller's world.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// Switches, hosts and aggregation nodes of the fabric, if one was given.
    pub fabric: Option<FabricStatus>,
    /// The devices that are connected, by name.
    pub devices: Vec<DeviceStatus>,
    /// The jobs, by name.
    pub jobs: Vec<JobStatus>,
    /// How many jobs the report leaves out, as it would be too long.
    pub jobs_left_out: u32,
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
    /// The group and its devices, root first, or why there is none: one that is lost, or of which a device is not connected,
    /// counts as none. `None` before the job is complete.
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
