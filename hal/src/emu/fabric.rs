//! The fabric: emulated links in virtual time, and the packets in flight on them.
//!
//! A packet leaves when its sender's link is free, which it occupies for `len / bandwidth`. It travels for the path's
//! latency, or is dropped if it is longer than the path carries. Then it queues for its receiver's link, which it
//! occupies for as long, or is dropped if that queue is full (incast). The delay of a rule is added to the latency.
//!
//! Invariants:
//! - `sent + duplicated == delivered + dropped + in_flight` after every call;
//! - events are ordered by (time, number), and no map is iterated in an unspecified order;
//! - the damage of a packet depends only on the seed and on its path and number, so that a run with the recorded faults
//!   of another is identical to it.

use super::{Frame, NthPacket, Rng, Rule, Verdict, damage, decide};
use crate::port::{Addr, Ecn};
use crate::time::Instant;
use core::fmt;
use core::hash::{Hash, Hasher};
use core::time::Duration;
use std::collections::BTreeMap;

/// The properties of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkConfig {
    /// The time from the sender's link to the receiver's link.
    pub latency: Duration,
    /// The bandwidth of the sender's and the receiver's link; `None` if transmission takes no time.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// The capacity of the queue for the receiver's link, in bytes; `None` if unlimited. Only a link with a bandwidth
    /// queues.
    pub receive_queue_bytes: Option<usize>,
    /// The queue length in bytes above which packets are marked for congestion (ECN-CE); `None` to never mark.
    pub mark_queue_bytes: Option<usize>,
    /// The longest packet that the path carries, in bytes; `None` if unlimited. Longer ones are lost on their way, and
    /// nobody is told.
    pub max_packet_len_bytes: Option<usize>,
}

impl Default for LinkConfig {
    /// A latency of one microsecond and no limits.
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(1),
            bandwidth_bytes_per_s: None,
            receive_queue_bytes: None,
            mark_queue_bytes: None,
            max_packet_len_bytes: None,
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

/// A delivered packet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// When it arrived.
    pub at: Instant,
    /// The sender.
    pub from: Addr,
    /// The receiver.
    pub to: Addr,
    /// Its bytes, which may be damaged.
    pub bytes: Vec<u8>,
    /// Its congestion mark.
    pub ecn: Ecn,
}

/// The counters of a fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Packets sent.
    pub sent: u64,
    /// Duplicates made by rules.
    pub duplicated: u64,
    /// Packets and duplicates delivered.
    pub delivered: u64,
    /// Packets dropped by rules.
    pub dropped_by_rule: u64,
    /// Packets and duplicates dropped because the receiver's queue was full.
    pub dropped_by_queue: u64,
    /// Packets dropped because they are longer than their path carries.
    pub dropped_by_length: u64,
    /// Packets damaged by rules.
    pub corrupted: u64,
    /// Packets delayed by rules.
    pub delayed: u64,
    /// Packets and duplicates marked for congestion.
    pub marked: u64,
}

/// Identifies a rule for [`Fabric::remove_rule`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleId(u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Stage {
    /// The packet reaches the queue of the receiver's link.
    Arrive,
    /// The packet leaves that link.
    Deliver,
}

struct InFlight {
    stage: Stage,
    from: Addr,
    to: Addr,
    bytes: Vec<u8>,
    is_marked: bool,
    /// A rule made it.
    is_duplicate: bool,
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
    duplicates_in_flight: u64,
    /// The faults so far, if they are recorded.
    faults: Option<Vec<NthPacket>>,
    log: LogHash,
}

