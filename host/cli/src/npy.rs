//! Arrays in NumPy's `.npy` files: what `all-reduce` takes, and why it refuses the rest.
//!
//! Source: NEP 1 and `numpy/lib/format.py`. A file is the magic `\x93NUMPY`, two bytes of version, the header's length (16
//! bits in version 1, else 32), the header, and the elements. The header is a Python dictionary literal with
//! exactly the keys `descr`, `fortran_order` and `shape`, which is read here strictly: what a file from elsewhere says of
//! its length is never believed before it is compared with the file's.
//!
//! Invariant: an [`Array`] describes a file that held every element when it was looked at, and nothing behind them.

mod header;

use header::{Header, read_header};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use sumac_hal::op::Dtype;
use thiserror::Error;

/// Why an array can't be used. Every message names the file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum NpyError {
    /// The file can't be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No `.npy` file, or one that is damaged in its header.
    #[error("{}: not a .npy file: {why}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The first thing that is wrong.
        why: String,
    },
    /// An element type without a kernel.
    #[error("{}: element type {descr}; known are little-endian i1 to i8, u1 to u8, f2, f4 and f8 (convert with numpy's astype)", path.display())]
    Type {
        /// The file.
        path: PathBuf,
        /// As the file calls it.
        descr: String,
    },
    /// More or fewer bytes than the header says.
    #[error("{}: {found} bytes of elements, but shape {} of {dtype} has {expected}; the file is {}",
        path.display(), Shape(shape), if found < expected { "truncated" } else { "longer than its header says" })]
    Length {
        /// The file.
        path: PathBuf,
        /// The array's shape.
        shape: Vec<u64>,
        /// Its element type.
        dtype: Dtype,
        /// Bytes that there are.
        found: u128,
        /// Bytes that the shape needs.
        expected: u128,
    },
    /// Two arrays do not go together.
    #[error("{}: {what} {found}, but {} has {expected}; all inputs must have the same", path.display(), first.display())]
    Differs {
        /// The file.
        path: PathBuf,
        /// The file that it is compared with.
        first: PathBuf,
        /// `shape` or `element type`.
        what: &'static str,
        /// This file's.
        found: String,
        /// That file's.
        expected: String,
    },
}

/// A shape as Python writes it.
struct Shape<'a>(&'a [u64]);

impl fmt::Display for Shape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "({one},)"),
            many => write!(f, "({})", many.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

/// An array in a file, looked at but not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Array {
    path: PathBuf,
    header: Header,
    len_bytes: usize,
}

impl Array {
    /// Look at a file's header and length.
    ///
    /// # Errors
    /// [`NpyError`] for all but a whole array of a known type.
    pub(crate) fn inspect(path: &Path) -> Result<Self, NpyError> {
        let io_error = |source| NpyError::Io { path: path.into(), source };
        let mut file = File::open(path).map_err(io_error)?;
        let header = read_header(&mut file, path)?;
        let file_len_bytes = file.metadata().map_err(io_error)?.len();
        let found = u128::from(file_len_bytes.saturating_sub(header.bytes.len() as u64));
        // No product of a shape that a file can hold overflows; one that a header only claims may.
        let dtype = header.dtype;
        let expected =
            header.shape.iter().try_fold(dtype.size_bytes() as u128, |n, &dim| n.checked_mul(u128::from(dim)));
        let expected = expected.unwrap_or(u128::MAX);
        match usize::try_from(expected) {
            Ok(len_bytes) if found == expected => Ok(Self { path: path.into(), header, len_bytes }),
            _ => Err(NpyError::Length { path: path.into(), shape: header.shape, dtype, found, expected }),
        }
    }

    /// Look at all files and see that their arrays go together.
    ///
    /// # Errors
    /// The first [`NpyError`], in order of the files.
    pub(crate) fn inspect_all(paths: &[PathBuf]) -> Result<Vec<Self>, NpyError> {
        let arrays = paths.iter().map(|path| Self::inspect(path)).collect::<Result<Vec<_>, _>>()?;
        for array in &arrays {
            let differs = |what, found, expected| NpyError::Differs {
                path: array.path.clone(),
                first: arrays[0].path.clone(),
                what,
                found,
                expected,
            };
            let (own, first) = (&array.header, &arrays[0].header);
            if own.shape != first.shape {
                return Err(differs("shape", Shape(&own.shape).to_string(), Shape(&first.shape).to_string()));
            }
            if own.dtype != first.dtype {
                return Err(differs("element type", own.dtype.to_string(), first.dtype.to_string()));
            }
        }
        Ok(arrays)
    }

    /// Return the element type.
    pub(crate) const fn dtype(&self) -> Dtype {
        self.header.dtype
    }

    /// Return the shape.
    pub(crate) fn shape(&self) -> String {
        Shape(&self.header.shape).to_string()
    }

    /// Return whether the first index varies fastest in the file.
    pub(crate) const fn fortran_order(&self) -> bool {
        self.header.fortran_order
    }

    /// Return the file's bytes in front of the elements: also the head of any array of the same type, shape and order.
    pub(crate) fn head(&self) -> &[u8] {
        &self.header.bytes
    }

    /// Read the elements, in C or Fortran order whichever the file has.
    ///
    /// # Errors
    /// [`NpyError::Io`]; the file may have changed since it was looked at.
    pub(crate) fn read(&self, fortran_order: bool) -> Result<Vec<u8>, NpyError> {
        let read = || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(self.header.bytes.len() as u64))?;
            let mut bytes = vec![0; self.len_bytes];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        let bytes: Vec<u8> = read().map_err(|source| NpyError::Io { path: self.path.clone(), source })?;
        if fortran_order == self.header.fortran_order {
            return Ok(bytes);
        }
        // The bytes of an array in one order are those of the transposed array in the other.
        let mut shape: Vec<usize> = self.header.shape.iter().map(|&dim| dim as usize).collect();
        if self.header.fortran_order {
            shape.reverse();
        }
        Ok(transpose(&bytes, &shape, self.dtype().size_bytes()))
    }
}

/// Turn an array of `shape` in C order into Fortran order.
fn transpose(bytes: &[u8], shape: &[usize], size_bytes: usize) -> Vec<u8> {
    let mut strides = vec![size_bytes; shape.len()];
    for axis in 1..shape.len() {
        strides[axis] = strides[axis - 1] * shape[axis - 1];
    }
    let mut out = vec![0; bytes.len()];
    let (mut index, mut to) = (vec![0; shape.len()], 0);
    for element in bytes.chunks_exact(size_bytes) {
        out[to..to + size_bytes].copy_from_slice(element);
        // Count up with the last axis fastest, and keep the place in step.
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            to += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            to -= strides[axis] * shape[axis];
            index[axis] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests;
