//! A minimal controller for ranks that recover: reports lost trees, and finds other ones.
//!
//! Tenants run the production controller. In this model, which knows neither fabric nor quotas, losses can strike
//! after each single step ([`Point`]), and devices and ranks meet a controller that is slow, wrong about liveness, or
//! gone. It keeps the same promises:
//! - a tree is reserved on all its devices or on none;
//! - no two incarnations of a group share an epoch, not even across incarnations of the controller (PROTOCOL 4);
//! - devices of lost trees are chosen last, and never after three losses;
//! - its state is lost when it stops, and rebuilt from the requests of ranks and the replies of devices.

use super::cluster::{Actor, Assignment, Cluster};
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::messages::Message;
use super::options::Draw;
use super::report::Violation;
use super::wiring::{Wiring, group_id};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac_hal::ctrl::{Request, Response};
use sumac_hal::ids::{Epoch, TreeId};

/// State of the controller.
pub(super) struct Controller {
    is_up: bool,
    /// Epoch of the last tree assigned.
    epoch: Epoch,
    /// By group.
    jobs: BTreeMap<usize, Job>,
    /// Devices that did not reply.
    silent: BTreeSet<usize>,
    draw: Draw,
}

/// A group whose tree was lost.
#[derive(Default)]
struct Job {
    /// The view that lost the tree.
    view: u32,
    /// Number of lost trees that each device was part of.
    lost: BTreeMap<usize, u32>,
    state: State,
    /// Ranks waiting for the result.
    waiting: BTreeSet<usize>,
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    /// This many nodes of a tree are reserved.
    Reserving { tree: usize, done: usize },
    /// The result: a tree, or none.
    Found(Option<usize>),
}

/// A rank's request to the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ControllerRequest {
    /// The tree of this view is lost.
    Suspect,
    /// Request for another tree; `lost` is the last one.
    Replan { lost: Option<usize> },
}

impl Controller {
    pub(super) fn new(seed: u64, epoch: Epoch) -> Self {
        let (jobs, silent) = (BTreeMap::new(), BTreeSet::new());
        Self { is_up: true, epoch, jobs, silent, draw: Draw::new(seed ^ 0x6374_726c) }
    }

    /// Draw the duration of a request to a device.
    fn delay(&mut self) -> Duration {
        let most = self.draw.one_of(&[50_000, 500_000, 5_000_000]);
        Duration::from_nanos(10_000 + self.draw.below(most))
    }
}

impl Cluster<'_, '_> {
    pub(super) fn stop_controller(&mut self, len: Duration) {
        let controller = &mut self.controller;
        controller.is_up = false;
        controller.jobs.clear();
        controller.silent.clear();
        self.schedule(self.now + len, Alarm::ControllerUp);
    }

    /// Restart in another term.
    pub(super) fn start_controller(&mut self) {
        let controller = &mut self.controller;
        if !controller.is_up {
            controller.is_up = true;
            controller.epoch = Epoch { term: controller.epoch.term + 1, counter: 0 };
            self.seen.note(Mark::ControllerRestarted);
        }
    }

    /// Handle a rank's request.
    pub(super) fn on_controller_request(
        &mut self,
        (rank, group): (usize, usize),
        view: u32,
        request: ControllerRequest,
    ) {
        if !self.controller.is_up {
            return;
        }
        match request {
            ControllerRequest::Suspect => {
                for rank in 0..self.options.ranks {
                    self.send_message(Message::TreeLost { rank, group, view });
                }
            }
            ControllerRequest::Replan { lost } => {
                let job = self.controller.jobs.entry(group).or_default();
                if view < job.view {
                    return;
                }
                if view > job.view || matches!(job.state, State::Idle) {
                    job.view = view;
                    job.waiting.clear();
                    let devices = lost.map(|tree| self.assignments[tree].wiring.nodes.iter().map(|node| node.device));
                    devices.into_iter().flatten().for_each(|device| *job.lost.entry(device).or_default() += 1);
                    job.state = State::Idle;
                    self.plan(group);
                }
                let job = self.controller.jobs.get_mut(&group).expect("made above");
                job.waiting.insert(rank);
                self.answer(group);
            }
        }
    }

