//! The oracles outside: who holds what, compared with who may; who comes first; who waits in vain.
//!
//! What devices hold is counted from what they were asked and have said, and what tenants may hold is what was drawn.

use super::TenantViolation as Violation;
use super::draw::Tenancy;
use super::job::{End, Phase};
use super::world::World;
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::controller::proto::{JobStatus, StatusReport, TreeMembership};
use sumac::controller::rehearsal::{Booked, Rehearsed};
use sumac_hal::ctrl::Order;
use sumac_hal::ids::GroupId;
use sumac_hal::time::Instant;

/// What a device holds for a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeldGroup {
    pub(super) slots: u64,
    pub(super) bytes: u64,
    pub(super) lease_ms: u32,
    /// The last valid packet, or renewal, by the device's clock.
    pub(super) heard: Instant,
}

/// What was seen of the controller.
#[derive(Default)]
pub(super) struct Watch {
    /// It has done something since.
    pub(super) is_stale: bool,
    pub(super) hash: u64,
    /// Where each group was created.
    created: BTreeSet<(GroupId, usize)>,
    jobs: BTreeMap<usize, Seen>,
    looks: u64,
    /// Since when somebody waits though nothing is taken.
    idle_since: Option<Instant>,
}

/// A job as it was seen last.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// At which look it came into the queue, if it is there.
    since: Option<u64>,
    /// The same, as long as it waits or is being served.
    entered: Option<u64>,
    /// The check at which it entered the queue, or got an offer straight from joining, if it has no tree yet.
    asked: Option<u64>,
    has: bool,
    /// Its ranks have been told something, and with it what a declared order means.
    runs: bool,
    /// Later ones of its tenant that got something while it waited.
    passed: u32,
}

impl Watch {
    /// The controller has forgotten everything.
    pub(super) fn controller_gone(&mut self) {
        self.jobs.clear();
        self.idle_since = None;
    }
}

fn violation(oracle: &'static str, what: String) -> Violation {
    Violation { oracle, what }
}

/// The index in a name such as `job7`.
fn index_in(name: &str, before: &str) -> usize {
    name.strip_prefix(before).and_then(|index| index.parse().ok()).expect("named so")
}

impl World<'_, '_> {
    /// Look at what the controller has done, if it has.
    pub(super) fn look(&mut self) -> Result<(), Violation> {
        if !std::mem::take(&mut self.watch.is_stale) {
            return self.check_idle();
        }
        let Some(controller) = &self.controller else { return Ok(()) };
        let (report, booked, is_settled) = (controller.report(), controller.booked(), controller.is_settled());
        self.check_quotas(&booked)?;
        self.check_order(&report)?;
        let has_backlog = self.devices.iter().any(|device| device.stalled_until > self.now);
        if is_settled && !has_backlog && self.is_silent() {
            self.check_kept(&booked)?;
            self.check_places(&report)?;
            let waits = report.jobs.iter().any(|job| job.queue.is_some());
            let is_whole = |device: &super::device::Device<'_>| device.conn.is_some() && device.held.is_empty();
            let is_idle = waits && booked.is_empty() && self.is_healed() && self.devices.iter().all(is_whole);
            self.watch.idle_since = is_idle.then(|| self.watch.idle_since.unwrap_or(self.now));
        } else {
            self.watch.idle_since = None;
        }
        let says = report.jobs.iter().map(|job| u64::from(job.view) << 8 | u64::from(job.queue.is_some()));
        self.watch.hash = says.fold(self.watch.hash, |hash, job| weight(&[hash, job]));
        self.check_idle()
    }

    /// Nobody waits for long while everything is free.
    fn check_idle(&self) -> Result<(), Violation> {
        let limit = 3 * self.plan.lease + Duration::from_secs(1);
        match self.watch.idle_since {
            Some(since) if self.now > since + limit => {
                let report = self.controller.as_ref().map(Rehearsed::report);
                let waits = report.iter().flat_map(|report| &report.jobs).find(|job| job.queue.is_some());
                Err(violation("waits for nothing", format!("for {limit:?}, and nothing is taken: {waits:?}")))
            }
            _ => Ok(()),
        }
    }

