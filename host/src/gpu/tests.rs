//! GPU logic on the fake GPU: values, order, completion.

use super::*;
use crate::exec::tests::{contribution, expected};
use crate::schedule::Shape;
use crate::select::Algo;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};

mod completion;
mod errors;
mod programs;
mod shapes;
mod staging;
mod traces;

/// Long enough for any machine; no test waits for it.
const LONG: Duration = Duration::from_secs(60);
const ROOM: usize = 1 << 24;
fn small() -> GroupOptions {
    let table = crate::select::CostTable::gpu();
    GroupOptions {
        order: Order::Arrival,
        shape: Shape::Line,
        table,
        piece_bytes: 64,
        serial_bytes: 0,
        replay_bytes: 0,
        grace: Duration::from_secs(20),
    }
}

fn group(seed: u64, ranks: u32) -> Group<FakeGpu> {
    Group::new(FakeGpu::new(seed, ROOM), ranks, small()).expect("a group")
}

fn inputs(dtype: Dtype, op: ReduceOp, ranks: u32, count: usize) -> Vec<Vec<u8>> {
    let input = |rank| (0..count).flat_map(|element| contribution(dtype, op, rank, element)).collect();
    (0..ranks).map(input).collect()
}

fn long_deadline() -> Instant {
    Instant::now() + LONG
}

fn in_place(gpu: &FakeGpu, inputs: &[Vec<u8>]) -> Vec<GpuBuffers<FakeMemory>> {
    inputs.iter().map(|input| GpuBuffers::InPlace(gpu.upload_now(input).expect("room"))).collect()
}

fn results(gpu: &FakeGpu, buffers: &[GpuBuffers<FakeMemory>]) -> Vec<Vec<u8>> {
    let output = |each: &GpuBuffers<FakeMemory>| match each {
        GpuBuffers::InPlace(memory) | GpuBuffers::Separate { output: memory, .. } => gpu.download_now(memory),
    };
    buffers.iter().map(output).collect()
}

fn request(desc: OpDesc, algo: Algo, buffers: &[GpuBuffers<FakeMemory>]) -> Request<'_, FakeMemory> {
    Request { desc, algo, buffers, scalars: &[] }
}

#[test]
fn every_type_operator_and_algorithm_gives_the_reduction() {
    let algos =
        [Algo::Ring, Algo::HalvingDoubling, Algo::RecursiveDoubling, Algo::Binomial, Algo::HostTree, Algo::Pairwise];
    let mut seed = 0;
    for &dtype in Dtype::ALL {
        for &op in ReduceOp::ALL {
            if sumac_hal::reduce::Kernel::new(dtype, op).is_none() {
                continue;
            }
            seed += 1;
            let (algo, ranks) = (algos[seed % algos.len()], [1, 2, 3, 4, 5, 8][seed / 3 % 6]);
            let count = [0, 1, 7, 100][seed % 4];
            let mut group = group(seed as u64, ranks);
            let inputs = inputs(dtype, op, ranks, count);
            let gpu = group.gpu().clone();
            let mut buffers = in_place(&gpu, &inputs);
            if seed % 2 == 0 {
                for each in &mut buffers {
                    let output = gpu.alloc(inputs[0].len()).expect("room");
                    *each = GpuBuffers::Separate { input: each.input().clone(), output };
                }
            }
            let desc = OpDesc::all_reduce(dtype, op, count as u64);
            let work = group.start(&request(desc, algo, &buffers), &[]).expect("started");
            group.wait(work, long_deadline()).expect("done");
            let wanted: Vec<u8> = (0..count).flat_map(|element| expected(dtype, op, ranks, element)).collect();
            for (rank, result) in results(&gpu, &buffers).into_iter().enumerate() {
                assert_eq!(result, wanted, "{dtype} {op} by {algo}, rank {rank} of {ranks}");
            }
            if let GpuBuffers::Separate { input, .. } = &buffers[0] {
                assert_eq!(gpu.download_now(input), inputs[0], "an input stays as it is");
            }
        }
    }
}

