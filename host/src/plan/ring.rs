//! The predicted time of a ring over the hosts, to compare a tree with.
//!
//! 2 (p - 1) steps: each takes a message in two hosts and over the cables between them, and moves 1/p of the bytes to
//! the next rank. The busiest cable carries as many of these messages as pairs of neighbours are routed over it in the
//! same direction.

use super::cost::Pricing;
use super::index::{Distances, FabricIndex, Routing, byte_times};
use super::route::{Load, route};
use super::{Plan, PlanRank};
use crate::topo::{Device, Fabric, LinkId, SwitchId};
use std::collections::HashMap;

pub(super) fn seconds(fabric: &Fabric, index: &FabricIndex, plan: &Plan, bytes: u64, pricing: &Pricing) -> Option<f64> {
    let ranks = plan.ranks.len();
    if ranks < 2 {
        return Some(0.0);
    }
    let byte_s = byte_times(fabric, &pricing.costs);
    let mut load = Load::new(pricing, &byte_s);
    // Per cable and direction: the messages of a step.
    let mut messages: HashMap<(LinkId, Device), u32> = HashMap::new();
    let mut longest = 0;
    for (rank, next) in plan.ranks.iter().zip(plan.ranks.iter().cycle().skip(1)) {
        let between = between(fabric, index, plan.routing, (rank, next), &mut load)?;
        let cables = std::iter::once(rank.path[0]).chain(between).chain([next.path[0]]);
        let mut at = Device::Host(rank.host);
        let mut length = 0;
        for link in cables {
            *messages.entry((link, at)).or_default() += 1;
            at = fabric.link(link).across(at)?;
            length += 1;
        }
        longest = longest.max(length);
    }
    let cost = |((link, _), count): (&(LinkId, Device), &u32)| {
        f64::from(count + pricing.others(*link)) * byte_s[link.0 as usize]
    };
    let busiest_s = messages.iter().map(cost).fold(0.0, f64::max);
    let costs = &pricing.costs;
    let step_s = 2.0 * costs.host_s + costs.cable_s * f64::from(longest) + bytes as f64 / ranks as f64 * busiest_s;
    Some(2.0 * (ranks - 1) as f64 * step_s)
}

/// The cables between the switches of two ranks' hosts.
fn between(
    fabric: &Fabric,
    index: &FabricIndex,
    routing: Routing,
    (from, to): (&PlanRank, &PlanRank),
    load: &mut Load<'_>,
) -> Option<Vec<LinkId>> {
    let switch = |rank: &PlanRank| match fabric.link(rank.path[0]).across(Device::Host(rank.host))? {
        Device::Switch(SwitchId(switch)) => Some(switch),
        Device::Host(_) => None,
    };
    let (from, to) = (switch(from)?, switch(to)?);
    let distances = Distances::of_sources(index, routing, to, &[from]);
    route(index, routing, &distances, from, load)
}
