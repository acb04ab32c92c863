//! Secrets in memory that have a name: for programs that read keys from files, without one on a disk.

use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// A file in memory that only this user can open, and that nobody can change. It is gone when it is dropped, or this
/// process ends; programs that are started do not inherit it.
#[derive(Debug)]
pub struct PrivateMemory(File);

impl PrivateMemory {
    /// Make a file with this content.
    ///
    /// # Errors
    /// The system's.
    pub fn new(text: &str) -> io::Result<Self> {
        let memory = memfd_create("sumac-keys", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        // Before there is anything to read.
        fchmod(&memory, Mode::RUSR | Mode::WUSR)?;
        let mut file = File::from(memory);
        file.write_all(text.as_bytes())?;
        fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok(Self(file))
    }

    /// Return the file's name for all processes of this user that see this one in `/proc`.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{metadata, read_to_string, write};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn file_is_its_owners_and_constant_and_ends_with_its_value() {
        let memory = PrivateMemory::new("secret").expect("memory");
        let path = memory.path();
        assert_eq!(metadata(&path).expect("it is open").permissions().mode() & 0o777, 0o600);
        assert!(write(&path, "other").is_err());
        assert_eq!(read_to_string(&path).expect("ours"), "secret");
        drop(memory);
        // The number may belong to another file by now.
        assert!(read_to_string(&path).map_or(true, |text| text != "secret"));
    }
}
