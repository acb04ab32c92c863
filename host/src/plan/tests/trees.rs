//! Several trees.

use super::*;
use crate::topo::DevicePlace;
use crate::topo::generate::{self, Rails};
use sumac_hal::op::Path;

/// Plan trees, verify each alone, and return them.
fn planned_trees(fabric: &Fabric, hosts: &HostSelection, limits: &Limits, max_trees: usize) -> Trees {
    let trees = Planner::new(fabric).plan_trees(hosts, limits, max_trees).unwrap_or_else(|error| panic!("{error}"));
    verify_trees(fabric, &trees, limits).unwrap_or_else(|error| panic!("{error}"));
    trees
}

/// All servers, each with all its adapters.
fn all_rails(fabric: &Fabric) -> HostSelection {
    HostSelection::Rails(fabric.servers().iter().map(|server| server.adapters.clone()).collect())
}

#[test]
fn one_tree_suffices_where_hosts_have_one_cable_and_switches_aggregate() {
    for fabric in [leaf_spine(4, 2, 8, 1), Fabric::fat_tree(4, Rate::from_gbits(400.0)).expect("a possible shape")] {
        let trees = planned_trees(&fabric, &HostSelection::All, &Limits::default(), 8);
        assert_eq!((trees.trees.len(), trees.gbits, trees.limited_by), (1, 400.0, TreesLimit::Bound));
        let single = planned(&fabric, HostSelection::All, &Limits::default());
        assert_eq!(trees.times, single.prediction.times);
        assert_eq!(trees.trees[0].plan, single);
    }
}

#[test]
fn servers_with_rails_get_one_tree_a_rail() {
    let rate = Rate::from_gbits(400.0);
    let shape = Rails { servers: 64, rails: 8, servers_per_leaf: 16, spines: 4, rate };
    let fabric = generate::rails(shape).expect("a possible shape");
    let trees = planned_trees(&fabric, &all_rails(&fabric), &Limits::default(), 16);
    assert_eq!(trees.trees.len(), 8);
    assert!(trees.gbits >= 0.95 * trees.bound.gbits && trees.bound.gbits == 3200.0, "{} Gbit/s", trees.gbits);
    let hosts: BTreeSet<HostId> =
        trees.trees.iter().flat_map(|tree| tree.plan.ranks.iter().map(|rank| rank.host)).collect();
    assert_eq!(hosts.len(), 64 * 8, "each adapter has a rank in one tree");
    let single = planned(&fabric, all_rails(&fabric), &Limits::default());
    let (one, eight) = (single.prediction.times[1].1, trees.times[1].1);
    assert!(eight < one / 6.0, "{eight} s, and {one} s with one tree");
    assert_eq!(trees.times[0], single.prediction.times[0], "a small message is not divided");
    let some = planned_trees(&fabric, &all_rails(&fabric), &Limits::default(), 3);
    assert_eq!((some.trees.len(), some.limited_by), (3, TreesLimit::Count));
}

#[test]
fn slow_cables_between_switches_are_used_by_a_tree_each() {
    let mut toml = String::new();
    for leaf in 0..3 {
        toml += &format!("[[switch]]\nname = \"leaf{leaf}\"\naggregation = true\n");
    }
    for spine in 0..4 {
        toml += &format!("[[switch]]\nname = \"spine{spine}\"\naggregation = true\n");
        for leaf in 0..3 {
            toml += &format!("[[link]]\nends = [\"leaf{leaf}\", \"spine{spine}\"]\nrate_gbits = 100\n");
        }
    }
    for host in 0..6 {
        toml += &format!("[[host]]\nname = \"h{host}\"\n");
        toml += &format!("[[link]]\nends = [\"h{host}\", \"leaf{}\"]\nrate_gbits = 400\n", host / 2);
    }
    let fabric = Fabric::from_toml(&toml).expect("valid");
    let trees = planned_trees(&fabric, &HostSelection::All, &Limits::default(), 8);
    assert_eq!((trees.trees.len(), trees.gbits, trees.limited_by), (4, 400.0, TreesLimit::Bound));
    let roots: BTreeSet<&str> = trees.trees.iter().map(|tree| tree.plan.root().name.as_str()).collect();
    assert_eq!(roots.len(), 4, "{roots:?}");
}

