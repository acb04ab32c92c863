//! A child's side of one hop: what it has sent up and not yet got an answer for.
//!
//! A rank's endpoint and an inner node's way to its parent are the same machine (PROTOCOL 3): contributions
//! go up, the result is the acknowledgement; a gap in the results with three later ones behind it is asked for
//! at once; after that only header-sized probes, with back-off, and a payload again only for contributions
//! that the parent says it does not have.
//!
//! Numbers here are local to one shard (see [`crate::shard`]). Invariants:
//! - `answered_below <= sent_below <= answered_below + MAX_WINDOW`;
//! - a seq is answered once: [`Uplink::on_answer`] tells the first time from all others;
//! - nothing is sent again that was sent after the probe whose Status says that it is missing.

#[cfg(feature = "snapshot")]
mod snapshot;

use crate::rtt::Rtt;
use crate::time::Instant;
use core::time::Duration;

/// The most contributions that a child may have in flight: the slots of its bitmaps.
pub const MAX_WINDOW: u64 = 256;

/// How many later answers make a gap a loss (as in TCP's duplicate-ACK threshold, RFC 5681).
pub const REORDER_TOLERANCE: u32 = 3;

/// The timers of a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HopTimers {
    /// The least time before a probe.
    pub probe_min: Duration,
    /// The most, after back-off.
    pub probe_max: Duration,
    /// Silence after which the hop is dead.
    pub dead: Duration,
}

impl HopTimers {
    /// For a machine room: 2 ms to 100 ms between probes, dead after 5 s.
    pub const DEFAULT: Self = Self {
        probe_min: Duration::from_millis(2),
        probe_max: Duration::from_millis(100),
        dead: Duration::from_secs(5),
    };
}

/// What a probe asks about: 64 local numbers from `from` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// The first local number without an answer.
    pub from: u64,
    /// How many follow that were sent, at most 64.
    pub count: u16,
    /// Bit i: the answer to `from + i` is held.
    pub held: u64,
    /// Drawn for this probe; its Status echoes it.
    pub token: u32,
}

/// The state of one hop, seen from the child.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Uplink {
    timers: HopTimers,
    rtt: Rtt,
    answered_below: u64,
    sent_below: u64,
    answered: [u64; WORDS],
    sent_at: [u32; MAX_WINDOW as usize],
    asked_below: u64,
    /// The lowest gap that was asked for, and the highest answer then.
    asked: (u64, u64),
    top_answer: Option<u64>,
    probe_at: Option<Instant>,
    backoff: u32,
    probe: Option<Asked>,
    probe_count: u32,
    /// When this hop last owed us nothing or last spoke; silence is counted from here.
    heard_at: Instant,
}

/// The probe that is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Asked {
    token: u32,
    at: Instant,
    /// What had been sent by then: its Status knows nothing of what came behind it.
    sent_below: u64,
}

/// Whether a child asks for shared results: as long as there is no sign that it asks in vain.
///
/// A port can have joined an address and yet get nothing (a filter, a route). Each result would then be found missing
/// and fetched; so after [`Listening::PATIENCE`] results that came to this child alone, and none that was shared, it
/// asks no more. The same ends it where a sibling does not listen, and costs nothing then. A shared result that comes
/// later, as a slow child finds it behind copies that it has asked for, proves that it can hear, and it asks again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Listening {
    asks: bool,
    /// Results that came alone so far; counted until the first shared one.
    alone: Option<u8>,
}

impl Listening {
    /// How many results may come alone before the first shared one.
    pub const PATIENCE: u8 = 8;

    /// Start; `joined` tells whether the port listens at all.
    pub const fn new(joined: bool) -> Self {
        Self { asks: joined, alone: Some(0) }
    }

    /// Tell whether contributions are to say that the child listens.
    pub const fn asks(&self) -> bool {
        self.asks
    }

    /// Note that something came to all children, be it of use or a copy of what is here.
    pub fn on_shared(&mut self) {
        self.alone = None;
        self.asks = true;
    }

    /// Note a result that came to this child alone; true if the child has just given up.
    pub fn on_alone(&mut self) -> bool {
        let Some(alone) = self.alone.as_mut().filter(|_| self.asks) else { return false };
        *alone += 1;
        self.asks = *alone < Self::PATIENCE;
        !self.asks
    }
}

const WORDS: usize = (MAX_WINDOW / 64) as usize;

/// A time stamp of 2^16 ns steps in 32 bits: comparable over 78 hours, which outlasts every retransmission.
fn stamp(now: Instant) -> u32 {
    (now.as_nanos() >> 16) as u32
}

