//! Carries ring entries over a link: on each side a carrier stands in for the rank or device on the other.
//!
//! Invariants:
//! - Entries arrive in order, each once. They wait in their ring for a message, in a message for credit, and on the
//!   receiving side for a place in its ring. Nothing is dropped, and the backlog is bounded.
//! - A side has at most [`CREDITS`] counted messages that the peer has not acknowledged, so [`BUFFERS`] receive buffers
//!   a connection always suffice; a peer that sends more ends its connection.
//! - A turn allocates nothing, except when memory is handed over.

use super::message::{Body, Head, Memory, MessageError};
use super::message::{ENTRIES_LEN_BYTES, HEAD_LEN_BYTES, MESSAGE_LEN_BYTES};
use super::{Arrived, Link, LinkError};
use crate::ring::{Consumer, Poisoned, Producer};
use crate::shm::FunctionRing;
use std::collections::VecDeque;
use std::fmt;
use thiserror::Error;

/// Counted messages that a side may have outstanding.
pub const CREDITS: u32 = 8;

/// Receive buffers that a connection needs: one for each counted message, and for the messages that only return credit,
/// of which there is one for each half of the credits.
pub const BUFFERS: usize = CREDITS as usize + 4;

/// Arrivals consumed from one link in a turn: more than the messages that can be outstanding, plus a run of results.
const ARRIVALS_PER_TURN: usize = 256;

/// The admin queue, and one for data.
const QUEUES: usize = 2;

/// The maximum number of entries in a message, for the shorter entry type.
const BATCH: usize = ENTRIES_LEN_BYTES / 32;

/// Why a carrier failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CarrierError {
    /// The connection has ended.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A malformed message arrived.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The peer acknowledges messages that were not sent.
    #[error("the peer acknowledges {acked} messages, but {sent} were sent and {known} were acknowledged before")]
    Credit {
        /// The peer's count.
        acked: u32,
        /// Messages sent so far.
        sent: u32,
        /// The peer's previous count.
        known: u32,
    },
    /// The peer exceeds its credits.
    #[error("the peer has more than {CREDITS} messages outstanding: it ignores flow control")]
    Flood,
    /// A ring is corrupt, which is a bug of this process.
    #[error(transparent)]
    Ring(#[from] Poisoned),
}

/// What a carrier received besides ring entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CarrierEvent {
    /// The peer has handed memory over.
    Memory(Memory),
    /// A result is complete at this offset of the landing area.
    Landed(u32),
    /// The peer's count of turns.
    Heartbeat(u32),
}

/// Counters of a carrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CarrierStats {
    /// Messages sent, including those that only return credit.
    pub sent_messages: u64,
    /// Entries in them.
    pub sent_entries: u64,
    /// Messages received.
    pub received_messages: u64,
    /// Results announced by the peer.
    pub landed: u64,
}

/// What is to be sent besides ring entries.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Memory to hand over; it is sent before the entries that refer to it.
    memory: VecDeque<Memory>,
    requests_heartbeat: bool,
    is_heartbeat_due: bool,
    /// This side's count of turns.
    heartbeat: u32,
}

/// A message buffer.
type Buffer = Box<[u8; MESSAGE_LEN_BYTES]>;

/// A message whose entries are not all in their ring yet.
struct PendingMessage {
    bytes: Buffer,
    len: usize,
    /// The offset of the first entry that is not.
    at: usize,
    queue: usize,
}

/// One side of a function that spans two hosts: sends entries of `OUT` words and receives entries of `IN` words.
pub struct Carrier<const OUT: usize, const IN: usize> {
    from: [Consumer<FunctionRing<OUT>, OUT>; QUEUES],
    into: [Producer<FunctionRing<IN>, IN>; QUEUES],
    outbox: Outbox,
    /// A message that the link had no room for, and its length; 0 if there is none.
    unsent: (Buffer, usize),
    is_counted: bool,
    /// Messages received whose entries wait for room, oldest first. Later messages are still read, so a full ring
    /// delays neither credit nor heartbeats.
    pending: VecDeque<PendingMessage>,
    /// Buffers for all outstanding messages and the next arrival.
    spare: Vec<Buffer>,
    /// Counted messages, modulo 2^32: sent, and of these acknowledged by the peer; received, of these consumed, and
    /// acknowledged.
    sent: u32,
    sent_acked: u32,
    received: u32,
    consumed: u32,
    received_acked: u32,
    stats: CarrierStats,
}

