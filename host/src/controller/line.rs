//! The way to a peer that is told things: a queue of bounded length that a thread of its own empties into a connection, or
//! what a rehearsal carries in its place.
//!
//! Invariant: nobody who puts something there waits for the peer.

use super::wakeup::Wakeup;
use serde::Serialize;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use sumac_hal::ctrl::{FrameError, encode_frames};

/// A message in its frames, which several peers may be sent.
#[derive(Debug, Clone)]
pub(super) struct Frames(Arc<Counted>);

#[derive(Debug)]
struct Counted {
    bytes: Vec<u8>,
    /// Where it counts, since it was first queued.
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

    /// Take what is encoded.
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Counted { bytes, budget: OnceLock::new() }))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }

    /// Count the bytes, once, whoever waits for them.
    fn count(&self, budget: &Arc<AtomicUsize>) {
        self.0.budget.get_or_init(|| {
            budget.fetch_add(self.0.bytes.len(), Ordering::AcqRel);
            Arc::clone(budget)
        });
    }
}

/// Takes messages towards one peer, without waiting for it.
pub(super) trait Line: Send + Sync + Debug {
    /// Queue a message, whose parts stay together. False if the connection has ended, or ends now because the peer does not
    /// read.
    fn put(&self, parts: &[Frames]) -> bool;

    /// End the connection, once what is queued has had its chance.
    fn hang_up(&self);
}

/// What waits to be sent on a connection.
#[derive(Debug)]
pub(super) struct Outbox {
    pending: Mutex<Pending>,
    conn: u64,
    limit: usize,
    /// What waits to be sent on all connections, in bytes. Who adds to it is not who is to blame if it is too much: that is
    /// seen to by who has the connections.
    all: Arc<AtomicUsize>,
    wakeup: Arc<Wakeup>,
}

#[derive(Debug, Default)]
struct Pending {
    queue: VecDeque<Frames>,
    /// How much of the first was sent.
    sent: usize,
    bytes: usize,
    is_over: bool,
    /// Whether the connection's thread knows that there is something to do.
    is_noted: bool,
}

/// What came of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sending {
    /// Nothing waits.
    Empty,
    /// The peer takes no more now; whether it took some.
    Blocked { has_moved: bool },
    /// The connection is to end.
    Over,
}

/// What a frame in the queue takes beside its bytes: many small ones count for what they are.
const FRAME_COST_BYTES: usize = 64;

impl Outbox {
    pub(super) fn new(conn: u64, limit: usize, all: Arc<AtomicUsize>, wakeup: Arc<Wakeup>) -> Self {
        Self { pending: Mutex::default(), conn, limit, all, wakeup }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing more is taken, and nothing is sent.
    pub(super) fn close(&self) {
        let mut pending = self.lock();
        *pending = Pending { is_over: true, is_noted: true, ..Pending::default() };
    }

    /// Return how much waits.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Send what the peer takes.
    pub(super) fn flush(&self, mut stream: impl Write) -> Sending {
        let mut pending = self.lock();
        pending.is_noted = false;
        let mut has_moved = false;
        while let Some(first) = pending.queue.front().cloned() {
            match stream.write(&first.bytes()[pending.sent..]) {
                Ok(0) => return Sending::Over,
                Ok(len) => {
                    has_moved = true;
                    pending.sent += len;
                    if pending.sent == first.bytes().len() {
                        pending.queue.pop_front();
                        pending.sent = 0;
                        pending.bytes -= first.bytes().len() + FRAME_COST_BYTES;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !pending.is_over => {
                    return Sending::Blocked { has_moved };
                }
                Err(_) => return Sending::Over,
            }
        }
        if pending.is_over { Sending::Over } else { Sending::Empty }
    }

    fn note(&self, pending: &mut Pending) {
        if !std::mem::replace(&mut pending.is_noted, true) {
            self.wakeup.note(self.conn);
        }
    }
}

impl Line for Arc<Outbox> {
    fn put(&self, parts: &[Frames]) -> bool {
        let mut pending = self.lock();
        if pending.is_over {
            return false;
        }
        let bytes = pending.bytes + parts.iter().map(|part| part.bytes().len() + FRAME_COST_BYTES).sum::<usize>();
        let is_within = bytes <= self.limit;
        if is_within {
            parts.iter().for_each(|part| part.count(&self.all));
            pending.queue.extend(parts.iter().cloned());
            pending.bytes = bytes;
        } else {
            tracing::warn!(waiting_bytes = pending.bytes, "a peer does not read what it is sent: hung up on");
            // What it has not read by now it never will.
            (pending.is_over, pending.sent, pending.bytes) = (true, 0, 0);
            pending.queue.clear();
        }
        self.note(&mut pending);
        is_within
    }

    fn hang_up(&self) {
        let mut pending = self.lock();
        pending.is_over = true;
        self.note(&mut pending);
    }
}

/// Leads nowhere, for tests.
#[cfg(test)]
#[derive(Debug)]
pub(super) struct NoLine;

#[cfg(test)]
impl Line for NoLine {
    fn put(&self, _: &[Frames]) -> bool {
        true
    }

    fn hang_up(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so many bytes and then blocks.
    struct Narrow(usize);

    impl Write for Narrow {
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
        Arc::new(Outbox::new(7, limit, Arc::clone(all), Arc::new(Wakeup::new().expect("a descriptor"))))
    }

    #[test]
    fn peer_that_does_not_read_is_hung_up_on_at_its_limit() {
        let outbox = outbox(1000, &Arc::default());
        let frame = Frames::new(vec![0; 100]);
        let taken = (0..100).take_while(|_| outbox.put(std::slice::from_ref(&frame))).count();
        assert_eq!(taken, 1000 / (100 + FRAME_COST_BYTES));
        assert_eq!(outbox.flush(Narrow(0)), Sending::Over);
    }

    #[test]
    fn shared_frames_count_once_and_not_after_they_are_gone() {
        let all = Arc::default();
        let (one, other) = (outbox(5000, &all), outbox(5000, &all));
        let shared = Frames::new(vec![0; 1000]);
        assert!(one.put(std::slice::from_ref(&shared)) && other.put(std::slice::from_ref(&shared)));
        assert_eq!(all.load(Ordering::Acquire), 1000);
        assert_eq!((one.waiting_bytes(), other.waiting_bytes()), (1000 + FRAME_COST_BYTES, 1000 + FRAME_COST_BYTES));
        other.close();
        assert_eq!(all.load(Ordering::Acquire), 1000, "one of them still waits for it");
        drop(shared);
        assert_eq!(one.flush(Narrow(1 << 20)), Sending::Empty);
        assert_eq!(all.load(Ordering::Acquire), 0);
    }

    #[test]
    fn frames_are_sent_in_the_pieces_that_the_peer_takes() {
        let outbox = outbox(5000, &Arc::default());
        assert!(outbox.put(&[Frames::new(vec![1; 100]), Frames::new(vec![2; 100])]));
        assert_eq!(outbox.flush(Narrow(150)), Sending::Blocked { has_moved: true });
        assert_eq!(outbox.flush(Narrow(0)), Sending::Blocked { has_moved: false });
        outbox.hang_up();
        let mut rest = Vec::new();
        assert_eq!(outbox.flush(&mut rest), Sending::Over);
        assert_eq!(rest, [2; 50], "what was said before the end still arrives");
    }
}
