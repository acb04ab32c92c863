//! Zero-copy ranks: the leaf's engine reads and writes their memory. Other ranks of the same group use packets.
//!
//! ```text
//! ZeroCopyEndpoint --- rings ---> board: Node, RegionTable, SimEngine --- packets ---> nodes above
//!        seat       <-- rings ---    |                 |
//!          |                         |                 v
//!          '---- registered memory, bounce <-------- every step, by the emulated engine
//!          '---- redo slots, which outlive the board
//! ```
//!
//! Production code: the device's node, region table and engine arithmetic; the rank's endpoint, bounce buffer, rings
//! and entries; what is salvaged of an ended group, and the decisions then. Models: the board's loop and the rank's
//! driver, which in production use threads, sockets and mapped memory; when each polls its rings; connections that hang
//! up, and heartbeats that stop.
//!
//! Drawn: which ranks are zero-copy, anew in each incarnation of the group; the engine's capabilities, step times,
//! order of chains and queue depth; ring sizes, the bounce buffer, alignment; which buffers are registered, and their
//! offsets; chains that fail half-way; devices that die, restart or stall, and ranks that die, at a time or at a
//! [`CrashPoint`]; whether a dead rank's memory is revoked under the engine; how long it takes to sever memory from a
//! stalled device, piece by piece, while it may wake up.
//!
//! Oracles besides those of other scenarios: an engine writes only to the place of a chunk's result whose rank is
//! neither answered nor fenced; memory contains exactly the announced writes; chains in flight conflict neither with
//! each other nor with the processor; nothing refers to released memory; a device has no chain, slot or region left
//! when the group is released.

mod agreement;
mod board;
mod change;
mod check;
mod draw;
mod driver;
mod engine;
mod incarnation;
mod losses;
mod rank;
mod turn;
mod world;

pub use draw::{CrashPoint, Fate, Mishap, Setup, When, ZeroCopy};
pub use losses::every_device_loss;
pub(super) use world::run;
