//! The seeded simulator: devices and ranks as production state machines on one virtual clock.
//!
//! Everything that could differ between two runs is drawn from the seed: same seed, same log (its hash is part of
//! the [`Report`]). A run ends when every rank has every answer, or the error that its [`Scenario`] calls for, and
//! the cluster has become quiet; or it fails by name ([`Violation`]): a wrong element, a hang, an error that nobody
//! injected, ranks that were told different things, counters that do not add up, a queue that grew past its limit.
//!
//! The links are `hal::emu`'s; nothing here sleeps, reads a clock or opens a socket.

mod attack;
mod check;
mod cluster;
mod incident;
mod memory;
mod options;
mod report;
mod scenario;
mod setup;
mod wiring;

pub use cluster::run;
pub use options::{Draw, Faults, GroupOptions, Options, Sharing};
pub use report::{Report, Violation};
pub use scenario::{Scenario, ScenarioKind};
