//! Handles of asynchronous operations.

use super::{CallOptions, Error, Outcome, OwnedBuffer, WaitError};
use crate::engine::{ErasedBuffer, Owned, SharedCore, Task};
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
    task: Task,
    buffer: PhantomData<fn() -> B>,
    /// Whether the communicator has returned the buffer.
    is_finished: bool,
}

impl<B: OwnedBuffer> Handle<B> {
    pub(super) const fn new(core: SharedCore, task: Task) -> Self {
        Self { core, task, buffer: PhantomData, is_finished: false }
    }

    /// Return whether the operation has completed or failed, so that [`Handle::wait`] returns at once. With
    /// [`Progress::Thread`](super::Progress::Thread) this does not block. Otherwise it does not for an operation in the
    /// tree; a host collective that has not run yet runs here, and the communicator's deadline counts from the first
    /// call.
    pub fn test(&mut self) -> bool {
        self.core.has_ended(self.task)
    }

    /// Wait for the operation and return its buffer, which holds the result, within the communicator's deadline.
    ///
    /// # Errors
    /// [`WaitError`], with the buffer that was passed to the start, if the operation failed.
    pub fn wait(self) -> Result<(B, Outcome), WaitError<B>> {
        self.finish(&CallOptions::default())
    }

    /// Wait for the operation as [`Handle::wait`] does, for at most `deadline`. If the deadline passes, the
    /// communicator ends, because other ranks may have the result already.
    ///
    /// # Errors
    /// [`WaitError`], with the buffer that was passed to the start, if the operation failed.
    pub fn wait_for(self, deadline: Duration) -> Result<(B, Outcome), WaitError<B>> {
        self.finish(&CallOptions { deadline: Some(deadline), ..CallOptions::default() })
    }

    fn finish(mut self, options: &CallOptions) -> Result<(B, Outcome), WaitError<B>> {
        self.is_finished = true;
        let (owned, result) = self.core.finish(self.task, options).into_operation();
        let typed = |buffer: Box<dyn ErasedBuffer>| buffer.into_any().downcast::<B>().ok().map(|buffer| *buffer);
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(error) => return Err(WaitError { error, buffer: owned.map(Owned::into_memory).and_then(typed) }),
        };
        let gone = || Error::Argument("the buffer of this handle is gone".into());
        let buffer = owned.map(Owned::into_result).and_then(typed);
        buffer.map(|buffer| (buffer, outcome)).ok_or_else(|| WaitError { error: gone(), buffer: None })
    }
}

impl<B> Drop for Handle<B> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.core.detach(self.task);
        }
    }
}
