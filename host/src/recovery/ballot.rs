//! Messages of a view change.
//!
//! `P` is the report in a rank's promise: what it has of the operations. `D` is the decision about them, the same
//! function of all promises on all ranks.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;

/// One attempt to change the view. Ordered by attempt, then by coordinator (the derived order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Ballot {
    /// The attempt, from 1.
    pub(crate) attempt: u32,
    /// The rank that leads it.
    pub(crate) coordinator: Rank,
}

/// The authority by which a rank is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Authority {
    /// Other ranks cannot reach it. Suspicion counts only if a strict majority of the view continues together.
    Suspicion,
    /// Confirmed by the controller, by the end of its process, or by the rank itself, which takes no further part.
    Confirmed,
}

/// The ranks that are not waited for.
pub(crate) type Dead = BTreeMap<Rank, Authority>;

/// The outcome of a view change, the same on all surviving ranks.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Outcome<D> {
    /// The dead ranks, in order.
    pub(crate) dead: Vec<Rank>,
    /// The decision about the operations.
    pub(crate) decision: D,
    /// The vote of all ranks in `Done`; 0 if votes differed.
    pub(crate) vote: u64,
}

/// A rank's statement that it has executed a ballot's plan.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Done<D> {
    /// The ballot.
    pub(crate) ballot: Ballot,
    /// The outcome, if it is committed.
    pub(crate) outcome: Outcome<D>,
}

/// A message from one rank to another.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Message<P, D> {
    /// To the coordinator: the view must change, and these ranks are dead.
    Call { dead: Dead },
    /// Take part in no lower ballot, freeze, and report what you have.
    Prepare { ballot: Ballot, dead: Dead },
    /// The sender's promise, and its report.
    Promise { ballot: Ballot, dead: Dead, done: Option<Done<D>>, report: P },
    /// The sender has promised this higher ballot.
    Refuse { ballot: Ballot },
    /// The reports of all surviving ranks; each rank computes the same plan from them and executes it.
    Plan { ballot: Ballot, dead: Dead, reports: BTreeMap<Rank, P> },
    /// The plan is executed.
    Done { ballot: Ballot, vote: u64 },
    /// The plan could not be executed; perhaps a rank is dead.
    Failed { ballot: Ballot },
    /// All ranks have executed the plan, except for the dead ranks of the ballot that was committed. Those may be more
    /// than the dead ranks of the outcome, if that is an earlier ballot's.
    Commit { outcome: Outcome<D>, dead: Dead },
    /// The sender takes no further part.
    Farewell,
    /// The others continue without the receiver.
    Excluded,
}
