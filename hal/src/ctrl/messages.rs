//! What a controller and a device say to each other.

use super::stats::Stats;
use crate::ids::{BootId, ChildIndex, Epoch, GroupId, TreeId};
use crate::key::GroupSecret;
use crate::port::Addr;
use crate::shard::MAX_SHARDS;
use crate::uplink::HopTimers;
use crate::wire::MAX_CHILDREN;
use core::net::SocketAddr;
use core::num::NonZeroU32;
use core::time::Duration;
use heapless::{String, Vec};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The longest name of a device in bytes.
pub const MAX_NAME_LEN: usize = 64;

/// A device's name, as the fabric knows it.
pub type Name = String<MAX_NAME_LEN>;

/// A request or response with the number that pairs them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Envelope<M> {
    /// Chosen by the requester, echoed by the response.
    pub id: u32,
    /// The message.
    pub message: M,
}

/// What a device says first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Announce {
    /// Its name in the fabric.
    pub name: Name,
    /// Its life.
    pub boot_id: BootId,
    /// What it can do.
    pub capabilities: DeviceCapabilities,
    /// Where its shards receive packets, in order of shard.
    pub data_addrs: Vec<Addr, MAX_SHARDS>,
    /// How ranks on its own machine contribute by reference; `None` if they can't.
    pub bus: Option<Bus>,
}

/// A device's bus towards the processes of its machine: what the feature `shm` speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bus {
    /// The machine: processes that name another one can't share memory with the device.
    pub machine: Name,
    /// The name that the device listens on.
    pub socket: Name,
    /// Whose process listens there.
    pub user: BusUser,
    /// The memory for redo slots, in bytes.
    pub redo_memory_bytes: u64,
    /// Where ranks of other hosts ask to be let in ([`remote`](crate#by-reference)), over TCP; `None` if they can't.
    pub remote: Option<SocketAddr>,
}

/// The user of the process that a device's bus is reached by, as its system numbers users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusUser {
    /// The user.
    pub uid: u32,
    /// Whether ranks of all users are let in, not only of this one and of the superuser.
    pub serves_all: bool,
}

impl BusUser {
    /// The superuser, whose device serves all.
    pub const ROOT: Self = Self { uid: 0, serves_all: true };

    /// Tell whether ranks of a user are let in.
    pub const fn serves(self, rank: u32) -> bool {
        self.serves_all || rank == self.uid || rank == 0
    }
}

/// A set of a node's children.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ChildMask([u64; MAX_CHILDREN / 64]);

impl ChildMask {
    /// The empty set.
    pub const EMPTY: Self = Self([0; MAX_CHILDREN / 64]);

    /// Put a child in; one that no node can have is left out.
    pub fn insert(&mut self, child: ChildIndex) {
        if let Some(word) = self.0.get_mut(usize::from(child.0) / 64) {
            *word |= 1 << (child.0 % 64);
        }
    }

    /// Tell whether a child is in.
    pub fn contains(&self, child: ChildIndex) -> bool {
        self.0.get(usize::from(child.0) / 64).is_some_and(|word| word >> (child.0 % 64) & 1 == 1)
    }

    /// Tell whether no child is in.
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Return the children that are in, in order.
    pub fn iter(&self) -> impl Iterator<Item = ChildIndex> {
        (0..MAX_CHILDREN as u16).map(ChildIndex).filter(|child| self.contains(*child))
    }
}

/// The first message on a connection to a controller: who dials.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
// One a connection: see `Request` on its size.
#[allow(clippy::large_enum_variant)]
pub enum Greeting {
    /// A device, which then answers requests.
    Device(Announce),
    /// A program on a host, which then sends requests of its own kind.
    Client,
}

