//! The consuming end of a ring.

use super::{Memory, PeerIndex, Poisoned};

/// The end that takes entries out.
///
/// Each ring must have exactly one. It starts at index 0, so the ring's memory must be fresh.
#[derive(Debug)]
pub struct Consumer<M, const WORDS: usize> {
    memory: M,
    consumed: u32,
    produced: PeerIndex,
}

impl<M: Memory<WORDS>, const WORDS: usize> Consumer<M, WORDS> {
    /// Return the consumer of a fresh ring.
    pub fn new(memory: M) -> Self {
        Self { memory, consumed: 0, produced: PeerIndex::new() }
    }

    /// Return the consumer of a ring whose indices are both `index`.
    #[cfg(test)]
    pub(super) fn starting_at(memory: M, index: u32) -> Self {
        Self { memory, consumed: index, produced: PeerIndex { valid: index, poisoned: None } }
    }

    /// Return the capacity in entries.
    pub fn capacity(&self) -> u32 {
        self.memory.capacity()
    }

    /// Return the number of entries that are ready.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the producer has violated the protocol.
    pub fn available(&mut self) -> Result<u32, Poisoned> {
        let limit = self.consumed.wrapping_add(self.capacity());
        let produced = self.produced.update(self.memory.produced(), limit)?;
        Ok(produced.wrapping_sub(self.consumed))
    }

    /// Take out up to `entries.len()` entries, release their places with one store, and return their number.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the producer has violated the protocol; no entry was taken then.
    pub fn pop_batch(&mut self, entries: &mut [[u64; WORDS]]) -> Result<usize, Poisoned> {
        let known = self.produced.valid.wrapping_sub(self.consumed);
        // Fetch the producer's cache line only when all entries known to be ready have been taken.
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

    /// Take out the oldest entry; `None` if the ring is empty.
    ///
    /// # Errors
    /// As [`Consumer::pop_batch`].
    pub fn pop(&mut self) -> Result<Option<[u64; WORDS]>, Poisoned> {
        let mut entry = [[0; WORDS]];
        Ok((self.pop_batch(&mut entry)? == 1).then_some(entry[0]))
    }
}
