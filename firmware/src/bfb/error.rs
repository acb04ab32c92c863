//! What can be wrong with a boot stream: always with the offset and the field.

use super::id::{ImageName, VERSION_MAX};
use std::io;
use thiserror::Error;

/// A boot stream is damaged, or can't be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BfbError {
    /// Its bytes are wrong.
    #[error("offset {offset:#x} ({field} of {at}): {fault}", field = fault.field(), at = image.map_or_else(|| format!("image {index}"), |name| format!("image {index}, {name}")))]
    Damaged {
        /// Where the field begins, in bytes from the stream's first one.
        offset: u64,
        /// The image, counted from 0.
        index: usize,
        /// Its name, if the header could be read.
        image: Option<ImageName>,
        /// What is wrong.
        fault: Fault,
    },
    /// Reading failed.
    #[error("offset {offset:#x}: cannot read: {source}")]
    Read {
        /// How far it went, in bytes.
        offset: u64,
        /// What the system says.
        source: io::Error,
    },
    /// Who was to take the data could not.
    #[error("{image}: cannot take its data: {source}")]
    Take {
        /// Whose data.
        image: ImageName,
        /// What the system says.
        source: io::Error,
    },
}

/// What is wrong with an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Fault {
    /// There is no image at all.
    #[error("the stream is empty; a boot stream has at least one image")]
    Empty,
    /// The stream ends in a header.
    #[error("{have} bytes are left, a header has 24: the file is truncated, or something was appended")]
    ShortHeader {
        /// Bytes that are there.
        have: u64,
    },
    /// No header begins here.
    #[error(
        "{found:#010x} is not 0x13026642: no image begins here. The file is damaged, or something (such as a bf.cfg) \
         was appended, which no stage of the boot reads"
    )]
    Magic {
        /// What stands there.
        found: u32,
    },
    /// Not format 1.
    #[error("major version {found}, known is 1")]
    Major {
        /// What stands there.
        found: u8,
    },
    /// A format that came later.
    #[error("minor version {found}, known are 0 to 2")]
    Minor {
        /// What stands there.
        found: u8,
    },
    /// Between 0 and 2, but not what is written today.
    #[error("minor version {found}, written today is 2; readers take it, `repack` writes it anew")]
    OldMinor {
        /// What stands there.
        found: u8,
    },
    /// Reserved bits are set.
    #[error("reserved bits are {found:#x}, not 0")]
    Reserved {
        /// What stands there.
        found: u8,
    },
    /// A card that is not known.
    #[error("image version {found}, known are 0 to {VERSION_MAX}")]
    Version {
        /// What stands there.
        found: u8,
    },
    /// A header of another length.
    #[error("header of {found} words of 8 bytes; it is 3")]
    HeaderWords {
        /// What stands there.
        found: u8,
    },
    /// The stream ends in the data or the padding.
    #[error("{need} bytes of data and padding, {have} are left: the file is truncated")]
    Truncated {
        /// What the header announces, padding included.
        need: u64,
        /// What is there.
        have: u64,
    },
    /// Padding is not zero.
    #[error("padding byte is {found:#04x}, not 0")]
    Padding {
        /// What stands there.
        found: u8,
    },
    /// The data is not what it was.
    #[error("stored {stored:#010x}, the data gives {computed:#010x}: the data or the header is damaged")]
    Crc {
        /// What the header says.
        stored: u32,
        /// What it is.
        computed: u32,
    },
    /// The header announces another next version than the one that follows.
    #[error("says that version {stored} of this id is next; it is {expected} (0 stands for none)")]
    NextVersion {
        /// What the header says.
        stored: u8,
        /// What it should say.
        expected: u8,
    },
    /// The header announces other images than those that follow.
    #[error("{stored:#018x}; the images that follow make it {expected:#018x}")]
    Following {
        /// What the header says.
        stored: u64,
        /// What it should say.
        expected: u64,
    },
    /// It stands behind an image that it has to stand before.
    #[error("must stand before {before}: the boot stages read forwards only, and would miss it; `repack` sorts")]
    Order {
        /// The image before it.
        before: ImageName,
    },
    /// The same id and version twice.
    #[error("is there twice; only the first would be used")]
    Duplicate,
    /// An id without a name: consumers skip it. Never more than a note, as newer tools may name it.
    #[error("is no id that mlx-mkbfb names; the boot stages skip it")]
    UnknownId,
    /// More images than ids and versions can make.
    #[error("there are more than {max} images")]
    TooMany {
        /// The limit.
        max: usize,
    },
}

impl Fault {
    /// Return the header's field, or the part of the image, that is wrong.
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
            Self::NextVersion { .. } => "next_img_ver",
            Self::Following { .. } => "following_images",
            Self::Order { .. } | Self::Duplicate | Self::UnknownId => "image_id",
        }
    }

    /// Return where the field begins, in bytes from the header's first one; data and padding begin where the caller says.
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

    /// Tell whether writing the images again puts it right, so that a base with it can be used.
    pub(super) const fn is_repairable(&self) -> bool {
        matches!(self, Self::OldMinor { .. } | Self::NextVersion { .. } | Self::Following { .. } | Self::Order { .. })
    }
}
