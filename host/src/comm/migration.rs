//! Migration: moving to a tree that the controller offers to a job without one, at a call that all ranks agree on.
//!
//! ```text
//!   controller -- Offer ------> all ranks      resources for a tree have become available
//!   each rank  -- Pause(at) --> controller     "I begin no call from number `at` on until you decide"
//!   controller -- MoveAt(k) --> all ranks      the maximum of these numbers
//!              or Withdrawn
//! ```
//!
//! All ranks make the same calls in the same order, so call k is the same everywhere. No rank has begun it, and earlier
//! calls end on the path that was selected for them. Ranks that have not reached it go on meanwhile: a rank blocks only
//! if it is [`CALLS_AHEAD_MAX`] calls ahead before the decision arrives.
//!
//! Invariants:
//! - A call begins only below `limit`. The caller increments the count and then reads the limit; whoever sets a limit
//!   closes it first and then reads the count. All these accesses are sequentially consistent, so one of the two sees
//!   the other.
//! - Only the controller or a later view takes back a promise. An offer may arrive before this rank has entered the
//!   view that it belongs to; other ranks, which have, rely on the reply. If the controller disconnects before it
//!   decides, it may have told other ranks: the promise then holds until all ranks have exchanged what they were told,
//!   in a view change.
//! - All ranks that were told the call meet there, whatever has happened since, because some are already waiting. If
//!   the tree no longer exists, they find out together.

use crate::recovery::MigrationPromise;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How many calls a rank may begin between its promise and the decision.
const CALLS_AHEAD_MAX: u64 = 16;

/// No limit.
const NO_LIMIT: u64 = u64::MAX;

/// What a call must do before it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// Begin.
    Begin,
    /// Migrate to the tree offered with this view, and begin there.
    Migrate(u32),
    /// The decision did not arrive before the deadline.
    TimedOut,
    /// It is unknown whether other ranks migrate. Change the view, which settles that, and try again.
    InDoubt,
}

/// Counts a communicator's calls, and holds them at the call where it migrates.
#[derive(Debug)]
pub(super) struct MigrationGate {
    /// Number of calls that have begun.
    begun: AtomicU64,
    /// Calls from this number on may not begin.
    limit: AtomicU64,
    /// The call at which the communicator migrates.
    move_at: AtomicU64,
    view: AtomicU32,
    /// Locked by whoever changes anything but the count.
    changed: (Mutex<MigrationPoint>, Condvar),
}

/// An agreed migration.
#[derive(Debug, Default)]
struct MigrationPoint {
    /// The call, from the decision until this rank has migrated, or has found that no rank can.
    call: Option<u64>,
    /// The controller that decided it has disconnected, so there is no tree.
    is_cut_off: bool,
    /// The controller has disconnected, and may have told other ranks the call.
    in_doubt: bool,
    /// The view of the next offer, if there is one.
    next: Option<u32>,
}

impl MigrationPoint {
    const NONE: Self = Self { call: None, is_cut_off: false, in_doubt: false, next: None };

    /// Whether this migration must be completed or settled before the next offer counts.
    const fn is_binding(&self) -> bool {
        self.call.is_some() || self.in_doubt
    }
}

/// The lock of whoever changes the migration point.
type PointGuard<'o> = MutexGuard<'o, MigrationPoint>;

impl MigrationGate {
    pub(super) const fn new() -> Self {
        Self {
            begun: AtomicU64::new(0),
            limit: AtomicU64::new(NO_LIMIT),
            move_at: AtomicU64::new(NO_LIMIT),
            view: AtomicU32::new(0),
            changed: (Mutex::new(MigrationPoint::NONE), Condvar::new()),
        }
    }

    /// The controller offers a tree. Returns the first call that this rank holds back; `None` if
    /// [`MigrationGate::moved`] or [`MigrationGate::settle`] will return it later.
    pub(super) fn offer(&self, view: u32) -> Option<u64> {
        let mut point = self.lock();
        if point.is_binding() {
            point.next = Some(view);
            return None;
        }
        Some(self.promise(view, point))
    }

    fn promise(&self, view: u32, point: PointGuard<'_>) -> u64 {
        self.view.store(view, Ordering::Relaxed);
        self.move_at.store(NO_LIMIT, Ordering::Relaxed);
        self.limit.store(0, Ordering::SeqCst);
        let at = self.begun.load(Ordering::SeqCst) + CALLS_AHEAD_MAX;
        self.set_limit(at, point);
        at
    }

    /// The controller decides: all ranks migrate at this call, if the offer is still the current one.
    pub(super) fn move_at(&self, view: u32, call: u64) {
        let point = self.lock();
        if self.is_promised() && !point.is_binding() && self.view.load(Ordering::Relaxed) == view {
            self.set_migration_point(call, point);
        }
    }

