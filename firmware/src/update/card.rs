//! A card's storage, boot loader and supervisor: carries out a session's [`Work`].

use super::key::UpdateKey;
use super::session::{Done, Work};
use super::{slot_id, slot_image};
use crate::manifest::{ManifestError, hex};
use crate::slots::{self, BootLoader, BootOrder, Notice, Policy, Selected, Slot, Slots, Updater};
use std::convert::Infallible;
use std::fmt;
use sumac_hal::ctrl::update::{SLOT_VERSION_MAX_LEN, SlotsStatus, UpdateOffer};
use sumac_hal::flash::BlockDevice;
use sumac_hal::time::Instant;
use thiserror::Error;

/// What supervises the card's runtime.
pub trait Supervisor: fmt::Debug {
    /// Confirm the running slot, which is on trial.
    ///
    /// # Errors
    /// The supervisor cannot be reached.
    fn confirm(&mut self) -> std::io::Result<()>;

    /// Restart the system, into the slot that the boot order and the records select.
    ///
    /// # Errors
    /// The supervisor cannot be reached.
    fn restart(&mut self) -> std::io::Result<()>;
}

/// A boot order for systems whose loader reads the slots' records itself ([`Slots::select`]): an agent that runs as a
/// service.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoBootOrder;

impl BootOrder for NoBootOrder {
    type Error = Infallible;

    fn try_once(&mut self, _slot: Slot) -> Result<(), Infallible> {
        Ok(())
    }

    fn prefer(&mut self, _slot: Slot) -> Result<(), Infallible> {
        Ok(())
    }
}

impl BootLoader for NoBootOrder {
    type Lock = ();

    const READS_RECORDS: bool = true;

    fn lock(&mut self) -> Result<(), Infallible> {
        Ok(())
    }

    fn prepare(&mut self, _slot: Slot) -> Result<(), Infallible> {
        Ok(())
    }
}

/// Why an update failed on the card.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CardError {
    /// The manifest is not what the update key signed, or describes no payload.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The requester's image is another one than that of its manifest.
    #[error("an image of {len_bytes} bytes with SHA-256 {sha256} was offered, but its manifest is of another one")]
    Offer {
        /// The offered length in bytes.
        len_bytes: u64,
        /// The offered digest.
        sha256: String,
    },
    /// The version is too long for a slot's record.
    #[error("the version {0:?} exceeds {SLOT_VERSION_MAX_LEN} bytes")]
    Version(String),
    /// The slots refuse or fail.
    #[error("{0}")]
    Slots(String),
    /// The firmware's boot order cannot be changed.
    #[error("the boot order cannot be changed: {0}")]
    BootOrder(String),
    /// The supervisor cannot be reached.
    #[error("the supervisor of the card's runtime cannot be reached: {0}")]
    Supervisor(#[from] std::io::Error),
    /// The card was not started from a slot.
    #[error("the card was not started from a slot")]
    NotFromSlot,
}

/// A card's storage, boot loader and supervisor.
#[derive(Debug)]
pub struct Card<D, B: BootLoader, S> {
    slots: Slots<D>,
    running: Option<Slot>,
    key: UpdateKey,
    policy: Policy,
    boot_loader: B,
    supervisor: S,
    /// The update in progress; no other one is written meanwhile.
    writing: Option<(Updater, B::Lock)>,
}

