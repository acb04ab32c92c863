//! An image's header: parses and emits its 24 bytes, independent of the rest of the stream.

use super::error::Fault;
use super::id::{ImageId, ImageName, VERSION_MAX};

/// The length of a header in bytes.
pub const HEADER_LEN_BYTES: usize = 24;

/// The first four bytes, `Bf\x02\x13`, as a little-endian number.
const MAGIC: u32 = 0x1302_6642;
const MAJOR: u8 = 1;
/// The version that is written; readers accept all up to it.
pub(super) const MINOR: u8 = 2;
const HEADER_WORDS: u8 = 3;

/// The variable fields of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Id and version (`image_id`, `cur_img_ver`).
    pub name: ImageName,
    /// Minor version of the format, 0 to 2.
    pub minor: u8,
    /// Version of the next image with the same id, 0 if there is none (`next_img_ver`).
    pub next_version: u8,
    /// Length of the data, in bytes, without padding.
    pub len_bytes: u32,
    /// CRC-32 of data and padding.
    pub crc: u32,
    /// Bit n: an image with id n follows.
    pub following: u64,
}

impl Header {
    /// Parse a header.
    ///
    /// # Errors
    /// The first field with a value that no reader accepts; fields that depend on other images are not checked.
    pub fn parse(bytes: &[u8; HEADER_LEN_BYTES]) -> Result<Self, Fault> {
        let [w0, w1, w2] = [word(bytes, 0), word(bytes, 8), word(bytes, 16)];
        let nibble = |shift: u32| (w0 >> shift) as u8 & 0xf;
        if w0 as u32 != MAGIC {
            return Err(Fault::Magic { found: w0 as u32 });
        }
        if nibble(32) != MAJOR {
            return Err(Fault::Major { found: nibble(32) });
        }
        if nibble(36) > MINOR {
            return Err(Fault::Minor { found: nibble(36) });
        }
        if nibble(40) != 0 {
            return Err(Fault::Reserved { found: nibble(40) });
        }
        if nibble(48) > VERSION_MAX {
            return Err(Fault::Version { found: nibble(48) });
        }
        if nibble(52) != HEADER_WORDS {
            return Err(Fault::HeaderWords { found: nibble(52) });
        }
        Ok(Self {
            name: ImageName::new(ImageId((w0 >> 56) as u8), nibble(48)),
            minor: nibble(36),
            next_version: nibble(44),
            len_bytes: w1 as u32,
            crc: (w1 >> 32) as u32,
            following: w2,
        })
    }

    /// Emit the header, with its minor version.
    pub fn emit(&self) -> [u8; HEADER_LEN_BYTES] {
        let w0 = u64::from(MAGIC)
            | u64::from(MAJOR) << 32
            | u64::from(self.minor & 0xf) << 36
            | u64::from(self.next_version & 0xf) << 44
            | u64::from(self.name.version & 0xf) << 48
            | u64::from(HEADER_WORDS) << 52
            | u64::from(self.name.id.0) << 56;
        let w1 = u64::from(self.len_bytes) | u64::from(self.crc) << 32;
        let mut bytes = [0; HEADER_LEN_BYTES];
        for (to, from) in bytes.chunks_exact_mut(8).zip([w0, w1, self.following]) {
            to.copy_from_slice(&from.to_le_bytes());
        }
        bytes
    }
}

fn word(bytes: &[u8; HEADER_LEN_BYTES], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}
