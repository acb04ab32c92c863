//! The memory that a posted message owns, which comes back whether or not the message is posted.

use crate::exec::ExecError;
use std::any::Any;
use std::fmt;

/// Memory owned by a posted message until it is complete.
pub trait MessageBuffer: std::marker::Send {
    /// Return the payload.
    fn bytes(&self) -> &[u8];
    /// Return the destination of the payload, as long as [`Self::bytes`].
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Return the buffer in its original type.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl MessageBuffer for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Why a message could not be posted, and its memory.
pub struct PostError {
    /// What went wrong.
    pub error: ExecError,
    /// The memory that was passed.
    pub buffer: Box<dyn MessageBuffer>,
}

impl fmt::Debug for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostError").field("error", &self.error).finish_non_exhaustive()
    }
}
