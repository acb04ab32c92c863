//! The card's end of an update: requests and results of work go in, statuses and work come out.
//!
//! ```text
//! None ── Begin ──> Manifest ── pieces ──> Receiving ── Finish ──> Checking ──> Ready ── Restart ──> Restarting
//!                                              └────────── refused or failed ─────────> Failed
//! ```
//!
//! Manifest and Receiving are left for None when nothing has happened to the transfer for [`TRANSFER_LEASE`]: its
//! requester has gone, and others may write the slot.

use crate::emulated::update_text;
use std::collections::VecDeque;
use sumac_hal::ctrl::update::{
    Sha256Digest, SlotId, SlotTrust, SlotsStatus, TRANSFER_LEASE, Transfer, UPDATE_MANIFEST_MAX_BYTES,
    UPDATE_WINDOW_BYTES, UpdateOffer, UpdateRequest, UpdateStatus,
};
use sumac_hal::time::Instant;

/// Work on the card's storage, in order. Report its end with [`Session::handle_done`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Work {
    /// Check the manifest, and begin to write.
    Begin {
        /// What the requester says of the image, which must agree with the manifest.
        offer: UpdateOffer,
        /// The signed manifest.
        manifest: Vec<u8>,
    },
    /// Write the next bytes of the image.
    Write(Vec<u8>),
    /// Check what was written, and put it on trial.
    Finish,
    /// Write no more of the image, and let others write the slot.
    Abandon,
    /// Put the other slot on trial, or end the running one's trial.
    RollBack,
    /// Confirm the running slot.
    Confirm,
    /// Restart the system.
    Restart,
}

/// The end of work.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Done {
    /// The manifest is good, and the slot can be written.
    Begun,
    /// So many bytes of the image were written.
    Written(u64),
    /// The image is on trial in this slot.
    Finished(SlotId),
    /// Nothing of the image is written any more.
    Abandoned,
    /// The other slot is what the next restart starts.
    RolledBack,
    /// The confirmation was passed on.
    Confirmed,
    /// The work failed, for this reason.
    Failed(String),
}

#[derive(Debug)]
enum State {
    None,
    /// The manifest is being received.
    Manifest {
        offer: UpdateOffer,
        manifest: Vec<u8>,
    },
    /// The image is being received.
    Receiving {
        offer: UpdateOffer,
        received: u64,
        written: u64,
    },
    Checking(Sha256Digest),
    Ready {
        sha256: Sha256Digest,
        slot: SlotId,
    },
    Failed {
        sha256: Sha256Digest,
        why: String,
    },
    /// The slot for the restart is being prepared.
    RollingBack,
    Restarting,
}

/// The card's end of an update.
#[derive(Debug)]
pub struct Session {
    state: State,
    /// Counts transfers: what comes of the work of an abandoned one is ignored.
    transfer: u64,
    work: VecDeque<(u64, Work)>,
    /// The response to the request that leads to the restart was sent.
    is_sent: bool,
    /// When the transfer in progress is dropped, unless something happens to it.
    lease_end: Instant,
}

impl Default for Session {
    fn default() -> Self {
        Self { state: State::None, transfer: 0, work: VecDeque::new(), is_sent: false, lease_end: Instant::ZERO }
    }
}

impl Session {
    /// Process a request on a card whose slots are `slots`. Poll for work, and for the timeout, afterwards.
    ///
    /// # Errors
    /// The reason why it is refused.
    pub fn handle(
        &mut self,
        request: UpdateRequest,
        slots: &SlotsStatus,
        now: Instant,
    ) -> Result<UpdateStatus, String> {
        self.handle_timeout(now);
        let renews = matches!(request, UpdateRequest::Begin(_) | UpdateRequest::Piece { .. });
        let done = match request {
            UpdateRequest::Status => Ok(()),
            _ if matches!(self.state, State::RollingBack | State::Restarting) => {
                Err("the card is about to restart".to_owned())
            }
            UpdateRequest::Begin(offer) => self.begin(offer, slots),
            UpdateRequest::Piece { offset, bytes } => self.take_piece(offset, &bytes),
            UpdateRequest::Finish => self.finish(),
            UpdateRequest::Restart { sha256 } => self.restart(sha256, slots),
            UpdateRequest::RollBack => self.roll_back(slots),
            UpdateRequest::Confirm => self.confirm(slots),
            _ => Err("the card runs another version, which does not know this request".to_owned()),
        };
        done?;
        // Whoever asks for the status is perhaps not the requester, and what was refused is not the next piece.
        if renews {
            self.lease_end = now + TRANSFER_LEASE;
        }
        Ok(self.status(slots))
    }

