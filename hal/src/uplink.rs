//! The child's side of one hop: which contributions are in flight, and when to request, probe or retransmit.
//!
//! Ranks and inner nodes use the same state machine towards their parent (PROTOCOL 3). Contributions go up, and the
//! answer acknowledges them. A gap in the answers is requested at once when three later answers have arrived. What that
//! leaves is found by header-sized probes with exponential back-off. Payload is sent again only for contributions that
//! the parent reports missing, and for answers that it reports sent: those would have arrived before the report. So a
//! long queue between the two, from which nothing is lost, has nothing sent twice.
//!
//! Chunk numbers here are local to one shard (see [`crate::shard`]). Invariants:
//! - `answered_below <= sent_below <= answered_below + MAX_WINDOW`;
//! - each seq is answered once: [`Uplink::on_answer`] returns true for the first answer only;
//! - a contribution that was sent after a probe is never retransmitted because of that probe's Status.

#[cfg(feature = "snapshot")]
mod snapshot;

use crate::rtt::Rtt;
use crate::time::Instant;
use core::time::Duration;

/// The maximum number of contributions in flight per child: the capacity of its bitmaps.
pub const MAX_WINDOW: u64 = 256;

/// How many later answers turn a gap into a loss; TCP's duplicate-ACK threshold (RFC 5681).
pub const REORDER_TOLERANCE: u32 = 3;

/// How many probes in a row without progress make a hop count as stalled: 60 ms or more with the default timers.
const STALLED_PROBES: u32 = 5;

/// The timers of a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HopTimers {
    /// The shortest time before a probe.
    pub probe_min: Duration,
    /// The longest time before a probe, after back-off.
    pub probe_max: Duration,
    /// A hop that is silent for this long while it owes an answer is dead.
    pub dead: Duration,
}

impl HopTimers {
    /// Defaults for a data center: 2 ms to 100 ms between probes, dead after 5 s.
    pub const DEFAULT: Self = Self {
        probe_min: Duration::from_millis(2),
        probe_max: Duration::from_millis(100),
        dead: Duration::from_secs(5),
    };
}

/// A probe of up to 64 chunks, by local number, starting at `from`. Bit i of a bitmap is about `from + i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// The lowest local number without an answer.
    pub from: u64,
    /// How many chunks from there on were sent, at most 64.
    pub count: u16,
    /// The answer has arrived.
    pub held: u64,
    /// The answer was sent and is lost: send it again.
    pub lost: u64,
    /// Unique to this probe; its Status echoes it.
    pub token: u32,
}

/// The state of one hop on the child's side.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Uplink {
    timers: HopTimers,
    rtt: Rtt,
    answered_below: u64,
    sent_below: u64,
    answered: [u64; WORDS],
    /// Answers that were lost. A timer's probe requests them.
    lost: [u64; WORDS],
    /// Those that were not requested yet: a probe that does is due at once.
    unrequested: [u64; WORDS],
    sent_at: [u32; MAX_WINDOW as usize],
    requested_below: u64,
    /// The lowest gap that was requested, and the highest answer at that time.
    requested: (u64, u64),
    top_answer: Option<u64>,
    probe_at: Option<Instant>,
    backoff: u32,
    /// The first probe without a Status, and the last one if that is another.
    probes: [Option<OutstandingProbe>; 2],
    probe_count: u32,
    /// When the parent last owed nothing or last sent something; silence is counted from here.
    active_at: Instant,
    /// The signature of the operation that the parent was told of last.
    described: Option<u32>,
}

/// A probe that waits for its Status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct OutstandingProbe {
    token: u32,
    at: Instant,
    /// What had been sent by then. The Status does not cover what was sent later.
    sent_below: u64,
}

/// Whether a child requests results at the shared address. It stops when they do not arrive there.
///
/// A port can join an address and still receive nothing, because of a filter or a route. Each shared result would then
/// be missed and requested again. So a child stops requesting shared results after [`SharedResults::UNICAST_LIMIT`]
/// unicast results without a shared one. The same happens, at no cost, when a sibling does not listen. A shared result
/// that arrives later, as it can at a slow child, proves that the address works, and the child requests them again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedResults {
    requested: bool,
    /// Unicast results so far; `None` once a shared one has arrived.
    unicast: Option<u8>,
}

impl SharedResults {
    /// The number of unicast results, without a shared one, after which the child stops.
    pub const UNICAST_LIMIT: u8 = 8;

