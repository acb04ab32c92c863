//! The DMA engine of a card, alone: copies arrive whole and where they belong, wrong ones touch nothing, and their rate
//! beside that of the processor.

use super::engine::Words;
use super::{LIMIT, allocations};
use std::fmt::Debug;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::dma::{
    Address, Chain, Completion, DmaMemory, Engine, LocalMemory, Profile, RegionKey, Scope, Span, Status, Step, Tag,
};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine};
use sumac_hal::verbs::{MemcpyEngine, VerbsConfig, VerbsLink};

/// The length of each region in bytes.
const LEN: u32 = 8 << 20;

/// Bytes around what is copied, which must stay as they are.
const MARGIN: usize = 64;

const SOURCE: RegionKey = RegionKey { index: 0, generation: 2 };
const TARGET: RegionKey = RegionKey { index: 1, generation: 2 };

/// How long each rate is measured.
const MEASURED: Duration = Duration::from_millis(200);

/// An engine with memory that it shares with the processor.
trait Copier: Engine + LocalMemory + Debug {
    fn map(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>);
    fn unmap(&mut self, key: RegionKey) -> bool;
}

impl Copier for MemcpyEngine {
    fn map(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) {
        self.map_local_memory(key, memory).expect("memory");
    }

    fn unmap(&mut self, key: RegionKey) -> bool {
        self.unmap(key)
    }
}

impl Copier for EmuEngine {
    fn map(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) {
        self.map_local_memory(key, memory).expect("memory");
    }

    fn unmap(&mut self, key: RegionKey) -> bool {
        self.unmap(key)
    }
}

/// All checks on the engine of a link's device, or on the emulated one, which shows that they can be passed.
///
/// # Errors
/// Why there is no engine.
pub(crate) fn check(link: &VerbsLink) -> Result<(), String> {
    if link.device.as_deref() == Some("emulated") {
        check_on(EmuEngine::start(DmaConfig::new(Profile::CopyOnly, 1)).map_err(|error| error.to_string())?);
        return Ok(());
    }
    let config = VerbsConfig { link: link.clone(), ..VerbsConfig::default() };
    check_on(MemcpyEngine::open(&config, 4).map_err(|error| error.to_string())?);
    Ok(())
}

fn check_on(mut engine: impl Copier) {
    for key in [SOURCE, TARGET] {
        engine.map(key, Arc::new(Words::new(LEN as usize)));
    }
    let longest = engine.capabilities().max_len_bytes.min(LEN);
    println!("{:?}", engine.capabilities());
    for len_bytes in [1, 7, 64, 4096, 65_537, 1 << 20, longest] {
        for offset in [0, 3, 4095] {
            copy_is_whole(&mut engine, len_bytes.min(longest), offset);
        }
    }
    wrong_copies_touch_nothing(&mut engine);
    for len_bytes in [4 << 10, 64 << 10, 1 << 20] {
        rate(&mut engine, len_bytes);
    }
    assert!(engine.unmap(SOURCE) && engine.unmap(TARGET));
    assert_eq!(run(&mut engine, &[copy(0, 0, 64)]), Status::StaleRegion, "memory that is not mapped any more");
}

fn at(region: RegionKey, offset_bytes: u64) -> Address {
    Address { region, offset_bytes }
}

fn copy(from: u64, to: u64, len_bytes: u32) -> Step {
    Step::Copy { src: at(SOURCE, from), dst: at(TARGET, to), len_bytes }
}

fn submit(engine: &mut impl Copier, seq: u64, steps: &[Step]) {
    engine.submit(Chain { tag: Tag { seq, ..Tag::default() }, scope: Scope(0), steps }).expect("room");
}

fn run(engine: &mut impl Copier, steps: &[Step]) -> Status {
    submit(engine, 1, steps);
    let (start, mut completions) =
        (Instant::now(), [Completion { tag: Tag::default(), status: Status::Done, step: 0 }]);
    while engine.poll(&mut completions) == 0 {
        assert!(start.elapsed() < LIMIT, "neither done nor failed: {engine:?}");
        std::thread::yield_now();
    }
    completions[0].status
}

