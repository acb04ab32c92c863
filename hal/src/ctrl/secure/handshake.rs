//! The handshake: four messages of constant lengths. What each state accepts next is a type.

use super::crypto::{ChaChaPoly, Sensitive, Sha256, TAG_LEN, X25519};
use super::key::{Key, KeyId};
use super::record::{Opener, Sealer};
use core::fmt;
use noise_protocol::HandshakeState;
use noise_protocol::patterns::noise_nn_psk0;
use thiserror::Error;

/// The length of a hello: magic (u16), version (u16), key id (u64), little-endian.
pub const HELLO_LEN: usize = 12;

/// The length of a challenge: magic (u16), code (u16), nonce.
pub const CHALLENGE_LEN: usize = 4 + NONCE_LEN;

/// The length of the initiator's message: a public key and a tag.
pub const MESSAGE_LEN: usize = 32 + TAG_LEN;

/// The length of a reply: magic (u16), code (u16), a public key and a tag.
pub const REPLY_LEN: usize = 4 + MESSAGE_LEN;

/// The length of a challenge's nonce.
pub const NONCE_LEN: usize = 16;

const MAGIC: [u8; 2] = *b"Sk";

/// The version of handshake and records.
const VERSION: u16 = 1;

/// The code of a challenge or a reply that is no refusal.
const ACCEPTED: u16 = 0;

type State = HandshakeState<X25519, ChaChaPoly, Sha256>;

/// Why a responder refuses a handshake. It is not authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeyRefusal {
    /// The responder has no key of this id. Initiators are told [`KeyRefusal::Wrong`] instead.
    #[error("it does not know this key")]
    Unknown,
    /// The responder has another secret for this id, or none; so that nobody can find out which ids it knows, it does
    /// not say.
    #[error("it does not know this key, or has another secret for it")]
    Wrong,
    /// The key was revoked.
    #[error("this key was revoked")]
    Revoked,
    /// The key has expired.
    #[error("this key has expired")]
    Expired,
    /// The responder uses no keys.
    #[error("it was started without keys")]
    NoKeys,
    /// The responder has too many connections or handshakes in progress.
    #[error("it has too many connections")]
    Busy,
    /// The responder speaks another version.
    #[error(
        "it speaks version {0} of the key exchange and this build version {VERSION}; use the same release on both sides"
    )]
    Version(u16),
    /// A reason that a later version has.
    #[error("for reason {0}, which this build does not know")]
    Other(u16),
}

impl KeyRefusal {
    const fn code(self) -> u16 {
        match self {
            Self::Unknown => 1,
            Self::Wrong => 2,
            Self::Revoked => 3,
            Self::Expired => 4,
            Self::NoKeys => 5,
            Self::Busy => 6,
            Self::Version(version) => 0x8000 | version,
            Self::Other(code) => code,
        }
    }

    const fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Unknown,
            2 => Self::Wrong,
            3 => Self::Revoked,
            4 => Self::Expired,
            5 => Self::NoKeys,
            6 => Self::Busy,
            _ if code & 0x8000 != 0 => Self::Version(code & 0x7fff),
            _ => Self::Other(code),
        }
    }
}

/// Why a handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The peer does not speak this protocol.
    #[error("the peer does not speak Sumac's key exchange")]
    Magic,
    /// The initiator speaks another version.
    #[error("the peer speaks version {0} of the key exchange and this build version {VERSION}")]
    Version(u16),
    /// The responder refuses.
    #[error("the peer refuses key {id}: {refusal}")]
    Refused {
        /// The initiator's key.
        id: KeyId,
        /// The peer's reason.
        refusal: KeyRefusal,
    },
    /// The peer does not have the same secret, or a message was changed.
    #[error("the peer does not prove that it has key {0}")]
    Proof(KeyId),
}

/// Return whether the bytes that a connection begins with, at least two, are a hello. Ordinary frames never are.
pub fn is_hello(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// Return the id of the key in a hello.
///
/// # Errors
/// [`HandshakeError::Magic`] or [`HandshakeError::Version`].
pub fn key_id(hello: &[u8; HELLO_LEN]) -> Result<KeyId, HandshakeError> {
    let [m0, m1, v0, v1, id @ ..] = *hello;
    if [m0, m1] != MAGIC {
        return Err(HandshakeError::Magic);
    }
    match u16::from_le_bytes([v0, v1]) {
        VERSION => Ok(KeyId(u64::from_le_bytes(id))),
        version => Err(HandshakeError::Version(version)),
    }
}

/// Return what a responder answers a hello with, instead of a challenge.
pub fn refusal_to_hello(refusal: KeyRefusal) -> [u8; CHALLENGE_LEN] {
    headed(refusal.code(), &[0; NONCE_LEN])
}

/// Return what a responder answers a message with, instead of a reply.
pub fn refusal_to_message(refusal: KeyRefusal) -> [u8; REPLY_LEN] {
    headed(refusal.code(), &[0; MESSAGE_LEN])
}

/// The refusal of an initiator of another version.
impl From<HandshakeError> for KeyRefusal {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Refused { refusal, .. } => refusal,
            HandshakeError::Proof(_) => Self::Wrong,
            HandshakeError::Magic | HandshakeError::Version(_) => Self::Version(VERSION),
        }
    }
}

fn headed<const N: usize>(code: u16, body: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..2].copy_from_slice(&MAGIC);
    bytes[2..4].copy_from_slice(&code.to_le_bytes());
    bytes[4..].copy_from_slice(body);
    bytes
}

