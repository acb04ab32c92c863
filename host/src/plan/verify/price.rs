//! Recomputes what a plan predicts, from the formula at the head of `cost`.

use super::Violation;
use crate::plan::{Child, Limits, Plan};
use crate::topo::{Device, Fabric, LinkId};
use std::collections::HashMap;

/// What a tree costs.
pub(super) struct Priced<'a> {
    fabric: &'a Fabric,
    plan: &'a Plan,
    limits: &'a Limits,
    edges: &'a HashMap<LinkId, usize>,
}

impl<'a> Priced<'a> {
    pub(super) const fn new(
        fabric: &'a Fabric,
        plan: &'a Plan,
        limits: &'a Limits,
        edges: &'a HashMap<LinkId, usize>,
    ) -> Self {
        Self { fabric, plan, limits, edges }
    }

    /// The edges of other jobs on a cable.
    pub(super) fn others(&self, link: LinkId) -> f64 {
        f64::from(
            self.limits.pricing.load.as_ref().and_then(|load| load.get(link.0 as usize)).map_or(0, |edges| *edges),
        )
    }

    fn per_byte(&self, link: LinkId) -> f64 {
        let gbits = gbits(self.fabric, link, self.limits);
        (self.edges.get(&link).copied().unwrap_or(0) as f64 + self.others(link)) * 8.0 / (gbits * 1e9)
    }

    /// The rate of the port of a node's device in Gbit/s, if it is behind one.
    pub(super) fn port_gbits(&self, index: usize) -> Option<f64> {
        let device = self.limits.devices.as_ref()?.get(&self.plan.nodes[index].switch)?;
        device.port.map(|rate| rate.gbits())
    }

    fn port_per_byte(&self, index: usize) -> f64 {
        let children = self.plan.nodes[index].children.len() as f64;
        self.port_gbits(index).map_or(0.0, |gbits| children * 8.0 / (gbits * 1e9))
    }

    /// The seconds per byte of the busiest cable or port.
    fn busiest(&self) -> f64 {
        let cables = self.edges.keys().map(|link| self.per_byte(*link));
        cables.chain((0..self.plan.nodes.len()).map(|index| self.port_per_byte(index))).fold(0.0, f64::max)
    }

    /// The seconds of the first chunk of a message there and back.
    pub(super) fn round_trip(&self, bytes: u64) -> f64 {
        let (plan, costs) = (self.plan, &self.limits.pricing.costs);
        let chunk = bytes.min(u64::from(costs.chunk_bytes)) as f64;
        let edge = |path: &[LinkId]| {
            let slowest = path.iter().map(|link| self.per_byte(*link)).fold(0.0, f64::max);
            path.len() as f64 * costs.cable_s + chunk * slowest
        };
        let mut done = vec![0.0; plan.nodes.len()];
        // Parents come before children.
        for (index, node) in plan.nodes.iter().enumerate().rev() {
            let children = node.children.iter().map(|child| match *child {
                Child::Node(below) => done[below] + edge(&plan.nodes[below].path),
                Child::Rank(rank) => edge(&plan.ranks[rank.0 as usize].path),
            });
            let arrived = children.fold(0.0, f64::max);
            let messages = node.children.len() as f64 * costs.child_s;
            done[index] = arrived + costs.node_s + messages + chunk * self.port_per_byte(index);
        }
        2.0 * (done[0] + costs.host_s)
    }

    /// The seconds of a message, of which bytes after the first chunk take `byte_s` each, and no less than the window
    /// demands.
    pub(super) fn seconds(&self, bytes: u64, byte_s: f64) -> f64 {
        let costs = &self.limits.pricing.costs;
        let rest = bytes.saturating_sub(u64::from(costs.chunk_bytes)) as f64;
        let round_trip = self.round_trip(bytes);
        round_trip + rest * byte_s.max(round_trip / f64::from(costs.window_bytes))
    }

    /// The seconds of a message if the tree is alone.
    pub(super) fn alone(&self, bytes: u64) -> f64 {
        self.seconds(bytes, self.busiest())
    }
}

/// The rate of a cable in Gbit/s.
pub(super) fn gbits(fabric: &Fabric, link: LinkId, limits: &Limits) -> f64 {
    fabric.link(link).rate.map_or(limits.pricing.costs.assumed_gbits, |rate| rate.gbits())
}

/// Check the predicted times and the rate.
pub(super) fn check(
    fabric: &Fabric,
    plan: &Plan,
    limits: &Limits,
    edges: &HashMap<LinkId, usize>,
) -> Result<(), Violation> {
    let costs = &limits.pricing.costs;
    let priced = Priced::new(fabric, plan, limits, edges);
    let most = plan.prediction.times.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0);
    let round_trip = priced.round_trip(most);
    let rate = priced.busiest().max(round_trip / f64::from(costs.window_bytes));
    same("seconds per byte", plan.prediction.byte_s, rate)?;
    same("a round trip of", plan.prediction.round_trip_s, round_trip)?;
    let sizes = limits.pricing.size.bytes();
    for (nth, (bytes, seconds)) in plan.prediction.times.iter().enumerate() {
        same("a size of", *bytes as f64, sizes[nth.min(1)] as f64)?;
        same("seconds", *seconds, priced.alone(*bytes))?;
    }
    Ok(())
}

pub(super) fn same(what: &'static str, stated: f64, actual: f64) -> Result<(), Violation> {
    let is_same = (stated - actual).abs() <= 1e-9 * actual.abs();
    if is_same { Ok(()) } else { Err(Violation::Predicted { what, stated, actual }) }
}

/// Each switch's distance to the nearest switch with a host, by relaxation, from 1; 0 for a device behind a port, which
/// is no switch.
pub(super) fn tiers(fabric: &Fabric) -> Vec<u32> {
    let is_device = |at: u32| fabric.switches()[at as usize].is_device;
    // The switches that a cable of a host leads to, itself or through the host's device.
    let mut tiers = vec![u32::MAX; fabric.switches().len()];
    let mut has_host = vec![false; tiers.len()];
    let mut between = Vec::new();
    for link in fabric.links() {
        match link.ends.map(|end| end.device) {
            [Device::Switch(switch), Device::Host(_)] => has_host[switch.0 as usize] = true,
            [Device::Switch(a), Device::Switch(b)] => between.extend([(a.0, b.0), (b.0, a.0)]),
            _ => {}
        }
    }
    (0u32..).zip(&mut tiers).filter(|(at, _)| has_host[*at as usize]).for_each(|(_, tier)| *tier = 1);
    for (_, to) in between.iter().filter(|(from, _)| is_device(*from) && has_host[*from as usize]) {
        tiers[*to as usize] = 1;
    }
    let mut changed = true;
    while std::mem::take(&mut changed) {
        for (from, to) in between.iter().filter(|(from, to)| !is_device(*from) && !is_device(*to)) {
            let through = tiers[*from as usize].saturating_add(1);
            if through < tiers[*to as usize] {
                tiers[*to as usize] = through;
                changed = true;
            }
        }
    }
    (0u32..).zip(&mut tiers).filter(|(at, _)| is_device(*at)).for_each(|(_, tier)| *tier = 0);
    tiers
}
