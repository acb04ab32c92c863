//! Spreads the edges of all jobs over the cables between switches.
//!
//! A tree's predicted time minds that tree alone. Where hosts' cables carry several jobs, further edges between
//! switches cost it nothing, and would pile up on few cables. So beside other jobs' trees:
//!
//! 1. A tree with a cable beyond an even spread counts as [`SLACK`] slower. An even spread gives the cables that leave
//!    a leaf the leaf's edges in equal numbers, and one more.
//! 2. Of trees whose times differ by less than [`NEAR`], the one below the root with the most edges so far is taken.
//!    Roots with few are left to large jobs, which no other root suits.
//! 3. If no root keeps to the even spread, edges take a way around, over one more node.
//!
//! Edges to devices behind ports do not count: they all go over the device's cable.

use super::draft::Draft;
use super::{Candidate, Search};
use crate::plan::index::{Distances, FabricIndex, Turn};
use crate::plan::route::{Load, route};
use crate::topo::{Device, Fabric, LinkId, SwitchId};
use std::collections::BTreeSet;

/// By which fraction a tree may take longer (in the geometric mean over the sizes) to keep to an even spread.
pub(super) const SLACK: f64 = 0.25;
/// Beside other jobs' trees, products of times that differ by less than this factor count as equal.
pub(super) const NEAR: f64 = 2e-3;
/// How many edges of a tree take a way around at most.
const DETOURS_MAX: usize = 64;
/// How many nodes are tried for a way around.
const NODES_MAX: usize = 128;

/// What other jobs' trees have put on the fabric.
#[derive(Debug)]
pub(super) struct Spread {
    /// The seconds per byte of a cable with as many edges as an even spread gives it.
    pub(super) even_s: f64,
    /// Per switch: the sum over its cables to switches of the squares of their edges.
    edges: Vec<f64>,
}

impl Spread {
    /// Sum up the edges of other jobs; `leaves` are the switches that a job's edges leave.
    pub(super) fn new(
        fabric: &Fabric,
        index: &FabricIndex,
        (others, leaves): (&[u32], &[u32]),
        byte_s: &[f64],
    ) -> Self {
        let mut edges = vec![0.0; fabric.switches().len()];
        for (link, count) in fabric.links().iter().zip(others).filter(|(_, count)| **count > 0) {
            if let [Device::Switch(a), Device::Switch(b)] = link.ends.map(|end| end.device) {
                let square = f64::from(*count).powi(2);
                edges[a.0 as usize] += square;
                edges[b.0 as usize] += square;
            }
        }
        let even_s = leaves.iter().map(|leaf| even_s(index, *leaf, others, byte_s)).fold(0.0, f64::max);
        Self { even_s, edges }
    }

    /// How many edges the cables of a root and of the switches next to it carry.
    pub(super) fn edges_near(&self, index: &FabricIndex, root: u32) -> f64 {
        let next = index.hops(root).iter().filter(|hop| hop.turn == Turn::Down).map(|hop| hop.to);
        next.chain([root]).map(|switch| self.edges[switch as usize]).sum()
    }
}

/// The seconds per byte of a cable that leaves a switch with as many edges as an even spread gives it, and one more.
fn even_s(index: &FabricIndex, leaf: u32, others: &[u32], byte_s: &[f64]) -> f64 {
    let (mut edges, mut rates, mut fastest_s) = (1.0, 0.0, f64::INFINITY);
    for link in index.hops(leaf).iter().filter(|hop| hop.turn != Turn::Down).flat_map(|hop| index.cables(hop)) {
        let own_s = byte_s[link.0 as usize];
        edges += f64::from(others.get(link.0 as usize).copied().unwrap_or(0));
        rates += own_s.recip();
        fastest_s = fastest_s.min(own_s);
    }
    if rates == 0.0 {
        return f64::INFINITY;
    }
    ((edges / (rates * fastest_s)).ceil() + 1.0) * fastest_s
}

