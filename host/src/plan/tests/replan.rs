//! Plans after failures.

use super::*;

/// Plan, remove cables, and plan again with up to so much more time; return both and the moves.
fn replanned(fabric: &Fabric, failed: &[(&str, &str)], limits: &Limits, slack: f64) -> (Plan, Plan, Vec<Move>) {
    let before = planned(fabric, HostSelection::All, limits);
    let mut links = BTreeSet::new();
    for (a, b) in failed {
        let ends = [fabric.find_switch(a).expect("a switch"), fabric.find_switch(b).expect("a switch")];
        let between = fabric.adjacent(ends[0]).iter().find(|(next, _)| *next == ends[1]).expect("a cable");
        links.insert(between.1);
    }
    let rest = fabric.without_links(&links);
    let after = Planner::new(&rest).replan(&HostSelection::All, limits, &before, slack).expect("a tree");
    verify(&rest, &after, limits).unwrap_or_else(|error| panic!("{error}\n{}", after.to_text()));
    let moves = after.moves_from(&before);
    (before, after, moves)
}

#[test]
fn failed_cable_moves_one_child() {
    let fabric = leaf_spine(6, 3, 4, 1);
    let (before, after, moves) = replanned(&fabric, &[("leaf2", "spine0")], &Limits::default(), 0.25);
    assert_eq!((before.root().name.as_str(), after.root().name.as_str()), ("spine0", "spine0"));
    let [only] = &moves[..] else { panic!("{moves:?}") };
    assert_eq!((only.child.as_str(), only.from.as_deref()), ("leaf2", Some("spine0")));
    // Without slack, the fastest tree has another root, and all children of the root move.
    let (_, fastest, moves) = replanned(&fabric, &[("leaf2", "spine0")], &Limits::default(), 0.0);
    assert_eq!((fastest.root().name.as_str(), moves.len()), ("spine1", 6));
    assert!(fastest.prediction.times[0].1 < after.prediction.times[0].1);
}

#[test]
fn nothing_moves_if_nothing_of_the_tree_has_failed() {
    let fabric = leaf_spine(6, 3, 4, 1);
    let (before, after, moves) = replanned(&fabric, &[("leaf2", "spine1")], &Limits::default(), 0.0);
    assert_eq!(moves, []);
    assert_eq!(after.nodes.len(), before.nodes.len());
}

#[test]
fn lost_root_is_planned_anew() {
    let fabric = leaf_spine(3, 2, 2, 1);
    let all = [("leaf0", "spine0"), ("leaf1", "spine0"), ("leaf2", "spine0")];
    let (_, after, moves) = replanned(&fabric, &all, &Limits::default(), 0.25);
    assert_eq!((after.root().name.as_str(), moves.len()), ("spine1", 3));
}

#[test]
fn lost_host_moves_no_other() {
    let fabric = leaf_spine(4, 2, 2, 1);
    let limits = Limits::default();
    let before = planned(&fabric, HostSelection::All, &limits);
    let rest = HostSelection::Named((1..8).map(|host| format!("h{host}")).collect());
    let after = Planner::new(&fabric).replan(&rest, &limits, &before, 0.0).expect("a tree");
    assert_eq!(verify(&fabric, &after, &limits), Ok(()));
    let moves = after.moves_from(&before);
    assert!(matches!(&moves[..], [one] if one.child == "h0" && one.to.is_none()), "{moves:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn repaired_trees_verify_and_keep_within_the_slack(
        (leaves, spines, cables) in (2usize..6, 1usize..4, 1usize..3),
        failed in proptest::collection::btree_set((0u32..60).prop_map(LinkId), 1..8),
        slack in 0.0f64..0.5,
    ) {
        let whole = leaf_spine(leaves, spines, 2, cables);
        let limits = Limits::default();
        let before = planned(&whole, HostSelection::All, &limits);
        let between = |id: &LinkId| whole.hosts().iter().all(|host| host.uplinks[0].link != *id);
        let rest = whole.without_links(&failed.into_iter().filter(between).collect());
        let planner = Planner::new(&rest);
        match (planner.plan(&HostSelection::All, &limits), planner.replan(&HostSelection::All, &limits, &before, slack)) {
            (Ok(best), Ok(near)) => {
                prop_assert_eq!(verify(&rest, &near, &limits), Ok(()));
                let mean = |plan: &Plan| (plan.prediction.times[0].1 * plan.prediction.times[1].1).sqrt();
                prop_assert!(mean(&near) <= mean(&best) * (1.0 + slack) * (1.0 + 1e-9));
                let moves = |plan: &Plan| plan.moves_from(&before).len();
                prop_assert!(slack > 0.0 || moves(&near) <= moves(&best));
            }
            (Err(best), Err(near)) => prop_assert_eq!(best, near),
            (best, near) => prop_assert!(false, "{best:?}, but {near:?}"),
        }
    }
}
