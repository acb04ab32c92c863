//! What is decided of a call: its path, and what it does there.

use crate::exec::round::Round;
use crate::schedule::Schedule;
use std::sync::Arc;
use sumac_hal::op::Path;

/// The path of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) path: Path,
    /// Why it is not the tree, if the algorithm was left open.
    pub(super) fallback: Option<Arc<str>>,
    /// A host collective is announced in the present tree, because all ranks call it in this view.
    pub(super) is_announced: bool,
}

/// How an operation runs between hosts.
#[derive(Debug, Clone)]
pub(super) struct Decided {
    /// [`Selection::generation`](super::selection::Selection::generation) at the time.
    pub(super) generation: u64,
    pub(super) chosen: Chosen,
    pub(super) schedule: Arc<Schedule>,
    /// What it does on the board, if it is for that.
    pub(super) round: Option<Arc<Round>>,
}

impl Decided {
    /// Return whether it still applies.
    pub(super) const fn is_of(&self, generation: u64) -> bool {
        self.generation == generation
    }
}

/// What a call found before it ran as an attempt: nothing is under way that it must handle, and the board can be used.
///
/// What the communicator has changes only under its lock, and who takes that for anything else than a short call that
/// is complete at once forgets this value. Everything else is counted
/// ([`Notices::changes`](super::notices::Notices::changes)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settled {
    /// The [`Selection::generation`](super::selection::Selection::generation), while no ranks are excluded.
    pub(super) generation: u64,
    pub(super) changes: u64,
}
