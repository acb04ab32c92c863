//! The predicted times of host algorithms over the ranks, to compare a tree with.
//!
//! An algorithm is a sequence of steps. A step takes the messages of two hosts, the cables on the longest way between
//! any two, and its bytes over the busiest cable, which carries what is routed over it in the same direction.
//!
//! | algorithm | steps, bytes of each as a part of the message |
//! |---|---|
//! | ring | 2 (p - 1) of 1/p, to the next rank |
//! | recursive doubling | log2 p of 1, with the rank at distance 1, 2, 4, ... |
//! | halving-doubling | log2 p of 1/2, 1/4, ..., and back |
//! | all others | counted from their schedules ([`super::counted`]) |
//!
//! With a number of ranks that is no power of two, those beyond one give their message to another rank first, and get
//! the result last: two steps more.

use super::cost::Pricing;
use super::index::{Distances, FabricIndex, byte_times};
use super::route::{Load, route};
use super::{Plan, PlanRank};
use crate::schedule::{Algorithm, Shape};
use crate::topo::{Device, Fabric, LinkId, SwitchId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use sumac_hal::op::Path;

/// Steps that are alike.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    pub(super) count: f64,
    /// The part of the message that the longest message of each moves.
    pub(super) part: f64,
    pub(super) round: Round,
}

/// What one step costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    /// The cables of the longest way.
    longest: usize,
    /// The most messages that a rank sends, or receives.
    messages: u32,
    /// The seconds that a byte of the longest message takes over the busiest cable.
    busiest_s: f64,
    /// That cable, and the messages on it, in lengths of the longest one.
    busiest: (LinkId, f64),
}

/// A message of a step: the ranks, and the part of the whole message that it moves.
pub(super) type Part = (usize, usize, f64);

/// An algorithm with what its steps cost on a fabric.
#[derive(Debug, Clone)]
pub(super) struct HostAlgorithm {
    pub(super) path: Path,
    steps: Vec<Steps>,
    /// What its steps were counted from, unless they are alike at every size.
    counted: Option<Counted>,
}

/// The schedules that steps were counted from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counted {
    pub(super) algorithm: &'static Algorithm,
    pub(super) ranks: u32,
    pub(super) shape: Shape,
    /// The elements, of [`ELEMENT_BYTES`] each.
    pub(super) count: usize,
}

/// The size of the elements that segments are counted for.
const ELEMENT_BYTES: u64 = 4;

impl HostAlgorithm {
    pub(super) const fn counted(counted: Counted, steps: Vec<Steps>) -> Self {
        Self { path: counted.algorithm.path(), steps, counted: Some(counted) }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps.iter().map(|steps| steps.count as u64).sum()
    }

    /// The cable that takes the most time for a long message, and the messages on it, in lengths of the longest one.
    pub(super) fn busiest(&self) -> Option<(LinkId, f64)> {
        let weight = |steps: &&Steps| steps.part * steps.round.busiest_s;
        self.steps.iter().max_by(|a, b| weight(a).total_cmp(&weight(b))).map(|steps| steps.round.busiest)
    }

    /// What the busiest cables of all steps carry together, in lengths of the whole message.
    pub(super) fn load(&self) -> f64 {
        self.steps.iter().map(|steps| steps.count * steps.part * steps.round.busiest.1).sum()
    }

    /// The seconds that a byte of the longest path takes over the busiest cable, averaged over all steps.
    pub(super) fn byte_s(&self) -> f64 {
        let path = match self.counted {
            Some(Counted { algorithm, ranks, shape, count }) => {
                algorithm.cost(ranks, shape, count).path_elements / count.max(1) as f64
            }
            None => self.steps.iter().map(|steps| steps.count * steps.part).sum(),
        };
        let taken: f64 = self.steps.iter().map(|steps| steps.count * steps.part * steps.round.busiest_s).sum();
        if path > 0.0 { taken / path } else { 0.0 }
    }

    /// The latencies of a message of so many bytes by those of the steps: algorithms with segments have more of them
    /// for longer messages.
    fn latencies(&self, bytes: u64) -> f64 {
        let Some(Counted { algorithm, ranks, shape, count }) = self.counted else { return 1.0 };
        let steps = |count: u64| algorithm.cost(ranks, shape, usize::try_from(count).unwrap_or(usize::MAX)).steps;
        steps(bytes.div_ceil(ELEMENT_BYTES)) / steps(count as u64).max(1.0)
    }

