//! Every algorithm that uses a shape, proved in every shape of 1..=64 ranks and compared with its closed form.

use super::*;
use crate::schedule::{DIMENSIONS_MAX, Dims};
use std::num::NonZeroU32;

/// The algorithms that use a shape.
pub(super) fn shaped() -> impl Iterator<Item = &'static Algorithm> {
    let uses_shape = |path| matches!(path, Path::Swing | Path::SwingLatency);
    ALGORITHMS.iter().filter(move |algorithm| algorithm.needs_dimensions() || uses_shape(algorithm.path()))
}

pub(super) fn grid(extents: &[u32]) -> Shape {
    Shape::grid(extents).expect("a grid")
}

/// Every list of up to four factors of `ranks`, each at least 2, in every order.
pub(super) fn factorisations(ranks: u32) -> Vec<Vec<u32>> {
    let mut found = Vec::new();
    let mut open = vec![(Vec::new(), ranks)];
    while let Some((extents, rest)) = open.pop() {
        if rest == 1 {
            found.extend((!extents.is_empty()).then_some(extents));
            continue;
        }
        for extent in (2..=rest).filter(|&extent| rest.is_multiple_of(extent) && extents.len() < DIMENSIONS_MAX) {
            open.push(([&extents[..], &[extent]].concat(), rest / extent));
        }
    }
    found
}

fn prove_in(shape: Shape, algorithm: &Algorithm, ranks: u32, count: usize) -> Report {
    let schedules = schedules_in(shape, algorithm, ranks, count, Rank(0));
    let report = check(Goal::of(algorithm.pattern, Rank(0)), &schedules)
        .unwrap_or_else(|error| panic!("{algorithm:?}, {shape}, {count} elements: {error}"));
    compare_cost(algorithm, (ranks, shape), count, Rank(0), &report);
    report
}

#[test]
fn shaped_algorithms_are_correct_and_match_their_cost_formulas_in_every_shape() {
    let mut shapes = 0;
    for ranks in 2..=64 {
        let p = ranks as usize;
        for (nth, extents) in factorisations(ranks).into_iter().enumerate() {
            // Counts that do not divide, fewer elements than ranks, none; one that divides by every share.
            let all = [7 * p + 3, 24 * p, p - 1, 0, 1, p];
            let counts = match (ranks, extents.len()) {
                (..=16, _) => all.to_vec(),
                (_, 2) => vec![all[0], all[1], all[2 + nth % 4]],
                _ => vec![all[nth % 3]],
            };
            for algorithm in shaped().filter(|_| extents.len() > 1) {
                for &count in &counts {
                    prove_in(grid(&extents), algorithm, ranks, count);
                }
            }
            shapes += usize::from(extents.len() > 1);
        }
    }
    assert!(shapes > 300, "{shapes}");
}

#[test]
fn factorisations_are_all_there_are() {
    assert_eq!(factorisations(6), [vec![6], vec![3, 2], vec![2, 3]]);
    // The compositions of 6 into up to four parts.
    assert_eq!(factorisations(64).len(), 1 + 5 + 10 + 10);
}

/// Ranks that run in place send and receive the same messages as others, so both can be in one call.
#[test]
fn hierarchical_all_to_all_runs_in_place_on_any_ranks() {
    use crate::schedule::hierarchical_pairwise::{all_to_all, all_to_all_in_place};
    for ranks in 1..=24_u32 {
        for extents in factorisations(ranks) {
            for each in [0, 1, 7] {
                // The orders of the pairwise exchange of a line differ.
                let is_mixed = extents.len() > 1;
                for in_place in &[[true, true], [true, false], [false, true]][..if is_mixed { 3 } else { 1 }] {
                    let part = |place: Place| match in_place[place.rank().0 as usize % 2] {
                        true => all_to_all_in_place(place, each, grid(&extents)),
                        false => all_to_all(place, each * ranks as usize, grid(&extents)),
                    };
                    let schedules: Vec<_> = Place::all(ranks).map(part).collect();
                    check(Goal::AllToAll, &schedules).unwrap_or_else(|error| panic!("{extents:?} x {each}: {error}"));
                }
            }
        }
    }
}

