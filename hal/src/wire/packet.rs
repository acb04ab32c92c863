//! [`Packet`]: a packet's fields, read and written in place.

use super::{Flags, HEADER_LEN, MAGIC, SHORT_HEADER_LEN, VERSION, crc32c};
use crate::crc::{ShortWords, crc32c_header, crc32c_packet};
use core::ops::Deref;
use thiserror::Error;

/// Why bytes are not a valid packet of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// Shorter than a header.
    #[error("packet of {len} bytes is shorter than its header of {header_len} bytes")]
    Truncated {
        /// The buffer's length in bytes.
        len: usize,
        /// The length of the header, as far as the packet tells.
        header_len: usize,
    },
    /// Not a Sumac packet.
    #[error("magic is {found:#04x}, expected 0xc5")]
    Magic {
        /// The packet's magic.
        found: u8,
    },
    /// A packet of another version.
    #[error("header version is {found}; this build supports version 2: update the older one of both")]
    Version {
        /// The packet's version.
        found: u8,
    },
    /// The packet is damaged.
    #[error("checksum is {found:#010x}, expected {computed:#010x}: the packet is damaged")]
    Checksum {
        /// In the header.
        found: u32,
        /// Computed from the bytes.
        computed: u32,
    },
    /// This version does not know a field's number.
    #[error("unknown {field} number {number}: the sender may be a newer version")]
    UnknownNumber {
        /// The name of the field.
        field: &'static str,
        /// The field's value.
        number: u8,
    },
}

/// A packet in a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet<T> {
    buffer: T,
}

/// A header as it is sent, in one of the two forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    bytes: [u8; HEADER_LEN],
    len: u8,
}

impl Deref for Header {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// The byte range of each field in the header. `wireshark/sumac.lua` repeats them, which a test compares.
pub(super) mod field {
    use core::ops::Range;

    // Both forms.
    pub(in crate::wire) const MAGIC: Range<usize> = 0..1;
    pub(in crate::wire) const VERSION: Range<usize> = 1..2;
    pub(in crate::wire) const KIND: Range<usize> = 2..3;
    pub(in crate::wire) const FLAGS: Range<usize> = 3..4;
    pub(in crate::wire) const GROUP: Range<usize> = 4..8;
    pub(in crate::wire) const EPOCH: Range<usize> = 8..12;
    pub(in crate::wire) const SIGNATURE: Range<usize> = 12..16;
    pub(in crate::wire) const SEQ: Range<usize> = 16..24;
    pub(in crate::wire) const KEY: Range<usize> = 24..32;
    pub(in crate::wire) const CHILD: Range<usize> = 32..33;
    pub(in crate::wire) const ATTEMPT: Range<usize> = 33..34;
    pub(in crate::wire) const LAG: Range<usize> = 34..36;
    pub(in crate::wire) const SLOWEST: Range<usize> = 36..38;
    pub(in crate::wire) const LATE: Range<usize> = 38..40;

    // Data in the short form, and the full form.
    pub(in crate::wire) const TOKEN: Range<usize> = 40..44;

    // Result in the short form.
    pub(in crate::wire) const SHORT_WINDOW: Range<usize> = 40..42;
    pub(in crate::wire) const SHORT_VIEW: Range<usize> = 42..43;
    #[cfg(test)]
    pub(in crate::wire) const SHORT_SPARE: Range<usize> = 43..44;

    // The short form.
    #[cfg(test)]
    pub(in crate::wire) const SHORT_CRC: Range<usize> = 44..48;

