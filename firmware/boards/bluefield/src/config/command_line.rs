//! The words of a command line: settings, and what no store has.

use super::{ConfigError, Settings};
use crate::disks::Target;
use crate::update;
use std::time::Duration;
use sumac_firmware::slots::{Policy, Slot};
use sumac_firmware::update::UpdateKey;

/// How long a trial may last, in seconds: longer than a version has to serve before it is healthy, and a boot.
const TRIAL_S: std::ops::RangeInclusive<u64> = 90..=86_400;

/// The command line of the kernel, or of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// Settings that override the store.
    pub settings: Settings,
    /// The store (`store=/dev/mmcblk0p3`).
    pub store: Option<String>,
    /// Save the settings to the store for the next start (`keep=yes`).
    pub keep: bool,
    /// The file with the device's key (`key-file=/etc/sumac/leaf0.key`), or `-` for stdin.
    pub key_file: Option<String>,
    /// The boot FIFO, behind the stream that was booted from it (`boot-fifo=/dev/vdb`).
    pub boot_fifo: Option<String>,
    /// The slot that the kernel was started from (`slot=A`), which the boot entry says; `None`: from memory.
    pub slot: Option<Slot>,
    /// Where to install (`install=/dev/nvme0n1`).
    pub install: Target,
    /// The public key that must have signed what is installed (`update-key=`, the middle line of its PEM file).
    pub update_key: Option<UpdateKey>,
    /// The limits of a trial (`trial=300`, in seconds).
    pub trial: Policy,
    /// How long an installed version on trial serves before it is healthy (`confirm-after=60`, in seconds).
    pub confirm_after: Option<Duration>,
}

impl CommandLine {
    /// Parse the words that begin with `prefix`; others are ignored.
    ///
    /// # Errors
    /// [`ConfigError`] for the first invalid word.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>, prefix: &str) -> Result<Self, ConfigError> {
        let (mut line, mut rest) = (Self::default(), Vec::new());
        for word in words.into_iter().filter_map(|word| word.strip_prefix(prefix)) {
            match word.split_once('=') {
                Some((key, value)) if line.set(key, value)? => {}
                _ => rest.push(word),
            }
        }
        line.settings = Settings::from_words(rest)?;
        Ok(line)
    }

    /// Set what only a command line has; false if it is another key.
    fn set(&mut self, key: &str, value: &str) -> Result<bool, ConfigError> {
        let fail = |expected| ConfigError::Value { key: key.to_owned(), value: value.to_owned(), expected };
        match key {
            "store" => self.store = Some(value.to_owned()),
            "key-file" => self.key_file = Some(value.to_owned()),
            "boot-fifo" => self.boot_fifo = Some(value.to_owned()),
            "keep" => {
                self.keep = match value {
                    "yes" => true,
                    "no" => false,
                    _ => return Err(fail("yes or no")),
                }
            }
            "slot" => {
                self.slot = Some(update::slot(value).ok_or_else(|| fail("A or B"))?);
                // It is a setting as well.
                return Ok(false);
            }
            "install" => {
                self.install =
                    Target::parse(value).ok_or_else(|| fail("auto, a disk such as /dev/nvme0n1, or DISK,erase"))?
            }
            "update-key" => {
                let key = value.parse::<UpdateKey>();
                let key = key.map_err(|_| fail("the middle line of an ed25519 public key's PEM file"))?;
                self.update_key = Some(key);
                return Ok(false);
            }
            "confirm-after" => {
                self.confirm_after = value.parse().ok().map(Duration::from_secs);
                // Checked as a setting.
                return Ok(false);
            }
            "trial" => {
                let limit = value.parse().ok().filter(|seconds| TRIAL_S.contains(seconds));
                let limit = limit.ok_or_else(|| fail("a number of seconds from 90 to 86400"))?;
                self.trial.confirm_within = Duration::from_secs(limit);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}
