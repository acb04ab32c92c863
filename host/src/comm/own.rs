//! What a program holds of a communicator: the communicator itself, and handles, which may outlive it.
//!
//! Invariant: when the last of them is gone, so is all that the communicator had: memory, connections, threads. A thread
//! that repairs on the side may be at work on it then; it is told to stop, and waited for.

use super::core::Core;
use super::dropped::Dropped;
use super::error::Error;
use super::lost::Lost;
use std::sync::{Arc, Mutex, MutexGuard};

/// A share in a communicator. In a forked child it is nobody's: it is not locked, as the lock may be held by a thread that
/// the child does not have, and dropping it does nothing.
#[derive(Debug, Clone)]
pub(super) struct Own {
    /// There until it is dropped.
    shares: Option<Shares>,
}

#[derive(Debug, Clone)]
struct Shares {
    // Goes before `core`, so that the thread does not have the last of it.
    last: Arc<Last>,
    core: Arc<Mutex<Core>>,
    name: Arc<str>,
}

impl Own {
    pub(super) fn new(core: Core) -> Self {
        let name = Arc::from(core.config.job.as_str());
        let last = Arc::new(Last(Arc::clone(&core.lost)));
        let core = Arc::new(Mutex::new(core));
        last.0.serve(&core);
        Self { shares: Some(Shares { last, core, name }) }
    }

    fn shares(&self) -> &Shares {
        self.shares.as_ref().expect("it is there until it is dropped")
    }

    /// Lock the communicator.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Core>, Error> {
        if self.is_forked() { Err(Error::Forked) } else { Ok(super::lock(&self.shares().core)) }
    }

    /// Tell whether this process was forked from the one that joined.
    pub(super) fn is_forked(&self) -> bool {
        self.lost().is_forked()
    }

    /// Return the communicator's name.
    pub(super) fn name(&self) -> &str {
        &self.shares().name
    }

    /// A handle was dropped: note it by `push`, and see to it, unless a call runs, which does.
    pub(super) fn reclaim(&self, push: impl FnOnce(&Dropped)) {
        if self.is_forked() {
            return;
        }
        push(&self.lost().dropped);
        if let Ok(mut core) = self.shares().core.try_lock() {
            core.reclaim_dropped();
        }
    }

    /// Return what reaches it from outside of its calls.
    pub(super) fn lost(&self) -> &Arc<Lost> {
        &self.shares().last.0
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        if self.is_forked() {
            std::mem::forget(self.shares.take());
        }
    }
}

/// Goes with the last share.
#[derive(Debug)]
struct Last(Arc<Lost>);

impl Drop for Last {
    fn drop(&mut self) {
        self.0.cancel();
        self.0.wait_for_served();
    }
}
