//! When a version on trial is healthy.
//!
//! It has passed its self-test and joined its controller, and a time has passed since then without a restart of the
//! runtime. A version that a controller does not take is not healthy: nothing else would show that it can be reached
//! for the next update.

use std::time::Duration;
use sumac_hal::time::Instant;

/// How long a version has to serve before it is healthy.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(60);

/// What happens to the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HealthEvent {
    /// It has passed its self-test.
    SelfTestPassed,
    /// It has joined its controller.
    Joined,
    /// Its process has ended; whatever comes next is another run.
    Ended,
    /// An operator confirms the version.
    Confirmed,
}

/// The state machine.
#[derive(Debug, Clone)]
pub struct Health {
    after: Duration,
    has_passed: bool,
    has_joined: bool,
    /// When it is healthy, if it goes on like this.
    at: Option<Instant>,
    is_healthy: bool,
}

impl Health {
    /// Create it for a runtime that has not been started; it has to serve for this long.
    pub fn new(after: Duration) -> Self {
        Self { after, has_passed: false, has_joined: false, at: None, is_healthy: false }
    }

    /// Process an event.
    pub fn handle(&mut self, event: HealthEvent, now: Instant) {
        match event {
            HealthEvent::SelfTestPassed => self.has_passed = true,
            HealthEvent::Joined => self.has_joined = true,
            HealthEvent::Ended => (self.has_passed, self.has_joined, self.at) = (false, false, None),
            HealthEvent::Confirmed => self.is_healthy = true,
        }
        if self.has_passed && self.has_joined && self.at.is_none() {
            self.at = Some(now + self.after);
        }
    }

    /// Process timeouts. Call this when [`Health::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.is_healthy |= self.at.is_some_and(|at| now >= at);
    }

    /// Return when to call [`Health::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.at.filter(|_| !self.is_healthy)
    }

    /// Return whether it is healthy; once it is, it stays so.
    pub fn is_healthy(&self) -> bool {
        self.is_healthy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use HealthEvent::{Confirmed, Ended, Joined, SelfTestPassed};
    use proptest::prelude::*;

    fn at(seconds: u64) -> Instant {
        Instant::ZERO + Duration::from_secs(seconds)
    }

    /// Feed events, each with its second, and return whether it is healthy at the end.
    fn is_healthy_at(events: &[(HealthEvent, u64)], end: u64) -> bool {
        let mut health = Health::new(HEALTHY_AFTER);
        for &(event, second) in events {
            health.handle_timeout(at(second));
            health.handle(event, at(second));
        }
        health.handle_timeout(at(end));
        health.is_healthy()
    }

    #[test]
    fn healthy_is_who_serves_for_60_s_after_test_and_join() {
        for events in [[(SelfTestPassed, 1), (Joined, 5)], [(Joined, 1), (SelfTestPassed, 5)]] {
            assert!(!is_healthy_at(&events, 64));
            assert!(is_healthy_at(&events, 65));
        }
        assert!(!is_healthy_at(&[(SelfTestPassed, 1)], 1000), "never joined");
        assert!(!is_healthy_at(&[(Joined, 1)], 1000), "never tested");
    }

    #[test]
    fn restart_of_the_runtime_begins_anew() {
        let events = [(SelfTestPassed, 1), (Joined, 1), (Ended, 60), (SelfTestPassed, 61)];
        assert!(!is_healthy_at(&events, 1000), "the next run has not joined");
        let again = [&events[..], &[(Joined, 70)]].concat();
        assert!(!is_healthy_at(&again, 129));
        assert!(is_healthy_at(&again, 130));
        let joined_twice = [(SelfTestPassed, 1), (Joined, 1), (Joined, 60)];
        assert!(is_healthy_at(&joined_twice, 61), "a repeated message does not delay it");
        assert!(is_healthy_at(&[(SelfTestPassed, 1), (Joined, 1), (Ended, 61)], 1000), "healthy before it ended");
    }

    #[test]
    fn version_that_an_operator_confirms_is_healthy_at_once() {
        assert!(is_healthy_at(&[(Confirmed, 1)], 1));
        assert!(is_healthy_at(&[(Confirmed, 1), (Ended, 2)], 3), "it stays so");
    }

    proptest! {
        /// The model: some stretch of 60 s in which nothing ended, after both have happened in the same run.
        #[test]
        fn random_runs_agree_with_the_definition(steps in prop::collection::vec((0..60_usize, 1..50_u64), 0..20), tail in 0..100_u64) {
            let (mut second, mut events) = (0, Vec::new());
            for (kind, pause) in steps {
                second += pause;
                let event = match kind {
                    // An operator confirms now and then.
                    0 => Confirmed,
                    kind => [SelfTestPassed, Joined, Ended][kind % 3],
                };
                events.push((event, second));
            }
            let end = second + tail;
            let (mut expected, mut since) = (false, [None::<u64>; 2]);
            for &(event, second) in events.iter().chain([&(Ended, end)]) {
                if let [Some(passed), Some(joined)] = since {
                    expected |= second >= passed.max(joined) + 60;
                }
                match event {
                    SelfTestPassed => since[0] = since[0].or(Some(second)),
                    Joined => since[1] = since[1].or(Some(second)),
                    Ended => since = [None; 2],
                    Confirmed => expected = true,
                }
            }
            prop_assert_eq!(is_healthy_at(&events, end), expected);
        }
    }
}
