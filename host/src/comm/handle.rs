//! Handles of started operations.

use super::error::Error;
use super::own::Own;
use super::{CallOptions, Held, Outcome};
use std::marker::PhantomData;
use std::time::Duration;

/// A started operation.
///
/// Dropping it abandons the operation, which goes on, as the other ranks need it: the communicator drops the buffer when
/// it has completed, in the call that sees that. Forgetting it ([`std::mem::forget`]) is safe: the communicator then keeps
/// the buffer for good.
#[derive(Debug)]
#[must_use = "a started operation gives its buffer back when it is waited for"]
pub struct Handle<B> {
    own: Own,
    id: u64,
    buffer: PhantomData<fn() -> B>,
    /// The communicator has given the buffer back.
    is_finished: bool,
}

impl<B: Held> Handle<B> {
    pub(super) const fn new(own: Own, id: u64) -> Self {
        Self { own, id, buffer: PhantomData, is_finished: false }
    }

    /// Tell whether the operation has ended, with a result or an error that [`Handle::wait`] returns at once, without
    /// waiting for it if it goes through the tree; a schedule is run here if it has not been. The communicator's
    /// deadline counts from the first test on.
    pub fn test(&mut self) -> bool {
        self.own.lock().map_or(true, |mut core| core.test(self.id, &CallOptions::default()))
    }

    /// Wait for the operation, and get the buffer with the result.
    ///
    /// # Errors
    /// [`Error`].
    pub fn wait(self) -> Result<(B, Outcome), Error> {
        self.finish(&CallOptions::default())
    }

    /// Wait at most `deadline` from now. A deadline that passes ends the communicator, as other ranks may have the
    /// result already.
    ///
    /// # Errors
    /// [`Error`].
    pub fn wait_for(self, deadline: Duration) -> Result<(B, Outcome), Error> {
        self.finish(&CallOptions { deadline: Some(deadline), ..CallOptions::default() })
    }

    fn finish(mut self, options: &CallOptions) -> Result<(B, Outcome), Error> {
        let (buffer, result) = self.own.lock()?.finish(self.id, options);
        self.is_finished = true;
        let outcome = result?;
        let buffer = buffer.and_then(|owned| owned.into_result().into_any().downcast::<B>().ok());
        buffer.map(|buffer| (*buffer, outcome)).ok_or_else(|| Error::Argument("the handle's buffer is gone".into()))
    }
}

impl<B> Drop for Handle<B> {
    fn drop(&mut self) {
        if !self.is_finished {
            self.own.reclaim(|dropped| dropped.push(self.id));
        }
    }
}
