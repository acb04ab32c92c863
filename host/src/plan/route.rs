//! Routes of tree edges over the fabric, and the load that they put on cables.
//!
//! Invariants: a route is a sequence of adjacent cables, and as short as the routing allows; among all of these it has
//! the least loaded busiest cable, then the least sum of loads, then the first by id. So results are deterministic.

use super::cost::Pricing;
use super::index::{Distances, FabricIndex, Hop, Routing};
use crate::topo::LinkId;
use std::cmp::Ordering;
use std::collections::HashMap;

/// The edges that each cable carries, and what they cost.
#[derive(Debug)]
pub(super) struct Load<'a> {
    pricing: &'a Pricing,
    byte_s: &'a [f64],
    own: Vec<u32>,
    touched: Vec<LinkId>,
}

impl<'a> Load<'a> {
    pub(super) fn new(pricing: &'a Pricing, byte_s: &'a [f64]) -> Self {
        Self { pricing, byte_s, own: vec![0; byte_s.len()], touched: Vec::new() }
    }

    /// Remove all edges of this tree.
    pub(super) fn clear(&mut self) {
        self.touched.drain(..).for_each(|link| self.own[link.0 as usize] = 0);
    }

    pub(super) fn add(&mut self, route: &[LinkId]) {
        for link in route {
            let own = &mut self.own[link.0 as usize];
            if *own == 0 {
                self.touched.push(*link);
            }
            *own += 1;
        }
    }

    pub(super) fn remove(&mut self, route: &[LinkId]) {
        route.iter().for_each(|link| self.own[link.0 as usize] -= 1);
    }

    /// The edges of this tree on a cable.
    pub(super) fn own(&self, link: LinkId) -> u32 {
        self.own[link.0 as usize]
    }

    /// All edges on a cable.
    pub(super) fn edges(&self, link: LinkId) -> u32 {
        self.own(link) + self.pricing.others(link)
    }

    /// The seconds per byte that a cable takes for `more` edges than it has.
    pub(super) fn byte_s(&self, link: LinkId, more: u32) -> f64 {
        f64::from(self.edges(link) + more) * self.byte_s[link.0 as usize]
    }

    /// The cable of this tree with the most seconds per byte.
    pub(super) fn busiest(&self) -> Option<(LinkId, f64)> {
        self.busiest_of(|_, _| true)
    }

    /// The cable of this tree with the most seconds per byte, of those for which `counts` holds.
    pub(super) fn busiest_of(&self, counts: impl Fn(LinkId, f64) -> bool) -> Option<(LinkId, f64)> {
        let used = self.touched.iter().filter(|link| self.own(**link) > 0);
        let busiest = used.map(|link| (*link, self.byte_s(*link, 0))).filter(|(link, byte_s)| counts(*link, *byte_s));
        busiest.max_by(|(a, x), (b, y)| x.total_cmp(y).then(b.cmp(a)))
    }

    /// The edges of this tree on the cables for which `counts` holds.
    pub(super) fn sum_of_own(&self, counts: impl Fn(LinkId, f64) -> bool) -> u32 {
        let mut used = self.touched.clone();
        used.sort_unstable();
        used.dedup();
        used.retain(|link| counts(*link, self.byte_s(*link, 0)));
        used.into_iter().map(|link| self.own(link)).sum()
    }

    /// The most edges of this tree on a cable.
    pub(super) fn sharing(&self) -> u32 {
        self.touched.iter().map(|link| self.own(*link)).max().unwrap_or(0)
    }

    /// The cable of a hop that one more edge costs least on, and that cost.
    pub(super) fn cable(&self, index: &FabricIndex, hop: &Hop) -> (LinkId, f64) {
        let cost = |link: &LinkId| (*link, self.byte_s(*link, 1));
        let cables = index.cables(hop).iter().map(cost);
        // A hop has a cable.
        cables.min_by(|(a, x), (b, y)| x.total_cmp(y).then(a.cmp(b))).unwrap_or((LinkId(0), f64::INFINITY))
    }
}

/// The cost of a route so far: of its busiest cable, and the sum of all.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RouteCost(f64, f64);

impl RouteCost {
    fn with(self, cable: f64) -> Self {
        Self(self.0.max(cable), self.1 + cable)
    }

    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.total_cmp(&other.1))
    }
}

/// A switch that a route can come through.
struct Step {
    at: (u32, bool),
    cost: RouteCost,
    /// The previous step, and the cable from there.
    from: Option<(usize, LinkId)>,
}

/// Find the least loaded of the shortest routes from `from` to the target, add it to the load and return it. `None` if
/// there is no route.
pub(super) fn route(
    index: &FabricIndex,
    routing: Routing,
    distances: &Distances,
    from: u32,
    load: &mut Load<'_>,
) -> Option<Vec<LinkId>> {
    if !distances.reaches(from) {
        return None;
    }
    let mut steps = vec![Step { at: (from, false), cost: RouteCost(0.0, 0.0), from: None }];
    let mut layer = 0..1;
    for _ in 0..distances.of(from) {
        let mut known: HashMap<(u32, bool), usize> = HashMap::new();
        let start = steps.len();
        // The hops of one switch lead to different ones.
        let may_meet = layer.len() > 1;
        for nth in layer {
            let Step { at, cost, .. } = steps[nth];
            for (hop, goes_down) in distances.next(index, routing, at) {
                let (link, more) = load.cable(index, hop);
                let step = Step { at: (hop.to, goes_down), cost: cost.with(more), from: Some((nth, link)) };
                if !may_meet {
                    steps.push(step);
                    continue;
                }
                match known.get(&step.at) {
                    Some(&other) if step.cost.cmp(&steps[other].cost) != Ordering::Less => {}
                    Some(&other) => steps[other] = step,
                    None => {
                        known.insert(step.at, steps.len());
                        steps.push(step);
                    }
                }
            }
        }
        layer = start..steps.len();
    }
    // The target can be reached up or down.
    let last = layer.min_by(|a, b| steps[*a].cost.cmp(&steps[*b].cost))?;
    let mut found = Vec::with_capacity(distances.of(from).into());
    let mut at = last;
    while let Some((before, link)) = steps[at].from {
        found.push(link);
        at = before;
    }
    found.reverse();
    load.add(&found);
    Some(found)
}
