//! The host's side of Sumac: communicators, the controller, the planner, schedules.
//!
//! ```text
//!   comm ------> choice            which way, and why
//!    |  \------> exec -> endpoint  through the tree, on a port
//!    |   \          \-> coll       or by a schedule, over TCP
//!    |    \----> reference         or through the tree, by memory that the leaf device reads and writes
//!    v
//!   controller -> plan -> topo     who is where, on which tree
//! ```

pub mod choice;
pub mod coll;
pub mod comm;
pub mod controller;
pub mod endpoint;
pub mod exec;
pub mod plan;
pub mod reference;
mod repair;
pub mod topo;

pub use choice::Algo;
pub use comm::{
    BUCKET_BYTES, Buffer, Buffers, CallOptions, Canceller, Cart, Communicator, Element, Error, Handle, Held,
    JoinConfig, JoinError, MessageHandle, Outcome, ShrinkError, Slowest, SplitError, Straggler, Transfer,
};
pub use controller::proto::Attach;
#[cfg(feature = "snapshot")]
pub use repair::rehearsal;
pub use sumac_hal::ctrl::Order;
pub use sumac_hal::ids::Rank;
pub use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
pub use sumac_hal::wire::RankMask;
