//! The engine compared with a model that runs steps one by one, in every profile, and the chains that it refuses.

#[cfg(feature = "shm")]
mod aliases;
mod lifecycle;
mod refuse;

use super::{DmaConfig, EmuEngine, HeapMemory, Strictness};
use crate::dma::{
    Address, Chain, Completion, Coverage, Engine, LocalMemory, Profile, RegionKey, Scope, Span, Status, Step, Tag,
    WaitEngine,
};
use crate::op::{Dtype, ReduceOp};
use crate::reduce::Kernel;
use crate::ring::SpinPolicy;
use proptest::prelude::*;
use std::sync::Arc;

const EMPTY: Completion = Completion { tag: Tag { seq: 0, slot: 0, attempt: 0 }, status: Status::Done, step: 0 };

fn key(index: u16) -> RegionKey {
    RegionKey { index, generation: 1 }
}

fn at(index: u16, offset_bytes: u64) -> Address {
    Address { region: key(index), offset_bytes }
}

fn tag(seq: u64) -> Tag {
    Tag { seq, slot: seq as u32, attempt: 0 }
}

fn config(profile: Profile, threads: usize) -> DmaConfig {
    DmaConfig { spin: SpinPolicy::NONE, queue_depth: 64, max_steps: 64, regions: 8, ..DmaConfig::new(profile, threads) }
}

/// Return an engine with regions 0, 1, .. of these lengths.
fn engine(config: DmaConfig, lens_bytes: &[usize]) -> (EmuEngine, Vec<Arc<HeapMemory>>) {
    let mut engine = EmuEngine::start(config).expect("threads");
    let memories: Vec<_> = lens_bytes.iter().map(|&len_bytes| Arc::new(HeapMemory::new(len_bytes))).collect();
    for (index, memory) in memories.iter().enumerate() {
        engine.map(key(index as u16), memory.clone()).expect("a free entry");
    }
    (engine, memories)
}

/// Run one chain to completion.
fn run(engine: &mut EmuEngine, seq: u64, steps: &[Step]) -> Completion {
    engine.submit(Chain { tag: tag(seq), scope: Scope(0), steps }).expect("the queue is empty");
    let mut completion = [EMPTY];
    assert!(engine.wait(None));
    assert_eq!(engine.poll(&mut completion), 1);
    assert_eq!(completion[0].tag, tag(seq));
    completion[0]
}

fn bytes_of(memory: &HeapMemory, offset_bytes: usize, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes];
    memory.read(offset_bytes, &mut bytes);
    bytes
}

