//! What happens to a cluster at set moments: deaths, restarts, what the controller does then, attacks.

use super::cluster::{Actor, Cluster};
use super::coverage::Mark;
use super::loss::Ill;
use super::report::Violation;
use super::scenario::Scenario;
use super::setup::{boot, install};
use super::wiring::{TIMERS, count_levels, group_id};
use std::time::Duration;
use sumac::rehearsal::Attempt;
use sumac_hal::ctrl::{Request, Response};
use sumac_hal::time::Instant;

/// Something that happens at a set moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alarm {
    /// A device stops.
    Die(usize),
    /// A device starts with empty tables.
    Restart(usize),
    /// Whoever depends on the device has to know by now; then the controller releases all groups, so that the others
    /// hear of it too.
    GiveUp(usize),
    /// The controller starts all groups in the next epoch, and all ranks begin again.
    BeginAgain,
    /// The attacker sends something.
    Attack,
    /// Something is lost.
    Strike(Ill),
    /// The controller is back.
    ControllerUp,
    /// The controller asks a device for the next place of a tree.
    Reserve { group: usize, tree: usize },
    /// The controller tries other devices.
    PlanAgain { group: usize },
    /// A rank says once more that its tree is lost.
    SuspectAgain { rank: usize, group: usize, view: u32 },
    /// A rank does not wait for the controller any longer.
    ReplanLimit { rank: usize, group: usize, view: u32 },
    /// A rank may find that another is silent.
    Silent { rank: usize, of: usize },
    /// A rank finds that the controller is gone for good.
    NoController { rank: usize },
    /// The change of a view has something to do.
    ViewTimer { rank: usize, group: usize, view: u32 },
    /// A rank does not wait for an attempt's chunks any longer.
    PiecesLimit { rank: usize, group: usize, view: u32, attempt: Attempt },
}

impl Cluster<'_, '_> {
    pub(super) fn schedule_scenario(&mut self) {
        let zero = Instant::ZERO;
        match self.options.scenario {
            Scenario::Repair { ref losses } | Scenario::Ranks { ref losses } => self.schedule_losses(losses),
            // Those by reference have a driver of their own.
            Scenario::Calm | Scenario::Mismatch { .. } | Scenario::Reference(_) => {}
            Scenario::Hostile => self.schedule(zero, Alarm::Attack),
            Scenario::Death { device, at } => {
                self.schedule(zero + at, Alarm::Die(device));
                self.schedule(self.told_by(at), Alarm::GiveUp(device));
            }
            Scenario::Restart { device, at, again } => {
                self.schedule(zero + at, Alarm::Restart(device));
                if again {
                    // Soon enough that packets of the old epoch are still on their way.
                    self.schedule(zero + at + Duration::from_micros(self.options.seed % 300), Alarm::BeginAgain);
                } else {
                    self.schedule(self.told_by(at), Alarm::GiveUp(device));
                }
            }
        }
    }

    /// When everybody below a device that was lost at `at` has to know: `T_dead` a level after the last call, and
    /// some time for lossy links and for those that are cut or slow for a while.
    fn told_by(&self, at: Duration) -> Instant {
        let last_call = self.posts.keys().last().map_or(Instant::ZERO, |&(at, _)| at);
        let levels = self.options.trees.iter().map(count_levels).max().unwrap_or(1);
        last_call.max(Instant::ZERO + at) + TIMERS.dead * levels + SLACK + self.options.faults.spells_len()
    }

    pub(super) fn sound_alarms(&mut self) -> Result<(), Violation> {
        while let Some(entry) = self.alarms.first_entry().filter(|entry| entry.key().0 <= self.now) {
            match entry.remove() {
                Alarm::Die(device) => self.devices[device].alive = false,
                Alarm::Restart(device) => self.restart(device),
                Alarm::GiveUp(device) => self.give_up(device)?,
                Alarm::BeginAgain => {
                    self.restarts_to_come -= 1;
                    self.begin_again()?;
                }
                Alarm::Attack => self.attack(),
                Alarm::Strike(ill) => self.strike(ill),
                Alarm::ControllerUp => self.start_controller(),
                Alarm::Reserve { group, tree } => self.reserve(group, tree)?,
                Alarm::PlanAgain { group } => self.plan_again(group),
                Alarm::SuspectAgain { rank, group, view } => self.suspect_again((rank, group), view),
                Alarm::ReplanLimit { rank, group, view } => self.replan_limit((rank, group), view)?,
                Alarm::Silent { rank, of } => self.find_silent(rank, of)?,
                Alarm::NoController { rank } => self.miss_controller(rank)?,
                Alarm::ViewTimer { rank, group, view } => self.view_timer((rank, group), view)?,
                Alarm::PiecesLimit { rank, group, view, attempt } => {
                    self.pieces_limit((rank, group), view, attempt)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn restart(&mut self, index: usize) {
        let device = &mut self.devices[index];
        device.shards.iter().for_each(|node| self.past.merge(node.counters()));
        let lives = (0_u16..).zip(device.spare.drain(..));
        device.shards = lives.map(|(shard, tables)| boot(self.options, index, shard, 1, tables)).collect();
        self.touch_device(index);
    }

    /// Whoever has the device on his way must have heard by now, or have everything.
    fn give_up(&mut self, lost: usize) -> Result<(), Violation> {
        for (rank, members) in self.members.iter().enumerate() {
            for (group, member) in members.iter().enumerate() {
                let open = member.error.is_none() && member.done < self.options.groups[group].ops.len() as u64;
                if open && self.wirings[self.options.tree(group)].path(rank).any(|device| device == lost) {
                    return Err(Violation::Late { group, rank, at: self.now - Instant::ZERO });
                }
            }
        }
        for device in 0..self.devices.len() {
            let now = self.device_time(device);
            for node in &mut self.devices[device].shards {
                for group in 0..self.options.groups.len() {
                    // Refused where the group never was, or is not any more.
                    if node.control(&Request::ReleaseGroup(group_id(group)), now) == Response::Done {
                        self.seen.note(Mark::GroupReleased);
                    }
                }
            }
            self.touch_device(device);
        }
        Ok(())
    }

    fn begin_again(&mut self) -> Result<(), Violation> {
        self.check_results()?;
        self.epoch = self.options.planted.next_epoch(self.epoch);
        for device in 0..self.devices.len() {
            let now = self.device_time(device);
            for node in &mut self.devices[device].shards {
                node.control(&Request::Reset, now);
                self.seen.note(Mark::GroupReset);
                self.seen.note(Mark::GroupCreated);
                install(node, self.options, self.wirings, device, self.epoch, now)?;
            }
            self.touch_device(device);
        }
        self.life += 1;
        self.begin();
        let groups = 0..self.options.groups.len();
        let ranks = 0..self.options.ranks;
        self.touched.extend(ranks.flat_map(|rank| groups.clone().map(move |group| Actor::Rank { rank, group })));
        Ok(())
    }

    pub(super) fn touch_device(&mut self, device: usize) {
        self.touched.extend((0..usize::from(self.options.shards)).map(|shard| Actor::Node { device, shard }));
    }
}

/// What lossy links may add to `T_dead`.
const SLACK: Duration = Duration::from_secs(3);
