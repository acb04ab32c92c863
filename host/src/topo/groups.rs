//! Groups of switches between which a fabric has few cables, and the shape of ranks on them.
//!
//! [`Groups`] says which groups there are.
//!
//! Invariants: the groups depend on cables alone, never on names; each level joins groups of the one below; what is
//! found for ranks fits their number.

use super::{Fabric, HostId, LinkId, SwitchId};
use crate::schedule::{DIMENSIONS_MAX, Shape};
use std::collections::{BTreeMap, HashMap};

/// The most levels of groups. Each takes memory for all switches.
const LEVELS_MAX: usize = 4;
/// The most neighbours that are compared to find the groups of a dragonfly: about a second.
const COMPARED_MAX: usize = 1 << 27;

/// The groups of a fabric.
///
/// Hosts below one switch are a group. Further levels join such groups:
/// - switches with hosts that are joined to each other, as in a group of a dragonfly (Kim et al., ISCA 2008). A switch
///   is in one group with the neighbours with which it shares most neighbours. Two that a cable between groups joins
///   share at most as many as a switch has such cables, so groups of at least two switches more are found;
/// - switches below the same switches, as in a pod of a fat tree or a group of a dragonfly+ (Shpiner et al., HiPINEB
///   2017).
///
/// Ranks on a torus, a mesh or a HyperX are a grid, if their order is that of the switches' coordinates.
#[derive(Debug, Clone)]
pub struct Groups {
    /// Those that fewest cables leave for each host first; of equal ones the lower level.
    levels: Vec<Level>,
}

#[derive(Debug, Clone)]
struct Level {
    /// The group of each switch: the number of one of its switches.
    of_switch: Vec<u32>,
    /// How much leaves the groups for each host: cables, or Gbit/s where the rates of all are known.
    exits_per_host: f64,
}

impl Groups {
    /// Find the groups of a fabric.
    pub fn new(fabric: &Fabric) -> Self {
        let mut groups = Joined::new(fabric);
        let mut levels = vec![groups.level(fabric)];
        for step in 0.. {
            let has_changed = match step {
                0 => groups.join_neighbours(fabric),
                _ => groups.join_below(fabric, step),
            };
            let Some(has_changed) = has_changed.filter(|_| levels.len() < LEVELS_MAX) else { break };
            if has_changed {
                levels.push(groups.level(fabric));
            }
        }
        // Stable: of equal ones the lower level stays first.
        levels.sort_by(|a, b| a.exits_per_host.total_cmp(&b.exits_per_host));
        Self { levels }
    }

    /// Return the shape of ranks at these hosts of the fabric, in rank order: a grid, or servers of the ranks of a
    /// group, where each group has equally many consecutive ones, and there are at least two of both. Otherwise a line.
    ///
    /// # Panics
    /// If the fabric or a host is not the one that the groups are of.
    ///
    /// ```
    /// use sumac::topo::{Groups, generate};
    /// let torus = generate::torus(&[4, 4], 1, None)?;
    /// let ranks: Vec<_> = torus.host_ids().collect();
    /// let shape = |ranks| Groups::new(&torus).shape_of(&torus, ranks).to_string();
    /// assert_eq!((shape(&ranks), shape(&ranks[..3])), ("4x4".into(), "line".into()));
    /// # Ok::<(), sumac::topo::FabricError>(())
    /// ```
    pub fn shape_of(&self, fabric: &Fabric, ranks: &[HostId]) -> Shape {
        let switches: Option<Vec<SwitchId>> = ranks.iter().map(|host| switch_of(fabric, *host)).collect();
        let Some(switches) = switches else { return Shape::Line };
        if let Some(grid) = grid_of(fabric, &switches) {
            return grid;
        }
        let of_level = |level: &Level| {
            let groups: Vec<u32> = switches.iter().map(|switch| level.of_switch[switch.0 as usize]).collect();
            Some(Shape::of_machines(&groups)).filter(|shape| *shape != Shape::Line)
        };
        self.levels.iter().find_map(of_level).unwrap_or_default()
    }
}

/// The switch that a host's first cable leads to, if need be through a device.
fn switch_of(fabric: &Fabric, host: HostId) -> Option<SwitchId> {
    let first = fabric.host(host).uplinks.first()?.switch;
    if !fabric.switch(first).is_device {
        return Some(first);
    }
    neighbours(fabric, first).next()
}

