//! Every algorithm proved for up to 1024 ranks, by samples of counts, roots and shapes, and its costs compared with the
//! formulas: exactly, where they divide. Up to 64 ranks all are proved.
//!
//! Of 1000 ranks and more, those with many messages are proved if `SUMAC_TEST_ALL_SIZES` is set (`tests/run
//! exhaustive`); otherwise one of each kind.

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

/// Whether nothing is left out.
fn proves_all() -> bool {
    std::env::var_os("SUMAC_TEST_ALL_SIZES").is_some()
}

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
            0 => ranks < 1000 || messages <= MESSAGES_MAX || LONG.contains(&(ranks, algorithm.name)) || proves_all(),
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

/// Prove the algorithms that need no shape, at least so many of them.
fn prove_in_line(ranks: u32, least: usize) {
    let lines = ALGORITHMS.iter().enumerate();
    let proved = lines.filter(|(nth, algorithm)| prove_at(ranks, Shape::Line, algorithm, *nth)).count();
    let least = if proves_all() { ALGORITHMS.len() } else { least };
    assert!(proved >= least, "{proved} of {ranks} ranks");
}

/// Prove the algorithms that need a shape, at least such a share of them.
fn prove_shaped(ranks: u32, shapes: &[Shape], least: f64) {
    let least = if proves_all() { 1.0 } else { least };
    for &shape in shapes {
        let (all, proved) = (shaped().count(), shaped().filter(|of| prove_at(ranks, shape, of, 0)).count());
        assert!(proved as f64 >= least * all as f64, "{proved} of {all} in {shape}");
    }
}

#[test]
fn algorithms_are_correct_for_up_to_256_ranks() {
    [100, 128, 256].into_iter().for_each(|ranks| prove_in_line(ranks, ALGORITHMS.len()));
}

#[test]
fn algorithms_are_correct_for_1000_ranks() {
    prove_in_line(1000, 20);
}

#[test]
fn algorithms_are_correct_for_1024_ranks() {
    prove_in_line(1024, 20);
}

#[test]
fn shaped_algorithms_are_correct_for_up_to_256_ranks() {
    prove_shaped(100, &[grid(&[10, 10]), servers(10)], 1.0);
    prove_shaped(128, &[grid(&[8, 16]), servers(8)], 1.0);
    prove_shaped(256, &[grid(&[16, 16]), grid(&[4, 4, 4, 4])], 1.0);
}

#[test]
fn shaped_algorithms_are_correct_for_1000_ranks() {
    prove_shaped(1000, &[grid(&[10, 100]), grid(&[10, 10, 10])], 0.4);
}

#[test]
fn shaped_algorithms_are_correct_for_1024_ranks() {
    prove_shaped(1024, &[grid(&[32, 32]), servers(8)], 0.4);
}
