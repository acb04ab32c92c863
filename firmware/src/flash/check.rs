//! May this image go to this card? Decided from what was read of both, before anything of the card is touched.

use super::failure::{Failure, Refusal};
use crate::bfb::Generation;
use crate::manifest::{BOARD, Checked};
use crate::rshim::{CardMode, Misc};

/// The longest stream, in bytes. UEFI holds kernel and file system in the card's memory, and the smallest BlueField-2 has
/// 16 GiB of it; what is longer is taken for a mistake.
pub const STREAM_MAX_BYTES: u64 = 4 << 30;

/// What is asked of an image beyond being whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// The highest epoch that the card has had, as far as it is known.
    pub had_epoch: Option<u64>,
    /// Let older images come back.
    pub allow_rollback: bool,
}

/// Hold an image against a card, and return the card's generation.
///
/// # Errors
/// The first reason why not.
pub fn check(image: &Checked, misc: &Misc, terms: Terms) -> Result<Generation, Refusal> {
    let len_bytes = image.report.len_bytes;
    if len_bytes > STREAM_MAX_BYTES {
        return Err(Refusal::TooLong { len_bytes, max_bytes: STREAM_MAX_BYTES });
    }
    let found = || misc.dev_info.clone().unwrap_or_else(|| "a card that does not say what it is".into());
    let generation = misc.generation().ok_or_else(|| Refusal::UnknownCard { found: found() })?;
    if let Some(manifest) = image.manifest.as_ref().filter(|manifest| manifest.board != BOARD) {
        return Err(Refusal::Board { board: manifest.board.clone(), expected: BOARD });
    }
    if !image.boots(generation) {
        return Err(Refusal::Generation { generation });
    }
    // An image without a manifest says no epoch: it counts as the oldest.
    let epoch = image.manifest.as_ref().map_or(0, |manifest| manifest.epoch);
    match terms.had_epoch {
        Some(had) if epoch < had && !terms.allow_rollback => Err(Refusal::Rollback { epoch, had }),
        _ => Ok(generation),
    }
}

/// Tell whether the card takes a boot stream now, as far as `misc` shows.
///
/// # Errors
/// The first reason why not.
pub fn usable(misc: &Misc) -> Result<(), Failure> {
    if misc.mode == Some(CardMode::Nic) {
        return Err(Failure::NicMode);
    }
    if misc.secure_nic_mode == Some(true) {
        return Err(Failure::SecureMode);
    }
    if misc.drop_mode == Some(true) { Err(Failure::DropMode) } else { Ok(()) }
}
