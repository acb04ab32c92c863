//! Why files of arrays can't be used, alone or together. Every message names the file and the values.

use super::{Format, Shape};
use std::io;
use std::path::PathBuf;
use sumac_hal::op::Dtype;
use thiserror::Error;

/// Why a file can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum FileError {
    /// The file can't be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another kind of file, or one that is damaged in its header.
    #[error("{}: not a {format} file: {why}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What its name says that it is.
        format: Format,
        /// The first thing that is wrong.
        why: String,
    },
    /// An element type without a kernel.
    #[error("{}: {label}element type {found}; known are {known} (convert it first)", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// Which tensor, if the file has several.
        label: String,
        /// As the file calls it.
        found: String,
        /// What this version reduces, as the format calls it.
        known: String,
    },
    /// More or fewer bytes than the header says.
    #[error("{}: {found} bytes of elements, but {what} has {expected}; the file is {}",
        path.display(), if found < expected { "truncated" } else { "longer than its header says" })]
    Length {
        /// The file.
        path: PathBuf,
        /// What the header describes.
        what: String,
        /// Bytes that there are.
        found: u128,
        /// Bytes that the header needs.
        expected: u128,
    },
}

/// Why files do not go together, or into what is asked for.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum AgreeError {
    /// A file alone is at fault already.
    #[error(transparent)]
    File(#[from] FileError),
    /// Files of two formats.
    #[error("{}: a {found} file, but {} is {expected}; all inputs must have the same format, and the output too",
        path.display(), first.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The file that it is compared with.
        first: PathBuf,
        /// This file's.
        found: Format,
        /// That file's.
        expected: Format,
    },
    /// Tensors that only some of the files have.
    #[error("{}: lacks {}, which {} has", path.display(), names(missing), other.display())]
    Missing {
        /// The file that lacks them.
        path: PathBuf,
        /// Their names.
        missing: Vec<String>,
        /// A file that has them.
        other: PathBuf,
    },
    /// Two tensors do not go together.
    #[error("{}: {found}, but {} has {expected}; all inputs must have the same{except}",
        path.display(), first.display())]
    Differs {
        /// The file.
        path: PathBuf,
        /// The file that it is compared with.
        first: PathBuf,
        /// What differs, and how it is in this file.
        found: String,
        /// How it is in that file.
        expected: String,
        /// What need not be the same.
        except: &'static str,
    },
    /// No axis to cut or join along.
    #[error("{}: {label}shape () has no axis 0 to {verb} along", path.display())]
    NoAxis {
        /// The file.
        path: PathBuf,
        /// Which tensor, if the file has several.
        label: String,
        /// `cut` or `join`.
        verb: &'static str,
    },
    /// Parts would not be equal.
    #[error("{}: {label}shape {} can't be cut into {ranks} equal parts: axis 0 has {len}, no multiple of {ranks}",
        path.display(), Shape(shape))]
    Parts {
        /// The file.
        path: PathBuf,
        /// Which tensor, if the file has several.
        label: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The length of axis 0.
        len: u64,
        /// Parts asked for.
        ranks: u64,
    },
    /// More than can be addressed.
    #[error("{label}the joined arrays of {dtype} are longer than a file can be")]
    TooLong {
        /// Which tensor, if the files have several.
        label: String,
        /// Its element type.
        dtype: Dtype,
    },
}

/// How many names a message lists.
const NAMES_MAX: usize = 8;

fn names(missing: &[String]) -> String {
    let mut text = missing.iter().take(NAMES_MAX).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    if missing.len() > NAMES_MAX {
        text += &format!(" and {} more", missing.len() - NAMES_MAX);
    }
    format!("tensor{} {text}", if missing.len() == 1 { "" } else { "s" })
}
