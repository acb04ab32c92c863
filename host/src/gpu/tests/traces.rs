//! Overlap of computation and communication, and its trace.

use super::{group, in_place, inputs, long_deadline, request};
use crate::gpu::trace::{Kind, SPANS_MAX, Span, Timeline, Trace};
use crate::gpu::{FakeGpu, Gpu, GpuError, Part};
use crate::select::Algo;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// A producer's layers; each is reduced while the next one is computed.
fn layers(is_apart: bool) -> Timeline {
    let mut group = group(11, 2);
    let gpu = group.gpu().clone();
    let (producer, scratch) = (gpu.stream().expect("a stream"), gpu.alloc(100_000).expect("room"));
    let half = |at| Part { memory: &scratch, at, len_bytes: 50_000 };
    let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, 4000);
    group.start_trace().expect("a trace");
    let mut works = Vec::new();
    for _ in 0..3 {
        let produced = gpu.event().expect("an event");
        let buffers = in_place(&gpu, &inputs(Dtype::F32, ReduceOp::Sum, 2, 4000));
        let body = || gpu.copy(&producer, half(0), half(50_000));
        group.trace_span(&producer, ("producer", "layer"), body).expect("handed over");
        gpu.record(&produced, &producer).expect("recorded");
        let work = group.start(&request(desc, Algo::Ring, &buffers), &[&produced]).expect("started");
        if is_apart {
            gpu.wait(&producer, work.done()).expect("handed over");
        }
        works.push(work);
    }
    for work in works {
        group.wait(work, long_deadline()).expect("done");
    }
    while !gpu
        .is_done(&{
            let event = gpu.event().expect("an event");
            gpu.record(&event, &producer).expect("recorded");
            event
        })
        .expect("sound")
    {}
    group.take_trace().expect("all is done")
}

#[test]
fn communication_overlaps_with_the_next_layers_computation() {
    let timeline = layers(false);
    let (mut compute, mut communication) = (Vec::new(), Vec::new());
    for span in &timeline.spans {
        match span.kind {
            Kind::Compute => compute.push(span),
            Kind::Communication => communication.push(span),
        }
    }
    assert_eq!(compute.len(), 3);
    let meet = |a: &Span, b: &Span| a.start_us < b.start_us + b.len_us && b.start_us < a.start_us + a.len_us;
    // The second layer is computed while the first is reduced; nothing is reduced while the first is computed.
    assert!(communication.iter().any(|span| meet(span, compute[1])), "{timeline:?}");
    assert!(!communication.iter().any(|span| meet(span, compute[0])), "{timeline:?}");
    let overlap = timeline.overlap();
    assert!(overlap.both_us > 0.0 && overlap.efficiency() > 0.5 && overlap.efficiency() <= 1.0, "{overlap:?}");
    // With a consumer that waits for each, there is no overlap.
    let apart = layers(true).overlap();
    assert_eq!((apart.both_us, apart.efficiency()), (0.0, 0.0), "{apart:?}");
}

#[test]
fn trace_is_written_in_perfetto_format() {
    let timeline = layers(false);
    let mut bytes = Vec::new();
    timeline.write(&mut bytes).expect("memory");
    let json: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
    let events = json["traceEvents"].as_array().expect("events");
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    let names: Vec<_> = of("M").iter().map(|event| event["args"]["name"].clone()).collect();
    assert_eq!(names, ["GPU", "producer", "rank 0", "rank 1"], "a line for each stream");
    assert_eq!(of("X").len(), timeline.spans.len());
    let layer = of("X").into_iter().find(|event| event["name"] == "layer").expect("a layer");
    assert_eq!((layer["cat"].as_str(), layer["tid"].as_u64()), (Some("compute"), Some(0)));
    assert_eq!(layer["dur"].as_f64(), Some(101.0), "100,000 bytes and a launch");
    // Names are quoted.
    let odd = Span { lane: "a \"b\"\\".into(), name: "x\ny".into(), kind: Kind::Compute, start_us: 0.0, len_us: 1.0 };
    let mut bytes = Vec::new();
    Timeline { spans: vec![odd], dropped: 3 }.write(&mut bytes).expect("memory");
    let json: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
    assert_eq!(json["traceEvents"][2]["name"], "x\ny");
    assert_eq!(json["traceEvents"][1]["args"]["name"], "a \"b\"\\");
    assert_eq!(json["otherData"]["dropped"], 3);
}

#[test]
fn trace_is_bounded_and_readable_only_when_complete() {
    let gpu = FakeGpu::new(1, 1 << 20);
    let stream = gpu.stream().expect("a stream");
    let mut trace = Trace::new(&gpu, &stream).expect("a trace");
    let gate = gpu.gate(&stream);
    trace.span(&gpu, &stream, ("a", "b", Kind::Compute), || Ok(())).expect("handed over");
    assert!(!trace.is_done(&gpu).expect("sound"));
    assert!(matches!(trace.finish(&gpu), Err(GpuError::Invalid(_))));
    gate.open();
    let mut trace = Trace::new(&gpu, &stream).expect("a trace");
    for _ in 0..SPANS_MAX + 5 {
        trace.span(&gpu, &stream, ("a", "b", Kind::Compute), || Ok(())).expect("handed over");
    }
    while !trace.is_done(&gpu).expect("sound") {}
    let timeline = trace.finish(&gpu).expect("all is done");
    assert_eq!((timeline.spans.len(), timeline.dropped), (SPANS_MAX, 5));
}
