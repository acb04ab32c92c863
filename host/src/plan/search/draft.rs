//! A tree by switches, before its nodes are numbered, and its price.

use super::Search;
use crate::plan::cost::{Bottleneck, first_chunk, seconds};
use crate::plan::route::Load;
use crate::topo::{LinkId, Routes, SwitchId, Uplink};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Where each rank enters a tree.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// Per rank: its host's cable, and the switch of its leaf.
    pub(super) ranks: Vec<(Uplink, u32)>,
    /// The rest of the route of ranks whose leaf is not at their own switch.
    pub(super) routes: BTreeMap<u32, Vec<LinkId>>,
    /// The leaves.
    pub(super) leaves: BTreeMap<u32, Leaf>,
}

/// The ranks of a leaf.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leaf {
    pub(super) ranks: usize,
    pub(super) lowest: u32,
    /// The slowest cable of a host at the leaf's own switch, in seconds per byte, and that cable.
    slowest: (f64, LinkId),
}

impl Leaf {
    /// The seconds per byte of the slowest cable of a host at the leaf's own switch.
    pub(super) const fn slowest_s(&self) -> f64 {
        self.slowest.0
    }
}

impl Places {
    pub(super) fn new(search: &Search<'_>, ranks: Vec<(Uplink, u32)>, routes: BTreeMap<u32, Vec<LinkId>>) -> Self {
        let mut places = Self { ranks, routes, leaves: BTreeMap::new() };
        places.count(search);
        places
    }

    /// Count the ranks of each leaf anew.
    pub(super) fn count(&mut self, search: &Search<'_>) {
        self.leaves.clear();
        for (rank, (uplink, leaf)) in (0u32..).zip(&self.ranks) {
            let new = Leaf { ranks: 0, lowest: rank, slowest: (0.0, uplink.link) };
            let entry = self.leaves.entry(*leaf).or_insert(new);
            entry.ranks += 1;
            if !self.routes.contains_key(&rank) {
                let byte_s = search.uplink_byte_s(uplink.link);
                if byte_s > entry.slowest.0 {
                    entry.slowest = (byte_s, uplink.link);
                }
            }
        }
    }
}

/// A tree by switches.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) root: u32,
    /// For every node but the root: its parent and the route to it.
    pub(super) parents: BTreeMap<u32, (u32, Vec<LinkId>)>,
    pub(super) places: Rc<Places>,
}

/// A node's children in declared order: pairs of the lowest rank below, and the node that it is, if it is one.
pub(super) type Children = BTreeMap<u32, Vec<(u32, Option<u32>)>>;

/// What a tree costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Price {
    /// The predicted times of both sizes.
    pub(super) times: [f64; 2],
    /// The way up for the first chunk of the larger size.
    pub(super) way_s: f64,
    /// The seconds per byte of the busiest cable or port.
    pub(super) busiest_s: f64,
    pub(super) bottleneck: Busiest,
}

/// The busiest resource of a draft.
#[derive(Debug, Clone, Copy)]
pub(super) enum Busiest {
    Cable(LinkId, u32),
    Port(u32, usize),
}

impl Busiest {
    /// The same for a plan, whose nodes are numbered.
    pub(super) fn in_plan(self, node_of: impl Fn(u32) -> usize) -> Bottleneck {
        match self {
            Self::Cable(link, edges) => Bottleneck::Cable { link, edges },
            Self::Port(switch, children) => Bottleneck::Port { node: node_of(switch), children },
        }
    }
}

impl Draft {
    /// Put the edges of the tree on the cables between switches.
    pub(super) fn put(&self, load: &mut Load<'_>) {
        load.clear();
        self.places.routes.values().for_each(|route| load.add(route));
        self.parents.values().for_each(|(_, route)| load.add(route));
    }

    /// The number of each node's children.
    pub(super) fn child_counts(&self) -> BTreeMap<u32, usize> {
        let mut counts: BTreeMap<u32, usize> =
            self.places.leaves.iter().map(|(switch, leaf)| (*switch, leaf.ranks)).collect();
        counts.entry(self.root).or_default();
        for (node, (parent, _)) in &self.parents {
            counts.entry(*node).or_default();
            *counts.entry(*parent).or_default() += 1;
        }
        counts
    }

