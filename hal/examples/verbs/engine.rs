//! The DMA engine over one-sided connections: a device reduces the memory of two ranks on another host.

use super::one_sided::{bytes, connected, domain};
use super::{LIMIT, allocations};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use sumac_hal::dma::{
    Address, Chain, Completion, DmaMemory, Engine, LocalMemory, RegionKey, Scope, Span, Status, Step, Tag,
};
use sumac_hal::verbs::{ExposedRegion, LinkError, OneSided, PeerEngine, VerbsLink};

/// The length of each rank's memory in bytes.
const LEN: usize = 256 << 10;

/// The length of a chunk in bytes.
const CHUNK: u32 = 32 << 10;

/// The device's own memory: a record, an accumulator, and pulled chunks.
const OWN: RegionKey = RegionKey { index: 0, generation: 1 };
const RECORD: u64 = 0;
const ACCUMULATOR: u64 = 64;
const PULLED: u64 = ACCUMULATOR + CHUNK as u64;

/// Memory of this process.
pub(crate) struct Words(Box<[AtomicU64]>);

impl Words {
    /// Allocate so many bytes, a multiple of 8.
    pub(crate) fn new(len_bytes: usize) -> Self {
        Self((0..len_bytes / 8).map(|_| AtomicU64::new(0)).collect())
    }
}

// SAFETY: the words stay where they are, and may change under a shared borrow.
unsafe impl DmaMemory for Words {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&self.0[..]).cast()
    }

    fn len_bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

struct Rank {
    memory: ExposedRegion,
    end: Option<OneSided>,
    key: RegionKey,
    peer: u16,
}

fn at(region: RegionKey, offset_bytes: u64) -> Address {
    Address { region, offset_bytes }
}

fn copy(src: Address, dst: Address) -> Step {
    Step::Copy { src, dst, len_bytes: CHUNK }
}

fn submit(engine: &mut PeerEngine, seq: u64, steps: &[Step]) {
    engine.submit(Chain { tag: Tag { seq, ..Tag::default() }, scope: Scope(0), steps }).expect("room");
}

fn next(engine: &mut PeerEngine) -> Completion {
    let start = Instant::now();
    let mut completions = [Completion { tag: Tag::default(), status: Status::Done, step: 0 }];
    while engine.poll(&mut completions) == 0 {
        assert!(start.elapsed() < LIMIT, "neither done nor failed: {engine:?}");
        std::thread::sleep(Duration::from_micros(50));
    }
    completions[0]
}

fn run(engine: &mut PeerEngine, steps: &[Step]) -> (Status, u16) {
    submit(engine, 1, steps);
    let Completion { status, step, .. } = next(engine);
    (status, step)
}

/// All checks, between two links.
pub(crate) fn check(links: &[VerbsLink]) {
    let [here, there, ..] = links else { panic!("two links") };
    let (a, b) = (domain(here), domain(there));
    let mut engine = PeerEngine::new(&a, 8);
    let own = Words::new(PULLED as usize + CHUNK as usize);
    engine.map_local_memory(OWN, Arc::new(own)).expect("memory");
    let mut ranks = [1, 2].map(|index| {
        let (link, end) = connected(&a, &b);
        let mut memory = b.expose(LEN).expect("memory");
        memory.write(0, &(0..LEN).map(|i| (i * usize::from(index) * 7 % 251) as u8).collect::<Vec<_>>()).expect("all");
        let (key, peer) = (RegionKey { index, generation: 1 }, engine.attach(link));
        engine.map_remote(key, peer, memory.remote()).expect("a free place");
        Rank { memory, end: Some(end), key, peer }
    });
    reduce(&mut engine, &ranks);
    crowd(&mut engine, &ranks[0]);
    gone(&mut engine, &mut ranks);
}

