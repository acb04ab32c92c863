use super::*;
use crate::dma::Tag;
use crate::op::{Dtype, ReduceOp};
use proptest::prelude::*;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;

const LEN: usize = 256;

/// A peer that is gone.
const GONE: u16 = 7;

/// Memory of atomic words.
pub(in crate::verbs) struct Words(pub(in crate::verbs) Box<[AtomicU64]>);

// SAFETY: the words stay where they are, and may change under a shared borrow.
unsafe impl DmaMemory for Words {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&self.0[..]).cast()
    }

    fn len_bytes(&self) -> usize {
        size_of_val(&*self.0)
    }
}

fn words() -> Arc<Words> {
    Arc::new(Words((0..LEN / 8).map(|_| AtomicU64::new(0)).collect()))
}

fn bytes(memory: &Words) -> Vec<u8> {
    memory.0.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
}

fn fill(memory: &Words, from: u8) {
    for (nth, word) in memory.0.iter().enumerate() {
        let byte = |at: usize| from.wrapping_add((nth * 8 + at) as u8);
        word.store(u64::from_ne_bytes(std::array::from_fn(byte)), Ordering::Relaxed);
    }
}

/// The state of the hardware, shared with the tests.
#[derive(Default)]
struct Card {
    batches: VecDeque<(u64, Vec<Copy>)>,
    posted: usize,
    /// Completions returned before the next `None`.
    budget: usize,
    fails: bool,
    /// The maximum number of batches, if limited.
    room: Option<usize>,
    is_stopped: bool,
    registered: Vec<u32>,
    next_key: u32,
}

/// Hardware that executes the last batch first, and the last copy of a batch first.
struct ReverseCopier(Rc<RefCell<Card>>);

impl Drop for ReverseCopier {
    fn drop(&mut self) {
        self.0.borrow_mut().batches.clear();
    }
}

struct Registration(Rc<RefCell<Card>>, u32);

impl Drop for Registration {
    fn drop(&mut self) {
        let mut card = self.0.borrow_mut();
        let touches = |copy: &Copy| copy.src.key == self.1 || copy.dst.key == self.1;
        assert!(card.is_stopped || !card.batches.iter().any(|(_, copies)| copies.iter().any(touches)), "still in use");
        card.registered.retain(|key| *key != self.1);
    }
}

impl Copier for ReverseCopier {
    type Registration = Registration;

    fn register(&mut self, _memory: &Arc<dyn DmaMemory>) -> Result<(Registration, u32), VerbsError> {
        let mut card = self.0.borrow_mut();
        card.next_key += 1;
        let key = card.next_key;
        card.registered.push(key);
        Ok((Registration(Rc::clone(&self.0), key), key))
    }

    fn post(&mut self, copies: &[Copy], number: u64) -> Result<(), NotPosted> {
        let mut card = self.0.borrow_mut();
        if card.room.is_some_and(|room| card.batches.len() >= room) {
            return Err(NotPosted::Busy);
        }
        assert!(!card.is_stopped && !copies.is_empty());
        card.posted += 1;
        card.batches.push_back((number, copies.to_vec()));
        Ok(())
    }

    fn poll(&mut self) -> Option<BatchOutcome> {
        let mut card = self.0.borrow_mut();
        assert!(!card.is_stopped);
        if card.budget == 0 {
            // Each further poll completes one batch.
            card.budget = 1;
            return None;
        }
        card.budget -= 1;
        let (number, copies) = card.batches.pop_back()?;
        if card.fails {
            return Some(BatchOutcome::Failed);
        }
        let there = |copy: &Copy| [copy.src.peer, copy.dst.peer].contains(&Some(GONE));
        if copies.iter().any(there) {
            return Some(BatchOutcome::Lost(number));
        }
        for copy in copies.iter().rev() {
            assert!([copy.src.key, copy.dst.key].iter().all(|key| card.registered.contains(key)));
            let at = |range: MemoryRange| std::ptr::with_exposed_provenance_mut::<u8>(range.addr as usize);
            // SAFETY: inside memory that is registered, and disjoint.
            unsafe { at(copy.dst).copy_from_nonoverlapping(at(copy.src), copy.len_bytes as usize) };
        }
        Some(BatchOutcome::Done(number))
    }

