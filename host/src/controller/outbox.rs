//! Outgoing messages: a bounded queue per peer. With a key they are encrypted as they are sent, so that what several
//! peers share is queued once.
//!
//! Invariant: queueing a message never waits for the peer.

use serde::Serialize;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use sumac_hal::ctrl::secure::{RECORD_OVERHEAD_LEN, RECORD_PLAINTEXT_MAX, RecordError, Sealer};
use sumac_hal::ctrl::{FrameError, encode_frames};
use sumac_hal::planted;

/// A message encoded in frames, which several outboxes can share.
#[derive(Debug, Clone)]
pub struct Frames(Arc<Counted>);

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

    /// The encoded bytes.
    pub fn bytes(&self) -> &[u8] {
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

/// The messages queued for a connection.
#[derive(Debug)]
pub(super) struct Outbox {
    queue: VecDeque<Frames>,
    /// How many bytes of the first message were sent.
    sent: usize,
    bytes: usize,
    is_closed: bool,
    limit: usize,
    /// Bytes queued for all connections. Not enforced here: the connections decide which peer to disconnect.
    all: Arc<AtomicUsize>,
    /// Encrypts what is sent, except for the first `plain` messages of the queue.
    sealer: Option<Box<Sealing>>,
    plain: usize,
    #[cfg(feature = "planted")]
    pub(super) bug: Option<sumac_hal::planted::Bug>,
}

/// A cipher, and the record that is being sent.
#[derive(Debug)]
struct Sealing {
    sealer: Sealer,
    record: Vec<u8>,
    /// How many bytes of the record were sent.
    sent: usize,
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
    pub(super) const fn new(limit: usize, all: Arc<AtomicUsize>) -> Self {
        Self {
            queue: VecDeque::new(),
            sent: 0,
            bytes: 0,
            is_closed: false,
            limit,
            all,
            sealer: None,
            plain: 0,
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// The number of queued bytes.
    pub(super) const fn waiting_bytes(&self) -> usize {
        self.bytes
    }

    /// Queue a message; its parts stay together. If the peer reads too slowly, its queue is dropped, and the connection
    /// closes with the next flush.
    pub(super) fn put(&mut self, parts: &[Frames]) {
        if self.is_closed {
            return;
        }
        let bytes = self.bytes + parts.iter().map(|part| part.bytes().len() + FRAME_COST_BYTES).sum::<usize>();
        if bytes <= self.limit || planted!(self, OutputUnbounded) {
            parts.iter().for_each(|part| part.count(&self.all));
            self.queue.extend(parts.iter().cloned());
            self.bytes = bytes;
        } else {
            tracing::warn!(waiting_bytes = self.bytes, "peer does not read; disconnecting it at its output limit");
            (self.is_closed, self.sent, self.bytes, self.plain) = (true, 0, 0, 0);
            self.queue.clear();
        }
    }

    /// Close the connection after an attempt to send what is queued.
    pub(super) const fn close(&mut self) {
        self.is_closed = true;
    }

    /// Encrypt what is queued from now on.
    pub(super) fn seal_from_here(&mut self, sealer: Sealer) {
        self.plain = self.queue.len();
        self.sealer = Some(Box::new(Sealing { sealer, record: Vec::new(), sent: 0 }));
    }

    /// Count bytes of the first message as sent.
    fn advance(&mut self, len: usize) {
        let Some(first) = self.queue.front() else { return };
        self.sent += len;
        if self.sent == first.bytes().len() {
            self.bytes -= first.bytes().len() + FRAME_COST_BYTES;
            self.sent = 0;
            self.plain = self.plain.saturating_sub(1);
            self.queue.pop_front();
        }
    }

    /// Put the next bytes into a record, unless one is being sent. False if there are none.
    fn seal(&mut self) -> Result<bool, RecordError> {
        let Some(sealing) = self.sealer.as_mut().filter(|_| self.plain == 0) else { return Ok(false) };
        if sealing.sent < sealing.record.len() {
            return Ok(true);
        }
        let Some(first) = self.queue.front() else { return Ok(false) };
        let rest = &first.bytes()[self.sent..];
        let text = &rest[..rest.len().min(RECORD_PLAINTEXT_MAX)];
        sealing.record.resize(text.len() + RECORD_OVERHEAD_LEN, 0);
        sealing.sealer.seal(text, &mut sealing.record)?;
        sealing.sent = 0;
        let len = text.len();
        self.advance(len);
        Ok(true)
    }

    /// Send as much as the peer accepts.
    pub(super) fn flush(&mut self, mut stream: impl Write) -> FlushStatus {
        let mut has_progressed = false;
        loop {
            let Ok(has_record) = self.seal() else { return FlushStatus::Closed };
            let next = match (&self.sealer, self.queue.front()) {
                (Some(sealing), _) if has_record => &sealing.record[sealing.sent..],
                (_, Some(first)) => &first.bytes()[self.sent..],
                (_, None) => break,
            };
            match stream.write(next) {
                Ok(0) => return FlushStatus::Closed,
                Ok(len) => {
                    has_progressed = true;
                    match &mut self.sealer {
                        Some(sealing) if has_record => sealing.sent += len,
                        _ => self.advance(len),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.is_closed => {
                    return FlushStatus::Blocked { has_progressed };
                }
                Err(_) => return FlushStatus::Closed,
            }
        }
        if self.is_closed { FlushStatus::Closed } else { FlushStatus::Drained }
    }
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

    #[test]
    fn peer_that_does_not_read_is_disconnected_at_its_limit() {
        let mut outbox = Outbox::new(1000, Arc::default());
        let frame = Frames::new(vec![0; 100]);
        for _ in 0..1000 / (100 + FRAME_COST_BYTES) {
            outbox.put(std::slice::from_ref(&frame));
            assert_eq!(outbox.flush(LimitedWriter(0)), FlushStatus::Blocked { has_progressed: false });
        }
        outbox.put(std::slice::from_ref(&frame));
        assert_eq!((outbox.waiting_bytes(), outbox.flush(LimitedWriter(0))), (0, FlushStatus::Closed));
    }

    #[test]
    fn shared_frames_count_once_until_the_last_copy_is_sent() {
        let all = Arc::default();
        let (mut one, mut other) = (Outbox::new(5000, Arc::clone(&all)), Outbox::new(5000, Arc::clone(&all)));
        let shared = Frames::new(vec![0; 1000]);
        one.put(std::slice::from_ref(&shared));
        other.put(std::slice::from_ref(&shared));
        assert_eq!(all.load(Ordering::Acquire), 1000);
        assert_eq!((one.waiting_bytes(), other.waiting_bytes()), (1000 + FRAME_COST_BYTES, 1000 + FRAME_COST_BYTES));
        drop(other);
        assert_eq!(all.load(Ordering::Acquire), 1000, "still queued for one peer");
        drop(shared);
        assert_eq!(one.flush(LimitedWriter(1 << 20)), FlushStatus::Drained);
        assert_eq!(all.load(Ordering::Acquire), 0);
    }

    #[test]
    fn partial_writes_resume_where_they_stopped() {
        let mut outbox = Outbox::new(5000, Arc::default());
        outbox.put(&[Frames::new(vec![1; 100]), Frames::new(vec![2; 100])]);
        assert_eq!(outbox.flush(LimitedWriter(150)), FlushStatus::Blocked { has_progressed: true });
        assert_eq!(outbox.flush(LimitedWriter(0)), FlushStatus::Blocked { has_progressed: false });
        outbox.close();
        let mut rest = Vec::new();
        assert_eq!(outbox.flush(&mut rest), FlushStatus::Closed);
        assert_eq!(rest, [2; 50], "queued data is still sent after a disconnect");
    }
}