/// Let the processor work on all of both regions.
fn with_both<R>(engine: &mut impl Copier, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> R {
    let whole = |region| Span { address: at(region, 0), len_bytes: LEN.into() };
    engine.with_local(whole(TARGET), whole(SOURCE), work).expect("nothing else is at it")
}

/// Fill the source. `with_local` lends it for reading only, so the pattern goes through the target.
fn fill(engine: &mut impl Copier, salt: usize) {
    let whole = |region| Span { address: at(region, 0), len_bytes: LEN.into() };
    let pattern = |to: &mut [u8], _: &[u8]| {
        to.iter_mut().enumerate().for_each(|(index, byte)| *byte = ((index + salt) * 7 % 251) as u8);
    };
    engine.with_local(whole(SOURCE), whole(TARGET), pattern).expect("nothing else is at it");
    with_both(engine, |to, _| to.fill(0xee));
}

fn copy_is_whole(engine: &mut impl Copier, len_bytes: u32, offset: u64) {
    let (from, to) = (offset, offset / 2 + MARGIN as u64);
    let len = (len_bytes as usize).min(LEN as usize - offset as usize - MARGIN);
    fill(engine, len);
    assert_eq!(run(engine, &[copy(from, to, len as u32)]), Status::Done, "{len} bytes from {from} to {to}");
    let (from, to) = (from as usize, to as usize);
    let is_right = with_both(engine, |found, sent| {
        let is_untouched = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0xee);
        let (before, after) = (&found[to - MARGIN..to], &found[to + len..(to + len + MARGIN).min(LEN as usize)]);
        found[to..to + len] == sent[from..from + len] && is_untouched(before) && is_untouched(after)
    });
    assert!(is_right, "{len} bytes from {from} to {to}, and those around them");
}

fn wrong_copies_touch_nothing(engine: &mut impl Copier) {
    fill(engine, 1);
    let end = u64::from(LEN);
    for (step, status) in [(copy(0, end - 63, 64), Status::OutOfBounds), (copy(end, 0, 1), Status::OutOfBounds)] {
        assert_eq!(run(engine, &[step]), status, "{step:?}");
    }
    let stale = Step::Copy { src: at(RegionKey { generation: 1, ..SOURCE }, 0), dst: at(TARGET, 0), len_bytes: 64 };
    assert_eq!(run(engine, &[stale]), Status::StaleRegion);
    assert!(with_both(engine, |found, _| found.iter().all(|byte| *byte == 0xee)), "something was written");
}

/// Copy for a while by the engine, and by the processor.
fn rate(engine: &mut impl Copier, len_bytes: u32) {
    let steps: Vec<Step> = (0..8).map(|nth| copy(0, u64::from(nth * len_bytes), len_bytes)).collect();
    let counted = allocations();
    let (start, mut copied) = (Instant::now(), 0_u64);
    while start.elapsed() < MEASURED {
        assert_eq!(run(engine, &steps), Status::Done);
        copied += 8 * u64::from(len_bytes);
    }
    let by_engine = copied as f64 / start.elapsed().as_secs_f64();
    assert_eq!(allocations(), counted, "allocations on the data path");
    let by_processor = with_both(engine, |to, from| {
        let (start, mut copied) = (Instant::now(), 0_u64);
        let len = len_bytes as usize;
        while start.elapsed() < MEASURED {
            for nth in 0..8 {
                to[nth * len..(nth + 1) * len].copy_from_slice(black_box(&from[..len]));
            }
            copied += 8 * u64::from(len_bytes);
            black_box(&mut *to);
        }
        copied as f64 / start.elapsed().as_secs_f64()
    });
    println!("{len_bytes} B: {:.2} GB/s, {:.2} of the processor's rate", by_engine * 1e-9, by_engine / by_processor);
}
