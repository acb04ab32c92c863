//! Every algorithm proved for 1..=64 ranks, its costs compared with the formulas, and its expression with the tree's.

mod hybrid;
mod mutations;
mod pipelines;
mod planted;
mod rab;
mod relayed;
mod server_step;
mod shapes;
mod sizes;

use super::*;
use crate::schedule::tree::Child;
use crate::schedule::{ALGORITHMS, Buffer, Landing, Layout, Pattern, pairwise, recursive_doubling};
use proptest::prelude::*;
use sumac_hal::ctrl::Order;
use sumac_hal::op::Path;

const ORDERS: [Order; 2] = [Order::TreeFold, Order::TreePairwise];

fn flat(ranks: u32) -> Tree {
    Tree::flat(ranks, Order::TreePairwise).expect("a tree")
}

fn named(name: &str) -> &'static Algorithm {
    Algorithm::named(name).expect("in the table")
}

fn schedules(algorithm: &Algorithm, ranks: u32, count: usize, root: Rank) -> Vec<Schedule> {
    schedules_in(Shape::Line, algorithm, ranks, count, root)
}

fn schedules_in(shape: Shape, algorithm: &Algorithm, ranks: u32, count: usize, root: Rank) -> Vec<Schedule> {
    let tree = flat(ranks);
    Place::all(ranks).map(|place| (algorithm.schedule)(&Problem { place, count, root, tree: &tree, shape })).collect()
}

fn counts(ranks: u32) -> Vec<usize> {
    let p = ranks as usize;
    let even = 64 * 63 * 10;
    match ranks {
        ..=16 => vec![0, 1, p - 1, p, p + 1, 7 * p + 3, even, 1_000_003],
        // The few in turn: they take longest.
        _ if ranks.is_multiple_of(2) => vec![p - 1, 7 * p + 3, even],
        _ => vec![0, 7 * p + 3, even],
    }
}

/// Every rank for small communicators; the first, the last and some in between for large ones.
fn roots(ranks: u32) -> Vec<Rank> {
    let mut roots: Vec<_> = if ranks <= 9 { (0..ranks).collect() } else { vec![0, 1, ranks / 2, ranks - 2, ranks - 1] };
    roots.dedup();
    roots.into_iter().map(Rank).collect()
}

#[test]
fn all_reduces_are_correct_and_match_their_cost_formulas() {
    prove(ALGORITHMS.iter().filter(|algorithm| algorithm.pattern == Pattern::AllReduce));
}

#[test]
fn other_algorithms_are_correct_and_match_their_cost_formulas() {
    prove(ALGORITHMS.iter().filter(|algorithm| algorithm.pattern != Pattern::AllReduce));
    assert!(Pattern::ALL.iter().all(|&pattern| ALGORITHMS.iter().any(|algorithm| algorithm.pattern == pattern)));
}

fn prove<'a>(algorithms: impl Iterator<Item = &'a Algorithm>) {
    for algorithm in algorithms {
        for ranks in 1..=64 {
            let roots = if algorithm.pattern.is_rooted() { roots(ranks) } else { vec![Rank(0)] };
            for root in roots {
                // All pairs for small communicators; for large ones any root once, and root 0 with any count.
                let counts = if ranks <= 9 || root == Rank(0) { counts(ranks) } else { vec![7 * ranks as usize + 3] };
                for count in counts {
                    let schedules = schedules(algorithm, ranks, count, root);
                    let report = check(Goal::of(algorithm.pattern, root), &schedules)
                        .unwrap_or_else(|error| panic!("{algorithm:?}, {ranks} ranks, {count} to {root}: {error}"));
                    compare_cost(algorithm, (ranks, Shape::Line), count, root, &report);
                }
            }
        }
    }
}

