//! The fabric on which a cluster's controller plans: a switch with a device at each node of the drawn trees, or of the
//! first one only.
//!
//! Each tree has a place for every device: its own node, or, for one that the tree has no node for, a drawn node, as a
//! second device beside it. Devices at a node are cabled to all devices at its parent, and hosts to all at their leaf.
//! So the planner finds the drawn shape, or one with fewer levels by way of another tree; and after a loss the same
//! shape with the second devices, or one that passes by the lost device.

use super::options::{Draw, Options};
use super::wiring::Wiring;
use crate::oracle::weight;
use std::collections::BTreeSet;
use std::fmt::Write;
use sumac::topo::Fabric;

/// Return the fabric; `None` if any device may serve all ranks, as in some runs with trees of one node only.
pub(super) fn fabric(options: &Options, wirings: &[Wiring]) -> Option<Fabric> {
    let mut draw = Draw::new(weight(&[options.seed, 0x706c_6163]));
    let is_flat = wirings.iter().all(|wiring| wiring.nodes.len() == 1);
    if is_flat && draw.chance(500) {
        return None;
    }
    // On both trees the planner can often save levels.
    let wirings = if draw.chance(500) { wirings } else { &wirings[..1] };
    let devices = options.devices();
    let mut links = BTreeSet::new();
    for wiring in wirings {
        let mut at: Vec<Vec<usize>> = wiring.nodes.iter().map(|node| vec![node.device]).collect();
        let own: BTreeSet<usize> = at.iter().flatten().copied().collect();
        for second in (0..devices).filter(|device| !own.contains(device)) {
            let node = draw.below(at.len() as u64) as usize;
            at[node].push(second);
        }
        for (node, wired) in wiring.nodes.iter().enumerate() {
            let Some((parent, _)) = wired.parent else { continue };
            links.extend(at[node].iter().flat_map(|&low| at[parent].iter().map(move |&up| (switch(low), switch(up)))));
        }
        for (rank, (leaf, _)) in wiring.ranks.iter().enumerate() {
            links.extend(at[*leaf].iter().map(|&device| (host(rank), switch(device))));
        }
    }
    let mut text = String::new();
    let mut add = |line: std::fmt::Arguments<'_>| text.write_fmt(line).expect("to a string");
    (0..devices).for_each(|device| add(format_args!("[[switch]]\nname = {:?}\naggregation = true\n", switch(device))));
    (0..options.ranks).for_each(|rank| add(format_args!("[[host]]\nname = {:?}\n", host(rank))));
    // A second device of one tree may be below in another.
    links.iter().filter(|(one, other)| one < other || !links.contains(&(other.clone(), one.clone()))).for_each(
        |(one, other)| {
            add(format_args!("[[link]]\nends = [{one:?}, {other:?}]\n"));
        },
    );
    Some(Fabric::from_toml(&text).expect("a fabric"))
}

/// Return the name of a device, and of its switch.
pub(super) fn switch(device: usize) -> String {
    format!("d{device}")
}

/// Return the name of a rank's host.
pub(super) fn host(rank: usize) -> String {
    format!("h{rank}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::ScenarioKind;
    use sumac::plan::{HostSelection, Limits, plan};

    /// The fabric of a seed, if it has one.
    fn draw(seed: u64) -> Option<Fabric> {
        let options = Options::draw(seed, ScenarioKind::Recovery);
        let wiring = |tree| Wiring::new(&options, tree, options.devices());
        fabric(&options, &(0..options.trees.len()).map(wiring).collect::<Vec<_>>())
    }

    #[test]
    fn planned_trees_have_one_to_four_levels() {
        let planned = |fabric: Fabric| plan(&fabric, &HostSelection::All, &Limits::default()).expect("a tree");
        let levels: BTreeSet<usize> = (0..150).filter_map(draw).map(|fabric| planned(fabric).levels).collect();
        assert_eq!(levels, BTreeSet::from([1, 2, 3, 4]));
    }
}
