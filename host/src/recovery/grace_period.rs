//! The grace period: how long an operation continues after the view was called into question.
//!
//! Packets that dead ranks had sent may still complete it, and ranks that ended with an error that concerns all, such
//! as a mismatch, have reported it before they exited. So the grace period counts polls, each of which reads everything
//! that has arrived, and not time alone: if the machine gave this rank no CPU time, the clock says nothing about what
//! the rank missed.

use std::time::{Duration, Instant};

/// The polls since the view was called into question.
#[derive(Debug, Default)]
pub(crate) struct GracePeriod {
    polls: u32,
    last_poll_at: Option<Instant>,
}

impl GracePeriod {
    /// Count a poll. Returns how long until the next one counts; `None` when the grace period is over.
    pub(crate) fn poll(&mut self, now: Instant) -> Option<Duration> {
        let due = self.last_poll_at.map_or(now, |at| at + POLL_INTERVAL);
        if now < due {
            return Some(due - now);
        }
        if self.polls == POLLS {
            return None;
        }
        self.polls += 1;
        self.last_poll_at = Some(now);
        Some(POLL_INTERVAL)
    }
}

/// The minimum interval of polls that count.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The number of polls in a grace period.
const POLLS: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_count_once_per_interval_and_sleeping_does_not_count() {
        let (mut grace, mut now) = (GracePeriod::default(), Instant::now());
        for poll in 0..POLLS {
            assert_eq!(grace.poll(now), Some(POLL_INTERVAL), "{poll}");
            assert_eq!(grace.poll(now + POLL_INTERVAL / 2), Some(POLL_INTERVAL / 2), "{poll}");
            now += if poll == 1 { POLL_INTERVAL * 1000 } else { POLL_INTERVAL };
        }
        assert_eq!([grace.poll(now), grace.poll(now)], [None; 2]);
    }
}
