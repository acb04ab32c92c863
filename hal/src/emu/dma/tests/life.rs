//! Who waits for whom: full queues, sleeps, aborts and unmapping, made to happen by memory with a gate.

use super::*;
use crate::dma::{DmaMemory, SubmitError};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;

/// Memory whose translation does not come before the gate is open, so that a chain stays where it is.
struct Gated {
    memory: HeapMemory,
    open: Mutex<bool>,
    opened: Condvar,
    log: Arc<Mutex<Vec<&'static str>>>,
}

// SAFETY: the memory is `HeapMemory`'s.
unsafe impl DmaMemory for Gated {
    fn base(&self) -> NonNull<u8> {
        self.memory.base()
    }

    fn len_bytes(&self) -> usize {
        let open = self.open.lock().expect("no panic");
        drop(self.opened.wait_while(open, |open| !*open).expect("no panic"));
        self.log.lock().expect("no panic").push("used");
        self.memory.len_bytes()
    }
}

impl Gated {
    fn map(engine: &mut EmuEngine, index: u16) -> Arc<Self> {
        let gated = Arc::new(Self {
            memory: HeapMemory::new(64),
            open: Mutex::new(false),
            opened: Condvar::new(),
            log: Arc::default(),
        });
        engine.map(key(index), gated.clone()).expect("a free place");
        gated
    }

    fn open(&self) {
        *self.open.lock().expect("no panic") = true;
        self.opened.notify_all();
    }
}

fn copy(src: u16, dst: u16) -> [Step; 1] {
    [Step::Copy { src: at(src, 0), dst: at(dst, 0), len_bytes: 8 }]
}

fn submit(engine: &mut EmuEngine, seq: u64, scope: u8, steps: &[Step]) -> Result<(), SubmitError> {
    engine.submit(Chain { tag: tag(seq), scope: Scope(scope), steps })
}

/// Wait for `count` completions; (seq, status), by seq.
fn collect(engine: &mut EmuEngine, count: usize) -> Vec<(u64, Status)> {
    let mut ended = Vec::new();
    while ended.len() < count {
        assert!(engine.wait(None));
        let mut completions = [NOTHING; 8];
        let taken = engine.poll(&mut completions);
        ended.extend(completions[..taken].iter().map(|completion| (completion.tag.seq, completion.status)));
    }
    ended.sort_unstable_by_key(|&(seq, _)| seq);
    ended
}

#[test]
fn a_full_queue_says_so_and_takes_chains_again() {
    let depth = DmaConfig { queue_depth: 4, max_steps: 4, ..config(Profile::Full, 1) };
    let (mut engine, _memories) = engine(depth, &[64, 64]);
    let gated = Gated::map(&mut engine, 2);
    submit(&mut engine, 0, 0, &copy(2, 1)).expect("room");
    let mut taken = 1;
    let refused = loop {
        match submit(&mut engine, taken, 0, &copy(0, 1)) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, SubmitError::Full { depth: 4 });
    assert_eq!(taken, 4, "a place for every completion");
    gated.open();
    assert_eq!(collect(&mut engine, taken as usize).len(), taken as usize);
    submit(&mut engine, 9, 0, &copy(0, 1)).expect("room again");
}

#[test]
fn an_abort_ends_what_its_scope_had_submitted_and_nothing_else() {
    let (mut engine, memories) = engine(config(Profile::Full, 1), &[64, 64]);
    let gated = Gated::map(&mut engine, 2);
    memories[0].write(0, &[1; 8]);
    // The first is being run, the others wait behind it.
    submit(&mut engine, 0, 1, &copy(2, 1)).expect("room");
    submit(&mut engine, 1, 1, &copy(0, 1)).expect("room");
    submit(&mut engine, 2, 2, &[]).expect_err("no steps");
    submit(&mut engine, 2, 2, &[Step::Copy { src: at(0, 0), dst: at(1, 16), len_bytes: 8 }]).expect("room");
    engine.abort(Scope(1));
    submit(&mut engine, 3, 1, &[Step::Copy { src: at(0, 0), dst: at(1, 32), len_bytes: 8 }]).expect("room");
    gated.open();
    let expected = [(0, Status::Aborted), (1, Status::Aborted), (2, Status::Done), (3, Status::Done)];
    assert_eq!(collect(&mut engine, 4), expected);
    let mut written = [0; 40];
    written[16..24].fill(1);
    written[32..40].fill(1);
    assert_eq!(bytes_of(&memories[1], 0, 40), written, "only by what was not aborted");
}

