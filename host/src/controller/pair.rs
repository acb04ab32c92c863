//! A pair of controllers: which of them is active, and when the other one takes over.
//!
//! ```text
//!   controller --- PeerReport --> controller    once per interval, both ways: who is active, and the highest term seen
//!   device, rank -------- dials -----------> standby      after it has lost the active one: a witness
//!   active ------ Claim, Leading ----------> device, rank its term, repeated, so that they notice its silence
//! ```
//!
//! Invariants:
//! - Every activation starts a term higher than all that this controller has seen. The first controller's terms are
//!   odd, the second one's even, so the two never have the same.
//! - Devices and ranks refuse terms lower than the highest they have seen. A controller that learns of a higher term,
//!   from its peer or from a device, becomes the standby.
//! - A standby takes over only if it has not heard from its peer for [`PairConfig::silence`], and a device or a rank of
//!   a running job has come to it, which they do only after they have lost the active one; or if the peer is a standby,
//!   too.
//! - An active controller that was stopped for that long becomes the standby, because the other one may have taken
//!   over.

use super::proto::{PairRole, PairStatus, PeerReport};
use std::net::SocketAddr;
use std::time::Duration;
use sumac_hal::ctrl::TERM_MAX;
use sumac_hal::time::Instant;

/// How a controller belongs to a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairConfig {
    /// The other controller.
    pub peer: SocketAddr,
    /// Whether this is the second one, which starts as the standby.
    pub is_second: bool,
    /// How long a controller may be silent before it counts as lost, 1 s to 1 h.
    pub silence: Duration,
}

impl PairConfig {
    /// How often controllers report to each other, and the active one claims its term.
    pub(super) fn interval(&self) -> Duration {
        self.silence / 5
    }
}

/// A change of the role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoleChange {
    /// The controller is active from now on.
    Activated { term: u64 },
    /// The controller is the standby from now on, because a term higher than its own exists.
    Fenced { own: u64, by: u64 },
    /// The controller is the standby from now on, because it was stopped for too long.
    Stalled,
}

/// The state of a controller of a pair. It starts as the standby.
#[derive(Debug)]
pub(super) struct Pair {
    config: PairConfig,
    /// The own term, while this controller is active.
    term: Option<u64>,
    /// The highest term seen.
    seen: u64,
    /// The highest term that a client has reported. It only makes the next own term higher: clients depose no
    /// controller.
    hinted: u64,
    /// Whether the peer was active when it last reported.
    is_peer_active: bool,
    /// When the peer last reported, or the wait for it began.
    heard_at: Instant,
    /// Whether the peer has reported at all.
    has_reported: bool,
    /// The peer did not answer the latest question.
    is_unanswered: bool,
    /// When a device or a rank of a running job last came although this controller was the standby.
    witnessed_at: Option<Instant>,
    /// The time of the last call.
    now: Instant,
}

impl Pair {
    pub(super) const fn new(config: PairConfig, now: Instant) -> Self {
        Self {
            config,
            term: None,
            seen: 0,
            hinted: 0,
            is_peer_active: false,
            heard_at: now,
            has_reported: false,
            is_unanswered: false,
            witnessed_at: None,
            now,
        }
    }

    pub(super) const fn config(&self) -> &PairConfig {
        &self.config
    }

    /// The own term, if this controller is active.
    pub(super) const fn term(&self) -> Option<u64> {
        self.term
    }

    /// What the peer is told.
    pub(super) const fn report(&self) -> PeerReport {
        PeerReport { seen: self.seen, is_active: self.term.is_some(), is_second: self.config.is_second }
    }

    /// The active controller's address, as far as this one knows; `None` also if it is this one.
    pub(super) fn active_peer(&self) -> Option<SocketAddr> {
        (self.is_peer_active && !self.is_peer_lost()).then_some(self.config.peer)
    }

    /// Whether the peer has reported within the limit.
    pub(super) fn hears_peer(&self) -> bool {
        self.has_reported && !self.is_peer_lost()
    }

    fn is_peer_lost(&self) -> bool {
        self.now - self.heard_at >= self.config.silence
    }