#[test]
fn trees_stop_where_devices_have_no_slots_left() {
    let rate = Rate::from_gbits(400.0);
    let shape = Rails { servers: 4, rails: 4, servers_per_leaf: 4, spines: 0, rate };
    let fabric = generate::rails(shape).expect("a possible shape");
    let device = DeviceLimits { max_children: 8, slots_free: 8, port: None };
    let of = |slots| fabric.switch_ids().map(move |id| (id, DeviceLimits { slots_free: slots, ..device })).collect();
    let limits = |slots, needed| Limits { devices: Some(of(slots)), slots_needed: needed, ..Limits::default() };
    assert_eq!(planned_trees(&fabric, &all_rails(&fabric), &limits(8, 8), 8).trees.len(), 4);
    let wide = Fabric::from_toml(
        "[[switch]]\nname = \"s\"\naggregation = true\n[[host]]\nname = \"a\"\n[[host]]\nname = \"b\"\n\
         [[link]]\nends = [\"a\", \"s\"]\n[[link]]\nends = [\"a\", \"s\"]\n\
         [[link]]\nends = [\"b\", \"s\"]\n[[link]]\nends = [\"b\", \"s\"]\n",
    );
    let wide = wide.expect("valid");
    let limits = |slots| {
        let device = DeviceLimits { max_children: 8, slots_free: slots, port: None };
        Limits { devices: Some([(SwitchId(0), device)].into()), slots_needed: 8, ..Limits::default() }
    };
    assert_eq!(planned_trees(&wide, &HostSelection::All, &limits(16), 8).gbits, 200.0);
    assert_eq!(planned_trees(&wide, &HostSelection::All, &limits(15), 8).gbits, 100.0);
}

#[test]
fn torus_has_two_trees_that_share_no_cable() {
    let size = 8;
    let at = |x: usize, y: usize| format!("s{}-{}", x % size, y % size);
    let mut toml = String::new();
    for (x, y) in (0..size).flat_map(|x| (0..size).map(move |y| (x, y))) {
        toml += &format!("[[switch]]\nname = \"{}\"\naggregation = true\n[[host]]\nname = \"h{x}-{y}\"\n", at(x, y));
        // A host has the rate of two cables of its switch.
        toml += &format!("[[link]]\nends = [\"h{x}-{y}\", \"{}\"]\nrate_gbits = 400\n", at(x, y));
        for next in [at(x + 1, y), at(x, y + 1)] {
            toml += &format!("[[link]]\nends = [\"{}\", \"{next}\"]\nrate_gbits = 200\n", at(x, y));
        }
    }
    let fabric = Fabric::from_toml(&toml).expect("valid");
    let single = planned(&fabric, HostSelection::All, &Limits::default());
    let trees = planned_trees(&fabric, &HostSelection::All, &Limits::default(), 8);
    let factor = trees.gbits / single.prediction.gbits();
    assert!(trees.trees.len() == 2 && factor >= 1.95, "{} trees, {factor} times one", trees.trees.len());
    assert_eq!(trees.bound.gbits, 400.0);
    let one = planned_trees(&fabric, &HostSelection::All, &Limits::default(), 1);
    assert_eq!((one.trees.len(), one.trees[0].plan == single), (1, true));
}

