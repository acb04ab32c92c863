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
use std::time::SystemTime;
use sumac_firmware::rshim::Misc;

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
    /// SHA-256 of the configuration and root file system that followed it, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tail_sha256: Option<String>,
    /// When the card reported that it was ready, in seconds since 1970. Records of earlier releases have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ready_unix_s: Option<u64>,
    /// Whether it was a vendor's installer, whose system starts again after a reset. Ours runs from memory.
    #[serde(default)]
    pub(super) is_installed: bool,
    /// Whether UP_TIME was seen to restart when the card was reset for flashing, so that it tells later resets.
    #[serde(default)]
    pub(super) counts_resets: bool,
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

    /// Return what may be shown: the token is of no use elsewhere.
    pub(super) fn without_token(self) -> Self {
        Self { token: None, ..self }
    }

    /// Return the record as a line of text.
    pub(super) fn line(&self) -> String {
        let version = self.version.as_deref().unwrap_or("without a manifest");
        let sha256 = self.sha256.get(..16).unwrap_or(&self.sha256);
        format!("last flashed from here: {version}, epoch {}, sha256 {sha256}", self.epoch)
    }

    /// Return why the card is not known to run the last image at `now_unix_s`, if it is not.
    pub(super) fn why_not_running(&self, misc: &Misc, now_unix_s: u64) -> Option<&'static str> {
        /// How far the clocks of card and host may drift apart: one part in this many.
        const DRIFT: u64 = 5000;
        let since = self.ready_unix_s.and_then(|ready| now_unix_s.checked_sub(ready));
        match (since, misc.up_time_s) {
            _ if misc.boot_mode == Some(0) => Some("it waits for a boot stream"),
            (None, _) => Some("its record does not tell since when it has run"),
            _ if self.is_installed => None,
            (_, None) => Some("it does not report its time since the last reset"),
            _ if !self.counts_resets => Some("its UP_TIME does not restart at a reset"),
            // Both count whole seconds.
            (Some(since), Some(up)) if up + 1 + since / DRIFT < since => Some("it has been reset since then"),
            _ => None,
        }
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
        let why = || format!("the card is flashed, but {} cannot be written", path.display());
        write_atomically(&path, self).with_context(why).map_err(Failure::Run)
    }
}

/// Return the seconds since 1970, by this host's clock.
pub(super) fn unix_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Write a file of records, all or nothing.
pub(super) fn write_atomically(path: &Path, contents: &impl Serialize) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&serde_json::to_vec(contents)?)?;
    file.as_file().sync_all()?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Return the path of a card's record. Characters that a file name cannot have are escaped, so that no two cards share
/// one.
pub(super) fn file(folder: &Path, card: &str) -> PathBuf {
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
        Record {
            version: Some("1".into()),
            epoch: 7,
            sha256: "00".into(),
            tail_sha256: None,
            ready_unix_s: Some(1000),
            is_installed: false,
            counts_resets: true,
            token: card.token().map(str::to_owned),
        }
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
    fn card_that_was_reset_since_it_was_ready_does_not_run_its_image() {
        let had = record(&Identity::Serial("MT1".into()));
        let misc = |up: u64, boot_mode: u32| Misc::parse(&format!("BOOT_MODE {boot_mode}\nUP_TIME {up}(s)\n"));
        let why = |up, now| had.why_not_running(&misc(up, 1), now);
        assert_eq!((why(130, 1000), why(130, 1100), why(99, 1100)), (None, None, None));
        assert_eq!(why(98, 1100), Some("it has been reset since then"));
        // A month, in which the clocks drift apart.
        let month = 30 * 86_400;
        assert_eq!(why(month - 300, 1000 + month), None);
        assert_eq!(why(month - 3600, 1000 + month), Some("it has been reset since then"));
        assert!(why(130, 999).is_some(), "this host's clock was set back");
        assert!(had.why_not_running(&misc(130, 0), 1100).is_some(), "it waits for a stream");
        assert!(had.why_not_running(&Misc::parse("BOOT_MODE 1\n"), 1100).is_some(), "no time since the last reset");
        let blind = Record { counts_resets: false, ..had.clone() };
        assert!(blind.why_not_running(&misc(130, 1), 1100).is_some(), "a reset would not be seen");
        let installed = Record { is_installed: true, ..blind };
        assert_eq!(installed.why_not_running(&misc(5, 1), 1100), None);
        let old = Record { ready_unix_s: None, ..installed };
        assert!(old.why_not_running(&misc(500, 1), 1100).is_some());
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
