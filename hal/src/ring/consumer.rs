//! The end of a ring that entries come out of.

use super::{Memory, PeerIndex, Poisoned};

/// The end that reads entries.
///
/// There must be one for each ring. It starts at index 0, so over memory that nobody has used yet.
#[derive(Debug)]
pub struct Consumer<M, const WORDS: usize> {
    memory: M,
    consumed: u32,
    produced: PeerIndex,
}

impl<M: Memory<WORDS>, const WORDS: usize> Consumer<M, WORDS> {
    /// Take the consumer's end of a fresh ring.
    pub fn new(memory: M) -> Self {
        Self { memory, consumed: 0, produced: PeerIndex::new() }
    }

    /// Take the end of a ring whose indices both are `index`.
    #[cfg(test)]
    pub(super) fn starting_at(memory: M, index: u32) -> Self {
        Self { memory, consumed: index, produced: PeerIndex { valid: index, poisoned: None } }
    }

    /// Return the number of places.
    pub fn capacity(&self) -> u32 {
        self.memory.capacity()
    }

    /// Return how many entries are there.
    ///
    /// # Errors
    /// [`Poisoned`], now and for ever, if the producer has broken the protocol.
    pub fn available(&mut self) -> Result<u32, Poisoned> {
        let limit = self.consumed.wrapping_add(self.capacity());
        let produced = self.produced.update(self.memory.produced(), limit)?;
        Ok(produced.wrapping_sub(self.consumed))
    }

    /// Copy out as many entries as are there and fit, hand their places back together, and return how many.
    ///
    /// # Errors
    /// [`Poisoned`], now and for ever, if the producer has broken the protocol; then nothing came out.
    pub fn pop_batch(&mut self, entries: &mut [[u64; WORDS]]) -> Result<usize, Poisoned> {
        let known = self.produced.valid.wrapping_sub(self.consumed);
        // The producer's cache line is fetched only when all that is known to be there has been taken.
        let available = match self.produced.poisoned {
            Some(poisoned) => return Err(poisoned),
            None if known > 0 => known,
            None => self.available()?,
        };
        let count = entries.len().min(available as usize);
        for entry in &mut entries[..count] {
            *entry = self.memory.read(self.consumed & (self.capacity() - 1));
            self.consumed = self.consumed.wrapping_add(1);
        }
        if count > 0 {
            self.memory.set_consumed(self.consumed);
        }
        Ok(count)
    }

    /// Copy out the oldest entry and hand its place back; `None` if the ring is empty.
    ///
    /// # Errors
    /// As [`Consumer::pop_batch`].
    pub fn pop(&mut self) -> Result<Option<[u64; WORDS]>, Poisoned> {
        let mut entry = [[0; WORDS]];
        Ok((self.pop_batch(&mut entry)? == 1).then_some(entry[0]))
    }
}
