//! Several trees for one communicator: each carries a contiguous share of a message, in proportion to its rate.
//!
//! The first tree is the best single one. Each further tree is planned on the rates that the earlier ones leave, or
//! else as one of equals beside them, and kept only if the predicted time falls by [`GAIN_MIN`]. The trees' rates are
//! those of taking turns, each as fast as the earlier ones allow, or of rising together until a cable or port is full,
//! whichever is faster. So there is one tree where it has the rate of the hosts'
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

use super::cost::{Bottleneck, gbits};
use super::evaluate::Evaluation;
use super::index::FabricIndex;
use super::rates::{Capacities, Usage, edges};
use super::search::disjoint::{self, Cable};
use super::select::Ranks;
use super::{Limits, Plan, PlanError, RateBound, bound, search};
use crate::topo::{Fabric, HostId};
use std::collections::BTreeSet;

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
    /// Pairs of a message's size in bytes and the seconds that it takes, for the sizes of
    /// [`Pricing::size`](super::Pricing::size).
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
    /// What limits the first tree; on a cable with the edges of all trees and of other jobs.
    Bottleneck(Bottleneck),
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
    usage: Usage,
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
    let mut found = Set { fabric, limits, capacities: Capacities::new(fabric, limits), trees: Vec::new() };
    found.try_plan(plan);
    let adapters: Vec<&[HostId]> = ranks.iter().collect();
    let bound = |reached: f64| bound::rate_bound(fabric, index, (&adapters, reached), &limits.pricing);
    let mut least = bound(found.gbits());
    let is_slower = |set: &Set<'_>, least: &RateBound| set.gbits() < least.gbits * (1.0 - GAIN_MIN);
    while found.trees.len() < max_trees && is_slower(&found, &least) && found.add_tree(index, ranks) {}
    if max_trees > 1 && is_slower(&found, &least) {
        let packed = found.packed(index, ranks, least.gbits, max_trees).filter(|set| set.is_faster(&found));
        found = packed.unwrap_or(found);
    }
    if found.trees.len() > 1 {
        least = bound(found.gbits());
    }
    let limited_by = if found.gbits() >= least.gbits * (1.0 - TOLERANCE) {
        TreesLimit::Bound
    } else if found.trees.len() == max_trees && max_trees > 1 {
        TreesLimit::Count
    } else {
        found.limit()
    };
    Ok(found.finish(least, limited_by))
}

/// One planned tree, as trees.
pub(super) fn alone(fabric: &Fabric, index: &FabricIndex, (ranks, limits): (&Ranks, &Limits), plan: Plan) -> Trees {
    let mut found = Set { fabric, limits, capacities: Capacities::new(fabric, limits), trees: Vec::new() };
    found.try_plan(plan);
    let adapters: Vec<&[HostId]> = ranks.iter().collect();
    let bound = bound::rate_bound(fabric, index, (&adapters, found.gbits()), &limits.pricing);
    let is_met = found.gbits() >= bound.gbits * (1.0 - TOLERANCE);
    let limited_by = if is_met { TreesLimit::Bound } else { found.limit() };
    found.finish(bound, limited_by)
}

/// The trees so far.
struct Set<'a> {
    fabric: &'a Fabric,
    limits: &'a Limits,
    capacities: Capacities<'a>,
    trees: Vec<Rated>,
}

impl Trees {
    /// The predicted time of a message within the limits of the plan.
    pub(super) fn seconds(&self, fabric: &Fabric, limits: &Limits, bytes: u64) -> f64 {
        if self.trees.len() == 1 || bytes <= u64::from(limits.pricing.costs.chunk_bytes) {
            return Evaluation::new(fabric, &self.trees[0].plan, limits).seconds(bytes);
        }
        let one = |tree: &PlannedTree| {
            let share = (bytes as f64 * tree.share).ceil() as u64;
            Evaluation::new(fabric, &tree.plan, limits).seconds_at(share, 8e-9 / tree.gbits)
        };
        self.trees.iter().map(one).fold(0.0, f64::max)
    }
}