    /// Every node's children in declared order.
    pub(super) fn children(&self) -> Children {
        let mut children = Children::new();
        for (rank, (_, leaf)) in (0u32..).zip(&self.places.ranks) {
            children.entry(*leaf).or_default().push((rank, None));
        }
        let lowest = self.lowest();
        for (node, (parent, _)) in &self.parents {
            children.entry(*parent).or_default().push((lowest.get(node).copied().unwrap_or(u32::MAX), Some(*node)));
        }
        children.values_mut().for_each(|list| list.sort());
        children
    }

    /// The lowest rank below each node.
    fn lowest(&self) -> BTreeMap<u32, u32> {
        let mut lowest = BTreeMap::new();
        let mut leaves: Vec<(u32, u32)> =
            self.places.leaves.iter().map(|(switch, leaf)| (leaf.lowest, *switch)).collect();
        leaves.sort_unstable();
        for (rank, leaf) in leaves {
            // Leaves are visited in order, so the first rank below a node is its lowest.
            let mut at = leaf;
            while let std::collections::btree_map::Entry::Vacant(first) = lowest.entry(at) {
                first.insert(rank);
                at = self.parents.get(&at).map_or(at, |(parent, _)| *parent);
            }
        }
        lowest
    }

    /// The number of levels.
    pub(super) fn levels(&self) -> usize {
        self.parents.keys().map(|node| self.depth(*node)).max().unwrap_or(0) + 1
    }

