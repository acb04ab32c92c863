//! The sans-I/O core of the proxy: it applies rules to packets, on the caller's time.
//!
//! The rules are those of the simulator's links ([`sumac_hal::emu`]). Each packet passes through a lane's rules in
//! order, and the first that does not let it pass decides. Delays of the lane add up.
//!
//! Invariants:
//! - A packet's fate depends on the seed, its link, its client's number, its direction and its number in that flow, and
//!   for rules with a time span on the time. Traffic of other clients does not affect it.
//! - For each lane and after every call, `received + duplicated == sent + lost + overflowed + refused + stray + unsent
//!   + held`. The engine creates no packets but copies, and each packet leaves at most twice.
//! - Delayed packets never exceed the limit in bytes, and clients never exceed their table.

use super::clients::{Admission, Clients};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use sumac_hal::emu::{Frame, Rng, Rule, Verdict, damage, decide};
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;

/// The approximate memory of a delayed packet beyond its bytes.
const HELD_OVERHEAD_BYTES: usize = 128;

/// The direction of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Direction {
    /// From a client to the target.
    Up,
    /// From the target to a client.
    Down,
}

/// A link of the proxy and the number of one of its clients.
pub(crate) type Flow = (usize, u64);

/// The socket operations that the engine needs.
pub(crate) trait Sockets {
    /// Open a new client's socket towards the target. Returns false if the system has none left.
    fn open(&mut self, flow: Flow) -> bool;
    /// Close the socket of an evicted client.
    fn close(&mut self, flow: Flow);
    /// Send to the target from the client's socket, or to the client from the link's own. Returns false if the socket
    /// rejected it.
    fn send(&mut self, flow: Flow, direction: Direction, client: SocketAddr, bytes: &[u8]) -> bool;
}

/// A delay of all packets of a lane, drawn between two limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkDelay {
    pub(crate) during: (Instant, Instant),
    pub(crate) min: Duration,
    pub(crate) max: Duration,
}

/// One direction of a link.
#[derive(Default)]
pub(crate) struct Lane {
    pub(crate) rules: Vec<Box<dyn Rule + Send>>,
    pub(crate) delays: Vec<LinkDelay>,
}

/// Packet counters of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct LaneCounters {
    /// Received.
    pub(crate) received: u64,
    /// Sent, including copies.
    pub(crate) sent: u64,
    /// Dropped by a rule.
    pub(crate) lost: u64,
    /// Duplicated by a rule.
    pub(crate) duplicated: u64,
    /// Corrupted by a rule.
    pub(crate) corrupted: u64,
    /// Delayed by a rule so that others overtake them.
    pub(crate) reordered: u64,
    /// Dropped because too many bytes were delayed already.
    pub(crate) overflowed: u64,
    /// Dropped because there was no room or socket for another client.
    pub(crate) refused: u64,
    /// Dropped because their client had been evicted.
    pub(crate) stray: u64,
    /// Dropped because a socket rejected them.
    pub(crate) unsent: u64,
}

/// Counters of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct LinkCounters {
    /// Clients that were admitted.
    pub(crate) clients: u64,
    /// Clients that were evicted for others.
    pub(crate) replaced: u64,
    pub(crate) up: LaneCounters,
    pub(crate) down: LaneCounters,
}

impl LinkCounters {
    fn lane(&mut self, direction: Direction) -> &mut LaneCounters {
        match direction {
            Direction::Up => &mut self.up,
            Direction::Down => &mut self.down,
        }
    }
}

/// A link: its target, lanes and clients.
pub(crate) struct Link {
    pub(crate) target: SocketAddr,
    pub(crate) up: Lane,
    pub(crate) down: Lane,
    pub(crate) clients: Clients,
}

/// A delayed packet.
struct Held {
    flow: Flow,
    direction: Direction,
    bytes: Vec<u8>,
}

/// All links of a proxy.
pub(crate) struct Engine {
    seed: u64,
    links: Vec<Link>,
    counters: Vec<LinkCounters>,
    /// Number of packets that the rules have seen.
    packets: u64,
    held: BTreeMap<(Instant, u64), Held>,
    held_numbers: u64,
    held_bytes: usize,
    held_max_bytes: usize,
}

impl Engine {
    pub(crate) fn new(seed: u64, held_max_bytes: usize, links: Vec<Link>) -> Self {
        let counters = vec![LinkCounters::default(); links.len()];
        Self {
            seed,
            links,
            counters,
            packets: 0,
            held: BTreeMap::new(),
            held_numbers: 0,
            held_bytes: 0,
            held_max_bytes,
        }
    }

    /// Return the counters of each link.
    pub(crate) fn counters(&self) -> &[LinkCounters] {
        &self.counters
    }

    /// Return when [`Engine::release`] must be called next.
    pub(crate) fn next_release(&self) -> Option<Instant> {
        self.held.first_key_value().map(|(&(at, _), _)| at)
    }

    /// Send the delayed packets that are due.
    pub(crate) fn release(&mut self, now: Instant, sockets: &mut impl Sockets) {
        while let Some(entry) = self.held.first_entry().filter(|entry| entry.key().0 <= now) {
            let Held { flow, direction, bytes } = entry.remove();
            self.held_bytes -= bytes.len() + HELD_OVERHEAD_BYTES;
            self.send(flow, direction, &bytes, sockets);
        }
    }

