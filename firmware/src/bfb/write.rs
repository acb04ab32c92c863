//! Writes any set of images, in the order that the boot stages require.

use super::header::{HEADER_LEN_BYTES, Header, MINOR};
use super::id::{Generation, ImageId, ImageName};
use super::read::{Entry, Report};
use super::{crc, crc_value, padding_len_bytes};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Bytes copied at a time.
const CHUNK_LEN_BYTES: usize = 64 << 10;

/// The source of an image's data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// Memory, for small images.
    Bytes(Vec<u8>),
    /// A part of a file.
    File {
        /// The file.
        path: PathBuf,
        /// The offset of the data in bytes.
        offset: u64,
        /// The length of the data in bytes.
        len_bytes: u64,
    },
    /// A concatenation of sources.
    Chain(Vec<Source>),
}

impl Source {
    /// Use a whole file.
    ///
    /// # Errors
    /// The path is not a regular file, whose length is known.
    pub fn file(path: &Path) -> io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(Self::File { path: path.into(), offset: 0, len_bytes: metadata.len() })
    }

    /// Return the length of the data in bytes.
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { len_bytes, .. } => *len_bytes,
            Self::Chain(parts) => parts.iter().map(Self::len_bytes).fold(0, u64::saturating_add),
        }
    }

    /// Open the data for reading.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(&self) -> io::Result<Box<dyn Read + '_>> {
        match self {
            Self::Bytes(bytes) => Ok(Box::new(bytes.as_slice())),
            Self::File { path, offset, len_bytes } => {
                let mut file = File::open(path)?;
                file.seek(SeekFrom::Start(*offset))?;
                Ok(Box::new(file.take(*len_bytes)))
            }
            Self::Chain(parts) => {
                let mut all: Box<dyn Read + '_> = Box::new(io::empty());
                for part in parts {
                    all = Box::new(all.chain(part.open()?));
                }
                Ok(all)
            }
        }
    }
}

/// Why a stream could not be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// No images.
    #[error("no images: a boot stream needs at least one")]
    Empty,
    /// The id is unknown, so its place in the order is too.
    #[error("{0} is unknown, and so is its place in the stream; leave it out (`repack --drop`)")]
    UnknownId(ImageName),
    /// The image is too long for the header.
    #[error("{name}: {len_bytes} bytes exceed the maximum of an image, {max}", max = u32::MAX)]
    TooLong {
        /// The image.
        name: ImageName,
        /// Its length in bytes.
        len_bytes: u64,
    },
    /// The source changed while it was read.
    #[error("{name}: got {got} bytes instead of {expected}; its file changed while it was read")]
    Changed {
        /// The image.
        name: ImageName,
        /// The expected length in bytes.
        expected: u64,
        /// The bytes read.
        got: u64,
    },
    /// Reading a source failed.
    #[error("{name}: cannot read: {source}")]
    Read {
        /// The image.
        name: ImageName,
        /// The system's error.
        source: io::Error,
    },
    /// Writing failed.
    #[error("cannot write the stream: {0}")]
    Write(#[from] io::Error),
}

/// Builds a stream from images.
#[derive(Debug, Default)]
pub struct Builder {
    // The key is the stream's order: rank of the id, then version.
    images: BTreeMap<(usize, u8), (ImageName, Source)>,
}

impl Builder {
    /// Create an empty builder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Insert an image, replacing the one of the same name.
    ///
    /// # Errors
    /// The id is unknown, or the data is too long.
    pub fn insert(&mut self, name: ImageName, source: Source) -> Result<(), WriteError> {
        let rank = name.id.rank().ok_or(WriteError::UnknownId(name))?;
        if source.len_bytes() > u64::from(u32::MAX) {
            return Err(WriteError::TooLong { name, len_bytes: source.len_bytes() });
        }
        self.images.insert((rank, name.version), (name, source));
        Ok(())
    }

