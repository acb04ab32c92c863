//! Reads and checks a stream of any length in one pass, with a buffer of fixed size.

use super::error::{BfbError, Fault};
use super::header::{HEADER_LEN_BYTES, Header, MINOR};
use super::id::{Generation, ImageId, ImageName};
use super::{crc, crc_value, padding_len_bytes};
use std::io::{self, Read};

/// Bytes read at a time.
const CHUNK_LEN_BYTES: usize = 64 << 10;
/// The maximum number of images: 256 ids times 16 versions, each at most once. Bounds the memory of a scan.
const IMAGES_MAX: usize = 4096;
/// What an image begins with.
const MAGIC: [u8; 4] = *b"Bf\x02\x13";

/// An image in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The offset of its header in the stream, in bytes.
    pub offset: u64,
    /// Its header.
    pub header: Header,
}

impl Entry {
    /// Return the offset of its data in the stream, in bytes.
    pub const fn data_offset(&self) -> u64 {
        self.offset + HEADER_LEN_BYTES as u64
    }
}

/// How to treat wrong redundant fields, and data behind the last image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// They are errors.
    Strict,
    /// What vendors' tools write, and cards boot, is noted; the rest are errors. `mlx-mkbfb -f` writes the version of
    /// the next image, whatever its id, into `next_img_ver`; older tools write older minor versions; installers read a
    /// configuration (`bf.cfg`) and a file system behind the last image.
    Vendor,
    /// All that rewriting the images corrects is noted, and so is data behind the last image.
    Repairable,
}

/// The contents of a stream.
#[derive(Debug)]
pub struct Report {
    /// Its images, in the stream's order.
    pub entries: Vec<Entry>,
    /// Problems that were tolerated, each with offset and field.
    pub notes: Vec<BfbError>,
    /// The length of the stream in bytes, with what follows its last image.
    pub len_bytes: u64,
    /// The length of what follows the last image, in bytes. No boot stage reads it.
    pub tail_len_bytes: u64,
}

impl Report {
    /// Find an image.
    pub fn find(&self, name: ImageName) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.header.name == name)
    }

    /// Return the highest version of an id, if there is an image with it.
    pub fn highest(&self, id: ImageId) -> Option<u8> {
        self.entries.iter().map(|entry| entry.header.name).filter(|name| name.id == id).map(|name| name.version).max()
    }

    /// Return whether there is an image of this id that was made for cards of this generation.
    pub fn serves(&self, id: ImageId, generation: Generation) -> bool {
        self.highest(id).is_some_and(|highest| {
            self.entries
                .iter()
                .any(|entry| entry.header.name.id == id && generation.takes(entry.header.name.version, highest))
        })
    }
}

