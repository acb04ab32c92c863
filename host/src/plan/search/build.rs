//! Makes the plan of the chosen draft.

use super::draft::{Children, Draft};
use super::{Candidate, Search};
use crate::plan::aligned::{self, Below};
use crate::plan::cost::{Bottleneck, Prediction, first_chunk, seconds};
use crate::plan::route::Load;
use crate::plan::{Child, Plan, PlanNode, PlanRank};
use crate::topo::{HostId, LinkId, SwitchId};
use std::collections::HashMap;
use sumac_hal::ids::Rank;

impl Search<'_> {
    /// Whether the tree evaluates the pairing of all ranks, see [`Plan::aligned`].
    pub(super) fn is_aligned(&self, draft: &Draft) -> bool {
        if !self.ranks.len().is_power_of_two() {
            return false;
        }
        let children = draft.children();
        aligned::is_aligned(self.ranks.len(), draft.root as usize, &|node| below(&children, node))
    }

    /// Make the plan of the chosen tree.
    pub(super) fn finish(&self, best: Candidate, is_exact: bool, load: &mut Load<'_>) -> Plan {
        let Candidate { draft, price, .. } = best;
        draft.put(load);
        let (gap, unrated) = (self.gap(&draft, &price), self.index.unrated);
        let aligned = self.is_aligned(&draft);
        let mut children = draft.children();
        let mut plan = Plan {
            levels: 1,
            max_children: 0,
            max_link_sharing: load.sharing().max(1) as usize,
            aligned,
            optimal: is_exact || gap <= super::EQUAL,
            gap: if is_exact { 0.0 } else { gap },
            prediction: self.prediction(&price),
            routing: self.routing,
            unrated,
            nodes: vec![self.new_node(draft.root, 0, None, Vec::new())],
            ranks: Vec::with_capacity(self.ranks.len()),
        };
        let mut leaf_of = vec![0; self.ranks.len()];
        let mut numbers = HashMap::from([(draft.root, 0)]);
        let mut index = 0;
        while index < plan.nodes.len() {
            let level = plan.nodes[index].level;
            let below = children.remove(&plan.nodes[index].switch.0).unwrap_or_default();
            plan.max_children = plan.max_children.max(below.len());
            plan.levels = plan.levels.max(level + 1);
            for (rank, node) in below {
                let child = match node.and_then(|node| Some((node, draft.parents.get(&node)?))) {
                    Some((node, (_, route))) => {
                        numbers.insert(node, plan.nodes.len());
                        plan.nodes.push(self.new_node(node, level + 1, Some(index), route.clone()));
                        Child::Node(plan.nodes.len() - 1)
                    }
                    None => {
                        leaf_of[rank as usize] = index;
                        Child::Rank(Rank(rank))
                    }
                };
                plan.nodes[index].children.push(child);
            }
            index += 1;
        }
        for ((rank, (uplink, _)), leaf) in (0u32..).zip(&draft.places.ranks).zip(leaf_of) {
            let mut path = vec![uplink.link];
            path.extend(draft.places.routes.get(&rank).into_iter().flatten());
            plan.ranks.push(self.new_rank(rank, leaf, path));
        }
        if plan.prediction.bottleneck != Bottleneck::Window {
            plan.prediction.bottleneck = price.bottleneck.in_plan(|switch| numbers.get(&switch).copied().unwrap_or(0));
        }
        plan
    }

    fn prediction(&self, price: &super::Price) -> Prediction {
        let costs = self.costs();
        let mut sizes = self.sizes().to_vec();
        sizes.dedup();
        let times = sizes.iter().copied().zip(price.times).collect();
        let round_trip_s = 2.0 * (costs.host_s + price.way_s);
        let window_s = round_trip_s / f64::from(costs.window_bytes);
        let bottleneck = if window_s > price.busiest_s { Bottleneck::Window } else { price.bottleneck.in_plan(|_| 0) };
        Prediction { times, round_trip_s, byte_s: price.busiest_s.max(window_s), bottleneck }
    }

    /// By how much another tree may be faster, as a fraction of its time. Compares with times that no tree beats.
    fn gap(&self, draft: &Draft, price: &super::Price) -> f64 {
        let leaves = &draft.places.leaves;
        let costs = self.costs();
        let least_byte_s = |links: &mut dyn Iterator<Item = LinkId>| {
            links.map(|link| self.uplink_byte_s(link)).fold(f64::INFINITY, f64::min)
        };
        let rank_s = |entries: &Vec<super::Entry>| least_byte_s(&mut entries.iter().map(|entry| entry.uplink.link));
        let slowest_rank_s = self.entries.iter().map(rank_s).fold(0.0, f64::max);
        // Only where cables determine the leaves is it known which switches an edge has to leave.
        let is_plain = |leaf: u32| !self.fabric.switch(SwitchId(leaf)).is_device;
        let is_one = |entries: &Vec<super::Entry>| entries.iter().all(|entry| entry.leaf == entries[0].leaf);
        let is_given = self.entries.iter().all(|entries| is_one(entries) && is_plain(entries[0].leaf));
        let edges = if is_given && leaves.len() > 1 { leaves.len() } else { 0 };
        let out_s = |switch: &u32| {
            least_byte_s(&mut self.index.hops(*switch).iter().flat_map(|hop| self.index.cables(hop)).copied())
        };
        let slowest_edge_s = leaves.keys().take(edges).map(out_s).fold(0.0, f64::max);
        let fullest = leaves.values().map(|leaf| leaf.ranks).max().filter(|_| is_given).unwrap_or(1);
        // Of two leaves, one is at least half their distance from the root.
        let far = leaves.keys().next().filter(|_| edges > 0).map(|first| self.distances(*first));
        let far = far.map_or(0, |from| leaves.keys().map(|leaf| from.of(*leaf).div_ceil(2)).max().unwrap_or(0));
        let least = self.sizes().map(|bytes| {
            let chunk = first_chunk(bytes, costs);
            let first_s = costs.cable_s + chunk * slowest_rank_s + costs.node_s + fullest as f64 * costs.child_s;
            let onward_s = costs.cable_s * f64::from(far) + chunk * slowest_edge_s + costs.node_s + 2.0 * costs.child_s;
            let way_s = if edges > 0 { first_s - (fullest - 1) as f64 * costs.child_s + onward_s } else { first_s };
            seconds(bytes, way_s, slowest_rank_s.max(slowest_edge_s), costs)
        });
        (price.times[0] / least[0] * (price.times[1] / least[1])).sqrt() - 1.0
    }

    fn new_node(&self, switch: u32, level: usize, parent: Option<usize>, path: Vec<LinkId>) -> PlanNode {
        let id = SwitchId(switch);
        let switch = self.fabric.switch(id);
        let (name, guid) = (switch.name.clone(), switch.guid.clone());
        PlanNode { switch: id, name, guid, level, parent, children: Vec::new(), path }
    }

    fn new_rank(&self, rank: u32, leaf: usize, path: Vec<LinkId>) -> PlanRank {
        let has_cable = |host: &&HostId| self.fabric.host(**host).uplinks.iter().any(|uplink| uplink.link == path[0]);
        let adapters = self.ranks.adapters(rank as usize);
        let id: HostId = adapters.iter().find(has_cable).copied().unwrap_or(adapters[0]);
        let host = self.fabric.host(id);
        PlanRank { rank: Rank(rank), host: id, name: host.name.clone(), guid: host.guid.clone(), leaf, path }
    }
}

fn below(children: &Children, node: usize) -> Vec<Below> {
    let list = children.get(&(node as u32)).into_iter().flatten();
    list.map(|(rank, node)| node.map_or(Below::Rank(*rank as usize), |node| Below::Node(node as usize))).collect()
}
