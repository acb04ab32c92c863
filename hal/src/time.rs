//! Time as an argument.
//!
//! No state machine of Sumac reads a clock: the caller passes `now`. An [`Instant`] counts nanoseconds from a start
//! that the caller chooses, such as boot, process start or the simulator's zero. Instants of different clocks must not
//! be mixed. No packet carries one.

use core::ops::{Add, Sub};
use core::time::Duration;

/// A point in time on the caller's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant {
    ns: u64,
}

impl Instant {
    /// The clock's start.
    pub const ZERO: Self = Self { ns: 0 };

    /// Return the instant `ns` nanoseconds after the clock's start.
    pub const fn from_nanos(ns: u64) -> Self {
        Self { ns }
    }

    /// Return the nanoseconds since the clock's start.
    pub const fn as_nanos(self) -> u64 {
        self.ns
    }

    /// Return the time since `earlier`, or zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.ns.saturating_sub(earlier.ns))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    /// Saturates after 584 years; such an instant means "never".
    fn add(self, d: Duration) -> Self {
        let ns = u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
        Self { ns: self.ns.saturating_add(ns) }
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_since(earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addition_and_subtraction_saturate() {
        let t = Instant::from_nanos(5);
        assert_eq!(t - Instant::from_nanos(9), Duration::ZERO);
        assert_eq!((t + Duration::MAX).as_nanos(), u64::MAX);
    }
}
