//! What a boot order has besides its order: an entry for each slot.

use super::load_option::Partition;
use crate::slots::{BootOrder, Slot};

/// A boot order that names what it starts.
pub trait BootEntries: BootOrder {
    /// Return the slot that a restart boots unless one is tried once, if it is one of ours.
    ///
    /// # Errors
    /// The firmware's order cannot be read.
    fn preferred(&self) -> Result<Option<Slot>, Self::Error>;

    /// Create or replace the entry of a slot that is about to be written, and take it out of the order, where it
    /// belongs again when it is preferred: a trial that is not started by [`BootOrder::try_once`] would not be counted.
    /// `command_line` is that of the running kernel: what names an initramfs and a slot is replaced by what this slot
    /// needs.
    ///
    /// # Errors
    /// As for [`BootOrder::try_once`].
    fn set_entry(&mut self, slot: Slot, partition: Partition, command_line: &str) -> Result<(), Self::Error>;

    /// Take a slot out of the order, and out of what is tried at the next restart, so that the firmware starts it no
    /// more.
    ///
    /// # Errors
    /// As for [`BootOrder::try_once`].
    fn retire(&mut self, slot: Slot) -> Result<(), Self::Error>;

    /// The firmware has started a slot that is on trial, and which has reached this: make sure that every restart boots
    /// the preferred one again. EFI variables need nothing for that.
    ///
    /// # Errors
    /// As for [`BootOrder::try_once`].
    fn keep_fallback(&mut self, running: Slot) -> Result<(), Self::Error> {
        let _ = running;
        Ok(())
    }
}
