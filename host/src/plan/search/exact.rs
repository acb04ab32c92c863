//! Compares all trees where the fabric around a job is small, with a bound on the work.
//!
//! A tree is built edge by edge: each node chooses its parent among all usable switches, and one of the shortest routes
//! to it. A partial tree is dropped once no completion can be one of the best.

use super::draft::{Draft, Places};
use super::{Found, Search};
use crate::plan::cost::{first_chunk, seconds};
use crate::plan::route::Load;
use crate::topo::{LinkId, SwitchId};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A partial tree.
struct Partial<'s, 'a> {
    search: &'s Search<'a>,
    places: &'s Rc<Places>,
    root: u32,
    parents: BTreeMap<u32, (u32, Vec<LinkId>)>,
    /// Nodes without a parent yet.
    open: Vec<u32>,
    counts: BTreeMap<u32, usize>,
    steps: usize,
}

impl Search<'_> {
    /// Compare all trees if there are few enough, and keep the best. Notes whether that was so.
    pub(super) fn try_all(&self, places: &Rc<Places>, load: &mut Load<'_>, found: &mut Found) {
        let usable: Vec<u32> = (0..self.nodes.len() as u32).filter(|switch| self.is_usable(*switch)).collect();
        // Where a leaf has too many ranks, some enter elsewhere.
        let fits = places.leaves.iter().all(|(switch, leaf)| leaf.ranks <= self.node(*switch).children_max);
        // A host's own device that would only forward is left out of other trees.
        let is_plain = |leaf: &u32| !self.fabric.switch(SwitchId(*leaf)).is_device;
        let fits = fits && places.leaves.keys().all(is_plain);
        let is_given = fits && places.routes.is_empty() && self.entries.iter().all(|entries| entries.len() == 1);
        if !is_given || places.leaves.len() == 1 {
            found.is_exact = is_given;
            return;
        }
        if usable.len() > SWITCHES_MAX || places.leaves.len() > LEAVES_MAX {
            return;
        }
        let mut steps = 0;
        for &root in &usable {
            load.clear();
            let leaves = places.leaves.keys().copied();
            let mut counts: BTreeMap<u32, usize> = places.leaves.iter().map(|(at, leaf)| (*at, leaf.ranks)).collect();
            counts.entry(root).or_default();
            let open = leaves.filter(|leaf| *leaf != root).collect();
            let mut partial = Partial { search: self, places, root, parents: BTreeMap::new(), open, counts, steps };
            partial.extend(load, found);
            steps = partial.steps;
        }
        found.is_exact = steps < STEPS_MAX;
    }
}

impl Partial<'_, '_> {
    /// Add an edge in all possible ways.
    fn extend(&mut self, load: &mut Load<'_>, found: &mut Found) {
        self.steps += 1;
        if self.steps >= STEPS_MAX || !found.may_improve(self.least(load)) {
            return;
        }
        let Some(node) = self.open.pop() else {
            self.complete(found);
            return;
        };
        for parent in (0..self.search.nodes.len() as u32).filter(|switch| self.search.is_usable(*switch)) {
            let has_room = self.counts.get(&parent).unwrap_or(&0) < &self.search.node(parent).children_max;
            if parent == node || !has_room || self.leads_to(parent, node) {
                continue;
            }
            let is_new = !self.counts.contains_key(&parent);
            if is_new {
                self.open.push(parent);
            }
            *self.counts.entry(parent).or_default() += 1;
            for route in self.routes(node, parent, load) {
                load.add(&route);
                self.parents.insert(node, (parent, route));
                self.extend(load, found);
                if let Some((_, route)) = self.parents.remove(&node) {
                    load.remove(&route);
                }
            }
            if is_new {
                self.open.pop();
                self.counts.remove(&parent);
            } else {
                *self.counts.entry(parent).or_default() -= 1;
            }
        }
        self.open.push(node);
    }

