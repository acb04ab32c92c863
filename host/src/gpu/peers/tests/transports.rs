//! Available transports, selection, and reasons.

use super::*;
use crate::gpu::peers::{PeerTransport, WhyStaged};
use crate::gpu::{GpuBuffers, Group, Request};
use crate::select::Algo;
use sumac_hal::ctrl::Order;

/// All-reduce once at every rank, check the sums, and return each rank's outcome.
fn once(board: &Board, gpus: &[FakeGpu], options: &PeerOptions, algo: Algo) -> Vec<super::super::PeerOutcome> {
    let ranks = gpus.len() as u32;
    on_ranks(board, gpus, |gpu, board_rank| {
        let rank = board_rank.rank;
        let memory = upload(&gpu, &input(Dtype::F32, ReduceOp::Sum, rank, 100));
        let mut peers = PeerGroup::join(gpu.clone(), board_rank, options.clone(), long_deadline()).expect("joined");
        let shared = peers.share(&memory, long_deadline()).expect("shown");
        let types = (Dtype::F32, ReduceOp::Sum, algo);
        let outcome = peers.all_reduce(&shared, types, &[], long_deadline()).expect("reduced");
        assert_eq!(gpu.download_now(&memory), sum_of(Dtype::F32, ReduceOp::Sum, ranks, 100), "rank {rank}");
        outcome
    })
}

#[test]
fn algorithms_of_dimensions_run_in_the_shape_of_all_ranks() {
    let shaped = |text: &str| {
        let group = GroupOptions { shape: text.parse().expect("a shape"), ..small().group };
        PeerOptions { group, ..small() }
    };
    for (text, algo) in [("2x2", Algo::Torus2d), ("2x2", Algo::Mesh2d), ("servers:2", Algo::HierarchicalRing)] {
        for outcome in once(&Board::new(4), &processes(3, &[0, 1, 2, 3]), &shaped(text), algo) {
            assert!(
                matches!(outcome.transport, PeerTransport::Direct(path) if path.name() == algo.name()),
                "{outcome:?}"
            );
        }
    }
    let board = Board::new(2);
    let refusals = on_ranks(&board, &processes(3, &[0, 1]), |gpu, board_rank| {
        let options = shaped(if board_rank.rank == 0 { "line" } else { "servers:1" });
        PeerGroup::join(gpu, board_rank, options, long_deadline()).map(|_| ()).expect_err("other shapes").to_string()
    });
    assert!(refusals.iter().all(|why| why.contains("shape servers:1")), "{refusals:?}");
}

/// Same bits as the schedule in one process, for types whose sums round too.
#[test]
fn schedules_give_the_bits_of_a_single_process() {
    let algos = [Algo::Ring, Algo::HalvingDoubling, Algo::RecursiveDoubling, Algo::Binomial, Algo::Pairwise];
    for (seed, &ranks) in [1_u32, 2, 3, 4, 5].iter().enumerate() {
        for (dtype, op) in [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Avg), (Dtype::I32, ReduceOp::Max)] {
            let gpus = processes(seed as u64, &[0, 1, 0, 2, 1][..ranks as usize]);
            let board = Board::new(ranks);
            let of_peers = on_ranks(&board, &gpus, |gpu, board_rank| {
                let memory = upload(&gpu, &input(dtype, op, board_rank.rank, 77));
                let mut peers = PeerGroup::join(gpu.clone(), board_rank, small(), long_deadline()).expect("joined");
                assert_eq!(peers.why_staged(), None);
                let shared = peers.share(&memory, long_deadline()).expect("shown");
                let mut results = Vec::new();
                for algo in algos {
                    gpu_write(&gpu, &memory, &input(dtype, op, peers.bootstrap().rank, 77));
                    let outcome = peers.all_reduce(&shared, (dtype, op, algo), &[], long_deadline()).expect("reduced");
                    assert!(
                        matches!(outcome.transport, PeerTransport::Direct(path) if path.name() == algo.name()),
                        "{outcome:?}"
                    );
                    results.push(gpu.download_now(&memory));
                }
                results
            });
            for (index, algo) in algos.into_iter().enumerate() {
                let mut group = Group::new(FakeGpu::new(9, ROOM), ranks, small().group).expect("a group");
                let gpu = group.gpu().clone();
                let buffer = |rank| GpuBuffers::InPlace(upload(&gpu, &input(dtype, op, rank, 77)));
                let buffers: Vec<_> = (0..ranks).map(buffer).collect();
                let desc = OpDesc::all_reduce(dtype, op, 77);
                let request = Request { desc, algo, buffers: &buffers, scalars: &[] };
                let work = group.start(&request, &[]).expect("started");
                group.wait(work, long_deadline()).expect("done");
                for (rank, results) in of_peers.iter().enumerate() {
                    let GpuBuffers::InPlace(memory) = &buffers[rank] else { continue };
                    assert_eq!(results[index], gpu.download_now(memory), "{dtype} {op} by {algo}, rank {rank}");
                }
            }
        }
    }
}

