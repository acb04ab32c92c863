//! Several trees for one communicator: each carries a contiguous share of a message, in proportion to its rate.
//!
//! The first tree is the best single one. Each further tree is planned on the rates that the earlier ones leave, and
//! kept only if the predicted time falls by [`GAIN_MIN`]. So there is one tree where it has the rate of the hosts'
//! cables, one a rail where servers have rails, and one a device where the devices' ports are what limits.
//!
//! In a network without tiers, the best single tree may leave no other. There, disjoint spanning trees are packed, and
//! taken if they are faster.
//!
//! ```text
//!   of each cable:        sum over trees of (edges of the tree + edges of other jobs) rate of the tree <= its rate
//!   of each device port:  sum over trees of children rate of the tree <= its rate
//!   of each tree:         rate <= window / round trip of the first chunk
//!   T(n) = max over trees of (R + (n' - chunk) / rate),  n' = n times the tree's share
//! ```
//!
//! A message of at most one chunk is not divided: it takes the first tree.

use super::cost::{Bottleneck, Pricing, SATURATED_S, Size, gbits};
use super::evaluate::Evaluation;
use super::index::{FabricIndex, byte_times};
use super::search::disjoint::{self, Cable, Shape};
use super::select::Ranks;
use super::{Limits, Plan, PlanError, RateBound, bound, search};
use crate::topo::{Fabric, HostId, LinkId, Rate};
use std::collections::{BTreeMap, BTreeSet};

/// A tree, and its share of each message.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedTree {
    /// The tree. What it predicts is its speed alone.
    pub plan: Plan,
    /// The share of a message that it carries, in proportion to its rate; the shares of all trees add up to 1.
    pub share: f64,
    /// Its rate beside the other trees in Gbit/s.
    pub gbits: f64,
}

/// Trees of the same ranks. See [`Planner::plan_trees`](super::Planner::plan_trees).
#[derive(Debug, Clone, PartialEq)]
pub struct Trees {
    /// The trees, at least one; the first takes the messages that are not divided.
    pub trees: Vec<PlannedTree>,
    /// The rate of all trees together in Gbit/s.
    pub gbits: f64,
    /// Pairs of a message's size in bytes and the seconds that it takes, for the sizes of [`Pricing::size`].
    pub times: Vec<(u64, f64)>,
    /// The rate that no plan can beat on idle cables, however many trees it has.
    pub bound: RateBound,
    /// What keeps the trees from a higher rate.
    pub limited_by: TreesLimit,
}

/// What keeps trees from a higher rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TreesLimit {
    /// Nothing: the rate is that of the bound.
    Bound,
    /// The number of trees that were allowed.
    Count,
    /// A cable of the first tree that the trees fill, with the edges of all of them and of other jobs on it.
    Cable {
        /// The cable.
        link: LinkId,
        /// The edges.
        edges: u32,
    },
    /// The port of a device of the first tree, which all its children's bytes pass.
    Port {
        /// The node's index in the first tree.
        node: usize,
        /// The children.
        children: usize,
    },
    /// The window of a rank.
    Window,
}

/// By which fraction a further tree shortens the predicted time at least.
const GAIN_MIN: f64 = 0.01;
/// Rates that differ by less than this factor are equal.
const TOLERANCE: f64 = 1e-6;
/// How many trees are planned at most.
const TREES_MAX: usize = 256;

/// A tree with its rate in bytes per second.
struct Rated {
    plan: Plan,
    rate: f64,
}

/// Find trees for the ranks.
pub(super) fn find(
    fabric: &Fabric,
    index: &FabricIndex,
    (ranks, limits): (&Ranks, &Limits),
    max_trees: usize,
) -> Result<Trees, PlanError> {
    let plan = search::find_best(fabric, index, ranks, limits)?;
    let max_trees = max_trees.clamp(1, TREES_MAX);
    let rate = plan.prediction.byte_s.recip();
    let mut found = Set { fabric, limits, trees: Vec::new(), rest: Rest::new(fabric, limits) };
    found.push(Rated { plan, rate });
    while found.trees.len() < max_trees && found.add_tree(index, ranks, None) {}
    let adapters: Vec<&[HostId]> = ranks.iter().collect();
    let bound = |reached: f64| bound::rate_bound(fabric, index, (&adapters, gbits(reached.recip())), &limits.pricing);
    let mut least = bound(found.rate());
    if max_trees > 1 && gbits(found.rate().recip()) < least.gbits * (1.0 - GAIN_MIN) {
        if let Some(packed) = found.packed(index, ranks, least.gbits, max_trees).filter(|set| set.is_faster(&found)) {
            found = packed;
            least = bound(found.rate());
        }
    }
    let (bound, reached) = (least, gbits(found.rate().recip()));
    let limited_by = if reached >= bound.gbits * (1.0 - TOLERANCE) {
        TreesLimit::Bound
    } else if found.trees.len() == max_trees && max_trees > 1 {
        TreesLimit::Count
    } else {
        found.limit()
    };
    Ok(found.finish(bound, limited_by))
}

