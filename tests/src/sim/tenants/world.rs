//! The event loop: devices, ranks and the controller as production state machines, and the links between them. Only
//! components touched by an event are polled afterwards, in a fixed order.

use super::TenantViolation as Violation;
use super::device::{Device, ShardOf};
use super::draw::{Incident, Step, Tenancy};
use super::hosts::Hosts;
use super::job::{Job, Phase};
use super::report::TenantReport;
use super::watch::Watch;
use super::wire::Message;
use crate::oracle::weight;
use crate::sim::clock::{Clock, ClockOwner};
use crate::sim::controller::{Controller, Peer};
use crate::sim::coverage::Mark;
use crate::sim::options::Draw;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::controller::machine::ConnId;
#[cfg(feature = "planted")]
use sumac::controller::machine::Machine;
use sumac_hal::emu::{Fabric, NthPacket, RandomFaults, Script};
use sumac_hal::port::Addr;
use sumac_hal::shard::MAX_SHARDS;
use sumac_hal::time::Instant;

/// A sender of packets: a device, or a rank of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Actor {
    Device(usize),
    Rank(usize, usize),
}

/// A scheduled event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alarm {
    Incident(Incident),
    /// A device restarts.
    Boot(usize),
    /// A device executes requests that arrived while it was stalled.
    Answer(usize),
    ControllerUp,
    /// The older of two controllers ends.
    OlderGone,
    /// A device dials.
    DialDevice(usize),
    /// A rank dials or continues, if it is time.
    Rank(usize, usize),
    /// A rank dials the next controller.
    Redial(usize, usize),
    /// A rank that does not read asks for a report, or reads again.
    Blocked(usize, usize),
    /// A rank detects that a connection is gone.
    Ended(ConnId, Peer),
    /// The controller checks its connections.
    Sweep,
    /// A rank drops the handle of an operation.
    Drop(usize, usize, u64),
    /// A host device starts.
    StartHostDevice(usize),
    /// A rank waits no longer for the other ranks of its host to leave.
    LeaderLeaves(usize, usize),
}

pub(super) struct World<'t, 'm> {
    pub(super) plan: &'t Tenancy,
    pub(super) now: Instant,
    pub(super) controller: Option<Controller>,
    /// One that still runs beside its successor.
    pub(super) older: Option<Controller>,
    /// Number of starts of the controller.
    pub(super) incarnation: u64,
    #[cfg(feature = "planted")]
    pub(super) earlier: Option<Machine>,
    pub(super) devices: Vec<Device<'m>>,
    pub(super) jobs: Vec<Job>,
    pub(super) hosts: Hosts,
    pub(super) fabric: Fabric,
    alarms: BTreeMap<(Instant, u64), Alarm>,
    alarm_numbers: u64,
    pub(super) messages: BTreeMap<(Instant, u64), Message>,
    pub(super) message_numbers: u64,
    /// Messages in flight on connections to the controller.
    pub(super) on_wire: usize,
    pub(super) last: BTreeMap<(u64, u64), Instant>,
    /// Connections with output that their clients do not read.
    pub(super) blocked: BTreeSet<ConnId>,
    /// Open connections, with their peers.
    pub(super) conns: BTreeMap<ConnId, Peer>,
    /// When the last incident is over.
    pub(super) healed_at: Instant,
    /// The number of steps before the incident after a step.
    steps_left: u64,
    pub(super) draw: Draw,
    pub(super) touched: BTreeSet<Actor>,
    timers: BTreeSet<(Instant, Actor)>,
    timer_of: BTreeMap<Actor, Instant>,
    buffer: Vec<u8>,
    pub(super) watch: Watch,
    pub(super) report: TenantReport,
}

/// Return the address of a shard of a device. That of the first one is the number of the device.
pub(super) fn shard_addr(device: usize, shard: usize) -> Addr {
    Addr::Emu(if shard == 0 { device as u32 } else { SHARDS_FROM + (device * MAX_SHARDS + shard) as u32 })
}

/// Return the address of a rank in one of its views.
pub(super) fn rank_addr(job: usize, rank: usize, view: u32) -> Addr {
    Addr::Emu(RANKS_FROM + ((job * 256 + rank) as u32) * VIEWS + view % VIEWS)
}

/// Return the owner of an address, and the view or the shard.
pub(super) fn owner(addr: Addr) -> (Actor, u32) {
    let Addr::Emu(n) = addr else { panic!("the simulator has emulated addresses only") };
    if let Some(n) = n.checked_sub(RANKS_FROM) {
        return (Actor::Rank((n / VIEWS / 256) as usize, (n / VIEWS % 256) as usize), n % VIEWS);
    }
    match n.checked_sub(SHARDS_FROM) {
        Some(n) => (Actor::Device(n as usize / MAX_SHARDS), n % MAX_SHARDS as u32),
        None => (Actor::Device(n as usize), 0),
    }
}

