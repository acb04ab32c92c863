//! The longest packet that a path carries in both directions, by probing (DPLPMTUD, RFC 8899), sans I/O.
//!
//! The child of a hop sends probes that are padded to the length in question, and never fragmented. The parent answers
//! each with a packet of the same length, so one round trip tests both directions. What an ICMP message says does not
//! matter: it can be forged, and filtered. Lengths are searched in steps of [`STEP_BYTES`], the longest first, because
//! it fits as a rule.
//!
//! Invariants:
//! - A length fails only if several probes of it are lost while short ones, sent at the same time, are answered. A peer
//!   that is silent is dead, busy, or not there yet, which says nothing about lengths.
//! - The number of probes is bounded, whatever the peer answers.
//! - A reply counts only if it echoes a token of this search.

use crate::port::Addr;
use crate::time::Instant;
use crate::wire::HEADER_LEN;
use core::time::Duration;

/// The resolution of the search, in bytes: chunks are multiples of it.
pub const STEP_BYTES: usize = 16;

/// How many probes of the longest length are lost before it fails. At a loss of one packet in ten in each direction
/// that happens by chance once in 600,000 searches.
const ATTEMPTS_LONGEST: u8 = 8;

/// How many probes of any other length are lost before it fails. By chance this costs a part of the chunk only.
const ATTEMPTS: u8 = 3;

/// How many attempts in a row a peer may leave unanswered before the search ends: some three seconds.
const SILENT_ATTEMPTS: u8 = 16;

/// How many attempts a search makes at most; one that finds its length makes half as many, at a loss of one in ten.
const ATTEMPTS_MAX: u32 = 100;

/// The shortest wait for a reply. RFC 8899 suggests a second, for the Internet.
const WAIT_MIN: Duration = Duration::from_millis(5);

/// The time between the end of a search and the next one.
const REST: Duration = Duration::from_secs(1);

/// Waits for a silent peer are up to two to this power times longer.
const BACKOFF_MAX: u8 = 6;

/// What is known without a probe: packets without payload are of this length.
const SHORTEST: u16 = (HEADER_LEN / STEP_BYTES) as u16;

/// Return whether packets of a path to this address may be longer than the path carries. Within a host there is no
/// path, an emulated fabric's packets have the length of its ports, and RDMA's are as long as its links allow.
pub const fn needs_probes(addr: &Addr) -> bool {
    match addr {
        Addr::Udp(addr) => !addr.ip().is_loopback(),
        Addr::Emu(_) | Addr::Verbs(_) => false,
    }
}

/// A probe to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathProbe {
    /// The length of the packet, in bytes; at least [`HEADER_LEN`].
    pub len_bytes: usize,
    /// The reply echoes it.
    pub token: u32,
}

/// A search. Call [`PathSearch::poll`] until it returns `None`, again after [`PathSearch::on_reply`], and at
/// [`PathSearch::timeout`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PathSearch {
    /// Lengths in steps. Packets of `passes` arrive, those of `fails` do not; `longest` is what is wanted.
    passes: u16,
    fails: u16,
    longest: u16,
    /// Lost probes of the present length.
    lost: u8,
    /// Attempts in a row without an answer.
    silent: u8,
    /// The first token, and the latest.
    tokens: (u32, u32),
    /// The latest attempt is one of the present length, and has its short probe answered.
    is_open: bool,
    is_answered: bool,
    /// The short probe of the latest attempt was sent, and the padded one is to follow.
    follows_short: bool,
    probed_at: Instant,
    /// When the first attempt was made that is not answered, and behind it none.
    silent_since: Instant,
    rtt: Duration,
    /// When the next attempt is due; `None` at the end.
    due: Option<Instant>,
}

impl PathSearch {
    /// Begin a search for lengths of up to `longest_bytes`. `salt` is the first token; it should differ between
    /// searches.
    pub const fn new(longest_bytes: usize, salt: u32, now: Instant) -> Self {
        let longest = (longest_bytes / STEP_BYTES) as u16;
        let longest = if longest > SHORTEST { longest } else { SHORTEST };
        Self {
            passes: SHORTEST,
            fails: longest + 1,
            longest,
            lost: 0,
            silent: 0,
            tokens: (salt, salt),
            is_open: false,
            is_answered: false,
            follows_short: false,
            probed_at: now,
            silent_since: now,
            rtt: Duration::ZERO,
            due: Some(now),
        }
    }

