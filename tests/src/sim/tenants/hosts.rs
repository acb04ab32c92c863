//! Ranks that share a host, and the device that the lowest of them runs ([`sumac::transport::local`]).
//!
//! A host device is a production node as any device. It dials with the ticket that its rank was given, and redials as
//! any device does. It ends with its rank: at once if the rank dies, and after the other ranks of the host if it
//! leaves. The ranks below it use packets; zero-copy has a simulator of its own ([`ZeroCopy`](crate::sim::ZeroCopy)).
//!
//! Drawn: which ranks share a machine, host by host or round-robin, and how many; host devices that fail to start,
//! start late or never; that lose their connection, end before their ranks do, or go on after them; ranks that die with
//! their host device; devices with several shards, all with as many or one with another number, and shards that are
//! silent.
//!
//! Oracles: only the lowest rank of several is asked for a device; in a tree with a host device, no rank of that host
//! contributes elsewhere; a host device is in trees, claims and quotas of its job only, and only ranks of its host
//! contribute to it; nothing of it is left after its job.

use super::TenantViolation as Violation;
use super::draw::{DeviceCapacity, Incident, JobPlan, Tenancy};
use super::job::{End, Phase};
use super::watch::index_in;
use super::world::{Actor, Alarm, DEVICES_FIRST, World, owner};
use crate::oracle::weight;
use crate::sim::controller::incarnation_of;
use crate::sim::coverage::Mark;
use crate::sim::options::{Draw, draw_ops};
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::controller::is_host_device;
use sumac::controller::machine::{ClaimRecord, ConnId};
use sumac::controller::proto::{ClientRequest, HostLead, StatusReport};
use sumac_hal::ctrl::{Hello, JobTicket, Name};
use sumac_hal::emu::Delivery;
use sumac_hal::ids::{GroupId, Rank};
use sumac_hal::wire::{Kind, Packet, Repr};

/// The capacity of a host device: a tree and the next one.
pub(super) const HOST_CAPACITY: DeviceCapacity =
    DeviceCapacity { groups: 4, children: 128, slots: 256, bytes: 256 << 10 };

/// The hosts of a world that several ranks of a job share. Their devices come after those of the plan, in this order.
pub(super) struct Hosts {
    draw: Draw,
    all: Vec<Host>,
    /// For each group and host: whether its ranks, and whether its device, contribute to devices elsewhere.
    contributed: BTreeMap<(GroupId, usize), [bool; 2]>,
}

struct Host {
    job: usize,
    /// In order. The lowest one runs the device.
    ranks: Vec<usize>,
    /// `Some` once its rank was asked for the device.
    ticket: Option<JobTicket>,
    /// The number of controllers when its rank was asked.
    asked_by: u64,
    /// It goes on after its rank.
    outlives_rank: bool,
    /// How often it was disconnected or refused after that.
    refusals: u32,
}

impl Host {
    fn leader(&self) -> (usize, usize) {
        (self.job, self.ranks[0])
    }

    const fn has_given_up(&self) -> bool {
        self.refusals >= REFUSALS_MAX
    }
}

impl Hosts {
    pub(super) fn new(plan: &Tenancy) -> Self {
        let mut draw = Draw::new(weight(&[plan.seed, 0x6465_7669]));
        let hosts = plan.shared_hosts().into_iter().map(|(job, ranks)| {
            let outlives_rank = draw.chance(200);
            Host { job, ranks, ticket: None, asked_by: 0, outlives_rank, refusals: 0 }
        });
        Self { all: hosts.collect(), draw, contributed: BTreeMap::new() }
    }

    /// The host whose device this rank runs.
    fn led_by(&self, at: (usize, usize)) -> Option<usize> {
        self.all.iter().position(|host| host.leader() == at)
    }
}

impl JobPlan {
    /// The name of a rank's machine, if ranks of the job share some.
    pub(super) fn machine(&self, rank: usize) -> Option<Name> {
        let machine = self.machines.get(rank)?;
        Some(Name::try_from(format!("m{machine}").as_str()).expect("short"))
    }
}

