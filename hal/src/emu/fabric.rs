//! The links: who is busy until when, what is on its way, and what became of it.
//!
//! A packet leaves when its sender's link is free and takes `len / bandwidth` to leave; it travels for the path's
//! latency; then it queues for its receiver's link, which takes as long again, or is dropped when that queue is full
//! (incast). A delay that a rule sets comes on top of the latency.
//!
//! Invariants:
//! - `sent + duplicated == delivered + dropped + in_flight`, after every call;
//! - the order of events is the order of (time, number), and no map is iterated in an order of its own;
//! - what damage a packet takes follows from the seed and from which packet of its path it is, so that a run whose
//!   faults are repeated from a list is the same run.

use super::{Frame, NthPacket, Rng, Rule, Verdict, damage, decide};
use crate::port::Addr;
use crate::time::Instant;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::time::Duration;
use std::collections::BTreeMap;

/// What a path is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkConfig {
    /// From the sender's link to the receiver's.
    pub latency: Duration,
    /// Of the sender's and of the receiver's link; `None`: they take no time.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// How many bytes may queue for the receiver's link; `None`: any number. Only a link that takes time has a queue.
    pub receive_queue_bytes: Option<usize>,
    /// Beyond how many queued bytes packets are marked as having met congestion (ECN-CE); `None`: never.
    pub mark_queue_bytes: Option<usize>,
}

impl Default for LinkConfig {
    /// One microsecond, and no limits.
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(1),
            bandwidth_bytes_per_s: None,
            receive_queue_bytes: None,
            mark_queue_bytes: None,
        }
    }
}

impl LinkConfig {
    fn time_for(&self, len_bytes: usize) -> Duration {
        let ns = match self.bandwidth_bytes_per_s {
            Some(bandwidth) => (len_bytes as u128 * 1_000_000_000).div_ceil(u128::from(bandwidth.max(1))),
            None => 0,
        };
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

/// A packet that has arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// When.
    pub at: Instant,
    /// From whom.
    pub from: Addr,
    /// At whom.
    pub to: Addr,
    /// Its bytes, damaged or not.
    pub bytes: Vec<u8>,
    /// It met congestion on its way.
    pub is_marked: bool,
}

/// What a fabric has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Packets sent.
    pub sent: u64,
    /// Copies made by rules.
    pub duplicated: u64,
    /// Packets and copies handed out.
    pub delivered: u64,
    /// Packets lost by rules.
    pub dropped_by_rule: u64,
    /// Packets and copies that found the receiver's queue full.
    pub dropped_by_queue: u64,
    /// Packets damaged by rules.
    pub corrupted: u64,
    /// Packets delayed by rules.
    pub delayed: u64,
    /// Packets and copies marked in the receiver's queue.
    pub marked: u64,
}

/// Names a rule, to take it away again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleId(u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    /// Reaches the queue of the receiver's link.
    Arrive,
    /// Leaves that link.
    Deliver,
}

struct InFlight {
    stage: Stage,
    from: Addr,
    to: Addr,
    bytes: Vec<u8>,
    is_marked: bool,
}

#[derive(Default)]
struct Node {
    sending_until: Instant,
    receiving_until: Instant,
    queued_bytes: usize,
}

/// A network of emulated links on virtual time.
pub struct Fabric {
    seed: u64,
    rng: Rng,
    default_link: LinkConfig,
    links: BTreeMap<(Addr, Addr), LinkConfig>,
    paths: BTreeMap<(Addr, Addr), u64>,
    nodes: BTreeMap<Addr, Node>,
    rules: Vec<(RuleId, Box<dyn Rule>)>,
    events: BTreeMap<(Instant, u64), InFlight>,
    event_numbers: u64,
    rule_numbers: u64,
    counters: Counters,
    /// What rules did so far, if that is recorded.
    faults: Option<Vec<NthPacket>>,
    log: LogHash,
}

impl Fabric {
    /// Make a fabric in which all paths are like `default_link`, and chance comes from `seed`.
    pub fn new(seed: u64, default_link: LinkConfig) -> Self {
        Self {
            seed,
            rng: Rng::new(seed),
            default_link,
            links: BTreeMap::new(),
            paths: BTreeMap::new(),
            nodes: BTreeMap::new(),
            rules: Vec::new(),
            events: BTreeMap::new(),
            event_numbers: 0,
            rule_numbers: 0,
            counters: Counters::default(),
            faults: None,
            log: LogHash::default(),
        }
    }

    /// Make the path `from` -> `to` (that way only) like `link` from now on.
    pub fn set_link(&mut self, from: Addr, to: Addr, link: LinkConfig) {
        self.links.insert((from, to), link);
    }

    /// Add a rule behind the others.
    pub fn add_rule(&mut self, rule: impl Rule + 'static) -> RuleId {
        self.rule_numbers += 1;
        let id = RuleId(self.rule_numbers);
        self.rules.push((id, Box::new(rule)));
        id
    }

    /// Take a rule away; nothing happens if it is gone already.
    pub fn remove_rule(&mut self, id: RuleId) {
        self.rules.retain(|(other, _)| *other != id);
    }

    /// Record from now on what rules do to packets; the list grows with every fault.
    pub fn record_faults(&mut self) {
        self.faults.get_or_insert_default();
    }

    /// Return what rules did since [`Fabric::record_faults`], in the order of sending.
    /// [`Script`](super::Script) repeats it.
    pub fn faults(&self) -> &[NthPacket] {
        self.faults.as_deref().unwrap_or_default()
    }

