//! The client table of a link. Each client has a socket of its own towards the target, as behind address translation.
//!
//! One sender can use any number of source addresses. A full table therefore evicts the client with the fewest replies
//! from the target, and among those the one that has been silent longest.
//!
//! Invariants:
//! - The table never exceeds its limit.
//! - A client with [`SETTLED_REPLIES`] replies is evicted only after it has been silent for [`IDLE_LIMIT`].

use super::engine::Direction;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;
use sumac_hal::time::Instant;

/// The number of replies after which only a silent client can be evicted.
pub(crate) const SETTLED_REPLIES: u64 = 8;

/// The silence after which any client can be evicted.
pub(crate) const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// The clients of a link.
#[derive(Debug)]
pub(crate) struct Clients {
    limit: usize,
    /// The number of the next new client.
    next: u64,
    by_number: BTreeMap<u64, Client>,
    by_addr: HashMap<SocketAddr, u64>,
}

#[derive(Debug)]
struct Client {
    addr: SocketAddr,
    /// Packets counted, up and down.
    packets: [u64; 2],
    replies: u64,
    last_seen: Instant,
}

/// The outcome of [`Clients::admit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The client is in the table under this number.
    Known(u64),
    /// The client was added under this number; another client may have been evicted for it.
    New { client: u64, replaced: Option<u64> },
    /// The table is full, and no client can be evicted.
    Full,
}

impl Clients {
    /// Create a table for `limit` clients, at least one.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), next: 0, by_number: BTreeMap::new(), by_addr: HashMap::new() }
    }

    /// Find the client that sends from `addr`, or add it.
    pub(crate) fn admit(&mut self, addr: SocketAddr, now: Instant) -> Admission {
        if let Some(&known) = self.by_addr.get(&addr) {
            if let Some(client) = self.by_number.get_mut(&known) {
                client.last_seen = now;
            }
            return Admission::Known(known);
        }
        let mut replaced = None;
        if self.by_number.len() >= self.limit {
            let least = self.by_number.iter().filter(|(_, client)| client.is_evictable(now));
            let Some((&least, _)) = least.min_by_key(|(_, client)| (client.replies, client.last_seen)) else {
                return Admission::Full;
            };
            self.remove(least);
            replaced = Some(least);
        }
        let client = self.next;
        self.next += 1;
        self.by_addr.insert(addr, client);
        self.by_number.insert(client, Client { addr, packets: [0; 2], replies: 0, last_seen: now });
        Admission::New { client, replaced }
    }

    /// Note a reply of the target to a client.
    pub(crate) fn note_reply(&mut self, client: u64, now: Instant) {
        if let Some(client) = self.by_number.get_mut(&client) {
            client.replies += 1;
            client.last_seen = now;
        }
    }

    /// Count a packet of a client. Returns the client's address and the packet's number in its flow, from 1.
    pub(crate) fn count(&mut self, client: u64, direction: Direction) -> Option<(SocketAddr, u64)> {
        let client = self.by_number.get_mut(&client)?;
        let packets = &mut client.packets[direction as usize];
        *packets += 1;
        Some((client.addr, *packets))
    }

    /// Return a client's address; `None` if it has been evicted.
    pub(crate) fn addr(&self, client: u64) -> Option<SocketAddr> {
        self.by_number.get(&client).map(|client| client.addr)
    }

    /// Remove a client.
    pub(crate) fn remove(&mut self, client: u64) {
        if let Some(client) = self.by_number.remove(&client) {
            self.by_addr.remove(&client.addr);
        }
    }

    /// Remove all clients and return their numbers.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = u64> {
        self.by_addr.clear();
        std::mem::take(&mut self.by_number).into_keys()
    }
}

impl Client {
    fn is_evictable(&self, now: Instant) -> bool {
        self.replies < SETTLED_REPLIES || now.saturating_since(self.last_seen) >= IDLE_LIMIT
    }
}
