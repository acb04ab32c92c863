//! What becomes of operations whose tree is lost, or whose ranks are: who agrees on that, which chunks somebody has, and
//! which have to be computed again (PROTOCOL 8). What is decided here [`crate::comm`] carries out, in its own `change`.
//!
//! All ranks that live agree on who is dead in a [`View`] change. Each describes what it has in a [`Ledger`]; each gets
//! all ledgers, and works out the same [`Plan`] from them. Then the pieces of the plan run one after the other, each as a
//! schedule between the ranks that live:
//! - a chunk whose result some rank has is broadcast by the lowest of those ranks;
//! - a chunk whose result nobody has is reduced again, if all ranks are alive: from contributions that are all intact
//!   then, by a schedule that evaluates the declared expression.
//!
//! An operation that not every rank had entered has no result anywhere: where all are alive, it is left out, and begins
//! again on the next path. Where ranks are dead, operations fail from the first on that can't be had.
//!
//! Invariants:
//! - ledgers are made after the freeze: no result is taken in, and no device writes, between a ledger and the end of the
//!   change; what pieces have landed is in the next ledger, if there is another attempt;
//! - the plan is a function of the ledgers alone, so all ranks have the same;
//! - no piece crosses an operation.

mod ballot;
mod decide;
mod ledger;
mod plan;
#[cfg(feature = "snapshot")]
pub mod rehearsal;
mod remains;
#[cfg(test)]
mod tests;
mod view;

pub(crate) use ballot::{Authority, Ballot, Dead, Message, Outcome};
pub(crate) use decide::{Account, Decision, Offered, decide, of_last_tree, settled};
pub(crate) use ledger::Ledger;
#[cfg(test)]
pub(crate) use plan::plan;
pub(crate) use plan::{Piece, Source, Unrepairable};
pub(crate) use remains::{
    Landed, Remains, fresh, give_contribution, give_result, is_unknown, land, ledger, result_lens,
};
pub(crate) use view::{End, Event, View};