#[test]
fn unmapping_waits_for_who_uses_the_region_and_refuses_who_comes_later() {
    let (mut engine, _memories) = engine(config(Profile::Full, 2), &[64, 64]);
    let gated = Gated::map(&mut engine, 2);
    let log = gated.log.clone();
    let weak = Arc::downgrade(&gated);
    submit(&mut engine, 0, 0, &copy(2, 1)).expect("room");
    // The chain holds its region before it asks for the translation.
    while Arc::strong_count(&gated) < 2 || engine.shared.map.pins(key(2)) == 0 {
        thread::yield_now();
    }
    thread::scope(|scope| {
        let shared = engine.shared.clone();
        let unmapping = scope.spawn(move || {
            assert!(shared.map.unmap(key(2)));
            log.lock().expect("no panic").push("unmapped");
        });
        // Once new chains are refused, unmapping has begun and waits.
        while engine.shared.map.pin(key(2)).is_ok() {
            thread::yield_now();
        }
        // At home with the other thread.
        let behind = [Step::Copy { src: at(2, 1), dst: at(1, 1), len_bytes: 1 }];
        submit(&mut engine, 1, 0, &behind).expect("room");
        assert_eq!(collect(&mut engine, 1), [(1, Status::StaleRegion)]);
        gated.open();
        unmapping.join().expect("no panic");
    });
    assert_eq!(*gated.log.lock().expect("no panic"), ["used", "unmapped"]);
    assert_eq!(collect(&mut engine, 1), [(0, Status::Done)]);
    drop(gated);
    assert!(weak.upgrade().is_none(), "the engine keeps nothing of it");
    assert!(!engine.unmap(key(2)), "it is gone");
    let again = Arc::new(HeapMemory::new(64));
    assert!(engine.map(key(2), again.clone()).is_err(), "a key names one region for ever");
    let next = RegionKey { index: 2, generation: 2 };
    engine.map(next, again).expect("a later generation");
    assert_eq!(run(&mut engine, 5, &copy(2, 1)).status, Status::StaleRegion);
}

#[test]
fn no_wake_up_is_lost_between_engine_and_user() {
    let (mut engine, _memories) = engine(config(Profile::Full, 2), &[64, 64]);
    // Everybody sleeps at once: each round needs two wake-ups.
    for seq in 0..2000 {
        assert_eq!(run(&mut engine, seq, &copy(0, 1)).status, Status::Done);
    }
}

#[test]
fn a_user_that_sleeps_elsewhere_is_notified() {
    let notified = Arc::new(AtomicUsize::new(0));
    let count = notified.clone();
    let notify = Box::new(move |left| {
        assert_eq!(left, 0, "one at a time");
        count.fetch_add(1, Ordering::Relaxed);
    });
    let mut engine = EmuEngine::start_notifying(config(Profile::CopyOnly, 1), Some(notify)).expect("threads");
    for index in 0..2 {
        engine.map(key(index), Arc::new(HeapMemory::new(64))).expect("a free place");
    }
    for seq in 0..5 {
        run(&mut engine, seq, &copy(0, 1));
    }
    drop(engine);
    assert_eq!(notified.load(Ordering::Relaxed), 5 + 1, "after each chain, and at the thread's end");
}

