//! Arrays in NumPy's `.npy` files.
//!
//! Source: NEP 1 and `numpy/lib/format.py`. A file consists of the magic `\x93NUMPY`, two bytes of version, the
//! header's length (16 bits in version 1, else 32), the header, and the elements. The header is a Python dictionary
//! literal with exactly the keys `descr`, `fortran_order` and `shape`. It is parsed strictly.

mod header;

use super::{ArrayFile, FileError, Format, Shape, Tensor, len_bytes};
use anyhow::Context;
use header::{Header, read_header};
use std::io::Read;
use std::path::Path;
use sumac_hal::op::Dtype;

/// The supported element types, in the notation of the format.
const TYPES: [(&str, Dtype); 11] = [
    ("|i1", Dtype::I8),
    ("|u1", Dtype::U8),
    ("<i2", Dtype::I16),
    ("<u2", Dtype::U16),
    ("<i4", Dtype::I32),
    ("<u4", Dtype::U32),
    ("<i8", Dtype::I64),
    ("<u8", Dtype::U64),
    ("<f2", Dtype::F16),
    ("<f4", Dtype::F32),
    ("<f8", Dtype::F64),
];

/// Inspect a file of `file_len_bytes` bytes.
pub(super) fn inspect(file: &mut impl Read, file_len_bytes: u64, path: &Path) -> Result<ArrayFile, FileError> {
    let Header { dtype, fortran_order, shape, bytes: head } = read_header(file, path)?;
    let found = u128::from(file_len_bytes.saturating_sub(head.len() as u64));
    // An overflow means that the header claims more than any file can hold.
    let expected = len_bytes(dtype, &shape).unwrap_or(u128::MAX);
    match usize::try_from(expected) {
        Ok(len_bytes) if found == expected => {
            let tensor =
                Tensor { name: String::new(), dtype, shape, fortran_order, offset: head.len() as u64, len_bytes };
            Ok(ArrayFile { path: path.into(), format: Format::Npy, tensors: vec![tensor], head, metadata: None })
        }
        _ => {
            let what = format!("shape {} of {dtype}", Shape(&shape));
            Err(FileError::Length { path: path.into(), what, found, expected })
        }
    }
}

/// Return a header of version 1 for an array in C order.
///
/// # Errors
/// The format does not support the element type.
pub(super) fn head(dtype: Dtype, shape: &[u64]) -> anyhow::Result<Vec<u8>> {
    let descr = TYPES.iter().find(|(_, known)| *known == dtype).map(|(descr, _)| descr);
    let descr = descr.with_context(|| format!(".npy does not support {dtype}"))?;
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {}, }}", Shape(shape));
    // Pad as NumPy does: a line feed ends the header, and the elements begin at a multiple of 64 bytes.
    let front = MAGIC.len() + 4;
    let len = (front + text.len() + 1).next_multiple_of(64) - front;
    text.extend(std::iter::repeat_n(' ', len - 1 - text.len()));
    text.push('\n');
    let len = u16::try_from(text.len()).context("a shape too long for a .npy header")?;
    Ok([MAGIC, &[1, 0], &len.to_le_bytes(), text.as_bytes()].concat())
}

/// The magic bytes at the start of a file.
const MAGIC: &[u8] = b"\x93NUMPY";

/// Convert an array of `shape` from C order to Fortran order; `out` has the length of `bytes`.
pub(super) fn transpose(bytes: &[u8], shape: &[usize], size_bytes: usize, out: &mut [u8]) {
    let mut strides = vec![size_bytes; shape.len()];
    for axis in 1..shape.len() {
        strides[axis] = strides[axis - 1] * shape[axis - 1];
    }
    let (mut index, mut to) = (vec![0; shape.len()], 0);
    for element in bytes.chunks_exact(size_bytes) {
        out[to..to + size_bytes].copy_from_slice(element);
        // Increment the index with the last axis fastest, and update the position with it.
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
}

#[cfg(test)]
mod tests;
