//! Plans against the optimum by brute force.

use super::*;

/// A small fabric without rule: up to 6 switches in a random graph with cables of several rates, up to 5 hosts
/// anywhere, no device at some of the other switches.
fn any_small_fabric() -> impl Strategy<Value = Fabric> {
    let edges = proptest::collection::vec((0usize..6, 0usize..6, 0usize..4), 4..9);
    let hosts = proptest::collection::vec((0usize..6, 0usize..3), 1..6);
    (edges, hosts, proptest::collection::vec(any::<bool>(), 6)).prop_map(|(edges, hosts, devices)| {
        let mut toml = String::new();
        for (switch, device) in devices.iter().enumerate() {
            let aggregation = *device || hosts.iter().any(|(at, _)| *at == switch);
            toml += &format!("[[switch]]\nname = \"s{switch}\"\naggregation = {aggregation}\n");
        }
        for (host, (at, rate)) in hosts.into_iter().enumerate() {
            let rate = [100.0, 100.0, 25.0][rate];
            toml += &format!(
                "[[host]]\nname = \"h{host}\"\n[[link]]\nends = [\"h{host}\", \"s{at}\"]\nrate_gbits = {rate}\n"
            );
        }
        for (a, b, rate) in edges.into_iter().filter(|(a, b, _)| a != b) {
            let rate = [2.5, 100.0, 100.0, 400.0][rate];
            toml += &format!("[[link]]\nends = [\"s{a}\", \"s{b}\"]\nrate_gbits = {rate}\n");
        }
        Fabric::from_toml(&toml).expect("valid")
    })
}

/// Compare the plans for a small and a large message with the optimum by cost.
fn compare_with_brute_force(fabric: &Fabric, hosts: &HostSelection) -> Result<(), TestCaseError> {
    for bytes in [Size::SMALL, Size::LARGE] {
        let limits = sized(bytes);
        let optimum = brute::optimum(fabric, &hosts.resolve(fabric).expect("known hosts"), &limits, bytes);
        match (plan(fabric, hosts, &limits), optimum) {
            (Ok(plan), Some(optimum)) => {
                prop_assert_eq!(verify(fabric, &plan, &limits), Ok(()));
                let factor = plan.prediction.times[0].1 / optimum;
                prop_assert!(factor > 1.0 - 1e-9, "{factor} of the optimum: one of the two is wrong");
                prop_assert!(!plan.optimal || factor < 1.0 + 1e-9, "claims to be optimal, takes {factor}");
                prop_assert!(factor < 1.1, "takes {factor} of the optimum: {}", plan.to_text());
                prop_assert!(factor <= (1.0 + plan.gap) * (1.0 + 1e-9), "{factor} is beyond the gap {}", plan.gap);
            }
            // Only routes that go down and up again connect all.
            (Ok(plan), None) => prop_assert_eq!(plan.routing, Routing::Shortest),
            (Err(PlanError::Disconnected { .. }), None) => {}
            (plan, optimum) => prop_assert!(false, "{plan:?}, but the optimum is {optimum:?}"),
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn leaf_spine_plans_are_optimal(
        (leaves, spines, cables) in (1usize..4, 1usize..3, 1usize..3),
        failed in proptest::collection::btree_set((0u32..40).prop_map(LinkId), 0..6),
        seed in proptest::collection::vec(0usize..100, 1..6),
    ) {
        let whole = leaf_spine(leaves, spines, 2, cables);
        let between = |id: &LinkId| whole.hosts().iter().all(|host| host.uplinks[0].link != *id);
        let fabric = whole.without_links(&failed.into_iter().filter(between).collect());
        compare_with_brute_force(&fabric, &any_hosts(&fabric, &seed))?;
    }

    #[test]
    fn plans_claimed_optimal_match_brute_force(fabric in any_small_fabric()) {
        compare_with_brute_force(&fabric, &HostSelection::All)?;
        // Several trees are feasible together, and no slower than one.
        let limits = sized(Size::LARGE);
        if let Ok(trees) = Planner::new(&fabric).plan_trees(&HostSelection::All, &limits, 4) {
            prop_assert_eq!(verify_trees(&fabric, &trees, &limits), Ok(()));
            let one = trees.trees[0].plan.prediction.times[0].1;
            prop_assert!(trees.times[0].1 <= one * (1.0 + 1e-9), "{} s, and {one} s alone", trees.times[0].1);
        }
    }
}

#[test]
fn forwarding_device_is_the_way_around_a_slow_cable() {
    // s0 has one child where s3 is the root: without it, all would go over the slow cable.
    let toml = "switch = [{ name = \"s0\", aggregation = true }, { name = \"s1\", aggregation = true },\n\
                { name = \"s3\", aggregation = true }, { name = \"s5\" }]\n\
                host = [{ name = \"h0\" }, { name = \"h1\" }]\n\
                link = [{ ends = [\"s0\", \"s5\"], rate_gbits = 100 }, { ends = [\"s0\", \"s3\"], rate_gbits = 100 },\n\
                { ends = [\"s1\", \"h0\"], rate_gbits = 100 }, { ends = [\"s1\", \"s3\"], rate_gbits = 2.5 },\n\
                { ends = [\"s1\", \"s5\"], rate_gbits = 100 }, { ends = [\"s3\", \"h1\"], rate_gbits = 25 }]\n";
    let fabric = Fabric::from_toml(toml).expect("valid");
    let plan = planned(&fabric, HostSelection::All, &sized(Size::LARGE));
    assert_eq!((plan.root().name.as_str(), plan.levels), ("s3", 3));
    compare_with_brute_force(&fabric, &HostSelection::All).expect("the optimum");
}

#[test]
fn edges_share_the_cable_where_they_cost_least() {
    // Three edges over two cables between s3 and s0: the one of h3, whose cable is slow, gets one for itself.
    let toml = "switch = [{ name = \"s0\", aggregation = true }, { name = \"s1\", aggregation = true },\n\
                { name = \"s2\", aggregation = true }, { name = \"s3\", aggregation = true },\n\
                { name = \"s5\", aggregation = true }]\n\
                host = [{ name = \"h0\" }, { name = \"h1\" }, { name = \"h2\" }, { name = \"h3\" }]\n\
                link = [{ ends = [\"s0\", \"s2\"], rate_gbits = 2.5 }, { ends = [\"s0\", \"s3\"], rate_gbits = 100 },\n\
                { ends = [\"s0\", \"s3\"], rate_gbits = 100 }, { ends = [\"s1\", \"h0\"], rate_gbits = 100 },\n\
                { ends = [\"s1\", \"s3\"], rate_gbits = 100 }, { ends = [\"s2\", \"h1\"], rate_gbits = 100 },\n\
                { ends = [\"s3\", \"h2\"], rate_gbits = 100 }, { ends = [\"s3\", \"s5\"], rate_gbits = 100 },\n\
                { ends = [\"s5\", \"h3\"], rate_gbits = 25 }]\n";
    let fabric = Fabric::from_toml(toml).expect("valid");
    compare_with_brute_force(&fabric, &HostSelection::All).expect("the optimum");
}
