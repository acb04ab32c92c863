//! The predicted times of host algorithms over the ranks, to compare a tree with.
//!
//! An algorithm is a sequence of steps. In each, every rank sends at most one message; a step takes a message in two
//! hosts and over the cables between them, and its bytes over the busiest cable, which carries as many messages as are
//! routed over it in the same direction.
//!
//! | algorithm | steps, bytes of each as a part of the message |
//! |---|---|
//! | ring | 2 (p - 1) of 1/p, to the next rank |
//! | recursive doubling | log2 p of 1, with the rank at distance 1, 2, 4, ... |
//! | halving-doubling | log2 p of 1/2, 1/4, ..., and back |
//!
//! With a number of ranks that is no power of two, those beyond one give their message to another rank first, and get
//! the result last: two steps more.

use super::cost::Pricing;
use super::index::{Distances, FabricIndex, byte_times};
use super::route::{Load, route};
use super::{Plan, PlanRank};
use crate::topo::{Device, Fabric, LinkId, SwitchId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Steps that are alike.
#[derive(Debug, Clone, Copy)]
struct Steps {
    count: f64,
    /// The part of the message that each moves.
    part: f64,
    round: Round,
}

/// What one step costs.
#[derive(Debug, Clone, Copy)]
struct Round {
    /// The cables of the longest way.
    longest: usize,
    /// The seconds per byte of the busiest cable.
    busiest_s: f64,
    busiest: (LinkId, u32),
}

/// An algorithm with what its steps cost on a fabric.
#[derive(Debug, Clone)]
pub(super) struct HostAlgorithm {
    pub(super) name: &'static str,
    steps: Vec<Steps>,
}

impl HostAlgorithm {
    pub(super) fn steps(&self) -> u64 {
        self.steps.iter().map(|steps| steps.count as u64).sum()
    }

    /// The cable that takes the most time for a long message, and the messages on it.
    pub(super) fn busiest(&self) -> Option<(LinkId, u32)> {
        let weight = |steps: &&Steps| steps.part * steps.round.busiest_s;
        self.steps.iter().max_by(|a, b| weight(a).total_cmp(&weight(b))).map(|steps| steps.round.busiest)
    }

    /// The seconds that a byte which a rank sends takes over the busiest cable, averaged over all steps.
    pub(super) fn byte_s(&self) -> f64 {
        let sent = |steps: &Steps| steps.count * steps.part;
        let all: f64 = self.steps.iter().map(sent).sum();
        let taken: f64 = self.steps.iter().map(|steps| sent(steps) * steps.round.busiest_s).sum();
        if all > 0.0 { taken / all } else { 0.0 }
    }

    /// The predicted seconds of a message.
    pub(super) fn seconds(&self, bytes: u64, pricing: &Pricing) -> f64 {
        let costs = &pricing.costs;
        let one = |steps: &Steps| {
            let latency = 2.0 * costs.host_s + costs.cable_s * steps.round.longest as f64;
            steps.count * (latency + bytes as f64 * steps.part * steps.round.busiest_s)
        };
        self.steps.iter().map(one).sum()
    }
}

/// The algorithms for a plan's ranks in their order; none if two of them are not connected. Those whose partners change
/// are priced for up to [`PARTNERS_MAX`] ranks.
pub(super) fn algorithms(
    fabric: &Fabric,
    index: &FabricIndex,
    plan: &Plan,
    pricing: &Pricing,
) -> Option<Vec<HostAlgorithm>> {
    let places: Vec<usize> = (0..plan.ranks.len()).collect();
    algorithms_at(fabric, index, (plan, &places), pricing)
}

/// As [`algorithms`], for ranks that may share hosts: each has the adapter of a rank of the plan, by its index.
pub(super) fn algorithms_at(
    fabric: &Fabric,
    index: &FabricIndex,
    (plan, places): (&Plan, &[usize]),
    pricing: &Pricing,
) -> Option<Vec<HostAlgorithm>> {
    let mut job = Job::new(fabric, index, (plan, places), pricing);
    let mut all = vec![ring_of(&mut job)?];
    let ranks = places.len();
    if !(2..=PARTNERS_MAX).contains(&ranks) {
        return Some(all);
    }
    let within = 1_usize << ranks.ilog2();
    let beyond = || (within..ranks).map(|rank| (rank, rank - within));
    let mut fold = Vec::new();
    if ranks > within {
        fold = vec![
            Steps { count: 1.0, part: 1.0, round: job.round(beyond())? },
            Steps { count: 1.0, part: 1.0, round: job.round(beyond().map(|(from, to)| (to, from)))? },
        ];
    }
    let (mut doubling, mut halving) = (fold.clone(), fold);
    for step in 0..within.ilog2() {
        let round = job.round((0..within).map(|rank| (rank, rank ^ 1 << step)))?;
        doubling.push(Steps { count: 1.0, part: 1.0, round });
        halving.push(Steps { count: 2.0, part: 0.5_f64.powi(step as i32 + 1), round });
    }
    all.push(HostAlgorithm { name: "recursive doubling", steps: doubling });
    all.push(HostAlgorithm { name: "halving-doubling", steps: halving });
    Some(all)
}

/// The ring over the ranks in their order.
pub(super) fn ring(fabric: &Fabric, index: &FabricIndex, plan: &Plan, pricing: &Pricing) -> Option<HostAlgorithm> {
    let places: Vec<usize> = (0..plan.ranks.len()).collect();
    ring_of(&mut Job::new(fabric, index, (plan, &places), pricing))
}

fn ring_of(job: &mut Job<'_>) -> Option<HostAlgorithm> {
    let ranks = job.places.len();
    let mut steps = Vec::new();
    if ranks > 1 {
        let next = (0..ranks).map(|rank| (rank, (rank + 1) % ranks));
        let round = job.round(next)?;
        steps.push(Steps { count: 2.0 * (ranks - 1) as f64, part: 1.0 / ranks as f64, round });
    }
    Some(HostAlgorithm { name: "ring", steps })
}

struct Job<'a> {
    fabric: &'a Fabric,
    index: &'a FabricIndex,
    plan: &'a Plan,
    /// Of each rank: the rank of the plan whose adapter it has.
    places: &'a [usize],
    pricing: &'a Pricing,
    byte_s: Vec<f64>,
    /// Of each switch that messages went to: the distances of all switches with ranks.
    distances: RefCell<HashMap<u32, Rc<Distances>>>,
}

