//! A controller, as far as ranks that repair need one: it passes on that a tree is lost, and finds another one.
//!
//! The production controller lives on threads and sockets, and its rules are in its own tests. This one keeps the same
//! promises in as few words as possible, on virtual time, so that what ranks and devices make of a controller that is
//! slow, wrong about who is alive, or gone can be tried:
//! - a place in a tree is reserved on all its devices or on none;
//! - no two lives of a group have the same epoch, not even across the controller's own lives (PROTOCOL 4);
//! - devices of a lost tree come last, and one that was in three of them is not taken again;
//! - what it knows is lost when it stops, and found again from what ranks ask and devices say.

use super::cluster::{Actor, Assignment, Cluster};
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::mail::Mail;
use super::options::Draw;
use super::report::Violation;
use super::wiring::{Wiring, group_id};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac_hal::ctrl::{Request, Response};
use sumac_hal::ids::{Epoch, TreeId};

/// What the controller knows.
pub(super) struct Controller {
    is_up: bool,
    /// Of the last tree that was given out.
    epoch: Epoch,
    /// By group.
    jobs: BTreeMap<usize, Job>,
    /// Devices that did not answer.
    silent: BTreeSet<usize>,
    draw: Draw,
}

/// A group whose tree was lost.
#[derive(Default)]
struct Job {
    /// The view that lost it.
    view: u32,
    /// How many trees of the group each device was in when they were lost.
    lost: BTreeMap<usize, u32>,
    state: State,
    /// Who wants to know.
    waiting: BTreeSet<usize>,
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    /// So many of the nodes of a tree have their places.
    Reserving { tree: usize, done: usize },
    /// Found, or not to be had.
    Found(Option<usize>),
}

/// What ranks tell the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// The tree of this view is lost.
    Suspect,
    /// Another tree is wanted; this was the last one.
    Replan { lost: Option<usize> },
}

impl Controller {
    pub(super) fn new(seed: u64, epoch: Epoch) -> Self {
        let (jobs, silent) = (BTreeMap::new(), BTreeSet::new());
        Self { is_up: true, epoch, jobs, silent, draw: Draw::new(seed ^ 0x6374_726c) }
    }

    /// How long a request to a device takes.
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

    /// It starts again, in another term.
    pub(super) fn start_controller(&mut self) {
        let controller = &mut self.controller;
        if !controller.is_up {
            controller.is_up = true;
            controller.epoch = Epoch { term: controller.epoch.term + 1, counter: 0 };
            self.seen.note(Mark::ControllerAgain);
        }
    }

    /// A rank's word has come.
    pub(super) fn ask_controller(&mut self, (rank, group): (usize, usize), view: u32, ask: Ask) {
        if !self.controller.is_up {
            return;
        }
        match ask {
            Ask::Suspect => {
                for rank in 0..self.options.ranks {
                    self.mail(Mail::Word { rank, group, view });
                }
            }
            Ask::Replan { lost } => {
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

    /// Choose devices for another tree of the same shape, and begin to reserve it.
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

    /// Reserve the next place of a tree; the last one is the tree's beginning.
    pub(super) fn reserve(&mut self, group: usize, tree: usize) -> Result<(), Violation> {
        let Some(job) = self.controller.jobs.get_mut(&group) else { return Ok(()) };
        let State::Reserving { tree: current, done } = &mut job.state else { return Ok(()) };
        if *current != tree || !self.controller.is_up {
            return Ok(());
        }
        let node = *done;
        let device = self.assignments[tree].wiring.nodes[node].device;
        if !self.devices[device].alive {
            // It takes a while to find out. What was reserved is given back, and another tree tried.
            self.seen.note(Mark::RolledBack);
            job.state = State::Idle;
            self.controller.silent.insert(device);
            (0..node).for_each(|node| self.release(self.assignments[tree].wiring.nodes[node].device, group));
            let at = self.now + SILENCE;
            self.schedule(at, Alarm::PlanAgain { group });
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

    pub(super) fn plan_again(&mut self, group: usize) {
        let idle = self.controller.jobs.get(&group).is_some_and(|job| matches!(job.state, State::Idle));
        if self.controller.is_up && idle {
            self.plan(group);
        }
    }

    /// Take a group, and its tree, off a device, if they are there.
    fn release(&mut self, device: usize, group: usize) {
        let now = self.device_time(device);
        let tree = self.placed.remove(&(device, group)).map(|tree| self.assignments[tree].wiring.tree_id());
        for node in &mut self.devices[device].shards {
            if node.control(&Request::ReleaseGroup(group_id(group)), now) == Response::Done {
                self.seen.note(Mark::GroupReleased);
            }
            // Refused as long as another group uses it.
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

    /// Tell those who wait, if there is something to tell.
    fn answer(&mut self, group: usize) {
        let Some(job) = self.controller.jobs.get_mut(&group) else { return };
        let State::Found(found) = job.state else { return };
        let view = job.view;
        for rank in std::mem::take(&mut job.waiting) {
            self.mail(Mail::Found { rank, group, view, tree: found });
            self.reach(Point::Assigned, None);
        }
    }

    /// A rank's endpoint moves to another tree, or is put there for the first time.
    pub(super) fn touch_rank(&mut self, rank: usize, group: usize) {
        self.touched.insert(Actor::Rank { rank, group });
    }
}

/// How long a device may be silent before the controller gives it up.
const SILENCE: Duration = Duration::from_secs(1);

/// How many lost trees a device may have been in.
const LOSSES_MAX: u32 = 3;

/// Trees from here on are those of repairs.
const TREES_FROM: u32 = 1000;
