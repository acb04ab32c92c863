//! How operations end, and what becomes of their memory.

use super::{ROOM, SMALL, far, group, in_place, inputs, request, results};
use crate::exec::tests::expected;
use crate::gpu::{Double, Gpu, GpuError, Group, GroupOptions};
use crate::select::Algo;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

#[test]
fn memory_is_kept_until_the_gpu_has_let_go_of_it() {
    let mut group = group(5, 3);
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::Bf16, ReduceOp::Sum, 40);
    let buffers = in_place(&gpu, &inputs(Dtype::Bf16, ReduceOp::Sum, 3, 40));
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started");
    let kept = gpu.allocated_bytes();
    drop(buffers);
    assert_eq!(gpu.allocated_bytes(), kept, "what is on its way is kept");
    group.wait(work, far()).expect("done, and no illegal address");
    assert!(gpu.allocated_bytes() < kept);
    // A handle that is forgotten keeps memory no longer than the operation.
    let buffers = in_place(&gpu, &inputs(Dtype::Bf16, ReduceOp::Sum, 3, 40));
    std::mem::forget(group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started"));
    drop(buffers);
    drop(group);
    assert_eq!(gpu.allocated_bytes(), 0, "the group ends what is on its way, and then lets go");
}

#[test]
fn what_is_given_up_ends_and_the_group_goes_on() {
    let mut group = group(6, 4);
    let gpu = group.gpu().clone();
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4000);
    let buffers = in_place(&gpu, &inputs(Dtype::F32, ReduceOp::Sum, 4, 4000));
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started");
    let second = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("started");
    assert_eq!(group.wait(work, Instant::now()), Err(GpuError::Deadline));
    let (ran, stopped) = gpu.passes();
    assert!(stopped > ran, "passes that had not begun did nothing: {ran} ran, {stopped} did not");
    assert_eq!(group.wait(second, far()), Err(GpuError::Cancelled), "one that was on its way too is broken too");
    group.canceller().cancel();
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("usable");
    assert_eq!(group.wait(work, far()), Err(GpuError::Cancelled));
    let inputs = inputs(Dtype::F32, ReduceOp::Sum, 4, 4000);
    let buffers = in_place(&gpu, &inputs);
    let work = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect("usable");
    group.wait(work, far()).expect("done");
    let wanted: Vec<u8> = (0..4000).flat_map(|element| expected(Dtype::F32, ReduceOp::Sum, 4, element)).collect();
    assert!(results(&gpu, &buffers).iter().all(|result| *result == wanted));
}

#[test]
fn what_can_not_be_ended_keeps_its_memory() {
    // No more is waited for what does not come.
    let options = GroupOptions { grace: Duration::from_millis(50), ..SMALL };
    let mut group = Group::new(Double::new(7, ROOM), 2, options).expect("a group");
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