impl<'a> Job<'a> {
    fn new(
        fabric: &'a Fabric,
        index: &'a FabricIndex,
        (plan, places): (&'a Plan, &'a [usize]),
        pricing: &'a Pricing,
    ) -> Self {
        Self {
            fabric,
            index,
            plan,
            places,
            pricing,
            byte_s: byte_times(fabric, &pricing.costs),
            distances: RefCell::default(),
        }
    }

    /// What a step of these messages costs on cables, which those between ranks of one adapter do not cross; `None` if
    /// two ranks are not connected.
    fn round(&mut self, pairs: impl Iterator<Item = (usize, usize)>) -> Option<Round> {
        let mut load = Load::new(self.pricing, &self.byte_s);
        let mut messages: HashMap<(LinkId, Device), u32> = HashMap::new();
        let mut longest = 0;
        let (plan, places) = (self.plan, self.places);
        let ends = pairs.map(|(from, to)| (&plan.ranks[places[from]], &plan.ranks[places[to]]));
        for (from, to) in ends.filter(|(from, to)| from.host != to.host) {
            let between = self.between((from, to), &mut load)?;
            let cables = std::iter::once(from.path[0]).chain(between).chain([to.path[0]]);
            let mut at = Device::Host(from.host);
            let mut length = 0;
            for link in cables {
                *messages.entry((link, at)).or_default() += 1;
                at = self.fabric.link(link).across(at)?;
                length += 1;
            }
            longest = longest.max(length);
        }
        let cost = |((link, _), count): (&(LinkId, Device), &u32)| {
            let count = count + self.pricing.others(*link);
            (f64::from(count) * self.byte_s[link.0 as usize], *link, count)
        };
        let most = messages.iter().map(cost).max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let (busiest_s, link, count) = most.unwrap_or((0.0, LinkId(0), 0));
        Some(Round { longest, busiest_s, busiest: (link, count) })
    }

    /// The cables between the switches of two ranks' hosts.
    fn between(&self, (from, to): (&PlanRank, &PlanRank), load: &mut Load<'_>) -> Option<Vec<LinkId>> {
        let fabric = self.fabric;
        let switch = |rank: &PlanRank| match fabric.link(rank.path[0]).across(Device::Host(rank.host))? {
            Device::Switch(switch) => Some(switch),
            Device::Host(_) => None,
        };
        let (from, to) = (switch(from)?, switch(to)?);
        if let Some(tables) = &self.pricing.routes {
            return tables.route(self.fabric, from, to);
        }
        let (SwitchId(from), SwitchId(to)) = (from, to);
        let plan = self.plan;
        let measure = || {
            let sources: Vec<u32> = plan.ranks.iter().filter_map(switch).map(|SwitchId(at)| at).collect();
            Rc::new(Distances::of_sources(self.index, plan.routing, to, &sources))
        };
        let distances = Rc::clone(self.distances.borrow_mut().entry(to).or_insert_with(measure));
        route(self.index, plan.routing, &distances, from, load)
    }
}

/// For how many ranks algorithms with many partners are priced.
const PARTNERS_MAX: usize = 1024;
