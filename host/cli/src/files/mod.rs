//! Array files for collectives: two formats, validation and output.
//!
//! The file name determines the format: `.safetensors` holds named tensors; every other file is read as `.npy`, which
//! holds a single array (here a tensor with an empty name). The supervisor inspects header and length of each file
//! before anything starts. The ranks read the elements, tensor by tensor.
//!
//! Invariant: an [`ArrayFile`] describes a file that contained exactly the elements of its header when it was
//! inspected. Lengths in a header are not used before they have been compared with that of the file.

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

/// A file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// NumPy's `.npy`.
    Npy,
    /// Hugging Face's `.safetensors`.
    Safetensors,
}

impl Format {
    /// Return the format that a file's name stands for.
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

/// A shape in Python's notation.
pub(crate) struct Shape<'a>(pub(crate) &'a [u64]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "({one},)"),
            many => write!(f, "({})", many.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// The description of a tensor in a file.
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
    /// The offset of its elements in the file.
    pub(crate) offset: u64,
    /// The length of its elements in bytes.
    pub(crate) len_bytes: usize,
}

impl Tensor {
    /// Return the prefix of messages about this tensor.
    pub(crate) fn label(&self) -> String {
        label(&self.name)
    }

    /// Return the number of elements.
    pub(crate) const fn count(&self) -> u64 {
        (self.len_bytes / self.dtype.size_bytes()) as u64
    }
}

/// Return the prefix of messages about a tensor.
fn label(name: &str) -> String {
    if name.is_empty() { String::new() } else { format!("tensor {name:?}: ") }
}

/// The description of an array file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ArrayFile {
    /// Its path.
    pub(crate) path: PathBuf,
    /// Its format.
    pub(crate) format: Format,
    /// Its tensors, in the order of their elements in the file.
    pub(crate) tensors: Vec<Tensor>,
    /// The bytes in front of the elements.
    pub(crate) head: Vec<u8>,
    /// Metadata in the header, if the format has any.
    pub(crate) metadata: Option<BTreeMap<String, String>>,
}

impl ArrayFile {
    /// Inspect a file's header and length.
    ///
    /// # Errors
    /// [`FileError`] unless the file holds complete arrays of supported types.
    pub(crate) fn inspect(path: &Path) -> Result<Self, FileError> {
        let io_error = |source| FileError::Io { path: path.into(), source };
        let mut file = File::open(path).map_err(io_error)?;
        let len_bytes = file.metadata().map_err(io_error)?.len();
        Self::inspect_from(&mut file, len_bytes, path)
    }

    /// Inspect the contents of `file`, which has `len_bytes` bytes. `path` determines the format and is used in
    /// messages.
    ///
    /// # Errors
    /// Those of [`ArrayFile::inspect`].
    pub(crate) fn inspect_from(file: &mut impl Read, len_bytes: u64, path: &Path) -> Result<Self, FileError> {
        match Format::of(path) {
            Format::Npy => npy::inspect(file, len_bytes, path),
            Format::Safetensors => safetensors::inspect(file, len_bytes, path),
        }
    }

    /// Return the tensor with a name.
    pub(crate) fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Read a tensor's elements in C or Fortran order into `to`, which must have their length.
    ///
    /// # Errors
    /// [`FileError::Io`], also if the file has become shorter since it was inspected.
    pub(crate) fn read(&self, tensor: &Tensor, fortran_order: bool, to: &mut [u8]) -> Result<(), FileError> {
        let read = |to: &mut [u8]| File::open(&self.path)?.read_exact_at(to, tensor.offset);
        let io_error = |source| FileError::Io { path: self.path.clone(), source };
        if fortran_order == tensor.fortran_order || tensor.shape.len() < 2 || to.is_empty() {
            return read(to).map_err(io_error);
        }
        let mut bytes = vec![0; to.len()];
        read(&mut bytes).map_err(io_error)?;
        // An array in one order has the bytes of the transposed array in the other order.
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
