//! The rates of several trees that share cables and device ports.
//!
//! Invariant: no sum of rates exceeds what a cable, port or window has, by the head of `trees`.

use super::cost::{Pricing, SATURATED_S, Size, gbits};
use super::index::byte_times;
use super::{Limits, Plan};
use crate::topo::{Fabric, LinkId, Rate, SwitchId};
use std::collections::{BTreeMap, HashMap};

/// Something that trees share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Resource {
    Cable(LinkId),
    Port(SwitchId),
}

/// What a tree takes of each resource for each byte, and the most bytes per second that its window allows.
#[derive(Debug)]
pub(super) struct Usage {
    of: Vec<(Resource, f64)>,
    window: f64,
}

/// Rates that differ by less than this factor are equal.
const TOLERANCE: f64 = 1e-9;

/// The edges of a tree on each cable.
pub(super) fn edges(plan: &Plan) -> BTreeMap<LinkId, u32> {
    let mut edges = BTreeMap::new();
    let paths = plan.nodes.iter().map(|node| &node.path).chain(plan.ranks.iter().map(|rank| &rank.path));
    paths.flatten().for_each(|link| *edges.entry(*link).or_default() += 1);
    edges
}

impl Usage {
    pub(super) fn of(plan: &Plan, limits: &Limits) -> Self {
        let cable = |(link, edges)| (Resource::Cable(link), f64::from(edges + limits.pricing.others(link)));
        let has_port =
            |switch| limits.devices.as_ref().is_some_and(|all| all.get(&switch).is_some_and(|d| d.port.is_some()));
        let ports = plan.nodes.iter().filter(|node| has_port(node.switch));
        let ports = ports.map(|node| (Resource::Port(node.switch), node.children.len() as f64));
        let window = f64::from(limits.pricing.costs.window_bytes) / plan.prediction.round_trip_s;
        Self { of: edges(plan).into_iter().map(cable).chain(ports).collect(), window }
    }
}

/// What resources have, in bytes per second.
pub(super) struct Capacities<'a> {
    limits: &'a Limits,
    /// Per cable: its seconds per byte.
    byte_s: Vec<f64>,
}

impl<'a> Capacities<'a> {
    pub(super) fn new(fabric: &Fabric, limits: &'a Limits) -> Self {
        Self { limits, byte_s: byte_times(fabric, &limits.pricing.costs) }
    }

    /// The idle cables' seconds per byte.
    pub(super) fn byte_s(&self) -> &[f64] {
        &self.byte_s
    }

    fn of(&self, resource: Resource) -> f64 {
        match resource {
            Resource::Cable(link) => self.byte_s[link.0 as usize].recip(),
            Resource::Port(switch) => {
                let device = self.limits.devices.as_ref().and_then(|devices| devices.get(&switch));
                device.and_then(|device| device.port).map_or(f64::INFINITY, |rate| rate.gbits() * 1e9 / 8.0)
            }
        }
    }

    /// The best rates of these trees; 0 for all if one would have none.
    pub(super) fn rates(&self, trees: &[&Usage]) -> Vec<f64> {
        let (turns, together) = (self.by_turns(trees), self.together(trees));
        let sum = |rates: &[f64]| if rates.iter().all(|rate| *rate > 0.0) { rates.iter().sum() } else { 0.0 };
        let (by_turns, all) = (sum(&turns), sum(&together));
        if by_turns >= all * (1.0 - TOLERANCE) { turns } else { together }
    }

    /// Each tree is as fast as the earlier ones allow.
    fn by_turns(&self, trees: &[&Usage]) -> Vec<f64> {
        let mut taken: HashMap<Resource, f64> = HashMap::new();
        let mut rates = Vec::with_capacity(trees.len());
        for tree in trees {
            let left = |(resource, weight): &(Resource, f64)| {
                let most = self.of(*resource);
                let left = most - taken.get(resource).unwrap_or(&0.0);
                if left <= most * TOLERANCE { 0.0 } else { left / weight }
            };
            let rate = tree.of.iter().map(left).fold(tree.window, f64::min);
            tree.of.iter().for_each(|(resource, weight)| *taken.entry(*resource).or_default() += weight * rate);
            rates.push(rate);
        }
        rates
    }

