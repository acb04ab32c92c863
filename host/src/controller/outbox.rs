//! Outgoing messages: a bounded queue per peer, flushed by the connection thread, or a stand-in of the test harness.
//!
//! Invariant: queueing a message never waits for the peer.

use super::notifier::ConnectionNotifier;
use serde::Serialize;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use sumac_hal::ctrl::{FrameError, encode_frames};

/// A message encoded in frames, which several outboxes can share.
#[derive(Debug, Clone)]
pub(super) struct Frames(Arc<Counted>);

#[derive(Debug)]
struct Counted {
    bytes: Vec<u8>,
    /// The byte count that it is charged to, once it has been queued.
    budget: OnceLock<Arc<AtomicUsize>>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(budget) = self.budget.get() {
            budget.fetch_sub(self.bytes.len(), Ordering::AcqRel);
        }
    }
}

impl Frames {
    pub(super) fn of<M: Serialize>(message: &M) -> Result<Self, FrameError> {
        encode_frames(message).map(Self::new)
    }

    /// Wrap encoded frames.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Counted { bytes, budget: OnceLock::new() }))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }

    /// Charge the bytes to `budget`, once, however many peers they are queued for.
    fn count(&self, budget: &Arc<AtomicUsize>) {
        self.0.budget.get_or_init(|| {
            budget.fetch_add(self.0.bytes.len(), Ordering::AcqRel);
            Arc::clone(budget)
        });
    }
}

/// A non-blocking sink for messages to one peer.
pub(super) trait MessageSink: Send + Sync + Debug {
    /// Queue a message; its parts stay together. Returns false if the connection has ended, or ends now because the
    /// peer does not read.
    fn put(&self, parts: &[Frames]) -> bool;

    /// Close the connection after an attempt to send what is queued.
    fn disconnect(&self);
}

/// The messages queued for a connection.
#[derive(Debug)]
pub(super) struct Outbox {
    pending: Mutex<Pending>,
    conn: u64,
    limit: usize,
    /// Bytes queued for all connections. Not enforced here: the connection thread decides which peer to disconnect.
    all: Arc<AtomicUsize>,
    notifier: Arc<ConnectionNotifier>,
}

#[derive(Debug, Default)]
struct Pending {
    queue: VecDeque<Frames>,
    /// How many bytes of the first message were sent.
    sent: usize,
    bytes: usize,
    is_closed: bool,
    /// Whether the connection thread has been notified.
    is_notified: bool,
}

/// The result of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlushStatus {
    /// The queue is empty.
    Drained,
    /// The peer accepts no more for now; whether it accepted some.
    Blocked { has_progressed: bool },
    /// The connection must be closed.
    Closed,
}

/// Overhead charged per queued message, so that many small ones count.
const FRAME_COST_BYTES: usize = 64;