    // The full form.
    pub(in crate::wire) const COUNT: Range<usize> = 44..46;
    pub(in crate::wire) const WINDOW: Range<usize> = 46..48;
    pub(in crate::wire) const MARK: Range<usize> = 48..56;
    pub(in crate::wire) const BITS: Range<usize> = 56..64;
    pub(in crate::wire) const BITS2: Range<usize> = 64..72;
    pub(in crate::wire) const ROOT: Range<usize> = 72..76;
    pub(in crate::wire) const COLLECTIVE: Range<usize> = 76..77;
    pub(in crate::wire) const DTYPE: Range<usize> = 77..78;
    pub(in crate::wire) const OP: Range<usize> = 78..79;
    pub(in crate::wire) const REASON: Range<usize> = 79..80;
    pub(in crate::wire) const VIEW: Range<usize> = 80..82;
    #[cfg(test)]
    pub(in crate::wire) const SPARE: Range<usize> = 82..84;
    #[cfg(test)]
    pub(in crate::wire) const CRC: Range<usize> = 84..88;
}

/// Return name, offset and length of each field, for the test of the dissector: of both forms, and behind them of Data
/// and of Result in the short form, and of the full form.
#[cfg(test)]
pub(crate) fn field_ranges() -> [std::vec::Vec<(&'static str, usize, usize)>; 4] {
    fn list(fields: &[(&'static str, core::ops::Range<usize>)]) -> std::vec::Vec<(&'static str, usize, usize)> {
        fields.iter().map(|(name, range)| (*name, range.start, range.len())).collect()
    }
    [
        list(&[
            ("magic", field::MAGIC),
            ("version", field::VERSION),
            ("kind", field::KIND),
            ("flags", field::FLAGS),
            ("group", field::GROUP),
            ("epoch", field::EPOCH),
            ("signature", field::SIGNATURE),
            ("seq", field::SEQ),
            ("key", field::KEY),
            ("child", field::CHILD),
            ("attempt", field::ATTEMPT),
            ("lag", field::LAG),
            ("slowest", field::SLOWEST),
            ("late", field::LATE),
        ]),
        list(&[("token", field::TOKEN), ("crc", field::SHORT_CRC)]),
        list(&[
            ("window", field::SHORT_WINDOW),
            ("view", field::SHORT_VIEW),
            ("spare", field::SHORT_SPARE),
            ("crc", field::SHORT_CRC),
        ]),
        list(&[
            ("token", field::TOKEN),
            ("count", field::COUNT),
            ("window", field::WINDOW),
            ("mark", field::MARK),
            ("bits", field::BITS),
            ("bits2", field::BITS2),
            ("root", field::ROOT),
            ("collective", field::COLLECTIVE),
            ("dtype", field::DTYPE),
            ("op", field::OP),
            ("reason", field::REASON),
            ("view", field::VIEW),
            ("spare", field::SPARE),
            ("crc", field::CRC),
        ]),
    ]
}

/// Return the checksum of a payload for [`Repr::emit`](super::Repr::emit); 0 if it is empty.
pub fn payload_crc(payload: &[u8]) -> u32 {
    if payload.is_empty() { 0 } else { crc32c(payload) }
}

/// Return the length of a header with these flags.
pub(super) const fn header_len(flags: u8) -> usize {
    if flags & Flags::SHORT.bits() != 0 { SHORT_HEADER_LEN } else { HEADER_LEN }
}

/// Return the packet's checksum: over the header before the checksum field, followed by the payload's checksum.
#[inline]
fn packet_crc(header: &[u8], payload_crc: u32) -> u32 {
    if let Some(short) = short_words(header) {
        return crc32c_header(short, payload_crc);
    }
    let mut full = [[0; 8]; HEADER_LEN / 8];
    full.as_flattened_mut().copy_from_slice(header);
    crc32c_header(&full, payload_crc)
}

/// Return the words of a header in the short form.
#[inline]
fn short_words(header: &[u8]) -> Option<&ShortWords> {
    header.as_chunks().0.try_into().ok()
}

/// Return header, payload and the payload's checksum of a packet with a short header, if it is intact. The caller has
/// checked magic, version and form.
#[inline]
pub(super) fn check_short(packet: &[u8]) -> Result<(&[u8; SHORT_HEADER_LEN], &[u8], u32), WireError> {
    let truncated = WireError::Truncated { len: packet.len(), header_len: SHORT_HEADER_LEN };
    let (header, payload) = packet.split_first_chunk::<SHORT_HEADER_LEN>().ok_or(truncated)?;
    let words = short_words(header).ok_or(truncated)?;
    let (computed, payload_crc) = crc32c_packet(words, payload);
    let found = u32::from_le_bytes([header[44], header[45], header[46], header[47]]);
    if found != computed {
        return Err(WireError::Checksum { found, computed });
    }
    Ok((header, payload, payload_crc))
}

/// The start of every packet of version 1.
const VERSION_1_MAGIC: &[u8] = b"SUMC\x01";

impl<T: AsRef<[u8]>> Packet<T> {
    /// View a buffer as a packet, without any check.
    pub const fn new_unchecked(buffer: T) -> Self {
        Self { buffer }
    }

    /// View a buffer as a packet if it holds exactly one intact packet of this version.
    ///
    /// # Errors
    /// [`WireError`] for the first failed check of: header length, version, magic, checksum.
    pub fn new_checked(buffer: T) -> Result<Self, WireError> {
        Self::new_checked_with_crc(buffer).map(|(packet, _)| packet)
    }

    /// Like [`Packet::new_checked`], but also return the [`payload_crc`], for nodes that forward the payload.
    ///
    /// # Errors
    /// As [`Packet::new_checked`].
    pub fn new_checked_with_crc(buffer: T) -> Result<(Self, u32), WireError> {
        let packet = Self::new_unchecked(buffer);
        let (header, payload) = packet.split()?;
        let (at, payload_crc) = (header.len() - size_of::<u32>(), payload_crc(payload));
        let found = u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let computed = packet_crc(header, payload_crc);
        if found != computed {
            return Err(WireError::Checksum { found, computed });
        }
        Ok((packet, payload_crc))
    }

    /// Return header and payload, if the packet is of this version and long enough.
    pub(super) fn split(&self) -> Result<(&[u8], &[u8]), WireError> {
        let bytes = self.buffer.as_ref();
        let len = bytes.len();
        if bytes.starts_with(VERSION_1_MAGIC) {
            return Err(WireError::Version { found: 1 });
        }
        let &[magic, version, _, flags, ..] = bytes else {
            return Err(WireError::Truncated { len, header_len: SHORT_HEADER_LEN });
        };
        if magic != MAGIC {
            return Err(WireError::Magic { found: magic });
        }
        if version != VERSION {
            return Err(WireError::Version { found: version });
        }
        let header_len = header_len(flags);
        bytes.split_at_checked(header_len).ok_or(WireError::Truncated { len, header_len })
    }

    /// Return the buffer.
    pub fn into_inner(self) -> T {
        self.buffer
    }

    /// Return the payload; empty if the packet is none of this version.
    pub fn payload(&self) -> &[u8] {
        self.split().map_or(&[], |(_, payload)| payload)
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
    /// Write a header to the start of the buffer.
    pub(super) fn write(&mut self, header: &Header) {
        self.buffer.as_mut()[..header.len()].copy_from_slice(header);
    }
}

impl Header {
    /// Return a header of these fields with its checksum.
    pub(super) fn seal(mut bytes: [u8; HEADER_LEN], payload_crc: u32) -> Self {
        bytes[field::MAGIC.start] = MAGIC;
        bytes[field::VERSION.start] = VERSION;
        let len = header_len(bytes[field::FLAGS.start]);
        let crc = packet_crc(&bytes[..len], payload_crc);
        bytes[len - size_of::<u32>()..len].copy_from_slice(&crc.to_le_bytes());
        Self { bytes, len: len as u8 }
    }

    /// Return the header of these fields in the short form with its checksum.
    #[inline]
    pub(super) fn of_short(short: &[u8; SHORT_HEADER_LEN], payload_crc: u32) -> Self {
        let mut bytes = [0; HEADER_LEN];
        bytes[..SHORT_HEADER_LEN].copy_from_slice(short);
        let crc = packet_crc(short, payload_crc);
        bytes[SHORT_HEADER_LEN - size_of::<u32>()..SHORT_HEADER_LEN].copy_from_slice(&crc.to_le_bytes());
        Self { bytes, len: SHORT_HEADER_LEN as u8 }
    }
}
