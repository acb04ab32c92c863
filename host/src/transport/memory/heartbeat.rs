//! Detects a device whose runtime has stopped: a suspended process keeps its connection open and answers nothing.
//!
//! The runtime increments a word of the function on each iteration
//! ([`Features::HEARTBEAT`](sumac_hal::mmio::Features::HEARTBEAT)). An idle runtime sleeps and iterates only when its
//! doorbell is rung. A rank that waits for it therefore pings it from time to time and watches the counter.
//!
//! Invariants:
//! - A device is declared dead only if it was pinged after its last iteration, so an idle one never is. A rank that
//!   waits for nothing sends no pings.
//! - A rank that was suspended itself was not watching: between two checks at most [`CHECK_GAP_MAX`] counts as silence.

use std::time::{Duration, Instant};

/// Interval between pings to a device whose counter does not move.
const PING_INTERVAL: Duration = Duration::from_millis(500);

/// The longest interval between two checks that counts as silence; also between the last check and the start of a wait.
pub(super) const CHECK_GAP_MAX: Duration = Duration::from_millis(500);

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Liveness {
    /// The counter has moved, or silence is still short.
    Alive,
    /// Ring the doorbell: the device may be asleep.
    Ping,
    /// The counter has not moved although the device was pinged.
    Dead,
}

/// Watches the heartbeat counter of one device.
#[derive(Debug)]
pub(super) struct Heartbeat {
    limit: Duration,
    beat: u32,
    last_check: Instant,
    silent: Duration,
    /// The amount of silence at which the next ping is due.
    ping_at: Duration,
    is_pinged: bool,
}

impl Heartbeat {
    /// Start at `now`. A device whose counter does not move for `limit` while a rank waits for it is dead.
    pub(super) const fn new(limit: Duration, beat: u32, now: Instant) -> Self {
        Self { limit, beat, last_check: now, silent: Duration::ZERO, ping_at: PING_INTERVAL, is_pinged: false }
    }

    /// Check the counter at `now`. Silence counts only while something is waited for.
    pub(super) fn check(&mut self, beat: u32, is_waited_for: bool, now: Instant) -> Liveness {
        let gap = now.saturating_duration_since(self.last_check);
        self.last_check = now;
        if beat != self.beat || !is_waited_for {
            *self = Self::new(self.limit, beat, now);
            return Liveness::Alive;
        }
        self.silent += gap.min(CHECK_GAP_MAX);
        if self.is_pinged && self.silent >= self.limit {
            return Liveness::Dead;
        }
        if self.silent < self.ping_at {
            return Liveness::Alive;
        }
        self.ping_at = self.silent + PING_INTERVAL;
        self.is_pinged = true;
        Liveness::Ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);
    const STEP: Duration = Duration::from_millis(20);

    /// Check every 20 ms for `length`; returns the number of pings, and when the device was declared dead.
    fn watch(
        heartbeat: &mut Heartbeat,
        from: Instant,
        length: Duration,
        beat: impl Fn(u32) -> u32,
    ) -> (u32, Option<Duration>) {
        let mut pings = 0;
        for nth in 1..=u32::try_from(length.as_nanos() / STEP.as_nanos()).expect("few") {
            match heartbeat.check(beat(pings), true, from + STEP * nth) {
                Liveness::Alive => {}
                Liveness::Ping => pings += 1,
                Liveness::Dead => return (pings, Some(STEP * nth)),
            }
        }
        (pings, None)
    }

    #[test]
    fn stalled_device_is_dead_at_the_limit() {
        let now = Instant::now();
        let mut heartbeat = Heartbeat::new(LIMIT, 7, now);
        assert_eq!(watch(&mut heartbeat, now, 2 * LIMIT, |_| 7), (9, Some(LIMIT)));
    }

    #[test]
    fn sleeping_device_that_answers_pings_stays_alive_at_two_pings_a_second() {
        let now = Instant::now();
        let mut heartbeat = Heartbeat::new(LIMIT, 0, now);
        let (pings, dead) = watch(&mut heartbeat, now, Duration::from_secs(60), |pings| pings);
        assert!(dead.is_none() && (100..=120).contains(&pings), "{pings}");
    }

    #[test]
    fn idle_rank_sends_no_pings() {
        let now = Instant::now();
        let mut heartbeat = Heartbeat::new(LIMIT, 7, now);
        for nth in 1..10_000 {
            assert_eq!(heartbeat.check(7, false, now + STEP * nth), Liveness::Alive);
        }
        let begun = now + STEP * 9_999;
        assert_eq!(heartbeat.check(7, true, begun + STEP), Liveness::Alive, "silence begins with the wait");
        assert_eq!(watch(&mut heartbeat, begun + STEP, 2 * LIMIT, |_| 7).1, Some(LIMIT - STEP));
    }

    #[test]
    fn suspended_rank_does_not_count_its_own_pause_as_silence() {
        let now = Instant::now();
        let mut heartbeat = Heartbeat::new(LIMIT, 7, now);
        assert_eq!(watch(&mut heartbeat, now, Duration::from_secs(1), |_| 7).1, None);
        let woken = now + Duration::from_secs(3600);
        assert_eq!(heartbeat.check(7, true, woken), Liveness::Ping);
        assert_eq!(heartbeat.check(8, true, woken + STEP), Liveness::Alive);
    }
}