/// The neighbours of a switch that are no devices, sorted, those of parallel cables several times.
fn neighbours(fabric: &Fabric, switch: SwitchId) -> impl Iterator<Item = SwitchId> {
    fabric.adjacent(switch).iter().map(|(to, _)| *to).filter(|to| !fabric.switch(*to).is_device)
}

fn are_joined(fabric: &Fabric, a: SwitchId, b: SwitchId) -> bool {
    let near = fabric.adjacent(a);
    near.get(near.partition_point(|(to, _)| *to < b)).is_some_and(|(to, _)| *to == b)
}

/// Groups while they are joined.
struct Joined {
    /// Each switch's distance to the nearest one with a host, from 1; 0 for a device, and where there is none.
    tiers: Vec<u32>,
    /// The hosts at each switch.
    hosts: Vec<u32>,
    /// A switch of the same group, itself for one of each group.
    parents: Vec<u32>,
}

impl Joined {
    fn new(fabric: &Fabric) -> Self {
        let switches = fabric.switches().len();
        let mut hosts = vec![0; switches];
        fabric.host_ids().filter_map(|host| switch_of(fabric, host)).for_each(|at| hosts[at.0 as usize] += 1);
        let mut tiers: Vec<u32> = hosts.iter().map(|hosts| u32::from(*hosts > 0)).collect();
        let mut reached: Vec<SwitchId> = fabric.switch_ids().filter(|at| tiers[at.0 as usize] == 1).collect();
        let mut next = 0;
        while let Some(&at) = reached.get(next) {
            for to in neighbours(fabric, at) {
                if tiers[to.0 as usize] == 0 {
                    tiers[to.0 as usize] = tiers[at.0 as usize] + 1;
                    reached.push(to);
                }
            }
            next += 1;
        }
        Self { tiers, hosts, parents: (0..switches as u32).collect() }
    }

    fn group_of(&mut self, mut switch: u32) -> u32 {
        while self.parents[switch as usize] != switch {
            // Halve the way, so that ways stay short.
            let above = self.parents[self.parents[switch as usize] as usize];
            self.parents[switch as usize] = above;
            switch = above;
        }
        switch
    }

    /// Join two groups; return whether they were two.
    fn join(&mut self, a: SwitchId, b: SwitchId) -> bool {
        let (a, b) = (self.group_of(a.0), self.group_of(b.0));
        self.parents[a.max(b) as usize] = a.min(b);
        a != b
    }

    /// The groups as they are.
    fn level(&mut self, fabric: &Fabric) -> Level {
        let of_switch: Vec<u32> = (0..self.parents.len() as u32).map(|switch| self.group_of(switch)).collect();
        let is_rated = fabric.links().iter().all(|link| link.rate.is_some());
        let exit = |link: LinkId| fabric.link(link).rate.filter(|_| is_rated).map_or(1.0, |rate| rate.gbits());
        // Switches without hosts below them in their group leave nothing.
        let mut hosts: BTreeMap<u32, u32> = BTreeMap::new();
        of_switch.iter().zip(&self.hosts).for_each(|(group, at)| *hosts.entry(*group).or_default() += at);
        let group = |at: SwitchId| of_switch[at.0 as usize];
        let leaves = |at: SwitchId| {
            let is_exit = |to: SwitchId| group(to) != group(at) && !fabric.switch(to).is_device;
            let exits = fabric.adjacent(at).iter().filter(|(to, _)| is_exit(*to));
            exits.map(|(_, link)| exit(*link)).sum::<f64>()
        };
        let exits: f64 = fabric.switch_ids().filter(|at| hosts[&group(*at)] > 0).map(leaves).sum();
        let all: u32 = self.hosts.iter().sum();
        Level { exits_per_host: exits / f64::from(all.max(1)), of_switch }
    }

