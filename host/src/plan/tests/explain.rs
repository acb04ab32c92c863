//! What explanations say.

use super::*;

/// Plan up to so many trees and explain them.
fn explained(fabric: &Fabric, limits: &Limits) -> (Trees, Explanation) {
    let planner = Planner::new(fabric);
    let trees = planner.plan_trees(&HostSelection::All, limits, 1).expect("a tree");
    let explanation = planner.explain(&HostSelection::All, limits, &trees).expect("explained");
    (trees, explanation)
}

fn algorithm<'a>(explanation: &'a Explanation, name: &str) -> &'a Algorithm {
    explanation.algorithms.iter().find(|one| one.name == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn algorithms_have_the_steps_and_times_of_their_closed_forms() {
    // One switch: each message crosses two cables, and no cable carries two.
    let fabric = leaf_spine(1, 0, 8, 1);
    let (trees, explanation) = explained(&fabric, &Limits::default());
    let costs = FabricCosts::DATA_SHEET;
    let (latency, byte_s) = (2.0 * costs.host_s + 2.0 * costs.cable_s, 8e-9 / 400.0);
    let closed = |name: &str, steps: u64, part: f64| {
        let one = algorithm(&explanation, name);
        assert_eq!(one.steps, steps, "{name}");
        for time in &one.times {
            let expected = steps as f64 * latency + time.bytes as f64 * part * byte_s;
            assert!((time.seconds / expected - 1.0).abs() < 1e-9, "{name} {}: {}", time.bytes, time.seconds);
        }
    };
    closed("ring", 14, 2.0 * 7.0 / 8.0);
    closed("recursive doubling", 3, 3.0);
    closed("halving-doubling", 6, 2.0 * 7.0 / 8.0);
    let tree = algorithm(&explanation, "tree");
    assert_eq!((tree.steps, tree.times.len()), (2, 28));
    for (bytes, seconds) in &trees.trees[0].plan.prediction.times {
        let explained = tree.times.iter().find(|time| time.bytes == *bytes).expect("a power of two");
        assert!((explained.seconds / seconds - 1.0).abs() < 1e-9, "{bytes}");
    }
    assert_eq!(explanation.crossings, [Crossing { from_bytes: 8, algorithm: "tree".into() }]);
    // Two steps more: three ranks are beyond eight.
    let (_, odd) = explained(&leaf_spine(1, 0, 11, 1), &Limits::default());
    assert_eq!((algorithm(&odd, "recursive doubling").steps, algorithm(&odd, "halving-doubling").steps), (5, 8));
}

#[test]
fn crossing_is_where_another_way_becomes_faster() {
    let fabric = leaf_spine(8, 4, 8, 1);
    let (_, explanation) = explained(&fabric, &aggregating_at(&fabric, &["leaf3"]));
    let [first, .., last] = &explanation.crossings[..] else { panic!("{:?}", explanation.crossings) };
    assert_eq!((first.algorithm.as_str(), first.from_bytes), ("tree", 8));
    assert_ne!(last.algorithm, "tree", "a single device takes in all at few cables");
    let at = |name: &str, bytes: u64| {
        algorithm(&explanation, name).times.iter().find(|time| time.bytes == bytes).expect("a power of two").seconds
    };
    assert!(at(&last.algorithm, last.from_bytes) < at("tree", last.from_bytes));
    let text = explanation.to_text();
    assert!(text.contains("fastest: tree from 8 B, ") && text.contains("1 GiB"), "{text}");
}

#[test]
fn other_roots_are_told_with_the_reason_why_they_lost() {
    let fabric = slow_and_fast_spine();
    let (trees, explanation) = explained(&fabric, &Limits::default());
    assert_eq!(trees.trees[0].plan.root().name, "spine1");
    let slow = explanation.roots.iter().find(|other| other.root == "spine0").expect("it was considered");
    assert!(slow.factor.is_none_or(|factor| factor > 2.0) && !slow.reason.is_empty(), "{slow:?}");
    let leaf = explanation.roots.iter().find(|other| other.root == "leaf0").expect("it was considered");
    assert!(leaf.factor.is_some_and(|factor| factor > 1.0), "{leaf:?}");
    assert!(leaf.reason.contains("times as long for"), "{leaf:?}");
    let json = serde_json::to_value(&explanation).expect("JSON");
    assert_eq!(json["algorithms"][0]["times"][0]["bytes"], 8);
    assert_eq!(json["roots"].as_array().map(Vec::len), Some(explanation.roots.len()));
}
