//! What planning needs of a fabric whatever the job: adjacency, tiers, rates and names. Built once and kept.
//!
//! A switch's **tier** is its distance to the nearest switch with a host. Devices behind ports are below all switches,
//! as hosts are. A move to a higher tier is up. Routes are the
//! shortest ones that never go up again after they went down, as up*/down* routing lays them; a node ends a route, so a
//! tree may well go down to a node and up from it.

use super::cost::{FabricCosts, byte_s};
use crate::topo::{Fabric, HostId, LinkId, SwitchId};
use std::collections::{HashMap, HashSet, VecDeque};

/// The direction of a move between neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    Up,
    Flat,
    Down,
}

/// A neighbour of a switch, and the cables to it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hop {
    pub(super) to: u32,
    pub(super) turn: Turn,
    first: u32,
    cables: u32,
}

/// What planning needs of a fabric whatever the job. It belongs to the fabric that it was built from.
#[derive(Debug)]
pub(crate) struct FabricIndex {
    /// Per switch: where its hops start; one more entry for the end.
    starts: Vec<u32>,
    hops: Vec<Hop>,
    /// The cables of each hop, together.
    cables: Vec<LinkId>,
    /// Per switch: whether a hop does not go down.
    rises: Vec<bool>,
    /// Per switch: its tier.
    tiers: Vec<u32>,
    /// Whether no hop stays in its tier.
    is_tiered: bool,
    switches: HashMap<String, SwitchId>,
    hosts: HashMap<String, HostId>,
    /// The number of cables without a rate.
    pub(super) unrated: usize,
}

/// The distance of an unreachable switch.
pub(super) const UNREACHABLE: u16 = u16::MAX;

impl FabricIndex {
    pub(crate) fn new(fabric: &Fabric) -> Self {
        let tiers = tiers(fabric);
        let (mut starts, mut hops, mut cables) = (vec![0], Vec::<Hop>::new(), Vec::new());
        let mut rises = Vec::with_capacity(tiers.len());
        for at in fabric.switch_ids() {
            let start = hops.len();
            // Sorted, so parallel cables are adjacent.
            for &(to, link) in fabric.adjacent(at) {
                match hops[start..].last_mut().filter(|hop| hop.to == to.0) {
                    Some(hop) => hop.cables += 1,
                    None => {
                        let turn = match tiers[to.0 as usize].cmp(&tiers[at.0 as usize]) {
                            std::cmp::Ordering::Greater => Turn::Up,
                            std::cmp::Ordering::Equal => Turn::Flat,
                            std::cmp::Ordering::Less => Turn::Down,
                        };
                        hops.push(Hop { to: to.0, turn, first: cables.len() as u32, cables: 1 });
                    }
                }
                cables.push(link);
            }
            rises.push(hops[start..].iter().any(|hop| hop.turn != Turn::Down));
            starts.push(hops.len() as u32);
        }
        let mut switches = HashMap::with_capacity(2 * fabric.switches().len());
        // Names come last: they take precedence over GUIDs.
        switches.extend(fabric.switch_ids().map(|id| (fabric.switch(id).guid.clone(), id)));
        switches.extend(fabric.switch_ids().map(|id| (fabric.switch(id).name.clone(), id)));
        let mut hosts = HashMap::with_capacity(2 * fabric.hosts().len());
        hosts.extend(fabric.host_ids().map(|id| (fabric.host(id).guid.clone(), id)));
        hosts.extend(fabric.host_ids().map(|id| (fabric.host(id).name.clone(), id)));
        let unrated = fabric.links().iter().filter(|link| link.rate.is_none()).count();
        let is_tiered = hops.iter().all(|hop| hop.turn != Turn::Flat);
        Self { starts, hops, cables, rises, tiers, is_tiered, switches, hosts, unrated }
    }

    /// The neighbours of a switch.
    pub(super) fn hops(&self, at: u32) -> &[Hop] {
        &self.hops[self.starts[at as usize] as usize..self.starts[at as usize + 1] as usize]
    }

    /// Whether a route can go on from a switch without going down.
    pub(super) fn rises(&self, at: u32, routing: Routing) -> bool {
        routing != Routing::UpDown || self.rises[at as usize]
    }

    /// Whether all routes that rise from these switches to another one are equally long.
    pub(super) fn all_rise_alike(&self, switches: &[u32]) -> bool {
        // Only a device may be more than one tier below its neighbours.
        self.is_tiered && switches.iter().all(|at| self.tiers[*at as usize] == 1)
    }

    /// The parallel cables of a hop.
    pub(super) fn cables(&self, hop: &Hop) -> &[LinkId] {
        &self.cables[hop.first as usize..][..hop.cables as usize]
    }

    /// Find a switch as [`Fabric::find_switch`] does, in constant time.
    pub(crate) fn find_switch(&self, fabric: &Fabric, name: &str) -> Option<SwitchId> {
        // Other spellings of a GUID are rare.
        self.switches.get(name).copied().or_else(|| fabric.find_switch(name))
    }

    /// Find a host as [`Fabric::find_host`] does, in constant time.
    pub(super) fn find_host(&self, fabric: &Fabric, name: &str) -> Option<HostId> {
        self.hosts.get(name).copied().or_else(|| fabric.find_host(name))
    }
}