    /// Send a packet at `now`, which must not be before any earlier call's.
    pub fn send(&mut self, now: Instant, from: Addr, to: Addr, bytes: &[u8]) {
        let nth = self.paths.entry((from, to)).or_default();
        *nth += 1;
        let frame = Frame::new(self.counters.sent, *nth, now, (from, to), bytes);
        self.counters.sent += 1;
        let verdict = decide(self.rules.iter_mut().map(|(_, rule)| &mut **rule), &frame, &mut self.rng);
        let nth = *nth;
        if let Some(faults) = self.faults.as_mut().filter(|_| verdict != Verdict::Pass) {
            faults.push(NthPacket { from, to, nth, verdict });
        }
        self.log.note("sent", now, from, to, bytes);

        let link = self.link(from, to);
        let node = self.nodes.entry(from).or_default();
        node.sending_until = node.sending_until.max(now) + link.time_for(bytes.len());
        let arrival = node.sending_until + link.latency;
        let mut bytes = bytes.to_vec();
        let mut delay = Duration::ZERO;
        match verdict {
            Verdict::Pass => {}
            Verdict::Deliver { delay: extra } => {
                self.counters.delayed += 1;
                delay = extra;
            }
            Verdict::Duplicate { delay: extra } => {
                self.counters.duplicated += 1;
                self.schedule(
                    arrival + extra,
                    InFlight { stage: Stage::Arrive, from, to, bytes: bytes.clone(), is_marked: false },
                );
            }
            Verdict::Corrupt => {
                self.counters.corrupted += 1;
                damage(&mut bytes, &mut self.damage(from, to, nth));
            }
            Verdict::Drop => {
                self.counters.dropped_by_rule += 1;
                self.log.note("dropped by rule", now, from, to, &bytes);
                return;
            }
        }
        self.schedule(arrival + delay, InFlight { stage: Stage::Arrive, from, to, bytes, is_marked: false });
    }

    /// Return the next packet that has arrived by `now`, in order of arrival.
    pub fn poll_delivery(&mut self, now: Instant) -> Option<Delivery> {
        while let Some(entry) = self.events.first_entry() {
            let at = entry.key().0;
            if at > now {
                return None;
            }
            let packet = entry.remove();
            match packet.stage {
                Stage::Arrive => self.arrive(at, packet),
                Stage::Deliver => {
                    let InFlight { from, to, bytes, is_marked, .. } = packet;
                    self.counters.delivered += 1;
                    let node = self.nodes.entry(to).or_default();
                    node.queued_bytes -= bytes.len();
                    self.log.note("delivered", at, from, to, &bytes);
                    return Some(Delivery { at, from, to, bytes, is_marked });
                }
            }
        }
        None
    }

    /// Return when something happens next: at that time call [`Fabric::poll_delivery`], which may yet have nothing.
    pub fn next_event(&self) -> Option<Instant> {
        self.events.first_key_value().map(|(&(at, _), _)| at)
    }

    /// Return when the link of `from` has sent what it was given: before that a port would have to queue.
    pub fn ready_at(&self, from: Addr) -> Instant {
        self.nodes.get(&from).map_or(Instant::ZERO, |node| node.sending_until)
    }

    /// Return what was counted so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Return the number of packets and copies on their way.
    pub fn in_flight(&self) -> u64 {
        self.events.len() as u64
    }

    /// Return a hash of all that has happened: times, paths, bytes and fates, in order.
    pub fn log_hash(&self) -> u64 {
        self.log.finish()
    }

    /// Queue a packet for the receiver's link, or drop it.
    fn arrive(&mut self, at: Instant, mut packet: InFlight) {
        let link = self.link(packet.from, packet.to);
        let node = self.nodes.entry(packet.to).or_default();
        let queued_bytes = node.queued_bytes + packet.bytes.len();
        if link.receive_queue_bytes.is_some_and(|limit| queued_bytes > limit) {
            self.counters.dropped_by_queue += 1;
            self.log.note("dropped by queue", at, packet.from, packet.to, &packet.bytes);
            return;
        }
        node.queued_bytes = queued_bytes;
        packet.is_marked = link.mark_queue_bytes.is_some_and(|limit| queued_bytes > limit);
        self.counters.marked += u64::from(packet.is_marked);
        node.receiving_until = node.receiving_until.max(at) + link.time_for(packet.bytes.len());
        let done = node.receiving_until;
        packet.stage = Stage::Deliver;
        self.schedule(done, packet);
    }

    /// Return the chance that decides how the packet `nth` of a path is damaged.
    fn damage(&self, from: Addr, to: Addr, nth: u64) -> Rng {
        let mut hasher = LogHash::default();
        (self.seed, from, to, nth).hash(&mut hasher);
        Rng::new(hasher.finish())
    }

    fn link(&self, from: Addr, to: Addr) -> LinkConfig {
        self.links.get(&(from, to)).copied().unwrap_or(self.default_link)
    }

    fn schedule(&mut self, at: Instant, packet: InFlight) {
        self.event_numbers += 1;
        self.events.insert((at, self.event_numbers), packet);
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric")
            .field("counters", &self.counters)
            .field("in_flight", &self.in_flight())
            .field("log_hash", &self.log_hash())
            .finish_non_exhaustive()
    }
}

/// FNV-1a (Fowler, Noll, Vo) over words of 8 bytes, and a shift, so that high bits reach low ones.
#[derive(Debug)]
struct LogHash(u64);

impl Default for LogHash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl LogHash {
    fn note(&mut self, what: &str, at: Instant, from: Addr, to: Addr, bytes: &[u8]) {
        (what, at, from, to, bytes).hash(self);
    }

    fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        self.0 ^= self.0 >> 29;
    }
}

impl Hasher for LogHash {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for &word in words {
            self.word(u64::from_le_bytes(word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.word(u64::from_le_bytes(last));
        self.word(bytes.len() as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
