//! The API, and nothing else: communicators and the collectives on them, for programs to enter. [The front page](crate)
//! introduces it; this page is the reference.
//!
//! All ranks make the same calls in the same order. If they do not, every rank gets the same [`Error::Mismatch`]. No
//! call blocks longer than its deadline. A call that falls back from the tree says so: [`Outcome`] reports the path
//! taken and the reason, and [`Communicator::explain`] reports them in advance.
//!
//! # Buffer lengths
//!
//! `n` is the operation's count. Where ranks own blocks, it counts the elements of all blocks together;
//! [`Span::of_blocks`](crate::schedule::Span) computes them (blocks are equal if the number of ranks divides n).
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
//! Where a rank shares memory with its leaf device, operations on registered memory ([`Communicator::alloc`]) are
//! zero-copy: the device's engine reads contributions from the buffer and writes results back to it. Slices of any
//! other memory go through a bounce buffer, at the cost of two copies. [`Outcome::transfer`] says which it was. A
//! [`Buffer`] may outlive its communicator.
//!
//! When a call returns, with a result or an error, the device no longer writes to its buffers.
//!
//! # Device failures
//!
//! If the tree fails, the ranks complete the interrupted operations among themselves. Results keep the bits of the
//! declared order. Later operations use another tree if the controller has one, and host collectives otherwise.
//! [`Outcome::recovered`], [`Outcome::fallback`] and the log report it. A rank that is not in a call takes part on a
//! thread of its own. Recovery costs the time to detect the failure (immediate where memory is shared, otherwise the
//! time limit for silent hops) plus the transfer of what is missing. Memory registered with the lost device is ordinary
//! memory to the next one. [`JoinConfig::recover`] disables recovery.
//!
//! Once [`Straggler::Partial`] has excluded ranks, the communicator no longer recovers from the loss of its tree:
//! recovery needs all ranks.
//!
//! # Rank failures
//!
//! Survivors agree on which ranks failed and on the first call that fails; all of them get the same
//! [`Error::RanksFailed`]. Earlier calls complete on every survivor, from the results that some of them have. A
//! barrier, and a broadcast from a surviving root, completes if all survivors had entered it. [`OutputState`] says what
//! the output of a failed call holds. Survivors continue in a new communicator ([`Communicator::shrink`]). Host
//! collectives retain no results for recovery: a rank that had already returned from the failed call by one keeps its
//! result.
//!
//! The controller decides which ranks are dead. Without a controller, ranks that can no longer reach others go on
//! without them if they are a strict majority; a minority ends with [`Error::Partitioned`]. If the survivors cannot
//! agree in time, [`Error::Deadline`] means that nothing was decided, and [`Error::OutcomeUnknown`] that other ranks
//! may have decided.
//!
//! Operations continue while the controller is down. A controller that starts at the same address takes the job over
//! once all its ranks have reconnected, or 10 s after the first did if a majority has by then; ranks that have not are
//! considered lost. It then offers the job a new tree. [`Communicator::controller`] reports the state. A rank that is
//! refused, for instance because another job has taken the name, goes on without a controller.
//!
//! # Stragglers
//!
//! [`Outcome::slowest`] names the rank that entered an operation last, and how late it was. The straggler policy is per
//! call ([`CallOptions::straggler`]), with a default in [`JoinConfig::straggler`]: wait until the deadline
//! ([`Straggler::Wait`], the default), fail on all ranks with the stragglers named ([`Straggler::Deadline`]), or
//! complete without them ([`Straggler::Partial`]), which [`Outcome::missing`] reports and which ends the communicator
//! for them.
//!
//! # Forked processes
//!
//! A communicator belongs to the process that joined. In a child that this process forks, as data loaders do, every
//! call on the communicator and its handles returns [`Error::Forked`], and dropping them has no effect: the parent's
//! job goes on. The child can join a job of its own. It can read a [`Buffer`]. If the buffer is registered, parent and
//! child share it, so the parent sees what the child writes. The child inherits the parent's connections: if the parent
//! dies, its sockets stay open until the child exits, and other ranks detect the death by timeout.
//!
//! # Progress
//!
//! Started operations ([`Communicator::start_all_reduce`]) own their buffer until they are waited for. If you drop the
//! handle, the operation continues, and its buffer is freed when it completes ([`Communicator::outstanding`] counts
//! such operations). [`JoinConfig::progress`] says who drives them. By default callers do: operations advance while any
//! call of the communicator runs, and a host collective when it, or a later one, is waited for. With
//! [`Progress::Thread`], a thread drives them and recovers: they go on while the program computes, a test never waits,
//! and messages and collectives of several threads overlap. All threads' collectives must still have one order, which
//! is the same on all ranks. Queries such as [`Communicator::explain`] and [`Communicator::alloc`] then wait for a host
//! collective that runs.
//!
//! Operations and messages can be started on memory that stays the caller's, too ([`Communicator::start_raw`]).
//!
//! An operation that runs many times on the same buffers can be prepared once ([`Communicator::prepare`]), as with
//! MPI's persistent collectives.
//!
//! Up to 1024 operations may be in flight. At the limit, a call waits for room until its deadline and advances the
//! operations in flight meanwhile; then it fails with [`Error::TooManyInFlight`] and has no effect.

