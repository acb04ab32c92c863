//! Installing what follows the boot stream, and starting from a slot.
//!
//! The stream boots from memory. If a payload follows it, this writes the payload to the slot that does not hold the
//! version to fall back to, and restarts into it. The stream's own signed manifest describes the payload, and must be
//! signed by the key that the kernel's command line names (`sumac.update-key=`), which is part of the signed stream.
//!
//! Invariants: nothing is written before the signature, the board, the epoch and the firmware's variables are checked;
//! a failure is an error, never a system that runs from memory.

use crate::boot_order::{CardBootOrder, OrderError};
use crate::config::CommandLine;
use crate::disks::{DisksError, SlotDisk};
use crate::init::{AgentError, write_key};
use crate::log::Log;
use crate::store::Store;
use std::io::{self, Read};
use sumac_firmware::boot::{BootEntries, EntryError};
use sumac_firmware::manifest::ManifestError;
use sumac_firmware::slots::{
    BootOrder, Event, FileBlocks, Offer, Selected, Slot, SlotError, Slots, Start, StartError, State, UpdateError,
    Updater, start,
};
use sumac_firmware::tail::{Fifo, Payload};
use sumac_firmware::update::UpdateKey;
use sumac_hal::ctrl::secure::Key;
use sumac_hal::flash::BlockDevice;
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
    Order(#[from] OrderError),
    /// No slot may be started.
    #[error(transparent)]
    Start(#[from] StartError<io::Error, OrderError>),
    /// The key cannot be stored.
    #[error("store: {0}")]
    Store(Box<AgentError>),
}

impl From<EntryError> for InstallError {
    fn from(error: EntryError) -> Self {
        Self::Order(error.into())
    }
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
    let offer = offer_of(payload, line.update_key.as_ref())?;
    let mut order = CardBootOrder::of_card()?;
    // A card that keeps no order cannot start a slot: fail before anything is written.
    order.preferred()?;
    let disk = SlotDisk::prepare(&line.install, log)?;
    let mut slots = disk.slots()?;
    let mut updater = Updater::new(line.trial, None, Instant::ZERO);
    write(fifo, &offer, &mut updater, &mut slots, |slot| {
        let (path, place) = (disk.path.display(), order.place());
        log.info(&format!("installing {} in slot {slot} of {path}; boot order in {place}", offer.version));
        Ok(order.set_entry(slot, disk.partition(slot), command_line)?)
    })?;
    if let Some(key) = key {
        keep_key(&disk, key).map_err(|error| InstallError::Store(Box::new(error)))?;
        log.info(&format!("store: key {}", key.id()));
    }
    let selected = select_next(&mut slots, &mut order)?;
    log.info(&format!("installed {}; restarting into slot {}", selected.record.version, selected.slot));
    Ok(())
}

/// Return what a payload's manifest offers, if it is signed by this key.
pub(crate) fn offer_of(payload: &Payload, trusted: Option<&UpdateKey>) -> Result<Offer, InstallError> {
    let offer = trusted.ok_or(InstallError::NoTrust)?.open(&payload.manifest)?;
    if offer.len_bytes != payload.len_bytes {
        return Err(InstallError::Length { found: payload.len_bytes, expected: offer.len_bytes });
    }
    Ok(offer)
}

/// Write a payload to the slot that the updater chooses. `set_entry` is called once that slot is marked as empty, and
/// before its contents change.
pub(crate) fn write<R: Read, W: FnMut(u32) -> bool, D: BlockDevice<Error = io::Error>>(
    fifo: &mut Fifo<R, W>,
    offer: &Offer,
    updater: &mut Updater,
    slots: &mut Slots<D>,
    set_entry: impl FnOnce(Slot) -> Result<(), InstallError>,
) -> Result<(), InstallError> {
    updater.handle(Event::Begin(offer), slots)?;
    let slot = updater.writing().ok_or(UpdateError::NotBegun)?;
    set_entry(slot)?;
    let (mut left, mut buffer) = (offer.len_bytes, vec![0; PIECE_BYTES]);
    while left > 0 {
        let piece = fifo.read_piece(&mut buffer, left).map_err(InstallError::Fifo)?;
        updater.handle(Event::Chunk(piece), slots)?;
        left -= piece.len() as u64;
    }
    updater.handle(Event::Finish, slots)?;
    Ok(())
}

/// Have the firmware start what was written at the next restart; this counts as a try.
pub(crate) fn select_next<D, O>(slots: &mut Slots<D>, order: &mut O) -> Result<Selected, InstallError>
where
    D: BlockDevice<Error = io::Error>,
    O: BootOrder,
    InstallError: From<O::Error>,
{
    let selected = slots.select()?;
    order.try_once(selected.slot)?;
    Ok(selected)
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
    pub order: CardBootOrder,
    /// The running slot.
    pub selected: Selected,
}

/// Decide what to do after a start from this slot. `None`: restart, another slot has been selected.
///
/// # Errors
/// [`InstallError`].
pub fn start_from(slot: Slot, log: &Log) -> Result<Option<Running>, InstallError> {
    let disk = SlotDisk::find(log)?;
    let mut slots = disk.partition_slots()?;
    let mut order = CardBootOrder::of_card()?;
    let preferred = order.preferred()?;
    Ok(match start(&mut slots, slot, preferred, &mut order)? {
        Start::Run(selected) => {
            log.info(&format!("slot {slot} of {}: {}", disk.path.display(), selected.record));
            if selected.record.state != State::Confirmed {
                order.keep_fallback(slot)?;
            }
            Some(Running { disk, slots, order, selected })
        }
        Start::Restart(other) => {
            log.warn(&format!("slot {slot} is not the one to run; restarting into slot {other}"));
            None
        }
        _ => None,
    })
}
