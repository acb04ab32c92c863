//! Files for the card's initramfs, with a manifest of their own.
//!
//! An existing initramfs, compressed or not, stays as it is: [`write_archive`] creates a second archive (cpio, `newc`)
//! with the files that the agent starts and their signed manifest. The kernel unpacks concatenated archives in
//! sequence, later files over earlier ones (Linux, Documentation/driver-api/early-userspace/buffer-format.rst). On the
//! card, [`check`] verifies the files against the manifest before any of them is started.

use super::envelope::{self, Document, ENVELOPE_MAX_BYTES, EnvelopeError, Trust};
use super::{hex, is_version, sha256_of};
use cpio::newc::{self, Builder};
use ed25519_dalek::SigningKey;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The path of the manifest in the card's file system.
pub const MANIFEST_PATH: &str = "etc/sumac/manifest.json";

/// Regular file, readable and executable by all, writable by root.
pub(crate) const MODE_FILE: u32 = 0o100_755;
pub(crate) const MODE_MANIFEST: u32 = 0o100_444;
const MODE_FOLDER: u32 = 0o040_755;
/// Character device, for root only.
const MODE_DEVICE: u32 = 0o020_600;

/// The manifest of the files that the agent may start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileManifest {
    /// The version of the stream, for display.
    pub version: String,
    /// The epoch of the stream.
    pub epoch: u64,
    /// The files.
    pub files: Vec<FileDigest>,
}

/// The digest of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    /// The path from the root, without a leading slash.
    pub path: String,
    /// The length in bytes.
    pub len_bytes: u64,
    /// The SHA-256, in hexadecimal.
    pub sha256: String,
}

impl Document for FileManifest {
    const TYPE: &'static str = "application/vnd.sumac.file-manifest+json";
}

/// Why files cannot be packed or verified.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FilesError {
    /// The path is invalid.
    #[error("{0:?} is not a valid path; use an absolute one such as /usr/bin/sumac, without . and ..")]
    Path(String),
    /// The version is invalid.
    #[error("{0:?} is not a version")]
    Version(String),
    /// The manifest is invalid or not trusted.
    #[error("{MANIFEST_PATH}: {0}")]
    Envelope(#[from] EnvelopeError),
    /// The file is too long for cpio.
    #[error("{path}: {len_bytes} bytes exceed the 4 GiB limit of cpio")]
    TooLong {
        /// The path.
        path: String,
        /// The length in bytes.
        len_bytes: u64,
    },
    /// The contents differ from the manifest.
    #[error("{path}: SHA-256 is {found}, but the manifest has {expected}; do not start it")]
    Differs {
        /// The path.
        path: String,
        /// The actual SHA-256.
        found: String,
        /// The SHA-256 in the manifest.
        expected: String,
    },
    /// A file cannot be read, or the archive not written.
    #[error("{path}: {source}")]
    Io {
        /// The path.
        path: String,
        /// The system's error.
        source: io::Error,
    },
}

/// Write an archive of files, each with its path on the card, and their manifest, signed if there is a key.
///
/// # Errors
/// A path is invalid, a file cannot be read or is too long, or writing failed. The output is unusable then.
pub fn write_archive(
    files: &[(String, PathBuf)],
    version: &str,
    epoch: u64,
    key: Option<&SigningKey>,
    out: &mut impl Write,
) -> Result<FileManifest, FilesError> {
    if !is_version(version) {
        return Err(FilesError::Version(version.into()));
    }
    let mut digests = Vec::new();
    for (path, source) in files {
        let path = relative_path(path)?;
        let fail = |error| FilesError::Io { path: source.display().to_string(), source: error };
        let len_bytes = std::fs::metadata(source).map_err(fail)?.len();
        let sha256 = File::open(source).and_then(sha256_of).map_err(fail)?;
        digests.push(FileDigest { path, len_bytes, sha256: hex(&sha256) });
    }
    let manifest = FileManifest { version: version.into(), epoch, files: digests };
    let sealed = envelope::seal(&manifest, key)?;
    let mut archive = Archive::new(out);
    for (digest, (_, source)) in manifest.files.iter().zip(files) {
        let fail = |error| FilesError::Io { path: source.display().to_string(), source: error };
        let mut file = File::open(source).map_err(fail)?;
        let got = archive.add(&digest.path, MODE_FILE, &mut file, digest.len_bytes)?;
        if got != digest.sha256 {
            return Err(FilesError::Differs {
                path: source.display().to_string(),
                found: got,
                expected: digest.sha256.clone(),
            });
        }
    }
    archive.add(MANIFEST_PATH, MODE_MANIFEST, &mut sealed.as_slice(), sealed.len() as u64)?;
    archive.finish()?;
    Ok(manifest)
}

