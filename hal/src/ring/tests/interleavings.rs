//! `loom` tries every interleaving of two threads and every value that the memory model lets a load return.
//!
//! The entries are `loom` cells, which report unordered accesses. Sleeping is modelled by a mutex and a condition
//! variable that behave like `futex(2)`. Each test has a counterpart that removes one rule and must fail, which shows
//! that the search can find such errors.

use super::super::{
    Consumer, Doorbell, Memory, Producer, StreamConsumer, StreamMemory, StreamProducer, WakeThreshold, Word,
};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

const CAPACITY: u32 = 2;

/// A ring of `loom` cells. `publish` is the ordering of index stores; release is correct.
struct Cells {
    produced: AtomicU32,
    consumed: AtomicU32,
    entries: [UnsafeCell<[u64; 1]>; CAPACITY as usize],
    publish: Ordering,
}

impl Cells {
    fn new(publish: Ordering) -> Arc<Self> {
        Arc::new(Self {
            produced: AtomicU32::new(0),
            consumed: AtomicU32::new(0),
            entries: [UnsafeCell::new([0]), UnsafeCell::new([0])],
            publish,
        })
    }
}

impl Memory<1> for Arc<Cells> {
    fn capacity(&self) -> u32 {
        CAPACITY
    }

    fn produced(&self) -> u32 {
        self.produced.load(Ordering::Acquire)
    }

    fn set_produced(&self, produced: u32) {
        self.produced.store(produced, self.publish);
    }

    fn consumed(&self) -> u32 {
        self.consumed.load(Ordering::Acquire)
    }

    fn set_consumed(&self, consumed: u32) {
        self.consumed.store(consumed, self.publish);
    }

    fn read(&self, place: u32) -> [u64; 1] {
        // SAFETY: `loom` aborts the model if another thread may write at the same time.
        self.entries[place as usize].with(|entry| unsafe { *entry })
    }

    fn write(&self, place: u32, entry: &[u64; 1]) {
        // SAFETY: `loom` aborts the model if another thread may access it at the same time.
        self.entries[place as usize].with_mut(|place| unsafe { *place = *entry });
    }
}

/// Move three entries through a ring of two, so that a place is reused.
fn transfer(publish: Ordering) {
    loom::model(move || {
        let cells = Cells::new(publish);
        let mut producer = Producer::<_, 1>::new(cells.clone());
        let pushing = thread::spawn(move || {
            let mut next = 1;
            while next <= 3 {
                let batch = [[next], [next + 1]];
                let left = (4 - next).min(2) as usize;
                match producer.push_batch(&batch[..left]).expect("the peer is correct") {
                    0 => thread::yield_now(),
                    pushed => next += pushed as u64,
                }
            }
        });
        let mut consumer = Consumer::<_, 1>::new(cells);
        let mut expected = 1;
        while expected <= 3 {
            match consumer.pop().expect("the peer is correct") {
                None => thread::yield_now(),
                Some(entry) => {
                    assert_eq!(entry, [expected]);
                    expected += 1;
                }
            }
        }
        pushing.join().expect("no panic");
    });
}

