//! Variables of the firmware's boot manager, through Linux's efivarfs.
//!
//! A file holds the attributes (u32) and the value, and takes both in a single write. Files of variables that are not
//! well known are immutable, so that a recursive deletion cannot break a machine's firmware; the flag is cleared for
//! the write (Linux, Documentation/filesystems/efivarfs.rst).

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where Linux mounts them.
pub const EFIVARS: &str = "/sys/firmware/efi/efivars";

/// EFI_GLOBAL_VARIABLE (UEFI Specification 2.10, 3.3).
const GLOBAL: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";
/// Non-volatile, and accessible to the boot manager and the system.
const ATTRIBUTES: u32 = 1 | 2 | 4;
/// The longest value that is read, in bytes: firmware has less for all of its variables.
const VALUE_MAX_BYTES: u64 = 1 << 20;

/// Variables of the boot manager.
pub trait Variables {
    /// Return the value of a variable, if it exists.
    ///
    /// # Errors
    /// The firmware's or the system's error.
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// Create or replace a variable; durable on return.
    ///
    /// # Errors
    /// The firmware's or the system's error; the variable then has its earlier value.
    fn write(&mut self, name: &str, value: &[u8]) -> io::Result<()>;

    /// Delete a variable, if it exists; durable on return.
    ///
    /// # Errors
    /// The firmware's or the system's error; the variable then has its value.
    fn remove(&mut self, name: &str) -> io::Result<()>;
}

/// The variables of the running machine.
#[derive(Debug, Clone)]
pub struct Efivarfs {
    folder: PathBuf,
}

impl Default for Efivarfs {
    fn default() -> Self {
        Self::new(Path::new(EFIVARS))
    }
}

impl Efivarfs {
    /// Use the file system mounted at `folder`.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}-{GLOBAL}"))
    }
}

impl Variables for Efivarfs {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.path(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(file, VALUE_MAX_BYTES), &mut bytes)?;
        // A file that is being deleted is empty.
        Ok(bytes.split_at_checked(4).map(|(_, value)| value.to_vec()))
    }

    fn write(&mut self, name: &str, value: &[u8]) -> io::Result<()> {
        let path = self.path(name);
        make_mutable(&path)?;
        let bytes = [&ATTRIBUTES.to_le_bytes(), value].concat();
        // No truncation: it would be a write of its own, of an empty value, which deletes the variable.
        let is_new = !fs::exists(&path)?;
        let mut file = OpenOptions::new().write(true).create(is_new).truncate(false).open(&path)?;
        let written = file.write(&bytes)?;
        if written != bytes.len() {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "the firmware took a part of a variable"));
        }
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        let path = self.path(name);
        make_mutable(&path)?;
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Allow changes of a variable that exists.
fn make_mutable(path: &Path) -> io::Result<()> {
    // Another file system than efivarfs may have no flags; the change shows whether it is allowed.
    if let Ok(file) = File::open(path)
        && let Ok(flags) = ioctl_getflags(&file)
        && flags.contains(IFlags::IMMUTABLE)
    {
        ioctl_setflags(&file, flags - IFlags::IMMUTABLE)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_has_attributes_and_value() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut variables = Efivarfs::new(folder.path());
        assert_eq!(variables.read("BootNext").expect("read"), None);
        variables.write("BootNext", &[0x10, 0]).expect("written");
        let bytes = fs::read(folder.path().join("BootNext-8be4df61-93ca-11d2-aa0d-00e098032b8c")).expect("there");
        assert_eq!(bytes, [7, 0, 0, 0, 0x10, 0]);
        assert_eq!(variables.read("BootNext").expect("read"), Some(vec![0x10, 0]));
        variables.write("BootNext", &[0x11, 0]).expect("replaced");
        assert_eq!(variables.read("BootNext").expect("read"), Some(vec![0x11, 0]));
        variables.remove("BootNext").expect("removed");
        assert_eq!(variables.read("BootNext").expect("read"), None);
        variables.remove("BootNext").expect("not there");
    }
}
