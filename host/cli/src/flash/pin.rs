//! Pins: the only version that a card may be flashed with, kept beside its record.
//!
//! A pin follows the card's serial number. A card without one cannot be pinned, because another card may come to be in
//! its slot.

use super::identity::Identity;
use super::record::{file, write_atomically};
use crate::exit::Failure;
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use sumac_firmware::manifest::Manifest;

/// The version that a card is pinned to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pin {
    /// The version in the image's manifest.
    pub(crate) version: String,
    /// The epoch there; any if there is none here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<u64>,
}

impl Pin {
    /// Read a card's pin, if it has one.
    pub(super) fn read(records: &Path, card: &Identity) -> Result<Option<Self>, Failure> {
        let Identity::Serial(serial) = card else { return Ok(None) };
        let path = path(records, serial);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("cannot read {}", path.display())).map_err(Failure::Input)?,
        };
        let why = || format!("{} is damaged; pin the card again", path.display());
        serde_json::from_slice(&text).map(Some).with_context(why).map_err(Failure::Input)
    }

    /// Pin a card to a version, or to none.
    pub(super) fn set(pin: Option<&Self>, records: &Path, card: &Identity) -> Result<(), Failure> {
        let Identity::Serial(serial) = card else {
            let why = "no serial number can be read, and another card may come to be in the slot";
            return Err(Failure::Input(anyhow!("the card cannot be pinned: {why}")));
        };
        let path = path(records, serial);
        let done = match pin {
            Some(pin) => fs::create_dir_all(records).and_then(|()| write_atomically(&path, pin)),
            None => fs::remove_file(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            }),
        };
        done.with_context(|| format!("cannot change {}", path.display())).map_err(Failure::Input)
    }

    /// Check that the card may have an image.
    pub(super) fn check(&self, manifest: Option<&Manifest>) -> Result<(), String> {
        let allows = |manifest: &&Manifest| {
            manifest.version == self.version && self.epoch.is_none_or(|epoch| epoch == manifest.epoch)
        };
        if manifest.filter(allows).is_some() {
            return Ok(());
        }
        let found = manifest.map_or_else(
            || "without a manifest".into(),
            |manifest| format!("version {}, epoch {}", manifest.version, manifest.epoch),
        );
        Err(format!("the card is pinned to {self}, the image is {found}; see `sumac card unpin`"))
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "version {}", self.version)?;
        self.epoch.map_or(Ok(()), |epoch| write!(f, ", epoch {epoch}"))
    }
}

/// Return the path of a card's pin.
fn path(records: &Path, serial: &str) -> PathBuf {
    file(records, &format!("pin-{serial}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_follows_the_serial_number_and_is_never_a_slots() {
        let folder = tempfile::tempdir().expect("a folder");
        let records = folder.path().join("cards");
        let pin = Pin { version: "1.2".into(), epoch: Some(3) };
        let (one, other) = (Identity::Serial("MT1".into()), Identity::Serial("MT2".into()));
        Pin::set(Some(&pin), &records, &one).expect("pinned");
        assert_eq!(Pin::read(&records, &one).expect("readable").as_ref(), Some(&pin));
        assert_eq!(Pin::read(&records, &other).expect("readable"), None);
        let slot = Identity::Slot { name: "pcie-0000:04:00.2".into(), token: "x".into() };
        assert!(matches!(Pin::set(Some(&pin), &records, &slot), Err(Failure::Input(_))));
        fs::write(records.join("pin-MT2.json"), "{}").expect("written");
        assert!(matches!(Pin::read(&records, &other), Err(Failure::Input(_))), "damage is no permission");
        Pin::set(None, &records, &one).expect("unpinned");
        Pin::set(None, &records, &one).expect("already");
        assert_eq!(Pin::read(&records, &one).expect("readable"), None);
    }
}
