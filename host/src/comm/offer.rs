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
//! Invariants:
//! - A call begins only below `limit`. The caller counts itself and then looks at the limit; who sets a limit closes it
//!   first and then looks at the count. In one order of all these accesses one of both sees the other.
//! - What was promised is taken back by the controller's word alone, or by a later view. An offer may come before this rank
//!   has gone over to the view that it is of: the others, who have, count on the answer. Where the controller is gone before
//!   it has said where to move, it may have said so to others: the promise holds until all ranks know of each other what
//!   they were told, when they change the view.
//! - All ranks that were told where to move meet there, whatever has happened since: some are there already, and wait.
//!   That there is no tree for them any more they find out together.

use crate::recovery::Offered;
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
    /// It is not known whether others move, and the view changes, which settles that: ask again then.
    InDoubt,
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
    /// Locked by whoever changes anything but the count.
    changed: (Mutex<Appointment>, Condvar),
}

/// A move that all ranks make.
#[derive(Debug, Default)]
struct Appointment {
    /// The call, from when this rank was told it until it has moved, or has seen there that nobody can.
    call: Option<u64>,
    /// The controller that has said so is gone: nobody has a tree for them.
    is_cut_off: bool,
    /// It is gone, and others may have been told the call.
    in_doubt: bool,
    /// What was offered meanwhile.
    next: Option<u32>,
}

impl Appointment {
    const NONE: Self = Self { call: None, is_cut_off: false, in_doubt: false, next: None };

    /// Whether it has to come about, or to be settled, before the next offer counts.
    const fn is_binding(&self) -> bool {
        self.call.is_some() || self.in_doubt
    }
}

/// Held by whoever changes where to move.
type Change<'o> = MutexGuard<'o, Appointment>;

impl Offers {
    pub(super) const fn new() -> Self {
        Self {
            begun: AtomicU64::new(0),
            limit: AtomicU64::new(OPEN),
            move_at: AtomicU64::new(OPEN),
            view: AtomicU32::new(0),
            changed: (Mutex::new(Appointment::NONE), Condvar::new()),
        }
    }

    /// The controller offers a tree. Returns from which call on this rank waits for more; `None` if it says so later, by
    /// [`Offers::moved`] or [`Offers::settle`].
    pub(super) fn offer(&self, view: u32) -> Option<u64> {
        let mut change = self.lock();
        if change.is_binding() {
            change.next = Some(view);
            return None;
        }
        Some(self.promise(view, change))
    }

    fn promise(&self, view: u32, change: Change<'_>) -> u64 {
        self.view.store(view, Ordering::Relaxed);
        self.move_at.store(OPEN, Ordering::Relaxed);
        self.limit.store(0, Ordering::SeqCst);
        let at = self.begun.load(Ordering::SeqCst) + MARGIN;
        self.set_limit(at, change);
        at
    }

    /// All ranks move at this call, if they still mean the same offer.
    pub(super) fn move_at(&self, view: u32, call: u64) {
        let change = self.lock();
        if self.is_promised() && !change.is_binding() && self.view.load(Ordering::Relaxed) == view {
            self.appoint(call, change);
        }
    }

    fn appoint(&self, call: u64, mut change: Change<'_>) {
        change.call = Some(call);
        self.move_at.store(call, Ordering::Release);
        self.set_limit(call, change);
    }

    /// Whether calls are limited, by the lock's holder.
    fn is_promised(&self) -> bool {
        self.limit.load(Ordering::Relaxed) != OPEN
    }

    /// This rank has moved, or has seen that it can't. Returns what was offered meanwhile: its view, and from which call on
    /// this rank waits.
    pub(super) fn moved(&self) -> Option<(u32, u64)> {
        self.go_on(self.lock())
    }

    fn go_on(&self, mut change: Change<'_>) -> Option<(u32, u64)> {
        match std::mem::take(&mut *change).next {
            Some(view) => Some((view, self.promise(view, change))),
            None => {
                self.end(change);
                None
            }
        }
    }

    /// The controller is gone. Where it has told this rank the call, it may have told others, who may have moved. True if
    /// it has told this rank none: the others are to be asked, by a change of the view.
    pub(super) fn lose_controller(&self) -> bool {
        let mut change = self.lock();
        (change.is_cut_off, change.next) = (change.call.is_some(), None);
        change.in_doubt |= change.call.is_none() && self.is_promised();
        change.in_doubt
    }

    /// There is no other rank that could have been told.
    pub(super) fn alone(&self) {
        _ = self.go_on(self.lock());
    }

