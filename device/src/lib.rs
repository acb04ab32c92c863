//! The aggregation runtime that runs on a Sumac device.
//!
//! `no_std`, no allocation, no unsafe code. The core is sans-I/O: a [`Node`] takes packets, control requests and the
//! time, and returns packets, events and deadlines. [`runtime::poll`] moves packets between a node and a
//! [`Port`](sumac_hal::port::Port). A board supplies storage, ports, a clock and a thread.
//!
//! ```text
//!            Request / Response                    Event
//!                   |                                ^
//!   packet   +------v--------------------------------+------+   packet
//!  --------->| Node: groups -> slots -> order -> kernels    |--------->
//!   now      +----------------------------------------------+   deadline
//! ```
//!
//! Every child sends exactly one contribution per chunk and gets exactly one answer, which acknowledges the
//! contribution. A slot is reused only once every child holds the answer that was in it.
//!
//! To port Sumac to a board:
//!
//! 1. Give a [`Node`] its tables: [`Memory`] in a `static`, or a [`Storage`] of slices from a heap.
//! 2. Pass each control request to [`Node::control`] and call [`runtime::poll`] in a loop, sleeping until the
//!    deadline that it returns.
//! 3. For zero-copy ranks, create the node with [`Node::with_zero_copy`] and drive each rank's rings with a
//!    [`function::Function`].
//!
//! With the feature `testing`, `testing` has a group and its children for tests; `examples/node.rs` is a node and its
//! children in one screen.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod function;
mod node;
mod order;
pub mod runtime;
mod sets;
mod slot;
#[cfg(feature = "testing")]
pub mod testing;
mod trace;

pub use node::{
    Answer, AttachError, BufferRef, Child, Event, Group, Hop, MAX_EVENTS, MAX_REPLIES, Memory, Node, NodeConfig,
    Payload, RedoSlot, Storage, ZeroCopyStorage,
};
#[cfg(feature = "snapshot")]
pub use node::{NodeSnapshot, Phase};
pub use slot::Slot;
pub use trace::{Entry, TRACE_LEN, Trace, TraceRing};
