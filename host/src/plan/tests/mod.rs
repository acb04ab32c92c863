//! Plans on generated fabrics and on a real one, against the verifier and against the optimum by brute force.

mod brute;
mod explain;
mod optimum;
mod replan;
mod routes;
mod spread;
mod trees;

use super::*;
use crate::topo::tests::shared_input;
use crate::topo::{LeafSpine, Rate};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn leaf_spine(leaves: usize, spines: usize, hosts_per_leaf: usize, cables: usize) -> Fabric {
    let shape = LeafSpine { leaves, spines, hosts_per_leaf, cables, rate: Rate::from_gbits(400.0) };
    Fabric::leaf_spine(shape).expect("a possible shape")
}

/// Four leaves with a host each, below `spine0` at 2.5 Gbit/s and `spine1` at 400.
fn slow_and_fast_spine() -> Fabric {
    let mut toml = String::new();
    for (spine, gbits) in [(0, 2.5), (1, 400.0)] {
        toml += &format!("[[switch]]\nname = \"spine{spine}\"\naggregation = true\n");
        for leaf in 0..4 {
            toml += &format!("[[link]]\nends = [\"leaf{leaf}\", \"spine{spine}\"]\nrate_gbits = {gbits}\n");
        }
    }
    for leaf in 0..4 {
        toml += &format!("[[switch]]\nname = \"leaf{leaf}\"\naggregation = true\n[[host]]\nname = \"h{leaf}\"\n");
        toml += &format!("[[link]]\nends = [\"h{leaf}\", \"leaf{leaf}\"]\nrate_gbits = 400\n");
    }
    Fabric::from_toml(&toml).expect("valid")
}

/// Limits with trees chosen for one size.
fn sized(bytes: u64) -> Limits {
    Limits { pricing: Pricing { size: Size::Bytes(bytes), ..Pricing::default() }, ..Limits::default() }
}

fn at_most(max_children: usize) -> Limits {
    Limits { max_children, ..Limits::default() }
}

/// Plan and verify.
fn planned(fabric: &Fabric, hosts: HostSelection, limits: &Limits) -> Plan {
    let plan = plan(fabric, &hosts, limits).unwrap_or_else(|error| panic!("{error}"));
    verify(fabric, &plan, limits).unwrap_or_else(|error| panic!("{error}\n{}", plan.to_text()));
    plan
}

/// A fabric in which only the switches whose name starts with one of these aggregate.
fn aggregating_at(fabric: &Fabric, prefixes: &[&str]) -> Limits {
    let device = DeviceLimits { max_children: 256, slots_free: 8, port: None };
    let fits = |id: &SwitchId| prefixes.iter().any(|prefix| fabric.switch(*id).name.starts_with(prefix));
    let devices = fabric.switch_ids().filter(fits).map(|id| (id, device)).collect();
    Limits { devices: Some(devices), ..Limits::default() }
}

#[test]
fn real_superpod_plans_for_2_16_64_and_all_hosts() {
    let Some(fabric) = shared_input("ndr-superpod.ibnetdiscover") else { return };
    for count in [2, 16, 64, 542] {
        let plan = planned(&fabric, HostSelection::First(count), &Limits::default());
        assert_eq!((plan.levels, plan.max_link_sharing), (2, 1), "{count} hosts");
        // The bound has a root with two children, and more leaves need more.
        assert!(plan.gap < 0.1, "{count} hosts: within {} of the bound", plan.gap);
        assert_eq!(plan.ranks.len(), count);
        for rank in &plan.ranks {
            let leaf = plan.nodes[rank.leaf].switch;
            assert_eq!(fabric.host(rank.host).uplinks[0].switch, leaf, "each rank enters at its own switch");
        }
    }
    let all = planned(&fabric, HostSelection::All, &Limits::default());
    // Only three spines reach all 31 leaves; the first in natural order is taken.
    assert_eq!((all.root().name.as_str(), all.nodes.len()), ("MF0;A10-P1-IBSPINE-02:MQM9701/U1", 32));
    assert_eq!(all.max_children, 31);
    assert!(all.to_text().lines().all(|line| line.chars().count() < 200) && all.to_text().lines().count() == 34);
    let split = planned(&fabric, HostSelection::All, &at_most(20));
    assert_eq!((split.levels, split.max_children), (3, 19));
}

