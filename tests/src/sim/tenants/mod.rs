//! Tenants: the controller's own decisions, jobs with rank sets of their own on shared devices, and trees that are lost
//! and recovered.
//!
//! Production code: the controller without its threads and sockets ([`sumac::controller::machine`]); devices;
//! endpoints; migration to offered trees, with the vote on them and what becomes of an offer whose controller is gone;
//! recovery from the loss of a tree; and started operations: who owns their buffers, and what a rank that waits does
//! next ([`sumac::harness`]). Models: what blocking calls wait for (`calls`, `recovery`), how a rank talks to its
//! controller (`client`, `takeover`; a rank with a tree stays there when the next controller offers one), message
//! delivery (`wire`), and host collectives, which complete at once when all ranks have entered; the votes on a tree
//! are exchanged by one.
//!
//! Drawn: 1 to 64 devices on a fabric of 1 to 4 levels, or without one; their groups, children, slots and memory; up to
//! four tenants with quotas of groups, slots and memory; up to 14 jobs of 1 to 256 ranks that arrive one after the
//! other and need more than there is; how long they wait, whether they move, their operations and compute times; leases
//! of 1 to 9 s; operations started at once, handles dropped at any time, and the order of waits (`program`); clocks;
//! message delays; link faults; devices that die and restart, do not reply to their controller for a while, refuse, or
//! lose their connection; a controller that is away and loses its state, to which all ranks come back, or only some; a
//! controller that still runs beside its successor; ranks that die, lose the controller, or do not read what it sends.
//! All may happen during a reservation, an offer or a move; the controller may also be lost right after a step of an
//! offer ([`Step`]), which ranks detect late. Each kind is off in most runs. At the end everything is healed, and every
//! rank must end. In worlds of their own, ranks share hosts (`hosts`), or jobs are on several trees (`stripes`).
//!
//! Oracles: a tree is on all its nodes or on none; no tenant exceeds its quota and no device its capacity; of jobs with
//! equal needs the one that has waited longest is served first, and none is skipped more than eight times; every rank
//! knows its job's queue position, and has a tree or a reason; no job waits while everything is free; leases expire
//! neither early nor never: at the end devices and ledger are empty; operations are bit-exact, or the job has lost a
//! rank, and then chunks are whole; a client that does not read holds no more than its limit and is disconnected in
//! time; started operations leave no buffers, and end with their communicator's error; no two controllers number a
//! group alike, and a job is taken over by a majority of its ranks, in a new view.

mod calls;
mod client;
mod controller;
mod device;
mod draw;
mod hosts;
mod job;
mod program;
mod recovery;
mod report;
mod stripes;
mod takeover;
mod watch;
mod wire;
mod world;

use super::shrink::fewest;
use device::{Device, Tables};
pub use draw::{DeviceCapacity, Incident, JobPlan, Step, Strike, Tenancy};
use hosts::HOST_CAPACITY;
pub use report::TenantReport;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use sumac_hal::emu::NthPacket;
use sumac_hal::shard::MAX_SHARDS;
pub use takeover::Takeover;
use world::World;

/// A violation found by a check.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{oracle}: {what}")]
pub struct TenantViolation {
    /// Short name of the check.
    pub oracle: &'static str,
    /// What it found.
    pub what: String,
}

/// Run a simulation to its end.
///
/// # Errors
/// The first [`TenantViolation`].
pub fn run_tenants(plan: &Tenancy) -> Result<TenantReport, TenantViolation> {
    record_tenants(plan).0
}

/// Run a simulation to its end, and return its link faults too.
pub fn record_tenants(plan: &Tenancy) -> (Result<TenantReport, TenantViolation>, Vec<NthPacket>) {
    let incarnations = 2 + plan.incidents.iter().filter(|(_, incident)| matches!(incident, Incident::Die(..))).count();
    let count = |device: usize| incarnations * usize::from(plan.shards_of(device));
    let of_device = |device: usize| (0..count(device)).map(move |_| Tables::new(plan.capacity(device), 1));
    let mut tables: Vec<Tables> = (0..plan.capacities.len()).flat_map(of_device).collect();
    let hosts = plan.shared_hosts();
    tables.extend(hosts.iter().map(|_| Tables::new(&HOST_CAPACITY, MAX_SHARDS)));
    let mut borrowed = tables.iter_mut();
    let mut devices: Vec<Device<'_>> = (0..plan.capacities.len())
        .map(|index| Device::new(plan, index, borrowed.by_ref().take(count(index)).collect()))
        .collect();
    devices.extend(borrowed.map(|tables| Device::off(String::new(), vec![tables])));
    let mut world = World::new(plan, devices);
    world.fabric.record_faults();
    let outcome = catch_unwind(AssertUnwindSafe(|| world.run()));
    let outcome = outcome.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let what = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(TenantViolation { oracle: "panic", what })
    });
    (outcome, world.faults())
}

