//! Mutual authentication of two ranks: each proves to the other that it knows the job's secret, which never travels.
//!
//! ```text
//!   dialling rank                                                    accepting rank
//!        hello: version, purpose, from, to, number, nonce  ------------>
//!        answer: version, code, nonce, MAC                 <------------      proves that it knows the secret
//!        proof: MAC                                        ------------>      proves that the other knows it
//!        verdict: version, code                            <------------
//!        frames or messages                                <----------->
//! ```
//!
//! | Hello | | Answer | | Verdict | |
//! |---|---|---|---|---|---|
//! | 0..4 | magic `SMCH` | 0..4 | magic `SMCA` | 0..4 | magic `SMCA` |
//! | 4..6 | version | 4..6 | version | 4..6 | version |
//! | 6..8 | purpose: 1 peer, 2 one-shot, 4 point-to-point, 5 out-of-band | 6..8 | code | 6..8 | code |
//! | 8..12 | from rank | 8..32 | nonce | | |
//! | 12..16 | to rank | 32..64 | MAC | | |
//! | 16..24 | number of a one-shot, from 1 | | | | |
//! | 24..32 | zero | | | | |
//! | 32..64 | nonce | | | | |
//!
//! Code 0 goes on; others refuse: 1 version, 2 secret, 3 rank. All numbers are little-endian, and all MACs are
//! HMAC-SHA-256 under the job's secret, each for a purpose of its own: the answer's covers the rank that
//! answers (u32), the hello, and bytes 0..32 of the answer; the proof covers the hello and the whole answer.
//!
//! A one-shot connection carries one frame that its receiver may read only after the sender has gone, so there is no
//! answer: hello, frame, and a MAC that covers both. The number in its hello counts up. A receiver accepts none that is
//! not above the last one of that rank, so that a recorded one-shot is refused.
//!
//! # Invariants
//! - Both nonces are in each proof, so a recorded handshake opens no connection. Purpose and ranks are in it too, so
//!   that whoever holds the address of one rank cannot pass on its handshakes to another, or to another kind of
//!   connection. Nor can it pass on another's refusals, which carry the rank that refuses.
//! - An answer counts only with its MAC, a refusal too: who has taken over a rank's address can neither speak for the
//!   rank nor refuse for it.
//! - All lengths are constants, and an answer is never longer than what it answers.
//!
//! Who can alter traffic on the path can take over a connection after the handshake (PROTOCOL 10).

use super::error::Refusal;
use crate::secret::JobSecret;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io;
use std::net::SocketAddr;
use sumac_hal::ctrl::secure;
use sumac_hal::ids::Rank;

/// Version of handshake and frames; ranks of different versions refuse each other.
pub(super) const VERSION: u16 = 4;
pub(super) const HELLO_BYTES: usize = 64;
pub(super) const ANSWER_BYTES: usize = 64;
pub(super) const PROOF_BYTES: usize = 32;
pub(super) const VERDICT_BYTES: usize = 8;

const HELLO_MAGIC: [u8; 4] = *b"SMCH";
const ANSWER_MAGIC: [u8; 4] = *b"SMCA";

const ACCEPTING: &[u8; 16] = b"sumac accepting\0";
const DIALLING: &[u8; 16] = b"sumac dialling\0\0";
const ONE_SHOT: &[u8; 16] = b"sumac one-shot\0\0";
const SHARED_NAME: &[u8; 16] = b"sumac shm name\0\0";
const SHARED_KEY: &[u8; 16] = b"sumac shm key\0\0\0";

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The link between two ranks, for frames.
    Peer,
    /// Carries a single abort or announce frame, which follows at once and is not answered.
    OneShot,
    /// One direction of point-to-point messages ([`super::p2p`]).
    PointToPoint,
    /// One direction of the out-of-band channel ([`super::oob`]).
    OutOfBand,
    /// The board of all ranks of a machine, in shared memory ([`super::board`]). No connection has this purpose.
    Board,
}

impl Purpose {
    pub(super) const fn to_wire(self) -> u16 {
        match self {
            Self::Peer => 1,
            Self::OneShot => 2,
            Self::PointToPoint => 4,
            Self::OutOfBand => 5,
            Self::Board => 6,
        }
    }
}

