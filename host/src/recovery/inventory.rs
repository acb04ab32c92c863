//! What a rank has of the chunks that are not complete on all ranks.

use serde::{Deserialize, Serialize};
use sumac_hal::op::OpDesc;

/// What a rank has of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub(crate) struct ChunkState {
    /// It waits for the result, or for part of it.
    pub(crate) needs: bool,
    /// It has the whole result.
    pub(crate) holds: bool,
    /// Its contribution is intact; an empty one always is.
    pub(crate) gives: bool,
}

/// An operation, as ranks compare it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct OpEntry {
    /// The sequence number of its first chunk.
    pub(crate) first: u64,
    /// The sequence number after its last chunk.
    pub(crate) end: u64,
    /// The operation.
    pub(crate) desc: OpDesc,
    /// Whether its elements go through the tree; otherwise it was only announced there.
    pub(crate) moves: bool,
}

/// What a rank has of the chunks from `from` up to the last one that it has posted.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub(crate) struct ChunkInventory {
    /// Below this chunk, the rank needs nothing and can supply nothing.
    pub(crate) from: u64,
    /// Runs of chunks in the same state, from `from` on.
    runs: Vec<(u64, ChunkState)>,
    /// The operations of these chunks, in order.
    pub(crate) ops: Vec<OpEntry>,
}

impl ChunkInventory {
    /// Make an empty inventory that begins at `from`.
    pub(crate) const fn new(from: u64) -> Self {
        Self { from, runs: Vec::new(), ops: Vec::new() }
    }

    /// Append the chunks of an operation, each in the state that `state` returns.
    pub(crate) fn push(&mut self, op: OpEntry, from: u64, mut state: impl FnMut(u64) -> ChunkState) {
        debug_assert!(self.posted() == from && (op.first..op.end).contains(&from), "{op:?} from {from}");
        (from..op.end).for_each(|seq| self.extend(1, state(seq)));
        self.ops.push(op);
    }

    /// Append chunks in the default state up to `seq`.
    pub(crate) fn skip_to(&mut self, seq: u64) {
        self.extend(seq.saturating_sub(self.posted()), ChunkState::default());
    }

    fn extend(&mut self, chunks: u64, state: ChunkState) {
        match self.runs.last_mut() {
            _ if chunks == 0 => {}
            Some((count, last)) if *last == state => *count += chunks,
            _ => self.runs.push((chunks, state)),
        }
    }

    /// Return the sequence number after the last chunk that this rank has posted.
    pub(crate) fn posted(&self) -> u64 {
        self.from + self.runs.iter().map(|(count, _)| count).sum::<u64>()
    }

    /// Return the state of chunk `seq`, and the chunk at which its run ends.
    pub(crate) fn state(&self, seq: u64) -> (ChunkState, u64) {
        if seq < self.from {
            return (ChunkState::default(), self.from);
        }
        let mut end = self.from;
        for &(count, state) in &self.runs {
            end += count;
            if seq < end {
                return (state, end);
            }
        }
        (ChunkState::default(), u64::MAX)
    }

    /// Validate an inventory from another of `ranks` ranks: sums do not overflow, operations are in order and as long
    /// as `chunks` says, and roots are ranks.
    pub(crate) fn is_valid(&self, ranks: u32, chunks: impl Fn(&OpDesc) -> u64) -> bool {
        let posted = self.runs.iter().try_fold(self.from, |end, (count, _)| end.checked_add(*count));
        let in_order =
            self.ops.iter().all(|op| op.first < op.end) && self.ops.windows(2).all(|pair| pair[0].end <= pair[1].first);
        let is_known = |op: &OpEntry| {
            let chunks = if op.moves { chunks(&op.desc) } else { 1 };
            op.end - op.first == chunks && op.desc.root.0 < ranks && (!op.moves || op.desc.count > 0)
        };
        let in_order = in_order && self.ops.iter().all(is_known);
        posted.is_some_and(|posted| self.ops.last().is_none_or(|op| op.end <= posted)) && in_order
    }
}
