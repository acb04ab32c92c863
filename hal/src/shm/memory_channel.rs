//! What is left of a connection between two ranks once their streams are set up: a way to hand more memory over.
//!
//! Neither end waits for the other. Memory is handed over under a handle, and withdrawn by it.

use super::socket::{Message, Received, SocketError, receive, send};
use rustix::net::SendFlags;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// A connection over which processes hand memory over, without waiting.
#[derive(Debug)]
pub struct MemoryChannel {
    socket: OwnedFd,
}

impl MemoryChannel {
    pub(super) const fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Hand memory over.
    ///
    /// # Errors
    /// [`SocketError`]; [`SocketError::Timeout`] while the other end has too many messages to receive.
    pub fn hand_over(&self, handle: u64, file: BorrowedFd<'_>) -> Result<(), SocketError> {
        self.send(&Message::Memory { handle }, Some(file))
    }

    /// Say that memory was freed that was handed over under this handle.
    ///
    /// # Errors
    /// As [`MemoryChannel::hand_over`].
    pub fn withdraw(&self, handle: u64) -> Result<(), SocketError> {
        self.send(&Message::Withdrawn { handle }, None)
    }

    fn send(&self, message: &Message, file: Option<BorrowedFd<'_>>) -> Result<(), SocketError> {
        send(&self.socket, (message, file), (Duration::ZERO, SendFlags::DONTWAIT))
    }

    /// Return the next message, if one is there.
    ///
    /// # Errors
    /// [`SocketError`]; after [`SocketError::Malformed`] do not trust the peer any more.
    pub fn receive(&self) -> Result<Option<Received>, SocketError> {
        match receive(&self.socket, Duration::ZERO) {
            Ok(received) => Ok(Some(received)),
            Err(SocketError::Timeout(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
