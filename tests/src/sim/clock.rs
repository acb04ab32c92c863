//! Clocks of devices and ranks: all have an offset and a rate error.
//!
//! Events happen in virtual time; each component sees its own clock.

use crate::oracle::weight;
use sumac_hal::time::Instant;

/// One machine's clock: an offset from virtual time, and a small rate error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clock {
    offset_ns: u64,
    /// Rate error in parts per million; positive is fast.
    ppm: i64,
}

/// The owner of a clock.
#[derive(Debug, Clone, Copy)]
pub(super) enum ClockOwner {
    Device(usize),
    Rank(usize),
}

impl Clock {
    /// Draw a clock. In half of the seeds all clocks are exact; in the others they are hours apart and off by up to 200
    /// ppm.
    pub(super) fn draw(seed: u64, whose: ClockOwner) -> Self {
        if weight(&[seed, 0x636c_6f63]) & 1 == 0 {
            return Self { offset_ns: 0, ppm: 0 };
        }
        let (kind, index) = match whose {
            ClockOwner::Device(device) => (0, device),
            ClockOwner::Rank(rank) => (1, rank),
        };
        let draw = |what: u64| weight(&[seed, 0x736b_6577, kind, index as u64, what]);
        Self { offset_ns: draw(0) % OFFSET_MAX_NS, ppm: (draw(1) % (2 * PPM_MAX + 1)) as i64 - PPM_MAX as i64 }
    }

    /// Return this clock's reading at a moment of virtual time.
    pub(super) fn at(&self, moment: Instant) -> Instant {
        let since = i128::from(moment.as_nanos());
        let local = since + since * i128::from(self.ppm) / 1_000_000;
        Instant::from_nanos(self.offset_ns + local as u64)
    }

    /// Return the first moment at which this clock reads `local` or more.
    pub(super) fn when(&self, local: Instant) -> Instant {
        let wanted = i128::from(local.as_nanos().saturating_sub(self.offset_ns));
        let estimate = wanted * 1_000_000 / (1_000_000 + i128::from(self.ppm));
        let mut moment = Instant::from_nanos(estimate as u64);
        while self.at(moment) < local {
            moment = Instant::from_nanos(moment.as_nanos() + 1);
        }
        moment
    }
}

/// Ten hours.
const OFFSET_MAX_NS: u64 = 36_000_000_000_000;

/// Twice the error of a cheap oscillator.
const PPM_MAX: u64 = 200;

#[cfg(test)]
mod tests {
    use super::*;

    /// A timer set by a clock expires when that clock reads the deadline, not before.
    #[test]
    fn when_is_the_inverse_of_at() {
        let mut skewed = 0;
        for seed in 0..40 {
            let clock = Clock::draw(seed, ClockOwner::Rank(seed as usize));
            skewed += usize::from(clock.ppm != 0);
            for ns in [0, 1, 999, 5_000_000_007, 600_000_000_000] {
                let moment = Instant::from_nanos(ns);
                let read = clock.when(clock.at(moment));
                assert_eq!(clock.at(read), clock.at(moment), "{clock:?}");
                assert!(read <= moment);
            }
        }
        assert!((10..30).contains(&skewed), "{skewed}");
    }
}
