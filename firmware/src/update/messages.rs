//! What goes in and out of the operator's end: goals, commands, replies, events and outcomes.

use std::fmt;
use std::time::Duration;
use sumac_hal::ctrl::update::{Sha256Digest, SlotId, SlotTrust, SlotsStatus, UpdateOffer, UpdateStatus};
use thiserror::Error;

/// What is to be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Goal {
    /// The card runs this image, confirmed.
    Update {
        /// The image.
        offer: UpdateOffer,
        /// The epoch in its manifest.
        epoch: u64,
    },
    /// The card runs its other slot, confirmed.
    RollBack,
    /// The running slot is confirmed.
    Confirm,
}

/// Limits on time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long all of it may take.
    pub total: Duration,
    /// How long to wait before asking again.
    pub interval: Duration,
    /// Whether to wait until a restarted card is confirmed.
    pub awaits_confirmation: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { total: Duration::from_secs(1800), interval: Duration::from_millis(250), awaits_confirmation: true }
    }
}

/// A command for the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Command {
    /// Report the status.
    Status,
    /// Start a transfer.
    Begin(UpdateOffer),
    /// Send these bytes of manifest and image.
    Piece {
        /// Where they start.
        offset: u64,
        /// How many they are.
        len_bytes: u32,
    },
    /// Check the image, and put it on trial.
    Finish,
    /// Restart into the image.
    Restart(Sha256Digest),
    /// Restart into the other slot.
    RollBack,
    /// Confirm the running slot.
    Confirm,
}

/// The reply to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply {
    /// The card's status.
    Status(Box<UpdateStatus>),
    /// The card, or the controller, refuses.
    Refused(String),
    /// The card is not connected to the controller.
    Away,
    /// There was no reply, or no connection to a controller.
    Lost(String),
}

/// A change to be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The card has received so many bytes of manifest and image.
    Progress(u64),
    /// The card checks the image.
    Checks,
    /// The card was told to restart.
    Restarts,
    /// The card has restarted into this slot, which is on trial.
    OnTrial(SlotId),
    /// The machine goes on after this was lost or refused.
    Retries(String),
}

/// What was reached.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The running slot.
    pub slot: SlotId,
    /// Its version.
    pub version: String,
    /// Its epoch.
    pub epoch: u64,
    /// Whether it is confirmed.
    pub is_confirmed: bool,
    /// Nothing had to be done.
    pub was_so_before: bool,
}

/// Why it was not reached.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Failure {
    /// The card refuses.
    #[error("refused: {why}; {state}")]
    Refused {
        /// The reason.
        why: String,
        /// What the card runs.
        state: String,
    },
    /// The card has an epoch already that is higher.
    #[error("the image has epoch {epoch}, and the card runs epoch {running}: older epochs are refused; {state}")]
    OlderEpoch {
        /// The image's epoch.
        epoch: u64,
        /// The running epoch.
        running: u64,
        /// What the card runs.
        state: String,
    },
    /// The card restarted, and runs something else.
    #[error("the card has restarted and does not run the image: {state}")]
    FellBack {
        /// What the card runs.
        state: String,
    },
    /// Too much time has passed.
    #[error("not done within {limit_s} s, {during}; {state}")]
    TimeLimit {
        /// The limit in seconds.
        limit_s: u64,
        /// What was waited for.
        during: String,
        /// What the card runs, as far as is known.
        state: String,
    },
}

/// What a card runs, in messages.
pub(super) struct Described<'s>(pub(super) &'s SlotsStatus);

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.running, self.0.running_image()) {
            (Some(slot), Some(image)) => {
                let trust = if image.trust == SlotTrust::Confirmed { "confirmed" } else { "on trial" };
                write!(f, "the card runs slot {slot}, version {}, epoch {}, {trust}", image.version, image.epoch)
            }
            _ => f.write_str("the card was not started from a slot"),
        }
    }
}