/// Rounded results match too: the bits are those of the same schedule over CPU memory.
#[test]
fn results_match_the_same_schedule_over_tcp_bit_for_bit() {
    let (ranks, count) = (5, 301);
    for (path, algo) in [(Path::Ring, Algo::Ring), (Path::HalvingDoubling, Algo::HalvingDoubling)] {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F64] {
            let mut draws = 7_u64;
            let mut draw = || {
                draws = draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (draws >> 40) as f32 / 1e4 - 700.0
            };
            let mut element = || match dtype {
                Dtype::F64 => f64::from(draw()).to_le_bytes().to_vec(),
                // Any upper half of an f32 is a bf16.
                _ => draw().to_le_bytes()[4 - dtype.size_bytes()..].to_vec(),
            };
            let inputs: Vec<Vec<u8>> = (0..ranks).map(|_| (0..count).flat_map(|_| element()).collect()).collect();
            let mut meshes = crate::exec::tests::meshes(ranks);
            let over_connections = crate::exec::tests::on_ranks(&mut meshes, |mesh| {
                let mut buffer = inputs[mesh.place().rank().0 as usize].clone();
                crate::exec::tests::all_reduce(mesh, 0, path, dtype, ReduceOp::Sum, &mut buffer).expect("reduced");
                buffer
            });
            let mut group = group(3, ranks);
            let gpu = group.gpu().clone();
            let buffers = in_place(&gpu, &inputs);
            let desc = OpDesc::all_reduce(dtype, ReduceOp::Sum, count as u64);
            let work = group.start(&request(desc, algo, &buffers), &[]).expect("started");
            group.wait(work, long_deadline()).expect("done");
            assert_eq!(results(&gpu, &buffers), over_connections, "{dtype} by {algo}");
        }
    }
}

#[test]
fn other_collectives_give_their_defined_results() {
    let (ranks, count) = (5_u32, 23_usize);
    let whole: Vec<u8> = (0..count as u8).collect();
    let block = |rank: u32| rank as usize * count / 5..(rank as usize + 1) * count / 5;
    let mut group = group(9, ranks);
    let gpu = group.gpu().clone();
    let desc = OpDesc {
        collective: Collective::AllGather,
        dtype: Some(Dtype::U8),
        op: None,
        root: Rank(0),
        count: count as u64,
    };
    for algo in [Algo::Ring, Algo::HalvingDoubling, Algo::Bruck] {
        let separate = |rank: u32| GpuBuffers::Separate {
            input: gpu.upload_now(&whole[block(rank)]).expect("room"),
            output: gpu.alloc(count).expect("room"),
        };
        let buffers: Vec<_> = (0..ranks).map(separate).collect();
        let work = group.start(&request(desc, algo, &buffers), &[]).expect("started");
        group.wait(work, long_deadline()).expect("done");
        assert!(results(&gpu, &buffers).iter().all(|result| *result == whole), "{algo}");
    }
    let desc = OpDesc { collective: Collective::Broadcast, root: Rank(3), ..desc };
    let inputs: Vec<Vec<u8>> = (0..ranks).map(|rank| if rank == 3 { whole.clone() } else { vec![0; count] }).collect();
    let buffers = in_place(&gpu, &inputs);
    let work = group.start(&request(desc, Algo::Auto, &buffers), &[]).expect("started");
    assert_eq!(work.path(), Path::Binomial);
    group.wait(work, long_deadline()).expect("done");
    assert!(results(&gpu, &buffers).iter().all(|result| *result == whole));
}

