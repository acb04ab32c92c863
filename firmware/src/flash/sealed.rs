//! An image in sealed memory: the bytes that are checked are the bytes that are written.
//!
//! A file can be modified or replaced between its check and its use, and a digest taken while writing would notice only
//! when most of it is on the card. So the stream is copied once, sealed, and only then checked. Until flashing ends,
//! the copy takes as much (swappable) memory as the stream is long. What follows the stream on its way to the card
//! ([`crate::enrolment`]) is behind it in the same file; it is not part of what is checked.
//!
//! Invariant: the file of a [`SealedImage`] is a `memfd` sealed against writing, growing, shrinking and further seals.

use super::check::STREAM_MAX_BYTES;
use crate::manifest;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use thiserror::Error;
use zeroize::Zeroizing;

/// Why an image could not be copied and sealed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SealError {
    /// The stream is too long.
    #[error("the stream exceeds {STREAM_MAX_BYTES} bytes, the maximum that a card takes")]
    TooLong,
    /// The stream could not be read.
    #[error("{0}")]
    Read(io::Error),
    /// Memory for the copy could not be allocated or sealed.
    #[error("could not allocate memory for a copy of the whole stream: {0}")]
    Memory(io::Error),
}

/// An immutable copy of an image.
#[derive(Debug)]
pub struct SealedImage {
    file: File,
    len_bytes: u64,
    tail_len_bytes: u64,
}

impl SealedImage {
    /// Copy a stream, and `tail`, which follows it, together of at most [`STREAM_MAX_BYTES`].
    ///
    /// # Errors
    /// [`SealError`].
    pub fn copy(stream: impl Read, tail: impl Read) -> Result<Self, SealError> {
        Self::copy_within(stream, STREAM_MAX_BYTES, tail)
    }

    fn copy_within(stream: impl Read, max_bytes: u64, tail: impl Read) -> Result<Self, SealError> {
        let memory = |errno: rustix::io::Errno| SealError::Memory(errno.into());
        let file = memfd_create("sumac-image", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(memory)?;
        let mut file = File::from(file);
        let len_bytes = append(stream, max_bytes, &mut file)?;
        let tail_len_bytes = append(tail, max_bytes - len_bytes, &mut file)?;
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(memory)?;
        Ok(Self { file, len_bytes, tail_len_bytes })
    }

    /// Return the stream's length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Return the length of what follows the stream, in bytes.
    pub fn tail_len_bytes(&self) -> u64 {
        self.tail_len_bytes
    }

    /// Read the stream from its beginning.
    ///
    /// # Errors
    /// The system's error.
    pub fn reader(&self) -> io::Result<impl Read + '_> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0))?;
        Ok(file.take(self.len_bytes))
    }

    /// Return a reader of the stream and of what follows it. Unlike [`SealedImage::reader`], others do not disturb it.
    pub fn contents(&self) -> impl Read + '_ {
        At { file: &self.file, at_bytes: 0 }
    }

    /// Return the SHA-256 of what follows the stream.
    ///
    /// # Errors
    /// The system's error.
    pub fn tail_sha256(&self) -> io::Result<[u8; 32]> {
        manifest::sha256_of(At { file: &self.file, at_bytes: self.len_bytes })
    }

    /// Return another handle of the same copy, for another card.
    ///
    /// # Errors
    /// The system's error.
    pub fn try_clone(&self) -> io::Result<Self> {
        let Self { file, len_bytes, tail_len_bytes } = self;
        Ok(Self { file: file.try_clone()?, len_bytes: *len_bytes, tail_len_bytes: *tail_len_bytes })
    }

    /// Convert to the stdin of a process.
    pub(super) fn into_stdin(self) -> Stdio {
        self.file.into()
    }
}

/// Reads a file without its position, which others may share.
struct At<'a> {
    file: &'a File,
    at_bytes: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.file.read_at(buffer, self.at_bytes)?;
        self.at_bytes += len as u64;
        Ok(len)
    }
}

