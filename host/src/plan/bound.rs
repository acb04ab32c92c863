//! The rate that no plan can beat, however many trees it has.
//!
//! If nodes combine everywhere, an all-reduce sends the message's bytes once each way through every cut of the fabric
//! that has ranks on both sides. So no plan is faster than the smallest such cut: the least maximum flow between one
//! rank and each of the others. Flows are found by Dinic's algorithm. For many hosts, only cuts around one host, one
//! leaf and one pod are compared, and the plan says so.

use super::Pricing;
use super::cost::gbits;
use super::index::{FabricIndex, Turn};
use crate::topo::{Fabric, HostId, SwitchId, Uplink};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// A rate that no plan can beat on idle cables.
#[derive(Debug, Clone, PartialEq)]
pub struct RateBound {
    /// The rate in Gbit/s.
    pub gbits: f64,
    /// How it was found.
    pub kind: BoundKind,
    /// What is cut off by the smallest cut: the name of a host or a switch on its smaller side.
    pub at: String,
}

/// How a bound was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoundKind {
    /// The smallest of all cuts.
    MinCut,
    /// The smallest cut around one host, the hosts of one leaf or of one pod. The smallest of all cuts may be smaller.
    Cuts,
}

/// Bound the rate of any plan for these ranks, each with its adapters, of which one has the rate `reached`.
pub(super) fn rate_bound(
    fabric: &Fabric,
    index: &FabricIndex,
    (ranks, reached): (&[&[HostId]], f64),
    pricing: &Pricing,
) -> RateBound {
    let byte_s = super::index::byte_times(fabric, &pricing.costs);
    let job = Job { fabric, index, ranks, byte_s };
    let (mut least, mut at) = job.cuts();
    let is_met = reached >= least * (1.0 - TOLERANCE);
    // A rate that some tree has is not above the smallest cut.
    let is_exact = is_met || ranks.len() <= EXACT_HOSTS_MAX;
    if is_exact && !is_met {
        for (flow, name) in job.flows(least) {
            if flow < least {
                (least, at) = (flow, name);
            }
        }
    }
    RateBound { gbits: least, kind: if is_exact { BoundKind::MinCut } else { BoundKind::Cuts }, at }
}

/// Up to how many hosts all cuts are compared.
const EXACT_HOSTS_MAX: usize = 1000;
/// Rates that differ by less than this factor are equal.
const TOLERANCE: f64 = 1e-9;

struct Job<'a> {
    fabric: &'a Fabric,
    index: &'a FabricIndex,
    /// The adapters of each rank.
    ranks: &'a [&'a [HostId]],
    byte_s: Vec<f64>,
}

impl<'a> Job<'a> {
    fn gbits(&self, link: crate::topo::LinkId) -> f64 {
        gbits(self.byte_s[link.0 as usize])
    }

    fn uplinks(&self, adapters: &'a [HostId]) -> impl Iterator<Item = &'a Uplink> + use<'a> {
        let fabric = self.fabric;
        adapters.iter().flat_map(move |host| &fabric.host(*host).uplinks)
    }

    /// What a rank goes by: its server, if it has several adapters.
    fn name(&self, adapters: &[HostId]) -> &'a str {
        let host = self.fabric.host(adapters[0]);
        if adapters.len() == 1 { &host.name } else { &self.fabric.server(host.server).name }
    }

    /// The smallest cut around one host, the hosts of one leaf, or of one pod, and what it cuts off.
    fn cuts(&self) -> (f64, String) {
        let mut least = (f64::INFINITY, String::new());
        let mut consider = |rate: f64, name: &str| {
            if rate < least.0 {
                least = (rate, name.to_owned());
            }
        };
        let mut at: BTreeMap<u32, usize> = BTreeMap::new();
        let mut foreign: HashMap<u32, f64> = HashMap::new();
        for adapters in self.ranks {
            let uplinks = || self.uplinks(adapters);
            consider(uplinks().map(|uplink| self.gbits(uplink.link)).sum(), self.name(adapters));
            let switches: BTreeSet<u32> = uplinks().map(|uplink| uplink.switch.0).collect();
            match (switches.len(), switches.first()) {
                (1, Some(only)) => *at.entry(*only).or_default() += 1,
                // A host with several switches carries what leaves one of them over to the others.
                _ => uplinks().for_each(|uplink| {
                    *foreign.entry(uplink.switch.0).or_default() += self.gbits(uplink.link);
                }),
            }
        }
        let ranks = self.ranks.len();
        for (switch, own) in &at {
            if *own < ranks {
                let cut = self.leaving(*switch, &BTreeSet::from([*switch])) + foreign.get(switch).unwrap_or(&0.0);
                consider(cut, &self.fabric.switch(SwitchId(*switch)).name);
            }
        }
        if foreign.is_empty() {
            for pod in self.pods(at.keys().copied()) {
                let own: usize = pod.iter().filter_map(|switch| at.get(switch)).sum();
                let cut = pod.iter().map(|switch| self.leaving(*switch, &pod)).sum();
                let first = pod.iter().find(|switch| at.contains_key(switch));
                if let (true, Some(first)) = (own < ranks, first) {
                    consider(cut, &format!("pod of {}", self.fabric.switch(SwitchId(*first)).name));
                }
            }
        }
        least
    }

    /// The rate of a switch's cables to switches outside.
    fn leaving(&self, switch: u32, inside: &BTreeSet<u32>) -> f64 {
        let out = self.index.hops(switch).iter().filter(|hop| !inside.contains(&hop.to));
        out.flat_map(|hop| self.index.cables(hop)).map(|link| self.gbits(*link)).sum()
    }

    /// The leaves with the switches one tier above them, joined where they share one.
    fn pods(&self, leaves: impl Iterator<Item = u32>) -> Vec<BTreeSet<u32>> {
        let (mut pods, mut seen) = (Vec::new(), BTreeSet::new());
        for leaf in leaves {
            if !seen.insert(leaf) {
                continue;
            }
            let mut pod = BTreeSet::from([leaf]);
            let mut open = VecDeque::from([(leaf, true)]);
            while let Some((at, is_leaf)) = open.pop_front() {
                let wanted = if is_leaf { Turn::Up } else { Turn::Down };
                for hop in self.index.hops(at).iter().filter(|hop| hop.turn == wanted) {
                    if pod.insert(hop.to) {
                        seen.insert(hop.to);
                        open.push_back((hop.to, !is_leaf));
                    }
                }
            }
            pods.push(pod);
        }
        pods
    }

    /// The maximum flows between the first rank and each of the others, as far as they are below `least`.
    fn flows(&self, least: f64) -> Vec<(f64, String)> {
        let switches = self.fabric.switches().len();
        let mut vertices: Vec<usize> = Vec::new();
        let mut network = Network::new(switches);
        for switch in self.fabric.switch_ids() {
            for hop in self.index.hops(switch.0).iter().filter(|hop| hop.to > switch.0) {
                let rate = self.index.cables(hop).iter().map(|link| self.gbits(*link)).sum();
                network.edge(switch.0 as usize, hop.to as usize, rate);
            }
        }
        let mut names = Vec::new();
        for adapters in self.ranks {
            let switches: BTreeSet<u32> = self.uplinks(adapters).map(|uplink| uplink.switch.0).collect();
            let vertex = match (switches.len(), switches.first()) {
                // The cut around a host with one cable was considered; all others cut off its switch.
                (1, Some(only)) => *only as usize,
                _ => {
                    let vertex = network.vertex();
                    for uplink in self.uplinks(adapters) {
                        network.edge(vertex, uplink.switch.0 as usize, self.gbits(uplink.link));
                    }
                    vertex
                }
            };
            if !vertices.contains(&vertex) {
                vertices.push(vertex);
                names.push(self.name(adapters).to_owned());
            }
        }
        let Some((first, others)) = vertices.split_first() else { return Vec::new() };
        let flow = |(to, name): (&usize, &String)| (network.max_flow((*first, *to), least), name.clone());
        others.iter().zip(&names[1..]).map(flow).collect()
    }
}