    /// The predicted seconds of a message.
    pub(super) fn seconds(&self, bytes: u64, pricing: &Pricing) -> f64 {
        let (costs, latencies) = (&pricing.costs, self.latencies(bytes));
        let one = |Steps { count, part, round }: &Steps| {
            let in_hosts = costs.host_s * f64::from(1 + round.messages);
            let latency = in_hosts + costs.cable_s * round.longest as f64;
            count * (latencies * latency + bytes as f64 * part * round.busiest_s)
        };
        self.steps.iter().map(one).sum()
    }
}

/// The algorithms for the ranks of a job in their order; none if two of them are not connected. Those whose partners
/// change are priced for up to [`PARTNERS_MAX`] ranks.
pub(super) fn algorithms(job: &mut Job<'_>) -> Option<Vec<HostAlgorithm>> {
    let mut all = vec![ring_of(job)?];
    let ranks = job.places.len();
    if !(2..=PARTNERS_MAX).contains(&ranks) {
        return Some(all);
    }
    let within = 1_usize << ranks.ilog2();
    let beyond = || (within..ranks).map(|rank| (rank, rank - within, 1.0));
    let mut fold = Vec::new();
    if ranks > within {
        fold = vec![
            Steps { count: 1.0, part: 1.0, round: job.round(beyond())? },
            Steps { count: 1.0, part: 1.0, round: job.round(beyond().map(|(from, to, part)| (to, from, part)))? },
        ];
    }
    let (mut doubling, mut halving) = (fold.clone(), fold);
    for step in 0..within.ilog2() {
        let round = job.round((0..within).map(|rank| (rank, rank ^ 1 << step, 1.0)))?;
        doubling.push(Steps { count: 1.0, part: 1.0, round });
        halving.push(Steps { count: 2.0, part: 0.5_f64.powi(step as i32 + 1), round });
    }
    all.push(HostAlgorithm { path: Path::RecursiveDoubling, steps: doubling, counted: None });
    all.push(HostAlgorithm { path: Path::HalvingDoubling, steps: halving, counted: None });
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
        let next = (0..ranks).map(|rank| (rank, (rank + 1) % ranks, 1.0));
        let round = job.round(next)?;
        steps.push(Steps { count: 2.0 * (ranks - 1) as f64, part: 1.0 / ranks as f64, round });
    }
    Some(HostAlgorithm { path: Path::Ring, steps, counted: None })
}

/// Ranks of a plan on its fabric.
pub(super) struct Job<'a> {
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
    pub(super) fn new(
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

    /// The number of ranks.
    pub(super) const fn ranks(&self) -> usize {
        self.places.len()
    }

    /// What a step of these messages, at least one of them not empty, costs on cables, which those between ranks of one
    /// adapter do not cross; `None` if two ranks are not connected.
    pub(super) fn round(&mut self, parts: impl Iterator<Item = Part> + Clone) -> Option<Round> {
        let mut load = Load::new(self.pricing, &self.byte_s);
        let mut carried: HashMap<(LinkId, Device), f64> = HashMap::new();
        let mut messages = vec![(0, 0); self.places.len()];
        let (mut longest, most) = (0, parts.clone().map(|(.., part)| part).fold(0.0, f64::max));
        let (plan, places) = (self.plan, self.places);
        for (from, to, part) in parts {
            (messages[from].0, messages[to].1) = (messages[from].0 + 1, messages[to].1 + 1);
            let (from, to) = (&plan.ranks[places[from]], &plan.ranks[places[to]]);
            if from.host == to.host {
                continue;
            }
            let between = self.between((from, to), &mut load)?;
            let cables = std::iter::once(from.path[0]).chain(between).chain([to.path[0]]);
            let mut at = Device::Host(from.host);
            let mut length = 0;
            for link in cables {
                *carried.entry((link, at)).or_default() += if most > 0.0 { part / most } else { 0.0 };
                at = self.fabric.link(link).across(at)?;
                length += 1;
            }
            longest = longest.max(length);
        }
        let cost = |((link, _), carried): (&(LinkId, Device), &f64)| {
            let carried = carried + f64::from(self.pricing.others(*link));
            (carried * self.byte_s[link.0 as usize], *link, carried)
        };
        let busiest = carried.iter().map(cost).max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        let (busiest_s, link, carried) = busiest.unwrap_or((0.0, LinkId(0), 0.0));
        let messages = messages.into_iter().map(|(sent, received)| sent.max(received)).max().unwrap_or(0);
        Some(Round { longest, messages, busiest_s, busiest: (link, carried) })
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
