//! Algorithms in segments: as many as the cost picks, and forced by counts that cut them in every way.

use super::*;
use crate::schedule::combinations::Profile;
use crate::schedule::{chain, double_tree};

/// The formulas are bounds for any count; where all segments are equal, a chain's are exact, but for the path of its
/// all-reduce.
#[test]
fn costs_of_chains_are_exact_where_segments_are_equal() {
    for ranks in [2, 3, 4, 7, 16, 33_u32] {
        for count in [1 << 10, 1 << 16, 1 << 20, 3 << 20] {
            let k = chain::segments(ranks, count);
            let count = count.next_multiple_of(k as usize);
            if chain::segments(ranks, count) != k {
                continue;
            }
            for name in ["chain::all_reduce", "chain::reduce", "chain::broadcast"] {
                let algorithm = named(name);
                let cost = algorithm.cost(ranks, Shape::Line, count);
                let root = Rank(if algorithm.pattern.is_rooted() { ranks / 2 } else { 0 });
                let schedules = schedules(algorithm, ranks, count, root);
                let report = check(Goal::of(algorithm.pattern, root), &schedules).expect("proved");
                let rounds = crate::schedule::rounds::rounds(&schedules, count).expect("one collective").len();
                let what = format!("{name}, {ranks} ranks, {count} in {k}: {} {cost:?}", figures(&report));
                assert_eq!(rounds as f64, cost.steps, "{what}");
                // Few segments of an all-reduce meet those on the way back at few ranks.
                let least = match algorithm.pattern {
                    Pattern::AllReduce => cost.steps * count as f64 / f64::from(k),
                    _ => cost.path_elements,
                };
                let path = report.path_elements as f64;
                assert!(path <= cost.path_elements + 1.0 && path >= least - 1.0, "{what}");
                assert_eq!(report.reduced_elements_max as f64, cost.reduced_elements, "{what}");
                assert_eq!(report.sent_elements_max as f64, cost.sent_elements, "{what}");
                assert_eq!(report.messages as f64, cost.messages, "{what}");
                assert_eq!(report.moved_elements as f64, cost.moved_elements, "{what}");
                assert!(report.extra_messages as f64 <= cost.extra_messages, "{what}");
            }
        }
    }
}

#[test]
fn chains_fold_from_the_left() {
    for ranks in 2..=9_u32 {
        let [fold, pairs] = ORDERS.map(|order| Tree::flat(ranks, order).expect("a tree"));
        let all_reduce = named("chain::all_reduce");
        evaluates(all_reduce, &fold, Shape::Line).expect("a fold");
        assert_eq!(evaluates(all_reduce, &pairs, Shape::Line).is_ok(), ranks <= 3, "{ranks}");
        // Several segments have the same expression as one.
        let report = check(Goal::AllReduce, &schedules(all_reduce, ranks, 1 << 18, Rank(0)));
        let mut report = report.expect("proved");
        let declared = report.expressions.of_tree(&fold);
        assert!(report.blocks.iter().all(|&(_, computed)| Some(computed) == declared), "{ranks}");
        // The order of a reduction depends on its root, so selection takes none in a declared order.
        let of_root = |root: u32| {
            let report =
                check(Goal::Reduce { root: Rank(root) }, &schedules(named("chain::reduce"), ranks, 9, Rank(root)));
            let report = report.expect("proved");
            report.expressions.to_text(report.blocks[0].1)
        };
        assert_eq!(
            of_root(ranks - 1),
            fold.evaluate(|rank| rank.0.to_string(), |left, right| format!("({left}+{right})"))
        );
        assert_eq!(evaluates(named("chain::reduce"), &fold, Shape::Line).is_ok(), ranks == 2, "{ranks}");
    }
}

/// Large messages of every declared expression, each in several segments.
#[test]
fn declared_expressions_in_segments_are_evaluated_for_every_root() {
    let mut cut = [0, 0];
    for ranks in 2..=64_u32 {
        for order in ORDERS {
            let widths = [&[][..], &[2, 2, 2, 2, 2, 2], &[4], &[3, 5]];
            for widths in &widths[if ranks <= 24 { 0..4 } else { ranks as usize % 3..ranks as usize % 3 + 1 }] {
                let tree = Tree::new(layered(ranks, widths), ranks, order).expect("a tree");
                // Segments that do not divide it.
                let count = (1 << 20) + 7;
                for (name, nth, segments) in [
                    ("tree::all_reduce", 0, tree.profile().segments_of_all_reduce(ranks, count)),
                    ("tree::reduce", 1, tree.profile().segments(count)),
                ] {
                    cut[nth] += usize::from(segments > 1);
                    let all_roots = if nth == 0 { vec![Rank(0)] } else { roots(ranks) };
                    for root in all_roots {
                        assert_evaluated(named(name), &tree, count, root);
                    }
                }
            }
        }
    }
    assert!(cut.iter().all(|&cut| cut > 150), "{cut:?}");
}

