//! The DMA engine of a card, alone: copies arrive whole and where they belong, wrong ones touch nothing, and their rate
//! beside that of the processor. Then alias keys: memory of another function, which is the same one unless there is a
//! grant of another.

use super::engine::Words;
use super::{LIMIT, allocations};
use std::fmt::Debug;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use sumac_hal::dma::{
    Address, Chain, Completion, DmaMemory, Engine, LocalMemory, Profile, RegionKey, Scope, Span, Status, Step, Tag,
};
use sumac_hal::emu::dma::{DmaConfig, EmuEngine};
use sumac_hal::verbs::{ExportedMemory, MemcpyEngine, MemoryGrant, VerbsConfig, VerbsLink};

/// The length of each region in bytes.
const LEN: u32 = 8 << 20;

/// Bytes around what is copied, which must stay as they are.
const MARGIN: usize = 64;

const SOURCE: RegionKey = RegionKey { index: 0, generation: 2 };
const TARGET: RegionKey = RegionKey { index: 1, generation: 2 };
const ALIAS: RegionKey = RegionKey { index: 2, generation: 2 };

/// The last word of exported memory, once the other function has written its answer in front of it.
const WRITTEN: u64 = 0x5375_6d61_6321_0a00;

/// How long an export waits for it.
const EXPORTED: Duration = Duration::from_secs(60);

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

/// All checks on the engine of a link's device, or on the emulated one, which shows that they can be passed. Then those
/// of alias keys, with memory that was granted or that this process exports.
///
/// # Errors
/// Why there is no engine, or why the granted memory cannot be attached.
pub(crate) fn check(link: &VerbsLink, grant: Option<&MemoryGrant>) -> Result<(), String> {
    if link.device.as_deref() == Some("emulated") {
        check_on(&mut EmuEngine::start(DmaConfig::new(Profile::CopyOnly, 1)).map_err(|error| error.to_string())?);
        return Ok(());
    }
    let config = VerbsConfig { link: link.clone(), ..VerbsConfig::default() };
    let mut engine = MemcpyEngine::open(&config, 4).map_err(|error| error.to_string())?;
    check_on(&mut engine);
    let again = |key: RegionKey| RegionKey { generation: key.generation + 1, ..key };
    let (source, target) = (again(SOURCE), again(TARGET));
    match grant {
        Some(grant) => {
            engine.map_alias(ALIAS, grant).map_err(|error| error.to_string())?;
            answer(&mut engine, (source, target), grant.len_bytes);
        }
        None => {
            let memory = Arc::new(Exported::new());
            let exported = ExportedMemory::new(engine.device(), Arc::clone(&memory) as Arc<dyn DmaMemory>);
            let attached = exported.map_err(|error| error.to_string()).and_then(|exported| {
                engine.map_alias(ALIAS, &exported.grant()).map_err(|error| error.to_string())?;
                Ok(exported)
            });
            match attached {
                // Not every card has them.
                Err(why) => println!("no alias keys: {why}"),
                Ok(exported) => {
                    answer(&mut engine, (source, target), u64::from(LEN));
                    memory.check_answer();
                    assert!(engine.unmap(ALIAS));
                    drop(exported);
                    println!("alias keys: copies from and to exported memory");
                }
            }
        }
    }
    Ok(())
}

/// Export memory through a link's device, print the grant, and check what the function that has it writes.
///
/// # Errors
/// Why it cannot be exported, or that nobody has written.
pub(crate) fn export(link: &VerbsLink) -> Result<(), String> {
    let device = link.device.as_deref().ok_or("name the device of the memory's host")?;
    let memory = Arc::new(Exported::new());
    let exported = ExportedMemory::new(device, Arc::clone(&memory) as Arc<dyn DmaMemory>);
    let exported = exported.map_err(|error| error.to_string())?;
    println!("grant {}", exported.grant().to_hex());
    let start = Instant::now();
    while memory.0.last().is_none_or(|word| word.load(Ordering::Acquire) != WRITTEN) {
        if start.elapsed() > EXPORTED {
            return Err(format!("nobody has written within {} s", EXPORTED.as_secs()));
        }
        std::thread::yield_now();
    }
    memory.check_answer();
    println!("another function has read and written this memory");
    Ok(())
}

