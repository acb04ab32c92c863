//! What selects the slot that the firmware boots.

use super::Slot;

/// What selects the slot that the firmware boots: EFI variables ([`EfiBootOrder`](crate::boot::EfiBootOrder)), the
/// eMMC's boot partitions ([`SwapBootOrder`](crate::boot::SwapBootOrder)), or nothing, where a loader reads the slots'
/// records itself ([`NoBootOrder`](crate::update::NoBootOrder)).
///
/// Both calls take effect at the next restart, and are durable when they return; those of boot partitions only if power
/// lasts until then, else the running slot is booted again.
pub trait BootOrder {
    /// Why the firmware's order cannot be changed.
    type Error;

    /// Boot this slot at the next restart only. Every later restart boots the preferred slot again, without help from
    /// the one that was tried: this is what ends a trial in which nothing of ours runs.
    ///
    /// # Errors
    /// The firmware refuses the change, or the slot has no boot entry.
    fn try_once(&mut self, slot: Slot) -> Result<(), Self::Error>;

    /// Boot this slot at every restart from now on, before everything else; the other slot comes after it.
    ///
    /// # Errors
    /// As for [`BootOrder::try_once`].
    fn prefer(&mut self, slot: Slot) -> Result<(), Self::Error>;
}

/// What starts the slots of a card that is updated while it runs.
pub trait BootLoader: BootOrder {
    /// What keeps others from writing slots.
    type Lock: std::fmt::Debug + Send;

    /// Whether it reads the slots' records, and counts the tries of one on trial ([`Slots::select`](super::Slots)).
    /// Otherwise the try has to be counted before the restart.
    const READS_RECORDS: bool;

    /// Keep others from writing slots, until the lock is dropped.
    ///
    /// # Errors
    /// Another one writes.
    fn lock(&mut self) -> Result<Self::Lock, Self::Error>;

    /// A slot is about to be written: start it no more, also not at the next restart, until [`BootOrder::try_once`]
    /// names it.
    ///
    /// # Errors
    /// The firmware refuses the change.
    fn prepare(&mut self, slot: Slot) -> Result<(), Self::Error>;
}
