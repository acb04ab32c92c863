//! Every algorithm of the table over loopback TCP, in place and out of place, against an independent oracle; and the
//! bits of tree schedules against the declared expression.

use super::tests::{both_ways, context, meshes, on_ranks};
use super::*;
use crate::schedule::tree::Tree;
use crate::schedule::{ALGORITHMS, Algorithm, Pattern, Place, Problem, Schedule, Shape, Span, pairwise};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

both_ways! {
    every_algorithm_and_root_gives_exact_results_in_and_out_of_place,
    algorithms_give_exact_results_in_every_shape,
    transfers_beyond_frame_and_scratch_size_give_exact_results,
    all_to_all_of_any_counts_gives_exact_results_in_and_out_of_place,
    rank_lost_in_any_step_is_named_or_not_needed,
    tree_schedules_match_the_declared_expression_bit_for_bit,
    partials_travel_in_accumulator_type_and_inputs_in_their_own,
    buffers_of_wrong_length_are_refused,
}

/// Element `element` of rank `rank`'s input: whole numbers that bfloat16 holds, as it does their sums over 9 ranks.
fn input(rank: u32, element: usize) -> i32 {
    let mixed = (u64::from(rank) + 3).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (element as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 37) as i32 % 15 - 7
}

fn encode(dtype: Dtype, values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    let bytes = |value: i32| match dtype {
        Dtype::I32 => value.to_le_bytes().to_vec(),
        // A bfloat16 is the upper half of a binary32.
        Dtype::Bf16 => (value as f32).to_le_bytes()[2..].to_vec(),
        other => panic!("no encoding for {other}"),
    };
    values.into_iter().flat_map(bytes).collect()
}

/// Oracle: a rank's input and its output by the collective's definition, independent of the schedules.
fn defined(pattern: Pattern, rank: u32, ranks: u32, count: usize, root: u32) -> (Vec<i32>, Vec<i32>) {
    let block = |index: u32| Span::of_block(count, ranks, index);
    let of = |rank: u32, span: Span| (span.start..span.end()).map(move |element| input(rank, element));
    let sum = |span: Span| {
        (span.start..span.end()).map(|element| (0..ranks).map(|rank| input(rank, element)).sum()).collect::<Vec<i32>>()
    };
    let whole = Span::first(count);
    let is_root = rank == root;
    let gathered = || (0..ranks).flat_map(|from| of(from, block(from))).collect::<Vec<_>>();
    let none = Vec::new;
    match pattern {
        Pattern::AllReduce => (of(rank, whole).collect(), sum(whole)),
        Pattern::Reduce => (of(rank, whole).collect(), if is_root { sum(whole) } else { none() }),
        Pattern::Broadcast => (if is_root { of(root, whole).collect() } else { none() }, of(root, whole).collect()),
        Pattern::ReduceScatter => (of(rank, whole).collect(), sum(block(rank))),
        Pattern::AllGather => (of(rank, block(rank)).collect(), gathered()),
        Pattern::Gather => (of(rank, block(rank)).collect(), if is_root { gathered() } else { none() }),
        Pattern::Scatter => (if is_root { of(root, whole).collect() } else { none() }, of(root, block(rank)).collect()),
        Pattern::AllToAll => (of(rank, whole).collect(), (0..ranks).flat_map(|from| of(from, block(rank))).collect()),
        Pattern::Barrier => (none(), none()),
    }
}

