//! Block storage in a file or a Linux block device: what slots use outside of tests.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use sumac_hal::flash::{BlockDevice, Geometry};

/// The block size in bytes: the unit that every disk writes atomically.
const BLOCK_LEN_BYTES: usize = 512;

/// A file, or a block device such as `/dev/mmcblk0boot0` (which must be writable: `force_ro` 0 in its sysfs folder).
#[derive(Debug)]
pub struct FileBlocks {
    file: File,
    geometry: Geometry,
}

impl FileBlocks {
    /// Open an existing file; its length is rounded down to whole blocks.
    ///
    /// # Errors
    /// It cannot be opened for reading and writing.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        // A block device has no length in its metadata.
        let len_bytes = file.seek(SeekFrom::End(0))?;
        let blocks = u32::try_from(len_bytes / BLOCK_LEN_BYTES as u64).unwrap_or(u32::MAX);
        Ok(Self { file, geometry: Geometry { block_len_bytes: BLOCK_LEN_BYTES, blocks } })
    }

    /// Create a file of this length in bytes that only its owner can read: it may hold a key.
    ///
    /// # Errors
    /// It already exists, or cannot be created.
    pub fn create(path: &Path, len_bytes: u64) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(len_bytes)?;
        // Flush the directory too, so that the name survives a power cut.
        file.sync_all()?;
        if let Some(folder) = path.parent().filter(|folder| *folder != Path::new("")) {
            File::open(folder)?.sync_all()?;
        }
        Self::open(path)
    }

    fn at(&self, block: u32, len_bytes: usize) -> io::Result<u64> {
        if !self.geometry.holds(block, len_bytes) {
            let why =
                format!("{len_bytes} bytes at block {block} are not whole blocks within {}", self.geometry.blocks);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(u64::from(block) * self.geometry.block_len_bytes as u64)
    }
}

impl BlockDevice for FileBlocks {
    type Error = io::Error;

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&mut self, block: u32, buffer: &mut [u8]) -> io::Result<()> {
        let at = self.at(block, buffer.len())?;
        self.file.read_exact_at(buffer, at)
    }

    fn write(&mut self, block: u32, data: &[u8]) -> io::Result<()> {
        let at = self.at(block, data.len())?;
        self.file.write_all_at(data, at)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}
