//! The facts of a rank that the search and its oracles use.

use std::collections::BTreeSet;
use sumac::harness::{Attempt, End, Origin, Outcome};
use sumac_hal::ids::Rank;

/// How the group ended for a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Ended {
    /// These ranks are dead, and this operation is the first that fails.
    RanksFailed(Vec<Rank>, u64),
    /// The rank is excluded.
    Out(End),
}

/// The facts of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) view: u32,
    pub(super) has_tree: bool,
    pub(super) is_changing: bool,
    pub(super) end: Option<Ended>,
    pub(super) known: BTreeSet<usize>,
    /// The highest attempt that it takes part in.
    pub(super) promised: Option<Attempt>,
    pub(super) ran: Option<Attempt>,
    /// The attempt whose plan it does, and the ranks of that.
    pub(super) trial: Option<(Attempt, Vec<usize>)>,
    /// Where the next chunk of that comes from; `None`: all have landed.
    pub(super) next: Option<Origin>,
    /// All live, so that another tree is asked for.
    pub(super) asks: bool,
    pub(super) retries: bool,
    pub(super) outcomes: Vec<Outcome>,
}