#[test]
fn single_switch_yields_one_level() {
    let plan = planned(&leaf_spine(4, 2, 8, 1), HostSelection::First(8), &Limits::default());
    assert_eq!((plan.levels, plan.nodes.len(), plan.root().name.as_str()), (1, 1, "leaf0"));
    assert!(plan.aligned && plan.optimal);
    let one = planned(&leaf_spine(1, 0, 1, 1), HostSelection::All, &Limits::default());
    assert_eq!((one.levels, one.ranks.len()), (1, 1));
}

#[test]
fn leaf_is_the_root_only_without_a_device_above() {
    let fabric = leaf_spine(2, 2, 4, 1);
    // As many levels, but one cable less on the way.
    assert_eq!(planned(&fabric, HostSelection::All, &Limits::default()).root().name, "spine0");
    let plan = planned(&fabric, HostSelection::All, &aggregating_at(&fabric, &["leaf"]));
    assert_eq!((plan.root().name.as_str(), plan.nodes.len(), plan.levels), ("leaf0", 2, 2));
    assert_eq!(plan.root().children[4], Child::Node(1));
}

#[test]
fn branches_spread_over_parallel_cables() {
    for (leaves, spines, cables) in
        [(4usize, 1usize, 2usize), (4, 1, 3), (9, 3, 1), (9, 1, 3), (10, 1, 1), (12, 2, 2), (16, 7, 1)]
    {
        let fabric = leaf_spine(leaves, spines, 1, cables);
        // A chain of leaves has fewer edges on a cable; for small messages it is too long.
        let only_leaves = Limits { pricing: sized(Size::SMALL).pricing, ..aggregating_at(&fabric, &["leaf"]) };
        let plan = planned(&fabric, HostSelection::All, &only_leaves);
        assert_eq!(plan.levels, 2);
        assert_eq!(plan.max_link_sharing, (leaves - 1).div_ceil(spines * cables), "{leaves} {spines} {cables}");
    }
}

#[test]
fn deeper_fabrics_get_more_levels() {
    let fabric = Fabric::fat_tree(4, None).expect("a possible shape");
    let plan = planned(&fabric, HostSelection::All, &Limits::default());
    assert_eq!((plan.levels, plan.max_link_sharing, plan.aligned), (3, 1, true));
    let pod = planned(&fabric, HostSelection::First(4), &Limits::default());
    assert_eq!((pod.levels, pod.max_link_sharing), (2, 1));
}

#[test]
fn large_messages_get_more_levels_than_small_ones_where_edges_would_share_cables() {
    let fabric = Fabric::fat_tree(8, Rate::from_gbits(400.0)).expect("a possible shape");
    let devices = aggregating_at(&fabric, &["edge", "core"]);
    let shape = |bytes| {
        let limits = Limits { pricing: sized(bytes).pricing, ..devices.clone() };
        let plan = planned(&fabric, HostSelection::All, &limits);
        (plan.ranks.len(), plan.levels, plan.max_link_sharing)
    };
    // The cores take in all edges of a pod over one cable, unless one edge switch of the pod joins them.
    assert_eq!(shape(Size::SMALL), (128, 2, 4));
    assert_eq!(shape(Size::LARGE), (128, 3, 1));
}

#[test]
fn root_is_reached_over_fast_cables() {
    let fabric = slow_and_fast_spine();
    for limits in [Limits::default(), sized(Size::SMALL), sized(Size::LARGE)] {
        let plan = planned(&fabric, HostSelection::All, &limits);
        assert_eq!((plan.root().name.as_str(), plan.prediction.gbits()), ("spine1", 400.0));
    }
}

#[test]
fn ring_beats_a_single_device_from_some_size_on() {
    let fabric = leaf_spine(8, 4, 8, 1);
    let planner = Planner::new(&fabric);
    let limits = aggregating_at(&fabric, &["leaf3"]);
    let plan = planned(&fabric, HostSelection::All, &limits);
    assert_eq!((plan.levels, plan.max_children, plan.max_link_sharing), (1, 64, 14));
    let is_faster = |bytes: u64| {
        let limits = Limits { pricing: sized(bytes).pricing, ..limits.clone() };
        let tree = planned(&fabric, HostSelection::All, &limits).prediction.times[0].1;
        planner.ring_seconds(&plan, bytes, &limits.pricing).expect("connected") < tree
    };
    let sizes: Vec<bool> = (3..31).map(|power| is_faster(1 << power)).collect();
    assert!(!sizes[0] && sizes[27] && sizes.windows(2).all(|pair| pair[0] <= pair[1]), "{sizes:?}");
}