/// A network of undirected edges.
struct Network {
    /// Per vertex: the indices of its edges.
    out: Vec<Vec<usize>>,
    /// The end and the capacity; the reverse of edge i is `i ^ 1`.
    edges: Vec<(usize, f64)>,
}

impl Network {
    fn new(vertices: usize) -> Self {
        Self { out: vec![Vec::new(); vertices], edges: Vec::new() }
    }

    fn vertex(&mut self) -> usize {
        self.out.push(Vec::new());
        self.out.len() - 1
    }

    fn edge(&mut self, a: usize, b: usize, rate: f64) {
        self.out[a].push(self.edges.len());
        self.edges.push((b, rate));
        self.out[b].push(self.edges.len());
        self.edges.push((a, rate));
    }

    /// The maximum flow, or `enough` if it is not less (Dinic, Soviet Math. Doklady 11, 1970).
    fn max_flow(&self, (from, to): (usize, usize), enough: f64) -> f64 {
        let mut left: Vec<f64> = self.edges.iter().map(|(_, rate)| *rate).collect();
        let mut total = 0.0;
        while total < enough * (1.0 - TOLERANCE) {
            let Some(levels) = self.levels((from, to), &left) else { return total };
            let mut next = vec![0; self.out.len()];
            while let Some(more) = self.augment((from, to), &levels, &mut next, &mut left) {
                total += more;
            }
        }
        enough
    }

    /// The distances from the source over edges with capacity left; `None` if the sink cannot be reached.
    fn levels(&self, (from, to): (usize, usize), left: &[f64]) -> Option<Vec<u32>> {
        let mut levels = vec![u32::MAX; self.out.len()];
        levels[from] = 0;
        let mut queue = VecDeque::from([from]);
        while let Some(at) = queue.pop_front() {
            for &edge in &self.out[at] {
                let (next, _) = self.edges[edge];
                if left[edge] > LEAST && levels[next] == u32::MAX {
                    levels[next] = levels[at] + 1;
                    queue.push_back(next);
                }
            }
        }
        (levels[to] != u32::MAX).then_some(levels)
    }

    /// Push flow along one path of the level graph. `next`: per vertex, the first edge that is not exhausted.
    fn augment(&self, (from, to): (usize, usize), levels: &[u32], next: &mut [usize], left: &mut [f64]) -> Option<f64> {
        let mut path: Vec<usize> = Vec::new();
        let mut at = from;
        while at != to {
            let Some(&edge) = self.out[at].get(next[at]) else {
                // A dead end: step back and skip the edge that led here.
                let edge = path.pop()?;
                at = self.edges[edge ^ 1].0;
                next[at] += 1;
                continue;
            };
            let (end, _) = self.edges[edge];
            if left[edge] > LEAST && levels[end] == levels[at] + 1 {
                path.push(edge);
                at = end;
            } else {
                next[at] += 1;
            }
        }
        let most = path.iter().map(|edge| left[*edge]).fold(f64::INFINITY, f64::min);
        for edge in path {
            left[edge] -= most;
            left[edge ^ 1] += most;
        }
        Some(most)
    }
}

/// Rates up to this, in Gbit/s, are rounding errors.
const LEAST: f64 = 1e-6;
