//! Waits that hold no GIL and that Ctrl-C ends.

use pyo3::prelude::*;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a wait looks for signals. Python runs signal handlers on its main thread only, when that thread asks.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A value that another thread sets once.
pub(crate) struct Slot<T> {
    value: Mutex<Option<T>>,
    is_set: Condvar,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { value: Mutex::new(None), is_set: Condvar::new() }
    }
}

impl<T: Send> Slot<T> {
    /// Return the value, if it is set.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<T>> {
        // A value is set in one step.
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Set the value and wake whoever waits.
    pub(crate) fn set(&self, value: T) {
        *self.lock() = Some(value);
        self.is_set.notify_all();
    }

    /// Wait until the value is set, at most for `limit`. Returns whether it is.
    ///
    /// # Errors
    /// What a signal handler raised, as `KeyboardInterrupt`. The value may still be set later.
    pub(crate) fn wait(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<bool> {
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = end.map_or(POLL_INTERVAL, |end| end.saturating_duration_since(Instant::now()));
            if py.detach(|| self.wait_for(left.min(POLL_INTERVAL))) {
                return Ok(true);
            }
            py.check_signals()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return Ok(self.lock().is_some());
            }
        }
    }

    fn wait_for(&self, limit: Duration) -> bool {
        let waited = self.is_set.wait_timeout_while(self.lock(), limit, |value| value.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_some()
    }
}