impl Tenancy {
    /// Draw the parameters of a seed, for ranks that share hosts.
    pub fn draw_hosts(seed: u64) -> Self {
        let mut plan = Self { shares_hosts: true, ..Self::draw(seed) };
        let mut draw = Draw::new(weight(&[seed, 0x686f_7374]));
        let by_ranks = draw.one_of(&[0, 0, 350]);
        plan.draw_shards();
        let most = u64::from(plan.window_chunks) - 2;
        for (index, job) in plan.jobs.iter_mut().enumerate().filter(|(_, job)| job.world < 20) {
            if draw.chance(800) {
                share_hosts(&mut draw, job);
                // Of these jobs, no two are alike.
                job.kind = KINDS_FROM + index;
                let chunks = (20 / job.world as u64).clamp(1, 6).max(most / 3).min(most);
                let rounds = 1 + draw.below(4) + if draw.chance(300) { 12 } else { 0 };
                job.ops =
                    (0..rounds).flat_map(|_| draw_ops(&mut draw, job.world, plan.chunk_len_bytes, chunks)).collect();
                job.by_ranks = job.ops.iter().map(|_| [draw.chance(by_ranks), draw.chance(by_ranks)]).collect();
            }
        }
        plan.draw_losses(&mut draw);
        plan
    }

    /// Draw the shards of devices: one in half of the runs, and as many on all of them in most of the others. Host
    /// devices have one.
    fn draw_shards(&mut self) {
        let mut draw = Draw::new(weight(&[self.seed, 0x7368_6172]));
        let count = draw.one_of(&[1, 1, 2, 3]);
        self.shards = vec![count; self.capacities.len()];
        if count > 1 {
            self.window_chunks = draw.one_of(&[8, 40, 80]);
            let odd = draw.below(8 * self.shards.len() as u64) as usize;
            self.shards.get_mut(odd).into_iter().for_each(|shards| *shards += 1);
            for _ in 0..draw.one_of(&[0, 0, 1, 3]) {
                let device = draw.below(self.shards.len() as u64) as usize;
                let shard = draw.below(self.shards[device].into()) as usize;
                let job = draw.below(self.jobs.len() as u64) as usize;
                let scale = draw.one_of(&[30_000, 500_000, 6_000_000]);
                let at = self.jobs[job].at + DEVICES_FIRST + Duration::from_micros(draw.below(scale));
                let len = Duration::from_millis(draw.one_of(&[3, 200, 4_000, 7_000]));
                self.incidents.push((at, Incident::Mute(device, shard, len)));
            }
            self.incidents.sort_by_key(|(at, _)| *at);
        }
    }

    /// The number of shards of a device of the plan, or of a host device.
    pub(super) fn shards_of(&self, device: usize) -> u16 {
        self.shards.get(device).copied().unwrap_or(1)
    }

    /// Losses of host devices, and of the controller that they come back to: each kind is off in most runs.
    fn draw_losses(&mut self, draw: &mut Draw) {
        let kinds = [draw.chance(300), draw.chance(300), draw.chance(200)];
        for (job, ranks) in self.shared_hosts() {
            let incidents = [Incident::CutHostDevice, Incident::EndHostDevice, Incident::Kill];
            for (incident, _) in incidents.into_iter().zip(kinds).filter(|(_, is_on)| *is_on) {
                if draw.chance(500) {
                    let scale = draw.one_of(&[30_000, 500_000, 6_000_000]);
                    let at = self.jobs[job].at + DEVICES_FIRST + Duration::from_micros(draw.below(scale));
                    self.incidents.push((at, incident(job, ranks[0])));
                }
            }
        }
        if draw.chance(150) {
            let job = draw.below(self.jobs.len() as u64) as usize;
            let at = self.jobs[job].at + DEVICES_FIRST + Duration::from_micros(draw.below(1_500_000));
            let len = Duration::from_millis(draw.one_of(&[100, 1_500, 7_000]));
            let incident = if draw.chance(700) { Incident::Controller(len) } else { Incident::Succeed(len) };
            self.incidents.push((at, incident));
        }
        self.incidents.sort_by_key(|(at, _)| *at);
    }

