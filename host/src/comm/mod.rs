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

mod calls;
mod core;
mod element;
mod error;
mod extent;
mod handle;
mod join;
mod progress;
mod start;

pub use crate::exec::Buffers;
pub use element::Element;
pub use error::Error;
pub use handle::Handle;
pub use join::{DEFAULT_PORT, JoinConfig, JoinError};

use self::core::Core;
use crate::choice::{Algo, Explanation};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac_hal::op::{OpDesc, Path};

/// How one call differs from the communicator's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CallOptions {
    /// The algorithm; the same at all ranks.
    pub algo: Option<Algo>,
    /// How long the call may take.
    pub deadline: Option<Duration>,
    /// What this rank multiplies its own contribution by; for [`ReduceOp::PremulSum`] alone, where it is 1 by default.
    pub scalar: Option<f64>,
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

    /// Say which path an operation would take, what each would cost, or why it is not possible.
    pub fn explain(&self, desc: &OpDesc, algo: Algo) -> Explanation {
        self.lock().explain(desc, &CallOptions { algo: Some(algo), ..CallOptions::default() })
    }

    /// Leave the job in good order.
    pub fn leave(self) {
        self.lock().leave();
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    // A caller's thread that panicked in between left the protocol's state as it was between two packets.
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
