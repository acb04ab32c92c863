//! Files for the card's first file system, with a manifest of their own.
//!
//! Whoever builds an initramfs keeps it as it is, compressed or not: [`write_archive`] makes a second archive (cpio, `newc`)
//! with the files that the agent is to start and their signed manifest, and the kernel unpacks concatenated archives one
//! after the other, later files over earlier ones (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
//! On the card, [`check`] holds the files against the manifest before any of them is started.

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

/// Where the manifest is in the card's file system.
pub const MANIFEST_PATH: &str = "etc/sumac/manifest.json";

/// Regular file, read and run by all, written by root.
pub(crate) const MODE_FILE: u32 = 0o100_755;
pub(crate) const MODE_MANIFEST: u32 = 0o100_444;
const MODE_FOLDER: u32 = 0o040_755;
/// Character device, for root only.
const MODE_DEVICE: u32 = 0o020_600;

/// What the agent may start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileManifest {
    /// What people call it; that of the stream.
    pub version: String,
    /// As the stream's.
    pub epoch: u64,
    /// The files.
    pub files: Vec<FileDigest>,
}

/// A file and what is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    /// Where it is, from the root, without a leading slash.
    pub path: String,
    /// Length, in bytes.
    pub len_bytes: u64,
    /// SHA-256, in hexadecimal digits.
    pub sha256: String,
}

impl Document for FileManifest {
    const TYPE: &'static str = "application/vnd.sumac.file-manifest+json";
}

/// Why files can't be packed or believed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FilesError {
    /// Not a place in the card's file system.
    #[error("{0:?} is no place for a file; write it from the root, as /usr/bin/sumac, without . and ..")]
    Path(String),
    /// The version of the stream is none.
    #[error("{0:?} is no version")]
    Version(String),
    /// The manifest can't be believed.
    #[error("{MANIFEST_PATH}: {0}")]
    Envelope(#[from] EnvelopeError),
    /// More than cpio can say.
    #[error("{path}: {len_bytes} bytes; cpio holds files of less than 4 GiB")]
    TooLong {
        /// Which.
        path: String,
        /// How long, in bytes.
        len_bytes: u64,
    },
    /// The bytes are not those of the manifest.
    #[error("{path}: SHA-256 is {found}, the manifest says {expected}; do not start it")]
    Differs {
        /// Which.
        path: String,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A file can't be read, or the archive not written.
    #[error("{path}: {source}")]
    Io {
        /// Which.
        path: String,
        /// What the system says.
        source: io::Error,
    },
}

/// Write an archive of files, each with its path on the card, and their manifest, signed if there is a key.
///
/// # Errors
/// A path is none, a file can't be read or is too long, or writing fails. What was written then is of no use.
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
        let path = place(path)?;
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

/// Hold the files below `root` against the manifest there.
///
/// # Errors
/// There is no manifest or it can't be believed; a file is missing or differs.
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
        let file = File::open(root.join(place(path)?)).map_err(fail(path))?;
        // One byte more than is due shows in the digest.
        let found = hex(&sha256_of(file.take(len_bytes.saturating_add(1))).map_err(fail(path))?);
        if found != *sha256 {
            return Err(FilesError::Differs { path: path.clone(), found, expected: sha256.clone() });
        }
    }
    Ok(manifest)
}

/// Return a path without its leading slash, if it stays below the root.
fn place(path: &str) -> Result<String, FilesError> {
    let relative = path.strip_prefix('/').unwrap_or(path);
    // Told from the text: `Path` forgives what the kernel's unpacking does not. cpio ends names with a zero byte.
    let plain = relative.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.contains('\0'));
    if !plain {
        return Err(FilesError::Path(path.into()));
    }
    Ok(relative.into())
}

/// A `newc` archive in the making.
pub(crate) struct Archive<'a, W: Write> {
    out: &'a mut W,
    /// What has an entry already.
    folders: BTreeSet<PathBuf>,
    inode: u32,
}

impl<'a, W: Write> Archive<'a, W> {
    pub(crate) fn new(out: &'a mut W) -> Self {
        Self { out, folders: BTreeSet::new(), inode: 0 }
    }

    /// Add a folder and those on the way to it.
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

    /// Say that this is all.
    pub(crate) fn finish(self) -> Result<(), FilesError> {
        let fail = |source| FilesError::Io { path: "archive".into(), source };
        newc::trailer(self.out).map(drop).map_err(fail)
    }

    /// Add a file and the folders on the way to it; return the SHA-256 of what was written.
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

    /// Begin an entry; the same input gives the same bytes, so there are no times.
    fn entry(&mut self, path: &str, mode: u32) -> Builder {
        self.inode += 1;
        Builder::new(path).ino(self.inode).mode(mode).nlink(1)
    }
}
