//! Paths over the fabric: distances, least-loaded shortest paths, and disjoint branches to a root.
//!
//! Invariants: a path is a sequence of adjacent cables; every path towards a root is a shortest path; among parallel
//! cables the one with the fewest tree edges is used, ties broken by id, so results are deterministic.

use crate::topo::{Fabric, LinkId, SwitchId};
use std::collections::{BTreeMap, VecDeque};

/// The distance of an unreachable switch.
pub(super) const UNREACHABLE: u32 = u32::MAX;

/// Each switch's distance to `target` in cables.
pub(super) fn distances(fabric: &Fabric, target: SwitchId) -> Vec<u32> {
    let mut distance = vec![UNREACHABLE; fabric.switches().len()];
    distance[target.0 as usize] = 0;
    let mut queue = VecDeque::from([target]);
    while let Some(at) = queue.pop_front() {
        for (next, _) in fabric.adjacent(at) {
            if distance[next.0 as usize] == UNREACHABLE {
                distance[next.0 as usize] = distance[at.0 as usize] + 1;
                queue.push_back(*next);
            }
        }
    }
    distance
}

/// How many tree edges each cable carries.
#[derive(Debug, Clone)]
pub(super) struct Load(Vec<u32>);

impl Load {
    pub(super) fn new(fabric: &Fabric) -> Self {
        Self(vec![0; fabric.links().len()])
    }

    pub(super) fn of(&self, link: LinkId) -> u32 {
        self.0[link.0 as usize]
    }

    pub(super) fn add(&mut self, path: &[LinkId]) {
        path.iter().for_each(|link| self.0[link.0 as usize] += 1);
    }

    pub(super) fn remove(&mut self, path: &[LinkId]) {
        path.iter().for_each(|link| self.0[link.0 as usize] -= 1);
    }

    pub(super) fn max(&self) -> u32 {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// The least-loaded cable between two neighbours.
    fn cable(&self, fabric: &Fabric, from: SwitchId, to: SwitchId) -> Option<LinkId> {
        let parallel = fabric.adjacent(from).iter().filter(|(next, _)| *next == to);
        parallel.map(|(_, link)| *link).min_by_key(|link| (self.of(*link), *link))
    }
}

/// The neighbours of `at` that are one hop closer to the target, with the cable to each.
pub(super) fn closer<'a>(
    fabric: &'a Fabric,
    distance: &'a [u32],
    at: SwitchId,
) -> impl Iterator<Item = (SwitchId, LinkId)> + 'a {
    let here = distance[at.0 as usize];
    fabric.adjacent(at).iter().copied().filter(move |(next, _)| {
        let there = distance[next.0 as usize];
        there != UNREACHABLE && there + 1 == here
    })
}

/// Find a shortest path from `from` to the target of `distance` over lightly loaded cables, and add it to `load`.
/// `from` must be able to reach the target.
pub(super) fn shortest_path(fabric: &Fabric, distance: &[u32], from: SwitchId, load: &mut Load) -> Vec<LinkId> {
    let mut path = Vec::new();
    let mut at = from;
    while let Some((next, link)) = closer(fabric, distance, at).min_by_key(|(_, link)| (load.of(*link), *link)) {
        path.push(link);
        at = next;
    }
    load.add(&path);
    path
}

/// Find shortest paths from every source to `root` such that no two meet at an aggregating switch, with the least
/// possible sharing of cables. Sources are aggregating switches themselves, and no path passes through one.
///
/// Such paths are a maximum flow of one unit per source in the graph of shortest paths, with a capacity of one unit per
/// aggregating switch and `sharing` units per cable. Bisection finds the least sharing. Returns the path of each
/// source, or `None` if there are no such paths.
pub(super) fn disjoint_paths(
    fabric: &Fabric,
    distance: &[u32],
    root: SwitchId,
    sources: &[SwitchId],
    combines: impl Fn(SwitchId) -> bool,
) -> Option<BTreeMap<SwitchId, Vec<LinkId>>> {
    let attempt = |sharing| Network::new(fabric, distance, root, sources, &combines, sharing).saturate(sources.len());
    let most = sources.len() as u32;
    let mut best = attempt(1);
    if best.is_none() {
        let (mut too_few, mut enough) = (1, most.max(1));
        best = Some(attempt(enough)?);
        while too_few + 1 < enough {
            let middle = too_few + (enough - too_few) / 2;
            match attempt(middle) {
                Some(network) => (enough, best) = (middle, Some(network)),
                None => too_few = middle,
            }
        }
    }
    Some(best?.paths(fabric, root, sources))
}

