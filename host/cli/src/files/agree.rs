//! Checks that several files match, tensor by tensor, and can be split or concatenated.
//!
//! Tensors are matched by name, in any order. The first file's order is used from then on.

use super::{AgreeError, ArrayFile, Format, Shape, Tensor};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What a collective does along the first axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axis0 {
    /// Nothing: shapes are the same on all ranks.
    Keep,
    /// The result is split into one equal part per rank.
    Cut,
    /// The ranks' arrays are concatenated; their lengths along the axis may differ.
    Join,
}

/// Inspect all files and check that their tensors match.
///
/// # Errors
/// The first [`AgreeError`], in order of the files.
pub(crate) fn inspect_all(paths: &[PathBuf], axis0: Axis0) -> Result<Vec<ArrayFile>, AgreeError> {
    let files = paths.iter().map(|path| ArrayFile::inspect(path)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = files.first() else { return Ok(files) };
    for tensor in &first.tensors {
        axis(first, tensor, axis0, files.len() as u64)?;
    }
    for file in &files[1..] {
        same_format(file, &first.path, first.format)?;
        same_names(file, first)?;
        for expected in &first.tensors {
            // It exists, because the names are the same.
            let Some(found) = file.tensor(&expected.name) else { continue };
            axis(file, found, axis0, files.len() as u64)?;
            same_type(file, found, first, expected, axis0)?;
        }
    }
    Ok(files)
}

fn same_format(file: &ArrayFile, first: &Path, expected: Format) -> Result<(), AgreeError> {
    if file.format == expected {
        return Ok(());
    }
    Err(AgreeError::Format { path: file.path.clone(), first: first.into(), found: file.format, expected })
}

/// Check that neither of two files has a tensor that the other lacks.
fn same_names(file: &ArrayFile, first: &ArrayFile) -> Result<(), AgreeError> {
    let names = |file: &ArrayFile| file.tensors.iter().map(|tensor| tensor.name.clone()).collect::<BTreeSet<_>>();
    let (here, there) = (names(file), names(first));
    for (path, missing, other) in [(file, &there - &here, first), (first, &here - &there, file)] {
        if !missing.is_empty() {
            let missing = missing.into_iter().collect();
            return Err(AgreeError::Missing { path: path.path.clone(), missing, other: other.path.clone() });
        }
    }
    Ok(())
}

fn same_type(
    file: &ArrayFile,
    found: &Tensor,
    first: &ArrayFile,
    expected: &Tensor,
    axis0: Axis0,
) -> Result<(), AgreeError> {
    let differs = |what, found_value, expected| AgreeError::Differs {
        path: file.path.clone(),
        first: first.path.clone(),
        found: format!("{}{what} {found_value}", found.label()),
        expected,
        except: if axis0 == Axis0::Join { ", except for axis 0" } else { "" },
    };
    // Skip the axis that may differ.
    let from = usize::from(axis0 == Axis0::Join);
    if found.shape.len() != expected.shape.len() || found.shape[from..] != expected.shape[from..] {
        return Err(differs("shape", Shape(&found.shape).to_string(), Shape(&expected.shape).to_string()));
    }
    if found.dtype != expected.dtype {
        return Err(differs("element type", found.dtype.to_string(), expected.dtype.to_string()));
    }
    Ok(())
}

/// Check that a tensor has a first axis and that it can be split, as far as the collective needs it.
fn axis(file: &ArrayFile, tensor: &Tensor, axis0: Axis0, ranks: u64) -> Result<(), AgreeError> {
    let verb = match axis0 {
        Axis0::Keep => return Ok(()),
        Axis0::Cut => "split",
        Axis0::Join => "concatenate",
    };
    match tensor.shape.first() {
        None => Err(AgreeError::NoAxis { path: file.path.clone(), label: tensor.label(), verb }),
        Some(&len) if axis0 == Axis0::Cut && !len.is_multiple_of(ranks) => Err(AgreeError::Parts {
            path: file.path.clone(),
            label: tensor.label(),
            shape: tensor.shape.clone(),
            len,
            ranks,
        }),
        Some(_) => Ok(()),
    }
}
