//! `loom` tries the interleavings of callers and the progress thread, with few preemptions, on the queue of `queue.rs`,
//! which is compiled here once more, with `loom`'s primitives.
//!
//! The progress thread is that of [`super::progress`] without operations: what it begins, it ends. A wake-up that is
//! lost is a deadlock, which `loom` reports. Tests that must fail remove one rule, which shows that the search can find
//! such errors.

mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
}

#[path = "queue.rs"]
#[allow(dead_code, reason = "deadlines and sizes need no search")]
#[allow(clippy::duplicate_mod, reason = "this one has other primitives")]
mod queue;

use loom::thread;
use queue::{Bell, Kind, Queue, Refusal, Submission};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use sync::{Condvar, Mutex};

/// Never reached: `loom` has no time.
const LIMIT: Duration = Duration::from_secs(1000);
const ROOM: usize = 8;

/// Why the thread has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Over;

/// What an operation keeps, its number, and how it ended.
type Work = (u32, Arc<()>);
type Ended = Result<Work, Over>;

/// `std` reference counts: `loom`'s cannot be dropped in a model that failed, and they are not under test.
type Shared = Arc<Model>;

struct Model {
    queue: Queue<Work, Ended, Over, Flag>,
    /// Stands for the communicator: what has been begun, in this order.
    core: Mutex<Vec<u32>>,
    wait: Wait,
}

/// Where the thread waits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Work,
    /// As a thread that drives operations does.
    Sockets,
    /// The same, with a mistake: it looks for news before it clears the bell.
    SocketsLookedAtTooEarly,
}

/// An event descriptor.
struct Flag {
    is_rung: Mutex<bool>,
    readers: Condvar,
}

impl Flag {
    /// Wait until it is readable.
    fn poll(&self) {
        let mut is_rung = self.is_rung.lock().expect("no panic");
        while !*is_rung {
            is_rung = self.readers.wait(is_rung).expect("no panic");
        }
    }
}

impl Bell for Flag {
    fn ring(&self) {
        *self.is_rung.lock().expect("no panic") = true;
        self.readers.notify_all();
    }

    fn clear(&self) {
        *self.is_rung.lock().expect("no panic") = false;
    }
}

impl Model {
    fn new(wait: Wait) -> Shared {
        let queue = Queue::with_bell(Flag { is_rung: Mutex::new(false), readers: Condvar::new() });
        Arc::new(Self { queue, core: Mutex::new(Vec::new()), wait })
    }

    /// Submit work, and wake the thread. Returns what it keeps.
    fn submit(&self, kind: Kind, number: u32, room: usize) -> Result<(u64, Arc<()>), Over> {
        let kept = Arc::new(());
        let pushed = self.queue.push(kind, (number, Arc::clone(&kept)), 1, room, LIMIT);
        let id = pushed.map_err(|(refusal, _)| match refusal {
            Refusal::Ended(over) => over,
            Refusal::Full => panic!("there is no time, so it cannot be up"),
        })?;
        self.queue.ring();
        Ok((id, kept))
    }

    /// Submit an operation, and wait for it.
    fn call(&self, number: u32) -> Result<u32, Over> {
        let (id, _) = self.submit(Kind::Operation, number, ROOM)?;
        self.queue.wait_for(id).expect("it is waited for once").map(|(number, _)| number)
    }

    /// The progress thread.
    fn serve(&self) {
        while !self.queue.is_over() {
            let mut begun = self.core.lock().expect("no panic");
            while let Some(Submission { id, work }) = self.queue.next(true) {
                begun.push(work.0);
                self.queue.end(id, Ok(work));
            }
            drop(begun);
            self.queue.let_callers_pass();
            match self.wait {
                Wait::Work => self.queue.wait_for_work(None),
                Wait::Sockets => {
                    self.queue.clear_bell();
                    if !self.has_news() {
                        self.queue.bell.poll();
                    }
                }
                Wait::SocketsLookedAtTooEarly => {
                    let has_news = self.has_news();
                    self.queue.clear_bell();
                    if !has_news {
                        self.queue.bell.poll();
                    }
                }
            }
        }
        self.queue.close_with(&Over, || Err(Over));
    }

    fn has_news(&self) -> bool {
        self.queue.has_work() || self.queue.has_callers() || self.queue.is_over()
    }

    /// Return what has been begun, in this order.
    fn begun(&self) -> Vec<u32> {
        self.core.lock().expect("no panic").clone()
    }
}

/// Run callers beside the progress thread, which is told to end when they have. Threads are preempted a few times at
/// most, so that each search ends within seconds.
fn search<const N: usize>(wait: Wait, callers: [fn(&Model); N]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(if N == 1 { 3 } else { 2 });
    model.check(move || {
        let shared = Model::new(wait);
        let spawn = |run: fn(&Model)| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || run(&shared))
        };
        let progress = spawn(Model::serve);
        let [first, others @ ..] = &callers[..] else { panic!("a caller") };
        let others: Vec<_> = others.iter().map(|&run| spawn(run)).collect();
        first(&shared);
        for other in others {
            other.join().expect("no panic");
        }
        shared.queue.shut_down();
        progress.join().expect("no panic");
        assert!(shared.queue.held().is_empty(), "everything was waited for or dropped");
    });
}

