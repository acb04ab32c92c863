//! Wakes the thread of the connections, and says for which there is something to do.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Connections with something to send, and what wakes who sends it.
#[derive(Debug)]
pub(super) struct Wakeup {
    conns: Mutex<Vec<u64>>,
    event: OwnedFd,
}

impl Wakeup {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { conns: Mutex::default(), event })
    }

    /// Return what becomes readable.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// There is something to do for a connection.
    pub(super) fn note(&self, conn: u64) {
        self.conns.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
        self.wake();
    }

    pub(super) fn wake(&self) {
        // Fails only where the count is at its end: then it is readable.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Return the connections since the last time.
    pub(super) fn take(&self) -> Vec<u64> {
        // First the event: what is noted from here on wakes again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        std::mem::take(&mut self.conns.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