    fn set_migration_point(&self, call: u64, mut point: PointGuard<'_>) {
        point.call = Some(call);
        self.move_at.store(call, Ordering::Release);
        self.set_limit(call, point);
    }

    /// Return whether calls are held back. Called with the lock held.
    fn is_promised(&self) -> bool {
        self.limit.load(Ordering::Relaxed) != NO_LIMIT
    }

    /// This rank has migrated, or has found that it cannot. Returns the promise for the next offer, if there is one:
    /// its view, and the first call that this rank holds back.
    pub(super) fn moved(&self) -> Option<(u32, u64)> {
        self.next_offer(self.lock())
    }

    fn next_offer(&self, mut point: PointGuard<'_>) -> Option<(u32, u64)> {
        match std::mem::take(&mut *point).next {
            Some(view) => Some((view, self.promise(view, point))),
            None => {
                self.end(point);
                None
            }
        }
    }

    /// The controller disconnected. Returns true if this rank was promised a decision and has not received it: other
    /// ranks may have, so a view change must find out.
    pub(super) fn controller_lost(&self) -> bool {
        let mut point = self.lock();
        (point.is_cut_off, point.next) = (point.call.is_some(), None);
        point.in_doubt |= point.call.is_none() && self.is_promised();
        point.in_doubt
    }

    /// There is no other rank that the controller could have told.
    pub(super) fn settle_alone(&self) {
        _ = self.next_offer(self.lock());
    }

    /// Return whether the controller that decided the migration has disconnected.
    pub(super) fn is_cut_off(&self) -> bool {
        self.lock().is_cut_off
    }

    /// Return what this rank has promised, and what it was told.
    pub(super) fn offered(&self) -> Option<MigrationPromise> {
        let point = self.lock();
        let is_open = point.call.is_some() || self.is_promised();
        let (view, call, in_doubt) = (self.view.load(Ordering::Relaxed), point.call, point.in_doubt);
        is_open.then_some(MigrationPromise { view, call, in_doubt })
    }

    /// All ranks know now whether any was told the call for this offer: they migrate there, or none does. Returns the
    /// next promise, as [`MigrationGate::moved`] does.
    pub(super) fn settle(&self, view: u32, call: Option<u64>) -> Option<(u32, u64)> {
        let mut point = self.lock();
        let is_open = point.call.is_some() || self.is_promised();
        if !is_open || self.view.load(Ordering::Relaxed) != view {
            return None;
        }
        let Some(call) = call else { return self.next_offer(point) };
        (point.is_cut_off, point.in_doubt) = (true, false);
        if point.call.is_none() {
            self.set_migration_point(call, point);
        }
        None
    }

    /// The controller withdraws its offer.
    pub(super) fn withdraw(&self) {
        let mut point = self.lock();
        if point.is_binding() {
            point.next = None;
        } else {
            self.end(point);
        }
    }

    /// This rank has entered a view: an offer for an earlier one is void. A controller sends its decision before it
    /// gives any rank another view.
    pub(super) fn enter_view(&self, view: u32) {
        let point = self.lock();
        if !point.is_binding() && self.view.load(Ordering::Relaxed) < view {
            self.end(point);
        }
    }

    fn end(&self, point: PointGuard<'_>) {
        self.move_at.store(NO_LIMIT, Ordering::Relaxed);
        self.set_limit(NO_LIMIT, point);
    }

    /// Count a call and wait until it may begin.
    #[cfg(test)]
    fn begin(&self, deadline: Instant, is_over: impl Fn() -> bool) -> Admission {
        self.admit(self.count_call(), deadline, is_over)
    }

