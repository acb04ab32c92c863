//! What follows a boot stream into the boot FIFO, for the agent: a device's key, and the payload of a slot.
//!
//! ```text
//! tail := [key] [payload]                   each padded with zeros to words of 8 bytes
//! key  := text                              as in enrolment
//! payload := "SUMACPAY"  8 length of the manifest u32, 0 u32  16 length of the payload u64
//!            24 the stream's manifest, signed; zeros  payload; zeros
//! ```
//!
//! Numbers are little-endian. The manifest is the stream's own (`info`), which has the payload's digest, so that its
//! signature covers what the card writes.
//!
//! Reading from the FIFO returns nothing both at the end and while the host pauses. The first word decides whether
//! there is a tail at all; within a part, `wait` is asked how long to go on.
//!
//! A host may also send a payload alone, to a card that has been running for long ([`Fifo::next_payload`]).
//!
//! Invariant: lengths are checked against limits before they size anything; the payload is read in pieces.

use crate::enrolment::{self, EnrolmentError, TAIL_MAX_BYTES};
use crate::manifest::envelope::ENVELOPE_MAX_BYTES;
use crate::payload::LEN_MAX_BYTES;
use std::io::{self, Read};
use sumac_hal::ctrl::secure::Key;
use thiserror::Error;
use zeroize::Zeroizing;

const MAGIC: &[u8; 8] = b"SUMACPAY";
const HEADER_BYTES: usize = 24;
const WORD: usize = 8;

/// Why a tail cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TailError {
    /// The FIFO cannot be read.
    #[error("boot FIFO: {0}")]
    Read(#[from] io::Error),
    /// The key is malformed, or what is there is none of ours.
    #[error("{0}")]
    Key(#[from] EnrolmentError),
    /// A length exceeds its limit.
    #[error("boot FIFO: a payload of {payload} bytes with a manifest of {manifest}; the limits are {max} and {manifest_max}",
        max = LEN_MAX_BYTES * 2, manifest_max = ENVELOPE_MAX_BYTES)]
    Length {
        /// The length of the payload in bytes.
        payload: u64,
        /// The length of the manifest in bytes.
        manifest: u32,
    },
}

/// A payload in a FIFO.
#[derive(Debug)]
pub struct Payload {
    /// The signed manifest.
    pub manifest: Vec<u8>,
    /// The length of the payload, which is next in the FIFO, in bytes.
    pub len_bytes: u64,
}

/// A tail up to its payload.
#[derive(Debug)]
pub struct Tail {
    /// The device's key.
    pub key: Option<Key>,
    /// The payload.
    pub payload: Option<Payload>,
}

/// Return what precedes the payload in a tail.
///
/// # Errors
/// The manifest is too long.
pub fn emit(manifest: &[u8], len_bytes: u64) -> Result<Vec<u8>, TailError> {
    let length = u32::try_from(manifest.len()).unwrap_or(u32::MAX);
    check(length, len_bytes)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&u64::from(length).to_le_bytes());
    bytes.extend_from_slice(&len_bytes.to_le_bytes());
    bytes.extend_from_slice(manifest);
    bytes.resize(bytes.len().next_multiple_of(WORD), 0);
    Ok(bytes)
}

fn check(manifest: u32, payload: u64) -> Result<(), TailError> {
    // A volume is longer than its files, but never twice as long.
    if manifest as usize > ENVELOPE_MAX_BYTES || payload > LEN_MAX_BYTES * 2 {
        return Err(TailError::Length { payload, manifest });
    }
    Ok(())
}

/// A reader that takes nothing for a pause.
#[derive(Debug)]
pub struct Fifo<R, W> {
    inner: R,
    /// Asked after the given number of reads without data: whether to go on.
    wait: W,
}

impl<R: Read, W: FnMut(u32) -> bool> Fifo<R, W> {
    /// Read from `inner`. `wait` is called with the number of empty reads in a row, waits, and returns whether to go
    /// on.
    pub fn new(inner: R, wait: W) -> Self {
        Self { inner, wait }
    }

