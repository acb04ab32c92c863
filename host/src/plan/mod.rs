//! Aggregation trees: which switch is the root, which combine, and over which cables the contributions travel.
//!
//! # What is planned
//! Each rank's contribution travels along a shortest path of switches towards the root. It enters the tree at the
//! first switch with an aggregation node, the rank's **leaf** (normally the switch that its host is cabled to).
//! Switches where branches join aggregate; switches that a single branch passes, or without a usable aggregation
//! node, only forward. Rank i is the i-th selected host; ranks are never renumbered, and the children of a node are in the order of
//! their lowest rank.
//!
//! Among all roots the planner takes the tree with, in this order: the fewest levels; the least link sharing (the
//! most tree edges that one cable carries; parallel cables count apart, hence edges are spread over them);
//! an aligned expression; the fewest cables in all; the fewest nodes; the first root in natural name order. The
//! same input gives the same plan.
//!
//! Levels count from the root: the root is **level 0**, and a plan has `levels` of them. If one switch holds all
//! hosts there is one level. Trees of two levels come from a maximum flow of disjoint branches and are exact; deeper
//! ones are built layer by layer and are good, not proved: [`Plan::optimal`] tells which.
//!
//! A node with more children than its limit is split: runs of children go to further aggregation nodes nearby.
//!
//! [`verify()`] checks a plan without any of the planner's code.

mod aligned;
mod render;
mod route;
mod select;
#[cfg(test)]
mod tests;
mod tree;
mod verify;

pub use select::HostSelection;
pub use verify::{Violation, verify};

use crate::topo::{Fabric, HostId, LinkId, SwitchId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;

/// What the nodes of a tree can take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Most children of a node, ranks and nodes together; at least 2.
    pub max_children: usize,
    /// Slots that the group needs on every node.
    pub slots_needed: u32,
    /// The devices that can be used, by switch, or `None`: every aggregation node of the fabric, without limits of its own.
    pub devices: Option<BTreeMap<SwitchId, DeviceLimits>>,
}

impl Default for Limits {
    /// 256 children, as the wire format allows; any device.
    fn default() -> Self {
        Self { max_children: 256, slots_needed: 0, devices: None }
    }
}

impl Limits {
    /// Return how many children the switch's aggregation node may have.
    ///
    /// # Errors
    /// The first condition that rules the switch out as a node.
    pub fn children_max(&self, fabric: &Fabric, switch: SwitchId) -> Result<usize, Refusal> {
        if fabric.switch(switch).aggregation.is_none() {
            return Err(Refusal::NoAggregationNode);
        }
        let Some(devices) = &self.devices else { return Ok(self.max_children) };
        let device = devices.get(&switch).ok_or(Refusal::NoDevice)?;
        if device.slots_free < self.slots_needed {
            return Err(Refusal::TooFewSlots { free: device.slots_free, needed: self.slots_needed });
        }
        match device.max_children.min(self.max_children) {
            0 | 1 => Err(Refusal::TooFewChildren { max_children: device.max_children }),
            usable => Ok(usable),
        }
    }
}

/// What one device can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Most children of a node there.
    pub max_children: usize,
    /// Slots that are not promised to another group.
    pub slots_free: u32,
}

/// Why a switch cannot be a node of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The fabric knows of no aggregation node there.
    #[error("it has no aggregation node")]
    NoAggregationNode,
    /// No usable device is registered there.
    #[error("no device is registered for it")]
    NoDevice,
    /// The device's slots are taken.
    #[error("its device has {free} free slots, the group needs {needed}")]
    TooFewSlots {
        /// Free slots.
        free: u32,
        /// Slots that the group needs.
        needed: u32,
    },
    /// The device cannot combine anything.
    #[error("its device takes {max_children} children, a node needs at least 2")]
    TooFewChildren {
        /// The device's limit.
        max_children: usize,
    },
}

