//! The search for the tree with the least predicted time.
//!
//! 1. Ranks enter at the nearest usable nodes (`attach`).
//! 2. Roots are found, not tried: routes are followed from the leaves, and the switches on which all of them meet are
//!    compared by distance and by the slowest cable on the way (`roots`).
//! 3. For each of the few roots, trees of several shapes are built (`shapes`): all leaves below the root; leaves joined
//!    where their routes meet; and before either, leaves that are close to each other joined at one of them.
//! 4. Nodes over their child limit are split (`split`). Edges on the busiest cable are routed anew.
//! 5. The cheapest is kept. If the fabric around the job is small, all trees are compared (`exact`).
//! 6. Beside other jobs' trees, edges spread over the cables between switches (`spread`).
//!
//! Only routes that start at the job's leaves are looked at, so time and memory grow with the job, not with the fabric.
//!
//! Invariants: a switch is at most one node of a tree; every rank has exactly one leaf; the search is deterministic.

mod attach;
mod build;
pub(super) mod disjoint;
mod draft;
mod exact;
pub(super) mod repair;
mod roots;
mod shapes;
mod split;
mod spread;

use super::cost::{FabricCosts, NodeLimits, SATURATED_S};
use super::index::{Distances, FabricIndex, Routing, byte_times};
use super::route::{Load, route};
use super::select::Ranks;
use super::{Limits, Plan, PlanError, Refusal};
use crate::topo::{Fabric, LinkId, SwitchId};
use attach::Entry;
use disjoint::Shape;
use draft::{Draft, Price};
use spread::Spread;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// Find the best tree for the ranks.
pub(super) fn find_best(
    fabric: &Fabric,
    index: &FabricIndex,
    ranks: &Ranks,
    limits: &Limits,
) -> Result<Plan, PlanError> {
    let (search, best, outcome) = find(fabric, index, (ranks, limits), &byte_times(fabric, &limits.pricing.costs))?;
    Ok(search.finish(best, outcome.is_exact, &mut Load::new(&limits.pricing, &search.byte_s)))
}

/// Find the best tree on what other trees of the same ranks leave: `rest` are the limits and the seconds per byte of
/// each cable. With a shape, it is the tree of that shape. Return it as it would be alone, within `limits`.
pub(super) fn find_further(
    fabric: &Fabric,
    index: &FabricIndex,
    (ranks, limits): (&Ranks, &Limits),
    (rest, byte_s): (&Limits, &[f64]),
    shape: Option<&Shape>,
) -> Result<Plan, PlanError> {
    let (mut search, mut best) = match shape {
        None => find(fabric, index, (ranks, rest), byte_s).map(|(search, best, _)| (search, best))?,
        Some(shape) => {
            let routing = if rest.pricing.routes.is_some() { Routing::Tables } else { Routing::Shortest };
            let search = Search::new(fabric, index, (ranks, rest), (routing, byte_s.to_vec()))?;
            let best = search.shaped(shape)?;
            (search, best)
        }
    };
    search.limits = limits;
    search.nodes = usable_nodes(fabric, limits)?;
    search.byte_s = byte_times(fabric, &limits.pricing.costs);
    search.entries = search.find_entry_points()?;
    Rc::make_mut(&mut best.draft.places).count(&search);
    let mut load = Load::new(&limits.pricing, &search.byte_s);
    best.price = best.draft.price(&search, &mut load);
    Ok(search.finish(best, false, &mut load))
}

fn find<'a>(
    fabric: &'a Fabric,
    index: &'a FabricIndex,
    job: (&'a Ranks, &'a Limits),
    byte_s: &[f64],
) -> Result<(Search<'a>, Candidate, Outcome), PlanError> {
    let run = |routing| {
        let search = Search::new(fabric, index, job, (routing, byte_s.to_vec()))?;
        let (best, outcome) = search.run()?;
        Ok((search, best, outcome))
    };
    if job.1.pricing.routes.is_some() {
        return run(Routing::Tables);
    }
    match run(Routing::UpDown) {
        // Routes that go down and up again are better than none.
        Err(PlanError::Disconnected { .. } | PlanError::Isolated { .. }) => run(Routing::Shortest),
        // Nodes above the leaves reach each other only so, to share the children of one.
        Err(error @ PlanError::ChildLimit { .. }) => run(Routing::Shortest).map_err(|_| error),
        found => found,
    }
}

/// A root that was considered, and its best tree.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RunnerUp {
    pub(super) root: SwitchId,
    /// `None` if a lower bound ruled it out before a tree was built.
    pub(super) best: Option<RootBest>,
}

