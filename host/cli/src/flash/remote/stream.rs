//! What goes to a host by `ssh`: a line that describes the image, the image, and what follows it.
//!
//! The image is never in a file of the host: it goes from the stream into sealed memory, whose digest is checked. The
//! stream stays open while the host works, so that its end tells that whoever waits has gone.

use anyhow::{Context, anyhow, ensure};
use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePublicKey, EncodePublicKey};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read, Write};
use std::thread;
use sumac_firmware::flash::SealedImage;
use sumac_firmware::manifest::{hex, sha256_of};

/// The longest first line.
const HEADER_MAX_BYTES: u64 = 64 << 10;
/// The version of this format.
const VERSION: u32 = 1;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    sumac_flash: u32,
    image_len_bytes: u64,
    image_sha256: String,
    tail_len_bytes: u64,
    tail_sha256: String,
    /// In PEM form; null if the image need not be signed.
    public_key: Option<String>,
}

/// What a host has received and checked.
#[derive(Debug)]
pub(in super::super) struct Received {
    pub(in super::super) image: SealedImage,
    pub(in super::super) key: Option<VerifyingKey>,
}

/// Send an image, what follows it, and the key that must have signed it.
pub(super) fn send(image: &SealedImage, key: Option<&VerifyingKey>, mut to: impl Write) -> anyhow::Result<()> {
    let header = Header {
        sumac_flash: VERSION,
        image_len_bytes: image.len_bytes(),
        image_sha256: hex(&sha256_of(image.contents().take(image.len_bytes()))?),
        tail_len_bytes: image.tail_len_bytes(),
        tail_sha256: hex(&image.tail_sha256()?),
        public_key: key.map(|key| key.to_public_key_pem(LineEnding::LF)).transpose()?,
    };
    writeln!(to, "{}", serde_json::to_string(&header)?)?;
    io::copy(&mut image.contents(), &mut to)?;
    Ok(to.flush()?)
}

/// Receive on stdin what [`send`] sends. From then on, this process gets SIGHUP when stdin ends.
pub(in super::super) fn receive() -> anyhow::Result<Received> {
    // A lock could not be moved to the thread.
    let mut input = io::BufReader::new(io::stdin());
    let received = receive_from(&mut input).context("the image on stdin")?;
    let watch = move || {
        // Whether it ends or fails, the sender has gone.
        let _ = io::copy(&mut input, &mut io::sink());
        let _ = kill_process(getpid(), Signal::HUP);
    };
    thread::Builder::new().name("stdin".into()).spawn(watch).context("cannot watch stdin")?;
    Ok(received)
}

fn receive_from(input: &mut impl BufRead) -> anyhow::Result<Received> {
    let mut line = String::new();
    input.take(HEADER_MAX_BYTES).read_line(&mut line)?;
    let header: Header = serde_json::from_str(&line).context("not what this version of sumac sends")?;
    ensure!(header.sumac_flash == VERSION, "format {} is not known here", header.sumac_flash);
    let (image_len, tail_len) = (header.image_len_bytes, header.tail_len_bytes);
    // `copy` checks the sum, which must not wrap in between.
    let stream = input.take(image_len.saturating_add(tail_len));
    let shared = std::cell::RefCell::new(stream);
    let image = SealedImage::copy(Part { from: &shared, left: image_len }, Part { from: &shared, left: tail_len })?;
    let lengths = (image.len_bytes(), image.tail_len_bytes());
    ensure!(lengths == (image_len, tail_len), "it has ended early, after {} bytes", lengths.0 + lengths.1);
    let digests = [hex(&sha256_of(image.contents().take(image_len))?), hex(&image.tail_sha256()?)];
    ensure!(digests == [header.image_sha256, header.tail_sha256], "its digest differs from that of the sender");
    let key = header.public_key.as_deref().map(VerifyingKey::from_public_key_pem).transpose();
    Ok(Received { image, key: key.map_err(|error| anyhow!("its public key: {error}"))? })
}

/// A part of a stream whose parts are read one after the other.
struct Part<'a, R> {
    from: &'a std::cell::RefCell<R>,
    left: u64,
}

impl<R: Read> Read for Part<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let len = self.from.borrow_mut().read(&mut buffer[..len])?;
        self.left -= len as u64;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ed25519_dalek::SigningKey;
    use proptest::prelude::*;

    fn sent(image: &[u8], tail: &[u8], key: Option<&VerifyingKey>) -> Vec<u8> {
        let sealed = SealedImage::copy(image, tail).expect("memory");
        let mut bytes = Vec::new();
        send(&sealed, key, &mut bytes).expect("memory");
        bytes
    }

    #[test]
    fn image_tail_and_key_are_received_as_they_were_sent() {
        let key = SigningKey::from_bytes(&[7; 32]).verifying_key();
        let image: Vec<u8> = (0..3_000_000_u32).map(|at| at as u8).collect();
        for (tail, key) in [(&b"bf.cfg"[..], None), (b"", Some(&key))] {
            let mut bytes = sent(&image, tail, key);
            bytes.extend(b"later");
            let mut input = &bytes[..];
            let received = receive_from(&mut input).expect("whole");
            let mut all = Vec::new();
            received.image.contents().read_to_end(&mut all).expect("readable");
            assert!(all == [&image[..], tail].concat() && received.image.tail_len_bytes() == tail.len() as u64);
            assert_eq!((received.key.as_ref(), input), (key, &b"later"[..]));
        }
    }

    #[test]
    fn changed_or_incomplete_image_is_refused() {
        let bytes = sent(b"image", b"tail", None);
        for at in bytes.iter().position(|byte| *byte == b'\n').expect("a line") + 1..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            let error = receive_from(&mut &changed[..]).expect_err("a digest differs").to_string();
            assert!(error.contains("digest"), "{error}");
            assert!(receive_from(&mut &bytes[..at]).is_err(), "cut at {at}");
        }
        let huge = br#"{"sumac_flash":1,"image_len_bytes":18446744073709551615,"image_sha256":"","tail_len_bytes":9,"tail_sha256":"","public_key":null}
x"#;
        assert!(receive_from(&mut &huge[..]).is_err());
        let later = String::from_utf8_lossy(&bytes).replacen("\"sumac_flash\":1", "\"sumac_flash\":2", 1);
        assert!(receive_from(&mut later.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_stream_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(receive_from(&mut &bytes[..]).is_err());
        }
    }
}
