//! The round-trip time of one hop and the retransmission timeout derived from it.
//!
//! Smoothed mean and deviation as in RFC 6298. Samples come from Probe/Status pairs only (PROTOCOL 3): the time to a
//! result includes the wait for the slowest rank, so it says nothing about the hop.

use core::time::Duration;

/// A round-trip estimate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rtt {
    smoothed: Option<Duration>,
    deviation: Duration,
}

impl Rtt {
    /// No sample yet.
    pub const UNKNOWN: Self = Self { smoothed: None, deviation: Duration::ZERO };

    /// Add a sample.
    pub fn sample(&mut self, rtt: Duration) {
        match self.smoothed {
            None => {
                self.smoothed = Some(rtt);
                self.deviation = rtt / 2;
            }
            Some(smoothed) => {
                self.deviation = (self.deviation * 3 + smoothed.abs_diff(rtt)) / 4;
                self.smoothed = Some((smoothed * 7 + rtt) / 8);
            }
        }
    }

    /// Return the smoothed round-trip time, or `None` before the first sample.
    pub const fn smoothed(&self) -> Option<Duration> {
        self.smoothed
    }

    /// Return how long to wait for an answer before probing: mean + 4 deviations, at least `min`, doubled `backoff`
    /// times, at most `max`.
    pub fn timeout(&self, backoff: u32, min: Duration, max: Duration) -> Duration {
        let base = self.smoothed.map_or(min * 4, |smoothed| smoothed + self.deviation * 4);
        let factor = 1_u32 << backoff.min(16);
        base.max(min).saturating_mul(factor).min(max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_converges_and_timeout_stays_within_limits() {
        let ms = Duration::from_millis;
        let mut rtt = Rtt::UNKNOWN;
        assert_eq!(rtt.timeout(0, ms(1), ms(100)), ms(4));
        for _ in 0..100 {
            rtt.sample(ms(10));
        }
        let smoothed = rtt.smoothed().unwrap();
        assert!(smoothed > ms(9) && smoothed < ms(11), "{smoothed:?}");
        assert!(rtt.timeout(0, ms(1), ms(100)) < ms(12));
        assert_eq!(rtt.timeout(30, ms(1), ms(100)), ms(100));
        assert!(rtt.timeout(1, ms(1), ms(100)) > rtt.timeout(0, ms(1), ms(100)));
    }
}
