//! Errors of a boot stream, each with its offset and field.

use super::id::{ImageName, VERSION_MAX};
use std::io;
use thiserror::Error;

/// A boot stream is damaged, or cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BfbError {
    /// The stream is damaged.
    #[error("offset {offset:#x} ({field} of {at}): {fault}", field = fault.field(), at = image.map_or_else(|| format!("image {index}"), |name| format!("image {index}, {name}")))]
    Damaged {
        /// The offset of the field in the stream, in bytes.
        offset: u64,
        /// The image, counted from 0.
        index: usize,
        /// Its name, if the header could be parsed.
        image: Option<ImageName>,
        /// What is wrong.
        fault: Fault,
    },
    /// Reading failed.
    #[error("offset {offset:#x}: cannot read: {source}")]
    Read {
        /// The offset reached, in bytes.
        offset: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The consumer of the data failed.
    #[error("{image}: cannot process its data: {source}")]
    Take {
        /// The image.
        image: ImageName,
        /// The system's error.
        source: io::Error,
    },
}

/// What is wrong with an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Fault {
    /// The stream has no image.
    #[error("the stream is empty; a boot stream has at least one image")]
    Empty,
    /// The stream ends in a header.
    #[error("{have} bytes are left, a header has 24: the file is truncated, or something was appended")]
    ShortHeader {
        /// The bytes left.
        have: u64,
    },
    /// The magic number is wrong.
    #[error(
        "{found:#010x} is not 0x13026642: not the start of an image. The file is damaged, or something (such as a \
         bf.cfg) was appended, which only an unsigned stream may have"
    )]
    Magic {
        /// The value found.
        found: u32,
    },
    /// Not format 1.
    #[error("major version {found} is unknown; 1 is supported")]
    Major {
        /// The value found.
        found: u8,
    },
    /// A later minor version.
    #[error("minor version {found} is unknown; 0 to 2 are supported")]
    Minor {
        /// The value found.
        found: u8,
    },
    /// An older minor version.
    #[error("minor version {found} is outdated, the current one is 2; readers accept it, `repack` updates it")]
    OldMinor {
        /// The value found.
        found: u8,
    },
    /// Reserved bits are set.
    #[error("reserved bits are {found:#x}, not 0")]
    Reserved {
        /// The value found.
        found: u8,
    },
    /// An unknown image version.
    #[error("image version {found} is unknown; 0 to {VERSION_MAX} are supported")]
    Version {
        /// The value found.
        found: u8,
    },
    /// The header length is wrong.
    #[error("the header has {found} words of 8 bytes, not 3")]
    HeaderWords {
        /// The value found.
        found: u8,
    },
    /// The stream ends in the data or the padding.
    #[error("{need} bytes of data and padding are expected, but {have} are left: the file is truncated")]
    Truncated {
        /// The length in the header, with padding.
        need: u64,
        /// The bytes left.
        have: u64,
    },
    /// Padding is not zero.
    #[error("padding byte is {found:#04x}, not 0")]
    Padding {
        /// The value found.
        found: u8,
    },
    /// The checksum is wrong.
    #[error("stored {stored:#010x}, the data gives {computed:#010x}: the data or the header is damaged")]
    Crc {
        /// The value in the header.
        stored: u32,
        /// The computed value.
        computed: u32,
    },
    /// The header's next version is wrong.
    #[error("the next version of this id is {expected}, not {stored} (0 means none)")]
    NextVersion {
        /// The value in the header.
        stored: u8,
        /// The correct value.
        expected: u8,
    },
    /// The header's set of following images is wrong.
    #[error("{stored:#018x} does not match the following images, which give {expected:#018x}")]
    Following {
        /// The value in the header.
        stored: u64,
        /// The correct value.
        expected: u64,
    },
    /// The image comes after one that it has to precede.
    #[error("has to come before {before}: the boot stages read sequentially and would skip it; `repack` sorts images")]
    Order {
        /// The image that it has to precede.
        before: ImageName,
    },
    /// The same id and version occur twice.
    #[error("occurs twice; only the first would be used")]
    Duplicate,
    /// Data follows the last image. Only noted, and only in unsigned streams.
    #[error(
        "{len_bytes} bytes follow the last image; no boot stage reads them, but a vendor's installer does (bf.cfg, root \
         file system)"
    )]
    Tail {
        /// The length of the data in bytes.
        len_bytes: u64,
    },
    /// An unknown id, which consumers skip. Only noted, because newer tools may define it.
    #[error("is not an id known to mlx-mkbfb; the boot stages skip it")]
    UnknownId,
    /// More images than there are ids and versions.
    #[error("there are more than {max} images")]
    TooMany {
        /// The limit.
        max: usize,
    },
}

impl Fault {
    /// Return the wrong field of the header, or part of the image.
    pub const fn field(&self) -> &'static str {
        match self {
            Self::Empty | Self::ShortHeader { .. } | Self::TooMany { .. } => "header",
            Self::Magic { .. } => "magic",
            Self::Major { .. } => "major",
            Self::Minor { .. } | Self::OldMinor { .. } => "minor",
            Self::Reserved { .. } => "reserved",
            Self::Version { .. } => "cur_img_ver",
            Self::HeaderWords { .. } => "hdr_len",
            Self::Truncated { .. } => "image_len",
            Self::Padding { .. } => "padding",
            Self::Crc { .. } => "image_crc",
            Self::Tail { .. } => "end",
            Self::NextVersion { .. } => "next_img_ver",
            Self::Following { .. } => "following_images",
            Self::Order { .. } | Self::Duplicate | Self::UnknownId => "image_id",
        }
    }

    /// Return the offset of the field in the header, in bytes; for data and padding the caller adds it.
    pub(super) const fn field_offset(&self) -> u64 {
        match self {
            Self::Major { .. } | Self::Minor { .. } | Self::OldMinor { .. } => 4,
            Self::Reserved { .. } | Self::NextVersion { .. } => 5,
            Self::Version { .. } | Self::HeaderWords { .. } => 6,
            Self::Order { .. } | Self::Duplicate | Self::UnknownId => 7,
            Self::Truncated { .. } => 8,
            Self::Crc { .. } => 12,
            Self::Following { .. } => 16,
            _ => 0,
        }
    }

    /// Return whether rewriting the images corrects it, so that such a base can be used.
    pub(super) const fn is_repairable(&self) -> bool {
        matches!(self, Self::OldMinor { .. } | Self::NextVersion { .. } | Self::Following { .. } | Self::Order { .. })
    }
}
