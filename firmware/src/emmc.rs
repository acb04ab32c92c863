//! The format of a boot stream in an eMMC boot partition: the stream is split into segments, which the card's boot ROM
//! copies to its boot FIFO.
//!
//! ```text
//! partition := word(0) segment*          all words are little-endian u64
//! segment   := word data                 data: a multiple of 8 bytes, at most 2^20 - 8
//! word      := is_end << 63 | channel << 45 | (address & 0xfff8) << 29 | ((len + 8) >> 3 & 0x1ffff)
//! ```
//!
//! The format is that of Mellanox/mlxbf-bootctl: channel 1, address 0x408 (BOOT_FIFO_DATA). A segment of maximum length
//! has 0 in its length field. Bytes after the last segment are ignored.
//!
//! Invariants: both directions hold at most one segment in memory; the reader uses no word before it is checked.

use std::io::{self, Read, Write};
use thiserror::Error;

/// The maximum length of a segment's data in bytes.
pub const SEGMENT_MAX_BYTES: usize = (1 << 20) - 8;
/// The maximum length of a stream that `mlxbf-bootctl` writes, in bytes; the partition may be smaller.
pub const STREAM_MAX_BYTES: u64 = 20 << 20;
/// The first word of a partition.
pub const FIRST_WORD: [u8; 8] = [0; 8];

const IS_END: u64 = 1 << 63;
/// Channel 1, address of BOOT_FIFO_DATA.
const DESTINATION: u64 = 1 << 45 | 0x0408 << 29;
const LENGTH_MASK: u64 = 0x1_ffff;

/// Why a stream cannot be written to a partition.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EmmcError {
    /// The stream exceeds the partition.
    #[error(
        "the stream has {len_bytes} bytes, {needed} in segments, but the limit is {max}: leave images out (`--for`, `--drop`)"
    )]
    TooLong {
        /// The length of the stream in bytes.
        len_bytes: u64,
        /// Its length with segment words, in bytes.
        needed: u64,
        /// The limit, in bytes.
        max: u64,
    },
    /// The length is not a multiple of 8.
    #[error("the stream has {0} bytes, not a multiple of 8: it is not a boot stream")]
    Unaligned(u64),
    /// Reading or writing failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Return the length of a stream in the partition's format, in bytes.
pub const fn partition_len_bytes(stream_len_bytes: u64) -> u64 {
    8 + stream_len_bytes + 8 * stream_len_bytes.div_ceil(SEGMENT_MAX_BYTES as u64)
}

/// Write a stream of `len_bytes` bytes in the partition's format, using at most `max_bytes`.
///
/// # Errors
/// The stream does not fit or is not aligned, and nothing is written; or reading or writing failed.
pub fn write(mut stream: impl Read, len_bytes: u64, max_bytes: u64, out: &mut impl Write) -> Result<(), EmmcError> {
    let (needed, max) = (partition_len_bytes(len_bytes), max_bytes.min(STREAM_MAX_BYTES));
    if needed > max {
        return Err(EmmcError::TooLong { len_bytes, needed, max });
    }
    if !len_bytes.is_multiple_of(8) {
        return Err(EmmcError::Unaligned(len_bytes));
    }
    out.write_all(&FIRST_WORD)?;
    let mut buffer = vec![0; SEGMENT_MAX_BYTES];
    let mut left = len_bytes;
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        stream.read_exact(&mut buffer[..len])?;
        left -= len as u64;
        let end = if left == 0 { IS_END } else { 0 };
        let word = end | DESTINATION | ((len as u64 + 8) >> 3 & LENGTH_MASK);
        out.write_all(&word.to_le_bytes())?;
        out.write_all(&buffer[..len])?;
    }
    Ok(())
}

/// Reads a stream from its segments.
#[derive(Debug)]
pub struct Reader<R> {
    inner: R,
    /// Unread bytes of the current segment.
    left: usize,
    is_last: bool,
    /// The offset in `inner`, for messages.
    offset: u64,
}

impl<R: Read> Reader<R> {
    /// Read a partition after its first word.
    pub fn after_first_word(inner: R) -> Self {
        Self { inner, left: 0, is_last: false, offset: FIRST_WORD.len() as u64 }
    }

    fn next_segment(&mut self) -> io::Result<()> {
        let mut word = [0; 8];
        self.inner.read_exact(&mut word)?;
        let (word, at) = (u64::from_le_bytes(word), self.offset);
        self.offset += 8;
        if word & !(IS_END | LENGTH_MASK) != DESTINATION {
            let why = format!("partition offset {at:#x}: {word:#018x} is not a segment word of an eMMC boot partition");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        self.is_last = word & IS_END != 0;
        self.left = match (word & LENGTH_MASK) as usize {
            0 => SEGMENT_MAX_BYTES,
            words => (words - 1) * 8,
        };
        Ok(())
    }
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        while self.left == 0 {
            if self.is_last {
                return Ok(0);
            }
            self.next_segment()?;
        }
        let len = buffer.len().min(self.left);
        let got = self.inner.read(&mut buffer[..len])?;
        if got == 0 {
            let why = format!("partition offset {:#x}: ends within a segment", self.offset);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
        }
        self.left -= got;
        self.offset += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn partition(stream: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        write(stream, stream.len() as u64, u64::MAX, &mut out).expect("fits");
        out
    }

    fn stream(partition: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        Reader::after_first_word(&partition[8..]).read_to_end(&mut out).map(|_| out)
    }

    #[test]
    fn reference_stream_gives_the_reference_word() {
        let out = partition(&[7; 1064]);
        assert_eq!(out.len(), 1080);
        assert_eq!(out[..8], FIRST_WORD);
        assert_eq!(out[8..16], 0x8000_2081_0000_0086_u64.to_le_bytes());
    }

    #[test]
    fn segment_of_maximum_length_has_length_field_0() {
        for (len, words) in [(SEGMENT_MAX_BYTES, 1), (SEGMENT_MAX_BYTES + 8, 2)] {
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let out = partition(&bytes);
            assert_eq!(out.len(), 8 + len + 8 * words);
            assert_eq!(out.len() as u64, partition_len_bytes(len as u64));
            assert_eq!(out[8..11], [0, 0, 0]);
            assert_eq!(stream(&out).expect("reads"), bytes);
        }
    }

    #[test]
    fn overlong_or_damaged_partition_is_refused() {
        let mut out = Vec::new();
        let long = write(io::empty(), STREAM_MAX_BYTES, u64::MAX, &mut out);
        assert!(matches!(long, Err(EmmcError::TooLong { max: STREAM_MAX_BYTES, .. })));
        assert!(matches!(write(&[0; 64][..], 64, 64, &mut out), Err(EmmcError::TooLong { needed: 80, .. })));
        assert!(matches!(write(&[0; 9][..], 9, 64, &mut out), Err(EmmcError::Unaligned(9))));
        assert!(out.is_empty());
        let good = partition(&[7; 64]);
        assert!(stream(&good[..40]).is_err(), "ends within a segment");
        assert!(stream(&good[..8]).is_err(), "has no end");
        let mut bad = good;
        bad[12] ^= 1;
        assert!(stream(&bad).expect_err("another channel").to_string().contains("offset 0x8"));
    }

    proptest! {
        #[test]
        fn arbitrary_partition_does_not_panic(bytes: Vec<u8>) {
            let _ = stream(&[&FIRST_WORD[..], &bytes].concat());
        }
    }
}