    /// Tell whether the controller that said where to move is gone.
    pub(super) fn is_cut_off(&self) -> bool {
        self.lock().is_cut_off
    }

    /// Return what this rank has promised, and what it was told.
    pub(super) fn offered(&self) -> Option<Offered> {
        let change = self.lock();
        let is_open = change.call.is_some() || self.is_promised();
        let (view, call, in_doubt) = (self.view.load(Ordering::Relaxed), change.call, change.in_doubt);
        is_open.then_some(Offered { view, call, in_doubt })
    }

    /// All ranks know now whether any was told a call for the offer of that view: they move there, or nobody does. Returns
    /// what was offered meanwhile, as [`Offers::moved`] does.
    pub(super) fn settle(&self, view: u32, call: Option<u64>) -> Option<(u32, u64)> {
        let mut change = self.lock();
        let is_open = change.call.is_some() || self.is_promised();
        if !is_open || self.view.load(Ordering::Relaxed) != view {
            return None;
        }
        let Some(call) = call else { return self.go_on(change) };
        (change.is_cut_off, change.in_doubt) = (true, false);
        if change.call.is_none() {
            self.appoint(call, change);
        }
        None
    }

    /// The controller takes an offer back.
    pub(super) fn withdraw(&self) {
        let mut change = self.lock();
        if change.is_binding() {
            change.next = None;
        } else {
            self.end(change);
        }
    }

    /// This rank is at that view now: an offer of an earlier one is void. Where to move the controller said before it gave
    /// any rank another view, if it did.
    pub(super) fn outdate(&self, view: u32) {
        let change = self.lock();
        if !change.is_binding() && self.view.load(Ordering::Relaxed) < view {
            self.end(change);
        }
    }

    fn end(&self, change: Change<'_>) {
        self.move_at.store(OPEN, Ordering::Relaxed);
        self.set_limit(OPEN, change);
    }

    /// The next call begins.
    #[cfg(test)]
    fn begin(&self, deadline: Instant, is_over: impl Fn() -> bool) -> Turn {
        self.begin_again(self.count(), deadline, is_over)
    }