impl Outbox {
    pub(super) fn new(conn: u64, limit: usize, all: Arc<AtomicUsize>, notifier: Arc<ConnectionNotifier>) -> Self {
        Self { pending: Mutex::default(), conn, limit, all, notifier }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accept no more messages and drop the queue.
    pub(super) fn close(&self) {
        let mut pending = self.lock();
        *pending = Pending { is_closed: true, is_notified: true, ..Pending::default() };
    }

    /// The number of queued bytes.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Send as much as the peer accepts.
    pub(super) fn flush(&self, mut stream: impl Write) -> FlushStatus {
        let mut pending = self.lock();
        pending.is_notified = false;
        let mut has_progressed = false;
        while let Some(first) = pending.queue.front().cloned() {
            match stream.write(&first.bytes()[pending.sent..]) {
                Ok(0) => return FlushStatus::Closed,
                Ok(len) => {
                    has_progressed = true;
                    pending.sent += len;
                    if pending.sent == first.bytes().len() {
                        pending.queue.pop_front();
                        pending.sent = 0;
                        pending.bytes -= first.bytes().len() + FRAME_COST_BYTES;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !pending.is_closed => {
                    return FlushStatus::Blocked { has_progressed };
                }
                Err(_) => return FlushStatus::Closed,
            }
        }
        if pending.is_closed { FlushStatus::Closed } else { FlushStatus::Drained }
    }

    fn notify(&self, pending: &mut Pending) {
        if !std::mem::replace(&mut pending.is_notified, true) {
            self.notifier.mark_ready(self.conn);
        }
    }
}

impl MessageSink for Arc<Outbox> {
    fn put(&self, parts: &[Frames]) -> bool {
        let mut pending = self.lock();
        if pending.is_closed {
            return false;
        }
        let bytes = pending.bytes + parts.iter().map(|part| part.bytes().len() + FRAME_COST_BYTES).sum::<usize>();
        let is_within = bytes <= self.limit;
        if is_within {
            parts.iter().for_each(|part| part.count(&self.all));
            pending.queue.extend(parts.iter().cloned());
            pending.bytes = bytes;
        } else {
            tracing::warn!(waiting_bytes = pending.bytes, "peer does not read; disconnecting it at its output limit");
            // Drop the queue: the peer will not read it.
            (pending.is_closed, pending.sent, pending.bytes) = (true, 0, 0);
            pending.queue.clear();
        }
        self.notify(&mut pending);
        is_within
    }

    fn disconnect(&self) {
        let mut pending = self.lock();
        pending.is_closed = true;
        self.notify(&mut pending);
    }
}

/// Discards all messages, for tests.
#[cfg(test)]
#[derive(Debug)]
pub(super) struct NullSink;

#[cfg(test)]
impl MessageSink for NullSink {
    fn put(&self, _: &[Frames]) -> bool {
        true
    }

    fn disconnect(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accepts this many bytes and then blocks.
    struct LimitedWriter(usize);

    impl Write for LimitedWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0 == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let len = bytes.len().min(self.0);
            self.0 -= len;
            Ok(len)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn outbox(limit: usize, all: &Arc<AtomicUsize>) -> Arc<Outbox> {
        Arc::new(Outbox::new(7, limit, Arc::clone(all), Arc::new(ConnectionNotifier::new().expect("a descriptor"))))
    }

    #[test]
    fn peer_that_does_not_read_is_disconnected_at_its_limit() {
        let outbox = outbox(1000, &Arc::default());
        let frame = Frames::new(vec![0; 100]);
        let taken = (0..100).take_while(|_| outbox.put(std::slice::from_ref(&frame))).count();
        assert_eq!(taken, 1000 / (100 + FRAME_COST_BYTES));
        assert_eq!(outbox.flush(LimitedWriter(0)), FlushStatus::Closed);
    }

    #[test]
    fn shared_frames_count_once_until_the_last_copy_is_sent() {
        let all = Arc::default();
        let (one, other) = (outbox(5000, &all), outbox(5000, &all));
        let shared = Frames::new(vec![0; 1000]);
        assert!(one.put(std::slice::from_ref(&shared)) && other.put(std::slice::from_ref(&shared)));
        assert_eq!(all.load(Ordering::Acquire), 1000);
        assert_eq!((one.waiting_bytes(), other.waiting_bytes()), (1000 + FRAME_COST_BYTES, 1000 + FRAME_COST_BYTES));
        other.close();
        assert_eq!(all.load(Ordering::Acquire), 1000, "still queued for one peer");
        drop(shared);
        assert_eq!(one.flush(LimitedWriter(1 << 20)), FlushStatus::Drained);
        assert_eq!(all.load(Ordering::Acquire), 0);
    }

    #[test]
    fn partial_writes_resume_where_they_stopped() {
        let outbox = outbox(5000, &Arc::default());
        assert!(outbox.put(&[Frames::new(vec![1; 100]), Frames::new(vec![2; 100])]));
        assert_eq!(outbox.flush(LimitedWriter(150)), FlushStatus::Blocked { has_progressed: true });
        assert_eq!(outbox.flush(LimitedWriter(0)), FlushStatus::Blocked { has_progressed: false });
        outbox.disconnect();
        let mut rest = Vec::new();
        assert_eq!(outbox.flush(&mut rest), FlushStatus::Closed);
        assert_eq!(rest, [2; 50], "queued data is still sent after a disconnect");
    }
}
