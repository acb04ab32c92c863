//! Who sends to a link: each client has a place, and a socket of its own towards the target, as behind address translation.
//!
//! Anybody can send from as many addresses as he likes. So a place is kept by those that the target answers, and a full table
//! gives a new client the place of the one that was answered least, of these the one that has said nothing for longest.
//!
//! Invariants:
//! - no more clients than the limit;
//! - a client that was answered [`SETTLED_ANSWERS`] times loses its place to others only when it was not heard of for
//!   [`IDLE_LIMIT`].

use super::engine::Direction;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;
use sumac_hal::time::Instant;

/// So many answers of the target, and a client's place is its own.
pub(crate) const SETTLED_ANSWERS: u64 = 8;

/// Who was not heard of for so long may lose its place all the same.
pub(crate) const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// The clients of a link.
#[derive(Debug)]
pub(crate) struct Clients {
    limit: usize,
    /// The number of the next one.
    next: u64,
    by_number: BTreeMap<u64, Client>,
    by_addr: HashMap<SocketAddr, u64>,
}

#[derive(Debug)]
struct Client {
    addr: SocketAddr,
    /// Packets of it, up and down.
    packets: [u64; 2],
    answers: u64,
    heard: Instant,
}

/// Whether a client has a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// It has this number.
    Known(u64),
    /// It has just got this one, and another client has lost its place for it.
    New { client: u64, replaced: Option<u64> },
    /// There is none.
    Full,
}

impl Clients {
    /// Make places for `limit` clients, at least one.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), next: 0, by_number: BTreeMap::new(), by_addr: HashMap::new() }
    }

    /// Find the place of who sends from `addr`, or give it one.
    pub(crate) fn admit(&mut self, addr: SocketAddr, now: Instant) -> Admission {
        if let Some(&known) = self.by_addr.get(&addr) {
            if let Some(client) = self.by_number.get_mut(&known) {
                client.heard = now;
            }
            return Admission::Known(known);
        }
        let mut replaced = None;
        if self.by_number.len() >= self.limit {
            let least = self.by_number.iter().filter(|(_, client)| client.may_go(now));
            let Some((&least, _)) = least.min_by_key(|(_, client)| (client.answers, client.heard)) else {
                return Admission::Full;
            };
            self.remove(least);
            replaced = Some(least);
        }
        let client = self.next;
        self.next += 1;
        self.by_addr.insert(addr, client);
        self.by_number.insert(client, Client { addr, packets: [0; 2], answers: 0, heard: now });
        Admission::New { client, replaced }
    }

    /// The target has answered a client.
    pub(crate) fn note_answer(&mut self, client: u64, now: Instant) {
        if let Some(client) = self.by_number.get_mut(&client) {
            client.answers += 1;
            client.heard = now;
        }
    }

    /// Count a packet of a client; returns its address and which packet of its flow this is, from 1.
    pub(crate) fn count(&mut self, client: u64, direction: Direction) -> Option<(SocketAddr, u64)> {
        let client = self.by_number.get_mut(&client)?;
        let packets = &mut client.packets[direction as usize];
        *packets += 1;
        Some((client.addr, *packets))
    }

    /// Return where a client is; `None` if it has lost its place.
    pub(crate) fn addr(&self, client: u64) -> Option<SocketAddr> {
        self.by_number.get(&client).map(|client| client.addr)
    }

    /// Take a client's place away.
    pub(crate) fn remove(&mut self, client: u64) {
        if let Some(client) = self.by_number.remove(&client) {
            self.by_addr.remove(&client.addr);
        }
    }

    /// Take all places away, and return whose they were.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = u64> {
        self.by_addr.clear();
        std::mem::take(&mut self.by_number).into_keys()
    }
}

impl Client {
    fn may_go(&self, now: Instant) -> bool {
        self.answers < SETTLED_ANSWERS || now.saturating_since(self.heard) >= IDLE_LIMIT
    }
}