/// A report without its expressions, which are long.
fn figures(report: &Report) -> String {
    let Report { steps, sent_elements_max, messages, moved_elements, extra_messages, extra_pieces, .. } = report;
    let Report { reduced_elements_max, path_elements, .. } = report;
    format!(
        "steps {steps}, path {path_elements}, reduced {reduced_elements_max}, sent {sent_elements_max}, \
         messages {messages}, moved {moved_elements}, extra {extra_messages} and {extra_pieces}"
    )
}

fn compare_cost(algorithm: &Algorithm, (ranks, shape): (u32, Shape), count: usize, root: Rank, report: &Report) {
    let cost = algorithm.cost(ranks, shape, count);
    let block = count.div_ceil(ranks as usize) as f64;
    let full = ranks.next_power_of_two();
    let widest = f64::from(full - 1) * block;
    // Each with the most that another root than the cheapest can make of it.
    let found = [
        (report.path_elements, cost.path_elements, widest),
        (report.reduced_elements_max, cost.reduced_elements, widest),
        (report.sent_elements_max, cost.sent_elements, widest),
        (report.moved_elements, cost.moved_elements, f64::from(full * full.ilog2()) / 2.0 * block),
    ];
    let what = || format!("{algorithm:?}, {ranks} ranks, {count} elements, root {root}: {} {cost:?}", figures(report));
    // A run of blocks that wraps around the last one is two pieces, and what folds is a message of its own.
    assert!(report.extra_messages as f64 <= cost.extra_messages + cost.steps, "{}", what());
    assert!(report.extra_pieces as f64 <= cost.extra_pieces + cost.steps, "{}", what());
    // The formulas are for the cheapest root.
    let is_bound = cost.is_bound || root != Rank(0);
    if is_bound {
        assert!(report.steps as f64 <= cost.steps, "{}", what());
        for (found, formula, widest) in found {
            let bound = match cost.is_bound {
                true => formula,
                // The all-gather comes on top of the scatter.
                false if algorithm.path() == Path::VanDeGeijn => formula + widest,
                false => formula.max(widest),
            };
            assert!(found as f64 <= bound + 2.0 * cost.steps, "{}", what());
        }
        return;
    }
    assert_eq!(report.steps as f64, cost.steps, "{}", what());
    assert_eq!(report.messages as f64, cost.messages, "{}", what());
    let floor = 1 << ranks.ilog2();
    let shares = match algorithm.path() {
        Path::Swing | Path::Torus2d => 2 * shape.dims(ranks).as_slice().len(),
        _ => 1,
    };
    let is_even = count.is_multiple_of(ranks as usize * shares) && count.is_multiple_of(floor * shares);
    let slack = if is_even { 1e-6 } else { cost.steps + cost.extra_messages + cost.extra_pieces + f64::from(ranks) };
    for (found, formula, _) in found {
        assert!((found as f64 - formula).abs() <= slack * formula.max(1.0).log2().max(1.0), "{}", what());
    }
}

/// Steps are read by their index, stored or computed: the executor looks ahead, and begins again.
#[test]
fn steps_are_the_same_in_any_order_and_stored() {
    for algorithm in ALGORITHMS {
        for (ranks, shape) in [(1, Shape::Line), (7, Shape::Line), (12, Shape::grid(&[3, 4]).expect("a grid"))] {
            for schedule in schedules_in(shape, algorithm, ranks, 60_000, Rank(ranks - 1)) {
                let stored = schedule.clone().stored();
                assert_eq!((stored == schedule, stored.messages()), (true, schedule.messages()), "{algorithm:?}");
                let (mut ours, mut theirs) = (StepBuffer::default(), StepBuffer::default());
                for index in (0..=schedule.len()).rev() {
                    let (computed, stored) = (schedule.step(index, &mut ours), stored.step(index, &mut theirs));
                    assert_eq!(computed, stored, "{algorithm:?}, step {index} of {:?}", schedule.place());
                }
            }
        }
    }
}

