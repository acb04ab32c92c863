//! Plans aggregation trees: the root, the aggregating switches, and the cables that contributions travel over.
//!
//! # What is planned
//! Each rank enters the tree at the nearest switch with a usable aggregation node, its **leaf** (normally the switch
//! that its host is cabled to). Nodes are joined by edges to a root. An edge is routed along a shortest path of
//! switches that does not go up again after it went down, as up*/down* routing does; a node on the way ends the edge.
//! Rank i is the i-th selected host; ranks are never renumbered, and the children of a node are ordered by their lowest
//! rank.
//!
//! The planner selects the tree with the least **predicted time** (`cost`) for the size of [`Limits::pricing`]. Among
//! trees of equal time it selects an aligned expression, then the fewest cables, the fewest nodes, and the first root
//! in natural name order. The same input yields the same plan. Beside other jobs' trees, the edges of all jobs also
//! spread over the cables between switches, at the price of up to a quarter more time (`search::spread`).
//!
//! Levels count from the root, which is **level 0**. If one switch connects all hosts, there is one level.
//!
//! Trees are found by a search over few roots and shapes (`search`). [`Plan::optimal`] tells whether it is proved that
//! no tree is faster, by comparing all trees or by a lower bound, and [`Plan::gap`] how far the bound is otherwise.
//!
//! A node with more children than its limit is split: runs of children move to further aggregation nodes nearby.
//!
//! Several trees carry a share of each message each, where one alone does not have the rate of the hosts' cables
//! ([`Planner::plan_trees`]).
//!
//! [`verify()`] and [`verify_trees()`] check plans independently of the planner's code.

mod aligned;
mod bound;
mod cable_times;
mod cost;
mod counted;
mod error;
mod evaluate;
mod explain;
mod index;
mod limits;
mod moves;
mod rates;
mod render;
mod report;
mod ring;
mod route;
mod search;
mod select;
#[cfg(test)]
mod tests;
mod trees;
mod verify;

pub use crate::schedule::tree::Child;
pub use bound::{BoundKind, RateBound};
pub(crate) use cable_times::CableTimes;
pub use cost::{Bottleneck, FabricCosts, Prediction, Pricing, Size};
pub use error::PlanError;
pub use explain::{Algorithm, Crossing, Explanation, OtherRoot, SizeTime};
pub use index::Routing;
pub use limits::{DeviceLimits, Limits, Refusal};
pub use moves::Move;
pub use report::Report;
pub use select::HostSelection;
pub use trees::{PlannedTree, Trees, TreesLimit};
pub use verify::{Violation, verify, verify_trees};

use crate::schedule::Shape;
use crate::topo::{Fabric, Groups, HostId, LinkId, SwitchId};
use index::FabricIndex;
use std::sync::{Arc, OnceLock};
use sumac_hal::ids::Rank;

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
/// optimal gap gbits times[{bytes,seconds}] nodes[{name,guid,level,parent,children}] ranks[{rank,host,guid,leaf}]`.
/// Nodes are referred to by name, and ranks among the children as `"rank N"`.
#[derive(Debug, Clone, PartialEq)]
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
    /// Whether it is proved that no tree of such routes is faster, by the constants of the prediction.
    pub optimal: bool,
    /// By how much another tree may be faster at most, as a fraction of its time (of the geometric mean over both
    /// sizes); 0 if the tree is optimal.
    pub gap: f64,
    /// The predicted speed.
    pub prediction: Prediction,
    /// The routes that are assumed.
    pub routing: Routing,
    /// The number of cables in the fabric whose rate is not known, and was assumed.
    pub unrated: usize,
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

/// A planner for one fabric. It keeps what does not depend on the job, so that plans take time in proportion to the
/// job.
#[derive(Debug, Clone)]
pub struct Planner<'f> {
    fabric: &'f Fabric,
    index: Arc<FabricIndex>,
}

