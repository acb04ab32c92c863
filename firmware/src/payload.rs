//! The payload of an update slot: an EFI system partition with a kernel and its initramfs.
//!
//! ```text
//! FAT volume
//!   KERNEL.EFI    the boot stream's `image`: a kernel with EFI stub
//!   INITRD        its `initramfs`
//! ```
//!
//! Firmware starts the kernel by a boot entry, whose load options are the kernel's command line ([`crate::boot`]). So
//! the payload holds code only, and a card's settings outlast updates. There is no `\EFI\BOOT`: firmware must not start
//! a slot that no boot entry names, because nothing would count the try.
//!
//! Invariant: the same kernel and initramfs give the same bytes. A stream's manifest has their digest
//! ([`crate::manifest::SlotDigest`]), so that the payload can be derived from the stream wherever it is needed, and one
//! signature covers both.

use crate::bfb::{ImageId, Report, Source};
use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};
use rustix::fs::{MemfdFlags, memfd_create};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use thiserror::Error;

/// The kernel's path on the volume, as firmware writes it.
pub const KERNEL_PATH: &str = "\\KERNEL.EFI";
/// The initramfs's path on the volume, for the kernel argument `initrd=`.
pub const INITRD_PATH: &str = "\\INITRD";

/// The volume's serial number, which has to be the same each time.
const VOLUME_ID: u32 = 0x5355_4d43;
const LABEL: [u8; 11] = *b"SUMAC      ";
const SECTOR_BYTES: u64 = 512;
const CLUSTER_BYTES: u32 = 4096;
/// Room for boot sectors and folders, and the unit of the volume's length, in bytes.
const ALIGNMENT_BYTES: u64 = 1 << 20;
/// FAT has 4 bytes for each cluster in each of two tables, and a file's last cluster may be almost empty: one byte in
/// 256 is more than both take.
const OVERHEAD: u64 = 256;

/// Why a payload cannot be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PayloadError {
    /// The stream has no single kernel and initramfs.
    #[error("the stream has {0} images named {1}, not one: a slot holds one kernel and one initramfs")]
    Images(usize, &'static str),
    /// Together they are too long for the file system.
    #[error("kernel and initramfs have {0} bytes; the limit is {LEN_MAX_BYTES}")]
    TooLong(u64),
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The maximum length of both files in bytes.
pub const LEN_MAX_BYTES: u64 = 2 << 30;

/// Return the kernel and the initramfs of a stream in a file.
///
/// # Errors
/// [`PayloadError::Images`].
pub fn images(path: &Path, report: &Report) -> Result<[Source; 2], PayloadError> {
    let find = |id, name| {
        let mut found = report.entries.iter().filter(|entry| entry.header.name.id == id);
        match (found.next(), found.count()) {
            (Some(entry), 0) => Ok(Source::File {
                path: path.into(),
                offset: entry.data_offset(),
                len_bytes: u64::from(entry.header.len_bytes),
            }),
            (first, more) => Err(PayloadError::Images(more + usize::from(first.is_some()), name)),
        }
    };
    Ok([find(ImageId::IMAGE, "image")?, find(ImageId::INITRAMFS, "initramfs")?])
}

/// Return the length of the payload of files with these lengths, in bytes.
///
/// # Errors
/// [`PayloadError::TooLong`].
pub fn len_bytes(kernel: u64, initramfs: u64) -> Result<u64, PayloadError> {
    let files = kernel.saturating_add(initramfs);
    if files > LEN_MAX_BYTES {
        return Err(PayloadError::TooLong(files));
    }
    Ok((files + files / OVERHEAD + ALIGNMENT_BYTES).next_multiple_of(ALIGNMENT_BYTES))
}

/// Write a payload to an empty file; return its length in bytes.
///
/// # Errors
/// [`PayloadError`].
pub fn write(kernel: &Source, initramfs: &Source, file: &mut (impl Read + Write + Seek)) -> Result<u64, PayloadError> {
    let len_bytes = len_bytes(kernel.len_bytes(), initramfs.len_bytes())?;
    let sectors = u32::try_from(len_bytes / SECTOR_BYTES).map_err(io::Error::other)?;
    // Sectors that the file system leaves alone are zero, too.
    file.seek(io::SeekFrom::Start(len_bytes - 1))?;
    file.write_all(&[0])?;
    file.rewind()?;
    let options = FormatVolumeOptions::new().total_sectors(sectors).bytes_per_cluster(CLUSTER_BYTES);
    format_volume(&mut *file, options.volume_id(VOLUME_ID).volume_label(LABEL))?;
    file.rewind()?;
    let volume = FileSystem::new(&mut *file, FsOptions::new())?;
    for (path, source) in [(KERNEL_PATH, kernel), (INITRD_PATH, initramfs)] {
        let mut to = volume.root_dir().create_file(path.trim_start_matches('\\'))?;
        let written = io::copy(&mut source.open()?, &mut to)?;
        if written != source.len_bytes() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file changed while it was read").into());
        }
        to.flush()?;
    }
    volume.unmount()?;
    file.flush()?;
    Ok(len_bytes)
}

