//! The format of messages on a link, little-endian: a 16-byte head, and a body that depends on the kind.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind: 1 entries of a queue, 2 memory, 3 head only |
//! | 1 | kind 1: the queue, 0 admin or 1 data; else 0 |
//! | 2..4 | kind 1: the number of entries; else 0 |
//! | 4..8 | counted messages that this side has consumed, modulo 2^32 |
//! | 8..12 | heartbeat: this side's turns, modulo 2^32 |
//! | 12 | flags: 1 requests a heartbeat |
//! | 13..16 | 0 |
//! | 16.. | entries of the function's queues; or handle (8), address (8), length (8), key (4), generation (4), 1 if results land there (4), 0 (4) |
//!
//! Messages with a body are *counted*: a side may have at most [`CREDITS`](super::CREDITS) of them outstanding.
//! Messages with only a head are not counted.
//!
//! Invariant: a message whose length does not fit its kind, or with reserved bits set, is refused.

use super::region::RemoteRegion;
use thiserror::Error;

/// The maximum length of a message: about 2 KiB of entries, in whole cache lines.
pub const MESSAGE_LEN_BYTES: usize = 2112;

pub(super) const HEAD_LEN_BYTES: usize = 16;

/// The maximum length of the entries in a message.
pub(super) const ENTRIES_LEN_BYTES: usize = 2048;

const MEMORY_LEN_BYTES: usize = 40;
const ENTRIES: u8 = 1;
const MEMORY: u8 = 2;
const NOTHING: u8 = 3;
const REQUESTS_HEARTBEAT: u8 = 1;

/// Memory that a rank hands over, as it hands over a file descriptor over shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// The handle by which it is registered.
    pub handle: u64,
    /// Its address, length and key.
    pub region: RemoteRegion,
    /// Whether it is a landing area, where results are written and announced.
    pub lands: bool,
}

/// Malformed message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("malformed message of {len_bytes} bytes, kind {kind}")]
pub struct MessageError {
    /// Its length in bytes.
    pub len_bytes: usize,
    /// Its first byte; 0 if it is empty.
    pub kind: u8,
}

/// The head of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) body: Body,
    pub(super) consumed: u32,
    pub(super) heartbeat: u32,
    pub(super) requests_heartbeat: bool,
}

/// The body of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    Entries { queue: u8, count: u16 },
    Memory,
    Nothing,
}

impl Head {
    pub(super) fn emit(&self, into: &mut [u8]) {
        let (kind, queue, count) = match self.body {
            Body::Entries { queue, count } => (ENTRIES, queue, count),
            Body::Memory => (MEMORY, 0, 0),
            Body::Nothing => (NOTHING, 0, 0),
        };
        into[..HEAD_LEN_BYTES].fill(0);
        (into[0], into[1]) = (kind, queue);
        into[2..4].copy_from_slice(&count.to_le_bytes());
        into[4..8].copy_from_slice(&self.consumed.to_le_bytes());
        into[8..12].copy_from_slice(&self.heartbeat.to_le_bytes());
        into[12] = if self.requests_heartbeat { REQUESTS_HEARTBEAT } else { 0 };
    }

    /// Parse the head of a message whose entries are `entry_len_bytes` long.
    pub(super) fn parse(message: &[u8], entry_len_bytes: usize) -> Result<Self, MessageError> {
        let malformed = MessageError { len_bytes: message.len(), kind: message.first().copied().unwrap_or(0) };
        let (head, rest) = message.split_first_chunk::<HEAD_LEN_BYTES>().ok_or(malformed)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (queue, count) = (head[1], u16::from_le_bytes([head[2], head[3]]));
        let body = match head[0] {
            ENTRIES if queue < 2 && count > 0 => Body::Entries { queue, count },
            MEMORY => Body::Memory,
            NOTHING => Body::Nothing,
            _ => return Err(malformed),
        };
        let len_bytes = match body {
            Body::Entries { count, .. } => usize::from(count) * entry_len_bytes,
            Body::Memory => MEMORY_LEN_BYTES,
            Body::Nothing => 0,
        };
        let parsed =
            Self { body, consumed: word(4), heartbeat: word(8), requests_heartbeat: head[12] == REQUESTS_HEARTBEAT };
        let mut again = [0; HEAD_LEN_BYTES];
        parsed.emit(&mut again);
        if again == *head && rest.len() == len_bytes && len_bytes <= ENTRIES_LEN_BYTES {
            Ok(parsed)
        } else {
            Err(malformed)
        }
    }
}