    /// Read the tail up to its payload. Nothing but zeros is an empty tail.
    ///
    /// # Errors
    /// [`TailError`].
    pub fn read_tail(&mut self) -> Result<Tail, TailError> {
        // Of its final length, so that growing leaves no copies of a key behind.
        let mut text = Zeroizing::new(vec![0; TAIL_MAX_BYTES]);
        let mut len = 0;
        let mut word = Zeroizing::new([0; WORD]);
        let mut has_word = self.try_word(&mut word)?;
        while has_word && *word != *MAGIC && *word != [0; WORD] && len < text.len() {
            text[len..len + WORD].copy_from_slice(&*word);
            len += WORD;
            has_word = self.try_word(&mut word)?;
        }
        let key = enrolment::parse(&text[..len])?;
        let payload = if has_word && *word == *MAGIC { Some(self.read_header()?) } else { None };
        Ok(Tail { key, payload })
    }

    /// Read up to the next payload, past whatever else is there, as what is left of one that was refused or cut off.
    /// `None`: nothing is there now.
    ///
    /// # Errors
    /// [`TailError`].
    pub fn next_payload(&mut self) -> Result<Option<Payload>, TailError> {
        let mut word = Zeroizing::new([0; WORD]);
        while self.try_word(&mut word)? {
            if *word == *MAGIC {
                return self.read_header().map(Some);
            }
        }
        Ok(None)
    }

