//! Verifies several trees together, from the formulas at the head of `trees`.

use super::price::{Priced, gbits, same};
use super::{Violation, check_paths, verify};
use crate::plan::{Limits, Trees};
use crate::topo::{Device, Fabric, LinkId};
use std::collections::{BTreeMap, HashMap};

/// By which factor sums of rates may exceed a limit: rounding.
const ROUNDING: f64 = 1e-5;

/// Verify trees that are planned together: each alone, their ranks, that their rates together fit every cable, port and
/// window, and the rates, shares and times that they state.
///
/// # Errors
/// The first [`Violation`].
pub fn verify_trees(fabric: &Fabric, trees: &Trees, limits: &Limits) -> Result<(), Violation> {
    let Some(first) = trees.trees.first() else { return Err(Violation::Empty { nodes: 0, ranks: 0 }) };
    let mut edges = Vec::with_capacity(trees.trees.len());
    for (tree, planned) in trees.trees.iter().enumerate() {
        let wrong = |violation| Violation::Tree { tree, violation: Box::new(violation) };
        verify(fabric, &planned.plan, limits).map_err(wrong)?;
        edges.push(check_paths(fabric, &planned.plan).map_err(wrong)?);
        let ranks = (&planned.plan.ranks, &first.plan.ranks);
        let of = |ranks: &[crate::plan::PlanRank], rank: usize| {
            ranks.get(rank).map(|rank| (rank.host, fabric.host(rank.host).server))
        };
        // One host, or another adapter of its server.
        let is_other = |rank: &usize| match (of(ranks.0, *rank), of(ranks.1, *rank)) {
            (Some((host, server)), Some((other, of))) => host != other && server != of,
            _ => true,
        };
        if let Some(rank) = (0..ranks.0.len().max(ranks.1.len())).find(is_other) {
            return Err(Violation::OtherRank { tree, rank });
        }
    }
    check_loads(fabric, trees, (&edges, limits))?;
    let all: f64 = trees.trees.iter().map(|tree| tree.gbits).sum();
    same("Gbit/s", trees.gbits, all)?;
    for tree in &trees.trees {
        same("a share of", tree.share, tree.gbits / all)?;
    }
    let priced: Vec<Priced<'_>> =
        trees.trees.iter().zip(&edges).map(|(tree, edges)| Priced::new(fabric, &tree.plan, limits, edges)).collect();
    for (bytes, seconds) in &trees.times {
        let actual = if trees.trees.len() == 1 || *bytes <= u64::from(limits.pricing.costs.chunk_bytes) {
            priced[0].alone(*bytes)
        } else {
            let share = |tree: &crate::plan::PlannedTree| (*bytes as f64 * tree.gbits / all).ceil() as u64;
            let times = trees.trees.iter().zip(&priced).map(|(tree, one)| one.seconds(share(tree), 8e-9 / tree.gbits));
            times.fold(0.0, f64::max)
        };
        // A share is rounded up to whole bytes, which rates that are rounded otherwise may change by one.
        let close = (seconds - actual).abs() <= 1e-6 * actual;
        if !close {
            return Err(Violation::Predicted { what: "seconds", stated: *seconds, actual });
        }
    }
    if trees.gbits > trees.bound.gbits * (1.0 + ROUNDING) {
        let (stated, actual) = (trees.bound.gbits, trees.gbits);
        return Err(Violation::Predicted { what: "at most", stated, actual });
    }
    Ok(())
}

/// Check that the trees fit cables, ports, windows and slots together.
fn check_loads(
    fabric: &Fabric,
    trees: &Trees,
    (edges, limits): (&[HashMap<LinkId, usize>], &Limits),
) -> Result<(), Violation> {
    let mut cables: BTreeMap<LinkId, f64> = BTreeMap::new();
    let mut devices: BTreeMap<u32, (f64, Option<f64>, u32)> = BTreeMap::new();
    for (index, (tree, edges)) in trees.trees.iter().zip(edges).enumerate() {
        let priced = Priced::new(fabric, &tree.plan, limits, edges);
        for (link, edges) in edges {
            *cables.entry(*link).or_default() += (*edges as f64 + priced.others(*link)) * tree.gbits;
        }
        for (node, planned) in tree.plan.nodes.iter().enumerate() {
            let (taken, port, groups) = devices.entry(planned.switch.0).or_default();
            *taken += planned.children.len() as f64 * tree.gbits;
            *port = priced.port_gbits(node);
            *groups += 1;
        }
        let window = f64::from(limits.pricing.costs.window_bytes) * 8e-9 / tree.plan.prediction.round_trip_s;
        if tree.gbits > window * (1.0 + ROUNDING) {
            let resource = format!("the window of tree {index}");
            return Err(Violation::Overbooked { resource, taken: tree.gbits, limit: window, unit: "Gbit/s" });
        }
    }
    for (link, taken) in cables {
        let limit = gbits(fabric, link, limits);
        if taken > limit * (1.0 + ROUNDING) {
            let ends = fabric.link(link).ends.map(|end| fabric.name(end.device).to_owned());
            return Err(Violation::Overbooked { resource: ends.join(" to "), taken, limit, unit: "Gbit/s" });
        }
    }
    for (switch, (taken, port, groups)) in devices {
        let switch = crate::topo::SwitchId(switch);
        let resource = fabric.name(Device::Switch(switch)).to_owned();
        if let Some(limit) = port.filter(|port| taken > port * (1.0 + ROUNDING)) {
            return Err(Violation::Overbooked { resource, taken, limit, unit: "Gbit/s" });
        }
        let device = limits.devices.as_ref().and_then(|devices| devices.get(&switch));
        let slots = u64::from(groups) * u64::from(limits.slots_needed);
        if let Some(device) = device.filter(|device| slots > u64::from(device.slots_free)) {
            let (taken, limit) = (slots as f64, f64::from(device.slots_free));
            return Err(Violation::Overbooked { resource, taken, limit, unit: "slots" });
        }
    }
    Ok(())
}
