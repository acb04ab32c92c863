//! Terms: which controller of a pair a device obeys.
//!
//! Two controllers may stand in for each other. Each takeover starts a higher term, which the active controller claims
//! on every connection, and repeats so that a device notices its silence. A device keeps the highest term it has seen
//! and refuses whatever comes under a lower one, so it never serves two controllers (PROTOCOL 11).
//!
//! A controller without a pair claims no term: it counts as term 0.

use super::{Refusal, Request};
use serde::{Deserialize, Serialize};

/// The highest valid term. Each takeover starts a term, so a higher one is an error, or an attempt to use them up.
pub const TERM_MAX: u64 = 1 << 48;

/// A controller's claim to be the active one of its pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TermClaim {
    /// The term.
    pub term: u64,
    /// The controller repeats the claim. After this long without a message it counts as lost, in milliseconds; 0 means
    /// never.
    pub silence_ms: u32,
}

/// The highest term that a device has seen, and that of its current connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TermGuard {
    seen: u64,
    of_connection: u64,
}

impl TermGuard {
    /// Start with the highest term that earlier incarnations of the device have seen; 0 if that was not kept.
    pub const fn new(seen: u64) -> Self {
        Self { seen, of_connection: 0 }
    }

    /// Return the highest term seen.
    pub const fn seen(&self) -> u64 {
        self.seen
    }

    /// A connection to a controller begins. It has no term until the controller claims one.
    pub const fn connect(&mut self) {
        self.of_connection = 0;
    }

    /// Return the term that [`admit`](Self::admit) would newly keep. A device that keeps terms over its restarts stores
    /// it first.
    pub fn new_term(&self, request: &Request) -> Option<u64> {
        match request {
            Request::Claim(claim) => Some(claim.term).filter(|&term| term > self.seen && term <= TERM_MAX),
            _ => None,
        }
    }

    /// Check a request before it is executed.
    ///
    /// # Errors
    /// [`Refusal::OldTerm`] if the connection's term is not the highest one seen, [`Refusal::Term`] if it is invalid.
    pub fn admit(&mut self, request: &Request) -> Result<(), Refusal> {
        if let Request::Claim(TermClaim { term, .. }) = *request {
            if term > TERM_MAX {
                return Err(Refusal::Term { term });
            }
            self.of_connection = term;
            self.seen = self.seen.max(term);
        }
        if self.of_connection < self.seen {
            return Err(Refusal::OldTerm { seen: self.seen });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::GroupId;

    const fn claim(term: u64) -> Request {
        Request::Claim(TermClaim { term, silence_ms: 1000 })
    }

    const RENEW: Request = Request::RenewGroup(GroupId(1));

    /// Every sequence of five events on a device, of two controllers and one without a pair.
    #[test]
    fn executed_requests_never_return_to_a_lower_term() {
        const TERMS: u64 = 3;
        // Events: connect to the controller of a term, which claims it unless it is 0; or a request of it.
        for sequence in 0..(TERMS * 2_u64).pow(5) {
            let (mut guard, mut highest, mut rest, mut of_connection) = (TermGuard::default(), 0, sequence, 0);
            for _ in 0..5 {
                let event = rest % (TERMS * 2);
                rest /= TERMS * 2;
                let admitted = if event < TERMS {
                    guard.connect();
                    of_connection = event;
                    if event == 0 { continue } else { guard.admit(&claim(event)) }
                } else {
                    guard.admit(&RENEW)
                };
                assert_eq!(admitted.is_ok(), of_connection >= highest, "{sequence}: {guard:?}");
                if admitted.is_ok() {
                    highest = of_connection;
                }
                assert_eq!(guard.seen(), highest);
            }
        }
    }

    #[test]
    fn refusal_names_the_term_and_a_restarted_device_keeps_what_was_stored() {
        let mut guard = TermGuard::default();
        assert_eq!((guard.new_term(&claim(4)), guard.new_term(&RENEW)), (Some(4), None));
        assert_eq!(guard.admit(&claim(4)), Ok(()));
        assert_eq!(guard.new_term(&claim(4)), None, "it is stored already");
        let mut restarted = TermGuard::new(guard.seen());
        assert_eq!(restarted.admit(&Request::Identify), Err(Refusal::OldTerm { seen: 4 }));
        assert_eq!(restarted.admit(&claim(3)), Err(Refusal::OldTerm { seen: 4 }));
        assert_eq!(restarted.admit(&claim(4)), Ok(()));
        assert_eq!(restarted.admit(&RENEW), Ok(()));
    }

    #[test]
    fn term_beyond_the_limit_is_refused_and_not_kept() {
        let mut guard = TermGuard::new(1);
        assert_eq!(guard.admit(&claim(u64::MAX)), Err(Refusal::Term { term: u64::MAX }));
        assert_eq!((guard.seen(), guard.new_term(&claim(u64::MAX))), (1, None));
    }
}
