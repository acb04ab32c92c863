//! Output files of collectives, which are written atomically.
//!
//! Invariants: a file has a temporary name in the same folder until every byte is on disk. Several outputs are renamed
//! together; if one rename fails, none of them remains.

use super::{AgreeError, ArrayFile, Axis0, Format, Tensor, npy, safetensors};
use anyhow::Context;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The head of an output file and the places of its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputHead {
    /// The bytes in front of the elements.
    pub(crate) bytes: Vec<u8>,
    /// The tensors, in the order of the first input.
    pub(crate) tensors: Vec<Tensor>,
}

impl OutputHead {
    /// Return the head for the result of these inputs, which match for `axis0`. Metadata comes from the first input.
    ///
    /// # Errors
    /// An array is longer than a file can be.
    pub(crate) fn new(files: &[ArrayFile], axis0: Axis0) -> anyhow::Result<Self> {
        let first = files.first().context("no input")?;
        if axis0 == Axis0::Keep {
            return Ok(Self { bytes: first.head.clone(), tensors: first.tensors.clone() });
        }
        let mut tensors = first.tensors.clone();
        for tensor in &mut tensors {
            reshape(tensor, files, axis0)
                .ok_or_else(|| AgreeError::TooLong { label: tensor.label(), dtype: tensor.dtype })?;
        }
        let bytes = match first.format {
            Format::Npy => npy::head(tensors[0].dtype, &tensors[0].shape)?,
            Format::Safetensors => safetensors::head(first.metadata.as_ref(), &tensors)?,
        };
        let mut offset = bytes.len() as u64;
        for tensor in &mut tensors {
            tensor.offset = offset;
            offset += tensor.len_bytes as u64;
        }
        Ok(Self { bytes, tensors })
    }
}

/// Change a tensor to the shape of its result. Returns `None` if that is longer than a file can be.
fn reshape(tensor: &mut Tensor, files: &[ArrayFile], axis0: Axis0) -> Option<()> {
    let mut lens = files.iter().filter_map(|file| file.tensor(&tensor.name)?.shape.first());
    let joined = lens.try_fold(0_u64, |sum, &len| sum.checked_add(len));
    let axis = tensor.shape.first_mut()?;
    *axis = if axis0 == Axis0::Cut { *axis / files.len() as u64 } else { joined? };
    let len_bytes = super::len_bytes(tensor.dtype, &tensor.shape)?;
    tensor.len_bytes = i64::try_from(len_bytes).ok()? as usize;
    tensor.fortran_order = false;
    Some(())
}

/// An output file in progress. It is removed unless it is published.
#[derive(Debug)]
pub(crate) struct Output {
    temporary: PathBuf,
    path: PathBuf,
}

impl Output {
    /// Create a temporary file next to `path` and write `head` to it.
    ///
    /// # Errors
    /// The file cannot be written there.
    pub(crate) fn create(path: &Path, head: &[u8]) -> anyhow::Result<Self> {
        let name = path.file_name().with_context(|| format!("{} is not the name of a file", path.display()))?;
        anyhow::ensure!(!path.is_dir(), "{} is a directory; name a file in it", path.display());
        let temporary = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        let mut file = File::create_new(&temporary).with_context(|| format!("cannot write {}", path.display()))?;
        let output = Self { temporary, path: path.into() };
        file.write_all(head).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(output)
    }

    /// Return the path to which elements are written.
    pub(crate) fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Rename all files to their final names.
    ///
    /// # Errors
    /// A file cannot be written or renamed. Then none of them remains.
    pub(crate) fn publish(outputs: Vec<Self>) -> anyhow::Result<()> {
        for output in &outputs {
            // After a power cut, a name must not exist without its bytes.
            let sync = || File::open(&output.temporary)?.sync_all();
            sync().with_context(|| format!("cannot write {}", output.path.display()))?;
        }
        for (nth, output) in outputs.iter().enumerate() {
            if let Err(error) = fs::rename(&output.temporary, &output.path) {
                for published in &outputs[..nth] {
                    // Best effort: a file that cannot be removed remains.
                    let _ = fs::remove_file(&published.path);
                }
                return Err(error).with_context(|| format!("cannot write {}", output.path.display()));
            }
        }
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // Fails after `publish`, when the file no longer exists.
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_output_is_removed_and_published_one_remains() {
        let path = std::env::temp_dir().join(format!("sumac-output-{}.npy", std::process::id()));
        let output = Output::create(&path, b"head").expect("a writable temporary directory");
        let temporary = output.temporary.clone();
        assert!(temporary.exists() && !path.exists());
        drop(output);
        assert!(!temporary.exists() && !path.exists());
        Output::create(&path, b"head").and_then(|output| Output::publish(vec![output])).expect("published");
        assert_eq!(fs::read(&path).expect("the output"), b"head");
        assert!(!temporary.exists());
        fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn failed_rename_removes_all_outputs() {
        let dir = std::env::temp_dir().join(format!("sumac-outputs-{}", std::process::id()));
        fs::create_dir(&dir).expect("a writable temporary directory");
        let paths = [dir.join("0.npy"), dir.join("1.npy")];
        let outputs: Vec<_> = paths.iter().map(|path| Output::create(path, b"head").expect("begun")).collect();
        // A file cannot replace a directory that is not empty.
        fs::create_dir(&paths[1]).and_then(|()| fs::write(paths[1].join("x"), b"")).expect("written");
        let error = Output::publish(outputs).expect_err("must fail").to_string();
        assert!(error.contains("1.npy"), "{error}");
        let left: Vec<_> = fs::read_dir(&dir).expect("listed").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["1.npy"]);
        fs::remove_dir_all(&dir).expect("removed");
    }
}
