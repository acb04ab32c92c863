//! Rings to messages and back: plays, at one side, the rank or the device that is at the other.
//!
//! Invariants:
//! - Entries arrive in order, each once: they wait in their ring for a message, in a message for credit, and at the other side
//!   for a place in its ring. Nothing is thrown away, and what waits is bounded.
//! - A side has at most [`CREDITS`] counted messages at its peer that the peer has not said to have taken, so [`BUFFERS`]
//!   places for each connection are always enough; a peer that sends more is at its end.
//! - Nothing is allocated in a turn, but for memory that is handed over.

use super::message::{Body, Head, Memory, MessageError};
use super::message::{ENTRIES_LEN_BYTES, HEAD_LEN_BYTES, MESSAGE_LEN_BYTES};
use super::{Arrived, Link, LinkError};
use crate::ring::{Consumer, Poisoned, Producer};
use crate::shm::FunctionRing;
use std::collections::VecDeque;
use std::fmt;
use thiserror::Error;

/// Counted messages that a side may have at its peer.
pub const CREDITS: u32 = 8;

/// Places for messages that a connection needs: the counted ones, and those that only give credit back, of which one goes for
/// each half of the credits.
pub const BUFFERS: usize = CREDITS as usize + 4;

/// Arrivals that are taken before others get their turn: more than there can be of messages, and runs of results.
const ARRIVALS_PER_TURN: usize = 256;

/// The admin queue, and one for data.
const QUEUES: usize = 2;

/// The most entries in a message: those of the shorter kind.
const BATCH: usize = ENTRIES_LEN_BYTES / 32;

/// Why a carrier can't go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CarrierError {
    /// The connection is at its end.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// What came is no message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The peer says to have taken what was not sent.
    #[error("the peer says to have taken {said} messages, where {sent} were sent and {known} were taken before")]
    Credit {
        /// What it says.
        said: u32,
        /// What was sent, ever.
        sent: u32,
        /// What it said before.
        known: u32,
    },
    /// The peer sends more than it may.
    #[error("the peer sends more than {CREDITS} messages without having been told that any was taken")]
    Flood,
    /// A ring is broken: by a bug of this process.
    #[error(transparent)]
    Ring(#[from] Poisoned),
}

/// What a turn has heard besides entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// The peer has handed memory over.
    Memory(Memory),
    /// A result is whole at this offset of the landing area.
    Landed(u32),
    /// How many turns the peer has had.
    Beat(u32),
}

/// What was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CarrierStats {
    /// Messages sent, those that only give credit back among them.
    pub sent_messages: u64,
    /// Entries in them.
    pub sent_entries: u64,
    /// Messages that came.
    pub received_messages: u64,
    /// Results that were announced.
    pub landed: u64,
}

/// What is said besides entries.
#[derive(Debug, Default)]
pub struct Outbox {
    /// Memory to hand over; it goes before the entries that speak of it.
    memory: VecDeque<Memory>,
    asks: bool,
    answers: bool,
    /// This side's turns.
    beat: u32,
}

/// Room for a message.
type Buffer = Box<[u8; MESSAGE_LEN_BYTES]>;

/// A message of which not all entries have found a place in their ring.
struct Held {
    bytes: Buffer,
    len: usize,
    /// Where the first entry is that has none.
    at: usize,
    queue: usize,
}

/// One side of a function that is on two hosts: sends entries of `OUT` words, and takes those of `IN` words.
pub struct Carrier<const OUT: usize, const IN: usize> {
    from: [Consumer<FunctionRing<OUT>, OUT>; QUEUES],
    into: [Producer<FunctionRing<IN>, IN>; QUEUES],
    outbox: Outbox,
    /// A message that the link had no room for; empty if there is none.
    unsent: (Buffer, usize),
    is_counted: bool,
    /// What came and waits, the first one first: what comes behind it is heard all the same, so that a full ring keeps no word
    /// of credit or life waiting.
    held: VecDeque<Held>,
    /// For as many as there can be, and the one that comes.
    spare: Vec<Buffer>,
    /// Counted messages: sent, and of these taken by the peer; those that came, of these taken, and told as taken; modulo
    /// 2^32.
    sent: u32,
    taken_there: u32,
    came: u32,
    taken: u32,
    told: u32,
    stats: CarrierStats,
}

impl<const OUT: usize, const IN: usize> Carrier<OUT, IN> {
    /// Carry entries out of `from`, and into `into`: of the admin queue and of the data queue, which nobody else empties and
    /// fills.
    pub fn new(from: [FunctionRing<OUT>; QUEUES], into: [FunctionRing<IN>; QUEUES]) -> Self {
        let buffer = || Box::new([0; MESSAGE_LEN_BYTES]);
        Self {
            from: from.map(Consumer::new),
            into: into.map(Producer::new),
            outbox: Outbox::default(),
            unsent: (buffer(), 0),
            is_counted: false,
            held: VecDeque::with_capacity(CREDITS as usize),
            spare: (0..=CREDITS).map(|_| buffer()).collect(),
            sent: 0,
            taken_there: 0,
            came: 0,
            taken: 0,
            told: 0,
            stats: CarrierStats::default(),
        }
    }

    /// Hand memory over, before any entry that is submitted from now on.
    pub fn hand_over(&mut self, memory: Memory) {
        self.outbox.memory.push_back(memory);
    }

    /// Ask the peer to say that it goes on.
    pub const fn ask(&mut self) {
        self.outbox.asks = true;
    }

