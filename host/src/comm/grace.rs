//! How long an operation goes on after the view was called in question.
//!
//! What dead ranks had sent may still complete it, and ranks that ended by what all get to hear, a mismatch say, have
//! told so before they went: it is there to be read. So grace is counted in looks, each with all that had come by then,
//! and not by the clock alone: on a machine that had no time for this rank the clock says nothing about what it missed.

use std::time::{Duration, Instant};

/// The looks that were taken since.
#[derive(Debug, Default)]
pub(super) struct Grace {
    looks: u32,
    looked_at: Option<Instant>,
}

impl Grace {
    /// Count a look; returns how long until the next one counts, `None` once there were enough.
    pub(super) fn look(&mut self, now: Instant) -> Option<Duration> {
        let due = self.looked_at.map_or(now, |at| at + LOOK_EVERY);
        if now < due {
            return Some(due - now);
        }
        if self.looks == LOOKS {
            return None;
        }
        self.looks += 1;
        self.looked_at = Some(now);
        Some(LOOK_EVERY)
    }
}

/// How often a look counts.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How many are enough.
const LOOKS: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_looks_at_once_are_one_and_a_long_sleep_is_no_look() {
        let (mut grace, mut now) = (Grace::default(), Instant::now());
        for look in 0..LOOKS {
            assert_eq!(grace.look(now), Some(LOOK_EVERY), "{look}");
            assert_eq!(grace.look(now + LOOK_EVERY / 2), Some(LOOK_EVERY / 2), "{look}");
            now += if look == 1 { LOOK_EVERY * 1000 } else { LOOK_EVERY };
        }
        assert_eq!([grace.look(now), grace.look(now)], [None; 2]);
    }
}