/// The effect of a step on plain vectors.
fn model(memories: &mut [Vec<u8>], step: &Step) -> Result<(), Status> {
    let end = |address: Address, len_bytes: u64| address.offset_bytes + len_bytes;
    let fits = |address: Address, len_bytes| {
        end(address, len_bytes) <= memories[usize::from(address.region.index)].len() as u64
    };
    let (dst, dst_len_bytes) = (step.dst(), step.dst_len_bytes());
    let Some(src) = step.src() else {
        let Step::Publish { words, covers, .. } = step else { unreachable!("only publications have no source") };
        let covered = Address { offset_bytes: dst.offset_bytes + u64::from(covers.offset_bytes), ..dst };
        if !fits(dst, dst_len_bytes) || !fits(covered, covers.len_bytes.into()) {
            return Err(Status::OutOfBounds);
        }
        let memory = &mut memories[usize::from(dst.region.index)];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        if !covers.is_empty() {
            let covered = &memory[covered.offset_bytes as usize..][..covers.len_bytes as usize];
            bytes.extend(Coverage::checksum_word(covered).to_le_bytes());
        }
        memory[dst.offset_bytes as usize..][..bytes.len()].copy_from_slice(&bytes);
        return Ok(());
    };
    let src_len_bytes = step.src_len_bytes();
    if !fits(src, src_len_bytes) || !fits(dst, dst_len_bytes) {
        return Err(Status::OutOfBounds);
    }
    let disjoint = end(src, src_len_bytes) <= dst.offset_bytes || end(dst, dst_len_bytes) <= src.offset_bytes;
    if let Step::Store { op, output, count, ranks, .. } = *step
        && (src, src_len_bytes) == (dst, dst_len_bytes)
    {
        let acc = &mut memories[usize::from(dst.region.index)][dst.offset_bytes as usize..][..dst_len_bytes as usize];
        Kernel::new(output, op).expect("supported").finish(acc, count as usize, ranks);
        return Ok(());
    }
    if src.region == dst.region && !disjoint {
        return Err(Status::Overlap);
    }
    let from = memories[usize::from(src.region.index)][src.offset_bytes as usize..][..src_len_bytes as usize].to_vec();
    let to = &mut memories[usize::from(dst.region.index)][dst.offset_bytes as usize..][..dst_len_bytes as usize];
    let kernel = |dtype, op| Kernel::new(dtype, op).expect("supported");
    match *step {
        Step::Load { source, accumulator, .. } if source != accumulator => {
            kernel(source, ReduceOp::Sum).load(to, &from, false);
        }
        Step::Copy { .. } | Step::Load { .. } => to.copy_from_slice(&from),
        Step::Reduce { op, source, accumulator, .. } if accumulator == source.accumulator() => {
            kernel(source, op).combine(to, &from, false);
        }
        Step::Reduce { op, source, count, .. } => {
            let kernel = kernel(source, op);
            let mut wide = vec![0; count as usize * kernel.accumulator_bytes()];
            kernel.load(&mut wide, to, false);
            kernel.combine(&mut wide, &from, false);
            kernel.store(to, &wide, 1);
        }
        Step::Store { op, output, ranks, .. } => kernel(output, op).store(to, &from, ranks),
        Step::Publish { .. } => unreachable!("handled above"),
    }
    Ok(())
}

const LENS_BYTES: [usize; 3] = [600, 1000, 1400];

