//! What is agreed and done when devices or ranks are lost (PROTOCOL 8); time and messages enter it, and what is to be
//! done comes out. It writes to nobody and locks nothing: [`crate::engine`] carries out what it decides.
//!
//! - [`Change`] is a rank's part in the change of a view: which ranks are dead, which chunks some rank has, and which
//!   must be recomputed.
//! - [`CallPaths`] keeps calls on the paths that other ranks took before the change.
//! - [`Membership`] is what ranks tell each other outside of collectives.
//! - [`Migration`] holds calls where the job moves to another tree, and [`MigrationVote`] is a rank's vote there.
//! - [`GracePeriod`] says how long operations may go on once the view is in question.
//!
//! All surviving ranks agree on the dead ranks in a view change. Each describes what it has in a
//! [`ChunkInventory`], gets the inventories of all, and computes the same plan from them. The pieces of the plan run
//! one after the other, each as a host collective between the survivors:
//! - if some rank has the result of a chunk, the lowest such rank broadcasts it;
//! - if no rank has it and all ranks are alive, it is reduced again from the contributions, which are all intact in
//!   that case, by a schedule that evaluates the declared expression.
//!
//! An operation that not every rank had entered has no result anywhere. If all ranks are alive, it is left out, and
//! starts again on the next path. If ranks are dead, operations fail from the first one that cannot be recovered.
//!
//! Invariants:
//! - inventories are made after the freeze: between an inventory and the end of the change, no result is taken in and
//!   no device writes. If there is another attempt, its inventories include what the pieces have written;
//! - the plan is a function of the inventories only, so it is the same on all ranks;
//! - no piece crosses an operation.

mod ballot;
mod call_paths;
mod change;
mod decide;
mod grace_period;
#[cfg(feature = "snapshot")]
pub(crate) mod harness;
mod inventory;
mod membership;
mod migration;
mod migration_vote;
mod plan;
mod source;
#[cfg(test)]
mod tests;
mod view;

pub(crate) use crate::transport::RecoverySource;
pub(crate) use ballot::{Ballot, Dead, Outcome};
pub(crate) use call_paths::CallPaths;
pub(crate) use change::{Action, Attempt, Change, Commit};
pub(crate) use decide::{Decision, MigrationPromise, RankReport};
pub(crate) use grace_period::GracePeriod;
pub(crate) use inventory::ChunkInventory;
pub(crate) use membership::{MemberEvent, MemberMessage, Membership, PeerEvent, ViewMessage, Watermark, authority};
pub(crate) use migration::{CallStart, Migration, NO_LIMIT};
pub(crate) use migration_vote::{MigrationVote, Verdict};
#[cfg(test)]
pub(crate) use plan::plan;
pub(crate) use plan::{Piece, Source, Unrecoverable};
pub(crate) use source::{
    Landed, append_contribution, append_result, completed_elements, inventory, is_unknown, land, result_lens,
};
pub(crate) use view::End;
