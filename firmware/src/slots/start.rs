//! What a version does first when the firmware has started it from a slot.
//!
//! Firmware starts slots by its own order, which knows nothing of records, and falls back by itself. So each version
//! compares: the record of its own slot, and which slot [`Slots::select`] would start. A fallback thus counts as a try
//! of the version that failed; when its tries are used up, the fallback stays.
//!
//! ```text
//! own record     selected              then
//! Confirmed      own                   run; move to the front of the order
//! Confirmed      the other, on trial   its next try
//! Confirmed      the other, confirmed  its confirmation was interrupted: prefer and start it; if it is preferred
//!                                      already, the firmware could not start it: run, unless the own epoch is older
//! Trial          -                     on trial, unless the other is confirmed with a later epoch
//! Empty, none    -                     a half-written slot: start the other
//! ```
//!
//! Invariant: no sequence of calls restarts without end. Each restart uses up a try, or moves a slot to the front that
//! was not there.

use super::record::{Record, State};
use super::{BootOrder, Selected, Slot, SlotError, Slots};
use sumac_hal::flash::BlockDevice;
use thiserror::Error;

/// What to do after a start from a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Start {
    /// Serve. The record says whether the slot is on trial.
    Run(Selected),
    /// Restart: the order has been set to start this slot.
    Restart(Slot),
}

/// Why nothing may be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError<D, B> {
    /// A slot failed, or none can be started.
    #[error(transparent)]
    Slot(#[from] SlotError<D>),
    /// The order cannot be changed.
    #[error("{0}")]
    Order(B),
    /// The running version is older than one that was confirmed, which the firmware could not start.
    #[error(
        "slot {slot} has epoch {epoch}, but slot {} was confirmed with epoch {confirmed} and does not start; flash the card",
        slot.other()
    )]
    OlderEpoch {
        /// The running slot.
        slot: Slot,
        /// Its epoch.
        epoch: u64,
        /// The other's epoch.
        confirmed: u64,
    },
}

/// Decide what to do after the firmware has started `running`. `preferred` is the first slot in its order.
///
/// # Errors
/// [`StartError`].
pub fn start<D: BlockDevice, B: BootOrder>(
    slots: &mut Slots<D>,
    running: Slot,
    preferred: Option<Slot>,
    order: &mut B,
) -> Result<Start, StartError<D::Error, B::Error>> {
    let own = slots.record(running)?.filter(|record| record.state != State::Empty);
    let other = running.other();
    let confirmed = slots.record(other)?.filter(|record| record.state == State::Confirmed);
    if let Some(record) = own.clone().filter(|record| matches!(record.state, State::Trial { .. })) {
        let is_older = confirmed.as_ref().is_some_and(|confirmed| record.epoch < confirmed.epoch);
        return if is_older { go(order, other) } else { Ok(Start::Run(Selected { slot: running, record })) };
    }
    let selected = slots.select()?;
    match (own, selected) {
        (Some(_), selected) if selected.slot == running => {
            order.prefer(running).map_err(StartError::Order)?;
            Ok(Start::Run(selected))
        }
        (_, Selected { slot, record: Record { state: State::Trial { .. }, .. } }) => {
            order.try_once(slot).map_err(StartError::Order)?;
            Ok(Start::Restart(slot))
        }
        (Some(own), selected) if preferred == Some(selected.slot) => {
            let (epoch, confirmed) = (own.epoch, selected.record.epoch);
            if epoch < confirmed {
                return Err(StartError::OlderEpoch { slot: running, epoch, confirmed });
            }
            Ok(Start::Run(Selected { slot: running, record: own }))
        }
        (_, selected) => go(order, selected.slot),
    }
}

fn go<D, B: BootOrder>(order: &mut B, slot: Slot) -> Result<Start, StartError<D, B::Error>> {
    order.prefer(slot).map_err(StartError::Order)?;
    order.try_once(slot).map_err(StartError::Order)?;
    Ok(Start::Restart(slot))
}

#[cfg(test)]
mod tests;
