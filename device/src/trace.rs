//! A ring of recent events, readable after a panic or over the control plane.
//!
//! Only rare events are recorded (groups, losses, refusals). The data path counts instead.

use heapless::HistoryBuf;
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::{ChildIndex, ChunkNo, GroupId};
use sumac_hal::time::Instant;
use sumac_hal::wire::NakReason;

/// Capacity of the ring, in entries.
pub const TRACE_LEN: usize = 128;

/// A rare event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trace {
    /// A group was created.
    GroupCreated(GroupId),
    /// A group was released.
    GroupReleased(GroupId),
    /// A group's lease expired.
    LeaseExpired(GroupId),
    /// A child's address was learned; packets from any other address are dropped.
    ChildPinned(GroupId, ChildIndex),
    /// A child's contribution was lost.
    Lost(GroupId, ChildIndex, ChunkNo),
    /// A group failed at a chunk.
    Failed(GroupId, ChunkNo, NakReason),
    /// A group excluded this many ranks from a chunk on.
    Cut(GroupId, ChunkNo, u32),
    /// A packet that no peer should send was dropped.
    Dropped(DropReason),
}

/// A trace entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// When it happened.
    pub at: Instant,
    /// What happened.
    pub event: Trace,
}

/// A ring of the newest [`TRACE_LEN`] entries.
#[derive(Debug, Default)]
pub struct TraceRing {
    entries: HistoryBuf<Entry, TRACE_LEN>,
    recorded: u64,
}

impl TraceRing {
    /// Return an empty ring.
    pub const fn new() -> Self {
        Self { entries: HistoryBuf::new(), recorded: 0 }
    }

    pub(crate) fn record(&mut self, at: Instant, event: Trace) {
        self.entries.write(Entry { at, event });
        self.recorded += 1;
    }

    /// Return how many entries have been recorded since boot.
    pub const fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Return the entries recorded after the first `seen`, oldest first. Entries that were overwritten are missing.
    pub fn since(&self, seen: u64) -> impl Iterator<Item = &Entry> {
        let new = usize::try_from(self.recorded - seen.min(self.recorded)).unwrap_or(usize::MAX);
        self.iter().skip(self.entries.len().saturating_sub(new))
    }

    /// Return the entries, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.oldest_ordered()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_reader_gets_the_entries_still_in_the_ring() {
        let mut ring = TraceRing::new();
        for nth in 0..TRACE_LEN as u32 + 5 {
            ring.record(Instant::ZERO, Trace::GroupCreated(GroupId(nth)));
        }
        let of = |seen| ring.since(seen).count();
        assert_eq!((of(0), of(ring.recorded() - 3), of(ring.recorded()), of(u64::MAX)), (TRACE_LEN, 3, 0, 0));
        let last = ring.since(ring.recorded() - 1).next().map(|entry| entry.event);
        assert_eq!(last, Some(Trace::GroupCreated(GroupId(TRACE_LEN as u32 + 4))));
    }
}
