//! Collective algorithms as data: which rank sends which elements to whom, in which step.
//!
//! A [`Schedule`] is pure index arithmetic over (rank, ranks, count, root). It performs no I/O and knows no element
//! type, so the same data drives the executor ([`crate::exec`]), the checker ([`check`]), which proves it for all ranks
//! at once, and the cost model. To add an algorithm, add a function that returns a [`Schedule`] and a line in
//! [`ALGORITHMS`]; for a new collective also a [`check::Goal`].
//!
//! Each rank has three buffers ([`Buffer`]): its input, its output and room for partial values. The same schedule runs
//! in place and out of place. Wherever `n` elements are divided into p blocks, the same rule applies for every n:
//! blocks differ by at most one element, and are equal where p divides n.
//!
//! Costs are in the alpha-beta-gamma model, for n elements over p ranks, with p' = 2^floor(log2 p) and l = ceil(log2
//! p); all logarithms are to base 2. "Path" is what the longest chain of dependent messages carries. Sources are cited
//! in the modules. [`Cost`] holds the same formulas as data, with what all ranks together send; a test compares them
//! with what the checker counts.
//!
//! | Algorithm | Steps (alpha) | Path (beta) | Reduced (gamma) | Busiest sender |
//! |---|---|---|---|---|
//! | [`ring::all_reduce`] | 2(p-1) | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | [`ring::reduce_scatter`] | p-1 | n(p-1)/p | n(p-1)/p | n(p-1)/p |
//! | [`ring::all_gather`] | p-1 | n(p-1)/p | 0 | n(p-1)/p |
//! | [`halving_doubling::all_reduce`], p = p' | 2 log p | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | the same, other p | 2 log p' + 2 | 2n(p'-1)/p' + 2n | n(p'-1)/p' + n | 2n(p'-1)/p' + n |
//! | [`halving_doubling::reduce_scatter`], p = p' | log p | n(p-1)/p | n(p-1)/p | n(p-1)/p |
//! | the same, other p (bounds) | log p' + 2 | n + 2n(p'-1)/p + n/p | n + 2n(p'-1)/p | n + 2n(p'-1)/p |
//! | [`halving_doubling::all_gather`], p = p' | log p | n(p-1)/p | 0 | n(p-1)/p |
//! | the same, other p (bounds) | log p' + 2 | n/p + 2n(p'-1)/p + n | 0 | 2n(p'-1)/p + n |
//! | [`recursive_doubling::all_reduce`], p = p' | log p | n log p | n log p | n log p |
//! | the same, other p | log p' + 2 | n log p' + 2n | n log p' + n | n log p' + n |
//! | [`bruck::all_gather`] | l | n(p-1)/p | 0 | n(p-1)/p |
//! | [`binomial::reduce`] | l | n l | n l | n |
//! | [`binomial::broadcast`] | l | n l | 0 | n l |
//! | [`binomial::all_reduce`] | 2 l | 2n l | n l | n l |
//! | [`binomial::gather`], root 0 (bound for others: n (2^l-1)/p) | l | n(p-1)/p | 0 | n max(2^(l-2), p - 2^(l-1))/p |
//! | [`binomial::scatter`], root 0 (the same bound) | l | n(p-1)/p | 0 | n(p-1)/p |
//! | [`pairwise::all_to_all`] | p-1 | n(p-1)/p | 0 | n(p-1)/p |
//! | [`pairwise::all_to_all_in_place`] | p | n | 0 | n(p-1)/p |
//! | [`pairwise::reduce_scatter`] | p-1 | n(p-1)/p | n(p-1)/p | n(p-1)/p |
//! | [`pairwise::all_reduce`] | p-1 + l | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | [`tree::reduce`], one node | p-1 | n(p-1) | n(p-1) | n |
//! | [`tree::all_reduce`], one node | p-1 + l | n(p-1) + n l | n(p-1) | n l |
//! | [`dissemination::barrier`] | l | 0 | 0 | 0 |
//!
//! Invariants, each proved by the checker for p in 1..=64:
//! - Within a step nothing is received into elements that the step sends, or that it receives elsewhere.
//! - A value is read in the form in which it was written (input, partial, finished), and is finished only with every
//!   contribution included. The form in which elements travel (16-bit floats travel as f32 while partial) therefore
//!   follows from the buffers.
//! - Every send matches its receive, even if sends wait for their receivers.

mod algorithm;
pub mod binomial;
pub mod bruck;
mod buffer;
pub mod check;
pub mod dissemination;
mod fold;
pub mod halving_doubling;
pub mod pairwise;
pub mod recursive_doubling;
pub mod ring;
mod steps;
pub mod tree;

pub use algorithm::{ALGORITHMS, Algorithm, Cost, Pattern, Problem};
pub use buffer::{Buffer, Landing, Layout, Local, Operand, Recv, Region, Send, Side};
pub use steps::{Place, PlaceError, Schedule, Span, Step};
