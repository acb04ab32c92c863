//! Files of arrays: what collectives on files take, and why they refuse the rest.
//!
//! Two formats, told apart by the name: `.safetensors` holds named tensors, everything else is read as `.npy`, which holds
//! one array (here a tensor whose name is empty). Files are looked at (header and length) before anything is started;
//! elements are read by the ranks, tensor by tensor.
//!
//! Invariant: an [`ArrayFile`] describes a file that held every element when it was looked at, and nothing behind
//! them; what a header says of lengths is never believed before it is compared with the file's.

mod agree;
mod error;
mod npy;
mod output;
mod safetensors;
#[cfg(test)]
mod tests;

pub(crate) use agree::{Axis0, inspect_all};
pub(crate) use error::{AgreeError, FileError};
pub(crate) use output::{Output, OutputHead};

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use sumac_hal::op::Dtype;

/// A kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// NumPy's.
    Npy,
    /// Hugging Face's.
    Safetensors,
}

impl Format {
    /// Return what a file's name says of its format.
    pub(crate) fn of(path: &Path) -> Self {
        let is_safetensors = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("safetensors"));
        if is_safetensors { Self::Safetensors } else { Self::Npy }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Npy => ".npy",
            Self::Safetensors => ".safetensors",
        })
    }
}

/// A shape as Python writes it.
pub(crate) struct Shape<'a>(pub(crate) &'a [u64]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "({one},)"),
            many => write!(f, "({})", many.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// A tensor in a file, looked at but not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tensor {
    /// Its name; empty in a format without names.
    pub(crate) name: String,
    /// Its element type.
    pub(crate) dtype: Dtype,
    /// Its shape.
    pub(crate) shape: Vec<u64>,
    /// Whether the first index varies fastest in the file.
    pub(crate) fortran_order: bool,
    /// Where its elements begin in the file.
    pub(crate) offset: u64,
    /// Their length in bytes.
    pub(crate) len_bytes: usize,
}

impl Tensor {
    /// Return what messages put in front of what they say of this tensor.
    pub(crate) fn label(&self) -> String {
        label(&self.name)
    }

    /// Return the number of elements.
    pub(crate) const fn count(&self) -> u64 {
        (self.len_bytes / self.dtype.size_bytes()) as u64
    }
}

/// Return what messages put in front of what they say of a tensor.
fn label(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!("tensor {name:?}: ") }
}

/// A file of arrays, looked at but not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ArrayFile {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// What it is.
    pub(crate) format: Format,
    /// Its tensors, in order of their elements in the file.
    pub(crate) tensors: Vec<Tensor>,
    /// The file's bytes in front of the elements.
    pub(crate) head: Vec<u8>,
    /// What the header says besides, if the format has room for it.
    pub(crate) metadata: Option<BTreeMap<String, String>>,
}

impl ArrayFile {
    /// Look at a file's header and length.
    ///
    /// # Errors
    /// [`FileError`] for all but whole arrays of known types.
    pub(crate) fn inspect(path: &Path) -> Result<Self, FileError> {
        let io_error = |source| FileError::Io { path: path.into(), source };
        let mut file = File::open(path).map_err(io_error)?;
        let len_bytes = file.metadata().map_err(io_error)?.len();
        Self::inspect_from(&mut file, len_bytes, path)
    }

    /// Look at what `file` gives, which is `len_bytes` long; `path` names it in messages, and says what it is.
    ///
    /// # Errors
    /// As [`ArrayFile::inspect`].
    pub(crate) fn inspect_from(file: &mut impl Read, len_bytes: u64, path: &Path) -> Result<Self, FileError> {
        match Format::of(path) {
            Format::Npy => npy::inspect(file, len_bytes, path),
            Format::Safetensors => safetensors::inspect(file, len_bytes, path),
        }
    }

    /// Return the tensor of a name.
    pub(crate) fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Read a tensor's elements into `to`, which is as long as they are, in C or Fortran order.
    ///
    /// # Errors
    /// [`FileError::Io`]; the file may have changed since it was looked at.
    pub(crate) fn read(&self, tensor: &Tensor, fortran_order: bool, to: &mut [u8]) -> Result<(), FileError> {
        let read = |to: &mut [u8]| File::open(&self.path)?.read_exact_at(to, tensor.offset);
        let io_error = |source| FileError::Io { path: self.path.clone(), source };
        if fortran_order == tensor.fortran_order || tensor.shape.len() < 2 || to.is_empty() {
            return read(to).map_err(io_error);
        }
        let mut bytes = vec![0; to.len()];
        read(&mut bytes).map_err(io_error)?;
        // The bytes of an array in one order are those of the transposed array in the other.
        let mut shape: Vec<usize> = tensor.shape.iter().map(|&dim| dim as usize).collect();
        if tensor.fortran_order {
            shape.reverse();
        }
        npy::transpose(&bytes, &shape, tensor.dtype.size_bytes(), to);
        Ok(())
    }
}

/// Return the length of the elements of a shape in bytes; `None` if it overflows.
fn len_bytes(dtype: Dtype, shape: &[u64]) -> Option<u128> {
    shape.iter().try_fold(dtype.size_bytes() as u128, |n, &dim| n.checked_mul(u128::from(dim)))
}