/// What a device can do, over all its shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceCapabilities {
    /// The longest packet on its port, in bytes.
    pub max_packet_len_bytes: u32,
    /// What its port buffers, in bytes.
    pub receive_buffer_bytes: u32,
    /// Groups that it can hold.
    pub groups: u16,
    /// Children that one group can have.
    pub children: u16,
    /// Slots of all groups, in one shard.
    pub slots: u32,
    /// Bytes for accumulators and staging, in one shard.
    pub slot_memory_bytes: u64,
    /// Bit n: element type number n ([`Dtype::to_wire`](crate::op::Dtype::to_wire)).
    pub dtypes: u32,
    /// Bit n: operator number n.
    pub ops: u32,
    /// Bit n: collective number n.
    pub collectives: u32,
}

/// In which order the contributions of a slot combine (PROTOCOL 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Order {
    /// As they come: least memory, bits of float sums may differ from run to run.
    Arrival,
    /// Left to right over the children, ((c0 + c1) + c2) + ...
    TreeFold,
    /// Pairwise over aligned blocks of children, (c0 + c1) + (c2 + c3), ...
    TreePairwise,
}

impl Order {
    /// Return how many chunk buffers a slot of this order needs for `children`.
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
    /// Where the parent's shards receive, in order of shard.
    pub data_addrs: Vec<Addr, MAX_SHARDS>,
    /// Which child of the parent this node is.
    pub child: ChildIndex,
}

/// A shared address that a parent sends results to, as one of its children knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SharedLink {
    /// What to listen to ([`Port::join`](crate::port::Port::join)) for the parent's first shard; its other shards take
    /// the addresses [behind](Addr::behind) it, so that an inner node's shard hears only what it needs.
    pub addr: Addr,
    /// The key of what arrives there: the parent's for [`ChildIndex::ALL`].
    pub key: u64,
}

/// A node's place in a tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TreeConfig {
    /// The tree.
    pub tree: TreeId,
    /// `None` at the root.
    pub parent: Option<NodeParent>,
    /// How many children (nodes or ranks) it has here, in declared order.
    pub children: u16,
    /// Which rank each of them is, [`TreeConfig::NODE`] for a node: what ranks are named by that are late. Empty: nobody
    /// is named, and no operation goes on without anybody.
    pub ranks: Vec<u16, MAX_CHILDREN>,
}

impl TreeConfig {
    /// In place of a rank: the child is a node.
    pub const NODE: u16 = u16::MAX;
}

/// The timers of a group's hops in microseconds; see [`HopTimers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TimersConfig {
    /// The least time before a probe.
    pub probe_min_us: u32,
    /// The most, after back-off.
    pub probe_max_us: u32,
    /// Silence after which a hop is dead.
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

/// A group on one node of its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupConfig {
    /// The group.
    pub group: GroupId,
    /// The tree that it lives on.
    pub tree: TreeId,
    /// Its first epoch.
    pub epoch: Epoch,
    /// In which order contributions combine.
    pub order: Order,
    /// What the children's keys are made of.
    pub secret: GroupSecret,
    /// This node's key as a child of its parent; 0 at the root.
    pub parent_key: u64,
    /// Where this node's first shard may send one result to all its children at once, the others
    /// [behind](Addr::behind) it; `None`: to each of them only.
    pub shared: Option<Addr>,
    /// The shared address of its parent, if this node is to listen there. A board whose port can't, takes it out.
    pub parent_shared: Option<SharedLink>,
    /// The most contributions that a rank may have in flight, over all shards; at most half the slots.
    pub window_max: u16,
    /// Slots on this node, in each shard; at least twice what of the window can fall into one shard.
    pub slots: u16,
    /// The payload limit of a packet in this group, in bytes: the smallest of its tree.
    pub chunk_len_bytes: u16,
    /// The ranks of the communicator, over the whole tree: what the root divides averages by.
    pub ranks: NonZeroU32,
    /// How long it lives without a valid packet or a renewal; an answer to what a node has asked for itself is none.
    pub lease_ms: u32,
    /// The timers of its hops.
    pub timers: TimersConfig,
    /// The children that contribute by reference, over the device's [`Bus`]: from packets nothing is taken for theirs.
    pub by_reference: ChildMask,
}

