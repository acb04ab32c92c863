//! Files with secrets: only their owner may read them.

use super::key::{Key, KeyError};
use rustix::fs::{FileType, Mode, OFlags};
use std::borrow::ToOwned;
use std::format;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::string::String;
use thiserror::Error;
use zeroize::Zeroizing;

/// Why a file with a key cannot be used. No message contains a secret.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KeyFileError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Others can read or change the file.
    #[error("others can read or change {path} (mode {mode:04o}): run `chmod 600` on it, and replace its keys", path = path.display())]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The file belongs to another user.
    #[error("{path} belongs to user {owner}, who can change it; it must belong to this user, {uid}, or to root", path = path.display())]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        uid: u32,
    },
    /// The file is too long.
    #[error("{path} has more than {len_max} bytes", path = path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit.
        len_max: usize,
    },
    /// The file's content is not a key.
    #[error("{path}: {source}", path = path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: KeyError,
    },
    /// The file cannot be written.
    #[error("cannot write {path}: {source}", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The length of the longest file with one key, in bytes.
const KEY_FILE_LEN_MAX: usize = 64 * 1024;

/// Read a key from a file, or from stdin if `path` is `-`. Lines that begin with `#` are comments.
///
/// # Errors
/// [`KeyFileError`]; a file that others can read or change is refused.
pub fn read_key(path: &Path) -> Result<Key, KeyFileError> {
    let text = if path.as_os_str() == "-" {
        read_all(path, io::stdin().lock(), KEY_FILE_LEN_MAX)?
    } else {
        read_private(path, KEY_FILE_LEN_MAX)?
    };
    parse_key(&text).map_err(|source| KeyFileError::Key { path: path.to_owned(), source })
}

/// Parse the text of a key's file.
///
/// # Errors
/// [`KeyError`].
pub fn parse_key(text: &str) -> Result<Key, KeyError> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    match (lines.next(), lines.next()) {
        (Some(line), None) => line.parse(),
        _ => Err(KeyError::Form),
    }
}

/// Write a key to a new file that only its owner can read, below a comment. An existing file is not replaced.
///
/// # Errors
/// [`KeyFileError::Write`]; nothing is left behind.
pub fn write_new_key(path: &Path, key: &Key, comment: &str) -> Result<(), KeyFileError> {
    let text = Zeroizing::new(format!("# {comment}\n{}\n", key.reveal()));
    let failed = |source| KeyFileError::Write { path: path.to_owned(), source };
    let mut file = create_private(path).map_err(failed)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.map_err(|source| {
        let _ = std::fs::remove_file(path);
        failed(source)
    })
}

/// Read a file of at most `len_max` bytes that only its owner may read.
///
/// # Errors
/// [`KeyFileError`]; a file that others can read or change is refused.
pub fn read_private(path: &Path, len_max: usize) -> Result<Zeroizing<String>, KeyFileError> {
    let failed = |source: io::Error| KeyFileError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    // Of the open file: the one of that name may be another by now.
    check_private(path, &file)?;
    read_all(path, file, len_max)
}

/// Check that an open file, whose name is `path`, is its owner's alone. The group of a disk may have it, because a
/// disk's owner is root.
///
/// # Errors
/// [`KeyFileError::Mode`], [`KeyFileError::Owner`] or [`KeyFileError::Read`].
pub fn check_private(path: &Path, file: impl AsFd) -> Result<(), KeyFileError> {
    let failed = |source: rustix::io::Errno| KeyFileError::Read { path: path.to_owned(), source: source.into() };
    let stat = rustix::fs::fstat(file).map_err(failed)?;
    let (mode, owner) = (stat.st_mode & 0o7777, stat.st_uid);
    let is_disk = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    if mode & if is_disk { 0o007 } else { 0o077 } != 0 {
        return Err(KeyFileError::Mode { path: path.to_owned(), mode });
    }
    let uid = rustix::process::geteuid().as_raw();
    if owner != uid && owner != 0 {
        return Err(KeyFileError::Owner { path: path.to_owned(), owner, uid });
    }
    Ok(())
}

fn read_all(path: &Path, file: impl Read, len_max: usize) -> Result<Zeroizing<String>, KeyFileError> {
    // Of its final length, so that growing leaves no copies behind.
    let mut text = Zeroizing::new(String::with_capacity(len_max + 1));
    let read = file.take(len_max as u64 + 1).read_to_string(&mut text);
    read.map_err(|source| KeyFileError::Read { path: path.to_owned(), source })?;
    if text.len() > len_max {
        return Err(KeyFileError::TooLong { path: path.to_owned(), len_max });
    }
    Ok(text)
}

/// Replace a file's content at once, or create it, so that only its owner can read it.
///
/// # Errors
/// [`KeyFileError::Write`]; the file is as it was.
pub fn replace_private(path: &Path, text: &str) -> Result<(), KeyFileError> {
    let failed = |source| KeyFileError::Write { path: path.to_owned(), source };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let new = path.with_file_name(name);
    let mut file = create_private(&new).map_err(failed)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.and_then(|()| std::fs::rename(&new, path)).map_err(|source| {
        let _ = std::fs::remove_file(&new);
        failed(source)
    })
}

fn create_private(path: &Path) -> io::Result<std::fs::File> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}
