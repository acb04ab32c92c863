//! Planning, which takes as long as the fabric is large: on a copy of what it looks at, with the state unlocked.
//!
//! ```text
//!   State::next_plan -- Plan (a copy) --> Plan::run, unlocked --> State::planned: still so? -- yes --> done
//!                                                                     | no
//!                                                                     v
//!                                                                 planned anew, a few times
//! ```
//!
//! There is one planner, so that nothing is claimed between plan and claim but by the retry of a draft. What it finds is
//! taken only if its job still waits for it and its devices are still connected; what it does not find only if no device has
//! come or gone meanwhile. Whoever is tried again and again counts as tried with the books as they were copied. Who waits
//! in the queue is served only if nobody before it has come to be looked at meanwhile; but in a world that never stands
//! still, what fitted is taken after a few plans.

use super::place::{NoTree, Wait};
use super::{Draft, Job, State};
use crate::controller::ControllerConfig;
use crate::controller::admit::{Asking, Devices, Ids, Placement, draft};
use crate::controller::books::{Books, Short};
use crate::controller::device::DeviceSession;
use crate::controller::proto::JoinRequest;
use crate::controller::queue::{Bars, Candidate, Scope, Standing};
use crate::plan::Child;
use crate::schedule::tree::Tree;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::ctrl::Order;
use sumac_hal::ids::{Epoch, GroupId, Rank};

/// How often a plan is made anew because the world has changed under it.
const PLANS_MAX: u32 = 4;

/// How long what an offered tree takes is held for a job that does not come.
const OFFER_LIMIT: Duration = Duration::from_secs(60);

/// What is to be planned.
#[derive(Debug)]
enum Task {
    /// A tree for a job whose ranks all want one: by that name, after so many trees and plans.
    Seek(Seek),
    /// What a job waits for in the queue; and with which books it counts as tried.
    Enter { name: String, tried: Option<u64> },
}

#[derive(Debug, Clone)]
struct Seek {
    name: String,
    ids: Ids,
    /// Trees and plans that came to nothing before.
    tries: u32,
    plans: u32,
    /// What it may have, others wait for, too, and come first: only the reason is wanted.
    is_too_late: bool,
}

/// What is to be planned, in order.
#[derive(Debug, Default)]
pub(super) struct Planning {
    tasks: VecDeque<Task>,
    /// Whether those who wait in the queue are to be looked at.
    pump_is_due: bool,
    /// How many plans in a row came too late for the order of the queue.
    overtaken: u32,
    /// Counts devices that have come or gone, or answer again.
    pub(super) devices_version: u64,
}

/// What of a job matters to a plan.
#[derive(Debug)]
struct JobView {
    /// Tells it from others of its name, before and after it.
    token: u64,
    world: u32,
    requests: Vec<Arc<JoinRequest>>,
    pinned: Vec<String>,
    lost: Vec<Arc<DeviceSession>>,
    declined: Vec<Arc<DeviceSession>>,
    expression: Option<Tree>,
}

/// What is asked for, and a copy of all that the answer depends on.
#[derive(Debug)]
pub(in crate::controller) struct Plan {
    goal: Goal,
    job: JobView,
    devices: Devices,
    devices_version: u64,
    books: Books,
    bars: Bars,
    /// Devices that are left alone.
    resting: BTreeSet<String>,
    ids: Ids,
}

#[derive(Debug)]
enum Goal {
    Seek { seek: Seek, was_held: bool },
    Enter { name: String, tried: Option<u64> },
    Serve(Candidate),
}

/// What came of it.
pub(in crate::controller) struct Planned {
    plan: Plan,
    found: Result<Placement, NoTree>,
}

impl Plan {
    /// Plan; the state is not locked meanwhile.
    pub(in crate::controller) fn run(mut self, config: &ControllerConfig) -> Planned {
        #[cfg(test)]
        config.gate.pass();
        let mut found = match &self.goal {
            Goal::Serve(_) => self.fits(config).map_err(NoTree::for_good),
            _ => self.fit(config),
        };
        if let (Goal::Seek { .. }, Err(none)) = (&self.goal, &mut found) {
            none.wait_running = self.wait_running(config, none.wait.clone());
        }
        Planned { plan: self, found }
    }