impl Set<'_> {
    fn rate(&self) -> f64 {
        self.trees.iter().map(|tree| tree.rate).sum()
    }

    fn gbits(&self) -> f64 {
        gbits(self.rate().recip())
    }

    /// Plan another tree on what these leave, or else beside them, and keep it if it pays.
    fn add_tree(&mut self, index: &FabricIndex, ranks: &Ranks) -> bool {
        let job = (ranks, self.limits);
        let (rest, byte_s) = self.capacities.rest(&self.rated());
        let found = search::find_further(self.fabric, index, job, (&rest, &byte_s), None);
        if found.is_ok_and(|plan| self.try_plan(plan)) {
            return true;
        }
        let beside = self.capacities.beside(&self.rated());
        let found = search::find_further(self.fabric, index, job, (&beside, self.capacities.byte_s()), None);
        found.is_ok_and(|plan| self.try_plan(plan))
    }

    fn rated(&self) -> Vec<(&Plan, &Usage, f64)> {
        self.trees.iter().map(|tree| (&tree.plan, &tree.usage, tree.rate)).collect()
    }

    /// Add a tree, and keep it if it pays.
    fn try_plan(&mut self, plan: Plan) -> bool {
        let large = self.limits.pricing.size.bytes()[1];
        let before = if self.trees.is_empty() { f64::INFINITY } else { self.seconds(large) };
        let usage = Usage::of(&plan, self.limits);
        let rates = self.trees.iter().map(|tree| tree.rate).collect();
        self.trees.push(Rated { plan, usage, rate: 0.0 });
        let usages: Vec<&Usage> = self.trees.iter().map(|tree| &tree.usage).collect();
        let new = self.capacities.rates(&usages);
        let has_rates = new.iter().all(|rate| *rate > 0.0);
        self.set_rates(new);
        let is_faster = has_rates && self.seconds(large) < before * (1.0 - GAIN_MIN);
        if !is_faster {
            self.trees.pop();
            self.set_rates(rates);
        }
        is_faster
    }

    fn set_rates(&mut self, rates: Vec<f64>) {
        self.trees.iter_mut().zip(rates).for_each(|(tree, rate)| tree.rate = rate);
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
        let slowest_s = cables.iter().map(|cable| self.capacities.byte_s()[cable.link.0 as usize]).fold(0.0, f64::max);
        let useful = (most_gbits / gbits(slowest_s)).ceil() as usize;
        let leaves: Vec<u32> = leaves.into_iter().collect();
        let all = cables.len().checked_div(leaves.len() - 1)?;
        let counts = (2..=max_trees.min(useful).min(all)).rev();
        let mut shapes = counts.filter_map(|count| disjoint::spanning_trees(&leaves, &cables, count));
        let mut set = Set { fabric, limits, capacities: Capacities::new(fabric, limits), trees: Vec::new() };
        for shape in shapes.next()? {
            let (rest, byte_s) = set.capacities.rest(&set.rated());
            let plan = search::find_further(fabric, index, (ranks, limits), (&rest, &byte_s), Some(&shape)).ok()?;
            if !set.try_plan(plan) {
                return None;
            }
        }
        Some(set)
    }

    /// Whether these trees are faster than others, by the product of the times for the sizes that count.
    fn is_faster(&self, other: &Self) -> bool {
        let product = |set: &Self| self.limits.pricing.size.bytes().map(|bytes| set.seconds(bytes)).iter().product();
        let (this, other): (f64, f64) = (product(self), product(other));
        this < other * (1.0 - GAIN_MIN)
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
        TreesLimit::Bottleneck(match self.trees[0].plan.prediction.bottleneck {
            Bottleneck::Cable { link, .. } => {
                let on_cable = |tree: &Rated| edges(&tree.plan).get(&link).copied().unwrap_or(0);
                let own: u32 = self.trees.iter().map(on_cable).sum();
                Bottleneck::Cable { link, edges: own + self.limits.pricing.others(link) }
            }
            port_or_window => port_or_window,
        })
    }

    fn finish(self, bound: RateBound, limited_by: TreesLimit) -> Trees {
        let mut sizes = self.limits.pricing.size.bytes().to_vec();
        sizes.dedup();
        let times = sizes.into_iter().map(|bytes| (bytes, self.seconds(bytes))).collect();
        let (all, total) = (self.rate(), self.gbits());
        let planned =
            |Rated { plan, rate, .. }| PlannedTree { plan, share: rate / all, gbits: gbits(f64::recip(rate)) };
        Trees { trees: self.trees.into_iter().map(planned).collect(), gbits: total, times, bound, limited_by }
    }
}
