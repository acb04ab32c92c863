//! Records: the encrypted pieces of a connection's byte stream, one cipher per direction.

use super::crypto::{ChaChaPoly, TAG_LEN};
use core::fmt;
use noise_protocol::CipherState;
use thiserror::Error;

/// The most plaintext in one record, in bytes.
pub const RECORD_PLAINTEXT_MAX: usize = 4096;

/// The length of what a record adds to its plaintext: its length field and its tag.
pub const RECORD_OVERHEAD_LEN: usize = HEADER_LEN + TAG_LEN;

/// The length of the longest record.
pub const RECORD_LEN_MAX: usize = RECORD_PLAINTEXT_MAX + RECORD_OVERHEAD_LEN;

const HEADER_LEN: usize = 2;

/// Why a record cannot be sealed or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// A record's length is out of range.
    #[error("a record of {len} bytes; the limits are {} and {}", TAG_LEN + 1, RECORD_PLAINTEXT_MAX + TAG_LEN)]
    Length {
        /// The length of its ciphertext.
        len: usize,
    },
    /// A record was changed, repeated, reordered or left out, or is not of this connection.
    #[error("a record fails authentication")]
    Authentication,
    /// An earlier record failed, or all nonces are used.
    #[error("the channel has ended")]
    Ended,
    /// The caller's buffer is too small for the record.
    #[error("a buffer of {len} bytes is too small for the record")]
    Buffer {
        /// The buffer's length.
        len: usize,
    },
}

/// Encrypts one direction of a connection.
pub struct Sealer(CipherState<ChaChaPoly>);

impl Sealer {
    pub(super) const fn new(cipher: CipherState<ChaChaPoly>) -> Self {
        Self(cipher)
    }

    /// Write `plaintext`, of 1 to [`RECORD_PLAINTEXT_MAX`] bytes, as a record to the start of `buffer`, and return the
    /// record's length. Records must be sent in the order in which they are sealed.
    ///
    /// # Errors
    /// [`RecordError`]; nothing was sealed.
    pub fn seal(&mut self, plaintext: &[u8], buffer: &mut [u8]) -> Result<usize, RecordError> {
        let ciphertext_len = plaintext.len() + TAG_LEN;
        let header = header(ciphertext_len)?;
        if self.0.get_next_n() >= NONCE_END {
            return Err(RecordError::Ended);
        }
        let (buffer_len, record_len) = (buffer.len(), HEADER_LEN + ciphertext_len);
        let record = buffer.get_mut(..record_len).ok_or(RecordError::Buffer { len: buffer_len })?;
        record[..HEADER_LEN].copy_from_slice(&header);
        self.0.encrypt_ad(&header, plaintext, &mut record[HEADER_LEN..]);
        Ok(record_len)
    }
}

/// Decrypts the other direction.
pub struct Opener {
    cipher: CipherState<ChaChaPoly>,
    has_failed: bool,
}

impl Opener {
    pub(super) const fn new(cipher: CipherState<ChaChaPoly>) -> Self {
        Self { cipher, has_failed: false }
    }

    /// Decrypt a record, of the length that [`record_len`] says, in place, and return its plaintext.
    ///
    /// # Errors
    /// [`RecordError`]. Nothing can be opened after that: close the connection.
    pub fn open<'r>(&mut self, record: &'r mut [u8]) -> Result<&'r [u8], RecordError> {
        if self.has_failed || self.cipher.get_next_n() >= NONCE_END {
            return Err(RecordError::Ended);
        }
        // Until the record is found to be authentic.
        self.has_failed = true;
        if record_len(record)? != Some(record.len()) {
            return Err(RecordError::Length { len: record.len() });
        }
        let (header, ciphertext) = record.split_at_mut(HEADER_LEN);
        let len = ciphertext.len();
        let opened = self.cipher.decrypt_ad_in_place(header, ciphertext, len);
        let len = opened.map_err(|()| RecordError::Authentication)?;
        self.has_failed = false;
        Ok(&ciphertext[..len])
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer").field("sealed", &self.0.get_next_n()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener").field("opened", &self.cipher.get_next_n()).finish_non_exhaustive()
    }
}

/// Return the length of the record at the start of `bytes`, or `None` while its length field is incomplete.
///
/// # Errors
/// [`RecordError::Length`] if no record has that length.
pub fn record_len(bytes: &[u8]) -> Result<Option<usize>, RecordError> {
    let Some(&[low, high]) = bytes.get(..HEADER_LEN) else { return Ok(None) };
    let len = usize::from(u16::from_le_bytes([low, high]));
    header(len)?;
    Ok(Some(HEADER_LEN + len))
}

/// Return the length field of a record.
fn header(len: usize) -> Result<[u8; HEADER_LEN], RecordError> {
    let is_valid = len > TAG_LEN && len <= RECORD_PLAINTEXT_MAX + TAG_LEN;
    if is_valid { Ok((len as u16).to_le_bytes()) } else { Err(RecordError::Length { len }) }
}

/// The first nonce that is not used. Noise reserves the last one, and the crate panics when it counts past it.
const NONCE_END: u64 = u64::MAX - 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(nonce: u64) -> (Sealer, Opener) {
        (Sealer::new(CipherState::new(&[7; 32], nonce)), Opener::new(CipherState::new(&[7; 32], nonce)))
    }

    #[test]
    fn channel_ends_before_a_nonce_repeats() {
        let (mut sealer, mut opener) = pair(NONCE_END - 1);
        let mut buffer = [0; 64];
        let len = sealer.seal(b"last", &mut buffer).expect("one is left");
        assert_eq!(opener.open(&mut { buffer }[..len]), Ok(&b"last"[..]));
        assert_eq!(sealer.seal(b"none", &mut buffer), Err(RecordError::Ended));
        assert_eq!(opener.open(&mut buffer[..len]), Err(RecordError::Ended));
    }

    #[test]
    fn lengths_out_of_range_are_refused_before_anything_is_sealed() {
        let (mut sealer, mut opener) = pair(0);
        let mut buffer = [0; RECORD_LEN_MAX];
        let long = [0; RECORD_PLAINTEXT_MAX + 1];
        assert_eq!(sealer.seal(&[], &mut buffer), Err(RecordError::Length { len: 16 }));
        assert_eq!(sealer.seal(&long, &mut buffer), Err(RecordError::Length { len: 4113 }));
        assert_eq!(sealer.seal(&[1; 20], &mut buffer[..37]), Err(RecordError::Buffer { len: 37 }));
        assert_eq!(sealer.seal(&long[1..], &mut buffer), Ok(RECORD_LEN_MAX));
        assert_eq!(opener.open(&mut buffer).map(<[u8]>::len), Ok(RECORD_PLAINTEXT_MAX), "no nonce was lost");
        for len in [0_u16, 16, 4113, u16::MAX] {
            let [low, high] = len.to_le_bytes();
            assert_eq!(record_len(&[low, high]), Err(RecordError::Length { len: len.into() }));
        }
        assert_eq!(record_len(&[17]), Ok(None));
        assert_eq!(record_len(&[17, 0]), Ok(Some(19)));
    }
}
