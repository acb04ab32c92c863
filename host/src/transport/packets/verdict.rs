//! What an operation that is complete has to say besides its result: whose it is, and who came last.

use std::fmt;
use sumac_hal::ids::Rank;
use sumac_hal::wire::RankMask;

/// Which rank was the last to come to an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slowest {
    /// The rank.
    pub rank: Rank,
    /// How long its first contribution came after the first of all ranks, in microseconds, as the devices saw it.
    pub late_us: u32,
}

impl fmt::Display for Slowest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {} us", self.rank, self.late_us)
    }
}

/// What is known of an operation that is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Verdict {
    /// Which rank was the last, if one is known.
    pub slowest: Option<Slowest>,
    /// The ranks that have no part in the result; empty but where the group goes on without some.
    pub missing: RankMask,
}

/// From which seq on a group goes on without whom.
#[derive(Debug, Default)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct Cuts {
    /// In the order of decision, which is that of seqs; each with all that have left by then.
    made: Vec<(u64, RankMask)>,
}

impl Cuts {
    /// Return how many decisions are known.
    pub(crate) fn number(&self) -> u16 {
        // Each leaves out a rank at least, and there are no more ranks in a set than that.
        self.made.len() as u16
    }

    /// Note the next decision.
    pub(crate) fn push(&mut self, first: u64, ranks: &RankMask) {
        let before = self.gone();
        self.made.push((first, before.union(ranks)));
    }

    /// Return who has left by now.
    pub(crate) fn gone(&self) -> RankMask {
        self.made.last().map_or(RankMask::EMPTY, |(_, gone)| *gone)
    }

    /// Return from which seq on a rank has no part, if it has left.
    pub(crate) fn first_without(&self, rank: Rank) -> Option<u64> {
        self.made.iter().find(|(_, gone)| gone.contains(rank)).map(|(first, _)| *first)
    }

    /// Return who has no part in the operation that begins at `first`.
    pub(crate) fn missing_at(&self, first: u64) -> RankMask {
        let decided = self.made.iter().rev().find(|(from, _)| *from <= first);
        decided.map_or(RankMask::EMPTY, |(_, gone)| *gone)
    }
}