    fn stop(&mut self) {
        self.0.borrow_mut().is_stopped = true;
    }
}

struct Bench {
    card: Rc<RefCell<Card>>,
    engine: CopyEngine<ReverseCopier>,
    memory: [Arc<Words>; 2],
}

fn key(index: u16) -> RegionKey {
    RegionKey { index, generation: 1 }
}

fn at(index: u16, offset_bytes: u64) -> Address {
    Address { region: key(index), offset_bytes }
}

fn copy(src: Address, dst: Address, len_bytes: u32) -> Step {
    Step::Copy { src, dst, len_bytes }
}

/// An engine with region 0 of a rank and region 1 of its own.
fn bench() -> Bench {
    let card = Rc::<RefCell<Card>>::default();
    let mut engine = CopyEngine::new(ReverseCopier(Rc::clone(&card)), LEN as u32, 8);
    let memory = [words(), words()];
    for (index, memory) in memory.iter().enumerate() {
        fill(memory, index as u8 * 100);
        engine.map(key(index as u16), Arc::clone(memory) as Arc<dyn DmaMemory>, index == 1).expect("a free entry");
    }
    Bench { card, engine, memory }
}

impl Bench {
    fn submit(&mut self, seq: u64, steps: &[Step]) -> Result<(), SubmitError> {
        self.engine.submit(Chain { tag: Tag { seq, ..Tag::default() }, scope: Scope(seq as u8), steps })
    }

    fn poll(&mut self) -> Option<(u64, Status, u16)> {
        let mut completions = [Completion { tag: Tag::default(), status: Status::Done, step: 0 }];
        (self.engine.poll(&mut completions) > 0).then(|| {
            let [Completion { tag, status, step }] = completions;
            (tag.seq, status, step)
        })
    }

    fn run(&mut self, steps: &[Step]) -> (Status, u16) {
        self.submit(1, steps).expect("taken");
        let ended = (0..1000).find_map(|_| self.poll()).expect("it ends");
        (ended.1, ended.2)
    }
}

#[test]
fn independent_copies_are_posted_together_and_dependent_ones_wait() {
    let mut bench = bench();
    let publish = |words| Step::Publish { dst: at(1, 0), words, covers: Default::default() };
    let steps = [
        publish([0, 0]),
        copy(at(0, 0), at(1, 16), 32),
        copy(at(0, 64), at(1, 48), 32),
        // Reads what the two copies above wrote.
        copy(at(1, 16), at(0, 128), 64),
        publish([7, 8]),
        copy(at(1, 0), at(0, 200), 16),
    ];
    assert_eq!(bench.run(&steps), (Status::Done, 6));
    assert_eq!(bench.card.borrow().posted, 3, "two, one, and what comes after the publication");
    let mut expected = bytes(&bench.memory[0]);
    let source: Vec<u8> = (0..LEN).map(|i| i as u8).collect();
    assert_eq!((&expected[128..160], &expected[160..192]), (&source[..32], &source[64..96]));
    expected.truncate(216);
    assert_eq!(expected[200..], [7_u64.to_le_bytes(), 8_u64.to_le_bytes()].concat());
}

