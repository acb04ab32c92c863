//! Emulated hardware: links on virtual time, with faults on demand, and a [DMA engine](dma).
//!
//! Fake hardware moves bytes; it does not understand them, so nothing here knows [`wire`](crate::wire). The fabric has
//! no clock, thread or socket either: the caller says what time it is, and the same seed and the same calls give the
//! same deliveries, the same counters and the same [`Fabric::log_hash`]. The DMA engine works for real, on threads of
//! its own: what it does to memory does not depend on when, but the order in which chains complete does.

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