/// Run a schedule with separate buffers and, if it can, in place; check the results.
fn run_both(mesh: &mut Mesh, op_index: &mut u64, schedule: &Schedule, dtype: Dtype, contents: (Vec<i32>, Vec<i32>)) {
    let (input, right) = (encode(dtype, contents.0), encode(dtype, contents.1));
    let kernel = Kernel::new(dtype, ReduceOp::Sum);
    let ctx = |op_index: &mut u64| {
        *op_index += 1;
        context(*op_index - 1, OpDesc::all_reduce(dtype, ReduceOp::Sum, 1), Path::Ring)
    };
    let what = format!("{:?} {:?}", schedule.place(), schedule.layout());
    let mut output = vec![0xa5; right.len()];
    let before = input.clone();
    let buffers = Buffers::Separate { input: &input, output: &mut output };
    execute(mesh, schedule, kernel.as_ref(), buffers, &ctx(op_index), &mut NoInterrupt).expect("no error");
    assert!(output == right, "{what}");
    assert!(input == before, "{what}: an input is only read");
    let Some(at) = schedule.layout().in_place_at.map(|at| at * dtype.size_bytes()) else { return };
    let (input_at, output_at) = if input.len() >= right.len() { (0, at) } else { (at, 0) };
    let mut buffer = vec![0xa5; input.len().max(right.len())];
    buffer[input_at..][..input.len()].copy_from_slice(&input);
    execute(mesh, schedule, kernel.as_ref(), &mut buffer[..], &ctx(op_index), &mut NoInterrupt).expect("no error");
    assert!(buffer[output_at..][..right.len()] == right, "{what} in place");
    if schedule.layout().output < schedule.layout().input && !schedule.layout().work_in_output {
        let apart = |range: std::ops::Range<usize>| buffer[range.clone()] == input[range];
        assert!(apart(0..output_at) && apart(output_at + right.len()..input.len()), "{what}: the rest of the input");
    }
}

fn run_table(ranks: u32, algorithms: &[&Algorithm], roots: &[u32], counts: &[usize]) {
    run_table_in(Shape::Line, ranks, algorithms, roots, counts);
}

fn run_table_in(shape: Shape, ranks: u32, algorithms: &[&Algorithm], roots: &[u32], counts: &[usize]) {
    let tree = Tree::flat(ranks, Order::TreeFold).expect("a tree");
    on_ranks(&mut meshes(ranks), |mesh| {
        let mut op_index = 0;
        for algorithm in algorithms {
            for &root in if algorithm.pattern.is_rooted() { roots } else { &[0] } {
                for &count in counts {
                    for dtype in [Dtype::I32, Dtype::Bf16] {
                        let place = mesh.place();
                        let count = if algorithm.pattern == Pattern::Barrier { 0 } else { count };
                        let problem = Problem { place, count, root: Rank(root), tree: &tree, shape };
                        let contents = defined(algorithm.pattern, place.rank().0, ranks, count, root);
                        run_both(mesh, &mut op_index, &(algorithm.schedule)(&problem), dtype, contents);
                    }
                }
            }
        }
    });
}

fn every_algorithm_and_root_gives_exact_results_in_and_out_of_place() {
    let all: Vec<_> = ALGORITHMS.iter().collect();
    for ranks in [1_u32, 2, 3, 4, 7, 8] {
        let roots: Vec<_> = (0..ranks).collect();
        run_table(ranks, &all, &roots, &[0, 1, ranks as usize - 1, 7 * ranks as usize + 3]);
    }
    for ranks in [6, 9] {
        run_table(ranks, &all, &[ranks - 2], &[7 * ranks as usize + 3]);
    }
}

fn algorithms_give_exact_results_in_every_shape() {
    let uses_shape = |path| matches!(path, Path::Swing | Path::SwingLatency);
    let shaped: Vec<_> =
        ALGORITHMS.iter().filter(|known| known.needs_dimensions() || uses_shape(known.path())).collect();
    for (ranks, shapes) in [
        (4, &["2x2", "servers:2"][..]),
        (6, &["2x3", "3x2", "servers:3"]),
        (8, &["2x4", "4x2", "2x2x2", "servers:4"]),
        (9, &["3x3"]),
    ] {
        for shape in shapes {
            let shape = shape.parse().expect("a shape");
            run_table_in(shape, ranks, &shaped, &[0], &[0, 1, ranks as usize - 1, 7 * ranks as usize + 3, 20_011]);
        }
    }
}

fn transfers_beyond_frame_and_scratch_size_give_exact_results() {
    let all: Vec<_> = ALGORITHMS.iter().collect();
    run_table(3, &all, &[2], &[200_001]);
}