impl Uplink {
    /// Return a hop on which nothing was sent. `salt` makes its tokens differ from another life's.
    pub const fn new(timers: HopTimers, salt: u32) -> Self {
        Self {
            timers,
            rtt: Rtt::UNKNOWN,
            answered_below: 0,
            sent_below: 0,
            answered: [0; WORDS],
            sent_at: [0; MAX_WINDOW as usize],
            asked_below: 0,
            asked: (0, 0),
            top_answer: None,
            probe_at: None,
            backoff: 0,
            probe: None,
            probe_count: salt,
            heard_at: Instant::ZERO,
        }
    }

    /// Return the first local number without an answer: all below have one.
    pub const fn answered_below(&self) -> u64 {
        self.answered_below
    }

    /// Return the local number after the highest one sent.
    pub const fn sent_below(&self) -> u64 {
        self.sent_below
    }

    /// Tell whether contributions are waiting for answers.
    pub const fn in_flight(&self) -> bool {
        self.answered_below < self.sent_below
    }

    /// Return the round-trip estimate.
    pub const fn rtt(&self) -> Rtt {
        self.rtt
    }

    /// Tell whether `local` has its answer.
    pub fn is_answered(&self, local: u64) -> bool {
        local < self.answered_below || (local < self.answered_below + MAX_WINDOW && self.bit(local))
    }

    /// Note that the contribution `local` goes out, for the first time or again.
    ///
    /// # Panics
    /// If it is outside the window, which is a bug of the caller.
    pub fn on_sent(&mut self, local: u64, now: Instant) {
        assert!(local < self.answered_below + MAX_WINDOW, "sent outside the window");
        if !self.in_flight() {
            self.heard_at = now;
        }
        self.sent_below = self.sent_below.max(local + 1);
        self.sent_at[(local % MAX_WINDOW) as usize] = stamp(now);
        if self.probe_at.is_none() {
            self.arm(now);
        }
    }

    /// Note that the answer to `local` is here; true the first time.
    pub fn on_answer(&mut self, local: u64, now: Instant) -> bool {
        if local >= self.sent_below || self.is_answered(local) {
            return false;
        }
        self.answered[word(local)] |= 1 << (local % 64);
        self.top_answer = self.top_answer.max(Some(local));
        while self.in_flight() && self.bit(self.answered_below) {
            self.answered[word(self.answered_below)] &= !(1 << (self.answered_below % 64));
            self.answered_below += 1;
        }
        self.heard_at = now;
        self.backoff = 0;
        self.probe_at = None;
        if self.in_flight() {
            self.arm(now);
        }
        true
    }

    /// Return a local number whose answer got lost, as far as later answers show. Each is named once, and again if half
    /// a `window` of later answers, and three, have come meanwhile: then what was asked for has got lost too.
    pub fn next_gap(&mut self, window: u16) -> Option<u64> {
        let top = self.top_answer?;
        if self.answered_below < self.asked_below {
            let (lowest, then) = self.asked;
            if lowest != self.answered_below {
                self.asked = (self.answered_below, top);
            } else if top >= then + u64::from(window / 2) + u64::from(REORDER_TOLERANCE) {
                self.asked_below = self.answered_below;
            }
        }
        self.asked_below = self.asked_below.max(self.answered_below);
        while self.asked_below < top {
            let local = self.asked_below;
            if !self.bit(local) {
                let later: u32 = (local + 1..=top).map(|n| u32::from(self.bit(n))).sum();
                if later < REORDER_TOLERANCE {
                    return None;
                }
                self.asked_below = local + 1;
                if local == self.answered_below {
                    self.asked = (local, top);
                }
                return Some(local);
            }
            self.asked_below += 1;
        }
        None
    }

    /// Return the highest local number whose answer is here: what a gap is told from, when it is asked for.
    pub fn top_answer(&self) -> u64 {
        self.top_answer.unwrap_or(0)
    }

    /// Note a Status that echoes `token`, and call `resend` for each local number that it says is missing and
    /// that was not sent again since the probe. Returns false, and does nothing, if the token is not the last
    /// probe's.
    pub fn on_status(&mut self, token: u32, from: u64, bits: u64, now: Instant, mut resend: impl FnMut(u64)) -> bool {
        let Some(asked) = self.probe.filter(|asked| asked.token == token) else { return false };
        self.probe = None;
        self.rtt.sample(now - asked.at);
        self.heard_at = now;
        for i in 0..u64::from(crate::wire::BITMAP_SEQS) {
            let local = from.saturating_add(i);
            if local >= asked.sent_below || local < self.answered_below {
                continue;
            }
            let sent_at = self.sent_at[(local % MAX_WINDOW) as usize];
            let sent_since = stamp(asked.at).wrapping_sub(sent_at) as i32 <= 0 && stamp(asked.at) != sent_at;
            if bits & (1 << i) == 0 && !self.bit(local) && !sent_since {
                resend(local);
            }
        }
        true
    }

