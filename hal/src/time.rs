//! Time as an argument.
//!
//! No state machine of Sumac reads a clock: the caller passes `now`. An [`Instant`] counts nanoseconds since
//! a start that the caller chose (boot, process start, the simulator's zero), so instants of two clocks must
//! never meet; nothing on the wire carries one.

use core::ops::{Add, Sub};
use core::time::Duration;

/// A point on the caller's monotonic clock, in nanoseconds since its start.
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

    /// Return the time since `earlier`, zero if it is not earlier.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.ns.saturating_sub(earlier.ns))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    /// Saturates at the end of the clock (584 years), which then means "never".
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
    fn arithmetic_saturates() {
        let t = Instant::from_nanos(5);
        assert_eq!(t - Instant::from_nanos(9), Duration::ZERO);
        assert_eq!((t + Duration::MAX).as_nanos(), u64::MAX);
    }
}
