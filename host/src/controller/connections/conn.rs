//! One connection: its handshake, its messages, and its deadlines.

use super::channel::{Channel, KeyExchange};
use super::pace::Source;
use crate::controller::limits::{Limits, REQUEST_LEN_MAX};
use crate::controller::machine::Machine;
use crate::controller::outbox::Outbox;
use crate::controller::output::ConnId;
use crate::controller::proto::ClientRequest;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use sumac_hal::ctrl::secure::RecordError;
use sumac_hal::ctrl::{Envelope, FrameBuffer, FrameError, Hello, MAX_MESSAGE_LEN, Response};
use sumac_hal::planted;
use sumac_hal::time::Instant;

/// The maximum length of a handshake in bytes: fits a device with all its shards.
const HELLO_LEN_MAX: usize = 8 * 1024;

/// How long a connection beyond the limit may take to read the refusal.
const TURN_AWAY_TIMEOUT: Duration = Duration::from_secs(2);

/// The role of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// The handshake is outstanding.
    Unknown,
    Device,
    Client {
        has_joined: bool,
    },
    /// Beyond the connection limit; being refused.
    TurnedAway,
    /// A device that is refused, or a client without a key.
    Rejected,
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer has closed it.
    #[error("closed by the peer")]
    Closed,
    /// Reading or writing has failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A message cannot be decoded or is too long.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// A record is not authentic.
    #[error("{0}")]
    Record(#[from] RecordError),
    /// Too many key exchanges are in progress.
    #[error("more than {limit} key exchanges are in progress, and this one is the oldest")]
    Handshakes {
        /// The limit.
        limit: usize,
    },
    /// The peer's key is no longer valid.
    #[error("its key was revoked, removed or changed")]
    KeyGone,
    /// The controller closes it.
    #[error("disconnected by the controller")]
    Disconnected,
    /// No handshake arrived.
    #[error("no handshake within the time limit")]
    Greeting,
    /// The peer is idle, or a message stays incomplete.
    #[error("idle, or sending one message, for longer than the limit")]
    Idle,
    /// The peer does not read.
    #[error("it does not read its input")]
    Stalled,
    /// Incomplete messages exceed their limit.
    #[error("incomplete messages of all peers exceed the limit, and this peer's are the longest")]
    Input,
    /// Queued output exceeds its limit.
    #[error("output queued for all peers exceeds the limit, and this peer's queue is the longest")]
    Output,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    inbox: FrameBuffer,
    pub(super) outbox: Outbox,
    pub(super) peer: Peer,
    pub(super) channel: Channel,
    /// The address that has paid for its key exchange, until the peer has proved that it has a key.
    pub(super) paid_by: Option<Source>,
    /// When it connected or last completed a message.
    active_at: Instant,
    /// Since when it has read nothing although output is queued.
    pub(super) blocked_since: Option<Instant>,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

impl Conn {
    pub(super) fn new(output_len_max: usize, output_bytes: Arc<AtomicUsize>, now: Instant) -> Self {
        Self {
            inbox: FrameBuffer::new(HELLO_LEN_MAX),
            outbox: Outbox::new(output_len_max, output_bytes),
            peer: Peer::Unknown,
            channel: Channel::new(),
            paid_by: None,
            active_at: now,
            blocked_since: None,
            #[cfg(feature = "planted")]
            bug: None,
        }
    }

    #[cfg(feature = "planted")]
    pub(super) const fn plant(&mut self, bug: Option<sumac_hal::planted::Bug>) {
        (self.bug, self.outbox.bug) = (bug, bug);
    }

    /// The bytes of incomplete messages.
    pub(super) const fn waiting_bytes(&self) -> usize {
        self.inbox.len() + self.channel.waiting_bytes()
    }

    /// Whether there are bytes of messages.
    pub(super) const fn has_input(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Take bytes, and answer those of a key exchange.
    pub(super) fn receive(
        &mut self,
        input: (ConnId, &[u8]),
        exchange: &KeyExchange,
        now: Instant,
    ) -> Result<(), CloseReason> {
        if matches!(self.peer, Peer::TurnedAway | Peer::Rejected) {
            return Ok(());
        }
        self.channel.receive(input, exchange, (&mut self.inbox, &mut self.outbox), now)
    }

    /// Hand complete messages to the machine.
    pub(super) fn handle_messages(
        &mut self,
        id: ConnId,
        machine: &mut Machine,
        now: Instant,
    ) -> Result<(), CloseReason> {
        while self.handle_message(id, machine, now)? {
            self.active_at = now;
        }
        Ok(())
    }

    /// Handle the next message. Returns false if none is complete.
    fn handle_message(&mut self, id: ConnId, machine: &mut Machine, now: Instant) -> Result<bool, CloseReason> {
        match &mut self.peer {
            Peer::TurnedAway | Peer::Rejected => Ok(false),
            Peer::Unknown => {
                let Some(hello) = self.inbox.take_message::<Hello>()? else { return Ok(false) };
                if let Some(grant) = self.channel.grant() {
                    machine.authenticate(id, Arc::clone(&grant.principal));
                }
                let seen = if let Hello::FailoverClient { seen } = hello { Some(seen) } else { None };
                if let Hello::Device(announce) | Hello::HostDevice { announce, .. } = &hello {
                    let announce = announce.clone();
                    let is_registered = match &hello {
                        Hello::HostDevice { ticket, .. } => machine.connect_host_device(id, announce, ticket, now),
                        _ => machine.connect_device(id, announce, now),
                    };
                    if !is_registered {
                        // It is told why before the machine closes the connection.
                        self.peer = Peer::Rejected;
                        return Ok(false);
                    }
                    self.peer = Peer::Device;
                    self.inbox.limit(MAX_MESSAGE_LEN);
                } else {
                    if !machine.connect_client(id) {
                        self.peer = Peer::Rejected;
                        return Ok(false);
                    }
                    self.peer = Peer::Client { has_joined: false };
                    if let Some(seen) = seen {
                        machine.notify_term(id, seen);
                    }
                    self.inbox.limit(REQUEST_LEN_MAX);
                }
                Ok(true)
            }
            Peer::Device => {
                let Some(response) = self.inbox.take_message::<Envelope<Response>>()? else { return Ok(false) };
                machine.handle_response(id, response, now);
                Ok(true)
            }
            Peer::Client { has_joined } => {
                let Some(request) = self.inbox.take_message::<ClientRequest>()? else { return Ok(false) };
                if !machine.handle_request(id, request, now) {
                    return Err(CloseReason::Disconnected);
                }
                *has_joined = machine.has_joined(id);
                Ok(true)
            }
        }
    }

    /// Return why the connection must be closed by now, if so.
    pub(super) fn due(&self, limits: &Limits, now: Instant) -> Option<CloseReason> {
        let silent = now - self.active_at;
        let is_stalled = self.blocked_since.is_some_and(|since| now - since >= limits.stalled);
        if is_stalled && !planted!(self, StalledPeerKept) {
            return Some(CloseReason::Stalled);
        }
        match self.peer {
            Peer::Unknown => (silent >= limits.greeting).then_some(CloseReason::Greeting),
            Peer::TurnedAway | Peer::Rejected => (silent >= TURN_AWAY_TIMEOUT).then_some(CloseReason::Disconnected),
            Peer::Client { has_joined: false } => (silent >= limits.idle).then_some(CloseReason::Idle),
            Peer::Client { .. } | Peer::Device => {
                (self.waiting_bytes() > 0 && silent >= limits.idle).then_some(CloseReason::Idle)
            }
        }
    }
}
