//! Updates the other slot: receives an image in pieces, puts it on trial, and confirms it or rolls back.
//!
//! ```text
//! Idle ── Begin ──> Writing ── Chunk … ── Finish ──> Restart notice      (the other slot is on trial)
//! OnTrial ── Healthy ──> Idle          OnTrial ── time limit ──> RollBack notice
//! Idle, OnTrial ── RollBack ──> Restart notice      (the other slot is started again)
//! ```
//!
//! Invariant: the running slot is never written, except for its record when its trial ends.

use super::record::{Record, State, VERSION_MAX_BYTES};
use super::{Selected, Slot, SlotError, Slots};
use sha2::{Digest, Sha256};
use std::time::Duration;
use sumac_hal::flash::BlockDevice;
use sumac_hal::time::Instant;
use thiserror::Error;

/// The limits of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How often an update may be started before it is abandoned; at least 1.
    pub tries: u8,
    /// How long a started update has to report that it is healthy.
    pub confirm_within: Duration,
}

impl Default for Policy {
    /// One retry, because power may fail during the first try; five minutes, within the limit of `mlxbf-bootctl`'s
    /// watchdog.
    fn default() -> Self {
        Self { tries: 2, confirm_within: Duration::from_secs(300) }
    }
}

/// The description of an update, from a manifest whose signature was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The version, for display.
    pub version: String,
    /// The epoch, which must not be lower than that of the running payload.
    pub epoch: u64,
    /// The length in bytes.
    pub len_bytes: u64,
    /// The SHA-256 of the payload.
    pub sha256: [u8; 32],
}

/// An event for the updater.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Start writing an update; one in progress is abandoned.
    Begin(&'a Offer),
    /// The next bytes of the update.
    Chunk(&'a [u8]),
    /// The update is complete.
    Finish,
    /// The running payload is healthy.
    Healthy,
    /// Go back to the other slot: end the running payload's trial or, if it is confirmed, put the other payload on
    /// trial.
    RollBack,
}

/// An action for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// The update is written and on trial: restart into this slot.
    Restart {
        /// The slot of the update.
        slot: Slot,
    },
    /// The running payload is confirmed; the watchdog can be stopped.
    Confirmed,
    /// The running payload did not become healthy in time: restart, which selects the old slot.
    RollBack {
        /// The old slot.
        slot: Slot,
    },
}

/// Why an update failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UpdateError<E> {
    /// A slot failed.
    #[error(transparent)]
    Slot(#[from] SlotError<E>),
    /// The running payload is on trial, so the old one must be kept.
    #[error("the running version is on trial; it has to become healthy before the next update")]
    OnTrial,
    /// The update is older than the running payload.
    #[error("the update has epoch {epoch}, but the running version has epoch {running}: rollback is refused")]
    Rollback {
        /// The update's epoch.
        epoch: u64,
        /// The running payload's epoch.
        running: u64,
    },
    /// The update exceeds the slot.
    #[error("the update has {len_bytes} bytes, but slot {slot} holds only {capacity_bytes}")]
    TooLong {
        /// The length of the update in bytes.
        len_bytes: u64,
        /// The slot.
        slot: Slot,
        /// The capacity of the slot in bytes.
        capacity_bytes: u64,
    },
    /// The version does not fit the record.
    #[error("the version {0:?} exceeds {VERSION_MAX_BYTES} bytes")]
    Version(String),
    /// There is nothing to go back to.
    #[error("slot {slot} holds no complete payload that may be started")]
    NothingThere {
        /// The other slot.
        slot: Slot,
    },
    /// The system was not started from a slot.
    #[error("the system was not started from a slot")]
    NotFromSlot,
    /// No update is in progress.
    #[error("no update is in progress")]
    NotBegun,
    /// The update's length differs from the announced one.
    #[error("the update has {len_bytes} bytes so far, but {offered} were announced")]
    Length {
        /// The bytes received.
        len_bytes: u64,
        /// The bytes announced.
        offered: u64,
    },
    /// The payload differs from the announced one, or the device does not retain it.
    #[error("the SHA-256 of the update differs from the announced one")]
    Digest,
}

/// An update in progress.
#[derive(Debug)]
struct Writing {
    /// The target slot.
    slot: Slot,
    offer: Offer,
    digest: Sha256,
    len_bytes: u64,
    /// Bytes that do not fill a block.
    rest: Vec<u8>,
    next_block: u32,
}