impl<'f> Planner<'f> {
    /// Prepare planning on a fabric.
    pub fn new(fabric: &'f Fabric) -> Self {
        Self { fabric, index: Arc::new(FabricIndex::new(fabric)) }
    }

    /// Find a switch by name or GUID.
    pub fn find_switch(&self, name: &str) -> Option<SwitchId> {
        self.index.find_switch(self.fabric, name)
    }

    /// Plan the aggregation tree of the selected hosts. See the [module](self) for the criteria.
    ///
    /// # Errors
    /// [`PlanError`] names the first condition that failed.
    pub fn plan(&self, hosts: &HostSelection, limits: &Limits) -> Result<Plan, PlanError> {
        search::find_best(self.fabric, &self.index, &self.resolve(hosts)?, limits)
    }

    /// Plan anew after a failure. Children stay with the nodes that they had in the earlier plan, by name, if the tree
    /// then takes at most `1 + slack` times as long as the best one (in the geometric mean over the sizes); otherwise
    /// this is [`Planner::plan`].
    ///
    /// # Errors
    /// [`PlanError`] names the first condition that failed.
    pub fn replan(
        &self,
        hosts: &HostSelection,
        limits: &Limits,
        earlier: &Plan,
        slack: f64,
    ) -> Result<Plan, PlanError> {
        let ranks = self.resolve(hosts)?;
        search::repair::find_near(self.fabric, &self.index, (&ranks, limits), (earlier, slack))
    }

    /// A plan that was made for these hosts within these limits, as the only one of several trees: with its rate beside
    /// the bound.
    ///
    /// # Errors
    /// [`PlanError`] if the hosts are not known.
    pub fn single(&self, hosts: &HostSelection, limits: &Limits, plan: Plan) -> Result<Trees, PlanError> {
        Ok(trees::alone(self.fabric, &self.index, (&self.resolve(hosts)?, limits), plan))
    }