    /// Return the next probe that is due; `None` if there is none at `now`.
    #[must_use]
    pub fn poll(&mut self, now: Instant) -> Option<PathProbe> {
        if core::mem::take(&mut self.follows_short) {
            let len = usize::from(self.present()) * STEP_BYTES;
            return Some(PathProbe { len_bytes: len.max(HEADER_LEN), token: self.tokens.1 });
        }
        if self.due.is_none_or(|at| now < at) {
            return None;
        }
        if core::mem::take(&mut self.is_open) {
            self.end_attempt();
        }
        let attempts = self.tokens.1.wrapping_sub(self.tokens.0);
        if self.is_found() || self.silent >= SILENT_ATTEMPTS || attempts >= ATTEMPTS_MAX {
            self.due = None;
            return None;
        }
        let wait = WAIT_MIN.max(4 * self.rtt) * (1 << self.silent.min(BACKOFF_MAX));
        self.tokens.1 = self.tokens.1.wrapping_add(1);
        (self.is_open, self.is_answered, self.follows_short) = (true, false, true);
        (self.probed_at, self.due) = (now, Some(now + wait));
        if self.silent == 0 {
            self.silent_since = now;
        }
        // The short one goes first. Behind a longer packet, ports would send both as one run, which virtual links carry
        // whole, however narrow they are.
        Some(PathProbe { len_bytes: HEADER_LEN, token: self.tokens.1 })
    }

    /// The latest attempt has had its time.
    fn end_attempt(&mut self) {
        if !self.is_answered {
            self.silent += 1;
            return;
        }
        self.lost += 1;
        let present = self.present();
        if self.lost >= if present == self.longest { ATTEMPTS_LONGEST } else { ATTEMPTS } {
            (self.fails, self.lost) = (present, 0);
        }
    }

    /// Process the reply to a probe, which was `len_bytes` long. Returns false if it is not one of this search.
    pub fn on_reply(&mut self, token: u32, len_bytes: usize, now: Instant) -> bool {
        let (first, last) = self.tokens;
        // Tokens begin behind the first one.
        let nth = token.wrapping_sub(first);
        if nth == 0 || nth > last.wrapping_sub(first) {
            return false;
        }
        if self.due.is_none() {
            return true;
        }
        if token == last && self.is_open && !self.is_answered {
            (self.is_answered, self.rtt) = (true, now - self.probed_at);
            // The padded probe followed at once, and so does its reply.
            self.due = Some(now + WAIT_MIN + self.rtt / 4);
        } else if self.silent > 0 {
            // Later than it was waited for.
            self.rtt = self.rtt.max(now - self.silent_since);
        }
        self.silent = 0;
        let length = (len_bytes / STEP_BYTES).min(usize::from(self.longest)) as u16;
        if length > self.passes {
            (self.passes, self.lost, self.is_open, self.follows_short) = (length, 0, false, false);
            self.fails = self.fails.max(length + 1);
            self.due = if self.is_found() { None } else { Some(now) };
        }
        true
    }

    /// Search again, because the hop has stalled: the path may have become narrower. Does nothing during a search, and
    /// for a second after one: a hop stalls for other reasons, too.
    pub fn search_again(&mut self, now: Instant) {
        if self.due.is_none() && now - self.probed_at >= REST {
            *self = Self::new(usize::from(self.longest) * STEP_BYTES, self.tokens.1, now);
        }
    }

    /// Return whether the wanted length is known not to arrive.
    pub fn is_narrow(&self) -> bool {
        self.result().is_some_and(|len| len < usize::from(self.longest) * STEP_BYTES)
    }

    /// End the search with what is known now.
    pub fn give_up(&mut self) {
        self.due = None;
    }

    /// Return the latest token: the first one of the next search with the same peer, so that no reply counts twice.
    pub const fn last_token(&self) -> u32 {
        self.tokens.1
    }

    /// Return when to call [`PathSearch::poll`] next; `None` once the search has ended.
    pub const fn timeout(&self) -> Option<Instant> {
        self.due
    }

    /// Return the longest length that is known to arrive, in bytes. `None` before the end, or if the peer was too
    /// silent to know whether the wanted length arrives.
    pub fn result(&self) -> Option<usize> {
        let is_known = self.is_found() || self.fails <= self.longest;
        (self.due.is_none() && is_known).then_some(usize::from(self.passes) * STEP_BYTES)
    }

    /// The length that is probed now.
    const fn present(&self) -> u16 {
        if self.fails > self.longest { self.longest } else { u16::midpoint(self.passes, self.fails) }
    }

    const fn is_found(&self) -> bool {
        self.fails - self.passes <= 1
    }
}

#[cfg(test)]
mod tests;
