//! A queue between threads that submit work and the one that does it. It knows neither operations nor sockets: tests
//! compile it a second time, with `loom`'s primitives, and search the interleavings (`interleavings.rs`).
//!
//! Invariants:
//! - work is begun in the order in which it was submitted, messages and operations each among themselves;
//! - every submission ends exactly once: with its result, or with the error that the thread ended with;
//! - submissions that have not ended are bounded;
//! - whoever adds work publishes it before it wakes the thread ([`Queue::ring`]).

use super::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering};
use crate::deadline::after;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// What a caller wants to be told.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Operation,
    Message,
}

/// Work that was submitted and has not been begun.
pub(super) struct Submission<W> {
    pub(super) id: u64,
    pub(super) work: W,
}

/// Why work was not submitted.
pub(super) enum Refusal<E> {
    /// There was no room in time.
    Full,
    /// The communicator has ended, or the thread.
    Ended(E),
}

/// Wakes the thread where it waits for sockets.
pub(super) trait Bell {
    /// Wake it, or keep it from sleeping next.
    fn ring(&self);
    /// The thread looks for news next.
    fn clear(&self);
}

/// Work of type `W` that ends with an `R`; the thread ends with an `E`.
pub(super) struct Queue<W, R, E, B> {
    state: Mutex<State<W, R, E>>,
    /// The thread waits for work.
    submitted: Condvar,
    /// Callers wait for an end, for room, or for the thread to let them have the communicator.
    changed: Condvar,
    has_work: AtomicBool,
    has_messages: AtomicBool,
    is_over: AtomicBool,
    /// Callers that wait for the communicator's lock.
    callers: AtomicUsize,
    /// Rung with every submission.
    pub(super) bell: B,
}

struct State<W, R, E> {
    operations: VecDeque<Submission<W>>,
    messages: VecDeque<Submission<W>>,
    entries: BTreeMap<u64, Entry<R>>,
    next: u64,
    /// When each submission of each kind must end that has not ended.
    deadlines: [BTreeSet<(Instant, u64)>; 2],
    /// Submissions of each kind that have not ended.
    open: [usize; 2],
    /// Why nothing more is submitted: the communicator has ended, or the thread.
    ended: Option<E>,
}

/// A submission.
enum Entry<R> {
    /// It has not ended.
    Open {
        kind: Kind,
        /// When it must end, and how long that is.
        deadline: (Instant, Duration),
        on_end: Option<Callback>,
        /// Nobody will wait for it.
        is_detached: bool,
        /// The length of its memory.
        len_bytes: usize,
    },
    /// It has ended, and has not been waited for.
    Ended { kind: Kind, result: R, len_bytes: usize },
}

impl<R> Entry<R> {
    fn deadline(&self) -> Option<(Instant, Duration)> {
        match self {
            Self::Open { deadline, .. } => Some(*deadline),
            Self::Ended { .. } => None,
        }
    }
}

impl<W, R, E, B> fmt::Debug for Queue<W, R, E, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("has_work", &self.has_work).finish_non_exhaustive()
    }
}

/// Wait until a condition variable is notified, at most until `until`; `None` if that has passed.
fn wait_on<'s, T>(condvar: &Condvar, state: MutexGuard<'s, T>, until: Option<Instant>) -> Option<MutexGuard<'s, T>> {
    let Some(until) = until else { return Some(condvar.wait(state).unwrap_or_else(PoisonError::into_inner)) };
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return None;
    }
    Some(condvar.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
}