fn gpu_write(gpu: &FakeGpu, memory: &FakeMemory, bytes: &[u8]) {
    use crate::gpu::{Gpu, Part};
    let (stream, event) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
    let from = upload(gpu, bytes);
    let part = |memory| Part { memory, at: 0, len_bytes: bytes.len() };
    gpu.copy(&stream, part(memory), part(&from)).expect("handed over");
    gpu.record(&event, &stream).expect("recorded");
    while !gpu.is_done(&event).expect("sound") {}
}

#[test]
fn indirect_operations_are_staged_with_a_reason() {
    let (board, staged) = (Board::new(3), |outcomes: Vec<super::super::PeerOutcome>| {
        let first = outcomes[0].transport.clone();
        for outcome in &outcomes {
            assert_eq!((&outcome.transport, outcome.chunks.len()), (&first, 7), "400 bytes in chunks of 64");
        }
        match first {
            PeerTransport::Staged(why) => why,
            other => panic!("{other:?}"),
        }
    });
    let run = |gpus: &[FakeGpu], options: &PeerOptions| staged(once(&board, gpus, options, Algo::Auto));
    let gpus = processes(1, &[0, 1, 2]);
    gpus[0].disable_peer_access(2, 1);
    let apart = WhyStaged::NoPeerAccess { from: "gpu 1".into(), to: "gpu 2".into() };
    assert_eq!(run(&gpus, &small()), apart, "rank 1 is the first who finds out");
    let gpus = processes(2, &[0, 0, 0]);
    gpus[0].without_handles("the platform has none");
    let none = WhyStaged::NoHandles { rank: 0, why: "the platform has none".into() };
    assert_eq!(run(&gpus, &small()), none);
    let gpus = [processes(3, &[0, 0]), processes(3, &[0])].concat();
    assert_eq!(run(&gpus, &small()), WhyStaged::OtherHost { a: 0, b: 2 });
    let gpus = processes(4, &[0, 1, 2]);
    assert_eq!(run(&gpus, &PeerOptions { direct: false, ..small() }), WhyStaged::Asked);
    let board = Board { cost_s: 0.0, ..Board::new(3) };
    let cheap = staged(once(&board, &gpus, &small(), Algo::Auto));
    assert!(matches!(cheap, WhyStaged::Cost { direct_us, staged_us } if staged_us < direct_us), "{cheap}");
    // A requested schedule is used whatever it costs.
    assert!(
        once(&board, &gpus, &small(), Algo::Ring)
            .iter()
            .all(|outcome| outcome.transport == PeerTransport::Direct(Path::Ring))
    );
}

/// One process with a GPU for each rank, as threads: no handle is needed.
#[test]
fn ranks_of_one_process_need_no_handles() {
    let machine = FakeGpu::new(5, ROOM);
    let gpus = [machine.on_gpu(0), machine.on_gpu(1)];
    let outcomes = once(&Board::new(2), &gpus, &small(), Algo::Auto);
    assert!(outcomes.iter().all(|outcome| matches!(outcome.transport, PeerTransport::Direct(_))), "{outcomes:?}");
}

