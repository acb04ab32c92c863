//! What the state machine sends: encoded messages and ends of connections, in order, until they are polled.

use super::outbox::Frames;
use super::proto::ClientReply;
use std::collections::VecDeque;
use sumac_hal::ctrl::{Envelope, FrameError, Request};

/// A connection, numbered by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// An output on a connection.
#[derive(Debug, Clone)]
pub enum Output {
    /// Encoded messages, which stay together.
    Frames(Vec<Frames>),
    /// Close the connection after an attempt to send what is queued, and report its end.
    Close,
}

/// Outputs that were not polled yet.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    queue: VecDeque<(ConnId, Output)>,
}

impl Outputs {
    /// Send a message to a client. If it cannot be encoded, close the connection.
    pub(super) fn send(&mut self, conn: ConnId, reply: &ClientReply) {
        match Frames::of(reply) {
            Ok(frames) => self.put(conn, vec![frames]),
            Err(error) => {
                tracing::error!(%error, "cannot encode a message; disconnecting the client");
                self.close(conn);
            }
        }
    }

    /// Send an encoded message to several clients, which share it.
    pub(super) fn broadcast(&mut self, conns: impl Iterator<Item = ConnId>, frames: Result<Frames, FrameError>) {
        match frames {
            Ok(frames) => conns.for_each(|conn| self.put(conn, vec![frames.clone()])),
            Err(error) => tracing::error!(%error, "cannot encode a message to the ranks"),
        }
    }

    /// Send a request to a device. Returns false if it cannot be encoded.
    pub(super) fn request(&mut self, conn: ConnId, request: &Envelope<Request>) -> bool {
        Frames::of(request).map(|frames| self.put(conn, vec![frames])).is_ok()
    }

    /// Send encoded messages, which stay together.
    pub(super) fn put(&mut self, conn: ConnId, parts: Vec<Frames>) {
        self.queue.push_back((conn, Output::Frames(parts)));
    }

    /// Close a connection.
    pub(super) fn close(&mut self, conn: ConnId) {
        self.queue.push_back((conn, Output::Close));
    }

    pub(super) fn pop(&mut self) -> Option<(ConnId, Output)> {
        self.queue.pop_front()
    }
}
