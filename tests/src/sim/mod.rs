//! The seeded simulator: devices and ranks as production state machines on one virtual clock.
//!
//! Everything that could differ between two runs is drawn from the seed: same seed, same log (its hash is part of
//! the [`Report`]). A run ends when every rank has every answer, or fails by name: a wrong element, a hang (no
//! event left, or the virtual time limit), an error that nobody injected, a limit that was passed.

mod cluster;
mod net;
mod options;
mod wiring;

pub use cluster::{Report, Violation, run};
pub use options::{Draw, Faults, Options};
