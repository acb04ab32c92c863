//! A/B update slots, of which one always boots, for what the agent on a card updates itself.
//!
//! ```text
//! slot := payload … | record | record        each record is one block; the last two of the device
//! ```
//!
//! The running slot is never written. An update is written to the other slot, read back, and then put *on trial*: it
//! may be started a limited number of times, and unless it reports that it is healthy ([`Event::Healthy`]) within a
//! time limit, the next start selects the old slot ([`Slots::select`]). There are thus two guards against a bad update:
//! [`Updater`], which runs in the new version, and the number of tries, which works even if the new version does not
//! run at all.
//!
//! Slots are two partitions of a disk ([`crate::disk`]), which firmware boots by EFI boot entries ([`crate::boot`]),
//! two files, or the two eMMC boot partitions of a BlueField. In a boot partition the payload has the format of
//! [`crate::emmc`], and the boot ROM does not read records: on [`Notice::Restart`] the caller also has the firmware
//! swap the partitions, with the watchdog that swaps back as the guard that does not depend on our code
//! ([`crate::boot::SwapBootOrder`]).
//!
//! Invariants, checked by cutting power after every single write, with torn and lost writes (`tests`):
//! - at any time one slot holds a complete payload and a record of it: the running one, or the last confirmed one;
//! - a new record replaces the older of the slot's two records, so a torn write leaves the other intact;
//! - a payload is written only after a record that marks the slot as empty was flushed; the record of the payload is
//!   written only after the payload was flushed and read back;
//! - a payload whose SHA-256 differs from its record's is never selected, and neither is one whose epoch is lower than
//!   that of a confirmed one, even if the confirmed one is damaged.

mod boot_order;
mod file;
mod health;
mod record;
mod start;
#[cfg(test)]
mod tests;
mod updater;

pub use boot_order::{BootLoader, BootOrder};
pub use file::{DISK_BLOCK_LEN_BYTES, FileBlocks};
pub use health::{HEALTHY_AFTER, Health, HealthEvent};
pub use record::{Record, State};
pub use start::{Start, StartError, start};
pub use updater::{Event, Notice, Offer, Policy, UpdateError, Updater};

use record::RECORD_LEN_BYTES;
use sha2::{Digest, Sha256};
use std::fmt;
use sumac_hal::flash::{BlockDevice, Geometry};
use thiserror::Error;

/// The number of blocks at the end of a slot that hold records.
const RECORD_BLOCKS: u32 = 2;
/// The number of blocks read at a time.
const READ_BLOCKS: usize = 128;

/// One of the two slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// The first device.
    A,
    /// The second device.
    B,
}

impl Slot {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A, Self::B];

    /// Return the other one.
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::A => "A",
            Self::B => "B",
        })
    }
}

/// Why slots cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SlotError<E> {
    /// A device failed.
    #[error("slot {slot}: {error}")]
    Device {
        /// The slot.
        slot: Slot,
        /// The device's error.
        error: E,
    },
    /// A device has no room for records, or its blocks are too short for one.
    #[error("slot {slot}: {} blocks of {} bytes; more than 2 blocks of at least {RECORD_LEN_BYTES} bytes are required", geometry.blocks, geometry.block_len_bytes)]
    Geometry {
        /// The slot.
        slot: Slot,
        /// Its size.
        geometry: Geometry,
    },
    /// Neither slot holds a complete payload that may be started.
    #[error("no slot can be started: A is {a}, B is {b}; flash the card over rshim")]
    NothingBoots {
        /// The state of slot A.
        a: String,
        /// The state of slot B.
        b: String,
    },
}

/// The slot to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// The slot.
    pub slot: Slot,
    /// Its record, after this try was counted.
    pub record: Record,
}

/// The two slots.
#[derive(Debug)]
pub struct Slots<D> {
    devices: [D; 2],
}

impl<D: BlockDevice> Slots<D> {
    /// Use two devices; they need not be of the same size.
    ///
    /// # Errors
    /// A device is too small.
    pub fn new(devices: [D; 2]) -> Result<Self, SlotError<D::Error>> {
        for slot in Slot::ALL {
            let geometry = devices[slot.index()].geometry();
            if geometry.blocks <= RECORD_BLOCKS || geometry.block_len_bytes < RECORD_LEN_BYTES {
                return Err(SlotError::Geometry { slot, geometry });
            }
        }
        Ok(Self { devices })
    }

    /// Return the maximum length of a slot's payload, in bytes.
    pub fn capacity_bytes(&self, slot: Slot) -> u64 {
        let Geometry { block_len_bytes, blocks } = self.devices[slot.index()].geometry();
        block_len_bytes as u64 * u64::from(blocks - RECORD_BLOCKS)
    }