#[test]
fn recursive_doubling_of_separate_buffers_copies_nothing_and_gives_the_same_bits() {
    for ranks in 2..=64_u32 {
        let apart: Vec<_> = Place::all(ranks).map(|place| recursive_doubling::all_reduce_apart(place, 10)).collect();
        let locals = |schedule: &Schedule| schedule.steps().map(|step| step.locals.len()).sum::<usize>();
        assert!(apart.iter().all(|schedule| locals(schedule) == 0), "{ranks}");
        check(Goal::AllReduce, &apart).expect("proved");
        // Some ranks in place: all have the same expression.
        let of = |place: Place| match place.rank().0 % 3 {
            0 => recursive_doubling::all_reduce(place, 10),
            _ => recursive_doubling::all_reduce_apart(place, 10),
        };
        check(Goal::AllReduce, &Place::all(ranks).map(of).collect::<Vec<_>>()).expect("proved");
    }
}

#[test]
fn all_to_all_of_any_counts_and_in_place() {
    for ranks in 1..=64_u32 {
        for each in [0, 1, 7] {
            let schedules: Vec<_> = Place::all(ranks).map(|place| pairwise::all_to_all_in_place(place, each)).collect();
            let report = check(Goal::AllToAll, &schedules).unwrap_or_else(|error| panic!("{ranks} x {each}: {error}"));
            assert!(report.steps <= ranks as usize);
            assert_eq!(report.sent_elements_max, u64::from(ranks - 1) * each as u64);
        }
        let p = ranks as usize;
        for salt in 0..3 {
            let counts: Vec<usize> = (0..p * p).map(|pair| (pair * 7919 + salt * 31) % 5 * salt).collect();
            let part = |place: Place| {
                let rank = place.rank().0 as usize;
                let recvs: Vec<_> = counts.iter().skip(rank).step_by(p).copied().collect();
                pairwise::all_to_all_v(place, &counts[rank * p..][..p], &recvs).expect("consistent")
            };
            let schedules: Vec<_> = Place::all(ranks).map(part).collect();
            check(Goal::AllToAllV { counts: &counts }, &schedules).expect("proved");
        }
    }
}

#[test]
fn gathers_and_reductions_of_blocks_of_any_length() {
    for ranks in 1..=64_u32 {
        for salt in 1..if ranks <= 16 { 4 } else { 2 } {
            let counts: Vec<usize> = (0..ranks as usize).map(|rank| (rank * 7919 + salt * 31) % 5 * salt).collect();
            let schedules: Vec<_> =
                Place::all(ranks).map(|place| pairwise::all_gather_v(place, &counts).expect("consistent")).collect();
            let report = check(Goal::AllGatherV { counts: &counts }, &schedules).expect("proved");
            let longest = counts.iter().max().map_or(0, |&longest| longest as u64);
            assert_eq!(report.sent_elements_max, u64::from(ranks - 1) * longest);
            for order in [Order::TreeFold, Order::TreePairwise] {
                let tree = Tree::flat(ranks, order).expect("a tree");
                let part = |place| pairwise::reduce_scatter_v(place, &counts, &tree).expect("consistent");
                let schedules: Vec<_> = Place::all(ranks).map(part).collect();
                let mut report = check(Goal::ReduceScatterV { counts: &counts }, &schedules).expect("proved");
                let declared = report.expressions.of_tree(&tree);
                assert!(report.blocks.iter().all(|&(_, expression)| Some(expression) == declared), "{ranks} {order:?}");
            }
            let mut wrong = counts.clone();
            wrong.swap(0, ranks as usize - 1);
            if wrong != counts {
                check(Goal::AllGatherV { counts: &wrong }, &schedules).expect_err("blocks at wrong places");
            }
        }
    }
}

