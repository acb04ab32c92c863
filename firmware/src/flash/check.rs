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

/// Check that the card accepts a boot stream now, according to `misc`. A card in NIC mode accepts a vendor's, which
/// ends with [`Until::NicMode`].
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bfb::{Builder, ImageName, Policy, Source};
    use crate::manifest::{self, Trust};
    use std::io::Cursor;

    fn image(names: &[&str], len: usize) -> manifest::Checked {
        let mut builder = Builder::new();
        for name in names {
            builder.insert(name.parse().expect("a name"), Source::Bytes(vec![1; len])).expect("fits");
        }
        let sealed = manifest::Manifest::of(&builder, "1", 5).and_then(|manifest| manifest.seal(None)).expect("sealed");
        builder.insert(manifest::MANIFEST_IMAGE, Source::Bytes(sealed)).expect("fits");
        let mut out = Cursor::new(Vec::new());
        builder.write_to(&mut out).expect("memory takes it");
        manifest::check(out.get_ref().as_slice(), Policy::Strict, Trust::AnySigner).expect("whole")
    }

    #[test]
    fn image_for_another_card_or_older_epoch_is_refused() {
        let policy = RollbackPolicy { had_epoch: None, allow_rollback: false };
        let card = |info: &str| Misc::parse(&format!("DEV_INFO        {info}\n"));
        let for_three = image(&["bl2-v2", "image"], 10);
        let checked = |misc: &Misc, policy| check(&for_three, misc, policy);
        assert_eq!(checked(&card("BlueField-3(Rev 1)"), policy), Ok(Generation::BlueField3));
        let generation = Generation::BlueField2;
        assert_eq!(checked(&card("BlueField-2(Rev 1)"), policy), Err(Refusal::Generation { generation }));
        for unknown in ["BlueField-4(Rev 0)", "ConnectX"] {
            assert!(matches!(checked(&card(unknown), policy), Err(Refusal::UnknownCard { .. })));
        }
        let three = card("BlueField-3(Rev 1)");
        let had = |had| RollbackPolicy { had_epoch: Some(had), allow_rollback: false };
        assert!(checked(&three, had(5)).is_ok());
        assert_eq!(checked(&three, had(6)), Err(Refusal::Rollback { epoch: 5, had: 6 }));
        assert!(checked(&three, RollbackPolicy { had_epoch: Some(6), allow_rollback: true }).is_ok());
        let mut long = image(&["bl2", "image"], 10);
        long.report.len_bytes = STREAM_MAX_BYTES + 1;
        assert!(matches!(check(&long, &three, policy), Err(Refusal::TooLong { .. })));
        let mut other = image(&["bl2", "image"], 10);
        other.manifest.as_mut().expect("is there").board = "toaster".into();
        assert!(matches!(check(&other, &three, policy), Err(Refusal::Board { .. })));
        let name: ImageName = "bl2-v2".parse().expect("a name");
        assert!(for_three.report.find(name).is_some());
    }

    #[test]
    fn card_in_nic_secure_or_drop_mode_is_refused() {
        let usable = |line: &str| usable(&Misc::parse(line), Until::Ready);
        assert_eq!(usable("BF_MODE         DPU mode\nDROP_MODE       0 (0:normal, 1:drop)\n"), Ok(()));
        assert_eq!(usable(""), Ok(()));
        assert_eq!(usable("BF_MODE         NIC mode\n"), Err(Failure::NicMode));
        assert_eq!(super::usable(&Misc::parse("BF_MODE         NIC mode\n"), Until::NicMode), Ok(()));
        assert_eq!(usable("SECURE_NIC_MODE 1 (0:no, 1:yes)\n"), Err(Failure::SecureMode));
        assert_eq!(usable("DROP_MODE       1 (0:normal, 1:drop)\n"), Err(Failure::DropMode));
    }
}
