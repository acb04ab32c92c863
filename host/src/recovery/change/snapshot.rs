//! What searches of other crates read and set in a change.

use super::{Ballot, Change, Decision};
use crate::recovery::view::Flaw;

impl Change {
    /// Break a rule of the agreement.
    pub(crate) const fn set_flaw(&mut self, flaw: Option<Flaw>) {
        self.view.set_flaw(flaw);
    }

    /// Return the highest ballot that this rank takes part in.
    pub(crate) fn promised(&self) -> Option<Ballot> {
        self.view.promised()
    }

    /// Normalize time: timers count as if they had been started at [`Instant::ZERO`](sumac_hal::time::Instant::ZERO).
    pub(crate) fn normalize_time(&mut self) {
        self.view.normalize_time();
    }

    /// Return the number of trees that the ranks of the last plan have recovered or migrated from, and what they have
    /// agreed on about an offer.
    pub(crate) const fn agreed(&self) -> (u32, Option<(u32, Option<u64>)>) {
        (self.agreed_trees, self.settled)
    }

    /// Return what follows from the plan that was made last.
    pub(crate) fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref().map(|(_, decision)| decision)
    }
}
