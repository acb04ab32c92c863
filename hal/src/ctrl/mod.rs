//! The control plane: postcard messages in checksummed frames, over any byte stream or datagram.
//!
//! | offset | field | type | meaning |
//! |---|---|---|---|
//! | 0 | magic | u16 | `"Sc"`, 0x6353 |
//! | 2 | version | u16 | [`VERSION`] of the messages inside |
//! | 4 | len | u32 | bits 0..31: bytes of the message in this frame, at most [`MAX_MESSAGE_LEN`]; bit 31: the message continues in the next frame |
//! | 8 | crc | u32 | CRC-32C of bytes 0..8 followed by the CRC-32C of the message, little-endian |
//! | 12 | message | | postcard |
//!
//! A message of more than [`MAX_MESSAGE_LEN`] bytes is split into fragments, one per frame. Only byte streams between
//! hosted programs carry fragments ([`FrameBuffer`]), up to the reader's limit. A device refuses them.
//!
//! A controller and a device exchange [`Request`] and [`Response`]; other peers put their own messages in the same
//! frames. The device connects, sends a [`Hello`], and then answers requests in order.
//!
//! With keys, the frames travel inside a secure channel (module `secure`, feature `secure`). Without keys, control
//! connections are not authenticated (PROTOCOL 10): whoever can reach a control port can command it, so such ports
//! listen on loopback only.

mod messages;
mod refusal;
#[cfg(feature = "secure")]
pub mod secure;
pub mod shards;
mod stats;
#[cfg(feature = "std")]
mod stream;
mod term;
#[cfg(test)]
mod tests;
pub mod update;

pub use messages::{
    Announce, AttachPoint, ChildMask, DeviceCapabilities, DeviceUser, Envelope, GroupConfig, Hello, JobTicket,
    MAX_NAME_LEN, Name, NodeParent, Order, Rejection, Request, Response, SharedLink, TimersConfig, TreeConfig,
};
pub use refusal::{Refusal, ZeroCopyRefusal};
pub use stats::{Counters, DropReason, StackUsage, Stats};
#[cfg(feature = "std")]
pub use stream::{FrameBuffer, FrameReader, StreamError, encode_frames, fragment, send};
pub use term::{TERM_MAX, TermClaim, TermGuard};

use crate::crc::crc32c;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// The version of the messages. It increases with every change of their encoding.
pub const VERSION: u16 = 19;

/// The length of a frame header, in bytes.
pub const FRAME_HEADER_LEN: usize = 12;

/// The longest message or fragment in one frame, in bytes.
pub const MAX_MESSAGE_LEN: usize = 64 * 1024;

/// Flag in the header's length field: the message continues in the next frame.
const MORE: u32 = 1 << 31;

const MAGIC: u16 = u16::from_le_bytes(*b"Sc");

/// Why bytes are not a valid frame, or why a message cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Not a control frame.
    #[error("magic is {0:#06x}, expected 0x6353: the peer does not speak Sumac's control protocol")]
    Magic(u16),
    /// The peer uses another version of the messages.
    #[error("the peer speaks control version {0} and this build version {VERSION}; use the same release on both sides")]
    Version(u16),
    /// Longer than the limit.
    #[error("a message of {len} bytes is over the limit")]
    TooLong {
        /// The message's length, by the header.
        len: usize,
    },
    /// A fragment where only whole messages are accepted.
    #[error("the frame is a fragment of a message; only whole messages are accepted here")]
    Fragment,
    /// The frame is damaged.
    #[error("checksum is {found:#010x}, expected {computed:#010x}: the frame is damaged")]
    Checksum {
        /// In the header.
        found: u32,
        /// Computed from the bytes.
        computed: u32,
    },
    /// The frame does not hold a message of the expected type.
    #[error("the frame does not hold a message of the expected type")]
    Message,
    /// The caller's buffer is too small for the message.
    #[error("the buffer of {len} bytes is too small for the frame")]
    Buffer {
        /// The buffer's length.
        len: usize,
    },
}