/// Why there is no plan. The message names the first condition that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The selection is empty.
    #[error("no host is selected; a tree needs at least one")]
    NoHosts,
    /// More hosts are asked for than there are.
    #[error("{asked} hosts are asked for, the fabric has {available}")]
    TooManyHosts {
        /// As many as asked for.
        asked: usize,
        /// As many as there are.
        available: usize,
    },
    /// A name or GUID that no host has.
    #[error("no host is called `{name}`{}", select::hint(near))]
    UnknownHost {
        /// The name as asked for.
        name: String,
        /// Names that look like it, the nearest first.
        near: Vec<String>,
    },
    /// A description that several hosts have.
    #[error("{} hosts are called `{name}`; name one by its GUID: {}", guids.len(), select::some_of(guids))]
    AmbiguousHost {
        /// The name as asked for.
        name: String,
        /// The GUIDs of those hosts.
        guids: Vec<String>,
    },
    /// A host is listed twice.
    #[error("host `{name}` is listed twice; it holds one rank")]
    DuplicateHost {
        /// Its name.
        name: String,
    },
    /// A child limit with which nothing can be combined.
    #[error("a limit of {max_children} children is too small; a node combines at least 2")]
    ChildLimitTooSmall {
        /// The limit.
        max_children: usize,
    },
    /// No switch can be a node.
    #[error("none of the {switches} switches can aggregate; `{first}`: {reason}")]
    NoUsableNode {
        /// As many switches as there are.
        switches: usize,
        /// One of them.
        first: String,
        /// Why that one cannot.
        reason: Refusal,
    },
    /// A host from which no usable aggregation node can be reached.
    #[error("host `{host}` has no path to a switch that can aggregate; check its cables")]
    Isolated {
        /// Its name.
        host: String,
    },
    /// No aggregation node is reached by all hosts.
    #[error("no root reaches all hosts: `{one}` and `{other}` are in parts of the fabric that are not connected")]
    Disconnected {
        /// A host.
        one: String,
        /// A host that no root of the other reaches.
        other: String,
    },
    /// A node has too many children, and no further node is left to take some of them.
    #[error(
        "`{node}` would have {children} children, its limit is {limit}, and no free aggregation node within reach takes \
         {chunk} of them; raise the limit or use fewer hosts"
    )]
    ChildLimit {
        /// The node.
        node: String,
        /// The children that the tree wants there.
        children: usize,
        /// The node's limit.
        limit: usize,
        /// As many children as a further node would take.
        chunk: usize,
    },
}

/// A child of a node: another node of the plan, or a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Child {
    /// The node with this index in [`Plan::nodes`].
    Node(usize),
    /// A rank.
    Rank(Rank),
}

/// A node of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanNode {
    /// The switch whose aggregation node it is.
    pub switch: SwitchId,
    /// The switch's name, unique in the fabric.
    pub name: String,
    /// The switch's GUID.
    pub guid: String,
    /// Distance from the root in nodes; the root has 0.
    pub level: usize,
    /// The parent's index in [`Plan::nodes`]; `None` for the root.
    pub parent: Option<usize>,
    /// The children in declared order: by their lowest rank.
    pub children: Vec<Child>,
    /// The cables to the parent's switch, in order; empty for the root.
    pub path: Vec<LinkId>,
}

/// A rank and where it enters the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRank {
    /// The rank: the index in [`Plan::ranks`].
    pub rank: Rank,
    /// Its host.
    pub host: HostId,
    /// The host's name, unique in the fabric.
    pub name: String,
    /// The host's GUID.
    pub guid: String,
    /// The node that it contributes to, by its index in [`Plan::nodes`].
    pub leaf: usize,
    /// The cables to that node's switch, in order.
    pub path: Vec<LinkId>,
}

/// An aggregation tree. Its JSON form (`serde`) has the keys `levels root max_children max_link_sharing aligned
/// optimal nodes[{name,guid,level,parent,children}] ranks[{rank,host,guid,leaf}]`, in which nodes are named and a rank
/// among the children is `"rank N"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Number of node levels: 1 + the greatest [`PlanNode::level`].
    pub levels: usize,
    /// The most children that a node has.
    pub max_children: usize,
    /// The most tree edges (rank to leaf, node to parent) that share one cable.
    pub max_link_sharing: usize,
    /// Whether nodes that combine their children pairwise (neighbours first, then pairs of pairs) evaluate the same
    /// expression as pairing all ranks so, for a power-of-two number of ranks: then halving-doubling with distances
    /// 1, 2, 4, ... gives the same bits.
    pub aligned: bool,
    /// Whether no tree of shortest paths has fewer levels, or as few and less link sharing. `false`: not known.
    pub optimal: bool,
    /// The nodes, breadth first: the root is node 0, and parents come before children.
    pub nodes: Vec<PlanNode>,
    /// The ranks, in order.
    pub ranks: Vec<PlanRank>,
}

impl Plan {
    /// Return the root.
    pub fn root(&self) -> &PlanNode {
        &self.nodes[0]
    }
}

/// Plan the aggregation tree of the selected hosts. See the [module](self) for what is chosen.
///
/// # Errors
/// [`PlanError`] names the first condition that failed.
///
/// ```
/// use sumac::{plan, topo::{Fabric, LeafSpine}};
/// let fabric = Fabric::leaf_spine(LeafSpine { leaves: 4, spines: 2, hosts_per_leaf: 8, cables: 1, rate: None })?;
/// let plan = plan::plan(&fabric, &"16".parse()?, &plan::Limits::default())?;
/// assert_eq!((plan.levels, plan.max_link_sharing, plan.aligned), (2, 1, true));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn plan(fabric: &Fabric, hosts: &HostSelection, limits: &Limits) -> Result<Plan, PlanError> {
    tree::best(fabric, &hosts.resolve(fabric)?, limits)
}