#[test]
fn contradictory_counts_are_refused() {
    use crate::schedule::pairwise::{CountsError, all_gather_v, all_to_all_v, reduce_scatter_v};
    let place = Place::new(Rank(1), 2).expect("inside");
    let refused = |sends: &[usize], recvs: &[usize]| all_to_all_v(place, sends, recvs).expect_err("contradictory");
    assert_eq!(refused(&[1], &[1, 2]), CountsError::Ranks { sends: 1, recvs: 2, ranks: 2 });
    assert_eq!(refused(&[1, 2], &[1, 3]), CountsError::Own { rank: Rank(1), send: 2, recv: 3 });
    assert_eq!(refused(&[usize::MAX, 1], &[0, 1]), CountsError::Overflow { rank: Rank(1) });
    let tree = Tree::flat(2, Order::TreeFold).expect("a tree");
    for (counts, error) in [
        (&[1, 2, 3][..], CountsError::Blocks { counts: 3, ranks: 2 }),
        (&[usize::MAX, 1], CountsError::Overflow { rank: Rank(1) }),
    ] {
        assert_eq!(all_gather_v(place, counts).expect_err("contradictory"), error);
        assert_eq!(reduce_scatter_v(place, counts, &tree).expect_err("contradictory"), error);
    }
    reduce_scatter_v(place, &[0, usize::MAX / 2 + 1], &tree).expect_err("no room for the contributions");
}

/// Group ranks into runs of given lengths, repeatedly, until one node is left: a tree as the planner builds it.
fn layered(ranks: u32, widths: &[usize]) -> Vec<Vec<Child>> {
    let mut layers: Vec<Vec<Vec<Child>>> = Vec::new();
    let mut level: Vec<Child> = (0..ranks).map(|rank| Child::Rank(Rank(rank))).collect();
    let mut made = 0;
    for width in widths.iter().map(|&width| width.max(2)).chain(std::iter::repeat(level.len().max(2))) {
        let nodes: Vec<Vec<Child>> = level.chunks(width).map(<[Child]>::to_vec).collect();
        level = (made..made + nodes.len()).map(Child::Node).collect();
        made += nodes.len();
        layers.push(nodes);
        if level.len() == 1 {
            break;
        }
    }
    // The root comes first.
    let renumber = |child: &Child| match *child {
        Child::Node(node) => Child::Node(made - 1 - node),
        rank => rank,
    };
    let nodes = layers.into_iter().flatten().collect::<Vec<_>>();
    nodes.iter().rev().map(|children| children.iter().map(renumber).collect()).collect()
}

fn assert_follows(tree: &Tree, root: Rank) {
    let ranks = tree.ranks();
    // A full mesh evaluates by the same local moves as a pairwise exchange.
    let is_new = |algorithm: &Algorithm| algorithm.path() != Path::FullMesh || ranks <= 16;
    let follows = |algorithm: &&Algorithm| {
        algorithm.follows_tree && is_new(algorithm) && (root == Rank(0) || algorithm.pattern.is_rooted())
    };
    for algorithm in ALGORITHMS.iter().filter(follows) {
        // More blocks than elements, for small communicators, and fewer.
        let counts = [1, 3 * ranks as usize + 1];
        for &count in &counts[usize::from(ranks > 16)..] {
            let part = |place| (algorithm.schedule)(&Problem { place, count, root, tree, shape: Shape::Line });
            let schedules: Vec<_> = Place::all(ranks).map(part).collect();
            let mut report = check(Goal::of(algorithm.pattern, root), &schedules)
                .unwrap_or_else(|error| panic!("{algorithm:?}, {tree:?}, {root}: {error}"));
            let declared = report.expressions.of_tree(tree);
            for &(_, expression) in &report.blocks {
                assert_eq!(Some(expression), declared, "{algorithm:?} {}", report.expressions.to_text(expression));
            }
        }
    }
}

