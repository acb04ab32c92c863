//! The record of a slot's payload: one block with a checksum.
//!
//! ```text
//!  0 magic "SUMACSLT"    8 format 1 u32   12 state u8   13 tries u8   14 version length u8   15 0
//! 16 count u64          24 sequence u64   32 epoch u64  40 length u64 (bytes)
//! 48 SHA-256            80 version, 44 bytes            124 CRC-32 of the 124 bytes before
//! ```
//!
//! All numbers are little-endian. Any other block is not a record: torn, never written, or of a later format.

use std::fmt;

/// The length of a record in bytes; the rest of its block is zero.
pub(super) const RECORD_LEN_BYTES: usize = 128;
/// The maximum length of a version in bytes.
pub(super) const VERSION_MAX_BYTES: usize = 44;

const MAGIC: &[u8; 8] = b"SUMACSLT";
const FORMAT: u32 = 1;

/// The state of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It is being written, or was abandoned.
    Empty,
    /// It is complete, and may be started this many more times before it has to report that it is healthy.
    Trial {
        /// The remaining number of starts.
        tries_left: u8,
    },
    /// It has reported that it is healthy.
    Confirmed,
}

/// The record of a slot's payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its state.
    pub state: State,
    /// The number of this record in its slot: of two records, the higher is the newer.
    pub(super) count: u64,
    /// The number of the update across both slots: of two payloads, the higher is the newer.
    pub sequence: u64,
    /// The epoch of the manifest; a lower one is refused.
    pub epoch: u64,
    /// The length of the payload in bytes.
    pub len_bytes: u64,
    /// SHA-256 of the payload.
    pub sha256: [u8; 32],
    /// The version, for display.
    pub version: String,
}

impl Record {
    /// Return whether it may be started.
    pub(super) fn may_start(&self) -> bool {
        match self.state {
            State::Empty | State::Trial { tries_left: 0 } => false,
            State::Trial { .. } | State::Confirmed => true,
        }
    }

    /// Parse a block.
    pub(super) fn parse(block: &[u8]) -> Option<Self> {
        let bytes = block.get(..RECORD_LEN_BYTES)?;
        let (bytes, crc) = bytes.split_at(RECORD_LEN_BYTES - 4);
        if crc32(bytes).to_le_bytes() != crc || !bytes.starts_with(MAGIC) || bytes[8..12] != FORMAT.to_le_bytes() {
            return None;
        }
        let state = match (bytes[12], bytes[13]) {
            (0, 0) => State::Empty,
            (1, tries_left) => State::Trial { tries_left },
            (2, 0) => State::Confirmed,
            _ => return None,
        };
        let number = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let version = bytes[80..].get(..usize::from(bytes[14]))?;
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(&bytes[48..80]);
        Some(Self {
            state,
            count: number(16),
            sequence: number(24),
            epoch: number(32),
            len_bytes: number(40),
            sha256,
            version: String::from_utf8(version.to_vec()).ok()?,
        })
    }

    /// Write it to a zeroed block; an overlong version is truncated.
    pub(super) fn emit(&self, block: &mut [u8]) {
        let (state, tries) = match self.state {
            State::Empty => (0, 0),
            State::Trial { tries_left } => (1, tries_left),
            State::Confirmed => (2, 0),
        };
        let version = self.version.as_bytes();
        let version = &version[..version.len().min(VERSION_MAX_BYTES)];
        block[..8].copy_from_slice(MAGIC);
        block[8..12].copy_from_slice(&FORMAT.to_le_bytes());
        block[12..15].copy_from_slice(&[state, tries, version.len() as u8]);
        let numbers = [self.count, self.sequence, self.epoch, self.len_bytes];
        for (to, number) in block[16..48].chunks_exact_mut(8).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        block[48..80].copy_from_slice(&self.sha256);
        block[80..80 + version.len()].copy_from_slice(version);
        let crc = crc32(&block[..RECORD_LEN_BYTES - 4]);
        block[RECORD_LEN_BYTES - 4..RECORD_LEN_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, epoch, .. } = self;
        match self.state {
            State::Empty => f.write_str("empty"),
            State::Trial { tries_left } => write!(f, "{version} (epoch {epoch}), on trial, {tries_left} tries left"),
            State::Confirmed => write!(f, "{version} (epoch {epoch}), confirmed"),
        }
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    // The library returns every width as u64.
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(state: State) -> Record {
        let version = "1.2.3-rc.4".into();
        Record { state, count: 5, sequence: u64::MAX, epoch: 7, len_bytes: 1 << 40, sha256: [9; 32], version }
    }

    #[test]
    fn record_round_trips_and_any_flipped_bit_is_detected() {
        for state in [State::Empty, State::Trial { tries_left: 3 }, State::Confirmed] {
            let mut block = vec![0; 512];
            record(state).emit(&mut block);
            assert_eq!(Record::parse(&block), Some(record(state)));
            for bit in 0..RECORD_LEN_BYTES * 8 {
                let mut bad = block.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Record::parse(&bad), None, "bit {bit}");
            }
        }
        assert_eq!(Record::parse(&[0; 512]), None);
        assert_eq!(Record::parse(&[0xff; 100]), None);
    }
}
