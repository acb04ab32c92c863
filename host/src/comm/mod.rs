//! Communicators: what a program calls.
//!
//! ```no_run
//! use sumac::{Communicator, JoinConfig, ReduceOp};
//!
//! let comm = Communicator::join(JoinConfig::from_env()?)?;
//! let mut gradients = vec![comm.rank() as f32; 1 << 20];
//! let outcome = comm.all_reduce(&mut gradients, ReduceOp::Sum)?;
//! println!("by {}: {}", outcome.path.name(), gradients[0]);
//! comm.leave();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! All ranks make the same calls in the same order; ranks that call different things all get [`Error::Mismatch`].
//! No call hangs: each has a deadline. Nothing takes another path in silence: [`Outcome`] says which was taken and
//! why, and [`Communicator::explain`] says it beforehand.
//!
//! # How long buffers are
//!
//! `n` is the operation's count: the elements of all blocks where ranks own blocks, which are those of
//! [`Span::of_blocks`](crate::schedule::Span) (equal where the number of ranks divides n).
//!
//! | collective | input | output | in place |
//! |---|---|---|---|
//! | all-reduce | n | n | n |
//! | reduce | n | n at the root, else 0 | n |
//! | broadcast | n at the root, else 0 | n | n |
//! | reduce-scatter | n | own block | n; the output is the own block in it |
//! | all-gather | own block | n | n; the input is the own block in it |
//! | gather | own block | n at the root, else 0 | as all-gather at the root, else the own block |
//! | scatter | n at the root, else 0 | own block | as reduce-scatter at the root, else the own block |
//! | all-to-all | n | N own blocks | n, in equal blocks |
//!
//! # Memory
//!
//! A rank that shares memory with its leaf device contributes by reference: the device's engine fetches from
//! [`Communicator::alloc`]ed buffers and writes results back there. Slices of any other memory go through a buffer in
//! between, which costs two copies; [`Outcome::transfer`] says which it was. Such a buffer may outlive the communicator.
//! No call returns while the device could still write to what it was given, whatever it returns.
//!
//! # When a device dies
//!
//! Operations whose tree is lost are completed by the ranks among themselves, to the bit as the declared order says, and
//! later ones go on through another tree if the controller has one, else by schedules: [`Outcome::repaired`],
//! [`Outcome::fallback`] and the log say so. Ranks that are in no call take part on a thread of their own. What the death
//! costs is the time to notice it (at once where memory is shared, else the limit for silent hops) and the movement of
//! what is missing. Memory that the lost device reached is ordinary memory to the next one. [`JoinConfig::repair`] turns it
//! all off.
//!
//! Ranks that were left out before ([`Straggler::Partial`]) would be needed: then nothing is repaired.
//!
//! # When ranks die
//!
//! Those that are left agree on who is dead, and on the first call that fails: [`Error::RanksFailed`] is the same at all of
//! them. Calls before it complete at all, from what some of them have of the results; a broadcast from a live root, or a
//! barrier, that all of them had entered is one of these. [`Fresh`] says what the buffer of a call that fails holds. Whoever
//! is left may go on in a communicator of its own: [`Communicator::shrink`]. A schedule keeps no results for others: who
//! had returned from the call that fails, having gone there by one, keeps its own.
//!
//! The controller says who is dead. Where it is gone, ranks that no longer hear of others go on without them if they are
//! more than half of all; else they end with [`Error::Partitioned`]. Where they can't agree in time, [`Error::Deadline`]
//! says that nothing was decided, and [`Error::OutcomeUnknown`] that others may have. Operations go on meanwhile, and a
//! controller that starts at the same address takes the job over, as soon as all its ranks have found it, or 10 s after the
//! first has, if they are more than half by then: who has not come counts as lost. It offers the job a tree that it knows,
//! in place of the one from before. [`Communicator::controller`] says where that stands; a rank that is not taken in, as
//! when another job has its name by then, goes on without a controller.
//!
//! # When ranks come late
//!
//! [`Outcome::slowest`] names the rank that came last to an operation, and how late it was. What becomes of an operation
//! to which ranks come too late is the caller's choice, for each call or in [`JoinConfig::straggler`]: it waits for them
//! until its deadline ([`Straggler::Wait`], the default), fails for all by name ([`Straggler::Deadline`]), or is completed
//! without them ([`Straggler::Partial`]), which [`Outcome::missing`] says and which ends the communicator for them.
//!
//! # Forked processes
//!
//! A communicator is of the process that joined. In a process that this one forks, as data loaders do, every call on it and
//! on its handles is [`Error::Forked`], and dropping them does nothing: the parent's job goes on. Such a process can join a
//! job of its own. It reads a [`Buffer`] as any other memory; where the device reaches the buffer, parent and child share
//! it, so what the child writes there the parent has in its own. While it lives it keeps copies of the parent's
//! connections: if the parent dies, its sockets stay open until the child has ended too, and others notice the death by
//! silence.
//!
//! # Progress
//!
//! Started operations ([`Communicator::start_all_reduce`]) own their buffer until they are waited for; an operation whose
//! handle is dropped goes on, and its buffer goes when it has completed ([`Communicator::outstanding`] counts them). They
//! advance while any call of the communicator runs; there is no progress thread.
//!
//! 1024 operations may be in flight. A call waits for room until its deadline, and moves on what is in flight; if there
//! is none then, it fails with [`Error::TooManyInFlight`], having changed nothing.