/// Steps that often share spans, are often adjacent, and are sometimes invalid.
fn steps() -> impl Strategy<Value = Vec<Step>> {
    let offset = prop_oneof![6 => Just(0), 4 => Just(512), 2 => (0..9_u64).prop_map(|at| at * 16), 1 => 0..1300_u64];
    let address = (0..3_u16, offset).prop_map(|(region, offset_bytes)| at(region, offset_bytes));
    let count = prop_oneof![4 => Just(100_u32), 1 => 1..150_u32];
    let dtype = prop_oneof![Just(Dtype::I32), Just(Dtype::E4m3), Just(Dtype::F16), Just(Dtype::Bf16), Just(Dtype::F64)];
    let op = prop_oneof![Just(ReduceOp::Sum), Just(ReduceOp::Min), Just(ReduceOp::Avg), Just(ReduceOp::MaxLoc)];
    let step = (0..8_u8, address.clone(), address, count, dtype, op).prop_map(|(kind, src, dst, count, dtype, op)| {
        let accumulator = dtype.accumulator();
        match kind {
            0 => Step::Copy { src, dst, len_bytes: count },
            1 => Step::Copy { src, dst, len_bytes: count * 4 },
            // Not every combination of type and operator is supported.
            3..=6 if Kernel::new(dtype, op).is_none() => Step::Copy { src, dst, len_bytes: count },
            2 => Step::Load { source: dtype, accumulator, src, dst, count },
            3 | 4 => Step::Reduce { op, source: dtype, accumulator, src, dst, count },
            5 => Step::Reduce { op, source: dtype, accumulator: dtype, src, dst, count },
            6 if count % 2 == 0 => Step::Store { op, accumulator, output: dtype, src, dst: src, count, ranks: 3 },
            6 => Step::Store { op, accumulator, output: dtype, src, dst, count, ranks: 2 },
            _ => {
                let dst = Address { offset_bytes: dst.offset_bytes & !7, ..dst };
                let covers_nothing = src.offset_bytes % 2 == 0;
                let covers = Coverage { offset_bytes: 24 + count, len_bytes: count };
                let covers = if covers_nothing { Coverage::NONE } else { covers };
                Step::Publish { dst, words: [u64::from(count), src.offset_bytes], covers }
            }
        }
    });
    prop::collection::vec(step, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn chain_has_the_effect_of_its_steps_one_by_one(steps in steps(), seed in any::<u64>()) {
        let (threads, shares_work) = [(1, false), (0, true), (1, true)][(seed % 3) as usize];
        let (mut engine, memories) = engine(DmaConfig { shares_work, ..config(Profile::Full, threads) }, &LENS_BYTES);
        let mut word = seed;
        let mut expected: Vec<Vec<u8>> = Vec::new();
        for (memory, len_bytes) in memories.iter().zip(LENS_BYTES) {
            // Knuth's MMIX generator; any bytes are valid elements.
            let bytes: Vec<u8> = (0..len_bytes).map(|_| {
                word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (word >> 56) as u8
            }).collect();
            memory.write(0, &bytes);
            expected.push(bytes);
        }
        let mut completed = (Status::Done, steps.len() as u16);
        for (at, step) in steps.iter().enumerate() {
            if let Err(status) = model(&mut expected, step) {
                completed = (status, at as u16);
                break;
            }
        }
        let completion = run(&mut engine, 1, &steps);
        prop_assert_eq!((completion.status, completion.step), completed);
        for (region, (memory, expected)) in memories.iter().zip(&expected).enumerate() {
            let found = bytes_of(memory, 0, expected.len());
            let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
            prop_assert_eq!(first, None, "the first wrong byte of region {}", region);
        }
    }
}

/// A span is read together with an overlapping one and written later, so the steps must not run tile by tile.
#[test]
fn span_written_after_overlapping_reads_is_not_tiled() {
    let (mut engine, memories) = engine(config(Profile::Full, 1), &LENS_BYTES);
    let input: Vec<u8> = (0..100_u16).flat_map(|index| (index as f32 * 256.0).to_le_bytes()).collect();
    memories[2].write(0, &input);
    let mut expected: Vec<Vec<u8>> = LENS_BYTES.iter().map(|&len_bytes| vec![0; len_bytes]).collect();
    expected[2][..400].copy_from_slice(&input);
    let steps = [
        Step::Copy { src: at(2, 0), dst: at(0, 0), len_bytes: 400 },
        Step::Load { source: Dtype::F16, accumulator: Dtype::F32, src: at(2, 0), dst: at(0, 0), count: 100 },
        Step::Copy { src: at(0, 0), dst: at(2, 0), len_bytes: 400 },
    ];
    for step in &steps {
        model(&mut expected, step).expect("a valid step");
    }
    assert_eq!(run(&mut engine, 1, &steps).status, Status::Done);
    for (memory, expected) in memories.iter().zip(&expected) {
        assert!(bytes_of(memory, 0, expected.len()) == *expected);
    }
}

#[test]
fn published_checksum_covers_the_writes_of_earlier_steps() {
    const COUNT: u32 = 150;
    const REDO: u64 = 64;
    const BOUNCE: u64 = REDO + COUNT as u64 * 4;
    let (op, f32, bf16) = (ReduceOp::Sum, Dtype::F32, Dtype::Bf16);
    let (header, acc, bounce) = (at(0, 0), at(0, REDO), at(0, BOUNCE));
    let copy = |src: u64, dst: u64, len_bytes| Step::Copy { src: at(1, src), dst: at(0, dst), len_bytes };
    let add = |source, src| Step::Reduce { op, source, accumulator: f32, src: at(1, src), dst: acc, count: COUNT };
    let store = |output, dst| Step::Store { op, accumulator: f32, output, src: acc, dst, count: COUNT, ranks: 2 };
    let load = Step::Load { source: bf16, accumulator: f32, src: at(1, 0), dst: acc, count: COUNT };
    let move_on = Step::Copy { src: acc, dst: bounce, len_bytes: COUNT * 4 };
    let whole = |from: u64, size: u32| Coverage { offset_bytes: from as u32, len_bytes: COUNT * size };
    let part = Coverage { offset_bytes: REDO as u32 + 20, len_bytes: 300 };
    let chains: [(&str, Vec<Step>, Coverage); 10] = [
        ("in place", vec![copy(0, REDO, COUNT * 4), add(f32, 604), store(f32, acc)], whole(REDO, 4)),
        ("rounded elsewhere", vec![load, add(bf16, 302), store(bf16, bounce)], whole(BOUNCE, 2)),
        ("accumulators of what is rounded", vec![load, store(bf16, bounce)], whole(REDO, 4)),
        ("a sum", vec![copy(0, REDO, COUNT * 4), add(f32, 604)], whole(REDO, 4)),
        ("a copy", vec![copy(3, REDO, COUNT * 4)], whole(REDO, 4)),
        ("a copy of a sum", vec![copy(0, REDO, COUNT * 4), add(f32, 604), move_on], whole(BOUNCE, 4)),
        ("a copy over another", vec![copy(0, REDO, COUNT * 4), copy(1, REDO, COUNT * 4)], whole(REDO, 4)),
        ("a copy of a copy", vec![copy(0, REDO, COUNT * 4), move_on], whole(BOUNCE, 4)),
        ("a part of a copy", vec![copy(0, REDO, COUNT * 4)], part),
        ("a copy over a part", vec![copy(0, REDO, COUNT * 4), copy(9, REDO + 8, 40)], whole(REDO, 4)),
    ];
    let (mut engine, memories) = engine(config(Profile::Full, 1), &[2048, 2048]);
    let mut expected = [vec![0; 2048], (0..2048_u32).map(|at| (at * 37 % 251) as u8).collect()];
    memories[1].write(0, &expected[1]);
    for (seq, (name, mut steps, covers)) in (1..).zip(chains) {
        steps.push(Step::Publish { dst: header, words: [seq, 0], covers });
        for step in &steps {
            model(&mut expected, step).expect("a valid step");
        }
        assert_eq!(run(&mut engine, seq, &steps).status, Status::Done, "{name}");
        assert_eq!(bytes_of(&memories[0], 0, 24), expected[0][..24], "the record of {name}");
        assert!(bytes_of(&memories[0], 24, 2024) == expected[0][24..], "the memory after {name}");
    }
}

/// Return the chain of an in-place all-reduce of `ranks` inputs of `count` f32, with header and accumulators in region
/// 0.
fn all_reduce(ranks: u16, seq: u64, slot_offset_bytes: u64, input_offset_bytes: u64, count: u32) -> Vec<Step> {
    let (op, f32, header, slot) = (ReduceOp::Sum, Dtype::F32, at(0, slot_offset_bytes), at(0, slot_offset_bytes + 64));
    let input = |rank: u16| at(1 + rank, input_offset_bytes);
    let mut steps = vec![
        Step::Publish { dst: header, words: [0, 0], covers: Default::default() },
        Step::Load { source: f32, accumulator: f32, src: input(0), dst: slot, count },
    ];
    steps.extend((1..ranks).map(|rank| Step::Reduce {
        op,
        source: f32,
        accumulator: f32,
        src: input(rank),
        dst: slot,
        count,
    }));
    let all = u32::from(ranks);
    steps.push(Step::Store { op, accumulator: f32, output: f32, src: slot, dst: slot, count, ranks: all });
    steps.push(Step::Publish { dst: header, words: [1, seq], covers: Default::default() });
    steps.extend((0..ranks).map(|rank| Step::Copy { src: slot, dst: input(rank), len_bytes: count * 4 }));
    steps
}

#[test]
fn all_chains_on_several_threads_complete_with_correct_results() {
    const RANKS: u16 = 4;
    const CHUNKS: u64 = 200;
    const SLOTS: u64 = 4;
    const COUNT: usize = 50;
    let chunk_len_bytes = COUNT * 4;
    let slot_len_bytes = 64 + chunk_len_bytes;
    let strict = DmaConfig { strictness: Strictness::Assert, ..config(Profile::Full, 3) };
    let input_len_bytes = CHUNKS as usize * chunk_len_bytes;
    let lens_bytes = [vec![SLOTS as usize * slot_len_bytes], vec![input_len_bytes; RANKS.into()]].concat();
    let (mut engine, memories) = engine(strict, &lens_bytes);
    for rank in 0..RANKS {
        let input: Vec<u8> = (0..CHUNKS as usize * COUNT)
            .flat_map(|index| ((index * (usize::from(rank) + 1)) as f32).to_le_bytes())
            .collect();
        memories[usize::from(rank) + 1].write(0, &input);
    }
    let mut free: Vec<u64> = (0..SLOTS).collect();
    let (mut next, mut done) = (0, Vec::new());
    while done.len() < CHUNKS as usize {
        while next < CHUNKS
            && let Some(slot) = free.pop()
        {
            let steps =
                all_reduce(RANKS, next, slot * slot_len_bytes as u64, next * chunk_len_bytes as u64, COUNT as u32);
            let tag = Tag { seq: next, slot: slot as u32, attempt: 7 };
            engine.submit(Chain { tag, scope: Scope(1), steps: &steps }).expect("room for a chain a slot");
            next += 1;
        }
        assert!(engine.wait(None));
        let mut completions = [EMPTY; 3];
        let taken = engine.poll(&mut completions);
        for completion in &completions[..taken] {
            assert_eq!((completion.status, completion.tag.attempt), (Status::Done, 7));
            free.push(u64::from(completion.tag.slot));
            done.push(completion.tag.seq);
        }
    }
    done.sort_unstable();
    assert_eq!(done, (0..CHUNKS).collect::<Vec<_>>(), "each chain completes once");
    // 1 + 2 + 3 + 4 times the index, which f32 holds exactly.
    let sum: Vec<u8> = (0..CHUNKS as usize * COUNT).flat_map(|index| ((index * 10) as f32).to_le_bytes()).collect();
    for memory in &memories[1..] {
        assert_eq!(bytes_of(memory, 0, input_len_bytes), sum);
    }
    assert_eq!(engine.stats().chains, CHUNKS);
    assert_eq!(engine.stats().completed[Status::Done as usize], CHUNKS);
}

/// 256 + 1 + 1: bf16 has 8 digits, so a bf16 accumulator stays at 256 (PROTOCOL 9).
#[test]
fn sums_are_accumulated_in_the_descriptors_type() {
    let bf16 = |value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
    let sum = |profile, accumulator: Dtype| {
        let (mut engine, memories) = engine(config(profile, 1), &[64, 64]);
        for (at, value) in [256.0, 1.0, 1.0].into_iter().enumerate() {
            memories[0].write(2 * at, &bf16(value));
        }
        let (op, source, dst, count) = (ReduceOp::Sum, Dtype::Bf16, at(1, 0), 1);
        let reduce = |offset| Step::Reduce { op, source, accumulator, src: at(0, offset), dst, count };
        let narrow = accumulator == source;
        let first = if narrow {
            Step::Copy { src: at(0, 0), dst, len_bytes: 2 }
        } else {
            Step::Load { source, accumulator, src: at(0, 0), dst, count }
        };
        let mut steps = vec![first, reduce(2), reduce(4)];
        if !narrow {
            steps.push(Step::Store { op, accumulator, output: source, src: dst, dst: at(1, 32), count, ranks: 3 });
        }
        let completion = run(&mut engine, 1, &steps);
        (completion.status, bytes_of(&memories[1], if narrow { 0 } else { 32 }, 2))
    };
    assert_eq!(sum(Profile::InlineReduce, Dtype::Bf16), (Status::Done, bf16(256.0).to_vec()));
    assert_eq!(sum(Profile::Full, Dtype::Bf16), (Status::Done, bf16(256.0).to_vec()));
    assert_eq!(sum(Profile::Full, Dtype::F32), (Status::Done, bf16(258.0).to_vec()));
    assert_eq!(sum(Profile::InlineReduce, Dtype::F32).0, Status::Unsupported);
    assert_eq!(sum(Profile::CopyOnly, Dtype::Bf16).0, Status::Unsupported);
}

/// Runs the same reduction with every profile, as a device does: in flight with wide or narrow accumulators, or by
/// copies and the runtime's kernels. The values are small integers, so that all sums are equal.
#[test]
fn every_profile_computes_the_same_sum() {
    const RANKS: u16 = 3;
    const COUNT: u32 = 100;
    let (op, f32, len_bytes) = (ReduceOp::Sum, Dtype::F32, COUNT * 4);
    let span = |address| Span { address, len_bytes: len_bytes.into() };
    for profile in Profile::ALL {
        let (mut engine, memories) = engine(config(profile, 1), &[400; RANKS as usize]);
        let own = RegionKey { index: 7, generation: 1 };
        engine.map_local(own, 2 * 400).expect("a free entry");
        let (slot, staging) = (Address { region: own, offset_bytes: 0 }, Address { region: own, offset_bytes: 400 });
        for (rank, memory) in memories.iter().enumerate() {
            let input: Vec<u8> =
                (0..COUNT).flat_map(|index| ((index * (rank as u32 + 1)) as f32).to_le_bytes()).collect();
            memory.write(0, &input);
        }
        let copy = |src, dst| Step::Copy { src, dst, len_bytes };
        let reduce =
            |rank| Step::Reduce { op, source: f32, accumulator: f32, src: at(rank, 0), dst: slot, count: COUNT };
        let out = |rank| copy(slot, at(rank, 0));
        let kernel = Kernel::new(f32, op).expect("supported");
        let steps: Vec<Step> = match profile {
            Profile::CopyOnly => {
                for rank in 0..RANKS {
                    let pull = [copy(at(rank, 0), staging)];
                    assert_eq!(run(&mut engine, rank.into(), &pull).status, Status::Done);
                    let combined = engine.with_local(span(slot), span(staging), |acc, src| match rank {
                        0 => kernel.load(acc, src, false),
                        _ => kernel.combine(acc, src, false),
                    });
                    assert_eq!(combined, Ok(()));
                }
                (0..RANKS).map(out).collect()
            }
            Profile::InlineReduce => {
                let first = copy(at(0, 0), slot);
                std::iter::once(first).chain((1..RANKS).map(reduce)).chain((0..RANKS).map(out)).collect()
            }
            Profile::Full => {
                let first = Step::Load { source: f32, accumulator: f32, src: at(0, 0), dst: slot, count: COUNT };
                std::iter::once(first).chain((1..RANKS).map(reduce)).chain((0..RANKS).map(out)).collect()
            }
        };
        assert_eq!(run(&mut engine, 9, &steps).status, Status::Done, "{profile}");
        let sum: Vec<u8> = (0..COUNT).flat_map(|index| ((index * 6) as f32).to_le_bytes()).collect();
        assert!(memories.iter().all(|memory| bytes_of(memory, 0, 400) == sum), "{profile}");
    }
}

#[test]
fn local_memory_is_inaccessible_while_a_chain_conflicts() {
    let (mut engine, _memories) = engine(config(Profile::CopyOnly, 1), &[64]);
    let own = RegionKey { index: 7, generation: 1 };
    engine.map_local(own, 64).expect("a free entry");
    let span = |region, offset_bytes, len_bytes| Span { address: Address { region, offset_bytes }, len_bytes };
    let access = |engine: &mut EmuEngine, dst, src| engine.with_local(dst, src, |_, _| ());
    let (low, high) = (span(own, 0, 32), span(own, 32, 32));
    assert_eq!(access(&mut engine, low, high), Ok(()));
    assert_eq!(access(&mut engine, low, span(own, 31, 4)), Err(Status::Overlap));
    assert_eq!(access(&mut engine, low, span(own, 60, 5)), Err(Status::OutOfBounds));
    assert_eq!(access(&mut engine, span(key(0), 0, 8), high), Err(Status::BadRegion), "a rank's memory is not local");
    // In flight until it is polled: it reads the low half and writes to a rank.
    let steps = [Step::Copy { src: low.address, dst: at(0, 0), len_bytes: 32 }];
    engine.submit(Chain { tag: tag(1), scope: Scope(0), steps: &steps }).expect("room");
    assert_eq!(access(&mut engine, low, high), Err(Status::Overlap));
    assert_eq!(access(&mut engine, high, low), Ok(()), "both only read the low half");
    assert!(engine.wait(None));
    assert_eq!(engine.poll(&mut [EMPTY]), 1);
    assert_eq!(access(&mut engine, low, high), Ok(()));
    assert!(engine.unmap(own));
    assert_eq!(access(&mut engine, low, high), Err(Status::BadRegion));
}
