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
//! Started operations ([`Communicator::start_all_reduce`]) own their buffer until they are waited for, so that a
//! handle may be forgotten. They advance while any call of the communicator runs; there is no progress thread.

mod core;
mod element;
mod error;
mod handle;
mod join;

pub use element::Element;
pub use error::Error;
pub use handle::Handle;
pub use join::{DEFAULT_PORT, JoinConfig, JoinError};

use self::core::Core;
use crate::choice::{Algo, Explanation};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// How one call differs from the communicator's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallOptions {
    /// The algorithm; the same at all ranks.
    pub algo: Option<Algo>,
    /// How long the call may take.
    pub deadline: Option<Duration>,
}

/// What became of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The path taken.
    pub path: Path,
    /// Why not the tree, if the choice was open and the tree not possible.
    pub fallback: Option<String>,
    /// Bytes that this rank sent meanwhile, headers of the data plane included; operations in flight together
    /// count each other's.
    pub wire_bytes: u64,
    /// Contributions that this rank sent again meanwhile.
    pub retransmits: u64,
    /// Whether the operation was repaired on the way.
    pub repaired: bool,
}

/// A member of a job. Dropping it without [`Communicator::leave`] tells the other ranks that this one is lost.
#[derive(Debug)]
pub struct Communicator {
    core: Arc<Mutex<Core>>,
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
        Ok(Self { core: Arc::new(Mutex::new(join::join(config)?)), rank, size })
    }

    /// Return this rank.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Return the number of ranks.
    pub const fn size(&self) -> u32 {
        self.size
    }

    /// Combine `buffer` element by element over all ranks; every rank gets the result in place.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<Outcome, Error> {
        self.all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`Error`].
    pub fn all_reduce_with<T: Element>(
        &self,
        buffer: &mut [T],
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        self.all_reduce_bytes(bytemuck::cast_slice_mut(buffer), T::DTYPE, op, options)
    }

    /// The same for elements whose type is known at run time, as little-endian bytes.
    ///
    /// # Errors
    /// [`Error::Argument`] if the buffer does not hold whole elements, else [`Error`].
    pub fn all_reduce_bytes(
        &self,
        buffer: &mut [u8],
        dtype: Dtype,
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let desc = describe(dtype, op, buffer.len())?;
        self.lock().run(desc, buffer, options)
    }

    /// Start an all-reduce of `buffer`, which [`Handle::wait`] gives back.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_reduce<T: Element>(&self, buffer: Vec<T>, op: ReduceOp) -> Result<Handle<T>, Error> {
        self.start_all_reduce_with(buffer, op, &CallOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`Error`]; the buffer is gone then.
    pub fn start_all_reduce_with<T: Element>(
        &self,
        buffer: Vec<T>,
        op: ReduceOp,
        options: &CallOptions,
    ) -> Result<Handle<T>, Error> {
        let desc = describe(T::DTYPE, op, size_of_val(buffer.as_slice()))?;
        let id = self.lock().start(desc, Box::new(buffer), options)?;
        Ok(Handle::new(Arc::clone(&self.core), id))
    }

    /// Wait until every rank has called this.
    ///
    /// # Errors
    /// [`Error`].
    pub fn barrier(&self) -> Result<Outcome, Error> {
        self.barrier_with(&CallOptions::default())
    }

    /// The same with options; the algorithm is left to the communicator unless it is [`Algo::Tree`].
    ///
    /// # Errors
    /// [`Error`].
    pub fn barrier_with(&self, options: &CallOptions) -> Result<Outcome, Error> {
        let algo = options.algo.filter(|algo| *algo == Algo::Tree).unwrap_or(Algo::Auto);
        let options = CallOptions { algo: Some(algo), ..*options };
        self.lock().run(OpDesc::barrier(), &mut [], &options)
    }

    /// Say which path an operation would take, what each would cost, or why it is not possible.
    pub fn explain(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        self.lock().explain(desc, &CallOptions { algo: Some(algo), deadline: None })
    }

    /// Leave the job in good order.
    pub fn leave(self) {
        self.lock().leave();
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }
}

/// Describe an all-reduce of a buffer, if its type and operator go together and it holds whole elements.
fn describe(dtype: Dtype, op: ReduceOp, len_bytes: usize) -> Result<OpDesc, Error> {
    if let Some(why) = Kernel::why_not(dtype, op) {
        return Err(Error::Argument(format!("{op} of {dtype}: {why}")));
    }
    let desc = OpDesc::all_reduce(dtype, op, 0);
    let size = desc.element_bytes();
    if !len_bytes.is_multiple_of(size) {
        let what = format!("a buffer of {len_bytes} bytes does not hold whole elements of {dtype} {op} ({size} bytes)");
        return Err(Error::Argument(what));
    }
    Ok(OpDesc { count: (len_bytes / size) as u64, ..desc })
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    // A caller's thread that panicked in between left the protocol's state as it was between two packets.
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
