//! What a board does for its functions: it reaches the memory of ranks, and keeps answers that have to wait.

use super::FunctionEnd;
use heapless::Deque;
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{CompletionEntry, EntryStatus};

/// How a board reaches the memory of one rank.
pub trait Mappings {
    /// What the rank has, not mapped yet.
    type Memory;
    /// Why the rank is at its end.
    type End: From<FunctionEnd>;

    /// Take what the rank calls by this handle; or the status that refuses it.
    ///
    /// # Errors
    /// Why the rank is at its end.
    fn find(&mut self, handle: u64) -> Result<Result<Self::Memory, EntryStatus>, Self::End>;

    /// Let the engine reach `len_bytes` bytes of it, from `offset_bytes` on, under a key.
    ///
    /// # Errors
    /// The status that refuses it.
    fn map(
        &mut self,
        key: RegionKey,
        memory: Self::Memory,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(), EntryStatus>;

    /// Let the engine reach it no more. Nothing, if it does not.
    fn unmap(&mut self, key: RegionKey);
}

/// Answers that wait to be published, first in, first out.
pub trait Backlog {
    /// Return how many there are.
    fn len(&self) -> usize;

    /// Tell whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the first.
    fn first(&self) -> Option<&CompletionEntry>;

    /// Return the last.
    fn last_mut(&mut self) -> Option<&mut CompletionEntry>;

    /// Put one behind the last; false if there is no room.
    #[must_use = "an answer that nobody gets is a rank that waits for ever"]
    fn push(&mut self, entry: CompletionEntry) -> bool;

    /// Take the first out.
    fn pop(&mut self);
}

impl<const N: usize> Backlog for Deque<CompletionEntry, N> {
    fn len(&self) -> usize {
        self.iter().len()
    }

    fn first(&self) -> Option<&CompletionEntry> {
        self.front()
    }

    fn last_mut(&mut self) -> Option<&mut CompletionEntry> {
        self.back_mut()
    }

    fn push(&mut self, entry: CompletionEntry) -> bool {
        self.push_back(entry).is_ok()
    }

    fn pop(&mut self) {
        self.pop_front();
    }
}