#[test]
fn verifier_detects_every_kind_of_fault_of_trees() {
    let shape = Rails { servers: 4, rails: 2, servers_per_leaf: 2, spines: 2, rate: Rate::from_gbits(100.0) };
    let fabric = generate::rails(shape).expect("a possible shape");
    let device = DeviceLimits { max_children: 8, slots_free: 8, port: Rate::from_gbits(500.0) };
    let devices = Some(fabric.switch_ids().map(|id| (id, device)).collect());
    let limits = Limits { devices, slots_needed: 5, ..Limits::default() };
    let good = planned_trees(&fabric, &all_rails(&fabric), &limits, 4);
    assert_eq!(good.trees.len(), 2);
    let fault = |spoil: fn(&mut Trees)| {
        let mut trees = good.clone();
        spoil(&mut trees);
        let violation = verify_trees(&fabric, &trees, &limits).expect_err("spoilt");
        format!("{violation:?}").split([' ', '{']).next().unwrap_or_default().to_owned()
    };
    assert_eq!(fault(|trees| trees.trees.clear()), "Empty");
    assert_eq!(fault(|trees| trees.trees[1].plan.levels = 5), "Tree");
    assert_eq!(fault(|trees| trees.trees[1].plan = trees.trees[0].plan.clone()), "Overbooked");
    assert_eq!(fault(|trees| trees.trees[1].gbits *= 1.1), "Overbooked");
    assert_eq!(fault(|trees| trees.gbits *= 1.1), "Predicted");
    assert_eq!(fault(|trees| (trees.trees[0].share, trees.trees[1].share) = (0.4, 0.6)), "Predicted");
    assert_eq!(fault(|trees| trees.times[1].1 *= 0.99), "Predicted");
    assert_eq!(fault(|trees| trees.times[0].1 *= 0.99), "Predicted");
    assert_eq!(fault(|trees| trees.bound.gbits *= 0.9), "Predicted");
    let HostSelection::Rails(mut servers) = all_rails(&fabric) else { panic!("rails") };
    servers.swap(1, 3);
    let other = planned_trees(&fabric, &HostSelection::Rails(servers), &limits, 1);
    let mut mixed = good.clone();
    mixed.trees[1].plan = other.trees[0].plan.clone();
    assert_eq!(verify_trees(&fabric, &mixed, &limits), Err(Violation::OtherRank { tree: 1, rank: 1 }));
    // Both trees on one device: it has the slots of one.
    let twice = Fabric::leaf_spine(LeafSpine { leaves: 1, spines: 0, hosts_per_leaf: 3, cables: 1, rate: None });
    let twice = twice.expect("a possible shape");
    let few = Limits { devices: Some([(SwitchId(0), DeviceLimits { port: None, ..device })].into()), ..limits.clone() };
    let mut half = planned_trees(&twice, &HostSelection::All, &few, 1);
    (half.trees[0].gbits, half.trees[0].share) = (50.0, 0.5);
    half.trees.push(half.trees[0].clone());
    let violation = verify_trees(&twice, &half, &few).expect_err("too few slots");
    assert!(matches!(violation, Violation::Overbooked { unit: "slots", .. }), "{violation}");
    let slow = DeviceLimits { port: Rate::from_gbits(120.0), slots_free: 16, ..device };
    let slow = Limits { devices: Some([(SwitchId(0), slow)].into()), ..limits.clone() };
    let mut trees = planned_trees(&twice, &HostSelection::All, &slow, 1);
    trees.trees[0].gbits *= 1.01;
    let violation = verify_trees(&twice, &trees, &slow).expect_err("too fast for the port");
    assert!(matches!(&violation, Violation::Overbooked { resource, .. } if resource == "leaf0"), "{violation}");
}

/// 32 hosts below one leaf, with devices in the given places.
fn leaf_with_devices(places: impl Fn(&Fabric) -> Vec<DevicePlace>) -> Fabric {
    let shape = LeafSpine { leaves: 1, spines: 0, hosts_per_leaf: 32, cables: 1, rate: Rate::from_gbits(100.0) };
    let fabric = Fabric::leaf_spine(shape).expect("a possible shape");
    fabric.with_devices(&places(&fabric)).expect("free places")
}

#[test]
fn devices_on_own_ports_of_a_leaf_have_the_rate_of_a_link_together() {
    let beside = |count| leaf_with_devices(|_| vec![DevicePlace::Port(SwitchId(0), None); count]);
    let one = planned_trees(&beside(1), &HostSelection::All, &Limits::default(), 64);
    assert!((one.gbits - 100.0 / 32.0).abs() < 1e-6, "{} Gbit/s through one port", one.gbits);
    assert!(
        matches!(one.limited_by, TreesLimit::Bottleneck(Bottleneck::Cable { edges: 32, .. })),
        "{:?}",
        one.limited_by
    );
    let eight = planned_trees(&beside(8), &HostSelection::All, &Limits::default(), 64);
    assert!((eight.gbits - 25.0).abs() < 1e-6, "{} Gbit/s through eight ports", eight.gbits);
    let all = planned_trees(&beside(32), &HostSelection::All, &Limits::default(), 64);
    assert!(all.gbits >= 90.0, "{} Gbit/s through 32 ports", all.gbits);
    let roots: BTreeSet<SwitchId> = all.trees.iter().map(|tree| tree.plan.root().switch).collect();
    assert!(roots.len() == all.trees.len() && all.trees.iter().all(|tree| tree.plan.levels == 1));
}

