//! What callers and the progress thread share: work that was submitted, and how it ended.
//!
//! Callers hold the lock of this queue, never that of the communicator, to submit work, to test and to wait. So none of
//! these waits for an operation but the one that it is for.
//!
//! Invariants:
//! - work is begun in the order in which it was submitted, messages and operations each among themselves;
//! - every submission ends exactly once: with its result, or with the error that ended the communicator;
//! - submissions that have not ended are bounded;
//! - whoever adds work publishes it before it wakes the thread ([`Submissions::ring`]).

use super::error::{Error, StartError};
use super::options::Outstanding;
use super::task::{Finished, Refused, Work};
use crate::deadline::after;
use crate::exec::message::POSTS_MAX;
use crate::transport::packets::MAX_OPS;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a caller wants to be told.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// Work that was submitted and has not been begun.
pub(super) struct Submission {
    pub(super) id: u64,
    pub(super) work: Work,
}

/// The work of a communicator whose progress is a thread's.
pub(crate) struct Submissions {
    state: Mutex<State>,
    /// The thread waits for work.
    submitted: Condvar,
    /// Callers wait for an end, for room, or for the thread to let them have the communicator.
    changed: Condvar,
    has_work: AtomicBool,
    has_messages: AtomicBool,
    is_over: AtomicBool,
    /// Callers that wait for the communicator's lock.
    callers: AtomicUsize,
    /// Rung with every submission, for a thread that polls sockets.
    bell: OwnedFd,
}

#[derive(Default)]
struct State {
    operations: VecDeque<Submission>,
    messages: VecDeque<Submission>,
    entries: BTreeMap<u64, Entry>,
    next: u64,
    /// When each submission of each kind must end that has not ended.
    deadlines: [BTreeSet<(Instant, u64)>; 2],
    /// Submissions of each kind that have not ended.
    open: [usize; 2],
    /// Why nothing more is submitted: the communicator has ended, or the thread.
    ended: Option<Error>,
}

/// A submission.
enum Entry {
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
    Ended { kind: Kind, finished: Finished, len_bytes: usize },
}

impl Entry {
    fn deadline(&self) -> Option<(Instant, Duration)> {
        match self {
            Self::Open { deadline, .. } => Some(*deadline),
            Self::Ended { .. } => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Operation,
    Message,
}

impl Kind {
    const fn of(work: &Work) -> Self {
        match work {
            Work::Operation(_) => Self::Operation,
            Work::Message(_) => Self::Message,
        }
    }

    /// The number of submissions of this kind that may be open.
    const fn limit(self) -> usize {
        match self {
            Self::Operation => MAX_OPS,
            Self::Message => POSTS_MAX,
        }
    }
}

impl fmt::Debug for Submissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submissions").field("has_work", &self.has_work).finish_non_exhaustive()
    }
}

impl Submissions {
    /// # Errors
    /// The system's, if there is no descriptor.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            submitted: Condvar::new(),
            changed: Condvar::new(),
            has_work: AtomicBool::new(false),
            has_messages: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            callers: AtomicUsize::new(0),
            bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- callers ----

