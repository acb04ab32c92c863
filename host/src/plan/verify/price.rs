//! Recomputes what a plan predicts, from the formula at the head of `cost`.

use super::Violation;
use crate::plan::{Child, Limits, Plan};
use crate::topo::{Device, Fabric, LinkId};
use std::collections::HashMap;

/// Check the predicted times and the rate.
pub(super) fn check(
    fabric: &Fabric,
    plan: &Plan,
    limits: &Limits,
    edges: &HashMap<LinkId, usize>,
) -> Result<(), Violation> {
    let costs = &limits.pricing.costs;
    let per_byte = |link: LinkId| {
        let gbits = fabric.link(link).rate.map_or(costs.assumed_gbits, |rate| rate.gbits());
        let others = limits.pricing.load.as_ref().and_then(|load| load.get(link.0 as usize)).map_or(0, |edges| *edges);
        (edges.get(&link).copied().unwrap_or(0) as f64 + f64::from(others)) * 8.0 / (gbits * 1e9)
    };
    let port_per_byte = |index: usize| {
        let device = limits.devices.as_ref().and_then(|devices| devices.get(&plan.nodes[index].switch));
        let port = device.and_then(|device| device.port);
        port.map_or(0.0, |rate| plan.nodes[index].children.len() as f64 * 8.0 / (rate.gbits() * 1e9))
    };
    let cables = edges.keys().map(|link| per_byte(*link));
    let busiest = cables.chain((0..plan.nodes.len()).map(port_per_byte)).fold(0.0, f64::max);
    let way = |bytes: u64| {
        let chunk = bytes.min(u64::from(costs.chunk_bytes)) as f64;
        let edge = |path: &[LinkId]| {
            let slowest = path.iter().map(|link| per_byte(*link)).fold(0.0, f64::max);
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
            done[index] = arrived + costs.node_s + messages + chunk * port_per_byte(index);
        }
        done[0]
    };
    let round_trip = |bytes| 2.0 * (way(bytes) + costs.host_s);
    let most = plan.prediction.times.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0);
    let rate = |bytes| busiest.max(round_trip(bytes) / f64::from(costs.window_bytes));
    same("seconds per byte", plan.prediction.byte_s, rate(most))?;
    same("a round trip of", plan.prediction.round_trip_s, round_trip(most))?;
    let sizes = limits.pricing.size.bytes();
    for (nth, (bytes, seconds)) in plan.prediction.times.iter().enumerate() {
        same("a size of", *bytes as f64, sizes[nth.min(1)] as f64)?;
        let rest = bytes.saturating_sub(u64::from(costs.chunk_bytes)) as f64;
        same("seconds", *seconds, round_trip(*bytes) + rest * rate(*bytes))?;
    }
    Ok(())
}

fn same(what: &'static str, stated: f64, actual: f64) -> Result<(), Violation> {
    let is_same = (stated - actual).abs() <= 1e-9 * actual.abs();
    if is_same { Ok(()) } else { Err(Violation::Predicted { what, stated, actual }) }
}

/// Each switch's distance to the nearest switch with a host, by relaxation.
pub(super) fn tiers(fabric: &Fabric) -> Vec<u32> {
    let mut tiers = vec![u32::MAX; fabric.switches().len()];
    let cabled = fabric.links().iter().filter_map(|link| match link.ends.map(|end| end.device) {
        [Device::Switch(switch), Device::Host(_)] => Some(switch),
        _ => None,
    });
    cabled.for_each(|switch| tiers[switch.0 as usize] = 0);
    let mut changed = true;
    while std::mem::take(&mut changed) {
        for link in fabric.links() {
            if let [Device::Switch(a), Device::Switch(b)] = link.ends.map(|end| end.device) {
                for (from, to) in [(a, b), (b, a)] {
                    let through = tiers[from.0 as usize].saturating_add(1);
                    if through < tiers[to.0 as usize] {
                        tiers[to.0 as usize] = through;
                        changed = true;
                    }
                }
            }
        }
    }
    tiers
}
