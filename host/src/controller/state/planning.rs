//! Planning. Its time grows with the fabric, so it works on a snapshot with the state unlocked.
//!
//! ```text
//!   State::next_plan -- Plan (snapshot) --> Plan::run, unlocked --> State::apply_plan: still valid? -- yes --> done
//!                                                                        | no
//!                                                                        v
//!                                                                    planned again, a few times
//! ```
//!
//! There is one planner, so between planning and claiming, only the retry of a draft can claim anything.
//!
//! When a result arrives, the state may have changed:
//! - A tree is accepted only if its job still waits for it and its devices are still connected. A failure is accepted
//!   only if the set of devices has not changed. Otherwise the job is planned again.
//! - A job that is planned again too often counts as tried with the ledger of the snapshot.
//! - A queued job is served only if no job ahead of it has become a candidate meanwhile. Under constant change, a tree
//!   that fits is accepted after a few plans.

use super::placement::{NoTree, Wait};
use super::{Draft, Job, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::{Devices, GroupIds, Placement, PlacementRequest, draft};
use crate::controller::device::DeviceSession;
use crate::controller::proto::JoinRequest;
use crate::controller::queue::{BlockedOn, Candidate, EntryStatus, Reservations};
use crate::controller::resources::{ResourceLedger, Shortage};
use crate::plan::Child;
use crate::schedule::tree::Tree;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::{Epoch, GroupId, Rank};

/// How often a plan is repeated because the state has changed meanwhile.
const PLANS_MAX: u32 = 4;

/// How long resources stay claimed for an offered tree that the job does not accept.
const OFFER_LIMIT: Duration = Duration::from_secs(60);

/// A pending task of the planner.
#[derive(Debug)]
enum Task {
    /// Plan a tree for a job whose ranks have all requested one.
    PlaceJob(PlaceJob),
    /// Find out what a job waits for, and queue it. `tried`: the ledger's version that it counts as tried with.
    Enqueue { name: String, tried: Option<u64> },
}

#[derive(Debug, Clone)]
struct PlaceJob {
    name: String,
    ids: GroupIds,
    /// How many trees and plans failed before.
    tries: u32,
    plans: u32,
    /// Joining has timed out: plan only to find the reason, since other jobs come first for the resources.
    wait_expired: bool,
}

/// The state of the planner.
#[derive(Debug, Default)]
pub(super) struct Planning {
    tasks: VecDeque<Task>,
    /// Whether the queue must be served.
    queue_is_due: bool,
    /// How many plans in a row were overtaken by changes in the queue.
    overtaken: u32,
    /// Incremented whenever a device connects, disconnects, or becomes eligible again.
    pub(super) devices_version: u64,
}

/// The parts of a job that a plan depends on.
#[derive(Debug)]
struct JobSnapshot {
    /// Distinguishes the job from earlier and later ones of the same name.
    token: u64,
    world: u32,
    requests: Vec<Arc<JoinRequest>>,
    pinned: Vec<String>,
    lost_devices: Vec<Arc<DeviceSession>>,
    declined_devices: Vec<Arc<DeviceSession>>,
    expression: Option<Tree>,
}

/// A plan to be made, with a snapshot of all that it depends on.
#[derive(Debug)]
pub(in crate::controller) struct Plan {
    goal: Goal,
    job: JobSnapshot,
    devices: Devices,
    devices_version: u64,
    ledger: ResourceLedger,
    reservations: Reservations,
    /// Devices in crash-loop backoff.
    backed_off: BTreeSet<String>,
    ids: GroupIds,
}

#[derive(Debug)]
enum Goal {
    PlaceJob { task: PlaceJob, was_held: bool },
    Enqueue { name: String, tried: Option<u64> },
    Serve(Candidate),
}

/// The result of a plan.
pub(in crate::controller) struct PlanResult {
    plan: Plan,
    found: Result<Placement, NoTree>,
}

impl Plan {
    /// Make the plan. Call it with the state unlocked.
    pub(in crate::controller) fn run(mut self, config: &ControllerConfig) -> PlanResult {
        #[cfg(test)]
        config.gate.pass();
        let mut found = match &self.goal {
            Goal::Serve(_) => self.draft_now(config).map_err(NoTree::permanent),
            _ => self.draft_or_explain(config),
        };
        if let (Goal::PlaceJob { .. }, Err(none)) = (&self.goal, &mut found) {
            none.wait_running = self.wait_running(config, none.wait.clone());
        }
        PlanResult { plan: self, found }
    }

    /// What the job could wait for while it runs without a tree: a declared order is then that of one node with all
    /// ranks, which few trees preserve.
    fn wait_running(&mut self, config: &ControllerConfig, wait: Option<Wait>) -> Option<Wait> {
        let order = self.job.requests.first().map_or(Order::Arrival, |request| request.order);
        if wait.is_none() || self.job.expression.is_some() || order == Order::Arrival {
            return wait;
        }
        let flat = vec![(0..self.job.world).map(|rank| Child::Rank(Rank(rank))).collect()];
        self.job.expression = Tree::new(flat, self.job.world, order).ok();
        match self.draft_or_explain(config) {
            Ok(placement) => Some((BlockedOn::Devices, placement.minimum_needs())),
            Err(none) => none.wait,
        }
    }

    fn requests(&self) -> Vec<&JoinRequest> {
        self.job.requests.iter().map(Arc::as_ref).collect()
    }

    fn tenant(&self) -> &str {
        self.job.requests.first().map_or("", |request| &request.terms.tenant)
    }

    /// Draft a tree for the job, or find out why there is none and what it could wait for.
    fn draft_or_explain(&self, config: &ControllerConfig) -> Result<Placement, NoTree> {
        let requests = self.requests();
        let (tenant, ledger) = (self.tenant(), &self.ledger);
        let request = PlacementRequest { tenant, requests: &requests, pinned: &self.job.pinned };
        let (devices, left_out) = self.eligible_devices().map_err(NoTree::permanent)?;
        let add = |why: String| if left_out.is_empty() { why } else { format!("{why}; {left_out}") };
        let drafted = |devices: &Devices, ledger: &ResourceLedger| {
            draft(config, devices, ledger, request, self.ids).and_then(|placement| self.job.check_order(placement))
        };
        let tenant_reservation = self.reservations.tenants.get(tenant);
        let why = match self.draft_now(config) {
            Ok(placement) => return Ok(placement),
            Err(why) => why,
        };
        // Could it have a tree if it were alone?
        let Ok(ideal) = drafted(&devices, &ledger.without_claims()) else {
            // Not even then: because of its quota, or for the reason in `why`.
            let short = drafted(&devices, &ledger.without_claims().without_quotas())
                .map(|ideal| ledger.without_claims().check(tenant, &ideal.minimum_needs()));
            return Err(NoTree::permanent(match short {
                Ok(Err(short)) => short.to_string(),
                _ => add(why),
            }));
        };
        let least = ideal.minimum_needs();
        let reserved_for =
            least.iter().find_map(|(device, _)| self.reservations.devices.get(device)).or(tenant_reservation);
        let (blocked_on, why) = match (reserved_for, ledger.check(tenant, &least)) {
            (_, Err(short)) if short.is_quota() => (BlockedOn::Quota, short.to_string()),
            (Some(other), _) => {
                let blocked_on = if tenant_reservation.is_some() { BlockedOn::Quota } else { BlockedOn::Devices };
                (blocked_on, format!("its resources are reserved for job {other:?}, which was skipped too often"))
            }
            (None, Err(short @ Shortage::Device { what: "groups", .. })) => (BlockedOn::Devices, short.to_string()),
            (None, _) => (BlockedOn::Devices, why),
        };
        Err(NoTree::temporary(add(why), Some((blocked_on, least))))
    }

    /// Draft a tree for the job with what is available now.
    fn draft_now(&self, config: &ControllerConfig) -> Result<Placement, String> {
        let requests = self.requests();
        let request = PlacementRequest { tenant: self.tenant(), requests: &requests, pinned: &self.job.pinned };
        if let Some(other) = self.reservations.tenants.get(request.tenant) {
            return Err(format!("resources are reserved for job {other:?} of the same tenant"));
        }
        let (mut devices, _) = self.eligible_devices()?;
        devices.retain(|_, device| !self.reservations.devices.contains_key(&device.key()));
        let drafted = |devices: &Devices| {
            draft(config, devices, &self.ledger, request, self.ids)
                .and_then(|placement| self.job.check_order(placement))
        };
        // Prefer devices that are not overdue with a response: each of the others may cost the job a timeout.
        let mut prompt = devices.clone();
        prompt.retain(|_, device| !device.has_overdue_stats());
        if prompt.len() < devices.len()
            && let Ok(placement) = drafted(&prompt)
        {
            return Ok(placement);
        }
        drafted(&devices)
    }

    /// The devices that the job may be placed on, and a clause that names the excluded ones. Fails with the reason if a
    /// pinned device is excluded.
    fn eligible_devices(&self) -> Result<(Devices, String), String> {
        let pinned = &self.job.pinned;
        let mut left_out = String::new();
        let mut leave_out = |devices: Devices, why: [&str; 2], is_out: &dyn Fn(&Arc<DeviceSession>) -> bool| {
            let (out, rest): (Devices, Devices) = devices.into_iter().partition(|(_, device)| is_out(device));
            if let Some(name) = pinned.iter().find(|name| out.contains_key(*name)) {
                return Err(format!("device {name} is pinned, but {}", why[1]));
            }
            if !out.is_empty() {
                let names: Vec<&str> = out.keys().map(String::as_str).collect();
                let between = if left_out.is_empty() { "" } else { "; " };
                left_out.push_str(&format!("{between}excluded devices ({}): {}", why[0], names.join(", ")));
            }
            Ok(rest)
        };
        let is_among = |known: &[Arc<DeviceSession>], device: &Arc<DeviceSession>| {
            known.iter().any(|other| Arc::ptr_eq(other, device))
        };
        let lost = ["tree lost", "its tree was lost; restart the device to use it again"];
        let devices = leave_out(self.devices.clone(), lost, &|device| is_among(&self.job.lost_devices, device))?;
        let devices = leave_out(devices, ["not responding", "it does not respond"], &|device| !device.is_responsive())?;
        let crash_loop = ["crash loop", "it is in a crash loop: its connections keep ending soon after they begin"];
        let devices = leave_out(devices, crash_loop, &|device| self.backed_off.contains(device.name()))?;
        let declined = ["attach failed", "a rank could not attach to it"];
        let devices = leave_out(devices, declined, &|device| is_among(&self.job.declined_devices, device))?;
        Ok((devices, left_out))
    }
}

impl Job {
    /// Whether the job may be queued: it has no tree, and none is being reserved.
    const fn may_queue(&self) -> bool {
        self.placing.is_none() && (matches!(self.placement, Some(Err(_))) || self.join_waits_until.is_some())
    }
}

impl JobSnapshot {
    fn of(job: &Job) -> Self {
        Self {
            token: job.mesh_token,
            world: job.world,
            requests: job.members.values().map(|member| Arc::clone(&member.request)).collect(),
            pinned: job.first().map_or_else(Vec::new, |member| member.pinned.clone()),
            lost_devices: job.lost_devices.clone(),
            declined_devices: job.declined_devices.clone(),
            expression: job.expression.clone(),
        }
    }

    /// Accept a placement only if it evaluates the job's declared expression.
    fn check_order(&self, placement: Placement) -> Result<Placement, String> {
        let Some(declared) = &self.expression else { return Ok(placement) };
        let order = self.requests.first().map_or(Order::Arrival, |request| request.order);
        if Tree::new(placement.expression(), self.world, order).is_ok_and(|tree| tree == *declared) {
            return Ok(placement);
        }
        let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
        Err(format!("a tree on {} would reduce in a different order than the declared one", devices.join(", ")))
    }
}

impl State {
    /// Plan a tree for a job whose ranks have all requested one.
    pub(super) fn request_tree(&mut self, name: &str, tries: u32) {
        self.push_placement(name, tries, false);
    }

    /// Start a job without a tree because joining has timed out, with the current reason.
    pub(super) fn request_reason(&mut self, name: &str) {
        self.push_placement(name, 0, true);
    }

    fn push_placement(&mut self, name: &str, tries: u32, wait_expired: bool) {
        let ids = self.next_ids(name);
        let Some(job) = self.jobs.get_mut(name) else { return };
        // Clearing this voids the plan.
        job.placing = Some(ids.group);
        self.push_task(Task::PlaceJob(PlaceJob { name: name.to_owned(), ids, tries, plans: 0, wait_expired }));
    }

    /// Queue a job that has no tree, if waiting could help. It is reconsidered once the ledger's version differs from
    /// `tried`, or at once if `None`.
    pub(super) fn enqueue(&mut self, name: &str, tried: Option<u64>) {
        let is_same = |task: &Task| match task {
            Task::Enqueue { name: other, tried: known } => other == name && *known == tried,
            Task::PlaceJob(_) => false,
        };
        if self.planning.tasks.iter().any(is_same) {
            return;
        }
        self.push_task(Task::Enqueue { name: name.to_owned(), tried });
    }

    /// Serve the queue with what is available.
    pub(super) fn serve_queue(&mut self) {
        self.planning.queue_is_due = true;
        self.wake.notify_all();
    }

    fn push_task(&mut self, task: Task) {
        self.planning.tasks.push_back(task);
        self.wake.notify_all();
    }

    /// Whether a plan is pending.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn has_plans(&self) -> bool {
        self.planning.queue_is_due || !self.planning.tasks.is_empty()
    }

    /// The next plan to make.
    pub(in crate::controller) fn next_plan(&mut self) -> Option<Plan> {
        while let Some(task) = self.planning.tasks.pop_front() {
            if let Some(plan) = self.plan_of(task) {
                return Some(plan);
            }
        }
        while self.planning.queue_is_due {
            let Some(candidate) = self.queue.candidate(&self.ledger) else {
                self.planning.queue_is_due = false;
                self.report_queue_positions();
                return None;
            };
            let name = candidate.job.clone();
            let ids = self.next_ids(&name);
            match self.jobs.get(&name).filter(|job| job.can_take_offer() || job.join_waits_until.is_some()) {
                Some(job) => {
                    let (job, reservations) = (JobSnapshot::of(job), self.queue.reservations(&name));
                    return Some(self.plan(Goal::Serve(candidate), job, reservations, ids));
                }
                None => drop(self.queue.try_serve(&mut self.ledger, &candidate, None)),
            }
        }
        None
    }

    fn plan_of(&mut self, task: Task) -> Option<Plan> {
        match task {
            Task::PlaceJob(task) => {
                let ids = task.ids;
                let job = self.jobs.get_mut(&task.name).filter(|job| job.placing == Some(ids.group))?;
                let held = job.offer_claim.take();
                let view = JobSnapshot::of(job);
                if let Some((group, _)) = held {
                    self.ledger.free(group);
                }
                // Resources that were claimed for its offer are its own, whatever reservations exist by now.
                let reservations =
                    if held.is_some() { Reservations::default() } else { self.queue.reservations(&task.name) };
                let goal = Goal::PlaceJob { task, was_held: held.is_some() };
                Some(self.plan(goal, view, reservations, ids))
            }
            Task::Enqueue { name, tried } => {
                let view = JobSnapshot::of(self.jobs.get(&name).filter(|job| job.may_queue())?);
                let ids = self.ids(GroupId(0), Epoch::default());
                Some(self.plan(Goal::Enqueue { name, tried }, view, Reservations::default(), ids))
            }
        }
    }

    fn plan(&self, goal: Goal, job: JobSnapshot, reservations: Reservations, ids: GroupIds) -> Plan {
        let (devices, ledger) = (self.devices.clone(), self.ledger.clone());
        let (devices_version, backed_off) = (self.planning.devices_version, self.crash_loops.backed_off());
        Plan { goal, job, devices, devices_version, ledger, reservations, backed_off, ids }
    }

    /// Apply the result of a plan, if it is still valid.
    pub(in crate::controller) fn apply_plan(
        &mut self,
        config: &ControllerConfig,
        PlanResult { plan, found }: PlanResult,
    ) {
        let Plan { goal, job: JobSnapshot { token, .. }, devices_version, ledger, ids, .. } = plan;
        let is_same_world = devices_version == self.planning.devices_version;
        match goal {
            Goal::PlaceJob { mut task, was_held } => {
                if self.jobs.get(&task.name).is_none_or(|job| job.placing != Some(ids.group)) {
                    return;
                }
                let is_valid = match &found {
                    Ok(placement) => task.wait_expired || self.can_claim(&task.name, placement),
                    Err(_) => is_same_world,
                };
                if !is_valid && task.plans < PLANS_MAX {
                    task.plans += 1;
                    return self.push_task(Task::PlaceJob(task));
                }
                // If joining timed out although a tree fits, the job does not count as tried.
                let tried = Some(ledger.version()).filter(|_| !(task.wait_expired && found.is_ok()));
                self.finish_placement_plan(config, (&task, was_held), tried, found);
                if !is_same_world {
                    // A device that connected or disconnected during this plan found the job busy.
                    self.reconsider();
                }
            }
            Goal::Enqueue { name, tried } => {
                // The job may have ended or got a tree meanwhile.
                if self.jobs.get(&name).is_some_and(|job| job.mesh_token == token && job.may_queue()) {
                    self.finish_enqueue_plan(&name, tried, found);
                }
            }
            Goal::Serve(candidate) => self.finish_serve_plan(&candidate, found),
        }
    }

    /// Whether the devices of a placement are still connected and have the resources.
    fn can_claim(&self, name: &str, placement: &Placement) -> bool {
        let tenant = self.jobs.get(name).map_or("", Job::tenant);
        self.has_devices(placement) && self.ledger.check(tenant, &placement.claim(tenant).needs).is_ok()
    }

    fn has_devices(&self, placement: &Placement) -> bool {
        let is_there = |device: &Arc<DeviceSession>| {
            self.devices.get(device.name()).is_some_and(|known| Arc::ptr_eq(known, device))
        };
        placement.nodes.iter().all(|node| is_there(&node.device))
    }

    fn finish_placement_plan(
        &mut self,
        config: &ControllerConfig,
        (task, was_held): (&PlaceJob, bool),
        tried: Option<u64>,
        found: Result<Placement, NoTree>,
    ) {
        let name = task.name.as_str();
        let claimed = found.and_then(|placement| {
            if task.wait_expired {
                let wait = Some((BlockedOn::Devices, placement.minimum_needs()));
                return Err(NoTree::temporary("other jobs were ahead in the queue".to_owned(), wait));
            }
            let claim = placement.claim(self.jobs.get(name).map_or("", Job::tenant));
            let claimed = self.ledger.claim(claim.clone());
            claimed.map_err(|short| NoTree::permanent(short.to_string()))?;
            Ok((placement, claim))
        });
        let (placement, claim) = match claimed {
            Ok(claimed) => claimed,
            Err(none) => return self.proceed_without_tree(config, name, none, tried),
        };
        if !was_held {
            let ticket = self.queue.get(name).map(|entry| entry.ticket);
            let ticket = ticket.unwrap_or_else(|| self.queue.ticket());
            self.queue.record_grant(ticket, &claim, &mut self.ledger);
        }
        let Some(job) = self.jobs.get(name) else { return };
        let order = job.first().map_or(Order::Arrival, |member| member.request.order);
        let version = self.planning.devices_version;
        self.ready.push_back(Draft::new(name.to_owned(), placement, order, task.tries, version));
        self.wake.notify_all();
    }

    fn finish_enqueue_plan(&mut self, name: &str, tried: Option<u64>, found: Result<Placement, NoTree>) {
        if self.queue.get(name).is_some_and(|entry| entry.status != EntryStatus::Waiting) {
            // It was served meanwhile, and its resources are claimed.
            return;
        }
        let wait = match found {
            Ok(placement) => Some((BlockedOn::Devices, placement.minimum_needs())),
            Err(none) => none.wait,
        };
        let Some(job) = self.jobs.get(name) else { return };
        let accepts_migration =
            job.members.values().all(|member| member.request.terms.accepts_migration) || job.join_waits_until.is_some();
        match wait.filter(|_| accepts_migration) {
            Some(wait) => self.insert_in_queue(name, wait, tried),
            None => self.leave_queue(name),
        }
        self.serve_queue();
    }

    /// Whether another job has become first in the queue while this one was planned: freed resources belong to the
    /// first.
    fn is_overtaken(&mut self, name: &str) -> bool {
        let is_first = self.queue.candidate(&self.ledger).is_some_and(|first| first.job == name);
        let is_overtaken = !is_first && self.planning.overtaken < PLANS_MAX;
        self.planning.overtaken = if is_overtaken { self.planning.overtaken + 1 } else { 0 };
        is_overtaken
    }

    fn finish_serve_plan(&mut self, candidate: &Candidate, found: Result<Placement, NoTree>) {
        let name = candidate.job.as_str();
        if found.as_ref().is_ok_and(|placement| !self.has_devices(placement)) {
            // It does not count as tried, so it is planned again.
            return;
        }
        if found.is_ok() && self.is_overtaken(name) {
            return;
        }
        let job = self.jobs.get(name).filter(|job| job.can_take_offer() || job.join_waits_until.is_some());
        let placement = job.and_then(|job| Some((found.ok()?, job.tenant())));
        let claim = placement.as_ref().map(|(placement, tenant)| placement.claim(tenant));
        let placement = placement.map(|(placement, _)| placement);
        if !self.queue.try_serve(&mut self.ledger, candidate, claim) {
            return;
        }
        let until = self.now + OFFER_LIMIT;
        let (Some(job), Some(placement)) = (self.jobs.get_mut(name), placement) else { return };
        let group = placement.group;
        if job.join_waits_until.take().is_some() {
            job.placing = Some(group);
            let order = job.first().map_or(Order::Arrival, |member| member.request.order);
            let version = self.planning.devices_version;
            self.ready.push_back(Draft::new(name.to_owned(), placement, order, 0, version));
        } else {
            tracing::info!(job = name, view = job.view, "offering a tree");
            job.offer_claim = Some((group, until));
            job.make_offer();
        }
        self.wake.notify_all();
    }
}