    /// The peer has answered what it was asked at `asked`. Both must not be the first, or both the second one; then the
    /// answer is ignored, as is an old one that waited while this controller was stopped.
    pub(super) fn handle_answer(&mut self, report: PeerReport, asked: Instant) {
        if report.is_second == self.config.is_second || self.now - asked >= self.config.silence {
            return;
        }
        (self.is_peer_active, self.heard_at) = (report.is_active, self.now);
        (self.has_reported, self.is_unanswered) = (true, false);
        self.see(report.seen);
    }

    /// The peer has reported by itself. Nobody knows how long ago, so what it was then proves nothing, except that a
    /// term exists.
    pub(super) fn handle_report(&mut self, report: PeerReport) {
        if report.is_second == self.config.is_second {
            return;
        }
        if report.is_active {
            (self.is_peer_active, self.heard_at, self.has_reported) = (true, self.now, true);
        }
        self.see(report.seen);
    }

    /// The peer has not answered.
    pub(super) const fn handle_no_answer(&mut self) {
        self.is_unanswered = true;
    }

    /// A device or a rank of a running job has come, although this controller is the standby.
    pub(super) const fn handle_witness(&mut self) {
        self.witnessed_at = Some(self.now);
    }

    /// A device has refused this controller's term, because it has seen a higher one.
    pub(super) fn handle_refused_term(&mut self, seen: u64) {
        self.handle_witness();
        self.see(seen);
    }

    /// A client has seen this term.
    pub(super) fn handle_hint(&mut self, term: u64) {
        if term <= self.seen.saturating_add(HINT_MAX) {
            self.hinted = self.hinted.max(term);
        }
    }

    /// Take over a term that the peer or a device has seen, in steps of [`HINT_MAX`]: one false report cannot use up
    /// the terms. Whoever really is further ahead refuses this controller, and so leads it on.
    fn see(&mut self, term: u64) {
        if term < TERM_MAX {
            self.seen = self.seen.max(term.min(self.seen.saturating_add(HINT_MAX)));
        }
    }

    /// Set the time. Returns whether this controller has become the standby, because it was stopped for too long.
    pub(super) fn set_time(&mut self, now: Instant) -> Option<RoleChange> {
        let was_stopped = now - self.now >= self.config.silence;
        self.now = now;
        if !was_stopped {
            return None;
        }
        // The peer may have reported in vain.
        (self.heard_at, self.is_unanswered, self.witnessed_at) = (now, false, None);
        self.term.take().map(|_| RoleChange::Stalled)
    }

    /// Decide about the role. Call it after everything else.
    pub(super) fn update(&mut self) -> Option<RoleChange> {
        match self.term {
            Some(own) if self.seen > own => {
                self.term = None;
                Some(RoleChange::Fenced { own, by: self.seen })
            }
            None if self.may_activate() => {
                let term = self.next_term();
                (self.term, self.seen, self.witnessed_at) = (Some(term), term, None);
                Some(RoleChange::Activated { term })
            }
            _ => None,
        }
    }

    fn may_activate(&self) -> bool {
        let is_first = !self.config.is_second;
        if self.hears_peer() && !self.is_unanswered {
            return is_first && !self.is_peer_active;
        }
        if is_first && self.seen == 0 {
            // Nobody has seen a term yet, so far as this controller knows. If others have, they refuse it.
            return self.is_unanswered || self.is_peer_lost();
        }
        self.is_peer_lost() && self.witnessed_at.is_some_and(|at| self.now - at < self.config.silence)
    }

    /// The next term of this controller: odd ones are the first's, even ones the second's.
    fn next_term(&self) -> u64 {
        let next = self.seen.max(self.hinted) + 1;
        next + u64::from(next.is_multiple_of(2) != self.config.is_second)
    }

    /// When to call [`set_time`](Self::set_time) and [`update`](Self::update) next.
    pub(super) fn next_due(&self) -> Instant {
        self.now + self.config.interval()
    }

    pub(super) fn status(&self) -> PairStatus {
        PairStatus {
            role: if self.term.is_some() { PairRole::Active } else { PairRole::Standby },
            term: self.seen,
            peer: self.config.peer,
            peer_role: self.hears_peer().then_some(if self.is_peer_active {
                PairRole::Active
            } else {
                PairRole::Standby
            }),
        }
    }
}

/// How far beyond the known terms a reported one may be: more takeovers than any controller misses, and too few to use
/// up the terms.
const HINT_MAX: u64 = 1024;

#[cfg(test)]
mod tests;