/// Append at most `max_bytes`; return how many.
fn append(mut from: impl Read, max_bytes: u64, file: &mut File) -> Result<u64, SealError> {
    // A key may be in it.
    let mut buffer = Zeroizing::new(vec![0; 1 << 20]);
    let mut len_bytes = 0;
    loop {
        let len = match from.read(&mut buffer) {
            Ok(0) => return Ok(len_bytes),
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(SealError::Read(error)),
        };
        len_bytes += len as u64;
        if len_bytes > max_bytes {
            return Err(SealError::TooLong);
        }
        io::Write::write_all(file, &buffer[..len]).map_err(SealError::Memory)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flash::{Contents, serve_boot};
    use crate::rshim::Rshim;
    use sha2::{Digest, Sha256};
    use std::os::fd::AsRawFd;

    /// A file that is overwritten or replaced after the copy does not change what is written.
    #[test]
    fn image_swapped_between_check_and_push_sends_the_checked_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, boot) = (folder.path().join("image"), folder.path().join("boot"));
        let good: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
        std::fs::write(&path, &good).expect("written");
        let source = File::open(&path).expect("there");
        let sealed = SealedImage::copy(&source, &b"tail"[..]).expect("memory");
        let mut checked = Vec::new();
        sealed.reader().expect("it can be read").read_to_end(&mut checked).expect("it can be read");
        assert!(checked == good && sealed.len_bytes() == good.len() as u64);
        std::fs::write(&path, vec![0xee; good.len()]).expect("written");
        std::fs::write(&boot, "").expect("written");
        let card = Rshim::new(&folder.path().display().to_string());
        let sha256 = Sha256::digest(&checked).into();
        let contents = Contents { len_bytes: good.len() as u64, sha256, tail_len_bytes: 0, is_tail_only: false };
        serve_boot(&card, sealed.file, &contents, &mut Vec::new()).expect("no error");
        assert!(std::fs::read(&boot).expect("there") == good, "exactly the checked bytes");
    }

    /// Handles share the position of their file, which the workers of other cards move at any time.
    #[test]
    fn clone_of_an_image_is_written_whatever_others_do_to_the_position() {
        struct Mover(File);

        impl io::Write for Mover {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.seek(SeekFrom::Start(7))?;
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        let folder = tempfile::tempdir().expect("a folder");
        let boot = folder.path().join("boot");
        std::fs::write(&boot, "").expect("written");
        let image: Vec<u8> = (0..100_000_u32).map(|at| (at / 7) as u8).collect();
        let sealed = SealedImage::copy(&image[..], &b"tail"[..]).expect("memory");
        assert_eq!(sealed.tail_sha256().expect("readable")[..], Sha256::digest(b"tail")[..]);
        let contents = Contents {
            len_bytes: image.len() as u64,
            sha256: Sha256::digest(&image).into(),
            tail_len_bytes: 4,
            is_tail_only: false,
        };
        let card = Rshim::new(&folder.path().display().to_string());
        let mover = Mover(sealed.try_clone().expect("descriptors are left").file);
        serve_boot(&card, sealed.file, &contents, mover).expect("no error");
        let expected = [&image[..], b"tail"].concat();
        assert!(std::fs::read(&boot).expect("there") == expected, "exactly the checked bytes");
    }

    #[test]
    fn readers_of_one_image_do_not_disturb_each_other() {
        let sealed = SealedImage::copy(&b"image"[..], &b"tail"[..]).expect("memory");
        let (mut first, mut second, mut part) = (sealed.contents(), sealed.contents(), [0; 3]);
        first.read_exact(&mut part).expect("long enough");
        for reader in [&mut second as &mut dyn Read, &mut first] {
            sealed.reader().expect("it moves the position").read_exact(&mut [0; 2]).expect("long enough");
            let mut rest = Vec::new();
            reader.read_to_end(&mut rest).expect("readable");
            assert!(b"imagetail".ends_with(&rest), "{rest:?}");
        }
        assert_eq!(part, *b"ima");
    }

    #[test]
    fn sealed_image_cannot_be_modified_through_its_descriptor() {
        let sealed = SealedImage::copy(&b"checked"[..], io::empty()).expect("memory");
        let again = std::fs::OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", sealed.file.as_raw_fd()));
        let mut again = again.expect("the file's mode allows it");
        assert!(io::Write::write(&mut again, b"x").is_err() && again.set_len(0).is_err() && again.set_len(99).is_err());
        let mut found = String::new();
        sealed.reader().expect("it can be read").read_to_string(&mut found).expect("it can be read");
        assert_eq!(found, "checked");
    }

    #[test]
    fn overlong_stream_is_refused_without_reading_to_its_end() {
        let mut read = 0;
        let endless = io::repeat(1).take(u64::MAX);
        let counted = Counted { inner: endless, read: &mut read };
        assert!(matches!(SealedImage::copy_within(counted, 3 << 20, io::empty()), Err(SealError::TooLong)));
        assert!(read <= 4 << 20, "{read} bytes of an endless stream");
        let sealed = SealedImage::copy_within(io::repeat(1).take(5), 9, &b"tail"[..]).expect("it fits");
        assert_eq!((sealed.len_bytes(), sealed.tail_len_bytes()), (5, 4));
        let long = SealedImage::copy_within(io::repeat(1).take(5), 8, &b"tail"[..]);
        assert!(matches!(long, Err(SealError::TooLong)), "the limit is for both");
    }

    struct Counted<'a, R> {
        inner: R,
        read: &'a mut u64,
    }

    impl<R: Read> Read for Counted<'_, R> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let len = self.inner.read(buffer)?;
            *self.read += len as u64;
            Ok(len)
        }
    }
}