/// The closed forms of the papers, written out for two dimensions.
#[test]
fn counts_of_two_dimensions_match_the_papers() {
    for (a, c) in [(2, 2), (3, 5), (4, 8), (6, 4)] {
        let (ranks, count) = (a * c, 240 * (a * c) as usize);
        let all_but_a_block = (count - count / ranks as usize) as u64;
        for (name, steps) in [
            ("ring_2d::all_reduce", 2 * (a - 1) + 2 * (c - 1)),
            ("torus_2d::all_reduce", 2 * (a - 1) + 2 * (c - 1)),
            ("hierarchical_ring::all_reduce", 2 + 2 * (a - 1)),
        ] {
            let report = prove_in(grid(&[a, c]), named(name), ranks, count);
            assert_eq!(report.steps as u32, steps, "{name} {a}x{c}");
            assert_eq!(report.sent_elements_max, 2 * all_but_a_block, "{name} {a}x{c}");
            assert_eq!(report.path_elements, 2 * all_but_a_block, "{name} {a}x{c}");
            assert_eq!(report.reduced_elements_max, all_but_a_block, "{name} {a}x{c}");
        }
        let exchanged = prove_in(grid(&[a, c]), named("hierarchical_pairwise::all_to_all"), ranks, count);
        let sent = (count - count / c as usize + count - count / a as usize) as u64;
        assert_eq!((exchanged.steps as u32, exchanged.sent_elements_max), (1 + a - 1, sent), "{a}x{c}");
        assert_eq!(exchanged.messages, u64::from(ranks * (c - 1 + a - 1)), "{a}x{c}: a message for each other server");
        let report = prove_in(grid(&[a, c]), named("mesh_2d::reduce_scatter"), ranks, count);
        assert_eq!((report.steps as u32, report.sent_elements_max), (a - 1 + c - 1, all_but_a_block), "{a}x{c}");
    }
}

#[test]
fn planted_mistakes_are_found_in_every_shape() {
    for (extents, count) in [(&[2, 3][..], 600), (&[3, 3], 900), (&[4, 2], 640), (&[2, 2, 2], 960)] {
        for algorithm in shaped() {
            let good = schedules_in(grid(extents), algorithm, extents.iter().product(), count, Rank(0));
            planted::assert_mistakes_are_found(algorithm, Goal::of(algorithm.pattern, Rank(0)), &good);
        }
    }
}

/// No two names stand for the same schedules: of some number of ranks, or some shape of them, they differ.
#[test]
fn names_stand_for_different_schedules() {
    // Enough elements that bounded buffers bind.
    let problems = [(8, grid(&[4, 2])), (8, grid(&[2, 2, 2])), (8, Shape::Line), (5, Shape::Line), (3, Shape::Line)];
    let mut same = Vec::new();
    for (nth, algorithm) in ALGORITHMS.iter().enumerate() {
        let of = |algorithm: &'static Algorithm| {
            problems.map(|(ranks, shape)| schedules_in(shape, algorithm, ranks, 1 << 22, Rank(0)))
        };
        let is_other = |other: &&'static Algorithm| other.pattern == algorithm.pattern && of(algorithm) == of(other);
        same.extend(ALGORITHMS[..nth].iter().filter(is_other).map(|other| (other.name, algorithm.name)));
    }
    assert!(same.is_empty(), "{same:?}");
}

#[test]
fn dimensions_of_one_rank_change_nothing_and_servers_are_rows() {
    let of = |shape, algorithm| schedules_in(shape, algorithm, 12, 100, Rank(0));
    for algorithm in shaped() {
        let plain = of(grid(&[3, 4]), algorithm);
        assert!(of(Shape::Servers(NonZeroU32::new(4).expect("not 0")), algorithm) == plain, "{algorithm:?}");
        let has_rows = matches!(algorithm.path(), Path::HierarchicalRing | Path::HierarchicalPairwise);
        for extents in [&[1, 3, 4][..], &[3, 1, 4], &[3, 4, 1]] {
            // The last dimension is that of servers.
            let is_same = of(grid(extents), algorithm) == plain;
            assert_eq!(is_same, !has_rows || extents[2] == 4, "{algorithm:?} {extents:?}");
        }
        // What fits another number of ranks is a line.
        assert!(of(grid(&[2, 4]), algorithm) == of(Shape::Line, algorithm), "{algorithm:?}");
    }
    assert_eq!(Shape::Line.dims(12), Dims::new(&[12]).expect("a line"));
}

/// Each block has an order of its own, so none of them keeps a declared order.
#[test]
fn shaped_algorithms_keep_no_declared_order() {
    let reduces = |algorithm: &&Algorithm| algorithm.pattern.collective().reduces();
    for algorithm in shaped().filter(reduces).filter(|algorithm| algorithm.needs_dimensions()) {
        for order in ORDERS {
            let tree = Tree::flat(6, order).expect("a tree");
            evaluates(algorithm, &tree, grid(&[2, 3])).expect_err("another order");
        }
    }
}
