//! The file in which a device keeps the highest term of its controllers over restarts.
//!
//! It holds the term in decimal digits and a newline. A new term is written to a file beside it, which then replaces
//! it, so that it is never half written.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use sumac_hal::ctrl::TERM_MAX;
use thiserror::Error;

/// Why the file of the highest term cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TermFileError {
    /// It cannot be read or written.
    #[error("file of the highest term, {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It holds something else.
    #[error("{} does not hold a term; remove it if no controller of an earlier term is left", path.display())]
    Content {
        /// The file.
        path: PathBuf,
    },
}

/// Read the term; 0 if there is no file yet.
pub(super) fn read(path: &Path) -> Result<u64, TermFileError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(source) => return Err(TermFileError::Io { path: path.to_owned(), source }),
    };
    let term = text.trim_end().parse().ok().filter(|&term| term <= TERM_MAX);
    term.ok_or_else(|| TermFileError::Content { path: path.to_owned() })
}

/// Replace the term. It is on the disk when this returns.
pub(super) fn write(path: &Path, term: u64) -> Result<(), TermFileError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = File::create(&new)
        .and_then(|mut file| {
            writeln!(file, "{term}")?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&new, path))
        .and_then(|()| File::open(folder)?.sync_all());
    written.map_err(|source| {
        let _ = fs::remove_file(&new);
        TermFileError::Io { path: path.to_owned(), source }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn term_round_trips_and_other_content_is_named() {
        let folder = std::env::temp_dir().join(format!("sumac-term-{}", std::process::id()));
        fs::create_dir(&folder).expect("a new folder");
        let path = folder.join("term");
        assert_eq!(read(&path).expect("no file yet"), 0);
        for term in [1, TERM_MAX] {
            write(&path, term).expect("writable");
            assert_eq!(read(&path).expect("a term"), term);
        }
        for text in ["", "x\n", "-1\n", "281474976710657\n"] {
            fs::write(&path, text).expect("writable");
            assert!(matches!(read(&path), Err(TermFileError::Content { .. })), "{text:?}");
        }
        assert_eq!(fs::read_dir(&folder).expect("a folder").count(), 1, "nothing is left behind");
        fs::remove_dir_all(&folder).expect("ours");
        assert!(matches!(write(&path, 1), Err(TermFileError::Io { .. })));
    }
}