    /// Read what precedes a payload, after its first word.
    fn read_header(&mut self) -> Result<Payload, TailError> {
        let mut header = [0; HEADER_BYTES - WORD];
        self.read_exactly(&mut header)?;
        let number = |at: usize| header[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let (length, len_bytes) = (u32::try_from(number(0)).unwrap_or(u32::MAX), number(8));
        check(length, len_bytes)?;
        let mut manifest = vec![0; (length as usize).next_multiple_of(WORD)];
        self.read_exactly(&mut manifest)?;
        manifest.truncate(length as usize);
        Ok(Payload { manifest, len_bytes })
    }

    /// Read the next piece of a payload, of which `left` bytes are left, into a buffer of whole words.
    ///
    /// # Errors
    /// The FIFO cannot be read, or ends.
    pub fn read_piece<'a>(&mut self, buffer: &'a mut [u8], left: u64) -> io::Result<&'a [u8]> {
        let len = left.min(buffer.len() as u64) as usize;
        self.read_exactly(&mut buffer[..len.next_multiple_of(WORD)])?;
        Ok(&buffer[..len])
    }

    /// Read a word unless there is none at all.
    fn try_word(&mut self, word: &mut [u8; WORD]) -> io::Result<bool> {
        let len = self.read_some(word)?;
        if len == 0 {
            return Ok(false);
        }
        self.read_exactly(&mut word[len..])?;
        Ok(true)
    }

    fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.inner.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn read_exactly(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let (mut filled, mut empty) = (0, 0);
        while filled < buffer.len() {
            match self.read_some(&mut buffer[filled..])? {
                0 => {
                    empty += 1;
                    if !(self.wait)(empty) {
                        let left = buffer.len() - filled;
                        let why = format!("it ended, or the host paused, with {left} bytes of a piece missing");
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
                    }
                }
                len => (filled, empty) = (filled + len, 0),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use sumac_hal::ctrl::secure::KeyId;

    fn key() -> Key {
        Key::new(KeyId(7), [0x5a; 32])
    }

    /// A FIFO that returns at most some words at once, and nothing before each of them.
    struct Slow {
        bytes: VecDeque<u8>,
        words: usize,
        pauses: bool,
        is_pause: bool,
    }

    impl Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.is_pause = !self.is_pause;
            if self.pauses && self.is_pause {
                return Ok(0);
            }
            let len = (buffer.len() / WORD).min(self.words) * WORD;
            self.bytes.read(&mut buffer[..len])
        }
    }

    fn slow(bytes: &[u8], words: usize, pauses: bool) -> Fifo<Slow, impl FnMut(u32) -> bool> {
        Fifo::new(Slow { bytes: bytes.iter().copied().collect(), words, pauses, is_pause: false }, |empty| empty < 3)
    }

    fn tail(with_key: bool, manifest: &[u8], payload: &[u8]) -> Vec<u8> {
        let key = if with_key { enrolment::emit(&key()).to_vec() } else { Vec::new() };
        let mut bytes = [key, emit(manifest, payload.len() as u64).expect("fits"), payload.to_vec()].concat();
        bytes.resize(bytes.len().next_multiple_of(WORD) + 64, 0);
        bytes
    }

    proptest! {
        #[test]
        fn tail_round_trips_through_a_fifo_that_pauses(
            manifest in prop::collection::vec(any::<u8>(), 1..100),
            payload in prop::collection::vec(any::<u8>(), 0..300),
            (with_key, pauses, words) in (any::<bool>(), any::<bool>(), 1..9_usize),
        ) {
            let bytes = tail(with_key, &manifest, &payload);
            // A pause before the first word would be the end.
            let mut fifo = slow(&bytes, words, false);
            let tail = fifo.read_tail().expect("a tail");
            prop_assert_eq!(tail.key, with_key.then(key));
            let found = tail.payload.expect("a payload");
            prop_assert_eq!(&found.manifest, &manifest);
            fifo.inner.pauses = pauses;
            let (mut got, mut buffer) = (Vec::new(), [0; 64]);
            while (got.len() as u64) < found.len_bytes {
                let left = found.len_bytes - got.len() as u64;
                got.extend_from_slice(fifo.read_piece(&mut buffer, left).expect("readable"));
            }
            prop_assert_eq!(got, payload);
        }

        #[test]
        fn arbitrary_tail_does_not_panic(bytes: Vec<u8>, with_magic: bool) {
            let bytes = if with_magic { [&MAGIC[..], &bytes].concat() } else { bytes };
            let _ = slow(&bytes, 8, false).read_tail();
        }
    }

    #[test]
    fn payload_is_found_behind_what_another_one_has_left() {
        let payload = |text: &[u8]| [emit(text, 8).expect("fits"), vec![0xee; 8]].concat();
        let bytes = [vec![0x5a; 4096], payload(b"one"), vec![0; 64], payload(b"two")].concat();
        let mut fifo = slow(&bytes, 4, false);
        for manifest in [b"one", b"two"] {
            let found = fifo.next_payload().expect("readable").expect("a payload");
            assert_eq!((&found.manifest[..], found.len_bytes), (&manifest[..], 8));
        }
        assert!(fifo.next_payload().expect("readable").is_none());
        assert!(matches!(slow(&MAGIC[..], 1, false).next_payload(), Err(TailError::Read(_))), "cut off");
    }

    #[test]
    fn key_alone_or_nothing_is_a_tail_without_payload() {
        for bytes in [&[][..], &[0; 64]] {
            let tail = slow(bytes, 4, false).read_tail().expect("empty");
            assert!(tail.key.is_none() && tail.payload.is_none());
        }
        let tail = slow(&enrolment::emit(&key()), 4, false).read_tail().expect("a key");
        assert!(tail.key == Some(key()) && tail.payload.is_none());
        assert!(matches!(slow(b"BOOT=1\n\0", 4, false).read_tail(), Err(TailError::Key(_))));
    }

    #[test]
    fn short_or_overlong_payload_is_an_error() {
        let bytes = tail(true, b"manifest", &[1; 100]);
        let mut fifo = slow(&bytes[..bytes.len() - 80], 4, false);
        let payload = fifo.read_tail().expect("a tail").payload.expect("a payload");
        let error = fifo.read_piece(&mut [0; 104], payload.len_bytes).expect_err("cut off").to_string();
        assert!(error.contains("bytes of a piece missing"), "{error}");
        assert!(matches!(emit(&[], u64::MAX), Err(TailError::Length { payload: u64::MAX, manifest: 0 })));
        let mut huge = emit(b"m", 1).expect("fits");
        huge[8..16].fill(0xff);
        assert!(matches!(slow(&huge, 4, false).read_tail(), Err(TailError::Length { manifest: u32::MAX, .. })));
    }
}
