//! A card's storage, boot order and supervisor: carries out a session's [`Work`].

use super::check::{StreamCheck, UpdateKey};
use super::session::{Done, Work};
use super::{slot_id, slot_image};
use crate::slots::{self, BootOrder, Notice, Offer, Policy, Selected, Slot, Slots, Updater};
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

/// A boot order for systems whose loader reads the slots' records itself ([`Slots::select`]).
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

/// Why an update failed on the card.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CardError {
    /// The manifest or the image is not what the update key signed.
    #[error("{0}")]
    Check(String),
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

/// A card's storage, boot order and supervisor.
#[derive(Debug)]
pub struct Card<D, B, S> {
    slots: Slots<D>,
    running: Option<Slot>,
    key: UpdateKey,
    policy: Policy,
    boot_order: B,
    supervisor: S,
    /// The update in progress.
    writing: Option<(Updater, StreamCheck)>,
}

impl<D, B, S> Card<D, B, S>
where
    D: BlockDevice,
    B: BootOrder<Error: fmt::Display>,
    S: Supervisor,
{
    /// A card that was started from slot `running`, or in another way.
    pub fn new(slots: Slots<D>, running: Option<Slot>, key: UpdateKey, (boot_order, supervisor): (B, S)) -> Self {
        // Only the tries count here: the supervisor limits the time.
        let policy = Policy { tries: 2, confirm_within: std::time::Duration::ZERO };
        Self { slots, running, key, policy, boot_order, supervisor, writing: None }
    }

    /// Carry out work.
    pub fn run(&mut self, work: Work) -> Done {
        let done = match work {
            Work::Begin { offer, manifest } => self.begin(&offer, &manifest).map(|()| Done::Begun),
            Work::Write(bytes) => self.write(bytes),
            Work::Finish => self.finish(),
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
        let check = StreamCheck::start(manifest, &self.key).map_err(CardError::Check)?;
        let (version, epoch) = (check.manifest().version.clone(), check.manifest().epoch);
        if version.len() > SLOT_VERSION_MAX_LEN {
            return Err(CardError::Version(version));
        }
        let offer = Offer { version, epoch, len_bytes: offer.len_bytes, sha256: offer.sha256 };
        let mut updater = self.updater()?;
        updater.handle(slots::Event::Begin(&offer), &mut self.slots).map_err(slots_error)?;
        self.writing = Some((updater, check));
        Ok(())
    }

    fn write(&mut self, bytes: Vec<u8>) -> Result<Done, CardError> {
        let (updater, check) =
            self.writing.as_mut().ok_or_else(|| CardError::Slots("no update is in progress".into()))?;
        let len = bytes.len() as u64;
        updater.handle(slots::Event::Chunk(&bytes), &mut self.slots).map_err(slots_error)?;
        check.push(bytes);
        if check.has_failed()
            && let Some((_, check)) = self.writing.take()
        {
            let fault = check.finish().err();
            return Err(CardError::Check(fault.unwrap_or_else(|| "the image has bytes behind its end".into())));
        }
        Ok(Done::Written(len))
    }

    fn finish(&mut self) -> Result<Done, CardError> {
        let (mut updater, check) =
            self.writing.take().ok_or_else(|| CardError::Slots("no update is in progress".into()))?;
        // Before the record is written that makes the slot start.
        check.finish().map_err(CardError::Check)?;
        updater.handle(slots::Event::Finish, &mut self.slots).map_err(slots_error)?;
        let Some(Notice::Restart { slot }) = updater.poll_event() else {
            return Err(CardError::Slots("the update has not ended as expected".into()));
        };
        self.boot_order.try_once(slot).map_err(|error| CardError::BootOrder(error.to_string()))?;
        Ok(Done::Finished(slot_id(slot)))
    }

    fn roll_back(&mut self) -> Result<(), CardError> {
        self.writing = None;
        let running = self.running.ok_or(CardError::NotFromSlot)?;
        let mut updater = self.updater()?;
        updater.handle(slots::Event::RollBack, &mut self.slots).map_err(slots_error)?;
        self.boot_order.try_once(running.other()).map_err(|error| CardError::BootOrder(error.to_string()))
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

fn slots_error(error: impl fmt::Display) -> CardError {
    CardError::Slots(error.to_string())
}