/// What the choice between the tree and host algorithms needs to know of cables.
#[test]
fn cable_times_count_what_shares_the_busiest_cable() {
    let fabric = leaf_with_devices(|_| vec![DevicePlace::Port(SwitchId(0), None)]);
    let planner = Planner::new(&fabric);
    let limits = Limits::default();
    let plan = planner.plan(&HostSelection::First(8), &limits).expect("a tree");
    let in_bytes = |places: &[usize]| {
        let times = planner.cable_times(&plan, &limits, (places, Shape::Line)).expect("all rates are known");
        let of_link = 8e-9 / 100.0;
        let of = |path| times.schedule_s(path);
        [times.tree_s, of(Path::Ring), of(Path::HalvingDoubling), of(Path::RecursiveDoubling)]
            .map(|time| (time / of_link * 1e6).round() / 1e6)
    };
    let each: Vec<usize> = (0..8).collect();
    assert_eq!(in_bytes(&each), [8.0, 1.0, 1.0, 1.0], "all children share the device's port");
    // Two ranks a host: placed in turns, both send to other hosts at once.
    assert_eq!(in_bytes(&[each.clone(), each.clone()].concat())[1], 2.0);
    let blocks: Vec<usize> = (0..16).map(|rank| rank / 2).collect();
    let [_, ring, halving, doubling] = in_bytes(&blocks);
    assert_eq!(ring, 1.0);
    // Half of halving-doubling's bytes stay within hosts; the others, of eight ranks, cross in twos.
    assert!((halving - 2.0 * (0.25 + 0.125 + 0.0625) / 0.9375).abs() < 1e-6, "{halving}");
    assert_eq!(doubling, 1.5);
    let ten: Vec<usize> = (0..80).map(|rank| rank / 10).collect();
    assert_eq!(in_bytes(&ten)[1], 1.0, "one of ten ranks sends to another host");
    // So may those whose partners change, of more ranks than these are followed for.
    let above: Vec<usize> = (0..2000).map(|rank| rank / 250).collect();
    assert_eq!(in_bytes(&above)[1..], [1.0, 250.0, 250.0]);
    // Of more ranks than routes are followed for, all may send to other hosts.
    let many: Vec<usize> = (0..(1 << 17) + 8).map(|rank| rank % 8).collect();
    assert_eq!(in_bytes(&many)[1..], [f64::from((1 << 14) + 1); 3]);
    let others =
        Limits { pricing: Pricing { load: Some(vec![1; 64].into()), ..Pricing::default() }, ..Limits::default() };
    let loaded = planner.cable_times(&plan, &others, (&each, Shape::Line)).expect("all rates are known");
    assert!((loaded.schedule_s(Path::Ring) / (8e-9 / 100.0) - 2.0).abs() < 1e-6);
    let unrated = LeafSpine { leaves: 1, spines: 0, hosts_per_leaf: 4, cables: 1, rate: None };
    let unrated = Fabric::leaf_spine(unrated).expect("a possible shape");
    let planner = Planner::new(&unrated);
    let plan = planner.plan(&HostSelection::All, &Limits::default()).expect("a tree");
    assert_eq!(
        planner.cable_times(&plan, &Limits::default(), (&[0, 1, 2, 3], Shape::Line)),
        None,
        "rates are never invented"
    );
}

#[test]
fn devices_at_the_hosts_ports_have_half_the_rate_of_a_link_together() {
    let fabric = leaf_with_devices(|fabric| fabric.host_ids().map(DevicePlace::Host).collect());
    let one = planned_trees(&fabric, &HostSelection::All, &Limits::default(), 1);
    assert!((one.gbits - 100.0 / 31.0).abs() < 1e-6, "{} Gbit/s through one port", one.gbits);
    let all = planned_trees(&fabric, &HostSelection::All, &Limits::default(), 64);
    assert!(all.gbits >= 45.0 && all.gbits <= 100.0 * 32.0 / 62.0 + 1e-6, "{} Gbit/s", all.gbits);
    // What limits it is the cables of the hosts, which carry their own bytes and those of their devices.
    let TreesLimit::Bottleneck(Bottleneck::Cable { link, edges }) = all.limited_by else {
        panic!("{:?}", all.limited_by)
    };
    let names = fabric.link(link).ends.map(|end| fabric.name(end.device).to_owned());
    assert!(edges > 50 && names.iter().any(|name| name.ends_with("/dpu")), "{edges} edges from {names:?}");
    assert_eq!(all.trees[0].plan.levels, 1, "a host's own device does not only forward");
}

#[test]
fn device_at_a_port_is_no_way_between_switches() {
    let fabric = leaf_spine(2, 1, 2, 1);
    let leaf = fabric.find_switch("leaf0").expect("a leaf");
    let fabric = fabric.with_devices(&[DevicePlace::Port(leaf, None)]).expect("a free place");
    let plan = planned(&fabric, HostSelection::All, &Limits::default());
    assert_eq!((plan.root().name.as_str(), plan.levels, plan.routing), ("leaf0/device0", 1, Routing::UpDown));
    assert_eq!(plan.ranks.iter().map(|rank| rank.path.len()).collect::<Vec<_>>(), [2, 2, 4, 4]);
}