/// The trees so far.
struct Set<'a> {
    fabric: &'a Fabric,
    limits: &'a Limits,
    trees: Vec<Rated>,
    rest: Rest,
}

impl Set<'_> {
    fn rate(&self) -> f64 {
        self.trees.iter().map(|tree| tree.rate).sum()
    }

    /// Plan another tree on what these leave, and keep it if it pays.
    fn add_tree(&mut self, index: &FabricIndex, ranks: &Ranks, shape: Option<&Shape>) -> bool {
        let rest = self.rest.limits(self.limits);
        let byte_s = self.rest.byte_times();
        let job = (ranks, self.limits);
        let Ok((plan, busiest_s)) = search::find_further(self.fabric, index, job, (&rest, &byte_s), shape) else {
            return false;
        };
        let window_s = plan.prediction.round_trip_s / f64::from(self.limits.pricing.costs.window_bytes);
        let rate = busiest_s.max(window_s).recip();
        let before = if self.trees.is_empty() { f64::INFINITY } else { self.seconds(self.large()) };
        self.trees.push(Rated { plan, rate });
        let is_faster = self.seconds(self.large()) < before * (1.0 - GAIN_MIN);
        if let Some(last) = self.trees.pop().filter(|_| is_faster) {
            self.push(last);
        }
        is_faster
    }

    /// Trees that share no cable between the leaves, as many as may raise the rate up to `most_gbits`.
    fn packed(&self, index: &FabricIndex, ranks: &Ranks, most_gbits: f64, max_trees: usize) -> Option<Self> {
        let ranked = self.trees[0].plan.ranks.iter().map(|rank| self.trees[0].plan.nodes[rank.leaf].switch.0);
        let leaves: BTreeSet<u32> = ranked.collect();
        let mut cables = Vec::new();
        for leaf in &leaves {
            for hop in index.hops(*leaf).iter().filter(|hop| hop.to > *leaf && leaves.contains(&hop.to)) {
                let ends = [*leaf, hop.to];
                cables.extend(index.cables(hop).iter().map(|link| Cable { link: *link, ends }));
            }
        }
        let (fabric, limits) = (self.fabric, self.limits);
        let idle = Rest::new(fabric, limits);
        let slowest_s = cables.iter().map(|cable| idle.byte_s[cable.link.0 as usize]).fold(0.0, f64::max);
        let useful = (most_gbits / gbits(slowest_s)).ceil() as usize;
        let leaves: Vec<u32> = leaves.into_iter().collect();
        let all = cables.len().checked_div(leaves.len() - 1)?;
        let counts = (2..=max_trees.min(useful).min(all)).rev();
        let mut shapes = counts.filter_map(|count| disjoint::spanning_trees(&leaves, &cables, count));
        let mut set = Set { fabric, limits, trees: Vec::new(), rest: idle };
        shapes.next()?.iter().all(|shape| set.add_tree(index, ranks, Some(shape))).then_some(set)
    }

    /// Whether these trees are faster than others, by the product of the times for the sizes that count.
    fn is_faster(&self, other: &Self) -> bool {
        let product = |set: &Self| self.limits.pricing.size.bytes().map(|bytes| set.seconds(bytes)).iter().product();
        let (this, other): (f64, f64) = (product(self), product(other));
        this < other * (1.0 - GAIN_MIN)
    }

    fn push(&mut self, tree: Rated) {
        self.rest.take(&tree, self.limits);
        self.trees.push(tree);
    }

    /// The size that decides whether another tree pays.
    fn large(&self) -> u64 {
        self.limits.pricing.size.bytes()[1]
    }

    /// The predicted time of a message.
    fn seconds(&self, bytes: u64) -> f64 {
        let one = |tree: &Rated, bytes: u64| {
            Evaluation::new(self.fabric, &tree.plan, self.limits).seconds_at(bytes, tree.rate.recip())
        };
        if self.trees.len() == 1 || bytes <= u64::from(self.limits.pricing.costs.chunk_bytes) {
            return Evaluation::new(self.fabric, &self.trees[0].plan, self.limits).seconds(bytes);
        }
        let all = self.rate();
        let share = |tree: &Rated| (bytes as f64 * tree.rate / all).ceil() as u64;
        self.trees.iter().map(|tree| one(tree, share(tree))).fold(0.0, f64::max)
    }

    /// What limits the first tree, with the edges of all.
    fn limit(&self) -> TreesLimit {
        match self.trees[0].plan.prediction.bottleneck {
            Bottleneck::Cable { link, .. } => {
                let on_cable = |tree: &Rated| edges(&tree.plan).get(&link).copied().unwrap_or(0);
                let own: u32 = self.trees.iter().map(on_cable).sum();
                TreesLimit::Cable { link, edges: own + self.limits.pricing.others(link) }
            }
            Bottleneck::Port { node, children } => TreesLimit::Port { node, children },
            Bottleneck::Window => TreesLimit::Window,
        }
    }

    fn finish(self, bound: RateBound, limited_by: TreesLimit) -> Trees {
        let mut sizes = self.limits.pricing.size.bytes().to_vec();
        sizes.dedup();
        let times = sizes.into_iter().map(|bytes| (bytes, self.seconds(bytes))).collect();
        let all = self.rate();
        let planned = |Rated { plan, rate }| PlannedTree { plan, share: rate / all, gbits: gbits(f64::recip(rate)) };
        Trees {
            trees: self.trees.into_iter().map(planned).collect(),
            gbits: gbits(all.recip()),
            times,
            bound,
            limited_by,
        }
    }
}

