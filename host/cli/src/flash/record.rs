//! A record of each card's last image, kept on the host to detect rollbacks.
//!
//! There is one small file per card, named by its serial number or its slot ([`Identity`]). A card has no storage for
//! this that a host which pushes boot streams could not modify. The record therefore protects against mistakes on this
//! host, not against its owner.

use super::identity::Identity;
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
    /// What a card that is known by its slot must have in common with the one of the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) token: Option<String>,
}

impl Record {
    /// Read the record of a card, if there is one. Another card in its slot has none.
    pub(super) fn read(folder: &Path, card: &Identity) -> Result<Option<Self>, Failure> {
        let path = file(folder, &card.record());
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("cannot read {}", path.display())).map_err(Failure::Input)?,
        };
        let record = serde_json::from_slice::<Self>(&text);
        let why = || format!("{} is damaged; remove it to accept any epoch", path.display());
        let record = record.with_context(why).map_err(Failure::Input)?;
        if record.token.as_deref() != card.token() {
            note!("note: {} is ignored: another card may be in the slot since then", path.display());
            return Ok(None);
        }
        Ok(Some(record))
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
    pub(super) fn write(&self, folder: &Path, card: &Identity) -> Result<(), Failure> {
        let path = file(folder, &card.record());
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

    fn in_slot(token: &str) -> Identity {
        Identity::Slot { name: "pcie-0000:04:00.2".into(), token: token.into() }
    }

    fn record(card: &Identity) -> Record {
        Record { version: Some("1".into()), epoch: 7, sha256: "00".into(), token: card.token().map(str::to_owned) }
    }

    #[test]
    fn records_are_read_back_and_damage_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().join("a/b");
        for card in [in_slot("x"), Identity::Serial("MT1".into())] {
            assert_eq!(Record::read(&root, &card).expect("new"), None);
            Record::probe(&root).expect("can be kept");
            record(&card).write(&root, &card).expect("written");
            assert_eq!(Record::read(&root, &card).expect("kept"), Some(record(&card)));
        }
        assert_eq!(Record::read(&root, &Identity::Serial("../x".into())).expect("another card"), None);
        fs::write(root.join("serial-MT1.json"), "{}").expect("written");
        assert!(matches!(Record::read(&root, &Identity::Serial("MT1".into())), Err(Failure::Input(_))));
        assert_eq!(file(Path::new("r"), "../x/y"), Path::new("r/..%2f%x%2f%y.json"));
    }

    #[test]
    fn another_card_in_the_slot_inherits_no_record() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        record(&in_slot("first")).write(root, &in_slot("first")).expect("written");
        assert_eq!(Record::read(root, &in_slot("second")).expect("readable"), None);
        assert_eq!(Record::read(root, &Identity::Serial("MT1".into())).expect("readable"), None);
        // A record of an earlier release, by slot alone.
        let old = r#"{"version":"1","epoch":7,"sha256":"00"}"#;
        fs::write(root.join("pcie-0000:04:00.2.json"), old).expect("written");
        assert_eq!(Record::read(root, &in_slot("first")).expect("readable"), None);
    }
}
