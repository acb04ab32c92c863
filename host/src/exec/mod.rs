//! Runs schedules and endpoints between processes: CPU memory, TCP and ports.
//!
//! [`TreeDriver`] moves packets between an endpoint and its port; the rest of this module is about schedules.
//!
//! [`message`] sends and receives between two ranks, also while a schedule runs.
//!
//! [`gpu`] runs the same schedules over GPUs' memory, for ranks that share one and for ranks that reach each other's.
//!
//! [`Mesh`] owns the connections, [`execute`] runs one rank's [`Schedule`](crate::schedule::Schedule) over them.
//! One thread, non-blocking sockets and one `poll`; nothing is allocated per operation once the mesh is warm.
//!
//! Invariants:
//! - every frame says which operation it belongs to, and is used only by that operation: ranks that call
//!   different things get [`ExecError::Mismatch`], not wrong numbers and not a hang;
//! - an operation ends in the result or in a named error by its deadline; the rank that finds an error tells all
//!   others, connected or not, and they return the same error;
//! - after an error the mesh is poisoned: its streams may stand in the middle of a frame, so nothing more is sent.
//!
//! After an error the output, and a buffer that is input and output, hold any mixture of inputs, partial values and
//! results. A separate input stays as it is: use one where it may be needed again.

mod abort;
mod acceptor;
mod announce;
mod error;
mod frame;
mod greet;
mod lane;
mod link;
mod memory;
mod mesh;
pub mod message;
pub(crate) mod notes;
pub(crate) mod place;
mod polls;
mod run;
mod watch;

#[cfg(test)]
mod collective_tests;
#[cfg(test)]
mod failure_tests;
#[cfg(test)]
mod message_tests;
#[cfg(test)]
pub(crate) mod tests;

pub use error::{Call, ExecError, MeshError, Refusal};
pub use memory::Buffers;
pub use mesh::{JobToken, Mesh};
pub use run::{Context, Interrupt, NoInterrupt, execute};
