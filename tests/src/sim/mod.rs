//! The seeded simulator: devices and ranks as production state machines on one virtual clock.
//!
//! Everything that could differ between two runs is drawn from the seed: same seed, same log (its hash is part of
//! the [`Report`]). A run ends when every rank has every answer, or the error that its [`Scenario`] calls for, and
//! the cluster has become quiet; or it fails by name ([`Violation`]): a wrong element, a hang, an error that nobody
//! injected, ranks that were told different things, counters that do not add up, a queue that grew past its limit, a
//! panic. What the links did wrong in a run can be recorded, repeated and [shrunk](shrink) to a short script.
//!
//! The links and the rules by which they fail are `hal::emu`'s; nothing here sleeps, reads a clock or opens a socket.

mod attack;
mod check;
mod clock;
mod cluster;
mod controller;
mod coverage;
mod faults;
mod incident;
mod loss;
mod memory;
mod options;
mod planted;
mod reduce;
mod repair;
mod report;
mod scenario;
mod setup;
mod shrink;
mod straggler;
mod wiring;

pub use cluster::{record, run};
pub use coverage::{Mark, Seen};
pub use faults::{Faults, Spell};
pub use loss::{Ill, Loss, Moment, Point};
pub use options::{Draw, GroupOptions, Options, Sharing};
pub use planted::Planted;
pub use report::{Report, Violation};
pub use scenario::{Scenario, ScenarioKind};
pub use shrink::{Shrunk, shrink};
pub use straggler::{Stragglers, run_stragglers};
