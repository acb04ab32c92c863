//! Algorithms of all names, for ranks in a line and in several dimensions.

use super::*;
use crate::gpu::group::{schedules, selection_context};
use crate::schedule::{ALGORITHMS, Pattern};

/// Shapes of `ranks` ranks.
fn shapes(ranks: u32) -> Vec<Shape> {
    let texts: &[&str] = match ranks {
        4 => &["line", "2x2", "servers:2"],
        6 => &["line", "2x3", "3x2", "servers:3"],
        8 => &["line", "2x4", "2x2x2", "servers:4"],
        _ => &["line"],
    };
    texts.iter().map(|text| text.parse().expect("a shape")).collect()
}

#[test]
fn every_algorithm_of_a_shape_gives_the_reduction() {
    let mut by_dimensions = 0;
    for ranks in [3, 4, 6, 8] {
        for shape in shapes(ranks) {
            for algorithm in ALGORITHMS.iter().filter(|algorithm| algorithm.pattern == Pattern::AllReduce) {
                if algorithm.needs_dimensions() && shape == Shape::Line {
                    continue;
                }
                by_dimensions += u32::from(algorithm.needs_dimensions());
                let options = GroupOptions { shape, ..small() };
                let mut group = Group::new(FakeGpu::new(u64::from(ranks), ROOM), ranks, options).expect("a group");
                let (dtype, op, gpu) = (Dtype::F32, ReduceOp::Sum, group.gpu().clone());
                let buffers = in_place(&gpu, &inputs(dtype, op, ranks, 50));
                let algo = algorithm.path().name().parse().expect("an algorithm");
                let desc = OpDesc::all_reduce(dtype, op, 50);
                let work = group.start(&request(desc, algo, &buffers), &[]).expect("started");
                assert_eq!(work.path(), algorithm.path());
                group.wait(work, long_deadline()).expect("done");
                let wanted: Vec<u8> = (0..50).flat_map(|element| expected(dtype, op, ranks, element)).collect();
                for (rank, result) in results(&gpu, &buffers).into_iter().enumerate() {
                    assert_eq!(result, wanted, "{algorithm:?}, rank {rank} of {ranks}, {shape}");
                }
            }
        }
    }
    assert_eq!(by_dimensions, 8 * 4, "four algorithms in each of eight shapes");
}

/// In a line the algorithms of dimensions give the same results by other messages.
#[test]
fn schedules_of_a_group_are_those_of_its_shape() {
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 48);
    let of = |shape: &str, path| {
        let options = GroupOptions { shape: shape.parse().expect("a shape"), ..small() };
        let selection = selection_context(4, &options, options.table.clone(), "none").expect("it fits");
        schedules(&desc, path, &selection).expect("known")
    };
    for path in [Path::Ring2d, Path::Torus2d, Path::Mesh2d, Path::HierarchicalRing] {
        assert!(of("2x2", path) != of("line", path), "{path}");
    }
}

#[test]
fn shape_of_another_number_of_ranks_is_refused() {
    let options = GroupOptions { shape: "2x3".parse().expect("a shape"), ..small() };
    let refused = Group::new(FakeGpu::new(1, ROOM), 4, options).map(|_| ()).expect_err("another number");
    assert!(refused.to_string().contains("2x3 does not fit 4 ranks; it has 6"), "{refused}");
}

#[test]
fn algorithm_of_dimensions_is_ruled_out_in_a_line() {
    let why = group(1, 4).explain(&OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64), Algo::Torus2d);
    assert!(why.refusal().is_some_and(|why| why.to_string().contains("shape line")), "{why}");
}
