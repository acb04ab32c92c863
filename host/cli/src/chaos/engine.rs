//! What becomes of each packet: decided by rules, on the caller's time, without a socket.
//!
//! The same rules as on the simulator's links ([`sumac_hal::emu`]): each packet is shown to a lane's rules in turn, and the
//! first that does not let it pass decides; what the lane itself takes comes on top.
//!
//! Invariants:
//! - what becomes of a packet follows from the seed, its link, its client's number there, its direction and which packet of
//!   that flow it is, and, where a rule holds for a while, from the time: what others send changes nothing;
//! - `received + duplicated == sent + lost + overflowed + refused + stray + unsent + held`, for each lane, after every call:
//!   nothing is made but copies, and each packet leaves at most twice;
//! - what is held back never takes more than the limit, and no client more than its place.

use super::clients::{Admission, Clients};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use sumac_hal::emu::{Frame, Rng, Rule, Verdict, damage, decide};
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;

/// What a packet that is held back takes beside its bytes, about.
const HELD_OVERHEAD_BYTES: usize = 128;

/// Which way a packet goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Direction {
    /// From a client to the target.
    Up,
    /// Back.
    Down,
}

/// A link of this proxy, and one of its clients.
pub(crate) type Flow = (usize, u64);

/// Sockets, as the engine needs them.
pub(crate) trait Sockets {
    /// Open a new client's socket towards the target; false if the system has none.
    fn open(&mut self, flow: Flow) -> bool;
    /// Close the socket of a client that has lost its place.
    fn close(&mut self, flow: Flow);
    /// Send to the target, from the client's socket, or from the link's own to the client; false if it was not taken.
    fn send(&mut self, flow: Flow, direction: Direction, client: SocketAddr, bytes: &[u8]) -> bool;
}

/// The time that a lane takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) during: (Instant, Instant),
    pub(crate) min: Duration,
    pub(crate) max: Duration,
}

/// One direction of a link.
#[derive(Default)]
pub(crate) struct Lane {
    pub(crate) rules: Vec<Box<dyn Rule + Send>>,
    pub(crate) ways: Vec<Way>,
}

/// What a lane has counted: packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct LaneCounters {
    /// Came in.
    pub(crate) received: u64,
    /// Left, copies among them.
    pub(crate) sent: u64,
    /// Lost by a rule.
    pub(crate) lost: u64,
    /// Doubled by a rule.
    pub(crate) duplicated: u64,
    /// Damaged by a rule.
    pub(crate) corrupted: u64,
    /// Delayed by a rule, so that others overtake them.
    pub(crate) reordered: u64,
    /// Lost as too much was held back already.
    pub(crate) overflowed: u64,
    /// Lost as there was no place for another client.
    pub(crate) refused: u64,
    /// Lost as their client had lost its place meanwhile.
    pub(crate) stray: u64,
    /// Lost as a socket did not take them.
    pub(crate) unsent: u64,
}

/// What a link has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub(crate) struct LinkCounters {
    /// Clients that got a place.
    pub(crate) clients: u64,
    /// Clients that lost it to others.
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

/// A place to relay from, and what to relay to.
pub(crate) struct Link {
    pub(crate) target: SocketAddr,
    pub(crate) up: Lane,
    pub(crate) down: Lane,
    pub(crate) clients: Clients,
}

/// A packet that is held back.
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
    /// Packets ever taken in.
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

    /// Return what each link has counted.
    pub(crate) fn counters(&self) -> &[LinkCounters] {
        &self.counters
    }

    /// Return when [`Engine::release`] has something to do next.
    pub(crate) fn next_release(&self) -> Option<Instant> {
        self.held.first_key_value().map(|(&(at, _), _)| at)
    }

    /// Send what was held back until now.
    pub(crate) fn release(&mut self, now: Instant, sockets: &mut impl Sockets) {
        while let Some(entry) = self.held.first_entry().filter(|entry| entry.key().0 <= now) {
            let Held { flow, direction, bytes } = entry.remove();
            self.held_bytes -= bytes.len() + HELD_OVERHEAD_BYTES;
            self.send(flow, direction, &bytes, sockets);
        }
    }

    /// Take in a packet that came to a link from `from`.
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

    /// Take in a packet that came to a client's socket from the target.
    pub(crate) fn down(&mut self, now: Instant, flow: Flow, bytes: &[u8], sockets: &mut impl Sockets) {
        self.counters[flow.0].down.received += 1;
        self.links[flow.0].clients.note_answer(flow.1, now);
        self.pass(now, flow, Direction::Down, bytes, sockets);
    }

    /// Let all clients go, and what is held back for them.
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
        let mut rng = dice(self.seed, [index as u64, client, direction as u64, nth]);
        let mut delay = lane.ways.iter().map(|way| way.delay(now, &mut rng)).sum::<Duration>();
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

impl Way {
    /// Draw what it takes at a time. It draws before and after as well, so that the rules' dice do not depend on the time.
    fn delay(&self, now: Instant, rng: &mut Rng) -> Duration {
        let delay = self.min + rng.duration_up_to(self.max.saturating_sub(self.min));
        let (from, until) = self.during;
        if (from..until).contains(&now) { delay } else { Duration::ZERO }
    }
}

/// Return the generator of one packet.
fn dice(seed: u64, place: [u64; 4]) -> Rng {
    place.into_iter().fold(Rng::new(seed), |mut rng, word| Rng::new(rng.next_u64() ^ word))
}
