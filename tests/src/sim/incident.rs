//! Scheduled events of a cluster: deaths, restarts, ends of connections, limits, attacks.

use super::cluster::{Actor, Cluster};
use super::controller::Peer;
use super::coverage::Mark;
use super::loss::LossKind;
use super::report::Violation;
use super::scenario::Scenario;
use super::setup::{boot, install};
use super::wiring::{TIMERS, count_levels, group_id};
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac::harness::Attempt;
use sumac_hal::ctrl::{Request, Response};
use sumac_hal::ids::Epoch;
use sumac_hal::time::Instant;

/// A scheduled event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alarm {
    /// A device stops.
    Die(usize),
    /// A device restarts with empty tables.
    Restart(usize),
    /// All ranks that depend on the device must have failed by now. The controller then releases all groups, so that
    /// the other ranks fail too.
    GiveUp(usize),
    /// The controller restarts all groups in the next epoch, and all ranks start again.
    BeginAgain,
    /// The attacker sends packets.
    Attack,
    /// A loss.
    Loss(LossKind),
    /// The controller restarts.
    ControllerUp,
    /// A device dials the controller.
    DialDevice(usize),
    /// A rank dials the controller.
    Dial { rank: usize, group: usize },
    /// The peer of a controller detects that its connection has ended.
    Ended(ConnId, Peer),
    /// A rank stops waiting for another tree at the end of an attempt.
    ReplanLimit { rank: usize, group: usize, view: u32, attempt: Attempt },
    /// A rank may detect that another is silent.
    Silent { rank: usize, of: usize },
    /// A timer of a view change.
    ViewTimer { rank: usize, group: usize, view: u32 },
    /// A rank stops waiting for an attempt's chunks.
    PiecesLimit { rank: usize, group: usize, view: u32, attempt: Attempt },
}

impl Cluster<'_, '_> {
    pub(super) fn schedule_scenario(&mut self) {
        let zero = Instant::ZERO;
        match self.options.scenario {
            Scenario::Recovery { ref losses } | Scenario::Ranks { ref losses } | Scenario::Paths { ref losses, .. } => {
                self.schedule_losses(losses);
            }
            // Zero-copy clusters have a driver of their own.
            Scenario::Calm | Scenario::Mismatch { .. } | Scenario::ZeroCopy(_) => {}
            Scenario::Hostile => self.schedule(zero, Alarm::Attack),
            Scenario::Death { device, at } => {
                self.schedule(zero + at, Alarm::Die(device));
                self.schedule(self.deadline_for_errors(at), Alarm::GiveUp(device));
            }
            Scenario::Restart { device, at, again } => {
                self.schedule(zero + at, Alarm::Restart(device));
                if again {
                    // Early enough that packets of the old epoch are still in flight.
                    self.schedule(zero + at + Duration::from_micros(self.options.seed % 300), Alarm::BeginAgain);
                } else {
                    self.schedule(self.deadline_for_errors(at), Alarm::GiveUp(device));
                }
            }
        }
    }

    /// Return when every rank below a device lost at `at` must have failed: `T_dead` per level after the last call,
    /// plus a margin for lossy links and for those that are cut or slow for a while.
    fn deadline_for_errors(&self, at: Duration) -> Instant {
        let last_call = self.posts.keys().last().map_or(Instant::ZERO, |&(at, _)| at);
        let levels = self.options.trees.iter().map(count_levels).max().unwrap_or(1);
        last_call.max(Instant::ZERO + at) + TIMERS.dead * levels + SLACK + self.options.faults.spells_len()
    }

    pub(super) fn run_alarms(&mut self) -> Result<(), Violation> {
        while let Some(entry) = self.alarms.first_entry().filter(|entry| entry.key().0 <= self.now) {
            match entry.remove() {
                Alarm::Die(device) => self.devices[device].alive = false,
                Alarm::Restart(device) => self.restart(device),
                Alarm::GiveUp(device) => self.check_dependents_failed(device)?,
                Alarm::BeginAgain => {
                    self.pending_restarts -= 1;
                    self.restart_groups()?;
                }
                Alarm::Attack => self.attack(),
                Alarm::Loss(kind) => self.apply_loss(kind),
                Alarm::ControllerUp => self.start_controller(),
                Alarm::DialDevice(device) => self.dial_device(device),
                Alarm::Dial { rank, group } => self.dial((rank, group)),
                Alarm::Ended(conn, Peer::Device(device)) => self.device_lost_controller(device, conn),
                Alarm::Ended(conn, Peer::Rank(rank, group)) => self.rank_lost_controller((rank, group), conn)?,
                Alarm::ReplanLimit { rank, group, view, attempt } => {
                    self.replan_limit((rank, group), view, attempt)?;
                }
                Alarm::Silent { rank, of } => self.detect_silence(rank, of)?,
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
        let incarnations = (0_u16..).zip(device.spare.drain(..));
        device.incarnation += 1;
        let incarnation = device.incarnation;
        device.shards =
            incarnations.map(|(shard, tables)| boot(self.options, index, shard, incarnation, tables)).collect();
        self.touch_device(index);
    }

    /// Ranks with the device on their path must have failed or finished by now.
    fn check_dependents_failed(&mut self, lost: usize) -> Result<(), Violation> {
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
                    // Refused by devices without the group.
                    if node.control(&Request::ReleaseGroup(group_id(group)), now) == Response::Done {
                        self.seen.note(Mark::GroupReleased);
                    }
                }
            }
            self.touch_device(device);
        }
        Ok(())
    }

    fn restart_groups(&mut self) -> Result<(), Violation> {
        self.check_results()?;
        self.epoch = Epoch { counter: self.epoch.counter + 1, ..self.epoch };
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
        self.incarnation += 1;
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

/// Margin that lossy links may add to `T_dead`.
const SLACK: Duration = Duration::from_secs(3);