    /// Handle a packet that a link received from `from`.
    pub(crate) fn up(&mut self, now: Instant, link: usize, from: SocketAddr, bytes: &[u8], sockets: &mut impl Sockets) {
        let counters = &mut self.counters[link];
        counters.up.received += 1;
        let client = match self.links[link].clients.admit(from, now) {
            Admission::Known(client) => client,
            Admission::New { client, replaced } => {
                if let Some(replaced) = replaced {
                    counters.replaced += 1;
                    sockets.close((link, replaced));
                }
                if !sockets.open((link, client)) {
                    self.links[link].clients.remove(client);
                    counters.up.refused += 1;
                    return;
                }
                counters.clients += 1;
                client
            }
            Admission::Full => {
                counters.up.refused += 1;
                return;
            }
        };
        self.pass(now, (link, client), Direction::Up, bytes, sockets);
    }

    /// Handle a packet that a client's socket received from the target.
    pub(crate) fn down(&mut self, now: Instant, flow: Flow, bytes: &[u8], sockets: &mut impl Sockets) {
        self.counters[flow.0].down.received += 1;
        self.links[flow.0].clients.note_reply(flow.1, now);
        self.pass(now, flow, Direction::Down, bytes, sockets);
    }

    /// Remove all clients and their delayed packets.
    pub(crate) fn forget(&mut self, sockets: &mut impl Sockets) {
        for (index, link) in self.links.iter_mut().enumerate() {
            link.clients.clear().for_each(|client| sockets.close((index, client)));
        }
        for held in std::mem::take(&mut self.held).into_values() {
            self.counters[held.flow.0].lane(held.direction).stray += 1;
        }
        self.held_bytes = 0;
    }

    fn pass(&mut self, now: Instant, flow: Flow, direction: Direction, bytes: &[u8], sockets: &mut impl Sockets) {
        let (index, client) = flow;
        let link = &mut self.links[index];
        let counters = self.counters[index].lane(direction);
        let Some((addr, nth)) = link.clients.count(client, direction) else {
            counters.stray += 1;
            return;
        };
        let (lane, path) = match direction {
            Direction::Up => (&mut link.up, (addr, link.target)),
            Direction::Down => (&mut link.down, (link.target, addr)),
        };
        let mut rng = packet_rng(self.seed, [index as u64, client, direction as u64, nth]);
        let mut delay = lane.delays.iter().map(|delay| delay.draw(now, &mut rng)).sum::<Duration>();
        let frame = Frame::new(self.packets, nth, now, (Addr::Udp(path.0), Addr::Udp(path.1)), bytes);
        self.packets += 1;
        let verdict = decide(lane.rules.iter_mut().map(|rule| &mut **rule), &frame, &mut rng);
        let mut damaged = Vec::new();
        match verdict {
            Verdict::Pass => {}
            Verdict::Drop => {
                counters.lost += 1;
                return;
            }
            Verdict::Deliver { delay: extra } => {
                counters.reordered += 1;
                delay += extra;
            }
            Verdict::Duplicate { delay: extra } => {
                counters.duplicated += 1;
                self.send_later(now, delay + extra, flow, direction, bytes, sockets);
            }
            Verdict::Corrupt => {
                counters.corrupted += 1;
                damaged.extend_from_slice(bytes);
                damage(&mut damaged, &mut rng);
            }
        }
        let bytes = if verdict == Verdict::Corrupt { &damaged[..] } else { bytes };
        self.send_later(now, delay, flow, direction, bytes, sockets);
    }

    fn send_later(
        &mut self,
        now: Instant,
        delay: Duration,
        flow: Flow,
        direction: Direction,
        bytes: &[u8],
        sockets: &mut impl Sockets,
    ) {
        if delay.is_zero() {
            return self.send(flow, direction, bytes, sockets);
        }
        let needed = self.held_bytes + bytes.len() + HELD_OVERHEAD_BYTES;
        if needed > self.held_max_bytes {
            self.counters[flow.0].lane(direction).overflowed += 1;
            return;
        }
        self.held_bytes = needed;
        self.held_numbers += 1;
        self.held.insert((now + delay, self.held_numbers), Held { flow, direction, bytes: bytes.to_vec() });
    }

    fn send(&mut self, flow: Flow, direction: Direction, bytes: &[u8], sockets: &mut impl Sockets) {
        let counters = self.counters[flow.0].lane(direction);
        let Some(addr) = self.links[flow.0].clients.addr(flow.1) else {
            counters.stray += 1;
            return;
        };
        let sent = sockets.send(flow, direction, addr, bytes);
        *if sent { &mut counters.sent } else { &mut counters.unsent } += 1;
    }

    #[cfg(test)]
    pub(super) fn held(&self, direction: Direction) -> u64 {
        self.held.values().filter(|held| held.direction == direction).count() as u64
    }

    #[cfg(test)]
    pub(super) const fn held_bytes(&self) -> usize {
        self.held_bytes
    }
}

impl LinkDelay {
    /// Draw the delay at a time. It draws outside its time span, too, so that the rules' random numbers do not depend
    /// on the time.
    fn draw(&self, now: Instant, rng: &mut Rng) -> Duration {
        let delay = self.min + rng.duration_up_to(self.max.saturating_sub(self.min));
        let (from, until) = self.during;
        if (from..until).contains(&now) { delay } else { Duration::ZERO }
    }
}

/// Return the random generator of one packet.
fn packet_rng(seed: u64, key: [u64; 4]) -> Rng {
    key.into_iter().fold(Rng::new(seed), |mut rng, word| Rng::new(rng.next_u64() ^ word))
}
