//! Moving to a tree that the controller offers to a job without one, at a call that all ranks agree on.
//!
//! ```text
//!   controller -- Offer ------> all ranks      there is room for the job, which there was not
//!   each rank  -- Pause(at) --> controller     "I begin no call from number `at` on before I hear more"
//!   controller -- MoveAt(k) --> all ranks      the greatest of these numbers
//!              or Withdrawn
//! ```
//!
//! All ranks make the same calls in the same order, so the k-th call is the same everywhere, no rank has begun it, and
//! what was called before ends on the path that was chosen for it. Who is not there yet goes on meanwhile: nobody waits
//! unless it has run ahead by [`MARGIN`] calls before the answers are in.
//!
//! Invariant: a call begins only below `limit`. The caller counts itself and then looks at the limit; who sets a limit
//! closes it first and then looks at the count. In one order of all these accesses one of both sees the other.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How many calls a rank may begin while the others answer.
const MARGIN: u64 = 16;

/// No limit.
const OPEN: u64 = u64::MAX;

/// What a call has to do before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Begin.
    Go,
    /// Move to the tree that is offered with this view, and begin there.
    Move(u32),
    /// It was not said in time where to move.
    TooLate,
}

/// Where a communicator is among its calls, and where it is to move.
#[derive(Debug)]
pub(super) struct Offers {
    /// Calls that have begun.
    begun: AtomicU64,
    /// No call from this number on may begin.
    limit: AtomicU64,
    /// At this call the communicator moves.
    move_at: AtomicU64,
    view: AtomicU32,
    changed: (Mutex<()>, Condvar),
    /// Locked by whoever changes where to move.
    cut_off: Mutex<CutOff>,
}

/// What is left of a move whose controller is gone.
#[derive(Debug, Default)]
struct CutOff {
    /// The other ranks may have moved already: all do at that call, though nobody has a tree for them.
    is_due: bool,
    /// What the next controller offers meanwhile.
    next: Option<u32>,
}

impl Offers {
    pub(super) const fn new() -> Self {
        Self {
            begun: AtomicU64::new(0),
            limit: AtomicU64::new(OPEN),
            move_at: AtomicU64::new(OPEN),
            view: AtomicU32::new(0),
            changed: (Mutex::new(()), Condvar::new()),
            cut_off: Mutex::new(CutOff { is_due: false, next: None }),
        }
    }

    /// The controller offers a tree. Returns from which call on this rank waits for more; `None` if it says so later, by
    /// [`Offers::settle`].
    pub(super) fn offer(&self, view: u32) -> Option<u64> {
        let mut cut_off = self.cut_off();
        if cut_off.is_due {
            cut_off.next = Some(view);
            return None;
        }
        self.view.store(view, Ordering::Relaxed);
        self.move_at.store(OPEN, Ordering::Relaxed);
        self.limit.store(0, Ordering::SeqCst);
        let at = self.begun.load(Ordering::SeqCst) + MARGIN;
        self.set_limit(at);
        Some(at)
    }

    fn cut_off(&self) -> MutexGuard<'_, CutOff> {
        self.cut_off.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The controller is gone. Where it has said where to move, all ranks have heard it, and some may have moved.
    pub(super) fn lose_controller(&self) {
        let mut cut_off = self.cut_off();
        if self.move_at.load(Ordering::Relaxed) == OPEN {
            self.withdraw();
        } else {
            *cut_off = CutOff { is_due: true, next: None };
        }
    }

    /// Tell whether the controller that said where to move is gone.
    pub(super) fn is_cut_off(&self) -> bool {
        self.cut_off().is_due
    }

    /// The move is over, or off. Returns what was offered meanwhile: its view, and from which call on this rank waits.
    pub(super) fn settle(&self) -> Option<(u32, u64)> {
        let next = {
            let mut cut_off = self.cut_off();
            self.withdraw();
            std::mem::take(&mut *cut_off).next
        };
        next.and_then(|view| Some((view, self.offer(view)?)))
    }

    /// The controller takes an offer back.
    pub(super) fn take_back(&self) {
        let mut cut_off = self.cut_off();
        if cut_off.is_due {
            cut_off.next = None;
        } else {
            self.withdraw();
        }
    }

    /// All ranks move at this call, if they still mean the same offer.
    pub(super) fn move_at(&self, view: u32, call: u64) {
        if self.view.load(Ordering::Relaxed) == view && self.limit.load(Ordering::Relaxed) != OPEN {
            self.move_at.store(call, Ordering::Release);
            self.set_limit(call);
        }
    }

    /// Nobody moves.
    fn withdraw(&self) {
        self.move_at.store(OPEN, Ordering::Relaxed);
        self.set_limit(OPEN);
    }

