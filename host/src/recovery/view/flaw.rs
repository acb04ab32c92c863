//! Rules of a view change that can be broken, to see that the searches over all its states find what each is for.

use super::View;
#[cfg(feature = "snapshot")]
use super::{RESEND, RETRY};
#[cfg(feature = "snapshot")]
use crate::recovery::Ballot;
#[cfg(feature = "snapshot")]
use sumac_hal::time::Instant;

/// A rule that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(not(feature = "snapshot"), expect(unreachable_pub, reason = "searches of other crates name it"))]
pub enum Flaw {
    /// Ballots below the one that was promised are taken, too.
    LowerBallots,
    /// Ranks listen to those that are dead to them.
    TheDead,
    /// What may have been committed is not adopted.
    NothingAdopted,
    /// Suspicion alone is enough, whoever is left.
    AnyMinority,
}

impl<P, D> View<P, D> {
    /// Break a rule.
    #[cfg(any(test, feature = "snapshot"))]
    pub(crate) const fn set_flaw(&mut self, flaw: Option<Flaw>) {
        self.flaw = flaw;
    }

    /// Tell whether this rule is broken: none is where nobody searches.
    #[cfg(not(any(test, feature = "snapshot")))]
    #[expect(clippy::unused_self, reason = "searches ask it")]
    pub(super) const fn breaks(&self, _: Flaw) -> bool {
        false
    }

    /// Tell whether this rule is broken.
    #[cfg(any(test, feature = "snapshot"))]
    pub(super) fn breaks(&self, flaw: Flaw) -> bool {
        self.flaw == Some(flaw)
    }

    /// Return the highest ballot that this rank takes part in.
    #[cfg(feature = "snapshot")]
    pub(crate) fn promised(&self) -> Option<Ballot> {
        self.promised.map(|(ballot, _)| ballot)
    }

    /// Forget moments: what is due after a while is due as if that while began at [`Instant::ZERO`].
    #[cfg(feature = "snapshot")]
    pub(crate) fn forget_time(&mut self) {
        self.retry_at = self.retry_at.map(|_| Instant::ZERO + RETRY);
        self.resend_at = self.resend_at.map(|_| Instant::ZERO + RESEND);
    }
}