    /// Choose devices for another tree of the same shape, and start reserving it.
    fn plan(&mut self, group: usize) {
        let Controller { jobs, silent, draw, .. } = &mut self.controller;
        let Some(job) = jobs.get_mut(&group) else { return };
        let times = |device: &usize| job.lost.get(device).copied().unwrap_or(0);
        let free = (0..self.devices.len()).filter(|device| !silent.contains(device) && times(device) < LOSSES_MAX);
        let mut free: Vec<(u32, u64, usize)> = free.map(|device| (times(&device), draw.bits(), device)).collect();
        free.sort_unstable();
        let tree = self.options.tree(group);
        let need = super::wiring::count_nodes(&self.options.trees[tree]);
        if free.len() < need {
            job.state = State::Found(None);
            self.seen.note(Mark::NoTree);
            return self.answer(group);
        }
        let index = self.assignments.len();
        job.state = State::Reserving { tree: index, done: 0 };
        let devices = free.into_iter().map(|(_, _, device)| device).collect();
        let wiring = Wiring::on(self.options, tree, TreeId(TREES_FROM + index as u32), devices);
        self.controller.epoch = self.options.planted.next_epoch(self.controller.epoch);
        self.assignments.push(Assignment { wiring, epoch: self.controller.epoch });
        let at = self.now + self.controller.delay();
        self.schedule(at, Alarm::Reserve { group, tree: index });
    }

    /// Reserve the next node of a tree; the last one starts the tree.
    pub(super) fn reserve(&mut self, group: usize, tree: usize) -> Result<(), Violation> {
        let Some(job) = self.controller.jobs.get_mut(&group) else { return Ok(()) };
        let State::Reserving { tree: current, done } = &mut job.state else { return Ok(()) };
        if *current != tree || !self.controller.is_up {
            return Ok(());
        }
        let node = *done;
        let device = self.assignments[tree].wiring.nodes[node].device;
        if !self.devices[device].alive {
            // This is detected after a while; reservations are then released and another tree is tried.
            self.seen.note(Mark::RolledBack);
            job.state = State::Idle;
            self.controller.silent.insert(device);
            (0..node).for_each(|node| self.release(self.assignments[tree].wiring.nodes[node].device, group));
            let at = self.now + SILENCE;
            self.schedule(at, Alarm::RetryPlan { group });
            return Ok(());
        }
        *done += 1;
        let is_last = *done == self.assignments[tree].wiring.nodes.len();
        self.release(device, group);
        self.place(device, group, tree, node)?;
        self.reach(Point::Reserved, None);
        if is_last {
            if let Some(job) = self.controller.jobs.get_mut(&group) {
                job.state = State::Found(Some(tree));
            }
            self.answer(group);
        } else {
            let at = self.now + self.controller.delay();
            self.schedule(at, Alarm::Reserve { group, tree });
        }
        Ok(())
    }

    pub(super) fn retry_plan(&mut self, group: usize) {
        let idle = self.controller.jobs.get(&group).is_some_and(|job| matches!(job.state, State::Idle));
        if self.controller.is_up && idle {
            self.plan(group);
        }
    }

    /// Release a group and its tree on a device, if present.
    fn release(&mut self, device: usize, group: usize) {
        let now = self.device_time(device);
        let tree = self.placed.remove(&(device, group)).map(|tree| self.assignments[tree].wiring.tree_id());
        for node in &mut self.devices[device].shards {
            if node.control(&Request::ReleaseGroup(group_id(group)), now) == Response::Done {
                self.seen.note(Mark::GroupReleased);
            }
            // Refused while another group uses it.
            tree.map(|tree| node.control(&Request::RemoveTree(tree), now));
        }
        self.touch_device(device);
    }

    fn place(&mut self, device: usize, group: usize, tree: usize, node: usize) -> Result<(), Violation> {
        let now = self.device_time(device);
        let Assignment { wiring, epoch } = &self.assignments[tree];
        for shard in &mut self.devices[device].shards {
            let requests = [
                Request::InstallTree(wiring.tree(node, self.options.shards)),
                Request::CreateGroup(wiring.group(self.options, node, group, *epoch)),
            ];
            for request in requests {
                match shard.control(&request, now) {
                    Response::Done => {}
                    response => return Err(Violation::Refused { device, response: format!("{response:?}") }),
                }
            }
        }
        self.seen.note(Mark::GroupCreated);
        self.placed.insert((device, group), tree);
        self.touch_device(device);
        Ok(())
    }

    /// Reply to waiting ranks if there is a result.
    fn answer(&mut self, group: usize) {
        let Some(job) = self.controller.jobs.get_mut(&group) else { return };
        let State::Found(found) = job.state else { return };
        let view = job.view;
        for rank in std::mem::take(&mut job.waiting) {
            self.send_message(Message::Found { rank, group, view, tree: found });
            self.reach(Point::Assigned, None);
        }
    }

    /// A rank's endpoint moves to another tree, or is created.
    pub(super) fn touch_rank(&mut self, rank: usize, group: usize) {
        self.touched.insert(Actor::Rank { rank, group });
    }
}

/// Timeout of a silent device.
const SILENCE: Duration = Duration::from_secs(1);

/// Maximum number of lost trees of a device.
const LOSSES_MAX: u32 = 3;

/// Ids from here on are trees of recoveries.
const TREES_FROM: u32 = 1000;
