//! Rules of a view change that tests can break, to check that the exhaustive search finds what each rule is for.

use super::View;
#[cfg(feature = "snapshot")]
use super::{RESEND, RETRY};
#[cfg(feature = "snapshot")]
use crate::recovery::Ballot;
#[cfg(feature = "snapshot")]
use sumac_hal::time::Instant;

/// A broken rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "snapshot"), expect(unreachable_pub, reason = "searches of other crates name it"))]
pub enum Flaw {
    /// Ranks accept ballots below the one that they have promised.
    LowerBallots,
    /// Ranks accept messages from ranks that are dead to them.
    MessagesFromDead,
    /// An outcome that may have been committed is not adopted.
    NothingAdopted,
    /// Suspicion suffices without a majority.
    AnyMinority,
}

impl<P, D> View<P, D> {
    /// Break a rule.
    #[cfg(any(test, feature = "snapshot"))]
    pub(crate) const fn set_flaw(&mut self, flaw: Option<Flaw>) {
        self.flaw = flaw;
    }

    /// Return whether this rule is broken; never outside of searches.
    #[cfg(not(any(test, feature = "snapshot")))]
    #[expect(clippy::unused_self, reason = "searches ask it")]
    pub(super) const fn breaks(&self, _: Flaw) -> bool {
        false
    }

    /// Return whether this rule is broken.
    #[cfg(any(test, feature = "snapshot"))]
    pub(super) fn breaks(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// Return the highest ballot that this rank takes part in.
    #[cfg(feature = "snapshot")]
    pub(crate) fn promised(&self) -> Option<Ballot> {
        self.promised.map(|(ballot, _)| ballot)
    }

    /// Normalize time: timers count as if they had been started at [`Instant::ZERO`].
    #[cfg(feature = "snapshot")]
    pub(crate) fn normalize_time(&mut self) {
        self.retry_at = self.retry_at.map(|_| Instant::ZERO + RETRY);
        self.resend_at = self.resend_at.map(|_| Instant::ZERO + RESEND);
    }
}
