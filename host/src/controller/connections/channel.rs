//! The key exchange of a connection, and the records that follow it (`sumac_hal::ctrl::secure`).
//!
//! A connection that begins with an ordinary frame has no key. Whether it is served is the machine's decision; an exchange
//! without keys is refused here, so that a peer with a key is told.

use super::conn::CloseReason;
use crate::controller::entropy::Entropy;
use crate::controller::keys::{KeyRecord, KeyStore, Principal};
use crate::controller::outbox::{Frames, Outbox};
use crate::controller::output::ConnId;
use std::sync::Arc;
use sumac_hal::ctrl::FrameBuffer;
use sumac_hal::ctrl::secure::{
    HELLO_LEN, HandshakeError, KeyId, KeyRefusal, MESSAGE_LEN, Opener, RECORD_LEN_MAX, Responder, is_hello, key_id,
    record_len, refusal_to_hello, refusal_to_message,
};
use sumac_hal::time::Instant;

/// What key exchanges need.
#[derive(Debug)]
pub(super) struct KeyExchange {
    pub(super) keys: Option<Arc<KeyStore>>,
    pub(super) entropy: Entropy,
    /// When time was zero, in milliseconds since 1970.
    pub(super) began_ms: u64,
}

impl KeyExchange {
    fn find(&self, id: KeyId, now: Instant) -> Result<&KeyRecord, KeyRefusal> {
        let unix_s = (self.began_ms + (now - Instant::ZERO).as_millis() as u64) / 1000;
        self.keys.as_ref().ok_or(KeyRefusal::NoKeys)?.find(id, unix_s)
    }
}

/// The key of a connection whose peer has proved that it has it.
#[derive(Debug, Clone)]
pub(super) struct Grant {
    pub(super) id: KeyId,
    pub(super) principal: Arc<Principal>,
}

impl Grant {
    /// Whether the key is still good for the same.
    pub(super) fn is_in(&self, keys: &KeyStore) -> bool {
        // Expiry is for new connections; at time zero nothing has expired.
        keys.find(self.id, 0).is_ok_and(|record| record.principal == self.principal)
    }
}

/// What is expected next.
#[derive(Debug)]
enum Stage {
    /// A hello, or a frame of a peer without a key.
    Begin,
    /// Frames in clear.
    Plain,
    /// The message of the handshake.
    Message { responder: Box<Responder>, grant: Grant },
    /// Records.
    Records { opener: Box<Opener>, grant: Grant },
    /// Nothing: the peer is being refused.
    Refused,
}

/// The receiving side of a connection.
#[derive(Debug)]
pub(super) struct Channel {
    stage: Stage,
    /// Bytes that are no complete message of the exchange, or no complete record.
    received: Vec<u8>,
}

impl Channel {
    pub(super) const fn new() -> Self {
        Self { stage: Stage::Begin, received: Vec::new() }
    }

    /// The bytes that wait for more; fewer than a record has, or than were received last.
    pub(super) const fn waiting_bytes(&self) -> usize {
        self.received.len()
    }

    /// The key that the peer has proved to have.
    pub(super) const fn grant(&self) -> Option<&Grant> {
        match &self.stage {
            Stage::Records { grant, .. } => Some(grant),
            _ => None,
        }
    }

    /// Take bytes from the peer: append what they say to `inbox`, and queue what the exchange answers.
    pub(super) fn receive(
        &mut self,
        (id, bytes): (ConnId, &[u8]),
        exchange: &KeyExchange,
        (inbox, outbox): (&mut FrameBuffer, &mut Outbox),
        now: Instant,
    ) -> Result<(), CloseReason> {
        if matches!(self.stage, Stage::Plain) {
            inbox.push(bytes);
            return Ok(());
        }
        self.received.extend_from_slice(bytes);
        loop {
            match &mut self.stage {
                Stage::Begin if self.received.len() < 2 => return Ok(()),
                Stage::Begin if !is_hello(&self.received) => {
                    self.stage = Stage::Plain;
                    inbox.push(&std::mem::take(&mut self.received));
                    return Ok(());
                }
                Stage::Begin => {
                    let Some(hello) = self.take::<HELLO_LEN>() else { return Ok(()) };
                    self.handle_hello((id, &hello), exchange, outbox, now);
                }
                Stage::Message { .. } => {
                    let Some(message) = self.take::<MESSAGE_LEN>() else { return Ok(()) };
                    self.handle_message((id, &message), exchange, outbox);
                }
                Stage::Records { opener, .. } => return open_records(opener, &mut self.received, inbox),
                Stage::Refused => {
                    self.received.clear();
                    return Ok(());
                }
                Stage::Plain => return Ok(()),
            }
        }
    }

    /// Take `N` bytes, if there are as many.
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.received.first_chunk()?;
        self.received.drain(..N);
        Some(bytes)
    }

    fn handle_hello(
        &mut self,
        (id, hello): (ConnId, &[u8; HELLO_LEN]),
        exchange: &KeyExchange,
        outbox: &mut Outbox,
        now: Instant,
    ) {
        let found = key_id(hello).map_err(KeyRefusal::from).and_then(|key| exchange.find(key, now));
        match found {
            Ok(record) => {
                let nonce = exchange.entropy.bytes([id.0, 1]);
                let (responder, challenge) = Responder::new(hello, &record.key, &nonce);
                let grant = Grant { id: record.key.id(), principal: Arc::clone(&record.principal) };
                self.stage = Stage::Message { responder: Box::new(responder), grant };
                outbox.put(&[Frames::new(challenge.to_vec())]);
            }
            Err(refusal) => {
                tracing::info!(conn = id.0, key = ?key_id(hello), %refusal, "refusing a key");
                self.refuse(refusal_to_hello(refusal).to_vec(), outbox);
            }
        }
    }

    fn handle_message(
        &mut self,
        (id, message): (ConnId, &[u8; MESSAGE_LEN]),
        exchange: &KeyExchange,
        outbox: &mut Outbox,
    ) {
        let Stage::Message { responder, grant } = std::mem::replace(&mut self.stage, Stage::Refused) else { return };
        match responder.handle_message(message, exchange.entropy.bytes([id.0, 2])) {
            Ok((reply, sealer, opener)) => {
                tracing::debug!(conn = id.0, key = %grant.id, principal = %grant.principal, "authenticated");
                outbox.put(&[Frames::new(reply.to_vec())]);
                outbox.seal_from_here(sealer);
                self.stage = Stage::Records { opener: Box::new(opener), grant };
            }
            Err(error) => {
                tracing::info!(conn = id.0, key = %grant.id, %error, "refusing a key");
                self.refuse(refusal_to_message(HandshakeError::into(error)).to_vec(), outbox);
            }
        }
    }

    fn refuse(&mut self, refusal: Vec<u8>, outbox: &mut Outbox) {
        self.stage = Stage::Refused;
        outbox.put(&[Frames::new(refusal)]);
        outbox.close();
    }
}

/// Open all complete records, and append their content to `inbox`.
fn open_records(opener: &mut Opener, received: &mut Vec<u8>, inbox: &mut FrameBuffer) -> Result<(), CloseReason> {
    let mut opened = 0;
    while let Some(len) = record_len(&received[opened..])? {
        let Some(record) = received.get_mut(opened..opened + len) else { break };
        inbox.push(opener.open(record)?);
        opened += len;
    }
    received.drain(..opened);
    debug_assert!(received.len() < RECORD_LEN_MAX, "no longer than one incomplete record");
    Ok(())
}
