//! When a time limit from outside ends.

use std::time::{Duration, Instant};

/// Return the end of a limit that begins at `from`. A limit that is longer than any program runs ends later than that:
/// programs and configurations may ask for more than the clock can count.
pub(crate) fn after(from: Instant, limit: Duration) -> Instant {
    from + limit.min(FAR)
}

/// About thirty years.
const FAR: Duration = Duration::from_secs(1_000_000_000);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_counted_from_its_beginning_up_to_what_the_clock_can_count() {
        let now = Instant::now();
        assert_eq!(after(now, Duration::from_secs(60)), now + Duration::from_secs(60));
        assert_eq!(after(now, Duration::MAX), now + FAR);
    }
}
