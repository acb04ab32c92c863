//! Signed manifests of boot streams, verified before the first byte is written.
//!
//! The boot stream is consumed before our code runs on the card, so the *host* verifies it: [`check`] reads the whole
//! stream once, as [`bfb::scan`] does, and compares every image with the [`Manifest`] in the stream's `info` image. The
//! manifest contains board, version, epoch and the SHA-256 of every other image, in order, and is signed
//! ([`envelope`]). On the card, files are later verified against the manifest in their initramfs before they are
//! started ([`files`]).
//!
//! Invariants: with [`Trust::Key`], [`check`] returns a manifest only if every byte of the stream, headers and padding
//! included, is the one that was signed; a stream has either no manifest or a correct one.

pub mod envelope;
pub mod files;
#[cfg(test)]
mod tests;

pub use envelope::{EnvelopeError, Trust};

use crate::bfb::{self, BfbError, Entry, Generation, ImageId, ImageName, Policy, Report, WriteError};
use crate::payload::{self, PayloadError};
use crate::slots::Offer;
use ed25519_dalek::SigningKey;
use envelope::{Document, ENVELOPE_MAX_BYTES};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{self, Read};
use thiserror::Error;

/// The board of all BlueField-class cards.
pub const BOARD: &str = "bluefield";
/// The image that holds the manifest.
pub const MANIFEST_IMAGE: ImageName = ImageName::new(ImageId::INFO, 0);
/// The current format.
const FORMAT: u32 = 1;
/// The maximum length of a version in bytes.
const VERSION_MAX_BYTES: usize = 64;

/// The manifest of a boot stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The format of this document.
    format: u32,
    /// The kind of card: [`BOARD`].
    pub board: String,
    /// The version, for display.
    pub version: String,
    /// Incremented when older images must be refused, as after a security fix.
    pub epoch: u64,
    /// All images except the manifest itself, in stream order.
    pub images: Vec<ImageDigest>,
    /// The payload for an update slot that results from the images, if the stream has what one needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<SlotDigest>,
}

/// The digest of a slot's payload ([`crate::payload`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotDigest {
    /// The length in bytes.
    pub len_bytes: u64,
    /// The SHA-256, in hexadecimal.
    pub sha256: String,
}

/// The digest of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageDigest {
    /// Name and version, for example `boot-args-v2`.
    pub name: String,
    /// The length of the data in bytes.
    pub len_bytes: u64,
    /// The SHA-256 of the data, in hexadecimal.
    pub sha256: String,
}

impl Document for Manifest {
    const TYPE: &'static str = "application/vnd.sumac.boot-manifest+json";
}

impl Manifest {
    /// Create the manifest of a builder's images, reading all of them.
    ///
    /// # Errors
    /// The version is invalid, or an image cannot be read.
    pub fn of(builder: &bfb::Builder, version: &str, epoch: u64) -> Result<Self, ManifestError> {
        if !is_version(version) {
            return Err(ManifestError::Version(version.into()));
        }
        let mut images = Vec::new();
        for (name, source) in builder.images().filter(|(name, _)| *name != MANIFEST_IMAGE) {
            let digest = source.open().and_then(sha256_of).map_err(|source| WriteError::Read { name, source })?;
            images.push(ImageDigest { name: name.to_string(), len_bytes: source.len_bytes(), sha256: hex(&digest) });
        }
        Ok(Self {
            format: FORMAT,
            board: BOARD.into(),
            version: version.into(),
            epoch,
            images,
            slot: slot_of(builder)?,
        })
    }

    /// Describe the payload as an update of a slot.
    ///
    /// # Errors
    /// The manifest has none, or is for another kind of card.
    pub fn offer(&self) -> Result<Offer, ManifestError> {
        if self.format != FORMAT {
            return Err(ManifestError::Format(self.format));
        }
        if self.board != BOARD {
            return Err(ManifestError::Board(self.board.clone()));
        }
        if !is_version(&self.version) {
            return Err(ManifestError::Version(self.version.clone()));
        }
        let slot = self.slot.as_ref().ok_or(ManifestError::NoSlot)?;
        let sha256 = from_hex(&slot.sha256).ok_or_else(|| ManifestError::Digest(slot.sha256.clone()))?;
        Ok(Offer { version: self.version.clone(), epoch: self.epoch, len_bytes: slot.len_bytes, sha256 })
    }

