//! Full queues, sleeping, aborts, unmapping and exiting threads, controlled by memory with a gate.

use super::*;
use crate::dma::{DmaMemory, SubmitError};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;

/// Memory whose translation blocks until the gate is opened, which holds a chain in flight.
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
        engine.map(key(index), gated.clone()).expect("a free entry");
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

/// Wait for `count` completions, and return (seq, status) sorted by seq.
fn collect(engine: &mut EmuEngine, count: usize) -> Vec<(u64, Status)> {
    let mut completed = Vec::new();
    while completed.len() < count {
        assert!(engine.wait(None));
        let mut completions = [EMPTY; 8];
        let taken = engine.poll(&mut completions);
        completed.extend(completions[..taken].iter().map(|completion| (completion.tag.seq, completion.status)));
    }
    completed.sort_unstable_by_key(|&(seq, _)| seq);
    completed
}

#[test]
fn full_queue_refuses_chains_until_some_complete() {
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
    assert_eq!(taken, 4, "room for every completion");
    gated.open();
    assert_eq!(collect(&mut engine, taken as usize).len(), taken as usize);
    submit(&mut engine, 9, 0, &copy(0, 1)).expect("room again");
}

#[test]
fn abort_ends_only_earlier_chains_of_its_scope() {
    let (mut engine, memories) = engine(config(Profile::Full, 1), &[64, 64]);
    let gated = Gated::map(&mut engine, 2);
    memories[0].write(0, &[1; 8]);
    // The first chain runs; the others are queued behind it.
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
    assert_eq!(bytes_of(&memories[1], 0, 40), written, "written only by chains that were not aborted");
}

#[test]
fn unmap_waits_for_running_chains_and_refuses_later_ones() {
    let (mut engine, _memories) = engine(config(Profile::Full, 2), &[64, 64]);
    let gated = Gated::map(&mut engine, 2);
    let log = gated.log.clone();
    let weak = Arc::downgrade(&gated);
    submit(&mut engine, 0, 0, &copy(2, 1)).expect("room");
    // The chain pins its region before it reads the translation.
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
        // This chain has affinity to the other thread.
        let behind = [Step::Copy { src: at(2, 1), dst: at(1, 1), len_bytes: 1 }];
        submit(&mut engine, 1, 0, &behind).expect("room");
        assert_eq!(collect(&mut engine, 1), [(1, Status::StaleRegion)]);
        gated.open();
        unmapping.join().expect("no panic");
    });
    assert_eq!(*gated.log.lock().expect("no panic"), ["used", "unmapped"]);
    assert_eq!(collect(&mut engine, 1), [(0, Status::Done)]);
    drop(gated);
    assert!(weak.upgrade().is_none(), "the engine holds no reference");
    assert!(!engine.unmap(key(2)), "already unmapped");
    let again = Arc::new(HeapMemory::new(64));
    assert!(engine.map(key(2), again.clone()).is_err(), "a key is used only once");
    let next = RegionKey { index: 2, generation: 2 };
    engine.map(next, again).expect("a later generation");
    assert_eq!(run(&mut engine, 5, &copy(2, 1)).status, Status::StaleRegion);
}

#[test]
fn engine_and_sleeping_user_always_wake_each_other() {
    let (mut engine, _memories) = engine(config(Profile::Full, 2), &[64, 64]);
    // All threads sleep at once, so each round needs two wake-ups.
    for seq in 0..2000 {
        assert_eq!(run(&mut engine, seq, &copy(0, 1)).status, Status::Done);
    }
}

#[test]
fn notify_is_called_after_each_chain_and_at_thread_exit() {
    let notified = Arc::new(AtomicUsize::new(0));
    let count = notified.clone();
    let notify = Box::new(move |left| {
        assert_eq!(left, 0, "one at a time");
        count.fetch_add(1, Ordering::Relaxed);
    });
    let mut engine = EmuEngine::start_notifying(config(Profile::CopyOnly, 1), Some(notify)).expect("threads");
    for index in 0..2 {
        engine.map(key(index), Arc::new(HeapMemory::new(64))).expect("a free entry");
    }
    for seq in 0..5 {
        run(&mut engine, seq, &copy(0, 1));
    }
    drop(engine);
    assert_eq!(notified.load(Ordering::Relaxed), 5 + 1, "after each chain, and when the thread exits");
}

/// A user that waits without a timeout is woken when a thread dies, and the thread's chains fail.
#[test]
fn dying_thread_wakes_its_user_and_fails_its_chains() {
    let mut config = config(Profile::CopyOnly, 1);
    config.on_start = Some(|_| panic!("a thread that dies is what is tested"));
    let mut engine = EmuEngine::start(config).expect("threads");
    for index in 0..2 {
        engine.map(key(index), Arc::new(HeapMemory::new(64))).expect("a free entry");
    }
    match submit(&mut engine, 0, 0, &copy(0, 1)) {
        // The thread was still running, but no longer takes the chain.
        Ok(()) => {
            assert!(engine.wait(None));
            let mut completions = [EMPTY];
            assert_eq!(engine.poll(&mut completions), 1);
            assert_eq!(completions[0].status, Status::Hardware);
        }
        Err(error) => assert_eq!(error, SubmitError::Stopped),
    }
}