    /// Start requesting shared results if `joined`: if the port has joined the address.
    pub const fn new(joined: bool) -> Self {
        Self { requested: joined, unicast: Some(0) }
    }

    /// Return whether contributions should carry the `SHARED` flag.
    pub const fn is_requested(&self) -> bool {
        self.requested
    }

    /// Record a packet at the shared address, whether it is new or a duplicate.
    pub fn on_shared(&mut self) {
        self.unicast = None;
        self.requested = true;
    }

    /// Record a unicast result. Returns true if the child stops requesting shared results because of it.
    pub fn on_unicast(&mut self) -> bool {
        let Some(unicast) = self.unicast.as_mut().filter(|_| self.requested) else { return false };
        *unicast += 1;
        self.requested = *unicast < Self::UNICAST_LIMIT;
        !self.requested
    }
}

const WORDS: usize = (MAX_WINDOW / 64) as usize;

/// A 32-bit timestamp in steps of 2^16 ns. Timestamps up to 39 hours apart compare correctly, which is longer than any
/// retransmission takes.
fn timestamp(now: Instant) -> u32 {
    (now.as_nanos() >> 16) as u32
}

impl Uplink {
    /// Return an idle hop. `salt` is the start of its probe tokens; it should differ between incarnations.
    pub const fn new(timers: HopTimers, salt: u32) -> Self {
        Self {
            timers,
            rtt: Rtt::UNKNOWN,
            answered_below: 0,
            sent_below: 0,
            answered: [0; WORDS],
            lost: [0; WORDS],
            unrequested: [0; WORDS],
            sent_at: [0; MAX_WINDOW as usize],
            requested_below: 0,
            requested: (0, 0),
            top_answer: None,
            probe_at: None,
            backoff: 0,
            probes: [None; 2],
            probe_count: salt,
            active_at: Instant::ZERO,
            described: None,
        }
    }

    /// Return the lowest local number without an answer.
    pub const fn answered_below(&self) -> u64 {
        self.answered_below
    }

    /// Return the highest local number sent, plus one.
    pub const fn sent_below(&self) -> u64 {
        self.sent_below
    }

    /// Return whether any contribution waits for its answer.
    #[inline]
    pub const fn in_flight(&self) -> bool {
        self.answered_below < self.sent_below
    }

    /// Return the round-trip estimate.
    pub const fn rtt(&self) -> Rtt {
        self.rtt
    }

    /// Return whether the answer to `local` has arrived.
    pub fn is_answered(&self, local: u64) -> bool {
        local < self.answered_below || (local < self.answered_below + MAX_WINDOW && self.bit(local))
    }

    /// Record that the contribution `local` is sent, for the first time or again.
    ///
    /// # Panics
    /// If `local` is [`MAX_WINDOW`] or more above [`Uplink::answered_below`].
    #[inline]
    pub fn on_sent(&mut self, local: u64, now: Instant) {
        assert!(local < self.answered_below + MAX_WINDOW, "contribution sent outside the window");
        if !self.in_flight() {
            self.active_at = now;
        }
        self.sent_below = self.sent_below.max(local + 1);
        self.sent_at[(local % MAX_WINDOW) as usize] = timestamp(now);
        if self.probe_at.is_none() {
            self.arm(now);
        }
    }

    /// Record the answer to `local`. Returns true if it is the first.
    pub fn on_answer(&mut self, local: u64, now: Instant) -> bool {
        if local >= self.sent_below || self.is_answered(local) {
            return false;
        }
        let bit = 1 << (local % 64);
        self.answered[word(local)] |= bit;
        self.lost[word(local)] &= !bit;
        self.unrequested[word(local)] &= !bit;
        self.top_answer = self.top_answer.max(Some(local));
        while self.in_flight() && self.bit(self.answered_below) {
            self.answered[word(self.answered_below)] &= !(1 << (self.answered_below % 64));
            self.answered_below += 1;
        }
        self.note_answers(now);
        true
    }

    /// Return whether answers have arrived in order so far: none is missing below another, and none was lost.
    pub fn is_in_order(&self) -> bool {
        self.top_answer.is_none_or(|top| top < self.answered_below)
            && self.requested_below <= self.answered_below
            && self.lost == [0; WORDS]
    }