/// Pull both ranks' chunks, combine them, publish the result, and write it back in place.
fn reduce(engine: &mut PeerEngine, ranks: &[Rank; 2]) {
    let [one, two] = ranks;
    let before = [bytes(&one.memory), bytes(&two.memory)];
    let chunks = LEN as u64 / u64::from(CHUNK);
    let span = |offset, len_bytes| Span { address: at(OWN, offset), len_bytes };
    let counted = allocations();
    for chunk in 0..chunks {
        let offset = chunk * u64::from(CHUNK);
        let pull = [
            Step::Publish { dst: at(OWN, RECORD), words: [0, 0], covers: Default::default() },
            copy(at(one.key, offset), at(OWN, ACCUMULATOR)),
            copy(at(two.key, offset), at(OWN, PULLED)),
        ];
        let pulled = run(engine, &pull);
        assert_eq!(
            pulled,
            (Status::Done, 3),
            "chunk {chunk}: {:?} {:?}",
            engine.error(one.peer),
            engine.error(two.peer)
        );
        let xor = |to: &mut [u8], from: &[u8]| to.iter_mut().zip(from).for_each(|(to, from)| *to ^= from);
        let (to, from) = (span(ACCUMULATOR, u64::from(CHUNK)), span(PULLED, u64::from(CHUNK)));
        engine.with_local(to, from, xor).expect("nothing else is at it");
        let write = [
            Step::Publish { dst: at(OWN, RECORD), words: [chunk + 1, chunk], covers: Default::default() },
            copy(at(OWN, ACCUMULATOR), at(one.key, offset)),
            copy(at(OWN, ACCUMULATOR), at(two.key, offset)),
        ];
        assert_eq!(run(engine, &write), (Status::Done, 3));
    }
    assert_eq!(allocations(), counted, "allocations on the data path");
    let expected: Vec<u8> = before[0].iter().zip(&before[1]).map(|(a, b)| a ^ b).collect();
    assert!(bytes(&one.memory) == expected && bytes(&two.memory) == expected, "what both have");
    println!("{chunks} chunks of {CHUNK} bytes of two ranks, pulled, combined and written back");
}

/// More chains at a time than a connection has room for.
fn crowd(engine: &mut PeerEngine, rank: &Rank) {
    let step =
        |nth: u64| Step::Copy { src: at(rank.key, 64 * nth), dst: at(OWN, ACCUMULATOR + 64 * nth), len_bytes: 64 };
    let chains = 32;
    for seq in 0..chains {
        let steps: [Step; 8] = std::array::from_fn(|nth| step(seq * 8 + nth as u64));
        submit(engine, seq, &steps);
    }
    let mut done: Vec<u64> = Vec::new();
    for _ in 0..chains {
        let end = next(engine);
        assert_eq!(end.status, Status::Done, "chain {}", end.tag.seq);
        done.push(end.tag.seq);
    }
    done.sort_unstable();
    assert_eq!(done, (0..chains).collect::<Vec<_>>());
    let len_bytes = 64 * 8 * chains;
    let pulled = Span { address: at(OWN, ACCUMULATOR), len_bytes };
    let nothing = Span { address: at(OWN, PULLED), len_bytes: 0 };
    let is_same = engine.with_local(nothing, pulled, |_, pulled| *pulled == bytes(&rank.memory)[..len_bytes as usize]);
    assert_eq!(is_same, Ok(true), "what was pulled");
    println!("{} copies at once", chains * 8);
}

/// A rank that has revoked its memory and one that is gone: each is a specific error, and the other rank is unaffected.
fn gone(engine: &mut PeerEngine, ranks: &mut [Rank; 2]) {
    let [one, two] = ranks;
    one.end.take();
    let start = Instant::now();
    submit(engine, 1, &[copy(at(one.key, 0), at(OWN, ACCUMULATOR))]);
    submit(engine, 2, &[copy(at(two.key, 0), at(OWN, PULLED))]);
    let mut ends = [next(engine), next(engine)].map(|end| (end.tag.seq, end.status));
    // On a lossy link, either may come first.
    ends.sort_unstable_by_key(|end| end.0);
    assert_eq!(ends, [(1, Status::Hardware), (2, Status::Done)]);
    assert_eq!((engine.error(one.peer), engine.error(two.peer)), (Some(LinkError::PeerGone), None));
    println!("a dead rank is noticed after {} ms, and the other goes on", start.elapsed().as_millis());
    assert_eq!(run(engine, &[copy(at(one.key, 0), at(OWN, ACCUMULATOR))]), (Status::Hardware, 0));
    two.memory.revoke().expect("another key");
    assert_eq!(run(engine, &[copy(at(OWN, ACCUMULATOR), at(two.key, 0))]), (Status::Hardware, 0));
    assert_eq!(engine.error(two.peer), Some(LinkError::RemoteAccess));
    engine.detach(two.peer).expect("ended");
    assert_eq!(engine.error(two.peer), Some(LinkError::Fenced));
    assert!(engine.unmap(two.key) && engine.unmap(OWN));
}
