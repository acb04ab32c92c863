//! Fault injection by rules. Every rule is applied to a packet in turn, and the first verdict other than
//! [`Verdict::Pass`] decides.
//!
//! A rule does not depend on a fabric: it gets a packet, the time and a random generator from the caller. The same
//! rules therefore work on the virtual links of a [`Fabric`](super::Fabric) and on packets of real sockets ([`decide`],
//! [`damage`]).

use super::Rng;
use crate::port::Addr;
use crate::time::Instant;
use core::ops::Range;
use core::time::Duration;
use std::collections::BTreeMap;

/// A packet that is being sent, as passed to rules.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Frame<'a> {
    /// The number of packets sent before it, on all paths.
    pub index: u64,
    /// Its number on its path (sender, receiver), counted from 1.
    pub nth: u64,
    /// When it is sent.
    pub at: Instant,
    /// The sender.
    pub from: Addr,
    /// The receiver.
    pub to: Addr,
    /// The packet.
    pub bytes: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Return a frame with these fields.
    pub const fn new(index: u64, nth: u64, at: Instant, (from, to): (Addr, Addr), bytes: &'a [u8]) -> Self {
        Self { index, nth, at, from, to, bytes }
    }
}

/// What happens to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// This rule does not affect the packet.
    Pass,
    /// It is delayed, and other packets may overtake it.
    Deliver {
        /// The extra delay.
        delay: Duration,
    },
    /// It arrives, and a duplicate arrives later.
    Duplicate {
        /// The extra delay of the duplicate.
        delay: Duration,
    },
    /// It arrives with 1 to 3 bits flipped, or truncated.
    Corrupt,
    /// It is lost.
    Drop,
}

/// A rule that decides what happens to packets. Closures `FnMut(&Frame, &mut Rng) -> Verdict` are rules too.
pub trait Rule {
    /// Decide about one packet. All randomness must come from `rng`, so that the seed determines everything.
    fn on_packet(&mut self, frame: &Frame<'_>, rng: &mut Rng) -> Verdict;
}

impl<F: FnMut(&Frame<'_>, &mut Rng) -> Verdict> Rule for F {
    fn on_packet(&mut self, frame: &Frame<'_>, rng: &mut Rng) -> Verdict {
        self(frame, rng)
    }
}

/// Apply the rules to a packet in turn, and return the first verdict other than [`Verdict::Pass`].
pub fn decide<'r, R: Rule + ?Sized + 'r>(
    rules: impl IntoIterator<Item = &'r mut R>,
    frame: &Frame<'_>,
    rng: &mut Rng,
) -> Verdict {
    let mut verdicts = rules.into_iter().map(|rule| rule.on_packet(frame, rng));
    verdicts.find(|verdict| *verdict != Verdict::Pass).unwrap_or(Verdict::Pass)
}

/// Damage a packet as for [`Verdict::Corrupt`]: flip 1 to 3 bits or, with a probability of 1/4, truncate it. The packet
/// always changes unless it is empty.
pub fn damage(bytes: &mut Vec<u8>, rng: &mut Rng) {
    if bytes.is_empty() {
        return;
    }
    if bytes.len() > 1 && rng.below(4) == 0 {
        bytes.truncate(1 + rng.below(bytes.len() as u64 - 1) as usize);
        return;
    }
    let bits = bytes.len() as u64 * 8;
    let first = rng.below(bits);
    // Flip distinct bits, so that no two flips cancel out.
    for i in 0..=rng.below(3).min(bits - 1) {
        let bit = (first + i * (1 + bits / 5)) % bits;
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

/// Applies a rule during a period of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct During<R> {
    /// The period.
    pub during: Range<Instant>,
    /// The rule.
    pub rule: R,
}

impl<R: Rule> Rule for During<R> {
    fn on_packet(&mut self, frame: &Frame<'_>, rng: &mut Rng) -> Verdict {
        // Draw outside of the period as well, so that the random numbers of other rules do not depend on it.
        let verdict = self.rule.on_packet(frame, rng);
        if self.during.contains(&frame.at) { verdict } else { Verdict::Pass }
    }
}

/// Random faults on every path. Probabilities are in thousandths, and each packet gets at most one fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RandomFaults {
    /// The share of packets that are lost.
    pub loss_per_mille: u16,
    /// The share of packets that are duplicated.
    pub duplicate_per_mille: u16,
    /// The share of packets that are delayed by up to `delay_max`, so that others overtake them.
    pub reorder_per_mille: u16,
    /// The share of packets that are damaged.
    pub corrupt_per_mille: u16,
    /// The maximum extra delay of a duplicate or a delayed packet.
    pub delay_max: Duration,
}

impl Rule for RandomFaults {
    fn on_packet(&mut self, _frame: &Frame<'_>, rng: &mut Rng) -> Verdict {
        // Always two draws per packet, so that a changed probability does not affect the draws for other packets.
        let die = rng.below(1000) as u16;
        let delay = rng.duration_up_to(self.delay_max);
        let mut bound = 0;
        let verdicts = [
            (self.loss_per_mille, Verdict::Drop),
            (self.duplicate_per_mille, Verdict::Duplicate { delay }),
            (self.reorder_per_mille, Verdict::Deliver { delay }),
            (self.corrupt_per_mille, Verdict::Corrupt),
        ];
        for (share, verdict) in verdicts {
            bound += u32::from(share);
            if u32::from(die) < bound {
                return verdict;
            }
        }
        Verdict::Pass
    }
}

/// Drops all packets from one set of ports to another for a period. The other direction is not affected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The senders.
    pub from: Vec<Addr>,
    /// The receivers.
    pub to: Vec<Addr>,
    /// The period.
    pub during: Range<Instant>,
}