/// Two operations are begun in order, and each ends for the caller that waits for it, last first.
fn two_operations(model: &Model) {
    let [(one, _), (two, _)] = [1, 2].map(|number| model.submit(Kind::Operation, number, ROOM).expect("it goes on"));
    for (id, expected) in [(two, 2), (one, 1)] {
        let (number, _) = model.queue.wait_for(id).expect("it is waited for once").expect("it goes on");
        assert_eq!(number, expected);
        assert!(model.queue.has_ended(id) && model.queue.wait_for(id).is_none());
    }
    assert_eq!(model.begun(), [1, 2]);
}

#[test]
fn operations_begin_in_the_order_of_posting_and_wake_their_waiter() {
    search(Wait::Work, [two_operations]);
}

#[test]
fn thread_that_waits_for_sockets_is_woken_by_every_submission() {
    search(Wait::Sockets, [two_operations]);
}

#[test]
fn each_of_two_callers_gets_its_own_result() {
    search(Wait::Work, [|model| assert_eq!(model.call(1), Ok(1)), |model| assert_eq!(model.call(2), Ok(2))]);
}

#[test]
fn message_overtakes_operations_and_operations_keep_their_order() {
    search(
        Wait::Work,
        [|model| {
            let kinds = [(Kind::Operation, 1), (Kind::Operation, 2), (Kind::Message, 3)];
            let ids = kinds.map(|(kind, number)| model.submit(kind, number, ROOM).expect("it goes on").0);
            for id in ids {
                assert!(model.queue.wait_for(id).is_some_and(|ended| ended.is_ok()));
            }
            let operations: Vec<_> = model.begun().into_iter().filter(|&number| number < 3).collect();
            assert_eq!(operations, [1, 2]);
        }],
    );
}

#[test]
fn submission_without_room_waits_until_another_one_ends() {
    search(
        Wait::Work,
        [|model| {
            let (one, _) = model.submit(Kind::Operation, 1, 1).expect("it goes on");
            let (two, _) = model.submit(Kind::Operation, 2, 1).expect("it goes on");
            assert!(model.queue.has_ended(one), "there was room for one");
            assert!(model.queue.wait_for(one).is_some() && model.queue.wait_for(two).is_some());
        }],
    );
}

#[test]
fn caller_gets_the_communicator_beside_submissions() {
    let locks = |model: &Model| {
        let caller = model.queue.call();
        model.queue.ring();
        model.core.lock().expect("no panic").push(7);
        drop(caller);
    };
    search(Wait::Work, [|model| assert_eq!(model.call(1), Ok(1)), locks]);
    search(Wait::Sockets, [|model| assert_eq!(model.call(1), Ok(1)), locks]);
}

#[test]
fn detached_operation_frees_what_it_keeps_whenever_it_ends() {
    search(
        Wait::Work,
        [|model| {
            let (id, kept) = model.submit(Kind::Operation, 1, ROOM).expect("it goes on");
            model.queue.detach(id);
            assert_eq!(model.call(2), Ok(2));
            assert_eq!(Arc::strong_count(&kept), 1, "the first one has ended");
        }],
    );
}

#[test]
fn callback_is_called_once_whenever_the_operation_ends() {
    search(
        Wait::Work,
        [|model| {
            let calls = Arc::new(AtomicU32::new(0));
            let (id, _) = model.submit(Kind::Operation, 1, ROOM).expect("it goes on");
            let counted = Arc::clone(&calls);
            model.queue.on_end(id, Box::new(move || _ = counted.fetch_add(1, Ordering::SeqCst)));
            // The thread calls back before it ends what comes next.
            assert_eq!(model.call(2), Ok(2));
            assert_eq!(calls.load(Ordering::SeqCst), 1);
            assert!(model.queue.wait_for(id).is_some());
        }],
    );
}

#[test]
fn cancelled_queue_ends_or_refuses_what_is_submitted_meanwhile() {
    for wait in [Wait::Work, Wait::Sockets] {
        search(
            wait,
            [
                |model| {
                    let first = model.call(1);
                    assert!(matches!(first, Ok(1) | Err(Over)));
                    let (id, kept) = match model.submit(Kind::Operation, 2, ROOM) {
                        Ok(submitted) => submitted,
                        Err(Over) => return,
                    };
                    assert!(first.is_ok(), "nothing is submitted after the end");
                    drop(model.queue.wait_for(id));
                    assert_eq!(Arc::strong_count(&kept), 1, "the memory is free when the wait is over");
                },
                |model| model.queue.shut_down(),
            ],
        );
    }
}

#[test]
fn refused_submission_returns_what_it_keeps() {
    search(
        Wait::Work,
        [|model| {
            model.queue.refuse(&Over);
            let kept = Arc::new(());
            let refused = model.queue.push(Kind::Operation, (1, Arc::clone(&kept)), 1, ROOM, LIMIT);
            assert!(matches!(refused, Err((Refusal::Ended(Over), (1, _)))));
        }],
    );
}

/// The thread may look between the two.
#[test]
#[should_panic(expected = "deadlock")]
fn waking_before_publishing_loses_a_wake_up() {
    search(
        Wait::Work,
        [|model| {
            model.queue.ring();
            let pushed = model.queue.push(Kind::Operation, (1, Arc::new(())), 1, ROOM, LIMIT);
            let Ok(id) = pushed else { panic!("it goes on") };
            drop(model.queue.wait_for(id));
        }],
    );
}

#[test]
#[should_panic(expected = "deadlock")]
fn clearing_the_bell_after_looking_loses_a_wake_up() {
    search(Wait::SocketsLookedAtTooEarly, [two_operations]);
}
