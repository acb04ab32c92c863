//! Whether the device's runtime goes on: a process that is stopped hangs nothing up and answers nothing.
//!
//! A runtime counts its turns in a word of the function ([`Features::HEARTBEAT`](sumac_hal::mmio::Features::HEARTBEAT)).
//! One that has nothing to do sleeps, and turns only when it is rung; so who waits for it rings now and then, and watches
//! whether the count goes on.
//!
//! Invariants:
//! - only a device that was rung after its last turn is dead, so an idle one is not, and who waits for nothing rings nobody;
//! - a rank that was stopped itself has not watched meanwhile: between two looks at most [`GAP_MAX`] counts as silence.

use std::time::{Duration, Instant};

/// How often a device that stands still is rung.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// The most time between two looks that counts, also between the last one and the beginning of a wait.
pub(super) const GAP_MAX: Duration = Duration::from_millis(500);

/// What a look at the count says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
    /// It went on, or may yet.
    Goes,
    /// Ring the device: it may sleep.
    Ask,
    /// It stands still, although it was rung.
    Dead,
}

/// One side's watch over a device.
#[derive(Debug)]
pub(super) struct Pulse {
    limit: Duration,
    beat: u32,
    looked: Instant,
    silent: Duration,
    /// The silence at which it is rung next.
    ask_at: Duration,
    is_asked: bool,
}

impl Pulse {
    /// Begin to watch at `now`; a device that stands still for `limit` while it is waited for is dead.
    pub(super) const fn new(limit: Duration, beat: u32, now: Instant) -> Self {
        Self { limit, beat, looked: now, silent: Duration::ZERO, ask_at: ASK_EVERY, is_asked: false }
    }

    /// Take in the count at `now`. Where nothing is waited for, nothing counts.
    pub(super) fn look(&mut self, beat: u32, is_waited_for: bool, now: Instant) -> Sign {
        let gap = now.saturating_duration_since(self.looked);
        self.looked = now;
        if beat != self.beat || !is_waited_for {
            *self = Self::new(self.limit, beat, now);
            return Sign::Goes;
        }
        self.silent += gap.min(GAP_MAX);
        if self.is_asked && self.silent >= self.limit {
            return Sign::Dead;
        }
        if self.silent < self.ask_at {
            return Sign::Goes;
        }
        self.ask_at = self.silent + ASK_EVERY;
        self.is_asked = true;
        Sign::Ask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);
    const STEP: Duration = Duration::from_millis(20);

    /// Look every 20 ms for so long; returns how often to ask, and when the device was dead.
    fn watch(pulse: &mut Pulse, from: Instant, length: Duration, beat: impl Fn(u32) -> u32) -> (u32, Option<Duration>) {
        let mut asked = 0;
        for nth in 1..=u32::try_from(length.as_nanos() / STEP.as_nanos()).expect("few") {
            match pulse.look(beat(asked), true, from + STEP * nth) {
                Sign::Goes => {}
                Sign::Ask => asked += 1,
                Sign::Dead => return (asked, Some(STEP * nth)),
            }
        }
        (asked, None)
    }

    #[test]
    fn a_device_that_stands_still_is_dead_at_the_limit() {
        let now = Instant::now();
        let mut pulse = Pulse::new(LIMIT, 7, now);
        assert_eq!(watch(&mut pulse, now, 2 * LIMIT, |_| 7), (9, Some(LIMIT)));
    }

    #[test]
    fn a_device_that_sleeps_and_turns_when_it_is_rung_is_alive_for_ever_at_two_rings_a_second() {
        let now = Instant::now();
        let mut pulse = Pulse::new(LIMIT, 0, now);
        let (asked, dead) = watch(&mut pulse, now, Duration::from_secs(60), |asked| asked);
        assert!(dead.is_none() && (100..=120).contains(&asked), "{asked}");
    }

    #[test]
    fn who_waits_for_nothing_asks_nothing() {
        let now = Instant::now();
        let mut pulse = Pulse::new(LIMIT, 7, now);
        for nth in 1..10_000 {
            assert_eq!(pulse.look(7, false, now + STEP * nth), Sign::Goes);
        }
        let begun = now + STEP * 9_999;
        assert_eq!(pulse.look(7, true, begun + STEP), Sign::Goes, "silence begins with the wait");
        assert_eq!(watch(&mut pulse, begun + STEP, 2 * LIMIT, |_| 7).1, Some(LIMIT - STEP));
    }

    #[test]
    fn a_rank_that_was_stopped_itself_declares_nobody_dead_for_it() {
        let now = Instant::now();
        let mut pulse = Pulse::new(LIMIT, 7, now);
        assert_eq!(watch(&mut pulse, now, Duration::from_secs(1), |_| 7).1, None);
        let woken = now + Duration::from_secs(3600);
        assert_eq!(pulse.look(7, true, woken), Sign::Ask);
        assert_eq!(pulse.look(8, true, woken + STEP), Sign::Goes);
    }
}
