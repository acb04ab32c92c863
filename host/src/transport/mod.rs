//! From a rank to its leaf device: [`packets`] over any port, or [`memory`] that the device reads and writes.

pub mod memory;
pub mod packets;