#[test]
fn operation_waits_for_its_producer_without_blocking_the_host() {
    let mut group = group(4, 4);
    let gpu = group.gpu().clone();
    let inputs = inputs(Dtype::F32, ReduceOp::Sum, 4, 50);
    let zeros = vec![vec![0; 200]; 4];
    let buffers = in_place(&gpu, &zeros);
    let (producer, produced) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
    let gate = gpu.gate(&producer);
    for (each, input) in buffers.iter().zip(&inputs) {
        let source = gpu.upload_now(input).expect("room");
        let part = |memory| Part { memory, at: 0, len_bytes: 200 };
        gpu.copy(&producer, part(each.input()), part(&source)).expect("handed over");
        // The fake GPU checks queued work: memory must outlive it.
        std::mem::forget(source);
    }
    gpu.record(&produced, &producer).expect("recorded");
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 50);
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[&produced]).expect("started");
    // A consumer for which the host does not wait either.
    let (consumer, copy) = (gpu.stream().expect("a stream"), gpu.upload_now(&zeros[0]).expect("room"));
    gpu.wait(&consumer, work.done()).expect("handed over");
    let part = |memory| Part { memory, at: 0, len_bytes: 200 };
    gpu.copy(&consumer, part(&copy), part(buffers[2].input())).expect("handed over");
    let consumed = gpu.event().expect("an event");
    gpu.record(&consumed, &consumer).expect("recorded");
    for _ in 0..1000 {
        assert!(!group.is_done(&work).expect("sound"), "the producer has not produced");
    }
    assert_eq!(gpu.passes().0, 0);
    gate.open();
    while !gpu.is_done(&consumed).expect("sound") {}
    let wanted: Vec<u8> = (0..50).flat_map(|element| expected(Dtype::F32, ReduceOp::Sum, 4, element)).collect();
    assert_eq!(gpu.download_now(&copy), wanted);
    group.wait(work, long_deadline()).expect("done");
}

#[test]
fn captured_operation_can_be_replayed() {
    for seed in 0..20 {
        let mut group = group(seed, 4);
        let gpu = group.gpu().clone();
        let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 30);
        let buffers = in_place(&gpu, &inputs(Dtype::I32, ReduceOp::Sum, 4, 30));
        let repeat = group.capture(&request(desc, Algo::HalvingDoubling, &buffers)).expect("captured");
        assert_eq!(gpu.passes().0, 0, "a capture runs nothing");
        let mut last = None;
        for _ in 0..3 {
            last = Some(group.replay(&repeat, &[]).expect("launched"));
        }
        group.wait(last.expect("three"), long_deadline()).expect("done");
        // Each replay sums the previous result: four times as much.
        let once: Vec<i32> = (0..30)
            .map(|element| expected(Dtype::I32, ReduceOp::Sum, 4, element))
            .map(|bytes| i32::from_le_bytes(bytes.try_into().expect("four bytes")))
            .collect();
        let wanted: Vec<u8> = once.iter().flat_map(|sum| (sum * 16).to_le_bytes()).collect();
        assert!(results(&gpu, &buffers).iter().all(|result| *result == wanted), "seed {seed}");
    }
}

#[test]
fn premultiplied_sum_scales_contributions_first() {
    for is_in_place in [true, false] {
        let mut group = group(8, 3);
        let gpu = group.gpu().clone();
        let ones: Vec<u8> = (0..20).flat_map(|_| 1.5_f32.to_le_bytes()).collect();
        let mut buffers = in_place(&gpu, &vec![ones.clone(); 3]);
        if !is_in_place {
            for each in &mut buffers {
                let output = gpu.alloc(80).expect("room");
                *each = GpuBuffers::Separate { input: each.input().clone(), output };
            }
        }
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::PremulSum, 20);
        let request = Request { desc, algo: Algo::Ring, buffers: &buffers, scalars: &[1.0, 2.0, 4.0] };
        let work = group.start(&request, &[]).expect("started");
        group.wait(work, long_deadline()).expect("done");
        let wanted: Vec<u8> = (0..20).flat_map(|_| 10.5_f32.to_le_bytes()).collect();
        assert!(results(&gpu, &buffers).iter().all(|result| *result == wanted));
        if let GpuBuffers::Separate { input, .. } = &buffers[0] {
            assert_eq!(gpu.download_now(input), ones);
        }
        let wrong = Request { desc: OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 20), ..request };
        assert!(matches!(group.start(&wrong, &[]), Err(GpuError::Invalid(_))));
    }
}