    /// Wait until a counted call may begin. Returns what it must do first. Blocks while other ranks have not replied,
    /// at most until `deadline` or until `is_over`, for which the caller is woken by [`MigrationGate::wake`].
    pub(super) fn admit(&self, call: u64, deadline: Instant, is_over: impl Fn() -> bool) -> Admission {
        if call < self.limit.load(Ordering::SeqCst) {
            return Admission::Begin;
        }
        let mut guard = self.lock();
        loop {
            if is_over() {
                return if guard.in_doubt { Admission::InDoubt } else { Admission::Begin };
            }
            if let Some(admission) = self.admission(call, &guard) {
                return admission;
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Admission::TimedOut;
            }
            guard = self.changed.1.wait_timeout(guard, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Count the next call. Calls of a communicator are counted one at a time.
    pub(super) fn count_call(&self) -> u64 {
        let call = self.begun.load(Ordering::Relaxed);
        self.begun.store(call + 1, Ordering::SeqCst);
        call
    }

    /// The call that was counted last was rejected, and other ranks do not know of it, so the next call takes its
    /// number. Promises remain valid, because they concern later calls.
    pub(super) fn uncount_call(&self) {
        let begun = self.begun.load(Ordering::Relaxed);
        debug_assert!(begun > 0, "a call that was counted");
        self.begun.store(begun.saturating_sub(1), Ordering::SeqCst);
    }

    /// Return what a counted call must do first, if that is known. A result of `Migrate` counts as done.
    #[cfg(feature = "snapshot")]
    pub(super) fn admission_of(&self, call: u64) -> Option<Admission> {
        self.admission(call, &self.lock())
    }

    fn admission(&self, call: u64, _change: &PointGuard<'_>) -> Option<Admission> {
        if call < self.limit.load(Ordering::SeqCst) {
            return Some(Admission::Begin);
        }
        if self.move_at.load(Ordering::Acquire) != call {
            return None;
        }
        self.move_at.store(NO_LIMIT, Ordering::Relaxed);
        self.limit.store(NO_LIMIT, Ordering::SeqCst);
        Some(Admission::Migrate(self.view.load(Ordering::Relaxed)))
    }

    /// Wake waiters.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.1.notify_all();
    }

    /// Lock everything but the count.
    fn lock(&self) -> PointGuard<'_> {
        self.changed.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the number of calls that have begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    fn set_limit(&self, limit: u64, point: PointGuard<'_>) {
        self.limit.store(limit, Ordering::SeqCst);
        drop(point);
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
    fn calls_are_held_after_the_margin_and_migrate_at_the_decided_call() {
        let migration = MigrationGate::new();
        let begin = |deadline| migration.begin(deadline, || false);
        assert_eq!(begin(soon()), Admission::Begin);
        assert_eq!(migration.offer(3), Some(1 + CALLS_AHEAD_MAX));
        (0..CALLS_AHEAD_MAX).for_each(|_| assert_eq!(begin(soon()), Admission::Begin));
        assert_eq!(begin(Instant::now()), Admission::TimedOut);
        migration.withdraw();
        assert_eq!(begin(soon()), Admission::Begin);
        let at = migration.offer(4).expect("at once");
        migration.move_at(3, at);
        migration.move_at(4, at + 5);
        (0..CALLS_AHEAD_MAX + 5).for_each(|_| assert_eq!(begin(soon()), Admission::Begin));
        assert_eq!(begin(soon()), Admission::Migrate(4));
        assert_eq!(migration.moved(), None);
        assert_eq!(begin(soon()), Admission::Begin);
        // A decision for a finished offer is ignored.
        migration.move_at(4, 0);
        assert_eq!(begin(soon()), Admission::Begin);
    }

    /// Other ranks migrate at the agreed call, whether or not this rank was in that view when it replied.
    #[test]
    fn offer_remains_valid_when_its_own_view_is_entered() {
        let migration = MigrationGate::new();
        let at = migration.offer(1).expect("at once");
        migration.enter_view(1);
        migration.move_at(1, at);
        (0..at).for_each(|_| assert_eq!(migration.begin(soon(), || false), Admission::Begin));
        assert_eq!(migration.begin(soon(), || false), Admission::Migrate(1));
        assert_eq!(migration.moved(), None);
        migration.offer(2);
        migration.enter_view(3);
        (0..2 * CALLS_AHEAD_MAX).for_each(|_| assert_eq!(migration.begin(soon(), || false), Admission::Begin));
    }

    /// Ranks that were not rejected are at the same call afterwards.
    #[test]
    fn rejected_call_gives_its_number_to_the_next() {
        let migration = MigrationGate::new();
        let begin = || migration.begin(soon(), || false);
        assert_eq!((begin(), migration.begun()), (Admission::Begin, 1));
        migration.uncount_call();
        assert_eq!(migration.begun(), 0);
        let at = migration.offer(3).expect("at once");
        migration.move_at(3, at);
        (0..at).for_each(|_| assert_eq!(begin(), Admission::Begin));
        assert_eq!(begin(), Admission::Migrate(3));
        // Rejected after the migration: other ranks make this call after it, too.
        assert_eq!(migration.moved(), None);
        migration.uncount_call();
        assert_eq!((begin(), migration.begun()), (Admission::Begin, at + 1));
    }

    #[test]
    fn waiting_call_is_woken_by_the_decision_and_by_wake() {
        let migration = MigrationGate::new();
        let at = migration.offer(0).expect("at once");
        (0..at).for_each(|_| assert_eq!(migration.begin(soon(), || false), Admission::Begin));
        thread::scope(|scope| {
            let waits = scope.spawn(|| migration.begin(soon(), || false));
            migration.move_at(0, at);
            assert_eq!(waits.join().expect("no panic"), Admission::Migrate(0));
        });
        let over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            let waits = scope.spawn(|| migration.begin(soon(), || over.load(Ordering::SeqCst)));
            over.store(true, Ordering::SeqCst);
            migration.wake();
            assert_eq!(waits.join().expect("no panic"), Admission::Begin);
        });
    }

    /// Some ranks have migrated already when the controller disconnects: the others do, too, and only then consider the
    /// next offer.
    #[test]
    fn decided_migration_outlives_its_controller() {
        let migration = MigrationGate::new();
        let begin = || migration.begin(Instant::now(), || false);
        let at = migration.offer(2).expect("at once");
        migration.move_at(2, at);
        assert!(!migration.is_cut_off());
        assert!(!migration.controller_lost());
        assert!(migration.is_cut_off());
        assert_eq!(migration.offer(5), None);
        // Nor does another view affect a decision.
        migration.enter_view(5);
        (0..at).for_each(|_| assert_eq!(begin(), Admission::Begin));
        assert_eq!(begin(), Admission::Migrate(2));
        assert_eq!(migration.moved(), Some((5, at + 1 + CALLS_AHEAD_MAX)));
    }

    /// The controller may have told other ranks the call. They report it, or all ranks go on.
    #[test]
    fn promise_outlives_its_controller_until_ranks_have_settled_it() {
        for decided in [None, Some(20)] {
            let migration = MigrationGate::new();
            let begin = |is_over| migration.begin(Instant::now(), || is_over);
            assert!(!migration.controller_lost(), "there is none to be in doubt of");
            let at = migration.offer(2).expect("at once");
            assert!(migration.controller_lost());
            assert_eq!(migration.offered(), Some(MigrationPromise { view: 2, call: None, in_doubt: true }));
            (0..at).for_each(|_| assert_eq!(begin(false), Admission::Begin));
            assert_eq!(begin(false), Admission::TimedOut);
            assert_eq!(migration.admit(at, soon(), || true), Admission::InDoubt);
            // Neither a later view nor the next controller settles it.
            migration.enter_view(3);
            assert_eq!(migration.offer(4), None);
            migration.move_at(4, at);
            assert_eq!(migration.settle(3, None), None);
            assert_eq!(migration.admit(at, Instant::now(), || false), Admission::TimedOut);
            let after = migration.settle(2, decided);
            match decided {
                None => assert_eq!(
                    (after, migration.admit(at, soon(), || false)),
                    (Some((4, at + 1 + CALLS_AHEAD_MAX)), Admission::Begin)
                ),
                Some(call) => {
                    assert_eq!((after, migration.is_cut_off()), (None, true));
                    (at + 1..call).for_each(|_| assert_eq!(begin(false), Admission::Begin));
                    assert_eq!(begin(false), Admission::Migrate(2));
                    assert_eq!(migration.moved(), Some((4, call + 1 + CALLS_AHEAD_MAX)));
                }
            }
        }
    }

    /// Other ranks may not have asked the controller for the tree yet.
    #[test]
    fn controller_lost_during_the_migration_is_not_asked() {
        let migration = MigrationGate::new();
        let at = migration.offer(1).expect("at once");
        migration.move_at(1, at);
        (0..at).for_each(|_| assert_eq!(migration.begin(soon(), || false), Admission::Begin));
        assert_eq!(migration.begin(soon(), || false), Admission::Migrate(1));
        migration.controller_lost();
        assert!(migration.is_cut_off());
        assert_eq!(migration.offer(2), None);
        migration.withdraw();
        assert_eq!(migration.moved(), None);
        (0..2 * CALLS_AHEAD_MAX).for_each(|_| assert_eq!(migration.begin(soon(), || false), Admission::Begin));
    }

    /// Whatever the interleaving: no call at or above the promised number begins before the decision.
    #[test]
    fn promise_holds_for_calls_that_begin_concurrently() {
        for _ in 0..200 {
            let (migration, start) = (MigrationGate::new(), Barrier::new(2));
            thread::scope(|scope| {
                let caller = scope.spawn(|| {
                    start.wait();
                    (0..10_000).take_while(|_| migration.begin(Instant::now(), || false) == Admission::Begin).count()
                        as u64
                });
                start.wait();
                let at = migration.offer(1).expect("at once");
                let begun = caller.join().expect("no panic");
                // A call that came while the limit was closed gave up at once here.
                assert!(begun <= at, "{begun} calls, promised {at}");
            });
        }
    }
}