/// Whoever sleeps without a limit is told of a thread that dies: what it had taken ends, as failed.
#[test]
fn a_thread_that_dies_wakes_its_user() {
    let mut config = config(Profile::CopyOnly, 1);
    config.on_start = Some(|_| panic!("a thread that dies is what is tested"));
    let mut engine = EmuEngine::start(config).expect("threads");
    for index in 0..2 {
        engine.map(key(index), Arc::new(HeapMemory::new(64))).expect("a free place");
    }
    match submit(&mut engine, 0, 0, &copy(0, 1)) {
        // It was still alive: nobody takes the chain any more.
        Ok(()) => {
            assert!(engine.wait(None));
            let mut completions = [NOTHING];
            assert_eq!(engine.poll(&mut completions), 1);
            assert_eq!(completions[0].status, Status::Hardware);
        }
        Err(error) => assert_eq!(error, SubmitError::Stopped),
    }
}

/// A thread that dies with a chain in its hands takes neither the chains of others nor the word that all are done along.
#[test]
fn the_threads_that_are_left_do_all_and_say_when_it_is_done() {
    static SUBMITTED: AtomicBool = AtomicBool::new(false);
    let mut config = config(Profile::CopyOnly, 2);
    config.on_start = Some(|number| {
        while number == 0 && !SUBMITTED.load(Ordering::Acquire) {
            thread::yield_now();
        }
        assert_ne!(number, 0, "a thread that dies is what is tested");
    });
    let idle = Arc::new(AtomicUsize::new(0));
    let count = idle.clone();
    let notify = Box::new(move |left| {
        count.fetch_add(usize::from(left == 0), Ordering::Relaxed);
    });
    let mut engine = EmuEngine::start_notifying(config, Some(notify)).expect("threads");
    for index in 0..2 {
        engine.map(key(index), Arc::new(HeapMemory::new(64))).expect("a free place");
    }
    // The second piece of 8 bytes is at home with the first of two threads.
    let at_home = [Step::Copy { src: at(0, 8), dst: at(1, 0), len_bytes: 8 }];
    submit(&mut engine, 0, 0, &at_home).expect("room");
    assert_eq!(engine.queues[0].in_flight.len(), 1);
    SUBMITTED.store(true, Ordering::Release);
    engine.queues[0].thread.take().expect("it was started").join().expect_err("it dies");
    assert_eq!(collect(&mut engine, 1), [(0, Status::Hardware)]);
    idle.store(0, Ordering::Relaxed);
    for seq in 1..20 {
        submit(&mut engine, seq, 0, &at_home).expect("the other one is there");
        assert_eq!(collect(&mut engine, 1), [(seq, Status::Done)]);
    }
    drop(engine);
    assert_eq!(idle.load(Ordering::Relaxed), 19 + 1, "after each chain, and at the thread's end");
}

