//! The predicted time of a finished tree for any size: the formula at the head of `cost`.

use super::cost::{byte_s, first_chunk, seconds};
use super::rates::edges;
use super::{Limits, Plan};
use crate::topo::{Fabric, LinkId};
use std::collections::BTreeMap;

/// A tree with what its cables and ports take.
pub(super) struct Evaluation<'a> {
    plan: &'a Plan,
    limits: &'a Limits,
    /// Per cable of the tree: seconds per byte.
    cables: BTreeMap<LinkId, f64>,
    /// Per node: seconds per byte and child.
    ports: Vec<f64>,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(fabric: &Fabric, plan: &'a Plan, limits: &'a Limits) -> Self {
        let pricing = &limits.pricing;
        let cable = |(link, edges): (LinkId, u32)| {
            let edges = f64::from(edges + pricing.others(link));
            (link, edges * byte_s(fabric.link(link).rate, &pricing.costs))
        };
        let port = |switch| limits.devices.as_ref().and_then(|devices| devices.get(&switch)?.port);
        let ports = plan.nodes.iter().map(|node| match port(node.switch) {
            Some(rate) => byte_s(Some(rate), &pricing.costs),
            None => 0.0,
        });
        Self { plan, limits, cables: edges(plan).into_iter().map(cable).collect(), ports: ports.collect() }
    }

    /// The way up for the first chunk of a message.
    fn way_s(&self, bytes: u64) -> f64 {
        let costs = &self.limits.pricing.costs;
        let chunk = first_chunk(bytes, costs);
        let edge = |path: &[LinkId]| {
            let slowest = path.iter().filter_map(|link| self.cables.get(link)).copied().fold(0.0, f64::max);
            costs.cable_s * path.len() as f64 + chunk * slowest
        };
        let mut ways = vec![0.0_f64; self.plan.nodes.len()];
        for rank in &self.plan.ranks {
            ways[rank.leaf] = ways[rank.leaf].max(edge(&rank.path));
        }
        // Parents come before children.
        for (index, node) in self.plan.nodes.iter().enumerate().rev() {
            let children = node.children.len() as f64;
            ways[index] += costs.node_s + children * (costs.child_s + chunk * self.ports[index]);
            if let Some(parent) = node.parent {
                ways[parent] = ways[parent].max(ways[index] + edge(&node.path));
            }
        }
        ways[0]
    }

    /// The time of a message if further bytes take so many seconds each.
    pub(super) fn seconds_at(&self, bytes: u64, byte_s: f64) -> f64 {
        seconds(bytes, self.way_s(bytes), byte_s, &self.limits.pricing.costs)
    }

    /// The seconds per byte of a message over the busiest cable or port.
    pub(super) fn busiest_byte_s(&self) -> f64 {
        let ports = self.plan.nodes.iter().zip(&self.ports).map(|(node, port)| node.children.len() as f64 * port);
        self.cables.values().copied().chain(ports).fold(0.0, f64::max)
    }

    /// The time of a message if the tree is alone.
    pub(super) fn seconds(&self, bytes: u64) -> f64 {
        self.seconds_at(bytes, self.busiest_byte_s())
    }
}
