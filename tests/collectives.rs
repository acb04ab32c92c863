//! Every collective on every path over real sockets, with critical sizes; and messages, sub-communicators and buckets.

mod common;

use common::{Cluster, plain};
use std::time::Duration;
use sumac::controller::ControllerConfig;
use sumac::schedule::Shape;
use sumac::select::CostTable;
use sumac::testing::{LocalCluster, LocalClusterConfig};
use sumac::{
    Algo, BUCKET_BYTES, Buffers, CallOptions, Cart, Collective, Communicator, Dtype, Error, JoinConfig, OpDesc, Order,
    Path, ReduceOp,
};
use sumac_hal::ids::Rank;

const BY_RELAYS: &str = "[[override]]\ncollective = \"all_to_all_v\"\npath = \"hier-pairwise\"\n";

/// Return element `i` of a rank's input. Sums of eight inputs wrap, so that errors do not cancel out.
fn value(rank: u32, i: usize) -> u32 {
    (i as u32 + 1).wrapping_mul(0x9e37_79b9) ^ rank.wrapping_mul(0x85eb_ca6b)
}

fn total(ranks: u32, i: usize) -> u32 {
    (0..ranks).fold(0, |sum: u32, rank| sum.wrapping_add(value(rank, i)))
}

fn block(count: usize, ranks: u32, rank: u32) -> std::ops::Range<usize> {
    let start = |rank: u32| rank as usize * count / ranks as usize;
    start(rank)..start(rank + 1)
}

/// Return a rank's input and its expected output.
fn expected(desc: &OpDesc, ranks: u32, rank: u32) -> (Vec<u32>, Vec<u32>) {
    let count = desc.count as usize;
    let own = block(count, ranks, rank);
    let (root, at_root) = (desc.root.0, desc.root.0 == rank);
    let mine = |elements: std::ops::Range<usize>| elements.map(|i| value(rank, i)).collect::<Vec<_>>();
    let owned = |i: usize| (0..ranks).find(|&owner| block(count, ranks, owner).contains(&i)).expect("an owner");
    let all: Vec<u32> = (0..count).map(|i| total(ranks, i)).collect();
    let gathered: Vec<u32> = (0..count).map(|i| value(owned(i), i)).collect();
    match desc.collective {
        Collective::AllReduce => (mine(0..count), all),
        Collective::Reduce => (mine(0..count), if at_root { all } else { vec![] }),
        Collective::Broadcast => {
            (if at_root { mine(0..count) } else { vec![] }, (0..count).map(|i| value(root, i)).collect())
        }
        Collective::ReduceScatter => (mine(0..count), all[own].to_vec()),
        Collective::AllGather => (mine(own), gathered),
        Collective::Gather => (mine(own), if at_root { gathered } else { vec![] }),
        Collective::Scatter => (if at_root { mine(0..count) } else { vec![] }, own.map(|i| value(root, i)).collect()),
        Collective::AllToAll => {
            (mine(0..count), (0..ranks).flat_map(|from| own.clone().map(move |i| value(from, i))).collect())
        }
        _ => (vec![], vec![]),
    }
}

fn describe(collective: Collective, root: u32, count: u64) -> OpDesc {
    let op = collective.reduces().then_some(ReduceOp::Sum);
    let dtype = (collective != Collective::Barrier).then_some(Dtype::U32);
    OpDesc { collective, dtype, op, root: Rank(if collective.is_rooted() { root } else { 0 }), count }
}

/// Run an operation with `algo`, if possible; return the path it used.
fn run(comm: &Communicator, desc: &OpDesc, algo: Algo) -> Option<Path> {
    let (input, expected) = expected(desc, comm.size(), comm.rank());
    let mut output = vec![0_u32; expected.len()];
    let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
    let buffers = Buffers::Separate { input: bytes(&input), output: bytes_mut(&mut output) };
    match comm.run(desc, buffers, &options) {
        Ok(outcome) => {
            assert!(output == expected, "{desc} by {algo} at rank {} of {}", comm.rank(), comm.size());
            Some(outcome.path)
        }
        Err(Error::NotPossible(_)) => None,
        Err(error) => panic!("{desc} by {algo}: {error}"),
    }
}

