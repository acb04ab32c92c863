//! Hops without times, for state-space search: two hops that behave alike under all events compare equal.

use super::{MAX_WINDOW, OutstandingProbe, Uplink};
use crate::rtt::Rtt;
use crate::time::Instant;
use core::time::Duration;

/// The resolution of [`timestamp`](super::timestamp).
const STEP_NS: u64 = 1 << 16;

impl Uplink {
    /// Later than every instant that [`Uplink::forget_time`] leaves.
    pub const RESUME_AT: Instant = Instant::from_nanos(6 * STEP_NS);

    /// Replace every instant by one that keeps only the order: whether a timer is armed, and what was sent after an
    /// outstanding probe. Of the round-trip time, keep whether it is shorter than the timers. Continue at
    /// [`Uplink::RESUME_AT`]: an armed timer is due then, and no hop is dead.
    pub fn forget_time(&mut self) {
        // Of each contribution, how many of the outstanding probes were sent before it.
        let mut sent_at = [0; MAX_WINDOW as usize];
        for local in (self.answered_below..self.sent_below).filter(|&local| !self.bit(local)) {
            let place = (local % MAX_WINDOW) as usize;
            let is_later = |probe: &&OutstandingProbe| {
                local < probe.sent_below && (self.sent_at[place].wrapping_sub(super::timestamp(probe.at)) as i32) > 0
            };
            let later = self.probes.iter().flatten().filter(is_later).count();
            sent_at[place] = if self.probes[0].is_some() { 2 * later as u32 + 1 } else { 0 };
        }
        self.sent_at = sent_at;
        for (nth, probe) in self.probes.iter_mut().flatten().enumerate() {
            probe.at = Instant::from_nanos((2 * nth as u64 + 2) * STEP_NS);
        }
        let is_near = self.is_near();
        self.rtt = Rtt::UNKNOWN;
        if is_near {
            self.rtt.sample(Duration::ZERO);
        }
        self.backoff = 0;
        self.probe_at = self.probe_at.map(|_| Instant::ZERO);
        self.active_at = Self::RESUME_AT;
    }

    /// Forget the outstanding probes and their tokens. Valid only while no packet with a token of this hop is in
    /// flight: nothing can depend on either then.
    pub fn forget_probe(&mut self) {
        self.probes = [None; 2];
        self.probe_count = 0;
        self.sent_at = [0; MAX_WINDOW as usize];
    }
}

const _: () = assert!(Uplink::RESUME_AT.as_nanos() < Duration::from_millis(1).as_nanos() as u64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uplink::HopTimers;

    /// Hops that did the same at different times become equal, except for what was sent after the probe.
    #[test]
    fn hops_without_times_differ_only_in_order() {
        let hop = |times: [u64; 3], again: Option<u64>| {
            let mut up = Uplink::new(HopTimers::DEFAULT, 1);
            let at = |ms| Instant::from_nanos(ms * 1_000_000);
            up.on_sent(0, at(times[0]));
            up.on_sent(1, at(times[1]));
            assert!(up.poll_probe(at(times[2])).is_some());
            if let Some(local) = again {
                up.on_sent(local, at(times[2] + 1));
            }
            up.forget_time();
            up
        };
        assert_eq!(hop([1, 2, 50], None), hop([7, 9, 400], None));
        assert_ne!(hop([1, 2, 50], None), hop([1, 2, 50], Some(1)));
        assert_ne!(hop([1, 2, 50], Some(0)), hop([1, 2, 50], Some(1)));
        let resent = |mut up: Uplink| {
            let mut resent = Vec::new();
            assert!(up.on_status(2, 0, (0, 0), Uplink::RESUME_AT, |local| resent.push(local)));
            resent
        };
        assert_eq!(resent(hop([1, 2, 50], None)), [0, 1]);
        assert_eq!(resent(hop([1, 2, 50], Some(1))), [0]);
        let mut up = hop([1, 2, 50], None);
        assert!(!up.is_dead(Uplink::RESUME_AT) && up.poll_probe(Uplink::RESUME_AT).is_some());
    }
}
