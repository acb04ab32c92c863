//! Collective algorithms as data: which rank sends which elements to whom, in which step.
//!
//! A [`Schedule`] is pure index arithmetic over (rank, ranks, count, root). It performs no I/O and knows no element
//! type, so the same data drives the executor ([`crate::exec`]), the checker ([`check`]), which proves it for all ranks
//! at once, and the cost model. All of them take one step at a time ([`Schedule::steps`], [`Schedule::read`]): where an
//! algorithm's steps grow with the number of ranks, they are computed from their index, and never all in memory. To add
//! an algorithm, add a function that returns a [`Schedule`] and a line in [`ALGORITHMS`]; for a new collective also a
//! [`check::Goal`].
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
//! | [`tree::reduce`], large n: D combinations in a row, k segments (bounds) | D + k | 2n (1 + D/k) | n | 2n |
//! | [`tree::all_reduce`], the same | 2D + k | 4n (1 + D/k) | n | 4n |
//! | [`dissemination::barrier`] | l | 0 | 0 | 0 |
//! | [`one_shot::all_reduce`] | 1 | n(p-1) | n(p-1) | n(p-1) |
//! | [`one_shot::reduce`] | 1 | n(p-1) | n(p-1) | n |
//! | [`one_shot::broadcast`] | 1 | n(p-1) | 0 | n(p-1) |
//! | [`one_shot::reduce_scatter`] | 1 | n(p-1)/p | n(p-1)/p | n(p-1)/p |
//! | [`one_shot::all_gather`] | 1 | n(p-1)/p | 0 | n(p-1)/p |
//! | [`one_shot::barrier`] | 1 | 0 | 0 | 0 |
//! | [`star::all_reduce`] | 2(p-1) | 2n(p-1) | n(p-1) | n(p-1) |
//! | [`star::reduce`] | p-1 | n(p-1) | n(p-1) | n |
//! | [`star::broadcast`] | p-1 | n(p-1) | 0 | n(p-1) |
//! | [`star::gather`] | p-1 | n(p-1)/p | 0 | n/p |
//! | [`star::scatter`] | p-1 | n(p-1)/p | 0 | n(p-1)/p |
//! | [`full_mesh::all_reduce`] | 2, of p-1 messages each | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | [`double_tree::all_reduce`], h = floor(log(p-1)), k segments (bounds) | 2h + k + 1 | n (2 + 2h/k) | n | 2n |
//! | [`double_tree::reduce`] (bounds) | h + k | n (1 + h/k) | n | n |
//! | [`double_tree::broadcast`] (bounds) | h + k | n (1 + h/k) | 0 | n |
//! | [`chain::all_reduce`], p >= 2, k segments | 2(p-2) + k + 1 | 2n (1 + (p-2)/k) | n | 2n, p > 2 |
//! | [`chain::reduce`], [`chain::broadcast`], p >= 2 | p-2 + k | n (1 + (p-2)/k) | n; 0 | n |
//! | [`nhr::all_reduce`] | 2 l | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | [`nhr::reduce_scatter`] | l | n(p-1)/p | n(p-1)/p | n(p-1)/p |
//! | [`nhr::all_gather`] | l | n(p-1)/p | 0 | n(p-1)/p |
//! | [`pat::reduce_scatter`], a = 2^j blocks, r segments | r (ceil(p/a) - 1 + j), p = p' | n(p-1)/p | n(p-1)/p | n(p-1)/p |
//! | [`pat::all_gather`] | ceil(p/a) - 1 + j | n(p-1)/p | 0 | n(p-1)/p |
//! | [`swing::all_reduce`] | as [`halving_doubling::all_reduce`], with two messages a step, 2D on a torus | | | |
//! | [`swing::all_reduce_latency`] | as [`recursive_doubling::all_reduce`], with as many messages a step | | | |
//! | [`bine::all_reduce`] | as [`halving_doubling::all_reduce`] | | | |
//! | [`bine::reduce_scatter`], [`bine::all_gather`] | as those of [`halving_doubling`] | | | |
//! | [`bine::reduce`], [`bine::broadcast`] | as those of [`binomial`] | | | |
//! | [`van_de_geijn::broadcast`], root 0 (bound for others: n (2^l + p - 2)/p) | 2 l | 2n(p-1)/p | 0 | 2n(p-1)/p |
//! | [`ring_2d::all_reduce`], D dimensions of d ranks each, s = sum of all d-1 | 2s | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | [`ring_2d::reduce_scatter`], [`ring_2d::all_gather`] | s | n(p-1)/p | n(p-1)/p; 0 | n(p-1)/p |
//! | [`torus_2d::all_reduce`] | 2s, of up to D messages each | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | [`torus_2d::reduce_scatter`], [`torus_2d::all_gather`] | s | n(p-1)/p | n(p-1)/p; 0 | n(p-1)/p |
//! | [`mesh_2d::reduce_scatter`], n' elements along d >= 3 ranks | d-1 | floor((3d-1)/2) n'/d | n'(d+1)/d | n'(d-1)/d |
//! | [`mesh_2d::all_gather`], the same | d-1 | max(d+1, floor((3d-2)/2)) n'/d | 0 | n'(d+1)/d |
//! | [`mesh_2d::all_reduce`] | their sum over all dimensions | | | |
//! | [`hierarchical_ring::all_reduce`], G servers of m > 1 ranks | 2 + 2(G-1), two of m-1 messages | 2n(p-1)/p | n(p-1)/p | 2n(p-1)/p |
//! | [`hierarchical_ring::reduce_scatter`], [`hierarchical_ring::all_gather`] | 1 + G-1 | n(p-1)/p | n(p-1)/p; 0 | n(p-1)/p |
//! | [`hierarchical_pairwise::all_to_all`], [`all_to_all_v`](hierarchical_pairwise::relayed::all_to_all_v) | 1 + G-1, one of m-1 messages | n ((m-1)/m + (G-1)/G) | 0 | as the path |
//! | [`hybrid::reduce_scatter_inside`], [`hybrid::all_gather_inside`], servers of m ranks: parts around a tree | m-1 | n(m-1)/m | n(m-1)/m; 0 | n(m-1)/m |
//! | [`rab::reduce_inside`], [`rab::broadcast_inside`], servers of m ranks: parts around a tree | as [`binomial`], [`chain`] or [`double_tree`] of m ranks | | | |
//! | [`server_step`], the same parts for short messages | 1, of up to m-1 messages | as [`one_shot`] of m ranks | | |
//!
//! The last ones use the [`Shape`] of the ranks; Swing does where it is a torus of powers of two.
//!
//! Invariants, each proved by the checker for p in 1..=64, and in every shape of up to four dimensions; for up to 1024
//! ranks by samples:
//! - Within a step nothing is received into elements that the step sends, or that it receives elsewhere.
//! - A value is read in the form in which it was written (input, partial, finished), and is finished only with every
//!   contribution included. The form in which elements travel (16-bit floats travel as f32 while partial) therefore
//!   follows from the buffers.
//! - Every send matches its receive, even if sends wait for their receivers.