impl Memory {
    /// Write it behind the head; returns the length of the message.
    pub(super) fn emit(&self, into: &mut [u8]) -> usize {
        let at = &mut into[HEAD_LEN_BYTES..HEAD_LEN_BYTES + MEMORY_LEN_BYTES];
        at[0..8].copy_from_slice(&self.handle.to_le_bytes());
        at[8..16].copy_from_slice(&self.region.addr.to_le_bytes());
        at[16..24].copy_from_slice(&self.region.len_bytes.to_le_bytes());
        at[24..28].copy_from_slice(&self.region.rkey.to_le_bytes());
        at[28..32].copy_from_slice(&self.region.generation.to_le_bytes());
        at[32..40].copy_from_slice(&u64::from(self.lands).to_le_bytes());
        HEAD_LEN_BYTES + MEMORY_LEN_BYTES
    }

    /// Parse it from a message that [`Head::parse`] has accepted.
    pub(super) fn parse(message: &[u8]) -> Result<Self, MessageError> {
        let malformed = MessageError { len_bytes: message.len(), kind: MEMORY };
        let bytes: &[u8; MEMORY_LEN_BYTES] = message[HEAD_LEN_BYTES..].first_chunk().ok_or(malformed)?;
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|nth| bytes[at + nth]));
        let (keys, lands) = (long(24), long(32));
        let region =
            RemoteRegion { addr: long(8), len_bytes: long(16), rkey: keys as u32, generation: (keys >> 32) as u32 };
        if lands > 1 { Err(malformed) } else { Ok(Self { handle: long(0), region, lands: lands == 1 }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_emit_golden_bytes() {
        let mut bytes = [0xff; 64];
        let body = Body::Entries { queue: 1, count: 2 };
        Head { body, consumed: 0x0403_0201, heartbeat: 0x0807_0605, requests_heartbeat: true }.emit(&mut bytes);
        assert_eq!(bytes[..16], *b"\x01\x01\x02\0\x01\x02\x03\x04\x05\x06\x07\x08\x01\0\0\0");
        let region = RemoteRegion { addr: 0x1112, len_bytes: 0x2122, rkey: 0x3132, generation: 0x4142 };
        let memory = Memory { handle: 0x0102, region, lands: true };
        assert_eq!(memory.emit(&mut bytes), 56);
        assert_eq!(
            bytes[16..56],
            *b"\x02\x01\0\0\0\0\0\0\x12\x11\0\0\0\0\0\0\x22\x21\0\0\0\0\0\0\x32\x31\0\0\x42\x41\0\0\x01\0\0\0\0\0\0\0"
        );
        assert_eq!(Memory::parse(&bytes[..56]), Ok(memory));
    }

    proptest! {
        /// Parsing never panics, and what parses emits the same bytes.
        #[test]
        fn arbitrary_bytes_parse_without_panic_and_round_trip(bytes in prop::collection::vec(any::<u8>(), 0..80), kind in 0_u8..5) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() { *first = kind; }
            if let Ok(head) = Head::parse(&bytes, 32) {
                let mut again = [0; HEAD_LEN_BYTES];
                head.emit(&mut again);
                prop_assert_eq!(&again[..], &bytes[..HEAD_LEN_BYTES]);
                if head.body == Body::Memory { let _ = Memory::parse(&bytes); }
            }
        }
    }
}