    /// Return what the job waits for when it runs without a tree: a declared order means all ranks below one node then, and
    /// few trees keep that.
    fn wait_running(&mut self, config: &ControllerConfig, wait: Option<Wait>) -> Option<Wait> {
        let order = self.job.requests.first().map_or(Order::Arrival, |request| request.order);
        if wait.is_none() || self.job.expression.is_some() || order == Order::Arrival {
            return wait;
        }
        let flat = vec![(0..self.job.world).map(|rank| Child::Rank(Rank(rank))).collect()];
        self.job.expression = Tree::new(flat, self.job.world, order).ok();
        match self.fit(config) {
            Ok(placement) => Some((Scope::Devices, placement.least())),
            Err(none) => none.wait,
        }
    }

    fn requests(&self) -> Vec<&JoinRequest> {
        self.job.requests.iter().map(Arc::as_ref).collect()
    }

    fn tenant(&self) -> &str {
        self.job.requests.first().map_or("", |request| &request.terms.tenant)
    }

    /// Draft a tree for the job, or say why there is none, and what it could wait for.
    fn fit(&self, config: &ControllerConfig) -> Result<Placement, NoTree> {
        let requests = self.requests();
        let (tenant, books) = (self.tenant(), &self.books);
        let asking = Asking { tenant, requests: &requests, pinned: &self.job.pinned };
        let (devices, left_out) = self.usable().map_err(NoTree::for_good)?;
        let add = |why: String| if left_out.is_empty() { why } else { format!("{why}; {left_out}") };
        let drafted = |devices: &Devices, books: &Books| {
            draft(config, devices, books, asking, self.ids).and_then(|placement| self.job.keeps_order(placement))
        };
        let barred = self.bars.tenants.get(tenant);
        let why = match self.fits(config) {
            Ok(placement) => return Ok(placement),
            Err(why) => why,
        };
        // Could it have one if nobody else were there?
        let Ok(ideal) = drafted(&devices, &books.emptied()) else {
            // Not even then: because of its quota, or for another reason, which is told.
            let short = drafted(&devices, &books.emptied().unlimited())
                .map(|ideal| books.emptied().check(tenant, &ideal.least()));
            return Err(NoTree::for_good(match short {
                Ok(Err(short)) => short.to_string(),
                _ => add(why),
            }));
        };
        let least = ideal.least();
        let kept_for = least.iter().find_map(|(device, _)| self.bars.devices.get(device)).or(barred);
        let (scope, why) = match (kept_for, books.check(tenant, &least)) {
            (_, Err(short)) if short.is_quota() => (Scope::Tenant, short.to_string()),
            (Some(other), _) => {
                let scope = if barred.is_some() { Scope::Tenant } else { Scope::Devices };
                (scope, format!("what it takes is kept for job {other:?}, which was passed over too often"))
            }
            (None, Err(short @ Short::Device { what: "groups", .. })) => (Scope::Devices, short.to_string()),
            (None, _) => (Scope::Devices, why),
        };
        Err(NoTree::for_now(add(why), Some((scope, least))))
    }

    /// Draft a tree for the job, or say why not, as far as that is known without a look at what could be.
    fn fits(&self, config: &ControllerConfig) -> Result<Placement, String> {
        let requests = self.requests();
        let asking = Asking { tenant: self.tenant(), requests: &requests, pinned: &self.job.pinned };
        if let Some(other) = self.bars.tenants.get(asking.tenant) {
            return Err(format!("job {other:?} of the same tenant is first"));
        }
        let (mut devices, _) = self.usable()?;
        devices.retain(|_, device| !self.bars.devices.contains_key(&device.key()));
        let drafted = |devices: &Devices| {
            draft(config, devices, &self.books, asking, self.ids).and_then(|placement| self.job.keeps_order(placement))
        };
        // Without those that are late with an answer, if that goes: each of them may cost the job the time to give it up.
        let mut prompt = devices.clone();
        prompt.retain(|_, device| !device.owes_stats());
        if prompt.len() < devices.len()
            && let Ok(placement) = drafted(&prompt)
        {
            return Ok(placement);
        }
        drafted(&devices)
    }