mod algorithm;
pub mod bine;
pub mod binomial;
pub mod bruck;
mod buffer;
mod butterfly;
pub mod chain;
pub mod check;
mod circulant;
mod combinations;
mod dimensions;
pub mod dissemination;
pub mod double_tree;
mod fold;
pub mod full_mesh;
pub mod halving_doubling;
pub mod hierarchical_pairwise;
pub mod hierarchical_ring;
pub mod hybrid;
mod lines;
pub mod loads;
pub mod mesh_2d;
pub mod nhr;
pub mod one_shot;
pub mod pairwise;
pub mod pat;
mod pipeline;
pub mod rab;
pub mod recursive_doubling;
pub mod ring;
pub mod ring_2d;
pub mod rounds;
pub mod server_step;
mod shape;
pub mod star;
mod steps;
pub mod swing;
pub mod torus_2d;
pub mod tree;
pub mod van_de_geijn;

pub use algorithm::{ALGORITHMS, Algorithm, Cost, Pattern, Problem};
pub use buffer::{Buffer, Landing, Layout, Local, Operand, Recv, Region, Send, Side};
pub use shape::{DIMENSIONS_MAX, Dims, Shape, ShapeError};
pub use steps::{Place, PlaceError, Schedule, Span, Step, StepBuffer, Steps};
