//! How ranks of a tree of two levels attach to their leaves: zero-copy or by packets.

use super::*;
use crate::select::{Constants, CostTable, Origin};

/// A controller with two leaves of two hosts each. The first offers zero-copy.
fn two_leaves(config: ControllerConfig, other: Option<AttachPoint>) -> (Controller, [Device; 2]) {
    let fabric = "switch = [{ name = \"leaf0\", aggregation = true }, { name = \"leaf1\", aggregation = true }]\n\
                  host = [{ name = \"h0\" }, { name = \"h1\" }, { name = \"h2\" }, { name = \"h3\" }]\n\
                  link = [{ ends = [\"h0\", \"leaf0\"] }, { ends = [\"h1\", \"leaf0\"] }, { ends = [\"h2\", \"leaf1\"] }, \
                  { ends = [\"h3\", \"leaf1\"] }, { ends = [\"leaf0\", \"leaf1\"] }]\n";
    let fabric = Some(Fabric::from_toml(fabric).expect("a fabric"));
    let controller = Controller::start(ControllerConfig { fabric, ..config }).expect("a port");
    let devices = [("leaf0", attach_point(1 << 20)), ("leaf1", other)];
    let devices = devices.map(|(name, attach_point)| Device::start(&controller, name, attach_point, None));
    (controller, devices)
}

/// Calibrated tables alone decide, and only where devices exchange packets anyway.
#[test]
fn ranks_use_packets_where_the_calibrated_table_says_they_are_faster() {
    let slow_zero_copy = |factor: f64| {
        let emulated = CostTable::emulated().constants;
        let alpha_zero_copy_s = factor * emulated.alpha_tree_s;
        Constants { alpha_zero_copy_s, beta_zero_copy_s: factor * emulated.beta_node_s, ..emulated }
    };
    let calibrated = || Origin::Calibrated { date: String::new(), error: 0.1 };
    for (origin, factor, ranks, is_zero_copy) in [
        (calibrated(), 10.0, [AUTO; 4], false),
        (calibrated(), 0.1, [AUTO; 4], true),
        (Origin::Emulator, 10.0, [AUTO; 4], true),
        (calibrated(), 10.0, [AUTO, AUTO, AUTO, SHM], true),
    ] {
        let table = CostTable::new(origin, slow_zero_copy(factor));
        let (controller, _devices) =
            two_leaves(ControllerConfig { table, ..ControllerConfig::new() }, attach_point(1 << 20));
        let ranks = join(&controller, "job", &ranks);
        for tree in ranks.iter().map(tree) {
            assert_eq!(tree.facts.zero_copy_ranks, if is_zero_copy { 4 } else { 0 });
            let says = "packets are faster in a tree of 2 levels, by the cost table";
            assert_eq!(tree.packets_reason.as_deref(), (!is_zero_copy).then_some(says));
        }
    }
    let table = CostTable::new(calibrated(), slow_zero_copy(10.0));
    let controller = Controller::start(ControllerConfig { table, ..ControllerConfig::new() }).expect("a port");
    let _device = Device::start(&controller, "leaf0", attach_point(1 << 20), None);
    let ranks = join(&controller, "job", &[AUTO; 4]);
    assert!(ranks.iter().map(tree).all(|tree| tree.facts.zero_copy_ranks == 4));
}

#[test]
fn zero_copy_is_decided_per_leaf() {
    for (other, all) in [(None, false), (attach_point(1 << 20), true)] {
        let (controller, _devices) = two_leaves(ControllerConfig::new(), other);
        let ranks = join(&controller, "job", &[AUTO; 4]);
        let by_reference: Vec<bool> = ranks.iter().map(|rank| tree(rank).attach.is_some()).collect();
        assert_eq!(by_reference, [true, true, all, all]);
        for tree in ranks.iter().map(tree) {
            let by_reference = if all { 4 } else { 2 };
            assert_eq!((tree.facts.levels, tree.facts.zero_copy_ranks), (2, by_reference));
            assert!(tree.window_max > 16, "packets go between the devices");
        }
    }
}
