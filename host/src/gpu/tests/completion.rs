//! Completion of operations, and release of their memory.

use super::{ROOM, group, in_place, inputs, long_deadline, request, results, small};
use crate::exec::tests::expected;
use crate::gpu::{FakeGpu, Gpu, GpuError, Group, GroupOptions};
use crate::select::Algo;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

#[test]
fn memory_is_kept_until_the_gpu_releases_it() {
    let mut group = group(5, 3);
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::Bf16, ReduceOp::Sum, 40);
    let buffers = in_place(&gpu, &inputs(Dtype::Bf16, ReduceOp::Sum, 3, 40));
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started");
    let kept = gpu.allocated_bytes();
    drop(buffers);
    assert_eq!(gpu.allocated_bytes(), kept, "memory in flight is kept");
    group.wait(work, long_deadline()).expect("done, and no illegal address");
    assert!(gpu.allocated_bytes() < kept);
    // A leaked handle keeps memory no longer than the operation.
    let buffers = in_place(&gpu, &inputs(Dtype::Bf16, ReduceOp::Sum, 3, 40));
    std::mem::forget(group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started"));
    drop(buffers);
    drop(group);
    assert_eq!(gpu.allocated_bytes(), 0, "the group stops what is in flight and releases its memory");
}

#[test]
fn stopped_operation_ends_and_the_group_stays_usable() {
    let mut group = group(6, 4);
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4000);
    let buffers = in_place(&gpu, &inputs(Dtype::F32, ReduceOp::Sum, 4, 4000));
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started");
    let second = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started");
    assert_eq!(group.wait(work, Instant::now()), Err(GpuError::Deadline));
    let (ran, stopped) = gpu.passes();
    assert!(stopped > ran, "passes that had not begun did nothing: {ran} ran, {stopped} did not");
    assert_eq!(
        group.wait(second, long_deadline()),
        Err(GpuError::Cancelled),
        "other operations in flight are stopped too"
    );
    group.canceller().cancel();
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("usable");
    assert_eq!(group.wait(work, long_deadline()), Err(GpuError::Cancelled));
    let inputs = inputs(Dtype::F32, ReduceOp::Sum, 4, 4000);
    let buffers = in_place(&gpu, &inputs);
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("usable");
    group.wait(work, long_deadline()).expect("done");
    let wanted: Vec<u8> = (0..4000).flat_map(|element| expected(Dtype::F32, ReduceOp::Sum, 4, element)).collect();
    assert!(results(&gpu, &buffers).iter().all(|result| *result == wanted));
}

#[test]
fn unstoppable_operation_keeps_its_memory() {
    // The wait for what never completes is over.
    let options = GroupOptions { grace: Duration::from_millis(50), ..small() };
    let mut group = Group::new(FakeGpu::new(7, ROOM), 2, options).expect("a group");
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 10);
    let buffers = in_place(&gpu, &inputs(Dtype::F32, ReduceOp::Sum, 2, 10));
    let (producer, produced) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
    let gate = gpu.gate(&producer);
    gpu.record(&produced, &producer).expect("recorded");
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[&produced]).expect("started");
    assert_eq!(group.wait(work, Instant::now()), Err(GpuError::Stuck));
    assert_eq!(group.start(&request(desc, Algo::Ring, &buffers), &[]).expect_err("unusable"), GpuError::Stuck);
    drop(buffers);
    let kept = gpu.allocated_bytes();
    drop(group);
    assert_eq!(gpu.allocated_bytes(), kept, "nobody can say when the GPU reads it");
    gate.open();
    while !gpu.is_done(&produced).expect("sound") {}
}

/// Short operations use one stream: the same results, and no event between passes.
#[test]
fn serial_operations_have_the_same_results() {
    let algos = [Algo::Ring, Algo::HalvingDoubling, Algo::RecursiveDoubling, Algo::Binomial, Algo::Pairwise];
    for (seed, ranks) in [1_u32, 2, 3, 4, 5].into_iter().enumerate() {
        for (dtype, op) in [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Avg), (Dtype::I32, ReduceOp::Max)] {
            let options = GroupOptions { serial_bytes: u64::MAX, ..small() };
            let mut group = Group::new(FakeGpu::new(seed as u64, ROOM), ranks, options).expect("a group");
            let gpu = group.gpu().clone();
            for algo in algos {
                let buffers = in_place(&gpu, &inputs(dtype, op, ranks, 77));
                let desc = OpDesc::all_reduce(dtype, op, 77);
                let work = group.start(&request(desc, algo, &buffers), &[]).expect("started");
                group.wait(work, long_deadline()).expect("done");
                let wanted: Vec<u8> = (0..77).flat_map(|element| expected(dtype, op, ranks, element)).collect();
                assert!(results(&gpu, &buffers).iter().all(|result| *result == wanted), "{dtype} {op} by {algo}");
            }
        }
    }
}

/// The second call captures, later ones replay; the graph keeps no memory, and other memory has another graph.
#[test]
fn repeated_operations_are_replayed() {
    let options = GroupOptions { replay_bytes: u64::MAX, ..small() };
    let mut group = Group::new(FakeGpu::new(11, ROOM), 3, options).expect("a group");
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 50);
    let ones = vec![1_i32.to_le_bytes().repeat(50); 3];
    let buffers = [in_place(&gpu, &ones), in_place(&gpu, &ones)];
    for call in 1..=4 {
        for buffers in &buffers {
            let work = group.start(&request(desc, Algo::Ring, buffers), &[]).expect("started");
            group.wait(work, long_deadline()).expect("done");
            let wanted = 3_i32.pow(call).to_le_bytes().repeat(50);
            assert!(results(&gpu, buffers).iter().all(|result| *result == wanted), "call {call}");
        }
        assert_eq!(gpu.launches(), 2 * (call as usize - 1), "call {call}");
    }
    let kept = gpu.allocated_bytes();
    drop(buffers);
    assert_eq!(gpu.allocated_bytes(), kept - 2 * 3 * 200, "graphs hold no memory");
}

/// A replay that is given up ends like other operations, and the next one is right.
#[test]
fn stopped_replay_ends_and_the_next_is_right() {
    let options = GroupOptions { replay_bytes: u64::MAX, ..small() };
    let mut group = Group::new(FakeGpu::new(12, ROOM), 3, options).expect("a group");
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 50);
    let buffers = in_place(&gpu, &vec![0_i32.to_le_bytes().repeat(50); 3]);
    for call in 0..6 {
        let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started");
        match call {
            3 => assert_eq!(group.wait(work, Instant::now()), Err(GpuError::Deadline)),
            _ => group.wait(work, long_deadline()).expect("done"),
        }
    }
    assert!(results(&gpu, &buffers).iter().all(|result| *result == 0_i32.to_le_bytes().repeat(50)));
}
