//! The end of a ring that entries go into.

use super::{Memory, PeerIndex, Poisoned};

/// The end that writes entries.
///
/// There must be one for each ring. It starts at index 0, so over memory that nobody has used yet.
#[derive(Debug)]
pub struct Producer<M, const WORDS: usize> {
    memory: M,
    produced: u32,
    consumed: PeerIndex,
}

impl<M: Memory<WORDS>, const WORDS: usize> Producer<M, WORDS> {
    /// Take the producer's end of a fresh ring.
    pub fn new(memory: M) -> Self {
        Self { memory, produced: 0, consumed: PeerIndex::new() }
    }

    /// Take the end of a ring whose indices both are `index`.
    #[cfg(test)]
    pub(super) fn starting_at(memory: M, index: u32) -> Self {
        Self { memory, produced: index, consumed: PeerIndex { valid: index, poisoned: None } }
    }

    /// Return the number of places.
    pub fn capacity(&self) -> u32 {
        self.memory.capacity()
    }

    /// Return how many entries [`Producer::push_batch`] takes now.
    ///
    /// # Errors
    /// [`Poisoned`], now and for ever, if the consumer has broken the protocol.
    pub fn room(&mut self) -> Result<u32, Poisoned> {
        let consumed = self.consumed.update(self.memory.consumed(), self.produced)?;
        Ok(self.capacity() - self.produced.wrapping_sub(consumed))
    }

    /// Put in as many of the entries as there is room for, publish them together, and return how many.
    ///
    /// # Errors
    /// [`Poisoned`], now and for ever, if the consumer has broken the protocol; then nothing went in.
    pub fn push_batch(&mut self, entries: &[[u64; WORDS]]) -> Result<usize, Poisoned> {
        // Room as far as it is known: the consumer's cache line is fetched only if that is too little.
        let known = self.capacity() - self.produced.wrapping_sub(self.consumed.valid);
        let wanted = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        let room = match self.consumed.poisoned {
            Some(poisoned) => return Err(poisoned),
            None if known >= wanted => known,
            None => self.room()?,
        };
        let entries = &entries[..wanted.min(room) as usize];
        for entry in entries {
            self.memory.write(self.produced & (self.capacity() - 1), entry);
            self.produced = self.produced.wrapping_add(1);
        }
        if !entries.is_empty() {
            self.memory.set_produced(self.produced);
        }
        Ok(entries.len())
    }

    /// Put in one entry and publish it; false if the ring is full.
    ///
    /// # Errors
    /// As [`Producer::push_batch`].
    pub fn push(&mut self, entry: &[u64; WORDS]) -> Result<bool, Poisoned> {
        Ok(self.push_batch(core::slice::from_ref(entry))? == 1)
    }
}
