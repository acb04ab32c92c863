//! A secure channel between two sides on the board: that handshake and records need no allocator either.

use sumac_hal::ctrl::secure::{Initiator, Key, KeyId, NONCE_LEN, RECORD_LEN_MAX, Responder, key_id};

/// Set up a channel with these numbers for random ones, and send a frame each way; return whether both arrived.
pub(crate) fn carries_frames() -> bool {
    let key = Key::new(KeyId(7), [1; 32]);
    let (initiator, hello) = Initiator::new(&key, [2; 32]);
    if key_id(&hello) != Ok(key.id()) {
        return false;
    }
    let (responder, challenge) = Responder::new(&hello, &key, &[3; NONCE_LEN]);
    let Ok((awaiting, message)) = initiator.handle_challenge(&challenge) else { return false };
    let Ok((reply, mut down, mut at_responder)) = responder.handle_message(&message, [4; 32]) else { return false };
    let Ok((mut up, mut at_initiator)) = awaiting.handle_reply(&reply) else { return false };
    let mut record = [0; RECORD_LEN_MAX];
    let Ok(len) = up.seal(b"request", &mut record) else { return false };
    let is_up = at_responder.open(&mut record[..len]) == Ok(b"request");
    let Ok(len) = down.seal(b"response", &mut record) else { return false };
    is_up && at_initiator.open(&mut record[..len]) == Ok(b"response")
}