/// The state machine of updates.
#[derive(Debug)]
pub struct Updater {
    policy: Policy,
    /// The running slot; `None` if the system was started in another way, such as over rshim.
    running: Option<Selected>,
    /// The deadline for the running payload to become healthy.
    deadline: Option<Instant>,
    writing: Option<Writing>,
    notice: Option<Notice>,
}

impl Updater {
    /// Create an updater in the slot that [`Slots::select`] has selected, or `None` if started in another way.
    pub fn new(policy: Policy, running: Option<Selected>, now: Instant) -> Self {
        let is_on_trial = running.as_ref().is_some_and(|running| running.record.state != State::Confirmed);
        let deadline = is_on_trial.then(|| now + policy.confirm_within);
        Self { policy, running, deadline, writing: None, notice: None }
    }

    /// Process an event.
    ///
    /// # Errors
    /// The update failed and is abandoned; the running slot is unchanged.
    pub fn handle<D: BlockDevice>(
        &mut self,
        event: Event<'_>,
        slots: &mut Slots<D>,
    ) -> Result<(), UpdateError<D::Error>> {
        let result = match event {
            Event::Begin(offer) => self.begin(offer, slots),
            Event::Chunk(bytes) => self.chunk(bytes, slots),
            Event::Finish => self.finish(slots),
            Event::Healthy => return self.confirm(slots),
            Event::RollBack => self.roll_back(slots),
        };
        if result.is_err() {
            self.writing = None;
        }
        result
    }