mod bucket;
mod calls;
mod cart;
pub mod environment;
mod handle;
pub mod launcher;
mod messages;
mod owned_buffer;
mod prepared;
mod raw;
mod shrink;
mod split;
mod start;

pub use crate::engine::{
    CallOptions, ControllerState, Counts, CreationError, DEFAULT_PORT, Departure, Element, Error, JoinConfig,
    JoinError, Outcome, OutputState, Outstanding, Progress, RawBuffers, Recoveries, StartError, Straggler, Trees,
    WaitError,
};
pub use crate::exec::Buffers;
pub use crate::transport::memory::{Buffer, Transfer};
pub use crate::transport::packets::Slowest;
pub use bucket::BUCKET_BYTES;
pub(crate) use bucket::buckets;
pub use cart::Cart;
pub use handle::Handle;
pub use messages::MessageHandle;
pub use owned_buffer::OwnedBuffer;
pub use prepared::Prepared;
pub use raw::Request;
pub use shrink::ShrinkError;
pub use split::SplitError;

use crate::controller::proto::QueuePosition;
use crate::deadline::after;
use crate::engine::{Core, Notices, Rail, SharedCore, Stripes, join_as, join_rails};
use crate::schedule::Shape;
use crate::select::{Algo, Explanation, JobFacts, Origin};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};
use sumac_hal::op::OpDesc;

/// The old name of [`Recoveries`].
#[deprecated(since = "0.2.0", note = "renamed to `Recoveries`")]
pub type Repairs = Recoveries;

/// A rank's membership in a job, and the collectives of the job.
///
/// Call [`Communicator::leave`] when you are done. Dropping a communicator instead has the same effect as the death of
/// the process: the other ranks are told that this rank is lost, and operations that it had not completed fail with
/// [`Error::RanksFailed`] on all of them. Dropping does not block. Handles of started operations hold a reference, so
/// the communicator lives until the last of them is gone. In a forked child, dropping has no effect and calls return
/// [`Error::Forked`].
#[derive(Debug)]
pub struct Communicator {
    core: SharedCore,
    /// The core's, for what reaches the communicator while a call has that.
    rail: Option<Arc<Rail>>,
    stripes: Arc<Stripes>,
    rank: u32,
    size: u32,
    buckets: bucket::BucketPool,
}

impl Communicator {
    /// Join a job, and wait until all its ranks have joined.
    ///
    /// # Errors
    /// [`JoinError`] if the controller cannot be reached, the job cannot be joined or ports cannot be opened.
    pub fn join(config: JoinConfig) -> Result<Self, JoinError> {
        let (rank, size) = (config.rank, config.world);
        let (core, striping) = join_as(config, None)?;
        let core = SharedCore::new(core).map_err(|source| JoinError::ProgressThread { source })?;
        join_rails(&core)?;
        let rail = core.lock().ok().and_then(|core| core.rail().map(Arc::clone));
        let stripes = Arc::new(Stripes::join(&core, striping)?);
        Ok(Self { core, rail, stripes, rank, size, buckets: bucket::BucketPool::default() })
    }

    /// Return this rank.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Return the number of ranks.
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Return the communicator's name: the job's, with a suffix for each split (`job/0.3`) or shrink (`job~1`).
    pub fn name(&self) -> String {
        self.core.name().into()
    }

    /// Return the job's position in the queue for a tree; `None` if it is not queued.
    pub fn queue_position(&self) -> Option<QueuePosition> {
        if self.core.is_forked() { None } else { self.core.notices().queue_position() }
    }

    /// Return the state of the connection to the controller. Operations do not need it.
    pub fn controller(&self) -> ControllerState {
        if self.core.is_forked() {
            return ControllerState::Refused { reason: Error::Forked.to_string() };
        }
        self.core.notices().controller()
    }

