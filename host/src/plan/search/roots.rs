//! Finds the switches that may be the root: those on which the routes from all leaves meet.

use super::{Found, Search};
use crate::plan::cost::seconds;
use crate::plan::index::{Routing, Turn};
use crate::plan::route::Load;
use crate::topo::LinkId;

/// What the routes that lead up to a switch tell about it as a root.
#[derive(Debug, Clone, Copy)]
struct Reach {
    /// The leaves whose routes lead there.
    leaves: u32,
    farthest: u16,
    sum: u32,
    /// The seconds per byte of the slowest cable that all routes of a leaf need.
    slowest_s: f64,
    /// Of about how many leaves the routes have a cable beyond an even spread.
    uneven: u32,
}

/// How the routes of a leaf have come to a switch.
#[derive(Debug, Clone, Copy)]
struct Seen {
    leaf: u32,
    distance: u16,
    slowest_s: f64,
}

/// A switch that may be the root, with what the least distance and rate promise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Root {
    pub(super) switch: u32,
    farthest: u16,
    pub(super) slowest_s: f64,
}

impl Search<'_> {
    /// The roots that are worth a try for these leaves, the most promising first.
    pub(super) fn roots(&self, leaves: &[u32], load: &mut Load<'_>) -> Vec<Root> {
        load.clear();
        let mut met = self.meet(leaves, load);
        let usable = self.nodes.iter().filter(|node| node.children_max > 0).count();
        let mut roots: Vec<Root> = Vec::new();
        let mut add = |root: Root| {
            if roots.iter().all(|other| other.switch != root.switch) {
                roots.push(root);
            }
        };
        let distance = |one: &(u32, Reach)| (one.1.farthest, one.1.sum);
        let by_distance = |a: &(u32, Reach), b: &(u32, Reach)| {
            distance(a).cmp(&distance(b)).then(a.1.slowest_s.total_cmp(&b.1.slowest_s))
        };
        let root = |(switch, reach): &(u32, Reach)| Root {
            switch: *switch,
            farthest: reach.farthest,
            slowest_s: reach.slowest_s,
        };
        if let Some(spread) = &self.spread {
            // Roots whose cables keep to an even spread, the ones with the most edges below first.
            let edges = |one: &(u32, Reach)| -spread.edges_near(self.index, one.0);
            let mut fit: Vec<_> = met.iter().map(|one| ((one.1.uneven, distance(one)), edges(one), one)).collect();
            fit.sort_by(|(a, a_edges, one), (b, b_edges, other)| {
                let slowest = one.1.slowest_s.total_cmp(&other.1.slowest_s);
                a.cmp(b).then(a_edges.total_cmp(b_edges)).then(slowest).then(one.0.cmp(&other.0))
            });
            fit.into_iter().take(EACH_MAX).map(|(.., one)| root(one)).for_each(&mut add);
        }
        met.sort_by(|a, b| by_distance(a, b).then(a.0.cmp(&b.0)));
        met.iter().take(EACH_MAX).map(root).for_each(&mut add);
        met.sort_by(|a, b| a.1.slowest_s.total_cmp(&b.1.slowest_s).then(by_distance(a, b)).then(a.0.cmp(&b.0)));
        met.iter().take(EACH_MAX).map(root).for_each(&mut add);
        let below = |switch: u32| Root { switch, farthest: 0, slowest_s: 0.0 };
        // Where routes meet above the leaves, a leaf takes in more edges over longer routes.
        if met.is_empty() || leaves.len() <= FEW_LEAVES {
            self.best_leaves(leaves, load).into_iter().map(below).for_each(&mut add);
        }
        if usable <= ALL_MAX {
            let all = (0..self.nodes.len() as u32).filter(|switch| self.is_usable(*switch));
            all.map(below).for_each(&mut add);
        } else if met.is_empty() {
            self.nearest_roots(leaves).into_iter().map(below).for_each(&mut add);
        }
        roots
    }

    /// Follow the routes up from the leaves, and return the usable switches on which all meet. Of many leaves, a sample
    /// is followed.
    fn meet(&self, leaves: &[u32], load: &Load<'_>) -> Vec<(u32, Reach)> {
        if self.routing == Routing::UpDown && self.index.all_rise_alike(leaves) {
            return self.meet_by_tiers(leaves, load);
        }
        let none = Reach { leaves: 0, farthest: 0, sum: 0, slowest_s: 0.0, uneven: 0 };
        let mut reached = vec![none; self.nodes.len()];
        let mut seen = vec![Seen { leaf: u32::MAX, distance: 0, slowest_s: 0.0 }; self.nodes.len()];
        let (mut touched, mut followed, even_s) = (Vec::new(), 0, self.even_s());
        for (nth, &leaf) in (0u32..).zip(sample(leaves, SAMPLE_MAX)) {
            followed += 1;
            let mut layer = vec![leaf];
            seen[leaf as usize] = Seen { leaf: nth, distance: 0, slowest_s: 0.0 };
            let mut distance = 0;
            while !layer.is_empty() {
                for &at in &layer {
                    let reach = &mut reached[at as usize];
                    if reach.leaves == 0 {
                        touched.push(at);
                    }
                    reach.leaves += 1;
                    reach.farthest = reach.farthest.max(distance);
                    reach.sum += u32::from(distance);
                    reach.slowest_s = reach.slowest_s.max(seen[at as usize].slowest_s);
                    reach.uneven += u32::from(seen[at as usize].slowest_s > even_s);
                }
                distance += 1;
                layer = self.next_layer(&layer, (nth, distance), &mut seen, load);
            }
        }
        let all_meet = |switch: &u32| reached[*switch as usize].leaves == followed && self.is_usable(*switch);
        touched.into_iter().filter(all_meet).map(|switch| (switch, reached[switch as usize])).collect()
    }

    /// The same where all routes to a switch are equally long: leaves go on together from where they meet.
    fn meet_by_tiers(&self, leaves: &[u32], load: &Load<'_>) -> Vec<(u32, Reach)> {
        let mut layer: Vec<u32> = sample(leaves, TIERS_SAMPLE_MAX).copied().collect();
        let (all, words) = (layer.len(), layer.len().div_ceil(64));
        // Per switch: which leaves' routes lead there, and the slowest cable that all routes of a leaf need, or less.
        let mut sets = vec![0_u64; self.nodes.len() * words];
        let mut slowest = vec![(0.0_f64, 0_u32); self.nodes.len()];
        let even_s = self.even_s();
        for (nth, leaf) in layer.iter().enumerate() {
            sets[*leaf as usize * words + nth / 64] |= 1 << (nth % 64);
        }
        let (mut met, mut distance, mut own) = (Vec::new(), 0, vec![0; words]);
        while !layer.is_empty() {
            let mut next = Vec::new();
            for at in layer {
                let from = at as usize * words;
                own.copy_from_slice(&sets[from..from + words]);
                let leaves: u32 = own.iter().map(|word| word.count_ones()).sum();
                let (slowest_s, uneven) = slowest[at as usize];
                if leaves as usize == all && self.is_usable(at) {
                    let sum = u32::from(distance) * leaves;
                    met.push((at, Reach { leaves, farthest: distance, sum, slowest_s, uneven }));
                }
                for hop in self.index.hops(at).iter().filter(|hop| hop.turn == Turn::Up) {
                    let way_s = slowest_s.max(load.cable(self.index, hop).1);
                    let uneven = if way_s > slowest_s && way_s > even_s { leaves } else { uneven };
                    let to = hop.to as usize;
                    let (mut is_new, mut overlaps) = (true, false);
                    for (there, own) in sets[to * words..][..words].iter_mut().zip(&own) {
                        is_new &= *there == 0;
                        overlaps |= *there & own != 0;
                        *there |= own;
                    }
                    // A leaf with several ways takes the best, which may be that of all leaves.
                    let there = &mut slowest[to];
                    *there = match overlaps {
                        true => (there.0.min(way_s), there.1.min(uneven)),
                        false => (there.0.max(way_s), there.1 + uneven),
                    };
                    if is_new {
                        next.push(hop.to);
                    }
                }
            }
            layer = next;
            distance += 1;
        }
        met
    }

    /// The switches one move up from a layer, each with the slowest cable of the best way there.
    fn next_layer(&self, layer: &[u32], (nth, distance): (u32, u16), seen: &mut [Seen], load: &Load<'_>) -> Vec<u32> {
        let mut next = Vec::new();
        // Most switches that are reached are at the top, and have many hops down.
        for &at in layer.iter().filter(|at| self.index.rises(**at, self.routing)) {
            let slowest_s = seen[at as usize].slowest_s;
            for hop in self.index.hops(at).iter().filter(|hop| self.routing.turn(hop.turn) != Turn::Down) {
                let there = &mut seen[hop.to as usize];
                if there.leaf != nth {
                    *there = Seen { leaf: nth, distance, slowest_s: f64::INFINITY };
                    next.push(hop.to);
                }
                if there.distance == distance {
                    let (_, cable_s) = load.cable(self.index, hop);
                    there.slowest_s = there.slowest_s.min(slowest_s.max(cable_s));
                }
            }
        }
        next
    }

    /// The leaves that could take in the edges of all others fastest.
    fn best_leaves(&self, leaves: &[u32], load: &Load<'_>) -> Vec<u32> {
        let mut by_intake: Vec<(f64, u32)> =
            leaves.iter().map(|leaf| (self.intake_s(*leaf, leaves.len() - 1, load), *leaf)).collect();
        by_intake.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        by_intake.into_iter().take(LEAVES_MAX).map(|(_, leaf)| leaf).collect()
    }

    /// The seconds per byte that edges take at least into a switch over all its cables together.
    pub(super) fn intake_s(&self, switch: u32, edges: usize, load: &Load<'_>) -> f64 {
        let cables = self.index.hops(switch).iter().flat_map(|hop| self.index.cables(hop));
        let rates: f64 = cables.map(|link: &LinkId| 1.0 / load.byte_s(*link, 1)).sum();
        edges as f64 / rates.max(f64::MIN_POSITIVE)
    }

    /// The usable switches nearest to all leaves, down routes included.
    fn nearest_roots(&self, leaves: &[u32]) -> Vec<u32> {
        let distances: Vec<_> = sample(leaves, FAR_SAMPLE_MAX).map(|leaf| self.all_distances(*leaf)).collect();
        let usable = (0..self.nodes.len() as u32).filter(|switch| self.is_usable(*switch));
        let near = usable.filter(|switch| distances.iter().all(|from| from.reaches(*switch)));
        let mut near: Vec<(u16, u32, u32)> = near
            .map(|switch| {
                let far = distances.iter().map(|from| from.of(switch));
                (far.clone().max().unwrap_or(0), far.map(u32::from).sum(), switch)
            })
            .collect();
        near.sort_unstable();
        near.into_iter().take(EACH_MAX).map(|(_, _, switch)| switch).collect()
    }

    /// Whether the least distance and the slowest cable leave a chance that a tree with this root is one of the best.
    pub(super) fn may_improve(&self, root: Root, found: &Found) -> bool {
        let costs = self.costs();
        let way = costs.cable_s * f64::from(1 + root.farthest) + 2.0 * costs.node_s;
        let least = self.sizes().map(|bytes| seconds(bytes, way, root.slowest_s, costs));
        found.may_improve(least)
    }
}

/// At most `most` items, spread evenly over all.
fn sample(all: &[u32], most: usize) -> impl Iterator<Item = &u32> + Clone {
    let stride = all.len().div_ceil(most).max(1);
    all.iter().step_by(stride)
}

/// How many roots are tried by each criterion.
const EACH_MAX: usize = 4;
/// How many leaves are tried as the root.
const LEAVES_MAX: usize = 3;
/// Of so few leaves, some are always tried.
const FEW_LEAVES: usize = 8;
/// If there are no more usable switches, each is tried as the root.
const ALL_MAX: usize = 12;
/// How many leaves' routes are followed.
const SAMPLE_MAX: usize = 256;
/// How many leaves' routes are followed where they go on together.
const TIERS_SAMPLE_MAX: usize = 1024;
/// How many leaves' distances are measured if their routes do not meet.
const FAR_SAMPLE_MAX: usize = 16;