    /// Process timeouts. Call this when [`Updater::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let (Some(deadline), Some(running)) = (self.deadline, &self.running)
            && now >= deadline
        {
            self.deadline = None;
            self.notice = Some(Notice::RollBack { slot: running.slot.other() });
        }
    }

    /// Return when to call [`Updater::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    /// Return the slot that is being written.
    pub fn writing(&self) -> Option<Slot> {
        self.writing.as_ref().map(|writing| writing.slot)
    }

    /// Return the next notice.
    pub fn poll_event(&mut self) -> Option<Notice> {
        self.notice.take()
    }

    /// Return the slot to write, and the epoch of the one that is kept: the running slot or, if started in another way
    /// (over rshim), the better of the two, so that one slot always holds a complete payload.
    fn target<D: BlockDevice>(&self, slots: &mut Slots<D>) -> Result<(Slot, Option<u64>), UpdateError<D::Error>> {
        if let Some(running) = &self.running {
            return Ok((running.slot.other(), Some(running.record.epoch)));
        }
        let mut best = None;
        for slot in Slot::ALL {
            let Some(record) = slots.record(slot)?.filter(Record::may_start) else { continue };
            if slots.is_whole(slot, &record)? {
                best = best.max(Some((record.state == State::Confirmed, record.sequence, slot.index(), record.epoch)));
            }
        }
        let kept = best.and_then(|(_, _, index, epoch)| Some((*Slot::ALL.get(index)?, epoch)));
        Ok(kept.map_or((Slot::A, None), |(slot, epoch)| (slot.other(), Some(epoch))))
    }

    fn begin<D: BlockDevice>(&mut self, offer: &Offer, slots: &mut Slots<D>) -> Result<(), UpdateError<D::Error>> {
        self.writing = None;
        if self.running.as_ref().is_some_and(|running| running.record.state != State::Confirmed) {
            return Err(UpdateError::OnTrial);
        }
        self.notice = None;
        let epoch = offer.epoch;
        let (slot, kept) = self.target(slots)?;
        let floor = kept.unwrap_or(0).max(slots.confirmed_epoch()?);
        if let Some(running) = Some(floor).filter(|had| epoch < *had) {
            return Err(UpdateError::Rollback { epoch, running });
        }
        if offer.version.len() > VERSION_MAX_BYTES {
            return Err(UpdateError::Version(offer.version.clone()));
        }
        let (len_bytes, capacity_bytes) = (offer.len_bytes, slots.capacity_bytes(slot));
        if len_bytes > capacity_bytes {
            return Err(UpdateError::TooLong { len_bytes, slot, capacity_bytes });
        }
        slots.write_record(slot, record(offer, State::Empty, 0))?;
        self.writing = Some(Writing {
            offer: offer.clone(),
            slot,
            digest: Sha256::new(),
            len_bytes: 0,
            rest: Vec::new(),
            next_block: 0,
        });
        Ok(())
    }

    fn chunk<D: BlockDevice>(&mut self, bytes: &[u8], slots: &mut Slots<D>) -> Result<(), UpdateError<D::Error>> {
        let writing = self.writing.as_mut().ok_or(UpdateError::NotBegun)?;
        let slot = writing.slot;
        writing.len_bytes = writing.len_bytes.saturating_add(bytes.len() as u64);
        writing.check_length(|len_bytes, offered| len_bytes <= offered)?;
        writing.digest.update(bytes);
        let block_len_bytes = slots.devices[slot.index()].geometry().block_len_bytes;
        writing.rest.extend_from_slice(bytes);
        let whole = writing.rest.len() / block_len_bytes * block_len_bytes;
        slots.write(slot, writing.next_block, &writing.rest[..whole])?;
        writing.next_block += (whole / block_len_bytes) as u32;
        writing.rest.drain(..whole);
        Ok(())
    }

    fn finish<D: BlockDevice>(&mut self, slots: &mut Slots<D>) -> Result<(), UpdateError<D::Error>> {
        let mut writing = self.writing.take().ok_or(UpdateError::NotBegun)?;
        let slot = writing.slot;
        writing.check_length(|len_bytes, offered| len_bytes == offered)?;
        if writing.digest.finalize_reset()[..] != writing.offer.sha256 {
            return Err(UpdateError::Digest);
        }
        if !writing.rest.is_empty() {
            writing.rest.resize(slots.devices[slot.index()].geometry().block_len_bytes, 0);
            slots.write(slot, writing.next_block, &writing.rest)?;
        }
        slots.flush(slot)?;
        let record = record(&writing.offer, self.trial(), next_sequence(slots)?);
        if !slots.is_whole(slot, &record)? {
            return Err(UpdateError::Digest);
        }
        slots.write_record(slot, record)?;
        self.notice = Some(Notice::Restart { slot });
        Ok(())
    }

    /// One record decides: no power cut leaves a system that does not start.
    fn roll_back<D: BlockDevice>(&mut self, slots: &mut Slots<D>) -> Result<(), UpdateError<D::Error>> {
        self.writing = None;
        let Selected { slot: running, record } = self.running.clone().ok_or(UpdateError::NotFromSlot)?;
        let slot = running.other();
        let other = slots.record(slot)?.filter(Record::may_start).ok_or(UpdateError::NothingThere { slot })?;
        if !slots.is_whole(slot, &other)? {
            return Err(UpdateError::NothingThere { slot });
        }
        if record.state == State::Confirmed {
            let (epoch, running) = (other.epoch, record.epoch);
            if epoch < running {
                return Err(UpdateError::Rollback { epoch, running });
            }
            // On trial, so that the confirmed slot is started again if the other one does not become healthy.
            let (state, sequence) = (self.trial(), next_sequence(slots)?);
            slots.write_record(slot, Record { state, sequence, ..other })?;
        } else {
            slots.write_record(running, Record { state: State::Trial { tries_left: 0 }, ..record })?;
        }
        self.deadline = None;
        self.notice = Some(Notice::Restart { slot });
        Ok(())
    }

    fn trial(&self) -> State {
        State::Trial { tries_left: self.policy.tries.max(1) }
    }

    fn confirm<D: BlockDevice>(&mut self, slots: &mut Slots<D>) -> Result<(), UpdateError<D::Error>> {
        // Once the deadline has passed, the rollback was announced and is final.
        if let (Some(running), Some(_)) = (&mut self.running, self.deadline) {
            // Mark it as confirmed only after the record is written; otherwise the next update could overwrite the only
            // confirmed slot.
            let record = Record { state: State::Confirmed, ..running.record.clone() };
            running.record = slots.write_record(running.slot, record)?;
            self.deadline = None;
            self.notice = Some(Notice::Confirmed);
        }
        Ok(())
    }
}

impl Writing {
    fn check_length<E>(&self, is_right: impl FnOnce(u64, u64) -> bool) -> Result<(), UpdateError<E>> {
        let (len_bytes, offered) = (self.len_bytes, self.offer.len_bytes);
        if is_right(len_bytes, offered) { Ok(()) } else { Err(UpdateError::Length { len_bytes, offered }) }
    }
}

/// Return a number higher than every existing one: that of the running slot, and of what the other one held before.
fn next_sequence<D: BlockDevice>(slots: &mut Slots<D>) -> Result<u64, SlotError<D::Error>> {
    let mut newest = 0;
    for slot in Slot::ALL {
        newest = slots.record(slot)?.map_or(newest, |record| newest.max(record.sequence));
    }
    Ok(newest.saturating_add(1))
}

fn record(offer: &Offer, state: State, sequence: u64) -> Record {
    let Offer { version, epoch, len_bytes, sha256 } = offer.clone();
    Record { state, count: 0, sequence, epoch, len_bytes, sha256, version }
}
