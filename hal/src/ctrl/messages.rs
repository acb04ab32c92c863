//! The messages between a controller and a device, and the types that configure a device.

use super::refusal::Refusal;
use super::stats::Stats;
use super::term::TermClaim;
use super::update::{SlotsStatus, UpdateRequest, UpdateStatus, UpdateText};
use crate::ids::{BootId, ChildIndex, Epoch, GroupId, TreeId};
use crate::key::GroupSecret;
use crate::port::Addr;
use crate::shard::MAX_SHARDS;
use crate::uplink::HopTimers;
use crate::wire::MAX_CHILDREN;
use core::fmt;
use core::net::SocketAddr;
use core::num::NonZeroU32;
use core::time::Duration;
use heapless::{String, Vec};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The longest [`Name`], in bytes.
pub const MAX_NAME_LEN: usize = 64;

/// A name in the fabric, such as a device's.
pub type Name = String<MAX_NAME_LEN>;

/// A request or a response, with the id that matches one to the other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Envelope<M> {
    /// Chosen by the requester; the response repeats it.
    pub id: u32,
    /// The message.
    pub message: M,
}

/// What a device reports about itself when it connects, and on [`Request::Identify`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Announce {
    /// The device's name in the fabric.
    pub name: Name,
    /// The device's current incarnation.
    pub boot_id: BootId,
    /// Limits and supported operations.
    pub capabilities: DeviceCapabilities,
    /// Where the device's shards receive packets, in shard order.
    pub data_addrs: Vec<Addr, MAX_SHARDS>,
    /// Where ranks attach for zero-copy; `None` if the device does not support it.
    pub attach: Option<AttachPoint>,
    /// The slots that the device boots from; `None` if it cannot update itself.
    pub slots: Option<SlotsStatus>,
}

/// Where ranks attach to a device for zero-copy: over shared memory (feature `shm`), or over RDMA from another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachPoint {
    /// The device's machine. Only processes on the same machine can share memory with the device.
    pub machine: Name,
    /// The name of the Unix socket that the device listens on.
    pub socket: Name,
    /// The user of the process that listens there.
    pub user: DeviceUser,
    /// Total memory for redo slots (PROTOCOL 7), in bytes.
    pub redo_memory_bytes: u64,
    /// The TCP address at which ranks on other hosts attach ([zero-copy over RDMA](crate#zero-copy)); `None` if the
    /// device does not support RDMA.
    pub remote: Option<SocketAddr>,
}

/// The user that a device's process runs as, and whom it serves over shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUser {
    /// The user id.
    pub uid: u32,
    /// Whether ranks of all users may attach. Otherwise only this user and the superuser may.
    pub serves_all: bool,
}

impl DeviceUser {
    /// The superuser, whose device serves every user.
    pub const ROOT: Self = Self { uid: 0, serves_all: true };

    /// Return whether ranks of user `uid` may attach.
    pub const fn serves(self, uid: u32) -> bool {
        self.serves_all || uid == self.uid || uid == 0
    }
}

/// A set of a node's children.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ChildMask([u64; MAX_CHILDREN / 64]);

impl ChildMask {
    /// The empty set.
    pub const EMPTY: Self = Self([0; MAX_CHILDREN / 64]);

    /// Add a child. An index of [`MAX_CHILDREN`] or more is ignored.
    pub fn insert(&mut self, child: ChildIndex) {
        if let Some(word) = self.0.get_mut(usize::from(child.0) / 64) {
            *word |= 1 << (child.0 % 64);
        }
    }

    /// Return whether a child is in the set.
    pub fn contains(&self, child: ChildIndex) -> bool {
        self.0.get(usize::from(child.0) / 64).is_some_and(|word| word >> (child.0 % 64) & 1 == 1)
    }

    /// Return whether the set is empty.
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Iterate over the children in the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = ChildIndex> {
        (0..MAX_CHILDREN as u16).map(ChildIndex).filter(|child| self.contains(*child))
    }
}