/// The best tree of a root.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RootBest {
    pub(super) times: [f64; 2],
    pub(super) levels: usize,
    /// The busiest cable and the edges on it, if a cable is the bottleneck.
    pub(super) busiest: Option<(LinkId, u32)>,
}

/// All roots that the search considers, the fastest first.
pub(super) fn runners_up(
    fabric: &Fabric,
    index: &FabricIndex,
    ranks: &Ranks,
    limits: &Limits,
) -> Result<Vec<RunnerUp>, PlanError> {
    let (.., outcome) = find(fabric, index, (ranks, limits), &byte_times(fabric, &limits.pricing.costs))?;
    let product = |one: &RunnerUp| one.best.as_ref().map_or(f64::INFINITY, |best| best.times[0] * best.times[1]);
    let all = outcome.roots.into_iter().map(|(root, best)| RunnerUp { root: SwitchId(root), best });
    let mut all: Vec<RunnerUp> = all.collect();
    all.sort_by(|a, b| product(a).total_cmp(&product(b)).then(a.root.cmp(&b.root)));
    Ok(all)
}

/// What a search yields beside its best tree.
struct Outcome {
    /// Whether all trees were compared.
    is_exact: bool,
    roots: BTreeMap<u32, Option<RootBest>>,
}

/// The limits of each switch's node; those without children cannot be one.
fn usable_nodes(fabric: &Fabric, limits: &Limits) -> Result<Vec<NodeLimits>, PlanError> {
    let usable = NodeLimits::of(fabric, limits);
    if usable.iter().all(Result::is_err) {
        // Prefer the reason of a switch that has an aggregation node.
        let refused = fabric.switch_ids().zip(&usable).filter_map(|(switch, usable)| Some((switch, usable.err()?)));
        let first = refused.min_by_key(|(_, reason)| *reason == Refusal::NoAggregationNode);
        let (switch, reason) = first.unwrap_or((SwitchId(0), Refusal::NoAggregationNode));
        let first = fabric.switches().get(switch.0 as usize).map(|switch| switch.name.clone()).unwrap_or_default();
        return Err(PlanError::NoUsableNode { switches: usable.len(), first, reason });
    }
    let none = NodeLimits { children_max: 0, port_byte_s: 0.0 };
    Ok(usable.into_iter().map(|usable| usable.unwrap_or(none)).collect())
}

/// A search for one job.
pub(super) struct Search<'a> {
    fabric: &'a Fabric,
    index: &'a FabricIndex,
    routing: Routing,
    ranks: &'a Ranks,
    limits: &'a Limits,
    /// Per switch; without children if it cannot be a node.
    nodes: Vec<NodeLimits>,
    /// Per cable: its seconds per byte, without the edges of this tree and those of `Pricing::load`.
    byte_s: Vec<f64>,
    /// Per rank: its possible entry points.
    entries: Vec<Vec<Entry>>,
    /// The switches that routes start at.
    sources: Vec<u32>,
    /// What other jobs' trees have put on the fabric; `None` without any.
    spread: Option<Spread>,
    distances: RefCell<HashMap<u32, Rc<Distances>>>,
    all_distances: RefCell<HashMap<u32, Rc<Distances>>>,
}

/// A tree and its price.
struct Candidate {
    draft: Draft,
    price: Price,
    /// The edges on cables between switches beyond an even spread.
    uneven: u32,
}

impl Candidate {
    /// The product of the times for both sizes.
    fn product(&self) -> f64 {
        self.price.times[0] * self.price.times[1]
    }

    /// What candidates are compared by: the product, with what an uneven spread counts.
    fn cost(&self) -> f64 {
        let factor = if self.uneven > 0 { (1.0 + spread::SLACK).powi(2) } else { 1.0 };
        self.product() * factor
    }
}

impl<'a> Search<'a> {
    fn new(
        fabric: &'a Fabric,
        index: &'a FabricIndex,
        (ranks, limits): (&'a Ranks, &'a Limits),
        (routing, byte_s): (Routing, Vec<f64>),
    ) -> Result<Self, PlanError> {
        if limits.max_children < 2 {
            return Err(PlanError::ChildLimitTooSmall { max_children: limits.max_children });
        }
        let mut search = Self {
            fabric,
            index,
            routing,
            ranks,
            limits,
            nodes: usable_nodes(fabric, limits)?,
            byte_s,
            entries: Vec::new(),
            sources: Vec::new(),
            spread: None,
            distances: RefCell::default(),
            all_distances: RefCell::default(),
        };
        search.leave_out_full_devices();
        search.entries = search.find_entry_points()?;
        let entries = search.entries.iter().flatten();
        search.sources = entries.flat_map(|entry| [entry.leaf, entry.uplink.switch.0]).collect();
        search.sources.sort_unstable();
        search.sources.dedup();
        if let Some(others) = &limits.pricing.load {
            search.spread = Some(Spread::new(fabric, index, (others, &search.sources), &search.byte_s));
        }
        Ok(search)
    }

