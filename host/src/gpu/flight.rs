//! Operations on their way, and what keeps their memory until the GPU has let go of it.

use super::Gpu;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use sumac_hal::op::Path;

/// An operation on its way. Dropping it changes nothing: the group keeps the memory until the operation is done.
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
    /// Return the event that stands for the end of the operation: consumers let their streams wait for it.
    ///
    /// An operation that is given up ([`GpuCanceller`], a deadline) has an end too, after which its output holds
    /// anything.
    pub const fn done(&self) -> &Arc<G::Event> {
        &self.done
    }

    /// Return which way it takes.
    pub const fn path(&self) -> Path {
        self.path
    }

    /// Return why not the network, if the choice was open.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }
}

/// What is on its way, and what it works on.
pub(super) struct Flight<G: Gpu> {
    pub(super) done: Arc<G::Event>,
    pub(super) is_broken: Arc<AtomicBool>,
    /// Shares of everything that it touches.
    pub(super) held: Vec<G::Memory>,
}

/// Ends the operation that is waited for, from another thread.
#[derive(Debug, Clone, Default)]
pub struct GpuCanceller {
    is_cancelled: Arc<AtomicBool>,
}

impl GpuCanceller {
    /// Let the wait that goes on, or else the next, end with [`GpuError::Cancelled`](super::GpuError::Cancelled).
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
    }

    pub(super) fn take(&self) -> bool {
        self.is_cancelled.swap(false, Ordering::AcqRel)
    }
}