proptest! {
    #[test]
    fn chain_has_the_effect_of_its_steps_in_order(
        steps in prop::collection::vec((0_u16..2, 0_u64..240, 0_u16..2, 0_u64..240, 1_u32..40), 1..40),
    ) {
        let mut bench = bench();
        let mut model = [bytes(&bench.memory[0]), bytes(&bench.memory[1])];
        let mut expected = (Status::Done, steps.len() as u16);
        for (nth, &(from, src, to, dst, len)) in steps.iter().enumerate() {
            let (end, len) = (u64::from(len), len as usize);
            let status = match () {
                () if src + end > LEN as u64 || dst + end > LEN as u64 => Status::OutOfBounds,
                () if from == to && src < dst + end && dst < src + end => Status::Overlap,
                () => {
                    let piece = model[usize::from(from)][src as usize..][..len].to_vec();
                    model[usize::from(to)][dst as usize..][..len].copy_from_slice(&piece);
                    continue;
                }
            };
            expected = (status, nth as u16);
            break;
        }
        let steps: Vec<_> = steps.iter().map(|&(from, src, to, dst, len)| copy(at(from, src), at(to, dst), len)).collect();
        prop_assert_eq!(bench.run(&steps), expected);
        prop_assert_eq!([bytes(&bench.memory[0]), bytes(&bench.memory[1])], model);
    }
}

