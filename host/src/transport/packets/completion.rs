//! What is known of a completed operation besides its result: which ranks it lacks, and which came last.

use std::fmt;
use sumac_hal::ids::Rank;
use sumac_hal::wire::RankMask;

/// The rank that was the last to enter an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slowest {
    /// The rank.
    pub rank: Rank,
    /// Delay of its first contribution behind the first of all ranks, in microseconds, as measured by the devices.
    pub late_us: u32,
}

impl fmt::Display for Slowest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {} us", self.rank, self.late_us)
    }
}

/// Details of a completed operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CompletionInfo {
    /// The rank that entered last, if known.
    pub slowest: Option<Slowest>,
    /// The ranks that have no part in the result; empty unless ranks were excluded.
    pub missing: RankMask,
}

/// Decisions to exclude ranks, each with the sequence number from which it applies.
#[derive(Debug, Default)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub(crate) struct Exclusions {
    /// In order of decision, which is also the order of sequence numbers; each with all ranks excluded so far.
    decisions: Vec<(u64, RankMask)>,
}

impl Exclusions {
    /// Return the number of decisions.
    pub(crate) fn count(&self) -> u16 {
        // Each excludes at least one rank, so there are no more than ranks in a mask.
        self.decisions.len() as u16
    }

    /// Add the next decision.
    pub(crate) fn push(&mut self, first: u64, ranks: &RankMask) {
        let before = self.ranks();
        self.decisions.push((first, before.union(ranks)));
    }

    /// Return all excluded ranks.
    pub(crate) fn ranks(&self) -> RankMask {
        self.decisions.last().map_or(RankMask::EMPTY, |(_, ranks)| *ranks)
    }

    /// Return the sequence number from which a rank is excluded, if it is.
    pub(crate) fn first_without(&self, rank: Rank) -> Option<u64> {
        self.decisions.iter().find(|(_, ranks)| ranks.contains(rank)).map(|(first, _)| *first)
    }

    /// Return the ranks that have no part in the operation that begins at `first`.
    pub(crate) fn missing_at(&self, first: u64) -> RankMask {
        let decided = self.decisions.iter().rev().find(|(from, _)| *from <= first);
        decided.map_or(RankMask::EMPTY, |(_, ranks)| *ranks)
    }
}