    /// Return the recoveries so far, within calls ([`Outcome::recovered`]) and between them.
    pub fn recoveries(&self) -> Recoveries {
        let own = self.lock().map(|core| core.recoveries());
        own.map_or_else(|_| Recoveries::default(), |own| self.stripes.recoveries(own))
    }

    /// Return the trees that large operations are spread over ([`JoinConfig::trees`]), and why there are no more.
    pub fn trees(&self) -> Trees {
        self.stripes.trees()
    }

    /// The old name of [`Communicator::recoveries`].
    #[deprecated(since = "0.2.0", note = "renamed to `recoveries`")]
    pub fn repairs(&self) -> Recoveries {
        self.recoveries()
    }

    /// Return a [`Canceller`], which ends this communicator from another thread, also while a call blocks.
    pub fn canceller(&self) -> Canceller {
        let rail = self.rail.iter().map(|rail| rail.notices());
        let all = std::iter::once(self.core.notices()).chain(rail).chain(self.stripes.notices());
        Canceller { notices: all.cloned().collect() }
    }

    /// Return what the costs of operations depend on.
    pub fn facts(&self) -> JobFacts {
        match self.lock() {
            Ok(core) => core.facts(),
            // This process was forked: it is no rank.
            Err(_) => JobFacts { ranks: self.size(), ranks_per_host: 1, shape: Shape::Line, tree: None },
        }
    }

    /// Explain which path an operation would take, the cost of each candidate, and why others are ruled out. Runs
    /// nothing.
    pub fn explain(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        match self.lock() {
            Ok(core) => core.explain(desc, &CallOptions { algo: Some(algo), ..CallOptions::default() }),
            // No path is available: this process was forked.
            Err(_) => Explanation {
                requested: algo,
                candidates: Vec::new(),
                chosen: None,
                overridden: None,
                transport: None,
                origin: Origin::DataSheets,
            },
        }
    }

    /// Allocate zeroed, registered memory: where this rank shares memory with its leaf device, operations on it are
    /// zero-copy. You may pass any part of it to a call. Elsewhere it is ordinary memory, so programs need no special
    /// case.
    ///
    /// You may pass parts of it to calls while other threads write to other parts, with any boundaries; [`Buffer`]
    /// explains what that costs.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system or the device has no room. That has no other effect, and other memory works as
    /// well.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>, Error> {
        self.lock()?.alloc(len)
    }

    /// Leave the job gracefully: complete all started operations, and wait until all ranks have the results of the
    /// operations in the tree, because recovery from the failure of a device might still need this rank, and until
    /// their systems have received what it sent to them. This takes until the slowest rank has completed these
    /// operations, at most until the communicator's deadline. The rank has left in any case; if other ranks may still
    /// need it, a warning is logged.
    ///
    /// [`Communicator::leave_within`] takes the time limit as an argument and reports how the rank left.
    pub fn leave(self) {
        let limit = self.lock().map(|core| core.config().deadline);
        if let Ok(limit) = limit {
            self.leave_within(limit);
        }
    }

    /// Leave the job as [`Communicator::leave`] does, but wait for other ranks for at most `limit`. Returns whether
    /// they may still need this rank.
    pub fn leave_within(self, limit: Duration) -> Departure {
        let until = after(Instant::now(), limit);
        self.core.drain(until);
        let stripes = self.stripes.leave(limit);
        let left = until.saturating_duration_since(Instant::now());
        let own = self.lock().map_or_else(Departure::Failed, |mut core| core.leave(left));
        if own == Departure::Clean { stripes } else { own }
    }

    /// Return the started operations and messages that the communicator holds; none in a forked process.
    pub fn outstanding(&self) -> Outstanding {
        self.core.outstanding()
    }

    /// Return the number of regions that this rank has mapped of others.
    #[cfg(test)]
    pub(crate) fn mapped_regions(&self) -> usize {
        self.lock().expect("no panic").mapped_regions()
    }

    fn lock(&self) -> Result<MutexGuard<'_, Core>, Error> {
        self.core.lock()
    }
}

/// Ends a communicator from another thread.
///
/// The call that blocks, or else the next one, returns [`Error::Cancelled`], and every later one [`Error::Ended`]. The
/// other ranks are then told that this rank is lost. Each chunk of an interrupted operation's output is either old or
/// new.
#[derive(Debug, Clone)]
pub struct Canceller {
    notices: Vec<Arc<Notices>>,
}

impl Canceller {
    /// End the communicator.
    pub fn cancel(&self) {
        for notices in self.notices.iter().filter(|notices| !notices.is_forked()) {
            notices.cancel();
        }
    }
}
