//! Reading: one pass over a stream of any length, in a buffer of fixed size, that checks all that can be checked.

use super::error::{BfbError, Fault};
use super::header::{HEADER_LEN_BYTES, Header, MINOR};
use super::id::{Generation, ImageId, ImageName};
use super::{crc, crc_value, padding_len_bytes};
use std::io::{self, Read};

/// Bytes that are read at a time.
const CHUNK_LEN_BYTES: usize = 64 << 10;
/// Images of one stream: 256 ids times 16 versions, each at most once. Bounds the memory of a scan.
const IMAGES_MAX: usize = 4096;

/// Where an image lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Where its header begins, in bytes from the stream's first one.
    pub offset: u64,
    /// Its header.
    pub header: Header,
}

impl Entry {
    /// Return where its data begins, in bytes from the stream's first one.
    pub const fn data_offset(&self) -> u64 {
        self.offset + HEADER_LEN_BYTES as u64
    }
}

/// What becomes of fields that say what the rest of the file says as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// They must be what the writer writes.
    Strict,
    /// Differences are noted: writing the images again puts them right.
    Repairable,
}

/// What a stream holds.
#[derive(Debug)]
pub struct Report {
    /// Its images, in the stream's order.
    pub entries: Vec<Entry>,
    /// What is odd but was let pass, each with offset and field.
    pub notes: Vec<BfbError>,
    /// Bytes of the stream.
    pub len_bytes: u64,
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

    /// Tell whether a card of this generation finds an image of this id.
    pub fn serves(&self, id: ImageId, generation: Generation) -> bool {
        self.highest(id).is_some_and(|highest| {
            self.entries
                .iter()
                .any(|entry| entry.header.name.id == id && generation.takes(entry.header.name.version, highest))
        })
    }
}

/// Read and check a whole stream, and hand the data of each image to `take`.
///
/// For each image `take` is called once with no bytes, then with its data piece by piece, without padding. What it gets
/// is not checked yet: the checksum stands for the whole image, and an error may come after the last piece.
///
/// # Errors
/// The first damage, with offset and field; reading fails; `take` fails.
pub fn scan(
    reader: impl Read,
    policy: Policy,
    mut take: impl FnMut(&Entry, &[u8]) -> io::Result<()>,
) -> Result<Report, BfbError> {
    let mut scanner = Scanner { input: Input { reader, offset: 0 }, buffer: vec![0; CHUNK_LEN_BYTES] };
    let mut report = Report { entries: Vec::new(), notes: Vec::new(), len_bytes: 0 };
    while let Some(entry) = scanner.header(report.entries.len())? {
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
        if fault != Fault::UnknownId && (policy == Policy::Strict || !fault.is_repairable()) {
            return Err(error);
        }
        report.notes.push(error);
    }
    Ok(report)
}

struct Scanner<R> {
    input: Input<R>,
    buffer: Vec<u8>,
}

impl<R: Read> Scanner<R> {
    /// Read the next header; none at the end of the stream.
    fn header(&mut self, index: usize) -> Result<Option<Entry>, BfbError> {
        let offset = self.input.offset;
        let mut bytes = [0; HEADER_LEN_BYTES];
        let got = self.input.fill(&mut bytes)?;
        let fault = match got {
            0 => return Ok(None),
            HEADER_LEN_BYTES => match Header::parse(&bytes) {
                Ok(header) => return Ok(Some(Entry { offset, header })),
                Err(fault) => fault,
            },
            // Four bytes tell what is appended from what is cut off.
            _ if got >= 4 && bytes[..4] != *b"Bf\x02\x13" => {
                Fault::Magic { found: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) }
            }
            _ => Fault::ShortHeader { have: got as u64 },
        };
        Err(BfbError::Damaged { offset: offset + fault.field_offset(), index, image: None, fault })
    }

    /// Read data and padding of an image, and compare the checksum.
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

/// A reader that counts.
struct Input<R> {
    reader: R,
    offset: u64,
}

impl<R: Read> Input<R> {
    /// Fill the buffer as far as the stream goes, and return how far that is.
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

/// Name a fault of an image with the place of its field.
fn damaged(entry: &Entry, index: usize, fault: Fault) -> BfbError {
    let offset = entry.offset + fault.field_offset();
    BfbError::Damaged { offset, index, image: Some(entry.header.name), fault }
}

/// Find what is wrong with the images as a whole, in the order of the stream.
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

/// Return `next_img_ver` and `following_images` of each image, from the images behind it.
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