    /// Devices behind ports whose cables are full cannot be nodes.
    fn leave_out_full_devices(&mut self) {
        for device in self.fabric.switch_ids().filter(|switch| self.fabric.switch(*switch).is_device) {
            let mut cables = self.fabric.adjacent(device).iter();
            if cables.all(|(_, link)| self.byte_s[link.0 as usize] >= SATURATED_S) {
                self.nodes[device.0 as usize].children_max = 0;
            }
        }
    }

    fn costs(&self) -> &FabricCosts {
        &self.limits.pricing.costs
    }

    fn sizes(&self) -> [u64; 2] {
        self.limits.pricing.size.bytes()
    }

    fn node(&self, switch: u32) -> NodeLimits {
        self.nodes[switch as usize]
    }

    fn is_usable(&self, switch: u32) -> bool {
        self.nodes[switch as usize].children_max > 0
    }

    /// The edges of other trees on a cable.
    fn others(&self, link: LinkId) -> u32 {
        self.limits.pricing.others(link)
    }

    /// The seconds per byte of a host's cable with its rank's edge and those of other trees.
    fn uplink_byte_s(&self, link: LinkId) -> f64 {
        f64::from(1 + self.others(link)) * self.byte_s[link.0 as usize]
    }

    /// The distances of all switches that routes start at.
    fn distances(&self, target: u32) -> Rc<Distances> {
        let measure = || Rc::new(Distances::of_sources(self.index, self.routing, target, &self.sources));
        Rc::clone(self.distances.borrow_mut().entry(target).or_insert_with(measure))
    }

    /// The distances of all switches.
    fn all_distances(&self, target: u32) -> Rc<Distances> {
        let measure = || Rc::new(Distances::all(self.index, self.routing, target));
        Rc::clone(self.all_distances.borrow_mut().entry(target).or_insert_with(measure))
    }

    /// The least loaded route between two switches, of which the first is one that routes start at.
    fn route(&self, from: u32, to: u32, load: &mut Load<'_>) -> Option<Vec<LinkId>> {
        let near = self.distances(to);
        let distances = if near.reaches(from) { near } else { self.all_distances(to) };
        route(self.index, self.routing, &distances, from, load)
    }

    /// The best tree, and what else was found.
    fn run(&self) -> Result<(Candidate, Outcome), PlanError> {
        let mut load = Load::new(&self.limits.pricing, &self.byte_s);
        let mut found = self.nothing_found();
        for places in self.attachments(&mut load) {
            let places = Rc::new(places);
            self.try_roots(&places, &mut load, &mut found);
            if self.routing != Routing::Tables {
                self.try_all(&places, &mut load, &mut found);
            }
        }
        let least = found.least * (1.0 + EQUAL);
        match self.choose(found.candidates) {
            Some(best) => {
                let best = self.with_detours(best, &mut load);
                let is_exact = found.is_exact && best.product() <= least;
                Ok((best, Outcome { is_exact, roots: found.roots }))
            }
            None => Err(found.error.unwrap_or_else(|| self.disconnected())),
        }
    }

    /// The tree of a shape, whose leaves must be those of the ranks.
    fn shaped(&self, shape: &Shape) -> Result<Candidate, PlanError> {
        let mut load = Load::new(&self.limits.pricing, &self.byte_s);
        let spans = |places: &draft::Places| {
            places.leaves.keys().all(|leaf| *leaf == shape.root || shape.parents.contains_key(leaf))
        };
        let places = self.attachments(&mut load).into_iter().find(spans).ok_or_else(|| self.disconnected())?;
        let parents = shape.parents.iter().map(|(node, (parent, link))| (*node, (*parent, vec![*link]))).collect();
        let mut found = self.nothing_found();
        self.consider(Draft { root: shape.root, parents, places: Rc::new(places) }, &mut load, &mut found);
        self.choose(found.candidates).ok_or_else(|| found.error.unwrap_or_else(|| self.disconnected()))
    }