/// After a thread has died with a chain, the other threads run all further chains and still notify when they are idle.
#[test]
fn remaining_threads_run_all_chains_and_notify_when_idle() {
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
        engine.map(key(index), Arc::new(HeapMemory::new(64))).expect("a free entry");
    }
    // The second piece of 8 bytes has affinity to the first of two threads.
    let chain = [Step::Copy { src: at(0, 8), dst: at(1, 0), len_bytes: 8 }];
    submit(&mut engine, 0, 0, &chain).expect("room");
    assert_eq!(engine.queues[0].in_flight.len(), 1);
    SUBMITTED.store(true, Ordering::Release);
    engine.queues[0].thread.take().expect("it was started").join().expect_err("it dies");
    assert_eq!(collect(&mut engine, 1), [(0, Status::Hardware)]);
    idle.store(0, Ordering::Relaxed);
    for seq in 1..20 {
        submit(&mut engine, seq, 0, &chain).expect("the other thread runs");
        assert_eq!(collect(&mut engine, 1), [(seq, Status::Done)]);
    }
    drop(engine);
    assert_eq!(idle.load(Ordering::Relaxed), 19 + 1, "after each chain, and when the thread exits");
}

#[test]
fn short_chains_run_on_the_submitting_thread() {
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
        engine.map(key(index as u16), memory.clone()).expect("a free entry");
    }
    let step = |len_bytes| Step::Copy { src: at(0, 0), dst: at(1, 0), len_bytes };
    submit(&mut engine, 0, 0, &[step(8), step(8)]).expect("room");
    let mut completions = [EMPTY; 2];
    assert_eq!(engine.poll(&mut completions), 1);
    assert_eq!((completions[0].status, completions[0].step), (Status::Done, 2));
    assert_eq!(bytes_of(&memories[1], 0, 9), [7, 7, 7, 7, 7, 7, 7, 7, 0]);
    // Invalid chains fail as usual, and completions that are not polled fill the queue.
    submit(&mut engine, 1, 0, &[Step::Copy { src: at(0, 60), dst: at(1, 0), len_bytes: 8 }]).expect("room");
    assert_eq!(engine.poll(&mut completions), 1);
    assert_eq!(completions[0].status, Status::OutOfBounds);
    let depth = engine.capabilities().queue_depth;
    (0..depth).for_each(|seq| submit(&mut engine, seq.into(), 0, &[step(8)]).expect("room"));
    assert_eq!(submit(&mut engine, 0, 0, &[step(8)]), Err(SubmitError::Full { depth }));
    assert_eq!(notified.load(Ordering::Relaxed), 0, "no thread had work");
}

#[test]
fn user_that_shares_work_runs_its_chains_in_work() {
    let config = DmaConfig { shares_work: true, strictness: Strictness::Strict, ..config(Profile::Full, 0) };
    let (mut engine, memories) = engine(config, &[64, 64]);
    memories[0].write(0, &[7; 64]);
    let step = |at_byte| [Step::Copy { src: at(0, 0), dst: at(1, at_byte), len_bytes: 8 }];
    submit(&mut engine, 0, 0, &step(0)).expect("room");
    submit(&mut engine, 1, 1, &step(8)).expect("room");
    submit(&mut engine, 2, 0, &step(4)).expect("room");
    let mut completions = [EMPTY; 4];
    assert_eq!(engine.poll(&mut completions), 1, "only the chain that strict mode refuses");
    assert_eq!((completions[0].tag, completions[0].status), (tag(2), Status::Overlap));
    let local = Span { address: at(1, 0), len_bytes: 8 };
    assert_eq!(engine.with_local(local, local, |_, _| ()), Err(Status::BadRegion), "not local memory");
    engine.abort(Scope(1));
    assert!(engine.has_work() && engine.work() && engine.work() && !engine.work() && !engine.has_work());
    assert_eq!(engine.poll(&mut completions), 2);
    assert_eq!((completions[0].tag, completions[0].status), (tag(0), Status::Done));
    assert_eq!((completions[1].tag, completions[1].status, completions[1].step), (tag(1), Status::Aborted, 0));
    assert_eq!(bytes_of(&memories[1], 0, 16), [[7; 8], [0; 8]].concat());
    // Completed chains do not conflict, and waiting runs chains.
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
fn dropped_engine_stops_with_chains_in_flight() {
    let (mut engine, memories) = engine(config(Profile::Full, 2), &[64, 64]);
    for seq in 0..30 {
        submit(&mut engine, seq, 0, &[Step::Copy { src: at(0, 0), dst: at(1, seq), len_bytes: 1 }]).expect("room");
    }
    drop(engine);
    assert!(memories.iter().all(|memory| Arc::strong_count(memory) == 1));
}

/// Work that arrives between the first check and arming rings no doorbell; only the second check finds it.
#[test]
fn sleeper_checks_again_after_arming_its_doorbell() {
    let sleeper = crate::emu::dma::worker::Sleeper::default();
    let mut looks = Vec::new();
    // Only ends a sleeper that does not check again.
    let late = Some(std::time::Instant::now() + std::time::Duration::from_secs(60));
    let found = sleeper.wait(SpinPolicy::NONE, late, || {
        looks.push(sleeper.sleeps());
        looks.len() > 1
    });
    assert!(found);
    assert_eq!((looks, sleeper.sleeps()), (vec![false, true], false));
}
