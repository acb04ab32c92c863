//! BFB: the boot stream of BlueField-class cards, read and written without ever holding an image in memory.
//!
//! A BFB is a plain concatenation of images; there is no file header, no table and no trailer. The format is that of
//! Mellanox/bfscripts `mlx-mkbfb` and Mellanox/mlxbf-bootctl:
//!
//! ```text
//! image  := header data pad            header: 3 little-endian u64;  pad: zeros up to a multiple of 8
//! w0      0..31 magic 0x13026642   32..35 major 1   36..39 minor 2   40..43 0   44..47 next_img_ver
//!        48..51 cur_img_ver        52..55 hdr_len 3 (words)          56..63 image_id
//! w1      0..31 image_len (bytes, without pad)      32..63 image_crc (CRC-32/ISO-HDLC of data and pad)
//! w2     following_images: bit id for each id < 64 that still appears later in the stream
//! ```
//!
//! Boot ROM, ATF and UEFI read the stream forwards only: an image that stands too early or too late is lost. So the
//! order is part of the format ([`ImageId::rank`]), and an image is named by its id and version ([`ImageName`]).
//!
//! Invariants:
//! - [`scan`] reads every byte once, in order, in a buffer of fixed size, and trusts no field before it is checked;
//! - `next_img_ver`, `following_images`, the minor version and the order follow from the rest of the file. [`Policy::Strict`]
//!   refuses a file where they differ; [`Policy::Repairable`] notes it, as writing the images again puts them right;
//! - [`Builder`] emits only files that [`scan`] accepts as strict.

mod error;
mod header;
mod id;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use error::{BfbError, Fault};
pub use header::{HEADER_LEN_BYTES, Header};
pub use id::{Generation, ImageId, ImageName, ImageNameError, VERSION_MAX};
pub use read::{Entry, Policy, Report, scan};
pub use write::{Builder, Source, WriteError};

/// Return how many bytes of padding follow `len_bytes` of data.
pub const fn padding_len_bytes(len_bytes: u64) -> usize {
    (len_bytes.wrapping_neg() & 7) as usize
}

/// The checksum of an image: CRC-32/ISO-HDLC (zlib) over data and padding.
fn crc() -> crc_fast::Digest {
    crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32IsoHdlc)
}

/// Return the value of an image's checksum.
fn crc_value(digest: &crc_fast::Digest) -> u32 {
    // The library returns every width as u64.
    digest.finalize() as u32
}
