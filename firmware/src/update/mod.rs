//! Updates of a card over the network: an operator's image reaches the other slot of a card that serves.
//!
//! ```text
//!   Sender (operator) -- requests --> controller -- requests --> Session -- work --> Card: Slots, BootOrder
//!          <--------- statuses ------            <-- statuses --         <-- results -
//! ```
//!
//! [`Sender`] and [`Session`] are the two ends, both without I/O. [`Card`] does the session's work on the storage, on a
//! thread of its own ([`Service`]), so that the card's control connection waits for no disk. The controller between
//! them relays one request at a time, and moves jobs off the card before it restarts.
//!
//! What travels is the signed manifest of a boot stream, as `sumac image build --sign-key` writes it, and then the
//! payload for a slot that results from the stream ([`crate::payload`]). What is not signed by the card's update key
//! ([`UpdateKey`]), is for another board, or is older than what runs is refused before a byte is written. The payload's
//! digest is that of the manifest, or it is never put on trial ([`crate::slots::Updater`]); it is read back before.
//!
//! What starts a slot is firmware with a boot entry for each ([`crate::boot::SlotLoader`]), which is set before the
//! slot is written, or a loader that reads the slots' records ([`NoBootOrder`]).
//!
//! Invariants, checked with lost connections and hostile peers (`tests`):
//! - the running slot is never written;
//! - an image is put on trial only if every byte is as signed, and its epoch is not lower than the running one's;
//! - memory is bounded by [`UPDATE_WINDOW_BYTES`](sumac_hal::ctrl::update::UPDATE_WINDOW_BYTES) and the longest
//!   manifest, whatever the peer sends;
//! - a transfer whose requester has gone ends, and with it the lock of the disk
//!   ([`TRANSFER_LEASE`](sumac_hal::ctrl::update::TRANSFER_LEASE));
//! - a request that is refused changes nothing, and says why.

mod card;
mod key;
mod messages;
mod sender;
mod service;
mod session;
#[cfg(test)]
mod tests;

pub use card::{Card, CardError, NoBootOrder, Supervisor};
pub use key::{UpdateKey, UpdateKeyError};
pub use messages::{Command, Event, Failure, Goal, Limits, Outcome, Reply};
pub use sender::Sender;
pub use service::Service;
pub use session::{Done, Session, Work};

use crate::slots::{Record, Slot, State};
use sumac_hal::ctrl::update::{SLOT_VERSION_MAX_LEN, SlotId, SlotImage, SlotTrust};

/// Return what a record says of its slot; `None` if nothing could be started from it. The running one was: this may be
/// its last try.
fn slot_image(record: &Record, is_running: bool) -> Option<SlotImage> {
    let trust = match record.state {
        State::Empty => return None,
        State::Trial { tries_left: 0 } if !is_running => return None,
        State::Trial { tries_left } => SlotTrust::Trial { tries_left },
        State::Confirmed => SlotTrust::Confirmed,
    };
    // A record holds no longer one.
    let version = record.version.chars().filter(char::is_ascii).take(SLOT_VERSION_MAX_LEN);
    Some(SlotImage { version: version.collect(), epoch: record.epoch, sha256: record.sha256, trust })
}

/// Return a slot's name in messages.
const fn slot_id(slot: Slot) -> SlotId {
    match slot {
        Slot::A => SlotId::A,
        Slot::B => SlotId::B,
    }
}

/// Return the slot of a name.
pub const fn slot_of(id: SlotId) -> Slot {
    match id {
        SlotId::A => Slot::A,
        SlotId::B => Slot::B,
    }
}
