//! Verifies a boot stream as it arrives: against its signed manifest, which came first, and under the card's key.

use crate::bfb::Policy;
use crate::manifest::envelope::{self, Trust};
use crate::manifest::{BOARD, Manifest, ManifestError, check};
use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use thiserror::Error;

/// How many pieces wait for the thread that verifies them.
const PIECES_MAX: usize = 16;

/// The operators' public key, by which a card accepts updates.
///
/// Its text is the line between the first and the last one of a PEM file (`openssl pkey -pubout`), so that it fits into
/// a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdateKey(VerifyingKey);

/// A text is no update key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("not a public ed25519 key; give the middle line of the file that `openssl pkey -pubout` writes")]
pub struct UpdateKeyError;

impl FromStr for UpdateKey {
    type Err = UpdateKeyError;

    fn from_str(text: &str) -> Result<Self, UpdateKeyError> {
        let pem = format!("-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n");
        VerifyingKey::from_public_key_pem(&pem).map(Self).map_err(|_| UpdateKeyError)
    }
}

impl UpdateKey {
    /// Return the key.
    pub const fn verifying_key(&self) -> &VerifyingKey {
        &self.0
    }
}

impl From<VerifyingKey> for UpdateKey {
    fn from(key: VerifyingKey) -> Self {
        Self(key)
    }
}

impl fmt::Display for UpdateKey {
    /// Shows its id.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&envelope::key_id(&self.0))
    }
}

/// The verification of a stream, on a thread of its own: parsing reads, and pieces arrive.
#[derive(Debug)]
pub struct StreamCheck {
    /// What the signed manifest says.
    manifest: Manifest,
    pieces: Option<SyncSender<Vec<u8>>>,
    thread: JoinHandle<Result<Option<Manifest>, ManifestError>>,
}

impl StreamCheck {
    /// Verify a manifest, and expect its stream.
    ///
    /// # Errors
    /// It is not a manifest for this kind of card that the key signed.
    pub fn start(manifest: &[u8], key: &UpdateKey) -> Result<Self, String> {
        let manifest: Manifest =
            envelope::open(manifest, Trust::Key(&key.0)).map_err(|error| format!("manifest: {error}"))?;
        if manifest.board != BOARD {
            return Err(format!("the image is for board {:?}, and this card is {BOARD:?}", manifest.board));
        }
        let (sender, receiver) = sync_channel(PIECES_MAX);
        let key = key.0;
        let verify = move || {
            let stream = Pieces { receiver, piece: Vec::new(), taken: 0 };
            check(stream, Policy::Strict, Trust::Key(&key)).map(|checked| checked.manifest)
        };
        let thread = std::thread::Builder::new().name("verify".into()).spawn(verify);
        let thread = thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { manifest, pieces: Some(sender), thread })
    }

    /// Return the manifest.
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Verify the next bytes. A fault is reported by [`StreamCheck::finish`].
    pub fn push(&mut self, bytes: Vec<u8>) {
        // The thread ends with the first fault, and then takes no more.
        if self.pieces.as_ref().is_some_and(|pieces| pieces.send(bytes).is_err()) {
            self.pieces = None;
        }
    }

    /// Return whether a fault was found, so that the rest need not be sent.
    pub fn has_failed(&self) -> bool {
        self.pieces.is_none()
    }

    /// The stream is complete: return its manifest if every byte is as signed.
    ///
    /// # Errors
    /// The first fault, or that the stream holds another manifest than the one that was announced.
    pub fn finish(mut self) -> Result<Manifest, String> {
        self.pieces = None;
        let verified = self.thread.join().map_err(|_| "the verification has panicked".to_owned())?;
        match verified.map_err(|error| error.to_string())? {
            Some(manifest) if manifest == self.manifest => Ok(manifest),
            _ => Err("the image's own manifest is another one than what was announced".into()),
        }
    }
}

/// Pieces as a reader.
struct Pieces {
    receiver: Receiver<Vec<u8>>,
    piece: Vec<u8>,
    taken: usize,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.taken == self.piece.len() {
            // The stream ends with the sender.
            let Ok(piece) = self.receiver.recv() else { return Ok(0) };
            (self.piece, self.taken) = (piece, 0);
        }
        let rest = &self.piece[self.taken..];
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        self.taken += len;
        Ok(len)
    }
}
