//! Decides whether an image may be written to a card, from what was read of both, before the card is modified.

use super::failure::{Failure, Refusal};
use super::messages::Until;
use crate::bfb::Generation;
use crate::manifest::{BOARD, Checked};
use crate::rshim::{CardMode, Misc};

/// The maximum length of a stream in bytes. UEFI holds kernel and file system in the card's memory, of which the
/// smallest BlueField-2 has 16 GiB; a longer stream is taken for a mistake.
pub const STREAM_MAX_BYTES: u64 = 4 << 30;

/// Which epochs a card accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RollbackPolicy {
    /// The highest epoch that the card has had, if known.
    pub had_epoch: Option<u64>,
    /// Accept images with a lower epoch.
    pub allow_rollback: bool,
}

/// Check that an image suits a card; returns the card's generation.
///
/// # Errors
/// The first reason for refusal.
pub fn check(image: &Checked, misc: &Misc, policy: RollbackPolicy) -> Result<Generation, Refusal> {
    let len_bytes = image.report.len_bytes;
    if len_bytes > STREAM_MAX_BYTES {
        return Err(Refusal::TooLong { len_bytes, max_bytes: STREAM_MAX_BYTES });
    }
    let found = || misc.dev_info.clone().unwrap_or_else(|| "a card that does not report its type".into());
    let generation = misc.generation().ok_or_else(|| Refusal::UnknownCard { found: found() })?;
    if let Some(manifest) = image.manifest.as_ref().filter(|manifest| manifest.board != BOARD) {
        return Err(Refusal::Board { board: manifest.board.clone(), expected: BOARD });
    }
    if !image.boots(generation) {
        return Err(Refusal::Generation { generation });
    }
    // An image without a manifest has no epoch and counts as the oldest.
    let epoch = image.manifest.as_ref().map_or(0, |manifest| manifest.epoch);
    match policy.had_epoch {
        Some(had) if epoch < had && !policy.allow_rollback => Err(Refusal::Rollback { epoch, had }),
        _ => Ok(generation),
    }
}

/// Check that the card accepts a boot stream now, according to `misc`. A card in NIC mode accepts a vendor's, which ends
/// with [`Until::NicMode`].
///
/// # Errors
/// The first reason for refusal.
pub fn usable(misc: &Misc, until: Until) -> Result<(), Failure> {
    if misc.mode == Some(CardMode::Nic) && until != Until::NicMode {
        return Err(Failure::NicMode);
    }
    if misc.secure_nic_mode == Some(true) {
        return Err(Failure::SecureMode);
    }
    if misc.drop_mode == Some(true) { Err(Failure::DropMode) } else { Ok(()) }
}