impl<W, R, E: Clone, B: Bell> Queue<W, R, E, B> {
    pub(super) fn with_bell(bell: B) -> Self {
        let state = State {
            operations: VecDeque::new(),
            messages: VecDeque::new(),
            entries: BTreeMap::new(),
            next: 0,
            deadlines: Default::default(),
            open: [0, 0],
            ended: None,
        };
        Self {
            state: Mutex::new(state),
            submitted: Condvar::new(),
            changed: Condvar::new(),
            has_work: AtomicBool::new(false),
            has_messages: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            callers: AtomicUsize::new(0),
            bell,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<W, R, E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- callers ----

    /// Submit work on memory of this length, which must end within `limit`. If `most` of its kind are open, wait for
    /// room until then. Follow this by [`Self::ring`].
    ///
    /// # Errors
    /// The reason, and the work.
    pub(super) fn push(
        &self,
        kind: Kind,
        work: W,
        len_bytes: usize,
        most: usize,
        limit: Duration,
    ) -> Result<u64, (Refusal<E>, W)> {
        let deadline = (after(Instant::now(), limit), limit);
        let mut state = self.lock();
        while state.open[kind as usize] >= most && state.ended.is_none() {
            match wait_on(&self.changed, state, Some(deadline.0)) {
                Some(woken) => state = woken,
                None => return Err((Refusal::Full, work)),
            }
        }
        if let Some(ended) = &state.ended {
            return Err((Refusal::Ended(ended.clone()), work));
        }
        let id = state.next;
        state.next += 1;
        state.open[kind as usize] += 1;
        state.entries.insert(id, Entry::Open { kind, deadline, on_end: None, is_detached: false, len_bytes });
        state.deadlines[kind as usize].insert((deadline.0, id));
        let queue = if kind == Kind::Message { &mut state.messages } else { &mut state.operations };
        queue.push_back(Submission { id, work });
        self.has_work.store(true, Ordering::SeqCst);
        self.has_messages.fetch_or(kind == Kind::Message, Ordering::SeqCst);
        Ok(id)
    }

    /// Return whether a submission has ended.
    pub(super) fn has_ended(&self, id: u64) -> bool {
        !matches!(self.lock().entries.get(&id), Some(Entry::Open { .. }))
    }

    /// A submission must end within this time, from now, if it must not end earlier.
    pub(super) fn limit(&self, id: u64, limit: Duration) {
        let mut state = self.lock();
        let State { entries, deadlines, .. } = &mut *state;
        let at = after(Instant::now(), limit);
        if let Some(Entry::Open { kind, deadline, .. }) = entries.get_mut(&id)
            && at < deadline.0
        {
            let deadlines = &mut deadlines[*kind as usize];
            deadlines.remove(&(deadline.0, id));
            deadlines.insert((at, id));
            *deadline = (at, limit);
        }
    }

    /// Wait until a submission has ended, and return how; `None` if that was returned before.
    pub(super) fn wait_for(&self, id: u64) -> Option<R> {
        let mut state = self.lock();
        while let Some(Entry::Open { .. }) = state.entries.get(&id) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.entries.remove(&id) {
            Some(Entry::Ended { result, .. }) => Some(result),
            _ => None,
        }
    }

    /// Call `callback` when a submission has ended; at once if it has.
    pub(super) fn on_end(&self, id: u64, callback: Callback) {
        match self.lock().entries.get_mut(&id) {
            Some(Entry::Open { on_end, .. }) => {
                *on_end = Some(callback);
                return;
            }
            Some(Entry::Ended { .. }) | None => {}
        }
        callback();
    }

    /// Nobody will wait for a submission: it goes on, and is forgotten when it has ended.
    pub(super) fn detach(&self, id: u64) {
        let mut state = self.lock();
        let ended = match state.entries.get_mut(&id) {
            Some(Entry::Open { is_detached, .. }) => {
                *is_detached = true;
                None
            }
            Some(Entry::Ended { .. }) => state.entries.remove(&id),
            None => None,
        };
        drop(state);
        // What it keeps may have a destructor that submits work.
        drop(ended);
    }

    /// A caller waits for the communicator's lock until the guard is dropped. Wake the thread, which lets it have that.
    pub(super) fn call(&self) -> Caller<'_, W, R, E, B> {
        self.callers.fetch_add(1, Ordering::SeqCst);
        Caller(self)
    }

    /// Return kind and length of what has not been waited for, or not ended.
    pub(super) fn held(&self) -> Vec<(Kind, usize)> {
        let kind_and_len = |entry: &Entry<R>| match entry {
            Entry::Open { kind, len_bytes, .. } | Entry::Ended { kind, len_bytes, .. } => (*kind, *len_bytes),
        };
        self.lock().entries.values().map(kind_and_len).collect()
    }

    /// The communicator has ended: refuse what comes.
    pub(super) fn refuse(&self, ended: &E) {
        self.lock().ended.get_or_insert_with(|| ended.clone());
    }

    /// Wait until everything that was submitted has ended, at most until `until`.
    pub(super) fn drain(&self, until: Instant) {
        let mut state = self.lock();
        while state.open != [0, 0] {
            let Some(woken) = wait_on(&self.changed, state, Some(until)) else { return };
            state = woken;
        }
    }

    // ---- the thread ----

    /// Take the next message, or else the next operation.
    pub(super) fn next(&self, takes_operations: bool) -> Option<Submission<W>> {
        if !self.has_work.load(Ordering::SeqCst) {
            return None;
        }
        let mut state = self.lock();
        let message = state.messages.pop_front();
        self.has_messages.store(!state.messages.is_empty(), Ordering::SeqCst);
        let next = message.or_else(|| if takes_operations { state.operations.pop_front() } else { None });
        self.has_work.store(!state.messages.is_empty() || !state.operations.is_empty(), Ordering::SeqCst);
        next
    }

    /// A submission has ended.
    pub(super) fn end(&self, id: u64, result: R) {
        let mut state = self.lock();
        let Some(Entry::Open { kind, on_end, is_detached, len_bytes, deadline }) = state.entries.remove(&id) else {
            return;
        };
        state.deadlines[kind as usize].remove(&(deadline.0, id));
        state.open[kind as usize] -= 1;
        let forgotten = if is_detached {
            Some(result)
        } else {
            state.entries.insert(id, Entry::Ended { kind, result, len_bytes });
            None
        };
        drop(state);
        self.changed.notify_all();
        drop(forgotten);
        if let Some(on_end) = on_end {
            on_end();
        }
    }

    /// Return the submission that must end first, when, and how long after its beginning that is.
    pub(super) fn first_due(&self) -> Option<(u64, (Instant, Duration))> {
        let state = self.lock();
        let (_, id) = state.deadlines.iter().filter_map(BTreeSet::first).min()?;
        Some((*id, state.entries.get(id)?.deadline()?))
    }

    /// Return when the first submission must end, and how long after its beginning that is.
    pub(super) fn first_deadline(&self) -> Option<(Instant, Duration)> {
        self.first_due().map(|(_, deadline)| deadline)
    }

    /// Return when the first message must end, and how long after its beginning that is.
    pub(super) fn message_deadline(&self) -> Option<(Instant, Duration)> {
        let state = self.lock();
        let (_, id) = state.deadlines[Kind::Message as usize].first()?;
        state.entries.get(id)?.deadline()
    }

    /// Take an operation back that has not been begun.
    pub(super) fn take_back(&self, id: u64) -> Option<W> {
        let mut state = self.lock();
        let index = state.operations.iter().position(|submission| submission.id == id)?;
        state.operations.remove(index).map(|submission| submission.work)
    }

    /// Return whether there is work of either kind that has not been begun.
    pub(super) fn has_work(&self) -> bool {
        self.has_work.load(Ordering::SeqCst)
    }

    /// Return whether there are messages that have not been begun.
    pub(super) fn has_messages(&self) -> bool {
        self.has_messages.load(Ordering::SeqCst)
    }

    /// Return whether a caller waits for the communicator's lock.
    pub(super) fn has_callers(&self) -> bool {
        self.callers.load(Ordering::SeqCst) > 0
    }

    /// Wait for work or the end, at most for `timeout`.
    pub(super) fn wait_for_work(&self, timeout: Option<Duration>) {
        let until = timeout.map(|timeout| after(Instant::now(), timeout));
        let mut state = self.lock();
        while !self.has_work() && !self.is_over() && !self.has_callers() {
            let Some(woken) = wait_on(&self.submitted, state, until) else { return };
            state = woken;
        }
    }

    /// Wait until no caller waits for the communicator's lock.
    pub(super) fn let_callers_pass(&self) {
        let mut state = self.lock();
        while self.has_callers() && !self.is_over() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The thread looks for news next.
    pub(super) fn clear_bell(&self) {
        self.bell.clear();
    }

    /// Wake the thread wherever it waits for work or sockets.
    pub(super) fn ring(&self) {
        drop(self.lock());
        self.submitted.notify_all();
        self.bell.ring();
    }

    /// The thread must end: the communicator is gone.
    pub(super) fn shut_down(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.ring();
        self.changed.notify_all();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// The thread has ended, with everything that it had begun: what comes is refused with `error`, and what is left
    /// ends with `result`.
    pub(super) fn close_with(&self, error: &E, result: impl Fn() -> R) {
        let mut state = self.lock();
        state.ended.get_or_insert_with(|| error.clone());
        let (operations, messages) = (std::mem::take(&mut state.operations), std::mem::take(&mut state.messages));
        let open: Vec<u64> =
            state.entries.iter().filter(|(_, entry)| matches!(entry, Entry::Open { .. })).map(|(&id, _)| id).collect();
        drop(state);
        drop((operations, messages));
        open.into_iter().for_each(|id| self.end(id, result()));
    }
}

/// A caller that waits for the communicator's lock.
pub(super) struct Caller<'q, W, R, E: Clone, B: Bell>(&'q Queue<W, R, E, B>);

impl<W, R, E: Clone, B: Bell> Drop for Caller<'_, W, R, E, B> {
    fn drop(&mut self) {
        self.0.callers.fetch_sub(1, Ordering::SeqCst);
        drop(self.0.lock());
        self.0.changed.notify_all();
    }
}