    /// Return when to call [`Session::handle_timeout`]; `None` unless a transfer is in progress.
    pub const fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Manifest { .. } | State::Receiving { .. } => Some(self.lease_end),
            _ => None,
        }
    }

    /// Drop the transfer if its time is over. Poll for work afterwards.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_some_and(|end| end <= now) {
            self.drop_work();
            self.state = State::None;
            self.push(Work::Abandon);
        }
    }

    /// Return the status.
    pub fn status(&self, slots: &SlotsStatus) -> UpdateStatus {
        let transfer = match &self.state {
            State::None => Transfer::None,
            State::Manifest { offer, manifest } => Transfer::Receiving {
                sha256: offer.sha256,
                received_bytes: manifest.len() as u64,
                written_bytes: manifest.len() as u64,
            },
            State::Receiving { offer, received, written } => Transfer::Receiving {
                sha256: offer.sha256,
                received_bytes: *received + u64::from(offer.manifest_len_bytes),
                written_bytes: *written + u64::from(offer.manifest_len_bytes),
            },
            State::Checking(sha256) => Transfer::Checking { sha256: *sha256 },
            State::Ready { sha256, slot } => Transfer::Ready { sha256: *sha256, slot: *slot },
            State::Failed { sha256, why } => Transfer::Failed { sha256: *sha256, why: update_text(why) },
            State::RollingBack | State::Restarting => Transfer::Restarting,
        };
        UpdateStatus { slots: slots.clone(), transfer }
    }

    /// Return the next work, and the number to report its end with.
    pub fn poll_work(&mut self) -> Option<(u64, Work)> {
        self.work.pop_front()
    }

    /// The response to a request was sent.
    pub fn handle_sent(&mut self) {
        if matches!(self.state, State::RollingBack | State::Restarting) && !std::mem::replace(&mut self.is_sent, true) {
            self.try_restart();
        }
    }

    /// Restart, once the slot is prepared and the response sent.
    fn try_restart(&mut self) {
        if matches!(self.state, State::Restarting) && self.is_sent {
            self.push(Work::Restart);
        }
    }

    /// Process the end of work. Poll for work, and for the timeout, afterwards.
    pub fn handle_done(&mut self, transfer: u64, done: Done, now: Instant) {
        if transfer != self.transfer {
            return;
        }
        // A requester waits while the card writes.
        self.lease_end = now + TRANSFER_LEASE;
        match (&mut self.state, done) {
            (State::Receiving { written, .. }, Done::Written(len)) => *written = written.saturating_add(len),
            (State::Receiving { offer, .. }, Done::Failed(why)) => {
                self.state = State::Failed { sha256: offer.sha256, why };
                self.drop_work();
            }
            (State::Checking(sha256), Done::Failed(why)) => {
                self.state = State::Failed { sha256: *sha256, why };
                self.drop_work();
            }
            (State::Checking(sha256), Done::Finished(slot)) => {
                self.state = State::Ready { sha256: *sha256, slot };
            }
            (State::RollingBack, Done::RolledBack) => {
                self.state = State::Restarting;
                self.try_restart();
            }
            (State::RollingBack, Done::Failed(why)) => {
                self.state = State::Failed { sha256: [0; 32], why };
            }
            _ => {}
        }
    }

    fn push(&mut self, work: Work) {
        self.work.push_back((self.transfer, work));
    }

    /// Forget work that has not been taken, and the results of what has.
    fn drop_work(&mut self) {
        self.work.clear();
        self.transfer += 1;
    }

    fn begin(&mut self, offer: UpdateOffer, slots: &SlotsStatus) -> Result<(), String> {
        if let Some(SlotTrust::Trial { .. }) = slots.running_image().map(|image| image.trust) {
            return Err("the running version is on trial: confirm it, or roll it back, before the next update".into());
        }
        if !(1..=UPDATE_MANIFEST_MAX_BYTES).contains(&offer.manifest_len_bytes) {
            let len = offer.manifest_len_bytes;
            return Err(format!("a manifest of {len} bytes; the limit is {UPDATE_MANIFEST_MAX_BYTES}"));
        }
        if offer.len_bytes == 0 || offer.len_bytes.checked_add(offer.manifest_len_bytes.into()).is_none() {
            return Err(format!("an image of {} bytes", offer.len_bytes));
        }
        if matches!(self.state, State::Checking(_)) {
            return Err("the last image is still being checked; ask again".into());
        }
        self.drop_work();
        self.state = State::Manifest { offer, manifest: Vec::new() };
        Ok(())
    }

    fn take_piece(&mut self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        let misplaced = |expected: u64| format!("a piece at byte {offset}; the next one starts at byte {expected}");
        if bytes.is_empty() {
            return Err("a piece of 0 bytes".into());
        }
        match &mut self.state {
            State::Manifest { offer, manifest } => {
                if offset != manifest.len() as u64 {
                    return Err(misplaced(manifest.len() as u64));
                }
                let missing = offer.manifest_len_bytes as usize - manifest.len();
                // What follows is the image's, and belongs to a piece of its own.
                if bytes.len() > missing {
                    return Err(format!("a piece of {} bytes; {missing} of the manifest are missing", bytes.len()));
                }
                manifest.extend_from_slice(bytes);
                if bytes.len() == missing {
                    let (offer, manifest) = (*offer, std::mem::take(manifest));
                    self.state = State::Receiving { offer, received: 0, written: 0 };
                    self.push(Work::Begin { offer, manifest });
                }
                Ok(())
            }
            State::Receiving { offer, received, written } => {
                let expected = *received + u64::from(offer.manifest_len_bytes);
                if offset != expected {
                    return Err(misplaced(expected));
                }
                let end = *received + bytes.len() as u64;
                if end > offer.len_bytes {
                    return Err(format!("{end} bytes of an image of {}", offer.len_bytes));
                }
                if end - *written > UPDATE_WINDOW_BYTES {
                    return Err(format!("more than {UPDATE_WINDOW_BYTES} bytes wait to be written"));
                }
                *received = end;
                self.push(Work::Write(bytes.to_vec()));
                Ok(())
            }
            _ => Err(self.not_receiving()),
        }
    }

    fn not_receiving(&self) -> String {
        match &self.state {
            State::Failed { why, .. } => why.clone(),
            _ => "no update is in progress".into(),
        }
    }

    fn finish(&mut self) -> Result<(), String> {
        let State::Receiving { offer, received, .. } = &self.state else { return Err(self.not_receiving()) };
        if *received != offer.len_bytes {
            return Err(format!("{received} of {} bytes have arrived", offer.len_bytes));
        }
        self.state = State::Checking(offer.sha256);
        self.push(Work::Finish);
        Ok(())
    }

    fn restart(&mut self, sha256: Sha256Digest, slots: &SlotsStatus) -> Result<(), String> {
        let is_ready = |slot: SlotId| {
            let is_trial = |image: &&_| is_on_trial(image) && image.sha256 == sha256;
            Some(slot) != slots.running && slots.image(slot).filter(is_trial).is_some()
        };
        // Also one that was written before the card's runtime was restarted.
        if matches!(self.state, State::Checking(_)) || !(is_ready(SlotId::A) || is_ready(SlotId::B)) {
            return Err("this image is not on trial in the other slot; update the card first".into());
        }
        self.drop_work();
        (self.state, self.is_sent) = (State::Restarting, false);
        Ok(())
    }

    fn roll_back(&mut self, slots: &SlotsStatus) -> Result<(), String> {
        if matches!(self.state, State::Checking(_)) {
            return Err("an image is being checked; ask again".into());
        }
        let running = slots.running.ok_or("the card was not started from a slot; restart it, which starts one")?;
        let other = slots.image(running.other());
        let other = other.ok_or_else(|| format!("slot {} holds nothing that can be started", running.other()))?;
        let floor = slots.running_image().filter(|image| !is_on_trial(image)).map_or(0, |image| image.epoch);
        if other.epoch < floor {
            return Err(format!(
                "slot {} has epoch {}, and the running version epoch {floor}: older epochs are refused",
                running.other(),
                other.epoch
            ));
        }
        self.drop_work();
        (self.state, self.is_sent) = (State::RollingBack, false);
        self.push(Work::RollBack);
        Ok(())
    }

    fn confirm(&mut self, slots: &SlotsStatus) -> Result<(), String> {
        let running = slots.running_image().ok_or("the card was not started from a slot")?;
        if is_on_trial(running) {
            self.push(Work::Confirm);
        }
        Ok(())
    }
}

const fn is_on_trial(image: &sumac_hal::ctrl::update::SlotImage) -> bool {
    matches!(image.trust, SlotTrust::Trial { .. })
}