    /// A node and those above it.
    fn upwards_from(&self, node: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(node), |at| self.parents.get(at).map(|(parent, _)| *parent))
    }

    /// The distance of a node from the root in nodes.
    pub(super) fn depth(&self, node: u32) -> usize {
        self.upwards_from(node).count() - 1
    }

    /// Whether a node is below another one, or that one.
    pub(super) fn is_below(&self, node: u32, other: u32) -> bool {
        self.upwards_from(node).any(|at| at == other)
    }

    /// The nodes, each before its parent.
    fn upwards(&self) -> Vec<u32> {
        let mut below: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        self.parents.iter().for_each(|(node, (parent, _))| below.entry(*parent).or_default().push(*node));
        let mut order = vec![self.root];
        let mut next = 0;
        while let Some(at) = order.get(next) {
            order.extend(below.remove(at).unwrap_or_default());
            next += 1;
        }
        order.reverse();
        order
    }

    /// Price the tree. Leaves its edges on `load`.
    pub(super) fn price(&self, search: &Search<'_>, load: &mut Load<'_>) -> Price {
        self.put(load);
        let (costs, sizes) = (search.costs(), search.sizes());
        let counts = self.child_counts();
        let chunks = sizes.map(|bytes| first_chunk(bytes, costs));
        let edge = |cables: usize, byte_s: f64| chunks.map(|chunk| costs.cable_s * cables as f64 + chunk * byte_s);
        let mut ways: BTreeMap<u32, [f64; 2]> = BTreeMap::new();
        let raise = |way: &mut [f64; 2], other: [f64; 2]| *way = [way[0].max(other[0]), way[1].max(other[1])];
        for (switch, leaf) in self.places.leaves.iter().filter(|(_, leaf)| leaf.slowest.0 > 0.0) {
            raise(ways.entry(*switch).or_default(), edge(1, leaf.slowest.0));
        }
        for (rank, route) in &self.places.routes {
            let (uplink, leaf) = &self.places.ranks[*rank as usize];
            let byte_s =
                route.iter().map(|link| load.byte_s(*link, 0)).fold(search.uplink_byte_s(uplink.link), f64::max);
            raise(ways.entry(*leaf).or_default(), edge(1 + route.len(), byte_s));
        }
        for node in self.upwards() {
            let (children, port) = (counts[&node] as f64, search.node(node).port_byte_s);
            let taken = chunks.map(|chunk| costs.node_s + children * (costs.child_s + chunk * port));
            let below = ways.get(&node).copied().unwrap_or_default();
            let way = [below[0] + taken[0], below[1] + taken[1]];
            ways.insert(node, way);
            if let Some((parent, route)) = self.parents.get(&node) {
                let byte_s = route.iter().map(|link| load.byte_s(*link, 0)).fold(0.0, f64::max);
                let more = edge(route.len(), byte_s);
                raise(ways.entry(*parent).or_default(), [way[0] + more[0], way[1] + more[1]]);
            }
        }
        let (bottleneck, busiest_s) = self.busiest(search, load, &counts);
        let way = ways.get(&self.root).copied().unwrap_or_default();
        let times = [0, 1].map(|size| seconds(sizes[size], way[size], busiest_s, costs));
        Price { times, way_s: way[1], busiest_s, bottleneck }
    }

    fn busiest(&self, search: &Search<'_>, load: &Load<'_>, counts: &BTreeMap<u32, usize>) -> (Busiest, f64) {
        let local = self.places.leaves.values().map(|leaf| leaf.slowest);
        let remote = self.places.routes.keys().map(|rank| {
            let link = self.places.ranks[*rank as usize].0.link;
            (search.uplink_byte_s(link), link)
        });
        let uplinks = local.chain(remote).map(|(byte_s, link)| (link, byte_s, 1 + search.others(link)));
        let between = load.busiest().map(|(link, byte_s)| (link, byte_s, load.edges(link)));
        let cables = uplinks.chain(between).map(|(link, byte_s, edges)| (Busiest::Cable(link, edges), byte_s));
        let ports = counts.iter().map(|(node, children)| {
            (Busiest::Port(*node, *children), *children as f64 * search.node(*node).port_byte_s)
        });
        let first = (Busiest::Cable(LinkId(0), 0), 0.0);
        cables.chain(ports).fold(first, |most, other| if other.1 > most.1 { other } else { most })
    }

    /// Where a host's own device would only forward what the host sends, the host enters at the next node.
    pub(super) fn skip_single_ranks(&mut self, search: &Search<'_>) {
        let is_own = |node: u32| search.fabric.switch(SwitchId(node)).is_device;
        let has_below: BTreeSet<u32> = self.parents.values().map(|(parent, _)| *parent).collect();
        let single = |(node, leaf): (&u32, &Leaf)| {
            let forwards = leaf.ranks == 1 && is_own(*node) && !has_below.contains(node);
            let fits = forwards && !self.places.routes.contains_key(&leaf.lowest);
            fits.then_some((*node, leaf.lowest))
        };
        let singles: Vec<(u32, u32)> = self.places.leaves.iter().filter_map(single).collect();
        let moves: Vec<_> =
            singles.into_iter().filter_map(|(node, rank)| Some((rank, self.parents.remove(&node)?))).collect();
        if moves.is_empty() {
            return;
        }
        let places = Rc::make_mut(&mut self.places);
        for (rank, (parent, route)) in moves {
            places.ranks[rank as usize].1 = parent;
            places.routes.insert(rank, route);
        }
        places.count(search);
    }

    /// Lay all edges over the fabric's forwarding tables; `None` if they lack a route.
    pub(super) fn follow(mut self, search: &Search<'_>, routes: &Routes) -> Option<Self> {
        let route = |from: u32, to: u32| routes.route(search.fabric, SwitchId(from), SwitchId(to));
        for (node, (parent, cables)) in &mut self.parents {
            *cables = route(*node, *parent)?;
        }
        if !self.places.routes.is_empty() {
            let places = Rc::make_mut(&mut self.places);
            for (rank, cables) in &mut places.routes {
                let (uplink, leaf) = places.ranks[*rank as usize];
                *cables = route(uplink.switch.0, leaf)?;
            }
        }
        Some(self)
    }

    /// Route the edges on the busiest cable anew while that helps.
    pub(super) fn reroute(&mut self, search: &Search<'_>, load: &mut Load<'_>) {
        self.put(load);
        for _ in 0..REROUTES_MAX {
            let Some((busiest, before)) = load.busiest().filter(|(link, _)| load.own(*link) > 1) else { return };
            let crossing = self.parents.iter().filter(|(_, (_, route))| route.contains(&busiest));
            let crossing: Vec<u32> = crossing.map(|(node, _)| *node).collect();
            let mut improved = false;
            for node in crossing {
                let Some((parent, route)) = self.parents.get_mut(&node) else { continue };
                load.remove(route);
                let Some(other) = search.route(node, *parent, load) else {
                    load.add(route);
                    continue;
                };
                let worst = other.iter().map(|link| load.byte_s(*link, 0)).fold(0.0, f64::max);
                if worst < before {
                    *route = other;
                    improved = true;
                    break;
                }
                load.remove(&other);
                load.add(route);
            }
            if !improved {
                return;
            }
        }
    }
}

/// How many edges are routed anew at most.
const REROUTES_MAX: usize = 64;
