//! External oracles: resources held against quotas and capacities, queue order, and starvation.
//!
//! Resources held are derived from requests to devices and their replies; limits are those that were drawn.

use super::TenantViolation as Violation;
use super::device::ShardOf;
use super::draw::Tenancy;
use super::job::{End, Member, Phase};
use super::world::World;
use crate::oracle::weight;
use crate::sim::controller::incarnation_of;
use crate::sim::coverage::Mark;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::controller::machine::{ClaimRecord, ConnId};
use sumac::controller::proto::{JobStatus, StatusReport, TreeMembership};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::GroupId;
use sumac_hal::time::Instant;

/// Resources that a device holds for a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldGroup {
    pub(super) slots: u64,
    pub(super) bytes: u64,
    pub(super) lease_ms: u32,
    /// Time of the last valid packet or renewal, by the device's clock.
    pub(super) last_packet: Instant,
}

/// Observed state of the controller.
#[derive(Default)]
pub(super) struct Watch {
    /// It has acted since the last check.
    pub(super) is_stale: bool,
    pub(super) hash: u64,
    /// The connection on which each group was created first.
    creators: BTreeMap<GroupId, ConnId>,
    /// Devices on which each group was created.
    created: BTreeSet<(GroupId, usize)>,
    jobs: BTreeMap<usize, ObservedJob>,
    checks: u64,
    /// Since when a job waits although no resource is in use.
    idle_since: Option<Instant>,
}

/// Last observed state of a job.
#[derive(Debug, Clone, Default)]
struct ObservedJob {
    /// The check at which it entered the queue, if it is queued.
    since: Option<u64>,
    /// The same, while it waits or is being served.
    entered: Option<u64>,
    /// The check at which it entered the queue, or got an offer straight from joining, if it has no tree yet.
    asked: Option<u64>,
    has: bool,
    /// Its ranks have a reply, which fixes the meaning of a declared order.
    runs: bool,
    /// Later jobs of its tenant that were served while it waited.
    skipped: u32,
}

impl Watch {
    /// The controller has lost its state.
    pub(super) fn controller_gone(&mut self) {
        self.jobs.clear();
        self.idle_since = None;
    }
}

pub(super) fn violation(oracle: &'static str, what: String) -> Violation {
    Violation { oracle, what }
}

/// The index in a name such as `job7`.
pub(super) fn index_in(name: &str, before: &str) -> usize {
    name.strip_prefix(before).and_then(|index| index.parse().ok()).expect("named so")
}

impl World<'_, '_> {
    /// Check the controller's state if it has acted.
    pub(super) fn check_controller(&mut self) -> Result<(), Violation> {
        if !std::mem::take(&mut self.watch.is_stale) {
            return self.check_idle();
        }
        let Some(controller) = &self.controller else { return Ok(()) };
        let machine = &controller.machine;
        let (report, booked, has_no_drafts) = (machine.report(), machine.claims(), machine.has_no_drafts());
        self.check_quotas(&booked)?;
        self.check_host_devices(&report, &booked)?;
        self.check_trees(&report)?;
        self.check_order(&report)?;
        let has_backlog = self.devices.iter().any(|device| device.stalled_until > self.now);
        if has_no_drafts && !has_backlog && self.is_silent() {
            self.check_kept(&booked)?;
            self.check_places(&report)?;
            let waits = report.jobs.iter().any(|job| job.queue.is_some());
            let is_whole =
                |device: &super::device::Device<'_>| device.conn.is_some() && device.groups_held().next().is_none();
            let common = &self.devices[..self.plan.capacities.len()];
            let is_idle = waits && booked.is_empty() && self.is_healed() && common.iter().all(is_whole);
            self.watch.idle_since = is_idle.then(|| self.watch.idle_since.unwrap_or(self.now));
        } else {
            self.watch.idle_since = None;
        }
        let says = report.jobs.iter().map(|job| u64::from(job.view) << 8 | u64::from(job.queue.is_some()));
        self.watch.hash = says.fold(self.watch.hash, |hash, job| weight(&[hash, job]));
        self.check_idle()
    }