    /// Record the answer to `local`, if it is the next in order ([`Uplink::is_in_order`]); false if it is not. With
    /// [`Uplink::note_answers`] behind the last of several, this does what [`Uplink::on_answer`] and
    /// [`Uplink::next_gap`] do.
    #[inline]
    pub fn take_in_order(&mut self, local: u64) -> bool {
        if local != self.answered_below || !self.in_flight() {
            return false;
        }
        self.top_answer = Some(local);
        self.answered_below += 1;
        self.requested_below = self.answered_below;
        true
    }

    /// Record that the parent has answered at `now`: the next probe is due later.
    pub fn note_answers(&mut self, now: Instant) {
        self.active_at = now;
        self.backoff = 0;
        self.probe_at = None;
        if self.in_flight() {
            self.arm(now);
        }
    }

    /// Return the next local number whose answer was lost, judging by later answers. Each gap is returned once. The
    /// lowest is returned again after half a `window` and three more answers: its retransmission was then lost too.
    pub fn next_gap(&mut self, window: u16) -> Option<u64> {
        let top = self.top_answer?;
        if self.answered_below < self.requested_below {
            let (lowest, then) = self.requested;
            if lowest != self.answered_below {
                self.requested = (self.answered_below, top);
            } else if top >= then + u64::from(window / 2) + u64::from(REORDER_TOLERANCE) {
                self.requested_below = self.answered_below;
            }
        }
        self.requested_below = self.requested_below.max(self.answered_below);
        while self.requested_below < top {
            let local = self.requested_below;
            if !self.bit(local) {
                let later: u32 = (local + 1..=top).map(|n| u32::from(self.bit(n))).sum();
                if later < REORDER_TOLERANCE {
                    return None;
                }
                self.requested_below = local + 1;
                self.note_lost(local);
                if local == self.answered_below {
                    self.requested = (local, top);
                }
                return Some(local);
            }
            self.requested_below += 1;
        }
        None
    }

    /// Return the highest local number whose answer has arrived; a request for a gap reports it.
    pub fn top_answer(&self) -> u64 {
        self.top_answer.unwrap_or(0)
    }

    /// Process a Status that echoes `token`: call `resend` for each local number whose contribution it reports missing
    /// (`arrived`) and that was not retransmitted since the probe. Answers that it reports as `sent` and that are not
    /// here were lost, and a probe that requests them is due at once; not for those that were requested before, since
    /// they may have been sent again behind the Status. Returns false, and does nothing, if the token is that of no
    /// outstanding probe.
    pub fn on_status(
        &mut self,
        token: u32,
        from: u64,
        (arrived, sent): (u64, u64),
        now: Instant,
        mut resend: impl FnMut(u64),
    ) -> bool {
        let [first, last] = self.probes;
        let (asked, others) = match (first, last) {
            (Some(first), _) if first.token == token => (first, last),
            (_, Some(last)) if last.token == token => (last, None),
            _ => return false,
        };
        self.probes = [others, None];
        self.rtt.sample(now - asked.at);
        self.active_at = now;
        for i in 0..u64::from(crate::wire::BITMAP_SEQS) {
            let local = from.saturating_add(i);
            if local >= asked.sent_below || local < self.answered_below || self.bit(local) {
                continue;
            }
            let sent_at = self.sent_at[(local % MAX_WINDOW) as usize];
            let sent_since = timestamp(asked.at).wrapping_sub(sent_at) as i32 <= 0 && timestamp(asked.at) != sent_at;
            if arrived & (1 << i) == 0 && !sent_since {
                resend(local);
            }
            let bit = 1 << (local % 64);
            if sent & (1 << i) != 0 && self.lost[word(local)] & bit == 0 {
                self.lost[word(local)] |= bit;
                self.unrequested[word(local)] |= bit;
            }
        }
        if self.unrequested != [0; WORDS] {
            self.arm(now);
        }
        true
    }

    /// Return whether the operation with this signature is the one that was described to the parent last. Contributions
    /// to any other are sent with a description, or after one.
    pub fn is_described(&self, signature: u32) -> bool {
        self.described == Some(signature)
    }

    /// Record that the operation with this signature is described to the parent.
    pub fn set_described(&mut self, signature: u32) {
        self.described = Some(signature);
    }

    /// Have the next contribution described: the parent does not know its operation.
    pub fn forget_described(&mut self) {
        self.described = None;
    }

