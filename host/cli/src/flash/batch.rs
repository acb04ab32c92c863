//! The cards of a run with several, kept beside their records until all are done, for `--continue`.
//!
//! The file lists the cards and says when the first run began. Which of them are done is in their own records, so that
//! another card in a slot is never taken for one that is done.

use super::record::write_atomically;
use crate::exit::Failure;
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A batch of cards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Batch {
    /// When it began, in seconds since 1970.
    pub(super) start_unix_s: u64,
    /// The cards' folders.
    pub(super) cards: Vec<PathBuf>,
}

impl Batch {
    /// Read the batch of this image that is not done.
    pub(super) fn read(records: &Path, sha256: &str) -> Result<Self, Failure> {
        let path = file(records, sha256);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let what = "no run with this image and several cards has left any to be done";
                return Err(Failure::Input(anyhow!("--continue: {what} (there is no {})", path.display())));
            }
            text => text.with_context(|| format!("cannot read {}", path.display())).map_err(Failure::Input)?,
        };
        let why = || format!("{} is damaged; remove it, and name the cards", path.display());
        serde_json::from_slice(&text).with_context(why).map_err(Failure::Input)
    }

    /// Write the batch of this image atomically.
    pub(super) fn write(&self, records: &Path, sha256: &str) -> Result<(), Failure> {
        let path = file(records, sha256);
        let why = || format!("cannot write {}", path.display());
        write_atomically(&path, self).with_context(why).map_err(Failure::Input)
    }

    /// Remove the batch of this image, because all its cards are done.
    pub(super) fn remove(records: &Path, sha256: &str) -> Result<(), Failure> {
        let path = file(records, sha256);
        let removed = fs::remove_file(&path).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        });
        removed.with_context(|| format!("cannot remove {}", path.display())).map_err(Failure::Run)
    }
}

/// Return the path of an image's batch.
fn file(records: &Path, sha256: &str) -> PathBuf {
    records.join(format!("batch-{sha256}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_is_read_back_for_its_image_until_it_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let batch = Batch { start_unix_s: 5, cards: vec!["/dev/rshim0".into(), "/dev/rshim1".into()] };
        assert!(matches!(Batch::read(folder.path(), "aa"), Err(Failure::Input(_))));
        batch.write(folder.path(), "aa").expect("written");
        assert_eq!(Batch::read(folder.path(), "aa").expect("there"), batch);
        assert!(Batch::read(folder.path(), "bb").is_err(), "another image");
        fs::write(folder.path().join("batch-bb.json"), "{}").expect("written");
        assert!(Batch::read(folder.path(), "bb").is_err(), "damaged");
        Batch::remove(folder.path(), "aa").expect("removed");
        Batch::remove(folder.path(), "aa").expect("already");
        assert!(Batch::read(folder.path(), "aa").is_err());
    }
}
