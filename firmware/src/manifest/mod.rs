//! What a boot stream says about itself, and how to know that it is true before the first byte is written.
//!
//! The boot stream is consumed before anything of ours runs on the card, so the *host* checks it: [`check`] reads the
//! whole stream once, as [`bfb::scan`] does, and holds every image against the [`Manifest`] in the stream's `info` image.
//! The manifest names board, version, epoch and the SHA-256 of every other image, in order, and is signed
//! ([`envelope`]). What starts on the card later checks the files that it is to run against the manifest in its
//! initramfs ([`files`]).
//!
//! Invariants: with [`Trust::Key`], [`check`] returns a manifest only if every byte of the stream is the one that was
//! signed, headers and padding included; a stream has either no manifest or one that is right.

pub mod envelope;
pub mod files;
#[cfg(test)]
mod tests;

pub use envelope::{EnvelopeError, Trust};

use crate::bfb::{self, BfbError, Entry, Generation, ImageId, ImageName, Policy, Report, WriteError};
use ed25519_dalek::SigningKey;
use envelope::{Document, ENVELOPE_MAX_BYTES};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{self, Read};
use thiserror::Error;

/// The board of all BlueField-class cards.
pub const BOARD: &str = "bluefield";
/// Where the manifest lies.
pub const MANIFEST_IMAGE: ImageName = ImageName::new(ImageId::INFO, 0);
/// The form that is written today.
const FORMAT: u32 = 1;
/// The longest version, in bytes.
const VERSION_MAX_BYTES: usize = 64;

/// What a boot stream is and what is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The form of this document.
    format: u32,
    /// For which kind of card: [`BOARD`].
    pub board: String,
    /// What people call it.
    pub version: String,
    /// Counts up when older images must not come back, as after a hole was mended.
    pub epoch: u64,
    /// All images but the manifest's own, in the stream's order.
    pub images: Vec<ImageDigest>,
}

/// An image and what is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageDigest {
    /// Name and version, as `boot-args-v2`.
    pub name: String,
    /// Length of the data, in bytes.
    pub len_bytes: u64,
    /// SHA-256 of the data, in hexadecimal digits.
    pub sha256: String,
}

impl Document for Manifest {
    const TYPE: &'static str = "application/vnd.sumac.boot-manifest+json";
}

impl Manifest {
    /// Read all images of a stream in the making, and say what is in them.
    ///
    /// # Errors
    /// The version is none, or an image can't be read.
    pub fn of(builder: &bfb::Builder, version: &str, epoch: u64) -> Result<Self, ManifestError> {
        if !is_version(version) {
            return Err(ManifestError::Version(version.into()));
        }
        let mut images = Vec::new();
        for (name, source) in builder.images().filter(|(name, _)| *name != MANIFEST_IMAGE) {
            let digest = source.open().and_then(sha256_of).map_err(|source| WriteError::Read { name, source })?;
            images.push(ImageDigest { name: name.to_string(), len_bytes: source.len_bytes(), sha256: hex(&digest) });
        }
        Ok(Self { format: FORMAT, board: BOARD.into(), version: version.into(), epoch, images })
    }

    /// Write it, signed if there is a key.
    ///
    /// # Errors
    /// It is too long.
    pub fn seal(&self, key: Option<&SigningKey>) -> Result<Vec<u8>, ManifestError> {
        Ok(envelope::seal(self, key)?)
    }
}

/// A stream that was read to its end and is whole.
#[derive(Debug)]
pub struct Checked {
    /// What it holds.
    pub report: Report,
    /// What it says about itself, if it has a manifest; then all of it is true.
    pub manifest: Option<Manifest>,
    /// SHA-256 of the whole stream.
    pub sha256: [u8; 32],
}

impl Checked {
    /// Tell whether the stream can boot a card of this generation: there is a boot loader for it.
    pub fn boots(&self, generation: Generation) -> bool {
        self.report.serves(ImageId::BL2, generation)
    }
}

/// Why a stream or its manifest can't be believed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The stream itself is damaged.
    #[error(transparent)]
    Stream(#[from] BfbError),
    /// There is no manifest where one must be.
    #[error(
        "the stream has no manifest (image {MANIFEST_IMAGE}); build it with `sumac image build --sign-key`, or allow it unsigned"
    )]
    Missing,
    /// The manifest can't be believed.
    #[error("manifest: {0}")]
    Envelope(#[from] EnvelopeError),
    /// A form that came later.
    #[error("manifest: format {0}, known is {FORMAT}; it was made by a newer version")]
    Format(u32),
    /// A version that is none.
    #[error(
        "{0:?} is no version; one has 1 to {VERSION_MAX_BYTES} letters, digits, dots, dashes, pluses and underscores"
    )]
    Version(String),
    /// An image that the manifest does not know, or at another place.
    #[error("manifest: image {index} is {found}, the manifest has {expected} there")]
    Images {
        /// The image, counted from 0 without the manifest.
        index: usize,
        /// What the stream has there.
        found: String,
        /// What the manifest has there.
        expected: String,
    },
    /// An image with other bytes.
    #[error("manifest: {name}: {field} is {found}, the manifest says {expected}")]
    Image {
        /// Which.
        name: String,
        /// What differs.
        field: &'static str,
        /// What the stream has.
        found: String,
        /// What the manifest has.
        expected: String,
    },
    /// An image can't be read.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Read a whole stream, check it, and hold it against its manifest.
///
/// # Errors
/// The first damage; with [`Trust::Key`] also if there is no manifest or it is not signed by the key.
pub fn check(stream: impl Read, policy: Policy, trust: Trust<'_>) -> Result<Checked, ManifestError> {
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
        // One byte more than is allowed tells that it is too long.
        if entry.header.name == MANIFEST_IMAGE && sealed.len() <= ENVELOPE_MAX_BYTES {
            sealed.extend_from_slice(piece);
        }
        Ok(())
    })?;
    let sha256 = whole.digest.finalize().into();
    let manifest = match (report.find(MANIFEST_IMAGE), trust) {
        (None, Trust::Key(_)) => return Err(ManifestError::Missing),
        (None, Trust::Anybody) => None,
        // A vendor's stream has an `info` image of its own.
        (Some(_), Trust::Anybody) if !is_envelope(&sealed) => None,
        (Some(_), trust) => Some(envelope::open::<Manifest>(&sealed, trust)?),
    };
    if let Some(manifest) = &manifest {
        compare(manifest, &report.entries, digests)?;
    }
    Ok(Checked { report, manifest, sha256 })
}

/// Tell whether an `info` image is a signed document, and not what a vendor's tools put there.
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

/// Return hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_version(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-+_".contains(&byte);
    (1..=VERSION_MAX_BYTES).contains(&text.len()) && text.bytes().all(is_allowed)
}

/// Hash what a reader gives.
fn sha256_of(reader: impl Read) -> io::Result<[u8; 32]> {
    let mut hashing = Hashing { inner: reader, digest: Sha256::new() };
    io::copy(&mut hashing, &mut io::sink())?;
    Ok(hashing.digest.finalize().into())
}

/// A reader that hashes what passes.
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
