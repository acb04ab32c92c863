//! The engine's rules, on the fake GPU.

use super::*;
use crate::gpu::{FakeGpu, FakeMemory};

fn engine(family: Family) -> GpuEngine<FakeGpu> {
    GpuEngine::new(FakeGpu::new(5, 1 << 20), family).expect("an engine")
}

fn chain(seq: u64, scope: u8, steps: &[Step]) -> Chain<'_> {
    Chain { tag: Tag { seq, slot: 0, attempt: 0 }, scope: Scope(scope), steps }
}

fn run(engine: &mut GpuEngine<FakeGpu>, steps: &[Step]) -> (Status, u16) {
    engine.submit(chain(1, 0, steps)).expect("taken");
    let mut end = [Completion { tag: Tag { seq: 0, slot: 0, attempt: 0 }, status: Status::Done, step: 0 }];
    while engine.poll(&mut end) == 0 {}
    (end[0].status, end[0].step)
}

fn memory(engine: &mut GpuEngine<FakeGpu>, bytes: &[u8]) -> (FakeMemory, RegionKey) {
    let memory = engine.gpu().upload_now(bytes).expect("room");
    let key = engine.register(memory.clone()).expect("few regions");
    (memory, key)
}

const fn at(region: RegionKey, offset_bytes: u64) -> Address {
    Address { region, offset_bytes }
}

#[test]
fn instructions_match_the_sets_of_their_family() {
    for family in [Family::Sums, Family::Integers] {
        let engine = engine(family);
        for &dtype in Dtype::ALL {
            for &op in ReduceOp::ALL {
                if engine.capabilities().reduces(dtype, op) {
                    assert!(bulk_instruction(dtype, op).is_some(), "{dtype} {op}");
                }
            }
        }
    }
    assert_eq!(bulk_instruction(Dtype::F32, ReduceOp::Max), None);
}

#[test]
fn chain_reduces_in_order_and_then_publishes() {
    let mut engine = engine(Family::Sums);
    let floats = |values: [f32; 4]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let (_, a) = memory(&mut engine, &floats([1.0, 2.0, 3.0, 4.0]));
    let (_, b) = memory(&mut engine, &floats([0.5; 4]));
    let (slot, out) = memory(&mut engine, &[0; 48]);
    let reduce = Step::Reduce {
        op: ReduceOp::Sum,
        source: Dtype::F32,
        accumulator: Dtype::F32,
        src: at(b, 0),
        dst: at(out, 16),
        count: 4,
    };
    let steps = [
        Step::Copy { src: at(a, 0), dst: at(out, 16), len_bytes: 16 },
        reduce,
        Step::Copy { src: at(out, 16), dst: at(out, 32), len_bytes: 16 },
        Step::Publish { dst: at(out, 0), words: [7, 9], covers: Default::default() },
    ];
    assert_eq!(run(&mut engine, &steps), (Status::Done, 4));
    let mut wanted = [7_u64, 9].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    wanted.extend(floats([1.5, 2.5, 3.5, 4.5]).repeat(2));
    assert_eq!(engine.gpu().download_now(&slot), wanted);
}

#[test]
fn invalid_step_ends_the_chain_there() {
    let mut engine = engine(Family::Integers);
    let (bytes, key) = memory(&mut engine, &[1; 64]);
    let copy = |src, dst, len_bytes| Step::Copy { src: at(key, src), dst: at(key, dst), len_bytes };
    let reduce =
        |op, source| Step::Reduce { op, source, accumulator: source, src: at(key, 0), dst: at(key, 32), count: 4 };
    let unknown = RegionKey { index: 9, generation: 1 };
    for (step, status) in [
        (copy(0, 16, 64), Status::OutOfBounds),
        (copy(0, 8, 16), Status::Misaligned),
        (copy(0, 32, 8), Status::Misaligned),
        (copy(0, 16, 32), Status::Overlap),
        (copy(0, 16, 0), Status::TooLong),
        (reduce(ReduceOp::Sum, Dtype::F32), Status::Unsupported),
        (reduce(ReduceOp::Prod, Dtype::I32), Status::Unsupported),
        (Step::Copy { src: at(unknown, 0), dst: at(key, 0), len_bytes: 16 }, Status::BadRegion),
    ] {
        assert_eq!(run(&mut engine, &[copy(0, 16, 16), step, copy(0, 48, 16)]), (status, 1), "{step:?}");
    }
    assert_eq!(run(&mut engine, &[reduce(ReduceOp::Max, Dtype::U32)]), (Status::Done, 1));
    assert!(engine.deregister(key) && !engine.deregister(key));
    assert_eq!(run(&mut engine, &[copy(0, 16, 16)]), (Status::StaleRegion, 0));
    let again = engine.register(bytes).expect("few regions");
    assert_eq!((again.index, again.generation), (key.index, key.generation + 1));
}

#[test]
fn limits_are_enforced_and_chains_complete_once() {
    let mut engine = engine(Family::Sums);
    let (_, key) = memory(&mut engine, &[1; 64]);
    let steps = [Step::Copy { src: at(key, 0), dst: at(key, 16), len_bytes: 16 }; 65];
    assert_eq!(engine.submit(chain(0, 0, &steps)), Err(SubmitError::Length { steps: 65, max: 64 }));
    assert_eq!(engine.submit(chain(0, 0, &[])), Err(SubmitError::Length { steps: 0, max: 64 }));
    for seq in 0..16 {
        engine.submit(chain(seq, (seq % 2) as u8, &steps[..64])).expect("room");
    }
    assert_eq!(engine.submit(chain(99, 0, &steps[..1])), Err(SubmitError::Full { depth: 1024 }));
    engine.abort(Scope(1));
    let mut seen = Vec::new();
    let none = Completion { tag: Tag { seq: 0, slot: 0, attempt: 0 }, status: Status::Done, step: 0 };
    let mut completions = [none; 3];
    while seen.len() < 16 {
        let count = engine.poll(&mut completions);
        seen.extend(completions[..count].iter().map(|end| (end.tag.seq, end.status)));
    }
    let wanted: Vec<_> = (0..16).map(|seq| (seq, if seq % 2 == 1 { Status::Aborted } else { Status::Done })).collect();
    assert_eq!(seen, wanted);
    assert_eq!(engine.poll(&mut completions), 0);
    engine.submit(chain(99, 1, &steps[..1])).expect("room again, and the scope goes on");
}