impl<D, B, S> Card<D, B, S>
where
    D: BlockDevice,
    B: BootLoader<Error: fmt::Display>,
    S: Supervisor,
{
    /// A card that was started from slot `running`, or in another way.
    pub fn new(slots: Slots<D>, running: Option<Slot>, key: UpdateKey, (boot_loader, supervisor): (B, S)) -> Self {
        // Only the tries count here: the supervisor limits the time.
        let policy = Policy { tries: 2, confirm_within: std::time::Duration::ZERO };
        Self { slots, running, key, policy, boot_loader, supervisor, writing: None }
    }

    /// Carry out work.
    pub fn run(&mut self, work: Work) -> Done {
        let done = match work {
            Work::Begin { offer, manifest } => self.begin(&offer, &manifest).map(|()| Done::Begun),
            Work::Write(bytes) => self.write(&bytes),
            Work::Finish => self.finish(),
            Work::Abandon => {
                tracing::warn!("nothing more of an update has arrived; others may write the slot");
                self.writing = None;
                Ok(Done::Abandoned)
            }
            Work::RollBack => self.roll_back().map(|()| Done::RolledBack),
            Work::Confirm => self.supervisor.confirm().map(|()| Done::Confirmed).map_err(CardError::from),
            Work::Restart => self.supervisor.restart().map(|()| Done::Confirmed).map_err(CardError::from),
        };
        done.unwrap_or_else(|error| {
            self.writing = None;
            Done::Failed(error.to_string())
        })
    }

    /// Read the slots' records.
    ///
    /// # Errors
    /// A device failed.
    pub fn status(&mut self) -> Result<SlotsStatus, CardError> {
        status(&mut self.slots, self.running)
    }

    /// Return an updater that knows the running slot's record as it is now: the supervisor may have confirmed it.
    fn updater(&mut self) -> Result<Updater, CardError> {
        let record =
            |slot| Ok::<_, CardError>(self.slots.record(slot).map_err(slots_error)?.map(|record| (slot, record)));
        let running = self.running.map(record).transpose()?.flatten();
        let running = running.map(|(slot, record)| Selected { slot, record });
        Ok(Updater::new(self.policy, running, Instant::ZERO))
    }

    fn begin(&mut self, offer: &UpdateOffer, manifest: &[u8]) -> Result<(), CardError> {
        self.writing = None;
        let signed = self.key.open(manifest)?;
        if (offer.len_bytes, offer.sha256) != (signed.len_bytes, signed.sha256) {
            return Err(CardError::Offer { len_bytes: offer.len_bytes, sha256: hex(&offer.sha256) });
        }
        if signed.version.len() > SLOT_VERSION_MAX_LEN {
            return Err(CardError::Version(signed.version));
        }
        let lock = self.boot_loader.lock().map_err(slots_error)?;
        let mut updater = self.updater()?;
        updater.handle(slots::Event::Begin(&signed), &mut self.slots).map_err(slots_error)?;
        if let Some(slot) = updater.writing() {
            self.boot_loader.prepare(slot).map_err(boot_order_error)?;
        }
        self.writing = Some((updater, lock));
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<Done, CardError> {
        let (updater, _) = self.writing.as_mut().ok_or_else(not_begun)?;
        updater.handle(slots::Event::Chunk(bytes), &mut self.slots).map_err(slots_error)?;
        Ok(Done::Written(bytes.len() as u64))
    }

    fn finish(&mut self) -> Result<Done, CardError> {
        let (mut updater, _lock) = self.writing.take().ok_or_else(not_begun)?;
        updater.handle(slots::Event::Finish, &mut self.slots).map_err(slots_error)?;
        let Some(Notice::Restart { slot }) = updater.poll_event() else {
            return Err(CardError::Slots("the update has not ended as expected".into()));
        };
        self.start_next(slot)?;
        Ok(Done::Finished(slot_id(slot)))
    }

    fn roll_back(&mut self) -> Result<(), CardError> {
        self.writing = None;
        let running = self.running.ok_or(CardError::NotFromSlot)?;
        let _lock = self.boot_loader.lock().map_err(slots_error)?;
        let mut updater = self.updater()?;
        updater.handle(slots::Event::RollBack, &mut self.slots).map_err(slots_error)?;
        self.start_next(running.other())
    }

    /// Make the next restart start a slot whose record allows it.
    fn start_next(&mut self, slot: Slot) -> Result<(), CardError> {
        if !B::READS_RECORDS {
            let selected = self.slots.select().map_err(slots_error)?.slot;
            if selected != slot {
                return Err(CardError::Slots(format!("slot {selected} would be started, not slot {slot}")));
            }
        }
        self.boot_loader.try_once(slot).map_err(boot_order_error)
    }
}

/// Read the records of slots of which `running` was started.
pub(super) fn status<D: BlockDevice>(slots: &mut Slots<D>, running: Option<Slot>) -> Result<SlotsStatus, CardError> {
    let mut image = |slot| {
        let record = slots.record(slot).map_err(slots_error)?;
        Ok::<_, CardError>(record.and_then(|record| slot_image(&record, running == Some(slot))))
    };
    Ok(SlotsStatus { running: running.map(slot_id), images: [image(Slot::A)?, image(Slot::B)?] })
}

fn not_begun() -> CardError {
    CardError::Slots("no update is in progress".into())
}

fn boot_order_error(error: impl fmt::Display) -> CardError {
    CardError::BootOrder(error.to_string())
}

fn slots_error(error: impl fmt::Display) -> CardError {
    CardError::Slots(error.to_string())
}
