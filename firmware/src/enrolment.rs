//! A device's key behind a boot stream.
//!
//! The host appends the key while it writes the stream, so that it is in no image. No stage of the boot parses what
//! follows the stream: it stays in the boot FIFO until the card's Linux reads it, through the file `bootfifo` of the
//! kernel's driver `mlxbf-bootctl` (Mellanox's `bfb-install` sends `bf.cfg` in the same place).
//!
//! ```text
//! tail := "# sumac device key\n" key "\n" zeros     the key as `sumac key new` writes it; padded to words of 8 bytes
//! ```

use std::io::{self, Read};
use sumac_hal::ctrl::secure::{Key, KeyError, parse_key};
use thiserror::Error;
use zeroize::Zeroizing;

/// The most that is read of a boot FIFO, in bytes.
pub const TAIL_MAX_BYTES: usize = 4096;

const FIRST_LINE: &str = "# sumac device key\n";

/// The FIFO takes words.
const WORD_BYTES: usize = 8;

/// Why what follows a boot stream is not a device's key. No message contains a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EnrolmentError {
    /// It begins differently.
    #[error("{0} bytes in the boot FIFO are no device key of Sumac; flash with --key-file to send one")]
    Other(usize),
    /// The key is malformed.
    #[error("the device key in the boot FIFO: {0}")]
    Key(#[from] KeyError),
}

/// Return the bytes that follow a stream.
pub fn emit(key: &Key) -> Zeroizing<Vec<u8>> {
    let text = Zeroizing::new(format!("{FIRST_LINE}{}\n", key.reveal()));
    let mut bytes = Zeroizing::new(vec![0; text.len().next_multiple_of(WORD_BYTES)]);
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

/// Read what is left in a boot FIFO, at most [`TAIL_MAX_BYTES`].
///
/// # Errors
/// The system's error.
pub fn read(fifo: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    // Of its final length, so that growing leaves no copies behind.
    let mut bytes = Zeroizing::new(vec![0; TAIL_MAX_BYTES]);
    let (mut fifo, mut len) = (fifo, 0);
    while len < bytes.len() {
        match fifo.read(&mut bytes[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

/// Return the key in what was [read]; `None` if there is nothing but zeros.
///
/// # Errors
/// [`EnrolmentError`].
pub fn parse(bytes: &[u8]) -> Result<Option<Key>, EnrolmentError> {
    let len = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    if len == 0 {
        return Ok(None);
    }
    let text = std::str::from_utf8(&bytes[..len]).map_err(|_| EnrolmentError::Other(len))?;
    let key = text.strip_prefix(FIRST_LINE).ok_or(EnrolmentError::Other(len))?;
    Ok(Some(parse_key(key)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::ctrl::secure::KeyId;

    fn key() -> Key {
        Key::new(KeyId(0x0123_4567_89ab_cdef), [0x5a; 32])
    }

    #[test]
    fn key_round_trips_through_a_fifo_that_pads_it() {
        let bytes = emit(&key());
        assert!(bytes.len().is_multiple_of(WORD_BYTES) && bytes.starts_with(b"# sumac device key\nsumac-key-v1 0123"));
        let padded = bytes.iter().copied().chain([0; 5000]).collect::<Vec<u8>>();
        let found = read(&padded[..]).expect("readable");
        assert_eq!(found.len(), TAIL_MAX_BYTES);
        assert_eq!(parse(&found), Ok(Some(key())));
    }

    #[test]
    fn empty_fifo_has_no_key_and_other_contents_are_named_without_secrets() {
        assert_eq!(parse(&read(&[0; 64][..]).expect("readable")), Ok(None));
        assert_eq!(parse(b""), Ok(None));
        for other in [&b"BOOT=1\0\0"[..], &[0xff; 16], b"# sumac device keys"] {
            assert!(matches!(parse(other), Err(EnrolmentError::Other(_))), "{other:?}");
        }
        let bytes = emit(&key());
        let cut = parse(&bytes[..bytes.len() - 12]).expect_err("cut off").to_string();
        assert!(cut.contains("64 hexadecimal digits") && !cut.contains("5a5a"), "{cut}");
        let twice = [&bytes[..], &bytes[..]].concat();
        assert!(parse(&twice).is_err(), "two keys");
    }
}
