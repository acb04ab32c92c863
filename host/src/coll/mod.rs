//! Collective algorithms as data: who sends which elements to whom, in which step.
//!
//! A [`Schedule`] is pure index arithmetic over (rank, ranks, count). It does no I/O and knows no element
//! type, so the same data drives the executor ([`crate::exec`]), the checker ([`check`]), which proves it for
//! all ranks at once, and a cost model. Adding a collective or an algorithm means adding a function that
//! returns a [`Schedule`] and, for a collective, a [`check::Goal`].
//!
//! | Algorithm | Steps | Elements sent by the busiest rank |
//! |---|---|---|
//! | [`ring::all_reduce`] | 2(p-1) | 2n(p-1)/p |
//! | [`halving_doubling::all_reduce`], p = 2^k | 2k | 2n(p-1)/p |
//! | [`halving_doubling::all_reduce`], other p, p' = 2^floor(log2 p) | 2 log2(p') + 2 | 2n(p'-1)/p' + n |
//! | [`dissemination::barrier`] | ceil(log2 p) | 0 |
//!
//! Invariants, each proved by the checker for p in 1..=64:
//! - within a step nothing is received into elements that the step sends, or that it receives elsewhere;
//! - [`Action::Copy`] moves finished elements, [`Action::Reduce`] moves partial ones, so that the sender knows
//!   the form that travels (16-bit floats travel as f32 while partial) without knowing the algorithm;
//! - every send meets its receive, also if sends wait for their receivers.

pub mod check;
pub mod dissemination;
pub mod halving_doubling;
pub mod ring;
mod schedule;

pub use schedule::{Action, Place, PlaceError, Schedule, Side, Span, Step, Transfer};