#[test]
fn host_trees_evaluate_the_declared_expression_for_every_number_of_ranks() {
    for ranks in 1..=64 {
        for order in ORDERS {
            let shapes = [&[][..], &[2, 2, 2, 2, 2, 2], &[4], &[3, 5]];
            // All of them for small communicators, then two in turn.
            let shapes =
                shapes.iter().enumerate().filter(|(nth, _)| ranks <= 16 || (*nth as u32 + ranks).is_multiple_of(2));
            for (_, widths) in shapes {
                let tree = Tree::new(layered(ranks, widths), ranks, order).expect("a tree");
                for root in [0, ranks / 2, ranks - 1] {
                    assert_follows(&tree, Rank(root));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any tree over any placement of the ranks, not only the planner's.
    #[test]
    fn host_trees_evaluate_any_expression(
        keys in prop::collection::vec(any::<u32>(), 1..20),
        widths in prop::collection::vec(1_usize..6, 0..4),
        fold in any::<bool>(),
        root in any::<prop::sample::Index>(),
    ) {
        let ranks = keys.len() as u32;
        let mut order: Vec<u32> = (0..ranks).collect();
        order.sort_by_key(|&rank| keys[rank as usize]);
        let mut nodes = layered(ranks, &widths);
        for child in nodes.iter_mut().flatten() {
            if let Child::Rank(rank) = child {
                *rank = Rank(order[rank.0 as usize]);
            }
        }
        // Children in any order, with nodes among ranks.
        nodes.iter_mut().enumerate().for_each(|(index, children)| {
            let by = keys[index % keys.len()] as usize % children.len();
            children.rotate_left(by);
        });
        let tree = Tree::new(nodes, ranks, ORDERS[usize::from(!fold)]).expect("a tree");
        assert_follows(&tree, Rank(root.index(keys.len()) as u32));
    }
}

#[test]
fn tree_expressions_match_hand_written_ones() {
    let written =
        |tree: &Tree| tree.evaluate(|rank| rank.0.to_string(), |left: String, right| format!("({left}+{right})"));
    let flat = |ranks, order| written(&Tree::flat(ranks, order).expect("a tree"));
    assert_eq!(flat(4, Order::TreeFold), "(((0+1)+2)+3)");
    assert_eq!(flat(6, Order::TreePairwise), "(((0+1)+(2+3))+(4+5))");
    assert_eq!(flat(7, Order::TreePairwise), "(((0+1)+(2+3))+((4+5)+6))");
    let ranks = |ranks: &[u32]| ranks.iter().map(|&rank| Child::Rank(Rank(rank))).collect::<Vec<_>>();
    let nodes = vec![vec![Child::Node(1), Child::Rank(Rank(3)), Child::Node(2)], ranks(&[0, 1, 2]), ranks(&[4, 5])];
    assert_eq!(written(&Tree::new(nodes, 6, Order::TreeFold).expect("a tree")), "((((0+1)+2)+3)+(4+5))");
}

#[test]
fn invalid_trees_are_refused() {
    use crate::schedule::tree::TreeError;
    let rank = |rank| Child::Rank(Rank(rank));
    let refused = |nodes: &[&[Child]], ranks, order| {
        Tree::new(nodes.iter().map(|children| children.to_vec()).collect(), ranks, order).expect_err("no tree")
    };
    let fold = Order::TreeFold;
    assert_eq!(refused(&[&[rank(0)]], 1, Order::Arrival), TreeError::Undeclared(Order::Arrival));
    assert_eq!(refused(&[], 0, fold), TreeError::Childless(0));
    assert_eq!(refused(&[&[rank(0), Child::Node(1)], &[]], 1, fold), TreeError::Childless(1));
    assert_eq!(refused(&[&[rank(0)]], 2, fold), TreeError::Rank { rank: Rank(1), times: 0, ranks: 2 });
    assert_eq!(refused(&[&[rank(0), rank(0)]], 1, fold), TreeError::Rank { rank: Rank(0), times: 2, ranks: 1 });
    assert_eq!(refused(&[&[rank(0), rank(7)]], 1, fold), TreeError::Rank { rank: Rank(7), times: 1, ranks: 1 });
    let itself = &[Child::Node(0), rank(0)][..];
    assert_eq!(refused(&[itself], 1, fold), TreeError::Node { node: 0, nodes: 1, parents: 1 });
    let circle = [&[rank(0)][..], &[Child::Node(2)], &[Child::Node(1)]];
    assert_eq!(refused(&circle, 1, fold), TreeError::Node { node: 1, nodes: 3, parents: 1 });
    assert_eq!(refused(&[&[Child::Node(9)]], 1, fold), TreeError::Node { node: 9, nodes: 1, parents: 1 });
}

/// The algorithms that give the bits of a tree, determined by the checker: the table that selection must agree with.
#[test]
fn table_of_algorithms_that_evaluate_a_tree() {
    let pairwise_of = |ranks| Tree::new(layered(ranks, &[4]), ranks, Order::TreePairwise).expect("a tree");
    let is_same = |name: &str, tree: &Tree| evaluates(named(name), tree, Shape::Line).is_ok();
    for ranks in 2..=16_u32 {
        let one_node = flat(ranks);
        // Binomial trees pair neighbours for any number of ranks.
        assert!(is_same("binomial::reduce", &one_node) && is_same("binomial::all_reduce", &one_node));
        for name in ["halving_doubling::all_reduce", "recursive_doubling::all_reduce"] {
            // Also for other p, if their folded pairs are whole halves: 3, 6, 7, 12, 14, 15, ...
            let is_aligned = (ranks + (ranks & ranks.wrapping_neg())).is_power_of_two();
            assert_eq!(is_same(name, &one_node), is_aligned, "{name} {ranks}");
            if ranks.is_power_of_two() {
                assert!(is_same(name, &pairwise_of(ranks)));
            }
        }
        let fold = Tree::flat(ranks, Order::TreeFold).expect("a tree");
        for name in ["halving_doubling::all_reduce", "binomial::reduce"] {
            assert_eq!(is_same(name, &fold), ranks <= 3, "{name} {ranks}");
        }
        let any_tree = ["tree::all_reduce", "tree::reduce", "pairwise::all_reduce", "pairwise::reduce_scatter"];
        let one_shot = ["one_shot::all_reduce", "one_shot::reduce", "one_shot::reduce_scatter"];
        for name in any_tree.into_iter().chain(one_shot) {
            assert!(is_same(name, &one_node) && is_same(name, &fold) && is_same(name, &pairwise_of(ranks)));
        }
        for name in ["ring::all_reduce", "ring::reduce_scatter"] {
            assert!(!is_same(name, &one_node) && !is_same(name, &fold));
        }
        assert_eq!(is_same("halving_doubling::reduce_scatter", &one_node), ranks == 2 || ranks == 3);
        for name in ["star::all_reduce", "star::reduce"] {
            assert!(is_same(name, &fold) && is_same(name, &one_node) == (ranks <= 3), "{name} {ranks}");
        }
        for name in ["full_mesh::all_reduce", "one_shot::reduce_scatter"] {
            assert!(is_same(name, &one_node) && is_same(name, &fold) && is_same(name, &pairwise_of(ranks)));
        }
        for name in ["nhr::all_reduce", "nhr::reduce_scatter", "pat::reduce_scatter"] {
            assert!(!is_same(name, &one_node) && !is_same(name, &fold), "another order for each block");
        }
        assert!(is_same("bruck::all_gather", &fold), "what combines nothing can't differ");
    }
}

/// Selection asks once for all roots, so an expression that matches must not depend on the root.
#[test]
fn reductions_that_evaluate_a_tree_do_so_for_every_root() {
    let reduces = |algorithm: &&Algorithm| algorithm.pattern == Pattern::Reduce && !algorithm.follows_tree;
    for ranks in 2..=10_u32 {
        for tree in ORDERS.map(|order| Tree::flat(ranks, order).expect("a tree")) {
            for algorithm in
                ALGORITHMS.iter().filter(reduces).filter(|algorithm| evaluates(algorithm, &tree, Shape::Line).is_ok())
            {
                for root in (0..ranks).map(Rank) {
                    let report = check(Goal::Reduce { root }, &schedules(algorithm, ranks, 100, root));
                    let mut report = report.expect("proved");
                    let declared = report.expressions.of_tree(&tree);
                    assert!(report.blocks.iter().all(|&(_, computed)| Some(computed) == declared), "{algorithm:?}");
                }
            }
        }
    }
}

/// With little room PAT walks its trees in depth, and cuts blocks that are too long; with enough it is as fast as NHR.
#[test]
fn pat_stays_within_its_room_in_every_regime() {
    use crate::schedule::pat::{Aggregation, all_gather_within, reduce_scatter_within};
    for ranks in [2, 3, 5, 8, 13, 16_u32] {
        let depths = ranks.next_power_of_two().ilog2() as usize;
        for room in [depths, 5 * depths, 1 << 10] {
            for count in [0, 1, 7 * ranks as usize + 3] {
                let what = format!("{ranks} ranks, {count} elements in {room}");
                let schedules: Vec<_> =
                    Place::all(ranks).map(|place| reduce_scatter_within(room, place, count)).collect();
                let report = check(Goal::ReduceScatter, &schedules).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(schedules.iter().all(|schedule| schedule.layout().work <= room), "{what}");
                let Aggregation { segments, .. } = Aggregation::within(room, ranks, count);
                let steps = Aggregation::within(room, ranks, count).steps(ranks);
                assert_eq!(report.steps as u32, segments * steps, "{what}");
                let gathers: Vec<_> = Place::all(ranks).map(|place| all_gather_within(room, place, count)).collect();
                let report = check(Goal::AllGather, &gathers).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(report.steps as u32, steps, "{what}");
            }
        }
    }
    let steps = |room, ranks| Aggregation::within(room, ranks, 64 * ranks as usize).steps(ranks);
    assert_eq!([64 * 6, 64 * 24, 64 * 64].map(|room| steps(room, 64)), [63, 7 + 3, 6]);
}

#[test]
fn ring_difference_shows_both_expressions() {
    let why = evaluates(named("ring::all_reduce"), &Tree::flat(3, Order::TreeFold).expect("a tree"), Shape::Line);
    let why = why.expect_err("another order for each block").to_string();
    assert_eq!(why, "ring::all_reduce computes ((1+2)+0) for elements 1..2 of 3; declared is ((0+1)+2)");
}

#[test]
fn halving_doubling_computes_the_aligned_pairwise_tree() {
    for ranks in 1..=64 {
        for name in ["halving_doubling::all_reduce", "recursive_doubling::all_reduce"] {
            let schedules = schedules(named(name), ranks, 1000, Rank(0));
            let mut report = check(Goal::AllReduce, &schedules).expect("proved");
            let mut level: Vec<_> = (0..ranks).map(|rank| Expressions::input(Rank(rank))).collect();
            if let extras @ 1.. = level.len() - (1 << ranks.ilog2()) {
                let rest = level.split_off(2 * extras);
                level = pairs(&mut report.expressions, &level).into_iter().chain(rest).collect();
            }
            while level.len() > 1 {
                level = pairs(&mut report.expressions, &level);
            }
            for &(_, expression) in &report.blocks {
                assert_eq!(expression, level[0], "{}", report.expressions.to_text(expression));
                assert!(report.expressions.is_in_order(expression));
            }
        }
    }
}

fn pairs(expressions: &mut Expressions, level: &[ExprId]) -> Vec<ExprId> {
    level.chunks(2).map(|pair| expressions.combine(pair[0], pair[1]).expect("disjoint")).collect()
}

#[test]
fn ring_order_differs_between_blocks() {
    let report = check(Goal::AllReduce, &schedules(named("ring::all_reduce"), 3, 3, Rank(0))).expect("proved");
    let written: Vec<_> = report.blocks.iter().map(|&(_, id)| report.expressions.to_text(id)).collect();
    assert_eq!(written, ["((0+1)+2)", "((1+2)+0)", "((2+0)+1)"]);
    assert!(!report.expressions.is_in_order(report.blocks[1].1));
}
