//! The facts of a rank that the search and its oracles use.

use std::collections::BTreeSet;
use sumac::harness::{Attempt, End, Origin, Outcome};
use sumac_hal::ids::Rank;

/// How the group ended for a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Ended {
    /// These ranks are dead; the operation is the first that fails.
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
    /// The highest attempt that it has joined.
    pub(super) promised: Option<Attempt>,
    pub(super) ran: Option<Attempt>,
    /// The attempt whose plan it runs, and the ranks of that plan.
    pub(super) trial: Option<(Attempt, Vec<usize>)>,
    /// The origin of the plan's next chunk; `None` if all have landed.
    pub(super) next: Option<Origin>,
    /// All ranks are alive, so it requests another tree.
    pub(super) asks: bool,
    pub(super) retries: bool,
    pub(super) outcomes: Vec<Outcome>,
}