/// The first message of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u16,
    pub(super) purpose: Purpose,
    pub(super) from: Rank,
    pub(super) to: Rank,
    /// The number of a one-shot connection.
    pub(super) number: u64,
    pub(super) nonce: [u8; 32],
}

impl Hello {
    /// Return a hello with a fresh nonce.
    pub(super) fn new(purpose: Purpose, from: Rank, to: Rank, number: u64) -> io::Result<Self> {
        Ok(Self { version: VERSION, purpose, from, to, number, nonce: secure::random()? })
    }

    pub(super) fn emit(&self) -> [u8; HELLO_BYTES] {
        let purpose = self.purpose.to_wire();
        let mut bytes = [0; HELLO_BYTES];
        bytes[0..4].copy_from_slice(&HELLO_MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6..8].copy_from_slice(&purpose.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.to.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[32..64].copy_from_slice(&self.nonce);
        bytes
    }

    /// Return the hello, or `None` if these bytes are not a hello of any version.
    pub(super) fn parse(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        if bytes[0..4] != HELLO_MAGIC {
            return None;
        }
        let purpose = match u16::from_le_bytes(array_at(bytes, 6)) {
            1 => Purpose::Peer,
            2 => Purpose::OneShot,
            4 => Purpose::PointToPoint,
            5 => Purpose::OutOfBand,
            _ => return None,
        };
        Some(Self {
            version: u16::from_le_bytes(array_at(bytes, 4)),
            purpose,
            from: Rank(u32::from_le_bytes(array_at(bytes, 8))),
            to: Rank(u32::from_le_bytes(array_at(bytes, 12))),
            number: u64::from_le_bytes(array_at(bytes, 16)),
            nonce: array_at(bytes, 32),
        })
    }
}

/// Why an answer or a verdict is not one that goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerError {
    /// The peer does not prove that it knows the secret.
    Unproven,
    /// The rank refuses the connection.
    Refused(Refusal),
}

/// The dialling rank's side of a handshake.
#[derive(Debug, Clone)]
pub(super) struct Dialler {
    hello: [u8; HELLO_BYTES],
}

impl Dialler {
    /// Begin a handshake.
    pub(super) fn new(purpose: Purpose, from: Rank, to: Rank) -> io::Result<Self> {
        Ok(Self { hello: Hello::new(purpose, from, to, 0)?.emit() })
    }

    pub(super) const fn hello(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    /// Check the peer's answer, and return the proof that this rank sends.
    pub(super) fn prove(
        &self,
        secret: &JobSecret,
        answer: &[u8; ANSWER_BYTES],
    ) -> Result<[u8; PROOF_BYTES], AnswerError> {
        let (signed, mac) = answer.split_at(ANSWER_BYTES - PROOF_BYTES);
        let to = Rank(u32::from_le_bytes(array_at(&self.hello, 12)));
        let expected = answer_mac(secret, to, &self.hello, signed);
        expected.verify_slice(mac).map_err(|_| AnswerError::Unproven)?;
        check_head(&array_at(answer, 0))?;
        Ok(proof(secret, &self.hello, answer).finalize().into_bytes().into())
    }
}

/// Check the verdict of a peer that has proved itself.
pub(super) fn check_head(head: &[u8; VERDICT_BYTES]) -> Result<(), AnswerError> {
    if head[0..4] != ANSWER_MAGIC {
        return Err(AnswerError::Unproven);
    }
    match u16::from_le_bytes(array_at(head, 6)) {
        0 => Ok(()),
        1 => Err(AnswerError::Refused(Refusal::Version)),
        2 => Err(AnswerError::Refused(Refusal::Secret)),
        _ => Err(AnswerError::Refused(Refusal::Rank)),
    }
}

/// Return the verdict of an accepting rank.
pub(super) fn verdict(refusal: Option<Refusal>) -> [u8; VERDICT_BYTES] {
    let code: u16 = match refusal {
        None => 0,
        Some(Refusal::Version) => 1,
        Some(Refusal::Secret) => 2,
        Some(Refusal::Rank) => 3,
    };
    let mut bytes = [0; VERDICT_BYTES];
    bytes[0..4].copy_from_slice(&ANSWER_MAGIC);
    bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
    bytes[6..8].copy_from_slice(&code.to_le_bytes());
    bytes
}

/// The accepting rank's side of a handshake: it has answered a hello.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    hello: [u8; HELLO_BYTES],
    bytes: [u8; ANSWER_BYTES],
}

