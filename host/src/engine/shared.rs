//! Shared ownership of a communicator's core: by the communicator itself and by handles, which may outlive it.
//!
//! Invariant: dropping the last share frees everything that the communicator had: memory, connections, threads. A
//! thread that changes the view in the background may be using the core at that moment; it is cancelled and joined.

use super::core::{Core, lock, lock_settled};
use super::dropped::Dropped;
use super::error::Error;
use super::notices::Notices;
use super::options::Progress;
use super::progress;
use super::submissions::Submissions;
use super::thread_progress::ThreadProgress;
use crate::schedule::Place;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// A share in a communicator. In a forked child it is inert: it is never locked, because a thread that the child does
/// not have may hold the lock, and dropping it has no effect.
#[derive(Debug, Clone)]
pub(crate) struct SharedCore {
    /// `Some` until it is dropped.
    shares: Option<Shares>,
}

#[derive(Debug, Clone)]
pub(super) struct Shares {
    // Dropped before `core`, so that the background thread never drops the last reference to it.
    guard: Arc<ShutdownGuard>,
    core: Arc<Mutex<Core>>,
    name: Arc<str>,
    /// Where work is submitted to the progress thread, if there is one.
    submissions: Option<Arc<Submissions>>,
    /// The default deadline of calls.
    pub(super) deadline: Duration,
    pub(super) place: Place,
}

impl SharedCore {
    /// Share a core, and start its progress thread if it is configured to have one.
    ///
    /// # Errors
    /// The system's, if there is no thread or descriptor.
    pub(crate) fn new(mut core: Core) -> io::Result<Self> {
        let (name, deadline) = (Arc::from(core.config().job.as_str()), core.config().deadline);
        let place = core.place();
        let guard = Arc::new(ShutdownGuard(Arc::clone(core.notices())));
        let submissions = match core.config().progress.unwrap_or_default() {
            Progress::Caller => None,
            Progress::Thread => Some(Arc::new(Submissions::new()?)),
        };
        core.set_progress(submissions.clone().map(ThreadProgress::new));
        let core = Arc::new(Mutex::new(core));
        if let Some(submissions) = &submissions {
            let thread = progress::start(Arc::downgrade(&core), Arc::clone(submissions))?;
            guard.0.set_progress(Arc::clone(submissions), thread);
        }
        let weak = Arc::downgrade(&core);
        guard.0.set_on_question(move || {
            if let Some(core) = weak.upgrade() {
                lock(&core).change_view_if_requested();
            }
        });
        Ok(Self { shares: Some(Shares { guard, core, name, submissions, deadline, place }) })
    }

    #[inline]
    pub(super) fn shares(&self) -> &Shares {
        self.shares.as_ref().expect("shares are present until drop")
    }

    /// Lock the core. The progress thread lets go of it as soon as no host collective runs.
    ///
    /// # Errors
    /// [`Error::Forked`].
    #[inline]
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Core>, Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        let shares = self.shares();
        let Some(submissions) = &shares.submissions else { return Ok(lock(&shares.core)) };
        Ok(self.lock_before_thread(submissions))
    }

    /// Lock the core to run a prepared operation, if callers make progress.
    ///
    /// # Errors
    /// [`Error::Forked`].
    #[inline]
    pub(crate) fn lock_settled(&self) -> Result<MutexGuard<'_, Core>, Error> {
        if self.is_forked() { Err(Error::Forked) } else { Ok(lock_settled(&self.shares().core)) }
    }

    fn lock_before_thread(&self, submissions: &Submissions) -> MutexGuard<'_, Core> {
        let _caller = submissions.call();
        self.notices().wake();
        lock(&self.shares().core)
    }

    /// Return where work is submitted to the progress thread; `None` if callers make progress.
    pub(super) fn submissions(&self) -> Option<&Arc<Submissions>> {
        self.shares().submissions.as_ref()
    }

    /// Return whether this process was forked from the one that joined.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.notices().is_forked()
    }

    /// Return the communicator's name.
    pub(crate) fn name(&self) -> &str {
        &self.shares().name
    }

    /// Queue a dropped handle by `push`, and process the queue unless a call is running, which does.
    pub(crate) fn reclaim(&self, push: impl FnOnce(&Dropped)) {
        if self.is_forked() {
            return;
        }
        self.notices().push_dropped(push);
        if let Ok(mut core) = self.shares().core.try_lock() {
            core.unsettle();
            core.reclaim_dropped();
        }
    }

    /// Return the notices that arrive outside of calls.
    #[inline]
    pub(crate) fn notices(&self) -> &Arc<Notices> {
        &self.shares().guard.0
    }
}

impl Drop for SharedCore {
    fn drop(&mut self) {
        if self.is_forked() {
            std::mem::forget(self.shares.take());
        }
    }
}

/// Shuts the communicator down when the last share is dropped.
#[derive(Debug)]
struct ShutdownGuard(Arc<Notices>);

impl Drop for ShutdownGuard {
    fn drop(&mut self) {
        self.0.cancel();
        self.0.join_threads();
    }
}
