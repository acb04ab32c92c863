//! The seeded simulator: devices and ranks as production state machines on one virtual clock.
//!
//! Everything that could differ between two runs is drawn from the seed: same seed, same log (its hash is part of
//! the [`Report`]). A run ends when every rank has every answer, or the error that its [`Scenario`] calls for, and
//! the cluster has become quiet; or it fails by name ([`Violation`]): a wrong element, a hang, an error that nobody
//! injected, ranks that were told different things, counters that do not add up, a queue that grew past its limit, a
//! panic. What the links did wrong in a run can be recorded, repeated and [shrunk](shrink) to a short script.
//!
//! The links and the rules by which they fail are `hal::emu`'s; nothing here sleeps, reads a clock or opens a socket.
//!
//! What is drawn: 1 to 256 ranks, up to three groups on up to two trees of 1 to 4 levels, shards, windows, types, sizes,
//! links, who listens to shared addresses, moments of calls, clocks that are hours apart and count 200 ppm too fast or
//! too slow; loss, duplication and reordering of up to 30 %, damage, one-way cuts and slow links, each kind off in most
//! runs; a device that dies or restarts, a link that is cut for longer than a dead hop takes, a controller that forgets
//! everything, up to three of these one after the other, at a time or right after a step of an operation or of a repair
//! ([`Point`]); an attacker.
//!
//! Where [ranks die](ScenarioKind::Ranks), those that are left agree by the machine that `sumac::comm` agrees by, whatever
//! dies meanwhile: other ranks, who leads, the controller, the way between ranks.
//!
//! [Tenants](Tenancy) are a world of their own: up to 14 jobs with rank sets of their own, on 1 to 64 devices, by what the
//! controller itself decides, whose threads and sockets are left out: books, quotas, the queue, leases, placement, offers.
//!
//! Ranks that [repair](ScenarioKind::Repair) use what `sumac::comm` decides with; there the controller is a small model.
//!
//! Where ranks [contribute by reference](ScenarioKind::Reference), a driver of its own runs the production endpoint, node
//! and engine through rings and registered memory: devices die at drawn points of a chunk's life ([`CrashPoint`]), come
//! back, or stand still; ranks fence them, salvage what was published, and repair; see [`ByReference`]. What is not there:
//! more than one group at a time, shards, operations that do not wait for late ranks, an attacker, and how ranks agree on a
//! repair while others die (which is [`ScenarioKind::Ranks`]'s). Tested elsewhere: the board's own loop and the rank's
//! driver, which live on threads and sockets (`tests/references`, `tests/repairs`).

mod attack;
mod check;
mod clock;
mod cluster;
mod controller;
mod coverage;
mod deaths;
mod faults;
mod incident;
mod look;
mod loss;
mod mail;
mod memory;
mod options;
mod planted;
mod ranks;
mod reduce;
mod reference;
mod repair;
mod report;
mod scenario;
mod setup;
mod shrink;
mod straggler;
mod tenants;
mod trial;
mod wiring;

pub use cluster::{record, run};
pub use coverage::{Mark, Seen};
pub use deaths::Victim;
pub use faults::{Faults, Spell};
pub use loss::{Ill, Loss, Moment, Point};
pub use options::{Draw, GroupOptions, Options, Sharing};
pub use planted::Planted;
pub use reference::{ByReference, CrashPoint, Fate, Mishap, Setup, When};
pub use report::{Extents, Report, Violation};
pub use scenario::{Scenario, ScenarioKind};
pub use shrink::{Shrunk, shrink};
pub use straggler::{Stragglers, run_stragglers};
pub use tenants::{
    JobPlan, Room, Tenancy, TenantReport, TenantViolation, TenantsShrunk, Trouble, record_tenants, run_tenants,
    shrink_tenants,
};
