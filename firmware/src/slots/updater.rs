//! Updating from the inside: takes an image in pieces, puts it on trial, and confirms it or rolls back.
//!
//! ```text
//! Idle ── Begin ──> Writing ── Chunk … ── Finish ──> Restart notice      (the other slot is on trial)
//! OnTrial ── Healthy ──> Idle          OnTrial ── time limit ──> RollBack notice
//! ```
//!
//! Invariant: the running slot is never written but for its record, when it is confirmed.

use super::record::{Record, State, VERSION_MAX_BYTES};
use super::{Selected, Slot, SlotError, Slots};
use sha2::{Digest, Sha256};
use std::time::Duration;
use sumac_hal::flash::BlockDevice;
use sumac_hal::time::Instant;
use thiserror::Error;

/// How trials go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How often an update may be started before it is given up; at least 1.
    pub tries: u8,
    /// How long a started update has to say that it is healthy.
    pub confirm_within: Duration,
}

impl Default for Policy {
    /// One retry, as power may fail in the first try; five minutes, within `mlxbf-bootctl`'s longest watchdog.
    fn default() -> Self {
        Self { tries: 2, confirm_within: Duration::from_secs(300) }
    }
}

/// What an update is, from a manifest whose signature was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// What people call it.
    pub version: String,
    /// Must not be lower than that of what runs.
    pub epoch: u64,
    /// Length, in bytes.
    pub len_bytes: u64,
    /// SHA-256.
    pub sha256: [u8; 32],
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An update is to be written; one that was under way is given up.
    Begin(&'a Offer),
    /// The next bytes of it.
    Chunk(&'a [u8]),
    /// All bytes have come.
    Finish,
    /// What runs has shown that it works.
    Healthy,
}

/// What the caller should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// The update is whole and on trial: restart, into this slot.
    Restart {
        /// Where it is.
        slot: Slot,
    },
    /// What runs is confirmed; the watchdog can be stopped.
    Confirmed,
    /// What runs has not become healthy in time: restart, and the old one is taken.
    RollBack {
        /// Where the old one is.
        slot: Slot,
    },
}

/// Why an update does not go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum UpdateError<E> {
    /// A device fails.
    #[error(transparent)]
    Slot(#[from] SlotError<E>),
    /// What runs could not be gone back to.
    #[error("what runs is on trial itself; it must be healthy before it is replaced")]
    OnTrial,
    /// Older than what runs.
    #[error("the update has epoch {epoch}, what runs has {running}: older images must not come back")]
    Rollback {
        /// The update's.
        epoch: u64,
        /// That of what runs.
        running: u64,
    },
    /// Longer than the slot.
    #[error("the update has {len_bytes} bytes, slot {slot} holds {capacity_bytes}")]
    TooLong {
        /// The update, in bytes.
        len_bytes: u64,
        /// Which slot.
        slot: Slot,
        /// The slot, in bytes.
        capacity_bytes: u64,
    },
    /// Longer than a record holds.
    #[error("the version {0:?} has more than {VERSION_MAX_BYTES} bytes")]
    Version(String),
    /// No update is under way.
    #[error("no update was begun")]
    NotBegun,
    /// More or fewer bytes than were offered.
    #[error("the update has {len_bytes} bytes so far; {offered} were offered")]
    Length {
        /// What came, in bytes.
        len_bytes: u64,
        /// What was offered, in bytes.
        offered: u64,
    },
    /// Other bytes than were offered, or the device does not keep them.
    #[error("the update reads back with another SHA-256 than was offered")]
    Digest,
}

/// An update that is being written.
#[derive(Debug)]
struct Writing {
    /// Where it goes.
    slot: Slot,
    offer: Offer,
    digest: Sha256,
    len_bytes: u64,
    /// Bytes that do not fill a block yet.
    rest: Vec<u8>,
    next_block: u32,
}

/// The state of updating.
#[derive(Debug)]
pub struct Updater {
    policy: Policy,
    /// What runs; nothing if it was started from elsewhere, as over rshim.
    running: Option<Selected>,
    /// When what runs must have become healthy.
    deadline: Option<Instant>,
    writing: Option<Writing>,
    notice: Option<Notice>,
}

impl Updater {
    /// Begin in what [`Slots::select`] has chosen, or in what was started from elsewhere.
    pub fn new(policy: Policy, running: Option<Selected>, now: Instant) -> Self {
        let is_on_trial = running.as_ref().is_some_and(|running| running.record.state != State::Confirmed);
        let deadline = is_on_trial.then(|| now + policy.confirm_within);
        Self { policy, running, deadline, writing: None, notice: None }
    }

    /// Take an event.
    ///
    /// # Errors
    /// The update does not go on and is given up; what runs is not touched.
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
        };
        if result.is_err() {
            self.writing = None;
        }
        result
    }

    /// Take the time. Call it when [`Updater::poll_timeout`] has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let (Some(deadline), Some(running)) = (self.deadline, &self.running)
            && now >= deadline
        {
            self.deadline = None;
            self.notice = Some(Notice::RollBack { slot: running.slot.other() });
        }
    }

    /// Return when [`Updater::handle_timeout`] has to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    /// Return what to do next.
    pub fn poll_event(&mut self) -> Option<Notice> {
        self.notice.take()
    }

    /// Return the slot to write to, and the epoch of what stays: that which runs or, started from elsewhere (over rshim),
    /// the best that there is, so that one slot always holds a whole payload.
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
        if let Some(running) = kept.filter(|had| epoch < *had) {
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
        // Newer than all there is: the running one, and what the slot had before.
        let mut newest = 0;
        for slot in Slot::ALL {
            newest = slots.record(slot)?.map_or(newest, |record| newest.max(record.sequence));
        }
        let trial = State::Trial { tries_left: self.policy.tries.max(1) };
        let record = record(&writing.offer, trial, newest.saturating_add(1));
        if !slots.is_whole(slot, &record)? {
            return Err(UpdateError::Digest);
        }
        slots.write_record(slot, record)?;
        self.notice = Some(Notice::Restart { slot });
        Ok(())
    }

    fn confirm<D: BlockDevice>(&mut self, slots: &mut Slots<D>) -> Result<(), UpdateError<D::Error>> {
        // Once the time is over, the roll-back has been announced, and stays.
        if let (Some(running), Some(_)) = (&mut self.running, self.deadline) {
            // Not confirmed before that is written: else the next update would take the place of what is.
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

fn record(offer: &Offer, state: State, sequence: u64) -> Record {
    let Offer { version, epoch, len_bytes, sha256 } = offer.clone();
    Record { state, count: 0, sequence, epoch, len_bytes, sha256, version }
}
