//! The boot order of a card whose firmware keeps no EFI variables: its two eMMC boot partitions.
//!
//! Each boot partition holds a boot stream ([`crate::emmc`]). The one of a slot consists of the boot loaders that the
//! card has, and of the boot entry that UEFI takes from the stream: `boot-path`, `boot-args` and `boot-desc`. The boot
//! ROM starts the primary partition (EXT_CSD byte 179). At a reset, the boot loader first does what `reset_action`
//! says; if that is `swap_emmc`, it makes the other partition the primary one, and starts that. It then arms a watchdog
//! of `post_reset_wdog` seconds, and makes `second_reset_action` the next `reset_action`. Loading the driver
//! `mlxbf-bootctl` sets `reset_action` to `emmc`.
//!
//! ```text
//! try_once      wdog, second swap_emmc, then swap_emmc     a trial whose kernel hangs is swapped back by the watchdog
//! keep_fallback swap_emmc                                  the trial runs: every restart swaps back
//! prefer        running slot: emmc                         else: swap_emmc, without a watchdog
//! ```
//!
//! All of these are registers, which a power cut clears, while a swap that the boot loader has made lasts. So a power
//! cut before the restart leaves the slot that runs, and one during a trial starts the trial again.
//!
//! Limits: a power cut while a trial's kernel has not reached the agent, if that kernel never does, leaves a card that
//! boots it for ever: only rshim's BOOT_MODE 2 swaps it back. UEFI starts the entry of a stream only if its own
//! `BootOrder`, which it may keep although it lets nobody write it, has nothing before it.
//!
//! Sources: Mellanox/mlxbf-bootctl, `mlxbf-bootctl.c` and its manual; Linux, drivers/platform/mellanox/mlxbf-bootctl.c;
//! andreiw/bluefield-atf, `swap_boot.c`; andreiw/bluefield-edk2, `BfbFs.c` and `DefaultBootOption.c`; UEFI
//! Specification 2.10, 10.6.1.6 "Text Device Node Reference".
//!
//! Invariants: the primary partition is never written; the other one is written, and read back, only while no reset
//! swaps; a partition is written only if boot loaders were read from the primary one.

use super::entries::BootEntries;
use super::load_option::Partition;
use super::order::arguments;
use crate::bfb::{self, BfbError, Builder, ImageId, ImageName, Policy, Source, WriteError};
use crate::emmc::{self, EmmcError};
use crate::payload::KERNEL_PATH;
use crate::slots::{BootOrder, Slot};
use std::io::{self, Cursor};
use thiserror::Error;
use uuid::Uuid;

/// How long a trial's kernel has until the agent takes the watchdog over, in seconds; the firmware takes 45 to 4095.
const WATCHDOG_S: u32 = 180;

const SWAP: &str = "swap_emmc";
const PRIMARY: &str = "emmc";
const NONE: &str = "none";

/// Images of a boot stream that belong to an entry, or to what was booted over rshim.
const OF_ENTRY: [ImageId; 6] =
    [ImageId::BOOT_DESC, ImageId::BOOT_PATH, ImageId::BOOT_ARGS, ImageId::IMAGE, ImageId::INITRAMFS, ImageId::INFO];

/// A boot partition of the eMMC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BootPartition {
    /// `boot0`.
    Boot0,
    /// `boot1`.
    Boot1,
}

impl BootPartition {
    /// Return the other one.
    pub const fn other(self) -> Self {
        match self {
            Self::Boot0 => Self::Boot1,
            Self::Boot1 => Self::Boot0,
        }
    }
}

/// A setting of the firmware for its next resets, by its name in the driver `mlxbf-bootctl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetSetting {
    /// What the next reset does: `emmc` or `swap_emmc`.
    Action,
    /// What the reset after it does: also `none`.
    SecondAction,
    /// The watchdog from the next reset on, in seconds; 0: none.
    Watchdog,
}

impl ResetSetting {
    /// Return its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Action => "reset_action",
            Self::SecondAction => "second_reset_action",
            Self::Watchdog => "post_reset_wdog",
        }
    }
}

/// The boot partitions of a card, and what its firmware does at the next resets.
pub trait BootPartitions {
    /// Return the partition that the boot ROM starts.
    ///
    /// # Errors
    /// The system's error.
    fn primary(&self) -> io::Result<BootPartition>;

    /// Return the length of a partition in bytes.
    ///
    /// # Errors
    /// The system's error.
    fn len_bytes(&self, partition: BootPartition) -> io::Result<u64>;

    /// Read a whole partition.
    ///
    /// # Errors
    /// The system's error.
    fn read(&self, partition: BootPartition) -> io::Result<Vec<u8>>;

    /// Write the beginning of a partition; durable on return.
    ///
    /// # Errors
    /// The system's error; the partition is unusable then.
    fn write(&mut self, partition: BootPartition, bytes: &[u8]) -> io::Result<()>;