    /// Price a draft, and keep it if none is better.
    fn consider(&self, mut draft: Draft, load: &mut Load<'_>, found: &mut Found) {
        draft.skip_single_ranks(self);
        if self.routing != Routing::Tables {
            draft.reroute(self, load);
        }
        let split = self.split(draft, load).and_then(|draft| match &self.limits.pricing.routes {
            Some(routes) => draft.follow(self, routes).ok_or_else(|| self.disconnected()),
            None => Ok(draft),
        });
        let draft = match split {
            Ok(draft) => draft,
            Err(error) => {
                found.error.get_or_insert(error);
                return;
            }
        };
        found.add(self.candidate(draft, load));
    }

    fn candidate(&self, draft: Draft, load: &mut Load<'_>) -> Candidate {
        let price = draft.price(self, load);
        Candidate { draft, price, uneven: self.uneven(load) }
    }

    fn nothing_found(&self) -> Found {
        Found { near: if self.spread.is_some() { spread::NEAR } else { EQUAL }, ..Found::default() }
    }

    /// Of equally fast candidates: the most evenly spread; then one that is aligned, has the fewest cables, the fewest
    /// nodes, the most edges of other jobs below its root, the first root.
    fn choose(&self, candidates: Vec<Candidate>) -> Option<Candidate> {
        let rank = |one: &Candidate| {
            let cables: usize = one.draft.parents.values().map(|(_, route)| route.len()).sum();
            let remote: usize = one.draft.places.routes.values().map(Vec::len).sum();
            let edges = self.spread.as_ref().map_or(0.0, |spread| spread.edges_near(self.index, one.draft.root));
            let is_ragged = !self.is_aligned(&one.draft);
            let (nodes, root) = (one.draft.parents.len(), one.draft.root);
            (one.uneven, is_ragged, cables + remote, nodes, Reverse(edges as u64), root)
        };
        candidates.into_iter().min_by_key(rank)
    }

    /// Name two hosts that cannot be joined.
    fn disconnected(&self) -> PlanError {
        let name = |rank: usize| self.fabric.host(self.ranks.adapters(rank)[0]).name.clone();
        let distances = self.all_distances(self.entries[0][0].leaf);
        let reached = |entries: &Vec<Entry>| entries.iter().any(|entry| distances.reaches(entry.leaf));
        let other = self.entries.iter().position(|entries| !reached(entries)).unwrap_or(self.entries.len() - 1);
        PlanError::Disconnected { one: name(0), other: name(other) }
    }
}

/// Times that differ by less than this factor are equal.
const EQUAL: f64 = 1e-9;

/// The best candidates so far, all equally fast: by the product of the times for both sizes.
#[derive(Default)]
struct Found {
    candidates: Vec<Candidate>,
    /// Costs that differ by less than this factor are equal.
    near: f64,
    /// The least cost.
    best: Option<f64>,
    /// The least product of times.
    least: f64,
    /// Why the first draft that was refused was.
    error: Option<PlanError>,
    /// Whether all trees were compared.
    is_exact: bool,
    /// The best tree of each root; `None` for one that a lower bound ruled out.
    roots: BTreeMap<u32, Option<RootBest>>,
}

impl Found {
    fn note(&mut self, new: &Candidate) {
        let product = |times: [f64; 2]| times[0] * times[1];
        let entry = self.roots.entry(new.draft.root).or_default();
        if entry.as_ref().is_none_or(|best| product(new.price.times) < product(best.times)) {
            let busiest = match new.price.bottleneck {
                draft::Busiest::Cable(link, edges) => Some((link, edges)),
                draft::Busiest::Port(..) => None,
            };
            *entry = Some(RootBest { times: new.price.times, levels: new.draft.levels(), busiest });
        }
    }

    fn add(&mut self, new: Candidate) {
        self.note(&new);
        self.least = if self.best.is_some() { self.least.min(new.product()) } else { new.product() };
        let (cost, best) = (new.cost(), self.best());
        if cost < best * (1.0 - EQUAL) {
            self.best = Some(cost);
            let most = cost * (1.0 + self.near);
            self.candidates.retain(|one| one.cost() <= most);
        } else if cost > best * (1.0 + self.near) || self.candidates.len() >= EQUAL_MAX {
            return;
        }
        self.candidates.push(new);
    }

    fn best(&self) -> f64 {
        self.best.unwrap_or(f64::INFINITY)
    }

    /// Whether a tree with at least these times could be better than the best, or as good.
    fn may_improve(&self, least: [f64; 2]) -> bool {
        least[0] * least[1] <= self.best() * (1.0 + EQUAL)
    }

    /// The seconds per byte of the best candidate's busiest cable or port.
    fn busiest_s(&self) -> f64 {
        self.candidates.iter().map(|one| one.price.busiest_s).fold(f64::INFINITY, f64::min)
    }
}

/// How many equally fast candidates are compared further.
const EQUAL_MAX: usize = 16;