impl Search<'_> {
    /// The seconds per byte up to which a cable between switches keeps to an even spread.
    pub(super) fn even_s(&self) -> f64 {
        self.spread.as_ref().map_or(f64::INFINITY, |spread| spread.even_s * (1.0 + super::EQUAL))
    }

    /// Whether a cable between switches with so many seconds per byte is beyond an even spread.
    fn is_beyond(&self, link: LinkId, byte_s: f64) -> bool {
        let is_plain = |device| matches!(device, Device::Switch(switch) if !self.fabric.switch(switch).is_device);
        byte_s > self.even_s() && self.fabric.link(link).ends.iter().all(|end| is_plain(end.device))
    }

    /// The edges of a tree on `load` that are on cables beyond an even spread.
    pub(super) fn uneven(&self, load: &Load<'_>) -> u32 {
        match &self.spread {
            Some(_) => load.sum_of_own(|link, byte_s| self.is_beyond(link, byte_s)),
            None => 0,
        }
    }

    /// Lead edges around cables beyond an even spread, if the tree then counts as faster.
    pub(super) fn with_detours(&self, best: Candidate, load: &mut Load<'_>) -> Candidate {
        if best.uneven == 0 {
            return best;
        }
        let mut draft = best.draft.clone();
        draft.put(load);
        let mut moved = BTreeSet::new();
        for _ in 0..DETOURS_MAX {
            let Some((full, _)) = load.busiest_of(|link, byte_s| self.is_beyond(link, byte_s)) else { break };
            let crosses =
                |(node, (_, route)): &(&u32, &(u32, Vec<LinkId>))| route.contains(&full) && !moved.contains(*node);
            let crossing: Vec<u32> = draft.parents.iter().filter(crosses).map(|(node, _)| *node).collect();
            let led = crossing.into_iter().find(|node| self.lead_around(*node, &mut draft, (&moved, load)));
            let Some(node) = led else { break };
            moved.insert(node);
        }
        let other = self.candidate(draft, load);
        if other.cost() < best.cost() { other } else { best }
    }

    /// Lead an edge over another node nearby, on cables that keep to an even spread. Returns whether there is one.
    fn lead_around(&self, node: u32, draft: &mut Draft, (moved, load): (&BTreeSet<u32>, &mut Load<'_>)) -> bool {
        let depth = draft.depth(node);
        let Some((parent, before)) = draft.parents.remove(&node) else { return false };
        load.remove(&before);
        let counts = draft.child_counts();
        let routed = |from: u32, to: u32, load: &mut Load<'_>| {
            let distances = Distances::of_sources(self.index, self.routing, to, &[from]);
            let found = route(self.index, self.routing, &distances, from, load)?;
            if found.iter().all(|link| load.byte_s(*link, 0) <= self.even_s()) {
                return Some(found);
            }
            load.remove(&found);
            None
        };
        let is_node = |via: u32, draft: &Draft| via == draft.root || draft.parents.contains_key(&via);
        let mut beside = self.beside(node);
        // Nodes of the tree first.
        beside.sort_by_key(|via| !is_node(*via, draft));
        for via in beside.into_iter().take(NODES_MAX) {
            let is_full = counts.get(&via).copied().unwrap_or(0) >= self.node(via).children_max;
            let is_node = is_node(via, draft);
            // One detour after the other would take long.
            let is_far = is_node && (moved.contains(&via) || draft.depth(via) > depth || draft.is_below(via, node));
            if via == parent || is_full || is_far {
                continue;
            }
            let Some(first) = routed(node, via, load) else { continue };
            if !is_node {
                let Some(second) = routed(via, parent, load) else {
                    load.remove(&first);
                    continue;
                };
                draft.parents.insert(via, (parent, second));
            }
            draft.parents.insert(node, (via, first));
            return true;
        }
        load.add(&before);
        draft.parents.insert(node, (parent, before));
        false
    }

    /// Usable switches one move up and one down from a switch.
    fn beside(&self, node: u32) -> Vec<u32> {
        let up = self.index.hops(node).iter().filter(|hop| hop.turn != Turn::Down);
        let down = up.flat_map(|hop| self.index.hops(hop.to)).filter(|hop| hop.turn == Turn::Down);
        let is_fit = |to: &u32| *to != node && self.is_usable(*to) && !self.fabric.switch(SwitchId(*to)).is_device;
        let beside: BTreeSet<u32> = down.map(|hop| hop.to).filter(is_fit).collect();
        beside.into_iter().collect()
    }
}