#[test]
fn tensors_are_reduced_in_buckets() {
    let mut group = group(10, 3);
    let gpu = group.gpu().clone();
    let lens = [3_usize, 5, 40, 1, 1];
    let tensor = |rank: u32, index: usize| {
        let bytes: Vec<u8> = (0..lens[index])
            .flat_map(|element| contribution(Dtype::F32, ReduceOp::Sum, rank, index * 100 + element))
            .collect();
        gpu.upload_now(&bytes).expect("room")
    };
    let tensors: Vec<Vec<FakeMemory>> = (0..3).map(|rank| (0..5).map(|index| tensor(rank, index)).collect()).collect();
    let works = group.start_bucketed(&tensors, (Dtype::F32, ReduceOp::Sum), 32, &[]).expect("started");
    assert_eq!(works.len(), 3, "two tensors of 32 bytes, one that is larger, two small ones");
    for work in works {
        group.wait(work, long_deadline()).expect("done");
    }
    for rank in &tensors {
        for (index, memory) in rank.iter().enumerate() {
            let wanted: Vec<u8> = (0..lens[index])
                .flat_map(|element| expected(Dtype::F32, ReduceOp::Sum, 3, index * 100 + element))
                .collect();
            assert_eq!(gpu.download_now(memory), wanted, "tensor {index}");
        }
    }
    let uneven = vec![tensors[0].clone(), tensors[1].clone(), tensors[2][..4].to_vec()];
    assert!(matches!(group.start_bucketed(&uneven, (Dtype::F32, ReduceOp::Sum), 32, &[]), Err(GpuError::Invalid(_))));
}

#[test]
fn invalid_calls_are_refused_without_effect() {
    let mut group = group(11, 2);
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 10);
    let refused = |group: &mut Group<FakeGpu>, desc, algo, buffers: &[GpuBuffers<FakeMemory>], words: &str| {
        let error = group.start(&request(desc, algo, buffers), &[]).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    };
    let whole = gpu.alloc(80).expect("room");
    let half = |at| GpuBuffers::InPlace(gpu.part(&whole, at, 40));
    refused(&mut group, desc, Algo::Ring, &[half(0), half(36)], "overlaps memory of rank 1");
    refused(&mut group, desc, Algo::Ring, &[half(0)], "buffers of 1 ranks");
    refused(
        &mut group,
        OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 11),
        Algo::Ring,
        &[half(0), half(40)],
        "40 bytes for 11",
    );
    refused(&mut group, desc, Algo::Tree, &[half(0), half(40)], "on one GPU");
    let bits = OpDesc::all_reduce(Dtype::F32, ReduceOp::Band, 10);
    refused(&mut group, bits, Algo::Ring, &[half(0), half(40)], "bitwise operators take integers");
    let full = Group::new(FakeGpu::new(1, 100), 2, small()).expect("a group");
    assert_eq!(full.gpu().alloc(101).expect_err("full"), GpuError::OutOfMemory { len_bytes: 101 });
    assert_eq!(gpu.passes().0, 0);
    let work = group.start(&request(desc, Algo::Auto, &[half(0), half(40)]), &[]).expect("started");
    assert_eq!(
        work.fallback(),
        Some("there is no tree: the ranks are on one GPU, which no device of the network sees")
    );
    group.wait(work, long_deadline()).expect("done");
}

#[test]
fn cost_and_declared_order_select_the_algorithm() {
    let chosen = |group: &Group<FakeGpu>, count| {
        group.explain(&OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count), Algo::Auto).chosen
    };
    let free = group(1, 8);
    assert_eq!(chosen(&free, 2), Some(Path::RecursiveDoubling), "few steps for small messages");
    assert_eq!(chosen(&free, 1 << 28), Some(Path::HalvingDoubling), "few bytes for large ones");
    let ordered = GroupOptions { order: Order::TreeFold, ..small() };
    let ordered = Group::new(FakeGpu::new(1, ROOM), 8, ordered).expect("a group");
    assert_eq!(chosen(&ordered, 1 << 28), Some(Path::Pairwise), "the only one of few bytes that keeps a fold");
    assert_eq!(ordered.explain(&OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 64), Algo::Ring).chosen, None);
}

#[test]
fn missing_gpu_or_feature_is_reported() {
    match probe() {
        Ok(description) => assert!(description.contains("sm_"), "{description}"),
        Err(error) => assert!(error.to_string().starts_with("CUDA unavailable: "), "{error}"),
    }
}