    /// Join switches with hosts that are joined to each other, as in a group of a dragonfly. Returns whether any were
    /// joined.
    fn join_neighbours(&mut self, fabric: &Fabric) -> Option<bool> {
        let near: Vec<Vec<SwitchId>> = fabric.switch_ids().map(|at| self.near_with_hosts(fabric, at)).collect();
        let compared: usize = near.iter().flatten().map(|to| near[to.0 as usize].len()).sum();
        if compared > COMPARED_MAX {
            return Some(false);
        }
        // Of each cable, how many switches both ends are joined to. Joined switches count themselves and each other.
        let common = |a: SwitchId, b: SwitchId| {
            let others = &near[b.0 as usize];
            2 + near[a.0 as usize].iter().filter(|to| others.binary_search(to).is_ok()).count()
        };
        let most: Vec<usize> = fabric
            .switch_ids()
            .map(|at| near[at.0 as usize].iter().map(|to| common(at, *to)).max().unwrap_or(0))
            .collect();
        let mut has_joined = false;
        for at in fabric.switch_ids() {
            for &to in near[at.0 as usize].iter().filter(|to| **to > at) {
                // The lesser: a switch that lost a cable has fewer in common with all others of its group.
                let most = most[at.0 as usize].min(most[to.0 as usize]);
                if common(at, to) >= most.max(3) {
                    has_joined |= self.join(at, to);
                }
            }
        }
        Some(has_joined)
    }

    /// The neighbours with hosts of a switch with hosts, sorted.
    fn near_with_hosts(&self, fabric: &Fabric, at: SwitchId) -> Vec<SwitchId> {
        if self.tiers[at.0 as usize] != 1 {
            return Vec::new();
        }
        let mut near: Vec<SwitchId> = neighbours(fabric, at).filter(|to| self.tiers[to.0 as usize] == 1).collect();
        near.dedup();
        near
    }

    /// Join the switches of a tier that are below the same switch, and that one. Returns whether any were joined;
    /// `None` if there is no switch above.
    fn join_below(&mut self, fabric: &Fabric, tier: u32) -> Option<bool> {
        let above: Vec<SwitchId> = fabric.switch_ids().filter(|at| self.tiers[at.0 as usize] == tier + 1).collect();
        if above.is_empty() {
            return None;
        }
        let mut has_joined = false;
        for at in above {
            for to in neighbours(fabric, at) {
                if self.tiers[to.0 as usize] == tier {
                    has_joined |= self.join(at, to);
                }
            }
        }
        Some(has_joined)
    }
}

/// The grid that ranks at these switches are, if neighbours along each of at least two dimensions are joined, and no
/// two that differ in several coordinates are. Several consecutive ranks at each switch are a dimension of their own.
fn grid_of(fabric: &Fabric, switches: &[SwitchId]) -> Option<Shape> {
    let runs: Vec<&[SwitchId]> = switches.chunk_by(PartialEq::eq).collect();
    let each = runs.first()?.len();
    let places: HashMap<SwitchId, usize> = runs.iter().enumerate().map(|(place, run)| (run[0], place)).collect();
    if places.len() < runs.len() || runs.iter().any(|run| run.len() != each) {
        return None;
    }
    let at = |place: usize| runs[place][0];
    // Last dimension first. Rows end where the next switch is not joined, so there is only one grid to try.
    let (mut extents, mut stride) = (Vec::new(), 1);
    while stride < runs.len() {
        let steps = (stride..runs.len()).step_by(stride);
        let extent = 1 + steps.take_while(|to| are_joined(fabric, at(to - stride), at(*to))).count();
        stride *= extent;
        if extent == 1 || !runs.len().is_multiple_of(stride) || extents.len() == DIMENSIONS_MAX {
            return None;
        }
        extents.push(extent);
    }
    let differ = |mut a: usize, mut b: usize| {
        let differ_here = |extent: &&usize| {
            let here = (a % **extent, b % **extent);
            (a, b) = (a / **extent, b / **extent);
            here.0 != here.1
        };
        extents.iter().filter(differ_here).count()
    };
    let is_grid = (0..runs.len()).all(|place| {
        let mut stride = 1;
        let are_next_joined = extents.iter().all(|extent| {
            let is_last = place / stride % extent + 1 == *extent;
            let next = place + stride;
            stride *= extent;
            is_last || are_joined(fabric, at(place), at(next))
        });
        let mut near = neighbours(fabric, at(place)).filter_map(|to| places.get(&to));
        are_next_joined && near.all(|other| differ(place, *other) == 1)
    });
    if !is_grid || extents.len() < 2 {
        return None;
    }
    extents.reverse();
    extents.extend(Some(each).filter(|each| *each > 1));
    let extents: Option<Vec<u32>> = extents.iter().map(|extent| u32::try_from(*extent).ok()).collect();
    Shape::grid(&extents?).ok()
}
