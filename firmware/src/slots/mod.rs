//! Two slots, A and B, of which one always boots: for what the agent on a card updates itself.
//!
//! ```text
//! slot := payload … | record | record        each record is one block; the last two of the device
//! ```
//!
//! The slot that runs is never written. An update goes into the other one, is read back, and is then put *on trial*: it
//! may be started a few times, and unless it says that it is healthy ([`Event::Healthy`]) within a time limit, or if it
//! never comes so far, the next start takes the old one ([`Slots::select`]). So there are two guards against a bad
//! update: [`Updater`], which runs in the new version, and the number of tries, which does not need it to run at all.
//!
//! Slots are two files, or the two eMMC boot partitions of a BlueField. There the payload is what [`crate::emmc`]
//! writes, and the boot ROM knows nothing of records: whoever acts on [`Notice::Restart`] also switches the partition
//! (`mlxbf-bootctl --swap`, EXT_CSD byte 179), with the watchdog that switches back
//! (`mlxbf-bootctl --watchdog-swap`, 45 to 4095 s) as the guard that needs nothing of ours to run.
//!
//! Invariants, each checked by cutting power after every single write, with torn and lost writes (`tests`):
//! - at any time one slot holds a whole payload with a record that says so: the running one, or the one confirmed last;
//! - a record is written to the place of the older of the two, so that a torn one leaves the other;
//! - a payload is written only after its slot's record says that it is empty, and that is safe; its record says otherwise
//!   only after the payload is safe and was read back;
//! - a payload with another SHA-256 than its record's is never selected.

mod file;
mod record;
#[cfg(test)]
mod tests;
mod updater;

pub use file::FileBlocks;
pub use record::{Record, State};
pub use updater::{Event, Notice, Offer, Policy, UpdateError, Updater};

use record::RECORD_LEN_BYTES;
use sha2::{Digest, Sha256};
use std::fmt;
use sumac_hal::flash::{BlockDevice, Geometry};
use thiserror::Error;

/// Blocks at the end of a slot that hold records.
const RECORD_BLOCKS: u32 = 2;
/// Blocks that are read at a time.
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

/// Why slots can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SlotError<E> {
    /// A device fails.
    #[error("slot {slot}: {error}")]
    Device {
        /// Which.
        slot: Slot,
        /// What it says.
        error: E,
    },
    /// A device has no room for records, or blocks that are too short for one.
    #[error("slot {slot}: {} blocks of {} bytes; it needs more than 2 blocks of at least {RECORD_LEN_BYTES}", geometry.blocks, geometry.block_len_bytes)]
    Geometry {
        /// Which.
        slot: Slot,
        /// Its size.
        geometry: Geometry,
    },
    /// Neither slot has a whole payload that may be started.
    #[error("no slot can be started: A is {a}, B is {b}. Flash the card over rshim")]
    NothingBoots {
        /// What slot A is.
        a: String,
        /// What slot B is.
        b: String,
    },
}

/// What to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selected {
    /// Where it is.
    pub slot: Slot,
    /// What it is, after this try was counted.
    pub record: Record,
}

/// Both slots.
#[derive(Debug)]
pub struct Slots<D> {
    devices: [D; 2],
}

impl<D: BlockDevice> Slots<D> {
    /// Use two devices; they need not be of the same size.
    ///
    /// # Errors
    /// A device is too small for records.
    pub fn new(devices: [D; 2]) -> Result<Self, SlotError<D::Error>> {
        for slot in Slot::ALL {
            let geometry = devices[slot.index()].geometry();
            if geometry.blocks <= RECORD_BLOCKS || geometry.block_len_bytes < RECORD_LEN_BYTES {
                return Err(SlotError::Geometry { slot, geometry });
            }
        }
        Ok(Self { devices })
    }

    /// Return the longest payload of a slot, in bytes.
    pub fn capacity_bytes(&self, slot: Slot) -> u64 {
        let Geometry { block_len_bytes, blocks } = self.devices[slot.index()].geometry();
        block_len_bytes as u64 * u64::from(blocks - RECORD_BLOCKS)
    }

    /// Return what a slot's record says; nothing if it never had one.
    ///
    /// # Errors
    /// The device fails.
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

    /// Choose what to start, and count the try if it is on trial. To be called once at each start.
    ///
    /// # Errors
    /// Nothing boots, or a device fails.
    pub fn select(&mut self) -> Result<Selected, SlotError<D::Error>> {
        let mut candidates = Vec::new();
        for slot in Slot::ALL {
            if let Some(record) = self.record(slot)?.filter(Record::may_start) {
                candidates.push(Selected { slot, record });
            }
        }
        // The newest first: one on trial is newer than the one that it is to replace.
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

    /// Tell whether a slot's payload is the one of the record.
    ///
    /// # Errors
    /// The device fails.
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

    /// Write a record in place of the older one, and make it safe.
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