    /// No job waits for long while everything is free.
    fn check_idle(&self) -> Result<(), Violation> {
        let limit = 3 * self.plan.lease + Duration::from_secs(1);
        match self.watch.idle_since {
            Some(since) if self.now > since + limit => {
                let report = self.controller.as_ref().map(|controller| controller.machine.report());
                let waits = report.iter().flat_map(|report| &report.jobs).find(|job| job.queue.is_some());
                Err(violation("waits for nothing", format!("for {limit:?}, and nothing is taken: {waits:?}")))
            }
            _ => Ok(()),
        }
    }

    /// No tenant exceeds its quota and no device its capacity, according to both the ledger and the devices.
    fn check_quotas(&self, booked: &[ClaimRecord]) -> Result<(), Violation> {
        let mut communicators: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut slots: BTreeMap<(&str, usize), [u64; 4]> = BTreeMap::new();
        for entry in booked {
            let index = self.device_index(&entry.device);
            let device = &self.devices[index];
            communicators.entry(&entry.tenant).or_default().insert(&entry.communicator);
            if device.boot_id() != entry.boot_id {
                continue;
            }
            let held = device.held(entry.group);
            for tenant in [entry.tenant.as_str(), ""] {
                let sums = slots.entry((tenant, index)).or_default();
                let parts = [entry.slots, entry.memory_bytes, held[0], held[1]];
                sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
            }
        }
        let within = |found: u64, limit: Option<u64>, what: &dyn Fn() -> String| match limit {
            Some(limit) if found > limit => Err(violation("over a quota", format!("{}: {found} of {limit}", what()))),
            _ => Ok(()),
        };
        for (tenant, communicators) in communicators {
            let quota = self.plan.quotas[index_in(tenant, "tenant")];
            within(communicators.len() as u64, quota.groups, &|| format!("groups of {tenant}"))?;
        }
        for ((tenant, index), [slots, bytes, slots_held, bytes_held]) in slots {
            let capacity = self.plan.capacity(index);
            // Host devices are their tenant's own.
            if !tenant.is_empty() && index >= self.plan.capacities.len() {
                continue;
            }
            let quota = (!tenant.is_empty()).then(|| self.plan.quotas[index_in(tenant, "tenant")]);
            let limits = quota.map_or((Some(capacity.slots as u64), Some(capacity.bytes as u64)), |quota| {
                (quota.slots, quota.memory_bytes)
            });
            let what = |what: &str| format!("{what} of {tenant:?} on device {index}");
            within(slots.max(slots_held), limits.0, &|| what("slots"))?;
            within(bytes.max(bytes_held), limits.1, &|| what("bytes"))?;
        }
        Ok(())
    }

