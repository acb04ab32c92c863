//! Every algorithm proved for up to 1024 ranks, by samples of counts, roots and shapes, and its costs compared with the
//! formulas: exactly, where they divide. Up to 64 ranks all are proved.

use super::shapes::{grid, shaped};
use super::*;
use std::num::NonZeroU32;

/// The most messages, further pieces included, of what is proved for 1000 ranks and more: that takes half a second.
const MESSAGES_MAX: f64 = 140_000.0;

/// The same for a second number of elements.
const MESSAGES_AGAIN_MAX: f64 = 30_000.0;

/// Those of more messages that are proved all the same, one of each kind.
const LONG: [(u32, &str); 4] = [
    (1024, "ring::all_reduce"),
    (1000, "pairwise::reduce_scatter"),
    (1024, "torus_2d::all_reduce"),
    (1000, "hierarchical_ring::all_reduce"),
];

/// A shape of servers.
fn servers(each: u32) -> Shape {
    Shape::Servers(NonZeroU32::new(each).expect("not 0"))
}

/// Prove an algorithm for a number of elements that all blocks and shares divide, and for one that none does; returns
/// whether it was.
fn prove_at(ranks: u32, shape: Shape, algorithm: &Algorithm, nth: usize) -> bool {
    let (shares, floor) = (2 * shape.dims(ranks).as_slice().len(), 1_usize << ranks.ilog2());
    let even = shares * floor * (ranks as usize >> ranks.trailing_zeros());
    let odd = 7 * ranks as usize + 3;
    let roots = [ranks / 3, 0, ranks - 1];
    let mut is_proved = false;
    for (turn, count) in [even, odd].into_iter().enumerate() {
        let cost = algorithm.cost(ranks, shape, count);
        let messages = cost.messages + f64::from(ranks) * cost.extra_pieces;
        let is_short = match turn {
            0 => ranks < 1000 || messages <= MESSAGES_MAX || LONG.contains(&(ranks, algorithm.name)),
            _ => messages <= MESSAGES_AGAIN_MAX,
        };
        if !is_short {
            continue;
        }
        let root = Rank(if algorithm.pattern.is_rooted() { roots[(nth + turn) % roots.len()] } else { 0 });
        let schedules = schedules_in(shape, algorithm, ranks, count, root);
        let report = check(Goal::of(algorithm.pattern, root), &schedules)
            .unwrap_or_else(|error| panic!("{algorithm:?}, {ranks} ranks, {shape}, {count} elements: {error}"));
        compare_cost(algorithm, (ranks, shape), count, root, &report);
        is_proved = true;
    }
    is_proved
}

#[test]
fn algorithms_are_correct_for_up_to_1024_ranks() {
    for (ranks, least) in
        [(100, ALGORITHMS.len()), (128, ALGORITHMS.len()), (256, ALGORITHMS.len()), (1000, 20), (1024, 20)]
    {
        let lines = ALGORITHMS.iter().enumerate();
        let proved = lines.filter(|(nth, algorithm)| prove_at(ranks, Shape::Line, algorithm, *nth)).count();
        assert!(proved >= least, "{proved} of {ranks} ranks");
    }
}

#[test]
fn shaped_algorithms_are_correct_for_up_to_1024_ranks() {
    let sizes = [
        (100, vec![grid(&[10, 10]), servers(10)], 1.0),
        (128, vec![grid(&[8, 16]), servers(8)], 1.0),
        (256, vec![grid(&[16, 16]), grid(&[4, 4, 4, 4])], 1.0),
        (1000, vec![grid(&[10, 100]), grid(&[10, 10, 10])], 0.4),
        (1024, vec![grid(&[32, 32]), servers(8)], 0.4),
    ];
    for (ranks, shapes, least) in sizes {
        for shape in shapes {
            let (all, proved) = (shaped().count(), shaped().filter(|of| prove_at(ranks, shape, of, 0)).count());
            assert!(proved as f64 >= least * all as f64, "{proved} of {all} in {shape}");
        }
    }
}