#[test]
fn loads_of_other_trees_move_the_root() {
    let fabric = leaf_spine(4, 2, 2, 1);
    let first = planned(&fabric, HostSelection::All, &Limits::default());
    assert_eq!(first.root().name, "spine0");
    let mut load = vec![0; fabric.links().len()];
    first.nodes.iter().flat_map(|node| &node.path).for_each(|link| load[link.0 as usize] += 1);
    let pricing = Pricing { load: Some(load.into()), ..Pricing::default() };
    let second = planned(&fabric, HostSelection::All, &Limits { pricing, ..Limits::default() });
    assert_eq!(second.root().name, "spine1");
}

#[test]
fn device_behind_a_port_takes_in_all_its_children() {
    let fabric = leaf_spine(1, 0, 32, 1);
    let mut limits = aggregating_at(&fabric, &["leaf"]);
    let device = limits.devices.as_mut().and_then(|devices| devices.values_mut().next()).expect("a device");
    device.port = Rate::from_gbits(400.0);
    let plan = planned(&fabric, HostSelection::All, &limits);
    assert_eq!(plan.prediction.bottleneck, Bottleneck::Port { node: 0, children: 32 });
    assert!((plan.prediction.gbits() - 400.0 / 32.0).abs() < 1e-9);
}

#[test]
fn rate_reaches_the_bound_on_leaf_spine_and_fat_tree() {
    let fat_tree = |radix| Fabric::fat_tree(radix, Rate::from_gbits(400.0)).expect("a possible shape");
    for fabric in [leaf_spine(6, 3, 8, 1), fat_tree(8), fat_tree(16)] {
        let planner = Planner::new(&fabric);
        let plan = planner.plan(&HostSelection::All, &Limits::default()).expect("a tree");
        let bound = planner.rate_bound(&plan, &Pricing::default());
        assert_eq!(bound.kind, BoundKind::MinCut);
        assert!(plan.prediction.gbits() >= 0.95 * bound.gbits, "{bound:?}");
    }
}

#[test]
fn bound_is_the_smallest_cut() {
    // Two pairs of leaves, joined by one slow cable between their spines.
    let mut toml = "[[link]]\nends = [\"s0\", \"s1\"]\nrate_gbits = 25\n".to_owned();
    for spine in 0..2 {
        toml += &format!("[[switch]]\nname = \"s{spine}\"\naggregation = true\n");
        for leaf in [2 * spine, 2 * spine + 1] {
            toml += &format!("[[switch]]\nname = \"l{leaf}\"\naggregation = true\n[[host]]\nname = \"h{leaf}\"\n");
            toml += &format!("[[link]]\nends = [\"h{leaf}\", \"l{leaf}\"]\nrate_gbits = 100\n");
            toml += &format!("[[link]]\nends = [\"l{leaf}\", \"s{spine}\"]\nrate_gbits = 50\n");
        }
    }
    let fabric = Fabric::from_toml(&toml).expect("valid");
    let planner = Planner::new(&fabric);
    let only_leaves = aggregating_at(&fabric, &["l"]);
    let plan = planned(&fabric, HostSelection::All, &only_leaves);
    let bound = planner.rate_bound(&plan, &Pricing::default());
    assert_eq!((bound.gbits, bound.kind), (25.0, BoundKind::MinCut));
    assert!(plan.prediction.gbits() <= 25.0);
}

#[test]
fn host_below_a_switch_without_device_enters_at_the_next() {
    let fabric = leaf_spine(2, 2, 3, 1);
    let plan = planned(&fabric, HostSelection::All, &aggregating_at(&fabric, &["spine"]));
    assert_eq!((plan.levels, plan.nodes.len(), plan.max_link_sharing), (1, 1, 3));
}