    /// Insert all images of a scanned file, except the ids in `except`.
    ///
    /// # Errors
    /// As [`Builder::insert`].
    pub fn insert_stream(&mut self, path: &Path, report: &Report, except: &[ImageId]) -> Result<(), WriteError> {
        for entry in report.entries.iter().filter(|entry| !except.contains(&entry.header.name.id)) {
            let (offset, len_bytes) = (entry.data_offset(), u64::from(entry.header.len_bytes));
            self.insert(entry.header.name, Source::File { path: path.into(), offset, len_bytes })?;
        }
        Ok(())
    }

    /// Remove all versions of an id; return whether there was one.
    pub fn remove(&mut self, id: ImageId) -> bool {
        let before = self.images.len();
        self.images.retain(|_, (name, _)| name.id != id);
        self.images.len() < before
    }

    /// Remove images that a card of this generation does not use: of each id, [one version](Generation::choose) stays.
    pub fn keep_for(&mut self, generation: Generation) {
        let names: Vec<_> = self.images.values().map(|(name, _)| *name).collect();
        let versions = |id| names.iter().filter(move |name| name.id == id).map(|name| name.version);
        self.images.retain(|_, (name, _)| generation.choose(versions(name.id)) == Some(name.version));
    }

    /// Return the images in the stream's order.
    pub fn images(&self) -> impl Iterator<Item = (ImageName, &Source)> {
        self.images.values().map(|(name, source)| (*name, source))
    }

    /// Write the stream at the current position of `out`; return the entries of its images.
    ///
    /// A header is written after its data, whose checksum it contains; each source is read once.
    ///
    /// # Errors
    /// There are no images, a source failed or has changed, or writing failed. The output is unusable then.
    pub fn write_to(&self, out: &mut (impl Write + Seek)) -> Result<Vec<Entry>, WriteError> {
        if self.images.is_empty() {
            return Err(WriteError::Empty);
        }
        let names: Vec<_> = self.images().map(|(name, _)| name).collect();
        let mut buffer = vec![0; CHUNK_LEN_BYTES];
        let mut entries = Vec::with_capacity(names.len());
        let start = out.stream_position()?;
        let mut offset = 0;
        for (index, (name, source)) in self.images().enumerate() {
            let rest = &names[index + 1..];
            out.seek(SeekFrom::Start(start + offset + HEADER_LEN_BYTES as u64))?;
            let (len_bytes, crc) = copy(name, source, out, &mut buffer)?;
            let header = Header {
                name,
                minor: MINOR,
                next_version: rest.first().filter(|next| next.id == name.id).map_or(0, |next| next.version),
                len_bytes,
                crc,
                following: rest.iter().fold(0, |bits, other| bits | other.id.bit()),
            };
            out.seek(SeekFrom::Start(start + offset))?;
            out.write_all(&header.emit())?;
            entries.push(Entry { offset, header });
            let len_bytes = u64::from(len_bytes);
            offset += HEADER_LEN_BYTES as u64 + len_bytes + padding_len_bytes(len_bytes) as u64;
        }
        out.seek(SeekFrom::Start(start + offset))?;
        out.flush()?;
        Ok(entries)
    }
}

/// Copy an image's data and padding; return the length of the data in bytes, and the checksum.
fn copy(name: ImageName, source: &Source, out: &mut impl Write, buffer: &mut [u8]) -> Result<(u32, u32), WriteError> {
    let fail = |source| WriteError::Read { name, source };
    let mut reader = source.open().map_err(fail)?;
    let mut crc = crc();
    let mut got = 0_u64;
    loop {
        match reader.read(buffer) {
            Ok(0) => break,
            Ok(len) => {
                crc.update(&buffer[..len]);
                out.write_all(&buffer[..len])?;
                got += len as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(fail(error)),
        }
    }
    let expected = source.len_bytes();
    let len_bytes = u32::try_from(got).ok().filter(|_| got == expected);
    let len_bytes = len_bytes.ok_or(WriteError::Changed { name, expected, got })?;
    let padding = &[0; 8][..padding_len_bytes(got)];
    crc.update(padding);
    out.write_all(padding)?;
    Ok((len_bytes, crc_value(&crc)))
}
