//! Collective communication with in-network reduction: all-reduce and its relatives between the ranks of a job, summed
//! by devices in the network (DPUs, SmartNICs, switch-side processors) where there are any, and by host collectives
//! where not.
//!
//! If you know NCCL or MPI, you know the model. A *job* has `world` *ranks*, one for each process or thread. Each rank
//! joins through the *controller* (`sumac controller`), which assigns the job an *aggregation tree* of devices, and
//! gets a [`Communicator`]. All ranks then call the same collectives in the same order.
//!
//! ```no_run
//! use sumac::{Communicator, JoinConfig, ReduceOp};
//!
//! fn main() -> Result<(), sumac::Error> {
//!     // What torchrun, mpirun, srun or `sumac run` set, and SUMAC_*.
//!     let comm = Communicator::join(JoinConfig::from_env()?)?;
//!
//!     let mut gradients = comm.alloc::<f32>(1 << 20)?;
//!     gradients.fill(comm.rank() as f32);
//!     let outcome = comm.all_reduce(&mut gradients, ReduceOp::Sum)?;
//!     println!("rank {} of {}: {} by {}", comm.rank(), comm.size(), gradients[0], outcome.path.name());
//!
//!     comm.leave();
//!     Ok(())
//! }
//! ```
//!
//! # Join
//!
//! [`JoinConfig::from_env`] reads what launchers set; [`JoinConfig::new`] takes the same from your program.
//! [`Communicator::join`] returns when all ranks of the job have joined. Ranks that give the same job name to the same
//! controller meet; several jobs share a controller and its devices.
//!
//! # Call
//!
//! Each collective is a method: [`all_reduce`](Communicator::all_reduce), [`reduce`](Communicator::reduce),
//! [`broadcast`](Communicator::broadcast), [`reduce_scatter`](Communicator::reduce_scatter),
//! [`all_gather`](Communicator::all_gather), [`gather`](Communicator::gather), [`scatter`](Communicator::scatter),
//! [`all_to_all`](Communicator::all_to_all), [`barrier`](Communicator::barrier). [`Communicator::run`] takes an
//! operation that is described at run time ([`OpDesc`]). [`send`](Communicator::send) and
//! [`receive`](Communicator::receive) move messages between two ranks.
//!
//! A call blocks until it is complete at this rank, and never longer than its deadline ([`CallOptions::deadline`],
//! [`JoinConfig::deadline`]).
//!
//! # Outcomes
//!
//! Every call returns an [`Outcome`], which says what really happened: the path taken (the tree, or a host collective
//! such as ring), whether the transfer was zero-copy, the bytes on the wire, the reason for a fallback, whether the
//! operation had to be recovered, and the slowest rank. A fallback is never silent. [`Communicator::explain`] tells you
//! in advance which path a call would take, what each candidate costs and why others are ruled out.
//!
//! # Zero-copy memory
//!
//! [`Communicator::alloc`] returns a [`Buffer`], which is a slice of *registered* memory: where rank and leaf device
//! share memory, the device reads contributions from it and writes results to it directly. Any other slice works as
//! well, but is copied through a bounce buffer. [`Outcome::transfer`] says which of the two it was.
//!
//! # Asynchronous operations
//!
//! `start_*` methods ([`start_all_reduce`](Communicator::start_all_reduce)) take ownership of a [`Vec`] or a [`Buffer`]
//! and return a [`Handle`]; [`Handle::wait`] returns the buffer with the result. A start or wait that fails gives it
//! back ([`StartError`], [`WaitError`]).
//!
//! ```no_run
//! # use sumac::{Communicator, Error, ReduceOp};
//! # fn step(comm: &Communicator, backward: impl Fn()) -> Result<(), Error> {
//! let handle = comm.start_all_reduce(vec![1.0_f32; 1 << 20], ReduceOp::Sum)?;
//! backward(); // overlaps with the operation
//! let (gradients, outcome) = handle.wait()?;
//! # drop((gradients, outcome));
//! # Ok(())
//! # }
//! ```
//!
//! There is no progress thread: operations advance while any call of the communicator runs.
//! [`Communicator::all_reduce_bucketed`] coalesces many small tensors.
//!
//! # Errors and failures
//!
//! All calls return [`Error`]. An error for which [`Error::is_rejection`] is true had no effect: correct the call and
//! make it again. Any other error ends the communicator, and every later call returns [`Error::Ended`].
//!
//! The death of a device is no error: the ranks complete the interrupted operations among themselves, bit-exactly, and
//! go on with another tree or with host collectives ([`Outcome::recovered`]). When a rank dies, all survivors get the
//! same [`Error::RanksFailed`], which lists the failed ranks, and continue with [`Communicator::shrink`]:
//!
//! ```no_run
//! # use sumac::{Communicator, Error, ReduceOp};
//! # fn train(mut comm: Communicator, gradients: &mut [f32]) -> Result<(), Box<dyn std::error::Error>> {
//! match comm.all_reduce(gradients, ReduceOp::Sum) {
//!     Ok(_) => {}
//!     Err(Error::RanksFailed { ranks, .. }) => {
//!         eprintln!("lost {ranks:?}, going on without them");
//!         comm = comm.shrink()?;
//!     }
//!     Err(error) => return Err(error.into()),
//! }
//! # drop(comm);
//! # Ok(())
//! # }
//! ```
//!
//! `main` may return [`Error`]: it prints as one line that says what to do.
//!
//! [`crate::comm`] has the details: buffer lengths, stragglers, the loss of the controller, forked processes.
//!
//! # Sub-communicators
//!
//! [`Communicator::split`] makes communicators by color and key, as `MPI_Comm_split` does. [`Cart`] arranges ranks in a
//! grid, and [`Communicator::split_along`] splits it along an axis, for data, pipeline and tensor parallelism. Each has
//! a group of its own on the devices, so that their operations overlap.
//!
//! # Log
//!
//! Events go to the program's `tracing` subscriber. Without one, each fault is one line on stderr: a job that gets no
//! tree, a lost device, an ended communicator. The variable `SUMAC_LOG` selects more (`debug`,
//! `sumac::controller=trace`), or `off`. The crate installs no subscriber, so a program may set its own at any time.
//!
//! # Test
//!
//! With the feature `testing`, `sumac::testing::LocalCluster` runs a controller, emulated devices and ranks in one
//! process, and kills devices when you say so.
//!
//! # Inside
//!
//! [`comm`] is the API. The other modules are its internals, public for the `sumac` command, tests and tools; they
//! change without notice.
//!
//! ```text
//!   comm                           the API
//!    v
//!   engine ----> select            which algorithm, and why
//!    |  \------> recovery          what is agreed and done when devices or ranks are lost
//!    |   \-----> transport         the path into the tree: packets, or memory shared with the leaf device
//!    |    \----> exec -> schedule  host collectives over TCP; gpu runs the same schedules on GPU memory
//!    v
//!   controller -> plan -> topo     membership, tree placement, the fabric
//! ```
//!
//! The buffer of an all-reduce goes down `comm` -> `engine` -> `transport` (or `exec`, for a host collective), and its
//! outcome comes up the same way. If a device or a rank is lost, `transport` and `exec` return to `engine`, which asks
//! `recovery` what to do, and goes on. `transport` and `exec` do not know of each other; what `exec` may read of the
//! memory that `transport` registers is in `region_exports`.