/// The first message on a connection to a controller: who is connecting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
// Sent once per connection; see `Request` on the size.
#[allow(clippy::large_enum_variant)]
pub enum Hello {
    /// A device. It answers requests from then on.
    Device(Announce),
    /// A program on a host, such as a rank. It sends requests from then on.
    Client,
    /// A client that knows several addresses. The controller answers at once with its term, or refuses because it is
    /// not the active one of its pair, so that the client can try the next address.
    FailoverClient {
        /// The highest term that the client has seen. Controllers choose higher ones.
        seen: u64,
    },
    /// A device that a rank runs on its host, for the ranks of its job there. It answers requests from then on, and
    /// serves this job alone.
    HostDevice {
        /// The device. The controller has chosen its name.
        announce: Announce,
        /// The job, and the rank that runs the device.
        ticket: JobTicket,
    },
}

/// What lets a device serve the ranks of one job: the controller gives it to the rank that runs the device.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct JobTicket {
    /// The job.
    pub job: Name,
    /// The rank that runs the device.
    pub rank: u32,
    /// Proves that the controller asked this rank.
    pub proof: [u8; 32],
}

/// Hides the proof.
impl fmt::Debug for JobTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobTicket").field("job", &self.job).field("rank", &self.rank).finish_non_exhaustive()
    }
}

/// A device's limits and supported operations, over all its shards unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCapabilities {
    /// The longest packet that the device's port sends or receives, in bytes.
    pub max_packet_len_bytes: u32,
    /// The size of the port's receive buffer, in bytes.
    pub receive_buffer_bytes: u32,
    /// The maximum number of groups.
    pub groups: u16,
    /// The maximum number of children per group.
    pub children: u16,
    /// Slots per shard, shared by all groups.
    pub slots: u32,
    /// Bytes per shard for accumulators and staging.
    pub slot_memory_bytes: u64,
    /// Supported element types: bit n stands for wire number n ([`Dtype::to_wire`](crate::op::Dtype::to_wire)).
    pub dtypes: u32,
    /// Supported operators: bit n stands for wire number n.
    pub ops: u32,
    /// Supported collectives: bit n stands for wire number n.
    pub collectives: u32,
}

/// The order in which the contributions to a slot are combined (PROTOCOL 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Order {
    /// As they arrive. Needs the least memory, but the bits of float sums may differ from run to run.
    Arrival,
    /// Left to right over the children: ((c0 + c1) + c2) + ...
    TreeFold,
    /// Pairwise over aligned blocks of children: (c0 + c1) + (c2 + c3), ...
    TreePairwise,
}

impl Order {
    /// Return how many chunk buffers a slot needs for `children` in this order.
    pub const fn stages(self, children: u16) -> usize {
        match self {
            Self::Arrival => 1,
            Self::TreeFold | Self::TreePairwise => children as usize,
        }
    }
}

/// A node's parent in a tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeParent {
    /// Where the parent's shards receive packets, in shard order.
    pub data_addrs: Vec<Addr, MAX_SHARDS>,
    /// This node's child index at the parent.
    pub child: ChildIndex,
}

/// The shared address to which a parent sends results for all its children at once, as a child uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SharedLink {
    /// The address to join ([`join`](crate::port::MulticastPort::join)) for the parent's first shard. The other shards
    /// use the addresses that [follow](Addr::offset_by), so that an inner node's shard receives only what it needs.
    pub addr: Addr,
    /// The key of packets that arrive there: the parent's key for [`ChildIndex::ALL`].
    pub key: u64,
}

/// A node's place in a tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TreeConfig {
    /// The tree.
    pub tree: TreeId,
    /// The parent; `None` at the root.
    pub parent: Option<NodeParent>,
    /// The number of children (nodes or ranks) on this node, in declared order.
    pub children: u16,
    /// The rank of each child, or [`TreeConfig::NODE`] for a child that is a node. Reports of stragglers use it. If it
    /// is empty, stragglers are not reported and no operation continues without them.
    pub ranks: Vec<u16, MAX_CHILDREN>,
}