    /// Return a setting.
    ///
    /// # Errors
    /// The system's error.
    fn setting(&self, setting: ResetSetting) -> io::Result<String>;

    /// Change a setting.
    ///
    /// # Errors
    /// The system's error.
    fn set(&mut self, setting: ResetSetting, value: &str) -> io::Result<()>;
}

/// Why the boot partitions cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SwapError {
    /// The eMMC or the driver failed.
    #[error("eMMC boot partitions: {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A setting does not read back.
    #[error("{} is {found:?} after {value:?} was written: the firmware does not swap boot partitions", setting.name())]
    Setting {
        /// The setting.
        setting: ResetSetting,
        /// What was written.
        value: String,
        /// What it is.
        found: String,
    },
    /// A partition does not read back.
    #[error("the eMMC boot partition does not read back as written")]
    ReadBack,
    /// The primary partition has no usable stream.
    #[error("the primary eMMC boot partition: {0}")]
    Stream(#[from] BfbError),
    /// The primary partition has no boot loaders.
    #[error("the primary eMMC boot partition has no boot loaders (bl2) to copy")]
    NoBootLoaders,
    /// A stream cannot be made.
    #[error("eMMC boot partition: {0}")]
    Write(#[from] WriteError),
    /// The stream does not fit.
    #[error("eMMC boot partition: {0}")]
    Emmc(#[from] EmmcError),
    /// The slot to be written is the one that the card boots.
    #[error(
        "slot {0} is what the card boots, and cannot be written: on its host, write BOOT_MODE 2 and SW_RESET 1 to misc, which \
         swaps its boot partitions, then flash it again"
    )]
    Primary(Slot),
    /// No partition starts the slot.
    #[error("no eMMC boot partition starts slot {0}; flash the card again")]
    NoEntry(Slot),
}

/// A boot order in two boot partitions.
#[derive(Debug)]
pub struct SwapBootOrder<P> {
    partitions: P,
}

impl<P: BootPartitions> SwapBootOrder<P> {
    /// Use these partitions.
    pub fn new(partitions: P) -> Self {
        Self { partitions }
    }

    fn primary(&self) -> Result<BootPartition, SwapError> {
        self.partitions.primary().map_err(system("which is primary"))
    }

    /// Return the slot that a partition starts, if it is one of ours.
    fn slot_in(&self, partition: BootPartition) -> Result<Option<Slot>, SwapError> {
        let bytes = self.partitions.read(partition).map_err(system("reading"))?;
        let found = images(&bytes).ok().and_then(|images| {
            let description = images.into_iter().find(|(name, _)| name.id == ImageId::BOOT_DESC)?;
            Slot::ALL.into_iter().find(|slot| super::order::description(*slot).as_bytes() == description.1)
        });
        Ok(found)
    }

    fn partition_of(&self, slot: Slot) -> Result<BootPartition, SwapError> {
        for partition in [BootPartition::Boot0, BootPartition::Boot1] {
            if self.slot_in(partition)? == Some(slot) {
                return Ok(partition);
            }
        }
        Err(SwapError::NoEntry(slot))
    }

    fn setting(&self, setting: ResetSetting) -> Result<String, SwapError> {
        let text = self.partitions.setting(setting).map_err(system(setting.name()))?;
        Ok(text.trim().to_owned())
    }

    fn set(&mut self, setting: ResetSetting, value: &str) -> Result<(), SwapError> {
        self.partitions.set(setting, value).map_err(system(setting.name()))?;
        match self.setting(setting)? {
            found if found == value => Ok(()),
            found => Err(SwapError::Setting { setting, value: value.into(), found }),
        }
    }

    /// Have the next reset start this partition. With a guard, the firmware swaps back if nothing takes its watchdog
    /// over. What decides is set last, so that a failure before changes nothing.
    fn start_next(&mut self, partition: BootPartition, is_guarded: bool) -> Result<(), SwapError> {
        let swaps = partition != self.primary()?;
        if !swaps {
            self.set(ResetSetting::Action, PRIMARY)?;
        }
        let is_guarded = swaps && is_guarded;
        let (second, watchdog) = if is_guarded { (SWAP, WATCHDOG_S) } else { (NONE, 0) };
        self.set(ResetSetting::Watchdog, &watchdog.to_string())?;
        self.set(ResetSetting::SecondAction, second)?;
        if swaps { self.set(ResetSetting::Action, SWAP) } else { Ok(()) }
    }
}

impl<P: BootPartitions> BootOrder for SwapBootOrder<P> {
    type Error = SwapError;

    fn try_once(&mut self, slot: Slot) -> Result<(), SwapError> {
        let partition = self.partition_of(slot)?;
        // What is preferred already is no trial: swapping back from it would never end.
        let is_guarded = self.preferred()? != Some(slot);
        self.start_next(partition, is_guarded)
    }

