//! The migration gate: counts a communicator's calls, and holds them at the call where it migrates
//! ([`Migration`](crate::recovery::Migration) has the rules).
//!
//! Calls of one thread pass it, notices of another change it. Invariant: a call increments the count and then reads the
//! limit; whoever changes the limit closes it first and then reads the count. All these accesses are sequentially
//! consistent, so one of the two sees the other.

use crate::recovery::{CallStart, Migration, MigrationPromise, MigrationVote, NO_LIMIT};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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
    /// The limit of `state`, or lower.
    limit: AtomicU64,
    /// Locked by whoever changes anything but the count.
    state: Mutex<Migration>,
    changed: Condvar,
}

impl MigrationGate {
    pub(super) const fn new() -> Self {
        Self {
            begun: AtomicU64::new(0),
            limit: AtomicU64::new(NO_LIMIT),
            state: Mutex::new(Migration::new()),
            changed: Condvar::new(),
        }
    }

    /// Change the state, given the number of calls that have begun. Meanwhile no call begins.
    pub(super) fn update<R>(&self, change: impl FnOnce(&mut Migration, u64) -> R) -> R {
        let mut state = self.lock();
        self.limit.store(0, Ordering::SeqCst);
        let result = change(&mut state, self.begun.load(Ordering::SeqCst));
        self.limit.store(state.limit(), Ordering::SeqCst);
        drop(state);
        self.changed.notify_all();
        result
    }

    /// Begin the vote at the agreed call, on the tree that is `offered` with a view; see [`MigrationVote`].
    pub(super) fn vote(&self, offered: u32, job_view: u32, trees: u32) -> MigrationVote {
        self.lock().vote(offered, job_view, trees)
    }

    /// Return what this rank has promised, and what it was told.
    pub(super) fn offered(&self) -> Option<MigrationPromise> {
        self.lock().offered()
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
        let mut state = self.lock();
        loop {
            if call < state.limit() {
                return Admission::Begin;
            }
            if is_over() {
                return if state.in_doubt() { Admission::InDoubt } else { Admission::Begin };
            }
            match state.start_of(call) {
                CallStart::Begin => return Admission::Begin,
                CallStart::Migrate(view) => {
                    self.limit.store(state.limit(), Ordering::SeqCst);
                    return Admission::Migrate(view);
                }
                CallStart::Wait => {}
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Admission::TimedOut;
            }
            state = self.changed.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Count the next call. Calls of a communicator are counted one at a time.
    #[inline]
    pub(super) fn count_call(&self) -> u64 {
        let call = self.begun.load(Ordering::Relaxed);
        self.begun.store(call + 1, Ordering::SeqCst);
        call
    }

    /// Count the next call if it may begin at once.
    #[inline]
    pub(super) fn count_open_call(&self) -> Option<u64> {
        let call = self.count_call();
        if call < self.limit.load(Ordering::SeqCst) {
            return Some(call);
        }
        self.uncount_call();
        None
    }

    /// The call that was counted last was rejected, and other ranks do not know of it, so the next call takes its
    /// number. Promises remain valid, because they concern later calls.
    pub(super) fn uncount_call(&self) {
        let begun = self.begun.load(Ordering::Relaxed);
        debug_assert!(begun > 0, "a call that was counted");
        self.begun.store(begun.saturating_sub(1), Ordering::SeqCst);
    }

    /// Wake waiters.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Return the number of calls that have begun.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Lock everything but the count.
    fn lock(&self) -> MutexGuard<'_, Migration> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Ranks that were not rejected are at the same call afterwards.
    #[test]
    fn rejected_call_gives_its_number_to_the_next() {
        let migration = MigrationGate::new();
        let begin = || migration.begin(soon(), || false);
        assert_eq!((begin(), migration.begun()), (Admission::Begin, 1));
        migration.uncount_call();
        assert_eq!(migration.begun(), 0);
        let at = migration.update(|migration, begun| migration.offer(3, begun)).expect("at once");
        migration.update(|migration, _| migration.move_at(3, at));
        (0..at).for_each(|_| assert_eq!(begin(), Admission::Begin));
        assert_eq!(begin(), Admission::Migrate(3));
        // Rejected after the migration: other ranks make this call after it, too.
        assert_eq!(migration.update(Migration::moved), None);
        migration.uncount_call();
        assert_eq!((begin(), migration.begun()), (Admission::Begin, at + 1));
    }

    #[test]
    fn waiting_call_is_woken_by_the_decision_and_by_wake() {
        let migration = MigrationGate::new();
        let at = migration.update(|migration, begun| migration.offer(0, begun)).expect("at once");
        (0..at).for_each(|_| assert_eq!(migration.begin(soon(), || false), Admission::Begin));
        thread::scope(|scope| {
            let waits = scope.spawn(|| migration.begin(soon(), || false));
            migration.update(|migration, _| migration.move_at(0, at));
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
                let at = migration.update(|migration, begun| migration.offer(1, begun)).expect("at once");
                let begun = caller.join().expect("no panic");
                // A call that came while the limit was closed gave up at once here.
                assert!(begun <= at, "{begun} calls, promised {at}");
            });
        }
    }
}