impl Fabric {
    /// Return a fabric in which all paths have the properties of `default_link`. `seed` determines all random choices.
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
            duplicates_in_flight: 0,
            faults: None,
            log: LogHash::default(),
        }
    }

    /// Set the properties of the path `from` -> `to`, in that direction only.
    pub fn set_link(&mut self, from: Addr, to: Addr, link: LinkConfig) {
        self.links.insert((from, to), link);
    }

    /// Add a rule after the others.
    pub fn add_rule(&mut self, rule: impl Rule + 'static) -> RuleId {
        self.rule_numbers += 1;
        let id = RuleId(self.rule_numbers);
        self.rules.push((id, Box::new(rule)));
        id
    }

    /// Remove a rule. Does nothing if it was already removed.
    pub fn remove_rule(&mut self, id: RuleId) {
        self.rules.retain(|(other, _)| *other != id);
    }

    /// Record all faults from now on. The list grows with every fault.
    pub fn record_faults(&mut self) {
        self.faults.get_or_insert_default();
    }

    /// Return the faults since [`Fabric::record_faults`], in the order of sending. [`Script`](super::Script) repeats
    /// them.
    pub fn faults(&self) -> &[NthPacket] {
        self.faults.as_deref().unwrap_or_default()
    }

    /// Send a packet at `now`, which must not be earlier than in previous calls.
    pub fn send(&mut self, now: Instant, from: Addr, to: Addr, bytes: &[u8]) {
        let link = self.link(from, to);
        let nth = self.paths.entry((from, to)).or_default();
        *nth += 1;
        let nth = *nth;
        let frame = Frame::new(self.counters.sent, nth, now, (from, to), bytes);
        self.counters.sent += 1;
        let is_too_long = link.max_packet_len_bytes.is_some_and(|longest| bytes.len() > longest);
        // Faults are those of packets that the path carries.
        let verdict = match is_too_long {
            true => Verdict::Pass,
            false => decide(self.rules.iter_mut().map(|(_, rule)| &mut **rule), &frame, &mut self.rng),
        };
        if let Some(faults) = self.faults.as_mut().filter(|_| verdict != Verdict::Pass) {
            faults.push(NthPacket { from, to, nth, verdict });
        }
        self.log.note("sent", now, from, to, bytes);
        let node = self.nodes.entry(from).or_default();
        node.sending_until = node.sending_until.max(now) + link.time_for(bytes.len());
        let arrival = node.sending_until + link.latency;
        if is_too_long {
            self.counters.dropped_by_length += 1;
            self.log.note("dropped by length", now, from, to, bytes);
            return;
        }
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
                    InFlight {
                        stage: Stage::Arrive,
                        from,
                        to,
                        bytes: bytes.clone(),
                        is_marked: false,
                        is_duplicate: true,
                    },
                );
                self.duplicates_in_flight += 1;
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
        let packet = InFlight { stage: Stage::Arrive, from, to, bytes, is_marked: false, is_duplicate: false };
        self.schedule(arrival + delay, packet);
    }

    /// Return the next packet that has arrived by `now`, in order of arrival, if any.
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
                    let InFlight { from, to, bytes, is_marked, is_duplicate, .. } = packet;
                    self.counters.delivered += 1;
                    self.duplicates_in_flight -= u64::from(is_duplicate);
                    let node = self.nodes.entry(to).or_default();
                    node.queued_bytes -= bytes.len();
                    self.log.note("delivered", at, from, to, &bytes);
                    return Some(Delivery { at, from, to, bytes, ecn: Ecn::from_mark(is_marked) });
                }
            }
        }
        None
    }

    /// Return the time of the next event. Call [`Fabric::poll_delivery`] then; it may still return `None`.
    pub fn next_event(&self) -> Option<Instant> {
        self.events.first_key_value().map(|(&(at, _), _)| at)
    }

    /// Return when the link of `from` becomes free.
    pub fn ready_at(&self, from: Addr) -> Instant {
        self.nodes.get(&from).map_or(Instant::ZERO, |node| node.sending_until)
    }

    /// Return the counters.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Return the number of packets and duplicates in flight.
    pub fn in_flight(&self) -> u64 {
        self.events.len() as u64
    }

    /// Return the number of packets in flight that were sent, without the duplicates that rules made of them.
    pub fn sent_in_flight(&self) -> u64 {
        self.in_flight() - self.duplicates_in_flight
    }

    /// Return a hash of all events: their times, paths, bytes and outcomes, in order.
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
            self.duplicates_in_flight -= u64::from(packet.is_duplicate);
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

    /// Return the generator for the damage of packet `nth` of a path.
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

/// FNV-1a (Fowler, Noll, Vo) over 8-byte words, with a shift that carries high bits into low ones.
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
