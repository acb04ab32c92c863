//! Shared ownership of a communicator's core: by the communicator itself and by handles, which may outlive it.
//!
//! Invariant: dropping the last share frees everything that the communicator had: memory, connections, threads. A
//! thread that changes the view in the background may be using the core at that moment; it is cancelled and joined.

use super::core::Core;
use super::dropped::Dropped;
use super::error::Error;
use super::notices::Notices;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A share in a communicator. In a forked child it is inert: it is never locked, because a thread that the child does
/// not have may hold the lock, and dropping it has no effect.
#[derive(Debug, Clone)]
pub(crate) struct SharedCore {
    /// `Some` until it is dropped.
    shares: Option<Shares>,
}

#[derive(Debug, Clone)]
struct Shares {
    // Dropped before `core`, so that the background thread never drops the last reference to it.
    guard: Arc<ShutdownGuard>,
    core: Arc<Mutex<Core>>,
    name: Arc<str>,
}

impl SharedCore {
    pub(crate) fn new(core: Core) -> Self {
        let name = Arc::from(core.config().job.as_str());
        let guard = Arc::new(ShutdownGuard(Arc::clone(core.notices())));
        let core = Arc::new(Mutex::new(core));
        let weak = Arc::downgrade(&core);
        guard.0.set_on_question(move || {
            if let Some(core) = weak.upgrade() {
                lock(&core).change_view_if_requested();
            }
        });
        Self { shares: Some(Shares { guard, core, name }) }
    }

    fn shares(&self) -> &Shares {
        self.shares.as_ref().expect("shares are present until drop")
    }

    /// Lock the core.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Core>, Error> {
        if self.is_forked() { Err(Error::Forked) } else { Ok(lock(&self.shares().core)) }
    }

    /// Return whether this process was forked from the one that joined.
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
        push(&self.notices().dropped);
        if let Ok(mut core) = self.shares().core.try_lock() {
            core.reclaim_dropped();
        }
    }

    /// Return the notices that arrive outside of calls.
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

pub(crate) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    // A thread that panicked left the protocol state as it was between two packets, which is consistent.
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
