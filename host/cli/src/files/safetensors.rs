//! Tensors in `.safetensors` files.
//!
//! Source: the description of the format in the `safetensors` crate, which also validates the header here. A file
//! consists of eight bytes of header length (little-endian), a JSON object of names with `dtype`, `shape` and
//! `data_offsets`, and the elements without gaps. The length of the header has the same limit as in that crate.

use super::{ArrayFile, FileError, Format, Tensor};
use anyhow::Context;
use safetensors::tensor::{Dtype as Stored, Metadata, TensorInfo};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::Path;
use sumac_hal::op::Dtype;

/// The longest header in bytes: the limit of the `safetensors` crate.
const HEADER_MAX_LEN: u64 = 100_000_000;

/// The length of the prefix that holds the header's length, in bytes.
const PREFIX_LEN: u64 = 8;

/// The supported element types, in the notation of the format.
const TYPES: [(Stored, Dtype); 14] = [
    (Stored::I8, Dtype::I8),
    (Stored::U8, Dtype::U8),
    (Stored::I16, Dtype::I16),
    (Stored::U16, Dtype::U16),
    (Stored::I32, Dtype::I32),
    (Stored::U32, Dtype::U32),
    (Stored::I64, Dtype::I64),
    (Stored::U64, Dtype::U64),
    (Stored::F16, Dtype::F16),
    (Stored::BF16, Dtype::Bf16),
    (Stored::F32, Dtype::F32),
    (Stored::F64, Dtype::F64),
    (Stored::F8_E4M3, Dtype::E4m3),
    (Stored::F8_E5M2, Dtype::E5m2),
];

/// Inspect a file of `len_bytes` bytes.
pub(super) fn inspect(file: &mut impl Read, len_bytes: u64, path: &Path) -> Result<ArrayFile, FileError> {
    let foreign = |why: String| FileError::Foreign { path: path.into(), format: Format::Safetensors, why };
    let head = read_head(file, len_bytes, path)?;
    let metadata: Metadata = serde_json::from_slice(&head[PREFIX_LEN as usize..])
        .map_err(|error| foreign(format!("invalid header: {error}")))?;
    let data_start = head.len() as u64;
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let known = TYPES.iter().find(|(stored, _)| *stored == info.dtype);
        let &(_, dtype) = known.ok_or_else(|| FileError::Type {
            path: path.into(),
            label: super::label(&name),
            found: info.dtype.to_string(),
            known: TYPES.map(|(stored, _)| stored.to_string()).join(", "),
        })?;
        if name.is_empty() {
            return Err(foreign("it has a tensor without a name".into()));
        }
        let (start, end) = info.data_offsets;
        tensors.push(Tensor {
            name,
            dtype,
            shape: info.shape.iter().map(|&dim| dim as u64).collect(),
            fortran_order: false,
            offset: data_start + start as u64,
            len_bytes: end - start,
        });
    }
    // The crate has checked that there are no gaps between elements.
    let (found, expected) = (u128::from(len_bytes - data_start), metadata.data_len() as u128);
    if found != expected {
        return Err(FileError::Length { path: path.into(), what: "its header".into(), found, expected });
    }
    let kept = metadata.metadata().as_ref();
    let kept = kept.map(|kept| kept.iter().map(|(key, value)| (key.clone(), value.clone())).collect());
    Ok(ArrayFile { path: path.into(), format: Format::Safetensors, tensors, head, metadata: kept })
}

/// Return a header for tensors in this order.
///
/// # Errors
/// The format does not support an element type.
pub(super) fn head(metadata: Option<&BTreeMap<String, String>>, tensors: &[Tensor]) -> anyhow::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Head<'a> {
        #[serde(rename = "__metadata__", skip_serializing_if = "Option::is_none")]
        metadata: Option<&'a BTreeMap<String, String>>,
        #[serde(flatten)]
        tensors: BTreeMap<&'a str, TensorInfo>,
    }
    let mut start = 0;
    let infos = tensors.iter().map(|tensor| {
        let end = start + tensor.len_bytes;
        let stored = TYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype);
        let &(stored, _) = stored.with_context(|| format!(".safetensors does not support {}", tensor.dtype))?;
        let info = TensorInfo {
            dtype: stored,
            shape: tensor.shape.iter().map(|&dim| dim as usize).collect(),
            data_offsets: (std::mem::replace(&mut start, end), end),
        };
        Ok((tensor.name.as_str(), info))
    });
    let tensors = infos.collect::<anyhow::Result<_>>()?;
    let mut text = serde_json::to_vec(&Head { metadata, tensors })?;
    // Elements begin at a multiple of eight bytes, as the `safetensors` crate writes them.
    text.resize(text.len().next_multiple_of(PREFIX_LEN as usize), b' ');
    Ok([&(text.len() as u64).to_le_bytes(), &text[..]].concat())
}

fn read_head(file: &mut impl Read, len_bytes: u64, path: &Path) -> Result<Vec<u8>, FileError> {
    let foreign = |why: String| FileError::Foreign { path: path.into(), format: Format::Safetensors, why };
    let read = |file: &mut dyn Read, to: &mut [u8], what: &str| match file.read_exact(to) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(foreign(format!("it ends within {what}"))),
        Err(source) => Err(FileError::Io { path: path.into(), source }),
    };
    let mut head = vec![0; PREFIX_LEN as usize];
    read(file, &mut head, "its header's length")?;
    let len = head.iter().rev().fold(0_u64, |n, &byte| n << 8 | u64::from(byte));
    let most = HEADER_MAX_LEN.min(len_bytes.saturating_sub(PREFIX_LEN));
    if len > most {
        return Err(foreign(format!("the header length {len} exceeds the limit of {most} bytes")));
    }
    head.resize((PREFIX_LEN + len) as usize, 0);
    read(file, &mut head[PREFIX_LEN as usize..], "its header")?;
    Ok(head)
}
