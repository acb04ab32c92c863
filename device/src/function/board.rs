//! What a board supplies to its functions: access to rank memory, and a queue for completions that have to wait.

use super::FunctionError;
use heapless::Deque;
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{CompletionEntry, EntryStatus};

/// How a board maps the memory of one rank for its DMA engine.
pub trait Mappings {
    /// Memory of the rank that is not mapped yet.
    type Memory;
    /// An error after which the function must be closed.
    type Error: From<FunctionError>;

    /// Take the memory that the rank named by `handle`, or return the status to complete the command with.
    ///
    /// # Errors
    /// The function must be closed.
    fn find(&mut self, handle: u64) -> Result<Result<Self::Memory, EntryStatus>, Self::Error>;

    /// Map `len_bytes` bytes of `memory` from `offset_bytes` on, so that the engine reaches them under `key`.
    ///
    /// # Errors
    /// The status to complete the command with.
    fn map(
        &mut self,
        key: RegionKey,
        memory: Self::Memory,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<(), EntryStatus>;

    /// Unmap a region. Does nothing if it is not mapped.
    fn unmap(&mut self, key: RegionKey);
}

/// Completions waiting to be published, first in, first out.
pub trait Backlog {
    /// Return the number of waiting completions.
    fn len(&self) -> usize;

    /// Return whether no completion waits.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the oldest completion.
    fn first(&self) -> Option<&CompletionEntry>;

    /// Return the newest completion.
    fn last_mut(&mut self) -> Option<&mut CompletionEntry>;

    /// Append a completion; false if there is no room.
    #[must_use = "a lost completion leaves its rank waiting forever"]
    fn push(&mut self, entry: CompletionEntry) -> bool;

    /// Remove the oldest completion.
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
