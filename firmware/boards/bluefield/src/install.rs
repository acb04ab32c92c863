//! Installing what follows the boot stream, and starting from a slot.
//!
//! The stream boots from memory. If a payload follows it, this writes the payload to the slot that does not hold the
//! version to fall back to, and restarts into it. The stream's own signed manifest describes the payload, and must be
//! signed by the key that the kernel's command line names (`sumac.update-key=`), which is part of the signed stream.
//!
//! Invariants: nothing is written before the signature, the board, the epoch and the firmware's variables are checked;
//! a failure is an error, never a system that runs from memory.

use crate::config::CommandLine;
use crate::disks::{DisksError, SlotDisk};
use crate::init::{AgentError, write_key};
use crate::log::Log;
use crate::store::Store;
use std::io::{self, Read};
use sumac_firmware::boot::{EfiBootOrder, Efivarfs, EntryError};
use sumac_firmware::manifest::{Manifest, ManifestError, Trust, envelope};
use sumac_firmware::slots::{
    BootOrder, Event, FileBlocks, Notice, Selected, Slot, SlotError, Slots, Start, StartError, UpdateError, Updater,
    start,
};
use sumac_firmware::tail::{Fifo, Payload};
use sumac_hal::ctrl::secure::Key;
use sumac_hal::time::Instant;
use thiserror::Error;

/// How much of the payload is read at once: whole words of the FIFO, and more than a page, which it returns at most.
const PIECE_BYTES: usize = 64 << 10;

/// Why an image was not installed, or a slot not started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InstallError {
    /// Nothing says whose signature to trust.
    #[error(
        "the kernel's command line has no sumac.update-key=: build the stream with --sign-key, or flash it with --ram"
    )]
    NoTrust,
    /// The manifest is not trusted, or describes no payload.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Manifest and payload differ.
    #[error("the payload has {found} bytes, but its manifest {expected}")]
    Length {
        /// The length announced behind the stream.
        found: u64,
        /// The length in the manifest.
        expected: u64,
    },
    /// No disk can be used.
    #[error(transparent)]
    Disk(#[from] DisksError),
    /// The boot FIFO failed.
    #[error("boot FIFO: {0}")]
    Fifo(io::Error),
    /// The image cannot be written.
    #[error(transparent)]
    Update(#[from] UpdateError<io::Error>),
    /// A slot failed.
    #[error(transparent)]
    Slot(#[from] SlotError<io::Error>),
    /// The boot order cannot be read or set.
    #[error(transparent)]
    Order(#[from] EntryError),
    /// No slot may be started.
    #[error(transparent)]
    Start(#[from] StartError<io::Error, EntryError>),
    /// The key cannot be stored.
    #[error("store: {0}")]
    Store(Box<AgentError>),
}

/// Write a payload to a slot, and select it for the next start.
///
/// # Errors
/// [`InstallError`]; the version to fall back to is untouched.
pub fn install<R: Read, W: FnMut(u32) -> bool>(
    fifo: &mut Fifo<R, W>,
    payload: &Payload,
    (line, command_line, key): (&CommandLine, &str, Option<&Key>),
    log: &Log,
) -> Result<(), InstallError> {
    let trusted = line.update_key.ok_or(InstallError::NoTrust)?;
    let manifest = envelope::open::<Manifest>(&payload.manifest, Trust::Key(&trusted)).map_err(ManifestError::from)?;
    let offer = manifest.offer()?;
    if offer.len_bytes != payload.len_bytes {
        return Err(InstallError::Length { found: payload.len_bytes, expected: offer.len_bytes });
    }
    let mut order = EfiBootOrder::new(Efivarfs::default());
    // Without variables there is no way to start a slot: fail before anything is written.
    order.preferred()?;
    let disk = SlotDisk::prepare(&line.install, log)?;
    let mut slots = disk.slots()?;
    let mut updater = Updater::new(line.trial, None, Instant::ZERO);
    updater.handle(Event::Begin(&offer), &mut slots)?;
    let slot = updater.writing().ok_or(UpdateError::NotBegun)?;
    order.set_entry(slot, disk.part(slot).partition, command_line)?;
    log.info(&format!("installing {} in slot {slot} of {}", offer.version, disk.path.display()));
    let (mut left, mut buffer) = (offer.len_bytes, vec![0; PIECE_BYTES]);
    while left > 0 {
        let piece = fifo.read_piece(&mut buffer, left).map_err(InstallError::Fifo)?;
        updater.handle(Event::Chunk(piece), &mut slots)?;
        left -= piece.len() as u64;
    }
    updater.handle(Event::Finish, &mut slots)?;
    if let Some(key) = key {
        keep_key(&disk, key).map_err(|error| InstallError::Store(Box::new(error)))?;
        log.info(&format!("store: key {}", key.id()));
    }
    if !matches!(updater.poll_event(), Some(Notice::Restart { .. })) {
        return Err(UpdateError::NotBegun.into());
    }
    let selected = slots.select()?;
    order.try_once(selected.slot)?;
    log.info(&format!("installed {}; restarting into slot {}", selected.record.version, selected.slot));
    Ok(())
}

fn keep_key(disk: &SlotDisk, key: &Key) -> Result<(), AgentError> {
    let fail = |error: DisksError| AgentError::Install(Box::new(error.into()));
    let store = disk.open_store().map_err(fail)?;
    let path = disk.path.as_path();
    let mut store =
        Store::open(store).map_err(|source| AgentError::Store { path: path.display().to_string(), source })?;
    write_key(&mut store, path, key.clone()).map(drop)
}

/// A version that runs from a slot.
#[derive(Debug)]
pub struct Running {
    /// The disk.
    pub disk: SlotDisk,
    /// Its slots.
    pub slots: Slots<FileBlocks>,
    /// The firmware's order.
    pub order: EfiBootOrder<Efivarfs>,
    /// The running slot.
    pub selected: Selected,
}

/// Decide what to do after a start from this slot. `None`: restart, another slot has been selected.
///
/// # Errors
/// [`InstallError`].
pub fn start_from(slot: Slot, log: &Log) -> Result<Option<Running>, InstallError> {
    let disk = SlotDisk::find(log)?;
    let mut slots = disk.slots()?;
    let mut order = EfiBootOrder::new(Efivarfs::default());
    let preferred = order.preferred()?;
    Ok(match start(&mut slots, slot, preferred, &mut order)? {
        Start::Run(selected) => {
            log.info(&format!("slot {slot} of {}: {}", disk.path.display(), selected.record));
            Some(Running { disk, slots, order, selected })
        }
        Start::Restart(other) => {
            log.warn(&format!("slot {slot} is not the one to run; restarting into slot {other}"));
            None
        }
        _ => None,
    })
}