/// What a controller asks of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
// One message exists at a time, on the control path: its size costs nothing, and a device has no heap to box in.
#[allow(clippy::large_enum_variant)]
pub enum Request {
    /// Say who you are, again.
    Hello,
    /// Take a place in a tree.
    InstallTree(TreeConfig),
    /// Forget a tree that no group lives on.
    RemoveTree(TreeId),
    /// Reserve a group's slots and memory, all or nothing.
    CreateGroup(GroupConfig),
    /// Extend a group's lease by its full length.
    RenewGroup(GroupId),
    /// Free a group.
    ReleaseGroup(GroupId),
    /// Report counters and use.
    Stats,
    /// Free all groups and trees.
    Reset,
}

/// What a device answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
// One response exists at a time, on the control path: its size costs nothing, and a device has no heap to box in.
#[allow(clippy::large_enum_variant)]
pub enum Response {
    /// To Hello.
    Hello(Announce),
    /// Done.
    Done,
    /// Not done, nothing changed.
    Refused(Refusal),
    /// To Stats.
    Stats(Stats),
}

/// Why a device refuses; nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The group exists.
    #[error("{0} exists already; release it first")]
    GroupExists(GroupId),
    /// No such group.
    #[error("{0} does not exist here; it was released, its lease ran out, or the device restarted")]
    NoGroup(GroupId),
    /// No such tree.
    #[error("{0} is not installed here")]
    NoTree(TreeId),
    /// A group lives on the tree.
    #[error("{0} is in use by a group")]
    TreeInUse(TreeId),
    /// Too many trees or groups.
    #[error("all {limit} group entries are taken; release a group")]
    NoEntry {
        /// Entries of this device.
        limit: u16,
    },
    /// The tree's child count is out of range.
    #[error("{children} children; this device takes 1 to {limit}")]
    Children {
        /// Asked for.
        children: u16,
        /// The most.
        limit: u16,
    },
    /// Not enough child entries left.
    #[error("{need} child entries are needed in one run, which the device does not have free")]
    NoChildren {
        /// Asked for.
        need: u32,
    },
    /// Not enough slots left.
    #[error("{need} slots are needed in one run, which the device does not have free")]
    NoSlots {
        /// Asked for, per shard.
        need: u32,
    },
    /// Not enough slot memory left.
    #[error("{need} bytes of slot memory are needed in one run, which the device does not have free")]
    NoMemory {
        /// Asked for, per shard.
        need: u64,
    },
    /// `window_max` breaks `1 <= window_max <= slots / 2` or the protocol's limit.
    #[error(
        "window {window} with {slots} slots; the window must be at least 1, at most half the slots and at most 256"
    )]
    Window {
        /// Asked for.
        window: u16,
        /// Asked for.
        slots: u16,
    },
    /// The chunk does not fit the device's packets or holds no element.
    #[error("chunk of {chunk_len_bytes} bytes; this device takes 64 to {limit}, in multiples of 16")]
    Chunk {
        /// Asked for.
        chunk_len_bytes: u16,
        /// The most.
        limit: u32,
    },
    /// The parent has another number of shards.
    #[error("the parent has {parent} shards, this device {own}; they must be equal")]
    Shards {
        /// Addresses given.
        parent: u16,
        /// Of this device.
        own: u16,
    },
    /// Children can't contribute by reference here.
    #[error("the device takes no contributions by reference: {0}")]
    NoBus(NoBus),
    /// Not enough memory left for redo slots.
    #[error("{need} bytes of memory for redo slots are needed in one run, which the device does not have free")]
    NoRedoMemory {
        /// Asked for.
        need: u64,
    },
    /// The request is not known to this version.
    #[error("the device does not know this request")]
    Unknown,
}

/// Why children can't contribute by reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum NoBus {
    /// The board has none.
    #[error("it has no bus")]
    None,
    /// The engine's chains are too short, or its steps, or its alignment is more than chunks keep.
    #[error("its engine does not take chunks of the group's length")]
    Engine,
    /// The group is not among those that an engine can tell apart.
    #[error("the groups that its engine can tell apart are taken")]
    Groups,
}