#[test]
fn two_port_host_enters_where_levels_are_fewest() {
    let fabric = Fabric::from_toml(
        r#"
        switch = [{ name = "a", aggregation = true }, { name = "b", aggregation = true }, { name = "c", aggregation = true }]
        host = [{ name = "n1" }, { name = "n2" }]
        link = [{ ends = ["n1", "a"] }, { ends = ["n1", "b"] }, { ends = ["n2", "b"] }, { ends = ["n2", "c"] }]
        "#,
    );
    let fabric = fabric.expect("valid");
    let plan = planned(&fabric, HostSelection::All, &Limits::default());
    assert_eq!((plan.levels, plan.root().name.as_str()), (1, "b"));
}

#[test]
fn nodes_over_the_child_limit_are_split_or_refused() {
    let fabric = leaf_spine(8, 4, 4, 1);
    let split = planned(&fabric, HostSelection::All, &at_most(4));
    assert_eq!((split.levels, split.max_children), (3, 4));
    let error = plan(&fabric, &HostSelection::All, &at_most(2)).expect_err("too few nodes").to_string();
    assert!(error.contains("its limit is 2") && error.contains("children"), "{error}");
    let error = plan(&fabric, &HostSelection::All, &at_most(1)).expect_err("nothing combines").to_string();
    assert!(error.contains("a limit of 1 children is too small"), "{error}");
}

#[test]
fn device_limits_apply_per_switch() {
    let fabric = leaf_spine(4, 2, 2, 1);
    let mut limits = aggregating_at(&fabric, &["leaf", "spine"]);
    let spine0 = fabric.find_switch("spine0").expect("generated");
    if let Some(device) = limits.devices.as_mut().and_then(|devices| devices.get_mut(&spine0)) {
        device.slots_free = 1;
    }
    limits.slots_needed = 4;
    assert_eq!(planned(&fabric, HostSelection::All, &limits).root().name, "spine1");
    limits.slots_needed = 9;
    let error = plan(&fabric, &HostSelection::All, &limits).expect_err("no slots").to_string();
    assert!(error.contains("`leaf0`: its device has 8 free slots; the group needs 9"), "{error}");
}

#[test]
fn host_selections_parse_and_are_checked() {
    assert_eq!("16".parse(), Ok(HostSelection::First(16)));
    assert_eq!(" all ".parse(), Ok(HostSelection::All));
    assert_eq!("b, a".parse(), Ok(HostSelection::Named(vec!["b".into(), "a".into()])));
    assert_eq!("1000000000000010".parse(), Ok(HostSelection::Named(vec!["1000000000000010".into()])));
    let fabric = leaf_spine(2, 1, 8, 1);
    let refused = |text: &str| {
        let hosts: HostSelection = text.parse().expect("any text is a selection");
        plan(&fabric, &hosts, &Limits::default()).expect_err(text).to_string()
    };
    assert!(refused("0").contains("no host is selected"));
    assert!(refused("17").contains("17 hosts requested, but the fabric has 16"));
    assert!(refused("h1,h99").contains("no host is named `h99`; did you mean `h9`"), "{}", refused("h1,h99"));
    assert!(refused("H12x").contains("did you mean `h12`"), "{}", refused("H12x"));
    assert!(refused("zebrafish").ends_with("no host is named `zebrafish`"));
    assert!(refused("h1,h2,h1").contains("`h1` is listed twice"));
    let named = planned(&fabric, HostSelection::Named(vec!["h9".into(), "h0".into()]), &Limits::default());
    assert_eq!(named.ranks.iter().map(|rank| rank.name.as_str()).collect::<Vec<_>>(), ["h9", "h0"]);

    let dump = Fabric::from_ibnetdiscover(include_str!("../../../tests/fixtures/two-leaves.ibnetdiscover"));
    let hosts = HostSelection::Named(vec!["ConnectX".into()]);
    let error = plan(&dump.expect("valid"), &hosts, &Limits::default()).expect_err("ambiguous").to_string();
    assert!(error.contains("2 hosts are named `ConnectX`") && error.contains("2000000000000003"), "{error}");
}