impl<const OUT: usize, const IN: usize> Carrier<OUT, IN> {
    /// Carry entries out of `from` and into `into`, each an admin queue and a data queue. Nothing else drains or fills
    /// them.
    pub fn new(from: [FunctionRing<OUT>; QUEUES], into: [FunctionRing<IN>; QUEUES]) -> Self {
        let buffer = || Box::new([0; MESSAGE_LEN_BYTES]);
        Self {
            from: from.map(Consumer::new),
            into: into.map(Producer::new),
            outbox: Outbox::default(),
            unsent: (buffer(), 0),
            is_counted: false,
            pending: VecDeque::with_capacity(CREDITS as usize),
            spare: (0..=CREDITS).map(|_| buffer()).collect(),
            sent: 0,
            sent_acked: 0,
            received: 0,
            consumed: 0,
            received_acked: 0,
            stats: CarrierStats::default(),
        }
    }

    /// Hand memory over, ahead of any entry submitted from now on.
    pub fn hand_over(&mut self, memory: Memory) {
        self.outbox.memory.push_back(memory);
    }

    /// Request a heartbeat from the peer.
    pub const fn request_heartbeat(&mut self) {
        self.outbox.requests_heartbeat = true;
    }

    /// Advance this side's heartbeat.
    pub const fn advance_heartbeat(&mut self) {
        self.outbox.heartbeat = self.outbox.heartbeat.wrapping_add(1);
    }

    /// Return the counters.
    pub const fn stats(&self) -> CarrierStats {
        self.stats
    }

    /// Return whether there is something to send, or a received entry now has room in its ring.
    pub fn has_work(&mut self) -> bool {
        let is_out = self.has_credit() && self.from.iter_mut().any(|ring| ring.available() != Ok(0));
        is_out || self.pending.front().is_some_and(|pending| self.into[pending.queue].room() != Ok(0))
    }

    /// Receive all arrivals and send all pending messages; true if there were any.
    ///
    /// # Errors
    /// [`CarrierError`]: the connection has ended. Earlier arrivals were processed.
    pub fn poll(&mut self, link: &mut dyn Link, mut on_event: impl FnMut(CarrierEvent)) -> Result<bool, CarrierError> {
        let received = self.receive(link, &mut on_event)?;
        Ok(self.send(link)? || received)
    }

    fn receive(&mut self, link: &mut dyn Link, on_event: &mut impl FnMut(CarrierEvent)) -> Result<bool, CarrierError> {
        let mut any = self.deliver()?;
        for _ in 0..ARRIVALS_PER_TURN {
            let Some(mut bytes) = self.spare.pop() else { break };
            let arrived = link.receive(&mut bytes);
            let spare = match arrived {
                Ok(Some(Arrived::Message(len))) => self.take(bytes, len, on_event)?,
                _ => Some(bytes),
            };
            self.spare.extend(spare);
            match arrived? {
                None => break,
                Some(Arrived::Landed(offset)) => {
                    self.stats.landed += 1;
                    on_event(CarrierEvent::Landed(offset));
                }
                Some(Arrived::Message(_)) => _ = self.deliver()?,
            }
            any = true;
        }
        Ok(any)
    }

    /// Process a received message; returns its buffer unless entries in it have to wait.
    fn take(
        &mut self,
        bytes: Buffer,
        len: usize,
        on_event: &mut impl FnMut(CarrierEvent),
    ) -> Result<Option<Buffer>, CarrierError> {
        self.stats.received_messages += 1;
        let none = MessageError { len_bytes: len, kind: bytes[0] };
        let message = bytes.get(..len).ok_or(none)?;
        let head = Head::parse(message, IN * 8)?;
        let (acked, sent, known) = (head.consumed, self.sent, self.sent_acked);
        if acked.wrapping_sub(known) > sent.wrapping_sub(known) {
            return Err(CarrierError::Credit { acked, sent, known });
        }
        self.sent_acked = acked;
        self.outbox.is_heartbeat_due |= head.requests_heartbeat;
        on_event(CarrierEvent::Heartbeat(head.heartbeat));
        if head.body == Body::Nothing {
            return Ok(Some(bytes));
        }
        if self.received.wrapping_sub(self.received_acked) >= CREDITS {
            return Err(CarrierError::Flood);
        }
        self.received = self.received.wrapping_add(1);
        if let Body::Entries { queue, .. } = head.body {
            self.pending.push_back(PendingMessage { bytes, len, at: HEAD_LEN_BYTES, queue: queue.into() });
            return Ok(None);
        }
        on_event(CarrierEvent::Memory(Memory::parse(message)?));
        self.consumed = self.consumed.wrapping_add(1);
        Ok(Some(bytes))
    }

