//! From a call to its outcome: posting, progress, started operations and memory; only [`crate::comm`] enters it.
//!
//! A blocking all-reduce in a tree takes this path, each file once down and once up:
//!
//! ```text
//!   calls        check the buffers, select the path, wait in a loop
//!     |  ^       the buffers are borrowed by each step of the loop
//!     v  |
//!   data_path    post; then drive the tree, and block until the next packet
//!     |  ^
//!     v  |
//!   tree_end     the present tree: operation numbers, counters
//!     |  ^
//!     v  |
//!   transport    chunks out of the buffer, results into it
//! ```
//!
//! `data_path` recovers nothing: it returns [`Stop`](data_path::Stop) to the driver ([`mod@core`]). If the view is in
//! question, the driver carries out what [`crate::recovery`] decides ([`change`]), and the loop goes on. A host
//! collective goes from `calls` through `host` to [`crate::exec`], which drives the data path beside it, and is paused
//! while the view changes. One by the rails is both ([`mod@hybrid`]), and one through relays is three, one after the
//! other ([`relayed`]).
//!
//! Started operations and messages are tasks ([`task`]). With [`Progress::Thread`](options::Progress::Thread), callers
//! put them into a queue ([`submissions`], a [`queue`], by [`submit`]), and the communicator's thread ([`progress`])
//! begins, drives and ends them.
//!
//! Invariants:
//! - no file needs one that needs it: the parts ([`tree_end`], [`operations`], [`connections`], [`selection`],
//!   [`watch`]) know neither each other nor the data path, and the data path does not know the driver;
//! - nothing here is called by recovery, which returns what is to be done.

mod calls;
mod change;
mod compare;
mod config;
mod connections;
mod core;
mod counts;
mod data_path;
mod decided;
mod departure;
mod dropped;
mod element;
mod embedded;
pub(crate) mod error;
mod extent;
mod foreign;
#[cfg(feature = "snapshot")]
pub(crate) mod harness;
mod host;
mod hybrid;
mod in_flight;
mod inside;
#[cfg(test)]
mod interleavings;
mod join;
mod leave;
mod membership;
mod messages;
mod migrate;
mod migration_gate;
mod new_tree;
mod notices;
mod operations;
mod options;
mod owned;
mod pieces;
mod prepared;
mod progress;
mod queue;
mod rail;
mod rails;
mod recent;
mod relayed;
mod rounds;
mod selection;
mod shared;
mod shares;
mod short_block;
mod started;
mod straggler;
mod stripes;
mod submissions;
mod submit;
mod sync;
mod task;
mod thread_progress;
mod tree;
mod tree_end;
mod watch;

pub(crate) use self::core::Core;
pub use config::{DEFAULT_PORT, JoinConfig, JoinError};
pub use counts::Counts;
pub use departure::Departure;
pub use element::Element;
pub(crate) use element::ErasedBuffer;
pub(crate) use error::creation_error;
pub use error::{CreationError, Error, OutputState, StartError, WaitError};
pub use foreign::RawBuffers;
pub(crate) use foreign::{ForeignMemory, Keep};
pub(crate) use join::join_as;
pub use notices::ControllerState;
pub(crate) use notices::Notices;
pub use options::{CallOptions, Outcome, Outstanding, Progress, Recoveries, Straggler};
pub(crate) use owned::Owned;
pub(crate) use prepared::PreparedCall;
pub(crate) use rail::Rail;
pub(crate) use rails::join_rails;
pub(crate) use shared::SharedCore;
pub(crate) use stripes::Stripes;
pub use stripes::Trees;
pub(crate) use task::{Operation, Post, Task, Work};
