//! What ranks say to each other in a view change.
//!
//! `P` is what a rank promises with: what it has of the operations. `D` is what is decided about them, the same function
//! of all promises at all ranks.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;

/// One attempt to change the view. A higher attempt comes first, then a higher coordinator: the derived order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Ballot {
    /// The attempt, from 1.
    pub(crate) attempt: u32,
    /// Who leads it.
    pub(crate) coordinator: Rank,
}

/// Who says that a rank is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Authority {
    /// Ranks that no longer hear of it. It counts where a strict majority of the view goes on together.
    Suspicion,
    /// The controller, the end of its process, or the rank itself, which takes no further part.
    Word,
}

/// The ranks that are not waited for.
pub(crate) type Dead = BTreeMap<Rank, Authority>;

/// How a view change ends, the same at all ranks that live on.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Outcome<D> {
    /// The ranks that are not part of it, in order.
    pub(crate) dead: Vec<Rank>,
    /// What is decided about the operations.
    pub(crate) decision: D,
    /// The word that all said with `Done`; 0 if they said different ones.
    pub(crate) word: u64,
}

/// That a rank has done all of a ballot's plan. `word` is its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Done<D> {
    /// The ballot.
    pub(crate) ballot: Ballot,
    /// What it comes to if it is committed.
    pub(crate) outcome: Outcome<D>,
}

/// What one rank says to another.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Message<P, D> {
    /// To the coordinator: the view has to change, and these ranks are dead.
    Call { dead: Dead },
    /// Take part in no lower ballot, freeze, and say what you have.
    Prepare { ballot: Ballot, dead: Dead },
    /// What this rank has.
    Promise { ballot: Ballot, dead: Dead, done: Option<Done<D>>, account: P },
    /// This rank has promised the higher ballot that is named.
    Refuse { ballot: Ballot },
    /// What all that live have: each works out the same from it, and does it.
    Plan { ballot: Ballot, dead: Dead, accounts: BTreeMap<Rank, P> },
    /// It is done.
    Done { ballot: Ballot, word: u64 },
    /// It could not be done; perhaps a rank is dead.
    Failed { ballot: Ballot },
    /// It is done at all ranks but the dead: those of the ballot that was committed, which may be more than those of the
    /// outcome, if that is an earlier ballot's.
    Commit { outcome: Outcome<D>, dead: Dead },
    /// This rank takes no further part.
    Farewell,
    /// The others go on without you.
    Excluded,
}