/// The edges of a tree on each cable.
pub(super) fn edges(plan: &Plan) -> BTreeMap<LinkId, u32> {
    let mut edges = BTreeMap::new();
    let paths = plan.nodes.iter().map(|node| &node.path).chain(plan.ranks.iter().map(|rank| &rank.path));
    paths.flatten().for_each(|link| *edges.entry(*link).or_default() += 1);
    edges
}

/// What trees leave of the cables and devices.
struct Rest {
    /// Per cable: its seconds per byte.
    byte_s: Vec<f64>,
    /// Per cable: the bytes per second that are taken.
    taken: Vec<f64>,
    /// Per switch: the Gbit/s that are taken of its device's port, and the groups on it.
    devices: BTreeMap<u32, (f64, u32)>,
}

impl Rest {
    fn new(fabric: &Fabric, limits: &Limits) -> Self {
        let byte_s = byte_times(fabric, &limits.pricing.costs);
        Self { taken: vec![0.0; byte_s.len()], byte_s, devices: BTreeMap::new() }
    }

    fn take(&mut self, tree: &Rated, limits: &Limits) {
        for (link, edges) in edges(&tree.plan) {
            self.taken[link.0 as usize] += f64::from(edges + limits.pricing.others(link)) * tree.rate;
        }
        for node in &tree.plan.nodes {
            let (port, groups) = self.devices.entry(node.switch.0).or_default();
            *port += node.children.len() as f64 * gbits(tree.rate.recip());
            *groups += 1;
        }
    }

    /// The seconds per byte of each cable.
    fn byte_times(&self) -> Vec<f64> {
        let left = |(byte_s, taken): (&f64, &f64)| {
            let rate = byte_s.recip();
            if *taken >= rate * (1.0 - TOLERANCE) { SATURATED_S } else { (rate - taken).recip() }
        };
        self.byte_s.iter().zip(&self.taken).map(left).collect()
    }

    /// The limits of a further tree, for a large message: trees divide no small one.
    fn limits(&self, limits: &Limits) -> Limits {
        let size = match limits.pricing.size {
            Size::Any => Size::Bytes(Size::LARGE),
            bytes @ Size::Bytes(_) => bytes,
        };
        let mut rest = Limits { pricing: Pricing { size, ..limits.pricing.clone() }, ..limits.clone() };
        let Some(devices) = &mut rest.devices else { return rest };
        devices.retain(|switch, device| {
            let Some((taken, groups)) = self.devices.get(&switch.0) else { return true };
            device.slots_free = device.slots_free.saturating_sub(groups.saturating_mul(limits.slots_needed));
            let Some(port) = device.port else { return true };
            let left = port.gbits() - taken;
            // Rounded down, so that ports are never overbooked.
            device.port = Rate::from_gbits((left * 1000.0).floor() / 1000.0);
            left > port.gbits() * TOLERANCE && device.port.is_some()
        });
        rest
    }
}