    /// A slot in the other partition is preferred from the next restart on; until then, a power cut leaves the running
    /// one, which decides again.
    fn prefer(&mut self, slot: Slot) -> Result<(), SwapError> {
        let partition = self.partition_of(slot)?;
        self.start_next(partition, false)
    }
}

impl<P: BootPartitions> BootEntries for SwapBootOrder<P> {
    fn preferred(&self) -> Result<Option<Slot>, SwapError> {
        let primary = self.primary()?;
        let swaps = self.setting(ResetSetting::Action)? == SWAP;
        let swaps_back = self.setting(ResetSetting::SecondAction)? == SWAP;
        self.slot_in(if swaps && !swaps_back { primary.other() } else { primary })
    }

    fn set_entry(&mut self, slot: Slot, partition: Partition, command_line: &str) -> Result<(), SwapError> {
        let primary = self.primary()?;
        if self.slot_in(primary)? == Some(slot) {
            return Err(SwapError::Primary(slot));
        }
        let target = primary.other();
        let loaders = self.partitions.read(primary).map_err(system("reading"))?;
        let max_bytes = self.partitions.len_bytes(target).map_err(system("its length"))?;
        let bytes = with_entry(&loaders, slot, partition, command_line, max_bytes)?;
        // No reset may start what is about to change.
        self.start_next(primary, false)?;
        if self.read_start(target, bytes.len())? != bytes {
            self.partitions.write(target, &bytes).map_err(system("writing"))?;
            if self.read_start(target, bytes.len())? != bytes {
                return Err(SwapError::ReadBack);
            }
        }
        Ok(())
    }

    /// The other slot is started by a swap only, so that nothing is to be done.
    fn retire(&mut self, slot: Slot) -> Result<(), SwapError> {
        let _ = slot;
        Ok(())
    }

    fn keep_fallback(&mut self, running: Slot) -> Result<(), SwapError> {
        let partition = self.partition_of(running)?;
        self.start_next(partition.other(), false)
    }
}

impl<P: BootPartitions> SwapBootOrder<P> {
    fn read_start(&self, partition: BootPartition, len: usize) -> Result<Vec<u8>, SwapError> {
        let mut bytes = self.partitions.read(partition).map_err(system("reading"))?;
        bytes.truncate(len);
        Ok(bytes)
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> SwapError {
    move |source| SwapError::System { what, source }
}

/// Return the images of a partition.
fn images(partition: &[u8]) -> Result<Vec<(ImageName, Vec<u8>)>, BfbError> {
    let stream = emmc::Reader::after_first_word(partition.get(emmc::FIRST_WORD.len()..).unwrap_or_default());
    let mut images: Vec<(ImageName, Vec<u8>)> = Vec::new();
    bfb::scan(stream, Policy::Vendor, |entry, piece| {
        match images.last_mut().filter(|_| !piece.is_empty()) {
            Some((_, bytes)) => bytes.extend_from_slice(piece),
            None => images.push((entry.header.name, Vec::new())),
        }
        Ok(())
    })?;
    Ok(images)
}

/// Return the contents of a partition that starts a slot, with the boot loaders of another partition.
fn with_entry(
    loaders: &[u8],
    slot: Slot,
    partition: Partition,
    command_line: &str,
    max_bytes: u64,
) -> Result<Vec<u8>, SwapError> {
    let mut builder = Builder::new();
    for (name, bytes) in images(loaders)? {
        if !OF_ENTRY.contains(&name.id) && !name.id.is_firmware_update() {
            builder.insert(name, Source::Bytes(bytes))?;
        }
    }
    if !builder.images().any(|(name, _)| name.id == ImageId::BL2) {
        return Err(SwapError::NoBootLoaders);
    }
    let entry = [
        (ImageId::BOOT_DESC, super::order::description(slot).to_owned()),
        (ImageId::BOOT_PATH, path_text(partition)),
        (ImageId::BOOT_ARGS, arguments(slot, command_line)),
    ];
    for (id, text) in entry {
        builder.insert(ImageName::new(id, 0), Source::Bytes(text.into_bytes()))?;
    }
    let mut stream = Cursor::new(Vec::new());
    builder.write_to(&mut stream)?;
    let (stream, mut bytes) = (stream.into_inner(), Vec::new());
    emmc::write(&stream[..], stream.len() as u64, max_bytes, &mut bytes)?;
    Ok(bytes)
}

/// Return a slot's kernel as a device path in text.
fn path_text(Partition { number, start, blocks, guid }: Partition) -> String {
    let guid = Uuid::from_bytes_le(guid).hyphenated().to_string().to_uppercase();
    format!("HD({number},GPT,{guid},0x{start:X},0x{blocks:X})/{KERNEL_PATH}")
}

#[cfg(test)]
mod tests;
