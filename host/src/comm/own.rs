//! What a program holds of a communicator: the communicator itself, and handles, which may outlive it.
//!
//! Invariant: when the last of them is gone, so is all that the communicator had: memory, connections, threads. A thread
//! that repairs on the side may be at work on it then; it is told to stop, and waited for.

use super::core::Core;
use super::lost::Lost;
use std::sync::{Arc, Mutex, MutexGuard};

/// A share in a communicator.
#[derive(Debug, Clone)]
pub(super) struct Own {
    // Goes before `core`, so that the thread does not have the last of it.
    last: Arc<Last>,
    core: Arc<Mutex<Core>>,
}

impl Own {
    pub(super) fn new(core: Core) -> Self {
        let last = Arc::new(Last(Arc::clone(&core.lost)));
        let core = Arc::new(Mutex::new(core));
        last.0.serve(&core);
        Self { last, core }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        super::lock(&self.core)
    }

    /// See to handles that were dropped, unless a call runs, which does.
    pub(super) fn reclaim(&self) {
        if let Ok(mut core) = self.core.try_lock() {
            core.reclaim_dropped();
        }
    }

    /// Return what reaches it from outside of its calls.
    pub(super) fn lost(&self) -> &Arc<Lost> {
        &self.last.0
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
