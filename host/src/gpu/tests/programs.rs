//! Programs: waits between streams, and their necessity.

use crate::gpu::program::{OpKind, Program};
use crate::schedule::{ALGORITHMS, Place, Problem, Schedule, Shape, tree::Tree};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, ReduceOp};

fn schedules(name: &str, ranks: u32, count: usize) -> Vec<Schedule> {
    schedules_in(name, Shape::Line, ranks, count)
}

fn schedules_in(name: &str, shape: Shape, ranks: u32, count: usize) -> Vec<Schedule> {
    let tree = Tree::flat(ranks, Order::TreeFold).expect("a tree");
    let algorithm = crate::schedule::Algorithm::named(name).expect("known");
    let problem = |place| Problem { place, count, root: Rank(ranks - 1), tree: &tree, shape };
    Place::all(ranks).map(|place| (algorithm.schedule)(&problem(place))).collect()
}

#[test]
fn programs_have_no_races() {
    let kernel = sumac_hal::reduce::Kernel::new(Dtype::Bf16, ReduceOp::Sum);
    let wide = sumac_hal::reduce::Kernel::new(Dtype::F32, ReduceOp::Sum);
    let grids = ["2x2", "servers:2", "2x3", "2x4", "2x2x2", "servers:4"].map(|text| text.parse().expect("a shape"));
    for algorithm in ALGORITHMS {
        for (ranks, shape) in (1..=8).flat_map(|ranks| {
            let fitting = grids.into_iter().filter(move |shape: &Shape| shape.check(ranks).is_ok());
            std::iter::once(Shape::Line).chain(fitting).map(move |shape| (ranks, shape))
        }) {
            for (count, piece_bytes, kernel, each) in [(97, 64, kernel, 2), (64, usize::MAX / 2, wide, 4)] {
                let schedules = schedules_in(algorithm.name, shape, ranks, count);
                for is_in_place in [false, true] {
                    let program = Program::new(&schedules, each, kernel.as_ref(), is_in_place, piece_bytes);
                    // Some broadcasts and gathers cannot run in place; those are errors, not programs.
                    let Ok(program) = program else {
                        assert!(is_in_place, "{}", algorithm.name);
                        continue;
                    };
                    assert_eq!(program.races(), None, "{} of {ranks}, {shape}", algorithm.name);
                }
            }
        }
    }
}

/// Removing a wait creates a race: so no wait is superfluous, and the race detector finds missing ones.
#[test]
fn removing_any_wait_is_a_race() {
    let kernel = sumac_hal::reduce::Kernel::new(Dtype::F32, ReduceOp::Sum);
    for name in ["ring::all_reduce", "halving_doubling::all_reduce", "tree::all_reduce", "pairwise::all_reduce"] {
        let program = Program::new(&schedules(name, 4, 64), 4, kernel.as_ref(), true, 64).expect("a program");
        for op in 0..program.ops.len() {
            for wait in 0..program.ops[op].waits.len() {
                let mut without = program.clone();
                without.ops[op].waits.remove(wait);
                assert!(without.races().is_some(), "{name}: operation {op} without its wait {wait}");
            }
        }
    }
}

#[test]
fn pieces_let_the_next_rank_start_early() {
    let kernel = sumac_hal::reduce::Kernel::new(Dtype::F32, ReduceOp::Sum);
    let schedules = schedules("ring::all_reduce", 4, 1024);
    let program = Program::new(&schedules, 4, kernel.as_ref(), true, 256).expect("a program");
    // Block 0 at rank 1 is a quarter of 1024 elements: four pieces of 256 bytes. Rank 2 takes the first piece without
    // waiting for the last.
    let lands: Vec<_> = program.ops.iter().filter(|op| matches!(op.kind, OpKind::Land { .. })).collect();
    assert_eq!(lands.len(), 4 * 3 * 4);
    let second = program.ops.iter().find(|op| op.to.rank == 2 && !op.waits.is_empty()).expect("one waits");
    let waited = &program.ops[second.waits[0]];
    assert_eq!((waited.to.rank, waited.to.bytes.len()), (1, 256));
    let later = program.ops.iter().rposition(|op| op.to.rank == 1 && op.to.bytes.end == waited.to.bytes.start + 1024);
    assert!(later.is_some_and(|later| !second.waits.contains(&later)));
}

#[test]
fn mismatched_schedules_are_refused() {
    let mut mixed = schedules("ring::all_reduce", 3, 9);
    mixed[1] = schedules("ring::all_reduce", 3, 12)[1].clone();
    let kernel = sumac_hal::reduce::Kernel::new(Dtype::F32, ReduceOp::Sum);
    let lengths = Program::new(&mixed, 4, kernel.as_ref(), true, 64).expect_err("other lengths");
    assert!(lengths.to_string().contains("expects"), "{lengths}");
    mixed[1] = schedules("binomial::all_reduce", 3, 9)[1].clone();
    assert!(Program::new(&mixed, 4, kernel.as_ref(), true, 64).is_err());
    mixed.swap(0, 1);
    let order = Program::new(&mixed, 4, kernel.as_ref(), true, 64).expect_err("another order");
    assert!(order.to_string().contains("in order"), "{order}");
}