    /// Return the devices that the job may be placed on, and, if some are left out, a clause that names them. Fails, with the
    /// reason, if one of them is pinned.
    fn usable(&self) -> Result<(Devices, String), String> {
        let pinned = &self.job.pinned;
        let mut left_out = String::new();
        let mut leave_out = |devices: Devices, why: [&str; 2], is_out: &dyn Fn(&Arc<DeviceSession>) -> bool| {
            let (out, rest): (Devices, Devices) = devices.into_iter().partition(|(_, device)| is_out(device));
            if let Some(name) = pinned.iter().find(|name| out.contains_key(*name)) {
                return Err(format!("device {name} is pinned, and {}", why[1]));
            }
            if !out.is_empty() {
                let names: Vec<&str> = out.keys().map(String::as_str).collect();
                let between = if left_out.is_empty() { "" } else { "; " };
                left_out.push_str(&format!("{between}not asked, as {}: {}", why[0], names.join(", ")));
            }
            Ok(rest)
        };
        let is_among = |known: &[Arc<DeviceSession>], device: &Arc<DeviceSession>| {
            known.iter().any(|other| Arc::ptr_eq(other, device))
        };
        let lost = ["the tree there is lost", "the tree there is lost; a restart brings the device back"];
        let devices = leave_out(self.devices.clone(), lost, &|device| is_among(&self.job.lost, device))?;
        let devices = leave_out(devices, ["it does not answer"; 2], &|device| !device.answers())?;
        let rests = ["it has ended soon after it came, again and again"; 2];
        let devices = leave_out(devices, rests, &|device| self.resting.contains(device.name()))?;
        let declined = ["a rank could not attach to it"; 2];
        let devices = leave_out(devices, declined, &|device| is_among(&self.job.declined, device))?;
        Ok((devices, left_out))
    }
}

impl Job {
    /// Tell whether the queue is the place for it: it has no tree, and none is being made.
    const fn may_wait(&self) -> bool {
        self.placing.is_none() && (matches!(self.placement, Some(Err(_))) || self.waits_until.is_some())
    }
}

impl JobView {
    fn of(job: &Job) -> Self {
        Self {
            token: job.mesh_token,
            world: job.world,
            requests: job.members.values().map(|member| Arc::clone(&member.request)).collect(),
            pinned: job.first().map_or_else(Vec::new, |member| member.pinned.clone()),
            lost: job.lost.clone(),
            declined: job.declined.clone(),
            expression: job.expression.clone(),
        }
    }

    /// Let a placement pass that combines in the declared order of the job.
    fn keeps_order(&self, placement: Placement) -> Result<Placement, String> {
        let Some(declared) = &self.expression else { return Ok(placement) };
        let order = self.requests.first().map_or(Order::Arrival, |request| request.order);
        if Tree::new(placement.expression(), self.world, order).is_ok_and(|tree| tree == *declared) {
            return Ok(placement);
        }
        let devices: Vec<&str> = placement.nodes.iter().map(|node| node.device.name()).collect();
        Err(format!("a tree on {} would combine in another order than the declared one", devices.join(", ")))
    }
}

impl State {
    /// All ranks of a job are there and want a tree: one is planned, or the job placed without.
    pub(super) fn seek(&mut self, name: &str, tries: u32) {
        self.push_seek(name, tries, false);
    }

    /// A job's ranks have waited for a tree for too long: it is placed without, for the reason that there is now.
    pub(super) fn seek_reason(&mut self, name: &str) {
        self.push_seek(name, 0, true);
    }

    fn push_seek(&mut self, name: &str, tries: u32, is_too_late: bool) {
        let ids = self.next_ids(name);
        let Some(job) = self.jobs.get_mut(name) else { return };
        // What makes the plan void when the job does without.
        job.placing = Some(ids.group);
        self.push_task(Task::Seek(Seek { name: name.to_owned(), ids, tries, plans: 0, is_too_late }));
    }

    /// Let a job that has no tree wait for one, if there could be one; from the first change on after that version of the
    /// books, or at once.
    pub(super) fn enter_queue(&mut self, name: &str, tried: Option<u64>) {
        let is_same = |task: &Task| match task {
            Task::Enter { name: other, tried: known } => other == name && *known == tried,
            Task::Seek(_) => false,
        };
        if self.planning.tasks.iter().any(is_same) {
            return;
        }
        self.push_task(Task::Enter { name: name.to_owned(), tried });
    }

    /// Give what is free to those who wait for it.
    pub(super) fn pump(&mut self) {
        self.planning.pump_is_due = true;
        self.wake.notify_all();
    }

    fn push_task(&mut self, task: Task) {
        self.planning.tasks.push_back(task);
        self.wake.notify_all();
    }

