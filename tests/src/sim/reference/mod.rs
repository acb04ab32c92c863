//! Contributions by reference: ranks whose leaf's engine reads and writes their memory, beside ranks by packets.
//!
//! ```text
//! ReferenceEndpoint --- rings ---> board: Node, RegionTable, SimEngine --- packets ---> nodes above
//!        seat       <-- rings ---    |                 |
//!          |                         |                 v
//!          '---- registered memory, bounce <-------- every step, by the emulated engine
//!          '---- redo slots, which outlive the board
//! ```
//!
//! The device's node, its region table and its engine's arithmetic are production code, as are the rank's endpoint, its
//! bounce buffer, the rings, their entries, what is salvaged of a group that is over, and what is decided then. Models
//! are: the board's loop and the driver's, which in production live on threads, sockets and mapped memory; the moments
//! at which each looks at its rings; connections that hang up, and hearts that stand still.
//!
//! Drawn: who contributes by reference, in each life of the group anew; what an engine can do, how long steps take, in
//! which order chains end, how many fit; places of rings, the bounce buffer, alignment; which buffers are registered,
//! and where they begin; chains that fail half-way; devices that die, restart or stand still, and ranks that die, at a
//! moment or at a [`CrashPoint`]; whether a dead rank's memory is taken from under the engine; how long
//! it takes to take memory away from a device that stands still, piece by piece, and that may wake meanwhile.
//!
//! Oracles beside those of other scenarios: an engine writes to no memory but where a chunk's result goes whose rank has
//! not been answered, let alone fenced; memory is what the announced writes have made it; chains in flight do not get in each
//! other's way, nor the processor in theirs; nothing names memory that is gone; a device has no chain, slot or region
//! left when the group is released.

mod board;
mod change;
mod check;
mod draw;
mod engine;
mod life;
mod rank;
mod seat;
mod turn;
mod world;

pub use draw::{ByReference, CrashPoint, Fate, Mishap, Setup, When};
pub(super) use world::run;