/// Exported memory, filled with words that say where they are.
struct Exported(Box<[AtomicU64]>);

impl Exported {
    fn new() -> Self {
        Self((0..u64::from(LEN) / 8).map(|nth| AtomicU64::new(word(nth))).collect())
    }

    /// Check that all but the last word are what [`answer`] writes.
    fn check_answer(&self) {
        let (last, others) = self.0.split_last().expect("words");
        assert_eq!(last.load(Ordering::Acquire), WRITTEN, "written last");
        let wrong = others.iter().enumerate().find(|(nth, found)| found.load(Ordering::Relaxed) != !word(*nth as u64));
        assert!(wrong.is_none(), "word {wrong:x?} of the exported memory is not what was written");
    }
}

// SAFETY: the words stay where they are, and may change under a shared borrow.
unsafe impl DmaMemory for Exported {
    fn base(&self) -> std::ptr::NonNull<u8> {
        std::ptr::NonNull::from(&self.0[..]).cast()
    }

    fn len_bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

/// What exported memory holds at first.
const fn word(nth: u64) -> u64 {
    nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1
}

/// Read all of another function's memory, check it, write the complement of its words to it, and at last the word by
/// which its owner sees that.
fn answer(engine: &mut MemcpyEngine, (source, target): (RegionKey, RegionKey), len_bytes: u64) {
    assert_eq!(len_bytes, u64::from(LEN), "the grant is of memory that `verbs export` exports");
    for key in [source, target] {
        Copier::map(engine, key, Arc::new(Words::new(LEN as usize)));
    }
    let whole = |region| Span { address: at(region, 0), len_bytes };
    copy_range(engine, (ALIAS, target), 0..LEN);
    let words = u64::from(LEN) / 8;
    let is_right = engine
        .with_local(whole(source), whole(target), |to, from| {
            let both = (0..words).zip(to.chunks_exact_mut(8).zip(from.chunks_exact(8)));
            let mut is_right = true;
            for (nth, (to, from)) in both {
                is_right &= *from == word(nth).to_ne_bytes();
                let answer = if nth + 1 == words { WRITTEN } else { !word(nth) };
                to.copy_from_slice(&answer.to_ne_bytes());
            }
            is_right
        })
        .expect("nothing else is at it");
    assert!(is_right, "the other function's memory was not read as it is");
    copy_range(engine, (source, ALIAS), 0..LEN - 8);
    copy_range(engine, (source, ALIAS), LEN - 8..LEN);
    assert!(engine.unmap(source) && engine.unmap(target));
}

/// Copy a range from one region to the same place in another.
fn copy_range(engine: &mut MemcpyEngine, (src, dst): (RegionKey, RegionKey), range: std::ops::Range<u32>) {
    let longest = engine.capabilities().max_len_bytes.min(1 << 20);
    for from in range.clone().step_by(longest as usize) {
        let (src, dst) = (at(src, from.into()), at(dst, from.into()));
        let step = Step::Copy { src, dst, len_bytes: longest.min(range.end - from) };
        assert_eq!(run(engine, &[step]), Status::Done, "{step:?}");
    }
}

fn check_on(engine: &mut impl Copier) {
    for key in [SOURCE, TARGET] {
        engine.map(key, Arc::new(Words::new(LEN as usize)));
    }
    let longest = engine.capabilities().max_len_bytes.min(LEN);
    println!("{:?}", engine.capabilities());
    for len_bytes in [1, 7, 64, 4096, 65_537, 1 << 20, longest] {
        for offset in [0, 3, 4095] {
            copy_is_whole(engine, len_bytes.min(longest), offset);
        }
    }
    wrong_copies_touch_nothing(engine);
    for len_bytes in [4 << 10, 64 << 10, 1 << 20] {
        rate(engine, len_bytes);
    }
    assert!(engine.unmap(SOURCE) && engine.unmap(TARGET));
    assert_eq!(run(engine, &[copy(0, 0, 64)]), Status::StaleRegion, "memory that is not mapped any more");
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