    /// Tell whether something is to be planned.
    #[cfg(feature = "snapshot")]
    pub(in crate::controller) fn has_plans(&self) -> bool {
        self.planning.pump_is_due || !self.planning.tasks.is_empty()
    }

    /// Return what is to be planned next.
    pub(in crate::controller) fn next_plan(&mut self) -> Option<Plan> {
        while let Some(task) = self.planning.tasks.pop_front() {
            if let Some(plan) = self.plan_of(task) {
                return Some(plan);
            }
        }
        while self.planning.pump_is_due {
            let Some(candidate) = self.queue.candidate(&self.books) else {
                self.planning.pump_is_due = false;
                self.tell_queue();
                return None;
            };
            let name = candidate.job.clone();
            let ids = self.next_ids(&name);
            match self.jobs.get(&name).filter(|job| job.can_move() || job.waits_until.is_some()) {
                Some(job) => {
                    let (job, bars) = (JobView::of(job), self.queue.bars(&name));
                    return Some(self.plan(Goal::Serve(candidate), job, bars, ids));
                }
                None => drop(self.queue.settle(&mut self.books, &candidate, None)),
            }
        }
        None
    }

    fn plan_of(&mut self, task: Task) -> Option<Plan> {
        match task {
            Task::Seek(seek) => {
                let ids = seek.ids;
                let job = self.jobs.get_mut(&seek.name).filter(|job| job.placing == Some(ids.group))?;
                let held = job.hold.take();
                let view = JobView::of(job);
                if let Some((group, _)) = held {
                    self.books.free(group);
                }
                // What was held for it is its own, whoever has come to starve meanwhile.
                let bars = if held.is_some() { Bars::default() } else { self.queue.bars(&seek.name) };
                let goal = Goal::Seek { seek, was_held: held.is_some() };
                Some(self.plan(goal, view, bars, ids))
            }
            Task::Enter { name, tried } => {
                let view = JobView::of(self.jobs.get(&name).filter(|job| job.may_wait())?);
                let ids = self.ids(GroupId(0), Epoch::default());
                Some(self.plan(Goal::Enter { name, tried }, view, Bars::default(), ids))
            }
        }
    }

    fn plan(&self, goal: Goal, job: JobView, bars: Bars, ids: Ids) -> Plan {
        let (devices, books) = (self.devices.clone(), self.books.clone());
        let (devices_version, resting) = (self.planning.devices_version, self.restarts.resting());
        Plan { goal, job, devices, devices_version, books, bars, resting, ids }
    }

    /// Take in what was planned, as far as it still holds.
    pub(in crate::controller) fn planned(&mut self, config: &ControllerConfig, Planned { plan, found }: Planned) {
        let Plan { goal, job: JobView { token, .. }, devices_version, books, ids, .. } = plan;
        let is_same_world = devices_version == self.planning.devices_version;
        match goal {
            Goal::Seek { mut seek, was_held } => {
                if self.jobs.get(&seek.name).is_none_or(|job| job.placing != Some(ids.group)) {
                    return;
                }
                let is_valid = match &found {
                    Ok(placement) => seek.is_too_late || self.can_claim(&seek.name, placement),
                    Err(_) => is_same_world,
                };
                if !is_valid && seek.plans < PLANS_MAX {
                    seek.plans += 1;
                    return self.push_task(Task::Seek(seek));
                }
                // What a job may have that comes too late, it has not been tried with.
                let tried = Some(books.version()).filter(|_| !(seek.is_too_late && found.is_ok()));
                self.seek_is_planned(config, (&seek, was_held), tried, found);
                if !is_same_world {
                    // A device has come, or gone, too late for this plan, and found the job busy.
                    self.reconsider();
                }
            }
            Goal::Enter { name, tried } => {
                // It may have ended, or got a tree, or be about to.
                if self.jobs.get(&name).is_some_and(|job| job.mesh_token == token && job.may_wait()) {
                    self.enter_is_planned(&name, tried, found);
                }
            }
            Goal::Serve(candidate) => self.serve_is_planned(&candidate, found),
        }
    }

    /// Tell whether the devices of a placement are connected still, and have what it takes.
    fn can_claim(&self, name: &str, placement: &Placement) -> bool {
        let tenant = self.jobs.get(name).map_or("", Job::tenant);
        self.has_devices(placement) && self.books.check(tenant, &placement.claim(tenant).needs).is_ok()
    }