fn bytes(values: &[u32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn bytes_mut(values: &mut [u32]) -> &mut [u8] {
    bytemuck::cast_slice_mut(values)
}

#[test]
fn every_collective_gives_exact_results_by_every_path() {
    let cluster = Cluster::start(2, 4);
    for ranks in [1, 2, 3, 4, 7, 8] {
        let paths = cluster.run(&format!("all-{ranks}"), ranks, plain, |comm| {
            let mut paths = std::collections::BTreeSet::new();
            for &collective in Collective::ALL.iter().filter(|&&collective| collective != Collective::AllToAllV) {
                for count in [0, 1, 13, 5 * 1024 + 1] {
                    let desc = describe(collective, ranks - 1, count);
                    for algo in Algo::ALL {
                        let path = run(&comm, &desc, algo);
                        assert!(algo != Algo::Auto || path.is_some(), "{desc} has no path");
                        paths.extend(path.map(|path| (collective, path)));
                    }
                }
            }
            comm.leave();
            paths
        });
        assert!(paths.windows(2).all(|pair| pair[0] == pair[1]), "ranks used different paths");
        let offloaded = paths[0].iter().filter(|(_, path)| *path == Path::Tree).count();
        assert_eq!(offloaded, if ranks == 1 { 0 } else { 6 }, "six collectives in the network: {:?}", paths[0]);
        let by_schedules = paths[0].iter().filter(|(_, path)| *path != Path::Tree).count();
        assert_eq!(by_schedules, if ranks == 1 { 9 } else { 50 }, "{:?}", paths[0]);
    }
}

const SHAPED: [(Algo, Path); 4] = [
    (Algo::Ring2d, Path::Ring2d),
    (Algo::Torus2d, Path::Torus2d),
    (Algo::Mesh2d, Path::Mesh2d),
    (Algo::HierarchicalRing, Path::HierarchicalRing),
];

#[test]
fn algorithms_of_several_dimensions_give_exact_results_in_every_shape() {
    let cluster = Cluster::start(2, 4);
    for (ranks, shape) in [(4, "2x2"), (6, "2x3"), (6, "servers:2"), (8, "2x2x2"), (8, "servers:4"), (9, "3x3")] {
        let configure = |config: &mut JoinConfig| config.set("shape", shape).expect("a shape");
        cluster.run(&format!("shaped-{ranks}-{}", shape.replace(':', "-")), ranks, configure, |comm| {
            assert_eq!(comm.facts().shape.to_string(), shape);
            for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
                for count in [0, 1, 13, 5 * 1024 + 1] {
                    let desc = describe(collective, 0, count);
                    for (algo, path) in SHAPED {
                        assert_eq!(run(&comm, &desc, algo), Some(path), "{desc} by {algo} in {shape}");
                    }
                }
            }
            for count in [0, 1, 13, 5 * 1024 + 1] {
                let path = run(&comm, &describe(Collective::AllToAll, 0, count), Algo::HierarchicalPairwise);
                assert_eq!(path, Some(Path::HierarchicalPairwise), "{count} elements in {shape}");
            }
            for algo in [Algo::Swing, Algo::SwingLatency] {
                assert!(run(&comm, &describe(Collective::AllReduce, 0, 777), algo).is_some());
            }
            // Half of the ranks are no such grid.
            let half = comm.split(Some(comm.rank() % 2), 0).expect("a split").expect("a color");
            assert_eq!(half.facts().shape, Shape::Line);
            assert_eq!(run(&half, &describe(Collective::AllReduce, 0, 13), Algo::Ring2d), None);
            let all = comm.split(Some(0), 0).expect("a split").expect("a color");
            assert_eq!(all.facts().shape.to_string(), shape, "as many ranks keep it");
            [half, all, comm].into_iter().for_each(Communicator::leave);
        });
    }
}

#[test]
fn ranks_in_a_line_refuse_algorithms_of_several_dimensions_by_name() {
    let cluster = Cluster::start(1, 4);
    cluster.run("line", 4, plain, |comm| {
        for (algo, path) in SHAPED {
            let why = comm.explain(&describe(Collective::AllReduce, 0, 13), algo).to_string();
            assert!(why.contains(&format!("{} needs at least two dimensions", path.name())), "{why}");
            assert_eq!(run(&comm, &describe(Collective::AllReduce, 0, 13), algo), None);
        }
        comm.leave();
    });
}

/// In place, the shorter of input and output is the rank's block in the longer one.
#[test]
fn in_place_blocks_give_exact_results() {
    let cluster = Cluster::start(1, 4);
    cluster.run("in-place", 3, plain, |comm| {
        for algo in [Algo::Tree, Algo::Ring] {
            let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
            let count = 1000;
            let own = block(count, 3, comm.rank());
            let mut buffer: Vec<u32> = (0..count).map(|i| value(comm.rank(), i)).collect();
            let desc = describe(Collective::ReduceScatter, 0, count as u64);
            comm.run(&desc, bytes_mut(&mut buffer), &options).expect("a reduce-scatter");
            let sums: Vec<u32> = own.clone().map(|i| total(3, i)).collect();
            assert_eq!(buffer[own.clone()], sums);
            // And back: each rank contributes the block that it just received.
            let desc = describe(Collective::AllGather, 0, count as u64);
            comm.run(&desc, bytes_mut(&mut buffer), &options).expect("an all-gather");
            assert_eq!(buffer, (0..count).map(|i| total(3, i)).collect::<Vec<_>>());
        }
        let mut buffer: Vec<u32> = (0..12).map(|i| value(comm.rank(), i)).collect();
        let desc = describe(Collective::AllToAll, 0, 12);
        comm.run(&desc, bytes_mut(&mut buffer), &CallOptions::default()).expect("an all-to-all");
        assert_eq!(buffer, expected(&desc, 3, comm.rank()).1);
        comm.leave();
    });
}

#[test]
fn typed_methods_take_the_lengths_of_nccl() {
    let cluster = Cluster::start(1, 4);
    cluster.run("typed", 4, plain, |comm| {
        let rank = comm.rank();
        let mut sum = [0.0_f64; 3];
        comm.all_reduce_into(&[1.5, f64::from(rank), -1.0], &mut sum, ReduceOp::Avg).expect("an average");
        assert_eq!(sum, [1.5, 1.5, -1.0]);
        let mut block = [0_i8; 2];
        comm.reduce_scatter(&[1, 2, 3, 4, 5, 6, 7, 8], &mut block, ReduceOp::Sum).expect("a reduce-scatter");
        assert_eq!(block, [8 * rank as i8 + 4, 8 * rank as i8 + 8]);
        let mut all = [0_u16; 8];
        comm.all_gather(&[rank as u16, 100], &mut all).expect("an all-gather");
        assert_eq!(all, [0, 100, 1, 100, 2, 100, 3, 100]);
        // Pairs of a value and an index: the lowest rank of those with the greatest value.
        let mut pair = [f32::from_bits(0x4000_0000), f32::from_bits(rank)];
        comm.all_reduce(&mut pair, ReduceOp::MaxLoc).expect("a location");
        assert_eq!((pair[0], pair[1].to_bits()), (2.0, 0));
        let scalar = CallOptions { scalar: Some(f64::from(rank)), ..CallOptions::default() };
        let mut scaled = [10_i32];
        comm.all_reduce_with(&mut scaled, ReduceOp::PremulSum, &scalar).expect("a scaled sum");
        assert_eq!(scaled, [60]);
        for error in [
            comm.reduce_scatter(&[1_u8; 7], &mut [0; 2], ReduceOp::Sum),
            comm.all_gather(&[1_u8; 2], &mut [0; 7]),
            comm.reduce(&mut [1.0_f32], ReduceOp::Bxor, 0),
            comm.broadcast(&mut [1.0_f32], 4),
            comm.all_reduce(&mut [1.0_f32; 3], ReduceOp::MinLoc),
            comm.all_reduce_with(&mut [1.0_f32], ReduceOp::Sum, &scalar),
        ] {
            assert!(matches!(error, Err(Error::Argument(_))), "{error:?}");
        }
        comm.barrier().expect("nothing was started");
        comm.leave();
    });
}

#[test]
fn started_operations_of_all_kinds_overlap() {
    let two_levels = LocalClusterConfig { levels: 2, devices: 2, ..LocalClusterConfig::new(4) };
    LocalCluster::start_with(two_levels).expect("a cluster").run(|comm| {
        let rank = comm.rank();
        let inputs: Vec<u32> = (0..4000).map(|i| value(rank, i)).collect();
        let scattered = comm.start_reduce_scatter(inputs.clone(), ReduceOp::Sum).expect("started");
        let gathered = comm.start_all_gather(vec![rank; 500]).expect("started");
        let reduced = comm.start_reduce(inputs.clone(), ReduceOp::Sum, 2).expect("started");
        let broadcast = comm.start_broadcast(inputs.clone(), 3).expect("started");
        let broadcast = broadcast.wait().expect("a broadcast").0;
        assert!(broadcast.iter().enumerate().all(|(i, &x)| x == value(3, i)));
        let reduced = reduced.wait().expect("a reduction").0;
        let whole = |i| if rank == 2 { total(4, i) } else { value(rank, i) };
        assert!(reduced.iter().enumerate().all(|(i, &x)| x == whole(i)));
        let gathered = gathered.wait().expect("an all-gather").0;
        assert!(gathered.iter().enumerate().all(|(i, &x)| x == i as u32 / 500));
        let scattered = scattered.wait().expect("a reduce-scatter").0;
        let first = rank as usize * 1000;
        assert!(scattered.iter().enumerate().all(|(i, &x)| x == total(4, first + i)));
        comm.leave();
    });
}

#[test]
fn messages_and_uneven_blocks() {
    let cluster = Cluster::start(1, 4);
    cluster.run("messages", 4, plain, |comm| {
        let (rank, ranks) = (comm.rank(), comm.size());
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let early = comm.start_receive::<u32>(70_000, before, 7).expect("posted");
        let mine: Vec<u32> = (0..70_000).map(|i| value(rank, i)).collect();
        let late = comm.start_send(mine, next, 7).expect("posted");
        comm.barrier().expect("messages do not block collectives");
        let theirs = early.wait().expect("received");
        assert!(theirs.iter().enumerate().all(|(i, &x)| x == value(before, i)));
        late.wait().expect("sent");
        let mut from = [0.0_f64];
        comm.send_receive((&[f64::from(rank)], next), (&mut from, before), 1).expect("a shift round the ring");
        assert_eq!(from, [f64::from(before)]);
        // Rank r sends r + to elements to each.
        let counts = |from: u32| (0..ranks).map(|to| (from + to) as usize).collect::<Vec<_>>();
        let (sent, received) = (counts(rank), counts(rank));
        let input: Vec<u32> = (0..ranks).flat_map(|to| vec![rank * 10 + to; (rank + to) as usize]).collect();
        let mut output = vec![0; received.iter().sum()];
        comm.all_to_all_v((&input, &sent), (&mut output, &received)).expect("an exchange");
        let wanted: Vec<u32> = (0..ranks).flat_map(|from| vec![from * 10 + rank; (rank + from) as usize]).collect();
        assert_eq!(output, wanted);
        comm.leave();
    });
}

#[test]
fn override_sends_uneven_blocks_through_relays_where_there_are_servers() {
    let table = CostTable::emulated().with_overrides(BY_RELAYS).expect("an override file");
    let cluster = Cluster::start_with(1, 4, 1, ControllerConfig { table, ..ControllerConfig::new() });
    for (shape, expected) in [("servers:2", Path::HierarchicalPairwise), ("line", Path::Pairwise)] {
        let configure = |config: &mut JoinConfig| config.set("shape", shape).expect("a shape");
        cluster.run(&shape.replace(':', "-"), 4, configure, |comm| {
            let own = comm.rank() as usize;
            let (sent, input) = ([0, 1, 2, 3], [comm.rank(); 6]);
            let mut output = vec![9; 4 * own];
            let outcome = comm.all_to_all_v((&input, &sent), (&mut output, &[own; 4])).expect("an exchange");
            assert_eq!(outcome.path, expected, "{shape}");
            assert!(output.iter().enumerate().all(|(at, &from)| from as usize == at / own), "{output:?}");
            comm.leave();
        });
    }
}

#[test]
fn sub_communicators_have_their_own_order_and_sequence() {
    let cluster = Cluster::start(2, 4);
    cluster.run("world", 8, plain, |comm| {
        let grid = Cart::new(&[("data", 2), ("tensor", 4)]).expect("a grid");
        let tensor = comm.split_along(&grid, "tensor").expect("a line");
        let data = comm.split_along(&grid, "data").expect("a line");
        assert_eq!((tensor.size(), data.size(), comm.name()), (4, 2, "world".to_owned()));
        assert_eq!(tensor.name(), format!("world/0.{}", comm.rank() / 4 * 4));
        // Operations of three communicators at the same time.
        let mut started = Vec::new();
        for _ in 0..3 {
            for group in [&comm, &tensor, &data] {
                started
                    .push((group.size(), group.start_all_reduce(vec![1_i64; 3000], ReduceOp::Sum).expect("started")));
            }
        }
        for (size, handle) in started.into_iter().rev() {
            let (sum, outcome) = handle.wait().expect("a sum");
            assert!(sum.iter().all(|&x| x == i64::from(size)));
            assert_eq!(outcome.fallback, None);
        }
        // Keys reverse the order; ranks without a color get no communicator.
        let color = (comm.rank() < 5).then_some(1);
        let key = -i64::from(comm.rank());
        let part = comm.split_with(color, key, |config| config.order = Order::TreeFold).expect("a split");
        assert_eq!(part.as_ref().map(Communicator::rank), (comm.rank() < 5).then(|| 4 - comm.rank()));
        if let Some(part) = part {
            let explanation = part.explain(&OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 100), Algo::Ring);
            assert!(explanation.chosen.is_none(), "a ring must be ruled out by the declared order: {explanation}");
            let mut sum = [1e8_f32 * if part.rank() == 2 { -1.0 } else { 1.0 }, 1.0];
            part.all_reduce(&mut sum, ReduceOp::Sum).expect("a sum");
            assert_eq!(sum[1], 5.0);
            part.leave();
        }
        [tensor, data, comm].into_iter().for_each(Communicator::leave);
    });
}

