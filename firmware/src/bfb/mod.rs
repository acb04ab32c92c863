//! BFB: the boot stream format of BlueField-class cards, read and written without holding a whole image in memory.
//!
//! A BFB is a concatenation of images, without a file header, table or trailer. The format is that of
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
//! Boot ROM, ATF and UEFI read the stream sequentially: an image that comes too early or too late is skipped. The order
//! is therefore part of the format ([`ImageId::rank`]), and an image is identified by its id and version
//! ([`ImageName`]).
//!
//! Invariants:
//! - [`scan`] reads every byte once, in order, into a buffer of fixed size, and uses no field before it is checked;
//! - `next_img_ver`, `following_images`, the minor version and the order are redundant. [`Policy::Strict`] refuses a
//!   file where they are wrong; [`Policy::Repairable`] notes it, because rewriting the images corrects them, and
//!   [`Policy::Vendor`] notes what vendors' tools write;
//! - [`Builder`] writes only files that [`scan`] accepts as strict.

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

/// Return the number of padding bytes after `len_bytes` of data.
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
