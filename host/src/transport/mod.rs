//! Transports between a rank and its leaf device: [`packets`] over any port, or [`memory`] that the device reads and
//! writes directly (zero-copy). Ranks that share a host may combine there first ([`local`]). How long packets may be,
//! [`path`] finds out.

pub mod local;
pub mod memory;
pub mod packets;
pub mod path;
mod source;

pub(crate) use source::RecoverySource;
