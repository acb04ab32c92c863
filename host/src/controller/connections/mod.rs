//! Connections: what peers send is decoded and handed to the [`Machine`], what it sends is queued for them; nothing
//! here reads, writes or waits (the thread that does is [`serve`]).
//!
//! With keys, bytes pass through a [`channel`] first, which needs no machine: key exchanges and decryption happen while
//! the machine is unlocked.
//!
//! A peer that sends no handshake, leaves a message incomplete, does not read or sends malformed data is disconnected.
//! [`Limits`] bounds what each peer and all peers together may hold, and how many key exchanges begin ([`pace`]).
//!
//! When a connection ends, for whatever reason, its membership or device ends with it. Connections that end together
//! are all closed before anyone is notified, so that lost ranks are not notified of each other.

mod channel;
mod conn;
mod pace;
pub(super) mod serve;

pub use conn::CloseReason;

use super::entropy::Entropy;
use super::keys::KeyStore;
use super::limits::Limits;
use super::machine::Machine;
use super::outbox::{FlushStatus, Frames};
use super::output::{ConnId, Output};
use super::proto::{ClientReply, JoinRefusal};
use channel::KeyExchange;
use conn::{Conn, Peer};
use pace::Budget;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use sumac_hal::ctrl::secure::{KeyRefusal, refusal_to_hello};
use sumac_hal::ctrl::{FrameError, VERSION};
use sumac_hal::time::Instant;

/// How many connections beyond the limit are accepted to be told so.
const TURNED_AWAY_MAX: usize = 64;

/// How often deadlines are checked.
pub(super) const SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// All connections, without their sockets.
#[derive(Debug)]
pub struct Connections {
    limits: Limits,
    exchange: KeyExchange,
    budget: Budget,
    conns: BTreeMap<ConnId, Conn>,
    /// The connections whose peers are not known yet.
    opening: BTreeSet<ConnId>,
    next: u64,
    turned_away: usize,
    /// Bytes queued for all peers.
    output_bytes: Arc<AtomicUsize>,
    /// Bytes of incomplete messages from all peers.
    input_bytes: usize,
    /// Connections with new output.
    unflushed: BTreeSet<ConnId>,
    /// Ended connections that the machine does not know of yet.
    ended: Vec<ConnId>,
    /// Ended connections whose sockets are to be closed.
    closed: Vec<ConnId>,
    swept_at: Instant,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

impl Connections {
    /// Create an empty set of connections without keys, which are numbered from `first` on.
    pub fn new(limits: Limits, first: ConnId, now: Instant) -> Self {
        Self {
            budget: Budget::new(limits.handshake_rate, limits.handshakes),
            limits,
            exchange: KeyExchange { keys: None, entropy: Entropy::System, began_ms: 0 },
            conns: BTreeMap::new(),
            opening: BTreeSet::new(),
            next: first.0,
            turned_away: 0,
            output_bytes: Arc::default(),
            input_bytes: 0,
            unflushed: BTreeSet::new(),
            ended: Vec::new(),
            closed: Vec::new(),
            swept_at: now,
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    /// Accept these keys. Time was zero `began_ms` after 1970, which decides when keys expire.
    pub fn with_keys(mut self, keys: Option<Arc<KeyStore>>, entropy: Entropy, began_ms: u64) -> Self {
        self.exchange = KeyExchange { keys, entropy, began_ms };
        self
    }

    /// Accept other keys from now on, and end connections by keys that are gone, revoked, or good for something else.
    pub fn set_keys(&mut self, keys: Arc<KeyStore>) {
        let is_gone = |conn: &Conn| conn.channel.grant().is_some_and(|grant| !grant.is_in(&keys));
        let gone: Vec<_> = self.conns.iter().filter(|(_, conn)| is_gone(conn)).map(|(id, _)| *id).collect();
        self.exchange.keys = Some(keys);
        gone.iter().for_each(|id| self.end(*id, &CloseReason::KeyGone));
    }

    /// Plant a bug.
    #[cfg(feature = "planted")]
    pub const fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.bug = Some(bug);
    }

    /// A peer connects from this address. Returns its number, or `None` if there is no room even to refuse it: then
    /// close its socket.
    pub fn connect(&mut self, from: IpAddr, now: Instant) -> Option<ConnId> {
        let paid_by = self.exchange.keys.is_some().then(|| from.into());
        if paid_by.is_some_and(|source| !self.budget.take(source, now)) {
            return None;
        }
        let limit = self.limits.connections;
        let is_one_too_many = self.conns.len() - self.turned_away >= limit;
        if is_one_too_many && self.turned_away >= TURNED_AWAY_MAX {
            return None;
        }
        let id = ConnId(self.next);
        self.next += 1;
        let mut conn = Conn::new(self.limits.peer_output_bytes, Arc::clone(&self.output_bytes), now);
        conn.paid_by = paid_by;
        #[cfg(feature = "planted")]
        conn.plant(self.bug);
        if is_one_too_many {
            self.turned_away += 1;
            conn.peer = Peer::TurnedAway;
            if let Ok(frames) = self.turn_away() {
                conn.outbox.put(&[frames]);
                self.unflushed.insert(id);
            }
        } else {
            self.opening.insert(id);
        }
        self.conns.insert(id, conn);
        self.shed_handshakes();
        Some(id)
    }

    /// What a peer beyond the limit is told.
    fn turn_away(&self) -> Result<Frames, FrameError> {
        if self.exchange.keys.is_some() {
            return Ok(Frames::new(refusal_to_hello(KeyRefusal::Busy).to_vec()));
        }
        let limit = self.limits.connections as u64;
        Frames::of(&ClientReply::Refused(JoinRefusal::Limit { what: "connections".into(), limit }))
    }

    /// If too many key exchanges are in progress, end the oldest: one by a peer that has the key takes a few round
    /// trips.
    fn shed_handshakes(&mut self) {
        let limit = self.limits.handshakes;
        if self.exchange.keys.is_some()
            && self.opening.len() > limit
            && let Some(oldest) = self.opening.first().copied()
        {
            self.end(oldest, &CloseReason::Handshakes { limit });
        }
    }

    /// Handle bytes that a peer has sent: [`receive`](Self::receive), then [`handle_messages`](Self::handle_messages).
    pub fn handle_input(&mut self, id: ConnId, bytes: &[u8], machine: &mut Machine, now: Instant) {
        self.receive(id, bytes, now);
        self.handle_messages(id, machine, now);
    }

    /// Take bytes that a peer has sent: decrypt them, or answer them if they belong to a key exchange. Call
    /// [`handle_messages`](Self::handle_messages) next; this needs no machine.
    pub fn receive(&mut self, id: ConnId, bytes: &[u8], now: Instant) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let before = conn.waiting_bytes();
        let received = conn.receive((id, bytes), &self.exchange, now);
        self.input_bytes = self.input_bytes + conn.waiting_bytes() - before;
        if self.opening.contains(&id) {
            // The exchange may have answered.
            self.unflushed.insert(id);
            if conn.channel.grant().is_some()
                && let Some(source) = conn.paid_by.take()
            {
                self.budget.give_back(source);
            }
        }
        if let Err(why) = received {
            self.end(id, &why);
        }
        self.shed_input();
    }