/// Read and check a whole stream, and pass the data of each image to `take`.
///
/// For each image, `take` is called once with no bytes, then with its data piece by piece, without padding. The data is
/// not verified yet: the checksum covers the whole image, and an error may follow the last piece.
///
/// # Errors
/// The first damage, with offset and field; reading failed; `take` failed.
pub fn scan(
    reader: impl Read,
    policy: Policy,
    mut take: impl FnMut(&Entry, &[u8]) -> io::Result<()>,
) -> Result<Report, BfbError> {
    let mut scanner = Scanner { input: Input { reader, offset: 0 }, buffer: vec![0; CHUNK_LEN_BYTES] };
    let mut report = Report { entries: Vec::new(), notes: Vec::new(), len_bytes: 0, tail_len_bytes: 0 };
    loop {
        let entry = match scanner.header(report.entries.len())? {
            Next::Image(entry) => entry,
            Next::End => break,
            Next::Other { error, len_bytes } => {
                let (true, Some(last)) = (policy != Policy::Strict, last_of_all(&report.entries)) else {
                    return Err(error);
                };
                report.tail_len_bytes = len_bytes + scanner.drain()?;
                let index = report.entries.len() - 1;
                let (image, fault) = (Some(last.header.name), Fault::Tail { len_bytes: report.tail_len_bytes });
                let offset = scanner.input.offset - report.tail_len_bytes;
                report.notes.push(BfbError::Damaged { offset, index, image, fault });
                break;
            }
        };
        if report.entries.len() == IMAGES_MAX {
            return Err(damaged(&entry, IMAGES_MAX, Fault::TooMany { max: IMAGES_MAX }));
        }
        take(&entry, &[]).map_err(|source| BfbError::Take { image: entry.header.name, source })?;
        scanner.data(&entry, report.entries.len(), &mut take)?;
        report.entries.push(entry);
    }
    report.len_bytes = scanner.input.offset;
    if report.entries.is_empty() {
        return Err(BfbError::Damaged { offset: 0, index: 0, image: None, fault: Fault::Empty });
    }
    for (index, fault) in faults_between(&report.entries) {
        let error = damaged(&report.entries[index], index, fault);
        let next_version = report.entries.get(index + 1).map(|next| next.header.name.version);
        let is_tolerated = match (policy, fault) {
            (_, Fault::UnknownId) | (Policy::Vendor, Fault::OldMinor { .. }) => true,
            (Policy::Vendor, Fault::NextVersion { stored, .. }) => Some(stored) == next_version,
            (Policy::Repairable, fault) => fault.is_repairable(),
            _ => false,
        };
        if !is_tolerated {
            return Err(error);
        }
        report.notes.push(error);
    }
    Ok(report)
}

/// Return the last image if it announces no other one. Otherwise what follows is a damaged image.
fn last_of_all(entries: &[Entry]) -> Option<&Entry> {
    entries.last().filter(|entry| entry.header.following == 0 && entry.header.next_version == 0)
}

/// What follows an image.
enum Next {
    /// Another one.
    Image(Entry),
    /// Nothing.
    End,
    /// This many bytes so far that do not begin an image, and the error if they should have.
    Other { error: BfbError, len_bytes: u64 },
}

struct Scanner<R> {
    input: Input<R>,
    buffer: Vec<u8>,
}

impl<R: Read> Scanner<R> {
    /// Read the next header, if there is one.
    fn header(&mut self, index: usize) -> Result<Next, BfbError> {
        let offset = self.input.offset;
        let mut bytes = [0; HEADER_LEN_BYTES];
        let got = self.input.fill(&mut bytes)?;
        let fault = match got {
            0 => return Ok(Next::End),
            HEADER_LEN_BYTES => match Header::parse(&bytes) {
                Ok(header) => return Ok(Next::Image(Entry { offset, header })),
                Err(fault) => fault,
            },
            // The first four bytes distinguish appended data from a truncated header.
            _ if got >= 4 && bytes[..4] != MAGIC => {
                Fault::Magic { found: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) }
            }
            _ => Fault::ShortHeader { have: got as u64 },
        };
        let error = BfbError::Damaged { offset: offset + fault.field_offset(), index, image: None, fault };
        let len = got.min(MAGIC.len());
        if bytes[..len] == MAGIC[..len] { Err(error) } else { Ok(Next::Other { error, len_bytes: got as u64 }) }
    }

    /// Read to the end; return how many bytes were left.
    fn drain(&mut self) -> Result<u64, BfbError> {
        let mut len_bytes = 0;
        loop {
            match self.input.fill(&mut self.buffer)? {
                0 => return Ok(len_bytes),
                got => len_bytes += got as u64,
            }
        }
    }

    /// Read an image's data and padding, and verify the checksum.
    fn data(
        &mut self,
        entry: &Entry,
        index: usize,
        take: &mut impl FnMut(&Entry, &[u8]) -> io::Result<()>,
    ) -> Result<(), BfbError> {
        let len_bytes = u64::from(entry.header.len_bytes);
        let padding_len = padding_len_bytes(len_bytes);
        let mut crc = crc();
        let mut left = len_bytes;
        let truncated = |have| Fault::Truncated { need: len_bytes + padding_len as u64, have };
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(usize::MAX).min(self.buffer.len());
            let got = self.input.fill(&mut self.buffer[..want])?;
            if got < want {
                return Err(damaged(entry, index, truncated(len_bytes - left + got as u64)));
            }
            crc.update(&self.buffer[..want]);
            take(entry, &self.buffer[..want]).map_err(|source| BfbError::Take { image: entry.header.name, source })?;
            left -= want as u64;
        }
        let at = self.input.offset;
        let mut padding = [0; 8];
        let padding = &mut padding[..padding_len];
        let got = self.input.fill(padding)?;
        if got < padding_len {
            return Err(damaged(entry, index, truncated(len_bytes + got as u64)));
        }
        if let Some((place, found)) = padding.iter().enumerate().find(|(_, byte)| **byte != 0) {
            let (image, fault) = (Some(entry.header.name), Fault::Padding { found: *found });
            return Err(BfbError::Damaged { offset: at + place as u64, index, image, fault });
        }
        crc.update(padding);
        match crc_value(&crc) {
            computed if computed == entry.header.crc => Ok(()),
            computed => Err(damaged(entry, index, Fault::Crc { stored: entry.header.crc, computed })),
        }
    }
}

