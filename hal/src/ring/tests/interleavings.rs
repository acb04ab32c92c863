//! Every interleaving of two threads, and every value that the memory model lets a load return, by `loom`.
//!
//! The cells of the entries are `loom`'s, which report two accesses that nothing orders; the sleep is a mutex and a
//! condition variable that do what `futex(2)` does. Each test has a twin that takes one rule away and must fail, so
//! that a search which finds nothing means something.

use super::super::{Consumer, Doorbell, Memory, Producer, Wanted, Word};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

const CAPACITY: u32 = 2;

/// A ring of `loom`'s cells; `publish` is the order of index stores, release where all is well.
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

/// Three entries through two places: each index store and load is seen by the other side, and a place is used again.
fn transfer(publish: Ordering) {
    loom::model(move || {
        let cells = Cells::new(publish);
        let mut producer = Producer::<_, 1>::new(cells.clone());
        let pushing = thread::spawn(move || {
            let mut next = 1;
            while next <= 3 {
                let batch = [[next], [next + 1]];
                let left = (4 - next).min(2) as usize;
                match producer.push_batch(&batch[..left]).expect("the peer is honest") {
                    0 => thread::yield_now(),
                    pushed => next += pushed as u64,
                }
            }
        });
        let mut consumer = Consumer::<_, 1>::new(cells);
        let mut expected = 1;
        while expected <= 3 {
            match consumer.pop().expect("the peer is honest") {
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
fn entries_arrive_whole_and_in_order() {
    transfer(Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_release_order_entries_tear() {
    transfer(Ordering::Relaxed);
}

/// A word to sleep on, and the kernel's queue behind it.
struct Futex {
    word: AtomicU32,
    fenced: bool,
    kernel: Mutex<()>,
    sleepers: Condvar,
}

impl Futex {
    fn wait(&self) {
        let mut kernel = self.kernel.lock().expect("no panic");
        // The kernel compares under the lock that a waker takes.
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

/// Each ringer publishes one thing; the sleeper sleeps until it has all. A lost wake-up is a deadlock.
fn wake_up(ringers: usize, fenced: bool, look_again: bool) {
    let mut model = loom::model::Builder::new();
    // All interleavings of two threads; of three, those with at most two preemptions, which are few enough.
    model.preemption_bound = (ringers > 1).then_some(2);
    // `loom`'s own counter of references can't be dropped where a model has failed, and is not under test.
    model.check(move || {
        let futex = std::sync::Arc::new(Futex {
            word: AtomicU32::new(Doorbell::<&Futex>::AWAKE),
            fenced,
            kernel: Mutex::new(()),
            sleepers: Condvar::new(),
        });
        let news: std::sync::Arc<[_]> = (0..ringers).map(|_| AtomicU32::new(0)).collect();
        let ringers: Vec<_> = (0..ringers)
            .map(|ringer| {
                let (futex, news) = (futex.clone(), news.clone());
                thread::spawn(move || {
                    news[ringer].store(1, Ordering::Release);
                    if Doorbell::new(&*futex).ring() {
                        futex.wake();
                    }
                })
            })
            .collect();
        let all_there = || news.iter().all(|news| news.load(Ordering::Acquire) == 1);
        let bell = Doorbell::new(&*futex);
        while !all_there() {
            bell.announce();
            if look_again && all_there() {
                bell.awake();
                break;
            }
            futex.wait();
            bell.awake();
        }
        for ringer in ringers {
            ringer.join().expect("no panic");
        }
    });
}

#[test]
fn no_wake_up_is_lost() {
    wake_up(1, true, true);
}

#[test]
fn no_wake_up_is_lost_between_two_ringers() {
    wake_up(2, true, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_fences_wake_ups_are_lost() {
    wake_up(1, false, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_second_look_wake_ups_are_lost() {
    wake_up(1, true, false);
}

/// The ringer counts to two and rings when what is wanted is reached; the sleeper wants two, and what was wanted before
/// is far ahead. A lost wake-up is a deadlock.
fn wake_up_at(fenced: bool) {
    loom::model(move || {
        let futex = std::sync::Arc::new(Futex {
            word: AtomicU32::new(Doorbell::<&Futex>::AWAKE),
            fenced,
            kernel: Mutex::new(()),
            sleepers: Condvar::new(),
        });
        let wanted = std::sync::Arc::new(Futex {
            word: AtomicU32::new(9),
            fenced,
            kernel: Mutex::new(()),
            sleepers: Condvar::new(),
        });
        let count: std::sync::Arc<AtomicU32> = std::sync::Arc::new(AtomicU32::new(0));
        let ringer = {
            let (futex, wanted, count) = (futex.clone(), wanted.clone(), count.clone());
            thread::spawn(move || {
                for now in 1..=2 {
                    count.store(now, Ordering::Release);
                    if Wanted::new(&*wanted).is_reached(now) && Doorbell::new(&*futex).ring() {
                        futex.wake();
                    }
                }
            })
        };
        let bell = Doorbell::new(&*futex);
        while count.load(Ordering::Acquire) < 2 {
            Wanted::new(&*wanted).set(2);
            bell.announce();
            if count.load(Ordering::Acquire) >= 2 {
                bell.awake();
                break;
            }
            futex.wait();
            bell.awake();
        }
        ringer.join().expect("no panic");
    });
}

#[test]
fn who_waits_for_a_count_is_woken_when_it_is_reached() {
    wake_up_at(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_fences_a_count_is_missed() {
    wake_up_at(false);
}
