//! Plans aggregation trees: the root, the aggregating switches, and the cables that contributions travel over.
//!
//! # What is planned
//! Each rank's contribution travels along a shortest path of switches to the root. It enters the tree at the first
//! switch with an aggregation node, the rank's **leaf** (normally the switch that its host is cabled to). Switches
//! where branches join aggregate. Switches with a single branch, or without a usable aggregation node, only forward.
//! Rank i is the i-th selected host; ranks are never renumbered, and the children of a node are ordered by their lowest
//! rank.
//!
//! Among all roots the planner selects the tree with, in this order: the fewest levels; the least link sharing (the
//! maximum number of tree edges on one cable; edges are spread over parallel cables); an aligned expression; the fewest
//! cables; the fewest nodes; the first root in natural name order. The same input yields the same plan.
//!
//! Levels count from the root, which is **level 0**. If one switch connects all hosts, there is one level. Trees of two
//! levels come from a maximum flow of disjoint branches and are optimal. Deeper ones are built layer by layer without a
//! proof; [`Plan::optimal`] tells the difference.
//!
//! A node with more children than its limit is split: runs of children move to further aggregation nodes nearby.
//!
//! [`verify()`] checks a plan independently of the planner's code.

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

/// Limits on the nodes of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of children of a node, ranks and nodes together; at least 2.
    pub max_children: usize,
    /// Slots that the group needs on every node.
    pub slots_needed: u32,
    /// The usable devices, by switch. `None` allows every aggregation node of the fabric, without limits of its own.
    pub devices: Option<BTreeMap<SwitchId, DeviceLimits>>,
}

impl Default for Limits {
    /// 256 children, as the wire format allows; any device.
    fn default() -> Self {
        Self { max_children: 256, slots_needed: 0, devices: None }
    }
}

impl Limits {
    /// The maximum number of children of the switch's aggregation node.
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

/// The limits of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Maximum number of children.
    pub max_children: usize,
    /// Slots that are not claimed by other groups.
    pub slots_free: u32,
}

/// Why a switch cannot be a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The fabric has no aggregation node there.
    #[error("it has no aggregation node")]
    NoAggregationNode,
    /// No usable device is registered there.
    #[error("no device is registered for it")]
    NoDevice,
    /// The device has too few free slots.
    #[error("its device has {free} free slots; the group needs {needed}")]
    TooFewSlots {
        /// Free slots.
        free: u32,
        /// Slots that the group needs.
        needed: u32,
    },
    /// The device supports too few children.
    #[error("its device supports {max_children} children; a node needs at least 2")]
    TooFewChildren {
        /// The device's limit.
        max_children: usize,
    },
}

/// Why there is no plan: the first condition that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The selection is empty.
    #[error("no host is selected; a tree needs at least one")]
    NoHosts,
    /// More hosts are requested than the fabric has.
    #[error("{asked} hosts requested, but the fabric has {available}")]
    TooManyHosts {
        /// The requested number.
        asked: usize,
        /// The number of hosts in the fabric.
        available: usize,
    },
    /// No host has this name or GUID.
    #[error("no host is named `{name}`{}", select::hint(near))]
    UnknownHost {
        /// The requested name.
        name: String,
        /// Similar names, the nearest first.
        near: Vec<String>,
    },
    /// Several hosts have this description.
    #[error("{} hosts are named `{name}`; select one by its GUID: {}", guids.len(), select::some_of(guids))]
    AmbiguousHost {
        /// The requested name.
        name: String,
        /// The GUIDs of those hosts.
        guids: Vec<String>,
    },
    /// A host is listed twice.
    #[error("host `{name}` is listed twice; a host holds one rank")]
    DuplicateHost {
        /// Its name.
        name: String,
    },
    /// The child limit is too small to combine anything.
    #[error("a limit of {max_children} children is too small; it must be at least 2")]
    ChildLimitTooSmall {
        /// The limit.
        max_children: usize,
    },
    /// No switch can be a node.
    #[error("none of the {switches} switches can aggregate; `{first}`: {reason}")]
    NoUsableNode {
        /// The number of switches.
        switches: usize,
        /// One of them.
        first: String,
        /// Why it cannot.
        reason: Refusal,
    },
    /// A host cannot reach any usable aggregation node.
    #[error("host `{host}` has no path to a switch that can aggregate; check its cables")]
    Isolated {
        /// Its name.
        host: String,
    },
    /// No aggregation node is reachable from all hosts.
    #[error("no root reaches all hosts: `{one}` and `{other}` are in disconnected parts of the fabric")]
    Disconnected {
        /// A host.
        one: String,
        /// A host in another part.
        other: String,
    },
    /// A node has too many children, and no free node can take some of them.
    #[error(
        "`{node}` would have {children} children, but its limit is {limit} and no free aggregation node within reach can \
         take {chunk} of them; raise the limit or use fewer hosts"
    )]
    ChildLimit {
        /// The node.
        node: String,
        /// The number of children.
        children: usize,
        /// The node's limit.
        limit: usize,
        /// The number of children that a further node would take.
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
    /// The distance from the root in nodes; the root has 0.
    pub level: usize,
    /// The parent's index in [`Plan::nodes`]; `None` for the root.
    pub parent: Option<usize>,
    /// The children in declared order: by their lowest rank.
    pub children: Vec<Child>,
    /// The cables to the parent's switch, in order; empty for the root.
    pub path: Vec<LinkId>,
}

/// A rank, and where it enters the tree.
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
    /// Its leaf: an index in [`Plan::nodes`].
    pub leaf: usize,
    /// The cables to the leaf's switch, in order.
    pub path: Vec<LinkId>,
}

/// An aggregation tree. Its JSON form (`serde`) has the keys `levels root max_children max_link_sharing aligned
/// optimal nodes[{name,guid,level,parent,children}] ranks[{rank,host,guid,leaf}]`. Nodes are referred to by name, and
/// ranks among the children as `"rank N"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The number of levels: 1 + the highest [`PlanNode::level`].
    pub levels: usize,
    /// The maximum number of children of a node.
    pub max_children: usize,
    /// The maximum number of tree edges (rank to leaf, node to parent) that share one cable.
    pub max_link_sharing: usize,
    /// Whether pairwise combining at each node (neighbours first, then pairs of pairs) evaluates the same expression as
    /// pairwise combining of all ranks, with a power-of-two number of ranks. Halving-doubling with distances 1, 2, 4,
    /// ... then yields the same bits.
    pub aligned: bool,
    /// Whether it is proved that no tree of shortest paths has fewer levels, or as few levels and less link sharing.
    pub optimal: bool,
    /// The nodes, breadth first: the root is node 0, and parents come before children.
    pub nodes: Vec<PlanNode>,
    /// The ranks, in order.
    pub ranks: Vec<PlanRank>,
}

impl Plan {
    /// The root node.
    pub fn root(&self) -> &PlanNode {
        &self.nodes[0]
    }
}

/// Plan the aggregation tree of the selected hosts. See the [module](self) for the criteria.
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
    tree::find_best(fabric, &hosts.resolve(fabric)?, limits)
}