    fn has_devices(&self, placement: &Placement) -> bool {
        let is_there = |device: &Arc<DeviceSession>| {
            self.devices.get(device.name()).is_some_and(|known| Arc::ptr_eq(known, device))
        };
        placement.nodes.iter().all(|node| is_there(&node.device))
    }

    fn seek_is_planned(
        &mut self,
        config: &ControllerConfig,
        (seek, was_held): (&Seek, bool),
        tried: Option<u64>,
        found: Result<Placement, NoTree>,
    ) {
        let name = seek.name.as_str();
        let claimed = found.and_then(|placement| {
            if seek.is_too_late {
                let wait = Some((Scope::Devices, placement.least()));
                return Err(NoTree::for_now("others came first".to_owned(), wait));
            }
            let claim = placement.claim(self.jobs.get(name).map_or("", Job::tenant));
            let claimed = self.books.claim(claim.clone());
            claimed.map_err(|short| NoTree::for_good(short.to_string()))?;
            Ok((placement, claim))
        });
        let (placement, claim) = match claimed {
            Ok(claimed) => claimed,
            Err(none) => return self.without(config, name, none, tried),
        };
        if !was_held {
            let ticket = self.queue.get(name).map(|entry| entry.ticket);
            let ticket = ticket.unwrap_or_else(|| self.queue.ticket());
            self.queue.given(ticket, &claim, &mut self.books);
        }
        let Some(job) = self.jobs.get(name) else { return };
        let order = job.first().map_or(Order::Arrival, |member| member.request.order);
        let version = self.planning.devices_version;
        self.ready.push_back(Draft::new(name.to_owned(), placement, order, seek.tries, version));
        self.wake.notify_all();
    }

    fn enter_is_planned(&mut self, name: &str, tried: Option<u64>, found: Result<Placement, NoTree>) {
        if self.queue.get(name).is_some_and(|entry| entry.standing != Standing::Waits) {
            // It was served meanwhile: what it takes is held for it.
            return;
        }
        let wait = match found {
            Ok(placement) => Some((Scope::Devices, placement.least())),
            Err(none) => none.wait,
        };
        let Some(job) = self.jobs.get(name) else { return };
        let moves = job.members.values().all(|member| member.request.terms.moves) || job.waits_until.is_some();
        match wait.filter(|_| moves) {
            Some(wait) => self.wait_in_queue(name, wait, tried),
            None => self.leave_queue(name),
        }
        self.pump();
    }

    /// Tell whether somebody else is to be looked at before a job whose plan is made: what has been freed meanwhile is for
    /// whoever comes first.
    fn is_overtaken(&mut self, name: &str) -> bool {
        let is_first = self.queue.candidate(&self.books).is_some_and(|first| first.job == name);
        let is_overtaken = !is_first && self.planning.overtaken < PLANS_MAX;
        self.planning.overtaken = if is_overtaken { self.planning.overtaken + 1 } else { 0 };
        is_overtaken
    }

    fn serve_is_planned(&mut self, candidate: &Candidate, found: Result<Placement, NoTree>) {
        let name = candidate.job.as_str();
        if found.as_ref().is_ok_and(|placement| !self.has_devices(placement)) {
            // Looked at again, as it was not tried.
            return;
        }
        if found.is_ok() && self.is_overtaken(name) {
            return;
        }
        let job = self.jobs.get(name).filter(|job| job.can_move() || job.waits_until.is_some());
        let placement = job.and_then(|job| Some((found.ok()?, job.tenant())));
        let claim = placement.as_ref().map(|(placement, tenant)| placement.claim(tenant));
        let placement = placement.map(|(placement, _)| placement);
        if !self.queue.settle(&mut self.books, candidate, claim) {
            return;
        }
        let until = self.now + OFFER_LIMIT;
        let (Some(job), Some(placement)) = (self.jobs.get_mut(name), placement) else { return };
        let group = placement.group;
        if job.waits_until.take().is_some() {
            job.placing = Some(group);
            let order = job.first().map_or(Order::Arrival, |member| member.request.order);
            let version = self.planning.devices_version;
            self.ready.push_back(Draft::new(name.to_owned(), placement, order, 0, version));
        } else {
            tracing::info!(job = name, view = job.view, "a tree is offered");
            job.hold = Some((group, until));
            job.make_offer();
        }
        self.wake.notify_all();
    }
}
