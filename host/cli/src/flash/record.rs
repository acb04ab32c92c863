//! A record of each card's last image, kept on the host to detect rollbacks.
//!
//! There is one small file per card, named after its DEV_NAME. A card has no storage for this that a host which pushes
//! boot streams could not modify. The record therefore protects against mistakes on this host, not against its owner.

use crate::exit::Failure;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The record of a card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    /// The version of the last image; images without a manifest have none.
    pub(super) version: Option<String>,
    /// The highest epoch.
    pub(super) epoch: u64,
    /// SHA-256 of the last image.
    pub(super) sha256: String,
}

impl Record {
    /// Read the record of a card, if there is one.
    pub(super) fn read(folder: &Path, card: &str) -> Result<Option<Self>, Failure> {
        let path = file(folder, card);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("cannot read {}", path.display())).map_err(Failure::Input)?,
        };
        let record = serde_json::from_slice(&text);
        let why = || format!("{} is damaged; remove it to accept any epoch", path.display());
        record.with_context(why).map(Some).map_err(Failure::Input)
    }

    /// Check that records can be written to a folder.
    pub(super) fn probe(folder: &Path) -> Result<(), Failure> {
        let probe = || -> io::Result<()> {
            fs::create_dir_all(folder)?;
            tempfile::tempfile_in(folder).map(drop)
        };
        let why = || format!("cannot write records to {}; name another folder with --records", folder.display());
        probe().with_context(why).map_err(Failure::Input)
    }

    /// Write the record atomically.
    pub(super) fn write(&self, folder: &Path, card: &str) -> Result<(), Failure> {
        let path = file(folder, card);
        let write = || -> io::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
            Ok(())
        };
        let why = || format!("the card is flashed, but {} cannot be written", path.display());
        write().with_context(why).map_err(Failure::Run)
    }
}

/// Return the path of a card's record. Characters that a file name cannot have are escaped, so that no two cards share
/// one.
fn file(folder: &Path, card: &str) -> PathBuf {
    let plain = |character: char| character.is_ascii_alphanumeric() || "-.:_".contains(character);
    let name: String = card
        .chars()
        .map(|character| if plain(character) { character.to_string() } else { format!("%{:x}%", u32::from(character)) })
        .collect();
    folder.join(format!("{name}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_back_and_damage_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let (root, card) = (folder.path().join("a/b"), "pcie-0000:04:00.2");
        assert_eq!(Record::read(&root, card).expect("new"), None);
        Record::probe(&root).expect("can be kept");
        let record = Record { version: Some("1".into()), epoch: 7, sha256: "00".into() };
        record.write(&root, card).expect("written");
        assert_eq!(Record::read(&root, card).expect("kept"), Some(record));
        assert_eq!(Record::read(&root, "../x").expect("another card"), None);
        fs::write(root.join("pcie-0000:04:00.2.json"), "{}").expect("written");
        assert!(matches!(Record::read(&root, card), Err(Failure::Input(_))));
        assert_eq!(file(Path::new("r"), "../x/y"), Path::new("r/..%2f%x%2f%y.json"));
    }
}
