//! Executes schedules between processes: CPU memory, over TCP, and over shared memory between ranks of one machine.
//!
//! [`Mesh`] owns a rank's connections, and an [`Execution`] runs the rank's [`Schedule`](crate::schedule::Schedule)
//! over them. [`message`] sends and receives between two ranks, also while a schedule runs. One thread, non-blocking
//! sockets and one `poll`; nothing is allocated per operation once the mesh is warm. An [`Interrupt`] that must be
//! handled outside pauses the operation, which keeps its place.
//!
//! Invariants:
//! - Every frame names its operation, and is used only by that operation: mismatched calls fail with
//!   [`ExecError::Mismatch`]; they never produce wrong numbers or hang.
//! - An operation ends with the result or a named error by its deadline. The rank that detects an error notifies all
//!   others, connected or not, and all return the same error.
//! - After an error the mesh is poisoned: its streams may be in the middle of a frame, so nothing more is sent.
//!
//! After an error the output, and a buffer used in place, hold any mixture of inputs, partial values and results. A
//! separate input is unchanged: use one if it may be needed again.

mod abort;
mod acceptor;
mod announce;
mod auth;
pub(crate) mod board;
mod error;
mod flush;
mod frame;
mod handshake;
mod link;
mod memory;
pub(crate) mod memory_layout;
mod mesh;
pub mod message;
pub(crate) mod oob;
mod other_calls;
mod p2p;
mod poll;
mod poll_backoff;
mod regions;
pub(crate) mod round;
mod run;
mod shared;
mod sharing;

#[cfg(test)]
mod board_steps_tests;
#[cfg(test)]
mod board_tests;
#[cfg(test)]
mod collective_tests;
#[cfg(test)]
mod failure_tests;
#[cfg(test)]
mod message_tests;
#[cfg(test)]
mod region_tests;
#[cfg(test)]
mod server_board_tests;
#[cfg(test)]
mod shared_tests;
#[cfg(test)]
pub(crate) mod tests;

pub use crate::secret::JobSecret;
pub use error::{Call, ExecError, MeshError, Refusal};
pub use memory::Buffers;
pub use mesh::{Mesh, SharedMemory};
pub(crate) use other_calls::{end_different, other_calls};
pub use run::{Context, Execution, Interrupt, NoInterrupt, Status, execute};