fn all_to_all_of_any_counts_gives_exact_results_in_and_out_of_place() {
    for ranks in [1_u32, 2, 3, 5, 8] {
        on_ranks(&mut meshes(ranks), |mesh| {
            let (place, mut op_index) = (mesh.place(), 0);
            let rank = place.rank().0;
            for each in [0, 1, 1001] {
                let contents = defined(Pattern::AllToAll, rank, ranks, each * ranks as usize, 0);
                run_both(mesh, &mut op_index, &pairwise::all_to_all_in_place(place, each), Dtype::I32, contents);
            }
            let count = |from: u32, to: u32| (from as usize * 7 + to as usize * 3) % 5 * 99;
            let sends: Vec<_> = (0..ranks).map(|to| count(rank, to)).collect();
            let recvs: Vec<_> = (0..ranks).map(|from| count(from, rank)).collect();
            let schedule = pairwise::all_to_all_v(place, &sends, &recvs).expect("consistent");
            let sent = |from: u32, to: u32| (0..count(from, to)).map(move |k| input(from, to as usize * 1000 + k));
            let contents = ((0..ranks).flat_map(|to| sent(rank, to)), (0..ranks).flat_map(|from| sent(from, rank)));
            run_both(mesh, &mut op_index, &schedule, Dtype::I32, (contents.0.collect(), contents.1.collect()));
        });
    }
}

/// The first `steps` steps of a schedule, as run by a rank that then dies.
fn cut(whole: &Schedule, steps: usize) -> Schedule {
    let new = if whole.reduces() { Schedule::reducing } else { Schedule::moving };
    let mut part = new(whole.place(), *whole.layout());
    whole.steps().map(|step| part.push(step)).take(steps).for_each(drop);
    part
}

fn rank_lost_in_any_step_is_named_or_not_needed() {
    let (ranks, dead, root, count) = (4, Rank(2), Rank(1), 1001);
    let tree = Tree::flat(ranks, Order::TreeFold).expect("a tree");
    let mut lost = 0;
    for algorithm in ALGORITHMS {
        let count = if algorithm.pattern == Pattern::Barrier { 0 } else { count };
        let schedule = |place| (algorithm.schedule)(&Problem { place, count, root, tree: &tree, shape: Shape::Line });
        let steps = schedule(Place::new(dead, ranks).expect("inside")).len();
        for last_words in 0..steps {
            let run = |mut mesh: Mesh| {
                let place = mesh.place();
                let (input, right) = defined(algorithm.pattern, place.rank().0, ranks, count, root.0);
                let (input, right) = (encode(Dtype::I32, input), encode(Dtype::I32, right));
                let mut output = vec![0; right.len()];
                let is_dead = place.rank() == dead;
                let part = if is_dead { cut(&schedule(place), last_words) } else { schedule(place) };
                let kernel = Kernel::new(Dtype::I32, ReduceOp::Sum);
                let buffers = Buffers::Separate { input: &input, output: &mut output };
                let ctx = context(0, OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 1), Path::Ring);
                let result = execute(&mut mesh, &part, kernel.as_ref(), buffers, &ctx, &mut NoInterrupt);
                // The lost rank's mesh is dropped here without notice, the others' when all are done.
                (!is_dead).then(|| (mesh, result, output == right))
            };
            let results: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = meshes(ranks).into_iter().map(|mesh| scope.spawn(move || run(mesh))).collect();
                threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
            });
            for (mesh, result, is_right) in results {
                let what = format!("{algorithm:?}, step {last_words}, {:?}: {result:?}", mesh.place());
                match result {
                    Ok(()) => assert!(is_right, "{what}"),
                    // Another test may have taken the address of the lost one.
                    Err(ExecError::RankLost { rank } | ExecError::Unproven { peer: rank, .. }) if rank == dead => {}
                    Err(_) => panic!("{what}"),
                }
                lost += usize::from(mesh.error().is_some());
            }
        }
    }
    assert!(lost > 2 * ALGORITHMS.len(), "most algorithms need every rank: {lost}");
}