    /// Move received entries into their rings as far as there is room; true if any was moved.
    fn deliver(&mut self) -> Result<bool, CarrierError> {
        let mut any = false;
        while let Some(pending) = self.pending.front_mut() {
            while pending.at < pending.len {
                // `Head::parse` ensures that a message holds whole entries.
                let bytes = &pending.bytes[pending.at..];
                let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
                if !self.into[pending.queue].push(&std::array::from_fn(word))? {
                    return Ok(any);
                }
                any = true;
                pending.at += IN * 8;
            }
            self.consumed = self.consumed.wrapping_add(1);
            self.spare.extend(self.pending.pop_front().map(|pending| pending.bytes));
        }
        Ok(any)
    }

    const fn has_credit(&self) -> bool {
        self.sent.wrapping_sub(self.sent_acked) < CREDITS
    }

    fn send(&mut self, link: &mut dyn Link) -> Result<bool, CarrierError> {
        let mut any = false;
        loop {
            if self.unsent.1 == 0 && !self.write()? {
                return Ok(any);
            }
            // Acknowledge everything consumed by now, which may be more than when the message was written.
            let message = &mut self.unsent.0[..self.unsent.1];
            message[4..8].copy_from_slice(&self.consumed.to_le_bytes());
            if !link.send(message)? {
                return Ok(any);
            }
            any = true;
            self.unsent.1 = 0;
            self.received_acked = self.consumed;
            self.sent = self.sent.wrapping_add(u32::from(self.is_counted));
            self.stats.sent_messages += 1;
        }
    }

    /// Write the next message; false if nothing is to be sent.
    fn write(&mut self) -> Result<bool, CarrierError> {
        let (mut body, mut len) = (Body::Nothing, HEAD_LEN_BYTES);
        let has_credit = self.has_credit();
        if has_credit && let Some(memory) = self.outbox.memory.pop_front() {
            (body, len) = (Body::Memory, memory.emit(&mut self.unsent.0[..]));
        } else if has_credit {
            let mut entries = [[0; OUT]; BATCH];
            let most = ENTRIES_LEN_BYTES / (OUT * 8);
            for (queue, ring) in (0..).zip(&mut self.from) {
                let count = ring.pop_batch(&mut entries[..most])?;
                if count == 0 {
                    continue;
                }
                let bytes = self.unsent.0[HEAD_LEN_BYTES..].chunks_exact_mut(8);
                bytes
                    .zip(entries[..count].as_flattened())
                    .for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
                // At most 64 in a message.
                (body, len) = (Body::Entries { queue, count: count as u16 }, HEAD_LEN_BYTES + count * OUT * 8);
                self.stats.sent_entries += count as u64;
                break;
            }
        }
        let is_credit_due = self.consumed.wrapping_sub(self.received_acked) >= CREDITS / 2;
        if body == Body::Nothing && !(self.outbox.requests_heartbeat || self.outbox.is_heartbeat_due || is_credit_due) {
            return Ok(false);
        }
        let head = Head {
            body,
            consumed: self.consumed,
            heartbeat: self.outbox.heartbeat,
            requests_heartbeat: self.outbox.requests_heartbeat,
        };
        (self.outbox.requests_heartbeat, self.outbox.is_heartbeat_due) = (false, false);
        head.emit(&mut self.unsent.0[..]);
        (self.unsent.1, self.is_counted) = (len, body != Body::Nothing);
        Ok(true)
    }
}

impl<const OUT: usize, const IN: usize> fmt::Debug for Carrier<OUT, IN> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier")
            .field("sent", &self.sent)
            .field("consumed", &self.consumed)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
