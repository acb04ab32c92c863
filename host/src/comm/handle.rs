//! Handles of asynchronous operations.

use super::{CallOptions, Error, Outcome, OwnedBuffer};
use crate::engine::SharedCore;
use std::marker::PhantomData;
use std::time::Duration;

/// An operation that has been started, and owns its buffer.
///
/// Dropping the handle detaches the operation: it continues, because the other ranks need it, and the communicator
/// frees the buffer in the call that sees it complete. Forgetting it ([`std::mem::forget`]) is safe: the communicator
/// then keeps the buffer for its lifetime.
#[derive(Debug)]
#[must_use = "`wait` returns the buffer with the result"]
pub struct Handle<B> {
    core: SharedCore,
    id: u64,
    buffer: PhantomData<fn() -> B>,
    /// Whether the communicator has returned the buffer.
    is_finished: bool,
}

impl<B: OwnedBuffer> Handle<B> {
    pub(super) const fn new(core: SharedCore, id: u64) -> Self {
        Self { core, id, buffer: PhantomData, is_finished: false }
    }

    /// Return whether the operation has completed or failed, so that [`Handle::wait`] returns at once. For an operation
    /// in the tree this does not block; a host collective that has not run yet runs here. The communicator's deadline
    /// counts from the first call.
    pub fn test(&mut self) -> bool {
        self.core.lock().map_or(true, |mut core| core.test(self.id, &CallOptions::default()))
    }

    /// Wait for the operation and return its buffer, which holds the result, within the communicator's deadline.
    ///
    /// # Errors
    /// [`Error`] if the operation failed. The buffer is lost.
    pub fn wait(self) -> Result<(B, Outcome), Error> {
        self.finish(&CallOptions::default())
    }

    /// Wait for the operation as [`Handle::wait`] does, for at most `deadline`. If the deadline passes, the
    /// communicator ends, because other ranks may have the result already.
    ///
    /// # Errors
    /// [`Error`] if the operation failed. The buffer is lost.
    pub fn wait_for(self, deadline: Duration) -> Result<(B, Outcome), Error> {
        self.finish(&CallOptions { deadline: Some(deadline), ..CallOptions::default() })
    }

    fn finish(mut self, options: &CallOptions) -> Result<(B, Outcome), Error> {
        let (buffer, result) = self.core.lock()?.finish(self.id, options);
        self.is_finished = true;
        let outcome = result?;
        let buffer = buffer.and_then(|owned| owned.into_result().into_any().downcast::<B>().ok());
        buffer
            .map(|buffer| (*buffer, outcome))
            .ok_or_else(|| Error::Argument("the buffer of this handle is gone".into()))
    }
}

impl<B> Drop for Handle<B> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.core.reclaim(|dropped| dropped.push(self.id));
        }
    }
}