#[test]
fn disconnected_fabric_is_refused_with_names() {
    let fabric = leaf_spine(2, 1, 1, 1);
    let between: BTreeSet<LinkId> = fabric.adjacent(SwitchId(1)).iter().map(|(_, link)| *link).collect();
    let error = plan(&fabric.without_links(&between), &HostSelection::All, &Limits::default()).expect_err("two pieces");
    assert_eq!(error, PlanError::Disconnected { one: "h0".into(), other: "h1".into() });
    let access = BTreeSet::from([fabric.hosts()[0].uplinks[0].link]);
    let error = plan(&fabric.without_links(&access), &HostSelection::All, &Limits::default()).expect_err("no cable");
    assert_eq!(error, PlanError::Isolated { host: "h0".into() });
}

#[test]
fn alignment_follows_the_ranks() {
    let fabric = leaf_spine(4, 2, 4, 1);
    assert!(planned(&fabric, HostSelection::All, &Limits::default()).aligned);
    let interleaved = (0..16).map(|i| format!("h{}", i % 4 * 4 + i / 4)).collect();
    assert!(!planned(&fabric, HostSelection::Named(interleaved), &Limits::default()).aligned);
    assert!(!planned(&fabric, HostSelection::First(12), &Limits::default()).aligned, "not a power of two");
    let uneven = ["h0", "h1", "h2", "h4", "h5", "h6", "h7", "h8"].map(String::from).to_vec();
    assert!(!planned(&fabric, HostSelection::Named(uneven), &Limits::default()).aligned);
}

#[test]
fn renderings_show_the_tree() {
    let plan = planned(&leaf_spine(3, 1, 2, 1), HostSelection::First(5), &Limits::default());
    let text = "5 ranks in 4 nodes, 2 levels, at most 3 children a node, at most 1 tree edge a cable\n\
                predicted: 8 B 2.67 us, 16 MiB 338.46 us; optimal by these times\n\
                spine0  3 children\n\
                ├─ leaf0  2 children\n\
                │  ├─ rank 0  h0\n\
                │  └─ rank 1  h1\n\
                ├─ leaf1  2 children\n\
                │  ├─ rank 2  h2\n\
                │  └─ rank 3  h3\n\
                └─ leaf2  1 child\n   └─ rank 4  h4\n";
    assert_eq!(plan.to_text(), text);
    let json = serde_json::to_value(&plan).expect("a plan is plain data");
    let mut keys: Vec<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    let named = [
        "aligned",
        "gap",
        "gbits",
        "levels",
        "max_children",
        "max_link_sharing",
        "nodes",
        "optimal",
        "ranks",
        "root",
        "times",
    ];
    assert_eq!(keys, named);
    assert_eq!((&json["root"], &json["levels"]), (&"spine0".into(), &2.into()));
    assert_eq!(json["nodes"][0]["children"], serde_json::json!(["leaf0", "leaf1", "leaf2"]));
    assert_eq!(json["nodes"][3]["children"], serde_json::json!(["rank 4"]));
    assert_eq!(
        (&json["nodes"][0]["parent"], &json["nodes"][1]["parent"]),
        (&serde_json::Value::Null, &"spine0".into())
    );
    assert_eq!(json["ranks"][4], serde_json::json!({ "rank": 4, "host": "h4", "guid": "h4", "leaf": "leaf2" }));
    let dot = plan.to_dot();
    assert!(dot.starts_with("digraph plan {") && dot.contains("n3 -> n0;") && dot.contains("r4 -> n3;"), "{dot}");
}