impl<'t, 'm> World<'t, 'm> {
    pub(super) fn new(plan: &'t Tenancy, devices: Vec<Device<'m>>) -> Self {
        let mut fabric = Fabric::new(plan.seed, plan.link);
        match &plan.faults.script {
            Some(script) => fabric.add_rule(Script::new(script)),
            None => fabric.add_rule(RandomFaults {
                loss_per_mille: plan.faults.loss,
                duplicate_per_mille: plan.faults.duplicate,
                reorder_per_mille: plan.faults.reorder,
                corrupt_per_mille: plan.faults.corrupt,
                delay_max: plan.faults.delay_max,
            }),
        };
        let mut world = Self {
            plan,
            now: Instant::ZERO,
            controller: None,
            older: None,
            incarnation: 0,
            #[cfg(feature = "planted")]
            earlier: None,
            devices,
            jobs: plan.jobs.iter().enumerate().map(|(index, job)| Job::new(index, job, plan.planted)).collect(),
            hosts: Hosts::new(plan),
            fabric,
            alarms: BTreeMap::new(),
            alarm_numbers: 0,
            messages: BTreeMap::new(),
            message_numbers: 0,
            on_wire: 0,
            last: BTreeMap::new(),
            blocked: BTreeSet::new(),
            conns: BTreeMap::new(),
            healed_at: Instant::ZERO + plan.healed_at(),
            steps_left: plan.strike.map_or(0, |strike| strike.nth),
            draw: Draw::new(weight(&[plan.seed, 0x776f_726c])),
            touched: BTreeSet::new(),
            timers: BTreeSet::new(),
            timer_of: BTreeMap::new(),
            buffer: vec![0; 65_536],
            watch: Watch::default(),
            report: TenantReport::of(plan),
        };
        plan.note(&mut world.report.seen);
        world.start_controller();
        plan.incidents
            .iter()
            .for_each(|(at, incident)| world.schedule(Instant::ZERO + *at, Alarm::Incident(*incident)));
        (0..plan.capacities.len()).for_each(|device| world.schedule(Instant::ZERO, Alarm::DialDevice(device)));
        for (job, plan) in plan.jobs.iter().enumerate() {
            for rank in 0..plan.world {
                let skew = Duration::from_micros(world.draw.below(5_000));
                world.schedule(Instant::ZERO + DEVICES_FIRST + plan.at + skew, Alarm::Rank(job, rank));
            }
        }
        world
    }

    pub(super) fn schedule(&mut self, at: Instant, alarm: Alarm) {
        self.alarm_numbers += 1;
        self.alarms.insert((at, self.alarm_numbers), alarm);
    }

    /// Run until every rank has an end, and then until everything kept by a lease has expired.
    pub(super) fn run(&mut self) -> Result<TenantReport, Violation> {
        while !self.jobs.iter().all(Job::has_ended) {
            let next = self.next_event().filter(|&at| at - Instant::ZERO < TIME_LIMIT);
            let next = next.ok_or_else(|| self.hang())?;
            self.turn(next)?;
        }
        let ended = self.now;
        let end = ended.max(self.healed_at) + 3 * self.plan.lease + SETTLE;
        while let Some(next) = self.next_event().filter(|&at| at < end) {
            self.turn(next)?;
        }
        self.check_end()?;
        self.report.took = ended - Instant::ZERO;
        self.report.log_hash = weight(&[self.fabric.log_hash(), self.message_numbers, self.watch.hash]);
        Ok(self.report.clone())
    }

    fn hang(&self) -> Violation {
        let waits = |job: &Job| job.ranks.iter().position(|rank| !matches!(rank.phase, Phase::Ended(_)));
        let found = self.jobs.iter().find_map(|job| Some((job.index, waits(job)?)));
        let (job, rank) = found.unwrap_or_default();
        let member = &self.jobs[job].ranks[rank];
        let what = format!(
            "at {:?} rank {rank} of job {job} still waits, in {:?}{} of epoch {} view {} after {} of {} operations",
            self.now - Instant::ZERO,
            member.phase,
            member.program.as_ref().map(|program| format!(" ({program})")).unwrap_or_default(),
            member.epoch,
            member.view,
            member.done,
            self.plan.jobs[job].ops.len()
        );
        Violation { oracle: "hang", what }
    }