mod bucket;
mod calls;
mod cart;
mod change;
mod choices;
mod core;
mod dropped;
mod element;
mod error;
mod extent;
mod grace;
mod handle;
mod join;
mod leave;
mod lost;
mod messages;
mod offer;
mod own;
mod parley;
mod progress;
#[cfg(feature = "snapshot")]
pub mod rehearsal;
mod repair;
mod shrink;
mod split;
mod start;
mod started;
mod straggler;
mod tree;

pub use crate::exec::Buffers;
pub use crate::transport::memory::{Buffer, Transfer};
pub use crate::transport::packets::Slowest;
pub use bucket::BUCKET_BYTES;
pub(crate) use bucket::buckets;
pub use cart::Cart;
pub use element::{Element, Held};
pub use error::{Error, Fresh};
pub use handle::Handle;
pub use join::{DEFAULT_PORT, JoinConfig, JoinError};
pub use leave::Departure;
pub use lost::ControllerState;
pub use messages::MessageHandle;
pub use shrink::ShrinkError;
pub use split::SplitError;
pub use straggler::Straggler;

use self::core::Core;
use self::lost::Lost;
use self::own::Own;
use crate::controller::proto::QueuePlace;
use crate::select::{Algo, Explanation};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::RankMask;

/// How one call differs from the communicator's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CallOptions {
    /// The algorithm; the same at all ranks.
    pub algo: Option<Algo>,
    /// How long the call may take.
    pub deadline: Option<Duration>,
    /// What this rank multiplies its own contribution by; for [`ReduceOp::PremulSum`](sumac_hal::op::ReduceOp::PremulSum) alone, where it is 1 by default.
    pub scalar: Option<f64>,
    /// What becomes of the operation if ranks come late to it; the same at all ranks.
    pub straggler: Option<Straggler>,
}

/// What became of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The path taken.
    pub path: Path,
    /// How the bytes got to the leaf device and back; `None` for what went past it.
    pub transfer: Option<Transfer>,
    /// Why not the tree, if the choice was open and the tree not possible.
    pub fallback: Option<String>,
    /// Bytes that this rank sent meanwhile, headers of the data plane included, or that its leaf device fetched from its
    /// memory; operations in flight together count each other's.
    pub wire_bytes: u64,
    /// Contributions that this rank sent again meanwhile.
    pub retransmits: u64,
    /// Whether the operation was repaired on the way.
    pub repaired: bool,
    /// Which rank was the last to come to it, and how late, as the devices saw it; `None` where nobody knows: by
    /// schedules, and after a repair.
    pub slowest: Option<Slowest>,
    /// The ranks that have no part in the result; all others have. Empty unless [`Straggler::Partial`] left some out, in
    /// this operation or before.
    pub missing: RankMask,
}

/// What a communicator has repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Repairs {
    /// How many times a lost tree was made good.
    pub count: u32,
    /// How long that took altogether, from when this rank took part.
    pub time: Duration,
    /// Bytes that this rank sent to others for it, attempts that came to nothing included.
    pub bytes: u64,
}

/// What a communicator owns for operations and messages that were started, until they are waited for, or have ended
/// after their handle was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Outstanding {
    /// How many operations.
    pub operations: usize,
    /// How many messages.
    pub messages: usize,
    /// The bytes of their buffers.
    pub bytes: usize,
}

/// A member of a job.
///
/// Dropping it without [`Communicator::leave`] is what the end of the process would be: the other ranks are told that
/// this one is lost, and operations that it had not completed fail with [`Error::RanksFailed`] at all of them. It waits for
/// nothing. Handles of started operations hold the communicator too: it is dropped with the last of them. In a process that
/// was forked since, dropping it does nothing, and calls are [`Error::Forked`].
#[derive(Debug)]
pub struct Communicator {
    own: Own,
    rank: u32,
    size: u32,
}