    /// Note any other sign of life from the parent.
    pub fn on_heard(&mut self, now: Instant) {
        self.heard_at = now;
    }

    /// Tell whether `token` is that of the probe that is out.
    pub fn is_probe_token(&self, token: u32) -> bool {
        self.probe.is_some_and(|asked| asked.token == token)
    }

    /// Return when to look again.
    pub const fn timeout(&self) -> Option<Instant> {
        self.probe_at
    }

    /// Return the probe that is due, if one is, and arm the next.
    pub fn poll_probe(&mut self, now: Instant) -> Option<Probe> {
        if self.probe_at.is_none_or(|at| now < at) || !self.in_flight() {
            return None;
        }
        self.backoff = self.backoff.saturating_add(1);
        self.arm(now);
        Some(self.draw_probe(now))
    }

    /// Tell whether the parent has been silent for too long while it owed an answer.
    pub fn is_dead(&self, now: Instant) -> bool {
        self.in_flight() && now - self.heard_at >= self.timers.dead
    }

    fn draw_probe(&mut self, now: Instant) -> Probe {
        self.probe_count = self.probe_count.wrapping_add(1);
        self.probe = Some(Asked { token: self.probe_count, at: now, sent_below: self.sent_below });
        let from = self.answered_below;
        let count = (self.sent_below - from).min(u64::from(crate::wire::BITMAP_SEQS));
        let held = (0..count).filter(|&i| self.bit(from + i)).fold(0, |bits, i| bits | 1 << i);
        Probe { from, count: count as u16, held, token: self.probe_count }
    }

    /// Wait once more for an answer; after a probe without one for a time drawn from the upper half of what the
    /// back-off says ("equal jitter"), because children that lost their packets in one burst and then ask again all
    /// at once lose them again.
    fn arm(&mut self, now: Instant) {
        let wait = self.rtt.timeout(self.backoff, self.timers.probe_min, self.timers.probe_max);
        let sooner =
            if self.backoff == 0 { Duration::ZERO } else { wait / 2 * (spread(self.probe_count) >> 16) / 65536 };
        self.probe_at = Some(now + (wait - sooner));
    }

    fn bit(&self, local: u64) -> bool {
        self.answered[word(local)] & (1 << (local % 64)) != 0
    }
}

/// Spread neighbouring numbers evenly over 32 bits: the finaliser of MurmurHash3 (Appleby, public domain).
const fn spread(number: u32) -> u32 {
    let number = (number ^ (number >> 16)).wrapping_mul(0x85eb_ca6b);
    let number = (number ^ (number >> 13)).wrapping_mul(0xc2b2_ae35);
    number ^ (number >> 16)
}