    /// Plan up to `max_trees` trees that carry a share of each message each, where that takes less time than one. With
    /// [`HostSelection::Rails`], trees use all adapters of a server.
    ///
    /// # Errors
    /// [`PlanError`] names the first condition that failed: without a single tree there are no several.
    ///
    /// ```
    /// use sumac::plan::{HostSelection, Limits, Planner};
    /// use sumac::topo::{Rate, generate};
    /// let rate = Rate::from_gbits(400.0);
    /// let rails = generate::Rails { servers: 16, rails: 4, servers_per_leaf: 8, spines: 2, rate };
    /// let fabric = generate::rails(rails)?;
    /// let servers = fabric.servers().iter().map(|server| server.adapters.clone()).collect();
    /// let trees = Planner::new(&fabric).plan_trees(&HostSelection::Rails(servers), &Limits::default(), 8)?;
    /// assert_eq!((trees.trees.len(), trees.gbits), (4, 1600.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn plan_trees(&self, hosts: &HostSelection, limits: &Limits, max_trees: usize) -> Result<Trees, PlanError> {
        trees::find(self.fabric, &self.index, (&self.resolve(hosts)?, limits), max_trees)
    }

    fn resolve(&self, hosts: &HostSelection) -> Result<select::Ranks, PlanError> {
        hosts.resolve_with(self.fabric, &|name| self.index.find_host(self.fabric, name))
    }

    /// The predicted seconds of a message through a plan that was made within these limits.
    pub fn seconds(&self, plan: &Plan, bytes: u64, limits: &Limits) -> f64 {
        evaluate::Evaluation::new(self.fabric, plan, limits).seconds(bytes)
    }

    /// The rate that no plan for these ranks can beat on an idle fabric.
    pub fn rate_bound(&self, plan: &Plan, pricing: &Pricing) -> RateBound {
        let ranks: Vec<&[HostId]> = plan.ranks.iter().map(|rank| std::slice::from_ref(&rank.host)).collect();
        bound::rate_bound(self.fabric, &self.index, (&ranks, plan.prediction.gbits()), pricing)
    }

    /// Render what limits a plan's rate, beside a bound that no plan beats, and what is assumed: lines of text, each
    /// ending in a newline.
    pub fn rate_text(&self, plan: &Plan, bound: &RateBound, costs: &FabricCosts) -> String {
        plan.rate_text(self.fabric, bound, costs)
    }

    /// Render trees for a terminal: what they reach together, and each tree. Lines of text, each ending in a newline.
    pub fn trees_text(&self, trees: &Trees, costs: &FabricCosts) -> String {
        trees.to_text(self.fabric, costs)
    }

    /// Trees for programs: the one JSON form of the library and the command.
    pub fn report<'a>(&'a self, trees: &'a Trees) -> Report<'a> {
        Report::new(self.fabric, trees)
    }

    /// Explain trees that were planned for these hosts within these limits: what other algorithms would take, and why
    /// other roots lost. `shape` is that of the hosts in the order of ranks; `None`: as the fabric has them
    /// ([`Groups`]).
    ///
    /// # Errors
    /// [`PlanError`], as for the plan.
    pub fn explain(
        &self,
        hosts: &HostSelection,
        limits: &Limits,
        (trees, shape): (&Trees, Option<Shape>),
    ) -> Result<Explanation, PlanError> {
        let shape = shape.unwrap_or_else(|| {
            let ranks: Vec<HostId> = trees.trees[0].plan.ranks.iter().map(|rank| rank.host).collect();
            Groups::new(self.fabric).shape_of(self.fabric, &ranks)
        });
        explain::explain(self.fabric, &self.index, (&self.resolve(hosts)?, limits), (trees, shape))
    }

    /// How long bytes take over the cables of a plan that was made within these limits, by each algorithm. `places` has
    /// each rank's adapter: that of a rank of the plan, by its index. `None` if the rate of a cable is not known.
    pub(crate) fn cable_times(
        &self,
        plan: &Plan,
        limits: &Limits,
        (places, shape): (&[usize], Shape),
    ) -> Option<CableTimes> {
        CableTimes::new(self.fabric, &self.index, (plan, places, shape), limits)
    }

    /// The predicted seconds of a ring over the hosts, in the order of ranks, for a message of so many bytes. `None` if
    /// two of them are not connected.
    pub fn ring_seconds(&self, plan: &Plan, bytes: u64, pricing: &Pricing) -> Option<f64> {
        Some(ring::ring(self.fabric, &self.index, plan, pricing)?.seconds(bytes, pricing))
    }
}

/// What a planner keeps of a fabric, shared by all plans on it. It is prepared by the first plan, so that this takes
/// place wherever plans are made.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeptIndex {
    index: Arc<OnceLock<Arc<FabricIndex>>>,
    groups: Arc<OnceLock<Groups>>,
}

impl KeptIndex {
    /// The groups of the fabric, which must always be the same one. They are prepared by the first call.
    pub(crate) fn groups(&self, fabric: &Fabric) -> &Groups {
        self.groups.get_or_init(|| Groups::new(fabric))
    }

    /// A planner for the fabric, which must always be the same one.
    pub(crate) fn planner<'f>(&self, fabric: &'f Fabric) -> Planner<'f> {
        let index = self.index.get_or_init(|| Arc::new(FabricIndex::new(fabric)));
        Planner { fabric, index: Arc::clone(index) }
    }

    /// Find a switch of the fabric, in constant time once a plan was made.
    pub(crate) fn find_switch(&self, fabric: &Fabric, name: &str) -> Option<SwitchId> {
        match self.index.get() {
            Some(index) => index.find_switch(fabric, name),
            None => fabric.find_switch(name),
        }
    }
}

/// Plan the aggregation tree of the selected hosts. See the [module](self) for the criteria, and [`Planner`] for more
/// than one plan.
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
    Planner::new(fabric).plan(hosts, limits)
}