impl Rule for Partition {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        let cut = self.during.contains(&frame.at) && self.from.contains(&frame.from) && self.to.contains(&frame.to);
        if cut { Verdict::Drop } else { Verdict::Pass }
    }
}

/// Delays all packets from one set of ports to another for a period. Packets sent in the period do not overtake each
/// other, as on a longer path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlowLink {
    /// The senders.
    pub from: Vec<Addr>,
    /// The receivers.
    pub to: Vec<Addr>,
    /// The period.
    pub during: Range<Instant>,
    /// The extra delay.
    pub delay: Duration,
}

impl Rule for SlowLink {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        let slow = self.during.contains(&frame.at) && self.from.contains(&frame.from) && self.to.contains(&frame.to);
        if slow { Verdict::Deliver { delay: self.delay } } else { Verdict::Pass }
    }
}

/// A fault of one packet of a path, such as "drop the third from a to b". A fabric records the faults of a run in this
/// form ([`Fabric::faults`](super::Fabric::faults)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NthPacket {
    /// The path's sender.
    pub from: Addr,
    /// The path's receiver.
    pub to: Addr,
    /// The packet's number on the path, counted from 1.
    pub nth: u64,
    /// What happens to the packet.
    pub verdict: Verdict,
}

impl Rule for NthPacket {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        let hit = (frame.from, frame.to, frame.nth) == (self.from, self.to, self.nth);
        if hit { self.verdict } else { Verdict::Pass }
    }
}

/// Repeats recorded faults of another run, or a subset of them. All other packets pass.
#[derive(Debug, Clone, Default)]
pub struct Script {
    verdicts: BTreeMap<(Addr, Addr, u64), Verdict>,
}

impl Script {
    /// Return a script with these faults. If a packet has two, the later one applies.
    pub fn new(faults: &[NthPacket]) -> Self {
        Self { verdicts: faults.iter().map(|fault| ((fault.from, fault.to, fault.nth), fault.verdict)).collect() }
    }
}

impl Rule for Script {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        self.verdicts.get(&(frame.from, frame.to, frame.nth)).copied().unwrap_or(Verdict::Pass)
    }
}
