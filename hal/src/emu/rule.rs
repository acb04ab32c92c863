//! Faults as rules: each packet is shown to every rule in turn, and the first that does not let it pass decides.
//!
//! A rule knows no fabric: it sees a packet, the time as the caller tells it, and the caller's generator. So the same
//! rules act on the [`Fabric`](super::Fabric)'s virtual links and on packets of real sockets ([`decide`], [`damage`]).

use super::Rng;
use crate::port::Addr;
use crate::time::Instant;
use core::ops::Range;
use core::time::Duration;
use std::collections::BTreeMap;

/// A packet as a rule sees it, when it is sent.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Frame<'a> {
    /// How many packets were sent into the fabric before it.
    pub index: u64,
    /// Which packet of its path (sender, receiver) it is, from 1.
    pub nth: u64,
    /// When it was sent.
    pub at: Instant,
    /// By whom.
    pub from: Addr,
    /// To whom.
    pub to: Addr,
    /// Its bytes.
    pub bytes: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Describe a packet: the `nth` of its path, from 1, and the `index`-th of all, from 0, sent at `at`.
    pub const fn new(index: u64, nth: u64, at: Instant, (from, to): (Addr, Addr), bytes: &'a [u8]) -> Self {
        Self { index, nth, at, from, to, bytes }
    }
}

/// What happens to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing, as far as this rule is concerned.
    Pass,
    /// It arrives later than it would, and others may overtake it.
    Deliver {
        /// By how much.
        delay: Duration,
    },
    /// It arrives, and a copy arrives later.
    Duplicate {
        /// The copy's delay.
        delay: Duration,
    },
    /// It arrives with 1 to 3 bits flipped, or cut short.
    Corrupt,
    /// It is lost.
    Drop,
}

/// Decides what happens to packets. Closures `FnMut(&Frame, &mut Rng) -> Verdict` are rules too.
pub trait Rule {
    /// Decide about one packet. All randomness comes from `rng`: then the seed says it all.
    fn on_packet(&mut self, frame: &Frame<'_>, rng: &mut Rng) -> Verdict;
}

impl<F: FnMut(&Frame<'_>, &mut Rng) -> Verdict> Rule for F {
    fn on_packet(&mut self, frame: &Frame<'_>, rng: &mut Rng) -> Verdict {
        self(frame, rng)
    }
}

/// Show a packet to rules in turn, and return the first verdict that does not let it pass.
pub fn decide<'r, R: Rule + ?Sized + 'r>(
    rules: impl IntoIterator<Item = &'r mut R>,
    frame: &Frame<'_>,
    rng: &mut Rng,
) -> Verdict {
    let mut verdicts = rules.into_iter().map(|rule| rule.on_packet(frame, rng));
    verdicts.find(|verdict| *verdict != Verdict::Pass).unwrap_or(Verdict::Pass)
}

/// Do what [`Verdict::Corrupt`] says: flip 1 to 3 bits, or, one time in four, cut the packet short. It is never as it was,
/// unless it is empty.
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
    // Distinct bits, so that no two flips cancel out: neighbours of the first, as in a burst.
    for i in 0..=rng.below(3).min(bits - 1) {
        let bit = (first + i * (1 + bits / 5)) % bits;
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    }
}

/// Another rule, for a while.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct During<R> {
    /// When.
    pub during: Range<Instant>,
    /// What then holds.
    pub rule: R,
}

impl<R: Rule> Rule for During<R> {
    fn on_packet(&mut self, frame: &Frame<'_>, rng: &mut Rng) -> Verdict {
        // It draws before and after as well, so that the other rules' dice do not depend on the time.
        let verdict = self.rule.on_packet(frame, rng);
        if self.during.contains(&frame.at) { verdict } else { Verdict::Pass }
    }
}

/// Faults by chance, on every path; shares are in thousandths, and each packet suffers one at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RandomFaults {
    /// Packets lost.
    pub loss_per_mille: u16,
    /// Packets doubled.
    pub duplicate_per_mille: u16,
    /// Packets delayed by up to `delay_max`, so that others overtake them.
    pub reorder_per_mille: u16,
    /// Packets damaged.
    pub corrupt_per_mille: u16,
    /// The longest extra delay of a doubled or delayed packet.
    pub delay_max: Duration,
}

impl Rule for RandomFaults {
    fn on_packet(&mut self, _frame: &Frame<'_>, rng: &mut Rng) -> Verdict {
        // Two draws per packet, whatever comes of them: a share that is changed leaves the other packets' dice alone.
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

/// Loses everything from one set of nodes to another, for a while; the way back stays open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The senders cut off.
    pub from: Vec<Addr>,
    /// Those that do not hear them.
    pub to: Vec<Addr>,
    /// When.
    pub during: Range<Instant>,
}

impl Rule for Partition {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        let cut = self.during.contains(&frame.at) && self.from.contains(&frame.from) && self.to.contains(&frame.to);
        if cut { Verdict::Drop } else { Verdict::Pass }
    }
}

/// Delays everything from one set of nodes to another, for a while: what is sent behind overtakes nothing, as on a
/// longer way, until the while is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlowLink {
    /// The senders that are slow.
    pub from: Vec<Addr>,
    /// To whom.
    pub to: Vec<Addr>,
    /// When.
    pub during: Range<Instant>,
    /// By how much.
    pub delay: Duration,
}

impl Rule for SlowLink {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        let slow = self.during.contains(&frame.at) && self.from.contains(&frame.from) && self.to.contains(&frame.to);
        if slow { Verdict::Deliver { delay: self.delay } } else { Verdict::Pass }
    }
}

/// Does something to one packet of a path: "lose the third from a to b". This is also how a fabric records the faults
/// of a run ([`Fabric::faults`](super::Fabric::faults)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NthPacket {
    /// The path's sender.
    pub from: Addr,
    /// The path's receiver.
    pub to: Addr,
    /// Which packet of the path, from 1.
    pub nth: u64,
    /// What happens to it.
    pub verdict: Verdict,
}

impl Rule for NthPacket {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        let hit = (frame.from, frame.to, frame.nth) == (self.from, self.to, self.nth);
        if hit { self.verdict } else { Verdict::Pass }
    }
}

/// Repeats the faults of another run, or what is left of them: every packet that is not named passes.
#[derive(Debug, Clone, Default)]
pub struct Script {
    verdicts: BTreeMap<(Addr, Addr, u64), Verdict>,
}

impl Script {
    /// Make a script of these faults. Of two for one packet the later is taken.
    pub fn new(faults: &[NthPacket]) -> Self {
        Self { verdicts: faults.iter().map(|fault| ((fault.from, fault.to, fault.nth), fault.verdict)).collect() }
    }
}

impl Rule for Script {
    fn on_packet(&mut self, frame: &Frame<'_>, _rng: &mut Rng) -> Verdict {
        self.verdicts.get(&(frame.from, frame.to, frame.nth)).copied().unwrap_or(Verdict::Pass)
    }
}