    /// Return a slot's record; `None` if it has none.
    ///
    /// # Errors
    /// The device failed.
    pub fn record(&mut self, slot: Slot) -> Result<Option<Record>, SlotError<D::Error>> {
        let mut newest: Option<Record> = None;
        for place in 0..RECORD_BLOCKS {
            let Geometry { block_len_bytes, blocks } = self.devices[slot.index()].geometry();
            let mut block = vec![0; block_len_bytes];
            self.read(slot, blocks - RECORD_BLOCKS + place, &mut block)?;
            let record = Record::parse(&block);
            newest = match (newest, record) {
                (Some(old), Some(new)) if new.count <= old.count => Some(old),
                (old, new) => new.or(old),
            };
        }
        Ok(newest)
    }

    /// Return the highest epoch that was confirmed, 0 if there is none: nothing older starts, even if that payload is
    /// damaged.
    ///
    /// # Errors
    /// The device failed.
    pub fn confirmed_epoch(&mut self) -> Result<u64, SlotError<D::Error>> {
        let mut epoch = 0;
        for slot in Slot::ALL {
            let confirmed = self.record(slot)?.filter(|record| record.state == State::Confirmed);
            epoch = confirmed.map_or(epoch, |record| epoch.max(record.epoch));
        }
        Ok(epoch)
    }

    /// Select the slot to start, and count the try if it is on trial. To be called once at each start.
    ///
    /// # Errors
    /// No slot can be started, or a device failed.
    pub fn select(&mut self) -> Result<Selected, SlotError<D::Error>> {
        let mut candidates = Vec::new();
        for slot in Slot::ALL {
            if let Some(record) = self.record(slot)?.filter(Record::may_start) {
                candidates.push(Selected { slot, record });
            }
        }
        let floor = self.confirmed_epoch()?;
        candidates.retain(|selected| selected.record.epoch >= floor);
        // Newest first: a payload on trial is newer than the one that it replaces.
        candidates.sort_by_key(|selected| std::cmp::Reverse(selected.record.sequence));
        for Selected { slot, mut record } in candidates {
            if !self.is_whole(slot, &record)? {
                continue;
            }
            if let State::Trial { tries_left } = record.state {
                record.state = State::Trial { tries_left: tries_left - 1 };
                record = self.write_record(slot, record)?;
            }
            return Ok(Selected { slot, record });
        }
        let what = |record: Option<Record>| record.map_or("empty".into(), |record| record.to_string());
        let (a, b) = (what(self.record(Slot::A)?), what(self.record(Slot::B)?));
        Err(SlotError::NothingBoots { a, b })
    }

    /// Return whether a slot's payload matches the record.
    ///
    /// # Errors
    /// The device failed.
    pub fn is_whole(&mut self, slot: Slot, record: &Record) -> Result<bool, SlotError<D::Error>> {
        if record.len_bytes > self.capacity_bytes(slot) {
            return Ok(false);
        }
        let block_len_bytes = self.devices[slot.index()].geometry().block_len_bytes;
        let mut buffer = vec![0; READ_BLOCKS * block_len_bytes];
        let mut digest = Sha256::new();
        let (mut block, mut left) = (0, record.len_bytes);
        while left > 0 {
            let blocks = left.div_ceil(block_len_bytes as u64).min(READ_BLOCKS as u64);
            let piece = &mut buffer[..blocks as usize * block_len_bytes];
            self.read(slot, block, piece)?;
            let len = left.min(piece.len() as u64);
            digest.update(&piece[..len as usize]);
            block += blocks as u32;
            left -= len;
        }
        Ok(digest.finalize()[..] == record.sha256)
    }

    /// Replace the older record, and flush.
    fn write_record(&mut self, slot: Slot, mut record: Record) -> Result<Record, SlotError<D::Error>> {
        let count = self.record(slot)?.map_or(0, |newest| newest.count + 1);
        record.count = count;
        let Geometry { block_len_bytes, blocks } = self.devices[slot.index()].geometry();
        let mut block = vec![0; block_len_bytes];
        record.emit(&mut block);
        let place = (count % u64::from(RECORD_BLOCKS)) as u32;
        self.write(slot, blocks - RECORD_BLOCKS + place, &block)?;
        self.flush(slot)?;
        Ok(record)
    }

    fn read(&mut self, slot: Slot, block: u32, buffer: &mut [u8]) -> Result<(), SlotError<D::Error>> {
        self.devices[slot.index()].read(block, buffer).map_err(|error| SlotError::Device { slot, error })
    }

    fn write(&mut self, slot: Slot, block: u32, data: &[u8]) -> Result<(), SlotError<D::Error>> {
        self.devices[slot.index()].write(block, data).map_err(|error| SlotError::Device { slot, error })
    }

    fn flush(&mut self, slot: Slot) -> Result<(), SlotError<D::Error>> {
        self.devices[slot.index()].flush().map_err(|error| SlotError::Device { slot, error })
    }
}
