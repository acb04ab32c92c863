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

use super::State;
use super::job::Job;
use super::placement::{Draft, NoTree};
use super::plan::{Goal, JobSnapshot, Plan, PlanResult};
use crate::controller::ControllerConfig;
use crate::controller::admit::{GroupIds, Placement};
use crate::controller::device::Device;
use crate::controller::queue::{BlockedOn, Candidate, EntryStatus, Reservations};
use crate::plan::KeptIndex;
use std::collections::VecDeque;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::{Epoch, GroupId};

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

/// A job to be placed.
#[derive(Debug, Clone)]
pub(super) struct PlaceJob {
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
    /// What plans share of the fabric.
    pub(super) index: KeptIndex,
}

impl Goal {
    /// The job's name.
    fn job(&self) -> &str {
        match self {
            Self::PlaceJob { task, .. } => &task.name,
            Self::Enqueue { name, .. } => name,
            Self::Serve(candidate) => &candidate.job,
        }
    }
}

impl Job {
    /// Whether the job may be queued: it has no tree, and none is being reserved.
    const fn may_queue(&self) -> bool {
        self.placing.is_none() && (matches!(self.placement, Some(Err(_))) || self.join_waits_until.is_some())
    }
}

impl State {
    /// What plans share of the fabric.
    pub(in crate::controller) const fn index(&mut self) -> &mut KeptIndex {
        &mut self.planning.index
    }

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
        job.narrow.forget_old(self.now);
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
    }

    fn push_task(&mut self, task: Task) {
        self.planning.tasks.push_back(task);
    }

    /// Whether a plan is pending.
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

    fn plan(&self, goal: Goal, mut job: JobSnapshot, reservations: Reservations, ids: GroupIds) -> Plan {
        job.hosts.retain(|host| self.links.is_responsive(&host.device));
        let name = goal.job();
        (job.siblings, job.of_other_rails) = (self.sibling_trees(name), self.devices_of_other_rails(name));
        let (devices, ledger) = (self.devices.clone(), self.ledger.for_communicator(job.tenant(), job.communicator()));
        let (devices_version, backed_off) = (self.planning.devices_version, self.crash_loops.backed_off());
        let names_of = |is_one: &dyn Fn(&Device) -> bool| {
            let all = self.devices.values().filter(|device| is_one(device));
            all.map(|device| device.name().to_owned()).collect()
        };
        let unresponsive = names_of(&|device| !self.links.is_responsive(device));
        let overdue = names_of(&|device| self.links.has_overdue_stats(device));
        let (index, draining) = (self.planning.index.clone(), self.drain_reasons());
        Plan {
            goal,
            job,
            devices,
            devices_version,
            index,
            ledger,
            reservations,
            backed_off,
            unresponsive,
            overdue,
            draining,
            ids,
        }
    }

    /// Apply the result of a plan, if it is still valid.
    pub(in crate::controller) fn apply_plan(
        &mut self,
        config: &ControllerConfig,
        PlanResult { plan, found }: PlanResult,
    ) {
        let Plan { goal, job: JobSnapshot { secret, shape, .. }, devices_version, ledger, ids, .. } = plan;
        if let Some(job) = self.jobs.get_mut(goal.job()).filter(|job| job.secret == secret) {
            job.shape = job.shape.or(shape);
        }
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
                if self.jobs.get(&name).is_some_and(|job| job.secret == secret && job.may_queue()) {
                    self.finish_enqueue_plan(&name, tried, found);
                }
            }
            Goal::Serve(candidate) => self.finish_serve_plan(&candidate, found),
        }
    }

    /// Whether the devices of a placement are still connected and have the resources.
    fn can_claim(&self, name: &str, placement: &Placement) -> bool {
        let tenant = self.jobs.get(name).map_or("", Job::tenant);
        let may_use = !placement.nodes.iter().any(|node| self.is_draining(&node.device));
        may_use && self.has_devices(placement) && self.ledger.check_claim(&placement.claim(tenant)).is_ok()
    }

    pub(super) fn has_devices(&self, placement: &Placement) -> bool {
        placement.nodes.iter().all(|node| self.is_connected(&node.device))
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
            job.make_offer(&mut self.output);
        }
    }
}