/// A failing run, minimised.
#[derive(Debug, Clone)]
pub struct TenantsShrunk {
    /// The run, with its faults as a script.
    pub plan: Tenancy,
    /// Number of link faults of the original run.
    pub recorded: usize,
    /// How it fails.
    pub violation: TenantViolation,
    /// Number of runs used.
    pub runs: usize,
}

/// Shrink a failing run, in at most `runs_max` runs: its incidents, jobs from the last one on, and link faults. `None`
/// if it passes.
pub fn shrink_tenants(plan: &Tenancy, runs_max: usize) -> Option<TenantsShrunk> {
    let (outcome, faults) = record_tenants(plan);
    let first = outcome.err()?;
    let (mut violation, mut runs, mut plan) = (first.clone(), 1, plan.clone());
    let mut fails = |plan: &Tenancy| {
        runs += 1;
        let found = if runs > runs_max { None } else { run_tenants(plan).err() };
        let found = found.filter(|found| found.oracle == first.oracle);
        found.map(|found| violation = found).is_some()
    };
    let with_incidents = |plan: &Tenancy, incidents: &[_]| Tenancy { incidents: incidents.to_vec(), ..plan.clone() };
    plan =
        with_incidents(&plan, &fewest(&plan.incidents.clone(), |incidents| fails(&with_incidents(&plan, incidents))));
    let unstruck = Tenancy { strike: None, ..plan.clone() };
    if plan.strike.is_some() && fails(&unstruck) {
        plan = unstruck;
    }
    // The remaining jobs keep their numbers.
    let count = plan.jobs.len();
    let with_jobs = |plan: &Tenancy, count: usize| {
        let mut plan = plan.clone();
        plan.jobs.truncate(count);
        plan.incidents.retain(|(_, incident)| incident.job().is_none_or(|job| job < count));
        plan
    };
    if let Some(count) = (1..count).find(|&count| fails(&with_jobs(&plan, count))) {
        plan = with_jobs(&plan, count);
    }
    let scripted = |faults: &[NthPacket]| {
        let mut plan = plan.clone();
        plan.faults.script = Some(faults.to_vec());
        plan
    };
    let plan = scripted(&fewest(&faults, |faults| fails(&scripted(faults))));
    Some(TenantsShrunk { plan, recorded: faults.len(), violation, runs })
}

impl fmt::Display for TenantsShrunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, violation, runs, recorded } = self;
        let jobs = plan.jobs.len();
        let script = plan.faults.script.as_deref().unwrap_or_default();
        writeln!(
            f,
            "/// {jobs} jobs, {} losses, {} of {recorded} faults, found in {runs} runs:",
            plan.incidents.len(),
            script.len()
        )?;
        writeln!(f, "/// {}.", violation.to_string().replace('\n', " "))?;
        writeln!(f, "#[test]\nfn tenants_{}() {{", plan.seed)?;
        let draw = match (plan.starts, plan.shares_hosts, plan.has_stripes) {
            (true, ..) => "draw_started",
            (_, true, _) => "draw_hosts",
            (.., true) => "draw_stripes",
            _ => "draw",
        };
        writeln!(f, "    let mut plan = Tenancy::{draw}({});", plan.seed)?;
        writeln!(f, "    plan.jobs.truncate({jobs});")?;
        if plan.strike.is_none() {
            writeln!(f, "    plan.strike = None;")?;
        }
        writeln!(f, "    plan.incidents = vec![")?;
        for (at, incident) in &plan.incidents {
            writeln!(f, "        (Duration::from_nanos({}), Incident::{}),", at.as_nanos(), Code(*incident))?;
        }
        writeln!(f, "    ];\n    plan.faults.script = Some(vec![")?;
        for NthPacket { from, to, nth, verdict } in script {
            let verdict = super::shrink::Code(*verdict);
            writeln!(
                f,
                "        NthPacket {{ from: Addr::{from:?}, to: Addr::{to:?}, nth: {nth}, verdict: {verdict} }},"
            )?;
        }
        writeln!(f, "    ]);")?;
        if let Some(bug) = plan.planted.code() {
            writeln!(f, "    plan.planted = {bug};")?;
        }
        writeln!(f, "    run_tenants(&plan).unwrap();\n}}")
    }
}

/// An incident as code.
struct Code(Incident);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = |len: std::time::Duration| format!("Duration::from_nanos({})", len.as_nanos());
        match self.0 {
            Incident::Die(device, len) => write!(f, "Die({device}, {})", ns(len)),
            Incident::Stall(device, len) => write!(f, "Stall({device}, {})", ns(len)),
            Incident::Mute(device, shard, len) => write!(f, "Mute({device}, {shard}, {})", ns(len)),
            Incident::Block(job, rank, len, asks) => write!(f, "Block({job}, {rank}, {}, {asks})", ns(len)),
            Incident::Succeed(len) => write!(f, "Succeed({})", ns(len)),
            Incident::Controller(len) => write!(f, "Controller({})", ns(len)),
            other => write!(f, "{other:?}"),
        }
    }
}
