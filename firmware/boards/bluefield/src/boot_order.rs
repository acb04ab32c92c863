//! The boot order of the card: EFI variables where the firmware keeps them, else the eMMC's two boot partitions.

use rustix::fs::{StatVfsMountFlags, statvfs};
use std::fs;
use std::io;
use std::path::Path;
use sumac_firmware::boot::{
    BootEntries, EFIVARS, EfiBootOrder, Efivarfs, EmmcPartitions, EntryError, Partition, SwapBootOrder, SwapError,
};
use sumac_firmware::slots::{BootOrder, Slot};
use thiserror::Error;

/// Why the boot order cannot be read or set.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OrderError {
    /// EFI variables failed.
    #[error(transparent)]
    Efi(#[from] EntryError),
    /// The boot partitions failed.
    #[error(transparent)]
    Swap(#[from] SwapError),
    /// The card can keep no order.
    #[error(
        "the firmware keeps no EFI variables ({efi}), and boot partitions cannot stand in ({emmc}): flash it with --ram"
    )]
    Neither {
        /// What is wrong with the variables.
        efi: &'static str,
        /// What is wrong with the boot partitions.
        emmc: io::Error,
    },
}

/// The order.
#[derive(Debug)]
pub enum CardBootOrder {
    /// In EFI variables.
    Efi(EfiBootOrder<Efivarfs>),
    /// In eMMC boot partitions.
    Swap(SwapBootOrder<EmmcPartitions>),
}

impl CardBootOrder {
    /// Choose what this card has.
    ///
    /// # Errors
    /// [`OrderError::Neither`].
    pub fn of_card() -> Result<Self, OrderError> {
        Self::choose(Path::new(EFIVARS), EmmcPartitions::find)
    }

    fn choose(efivars: &Path, emmc: impl FnOnce() -> io::Result<EmmcPartitions>) -> Result<Self, OrderError> {
        match why_unusable(efivars) {
            None => Ok(Self::Efi(EfiBootOrder::new(Efivarfs::new(efivars)))),
            Some(efi) => {
                let emmc = emmc().map_err(|emmc| OrderError::Neither { efi, emmc })?;
                Ok(Self::Swap(SwapBootOrder::new(emmc)))
            }
        }
    }

    /// Return where the order is, for the log.
    pub const fn place(&self) -> &'static str {
        match self {
            Self::Efi(_) => "EFI variables",
            Self::Swap(_) => "eMMC boot partitions",
        }
    }
}

/// Return why EFI variables cannot be written, if they cannot: Linux mounts a firmware's variables read-only if it does
/// not let the system write them (fs/efivarfs/super.c).
fn why_unusable(efivars: &Path) -> Option<&'static str> {
    let has_any = fs::read_dir(efivars).is_ok_and(|mut entries| entries.next().is_some());
    match statvfs(efivars) {
        _ if !has_any => Some("there are none"),
        Ok(mounted) if mounted.f_flag.contains(StatVfsMountFlags::RDONLY) => Some("they are read-only"),
        Ok(_) => None,
        Err(_) => Some("they cannot be read"),
    }
}

impl BootOrder for CardBootOrder {
    type Error = OrderError;

    fn try_once(&mut self, slot: Slot) -> Result<(), OrderError> {
        match self {
            Self::Efi(order) => Ok(order.try_once(slot)?),
            Self::Swap(order) => Ok(order.try_once(slot)?),
        }
    }

    fn prefer(&mut self, slot: Slot) -> Result<(), OrderError> {
        match self {
            Self::Efi(order) => Ok(order.prefer(slot)?),
            Self::Swap(order) => Ok(order.prefer(slot)?),
        }
    }
}

impl BootEntries for CardBootOrder {
    fn preferred(&self) -> Result<Option<Slot>, OrderError> {
        match self {
            Self::Efi(order) => Ok(order.preferred()?),
            Self::Swap(order) => Ok(order.preferred()?),
        }
    }

    fn set_entry(&mut self, slot: Slot, partition: Partition, command_line: &str) -> Result<(), OrderError> {
        match self {
            Self::Efi(order) => Ok(order.set_entry(slot, partition, command_line)?),
            Self::Swap(order) => Ok(order.set_entry(slot, partition, command_line)?),
        }
    }

    fn retire(&mut self, slot: Slot) -> Result<(), OrderError> {
        match self {
            Self::Efi(order) => Ok(order.retire(slot)?),
            Self::Swap(order) => Ok(order.retire(slot)?),
        }
    }

    fn keep_fallback(&mut self, running: Slot) -> Result<(), OrderError> {
        match self {
            Self::Efi(order) => Ok(order.keep_fallback(running)?),
            Self::Swap(order) => Ok(order.keep_fallback(running)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_that_keeps_no_order_at_all_is_an_error_that_names_both() {
        let folder = tempfile::tempdir().expect("a folder");
        let no_emmc = || Err(io::Error::new(io::ErrorKind::NotFound, "no eMMC with boot partitions is there"));
        let refused = |path: &Path| CardBootOrder::choose(path, no_emmc).expect_err("neither").to_string();
        let absent = refused(&folder.path().join("absent"));
        assert!(
            absent.contains("there are none") && absent.contains("no eMMC") && absent.contains("--ram"),
            "{absent}"
        );
        assert_eq!(refused(folder.path()), absent, "an empty folder is a file system that is not mounted");
        // Mounted read-only in every Linux, and never empty.
        if statvfs("/proc/sys/kernel").is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY)) {
            assert!(refused(Path::new("/proc/sys/kernel")).contains("read-only"));
        }
        fs::write(folder.path().join("BootOrder-x"), [7, 0, 0, 0]).expect("written");
        let order = CardBootOrder::choose(folder.path(), no_emmc).expect("variables");
        assert_eq!(order.place(), "EFI variables");
    }

    /// A plain folder stands in for efivarfs.
    #[test]
    fn order_in_variables_is_what_was_set_last() {
        let folder = tempfile::tempdir().expect("a folder");
        let value = |name: &str| {
            let path = folder.path().join(format!("{name}-8be4df61-93ca-11d2-aa0d-00e098032b8c"));
            fs::read(path).ok().map(|bytes| bytes[4..].to_vec())
        };
        fs::write(folder.path().join("Lang-8be4df61-93ca-11d2-aa0d-00e098032b8c"), *b"\x07\0\0\0en").expect("written");
        let no_emmc = || Err(io::Error::from(io::ErrorKind::NotFound));
        let mut order = CardBootOrder::choose(folder.path(), no_emmc).expect("variables");
        assert!(order.try_once(Slot::A).is_err() && order.prefer(Slot::A).is_err(), "no slot has an entry");
        for (slot, number) in [(Slot::A, 2), (Slot::B, 3)] {
            let partition = Partition { number, start: 2048, blocks: 4096, guid: [number as u8; 16] };
            order.set_entry(slot, partition, "console=hvc0").expect("set");
        }
        assert_eq!(order.preferred().expect("readable"), None);
        order.prefer(Slot::B).expect("set");
        assert_eq!(order.preferred().expect("readable"), Some(Slot::B));
        order.try_once(Slot::A).expect("set");
        assert_eq!(value("BootNext").expect("set"), [0x10, 0]);
        order.retire(Slot::A).expect("set");
        assert_eq!(value("BootNext"), None);
        assert_eq!(order.preferred().expect("readable"), Some(Slot::B));
        order.keep_fallback(Slot::A).expect("nothing to do");
    }
}
