//! The optimum by trying everything: every tree of nodes, every route of every edge and every cable of every route.
//!
//! Written from the descriptions of what is planned and of what it costs (the heads of `plan` and `cost`), with none of
//! the planner's code.

use crate::plan::{FabricCosts, Limits};
use crate::topo::{Fabric, HostId, LinkId, SwitchId};
use std::collections::BTreeMap;

struct Brute<'a> {
    fabric: &'a Fabric,
    costs: FabricCosts,
    bytes: u64,
    /// Per switch: its hosts' cables.
    hosts: BTreeMap<u32, Vec<LinkId>>,
    tiers: Vec<usize>,
    usable: Vec<u32>,
    root: u32,
    best: f64,
}

/// Return the least time for a message, if any tree connects all hosts. Each host has one cable, and its switch must be
/// able to aggregate.
pub(super) fn optimum(fabric: &Fabric, hosts: &[HostId], limits: &Limits, bytes: u64) -> Option<f64> {
    let mut at: BTreeMap<u32, Vec<LinkId>> = BTreeMap::new();
    for host in hosts {
        let uplink = fabric.host(*host).uplinks[0];
        at.entry(uplink.switch.0).or_default().push(uplink.link);
    }
    let usable: Vec<u32> =
        fabric.switch_ids().filter(|id| fabric.switch(*id).aggregation.is_some()).map(|id| id.0).collect();
    let (costs, best, tiers) = (limits.pricing.costs, f64::INFINITY, tiers(fabric));
    let mut brute = Brute { fabric, costs, bytes, hosts: at, tiers, usable: usable.clone(), root: 0, best };
    for root in usable {
        brute.root = root;
        let others = brute.usable.iter().copied().filter(|switch| *switch != root).collect();
        brute.choose_parents(others, BTreeMap::new());
    }
    brute.best.is_finite().then_some(brute.best)
}

fn tiers(fabric: &Fabric) -> Vec<usize> {
    let has_host =
        |switch: SwitchId| fabric.hosts().iter().flat_map(|host| &host.uplinks).any(|up| up.switch == switch);
    let mut tiers: Vec<usize> = fabric.switch_ids().map(|id| if has_host(id) { 0 } else { 1000 }).collect();
    // Relax often enough: slow, and plainly right.
    for _ in fabric.switch_ids() {
        for at in fabric.switch_ids() {
            for (next, _) in fabric.adjacent(at) {
                tiers[next.0 as usize] = tiers[next.0 as usize].min(tiers[at.0 as usize] + 1);
            }
        }
    }
    tiers
}

impl Brute<'_> {
    /// Try every parent, and none, for each switch.
    fn choose_parents(&mut self, mut left: Vec<u32>, parents: BTreeMap<u32, u32>) {
        let Some(node) = left.pop() else {
            if self.is_tree(&parents) {
                let edges: Vec<(u32, u32)> = parents.into_iter().collect();
                self.choose_routes(&edges, BTreeMap::new());
            }
            return;
        };
        if !self.hosts.contains_key(&node) {
            self.choose_parents(left.clone(), parents.clone());
        }
        for parent in self.usable.clone().into_iter().filter(|parent| *parent != node) {
            let mut parents = parents.clone();
            parents.insert(node, parent);
            self.choose_parents(left.clone(), parents);
        }
    }

    /// Whether all nodes lead to the root, and none is without a child.
    fn is_tree(&self, parents: &BTreeMap<u32, u32>) -> bool {
        let leads_to_root = |mut at: u32| {
            for _ in 0..=parents.len() {
                match parents.get(&at) {
                    Some(parent) => at = *parent,
                    None => return at == self.root,
                }
            }
            false
        };
        let has_child = |node: u32| self.hosts.contains_key(&node) || parents.values().any(|parent| *parent == node);
        parents.keys().all(|node| leads_to_root(*node) && has_child(*node)) && has_child(self.root)
    }

    fn choose_routes(&mut self, edges: &[(u32, u32)], routes: BTreeMap<u32, (u32, Vec<LinkId>)>) {
        let Some(((node, parent), rest)) = edges.split_first() else {
            self.best = self.best.min(self.price(&routes));
            return;
        };
        let all = self.all_routes(*node, *parent);
        let shortest = all.iter().map(Vec::len).min();
        for route in all.into_iter().filter(|route| Some(route.len()) == shortest) {
            let mut routes = routes.clone();
            routes.insert(*node, (*parent, route));
            self.choose_routes(rest, routes);
        }
    }

    /// All routes without a repeated switch that do not go up after they went down.
    fn all_routes(&self, from: u32, to: u32) -> Vec<Vec<LinkId>> {
        let (mut found, mut open) = (Vec::new(), vec![(vec![from], Vec::new(), false)]);
        while let Some((passed, route, fell)) = open.pop() {
            let at = passed[passed.len() - 1];
            if at == to {
                found.push(route);
                continue;
            }
            for (next, link) in self.fabric.adjacent(SwitchId(at)) {
                let (here, there) = (self.tiers[at as usize], self.tiers[next.0 as usize]);
                if passed.contains(&next.0) || (fell && there > here) {
                    continue;
                }
                let (mut passed, mut route) = (passed.clone(), route.clone());
                passed.push(next.0);
                route.push(*link);
                open.push((passed, route, fell || there < here));
            }
        }
        found
    }

    fn byte_s(&self, link: LinkId, edges: usize) -> f64 {
        let gbits = self.fabric.link(link).rate.map_or(self.costs.assumed_gbits, |rate| rate.gbits());
        edges as f64 * 8.0 / (gbits * 1e9)
    }

    fn price(&self, routes: &BTreeMap<u32, (u32, Vec<LinkId>)>) -> f64 {
        let mut edges: BTreeMap<LinkId, usize> = BTreeMap::new();
        routes.values().flat_map(|(_, route)| route).for_each(|link| *edges.entry(*link).or_default() += 1);
        self.hosts.values().flatten().for_each(|link| *edges.entry(*link).or_default() += 1);
        let chunk = self.bytes.min(self.costs.chunk_bytes.into()) as f64;
        let edge = |route: &[LinkId]| {
            let slowest = route.iter().map(|link| self.byte_s(*link, edges[link])).fold(0.0, f64::max);
            route.len() as f64 * self.costs.cable_s + chunk * slowest
        };
        let children = |node: u32| {
            let below = routes.values().filter(|(parent, _)| *parent == node).count();
            (below + self.hosts.get(&node).map_or(0, Vec::len)) as f64
        };
        let node_s = |node: u32| self.costs.node_s + children(node) * self.costs.child_s;
        let way = |(leaf, cables): (&u32, &Vec<LinkId>)| {
            let mut way = cables.iter().map(|link| edge(&[*link])).fold(0.0, f64::max) + node_s(*leaf);
            let mut at = *leaf;
            while let Some((parent, route)) = routes.get(&at) {
                way += edge(route) + node_s(*parent);
                at = *parent;
            }
            way
        };
        let round_trip = 2.0 * (self.costs.host_s + self.hosts.iter().map(way).fold(0.0, f64::max));
        let busiest = edges.iter().map(|(link, edges)| self.byte_s(*link, *edges)).fold(0.0, f64::max);
        round_trip + (self.bytes as f64 - chunk) * busiest.max(round_trip / f64::from(self.costs.window_bytes))
    }
}