fn assert_evaluated(algorithm: &Algorithm, tree: &Tree, count: usize, root: Rank) {
    let part = |place| (algorithm.schedule)(&Problem { place, count, root, tree, shape: Shape::Line });
    let schedules: Vec<_> = Place::all(tree.ranks()).map(part).collect();
    let report = check(Goal::of(algorithm.pattern, root), &schedules);
    let mut report = report.unwrap_or_else(|error| panic!("{algorithm:?}, {tree:?}, {root}: {error}"));
    let declared = report.expressions.of_tree(tree);
    assert!(report.blocks.iter().all(|&(_, computed)| Some(computed) == declared), "{algorithm:?}, {tree:?}, {root}");
    let ranks = tree.ranks();
    let (ways, segments, width) = match algorithm.pattern {
        Pattern::AllReduce => (2.0, tree.profile().segments_of_all_reduce(ranks, count), tree.profile().width(ranks)),
        _ => (1.0, tree.profile().segments(count), Profile::WIDTH_MAX),
    };
    if segments > 1 {
        let (depth, k, n) = (f64::from(tree.profile().depth), f64::from(segments), count as f64);
        let path = ways * width * n * (1.0 + depth / k) + 4.0 * (ways * depth + k);
        let what = || format!("{algorithm:?}, {tree:?}, {root}: {} in {k}", figures(&report));
        assert!(report.path_elements as f64 <= path, "{}, {path}", what());
        assert!(report.sent_elements_max as f64 <= ways * width * n, "{}", what());
        let rounds = crate::schedule::rounds::rounds(&schedules, count).expect("one collective").len();
        assert!(rounds as f64 <= ways * depth + k, "{}: {rounds}", what());
    }
}

/// A cut of the bytes on the path must not be bought with more time by the model.
#[test]
fn segments_of_declared_expressions_are_cheaper_than_nodes() {
    let mut best = 1.0_f64;
    for ranks in [4, 8, 16, 64_u32] {
        for order in ORDERS {
            let tree = Tree::new(layered(ranks, &[4]), ranks, order).expect("a tree");
            for count in [1 << 12, 1 << 16, 1 << 20] {
                let path_of = |count: usize| {
                    let part = |place| crate::schedule::tree::reduce(place, count, &tree, Rank(0));
                    let schedules: Vec<_> = Place::all(ranks).map(part).collect();
                    check(Goal::Reduce { root: Rank(0) }, &schedules).expect("proved").path_elements as f64
                };
                // Node by node the path is as many messages as there are steps.
                let by_nodes = f64::from(tree.profile().steps) * count as f64;
                let path = path_of(count);
                assert!(path <= by_nodes, "{ranks} {order:?} {count}: {path}, {by_nodes}");
                best = best.max(by_nodes / path);
            }
        }
    }
    assert!(best > 1.5, "{best}");
}

#[test]
fn all_segmented_algorithms_are_planted_with_mistakes_in_several_segments() {
    let (ranks, count) = (6, 1 << 20);
    assert!(chain::segments(ranks, count) > 3 && double_tree::segments(ranks, count) > 3);
    for name in ["chain::all_reduce", "chain::reduce", "chain::broadcast", "double_tree::all_reduce"] {
        let algorithm = named(name);
        let good = schedules(algorithm, ranks, count, Rank(1));
        planted::assert_mistakes_are_found(algorithm, Goal::of(algorithm.pattern, Rank(1)), &good);
    }
    let tree = Tree::new(layered(ranks, &[3]), ranks, Order::TreePairwise).expect("a tree");
    assert!(tree.profile().segments(count) > 3 && tree.profile().segments_of_all_reduce(ranks, count) > 1);
    for name in ["tree::all_reduce", "tree::reduce"] {
        let algorithm = named(name);
        let part =
            |place| (algorithm.schedule)(&Problem { place, count, root: Rank(1), tree: &tree, shape: Shape::Line });
        let good: Vec<_> = Place::all(ranks).map(part).collect();
        planted::assert_mistakes_are_found(algorithm, Goal::of(algorithm.pattern, Rank(1)), &good);
    }
}

#[test]
fn chains_are_no_other_algorithm() {
    for pattern in [Pattern::AllReduce, Pattern::Reduce, Pattern::Broadcast] {
        let of = |algorithm: &Algorithm| {
            [8, 9].map(|ranks| {
                schedules(algorithm, ranks, 1 << 20, Rank(if algorithm.pattern.is_rooted() { 2 } else { 0 }))
            })
        };
        let all = || ALGORITHMS.iter().filter(|algorithm| algorithm.pattern == pattern);
        let chain = all().find(|algorithm| algorithm.path() == Path::Chain).expect("in the table");
        for other in all().filter(|algorithm| algorithm.name != chain.name) {
            assert!(of(chain) != of(other), "{chain:?} is {other:?}");
        }
    }
}
