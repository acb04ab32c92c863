//! Errors of array files, alone or together. Every message names the file and the values.

use super::{Format, Shape};
use std::io;
use std::path::PathBuf;
use sumac_hal::op::Dtype;
use thiserror::Error;

/// Why a file cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum FileError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another format, or a damaged header.
    #[error("{}: not a {format} file: {why}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The format that its name stands for.
        format: Format,
        /// The first error found.
        why: String,
    },
    /// An unsupported element type.
    #[error("{}: {label}element type {found} is not supported; convert it to one of {known}", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// Prefix with the tensor's name, if it has one.
        label: String,
        /// The type in the notation of the file.
        found: String,
        /// The supported types in the notation of the format.
        known: String,
    },
    /// More or fewer bytes than the header says.
    #[error("{}: {found} bytes of elements, but {what} has {expected}; the file is {}",
        path.display(), if found < expected { "truncated" } else { "longer than its header says" })]
    Length {
        /// The file.
        path: PathBuf,
        /// Description of the header's contents.
        what: String,
        /// Bytes in the file.
        found: u128,
        /// Bytes according to the header.
        expected: u128,
    },
}

/// Why files do not match, or cannot be split or concatenated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum AgreeError {
    /// A file is invalid by itself.
    #[error(transparent)]
    File(#[from] FileError),
    /// Files of different formats.
    #[error("{}: a {found} file, but {} is {expected}; all inputs and the output must have the same format",
        path.display(), first.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The file that it is compared with.
        first: PathBuf,
        /// This file's format.
        found: Format,
        /// That file's format.
        expected: Format,
    },
    /// Tensors that only some files have.
    #[error("{}: lacks {}, which {} has", path.display(), names(missing), other.display())]
    Missing {
        /// The file that lacks them.
        path: PathBuf,
        /// Their names.
        missing: Vec<String>,
        /// A file that has them.
        other: PathBuf,
    },
    /// Two tensors differ.
    #[error("{}: {found}, but {} has {expected}; all inputs must have the same{except}",
        path.display(), first.display())]
    Differs {
        /// The file.
        path: PathBuf,
        /// The file that it is compared with.
        first: PathBuf,
        /// What differs, with its value in this file.
        found: String,
        /// Its value in that file.
        expected: String,
        /// What may differ.
        except: &'static str,
    },
    /// A scalar cannot be split or concatenated.
    #[error("{}: {label}shape () has no axis 0 to {verb} along", path.display())]
    NoAxis {
        /// The file.
        path: PathBuf,
        /// Prefix with the tensor's name, if it has one.
        label: String,
        /// `split` or `concatenate`.
        verb: &'static str,
    },
    /// Axis 0 cannot be split into equal parts.
    #[error("{}: {label}cannot split shape {} into {ranks} equal parts: axis 0 has {len}, which is not a multiple of {ranks}",
        path.display(), Shape(shape))]
    Parts {
        /// The file.
        path: PathBuf,
        /// Prefix with the tensor's name, if it has one.
        label: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The length of axis 0.
        len: u64,
        /// Number of parts.
        ranks: u64,
    },
    /// The result is too long for a file.
    #[error("{label}the concatenated arrays of {dtype} exceed the maximum length of a file")]
    TooLong {
        /// Prefix with the tensor's name, if it has one.
        label: String,
        /// Its element type.
        dtype: Dtype,
    },
}

/// The maximum number of names in a message.
const NAMES_MAX: usize = 8;

fn names(missing: &[String]) -> String {
    let mut text = missing.iter().take(NAMES_MAX).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    if missing.len() > NAMES_MAX {
        text += &format!(" and {} more", missing.len() - NAMES_MAX);
    }
    format!("tensor{} {text}", if missing.len() == 1 { "" } else { "s" })
}