impl Answer {
    /// Answer a hello as rank `own`, to go on or to refuse.
    pub(super) fn new(
        secret: &JobSecret,
        own: Rank,
        hello: &[u8; HELLO_BYTES],
        refusal: Option<Refusal>,
    ) -> io::Result<Self> {
        let nonce: [u8; ANSWER_BYTES - PROOF_BYTES - VERDICT_BYTES] = secure::random()?;
        let mut bytes = [0; ANSWER_BYTES];
        let (signed, mac) = bytes.split_at_mut(ANSWER_BYTES - PROOF_BYTES);
        signed[..VERDICT_BYTES].copy_from_slice(&verdict(refusal));
        signed[VERDICT_BYTES..].copy_from_slice(&nonce);
        mac.copy_from_slice(&answer_mac(secret, own, hello, signed).finalize().into_bytes());
        Ok(Self { hello: *hello, bytes })
    }

    pub(super) const fn bytes(&self) -> &[u8; ANSWER_BYTES] {
        &self.bytes
    }

    /// Return whether the dialling rank knows the secret.
    pub(super) fn is_proven(&self, secret: &JobSecret, by: &[u8; PROOF_BYTES]) -> bool {
        proof(secret, &self.hello, &self.bytes).verify_slice(by).is_ok()
    }
}

fn answer_mac(secret: &JobSecret, own: Rank, hello: &[u8; HELLO_BYTES], signed: &[u8]) -> Hmac<Sha256> {
    secret.mac(ACCEPTING).chain_update(own.0.to_le_bytes()).chain_update(hello).chain_update(signed)
}

fn proof(secret: &JobSecret, hello: &[u8; HELLO_BYTES], answer: &[u8; ANSWER_BYTES]) -> Hmac<Sha256> {
    secret.mac(DIALLING).chain_update(hello).chain_update(answer)
}

/// Return what a one-shot connection carries.
pub(super) fn one_shot(secret: &JobSecret, hello: &Hello, frame: &[u8]) -> Vec<u8> {
    let hello = hello.emit();
    let mac = secret.mac(ONE_SHOT).chain_update(hello).chain_update(frame).finalize().into_bytes();
    [&hello, frame, &mac].concat()
}

/// Return whether a rank that knows the secret sent this hello and this frame.
pub(super) fn is_one_shot_proven(secret: &JobSecret, hello_and_frame: &[u8], mac: &[u8; PROOF_BYTES]) -> bool {
    secret.mac(ONE_SHOT).chain_update(hello_and_frame).verify_slice(mac).is_ok()
}

/// Return the name of a rank's socket for shared memory, in the abstract namespace. Only the job's ranks can compute
/// it. `address` is that of its listener.
pub(super) fn shared_name(secret: &JobSecret, rank: Rank, address: SocketAddr) -> String {
    let place = format!("{} {address}", rank.0);
    let mac = secret.mac(SHARED_NAME).chain_update(place).finalize().into_bytes();
    mac[..8].iter().fold(String::from("sumac-rank-"), |name, byte| name + &format!("{byte:02x}"))
}

/// Return the key with which rank `from` hands `to` memory for connections of this purpose.
pub(super) fn shared_key(secret: &JobSecret, purpose: Purpose, from: Rank, to: Rank) -> u64 {
    let hello = Hello { version: VERSION, purpose, from, to, number: 0, nonce: [0; 32] };
    let mac = secret.mac(SHARED_KEY).chain_update(hello.emit()).finalize().into_bytes();
    u64::from_le_bytes(std::array::from_fn(|index| mac[index]))
}

/// Counts refused connections. So that a flood of them does not flood the log, it logs the first, second, fourth, ...
#[derive(Debug, Default)]
pub(super) struct RefusalCount(u64);

impl RefusalCount {
    pub(super) fn note(&mut self, own: Rank, why: &str) {
        self.0 += 1;
        if self.0.is_power_of_two() {
            crate::log::info!(rank = %own, refused = self.0, why, "closed connections that did not prove to be a rank's");
        }
    }

    pub(super) const fn count(&self) -> u64 {
        self.0
    }
}

/// Copy a field; callers pass constant offsets inside a message of fixed size.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

#[cfg(test)]
pub(super) mod tests;