/// A flow network over the switches. Units enter switch s at vertex 2s and leave it at vertex 2s + 1.
struct Network {
    edges: Vec<Edge>,
    out: Vec<Vec<usize>>,
    source: usize,
    sink: usize,
}

/// An edge; the edge with the index `i ^ 1` is its reverse, whose capacity is the flow.
struct Edge {
    to: usize,
    capacity: u32,
}

impl Network {
    fn new(
        fabric: &Fabric,
        distance: &[u32],
        root: SwitchId,
        sources: &[SwitchId],
        combines: impl Fn(SwitchId) -> bool,
        sharing: u32,
    ) -> Self {
        let switches = fabric.switches().len();
        let (source, sink) = (2 * switches, 2 * root.0 as usize);
        let mut network = Self { edges: Vec::new(), out: vec![Vec::new(); 2 * switches + 1], source, sink };
        for switch in fabric.switch_ids().filter(|switch| *switch != root) {
            let (enter, leave) = (2 * switch.0 as usize, 2 * switch.0 as usize + 1);
            if sources.binary_search(&switch).is_ok() {
                network.edge(source, leave, 1);
            } else {
                network.edge(enter, leave, if combines(switch) { 1 } else { u32::MAX / 2 });
            }
            let mut next_hops: Vec<SwitchId> = closer(fabric, distance, switch).map(|(next, _)| next).collect();
            while let Some(next) = next_hops.first().copied() {
                // Sorted, so parallel cables are adjacent.
                let parallel = next_hops.iter().take_while(|hop| **hop == next).count();
                next_hops.drain(..parallel);
                network.edge(leave, 2 * next.0 as usize, sharing.saturating_mul(parallel as u32));
            }
        }
        network
    }

    fn edge(&mut self, from: usize, to: usize, capacity: u32) {
        self.out[from].push(self.edges.len());
        self.edges.push(Edge { to, capacity });
        self.out[to].push(self.edges.len());
        self.edges.push(Edge { to: from, capacity: 0 });
    }

    /// Push `units` from source to sink along shortest augmenting paths (Edmonds and Karp, JACM 1972).
    fn saturate(mut self, units: usize) -> Option<Self> {
        for _ in 0..units {
            let mut through = vec![usize::MAX; self.out.len()];
            let mut queue = VecDeque::from([self.source]);
            while let Some(at) = queue.pop_front().filter(|at| *at != self.sink) {
                for &edge in &self.out[at] {
                    let Edge { to, capacity } = self.edges[edge];
                    if capacity > 0 && through[to] == usize::MAX && to != self.source {
                        through[to] = edge;
                        queue.push_back(to);
                    }
                }
            }
            let mut at = self.sink;
            while at != self.source {
                let edge = through[at];
                // Without an augmenting path, not all sources can be served.
                if edge == usize::MAX {
                    return None;
                }
                self.edges[edge].capacity -= 1;
                self.edges[edge ^ 1].capacity += 1;
                at = self.edges[edge ^ 1].to;
            }
        }
        Some(self)
    }

    /// Decompose the flow into one path per source.
    fn paths(mut self, fabric: &Fabric, root: SwitchId, sources: &[SwitchId]) -> BTreeMap<SwitchId, Vec<LinkId>> {
        let mut load = Load::new(fabric);
        let mut paths = BTreeMap::new();
        for &source in sources {
            let (mut at, mut path) = (source, Vec::new());
            while at != root {
                let Some((next, link)) = self.step(fabric, at, &load) else { break };
                load.add(&[link]);
                path.push(link);
                at = next;
            }
            paths.insert(source, path);
        }
        paths
    }

    /// Remove one unit of flow out of a switch; return the next switch and the cable.
    fn step(&mut self, fabric: &Fabric, at: SwitchId, load: &Load) -> Option<(SwitchId, LinkId)> {
        let leave = 2 * at.0 as usize + 1;
        // Forward edges have even indices.
        let flows = |edge: &&usize| edge.is_multiple_of(2) && self.edges[**edge ^ 1].capacity > 0;
        let edge = *self.out[leave].iter().find(flows)?;
        self.edges[edge ^ 1].capacity -= 1;
        let next = SwitchId(self.edges[edge].to as u32 / 2);
        Some((next, load.cable(fabric, at, next)?))
    }
}