pub mod comm;
pub mod config_file;
pub mod controller;
mod deadline;
mod engine;
pub mod exec;
pub mod gpu;
pub mod local_address;
mod log;
mod memory_kind;
pub mod plan;
mod recovery;
mod region_exports;
pub mod schedule;
mod secret;
pub mod select;
#[cfg(feature = "testing")]
pub mod testing;
pub mod topo;
pub mod transport;
mod wait_policy;

/// Harnesses for simulators, which carry messages themselves: recovery, and started operations.
#[cfg(feature = "snapshot")]
pub mod harness {
    pub use crate::engine::harness::*;
    pub use crate::recovery::harness::*;
}

pub use comm::{
    BUCKET_BYTES, Buffer, Buffers, CallOptions, Canceller, Cart, Communicator, Counts, CreationError, Element, Error,
    Handle, JoinConfig, JoinError, MessageHandle, Outcome, OwnedBuffer, Progress, RawBuffers, Request, ShrinkError,
    Slowest, SplitError, StartError, Straggler, Transfer, Trees, WaitError,
};
#[expect(deprecated, reason = "the old name works for one more release")]
pub use controller::proto::Attach;
pub use controller::proto::Transport;
pub use half::{bf16, f16};
pub use memory_kind::MemoryKind;
pub use schedule::Shape;
pub use select::Algo;
pub use sumac_hal::ctrl::Order;
pub use sumac_hal::ids::Rank;
pub use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
pub use sumac_hal::traffic_class::TrafficClass;
pub use sumac_hal::udp::{Offload, UdpConfig};
pub use sumac_hal::wire::RankMask;
pub use wait_policy::WaitPolicy;