    /// Fair order: of a tenant's jobs with equal needs, the one that has waited longest is served first, and no job is
    /// skipped forever.
    fn check_order(&mut self, report: &StatusReport) -> Result<(), Violation> {
        self.watch.checks += 1;
        let look = self.watch.checks;
        let mut served = Vec::new();
        for status in &report.jobs {
            let index = self.plan.job_named(&status.name);
            let seen = self.watch.jobs.entry(index).or_default();
            // A job that comes straight from joining is served once the devices have replied.
            let is_given = status.is_offered && seen.entered.is_some();
            let has = is_given || matches!(status.tree, Some(Ok(_)));
            if has && !seen.has {
                served.push((index, (seen.since, seen.asked), seen.runs));
            }
            (seen.has, seen.runs) = (has, status.running);
            match status.queue {
                // A job that is being served keeps its place: a device may not answer.
                None if status.is_offered && !matches!(status.tree, Some(Ok(_))) => {}
                None => seen.since = None,
                Some(_) => _ = seen.since.get_or_insert(look),
            }
            // A job being served keeps its place until it has its tree: a device may refuse it.
            match status.queue {
                None if status.is_offered => _ = seen.asked.get_or_insert(look),
                None => (seen.entered, seen.asked, seen.skipped) = (None, None, 0),
                Some(_) => {
                    seen.entered.get_or_insert(look);
                    seen.asked.get_or_insert(look);
                }
            }
        }
        let waits: Vec<&JobStatus> = report.jobs.iter().filter(|job| job.queue.is_some()).collect();
        for (job, (came, asked), ran) in served {
            for status in &waits {
                let other = self.plan.job_named(&status.name);
                let plans = [&self.plan.jobs[job], &self.plan.jobs[other]];
                let first = self.watch.jobs[&other].since.unwrap_or(look);
                if came.is_some_and(|came| first >= came)
                    || first >= look
                    || plans[0].tenant != plans[1].tenant
                    || status.view > 0
                {
                    continue;
                }
                // The meaning of a declared order is fixed once, and may be one that only some trees support. A job
                // refused by a device is not retried before something changes, while others are. Where devices hold
                // more than the ledger knows, a job may find the resource just taken.
                let means_the_same = plans[0].order == Order::Arrival || ran == status.running;
                let refusals = [Mark::DeviceFull, Mark::DeviceRefuses].map(|mark| self.report.seen.count(mark));
                let is_disturbed = self.devices.iter().any(|device| device.disturbed) || refusals != [0; 2];
                let is_known = !is_disturbed && came.is_some();
                if plans[0].kind == plans[1].kind && means_the_same && is_known {
                    let what = format!(
                        "job {job} was served before job {other} of the same tenant and kind, which came first"
                    );
                    return Err(violation("order of the queue", what));
                }
                let seen = self.watch.jobs.entry(other).or_default();
                if asked.is_some_and(|asked| seen.asked.unwrap_or(look) >= asked) {
                    continue;
                }
                seen.skipped += 1;
                if self.plan.capacities.len() == 1 && seen.skipped > SKIPS_MAX {
                    let what = format!("job {other} was skipped {} times", seen.skipped);
                    return Err(violation("starvation", what));
                }
            }
        }
        Ok(())
    }

    /// Devices that have received everything hold only what is in the ledger: a tree is on all of its nodes or on none.
    fn check_kept(&self, booked: &[ClaimRecord]) -> Result<(), Violation> {
        for (index, device) in self.devices.iter().enumerate().filter(|(_, device)| !device.disturbed) {
            let is_booked =
                |group: &GroupId| booked.iter().any(|entry| entry.group == *group && entry.boot_id == device.boot_id());
            if let Some(group) = device.groups_held().find(|group| !is_booked(group)) {
                return Err(violation(
                    "kept on one node",
                    format!("device {index} holds {group}, which is not in the ledger"),
                ));
            }
        }
        Ok(())
    }

    /// Each rank knows its job's queue position.
    fn check_places(&self, report: &StatusReport) -> Result<(), Violation> {
        for status in report.jobs.iter().filter(|status| status.running) {
            let job = self.plan.job_named(&status.name);
            let knows = |phase: &Phase| !matches!(phase, Phase::Disconnected | Phase::Joining(_) | Phase::Ended(_));
            let is_here = |conn| self.controller.as_ref().is_some_and(|controller| controller.owns(conn));
            let reads = |rank: &Member| rank.conn.is_some_and(is_here) && rank.blocked_until <= self.now;
            let ranks = self.jobs[job].ranks.iter().filter(|rank| reads(rank) && knows(&rank.phase));
            for rank in ranks {
                if rank.queue != status.queue {
                    let what = format!("job {job} is at {:?}, but a rank has {:?}", status.queue, rank.queue);
                    return Err(violation("place in the queue", what));
                }
            }
        }
        Ok(())
    }

    /// No two controllers create a group of the same number: devices and ranks may still hold the other one's.
    pub(super) fn check_creator(&mut self, group: GroupId, conn: ConnId) -> Result<(), Violation> {
        let first = *self.watch.creators.entry(group).or_insert(conn);
        if incarnation_of(first) == incarnation_of(conn) {
            return Ok(());
        }
        Err(violation("group number reused", format!("{group} is created on {conn:?}, and was on {first:?}")))
    }

