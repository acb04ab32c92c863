//! The key exchange of a connection, and the records that follow it (`sumac_hal::ctrl::secure`).
//!
//! A connection that begins with an ordinary frame has no key. Whether it is served is the machine's decision; an
//! exchange without keys is refused here, so that a peer with a key is told.
//!
//! A peer that does not prove that it has the secret is not told whether the controller knows the key: an unknown id
//! gets a challenge, too, and its message is checked against a random secret.

use super::conn::CloseReason;
use crate::controller::entropy::Entropy;
use crate::controller::keys::{KeyStore, Principal};
use crate::controller::outbox::{Frames, Outbox};
use crate::controller::output::ConnId;
use std::sync::Arc;
use sumac_hal::ctrl::FrameBuffer;
use sumac_hal::ctrl::secure::{
    HELLO_LEN, Key, KeyId, KeyRefusal, MESSAGE_LEN, NONCE_LEN, Opener, RECORD_LEN_MAX, Responder, is_hello, key_id,
    record_len, refusal_to_hello, refusal_to_message,
};
use sumac_hal::time::Instant;
use zeroize::Zeroizing;

/// What key exchanges need.
#[derive(Debug)]
pub(super) struct KeyExchange {
    pub(super) keys: Option<Arc<KeyStore>>,
    pub(super) entropy: Entropy,
    /// When time was zero, in milliseconds since 1970.
    pub(super) began_ms: u64,
}

impl KeyExchange {
    /// Return the id in a hello, and the keys.
    fn begin(&self, hello: &[u8; HELLO_LEN]) -> Result<(KeyId, &KeyStore), KeyRefusal> {
        let id = key_id(hello)?;
        Ok((id, self.keys.as_ref().ok_or(KeyRefusal::NoKeys)?))
    }

    /// Return what a peer gets that proves to have the key, if it is a valid one now: it may have been revoked or
    /// replaced since the hello.
    fn grant(&self, key: &Key, now: Instant) -> Result<Grant, KeyRefusal> {
        let keys = self.keys.as_ref().ok_or(KeyRefusal::NoKeys)?;
        let record = keys.find(key.id(), (self.began_ms + (now - Instant::ZERO).as_millis() as u64) / 1000)?;
        if record.key != *key {
            return Err(KeyRefusal::Wrong);
        }
        Ok(Grant { id: key.id(), principal: Arc::clone(&record.principal) })
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
    /// The message of the handshake, by a key that may be invalid or unknown.
    Message { responder: Box<Responder>, key: Key },
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
                    self.handle_hello((id, &hello), exchange, outbox);
                }
                Stage::Message { .. } => {
                    let Some(message) = self.take::<MESSAGE_LEN>() else { return Ok(()) };
                    self.handle_message((id, &message), exchange, outbox, now);
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

    fn handle_hello(&mut self, (id, hello): (ConnId, &[u8; HELLO_LEN]), exchange: &KeyExchange, outbox: &mut Outbox) {
        let (key, keys) = match exchange.begin(hello) {
            Ok(begun) => begun,
            Err(refusal) => {
                tracing::info!(conn = id.0, key = ?key_id(hello), %refusal, "refusing a key");
                return self.refuse(refusal_to_hello(refusal).to_vec(), outbox);
            }
        };
        // Drawn at once, as this may happen thousands of times a second.
        let random = Zeroizing::new(exchange.entropy.bytes::<{ NONCE_LEN + 32 }>([id.0, 1]));
        let (mut nonce, mut secret) = ([0; NONCE_LEN], [0; 32]);
        nonce.copy_from_slice(&random[..NONCE_LEN]);
        secret.copy_from_slice(&random[NONCE_LEN..]);
        // Made for known keys, too, so that the time does not tell them from others.
        let decoy = Key::new(key, secret);
        let key = keys.get(key).map_or(decoy, |record| record.key.clone());
        let (responder, challenge) = Responder::new(hello, &key, &nonce);
        self.stage = Stage::Message { responder: Box::new(responder), key };
        outbox.put(&[Frames::new(challenge.to_vec())]);
    }

    fn handle_message(
        &mut self,
        (id, message): (ConnId, &[u8; MESSAGE_LEN]),
        exchange: &KeyExchange,
        outbox: &mut Outbox,
        now: Instant,
    ) {
        let Stage::Message { responder, key } = std::mem::replace(&mut self.stage, Stage::Refused) else {
            return;
        };
        let proven = responder.handle_message(message, exchange.entropy.bytes([id.0, 2]));
        let refusal = match (proven, exchange.grant(&key, now)) {
            (Ok((reply, sealer, opener)), Ok(grant)) => {
                tracing::debug!(conn = id.0, key = %grant.id, principal = %grant.principal, "authenticated");
                outbox.put(&[Frames::new(reply.to_vec())]);
                outbox.seal_from_here(sealer);
                self.stage = Stage::Records { opener: Box::new(opener), grant };
                return;
            }
            (Ok(_), Err(refusal)) => refusal,
            (Err(_), Err(KeyRefusal::Unknown)) => KeyRefusal::Unknown,
            (Err(_), _) => KeyRefusal::Wrong,
        };
        tracing::info!(conn = id.0, key = %key.id(), ?refusal, "refusing a key");
        let told = if refusal == KeyRefusal::Unknown { KeyRefusal::Wrong } else { refusal };
        self.refuse(refusal_to_message(told).to_vec(), outbox);
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