/// Verify the files below `root` against the manifest there.
///
/// # Errors
/// There is no trusted manifest, or a file is missing or differs.
pub fn check(root: &Path, trust: Trust<'_>) -> Result<FileManifest, FilesError> {
    let fail = |path: &str| {
        let path = path.to_owned();
        move |source| FilesError::Io { path, source }
    };
    let mut sealed = Vec::new();
    let limit = ENVELOPE_MAX_BYTES as u64 + 1;
    let file = File::open(root.join(MANIFEST_PATH)).map_err(fail(MANIFEST_PATH))?;
    file.take(limit).read_to_end(&mut sealed).map_err(fail(MANIFEST_PATH))?;
    let manifest: FileManifest = envelope::open(&sealed, trust)?;
    for FileDigest { path, len_bytes, sha256 } in &manifest.files {
        let file = File::open(root.join(relative_path(path)?)).map_err(fail(path))?;
        // An extra byte changes the digest.
        let found = hex(&sha256_of(file.take(len_bytes.saturating_add(1))).map_err(fail(path))?);
        if found != *sha256 {
            return Err(FilesError::Differs { path: path.clone(), found, expected: sha256.clone() });
        }
    }
    Ok(manifest)
}

/// Return a path without its leading slash, if it stays below the root.
fn relative_path(path: &str) -> Result<String, FilesError> {
    let relative = path.strip_prefix('/').unwrap_or(path);
    // Checked as text: `Path` normalises what the kernel's unpacking does not. cpio ends names with a zero byte.
    let plain = relative.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0'));
    if !plain {
        return Err(FilesError::Path(path.into()));
    }
    Ok(relative.into())
}

/// Writes a `newc` archive.
pub(crate) struct Archive<'a, W: Write> {
    out: &'a mut W,
    /// Folders that have an entry.
    folders: BTreeSet<PathBuf>,
    inode: u32,
}

impl<'a, W: Write> Archive<'a, W> {
    pub(crate) fn new(out: &'a mut W) -> Self {
        Self { out, folders: BTreeSet::new(), inode: 0 }
    }

    /// Add a folder and its parents.
    pub(crate) fn folder(&mut self, path: &str) -> Result<(), FilesError> {
        let mut folders: Vec<_> = Path::new(path).ancestors().filter(|folder| *folder != Path::new("")).collect();
        folders.reverse();
        for folder in folders {
            if self.folders.insert(folder.into()) {
                let entry = self.entry(&folder.display().to_string(), MODE_FOLDER);
                let fail = |source| FilesError::Io { path: path.into(), source };
                entry.write(&mut *self.out, 0).finish().map_err(fail)?;
            }
        }
        Ok(())
    }

    /// Add a character device.
    pub(crate) fn device(&mut self, path: &str, (major, minor): (u32, u32)) -> Result<(), FilesError> {
        let entry = self.entry(path, MODE_DEVICE).rdev_major(major).rdev_minor(minor);
        let fail = |source| FilesError::Io { path: path.into(), source };
        entry.write(&mut *self.out, 0).finish().map(drop).map_err(fail)
    }

    /// Write the trailer.
    pub(crate) fn finish(self) -> Result<(), FilesError> {
        let fail = |source| FilesError::Io { path: "archive".into(), source };
        newc::trailer(self.out).map(drop).map_err(fail)
    }

    /// Add a file and its parent folders; return the SHA-256 of the written data.
    pub(crate) fn add(
        &mut self,
        path: &str,
        mode: u32,
        data: &mut impl Read,
        len_bytes: u64,
    ) -> Result<String, FilesError> {
        let fail = |source| FilesError::Io { path: path.into(), source };
        let len = u32::try_from(len_bytes).map_err(|_| FilesError::TooLong { path: path.into(), len_bytes })?;
        let folder = Path::new(path).parent().unwrap_or(Path::new(""));
        self.folder(&folder.display().to_string())?;
        let entry = self.entry(path, mode);
        let mut writer = entry.write(&mut *self.out, len);
        let mut hashing = super::Hashing { inner: data.take(len_bytes), digest: Default::default() };
        io::copy(&mut hashing, &mut writer).map_err(fail)?;
        writer.finish().map_err(fail)?;
        Ok(hex(&sha2::Digest::finalize(hashing.digest)))
    }

    /// Start an entry, without times, so that the output is reproducible.
    fn entry(&mut self, path: &str, mode: u32) -> Builder {
        self.inode += 1;
        Builder::new(path).ino(self.inode).mode(mode).nlink(1)
    }
}