#[test]
fn buckets_coalesce_tensors() {
    LocalCluster::start(3).expect("a cluster").run(|comm| {
        let lens = [3, 0, 70, 5000, 1, 40];
        for (limit, buckets) in [(BUCKET_BYTES, 1), (400, 3), (1, 6)] {
            let mut tensors: Vec<Vec<f32>> = lens.iter().map(|&len| vec![comm.rank() as f32; len]).collect();
            let mut views: Vec<&mut [f32]> = tensors.iter_mut().map(Vec::as_mut_slice).collect();
            let outcomes = comm.all_reduce_bucketed(&mut views, ReduceOp::Sum, limit).expect("sums");
            assert_eq!(outcomes.len(), buckets);
            assert!(
                tensors.iter().zip(lens).all(|(tensor, len)| tensor.len() == len && tensor.iter().all(|&x| x == 3.0))
            );
        }
        comm.leave();
    });
}

/// Rank 2 does not call, so only the cancellation can end the others' calls.
#[test]
fn cancelled_rank_is_lost_to_the_others() {
    let cluster = Cluster::start(1, 4);
    for (algo, before_the_call) in [(Algo::Tree, false), (Algo::Ring, false), (Algo::Tree, true), (Algo::Ring, true)] {
        let others_have_ended = std::sync::Barrier::new(3);
        let ends = cluster.run(&format!("cancel-{algo}-{before_the_call}"), 3, plain, |comm| {
            let options =
                CallOptions { algo: Some(algo), deadline: Some(Duration::from_secs(30)), ..CallOptions::default() };
            let call = || comm.all_reduce_with(&mut [1.0_f32], ReduceOp::Sum, &options);
            let end = match comm.rank() {
                0 if before_the_call => {
                    comm.canceller().cancel();
                    call()
                }
                0 => std::thread::scope(|scope| {
                    let canceller = comm.canceller();
                    scope.spawn(move || canceller.cancel());
                    call()
                }),
                1 => call(),
                _ => {
                    others_have_ended.wait();
                    return None;
                }
            };
            others_have_ended.wait();
            Some((end, comm.barrier()))
        });
        assert!(matches!(ends[0], Some((Err(Error::Cancelled), Err(Error::Ended(_))))), "{:?}", ends[0]);
        let is_reported = match &ends[1] {
            Some((Err(Error::RanksFailed { ranks, .. }), Err(_))) => ranks[..] == [Rank(0)],
            Some((Err(Error::Schedule(_)), Err(_))) => true,
            _ => false,
        };
        assert!(is_reported, "by {algo}, before the call: {before_the_call}: {:?}", ends[1]);
    }
}

