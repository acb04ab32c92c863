//! The aggregation runtime: what a Sumac device runs.
//!
//! `no_std`, no allocation, no unsafe code. The core is sans-I/O ([`Node`]); [`runtime::poll`] moves packets
//! between it and a [`Port`](sumac_hal::port::Port). Boards supply storage, ports, a clock and a thread.
//!
//! ```text
//!            Request / Response                    Event
//!                   |                                ^
//!   packet   +------v--------------------------------+------+   packet
//!  --------->| Node: groups -> slots -> order -> kernels    |--------->
//!   now      +----------------------------------------------+   deadline
//! ```
//!
//! The rules are those of the data path's contract: every child sends exactly one contribution per chunk and
//! gets exactly one answer; the answer is the acknowledgement; a slot is used again only when every child has
//! what was in it.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod function;
mod group;
mod memory;
mod node;
mod order;
pub mod runtime;
mod sets;
mod slot;
mod trace;

pub use group::{Child, Group};
pub use memory::{Memory, Storage};
pub use node::{
    Answer, AttachError, Event, MAX_EVENTS, MAX_REPLIES, Node, NodeConfig, Outgoing, RedoSlot, Reference, References,
    Transmit,
};
#[cfg(feature = "snapshot")]
pub use node::{Phase, Rest};
pub use slot::Slot;
pub use trace::{Entry, TRACE_LEN, Trace, TraceRing};
