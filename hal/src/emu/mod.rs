//! Emulated hardware for tests: links on virtual time, with faults on demand.
//!
//! Fake hardware moves bytes; it does not understand them, so nothing here knows [`wire`](crate::wire). There is no
//! clock, thread or socket either: the caller says what time it is, and the same seed and the same calls give the
//! same deliveries, the same counters and the same [`Fabric::log_hash`].

mod fabric;
mod port;
mod rng;
mod rule;
#[cfg(test)]
mod tests;

pub use fabric::{Counters, Delivery, Fabric, LinkConfig, RuleId};
pub use port::{EmuNet, EmuPort, EmuPortConfig, EmuRx, EmuTx};
pub use rng::Rng;
pub use rule::{Frame, NthPacket, Partition, RandomFaults, Rule, Verdict};
