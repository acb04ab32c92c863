//! What runs beside an operation, and may pause it.

use super::ExecError;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// A state machine driven by the executor's poll loop, such as a tree endpoint on its socket.
pub trait Interrupt {
    /// Return a descriptor to poll for input.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Run the state machine: its descriptor is readable, or its time has come. `Break` pauses the operation: its
    /// caller gets control back, and the operation keeps its place.
    ///
    /// # Errors
    /// An error ends the operation, at this and then at all other ranks.
    fn check(&mut self) -> Result<ControlFlow<()>, ExecError>;

    /// Return when [`Self::check`] must run even without input.
    fn wake_at(&self) -> Option<Instant> {
        None
    }

    /// Return another descriptor to poll for input, which others make readable to have [`Self::check`] run.
    fn bell(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A posted message is complete, which the operation is not waiting for. `Break` pauses the operation.
    fn message_completed(&mut self) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// An [`Interrupt`] that does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoInterrupt;

impl Interrupt for NoInterrupt {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        Ok(ControlFlow::Continue(()))
    }
}
