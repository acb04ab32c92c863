//! rshim: a card's boot FIFO and registers, as Mellanox/rshim-user-space exposes them to a host.
//!
//! `/dev/rshimN` contains `boot` (writes go to the card's boot FIFO), `misc` (settings and the boot log, as text) and
//! `console`. **Opening `boot` resets the card** unless [`Setting::BootResetSkip`] is set, so only [`Rshim::open_boot`]
//! opens it; reading a card's state ([`Rshim::read_misc_text`]) has no side effect other than that of
//! [`Setting::ClearOnRead`].
//!
//! Invariants: nodes are never created or truncated; every call is one open, one operation and one close, because the
//! driver generates its text anew for each open and keeps no state in between.

mod log;
mod misc;

pub use log::{LogKind, LogReader, kind_of};
pub use misc::{CardMode, Misc};

use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Where the driver creates its folders.
pub const DEV_FOLDER: &str = "/dev";
/// The maximum length of the text of `misc` in bytes; the driver's buffer has 4 KiB.
const MISC_MAX_BYTES: usize = 64 << 10;

/// A setting in `misc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Setting {
    /// The level of detail of `misc`: 0 basic, 1 advanced, 2 with the boot log.
    DisplayLevel(u32),
    /// Whether reading the boot log clears it.
    ClearOnRead(bool),
    /// The next boot source: 0 rshim, 1 eMMC, 2 the other eMMC boot partition.
    BootMode(u32),
    /// Reset the card now.
    Reset,
    /// Whether opening `boot` leaves the card running, instead of resetting it.
    BootResetSkip(bool),
}

impl Setting {
    /// Return the key in `misc`.
    pub const fn key(self) -> &'static str {
        match self {
            Self::DisplayLevel(_) => "DISPLAY_LEVEL",
            Self::ClearOnRead(_) => "CLEAR_ON_READ",
            Self::BootMode(_) => "BOOT_MODE",
            Self::Reset => "SW_RESET",
            Self::BootResetSkip(_) => "BOOT_RESET_SKIP",
        }
    }

    fn line(self) -> String {
        let value = match self {
            Self::DisplayLevel(value) | Self::BootMode(value) => value,
            Self::ClearOnRead(value) | Self::BootResetSkip(value) => value.into(),
            Self::Reset => 1,
        };
        format!("{} {value}\n", self.key())
    }
}

/// A card, by its folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rshim {
    folder: PathBuf,
}

impl Rshim {
    /// Name a card: `rshim0` is `/dev/rshim0`, anything with a slash is the folder itself. Nothing is opened.
    pub fn new(name: &str) -> Self {
        let folder = if name.contains('/') { name.into() } else { Path::new(DEV_FOLDER).join(name) };
        Self { folder }
    }

    /// Find the cards' folders in `root`, by number.
    ///
    /// # Errors
    /// `root` cannot be read.
    pub fn find(root: &Path) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in root.read_dir()? {
            let path = entry?.path();
            let number = path.file_name().and_then(|name| name.to_str()?.strip_prefix("rshim")?.parse::<u32>().ok());
            if let (Some(number), true) = (number, path.join("misc").exists()) {
                found.push((number, path));
            }
        }
        found.sort();
        Ok(found.into_iter().map(|(_, folder)| Self { folder }).collect())
    }

    /// Return the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Return whether the device nodes exist.
    pub fn exists(&self) -> bool {
        self.folder.join("misc").exists() && self.folder.join("boot").exists()
    }

    /// Lock the card against other sumac processes until the lock is dropped; a process that ends leaves no lock
    /// behind.
    ///
    /// The lock is on the folder, because opening `boot` resets the card.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process holds it; the folder cannot be opened.
    pub fn lock(&self) -> io::Result<Lock> {
        let folder = File::open(&self.folder)?;
        rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Lock { _folder: folder })
    }

    /// Read the text of `misc`, for [`Misc::parse`].
    ///
    /// # Errors
    /// The driver's error; `ENODEV` if the card has gone.
    pub fn read_misc_text(&self) -> io::Result<String> {
        let mut file = File::open(self.folder.join("misc"))?;
        // The driver returns its text in the first read only, so the buffer has to hold all of it.
        let mut buffer = vec![0; MISC_MAX_BYTES];
        let mut len = 0;
        loop {
            match file.read(&mut buffer[len..]) {
                Ok(0) => break,
                Ok(got) => len += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(String::from_utf8_lossy(&buffer[..len]).into_owned())
    }

    /// Change a setting.
    ///
    /// # Errors
    /// The driver's error; `EINVAL` if it does not support the setting.
    pub fn set(&self, setting: Setting) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).open(self.folder.join("misc"))?;
        let line = setting.line();
        // The driver parses each write separately.
        match file.write(line.as_bytes())? {
            len if len == line.len() => Ok(()),
            len => Err(io::Error::other(format!("took {len} of {} bytes", line.len()))),
        }
    }

    /// Open `boot`: unless [`Setting::BootResetSkip`] is set, this **resets the card**, which then waits for a boot
    /// stream. Closing sets its boot mode to eMMC.
    ///
    /// # Errors
    /// The driver's error: `EBUSY` open elsewhere, `ENODEV` not attached, `EINVAL` drop mode, `EPERM` locked.
    pub fn open_boot(&self) -> io::Result<File> {
        OpenOptions::new().write(true).open(self.folder.join("boot"))
    }
}

/// The lock of a card.
#[derive(Debug)]
pub struct Lock {
    _folder: File,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_name_resolves_below_dev_and_a_path_to_itself() {
        assert_eq!(Rshim::new("rshim3").folder(), Path::new("/dev/rshim3"));
        assert_eq!(Rshim::new("./x").folder(), Path::new("./x"));
    }

    #[test]
    fn cards_are_found_in_numeric_order_and_locked_once() {
        let root = tempfile::tempdir().expect("a folder");
        for name in ["rshim10", "rshim2", "rshimx", "null"] {
            let folder = root.path().join(name);
            std::fs::create_dir(&folder).expect("made");
            std::fs::write(folder.join("misc"), "").expect("made");
        }
        std::fs::create_dir(root.path().join("rshim0")).expect("made");
        let found = Rshim::find(root.path()).expect("readable");
        let names: Vec<_> = found.iter().filter_map(|card| card.folder().file_name()?.to_str()).collect();
        assert_eq!(names, ["rshim2", "rshim10"]);
        let lock = found[0].lock().expect("free");
        assert_eq!(found[0].lock().expect_err("taken").kind(), io::ErrorKind::WouldBlock);
        drop(lock);
        found[0].lock().expect("free again");
    }

    #[test]
    fn missing_nodes_are_not_created() {
        let root = tempfile::tempdir().expect("a folder");
        let card = Rshim::new(&root.path().display().to_string());
        assert!(card.open_boot().is_err() && card.set(Setting::Reset).is_err());
        assert_eq!(root.path().read_dir().expect("readable").count(), 0);
    }
}
