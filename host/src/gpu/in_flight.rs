//! Operations in flight, and the shares that keep their memory until the GPU has released it.

use super::Gpu;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use sumac_hal::op::Path;

/// An operation in flight. Dropping it has no effect: the group keeps the memory until the operation is complete.
pub struct Work<G: Gpu> {
    pub(super) done: Arc<G::Event>,
    pub(super) is_broken: Arc<AtomicBool>,
    pub(super) path: Path,
    pub(super) fallback: Option<String>,
}

impl<G: Gpu> std::fmt::Debug for Work<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("path", &self.path).field("is_broken", &self.is_broken).finish_non_exhaustive()
    }
}

impl<G: Gpu> Work<G> {
    /// Return the event that marks the end of the operation; consumers make their streams wait for it.
    ///
    /// A stopped operation ([`GpuCanceller`], a deadline) ends too, with unspecified output.
    pub const fn done(&self) -> &Arc<G::Event> {
        &self.done
    }

    /// Return the algorithm that it uses.
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Return why the network was not used, if the choice was open.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }
}

/// An operation in flight and the memory that it uses.
pub(super) struct InFlight<G: Gpu> {
    pub(super) done: Arc<G::Event>,
    pub(super) is_broken: Arc<AtomicBool>,
    /// Shares of all memory that it accesses.
    pub(super) held: Vec<G::Memory>,
}

/// Cancels a wait from another thread.
#[derive(Debug, Clone, Default)]
pub struct GpuCanceller {
    is_cancelled: Arc<AtomicBool>,
}

impl GpuCanceller {
    /// Make the current wait, or else the next, end with [`GpuError::Cancelled`](super::GpuError::Cancelled).
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
    }

    pub(super) fn take(&self) -> bool {
        self.is_cancelled.swap(false, Ordering::AcqRel)
    }
}
