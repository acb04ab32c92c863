//! Seeded simulator: devices and ranks as production state machines on one virtual clock.
//!
//! Everything that could differ between two runs is drawn from the seed: the same seed gives the same log, whose hash
//! is part of the [`Report`]. A run ends when every rank has every answer, or the error that its [`Scenario`] requires,
//! and the cluster is quiet. Otherwise it fails with a [`Violation`]: a wrong element, a hang, an unexpected error,
//! ranks that got different errors, inconsistent counters, a queue over its limit, a panic. The link faults of a run
//! can be recorded, replayed and [shrunk](shrink) to a short script.
//!
//! Links and their faults are `hal::emu`'s; nothing here sleeps, reads a clock or opens a socket.
//!
//! Drawn: 1 to 256 ranks; up to three groups on up to two trees of 1 to 4 levels; shards, windows, types, sizes and
//! links; which children listen to shared addresses; call times; clocks that are hours apart and run up to 200 ppm fast
//! or slow; loss, duplication and reordering of up to 30 %, corruption, one-way cuts and slow links, each kind disabled
//! in most runs; a device that dies or restarts, a link that is cut for longer than the dead-hop timeout, a controller
//! that loses its state: up to three of these in sequence, at a time or right after a step of an operation or of a
//! recovery ([`Point`]); an attacker.
//!
//! Ranks recover with the state machine of a communicator ([`sumac::harness::Change`]): it agrees, plans and decides,
//! also when [ranks die](ScenarioKind::Ranks), whatever dies meanwhile: other ranks, the coordinator, the controller,
//! links between ranks. Their trees are planned and reserved by the production controller, without its threads and
//! sockets ([`sumac::controller::machine`]); runs without a recovery are wired as drawn. Devices execute the
//! controller's requests, and ranks have a session for each group. Losses strike right after single steps of all of
//! them; connections end, the controller restarts, or is gone, and a dead device may just not reply.
//!
//! [Paths](ScenarioKind::Paths) that carry shorter packets than others are found by the probes of ranks and devices, as
//! the controller asks, and by hops that stall once a path has become narrower. Elsewhere packets of any length arrive.
//!
//! [Tenants](Tenancy) have a simulator of their own: up to 14 jobs with rank sets of their own on 1 to 64 devices, with
//! the controller's own decisions but without its threads and sockets: resource ledger, quotas, queue, leases,
//! placement, migration offers. Their ranks migrate and vote as communicators do. They call one operation after the
//! other, or start several at once and drop some handles ([`Tenancy::draw_started`]), with a communicator's own
//! bookkeeping ([`sumac::harness::Operations`]). Ranks that share a host combine there, on a device that one of them
//! runs ([`Tenancy::draw_hosts`]). Jobs may be on several trees ([`Tenancy::draw_stripes`]).
//!
//! For [zero-copy ranks](ScenarioKind::ZeroCopy), a driver runs the production endpoint, node and engine through rings
//! and registered memory. Devices die at drawn points of a chunk ([`CrashPoint`]), restart or stall; ranks fence them,
//! salvage what was published, and recover; see [`ZeroCopy`]. A device that is only slow may go on meanwhile
//! ([`ScenarioKind::Severing`]). Not covered there: several groups at a time, shards,
//! straggler limits, an attacker, and messages of a view change that are late or lost (see [`ScenarioKind::Ranks`]).
//! The board's own loop and the rank's driver, which use threads and sockets, are tested in `tests/zero_copy` and
//! `tests/recovery`.

mod agents;
mod assignments;
mod attack;
mod check;
mod clock;
mod cluster;
mod controller;
mod coverage;
mod deaths;
mod faults;
mod incident;
mod loss;
mod memory;
mod messages;
mod observe;
mod options;
mod paths;
mod places;
mod planted;
mod ranks;
mod reduce;
mod report;
mod route;
mod scenario;
mod serving;
mod sessions;
mod setup;
mod shrink;
mod straggler;
mod tenants;
mod trial;
mod wiring;
mod zero_copy;

pub use cluster::{record, run};
pub use coverage::{Coverage, Mark};
pub use deaths::Victim;
pub use faults::{Faults, Spell};
pub use loss::{Loss, LossKind, Moment, Point};
pub use options::{Draw, GroupOptions, Options, Sharing};
pub use paths::{Host, PathEnds, PathLimit};
pub use planted::Planted;
pub use report::{Extents, Report, Violation};
pub use scenario::{Scenario, ScenarioKind};
pub use shrink::{Shrunk, shrink};
pub use straggler::{Stragglers, run_stragglers};
pub use tenants::{
    DeviceCapacity, Incident, JobPlan, Step, Strike, Takeover, Tenancy, TenantReport, TenantViolation, TenantsShrunk,
    record_tenants, run_tenants, shrink_tenants,
};
pub use zero_copy::{CrashPoint, Fate, Mishap, Setup, When, ZeroCopy, every_device_loss};