    /// The hosts with several ranks of a job, in order of job and lowest rank.
    pub(super) fn shared_hosts(&self) -> Vec<(usize, Vec<usize>)> {
        let mut hosts = Vec::new();
        for (job, plan) in self.jobs.iter().enumerate() {
            let mut machines: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
            for (rank, machine) in plan.machines.iter().enumerate() {
                machines.entry(*machine).or_default().push(rank);
            }
            let mut shared: Vec<_> = machines.into_values().filter(|ranks| ranks.len() > 1).collect();
            shared.sort();
            hosts.extend(shared.into_iter().map(|ranks| (job, ranks)));
        }
        hosts
    }

    /// The capacity of a device of the plan, or of a host device.
    pub(super) fn capacity(&self, device: usize) -> &DeviceCapacity {
        self.capacities.get(device).unwrap_or(&HOST_CAPACITY)
    }
}

/// Place a job's ranks on few machines, one a host of the fabric if there is one. Their number does not shrink, because
/// incidents name ranks.
fn share_hosts(draw: &mut Draw, job: &mut JobPlan) {
    let most = if job.hosts.is_empty() { 3 } else { job.hosts.len().min(4) as u64 };
    let count = 1 + draw.below(most) as usize;
    let mut sizes: Vec<usize> = (0..count).map(|_| 1 + draw.below(4) as usize).collect();
    sizes[0] += job.world.saturating_sub(sizes.iter().sum());
    let is_round_robin = draw.chance(500);
    let mut machines = Vec::new();
    while sizes.iter().any(|left| *left > 0) {
        for (machine, left) in sizes.iter_mut().enumerate().filter(|(_, left)| **left > 0) {
            let taken = if is_round_robin { 1 } else { *left };
            machines.extend(std::iter::repeat_n(machine, taken));
            *left -= taken;
        }
    }
    job.world = machines.len();
    if !job.hosts.is_empty() {
        job.hosts = machines.iter().map(|machine| job.hosts[*machine].clone()).collect();
    }
    // Jobs have machines in common.
    let first = draw.below(2) as usize;
    job.machines = machines.into_iter().map(|machine| first + machine).collect();
}

impl World<'_, '_> {
    /// The device of a host.
    fn device_of(&self, host: usize) -> usize {
        self.plan.capacities.len() + host
    }

    /// The host of a host device.
    fn host_of(&self, device: usize) -> Option<usize> {
        device.checked_sub(self.plan.capacities.len())
    }

    /// The device of a name.
    pub(super) fn device_index(&self, name: &str) -> usize {
        if !is_host_device(name) {
            return index_in(name, "d");
        }
        self.devices.iter().position(|device| device.name == name).expect("a rank was given this name")
    }

    /// What a device says first; `None` if it does not dial.
    pub(super) fn hello(&self, device: usize) -> Option<Hello> {
        let announce = self.devices[device].announce(device);
        let Some(host) = self.host_of(device) else { return Some(Hello::Device(announce)) };
        let host = &self.hosts.all[host];
        let ticket = host.ticket.clone().filter(|_| !host.has_given_up())?;
        Some(Hello::HostDevice { announce, ticket })
    }

    /// The controller asks a rank for the device of its host.
    pub(super) fn lead_host(&mut self, at: (usize, usize), lead: HostLead) -> Result<(), Violation> {
        let Some(host) = self.hosts.led_by(at) else {
            let what = format!("job {} rank {} is asked for a device", at.0, at.1);
            return Err(Violation { oracle: "wrong leader", what });
        };
        let asked_by = self.incarnation;
        let ticket = lead.ticket(&self.plan.name_of(at.0), Rank(at.1 as u32));
        (self.hosts.all[host].ticket, self.hosts.all[host].asked_by) = (ticket, asked_by);
        let device = self.device_of(host);
        self.devices[device].name = lead.device;
        let draw = &mut self.hosts.draw;
        let delay = match draw.below(20) {
            0 => {
                self.report.seen.note(Mark::HostDeviceMissing);
                self.ask_controller(at, ClientRequest::HostDeviceFailed { why: "no memory".into() });
                return Ok(());
            }
            1 => {
                self.report.seen.note(Mark::HostDeviceMissing);
                // Before the limit of the controller, after it, or not at all.
                match draw.below(3) {
                    0 => return Ok(()),
                    n => Duration::from_secs(2 + 3 * n),
                }
            }
            _ => Duration::from_micros(draw.below(50_000)),
        };
        self.schedule(self.now + delay, Alarm::StartHostDevice(host));
        Ok(())
    }