    /// All trees become faster together, each until something of it is full.
    fn together(&self, trees: &[&Usage]) -> Vec<f64> {
        let mut rates = vec![0.0; trees.len()];
        let mut open: Vec<usize> = (0..trees.len()).collect();
        let mut taken: HashMap<Resource, f64> = HashMap::new();
        while !open.is_empty() {
            let mut weights: BTreeMap<Resource, f64> = BTreeMap::new();
            for tree in &open {
                trees[*tree].of.iter().for_each(|(resource, weight)| *weights.entry(*resource).or_default() += weight);
            }
            let left = |resource: &Resource| (self.of(*resource) - taken.get(resource).unwrap_or(&0.0)).max(0.0);
            let shared = weights.iter().map(|(resource, weight)| left(resource) / weight).fold(f64::INFINITY, f64::min);
            let windows = open.iter().map(|tree| trees[*tree].window - rates[*tree]);
            let more = windows.fold(shared, f64::min).max(0.0);
            for (resource, weight) in &weights {
                *taken.entry(*resource).or_default() += weight * more;
            }
            open.iter().for_each(|tree| rates[*tree] += more);
            let is_full = |resource: &Resource| {
                let most = self.of(*resource);
                most - taken.get(resource).unwrap_or(&0.0) <= most * TOLERANCE
            };
            let before = open.len();
            open.retain(|tree| {
                let has_window = rates[*tree] < trees[*tree].window * (1.0 - TOLERANCE);
                has_window && !trees[*tree].of.iter().any(|(resource, _)| is_full(resource))
            });
            if open.len() == before {
                // Rounding has left nothing full: what is left is too little to count.
                break;
            }
        }
        rates
    }

    /// What trees at these rates leave: the seconds per byte of each cable, and the limits of a further tree.
    pub(super) fn rest(&self, trees: &[(&Plan, &Usage, f64)]) -> (Limits, Vec<f64>) {
        let mut taken: HashMap<Resource, f64> = HashMap::new();
        for (_, usage, rate) in trees {
            usage.of.iter().for_each(|(resource, weight)| *taken.entry(*resource).or_default() += weight * rate);
        }
        let mut byte_s = self.byte_s.clone();
        for (resource, taken) in &taken {
            if let Resource::Cable(link) = resource {
                let rate = self.byte_s[link.0 as usize].recip();
                let is_full = *taken >= rate * (1.0 - 1e3 * TOLERANCE);
                byte_s[link.0 as usize] = if is_full { SATURATED_S } else { (rate - taken).recip() };
            }
        }
        let mut rest = self.further(trees);
        if let Some(devices) = &mut rest.devices {
            devices.retain(|switch, device| {
                let (Some(port), Some(taken)) = (device.port, taken.get(&Resource::Port(*switch))) else { return true };
                let left = port.gbits() - gbits(taken.recip());
                // Rounded down, so that ports are never overbooked.
                device.port = Rate::from_gbits((left * 1000.0).floor() / 1000.0);
                left > port.gbits() * 1e-6 && device.port.is_some()
            });
        }
        (rest, byte_s)
    }

    /// The limits of a further tree beside these, as one of equals: their edges count as those of other jobs do.
    pub(super) fn beside(&self, trees: &[(&Plan, &Usage, f64)]) -> Limits {
        let mut load = match &self.limits.pricing.load {
            Some(load) => load.to_vec(),
            None => Vec::new(),
        };
        load.resize(self.byte_s.len(), 0);
        for (plan, ..) in trees {
            edges(plan).into_iter().for_each(|(link, edges)| load[link.0 as usize] += edges);
        }
        let mut limits = self.further(trees);
        limits.pricing.load = Some(load.into());
        limits
    }

    /// The limits of a further tree: slots that these take are gone. It is for a large message, as no small one is
    /// divided.
    fn further(&self, trees: &[(&Plan, &Usage, f64)]) -> Limits {
        let size = match self.limits.pricing.size {
            Size::Any => Size::Bytes(Size::LARGE),
            bytes @ Size::Bytes(_) => bytes,
        };
        let pricing = Pricing { size, ..self.limits.pricing.clone() };
        let mut limits = Limits { pricing, ..self.limits.clone() };
        if let Some(devices) = &mut limits.devices {
            for node in trees.iter().flat_map(|(plan, ..)| &plan.nodes) {
                if let Some(device) = devices.get_mut(&node.switch) {
                    device.slots_free = device.slots_free.saturating_sub(self.limits.slots_needed);
                }
            }
        }
        limits
    }
}
