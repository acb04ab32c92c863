//! Invalid chains: each fails with a specific status, is counted, and writes nothing.

use super::*;
use crate::dma::SubmitError;

fn copy(src: Address, dst: Address, len_bytes: u32) -> Step {
    Step::Copy { src, dst, len_bytes }
}

fn reduce(src: Address, dst: Address) -> Step {
    Step::Reduce { op: ReduceOp::Sum, source: Dtype::F32, accumulator: Dtype::F32, src, dst, count: 4 }
}

fn locate(src: Address, dst: Address) -> Step {
    Step::Reduce { op: ReduceOp::MinLoc, source: Dtype::I32, accumulator: Dtype::I32, src, dst, count: 2 }
}

/// Invalid steps, with their status in hardware mode and in strict mode.
fn mistakes() -> Vec<(Step, Status, Status)> {
    let stale = Address { region: RegionKey { index: 0, generation: 0 }, offset_bytes: 0 };
    let later = Address { region: RegionKey { index: 0, generation: 2 }, offset_bytes: 0 };
    let both = |step, status| (step, status, status);
    vec![
        both(copy(at(7, 0), at(1, 0), 1), Status::BadRegion),
        both(copy(at(900, 0), at(1, 0), 1), Status::BadRegion),
        both(copy(stale, at(1, 0), 1), Status::BadRegion),
        both(copy(later, at(1, 0), 1), Status::BadRegion),
        both(copy(at(0, 60), at(1, 0), 5), Status::OutOfBounds),
        both(copy(at(0, 0), at(1, 65), 1), Status::OutOfBounds),
        both(copy(at(0, u64::MAX), at(1, 0), 1), Status::OutOfBounds),
        both(copy(at(0, 0), at(1, 0), 0), Status::TooLong),
        both(copy(at(0, 0), at(0, 3), 4), Status::Overlap),
        both(reduce(at(0, 8), at(0, 8)), Status::Overlap),
        both(Step::Publish { dst: at(0, 4), words: [1, 2], covers: Default::default() }, Status::Misaligned),
        (reduce(at(0, 2), at(1, 0)), Status::Done, Status::Misaligned),
        (reduce(at(0, 0), at(1, 6)), Status::Done, Status::Misaligned),
        // A pair only needs the alignment of its values.
        both(locate(at(0, 4), at(1, 12)), Status::Done),
        (locate(at(0, 4), at(1, 2)), Status::Done, Status::Misaligned),
    ]
}

#[test]
fn invalid_step_fails_with_its_status_and_is_counted() {
    for strictness in [Strictness::Hardware, Strictness::Strict] {
        for (step, hardware, strict) in mistakes() {
            let (mut engine, memories) = engine(DmaConfig { strictness, ..config(Profile::Full, 1) }, &[64, 64]);
            memories[0].write(0, &[1; 64]);
            let expected = if strictness == Strictness::Hardware { hardware } else { strict };
            // Earlier steps take effect, later ones do not.
            let steps = [copy(at(0, 0), at(1, 60), 1), step, copy(at(0, 0), at(1, 61), 1)];
            let completion = run(&mut engine, 1, &steps);
            let step_failed = if expected == Status::Done { 3 } else { 1 };
            assert_eq!((completion.status, completion.step), (expected, step_failed), "{step:?}");
            assert_eq!(bytes_of(&memories[1], 60, 2), [1, u8::from(expected == Status::Done)], "{step:?}");
            if expected != Status::Done {
                assert_eq!(bytes_of(&memories[1], 0, 60), [0; 60], "{step:?}");
            }
            assert_eq!(engine.stats().completed[expected as usize], 1);
        }
    }
}

#[test]
#[should_panic(expected = "beyond the end of the region")]
fn asserting_engine_panics_when_polled() {
    let assert = DmaConfig { strictness: Strictness::Assert, ..config(Profile::Full, 1) };
    let (mut engine, _memories) = engine(assert, &[64, 64]);
    run(&mut engine, 1, &[copy(at(0, 0), at(1, 0), 65)]);
}

#[test]
fn configured_alignment_applies_to_every_address() {
    let (mut engine, _memories) = engine(DmaConfig { alignment_bytes: 32, ..config(Profile::Full, 1) }, &[64, 64]);
    assert_eq!(run(&mut engine, 1, &[copy(at(0, 32), at(1, 0), 7)]).status, Status::Done);
    assert_eq!(run(&mut engine, 2, &[copy(at(0, 16), at(1, 0), 7)]).status, Status::Misaligned);
}

#[test]
fn strict_mode_refuses_chains_that_conflict_with_those_in_flight() {
    let strict = DmaConfig { strictness: Strictness::Strict, ..config(Profile::Full, 2) };
    let (mut engine, _memories) = engine(strict, &[64, 64]);
    // Completions are not polled, so everything stays in flight.
    let first = [copy(at(0, 0), at(1, 0), 16)];
    let others = [
        (copy(at(0, 16), at(1, 15), 16), Status::Overlap), // writes what is written
        (copy(at(1, 8), at(0, 32), 4), Status::Overlap),   // reads what is written
        (copy(at(1, 32), at(0, 8), 4), Status::Overlap),   // writes what is read
        (copy(at(0, 0), at(1, 16), 16), Status::Done),     // reads what is read, writes after it
    ];
    engine.submit(Chain { tag: tag(0), scope: Scope(0), steps: &first }).expect("room");
    for (seq, (step, _)) in others.iter().enumerate() {
        let steps = [copy(at(0, 60), at(1, 60 + seq as u64), 1), *step];
        engine.submit(Chain { tag: tag(1 + seq as u64), scope: Scope(0), steps: &steps }).expect("room");
    }
    let mut completed = [None; 5];
    while completed.contains(&None) {
        assert!(engine.wait(None));
        let mut completion = [EMPTY];
        assert_eq!(engine.poll(&mut completion), 1);
        completed[completion[0].tag.seq as usize] = Some((completion[0].status, completion[0].step));
    }
    assert_eq!(completed[0], Some((Status::Done, 1)));
    for ((_, status), completed) in others.iter().zip(&completed[1..]) {
        let step = if *status == Status::Done { 2 } else { 1 };
        assert_eq!(*completed, Some((*status, step)));
    }
    // Completed chains do not conflict.
    assert_eq!(run(&mut engine, 9, &first).status, Status::Done);
}

#[test]
fn submit_refuses_empty_and_too_long_chains() {
    let (mut engine, _memories) = engine(config(Profile::Full, 1), &[64]);
    let steps = vec![copy(at(0, 0), at(0, 8), 1); 65];
    for count in [0, 65] {
        let chain = Chain { tag: tag(0), scope: Scope(0), steps: &steps[..count] };
        assert_eq!(engine.submit(chain), Err(SubmitError::Length { steps: count, max: 64 }));
    }
    assert!(!engine.wait(Some(std::time::Duration::ZERO)));
}

#[test]
fn start_refuses_invalid_configurations() {
    let good = config(Profile::Full, 1);
    let wrong = [
        DmaConfig { threads: 0, ..good },
        DmaConfig { threads: DmaConfig::THREADS_MAX + 1, ..good },
        DmaConfig { queue_depth: 48, max_steps: 8, ..good },
        DmaConfig { queue_depth: crate::ring::CAPACITY_MAX * 2, ..good },
        DmaConfig { max_steps: 0, ..good },
        DmaConfig { max_steps: 65, ..good },
        DmaConfig { alignment_bytes: 24, ..good },
    ];
    for config in wrong {
        assert!(EmuEngine::start(config).is_err(), "{config:?}");
    }
}