    /// Count a turn of this side.
    pub const fn beat(&mut self) {
        self.outbox.beat = self.outbox.beat.wrapping_add(1);
    }

    /// Return what was counted.
    pub const fn stats(&self) -> CarrierStats {
        self.stats
    }

    /// Tell whether there is something to carry out, or something that came waits for a place.
    pub fn has_news(&mut self) -> bool {
        let is_out = self.has_credit() && self.from.iter_mut().any(|ring| ring.available() != Ok(0));
        is_out || self.held.front().is_some_and(|held| self.into[held.queue].room() != Ok(0))
    }

    /// Take what has come, and send what is to go; true if there was anything.
    ///
    /// # Errors
    /// [`CarrierError`]: this is the end. What came before it was taken.
    pub fn turn(&mut self, link: &mut dyn Link, mut hear: impl FnMut(Heard)) -> Result<bool, CarrierError> {
        let came = self.receive(link, &mut hear)?;
        Ok(self.send(link)? || came)
    }

    fn receive(&mut self, link: &mut dyn Link, hear: &mut impl FnMut(Heard)) -> Result<bool, CarrierError> {
        let mut any = self.deliver()?;
        for _ in 0..ARRIVALS_PER_TURN {
            let Some(mut bytes) = self.spare.pop() else { break };
            let arrived = link.receive(&mut bytes);
            let spare = match arrived {
                Ok(Some(Arrived::Message(len))) => self.take(bytes, len, hear)?,
                _ => Some(bytes),
            };
            self.spare.extend(spare);
            match arrived? {
                None => break,
                Some(Arrived::Landed(offset)) => {
                    self.stats.landed += 1;
                    hear(Heard::Landed(offset));
                }
                Some(Arrived::Message(_)) => _ = self.deliver()?,
            }
            any = true;
        }
        Ok(any)
    }

    /// Read a message that has come; returns its buffer, unless it has entries.
    fn take(
        &mut self,
        bytes: Buffer,
        len: usize,
        hear: &mut impl FnMut(Heard),
    ) -> Result<Option<Buffer>, CarrierError> {
        self.stats.received_messages += 1;
        let none = MessageError { len_bytes: len, kind: bytes[0] };
        let message = bytes.get(..len).ok_or(none)?;
        let head = Head::parse(message, IN * 8)?;
        let (said, sent, known) = (head.taken, self.sent, self.taken_there);
        if said.wrapping_sub(known) > sent.wrapping_sub(known) {
            return Err(CarrierError::Credit { said, sent, known });
        }
        self.taken_there = said;
        self.outbox.answers |= head.asks;
        hear(Heard::Beat(head.beat));
        if head.body == Body::Nothing {
            return Ok(Some(bytes));
        }
        if self.came.wrapping_sub(self.told) >= CREDITS {
            return Err(CarrierError::Flood);
        }
        self.came = self.came.wrapping_add(1);
        if let Body::Entries { queue, .. } = head.body {
            self.held.push_back(Held { bytes, len, at: HEAD_LEN_BYTES, queue: queue.into() });
            return Ok(None);
        }
        hear(Heard::Memory(Memory::parse(message)?));
        self.taken = self.taken.wrapping_add(1);
        Ok(Some(bytes))
    }

    /// Put what came into its rings, as far as there is room; true if something was put there.
    fn deliver(&mut self) -> Result<bool, CarrierError> {
        let mut any = false;
        while let Some(held) = self.held.front_mut() {
            while held.at < held.len {
                // A message is whole entries.
                let bytes = &held.bytes[held.at..];
                let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
                if !self.into[held.queue].push(&std::array::from_fn(word))? {
                    return Ok(any);
                }
                any = true;
                held.at += IN * 8;
            }
            self.taken = self.taken.wrapping_add(1);
            self.spare.extend(self.held.pop_front().map(|held| held.bytes));
        }
        Ok(any)
    }

    const fn has_credit(&self) -> bool {
        self.sent.wrapping_sub(self.taken_there) < CREDITS
    }

    fn send(&mut self, link: &mut dyn Link) -> Result<bool, CarrierError> {
        let mut any = false;
        loop {
            if self.unsent.1 == 0 && !self.write()? {
                return Ok(any);
            }
            // What is known by now, which may be more than when the message was written.
            let message = &mut self.unsent.0[..self.unsent.1];
            message[4..8].copy_from_slice(&self.taken.to_le_bytes());
            if !link.send(message)? {
                return Ok(any);
            }
            any = true;
            self.unsent.1 = 0;
            self.told = self.taken;
            self.sent = self.sent.wrapping_add(u32::from(self.is_counted));
            self.stats.sent_messages += 1;
        }
    }

    /// Write the next message; false if there is none to be sent.
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
        let is_credit_due = self.taken.wrapping_sub(self.told) >= CREDITS / 2;
        if body == Body::Nothing && !(self.outbox.asks || self.outbox.answers || is_credit_due) {
            return Ok(false);
        }
        let head = Head { body, taken: self.taken, beat: self.outbox.beat, asks: self.outbox.asks };
        (self.outbox.asks, self.outbox.answers) = (false, false);
        head.emit(&mut self.unsent.0[..]);
        (self.unsent.1, self.is_counted) = (len, body != Body::Nothing);
        Ok(true)
    }
}

impl<const OUT: usize, const IN: usize> fmt::Debug for Carrier<OUT, IN> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier")
            .field("sent", &self.sent)
            .field("taken", &self.taken)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