    /// Whether a switch's way to the root, as far as it is known, comes through a node.
    fn leads_to(&self, from: u32, node: u32) -> bool {
        let mut at = from;
        while let Some((parent, _)) = self.parents.get(&at) {
            at = *parent;
            if at == node {
                return true;
            }
        }
        false
    }

    /// All shortest routes; of parallel cables that carry no edge of this tree and cost the same, one. Cables with
    /// edges differ: the other edge of one may be on the slowest way.
    fn routes(&self, from: u32, to: u32, load: &Load<'_>) -> Vec<Vec<LinkId>> {
        let (index, routing) = (self.search.index, self.search.routing);
        let distances = self.search.all_distances(to);
        let (mut done, mut open) = (Vec::new(), vec![((from, false), Vec::new())]);
        if !distances.reaches(from) {
            return done;
        }
        while let Some((at, route)) = open.pop() {
            if at.0 == to {
                done.push(route);
                continue;
            }
            for (hop, has_gone_down) in distances.next(index, routing, at) {
                let mut unused: Vec<f64> = Vec::new();
                for link in index.cables(hop) {
                    let cost = load.byte_s(*link, 1);
                    if load.own(*link) == 0 {
                        if unused.contains(&cost) {
                            continue;
                        }
                        unused.push(cost);
                    }
                    let mut longer: Vec<LinkId> = route.clone();
                    longer.push(*link);
                    open.push(((hop.to, has_gone_down), longer));
                }
            }
        }
        done
    }

    /// Times that no completion of the tree beats.
    fn least(&self, load: &Load<'_>) -> [f64; 2] {
        let (search, costs) = (self.search, self.search.costs());
        let port = |(node, children): (&u32, &usize)| *children as f64 * search.node(*node).port_byte_s;
        let ports = self.counts.iter().map(port).fold(0.0, f64::max);
        let uplinks = self.places.leaves.values().map(|leaf| leaf.slowest_s()).fold(0.0, f64::max);
        let busiest_s = load.busiest().map_or(0.0, |(_, byte_s)| byte_s).max(ports).max(uplinks);
        search.sizes().map(|bytes| {
            let chunk = first_chunk(bytes, costs);
            let way = |(leaf, at): (&u32, &super::draft::Leaf)| {
                let mut way_s = costs.cable_s + chunk * at.slowest_s() + self.node_s(*leaf, chunk);
                let mut at = *leaf;
                while let Some((parent, route)) = self.parents.get(&at) {
                    let byte_s = route.iter().map(|link| load.byte_s(*link, 0)).fold(0.0, f64::max);
                    way_s += costs.cable_s * route.len() as f64 + chunk * byte_s + self.node_s(*parent, chunk);
                    at = *parent;
                }
                way_s
            };
            seconds(bytes, self.places.leaves.iter().map(way).fold(0.0, f64::max), busiest_s, costs)
        })
    }

    fn node_s(&self, node: u32, chunk: f64) -> f64 {
        let costs = self.search.costs();
        let children = self.counts.get(&node).copied().unwrap_or(0) as f64;
        costs.node_s + children * (costs.child_s + chunk * self.search.node(node).port_byte_s)
    }

    fn complete(&self, found: &mut Found) {
        // A root that only forwards is left out in another tree. Another node may be the way around a slow cable.
        let children = self.counts.get(&self.root).copied().unwrap_or(0);
        if children < 2 && !self.places.leaves.contains_key(&self.root) {
            return;
        }
        let draft = Draft { root: self.root, parents: self.parents.clone(), places: Rc::clone(self.places) };
        let mut load = Load::new(&self.search.limits.pricing, &self.search.byte_s);
        found.add(self.search.candidate(draft, &mut load));
    }
}

/// How many usable switches a fabric may have for all trees to be compared.
const SWITCHES_MAX: usize = 8;
/// How many leaves the job may have.
const LEAVES_MAX: usize = 6;
/// How many partial trees are looked at.
const STEPS_MAX: usize = 20_000;
