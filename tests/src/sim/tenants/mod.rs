//! Worlds of tenants: the controller's own decisions, jobs with rank sets of their own on shared devices, and trees that
//! are lost and come back.
//!
//! Production code: the controller's state, books, queue, planner and leases, without its threads
//! ([`sumac::controller::rehearsal`]); devices; endpoints; where ranks move to an offered tree
//! ([`sumac::comm::rehearsal`]); what a repair gives and lands. A model: what a rank waits for (`job`, `client`), how
//! letters travel (`wire`), and schedules, which are done at once when all are there.
//!
//! Drawn: 1 to 64 devices on a fabric of 1 to 4 levels, or without one; their groups, children, slots and memory; up to
//! four tenants with quotas of groups, slots and memory; up to 14 jobs of 1 to 256 ranks that come one after the other and
//! want more than there is; how long they wait, whether they move, what they call and how long they think; leases of 1 to
//! 9 s; clocks; how long letters take; faults of links; devices that die and come back, do not answer their controller for
//! a while, refuse, or lose their connection; a controller that is away and forgets everything; ranks that die or are cut
//! off from it. All may fall into a reservation, an offer or a move. Each kind is off in most runs. At the end everything
//! is healed, and has to end.
//!
//! Oracles: a tree is on all its nodes or on none; nobody is over a quota, and no device over what it has; of jobs that
//! want the same, who waits longer comes first, and nobody is passed over more than eight times; every rank knows its
//! job's place in the queue, and has a tree or a reason; nobody waits while everything is free; a lease ends neither
//! before its time nor never: at the end devices and books are empty; operations end bit by bit right, or the job has lost
//! a rank, and then chunks are whole.

mod client;
mod device;
mod draw;
mod job;
mod report;
mod watch;
mod wire;
mod world;

use super::shrink::fewest;
use device::{Device, Tables};
pub use draw::{JobPlan, Room, Tenancy, Trouble};
pub use report::TenantReport;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use sumac_hal::emu::NthPacket;
use world::World;

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{oracle}: {what}")]
pub struct TenantViolation {
    /// What found it, in a few words.
    pub oracle: &'static str,
    /// What it has found.
    pub what: String,
}

/// Run a world to its end.
///
/// # Errors
/// The first [`TenantViolation`].
pub fn run_tenants(plan: &Tenancy) -> Result<TenantReport, TenantViolation> {
    record_tenants(plan).0
}

/// Run a world to its end, and return also what its links did wrong.
pub fn record_tenants(plan: &Tenancy) -> (Result<TenantReport, TenantViolation>, Vec<NthPacket>) {
    let lives = 2 + plan.ills.iter().filter(|(_, ill)| matches!(ill, Trouble::Die(..))).count();
    let mut tables: Vec<Tables> = plan.rooms.iter().flat_map(|room| (0..lives).map(|_| Tables::new(room))).collect();
    let mut lent = tables.iter_mut();
    let devices =
        (0..plan.rooms.len()).map(|index| Device::new(plan, index, lent.by_ref().take(lives).collect())).collect();
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

/// A failing world with as little in it as was found to be enough.
#[derive(Debug, Clone)]
pub struct TenantsShrunk {
    /// The world: its faults are a script.
    pub plan: Tenancy,
    /// How many faults its links had at first.
    pub recorded: usize,
    /// How it fails.
    pub violation: TenantViolation,
    /// How many runs it took.
    pub runs: usize,
}

/// Shrink a world, in at most `runs_max` runs: what is lost, jobs from the last one on, and the links' faults. `None` if it
/// passes.
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
    let with_ills = |plan: &Tenancy, ills: &[_]| Tenancy { ills: ills.to_vec(), ..plan.clone() };
    plan = with_ills(&plan, &fewest(&plan.ills.clone(), |ills| fails(&with_ills(&plan, ills))));
    // Those that are left keep their numbers.
    let count = plan.jobs.len();
    let with_jobs = |plan: &Tenancy, count: usize| {
        let mut plan = plan.clone();
        plan.jobs.truncate(count);
        plan.ills.retain(|(_, ill)| !matches!(ill, Trouble::Kill(job, _) | Trouble::CutRank(job, _) if *job >= count));
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
            plan.ills.len(),
            script.len()
        )?;
        writeln!(f, "/// {}.", violation.to_string().replace('\n', " "))?;
        writeln!(f, "#[test]\nfn tenants_{}() {{", plan.seed)?;
        writeln!(f, "    let mut plan = Tenancy::draw({});", plan.seed)?;
        writeln!(f, "    plan.jobs.truncate({jobs});")?;
        writeln!(f, "    plan.ills = vec![")?;
        for (at, ill) in &plan.ills {
            writeln!(f, "        (Duration::from_nanos({}), Trouble::{}),", at.as_nanos(), Code(*ill))?;
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

/// A trouble as code.
struct Code(Trouble);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = |len: std::time::Duration| format!("Duration::from_nanos({})", len.as_nanos());
        match self.0 {
            Trouble::Die(device, len) => write!(f, "Die({device}, {})", ns(len)),
            Trouble::Stall(device, len) => write!(f, "Stall({device}, {})", ns(len)),
            Trouble::Controller(len) => write!(f, "Controller({})", ns(len)),
            other => write!(f, "{other:?}"),
        }
    }
}
