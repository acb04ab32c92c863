//! Wakes the connection thread and tells it which connections have output.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// The connections with queued output, and an eventfd that wakes their thread.
#[derive(Debug)]
pub(super) struct ConnectionNotifier {
    conns: Mutex<Vec<u64>>,
    event: OwnedFd,
}

impl ConnectionNotifier {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { conns: Mutex::default(), event })
    }

    /// The descriptor that becomes readable on a wake-up.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Mark a connection as ready and wake the thread.
    pub(super) fn mark_ready(&self, conn: u64) {
        self.conns.lock().unwrap_or_else(PoisonError::into_inner).push(conn);
        self.wake();
    }

    pub(super) fn wake(&self) {
        // Fails only if the counter is saturated, in which case the descriptor is readable anyway.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Take the connections that were marked since the last call.
    pub(super) fn take_ready(&self) -> Vec<u64> {
        // Clear the event first: connections marked from here on wake the thread again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        std::mem::take(&mut self.conns.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
