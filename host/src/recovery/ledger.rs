//! What one rank has of the chunks that are not settled.

use serde::{Deserialize, Serialize};
use sumac_hal::op::OpDesc;

/// What a rank has of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub(crate) struct Class {
    /// It waits for the result, or for a part of it.
    pub(crate) needs: bool,
    /// It has the whole result.
    pub(crate) holds: bool,
    /// It still has its contribution, be it none.
    pub(crate) gives: bool,
}

/// An operation, as ranks compare it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct OpEntry {
    /// Its first seq.
    pub(crate) first: u64,
    /// The seq after its last.
    pub(crate) end: u64,
    /// What it is.
    pub(crate) desc: OpDesc,
    /// Whether its elements go through the tree; else the tree was only told of it.
    pub(crate) moves: bool,
}

/// What one rank has of the chunks from `from` on, up to the last that it has posted.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub(crate) struct Ledger {
    /// Below, this rank needs nothing, and can't supply anything either.
    pub(crate) from: u64,
    /// Runs of chunks of the same class, from `from` on.
    runs: Vec<(u64, Class)>,
    /// The operations that these chunks are of, in order.
    pub(crate) ops: Vec<OpEntry>,
}

impl Ledger {
    /// Begin a ledger at `from`.
    pub(crate) const fn new(from: u64) -> Self {
        Self { from, runs: Vec::new(), ops: Vec::new() }
    }

    /// Append the chunks of an operation: `class` says of each what this rank has.
    pub(crate) fn push(&mut self, op: OpEntry, from: u64, mut class: impl FnMut(u64) -> Class) {
        debug_assert!(self.posted() == from && (op.first..op.end).contains(&from), "{op:?} from {from}");
        (from..op.end).for_each(|seq| self.extend(1, class(seq)));
        self.ops.push(op);
    }

    /// Append chunks up to `seq` of which there is nothing to say.
    pub(crate) fn skip_to(&mut self, seq: u64) {
        self.extend(seq.saturating_sub(self.posted()), Class::default());
    }

    fn extend(&mut self, chunks: u64, class: Class) {
        match self.runs.last_mut() {
            _ if chunks == 0 => {}
            Some((count, last)) if *last == class => *count += chunks,
            _ => self.runs.push((chunks, class)),
        }
    }

    /// Return the seq after the last that this rank has posted.
    pub(crate) fn posted(&self) -> u64 {
        self.from + self.runs.iter().map(|(count, _)| count).sum::<u64>()
    }

    /// Return the class of `seq`, and the seq where that may end.
    pub(crate) fn class(&self, seq: u64) -> (Class, u64) {
        if seq < self.from {
            return (Class::default(), self.from);
        }
        let mut end = self.from;
        for &(count, class) in &self.runs {
            end += count;
            if seq < end {
                return (class, end);
            }
        }
        (Class::default(), u64::MAX)
    }

    /// Check what has come from another of `ranks` ranks: sums that don't overflow, operations that follow each other and
    /// are as long as `chunks` says, with roots that are ranks.
    pub(crate) fn is_sound(&self, ranks: u32, chunks: impl Fn(&OpDesc) -> u64) -> bool {
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