#[test]
fn rest_is_direct_after_the_network_loses_its_tree() {
    let options = PeerOptions { network_first: true, ..small() };
    let board = Board { tree_chunks: 2, ..Board::new(3) };
    for outcome in once(&board, &processes(6, &[0, 1, 2]), &options, Algo::Auto) {
        assert_eq!(outcome.transport, PeerTransport::Staged(WhyStaged::Asked));
        assert_eq!(outcome.chunks, [Path::Tree, Path::Tree, Path::Ring]);
        assert_eq!(outcome.direct_bytes, 400 - 3 * 64);
        assert!(outcome.fallback.is_some_and(|why| why.contains("its device died")));
    }
    // Nothing is left over while the tree lives, and nothing can go directly without peer access.
    let whole = once(&Board::new(3), &processes(7, &[0, 1, 2]), &options, Algo::Auto);
    assert!(whole.iter().all(|outcome| outcome.direct_bytes == 0 && outcome.chunks == [Path::Tree; 7]));
    let gpus = processes(8, &[0, 1, 2]);
    gpus[0].disable_peer_access(0, 2);
    let apart = once(&board, &gpus, &options, Algo::Auto);
    assert!(apart.iter().all(|outcome| outcome.direct_bytes == 0 && outcome.chunks[6] == Path::Ring));
}

#[test]
fn nccl_is_used_or_reports_why_not() {
    let options = PeerOptions { nccl: true, ..small() };
    let (board, gpus) = (Board::new(3), processes(9, &[0, 1, 2]));
    let by = |gpus: &[FakeGpu], options: &PeerOptions, algo| once(&board, gpus, options, algo)[0].transport.clone();
    assert_eq!(by(&gpus, &options, Algo::Nccl), PeerTransport::Nccl);
    assert_eq!(by(&gpus, &options, Algo::Auto), PeerTransport::Nccl, "the cheapest at 400 bytes");
    assert_eq!(by(&gpus, &options, Algo::Ring), PeerTransport::Direct(Path::Ring));
    // It needs no peer access.
    gpus[0].disable_peer_access(0, 1);
    assert_eq!(by(&gpus, &options, Algo::Auto), PeerTransport::Nccl);
    let why = |gpus: &[FakeGpu], options: &PeerOptions| {
        let whys = on_ranks(&board, gpus, |gpu, board_rank| {
            let memory = upload(&gpu, &[0; 40]);
            let mut peers = PeerGroup::join(gpu, board_rank, options.clone(), long_deadline()).expect("joined");
            let shared = peers.share(&memory, long_deadline()).expect("shown");
            let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 10);
            let explanation = peers.explain(&shared, &desc, Algo::Auto);
            assert!(
                explanation.transport.as_ref().is_ok_and(|transport| *transport != PeerTransport::Nccl),
                "{explanation}"
            );
            let error =
                peers.start(&shared, (&desc, Algo::Nccl), &[], long_deadline()).map(|_| ()).expect_err("no NCCL");
            assert!(explanation.to_string().contains("nccl          ruled out: "), "{explanation}");
            error.to_string()
        });
        assert!(whys.iter().all(|why| *why == whys[0]), "{whys:?}");
        whys[0].clone()
    };
    let contains = |why: String, words: &str| assert!(why.contains(words), "{why}");
    let gpus = processes(10, &[0, 1, 2]);
    contains(why(&gpus, &PeerOptions { nccl: false, ..small() }), "disabled by the options");
    let ordered = GroupOptions { order: Order::TreeFold, ..small().group };
    contains(why(&gpus, &PeerOptions { group: ordered, ..options.clone() }), "cannot preserve the declared order");
    contains(why(&processes(11, &[0, 1, 0]), &options), "ranks 0 and 2 share a GPU");
    gpus[0].with_nccl(Some(22_203));
    contains(why(&gpus, &options), "rank 0 has version 22203, but 22400 is required");
    gpus[0].with_nccl(None);
    contains(why(&gpus, &options), "cannot load libnccl.so");
    let other = FakeGpu::new(12, ROOM).process(0);
    other.with_nccl(Some(22_900));
    let mixed = [processes(12, &[0, 1]), vec![other]].concat();
    contains(why(&mixed, &options), "22400 at rank 0, 22900 at rank 2");
}