    /// Encode it, signed if there is a key.
    ///
    /// # Errors
    /// It is too long.
    pub fn seal(&self, key: Option<&SigningKey>) -> Result<Vec<u8>, ManifestError> {
        Ok(envelope::seal(self, key)?)
    }
}

/// Return the digest of the payload of a slot, if there is one kernel and one initramfs for it.
fn slot_of(builder: &bfb::Builder) -> Result<Option<SlotDigest>, ManifestError> {
    let one = |id| {
        let mut found = builder.images().filter(|(name, _)| name.id == id).map(|(_, source)| source);
        found.next().filter(|_| found.next().is_none())
    };
    let (Some(kernel), Some(initramfs)) = (one(ImageId::IMAGE), one(ImageId::INITRAMFS)) else { return Ok(None) };
    let built = payload::build(kernel, initramfs)?;
    Ok(Some(SlotDigest { len_bytes: built.len_bytes, sha256: hex(&built.sha256) }))
}

/// A stream that was read to its end and is intact.
#[derive(Debug)]
pub struct Checked {
    /// Its contents.
    pub report: Report,
    /// Its verified manifest, if it has one.
    pub manifest: Option<Manifest>,
    /// The SHA-256 of the whole stream.
    pub sha256: [u8; 32],
}

impl Checked {
    /// Return whether the stream has a boot loader for a card of this generation.
    pub fn boots(&self, generation: Generation) -> bool {
        self.report.serves(ImageId::BL2, generation)
    }
}