const fn word(local: u64) -> usize {
    (local % MAX_WINDOW / 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const TIMERS: HopTimers = HopTimers::DEFAULT;

    fn at(us: u64) -> Instant {
        Instant::from_nanos(us * 1000)
    }

    #[test]
    fn a_gap_is_named_once_after_three_later_answers() {
        let mut up = Uplink::new(TIMERS, 1);
        (0..6).for_each(|n| up.on_sent(n, at(0)));
        for n in [1, 2] {
            assert!(up.on_answer(n, at(1)));
            assert_eq!(up.next_gap(8), None);
        }
        up.on_answer(3, at(1));
        assert_eq!(up.next_gap(8), Some(0));
        assert_eq!(up.next_gap(8), None);
        assert!(!up.on_answer(3, at(1)), "a second answer is not fresh");
        up.on_answer(0, at(2));
        assert_eq!(up.answered_below(), 4);
    }

    /// What is sent again can get lost as well, and nothing else would show that before a probe.
    #[test]
    fn a_gap_is_named_again_after_half_a_window() {
        let mut up = Uplink::new(TIMERS, 1);
        (0..20).for_each(|n| up.on_sent(n, at(0)));
        let mut named = Vec::new();
        for n in (1..20).filter(|n| *n != 2) {
            up.on_answer(n, at(1));
            while let Some(gap) = up.next_gap(16) {
                named.push((n, gap));
            }
        }
        assert_eq!(named, [(4, 0), (5, 2), (15, 0), (15, 2)]);
    }

    #[test]
    fn a_status_resends_only_what_is_missing_and_old() {
        let mut up = Uplink::new(TIMERS, 1);
        (0..4).for_each(|n| up.on_sent(n, at(0)));
        let probe = up.poll_probe(at(100_000)).expect("due");
        assert_eq!((probe.from, probe.count, probe.held), (0, 4, 0));
        up.on_sent(2, at(200_000));
        let mut resent = Vec::new();
        assert!(!up.on_status(probe.token ^ 1, 0, 0, at(300_000), |n| resent.push(n)));
        assert!(up.on_status(probe.token, 0, 0b0001, at(300_000), |n| resent.push(n)));
        assert_eq!(resent, [1, 3], "0 is in, 2 went out after the probe");
        assert_eq!(up.rtt().smoothed(), Some(Duration::from_millis(200)));
    }

    /// A rank sends its probe and, in the same instant, what a window that has just opened allows.
    #[test]
    fn a_status_says_nothing_of_what_was_sent_behind_its_probe() {
        let mut up = Uplink::new(TIMERS, 1);
        (0..2).for_each(|n| up.on_sent(n, at(0)));
        let probe = up.poll_probe(at(100_000)).expect("due");
        (2..4).for_each(|n| up.on_sent(n, at(100_000)));
        let mut resent = Vec::new();
        assert!(up.on_status(probe.token, 0, 0b0001, at(200_000), |n| resent.push(n)));
        assert_eq!(resent, [1]);
    }

    #[test]
    fn silence_kills_the_hop_only_while_it_owes_something() {
        let mut up = Uplink::new(TIMERS, 1);
        let late = Instant::ZERO + Duration::from_secs(100);
        assert!(!up.is_dead(late));
        up.on_sent(0, late);
        assert!(!up.is_dead(late + Duration::from_secs(4)));
        assert!(up.is_dead(late + Duration::from_secs(5)));
        up.on_heard(late + Duration::from_secs(5));
        assert!(!up.is_dead(late + Duration::from_secs(6)));
    }

    #[test]
    fn listening_in_vain_ends_and_once_heard_never() {
        let mut listening = Listening::new(true);
        assert!((1..Listening::PATIENCE).all(|_| !listening.on_alone() && listening.asks()));
        assert!(listening.on_alone() && !listening.asks());
        assert!(!listening.on_alone(), "told once");
        listening.on_shared();
        assert!((0..1000).all(|_| !listening.on_alone()) && listening.asks());
        assert!(!Listening::new(false).asks());
    }

    #[test]
    fn probes_back_off() {
        let mut up = Uplink::new(TIMERS, 1);
        up.on_sent(0, at(0));
        let mut last = at(0);
        let mut gaps = Vec::new();
        for _ in 0..6 {
            let due = up.timeout().expect("armed");
            gaps.push(due - last);
            assert!(up.poll_probe(due).is_some());
            last = due;
        }
        // Each from the upper half of twice the one before, so none is shorter; the last from that of the limit.
        let longest = |i: u32| (TIMERS.probe_min * 4 * (1 << i)).min(TIMERS.probe_max);
        for (i, &gap) in gaps.iter().enumerate() {
            let limit = longest(i as u32);
            assert!(gap <= limit && gap >= limit / 2, "{gaps:?}");
        }
        assert_eq!(gaps[0], longest(0), "the first says what the round trip is");
    }

    /// 256 children whose first packets were lost together do not go on together.
    #[test]
    fn children_back_off_apart() {
        let mut due: Vec<Instant> = (0..256_u32)
            .map(|child| {
                let mut up = Uplink::new(TIMERS, child);
                up.on_sent(0, at(0));
                for _ in 0..3 {
                    let at = up.timeout().expect("armed");
                    assert!(up.poll_probe(at).is_some());
                }
                up.timeout().expect("armed")
            })
            .collect();
        due.sort();
        // Twice a uniform share of the time that they are spread over.
        let crowd = due.windows(16).filter(|some| some[15] - some[0] < TIMERS.probe_max / 256).count();
        assert!(crowd == 0, "{crowd} times 16 of them within {:?}", TIMERS.probe_max / 256);
    }

    proptest! {
        /// Against an oracle of plain sets: answers in any order, with duplicates and foreign numbers.
        #[test]
        fn answers_match_a_set(order in prop::collection::vec(0_u64..90, 0..400)) {
            let mut up = Uplink::new(TIMERS, 1);
            let mut oracle = BTreeSet::new();
            let mut asked = BTreeSet::new();
            for (i, &n) in order.iter().enumerate() {
                let sent = (i as u64).min(80);
                if sent >= up.sent_below() { up.on_sent(sent, at(i as u64)); }
                let fresh = n < up.sent_below() && oracle.insert(n);
                prop_assert_eq!(up.on_answer(n, at(i as u64)), fresh);
                let below = (0..).find(|k| !oracle.contains(k)).unwrap();
                prop_assert_eq!(up.answered_below(), below);
                while let Some(gap) = up.next_gap(u16::MAX) {
                    prop_assert!(asked.insert(gap), "named twice");
                    prop_assert!(!oracle.contains(&gap) && oracle.range(gap..).count() >= 3);
                }
            }
        }
    }
}
