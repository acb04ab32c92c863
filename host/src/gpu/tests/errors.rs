//! Each failure of a GPU has its own error, and no result is returned.

use super::{ROOM, group, in_place, inputs, long_deadline, request, small};
use crate::gpu::nccl::why_not;
use crate::gpu::{FakeGpu, FakeMemory, Gpu, GpuBuffers, GpuError, Group, Part, Unavailable};
use crate::select::Algo;
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

const SUM: OpDesc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 10);

#[test]
fn no_room_for_partial_values_fails_before_enqueueing() {
    // Two buffers fit; the accumulators of a bf16 sum do not.
    let mut group = Group::new(FakeGpu::new(1, 100), 2, small()).expect("a group");
    let gpu = group.gpu().clone();
    let buffers = in_place(&gpu, &inputs(Dtype::Bf16, ReduceOp::Sum, 2, 20));
    let desc = OpDesc::all_reduce(Dtype::Bf16, ReduceOp::Sum, 20);
    let error = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect_err("no room");
    assert!(matches!(error, GpuError::OutOfMemory { len_bytes } if len_bytes > 20), "{error}");
    assert!(error.to_string().contains("free memory, or use smaller buckets"), "{error}");
    assert_eq!(gpu.passes(), (0, 0));
    assert_eq!(gpu.pinned(101).expect_err("no room either"), GpuError::OutOfMemory { len_bytes: 101 });
}

#[test]
fn lost_gpu_is_reported_in_flight_and_afterwards() {
    let mut group = group(2, 3);
    let gpu = group.gpu().clone();
    let buffers = in_place(&gpu, &inputs(Dtype::F32, ReduceOp::Sum, 3, 10));
    let work = group.start(&request(SUM, Algo::Ring, &buffers), &[]).expect("started");
    gpu.lose("it has fallen off the bus");
    let lost = GpuError::Lost("it has fallen off the bus".into());
    assert_eq!(group.wait(work, long_deadline()), Err(lost.clone()));
    assert_eq!(group.start(&request(SUM, Algo::Ring, &buffers), &[]).expect_err("still lost"), lost);
    assert_eq!(gpu.alloc(1).expect_err("still lost"), lost);
}

fn part(memory: &FakeMemory) -> Part<'_, FakeMemory> {
    Part { memory, at: 0, len_bytes: 16 }
}

#[test]
fn illegal_address_is_reported_and_ends_the_gpu() {
    let gpu = FakeGpu::new(3, ROOM);
    let (stream, event) = (gpu.stream().expect("a stream"), gpu.event().expect("an event"));
    let (from, to) = (gpu.alloc(16).expect("room"), gpu.alloc(16).expect("room"));
    gpu.copy(&stream, part(&to), part(&from)).expect("handed over");
    gpu.record(&event, &stream).expect("recorded");
    // Freed while the stream has yet to read it.
    drop(from);
    let error = loop {
        match gpu.is_done(&event) {
            Ok(false) => {}
            Ok(true) => panic!("read what was freed"),
            Err(error) => break error,
        }
    };
    assert!(matches!(&error, GpuError::IllegalAddress(why) if why.contains("a read of")), "{error}");
    assert_eq!(gpu.copy(&stream, part(&to), part(&to)), Err(error), "its context can't be used any more");
}

#[test]
fn missing_compiler_and_kernel_are_named() {
    let mut group = group(4, 2);
    let gpu = group.gpu().clone();
    gpu.without_compiler();
    let buffers = in_place(&gpu, &inputs(Dtype::F32, ReduceOp::Sum, 2, 10));
    let error = group.start(&request(SUM, Algo::Ring, &buffers), &[]).expect_err("no kernel");
    assert_eq!(error, Unavailable::Compiler { wanted: "f32-sum.ptx".into() }.into());
    assert!(error.to_string().contains("nvidia-cuda-nvrtc"), "{error}");
}

#[test]
fn unsupported_operator_for_a_type_is_named() {
    let mut group = group(5, 2);
    let buffers: Vec<GpuBuffers<_>> = in_place(&group.gpu().clone(), &vec![vec![0; 40]; 2]);
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Bxor, 10);
    let error = group.start(&request(desc, Algo::Ring, &buffers), &[]).expect_err("no such kernel");
    assert!(matches!(&error, GpuError::Kernel { kernel, .. } if kernel == "f32 bxor"), "{error}");
}

#[test]
fn operations_unsupported_by_nccl_are_named() {
    let why = |order, dtype, op| why_not(order, &OpDesc::all_reduce(dtype, op, 10)).map(|why| why.to_string());
    assert_eq!(why(Order::Arrival, Dtype::F32, ReduceOp::Sum), None);
    assert_eq!(why(Order::TreeFold, Dtype::I32, ReduceOp::Sum), None, "whole numbers have no order");
    let refused = |order, dtype, op, words: &str| {
        let why = why(order, dtype, op).unwrap_or_default();
        assert!(why.contains(words), "{dtype} {op}: {why}");
    };
    refused(Order::TreeFold, Dtype::F32, ReduceOp::Sum, "cannot preserve the declared order");
    refused(Order::Arrival, Dtype::I16, ReduceOp::Sum, "does not support i16");
    refused(Order::Arrival, Dtype::U32, ReduceOp::Bor, "does not support bor");
    refused(Order::Arrival, Dtype::I32, ReduceOp::Avg, "rounds differently");
    refused(Order::Arrival, Dtype::F32, ReduceOp::Max, "NaN");
    let gather = why_not(Order::Arrival, &OpDesc::all_gather(Dtype::U8, 8)).map(|why| why.to_string());
    assert_eq!(gather.as_deref(), Some("nccl does not implement all_gather"));
    // On one GPU it is a candidate that is ruled out, not an omitted one.
    let explanation = group(6, 2).explain(&SUM, Algo::Auto).to_string();
    assert!(explanation.contains("nccl") && explanation.contains("share a GPU"), "{explanation}");
    let forced = group(6, 2).explain(&SUM, Algo::Nccl);
    assert!(forced.refusal().is_some_and(|why| why.to_string().contains("share a GPU")), "{forced}");
}