    /// Record any other valid packet from the parent.
    pub fn on_activity(&mut self, now: Instant) {
        self.active_at = now;
    }

    /// Return whether `token` belongs to an outstanding probe.
    pub fn is_probe_token(&self, token: u32) -> bool {
        self.probes.iter().flatten().any(|asked| asked.token == token)
    }

    /// Return when to call [`Uplink::poll_probe`] next.
    pub const fn timeout(&self) -> Option<Instant> {
        self.probe_at
    }

    /// Return the probe that is due, if any, and schedule the next.
    pub fn poll_probe(&mut self, now: Instant) -> Option<Probe> {
        if self.probe_at.is_none_or(|at| now < at) || !self.in_flight() {
            return None;
        }
        let mut requested = core::mem::take(&mut self.unrequested);
        if requested == [0; WORDS] {
            if self.is_near() && self.probes[0].is_none() {
                (self.answered_below..self.sent_below).for_each(|local| self.note_lost(local));
            }
            requested = self.lost;
            self.backoff = self.backoff.saturating_add(1);
        }
        self.arm(now);
        Some(self.next_probe(&requested, now))
    }

    /// Return whether several probes in a row brought no progress, although the parent may have answered them.
    pub const fn is_stalled(&self) -> bool {
        self.in_flight() && self.backoff >= STALLED_PROBES
    }

    /// Return whether the parent owes an answer and has been silent for longer than [`HopTimers::dead`].
    pub fn is_dead(&self, now: Instant) -> bool {
        self.in_flight() && now - self.active_at >= self.timers.dead
    }

    /// Return whether a timer expires later than the parent's answer to a probe comes, as far as is known. If not,
    /// answers may be in a queue for longer than that.
    fn is_near(&self) -> bool {
        self.rtt.smoothed().is_some() && self.rtt.timeout(0, Duration::ZERO, Duration::MAX) <= self.timers.probe_max
    }

    /// Count the answer to `local` as lost, if it is not here.
    fn note_lost(&mut self, local: u64) {
        if !self.bit(local) {
            self.lost[word(local)] |= 1 << (local % 64);
        }
    }

    fn next_probe(&mut self, requested: &[u64; WORDS], now: Instant) -> Probe {
        self.probe_count = self.probe_count.wrapping_add(1);
        let (token, sent_below) = (self.probe_count, self.sent_below);
        let probe = OutstandingProbe { token, at: now, sent_below };
        match &mut self.probes {
            [first @ None, _] => *first = Some(probe),
            [_, last] => *last = Some(probe),
        }
        let from = self.answered_below;
        let count = (sent_below - from).min(u64::from(crate::wire::BITMAP_SEQS));
        let bits = |has: &dyn Fn(u64) -> bool| (0..count).filter(|&i| has(from + i)).fold(0, |bits, i| bits | 1 << i);
        let held = bits(&|local| self.bit(local));
        let lost = bits(&|local| requested[word(local)] & (1 << (local % 64)) != 0);
        Probe { from, count: count as u16, held, lost, token }
    }

    /// Schedule the next probe: at once if it has answers to request. After an unanswered probe the wait is drawn
    /// from the upper half of the back-off time ("equal jitter"): children that lose packets in one burst and probe in
    /// unison lose them again.
    fn arm(&mut self, now: Instant) {
        if self.unrequested != [0; WORDS] {
            self.probe_at = Some(now);
            return;
        }
        let wait = self.rtt.timeout(self.backoff, self.timers.probe_min, self.timers.probe_max);
        let sooner = if self.backoff == 0 { Duration::ZERO } else { wait / 2 * (mix(self.probe_count) >> 16) / 65536 };
        self.probe_at = Some(now + (wait - sooner));
    }

    fn bit(&self, local: u64) -> bool {
        self.answered[word(local)] & (1 << (local % 64)) != 0
    }
}

/// Map consecutive numbers to well-distributed ones: the finalizer of MurmurHash3 (Appleby, public domain).
const fn mix(number: u32) -> u32 {
    let number = (number ^ (number >> 16)).wrapping_mul(0x85eb_ca6b);
    let number = (number ^ (number >> 13)).wrapping_mul(0xc2b2_ae35);
    number ^ (number >> 16)
}

const fn word(local: u64) -> usize {
    (local % MAX_WINDOW / 64) as usize
}

#[cfg(test)]
mod tests;