impl TreeConfig {
    /// Stands in [`TreeConfig::ranks`] for a child that is a node.
    pub const NODE: u16 = u16::MAX;
}

/// The timers of a group's hops, in microseconds; see [`HopTimers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TimersConfig {
    /// The shortest time before a probe.
    pub probe_min_us: u32,
    /// The longest time before a probe, after back-off.
    pub probe_max_us: u32,
    /// A hop that is silent for this long is dead.
    pub dead_us: u32,
}

impl From<HopTimers> for TimersConfig {
    fn from(timers: HopTimers) -> Self {
        let us = |d: Duration| u32::try_from(d.as_micros()).unwrap_or(u32::MAX);
        Self { probe_min_us: us(timers.probe_min), probe_max_us: us(timers.probe_max), dead_us: us(timers.dead) }
    }
}

impl From<TimersConfig> for HopTimers {
    fn from(config: TimersConfig) -> Self {
        let us = |n: u32| Duration::from_micros(u64::from(n));
        Self { probe_min: us(config.probe_min_us), probe_max: us(config.probe_max_us), dead: us(config.dead_us) }
    }
}

/// A group's configuration on one node of its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupConfig {
    /// The group.
    pub group: GroupId,
    /// The tree that carries the group.
    pub tree: TreeId,
    /// The group's first epoch.
    pub epoch: Epoch,
    /// The order in which contributions are combined.
    pub order: Order,
    /// The secret from which the children's keys are derived.
    pub secret: GroupSecret,
    /// This node's key as a child of its parent; 0 at the root.
    pub parent_key: u64,
    /// The address to which this node's first shard may send a result for all its children at once. The other shards
    /// use the addresses that [follow](Addr::offset_by). `None`: the node sends to each child separately.
    pub shared: Option<Addr>,
    /// The parent's shared address, if this node is to listen there. A board whose port cannot listen there clears it.
    pub parent_shared: Option<SharedLink>,
    /// The maximum number of contributions that a rank may have in flight, over all shards; at most half the slots.
    pub window_max: u16,
    /// Slots per shard on this node: at least twice the part of the window that can fall into one shard.
    pub slots: u16,
    /// The largest payload of a packet in this group, in bytes: the smallest limit in the tree.
    pub chunk_len_bytes: u16,
    /// The number of ranks in the whole tree. The root divides averages by it.
    pub ranks: NonZeroU32,
    /// The lease: how long the group survives without a valid packet or a renewal, in milliseconds. Replies to requests
    /// that the node itself sent do not count.
    pub lease_ms: u32,
    /// The timers of the group's hops.
    pub timers: TimersConfig,
    /// The zero-copy children, which attach at the device's [`AttachPoint`]. Packets in their name are dropped.
    pub zero_copy: ChildMask,
}

/// A request from a controller to a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
// There is one message at a time, on the control path, so its size does not matter; a device has no heap for a box.
#[allow(clippy::large_enum_variant)]
pub enum Request {
    /// Send the [`Announce`] again.
    Identify,
    /// Take a place in a tree.
    InstallTree(TreeConfig),
    /// Remove a tree that no group uses.
    RemoveTree(TreeId),
    /// Create a group: reserve its slots and memory, all or nothing.
    CreateGroup(GroupConfig),
    /// Restart a group's lease.
    RenewGroup(GroupId),
    /// Release a group's resources.
    ReleaseGroup(GroupId),
    /// Report counters and resource usage.
    Stats,
    /// Release all groups and trees.
    Reset,
    /// The device is not registered; the controller closes the connection. Not answered.
    Rejected(Rejection),
    /// The controller is the active one of its pair. Precedes all other requests of a connection, and is repeated.
    Claim(TermClaim),
    /// Find the longest packet that the path to the group's parent carries, and report it. The first such request of a
    /// group begins the search.
    ProbePath(GroupId),
    /// Update the device, or report its slots.
    Update(UpdateRequest),
}