    /// Check the resources that a device reports.
    pub(super) fn check_held(&mut self, index: usize) -> Result<(), Violation> {
        let device = &self.devices[index];
        let capacity = self.plan.capacity(index);
        for ShardOf { node, held, .. } in &device.shards {
            let stats = node.stats();
            let (slots, bytes) = held.values().fold((0, 0), |sum, held| (sum.0 + held.slots, sum.1 + held.bytes));
            let found = [u64::from(stats.groups), u64::from(stats.slots_used), stats.slot_memory_used_bytes];
            if found != [held.len() as u64, slots, bytes]
                || slots > capacity.slots as u64
                || bytes > capacity.bytes as u64
            {
                let what = format!("device {index} has {found:?} of groups, slots, bytes; {held:?} were asked for");
                return Err(violation("conservation on a device", what));
            }
        }
        device.groups_held().for_each(|group| _ = self.watch.created.insert((*group, index)));
        Ok(())
    }

    /// A tree assigned to a rank is on all of its nodes.
    pub(super) fn check_reserved(&self, at: (usize, usize), tree: &TreeMembership) -> Result<(), Violation> {
        let report = self.controller.as_ref().map(|controller| controller.machine.report());
        let jobs = || report.iter().flat_map(|report| &report.jobs);
        let placed = jobs().filter_map(|job| job.tree.as_ref()?.as_ref().ok());
        let placed = placed.chain(jobs().flat_map(|job| &job.stripes).filter_map(|stripe| stripe.tree.as_ref().ok()));
        let nodes = placed.filter(|placed| placed.group == tree.group).flat_map(|placed| &placed.devices);
        let missing = |device: &&String| !self.watch.created.contains(&(tree.group, self.device_index(device)));
        if let Some(device) = nodes.chain([&tree.leaf]).find(missing) {
            let what = format!("job {} has {} without a place on {device}", at.0, tree.group);
            return Err(violation("not on all nodes", what));
        }
        Ok(())
    }

    /// A rank ends as the scenario requires.
    pub(super) fn check_rank_end(&mut self, at: (usize, usize), end: End) -> Result<(), Violation> {
        let is_job_disturbed = self.is_job_disturbed(at.0);
        let job = &mut self.jobs[at.0];
        let all = self.plan.jobs[at.0].ops.len();
        let done = job.ranks[at.1].done;
        let is_right = match end {
            End::Done => done == all,
            End::Killed => true,
            End::RanksFailed => job.is_disturbed,
            End::NotJoined => job.is_disturbed || job.has_lost_controller || is_job_disturbed,
        };
        if !is_right {
            let what = format!("job {} rank {} ended with {end:?} after {done} of {all} operations", at.0, at.1);
            return Err(violation("wrong end", what));
        }
        job.is_disturbed |= end != End::Done;
        Ok(())
    }

    /// At the end nothing is held, neither on devices nor in the ledger, and no job waits.
    pub(super) fn check_end(&mut self) -> Result<(), Violation> {
        let left =
            |what: &str, found: &dyn std::fmt::Debug| Err(violation("left behind", format!("{what}: {found:?}")));
        let Some(controller) = &self.controller else { return left("controller", &"gone") };
        let machine = &controller.machine;
        let (report, booked) = (machine.report(), machine.claims());
        if !booked.is_empty() {
            return left("in the ledger", &booked);
        }
        if !report.jobs.is_empty() || !machine.has_no_drafts() {
            return left("jobs", &report.jobs);
        }
        if report.devices.len() != self.plan.capacities.len() {
            return left("devices", &report.devices.len());
        }
        self.check_no_host_device()?;
        for (index, device) in self.devices.iter().enumerate().take(self.plan.capacities.len()) {
            let Some(held) = device.in_use() else { return left("a device that is off", &index) };
            if held != (0, 0, 0) {
                return left("groups, slots and bytes on a device", &(index, held));
            }
        }
        let quotas = report.tenants.iter().any(|tenant| tenant.groups > 0);
        if quotas { left("tenants", &report.tenants) } else { Ok(()) }
    }
}

impl Tenancy {
    /// Record drawn parameters that show nowhere else.
    pub(super) fn note(&self, seen: &mut crate::sim::coverage::Coverage) {
        if self.incidents.is_empty() && self.strike.is_none() {
            seen.note(Mark::NothingLost);
        }
    }
}

/// How often a job may be skipped.
const SKIPS_MAX: u32 = 8;