/// A reader that tracks its offset.
struct Input<R> {
    reader: R,
    offset: u64,
}

impl<R: Read> Input<R> {
    /// Fill the buffer as far as the stream goes; return the number of bytes read.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, BfbError> {
        let mut have = 0;
        while have < buffer.len() {
            match self.reader.read(&mut buffer[have..]) {
                Ok(0) => break,
                Ok(got) => {
                    have += got;
                    self.offset += got as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(BfbError::Read { offset: self.offset, source }),
            }
        }
        Ok(have)
    }
}

/// Return the error for a fault of an image.
fn damaged(entry: &Entry, index: usize, fault: Fault) -> BfbError {
    let offset = entry.offset + fault.field_offset();
    BfbError::Damaged { offset, index, image: Some(entry.header.name), fault }
}

/// Find faults in the sequence of images, in stream order.
fn faults_between(entries: &[Entry]) -> Vec<(usize, Fault)> {
    let expected = announcements(entries);
    let mut faults = Vec::new();
    let mut before: Option<ImageName> = None;
    for (index, entry) in entries.iter().enumerate() {
        let Header { name, minor, next_version, following, .. } = entry.header;
        if minor != MINOR {
            faults.push((index, Fault::OldMinor { found: minor }));
        }
        if entries[..index].iter().any(|other| other.header.name == name) {
            faults.push((index, Fault::Duplicate));
        }
        match (name.id.rank(), before) {
            (None, _) => faults.push((index, Fault::UnknownId)),
            (rank, Some(last)) if (rank, name.version) < (last.id.rank(), last.version) => {
                faults.push((index, Fault::Order { before: last }));
            }
            _ => before = Some(name),
        }
        let (expected_next, expected_following) = expected[index];
        if next_version != expected_next {
            faults.push((index, Fault::NextVersion { stored: next_version, expected: expected_next }));
        }
        if following != expected_following {
            faults.push((index, Fault::Following { stored: following, expected: expected_following }));
        }
    }
    faults
}

/// Return the correct `next_img_ver` and `following_images` of each image.
fn announcements(entries: &[Entry]) -> Vec<(u8, u64)> {
    let mut following = 0;
    let mut next = [0_u8; 256];
    let mut all: Vec<_> = entries
        .iter()
        .rev()
        .map(|entry| {
            let ImageName { id, version } = entry.header.name;
            let announced = (next[usize::from(id.0)], following);
            following |= id.bit();
            next[usize::from(id.0)] = version;
            announced
        })
        .collect();
    all.reverse();
    all
}
