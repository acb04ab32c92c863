//! Repairs a tree after a failure: children stay where they are if they still can.

use super::draft::{Draft, Places};
use super::{Candidate, Search, find};
use crate::plan::index::{FabricIndex, byte_times};
use crate::plan::route::{Load, route};
use crate::plan::select::Ranks;
use crate::plan::{Limits, Plan, PlanError};
use crate::topo::{Fabric, LinkId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// Find the best tree, or the repaired earlier one if it takes at most `1 + slack` times as long.
pub(in crate::plan) fn find_near(
    fabric: &Fabric,
    index: &FabricIndex,
    (ranks, limits): (&Ranks, &Limits),
    (earlier, slack): (&Plan, f64),
) -> Result<Plan, PlanError> {
    let (search, best, outcome) = find(fabric, index, (ranks, limits), &byte_times(fabric, &limits.pricing.costs))?;
    let mut load = Load::new(&limits.pricing, &search.byte_s);
    if let Some(repaired) = search.repair(earlier, &mut load) {
        let mean = |one: &Candidate| one.cost().sqrt();
        if mean(&repaired) <= mean(&best) * (1.0 + slack) {
            return Ok(search.finish(repaired, false, &mut load));
        }
    }
    Ok(search.finish(best, outcome.is_exact, &mut load))
}

impl Search<'_> {
    /// The earlier tree, in which only those children move that cannot stay. `None` if its root cannot stay.
    fn repair(&self, earlier: &Plan, load: &mut Load<'_>) -> Option<Candidate> {
        let switch = |name: &str| self.index.find_switch(self.fabric, name).map(|id| id.0);
        let nodes: Vec<Option<u32>> =
            earlier.nodes.iter().map(|node| switch(&node.name).filter(|at| self.is_usable(*at))).collect();
        let root = nodes[0]?;
        let places = Rc::new(self.stay(earlier, &nodes, load)?);
        load.clear();
        places.routes.values().for_each(|route| load.add(route));
        let mut parents: BTreeMap<u32, (u32, Vec<LinkId>)> = BTreeMap::new();
        let mut homeless: BTreeSet<u32> = places.leaves.keys().copied().filter(|leaf| *leaf != root).collect();
        for (node, planned) in nodes.iter().zip(&earlier.nodes) {
            let (Some(node), Some(parent)) = (*node, planned.parent) else { continue };
            homeless.insert(node);
            let stays = nodes[parent].and_then(|parent| Some((parent, self.route(node, parent, load)?)));
            if let Some(stays) = stays {
                parents.insert(node, stays);
                homeless.remove(&node);
            }
        }
        prune(&mut parents, &mut homeless, &places);
        for node in homeless {
            let home = self.home(node, root, &parents)?;
            parents.insert(node, (home, self.route_any(node, home, load)?));
        }
        let mut found = self.nothing_found();
        self.consider(Draft { root, parents, places }, load, &mut found);
        found.candidates.pop()
    }

    /// The ranks at their earlier leaves, where they can still enter there.
    fn stay(&self, earlier: &Plan, nodes: &[Option<u32>], load: &mut Load<'_>) -> Option<Places> {
        let leaf_of: HashMap<&str, u32> =
            earlier.ranks.iter().filter_map(|rank| Some((rank.name.as_str(), nodes[rank.leaf]?))).collect();
        let anew = self.attachments(load).into_iter().next()?;
        let mut routes = BTreeMap::new();
        let mut ranks = Vec::with_capacity(anew.ranks.len());
        load.clear();
        for (rank, entries) in (0u32..).zip(&self.entries) {
            let adapters = self.ranks.adapters(rank as usize);
            let before = adapters.iter().find_map(|host| leaf_of.get(self.fabric.host(*host).name.as_str()));
            let stays = before.and_then(|leaf| entries.iter().find(|entry| entry.leaf == *leaf));
            let (uplink, leaf) = match (stays, before) {
                (Some(entry), _) => (entry.uplink, entry.leaf),
                // It may have been moved there to keep to a limit of children.
                (None, Some(leaf)) if self.all_distances(*leaf).reaches(entries[0].uplink.switch.0) => {
                    (entries[0].uplink, *leaf)
                }
                _ => anew.ranks[rank as usize],
            };
            if uplink.switch.0 != leaf {
                let distances = self.all_distances(leaf);
                routes.insert(rank, route(self.index, self.routing, &distances, uplink.switch.0, load)?);
            }
            ranks.push((uplink, leaf));
        }
        Some(Places::new(self, ranks, routes))
    }

    /// The nearest node that leads to the root and does not come through `node`.
    fn home(&self, node: u32, root: u32, parents: &BTreeMap<u32, (u32, Vec<LinkId>)>) -> Option<u32> {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        parents.values().for_each(|(parent, _)| *counts.entry(*parent).or_default() += 1);
        let leads = |at: &u32| {
            let up = std::iter::successors(Some(*at), |at| parents.get(at).map(|(parent, _)| *parent));
            let way: Vec<u32> = up.collect();
            way.last() == Some(&root) && !way.contains(&node)
        };
        let open = parents.keys().copied().chain([root]).filter(leads);
        let near = open.filter_map(|at| {
            let distances = self.all_distances(at);
            distances.reaches(node).then(|| (distances.of(node), counts.get(&at).copied().unwrap_or(0), at))
        });
        near.min().map(|(.., at)| at)
    }

    fn route_any(&self, from: u32, to: u32, load: &mut Load<'_>) -> Option<Vec<LinkId>> {
        route(self.index, self.routing, &self.all_distances(to), from, load)
    }
}

/// Drop nodes that have neither ranks nor children any more.
fn prune(parents: &mut BTreeMap<u32, (u32, Vec<LinkId>)>, homeless: &mut BTreeSet<u32>, places: &Places) {
    loop {
        let used: BTreeSet<u32> = parents.values().map(|(parent, _)| *parent).collect();
        let is_idle = |node: &u32| !used.contains(node) && !places.leaves.contains_key(node);
        let idle: Vec<u32> = parents.keys().chain(homeless.iter()).copied().filter(is_idle).collect();
        if idle.is_empty() {
            return;
        }
        for node in idle {
            parents.remove(&node);
            homeless.remove(&node);
        }
    }
}