/// Values over many magnitudes, so that each order of summation gives different bits.
fn rough(rank: u32, element: usize) -> f32 {
    let bits = (u64::from(rank) << 32 | element as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((bits >> 40) as f32 - 8_388_608.0) * f32::from_bits(0x3000_0000 + (((bits >> 35) as u32 & 0x1f) << 23))
}

fn tree_schedules_match_the_declared_expression_bit_for_bit() {
    use crate::plan::Child::{Node, Rank as Leaf};
    let of = |ranks: &[u32]| ranks.iter().map(|&rank| Leaf(Rank(rank))).collect::<Vec<_>>();
    let count = 1000;
    let mut seen = std::collections::BTreeSet::new();
    for order in [Order::TreeFold, Order::TreePairwise] {
        let two_levels = vec![vec![Node(1), Leaf(Rank(3)), Node(2), Leaf(Rank(6))], of(&[0, 1, 2]), of(&[4, 5])];
        for tree in [Tree::new(two_levels, 7, order), Tree::flat(7, order)].map(|tree| tree.expect("a tree")) {
            let element = |element| tree.evaluate(|rank| rough(rank.0, element), |a, b| a + b).to_le_bytes();
            let right: Vec<u8> = (0..count).flat_map(element).collect();
            seen.insert(right.clone());
            for algorithm in ALGORITHMS.iter().filter(|algorithm| algorithm.follows_tree) {
                let root = Rank(5);
                let outputs = on_ranks(&mut meshes(7), |mesh| {
                    let place = mesh.place();
                    let schedule =
                        (algorithm.schedule)(&Problem { place, count, root, tree: &tree, shape: Shape::Line });
                    let own: Vec<u8> = (0..count).flat_map(|e| rough(place.rank().0, e).to_le_bytes()).collect();
                    let mut output = vec![0; schedule.layout().output * 4];
                    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count as u64);
                    let kernel = Kernel::new(Dtype::F32, ReduceOp::Sum);
                    let buffers = Buffers::Separate { input: &own, output: &mut output };
                    let ctx = context(0, desc, Path::Ring);
                    execute(mesh, &schedule, kernel.as_ref(), buffers, &ctx, &mut NoInterrupt).expect("no error");
                    output
                });
                for (rank, output) in outputs.iter().enumerate() {
                    let right = match algorithm.pattern {
                        Pattern::ReduceScatter => {
                            let block = Span::of_block(count, 7, rank as u32);
                            &right[block.start * 4..block.end() * 4]
                        }
                        Pattern::Reduce if rank != 5 => &[],
                        _ => &right[..],
                    };
                    assert!(output == right, "{algorithm:?} {order:?} {rank}");
                }
            }
        }
    }
    assert_eq!(seen.len(), 4, "four expressions, and other bits for each");
}

fn partials_travel_in_accumulator_type_and_inputs_in_their_own() {
    // 256 + 1 + 1 + ... in bfloat16: each 1 is lost if a partial sum is rounded.
    let reducing = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern == Pattern::AllReduce);
    for algorithm in reducing {
        let ranks = 5;
        let tree = Tree::flat(ranks, Order::TreeFold).expect("a tree");
        let sent = on_ranks(&mut meshes(ranks), |mesh| {
            let place = mesh.place();
            let schedule =
                (algorithm.schedule)(&Problem { place, count: 10, root: Rank(0), tree: &tree, shape: Shape::Line });
            let value = if place.rank() == Rank(0) { 256 } else { 1 };
            let mut buffer = encode(Dtype::Bf16, [value; 10]);
            let desc = OpDesc::all_reduce(Dtype::Bf16, ReduceOp::Sum, 10);
            let kernel = Kernel::new(Dtype::Bf16, ReduceOp::Sum);
            let ctx = context(0, desc, Path::Ring);
            execute(mesh, &schedule, kernel.as_ref(), &mut buffer[..], &ctx, &mut NoInterrupt).expect("no error");
            assert_eq!(buffer, encode(Dtype::Bf16, [260; 10]), "{algorithm:?}");
            assert_eq!(mesh.sent_bytes(), schedule.sent_bytes(2, 4));
            mesh.sent_bytes()
        });
        assert!(sent.iter().sum::<u64>() > 0);
    }
}

fn buffers_of_wrong_length_are_refused() {
    let mut meshes = meshes(2);
    let results = on_ranks(&mut meshes, |mesh| {
        let apart = pairwise::all_to_all(mesh.place(), 4);
        let ctx = context(0, OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4), Path::Ring);
        let refused = |result: Result<(), ExecError>| assert!(matches!(result, Err(ExecError::Invalid { .. })));
        refused(execute(mesh, &apart, None, &mut [0; 16][..], &ctx, &mut NoInterrupt));
        for (input, output) in [(15, 16), (16, 12)] {
            let mut output = vec![0; output];
            let buffers = Buffers::Separate { input: &vec![0; input], output: &mut output };
            refused(execute(mesh, &apart, None, buffers, &ctx, &mut NoInterrupt));
        }
        let buffers = Buffers::Separate { input: &[1; 16], output: &mut [0; 16] };
        execute(mesh, &apart, None, buffers, &ctx, &mut NoInterrupt)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}