#[test]
fn verifier_detects_every_kind_of_fault() {
    let fabric = leaf_spine(3, 2, 2, 1);
    let limits = Limits::default();
    let good = planned(&fabric, HostSelection::All, &limits);
    let fault = |spoil: fn(&mut Plan)| {
        let mut plan = good.clone();
        spoil(&mut plan);
        let violation = verify(&fabric, &plan, &limits).expect_err("spoilt");
        format!("{violation:?}").split([' ', '{']).next().unwrap_or_default().to_owned()
    };
    assert_eq!(fault(|plan| plan.ranks.clear()), "Empty");
    assert_eq!(fault(|plan| plan.ranks[1].host = plan.ranks[0].host), "Rank");
    assert_eq!(fault(|plan| plan.ranks.swap(0, 1)), "Rank");
    assert_eq!(fault(|plan| plan.nodes[1].parent = Some(2)), "Parent");
    assert_eq!(fault(|plan| plan.nodes[1].parent = None), "Parent");
    assert_eq!(fault(|plan| plan.nodes[2].level = 0), "Parent");
    assert_eq!(fault(|plan| plan.nodes[1].children.truncate(1)), "Children");
    assert_eq!(fault(|plan| plan.nodes[1].children.swap(0, 1)), "Children");
    assert_eq!(fault(|plan| plan.ranks[0].leaf = 2), "Children");
    assert_eq!(fault(|plan| plan.nodes[1].children[1] = plan.nodes[1].children[0]), "Children");
    assert_eq!(
        fault(|plan| (plan.nodes[2].switch, plan.nodes[2].name) = (plan.nodes[1].switch, plan.nodes[1].name.clone())),
        "SharedSwitch"
    );
    assert_eq!(fault(|plan| plan.nodes[1].path.clear()), "Path");
    assert_eq!(fault(|plan| plan.nodes[1].path = plan.nodes[2].path.clone()), "Path");
    assert_eq!(fault(|plan| plan.ranks[0].path.clear()), "Path");
    assert_eq!(fault(|plan| plan.levels = 3), "Stated");
    assert_eq!(fault(|plan| plan.max_link_sharing = 2), "Stated");
    assert_eq!(fault(|plan| plan.aligned = true), "Stated");
    assert_eq!(fault(|plan| plan.prediction.byte_s *= 0.99), "Predicted");
    assert_eq!(fault(|plan| plan.prediction.round_trip_s *= 0.99), "Predicted");
    assert_eq!(fault(|plan| plan.prediction.times[1].1 *= 1.01), "Predicted");
    assert_eq!(fault(|plan| plan.prediction.times[0].0 = 9), "Predicted");
    let strict = verify(&fabric, &good, &at_most(2)).expect_err("three children");
    assert_eq!(strict, Violation::ChildLimit { name: "spine0".into(), children: 3, limit: 2 });
    let leaves_only = aggregating_at(&fabric, &["leaf"]);
    let unusable = verify(&fabric, &good, &leaves_only).expect_err("the spine is no node");
    assert_eq!(unusable, Violation::Unusable { name: "spine0".into(), reason: Refusal::NoDevice });
}

/// A generated fabric, some of its cables between switches failed.
fn any_fabric() -> impl Strategy<Value = Fabric> {
    let shapes = prop_oneof![
        (1usize..7, 1usize..5, 1usize..6, 1usize..4).prop_map(|(l, s, h, c)| leaf_spine(l, s, h, c)),
        prop_oneof![Just(2usize), Just(4), Just(6)].prop_map(|k| Fabric::fat_tree(k, None).expect("a possible shape")),
    ];
    (shapes, proptest::collection::btree_set(0usize..200, 0..8)).prop_map(|(fabric, failed)| {
        let between: BTreeSet<LinkId> =
            fabric.switch_ids().flat_map(|s| fabric.adjacent(s).iter().map(|l| l.1)).collect();
        fabric
            .without_links(&between.into_iter().enumerate().filter(|(i, _)| failed.contains(i)).map(|l| l.1).collect())
    })
}

/// A choice of hosts by name, in any order; never empty.
fn any_hosts(fabric: &Fabric, seed: &[usize]) -> HostSelection {
    let picked: BTreeSet<usize> = seed.iter().map(|index| index % fabric.hosts().len()).collect();
    let mut names: Vec<String> = picked.iter().map(|index| fabric.hosts()[*index].name.clone()).collect();
    names.rotate_left(seed[0] % picked.len());
    HostSelection::Named(names)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn plans_verify_and_repeat(
        fabric in any_fabric(),
        seed in proptest::collection::vec(0usize..1000, 1..40),
        max_children in 2usize..12,
    ) {
        let hosts = any_hosts(&fabric, &seed);
        for limits in [Limits::default(), at_most(max_children)] {
            match plan(&fabric, &hosts, &limits) {
                Ok(plan) => {
                    prop_assert_eq!(verify(&fabric, &plan, &limits), Ok(()));
                    prop_assert_eq!(super::plan(&fabric, &hosts, &limits), Ok(plan));
                }
                Err(PlanError::Disconnected { .. }) => {}
                Err(PlanError::ChildLimit { children, limit, .. }) => prop_assert!(children > limit),
                Err(error) => prop_assert!(false, "{}", error),
            }
        }
    }
}