#[test]
fn invalid_step_ends_the_chain_after_the_steps_before_it() {
    let stale = Address { region: RegionKey { index: 0, generation: 0 }, offset_bytes: 0 };
    let reduce = Step::Reduce {
        op: ReduceOp::Sum,
        source: Dtype::F32,
        accumulator: Dtype::F32,
        src: at(0, 0),
        dst: at(1, 0),
        count: 1,
    };
    let publish = |dst| Step::Publish { dst, words: [1, 2], covers: Default::default() };
    for (wrong, status) in [
        (copy(at(7, 0), at(1, 0), 8), Status::BadRegion),
        (copy(at(9, 0), at(1, 0), 8), Status::BadRegion),
        (copy(stale, at(1, 0), 8), Status::BadRegion),
        (copy(at(0, 250), at(1, 0), 8), Status::OutOfBounds),
        (copy(at(0, u64::MAX), at(1, 0), 8), Status::OutOfBounds),
        (copy(at(0, 0), at(1, 0), LEN as u32 + 1), Status::TooLong),
        (copy(at(0, 0), at(1, 0), 0), Status::TooLong),
        (copy(at(0, 0), at(0, 4), 8), Status::Overlap),
        (publish(at(1, 4)), Status::Misaligned),
        (publish(at(1, 248)), Status::OutOfBounds),
        (reduce, Status::Unsupported),
    ] {
        let mut bench = bench();
        let before = bytes(&bench.memory[1]);
        let steps = [copy(at(0, 0), at(1, 32), 8), wrong, copy(at(0, 0), at(1, 64), 8)];
        assert_eq!(bench.run(&steps), (status, 1), "{wrong:?}");
        let mut expected = before;
        expected[32..40].copy_from_slice(&[0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(bytes(&bench.memory[1]), expected, "{wrong:?}: what came before it, and nothing else");
    }
}

#[test]
fn unmap_waits_for_posted_copies_and_later_steps_fail() {
    let mut bench = bench();
    let steps = [copy(at(0, 0), at(1, 0), 8), copy(at(1, 0), at(0, 8), 8)];
    bench.submit(1, &steps).expect("taken");
    assert!(!bench.engine.unmap(RegionKey { index: 0, generation: 2 }) && !bench.engine.unmap(key(5)));
    // The registration asserts on drop that no posted copy uses it.
    assert!(bench.engine.unmap(key(0)));
    assert_eq!(bench.card.borrow().registered.len(), 1);
    assert_eq!(Arc::strong_count(&bench.memory[0]), 1, "the engine keeps no reference");
    assert_eq!(bench.poll(), Some((1, Status::StaleRegion, 1)), "the rest of the chain does not find it");
    assert!(!bench.engine.unmap(key(0)));
    let again = bench.engine.map(key(0), bench.memory[0].clone(), false).expect_err("its generation was there");
    assert!(matches!(again, MapMemoryError::Taken { requested: 1, now: 1, .. }), "{again}");
    let next = RegionKey { index: 0, generation: 2 };
    bench.engine.map(next, bench.memory[0].clone(), false).expect("a later one");
    assert_eq!(bench.run(&[copy(at(0, 0), at(1, 0), 8)]), (Status::StaleRegion, 0));
}

#[test]
fn abort_ends_the_remaining_steps_of_its_scope_only() {
    let mut bench = bench();
    let before = bytes(&bench.memory[0]);
    let steps = [copy(at(0, 0), at(1, 0), 8), copy(at(1, 0), at(0, 8), 8)];
    bench.submit(1, &steps).expect("taken");
    bench.submit(2, &[copy(at(0, 16), at(1, 16), 8)]).expect("taken");
    bench.engine.abort(Scope(1));
    let mut ended: Vec<_> = (0..100).filter_map(|_| bench.poll()).collect();
    ended.sort_unstable_by_key(|ended| ended.0);
    assert_eq!(ended, [(1, Status::Aborted, 1), (2, Status::Done, 1)]);
    assert_eq!(bytes(&bench.memory[0]), before);
    assert_eq!(bench.run(&steps), (Status::Done, 2), "the scope's next chain is not");
}

#[test]
fn hardware_failure_ends_each_chain_once_and_stops_the_engine() {
    let mut bench = bench();
    let before = bytes(&bench.memory[1]);
    for seq in 1..=3 {
        bench.submit(seq, &[copy(at(0, 0), at(1, 0), 8)]).expect("taken");
    }
    bench.card.borrow_mut().fails = true;
    let mut ended: Vec<_> = (0..100).filter_map(|_| bench.poll()).collect();
    ended.sort_unstable_by_key(|ended| ended.0);
    assert_eq!(ended, [1, 2, 3].map(|seq| (seq, Status::Hardware, 0)));
    assert!(bench.card.borrow().is_stopped);
    assert_eq!(bench.submit(4, &[copy(at(0, 0), at(1, 0), 8)]), Err(SubmitError::Stopped));
    assert_eq!(bytes(&bench.memory[1]), before);
    assert!(bench.engine.unmap(key(0)), "memory is released");
}

#[test]
fn submit_beyond_length_depth_or_chains_is_refused() {
    let mut bench = bench();
    let step = copy(at(0, 0), at(1, 0), 1);
    let long = vec![step; STEPS as usize];
    assert_eq!(bench.submit(0, &[]), Err(SubmitError::Length { steps: 0, max: STEPS }));
    let longer = vec![step; STEPS as usize + 1];
    assert_eq!(bench.submit(0, &longer), Err(SubmitError::Length { steps: longer.len(), max: STEPS }));
    for seq in 0..u64::from(DEPTH / STEPS) {
        bench.submit(seq, &long).expect("room");
    }
    assert_eq!(bench.submit(9, &[step]), Err(SubmitError::Full { depth: DEPTH }));
    let mut done = 0;
    for _ in 0..10_000 {
        done += usize::from(bench.poll().is_some());
    }
    assert_eq!(done, (DEPTH / STEPS) as usize);
    for seq in 0..CHAINS as u64 {
        bench.submit(seq, &[step]).expect("room");
    }
    bench.card.borrow_mut().budget = CHAINS;
    assert!(bench.poll().is_some(), "all have ended, and one was taken");
    bench.submit(100, &[step]).expect("a free entry");
    assert_eq!(bench.submit(101, &[step]), Err(SubmitError::Full { depth: DEPTH }), "the others' completions wait");
}

#[test]
fn with_local_refuses_ranks_memory_and_memory_in_use() {
    let mut bench = bench();
    let span = |index, offset, len_bytes| Span { address: at(index, offset), len_bytes };
    let work = |bench: &mut Bench, dst, src| {
        bench.engine.with_local(dst, src, |dst, src| dst.iter_mut().zip(src).for_each(|(dst, src)| *dst ^= src))
    };
    assert_eq!(work(&mut bench, span(1, 0, 8), span(0, 0, 8)), Err(Status::BadRegion), "a rank's");
    assert_eq!(work(&mut bench, span(1, 250, 8), span(1, 0, 8)), Err(Status::OutOfBounds));
    assert_eq!(work(&mut bench, span(1, 0, 8), span(1, 4, 8)), Err(Status::Overlap));
    bench.submit(1, &[copy(at(1, 64), at(0, 0), 8), copy(at(0, 0), at(1, 96), 8)]).expect("taken");
    assert_eq!(work(&mut bench, span(1, 100, 8), span(1, 0, 8)), Err(Status::Overlap), "a chain writes it");
    assert_eq!(work(&mut bench, span(1, 0, 8), span(1, 100, 8)), Err(Status::Overlap), "a chain writes what it reads");
    assert_eq!(work(&mut bench, span(1, 64, 8), span(1, 0, 8)), Err(Status::Overlap), "a chain reads it");
    assert_eq!(work(&mut bench, span(1, 0, 8), span(1, 64, 8)), Ok(()), "both read");
    assert!((0..100).any(|_| bench.poll() == Some((1, Status::Done, 2))));
    assert_eq!(work(&mut bench, span(1, 96, 8), span(1, 64, 8)), Ok(()));
    assert_eq!(bytes(&bench.memory[1])[96..104], [0; 8], "what was copied there, with itself");
}

#[test]
fn lost_peer_ends_only_the_chains_at_its_memory() {
    let mut bench = bench();
    let region = RemoteRegion { addr: 4096, len_bytes: 64, rkey: 9, generation: 0 };
    bench.engine.map_remote(key(2), (GONE, region), false).expect("a free entry");
    bench.engine.map_remote(key(3), (GONE, region), false).expect("a free entry");
    let before = bytes(&bench.memory[0]);
    bench
        .submit(1, &[copy(at(1, 0), at(0, 8), 8), copy(at(2, 0), at(0, 8), 8), copy(at(1, 0), at(0, 0), 8)])
        .expect("taken");
    bench.submit(2, &[copy(at(0, 0), at(1, 64), 8)]).expect("taken");
    let mut ended: Vec<_> = (0..100).filter_map(|_| bench.poll()).collect();
    ended.sort_unstable_by_key(|ended| ended.0);
    assert_eq!(ended, [(1, Status::Hardware, 1), (2, Status::Done, 1)]);
    assert_eq!(bytes(&bench.memory[0])[..8], before[..8], "no step after the one that failed");
    for (wrong, status) in [
        (copy(at(2, 60), at(1, 0), 8), Status::OutOfBounds),
        (copy(at(2, 0), at(3, 32), 8), Status::Unsupported),
        (Step::Publish { dst: at(2, 0), words: [1, 2], covers: Default::default() }, Status::Unsupported),
    ] {
        assert_eq!(bench.run(&[wrong]), (status, 0), "{wrong:?}");
    }
    assert!(bench.engine.unmap(key(2)) && !bench.card.borrow().is_stopped);
    assert_eq!(bench.run(&[copy(at(2, 0), at(1, 0), 8)]), (Status::StaleRegion, 0));
}

#[test]
fn chains_waiting_for_room_all_complete() {
    let mut bench = bench();
    bench.card.borrow_mut().room = Some(2);
    for seq in 0..10 {
        let (from, to) = (at(0, 8 * seq), at(1, 8 * seq));
        bench.submit(seq, &[copy(from, to, 8), copy(to, at(0, 200), 8)]).expect("taken");
    }
    bench.engine.abort(Scope(9));
    let mut ended: Vec<_> = (0..1000).filter_map(|_| bench.poll()).collect();
    ended.sort_unstable_by_key(|ended| ended.0);
    let expected = |seq| if seq == 9 { (seq, Status::Aborted, 0) } else { (seq, Status::Done, 2) };
    assert_eq!(ended, (0..10).map(expected).collect::<Vec<_>>());
}
