//! Transports between a rank and its leaf device: [`packets`] over any port, or [`memory`] that the device reads and
//! writes directly (zero-copy).

pub mod memory;
pub mod packets;
mod source;

pub(crate) use source::RecoverySource;