    /// A call that is counted begins: returns what it has to do first. Waits, at most until `deadline`, where other ranks
    /// have not answered yet, or until `is_over`, at which the caller is woken by [`Offers::wake`].
    pub(super) fn begin_again(&self, call: u64, deadline: Instant, is_over: impl Fn() -> bool) -> Turn {
        if call < self.limit.load(Ordering::SeqCst) {
            return Turn::Go;
        }
        let mut guard = self.lock();
        loop {
            if is_over() {
                return if guard.in_doubt { Turn::InDoubt } else { Turn::Go };
            }
            if let Some(turn) = self.turn(call, &guard) {
                return turn;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Turn::TooLate;
            }
            guard = self.changed.1.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Count the next call. Only calls of this communicator count, one at a time.
    pub(super) fn count(&self) -> u64 {
        let call = self.begun.load(Ordering::Relaxed);
        self.begun.store(call + 1, Ordering::SeqCst);
        call
    }

    /// The call that was counted last was refused, and other ranks don't hear of it: the next one has its number. What
    /// was promised meanwhile holds, as it is about later calls.
    pub(super) fn uncount(&self) {
        let begun = self.begun.load(Ordering::Relaxed);
        debug_assert!(begun > 0, "a call that was counted");
        self.begun.store(begun.saturating_sub(1), Ordering::SeqCst);
    }

    /// Return what a call that is counted has to do first, if that is known. Told to move, it does.
    #[cfg(feature = "snapshot")]
    pub(super) fn turn_of(&self, call: u64) -> Option<Turn> {
        self.turn(call, &self.lock())
    }

    fn turn(&self, call: u64, _change: &Change<'_>) -> Option<Turn> {
        if call < self.limit.load(Ordering::SeqCst) {
            return Some(Turn::Go);
        }
        if self.move_at.load(Ordering::Acquire) != call {
            return None;
        }
        self.move_at.store(OPEN, Ordering::Relaxed);
        self.limit.store(OPEN, Ordering::SeqCst);
        Some(Turn::Move(self.view.load(Ordering::Relaxed)))
    }

    /// Let who waits look again.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.1.notify_all();
    }

    /// Whoever changes anything but the count holds this.
    fn lock(&self) -> Change<'_> {
        self.changed.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return how many calls have begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    fn set_limit(&self, limit: u64, change: Change<'_>) {
        self.limit.store(limit, Ordering::SeqCst);
        drop(change);
        self.changed.1.notify_all();
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
        assert_eq!(offers.moved(), None);
        assert_eq!(begin(soon()), Turn::Go);
        // Too late for an offer that is over.
        offers.move_at(4, 0);
        assert_eq!(begin(soon()), Turn::Go);
    }

    /// The others move at the call that was agreed on, whether this rank was at that view when it answered or not.
    #[test]
    fn an_offer_outlasts_the_change_to_the_view_that_it_is_of() {
        let offers = Offers::new();
        let at = offers.offer(1).expect("at once");
        offers.outdate(1);
        offers.move_at(1, at);
        (0..at).for_each(|_| assert_eq!(offers.begin(soon(), || false), Turn::Go));
        assert_eq!(offers.begin(soon(), || false), Turn::Move(1));
        assert_eq!(offers.moved(), None);
        offers.offer(2);
        offers.outdate(3);
        (0..2 * MARGIN).for_each(|_| assert_eq!(offers.begin(soon(), || false), Turn::Go));
    }

    /// A call that was refused takes its number along: ranks that were not refused are at the same call afterwards.
    #[test]
    fn refused_call_gives_its_number_to_the_next() {
        let offers = Offers::new();
        let begin = || offers.begin(soon(), || false);
        assert_eq!((begin(), offers.begun()), (Turn::Go, 1));
        offers.uncount();
        assert_eq!(offers.begun(), 0);
        let at = offers.offer(3).expect("at once");
        offers.move_at(3, at);
        (0..at).for_each(|_| assert_eq!(begin(), Turn::Go));
        assert_eq!(begin(), Turn::Move(3));
        // Refused behind the move: the others make this call after the same move.
        assert_eq!(offers.moved(), None);
        offers.uncount();
        assert_eq!((begin(), offers.begun()), (Turn::Go, at + 1));
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
        assert!(!offers.is_cut_off());
        assert!(!offers.lose_controller());
        assert!(offers.is_cut_off());
        assert_eq!(offers.offer(5), None);
        // Nor does another view change what all have heard.
        offers.outdate(5);
        (0..at).for_each(|_| assert_eq!(begin(), Turn::Go));
        assert_eq!(begin(), Turn::Move(2));
        assert_eq!(offers.moved(), Some((5, at + 1 + MARGIN)));
    }

    /// It may have told others where to move. They say so, or all go on.
    #[test]
    fn a_promise_outlives_its_controller_until_all_know_what_was_told() {
        for told in [None, Some(20)] {
            let offers = Offers::new();
            let begin = |is_over| offers.begin(Instant::now(), || is_over);
            assert!(!offers.lose_controller(), "there is none to be in doubt of");
            let at = offers.offer(2).expect("at once");
            assert!(offers.lose_controller());
            assert_eq!(offers.offered(), Some(Offered { view: 2, call: None, in_doubt: true }));
            (0..at).for_each(|_| assert_eq!(begin(false), Turn::Go));
            assert_eq!(begin(false), Turn::TooLate);
            assert_eq!(offers.begin_again(at, soon(), || true), Turn::InDoubt);
            // Not by a later view, nor by the next controller.
            offers.outdate(3);
            assert_eq!(offers.offer(4), None);
            offers.move_at(4, at);
            assert_eq!(offers.settle(3, None), None);
            assert_eq!(offers.begin_again(at, Instant::now(), || false), Turn::TooLate);
            let after = offers.settle(2, told);
            match told {
                None => assert_eq!(
                    (after, offers.begin_again(at, soon(), || false)),
                    (Some((4, at + 1 + MARGIN)), Turn::Go)
                ),
                Some(call) => {
                    assert_eq!((after, offers.is_cut_off()), (None, true));
                    (at + 1..call).for_each(|_| assert_eq!(begin(false), Turn::Go));
                    assert_eq!(begin(false), Turn::Move(2));
                    assert_eq!(offers.moved(), Some((4, call + 1 + MARGIN)));
                }
            }
        }
    }

    /// The others may not have asked it yet.
    #[test]
    fn a_controller_that_is_lost_on_the_move_is_not_asked() {
        let offers = Offers::new();
        let at = offers.offer(1).expect("at once");
        offers.move_at(1, at);
        (0..at).for_each(|_| assert_eq!(offers.begin(soon(), || false), Turn::Go));
        assert_eq!(offers.begin(soon(), || false), Turn::Move(1));
        offers.lose_controller();
        assert!(offers.is_cut_off());
        assert_eq!(offers.offer(2), None);
        offers.withdraw();
        assert_eq!(offers.moved(), None);
        (0..2 * MARGIN).for_each(|_| assert_eq!(offers.begin(soon(), || false), Turn::Go));
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
