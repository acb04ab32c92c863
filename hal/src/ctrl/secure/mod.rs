//! The secure channel of control connections (PROTOCOL 10): a handshake with a pre-shared key, and then encrypted
//! records that carry the ordinary control frames.
//!
//! ```text
//!   initiator                                                    responder
//!             hello:     magic, version, key id    ------------>           one lookup, never a trial over keys
//!             challenge: magic, code, nonce       <------------
//!             message:   e + tag                   ------------>           hashes only, unless the key is right
//!             reply:     magic, code, e + tag     <------------           two scalar multiplications
//!             records    <------------------------------------>           frames of the control protocol
//! ```
//!
//! The handshake is `Noise_NNpsk0_25519_ChaChaPoly_SHA256` by the crate `noise-protocol`; its prologue is the hello
//! followed by the challenge. Ephemeral keys give forward secrecy: who records a connection and gets the key later
//! cannot read it. The challenge makes a recorded handshake worthless and cheap to refuse: its message fails the check
//! of a tag, before any scalar multiplication. Nothing that the initiator has to say travels before the reply has
//! proved that the responder has the key, so who squats an address learns a key's id and nothing else.
//!
//! A record is `len` (u16, little-endian) and `len` bytes of ciphertext with tag. Its nonce is its number, so that a
//! record that is repeated, dropped, reordered or changed fails, and with it the connection. A connection that is cut
//! between two records looks like one that was closed; the messages inside do not depend on the difference.
//!
//! # Invariants
//! - All lengths are constants or bounded by [`RECORD_LEN_MAX`]; nothing allocates (except the streams, with `std`).
//! - Randomness is an argument: who has none cannot start a handshake.
//! - Nonces do not repeat, and never run out: a channel of 2^64 - 1 records ends with an error, so none is rekeyed.
//! - Secrets are cleared when they are dropped, and `Debug` hides them. One copy is not cleared: `noise-protocol` holds
//!   the pre-shared key for the duration of a handshake.
//!
//! A refusal travels in clear and can be forged by whoever is on the path, as a reset can. It is a hint for a message
//! to the user, and nothing follows from it.

mod crypto;
#[cfg(feature = "std")]
mod file;
mod handshake;
mod key;
mod record;
#[cfg(feature = "std")]
mod stream;
#[cfg(test)]
mod tests;

#[cfg(feature = "std")]
pub use file::{KeyFileError, check_private, parse_key, read_key, read_private, replace_private, write_new_key};
pub use handshake::{
    AwaitingReply, CHALLENGE_LEN, HELLO_LEN, HandshakeError, Initiator, KeyRefusal, MESSAGE_LEN, NONCE_LEN, REPLY_LEN,
    Responder, is_hello, key_id, refusal_to_hello, refusal_to_message,
};
pub use key::{Key, KeyError, KeyId};
pub use record::{Opener, RECORD_LEN_MAX, RECORD_OVERHEAD_LEN, RECORD_PLAINTEXT_MAX, RecordError, Sealer, record_len};
#[cfg(feature = "std")]
pub use stream::{ConnectError, ControlReader, ControlWriter, connect, connect_within, random};