/// Write `message` as a frame at the start of `buffer`, and return the frame's bytes.
///
/// # Errors
/// [`FrameError::Buffer`] or [`FrameError::TooLong`].
pub fn encode<'b, M: Serialize>(message: &M, buffer: &'b mut [u8]) -> Result<&'b [u8], FrameError> {
    let len = buffer.len();
    let body = buffer.get_mut(FRAME_HEADER_LEN..).ok_or(FrameError::Buffer { len })?;
    let body_len = postcard::to_slice(message, body).map_err(|_| FrameError::Buffer { len })?.len();
    if body_len > MAX_MESSAGE_LEN {
        return Err(FrameError::TooLong { len: body_len });
    }
    let frame = &mut buffer[..FRAME_HEADER_LEN + body_len];
    seal(frame, 0);
    Ok(frame)
}

/// Write the header of a frame whose message is already in place.
fn seal(frame: &mut [u8], more: u32) {
    let len = (frame.len() - FRAME_HEADER_LEN) as u32 | more;
    frame[0..2].copy_from_slice(&MAGIC.to_le_bytes());
    frame[2..4].copy_from_slice(&VERSION.to_le_bytes());
    frame[4..8].copy_from_slice(&len.to_le_bytes());
    let crc = frame_crc(frame);
    frame[8..12].copy_from_slice(&crc.to_le_bytes());
}

/// Return the length of the frame at the start of `bytes`, or `None` while its header is incomplete.
///
/// # Errors
/// [`FrameError`] if the bytes are not a frame of this version, or are a fragment. A stream cannot recover from that.
pub fn frame_len(bytes: &[u8]) -> Result<Option<usize>, FrameError> {
    match read_header(bytes)? {
        Some((_, true)) => Err(FrameError::Fragment),
        header => Ok(header.map(|(len, _)| len)),
    }
}

/// Return the length of the frame at the start of `bytes`, and whether its message continues in the next frame.
fn read_header(bytes: &[u8]) -> Result<Option<(usize, bool)>, FrameError> {
    let Some(header) = bytes.get(..FRAME_HEADER_LEN) else { return Ok(None) };
    let magic = u16::from_le_bytes([header[0], header[1]]);
    if magic != MAGIC {
        return Err(FrameError::Magic(magic));
    }
    let version = u16::from_le_bytes([header[2], header[3]]);
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let word = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
    let len = (word & !MORE) as usize;
    if len > MAX_MESSAGE_LEN {
        return Err(FrameError::TooLong { len });
    }
    Ok(Some((FRAME_HEADER_LEN + len, word & MORE != 0)))
}

/// Decode the frame at the start of `bytes`. Returns the message and the frame's length, or `Ok(None)` if more bytes
/// are needed.
///
/// # Errors
/// [`FrameError`] if the bytes are not a frame, are damaged, or hold a message of another type.
pub fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<Option<(M, usize)>, FrameError> {
    let Some(len) = frame_len(bytes)? else { return Ok(None) };
    let Some(frame) = bytes.get(..len) else { return Ok(None) };
    check_crc(frame)?;
    let message = postcard::from_bytes(&frame[FRAME_HEADER_LEN..]).map_err(|_| FrameError::Message)?;
    Ok(Some((message, len)))
}

fn check_crc(frame: &[u8]) -> Result<(), FrameError> {
    let found = u32::from_le_bytes([frame[8], frame[9], frame[10], frame[11]]);
    let computed = frame_crc(frame);
    if found == computed { Ok(()) } else { Err(FrameError::Checksum { found, computed }) }
}

/// Two levels, as in the data plane: over the header before the checksum, followed by the message's own checksum.
fn frame_crc(frame: &[u8]) -> u32 {
    let mut bytes = [0; FRAME_HEADER_LEN];
    bytes[..8].copy_from_slice(&frame[..8]);
    bytes[8..].copy_from_slice(&crc32c(&frame[FRAME_HEADER_LEN..]).to_le_bytes());
    crc32c(&bytes)
}