    pub(super) fn start_host_device(&mut self, host: usize) {
        let (plan, device, (job, rank)) = (self.plan, self.device_of(host), self.hosts.all[host].leader());
        if matches!(self.jobs[job].ranks[rank].phase, Phase::Ended(_)) {
            return;
        }
        self.devices[device].start(plan, device);
        self.report.seen.note(Mark::HostDeviceStarted);
        self.dial_device(device);
    }

    /// The connection of a host device ends.
    pub(super) fn cut_host_device(&mut self, at: (usize, usize)) {
        let conn = self.hosts.led_by(at).and_then(|host| self.devices[self.device_of(host)].conn);
        if let Some(conn) = conn {
            self.cut(conn);
        }
    }

    /// A host device ends, and its rank goes on.
    pub(super) fn lose_host_device(&mut self, at: (usize, usize)) {
        let Some(device) = self.hosts.led_by(at).map(|host| self.device_of(host)) else { return };
        if self.devices[device].is_on() {
            self.report.seen.note(Mark::HostDeviceLost);
            self.turn_off(device);
        }
    }

    /// A rank ends. Returns whether it keeps its connection until the other ranks of its host have left.
    pub(super) fn end_leader(&mut self, at: (usize, usize), (end, leaves): (End, bool)) -> bool {
        let Some(device) = self.hosts.led_by(at).map(|host| self.device_of(host)) else { return false };
        if !self.devices[device].is_on() {
            return false;
        }
        if end == End::Killed {
            self.report.seen.note(Mark::HostLeaderDied);
            self.turn_off(device);
            return false;
        }
        if leaves && self.member(at).conn.is_some() {
            self.report.seen.note(Mark::HostLeaderWaits);
            self.schedule(self.now + HOST_RANKS_TIMEOUT, Alarm::LeaderLeaves(at.0, at.1));
            return true;
        }
        self.stop_host_device(device);
        false
    }

    /// A rank that has left is released, has waited for long enough, or has lost the controller.
    pub(super) fn release_leader(&mut self, at: (usize, usize)) {
        if !matches!(self.member(at).phase, Phase::Ended(_)) {
            return;
        }
        if let Some(conn) = self.member(at).conn.take() {
            self.close(conn);
        }
        if let Some(device) = self.hosts.led_by(at).map(|host| self.device_of(host)) {
            self.stop_host_device(device);
        }
    }

    /// The rank of a host device has ended. Some devices go on: the controller must not depend on their end.
    fn stop_host_device(&mut self, device: usize) {
        let outlives_rank = self.host_of(device).is_some_and(|host| self.hosts.all[host].outlives_rank);
        if !outlives_rank {
            self.turn_off(device);
        }
    }

    /// A device gets a request of a controller that has accepted it.
    pub(super) fn note_request(&mut self, device: usize, conn: ConnId) {
        let host = self.host_of(device).map(|host| &self.hosts.all[host]);
        if host.is_some_and(|host| incarnation_of(conn) >= host.asked_by) {
            self.report.seen.note(Mark::HostDeviceBack);
        }
    }

    /// The connection of a device has ended. A host device whose rank has ended loses its connection with its job, and
    /// is refused from then on; after a few attempts it gives up.
    pub(super) fn note_end_of_host_device(&mut self, device: usize) {
        let Some(host) = self.host_of(device) else { return };
        let (job, rank) = self.hosts.all[host].leader();
        if matches!(self.jobs[job].ranks[rank].phase, Phase::Ended(_)) {
            let host = &mut self.hosts.all[host];
            host.refusals += 1;
            if host.has_given_up() {
                self.report.seen.note(Mark::HostDeviceRefused);
            }
        }
    }