/// Why a stream or its manifest is rejected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The stream itself is damaged.
    #[error(transparent)]
    Stream(#[from] BfbError),
    /// A required manifest is missing.
    #[error(
        "the stream has no manifest (image {MANIFEST_IMAGE}); build it with `sumac image build --sign-key`, or allow it unsigned"
    )]
    Missing,
    /// The manifest is invalid or not trusted.
    #[error("manifest: {0}")]
    Envelope(#[from] EnvelopeError),
    /// The format is unknown.
    #[error("manifest: format {0} is unknown, {FORMAT} is supported; it was made by a newer version")]
    Format(u32),
    /// The version is invalid.
    #[error(
        "{0:?} is not a version; use 1 to {VERSION_MAX_BYTES} letters, digits, dots, dashes, pluses and underscores"
    )]
    Version(String),
    /// The images differ from those in the manifest.
    #[error("manifest: image {index} is {found}, but the manifest lists {expected}")]
    Images {
        /// The image, counted from 0 without the manifest.
        index: usize,
        /// The stream's image.
        found: String,
        /// The manifest's image.
        expected: String,
    },
    /// An image's contents differ from the manifest.
    #[error("manifest: {name}: {field} is {found}, but the manifest has {expected}")]
    Image {
        /// The image.
        name: String,
        /// The field that differs.
        field: &'static str,
        /// The stream's value.
        found: String,
        /// The manifest's value.
        expected: String,
    },
    /// It is for another kind of card.
    #[error("manifest: the image is for the board {0:?}, not {BOARD:?}")]
    Board(String),
    /// It does not describe a slot's payload.
    #[error("manifest: no payload for an update slot; build the stream again, with one kernel and one initramfs")]
    NoSlot,
    /// A digest is malformed.
    #[error("manifest: {0:?} is not a SHA-256 in hexadecimal")]
    Digest(String),
    /// The payload cannot be built.
    #[error("payload for an update slot: {0}")]
    Payload(#[from] PayloadError),
    /// An image cannot be read.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Read and check a whole stream, and compare it with its manifest. With [`Trust::Key`], the policy is
/// [`Policy::Strict`] in any case, because no signature covers what the others tolerate.
///
/// # Errors
/// The first damage; with [`Trust::Key`], also a missing manifest or a missing signature by the key.
pub fn check(stream: impl Read, policy: Policy, trust: Trust<'_>) -> Result<Checked, ManifestError> {
    let policy = if matches!(trust, Trust::Key(_)) { Policy::Strict } else { policy };
    let mut whole = Hashing { inner: stream, digest: Sha256::new() };
    let mut digests: Vec<Sha256> = Vec::new();
    let mut sealed = Vec::new();
    let report = bfb::scan(&mut whole, policy, |entry, piece| {
        if piece.is_empty() {
            digests.push(Sha256::new());
        }
        if let Some(digest) = digests.last_mut() {
            digest.update(piece);
        }
        // One byte beyond the limit shows that it is too long.
        if entry.header.name == MANIFEST_IMAGE && sealed.len() <= ENVELOPE_MAX_BYTES {
            sealed.extend_from_slice(piece);
        }
        Ok(())
    })?;
    let sha256 = whole.digest.finalize().into();
    let manifest = match (report.find(MANIFEST_IMAGE), trust) {
        (None, Trust::Key(_)) => return Err(ManifestError::Missing),
        (None, Trust::AnySigner) => None,
        // A vendor's stream has its own kind of `info` image.
        (Some(_), Trust::AnySigner) if !is_envelope(&sealed) => None,
        (Some(_), trust) => Some(envelope::open::<Manifest>(&sealed, trust)?),
    };
    if let Some(manifest) = &manifest {
        compare(manifest, &report.entries, digests)?;
    }
    Ok(Checked { report, manifest, sha256 })
}

/// Return whether an `info` image is a signed document, rather than that of a vendor's tools.
pub fn is_envelope(info: &[u8]) -> bool {
    let value = serde_json::from_slice::<serde_json::Value>(info);
    value.is_ok_and(|value| value.get("payloadType").is_some())
}

fn compare(manifest: &Manifest, entries: &[Entry], digests: Vec<Sha256>) -> Result<(), ManifestError> {
    if manifest.format != FORMAT {
        return Err(ManifestError::Format(manifest.format));
    }
    if !is_version(&manifest.version) {
        return Err(ManifestError::Version(manifest.version.clone()));
    }
    let found: Vec<_> = entries.iter().zip(digests).filter(|(entry, _)| entry.header.name != MANIFEST_IMAGE).collect();
    for index in 0..found.len().max(manifest.images.len()) {
        let nothing = || "no image".to_owned();
        let found_name = found.get(index).map_or_else(nothing, |(entry, _)| entry.header.name.to_string());
        let expected = manifest.images.get(index);
        let expected_name = expected.map_or_else(nothing, |image| image.name.clone());
        let (Some((entry, digest)), Some(expected), true) = (found.get(index), expected, found_name == expected_name)
        else {
            return Err(ManifestError::Images { index, found: found_name, expected: expected_name });
        };
        let differs = |field, found: String, expected: String| {
            let name = found_name.clone();
            Err(ManifestError::Image { name, field, found, expected })
        };
        let len_bytes = u64::from(entry.header.len_bytes);
        if len_bytes != expected.len_bytes {
            return differs("length in bytes", len_bytes.to_string(), expected.len_bytes.to_string());
        }
        let sha256 = hex(&digest.clone().finalize());
        if sha256 != expected.sha256 {
            return differs("SHA-256", sha256, expected.sha256.clone());
        }
    }
    Ok(())
}

/// Format bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parse 32 bytes in hexadecimal.
pub fn from_hex(digits: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if digits.len() != 2 * bytes.len() || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(bytes)
}

fn is_version(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-+_".contains(&byte);
    (1..=VERSION_MAX_BYTES).contains(&text.len()) && text.bytes().all(is_allowed)
}

/// Return the SHA-256 of a reader's data.
pub fn sha256_of(reader: impl Read) -> io::Result<[u8; 32]> {
    let mut hashing = Hashing { inner: reader, digest: Sha256::new() };
    io::copy(&mut hashing, &mut io::sink())?;
    Ok(hashing.digest.finalize().into())
}

/// A reader that hashes the data read.
struct Hashing<R> {
    inner: R,
    digest: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buffer)?;
        self.digest.update(&buffer[..got]);
        Ok(got)
    }
}