/// Check the first four bytes of a challenge or a reply, and return the rest.
fn accepted(bytes: &[u8], id: KeyId) -> Result<&[u8], HandshakeError> {
    let (head, body) = bytes.split_at(4);
    if head[..2] != MAGIC {
        return Err(HandshakeError::Magic);
    }
    match u16::from_le_bytes([head[2], head[3]]) {
        ACCEPTED => Ok(body),
        code => Err(HandshakeError::Refused { id, refusal: KeyRefusal::from_code(code) }),
    }
}

/// Begin the Noise handshake, whose prologue is hello and challenge.
fn begin(
    is_initiator: bool,
    hello: &[u8; HELLO_LEN],
    challenge: &[u8; CHALLENGE_LEN],
    key: &Key,
    ephemeral: Option<Sensitive>,
) -> State {
    let mut prologue = [0; HELLO_LEN + CHALLENGE_LEN];
    prologue[..HELLO_LEN].copy_from_slice(hello);
    prologue[HELLO_LEN..].copy_from_slice(challenge);
    let mut state = State::new(noise_nn_psk0(), is_initiator, prologue, None, ephemeral, None, None);
    state.push_psk(key.secret());
    state
}

macro_rules! opaque_debug {
    ($($name:ident),+) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )+};
}

opaque_debug!(Initiator, AwaitingReply, Responder);

/// The side that connects. It has sent a hello.
pub struct Initiator {
    key: Key,
    ephemeral: Sensitive,
    hello: [u8; HELLO_LEN],
}

impl Initiator {
    /// Begin a handshake, and return the hello. `ephemeral` is 32 random bytes, used for nothing else.
    pub fn new(key: &Key, ephemeral: [u8; 32]) -> (Self, [u8; HELLO_LEN]) {
        let mut hello = [0; HELLO_LEN];
        hello[..2].copy_from_slice(&MAGIC);
        hello[2..4].copy_from_slice(&VERSION.to_le_bytes());
        hello[4..].copy_from_slice(&key.id().0.to_le_bytes());
        (Self { key: key.clone(), ephemeral: Sensitive::new(ephemeral), hello }, hello)
    }

    /// Handle the challenge, and return the message.
    ///
    /// # Errors
    /// [`HandshakeError`]; [`HandshakeError::Refused`] if it is a refusal.
    pub fn handle_challenge(
        self,
        challenge: &[u8; CHALLENGE_LEN],
    ) -> Result<(AwaitingReply, [u8; MESSAGE_LEN]), HandshakeError> {
        let id = self.key.id();
        accepted(challenge, id)?;
        let mut state = begin(true, &self.hello, challenge, &self.key, Some(self.ephemeral));
        let mut message = [0; MESSAGE_LEN];
        state.write_message(&[], &mut message).map_err(|_| HandshakeError::Proof(id))?;
        Ok((AwaitingReply { state, id }, message))
    }
}

/// The side that connects. It has sent its message.
pub struct AwaitingReply {
    state: State,
    id: KeyId,
}

impl AwaitingReply {
    /// Handle the reply, which proves that the responder has the key.
    ///
    /// # Errors
    /// [`HandshakeError`]; [`HandshakeError::Refused`] if it is a refusal.
    pub fn handle_reply(mut self, reply: &[u8; REPLY_LEN]) -> Result<(Sealer, Opener), HandshakeError> {
        let body = accepted(reply, self.id)?;
        self.state.read_message(body, &mut []).map_err(|_| HandshakeError::Proof(self.id))?;
        let (up, down) = self.state.get_ciphers();
        Ok((Sealer::new(up), Opener::new(down)))
    }
}

/// The side that accepts connections. It has sent a challenge.
pub struct Responder {
    key: Key,
    hello: [u8; HELLO_LEN],
    challenge: [u8; CHALLENGE_LEN],
}

impl Responder {
    /// Answer a hello, whose [`key_id`] is that of `key`, with the challenge. `nonce` is 16 random bytes, used for
    /// nothing else.
    pub fn new(hello: &[u8; HELLO_LEN], key: &Key, nonce: &[u8; NONCE_LEN]) -> (Self, [u8; CHALLENGE_LEN]) {
        let challenge = headed(ACCEPTED, nonce);
        (Self { key: key.clone(), hello: *hello, challenge }, challenge)
    }

    /// Handle the message, and return the reply. `ephemeral` is 32 random bytes, used for nothing else.
    ///
    /// # Errors
    /// [`HandshakeError::Proof`] if the initiator does not have the key; then nothing was computed but hashes.
    pub fn handle_message(
        self,
        message: &[u8; MESSAGE_LEN],
        ephemeral: [u8; 32],
    ) -> Result<([u8; REPLY_LEN], Sealer, Opener), HandshakeError> {
        let wrong = |_| HandshakeError::Proof(self.key.id());
        let ephemeral = Some(Sensitive::new(ephemeral));
        let mut state = begin(false, &self.hello, &self.challenge, &self.key, ephemeral);
        state.read_message(message, &mut []).map_err(wrong)?;
        let mut body = [0; MESSAGE_LEN];
        state.write_message(&[], &mut body).map_err(wrong)?;
        let (up, down) = state.get_ciphers();
        Ok((headed(ACCEPTED, &body), Sealer::new(down), Opener::new(up)))
    }
}