    fn next_event(&self) -> Option<Instant> {
        let alarms = self.alarms.keys().next().map(|&(at, _)| at);
        let messages = self.messages.keys().next().map(|&(at, _)| at);
        let timers = self.timers.first().map(|&(at, _)| at);
        let controllers = [&self.controller, &self.older].into_iter().flatten();
        let controllers = controllers.map(|controller| controller.machine.poll_timeout()).min();
        [alarms, messages, timers, controllers, self.fabric.next_event()].into_iter().flatten().min()
    }

    fn turn(&mut self, next: Instant) -> Result<(), Violation> {
        self.now = self.now.max(next);
        while let Some(entry) = self.alarms.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let alarm = entry.remove();
            self.on_alarm(alarm)?;
        }
        while let Some(entry) = self.messages.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let message = entry.remove();
            self.take(message)?;
        }
        self.deliver()?;
        self.time_out();
        self.poll_touched()?;
        self.serve()?;
        self.check_controller()
    }

    fn on_alarm(&mut self, alarm: Alarm) -> Result<(), Violation> {
        match alarm {
            Alarm::Incident(incident) => self.apply_incident(incident)?,
            Alarm::Boot(device) => self.boot(device),
            Alarm::Answer(device) => self.answer_backlog(device)?,
            Alarm::ControllerUp => self.start_controller(),
            Alarm::OlderGone => self.stop_older(),
            Alarm::DialDevice(device) => self.dial_device(device),
            Alarm::Rank(job, rank) => self.advance((job, rank))?,
            Alarm::Redial(job, rank) => self.redial((job, rank)),
            Alarm::Blocked(job, rank) => self.stay_blocked((job, rank))?,
            Alarm::Ended(conn, peer) => self.end_of(conn, peer)?,
            Alarm::Sweep => {}
            Alarm::Drop(job, rank, handle) => self.drop_handle((job, rank), handle),
            Alarm::StartHostDevice(host) => self.start_host_device(host),
            Alarm::LeaderLeaves(job, rank) => self.release_leader((job, rank)),
        }
        Ok(())
    }

    /// Count a step of an offer. The incident after it comes before all messages that are still under way.
    pub(super) fn reach(&mut self, step: Step) {
        let Some(strike) = self.plan.strike.filter(|strike| strike.after == step && self.steps_left > 0) else {
            return;
        };
        self.steps_left -= 1;
        if self.steps_left == 0 {
            self.healed_at = self.healed_at.max(self.now + strike.incident.len());
            self.schedule(self.now, Alarm::Incident(strike.incident));
        }
    }

    /// Return whether the incident after a step has happened.
    pub(super) fn has_struck(&self) -> bool {
        self.plan.strike.is_some() && self.steps_left == 0
    }

    fn apply_incident(&mut self, incident: Incident) -> Result<(), Violation> {
        match incident {
            Incident::Die(device, len) => self.kill_device(device, len),
            Incident::Stall(device, len) => {
                let device_ = &mut self.devices[device];
                device_.stalled_until = device_.stalled_until.max(self.now + len);
                self.report.seen.note(Mark::DeviceStalls);
                self.schedule(self.now + len, Alarm::Answer(device));
            }
            Incident::Mute(device, shard, len) => self.mute_shard((device, shard), len),
            Incident::Refuse(device, count) => self.devices[device].refuses += count,
            Incident::CutDevice(device) => {
                if let Some(conn) = self.devices[device].conn {
                    self.cut(conn);
                }
            }
            Incident::Controller(len) => self.stop_controller(len),
            Incident::Succeed(len) => self.succeed_controller(len),
            Incident::Block(job, rank, len, asks) => self.block((job, rank), len, asks)?,
            Incident::Kill(job, rank) => self.kill_rank((job, rank))?,
            Incident::CutHostDevice(job, rank) => self.cut_host_device((job, rank)),
            Incident::EndHostDevice(job, rank) => self.lose_host_device((job, rank)),
            Incident::CutRank(job, rank) => {
                if let Some(conn) = self.jobs[job].ranks[rank].conn {
                    self.jobs[job].is_disturbed = true;
                    self.cut(conn);
                }
            }
        }
        Ok(())
    }

    fn deliver(&mut self) -> Result<(), Violation> {
        for _ in 0..BURST {
            let Some(delivery) = self.fabric.poll_delivery(self.now) else { return Ok(()) };
            self.check_contribution(&delivery)?;
            match owner(delivery.to) {
                (Actor::Device(device), shard) => self.deliver_to_device((device, shard as usize), &delivery),
                (Actor::Rank(job, rank), view) => self.deliver_to_rank((job, rank), view, &delivery)?,
            }
        }
        Ok(())
    }

    fn time_out(&mut self) {
        let due: Vec<Actor> =
            self.timers.iter().take_while(|(at, _)| *at <= self.now).map(|&(_, actor)| actor).collect();
        for actor in due {
            match actor {
                Actor::Device(device) => {
                    let now = self.device_time(device);
                    self.devices[device].shards.iter_mut().for_each(|shard| shard.node.handle_timeout(now));
                }
                Actor::Rank(job, rank) => {
                    let now = self.rank_time((job, rank));
                    if let Some(endpoint) = &mut self.jobs[job].ranks[rank].endpoint {
                        endpoint.handle_timeout(now);
                    }
                }
            }
            self.touched.insert(actor);
        }
    }

    fn poll_touched(&mut self) -> Result<(), Violation> {
        while let Some(actor) = self.touched.pop_first() {
            let wake_at = match actor {
                Actor::Device(device) => self.poll_device(device)?,
                Actor::Rank(job, rank) => self.poll_rank((job, rank))?,
            };
            if let Some(at) = self.timer_of.remove(&actor) {
                self.timers.remove(&(at, actor));
            }
            if let Some(at) = wake_at {
                self.timers.insert((at, actor));
                self.timer_of.insert(actor, at);
            }
        }
        Ok(())
    }

    fn poll_device(&mut self, device: usize) -> Result<Option<Instant>, Violation> {
        let now = self.device_time(device);
        for (index, ShardOf { node, mute_until, .. }) in self.devices[device].shards.iter_mut().enumerate() {
            while let Some(sent) = node.poll_transmit(now) {
                let bytes = sent.write(node.payload(&sent), &mut self.buffer);
                if *mute_until <= self.now {
                    self.fabric.send(self.now, shard_addr(device, index), sent.to, bytes);
                }
            }
        }
        let wake_at = self.devices[device].shards.iter().filter_map(|shard| shard.node.poll_timeout()).min();
        self.note_events(device)?;
        Ok(wake_at.map(|at| Clock::draw(self.plan.seed, ClockOwner::Device(device)).when(at)))
    }

    fn poll_rank(&mut self, at: (usize, usize)) -> Result<Option<Instant>, Violation> {
        let now = self.rank_time(at);
        self.reclaim_dropped(at);
        self.check_held_buffers(at)?;
        let member = &mut self.jobs[at.0].ranks[at.1];
        let from = rank_addr(at.0, at.1, member.epoch);
        if let Some(endpoint) = &mut member.endpoint {
            let started = member.program.as_mut().map(|program| program.operations.buffers());
            while let Some(sent) = match &started {
                Some(started) => endpoint.poll_transmit(now, started),
                None => endpoint.poll_transmit(now, &member.memory),
            } {
                self.fabric.send(self.now, from, sent.to, sent.write(sent.payload, &mut self.buffer));
            }
        }
        self.collect(at)?;
        self.advance(at)?;
        let member = &mut self.jobs[at.0].ranks[at.1];
        let wake_at = member.endpoint.as_ref().and_then(|endpoint| endpoint.poll_timeout());
        Ok(wake_at.map(|at_| self.clock_of(at).when(at_)))
    }

    pub(super) fn device_time(&self, device: usize) -> Instant {
        Clock::draw(self.plan.seed, ClockOwner::Device(device)).at(self.now)
    }

    fn clock_of(&self, (job, rank): (usize, usize)) -> Clock {
        Clock::draw(self.plan.seed, ClockOwner::Rank(job * 256 + rank))
    }

    pub(super) fn rank_time(&self, at: (usize, usize)) -> Instant {
        self.clock_of(at).at(self.now)
    }

    /// Return the link faults that happened.
    pub(super) fn faults(&self) -> Vec<NthPacket> {
        self.fabric.faults().to_vec()
    }
}

const RANKS_FROM: u32 = 1 << 16;

/// The addresses of the shards behind the first.
const SHARDS_FROM: u32 = 1 << 12;

/// Addresses per rank: one per view.
const VIEWS: u32 = 64;

/// Packets that a port returns per burst.
const BURST: usize = 32;

/// Devices connect before the first jobs arrive.
pub(super) const DEVICES_FIRST: Duration = Duration::from_millis(400);

/// No run of these sizes takes this long.
const TIME_LIMIT: Duration = Duration::from_secs(900);

/// Time after the last end, for stalled devices and messages in flight.
const SETTLE: Duration = Duration::from_secs(15);