    /// No tenant is beyond its quota, and no device beyond what it has: by the books, and by what devices were given.
    fn check_quotas(&self, booked: &[Booked]) -> Result<(), Violation> {
        let mut groups: BTreeMap<&str, BTreeSet<GroupId>> = BTreeMap::new();
        let mut slots: BTreeMap<(&str, usize), [u64; 4]> = BTreeMap::new();
        for entry in booked {
            let index = index_in(&entry.device, "d");
            let device = &self.devices[index];
            groups.entry(&entry.tenant).or_default().insert(entry.group);
            if device.boot_id() != entry.boot_id {
                continue;
            }
            let held = device.held.get(&entry.group).map_or([0; 2], |held| [held.slots, held.bytes]);
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
        for (tenant, groups) in groups {
            let quota = self.plan.quotas[index_in(tenant, "tenant")];
            within(groups.len() as u64, quota.groups, &|| format!("groups of {tenant}"))?;
        }
        for ((tenant, index), [slots, bytes, slots_held, bytes_held]) in slots {
            let room = &self.plan.rooms[index];
            let quota = (!tenant.is_empty()).then(|| self.plan.quotas[index_in(tenant, "tenant")]);
            let limits = quota
                .map_or((Some(room.slots as u64), Some(room.bytes as u64)), |quota| (quota.slots, quota.memory_bytes));
            let what = |what: &str| format!("{what} of {tenant:?} on device {index}");
            within(slots.max(slots_held), limits.0, &|| what("slots"))?;
            within(bytes.max(bytes_held), limits.1, &|| what("bytes"))?;
        }
        Ok(())
    }

    /// Who comes first gets it first: of jobs of one tenant that want the same, the one that waits longer; and nobody is
    /// passed over for ever.
    fn check_order(&mut self, report: &StatusReport) -> Result<(), Violation> {
        self.watch.looks += 1;
        let look = self.watch.looks;
        let mut served = Vec::new();
        for status in &report.jobs {
            let index = index_in(&status.name, "job");
            let seen = self.watch.jobs.entry(index).or_default();
            // Who comes straight from joining has something when the devices have said so.
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
            // Who is being served keeps its place until it has its tree: a device may refuse it.
            match status.queue {
                None if status.is_offered => _ = seen.asked.get_or_insert(look),
                None => (seen.entered, seen.asked, seen.passed) = (None, None, 0),
                Some(_) => {
                    seen.entered.get_or_insert(look);
                    seen.asked.get_or_insert(look);
                }
            }
        }
        let waits: Vec<&JobStatus> = report.jobs.iter().filter(|job| job.queue.is_some()).collect();
        for (job, (came, asked), ran) in served {
            for status in &waits {
                let other = index_in(&status.name, "job");
                let plans = [&self.plan.jobs[job], &self.plan.jobs[other]];
                let first = self.watch.jobs[&other].since.unwrap_or(look);
                if came.is_some_and(|came| first >= came)
                    || first >= look
                    || plans[0].tenant != plans[1].tenant
                    || status.view > 0
                {
                    continue;
                }
                // What a declared order means is said once, and may be what only some trees do. Whom a device has refused is
                // not tried again before something has changed, and others are. Where devices hold what the books do not
                // know, who comes may find that it has just gone.
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
                seen.passed += 1;
                if self.plan.rooms.len() == 1 && seen.passed > PASSES_MAX {
                    let what = format!("job {other} was passed over {} times", seen.passed);
                    return Err(violation("passed over too often", what));
                }
            }
        }
        Ok(())
    }

    /// Devices that have heard everything hold nothing that nobody has booked: a tree is on all of its nodes or on none.
    fn check_kept(&self, booked: &[Booked]) -> Result<(), Violation> {
        for (index, device) in self.devices.iter().enumerate().filter(|(_, device)| !device.disturbed) {
            let is_booked =
                |group: &GroupId| booked.iter().any(|entry| entry.group == *group && entry.boot_id == device.boot_id());
            if let Some(group) = device.held.keys().find(|group| !is_booked(group)) {
                return Err(violation(
                    "kept on one node",
                    format!("device {index} holds {group}, which nobody has booked"),
                ));
            }
        }
        Ok(())
    }

    /// Each rank knows its job's place in the queue.
    fn check_places(&self, report: &StatusReport) -> Result<(), Violation> {
        for status in report.jobs.iter().filter(|status| status.running) {
            let job = index_in(&status.name, "job");
            let knows = |phase: &Phase| !matches!(phase, Phase::Away | Phase::Joining(_) | Phase::Ended(_));
            let ranks = self.jobs[job].ranks.iter().filter(|rank| rank.conn.is_some() && knows(&rank.phase));
            for rank in ranks {
                if rank.queue != status.queue {
                    let what = format!("job {job} is at {:?}, and a rank was told {:?}", status.queue, rank.queue);
                    return Err(violation("place in the queue", what));
                }
            }
        }
        Ok(())
    }

    /// Check what a device says that it holds.
    pub(super) fn check_held(&mut self, index: usize) -> Result<(), Violation> {
        let device = &self.devices[index];
        let Some(node) = &device.node else { return Ok(()) };
        let (stats, room) = (node.stats(), &self.plan.rooms[index]);
        let (slots, bytes) = device.held.values().fold((0, 0), |sum, held| (sum.0 + held.slots, sum.1 + held.bytes));
        let found = [u64::from(stats.groups), u64::from(stats.slots_used), stats.slot_memory_used_bytes];
        if found != [device.held.len() as u64, slots, bytes] || slots > room.slots as u64 || bytes > room.bytes as u64 {
            let what =
                format!("device {index} has {found:?} of groups, slots, bytes; {:?} were asked for", device.held);
            return Err(violation("conservation on a device", what));
        }
        device.held.keys().for_each(|group| _ = self.watch.created.insert((*group, index)));
        Ok(())
    }

    /// A tree that a rank is told is on all of its nodes.
    pub(super) fn check_reserved(&self, at: (usize, usize), tree: &TreeMembership) -> Result<(), Violation> {
        let report = self.controller.as_ref().map(Rehearsed::report);
        let placed = report.iter().flat_map(|report| &report.jobs).filter_map(|job| job.tree.as_ref()?.as_ref().ok());
        let nodes = placed.filter(|placed| placed.group == tree.group).flat_map(|placed| &placed.devices);
        let missing = |device: &&String| !self.watch.created.contains(&(tree.group, index_in(device, "d")));
        if let Some(device) = nodes.chain([&tree.leaf]).find(missing) {
            let what = format!("job {} has {} without a place on {device}", at.0, tree.group);
            return Err(violation("not on all nodes", what));
        }
        Ok(())
    }

    /// A rank ends as the scenario calls for.
    pub(super) fn check_rank_end(&mut self, at: (usize, usize), end: End) -> Result<(), Violation> {
        let job = &mut self.jobs[at.0];
        let all = self.plan.jobs[at.0].ops.len();
        let done = job.ranks[at.1].done;
        let is_right = match end {
            End::Done => done == all,
            End::Killed => true,
            End::RanksFailed => job.is_disturbed,
            End::NotJoined => job.is_disturbed || job.has_lost_controller,
        };
        if !is_right {
            let what = format!("job {} rank {} ended with {end:?} after {done} of {all} operations", at.0, at.1);
            return Err(violation("wrong end", what));
        }
        job.is_disturbed |= end != End::Done;
        Ok(())
    }

    /// When all is over, nobody holds anything, neither on devices nor in the books, and nobody waits.
    pub(super) fn check_end(&mut self) -> Result<(), Violation> {
        let left =
            |what: &str, found: &dyn std::fmt::Debug| Err(violation("left behind", format!("{what}: {found:?}")));
        let Some(controller) = &self.controller else { return left("controller", &"gone") };
        let (report, booked) = (controller.report(), controller.booked());
        if !booked.is_empty() {
            return left("in the books", &booked);
        }
        if !report.jobs.is_empty() || !controller.is_settled() {
            return left("jobs", &report.jobs);
        }
        if report.devices.len() != self.devices.len() {
            return left("devices", &report.devices.len());
        }
        for (index, device) in self.devices.iter().enumerate() {
            let stats = device.node.as_ref().map(|node| node.stats());
            let Some(stats) = stats else { return left("a device that is off", &index) };
            let held = (stats.groups, stats.slots_used, stats.slot_memory_used_bytes);
            if held != (0, 0, 0) {
                return left("groups, slots and bytes on a device", &(index, held));
            }
        }
        let quotas = report.tenants.iter().any(|tenant| tenant.groups > 0);
        if quotas { left("tenants", &report.tenants) } else { Ok(()) }
    }
}

impl Tenancy {
    /// Note what was drawn that shows nowhere else.
    pub(super) fn note(&self, seen: &mut crate::sim::coverage::Seen) {
        if self.ills.is_empty() {
            seen.note(Mark::NothingLost);
        }
    }
}

/// How often a job may be passed over.
const PASSES_MAX: u32 = 8;