    /// Submit work, which must end within `limit`. At the limit of open submissions, wait for room until then.
    ///
    /// # Errors
    /// [`Error::TooManyInFlight`], or the error that the thread ended with; each with the work.
    pub(super) fn submit(&self, work: Work, limit: Duration) -> Result<u64, Refused> {
        let (kind, deadline) = (Kind::of(&work), (after(Instant::now(), limit), limit));
        let mut state = self.lock();
        while state.open[kind as usize] >= kind.limit() && state.ended.is_none() {
            let left = deadline.0.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let error = Error::TooManyInFlight { limit: kind.limit(), waited: limit };
                return Err(Box::new(StartError { error, buffer: work }));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(ended) = &state.ended {
            return Err(Box::new(StartError { error: Error::Ended(Box::new(ended.clone())), buffer: work }));
        }
        let id = state.next;
        state.next += 1;
        state.open[kind as usize] += 1;
        let entry = Entry::Open { kind, deadline, on_end: None, is_detached: false, len_bytes: work.len_bytes() };
        state.entries.insert(id, entry);
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

    /// Wait until a submission has ended, and return how.
    pub(super) fn wait(&self, id: u64) -> Finished {
        let mut state = self.lock();
        while let Some(Entry::Open { .. }) = state.entries.get(&id) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.entries.remove(&id) {
            Some(Entry::Ended { finished, .. }) => finished,
            _ => Finished::Operation(None, Err(Error::Argument("this was waited for before".into()))),
        }
    }

    /// Call `on_end` when a submission has ended; at once if it has.
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
    pub(super) fn call(&self) -> Caller<'_> {
        self.callers.fetch_add(1, Ordering::SeqCst);
        Caller(self)
    }

    /// Return what has not been waited for, or not ended.
    pub(super) fn outstanding(&self) -> Outstanding {
        let mut outstanding = Outstanding::default();
        for entry in self.lock().entries.values() {
            let (Entry::Open { kind, len_bytes, .. } | Entry::Ended { kind, len_bytes, .. }) = entry;
            match kind {
                Kind::Operation => outstanding.operations += 1,
                Kind::Message => outstanding.messages += 1,
            }
            outstanding.bytes += len_bytes;
        }
        outstanding
    }

    /// The communicator has ended: refuse what comes.
    pub(super) fn refuse(&self, ended: &Error) {
        self.lock().ended.get_or_insert_with(|| ended.clone());
    }

    /// Wait until everything that was submitted has ended, at most until `until`.
    pub(super) fn drain(&self, until: Instant) {
        let state = self.lock();
        let left = until.saturating_duration_since(Instant::now());
        let is_any_open = |state: &mut State| state.open != [0, 0];
        drop(self.changed.wait_timeout_while(state, left, is_any_open).unwrap_or_else(PoisonError::into_inner));
    }

    // ---- the thread ----

    /// Take the next operation, and the next message.
    pub(super) fn next(&self, takes_operations: bool) -> Option<Submission> {
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
    pub(super) fn end(&self, id: u64, finished: Finished) {
        let mut state = self.lock();
        let Some(Entry::Open { kind, on_end, is_detached, len_bytes, deadline }) = state.entries.remove(&id) else {
            return;
        };
        state.deadlines[kind as usize].remove(&(deadline.0, id));
        state.open[kind as usize] -= 1;
        let forgotten = if is_detached {
            Some(finished)
        } else {
            state.entries.insert(id, Entry::Ended { kind, finished, len_bytes });
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
    pub(super) fn take_back(&self, id: u64) -> Option<Work> {
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
        let state = self.lock();
        let is_idle = |_: &mut State| !self.has_work() && !self.is_over() && !self.has_callers();
        drop(match timeout {
            Some(timeout) => {
                self.submitted.wait_timeout_while(state, timeout, is_idle).unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.submitted.wait_while(state, is_idle).unwrap_or_else(PoisonError::into_inner),
        });
    }

    /// Wait until no caller waits for the communicator's lock.
    pub(super) fn let_callers_pass(&self) {
        let state = self.lock();
        let is_waiting = |_: &mut State| self.has_callers() && !self.is_over();
        drop(self.changed.wait_while(state, is_waiting).unwrap_or_else(PoisonError::into_inner));
    }

    /// Return the descriptor that is readable when there is news for the thread.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The thread looks for news next.
    pub(super) fn clear_bell(&self) {
        // Nothing to read is no error.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
    }

    /// Wake the thread wherever it waits for work or sockets.
    pub(super) fn ring(&self) {
        drop(self.lock());
        self.submitted.notify_all();
        // A bell that is full has been rung.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
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

    /// The thread has ended, with everything that it had begun: what is left, and what comes, ends with `error`.
    pub(super) fn close(&self, error: &Error) {
        let mut state = self.lock();
        state.ended.get_or_insert_with(|| error.clone());
        let left: Vec<Submission> =
            std::mem::take(&mut state.operations).into_iter().chain(std::mem::take(&mut state.messages)).collect();
        let open: Vec<u64> =
            state.entries.iter().filter(|(_, entry)| matches!(entry, Entry::Open { .. })).map(|(&id, _)| id).collect();
        drop(state);
        drop(left);
        open.into_iter().for_each(|id| self.end(id, Finished::Operation(None, Err(error.clone()))));
    }
}

/// A caller that waits for the communicator's lock.
pub(super) struct Caller<'q>(&'q Submissions);

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        self.0.callers.fetch_sub(1, Ordering::SeqCst);
        drop(self.0.lock());
        self.0.changed.notify_all();
    }
}