/// Each switch's distance to the nearest switch with a host, from 1; 0 for a device behind a port.
fn tiers(fabric: &Fabric) -> Vec<u32> {
    let mut tiers = vec![u32::MAX; fabric.switches().len()];
    let mut queue = VecDeque::new();
    let mut start = |tiers: &mut Vec<u32>, switch: SwitchId| {
        if std::mem::replace(&mut tiers[switch.0 as usize], 1) != 1 {
            queue.push_back(switch);
        }
    };
    let is_device = |switch: SwitchId| fabric.switch(switch).is_device;
    fabric.switch_ids().filter(|switch| is_device(*switch)).for_each(|switch| tiers[switch.0 as usize] = 0);
    for uplink in fabric.hosts().iter().flat_map(|host| &host.uplinks) {
        if is_device(uplink.switch) {
            let behind = fabric.adjacent(uplink.switch).iter().filter(|(next, _)| !is_device(*next));
            behind.for_each(|(next, _)| start(&mut tiers, *next));
        } else {
            start(&mut tiers, uplink.switch);
        }
    }
    while let Some(at) = queue.pop_front() {
        for (next, _) in fabric.adjacent(at) {
            if tiers[next.0 as usize] == u32::MAX {
                tiers[next.0 as usize] = tiers[at.0 as usize] + 1;
                queue.push_back(*next);
            }
        }
    }
    tiers
}

/// Which routes are assumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routing {
    /// Shortest routes that do not go up after they went down.
    UpDown,
    /// All shortest routes, for fabrics in which up*/down* routes do not suffice.
    Shortest,
    /// Those of the fabric's forwarding tables, on the way up.
    Tables,
}

impl Routing {
    pub(super) const fn turn(self, turn: Turn) -> Turn {
        match self {
            Self::UpDown => turn,
            // Trees are drafted over all routes, and laid over those of the tables then.
            Self::Shortest | Self::Tables => Turn::Flat,
        }
    }
}

/// The distances of switches to a target, in cables.
#[derive(Debug)]
pub(super) struct Distances {
    /// By any route.
    any: Vec<u16>,
    /// By routes that do not go up: what is left of one that has gone down.
    down: Vec<u16>,
}

impl Distances {
    /// Measure the distances of all switches to `target`.
    pub(super) fn all(index: &FabricIndex, routing: Routing, target: u32) -> Self {
        Self::explore(index, routing, target, |_, _| false)
    }

    /// Measure distances to `target` up to that of the farthest of `sources`.
    pub(super) fn of_sources(index: &FabricIndex, routing: Routing, target: u32, sources: &[u32]) -> Self {
        let mut wanted: HashSet<u32> = sources.iter().copied().collect();
        wanted.remove(&target);
        Self::explore(index, routing, target, |switch, _| wanted.remove(&switch) && wanted.is_empty())
    }

    /// Measure distances to `target` until `is_last` says of a switch that its distance is the last of interest.
    pub(super) fn explore(
        index: &FabricIndex,
        routing: Routing,
        target: u32,
        mut is_last: impl FnMut(u32, u16) -> bool,
    ) -> Self {
        let switches = index.starts.len() - 1;
        let mut found = Self { any: vec![UNREACHABLE; switches], down: vec![UNREACHABLE; switches] };
        (found.any[target as usize], found.down[target as usize]) = (0, 0);
        let mut frontier = vec![(target, true), (target, false)];
        let mut stops = is_last(target, 0);
        for distance in 1..UNREACHABLE {
            if frontier.is_empty() || stops {
                break;
            }
            let mut next = Vec::new();
            for (at, is_down) in frontier {
                for hop in index.hops(at) {
                    let from = hop.to as usize;
                    // The move is from the neighbour to here, against the hop.
                    let turn = routing.turn(hop.turn);
                    if is_down && turn != Turn::Down && found.down[from] == UNREACHABLE {
                        found.down[from] = distance;
                        next.push((hop.to, true));
                    }
                    let continues = if is_down { turn != Turn::Down } else { turn != Turn::Up };
                    if continues && found.any[from] == UNREACHABLE {
                        found.any[from] = distance;
                        next.push((hop.to, false));
                        stops |= is_last(hop.to, distance);
                    }
                }
            }
            frontier = next;
        }
        found
    }

    pub(super) fn of(&self, switch: u32) -> u16 {
        self.any[switch as usize]
    }

    pub(super) fn reaches(&self, switch: u32) -> bool {
        self.any[switch as usize] != UNREACHABLE
    }

    /// The next hops of a route from `at`, with whether the route has gone down then. `is_down`: it has gone down
    /// before.
    pub(super) fn next<'a>(
        &'a self,
        index: &'a FabricIndex,
        routing: Routing,
        (at, is_down): (u32, bool),
    ) -> impl Iterator<Item = (&'a Hop, bool)> + 'a {
        let here = if is_down { self.down[at as usize] } else { self.any[at as usize] };
        index.hops(at).iter().filter_map(move |hop| {
            let goes_down = is_down || routing.turn(hop.turn) == Turn::Down;
            let allowed = !(is_down && routing.turn(hop.turn) == Turn::Up);
            let there = if goes_down { self.down[hop.to as usize] } else { self.any[hop.to as usize] };
            (allowed && there != UNREACHABLE && there + 1 == here).then_some((hop, goes_down))
        })
    }
}

/// The seconds per byte of each cable.
pub(super) fn byte_times(fabric: &Fabric, costs: &FabricCosts) -> Vec<f64> {
    fabric.links().iter().map(|link| byte_s(link.rate, costs)).collect()
}
