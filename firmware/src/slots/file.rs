//! Block storage in a file or a Linux block device: what slots use outside of tests.

use rustix::fs::{Advice, fadvise};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use sumac_hal::flash::{BlockDevice, Geometry};

/// The block length of a file in bytes: the unit that every disk writes atomically.
const BLOCK_LEN_BYTES: usize = 512;
/// The block length of a disk in bytes: disks that show sectors of 512 bytes write 4 KiB at a time, and a
/// torn write would otherwise reach both records.
pub const DISK_BLOCK_LEN_BYTES: usize = 4096;

/// A file, a block device such as `/dev/mmcblk0boot0` (which must be writable: `force_ro` 0 in its sysfs folder), or a
/// part of one.
#[derive(Debug)]
pub struct FileBlocks {
    file: File,
    /// The offset of the first block in the file, in bytes.
    offset: u64,
    geometry: Geometry,
}

impl FileBlocks {
    /// Open an existing file, or a block device, whose blocks have [`DISK_BLOCK_LEN_BYTES`]; the length is rounded down
    /// to whole blocks.
    ///
    /// # Errors
    /// It cannot be opened for reading and writing.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        // A block device has no length in its metadata.
        let len_bytes = file.seek(SeekFrom::End(0))?;
        let is_device = file.metadata()?.file_type().is_block_device();
        let block_len_bytes = if is_device { DISK_BLOCK_LEN_BYTES } else { BLOCK_LEN_BYTES };
        Ok(Self { file, offset: 0, geometry: geometry(block_len_bytes, len_bytes) })
    }

    /// Open a part of a disk, in blocks of [`DISK_BLOCK_LEN_BYTES`].
    ///
    /// # Errors
    /// It cannot be opened for reading and writing, or the disk ends within it.
    pub fn open_range(path: &Path, offset: u64, len_bytes: u64) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        let disk = file.seek(SeekFrom::End(0))?;
        if offset.checked_add(len_bytes).is_none_or(|end| end > disk) {
            let why = format!("{len_bytes} bytes at {offset} are beyond the end of a disk of {disk} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(Self { file, offset, geometry: geometry(DISK_BLOCK_LEN_BYTES, len_bytes) })
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
        Ok(self.offset + u64::from(block) * self.geometry.block_len_bytes as u64)
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
        self.file.sync_data()?;
        // Read back from the device later, not from memory. Where the kernel takes no advice, the digest is checked at
        // the next start.
        let _ = fadvise(&self.file, 0, None, Advice::DontNeed);
        Ok(())
    }
}

fn geometry(block_len_bytes: usize, len_bytes: u64) -> Geometry {
    let blocks = u32::try_from(len_bytes / block_len_bytes as u64).unwrap_or(u32::MAX);
    Geometry { block_len_bytes, blocks }
}
