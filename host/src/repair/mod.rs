//! What becomes of operations whose tree is lost: which chunks somebody has, and which have to be computed again
//! (PROTOCOL 8). What is decided here [`crate::comm`] carries out, in its own `repair`.
//!
//! Every rank describes what it has in a [`Ledger`], sends it to all others, and works out the same [`Plan`] from the
//! same ledgers. Then the pieces of the plan run one after the other, each as a schedule between the ranks:
//! - a chunk whose result some rank has is broadcast by the lowest of those ranks;
//! - a chunk whose result nobody has is reduced again, from contributions that are all intact then, by a schedule that
//!   evaluates the declared expression.
//!
//! An operation that not every rank had entered has no result anywhere: it is left out, and begins again on the next
//! path.
//!
//! Invariants:
//! - ledgers are made after the freeze: no result is taken in, and no device writes, between a ledger and the end of the
//!   repair;
//! - the plan is a function of the ledgers alone, so all ranks have the same;
//! - no piece crosses an operation.
//!
//! PROTOCOL 8 has a coordinator that collects promises and hands out the plan. While all ranks are alive, an exchange
//! among all says the same in fewer steps, and nobody has to be elected; a rank that dies ends the repair with its name.

mod ledger;
mod plan;
#[cfg(feature = "snapshot")]
pub mod rehearsal;
mod remains;
#[cfg(test)]
mod tests;

pub(crate) use ledger::Ledger;
pub(crate) use plan::{Piece, Source, Unrepairable, plan};
pub(crate) use remains::{Remains, give_contribution, give_result, land, ledger, result_lens};