/// A payload in memory.
#[derive(Debug)]
pub struct Payload {
    /// The file that holds it, from its beginning.
    pub file: File,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Its SHA-256.
    pub sha256: [u8; 32],
}

/// Write a payload to memory.
///
/// # Errors
/// [`PayloadError`].
pub fn build(kernel: &Source, initramfs: &Source) -> Result<Payload, PayloadError> {
    let memory = memfd_create("sumac-payload", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
    let mut file = File::from(memory);
    let len_bytes = write(kernel, initramfs, &mut file)?;
    file.rewind()?;
    let (mut digest, mut piece) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => break,
            len => digest.update(&piece[..len]),
        }
    }
    file.rewind()?;
    Ok(Payload { file, len_bytes, sha256: digest.finalize().into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;
    use std::process::Command;

    fn bytes(len: usize, seed: u8) -> Source {
        Source::Bytes((0..len).map(|at| (at / 7) as u8 ^ seed).collect())
    }

    fn payload(kernel: &Source, initramfs: &Source) -> Vec<u8> {
        let mut file = Cursor::new(Vec::new());
        let len_bytes = write(kernel, initramfs, &mut file).expect("fits");
        assert_eq!(file.get_ref().len() as u64, len_bytes);
        file.into_inner()
    }

    fn contents(image: &[u8], path: &str) -> Vec<u8> {
        let volume = FileSystem::new(Cursor::new(image.to_vec()), FsOptions::new()).expect("a volume");
        let mut contents = Vec::new();
        volume.root_dir().open_file(path).expect("there").read_to_end(&mut contents).expect("readable");
        contents
    }

    #[test]
    fn payload_holds_both_files_for_each_kind_of_fat() {
        // FAT12, FAT16 and FAT32; the last cluster is full, almost empty, and there is none.
        for (kernel, initramfs) in [(8192, 1), (40 << 20, 0), (300 << 20, 4097)] {
            let (kernel, initramfs) = (bytes(kernel, 1), bytes(initramfs, 2));
            let image = payload(&kernel, &initramfs);
            for (path, source) in [("KERNEL.EFI", &kernel), ("INITRD", &initramfs)] {
                assert!(Source::Bytes(contents(&image, path)) == *source, "{path} differs");
            }
        }
    }

    /// Streams are signed with the digest of what this writes: a change of the layout needs another file system, or
    /// another field in the manifest.
    #[test]
    fn same_files_give_the_same_bytes_for_ever() {
        let (kernel, initramfs) = (bytes(100_000, 1), bytes(50_000, 2));
        let built = build(&kernel, &initramfs).expect("fits");
        assert_eq!(<[u8; 32]>::from(Sha256::digest(payload(&kernel, &initramfs))), built.sha256);
        let digits: String = built.sha256.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digits, "bcf2db4112f3d2706bc6473e23864598471c65fd3c2db8fb57755aa83b0ab23b");
    }

    #[test]
    fn fsck_finds_nothing_wrong() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("payload");
        std::fs::write(&path, payload(&bytes(9 << 20, 1), &bytes(3 << 20, 2))).expect("written");
        let mut fsck = Command::new("fsck.vfat");
        fsck.env("PATH", "/sbin:/usr/sbin:/bin:/usr/bin").arg("-n").arg(&path);
        match fsck.output() {
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(output.status.success() && text.contains("2 files"), "{text}");
            }
            // Without dosfstools, only the library that wrote the volume has read it.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}"),
        }
    }

    #[test]
    fn overlong_or_shrinking_file_is_an_error() {
        assert!(matches!(len_bytes(LEN_MAX_BYTES, 1), Err(PayloadError::TooLong(_))));
        assert!(matches!(len_bytes(u64::MAX, u64::MAX), Err(PayloadError::TooLong(u64::MAX))));
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kernel");
        std::fs::write(&path, [1; 100]).expect("written");
        let source = Source::File { path, offset: 0, len_bytes: 101 };
        let error = write(&source, &bytes(1, 1), &mut Cursor::new(Vec::new())).expect_err("shorter").to_string();
        assert!(error.contains("changed"), "{error}");
    }
}