/// Why a controller does not register a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Rejection {
    /// Another device of that name is connected.
    #[error(
        "the controller has a device of that name, {}{}",
        holder.map_or(Described::Unknown, Described::At),
        if *is_alive { "" } else { " and has not answered the controller yet" }
    )]
    NameTaken {
        /// Where the other device receives packets.
        holder: Option<Addr>,
        /// Whether the other device has answered the controller just now. If it has not, it may be an earlier
        /// incarnation whose machine was reset, so the device should try again.
        is_alive: bool,
    },
    /// The controller has as many devices as it accepts.
    #[error("the controller has {limit} devices, its limit; raise it with `sumac controller --max-devices`")]
    TooMany {
        /// The limit.
        limit: u32,
    },
    /// A name in the announcement is not a name of the fabric.
    #[error("the controller does not accept a name in the device's announcement")]
    Name,
    /// The controller uses keys, and the device has none.
    #[error("the controller accepts devices with keys only; give the device its key with `--key-file`")]
    KeyRequired,
    /// The device's key is not good for its name.
    #[error("the device's key is not good for this name; make one with `sumac key new --device NAME`")]
    KeyName,
    /// The controller is the standby of a pair.
    #[error("the controller is the standby of a pair, {}; give the device both addresses", Active(*active))]
    Standby {
        /// The active controller, if the standby knows of one.
        active: Option<SocketAddr>,
    },
    /// The controller has no such job, or did not ask this rank to run a device for it.
    #[error("the controller has not asked this rank to run a device for its job")]
    Ticket,
}

impl Rejection {
    /// Return the message without addresses and limits, for boards on which their formatting costs too much memory.
    pub const fn summary(&self) -> &'static str {
        match self {
            Self::NameTaken { .. } => "the controller has a device of that name",
            Self::TooMany { .. } => "the controller has as many devices as it accepts",
            Self::Name => "the controller does not accept a name in the device's announcement",
            Self::KeyRequired => "the controller accepts devices with keys only",
            Self::KeyName => "the device's key is not good for this name",
            Self::Standby { .. } => "the controller is the standby of a pair",
            Self::Ticket => "the controller has not asked this rank to run a device for its job",
        }
    }

    /// Return whether trying again is futile until something is changed.
    pub const fn is_final(&self) -> bool {
        // A restarted controller learns of the job from its ranks.
        !matches!(self, Self::NameTaken { is_alive: false, .. } | Self::Standby { .. } | Self::Ticket)
    }
}

/// The active controller of a pair, in messages.
struct Active(Option<SocketAddr>);

impl fmt::Display for Active {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(addr) => write!(f, "whose active controller is {addr}"),
            None => f.write_str("which has no active controller yet"),
        }
    }
}

/// Another device, in messages.
enum Described {
    At(Addr),
    Unknown,
}

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At(addr) => write!(f, "which receives packets at {addr}"),
            Self::Unknown => f.write_str("which announced no address"),
        }
    }
}

/// A device's response to a [`Request`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
// See `Request` on the size.
#[allow(clippy::large_enum_variant)]
pub enum Response {
    /// Response to [`Request::Identify`].
    Announce(Announce),
    /// The request was carried out.
    Done,
    /// The request was refused; nothing changed.
    Refused(Refusal),
    /// Response to [`Request::Stats`].
    Stats(Stats),
    /// Response to [`Request::ProbePath`]: the longest packet in bytes, in both directions. `None` while it is not
    /// known.
    Path {
        /// The length, in steps of [`STEP_BYTES`](crate::path_mtu::STEP_BYTES).
        max_packet_len_bytes: Option<u32>,
    },
    /// Response to [`Request::Update`].
    Update(UpdateStatus),
    /// Response to [`Request::Update`]: refused for this reason, and nothing changed.
    UpdateRefused(UpdateText),
}
