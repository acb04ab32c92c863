//! Files that collectives write: their heads, and how they appear whole or not at all.
//!
//! Invariants: a file has a temporary name beside its own until every byte is on the disk; several outputs get their
//! names together, and where one can't, none keeps its.

use super::{AgreeError, ArrayFile, Axis0, Format, Tensor, npy, safetensors};
use anyhow::Context;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What stands in front of an output's elements, and where they go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputHead {
    /// The bytes in front.
    pub(crate) bytes: Vec<u8>,
    /// The tensors, in the order of the first input's.
    pub(crate) tensors: Vec<Tensor>,
}

impl OutputHead {
    /// Return the head of what comes of these inputs, which go together for `axis0`. What the header of the first one
    /// says besides shapes is kept.
    ///
    /// # Errors
    /// An array that is longer than a file can be.
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

/// Give a tensor the shape of its result; `None` if that is longer than a file can be.
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

/// A file that gets its name when it is whole, and is gone otherwise.
#[derive(Debug)]
pub(crate) struct Output {
    temporary: PathBuf,
    path: PathBuf,
}

impl Output {
    /// Begin a file beside `path` with `head`.
    ///
    /// # Errors
    /// A file that can't be written there.
    pub(crate) fn create(path: &Path, head: &[u8]) -> anyhow::Result<Self> {
        let name = path.file_name().with_context(|| format!("{}: not the name of a file", path.display()))?;
        anyhow::ensure!(!path.is_dir(), "{}: is a directory; name a file in it", path.display());
        let temporary = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
        let mut file = File::create_new(&temporary).with_context(|| format!("cannot write {}", path.display()))?;
        let output = Self { temporary, path: path.into() };
        file.write_all(head).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(output)
    }

    /// Return where elements are written to.
    pub(crate) fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Give all files their names.
    ///
    /// # Errors
    /// A file that can't be kept; then none of them is there.
    pub(crate) fn publish(outputs: Vec<Self>) -> anyhow::Result<()> {
        for output in &outputs {
            // A name must not survive a power cut that its bytes do not.
            let sync = || File::open(&output.temporary)?.sync_all();
            sync().with_context(|| format!("cannot write {}", output.path.display()))?;
        }
        for (nth, output) in outputs.iter().enumerate() {
            if let Err(error) = fs::rename(&output.temporary, &output.path) {
                for published in &outputs[..nth] {
                    // Best effort: one that can't be removed stays.
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
        // After `publish` there is no such file any more, which is what is wanted.
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_that_is_not_published_is_gone() {
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
    fn outputs_appear_all_or_none() {
        let dir = std::env::temp_dir().join(format!("sumac-outputs-{}", std::process::id()));
        fs::create_dir(&dir).expect("a writable temporary directory");
        let paths = [dir.join("0.npy"), dir.join("1.npy")];
        let outputs: Vec<_> = paths.iter().map(|path| Output::create(path, b"head").expect("begun")).collect();
        // A directory that is not empty can't be replaced by a file.
        fs::create_dir(&paths[1]).and_then(|()| fs::write(paths[1].join("x"), b"")).expect("written");
        let error = Output::publish(outputs).expect_err("must fail").to_string();
        assert!(error.contains("1.npy"), "{error}");
        let left: Vec<_> = fs::read_dir(&dir).expect("listed").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["1.npy"]);
        fs::remove_dir_all(&dir).expect("removed");
    }
}