impl Communicator {
    /// Join a job and wait for its other ranks.
    ///
    /// # Errors
    /// [`JoinError`] if controller, ports or job are not to be had.
    pub fn join(config: JoinConfig) -> Result<Self, JoinError> {
        let (rank, size) = (config.rank, config.world);
        let own = Own::new(join::join(config)?);
        Ok(Self { own, rank, size })
    }

    /// Return this rank.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Return the number of ranks.
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Return the name: the job's, with what it was split off by.
    pub fn name(&self) -> String {
        self.own.name().into()
    }

    /// Return the job's place among those that wait for a tree that others hold; `None` if it does not wait.
    pub fn queue_place(&self) -> Option<QueuePlace> {
        if self.own.is_forked() { None } else { self.own.lost().queue_place() }
    }

    /// Return whether a controller stands behind the job, which operations do not need.
    pub fn controller(&self) -> ControllerState {
        if self.own.is_forked() {
            return ControllerState::Refused { reason: Error::Forked.to_string() };
        }
        self.own.lost().controller()
    }

    /// Return how much was repaired so far: in calls, whose [`Outcome::repaired`] says so, and between them.
    pub fn repairs(&self) -> Repairs {
        let Ok(core) = self.lock() else { return Repairs::default() };
        Repairs { count: core.repaired.0, time: core.repaired.1, bytes: core.repaired_bytes }
    }

    /// Return what ends this communicator from another thread, while a call on it waits.
    pub fn canceller(&self) -> Canceller {
        Canceller { lost: Arc::clone(self.own.lost()) }
    }

    /// Say which path an operation would take, what each would cost, or why it is not possible.
    pub fn explain(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        match self.lock() {
            Ok(core) => core.explain(desc, &CallOptions { algo: Some(algo), ..CallOptions::default() }),
            // Nothing is possible here.
            Err(_) => {
                Explanation { requested: algo, candidates: Vec::new(), chosen: None, overridden: None, attached: None }
            }
        }
    }

    /// Return zeroed memory for operations. Where this rank shares memory with its leaf device, the device reads and
    /// writes it by itself, and nothing is copied on the way; any part of it may be passed to a call. Elsewhere it is
    /// ordinary memory, so that the program is the same.
    ///
    /// Parts of it may be passed to calls while other threads write to other parts, wherever these begin and end; what that
    /// costs is said at [`Buffer`].
    ///
    /// # Errors
    /// [`Error::Memory`] if the system or the device has no room; it changes nothing, and other memory can be used.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>, Error> {
        self.lock()?.alloc(len)
    }

    /// Leave the job in good order: when all that was started here has ended, and all ranks have the results of what
    /// went through the tree, which this one may be needed for if a device dies. Where others are in the middle of an
    /// operation that this one has completed, that takes until they have completed it too, whatever they do then; at most
    /// until the communicator's deadline. The rank has left in any case; a warning is logged where others may miss it.
    /// [`Communicator::leave_within`] takes another limit, and says how it went.
    pub fn leave(self) {
        let limit = self.lock().map(|core| core.config.deadline);
        if let Ok(limit) = limit {
            self.leave_within(limit);
        }
    }

    /// The same, waiting for other ranks at most `limit`; returns whether they can do without this one.
    pub fn leave_within(self, limit: Duration) -> Departure {
        self.lock().map_or_else(Departure::Failed, |mut core| core.leave(limit))
    }

    /// Return what the communicator owns for operations and messages that were started; nothing in a forked process.
    pub fn outstanding(&self) -> Outstanding {
        self.lock().map_or_else(|_| Outstanding::default(), |mut core| core.outstanding())
    }

    fn lock(&self) -> Result<MutexGuard<'_, Core>, Error> {
        self.own.lock()
    }
}

/// Ends a communicator from another thread: the call that waits, or else the next, returns [`Error::Cancelled`], every
/// later one [`Error::Ended`], and the other ranks are told then that this one is lost. What an operation had written is chunk by chunk old or new.
#[derive(Debug, Clone)]
pub struct Canceller {
    lost: Arc<Lost>,
}

impl Canceller {
    /// End the communicator.
    pub fn cancel(&self) {
        if !self.lost.is_forked() {
            self.lost.cancel();
        }
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    // A caller's thread that panicked in between left the protocol's state as it was between two packets.
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