    /// Check who contributes to whom.
    pub(super) fn check_contribution(&mut self, delivery: &Delivery) -> Result<(), Violation> {
        if self.hosts.all.is_empty() {
            return Ok(());
        }
        let (from, (to, shard)) = (owner(delivery.from).0, owner(delivery.to));
        let group = Packet::new_checked(&delivery.bytes).ok().and_then(|packet| Repr::parse(&packet).ok());
        let Some(Repr { group, .. }) = group.filter(|repr| repr.kind == Kind::Data) else { return Ok(()) };
        let Actor::Device(to) = to else { return Ok(()) };
        let host = match from {
            Actor::Device(device) => self.host_of(device),
            Actor::Rank(job, rank) => {
                self.hosts.all.iter().position(|host| host.job == job && host.ranks.contains(&rank))
            }
        };
        if let Some(other) = self.host_of(to) {
            if host != Some(other) || matches!(from, Actor::Device(_)) {
                let what = format!("{from:?} contributes to device {to} of job {}", self.hosts.all[other].job);
                return Err(Violation { oracle: "host device of others", what });
            }
            return Ok(());
        }
        let Some(host) = host else { return Ok(()) };
        let seen = self.hosts.contributed.entry((group, host)).or_default();
        let by_device = matches!(from, Actor::Device(_));
        if by_device && !seen[1] {
            self.report.seen.note(Mark::HostContributed);
        }
        if by_device && shard > 0 {
            self.report.seen.note(Mark::HostShards);
        }
        seen[usize::from(by_device)] = true;
        if *seen == [true; 2] {
            let Host { job, ranks, .. } = &self.hosts.all[host];
            let what = format!("the host of ranks {ranks:?} of job {job} also contributes as {from:?} to {group}");
            return Err(Violation { oracle: "host contributes twice", what });
        }
        Ok(())
    }

    /// A host device is in trees and claims of its job only.
    pub(super) fn check_host_devices(&self, report: &StatusReport, booked: &[ClaimRecord]) -> Result<(), Violation> {
        let job_of = |name: &str| {
            let host = is_host_device(name).then(|| self.host_of(self.device_index(name))).flatten();
            host.map(|host| self.hosts.all[host].job)
        };
        let found = |what| Err(Violation { oracle: "host device of others", what });
        for status in &report.jobs {
            let job = self.plan.job_named(&status.name);
            let devices = status.tree.iter().flatten().flat_map(|tree| &tree.devices);
            if let Some(device) = devices.into_iter().find(|name| job_of(name).is_some_and(|own| own != job)) {
                return found(format!("{device} is in the tree of job {job}"));
            }
        }
        for claim in booked {
            if job_of(&claim.device).is_some_and(|job| claim.tenant != Tenancy::tenant(self.plan.jobs[job].tenant)) {
                return found(format!("{claim:?}"));
            }
        }
        Ok(())
    }

    /// All jobs are over: no host device is connected, and none holds a group.
    pub(super) fn check_no_host_device(&self) -> Result<(), Violation> {
        for host in 0..self.hosts.all.len() {
            let device = &self.devices[self.device_of(host)];
            let held = device.in_use();
            if device.conn.is_some() || held.is_some_and(|held| held != (0, 0, 0)) {
                let Host { job, ranks, .. } = &self.hosts.all[host];
                let what = format!(
                    "the device of ranks {ranks:?} of job {job}, on {:?} with groups, slots and bytes {held:?}",
                    device.conn
                );
                return Err(Violation { oracle: "left behind", what });
            }
        }
        Ok(())
    }
}

/// How long a rank waits with its host device for the other ranks of its host.
const HOST_RANKS_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a host device without its rank is disconnected or refused until it gives up.
const REFUSALS_MAX: u32 = 3;

/// Other kinds of jobs are below.
const KINDS_FROM: usize = 1 << 16;