/// No rank sends and no socket is active, so only the cancellation can end the wait.
#[test]
fn cancel_ends_a_wait_for_a_message() {
    let cluster = Cluster::start(1, 2);
    let began = std::time::Instant::now();
    let done = std::sync::Barrier::new(2);
    cluster.run("cancel-message", 2, plain, |comm| {
        if comm.rank() == 0 {
            let canceller = comm.canceller();
            let end = std::thread::scope(|scope| {
                scope.spawn(move || canceller.cancel());
                comm.receive(&mut [0_u8], 1, 0)
            });
            assert_eq!(end, Err(Error::Cancelled));
        }
        done.wait();
    });
    assert!(began.elapsed() < Duration::from_secs(30), "the wait must end before half of the deadline");
}

/// Of P bytes a rank sends P through the tree, 2P(N-1)/N by ring, halving-doubling and others, and half of that in
/// reduce-scatter and all-gather. Bytes are counted where they are sent; headers are the excess.
#[test]
fn bytes_on_the_wire_are_those_of_the_formulas() {
    let cluster = Cluster::start(1, 4);
    let size = 4 << 20;
    let in_a_grid = |config: &mut JoinConfig| config.set("shape", "2x2").expect("a shape");
    let sent = cluster.run("bytes", 4, in_a_grid, |comm| {
        let formula_bytes = |formula: f64| (formula * size as f64) as u64;
        let sent = |collective, algo, formula: f64| {
            let desc = describe(collective, 0, size / 4);
            let mut buffer = vec![1_u32; desc.count as usize];
            let options = CallOptions { algo: Some(algo), ..CallOptions::default() };
            let outcome = comm.run(&desc, bytes_mut(&mut buffer), &options);
            let outcome = outcome.unwrap_or_else(|error| panic!("{desc} by {algo}: {error}"));
            // A busy machine may drop packets; retransmissions are not part of the formula.
            let again = outcome.retransmits * u64::from(u16::MAX);
            (outcome.wire_bytes - again.min(outcome.wire_bytes.saturating_sub(formula_bytes(formula)))) as f64
                / size as f64
        };
        let ways = [
            (Collective::AllReduce, Algo::Tree, 1.0),
            (Collective::AllReduce, Algo::Ring, 1.5),
            (Collective::AllReduce, Algo::HalvingDoubling, 1.5),
            (Collective::AllReduce, Algo::FullMesh, 1.5),
            (Collective::AllReduce, Algo::Nhr, 1.5),
            (Collective::AllReduce, Algo::Swing, 1.5),
            (Collective::AllReduce, Algo::Bine, 1.5),
            (Collective::AllReduce, Algo::SwingLatency, 2.0),
            (Collective::AllReduce, Algo::Ring2d, 1.5),
            (Collective::AllReduce, Algo::Torus2d, 1.5),
            (Collective::AllReduce, Algo::Mesh2d, 1.5),
            (Collective::AllReduce, Algo::HierarchicalRing, 1.5),
            (Collective::ReduceScatter, Algo::Tree, 1.0),
            (Collective::ReduceScatter, Algo::Ring, 0.75),
            (Collective::ReduceScatter, Algo::OneShot, 0.75),
            (Collective::ReduceScatter, Algo::Nhr, 0.75),
            (Collective::ReduceScatter, Algo::Pat, 0.75),
            (Collective::ReduceScatter, Algo::Bine, 0.75),
            (Collective::ReduceScatter, Algo::Torus2d, 0.75),
            (Collective::ReduceScatter, Algo::HierarchicalRing, 0.75),
            (Collective::AllGather, Algo::Tree, 0.25),
            (Collective::AllGather, Algo::Ring, 0.75),
            (Collective::AllGather, Algo::Pat, 0.75),
            (Collective::AllGather, Algo::Bine, 0.75),
            (Collective::AllGather, Algo::Torus2d, 0.75),
            (Collective::AllGather, Algo::HierarchicalRing, 0.75),
        ];
        let counted =
            ways.map(|(collective, algo, formula)| (collective, algo, formula, sent(collective, algo, formula)));
        comm.leave();
        counted
    });
    println!("bytes sent by rank 0 of 4, as a share of P = {size} B:");
    for (collective, algo, formula, counted) in sent[0] {
        println!("  {:<16}{:<6} formula {formula:<6} counted {counted:.4}", collective.name(), algo.name());
    }
    for (collective, algo, formula, counted) in sent.into_iter().flatten() {
        assert!(counted >= formula && counted < formula * 1.05, "{collective} by {algo}: {counted} for {formula}");
    }
}
