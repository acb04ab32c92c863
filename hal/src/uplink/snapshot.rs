//! A hop without its times: two that behave alike, whatever happens and in whatever order, then compare equal.

use super::{Asked, MAX_WINDOW, Uplink};
use crate::rtt::Rtt;
use crate::time::Instant;
use core::time::Duration;

/// The length of a step of [`stamp`](super::stamp).
const STEP_NS: u64 = 1 << 16;

impl Uplink {
    /// All moments that [`Uplink::forget_time`] leaves lie before this one.
    pub const AFTERWARDS: Instant = Instant::from_nanos(4 * STEP_NS);

    /// Replace every moment by one that says only what came first: whether a timer is armed, and what was sent after the
    /// probe that is out. Call it with all that was done until [`Uplink::AFTERWARDS`], and go on at that moment: an armed
    /// timer is due then, and no hop is dead.
    pub fn forget_time(&mut self) {
        const PROBED: Instant = Instant::from_nanos(2 * STEP_NS);
        let mut sent_at = [0; MAX_WINDOW as usize];
        if let Some(Asked { token, at, sent_below }) = self.probe {
            for local in (self.answered_below..sent_below).filter(|&local| !self.bit(local)) {
                let place = (local % MAX_WINDOW) as usize;
                let later = (self.sent_at[place].wrapping_sub(super::stamp(at)) as i32) > 0;
                sent_at[place] = if later { 3 } else { 1 };
            }
            self.probe = Some(Asked { token, at: PROBED, sent_below });
        }
        self.sent_at = sent_at;
        self.rtt = Rtt::UNKNOWN;
        self.backoff = 0;
        self.probe_at = self.probe_at.map(|_| Instant::ZERO);
        self.heard_at = Self::AFTERWARDS;
    }

    /// Forget the probe that is out and what its token was: allowed while no packet with a token of this hop is on its
    /// way, since then nothing can come of either.
    pub fn forget_probe(&mut self) {
        self.probe = None;
        self.probe_count = 0;
        self.sent_at = [0; MAX_WINDOW as usize];
    }
}

const _: () = assert!(Uplink::AFTERWARDS.as_nanos() < Duration::from_millis(1).as_nanos() as u64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uplink::HopTimers;

    /// Machines that did the same at other moments become equal; what was sent after the probe stays told apart.
    #[test]
    fn what_stays_is_the_order() {
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
            assert!(up.on_status(2, 0, 0, Uplink::AFTERWARDS, |local| resent.push(local)));
            resent
        };
        assert_eq!(resent(hop([1, 2, 50], None)), [0, 1]);
        assert_eq!(resent(hop([1, 2, 50], Some(1))), [0]);
        let mut up = hop([1, 2, 50], None);
        assert!(!up.is_dead(Uplink::AFTERWARDS) && up.poll_probe(Uplink::AFTERWARDS).is_some());
    }
}
