//! The producing end of a ring.

use super::{Memory, PeerIndex, Poisoned};

/// The end that puts entries in.
///
/// Each ring must have exactly one. It starts at index 0, so the ring's memory must be fresh.
#[derive(Debug)]
pub struct Producer<M, const WORDS: usize> {
    memory: M,
    produced: u32,
    consumed: PeerIndex,
}

impl<M: Memory<WORDS>, const WORDS: usize> Producer<M, WORDS> {
    /// Return the producer of a fresh ring.
    pub fn new(memory: M) -> Self {
        Self { memory, produced: 0, consumed: PeerIndex::new() }
    }

    /// Return the producer of a ring whose indices are both `index`.
    #[cfg(test)]
    pub(super) fn starting_at(memory: M, index: u32) -> Self {
        Self { memory, produced: index, consumed: PeerIndex { valid: index, poisoned: None } }
    }

    /// Return the capacity in entries.
    pub fn capacity(&self) -> u32 {
        self.memory.capacity()
    }

    /// Return how many entries fit into the ring now.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the consumer has violated the protocol.
    pub fn room(&mut self) -> Result<u32, Poisoned> {
        let consumed = self.consumed.update(self.memory.consumed(), self.produced)?;
        Ok(self.capacity() - self.produced.wrapping_sub(consumed))
    }

    /// Put in as many of the entries as fit, publish them with one store, and return their number.
    ///
    /// # Errors
    /// [`Poisoned`], permanently, if the consumer has violated the protocol; no entry was put in then.
    pub fn push_batch(&mut self, entries: &[[u64; WORDS]]) -> Result<usize, Poisoned> {
        // Fetch the consumer's cache line only when the room that is known is not enough.
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

    /// Put in one entry and publish it. Returns false if the ring is full.
    ///
    /// # Errors
    /// As [`Producer::push_batch`].
    pub fn push(&mut self, entry: &[u64; WORDS]) -> Result<bool, Poisoned> {
        Ok(self.push_batch(core::slice::from_ref(entry))? == 1)
    }
}