    /// The next call begins: returns what it has to do first. Waits, at most until `deadline`, where other ranks have not
    /// answered yet, or until `is_over`, at which the caller is woken by [`Offers::wake`].
    pub(super) fn begin(&self, deadline: Instant, is_over: impl Fn() -> bool) -> Turn {
        let call = self.count();
        if call < self.limit.load(Ordering::SeqCst) {
            return Turn::Go;
        }
        let (lock, changed) = &self.changed;
        let mut guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if is_over() {
                return Turn::Go;
            }
            if let Some(turn) = self.turn_of(call) {
                return turn;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Turn::TooLate;
            }
            guard = changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Count the next call. Only calls of this communicator count, one at a time.
    pub(super) fn count(&self) -> u64 {
        let call = self.begun.load(Ordering::Relaxed);
        self.begun.store(call + 1, Ordering::SeqCst);
        call
    }

    /// Return what a call that is counted has to do first, if that is known.
    pub(super) fn turn_of(&self, call: u64) -> Option<Turn> {
        if call < self.limit.load(Ordering::SeqCst) {
            return Some(Turn::Go);
        }
        (self.move_at.load(Ordering::Acquire) == call).then(|| Turn::Move(self.view.load(Ordering::Relaxed)))
    }

    /// Let who waits look again.
    pub(super) fn wake(&self) {
        drop(self.changed.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.1.notify_all();
    }

    /// Return how many calls have begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::SeqCst);
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::thread;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn calls_go_on_up_to_the_margin_and_move_where_all_do() {
        let offers = Offers::new();
        let begin = |deadline| offers.begin(deadline, || false);
        assert_eq!(begin(soon()), Turn::Go);
        assert_eq!(offers.offer(3), Some(1 + MARGIN));
        (0..MARGIN).for_each(|_| assert_eq!(begin(soon()), Turn::Go));
        assert_eq!(begin(Instant::now()), Turn::TooLate);
        offers.withdraw();
        assert_eq!(begin(soon()), Turn::Go);
        let at = offers.offer(4).expect("at once");
        offers.move_at(3, at);
        offers.move_at(4, at + 5);
        (0..MARGIN + 5).for_each(|_| assert_eq!(begin(soon()), Turn::Go));
        assert_eq!(begin(soon()), Turn::Move(4));
        offers.withdraw();
        assert_eq!(begin(soon()), Turn::Go);
        // Too late for an offer that is over.
        offers.move_at(4, 0);
        assert_eq!(begin(soon()), Turn::Go);
    }

    #[test]
    fn who_waits_is_woken() {
        let offers = Offers::new();
        let at = offers.offer(0).expect("at once");
        (0..at).for_each(|_| assert_eq!(offers.begin(soon(), || false), Turn::Go));
        thread::scope(|scope| {
            let waits = scope.spawn(|| offers.begin(soon(), || false));
            offers.move_at(0, at);
            assert_eq!(waits.join().expect("no panic"), Turn::Move(0));
        });
        let over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let waits = scope.spawn(|| offers.begin(soon(), || over.load(Ordering::SeqCst)));
            over.store(true, Ordering::SeqCst);
            offers.wake();
            assert_eq!(waits.join().expect("no panic"), Turn::Go);
        });
    }

    /// Some ranks have moved already when the controller is gone: the others do too, and only then hear of the next offer.
    #[test]
    fn a_move_that_all_know_of_outlives_its_controller() {
        let offers = Offers::new();
        let begin = || offers.begin(Instant::now(), || false);
        let at = offers.offer(2).expect("at once");
        offers.move_at(2, at);
        offers.lose_controller();
        assert!(offers.is_cut_off());
        assert_eq!(offers.offer(5), None);
        (0..at).for_each(|_| assert_eq!(begin(), Turn::Go));
        assert_eq!(begin(), Turn::Move(2));
        assert_eq!(offers.settle(), Some((5, at + 1 + MARGIN)));
        // One that is only offered is off.
        offers.lose_controller();
        assert!(!offers.is_cut_off());
        (0..2 * MARGIN).for_each(|_| assert_eq!(begin(), Turn::Go));
        assert_eq!(offers.settle(), None);
    }

    /// However they meet: no call from the number on that was promised begins before more is heard.
    #[test]
    fn a_promise_is_kept_by_calls_that_begin_meanwhile() {
        for _ in 0..200 {
            let (offers, start) = (Offers::new(), Barrier::new(2));
            thread::scope(|scope| {
                let caller = scope.spawn(|| {
                    start.wait();
                    (0..10_000).take_while(|_| offers.begin(Instant::now(), || false) == Turn::Go).count() as u64
                });
                start.wait();
                let at = offers.offer(1).expect("at once");
                let begun = caller.join().expect("no panic");
                // One that came while the limit was closed gave up at once here.
                assert!(begun <= at, "{begun} calls, promised {at}");
            });
        }
    }
}