    /// Hand a peer's complete messages to the machine, and queue what that sends.
    pub fn handle_messages(&mut self, id: ConnId, machine: &mut Machine, now: Instant) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let before = conn.waiting_bytes();
        let handled = conn.handle_messages(id, machine, now);
        self.input_bytes = self.input_bytes + conn.waiting_bytes() - before;
        if conn.peer != Peer::Unknown {
            self.opening.remove(&id);
        }
        match handled {
            Err(CloseReason::Frame(FrameError::Version(theirs))) => self.refuse_version(id, theirs),
            Err(why) => self.end(id, &why),
            Ok(()) => {}
        }
        self.collect(machine);
    }

    /// A peer uses another version of the messages: answer with a frame of this version, which tells it so, and close.
    fn refuse_version(&mut self, id: ConnId, theirs: u16) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.peer != Peer::Unknown {
            return self.end(id, &FrameError::Version(theirs).into());
        }
        tracing::warn!(conn = id.0, theirs, ours = VERSION, "refusing a peer of another version: use the same release");
        conn.peer = Peer::Rejected;
        self.opening.remove(&id);
        // The header has the version. No message of this one could be understood.
        if let Ok(frames) = Frames::of(&()) {
            conn.outbox.put(&[frames]);
        }
        conn.outbox.close();
        self.unflushed.insert(id);
    }

    /// Whether a peer has sent anything that [`handle_messages`](Self::handle_messages) may handle.
    pub fn has_messages(&self, id: ConnId) -> bool {
        self.conns.get(&id).is_some_and(Conn::has_input)
    }

    /// A peer has closed its connection, or reading from it or writing to it has failed.
    pub fn handle_closed(&mut self, id: ConnId, why: &CloseReason) {
        self.end(id, why);
    }

    /// Report ended connections to the machine, let it handle its deadlines, and queue what it sends. Call it after
    /// each batch of input, and when the machine is due.
    pub fn settle(&mut self, machine: &mut Machine, now: Instant) {
        loop {
            if !self.ended.is_empty() {
                machine.handle_disconnects(self.ended.drain(..), now);
            }
            if machine.poll_timeout() <= now {
                machine.handle_timeout(now);
            }
            self.collect(machine);
            if self.ended.is_empty() {
                return;
            }
        }
    }

    /// Queue what the machine sends.
    fn collect(&mut self, machine: &mut Machine) {
        while let Some((id, output)) = machine.poll_transmit() {
            // The connection may have ended meanwhile.
            let Some(conn) = self.conns.get_mut(&id) else { continue };
            match output {
                Output::Frames(parts) => conn.outbox.put(&parts),
                Output::Close => conn.outbox.close(),
            }
            self.unflushed.insert(id);
        }
    }

    /// Whether a connection has not ended.
    pub fn is_open(&self, id: ConnId) -> bool {
        self.conns.contains_key(&id)
    }

    /// Whether a connection's peer is not known yet.
    pub fn is_opening(&self, id: ConnId) -> bool {
        self.opening.contains(&id)
    }

    /// The next connection with new output, to be flushed.
    pub fn poll_unflushed(&mut self) -> Option<ConnId> {
        self.unflushed.pop_first()
    }

    /// Send a connection's output to `stream` as far as it accepts it. Returns whether the rest waits until it accepts
    /// more; flush it then.
    pub fn flush(&mut self, id: ConnId, stream: impl Write, now: Instant) -> bool {
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        let status = conn.outbox.flush(stream);
        let was_blocked = conn.blocked_since.is_some();
        match status {
            FlushStatus::Drained => conn.blocked_since = None,
            FlushStatus::Blocked { has_progressed } if has_progressed || !was_blocked => {
                conn.blocked_since = Some(now);
            }
            FlushStatus::Blocked { .. } => {}
            FlushStatus::Closed => self.end(id, &CloseReason::Disconnected),
        }
        self.conns.get(&id).is_some_and(|conn| conn.blocked_since.is_some())
    }

    /// End connections whose deadlines have passed, and those that hold too much output.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.shed_output();
        if now - self.swept_at < SWEEP_INTERVAL {
            return;
        }
        self.swept_at = now;
        let due = |(id, conn): (&ConnId, &Conn)| Some((*id, conn.due(&self.limits, now)?));
        let ended: Vec<_> = self.conns.iter().filter_map(due).collect();
        ended.iter().for_each(|(id, why)| self.end(*id, why));
    }

    /// The next connection whose socket is to be closed.
    pub fn poll_closed(&mut self) -> Option<ConnId> {
        self.closed.pop()
    }

    /// Whether connections have ended that the machine does not know of yet.
    pub const fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// The number of open connections.
    pub fn len(&self) -> usize {
        self.conns.len()
    }

    /// Whether no connection is open.
    pub fn is_empty(&self) -> bool {
        self.conns.is_empty()
    }

    /// The bytes queued for a peer, and since when it has read none of them.
    #[cfg(feature = "snapshot")]
    pub fn waiting(&self, id: ConnId) -> (usize, Option<Instant>) {
        self.conns.get(&id).map_or((0, None), |conn| (conn.outbox.waiting_bytes(), conn.blocked_since))
    }

    fn end(&mut self, id: ConnId, why: &CloseReason) {
        let Some(conn) = self.conns.remove(&id) else { return };
        self.input_bytes -= conn.waiting_bytes();
        self.unflushed.remove(&id);
        self.opening.remove(&id);
        tracing::debug!(conn = id.0, %why, "connection ended");
        self.closed.push(id);
        match conn.peer {
            Peer::TurnedAway => self.turned_away -= 1,
            Peer::Unknown | Peer::Rejected => {}
            Peer::Device | Peer::Client { .. } => self.ended.push(id),
        }
    }

    /// If incomplete messages exceed the limit, disconnect the peers that hold most, rather than the one that sent
    /// last.
    fn shed_input(&mut self) {
        let limit = self.limits.input_bytes;
        if self.input_bytes <= limit {
            return;
        }
        for (_, id) in most_first(self.conns.iter().map(|(id, conn)| (conn.waiting_bytes(), *id))) {
            if self.input_bytes <= limit / 4 * 3 {
                break;
            }
            self.end(id, &CloseReason::Input);
        }
    }

    /// If queued output exceeds the limit, disconnect the blocked peers with the longest queues.
    fn shed_output(&mut self) {
        let limit = self.limits.output_bytes;
        let output_bytes = Arc::clone(&self.output_bytes);
        let is_over = |limit| output_bytes.load(Ordering::Acquire) > limit;
        if !is_over(limit) {
            return;
        }
        let blocked = self.conns.iter().filter(|(_, conn)| conn.blocked_since.is_some());
        for (_, id) in most_first(blocked.map(|(id, conn)| (conn.outbox.waiting_bytes(), *id))) {
            if !is_over(limit / 4 * 3) {
                break;
            }
            // Messages shared with other outboxes stay allocated.
            tracing::warn!(limit, "queued output exceeds the limit in bytes; disconnecting a peer that does not read");
            self.end(id, &CloseReason::Output);
        }
    }
}

/// Sort connections by the bytes they hold, largest first.
fn most_first(held: impl Iterator<Item = (usize, ConnId)>) -> Vec<(usize, ConnId)> {
    let mut held: Vec<_> = held.filter(|(bytes, _)| *bytes > 0).collect();
    held.sort_unstable_by(|one, other| other.cmp(one));
    held
}
