//! Byte streams: rings whose entries are single bytes, for a producer and a consumer that move any number at a time.
//!
//! The invariants are those of the [module](super). In addition, several pieces are published by one store, so that a
//! consumer never sees a header without the bytes that were written with it; and places are released in quarters of the
//! ring, or when the ring is empty, so that a stream of small reads does not take the producer's cache line each time.

use super::{PeerIndex, Poisoned};

/// The maximum capacity of a stream in bytes; far below 2^31, so that index distances are unambiguous.
pub const STREAM_CAPACITY_MAX_BYTES: u32 = 1 << 24;

/// The memory of a stream.
///
/// The methods are unchecked accesses without state; [`StreamProducer`] and [`StreamConsumer`] do the checks. A range
/// of bytes never crosses the end of the ring.
pub trait StreamMemory {
    /// Return the number of bytes: a constant power of two up to [`STREAM_CAPACITY_MAX_BYTES`].
    fn capacity_bytes(&self) -> u32;

    /// Load the producer's index with acquire ordering.
    fn produced(&self) -> u32;

    /// Publish all bytes before `produced` with release ordering.
    fn set_produced(&self, produced: u32);

    /// Load the consumer's index with acquire ordering.
    fn consumed(&self) -> u32;

    /// Release all places before `consumed` with release ordering.
    fn set_consumed(&self, consumed: u32);

    /// Copy bytes out of the ring.
    fn read(&self, place: u32, bytes: &mut [u8]);

    /// Copy bytes into the ring.
    fn write(&self, place: u32, bytes: &[u8]);
}

/// The end that writes bytes.
///
/// Each stream must have exactly one. It starts at index 0, so the stream's memory must be fresh.
#[derive(Debug)]
pub struct StreamProducer<M> {
    memory: M,
    produced: u32,
    consumed: PeerIndex,
}

/// The end that reads bytes.
///
/// Each stream must have exactly one. It starts at index 0, so the stream's memory must be fresh.
#[derive(Debug)]
pub struct StreamConsumer<M> {
    memory: M,
    consumed: u32,
    /// The places that the producer knows to be free.
    released: u32,
    produced: PeerIndex,
}

impl<M: StreamMemory> StreamProducer<M> {
    /// Return the producer of a fresh stream.
    pub fn new(memory: M) -> Self {
        Self { memory, produced: 0, consumed: PeerIndex::new() }
    }

    /// Return the producer of a stream whose indices are both `index`.
    #[cfg(test)]
    pub(super) fn starting_at(memory: M, index: u32) -> Self {
        Self { memory, produced: index, consumed: PeerIndex { valid: index, poisoned: None } }
    }

    /// Return how many bytes fit now.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the consumer has violated the protocol.
    pub fn room_bytes(&mut self) -> Result<u32, Poisoned> {
        let consumed = self.consumed.update(self.memory.consumed(), self.produced)?;
        Ok(self.memory.capacity_bytes() - self.produced.wrapping_sub(consumed))
    }

    /// Write as many of the pieces' bytes as fit, in their order, publish them with one store, and return their number.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the consumer has violated the protocol; nothing was written then.
    pub fn write(&mut self, pieces: &[&[u8]]) -> Result<usize, Poisoned> {
        if let Some(poisoned) = self.consumed.poisoned {
            return Err(poisoned);
        }
        let wanted: usize = pieces.iter().map(|piece| piece.len()).sum();
        // Fetch the consumer's cache line only when the room that is known is not enough.
        let known = self.memory.capacity_bytes() - self.produced.wrapping_sub(self.consumed.valid);
        let room = if known as usize >= wanted { known } else { self.room_bytes()? };
        let mut left = wanted.min(room as usize);
        let written = left;
        for piece in pieces {
            let len = piece.len().min(left);
            self.copy_in(&piece[..len]);
            left -= len;
        }
        if written > 0 {
            self.memory.set_produced(self.produced);
        }
        Ok(written)
    }

    /// Copy bytes that fit, in up to two ranges.
    fn copy_in(&mut self, bytes: &[u8]) {
        let capacity = self.memory.capacity_bytes();
        let place = self.produced & (capacity - 1);
        let (first, second) = bytes.split_at(bytes.len().min((capacity - place) as usize));
        if !first.is_empty() {
            self.memory.write(place, first);
        }
        if !second.is_empty() {
            self.memory.write(0, second);
        }
        self.produced = self.produced.wrapping_add(bytes.len() as u32);
    }
}

impl<M: StreamMemory> StreamConsumer<M> {
    /// Return the consumer of a fresh stream.
    pub fn new(memory: M) -> Self {
        Self { memory, consumed: 0, released: 0, produced: PeerIndex::new() }
    }

    /// Return the consumer of a stream whose indices are both `index`.
    #[cfg(test)]
    pub(super) fn starting_at(memory: M, index: u32) -> Self {
        Self { memory, consumed: index, released: index, produced: PeerIndex { valid: index, poisoned: None } }
    }

    /// Return the number of bytes that are ready.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the producer has violated the protocol.
    pub fn available_bytes(&mut self) -> Result<u32, Poisoned> {
        let limit = self.released.wrapping_add(self.memory.capacity_bytes());
        let produced = self.produced.update(self.memory.produced(), limit)?;
        // A producer that moves its index back behind what was read poisons the stream above: `valid` is not below it.
        Ok(produced.wrapping_sub(self.consumed))
    }

    /// Read up to `bytes.len()` bytes, and return their number.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the producer has violated the protocol; nothing was read then.
    pub fn read(&mut self, bytes: &mut [u8]) -> Result<usize, Poisoned> {
        if let Some(poisoned) = self.produced.poisoned {
            return Err(poisoned);
        }
        let known = self.produced.valid.wrapping_sub(self.consumed);
        // Fetch the producer's cache line only when the bytes known to be ready are not enough.
        let ready = if known as usize >= bytes.len() { known } else { self.available_bytes()? };
        let len = bytes.len().min(ready as usize);
        let capacity = self.memory.capacity_bytes();
        let place = self.consumed & (capacity - 1);
        let (first, second) = bytes[..len].split_at_mut(len.min((capacity - place) as usize));
        if !first.is_empty() {
            self.memory.read(place, first);
        }
        if !second.is_empty() {
            self.memory.read(0, second);
        }
        self.consumed = self.consumed.wrapping_add(len as u32);
        let held = self.consumed.wrapping_sub(self.released);
        if len > 0 && (len == ready as usize || held >= capacity / RELEASES_PER_TURN) {
            self.released = self.consumed;
            self.memory.set_consumed(self.consumed);
        }
        Ok(len)
    }
}

/// How often places are released while the indices go once around the ring.
const RELEASES_PER_TURN: u32 = 4;