#[test]
fn entries_arrive_intact_and_in_order() {
    transfer(Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn relaxed_index_stores_race_with_entry_reads() {
    transfer(Ordering::Relaxed);
}

/// A futex word with the kernel's wait queue.
struct Futex {
    word: AtomicU32,
    fenced: bool,
    kernel: Mutex<()>,
    sleepers: Condvar,
}

impl Futex {
    fn wait(&self) {
        let mut kernel = self.kernel.lock().expect("no panic");
        // The kernel compares while it holds the lock that a waker takes.
        while self.word.load(Ordering::Relaxed) == Doorbell::<&Self>::ASLEEP {
            kernel = self.sleepers.wait(kernel).expect("no panic");
        }
    }

    fn wake(&self) {
        drop(self.kernel.lock().expect("no panic"));
        self.sleepers.notify_all();
    }
}

impl Word for Futex {
    fn load(&self) -> u32 {
        self.word.load(Ordering::Relaxed)
    }

    fn store(&self, value: u32) {
        self.word.store(value, Ordering::Relaxed);
    }

    fn swap(&self, value: u32) -> u32 {
        self.word.swap(value, Ordering::Relaxed)
    }

    fn fence(&self) {
        if self.fenced {
            fence(Ordering::SeqCst);
        }
    }
}

/// Each ringer publishes one flag; the sleeper sleeps until all are set. A lost wake-up is a deadlock.
fn wake_up(ringers: usize, fenced: bool, check_again: bool) {
    let mut model = loom::model::Builder::new();
    // All interleavings of two threads. With three, at most two preemptions, to keep the search small.
    model.preemption_bound = (ringers > 1).then_some(2);
    // `std` reference counts: `loom`'s cannot be dropped in a model that failed, and they are not under test.
    model.check(move || {
        let futex = std::sync::Arc::new(Futex {
            word: AtomicU32::new(Doorbell::<&Futex>::AWAKE),
            fenced,
            kernel: Mutex::new(()),
            sleepers: Condvar::new(),
        });
        let work: std::sync::Arc<[_]> = (0..ringers).map(|_| AtomicU32::new(0)).collect();
        let ringers: Vec<_> = (0..ringers)
            .map(|ringer| {
                let (futex, work) = (futex.clone(), work.clone());
                thread::spawn(move || {
                    work[ringer].store(1, Ordering::Release);
                    if Doorbell::new(&*futex).ring() {
                        futex.wake();
                    }
                })
            })
            .collect();
        let all_there = || work.iter().all(|work| work.load(Ordering::Acquire) == 1);
        let bell = Doorbell::new(&*futex);
        while !all_there() {
            bell.arm();
            if check_again && all_there() {
                bell.disarm();
                break;
            }
            futex.wait();
            bell.disarm();
        }
        for ringer in ringers {
            ringer.join().expect("no panic");
        }
    });
}

#[test]
fn one_ringer_always_wakes_the_sleeper() {
    wake_up(1, true, true);
}

#[test]
fn two_ringers_always_wake_the_sleeper() {
    wake_up(2, true, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_fences_a_wake_up_is_lost() {
    wake_up(1, false, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_second_check_a_wake_up_is_lost() {
    wake_up(1, true, false);
}

/// The ringer counts to two and rings when the threshold is reached. The sleeper sets the threshold to two; the
/// previous one was far ahead. A lost wake-up is a deadlock.
fn wake_up_at(fenced: bool) {
    loom::model(move || {
        let futex = std::sync::Arc::new(Futex {
            word: AtomicU32::new(Doorbell::<&Futex>::AWAKE),
            fenced,
            kernel: Mutex::new(()),
            sleepers: Condvar::new(),
        });
        let threshold = std::sync::Arc::new(Futex {
            word: AtomicU32::new(9),
            fenced,
            kernel: Mutex::new(()),
            sleepers: Condvar::new(),
        });
        let count: std::sync::Arc<AtomicU32> = std::sync::Arc::new(AtomicU32::new(0));
        let ringer = {
            let (futex, threshold, count) = (futex.clone(), threshold.clone(), count.clone());
            thread::spawn(move || {
                for now in 1..=2 {
                    count.store(now, Ordering::Release);
                    if WakeThreshold::new(&*threshold).is_reached(now) && Doorbell::new(&*futex).ring() {
                        futex.wake();
                    }
                }
            })
        };
        let bell = Doorbell::new(&*futex);
        while count.load(Ordering::Acquire) < 2 {
            WakeThreshold::new(&*threshold).set(2);
            bell.arm();
            if count.load(Ordering::Acquire) >= 2 {
                bell.disarm();
                break;
            }
            futex.wait();
            bell.disarm();
        }
        ringer.join().expect("no panic");
    });
}

#[test]
fn sleeper_is_woken_when_the_threshold_is_reached() {
    wake_up_at(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_fences_a_threshold_is_missed() {
    wake_up_at(false);
}

/// A stream of `loom` cells.
struct ByteCells {
    produced: AtomicU32,
    consumed: AtomicU32,
    bytes: [UnsafeCell<u8>; CAPACITY as usize],
    publish: Ordering,
}

impl StreamMemory for Arc<ByteCells> {
    fn capacity_bytes(&self) -> u32 {
        CAPACITY
    }

    fn produced(&self) -> u32 {
        self.produced.load(Ordering::Acquire)
    }

    fn set_produced(&self, produced: u32) {
        self.produced.store(produced, self.publish);
    }

    fn consumed(&self) -> u32 {
        self.consumed.load(Ordering::Acquire)
    }

    fn set_consumed(&self, consumed: u32) {
        self.consumed.store(consumed, self.publish);
    }

    fn read(&self, place: u32, bytes: &mut [u8]) {
        for (byte, cell) in bytes.iter_mut().zip(&self.bytes[place as usize..]) {
            // SAFETY: `loom` aborts the model if another thread may write at the same time.
            *byte = cell.with(|cell| unsafe { *cell });
        }
    }

    fn write(&self, place: u32, bytes: &[u8]) {
        for (byte, cell) in bytes.iter().zip(&self.bytes[place as usize..]) {
            // SAFETY: `loom` aborts the model if another thread may access it at the same time.
            cell.with_mut(|cell| unsafe { *cell = *byte });
        }
    }
}

/// Move three bytes through a stream of two, in pieces, so that a place is reused.
fn stream(publish: Ordering) {
    loom::model(move || {
        let bytes = [UnsafeCell::new(0), UnsafeCell::new(0)];
        let (produced, consumed) = (AtomicU32::new(0), AtomicU32::new(0));
        let cells = Arc::new(ByteCells { produced, consumed, bytes, publish });
        let mut producer = StreamProducer::new(cells.clone());
        let writing = thread::spawn(move || {
            let (all, mut at) = ([1, 2, 3], 0);
            while at < all.len() {
                match producer.write(&[&all[at..=at], &all[at + 1..]]).expect("the peer is correct") {
                    0 => thread::yield_now(),
                    written => at += written,
                }
            }
        });
        let mut consumer = StreamConsumer::new(cells);
        let mut expected = 1;
        while expected <= 3 {
            let mut bytes = [0; 2];
            let read = consumer.read(&mut bytes).expect("the peer is correct");
            for byte in &bytes[..read] {
                assert_eq!(*byte, expected);
                expected += 1;
            }
            if read == 0 {
                thread::yield_now();
            }
        }
        writing.join().expect("no panic");
    });
}

#[test]
fn bytes_arrive_intact_and_in_order() {
    stream(Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn relaxed_index_stores_race_with_byte_reads() {
    stream(Ordering::Relaxed);
}

/// The owner of memory withdraws a reference to it, and uses it for something else. A reader that copies it meanwhile
/// either sees that the reference is withdrawn, or has what it refers to (`shm::Duplex`).
fn withdrawal(fenced: bool) {
    loom::model(move || {
        let words: Arc<[AtomicU32; 2]> = Arc::new([AtomicU32::new(7), AtomicU32::new(0)]);
        let owner = {
            let words = words.clone();
            thread::spawn(move || {
                let [memory, is_withdrawn] = &*words;
                is_withdrawn.store(1, Ordering::Release);
                if fenced {
                    fence(Ordering::SeqCst);
                }
                memory.store(8, Ordering::Relaxed);
            })
        };
        let [memory, is_withdrawn] = &*words;
        let copied = memory.load(Ordering::Relaxed);
        if fenced {
            fence(Ordering::SeqCst);
        }
        if is_withdrawn.load(Ordering::Acquire) == 0 {
            assert_eq!(copied, 7, "reused memory was taken");
        }
        owner.join().expect("no panic");
    });
}

#[test]
fn withdrawn_reference_is_not_taken() {
    withdrawal(true);
}

#[test]
#[should_panic(expected = "reused memory was taken")]
fn without_fences_reused_memory_is_taken() {
    withdrawal(false);
}
