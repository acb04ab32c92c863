//! What explanations say.

use super::*;
use crate::plan::index::FabricIndex;
use crate::schedule::{ALGORITHMS, Algorithm as Schedules, Pattern};
use crate::topo::generate::{self, Dragonfly};
use sumac_hal::op::Path;

/// Plan up to so many trees and explain them.
fn explained(fabric: &Fabric, limits: &Limits) -> (Trees, Explanation) {
    let planner = Planner::new(fabric);
    let trees = planner.plan_trees(&HostSelection::All, limits, 1).expect("a tree");
    let explanation = planner.explain(&HostSelection::All, limits, (&trees, Some(Shape::Line))).expect("explained");
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
    closed("rd", 3, 3.0);
    closed("hd", 6, 2.0 * 7.0 / 8.0);
    let tree = algorithm(&explanation, "tree");
    assert_eq!((tree.steps, tree.times.len()), (2, 28));
    for (bytes, seconds) in &trees.trees[0].plan.prediction.times {
        let explained = tree.times.iter().find(|time| time.bytes == *bytes).expect("a power of two");
        assert!((explained.seconds / seconds - 1.0).abs() < 1e-9, "{bytes}");
    }
    let load = |name: &str| algorithm(&explanation, name).load.expect("no tree");
    assert!((load("ring") - 1.75).abs() < 1e-9 && (load("rd") - 3.0).abs() < 1e-9, "{explanation:?}");
    assert_eq!(explanation.crossings, [Crossing { from_bytes: 8, algorithm: "tree".into() }]);
    // Two steps more: three ranks are beyond eight.
    let (_, odd) = explained(&leaf_spine(1, 0, 11, 1), &Limits::default());
    assert_eq!((algorithm(&odd, "rd").steps, algorithm(&odd, "hd").steps), (5, 8));
}

/// Where schedules are of the forms above, counting their messages finds the same.
#[test]
fn algorithms_counted_by_schedule_agree_with_their_closed_forms() {
    for fabric in [leaf_spine(1, 0, 8, 1), leaf_spine(4, 2, 2, 1), leaf_spine(8, 2, 2, 1)] {
        let trees = Planner::new(&fabric).plan_trees(&HostSelection::All, &Limits::default(), 1).expect("a tree");
        let (plan, pricing, index) = (&trees.trees[0].plan, Pricing::default(), FabricIndex::new(&fabric));
        let places: Vec<usize> = (0..plan.ranks.len()).collect();
        let mut job = ring::Job::new(&fabric, &index, (plan, &places), &pricing);
        let closed = ring::algorithms(&mut job).expect("connected");
        let counted = counted::counted(&mut job, Shape::Line, &[], f64::INFINITY).expect("connected");
        for form in &closed {
            let found = counted.iter().find(|one| one.path == form.path).expect("counted");
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-3;
            assert_eq!(found.steps(), form.steps(), "{}", form.path);
            assert!(near(found.byte_s(), form.byte_s()) && near(found.load(), form.load()), "{found:?}, not {form:?}");
            for bytes in [8, 1 << 20] {
                assert!(near(found.seconds(bytes, &pricing), form.seconds(bytes, &pricing)), "{found:?}, not {form:?}");
            }
        }
        // All but those of several dimensions.
        let is_for_lines = |one: &&Schedules| one.pattern == Pattern::AllReduce && !one.needs_dimensions();
        assert_eq!(counted.len(), ALGORITHMS.iter().filter(is_for_lines).count());
    }
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

/// Of groups of 20, 256 ranks send fewer bytes between groups by Bine's butterfly than by halving-doubling, and more of
/// aligned groups of 16 (De Sensi et al., "Bine trees", SC 2025). Here all ranks of a group share its cables.
#[test]
fn bytes_between_groups_decide_between_butterflies() {
    let times = |(routers, global, hosts): (usize, usize, usize)| {
        let shape = Dragonfly { routers, global, hosts, rate: Rate::from_gbits(100.0) };
        let fabric = generate::dragonfly(shape).expect("a possible shape");
        let planner = Planner::new(&fabric);
        let plan = planner.plan(&HostSelection::First(256), &Limits::default()).expect("a tree");
        let places: Vec<usize> = (0..256).collect();
        let times = planner.cable_times(&plan, &Limits::default(), (&places, Shape::Line)).expect("rates are known");
        times.schedule_s(Path::Bine) / times.schedule_s(Path::HalvingDoubling)
    };
    for of_20 in [(20, 1, 1), (10, 2, 2)] {
        assert!(times(of_20) < 0.8, "{of_20:?}: {}", times(of_20));
    }
    for of_16 in [(16, 1, 1), (2, 8, 8)] {
        assert!(times(of_16) > 1.1, "{of_16:?}: {}", times(of_16));
    }
}
