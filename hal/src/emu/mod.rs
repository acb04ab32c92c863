//! Emulated hardware: network links in virtual time with injected faults, and a [DMA engine](dma).
//!
//! Emulated hardware moves bytes and does not interpret them, so nothing here depends on [`wire`](crate::wire). The
//! fabric has no clock, threads or sockets: the caller passes the time, and the same seed and calls give the same
//! deliveries, the same counters and the same [`Fabric::log_hash`]. The DMA engine runs on real threads. Its effect on
//! memory does not depend on timing, but the order in which chains complete does.

pub mod dma;
mod fabric;
mod port;
mod rng;
mod rule;
#[cfg(test)]
mod tests;

pub use fabric::{Counters, Delivery, Fabric, LinkConfig, RuleId};
pub use port::{EmuNet, EmuPort, EmuPortConfig, EmuRx, EmuTx};
pub use rng::Rng;
pub use rule::{During, Frame, NthPacket, Partition, RandomFaults, Rule, Script, SlowLink, Verdict, damage, decide};
