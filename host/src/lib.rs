//! The host's side of Sumac: communicators, the controller, the planner, schedules.
//!
//! ```text
//!   comm ------> select            which algorithm, and why
//!    |  \------> transport         through the tree: packets, or memory that the leaf device reads and writes
//!    |   \-----> exec -> schedule  or by a schedule, over TCP; gpu runs the same in GPU memory
//!    |    \----> recovery          what is done when devices or ranks are lost
//!    v
//!   controller -> plan -> topo     who is where, on which tree
//! ```

pub mod comm;
pub mod controller;
pub mod exec;
pub mod gpu;
pub mod plan;
mod recovery;
pub mod schedule;
pub mod select;
pub mod topo;
pub mod transport;

pub use comm::{
    BUCKET_BYTES, Buffer, Buffers, CallOptions, Canceller, Cart, Communicator, Element, Error, Handle, Held,
    JoinConfig, JoinError, MessageHandle, Outcome, ShrinkError, Slowest, SplitError, Straggler, Transfer,
};
pub use controller::proto::Attach;
#[cfg(feature = "snapshot")]
pub use recovery::rehearsal;
pub use select::Algo;
pub use sumac_hal::ctrl::Order;
pub use sumac_hal::ids::Rank;
pub use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
pub use sumac_hal::wire::RankMask;