#[test]
fn short_chains_end_where_they_are_submitted() {
    let notified = Arc::new(AtomicUsize::new(0));
    let count = notified.clone();
    let notify = Box::new(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let config = DmaConfig { inline_len_bytes: 16, ..config(Profile::Full, 1) };
    let mut engine = EmuEngine::start_notifying(config, Some(notify)).expect("threads");
    let memories = [7, 0].map(|fill| {
        let memory = Arc::new(HeapMemory::new(64));
        memory.write(0, &[fill; 64]);
        memory
    });
    for (index, memory) in memories.iter().enumerate() {
        engine.map(key(index as u16), memory.clone()).expect("a free place");
    }
    let step = |len_bytes| Step::Copy { src: at(0, 0), dst: at(1, 0), len_bytes };
    submit(&mut engine, 0, 0, &[step(8), step(8)]).expect("room");
    let mut completions = [NOTHING; 2];
    assert_eq!(engine.poll(&mut completions), 1);
    assert_eq!((completions[0].status, completions[0].step), (Status::Done, 2));
    assert_eq!(bytes_of(&memories[1], 0, 9), [7, 7, 7, 7, 7, 7, 7, 7, 0]);
    // Wrong ones fail as they would there, and what nobody polls fills the queue.
    submit(&mut engine, 1, 0, &[Step::Copy { src: at(0, 60), dst: at(1, 0), len_bytes: 8 }]).expect("room");
    assert_eq!(engine.poll(&mut completions), 1);
    assert_eq!(completions[0].status, Status::OutOfBounds);
    let depth = engine.capabilities().queue_depth;
    (0..depth).for_each(|seq| submit(&mut engine, seq.into(), 0, &[step(8)]).expect("room"));
    assert_eq!(submit(&mut engine, 0, 0, &[step(8)]), Err(SubmitError::Full { depth }));
    assert_eq!(notified.load(Ordering::Relaxed), 0, "no thread had anything to do");
}

#[test]
fn a_user_that_helps_takes_its_share_when_it_works() {
    let config = DmaConfig { helps: true, strictness: Strictness::Strict, ..config(Profile::Full, 0) };
    let (mut engine, memories) = engine(config, &[64, 64]);
    memories[0].write(0, &[7; 64]);
    let step = |at_byte| [Step::Copy { src: at(0, 0), dst: at(1, at_byte), len_bytes: 8 }];
    submit(&mut engine, 0, 0, &step(0)).expect("room");
    submit(&mut engine, 1, 1, &step(8)).expect("room");
    submit(&mut engine, 2, 0, &step(4)).expect("room");
    let mut completions = [NOTHING; 4];
    assert_eq!(engine.poll(&mut completions), 1, "only what strict mode refuses");
    assert_eq!((completions[0].tag, completions[0].status), (tag(2), Status::Overlap));
    let local = Span { address: at(1, 0), len_bytes: 8 };
    assert_eq!(engine.with_local(local, local, |_, _| ()), Err(Status::BadRegion), "not the device's own");
    engine.abort(Scope(1));
    assert!(engine.has_work() && engine.work() && engine.work() && !engine.work() && !engine.has_work());
    assert_eq!(engine.poll(&mut completions), 2);
    assert_eq!((completions[0].tag, completions[0].status), (tag(0), Status::Done));
    assert_eq!((completions[1].tag, completions[1].status, completions[1].step), (tag(1), Status::Aborted, 0));
    assert_eq!(bytes_of(&memories[1], 0, 16), [[7; 8], [0; 8]].concat());
    // What has run is in nobody's way, and who waits works.
    submit(&mut engine, 3, 0, &step(4)).expect("room");
    assert!(engine.wait(None));
    assert_eq!(engine.poll(&mut completions), 1);
    assert_eq!(completions[0].status, Status::Done);
    let depth = engine.capabilities().queue_depth;
    (0..depth).for_each(|seq| {
        submit(
            &mut engine,
            seq.into(),
            0,
            &[Step::Copy { src: at(0, 0), dst: at(1, u64::from(seq) % 64), len_bytes: 1 }],
        )
        .expect("room")
    });
    assert_eq!(submit(&mut engine, 0, 0, &step(0)), Err(SubmitError::Full { depth }));
}

#[test]
fn an_engine_that_is_dropped_stops_in_the_middle_of_its_work() {
    let (mut engine, memories) = engine(config(Profile::Full, 2), &[64, 64]);
    for seq in 0..30 {
        submit(&mut engine, seq, 0, &[Step::Copy { src: at(0, 0), dst: at(1, seq), len_bytes: 1 }]).expect("room");
    }
    drop(engine);
    assert!(memories.iter().all(|memory| Arc::strong_count(memory) == 1));
}

/// News that comes after the first look and before the announcement rings for nobody: only the second look finds it.
#[test]
fn a_sleeper_looks_again_after_it_has_announced_its_sleep() {
    let sleeper = crate::emu::dma::worker::Sleeper::default();
    let mut looks = Vec::new();
    // Not needed by a sleeper that looks again, and the end of one that does not.
    let late = Some(std::time::Instant::now() + std::time::Duration::from_secs(60));
    let found = sleeper.wait(Patience::NONE, late, || {
        looks.push(sleeper.sleeps());
        looks.len() > 1
    });
    assert!(found);
    assert_eq!((looks, sleeper.sleeps()), (vec![false, true], false));
}
