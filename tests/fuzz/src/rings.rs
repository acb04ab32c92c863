//! Ring entries, DMA descriptors, and the memory that holds them.
//!
//! Input: a byte for the kind of input, then little-endian words.

use crate::Cursor;
use std::sync::atomic::{AtomicU64, Ordering};
use sumac_hal::dma::{
    Capabilities, Chain, Completion, DESCRIPTOR_WORDS, Descriptor, Engine, Processor, Profile, RegionKey, Scope,
    Status, Step, Tag,
};
use sumac_hal::ids::BootId;
use sumac_hal::mmio::admission::{AdmissionReply, AdmissionRequest};
use sumac_hal::mmio::{
    BAR_ALIGNMENT_BYTES, Bar, COMPLETION_WORDS, CompletionEntry, DEPTH_MIN, Features, FunctionConfig, SUBMISSION_WORDS,
    SubmissionEntry, bar_len_bytes,
};
use sumac_hal::ring::{Consumer, Producer};

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    let mut cursor = Cursor(data);
    match cursor.byte() % 6 {
        0 => {
            let words = words(&mut cursor);
            if let Ok(entry) = SubmissionEntry::parse(&words) {
                assert_eq!(SubmissionEntry::parse(&entry.emit()), Ok(entry));
            }
            if let Some(request) = AdmissionRequest::parse(&words) {
                assert_eq!(request.emit(), words);
            }
        }
        1 => {
            let words: [u64; COMPLETION_WORDS] = words(&mut cursor);
            if let Ok(entry) = CompletionEntry::parse(&words) {
                assert_eq!(CompletionEntry::parse(&entry.emit()), Ok(entry));
            }
            if let Some(answer) = AdmissionReply::parse(&words) {
                assert_eq!(answer.emit(), words);
            }
        }
        2 => engine(&mut cursor),
        3 => probe(&mut cursor),
        4 => ring_of_device(&mut cursor),
        _ => ring_of_host(&mut cursor),
    }
}

fn words<const N: usize>(cursor: &mut Cursor<'_>) -> [u64; N] {
    std::array::from_fn(|_| cursor.u64())
}

/// The length in words of each region that chains name.
const REGION_WORDS: usize = 64;

/// Chains of arbitrary descriptors, over two regions between guards.
fn engine(cursor: &mut Cursor<'_>) {
    const GUARD: u64 = 0x5a5a_a5a5_5a5a_a5a5;
    let guarded = || (0..REGION_WORDS + 2).map(|_| AtomicU64::new(GUARD)).collect::<Vec<_>>();
    let (own, rank) = (guarded(), guarded());
    let mut engine = Processor::<4, 2>::new(8);
    let key = |index| RegionKey { index, generation: 1 };
    assert!(engine.map_local(key(0), &own[1..=REGION_WORDS]) && engine.map(key(1), &rank[1..=REGION_WORDS]));
    for _ in 0..8 {
        let mut steps: Vec<Step> = Vec::new();
        let mut tag = Tag::default();
        while steps.len() < 9 && !cursor.is_empty() {
            let words: [u64; DESCRIPTOR_WORDS] = words(cursor);
            let Ok(descriptor) = Descriptor::parse(&words) else { break };
            assert_eq!(descriptor.emit(), words);
            tag = descriptor.tag;
            steps.push(descriptor.step);
            if !descriptor.more {
                break;
            }
        }
        let taken = engine.submit(Chain { tag, scope: Scope(0), steps: &steps });
        let mut completions = [Completion { tag: Tag::default(), status: Status::Hardware, step: 0 }; 2];
        assert_eq!(engine.poll(&mut completions), usize::from(taken.is_ok()));
        if taken.is_ok() {
            assert_eq!(completions[0].tag, tag);
            assert_eq!(completions[0].status == Status::Done, usize::from(completions[0].step) == steps.len());
        }
    }
    for region in [&own, &rank] {
        for word in [0, REGION_WORDS + 1] {
            assert_eq!(region[word].load(Ordering::Relaxed), GUARD, "written beyond a region");
        }
    }
}

/// Zeroed memory of a function, aligned as a BAR is.
struct Memory {
    words: Vec<AtomicU64>,
    start: usize,
}

/// The number of queues of a function, and the length of its memory.
const QUEUES: u32 = 2;
const LEN_BYTES: usize = bar_len_bytes(QUEUES, DEPTH_MIN);

impl Memory {
    fn new() -> Self {
        let words: Vec<_> = (0..(LEN_BYTES + BAR_ALIGNMENT_BYTES) / 8).map(|_| AtomicU64::new(0)).collect();
        let start = words.as_ptr().align_offset(BAR_ALIGNMENT_BYTES);
        Self { words, start }
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words[self.start..][..LEN_BYTES / 8]
    }

    fn function(&self) -> Bar<'_> {
        let config = FunctionConfig {
            boot_id: BootId(1),
            features: Features::all(),
            queues: QUEUES,
            depth: DEPTH_MIN,
            dma: Capabilities::new(Profile::Full, 8, 8),
        };
        Bar::create(self.words(), &config).expect("it fits")
    }

    /// Let the peer write words: a count, then offsets and values.
    fn spoil(&self, cursor: &mut Cursor<'_>) {
        for _ in 0..cursor.byte() % 16 {
            let at = usize::from(cursor.u16()) % self.words().len();
            self.words()[at].store(cursor.u64(), Ordering::Relaxed);
        }
    }
}

/// A host reads registers with arbitrary contents.
fn probe(cursor: &mut Cursor<'_>) {
    let memory = Memory::new();
    memory.function();
    memory.spoil(cursor);
    let Ok((bar, identity)) = Bar::probe(memory.words()) else { return };
    assert!(bar_len_bytes(bar.queues(), bar.depth()) <= LEN_BYTES, "the queues are in the memory");
    assert!(identity.dma.alignment_bytes.is_power_of_two());
    assert!((0..bar.queues()).all(|index| bar.queue(index).is_some()) && bar.queue(bar.queues()).is_none());
    let _ = (bar.status(), bar.heartbeat(), bar.control());
}

/// A device serves a host that writes arbitrary words between polls.
fn ring_of_device(cursor: &mut Cursor<'_>) {
    let memory = Memory::new();
    let queue = memory.function().queue(1).expect("it has two");
    let mut submissions = Consumer::new(queue.submissions);
    let mut completions = Producer::new(queue.completions);
    for _ in 0..8 {
        memory.spoil(cursor);
        let mut entries = [[0; SUBMISSION_WORDS]; 4];
        let Ok(count) = submissions.pop_batch(&mut entries) else { break };
        assert!(count <= DEPTH_MIN as usize, "never more than the ring holds");
        for entry in &entries[..count] {
            let _ = SubmissionEntry::parse(entry);
        }
        let Ok(room) = completions.room() else { break };
        assert!(room <= completions.capacity());
        let _ = completions.push(&words(cursor));
    }
}

/// A host reads completions of a device that writes arbitrary words between polls.
fn ring_of_host(cursor: &mut Cursor<'_>) {
    let memory = Memory::new();
    let queue = memory.function().queue(1).expect("it has two");
    let mut completions = Consumer::new(queue.completions);
    let mut submissions = Producer::new(queue.submissions);
    for _ in 0..8 {
        memory.spoil(cursor);
        while let Ok(Some(entry)) = completions.pop() {
            let _ = CompletionEntry::parse(&entry);
        }
        let Ok(room) = submissions.room() else { break };
        assert!(room <= submissions.capacity());
        let _ = submissions.push(&words(cursor));
    }
}
