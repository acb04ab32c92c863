//! What a seed draws: devices and fabric, tenants and quotas, jobs, and incidents.

use super::takeover::Takeover;
use super::world::DEVICES_FIRST;
use crate::oracle::weight;
use crate::sim::faults::Faults;
use crate::sim::options::{Draw, draw_ops};
use crate::sim::planted::Planted;
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::controller::{ControllerConfig, Limits, Quota, Quotas};
use sumac::topo::Fabric;
use sumac_hal::ctrl::Order;
use sumac_hal::emu::LinkConfig;
use sumac_hal::op::OpDesc;

/// A tenants run and its parameters.
#[derive(Debug, Clone)]
pub struct Tenancy {
    /// The seed of these parameters and of the run.
    pub seed: u64,
    /// Levels of switches.
    pub levels: u32,
    /// The fabric file; `None` if any device serves all ranks.
    pub fabric: Option<String>,
    /// Capacity of each device.
    pub capacities: Vec<DeviceCapacity>,
    /// Quota of each tenant.
    pub quotas: Vec<Quota>,
    /// Lease of groups.
    pub lease: Duration,
    /// Payload limit, in bytes.
    pub chunk_len_bytes: u16,
    /// Maximum window, in chunks.
    pub window_chunks: u16,
    /// Shards of each device; one each if empty.
    pub shards: Vec<u16>,
    /// The jobs, by arrival.
    pub jobs: Vec<JobPlan>,
    /// Incidents, and when they happen.
    pub incidents: Vec<(Duration, Incident)>,
    /// An incident right after a step of an offer.
    pub strike: Option<Strike>,
    /// Link faults.
    pub faults: Faults,
    /// Properties of every path.
    pub link: LinkConfig,
    /// Maximum delay of a message to or from the controller.
    pub message_delay_max: Duration,
    /// Which ranks come back to a restarted controller.
    pub takeover: Takeover,
    /// Whether ranks of some jobs start several operations at once.
    pub starts: bool,
    /// Whether ranks of some jobs share hosts, and run host devices.
    pub shares_hosts: bool,
    /// Whether some jobs are on several trees.
    pub has_stripes: bool,
    /// The planted bug, if any.
    pub planted: Planted,
}

/// The capacity of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceCapacity {
    /// Groups.
    pub groups: usize,
    /// Children of all groups.
    pub children: usize,
    /// Slots.
    pub slots: usize,
    /// Slot memory, in bytes.
    pub bytes: usize,
}

/// A job.
#[derive(Debug, Clone, PartialEq)]
pub struct JobPlan {
    /// Index of its tenant.
    pub tenant: usize,
    /// When its ranks arrive.
    pub at: Duration,
    /// Hosts of its ranks, if the fabric has hosts.
    pub hosts: Vec<String>,
    /// Machines of its ranks, if some share one and combine there.
    pub machines: Vec<usize>,
    /// Number of ranks.
    pub world: usize,
    /// The declared order.
    pub order: Order,
    /// How long joining waits for a tree, in milliseconds.
    pub wait_ms: u32,
    /// Whether it accepts a tree that is offered later.
    pub moves: bool,
    /// Its operations.
    pub ops: Vec<OpDesc>,
    /// Which of them are host collectives in even and in odd views that have a tree; all others run in the tree.
    pub by_ranks: Vec<[bool; 2]>,
    /// Whether some of its calls are refused and made again.
    pub refuses: bool,
    /// The number of operations that its ranks may start at once, in the tree and as host collectives; `None` if they
    /// call one after the other.
    pub starts: Option<usize>,
    /// Maximum time of a rank between two calls.
    pub think_max: Duration,
    /// Jobs of the same kind need the same resources.
    pub kind: usize,
    /// How many trees it requests; 0: as many as are faster.
    pub trees: u8,
    /// The job whose further tree it has, and which, if it is a stripe.
    pub stripe: Option<(usize, u8)>,
}

/// An incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incident {
    /// A device is down for a while, and then restarts with empty tables.
    Die(usize, Duration),
    /// A device does not reply to its controller for a while, but serves packets.
    Stall(usize, Duration),
    /// A shard of a device neither receives nor sends packets for a while.
    Mute(usize, usize, Duration),
    /// A device refuses the next groups.
    Refuse(usize, u32),
    /// A device's connection to the controller ends.
    CutDevice(usize),
    /// The controller loses its state, and is away for a while.
    Controller(Duration),
    /// A rank of a job dies.
    Kill(usize, usize),
    /// A rank's connection to the controller ends.
    CutRank(usize, usize),
    /// The connection of the host device that a rank runs ends.
    CutHostDevice(usize, usize),
    /// The host device that a rank runs ends, and the rank goes on.
    EndHostDevice(usize, usize),
    /// Another controller starts, and this one keeps running for a while with connections that it has.
    Succeed(Duration),
    /// A rank does not read from its connection to the controller for a while; if true, it keeps asking for reports.
    Block(usize, usize, Duration, bool),
}

/// A step of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A rank is offered a tree.
    Offered,
    /// A rank's promise to hold its calls reaches the controller.
    Promised,
    /// A rank is told the call where all ranks move.
    Scheduled,
    /// A rank has voted on the tree.
    Voted,
}

/// An incident right after the given number of such steps, of all jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strike {
    /// The step.
    pub after: Step,
    /// Counts from 1.
    pub nth: u64,
    /// The incident.
    pub incident: Incident,
}

impl Incident {
    /// Return how long it lasts.
    pub(super) const fn len(&self) -> Duration {
        match self {
            Self::Die(_, len)
            | Self::Stall(_, len)
            | Self::Mute(_, _, len)
            | Self::Controller(len)
            | Self::Succeed(len)
            | Self::Block(_, _, len, _) => *len,
            _ => Duration::ZERO,
        }
    }

    /// Return the job that it happens to.
    pub(super) const fn job(&self) -> Option<usize> {
        match self {
            Self::Kill(job, _) | Self::CutRank(job, _) | Self::Block(job, ..) => Some(*job),
            Self::CutHostDevice(job, _) | Self::EndHostDevice(job, _) => Some(*job),
            _ => None,
        }
    }
}

impl Tenancy {
    /// Draw the parameters of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut draw = Draw::new(weight(&[seed, 0x7465_6e61]));
        let chunk_len_bytes = 16 * (4 + draw.below(8) as u16);
        let (levels, fabric, devices, hosts) = draw_fabric(&mut draw);
        let capacities = draw_capacities(&mut draw, devices, usize::from(chunk_len_bytes));
        let tenants = 1 + draw.below(4) as usize;
        let quotas = (0..tenants).map(|_| draw_quota(&mut draw, u64::from(chunk_len_bytes))).collect();
        let mut jobs = draw_jobs(&mut draw, tenants, &hosts, fabric.is_some(), chunk_len_bytes);
        draw_calls(&mut Draw::new(weight(&[seed, 0x7061_7468])), &mut jobs);
        let mut incidents = draw_incidents(&mut draw, devices, &jobs);
        draw_blocked(&mut Draw::new(weight(&[seed, 0x626c_6f63])), &jobs, &mut incidents);
        draw_successor(&mut Draw::new(weight(&[seed, 0x7375_6363])), &jobs, &mut incidents);
        let faults = if draw.chance(500) { Faults::draw(&mut draw) } else { Faults::default() };
        Self {
            seed,
            levels,
            fabric,
            capacities,
            quotas,
            lease: Duration::from_millis(draw.one_of(&[1_000, 2_000, 9_000])),
            chunk_len_bytes,
            window_chunks: 8,
            shards: Vec::new(),
            jobs,
            incidents,
            strike: draw_strike(&mut Draw::new(weight(&[seed, STRIKES]))),
            faults,
            link: LinkConfig {
                latency: Duration::from_micros(draw.one_of(&[1, 5, 200])),
                bandwidth_bytes_per_s: None,
                receive_queue_bytes: None,
                mark_queue_bytes: None,
                max_packet_len_bytes: None,
            },
            message_delay_max: Duration::from_micros(draw.one_of(&[50, 2_000, 300_000])),
            takeover: if Draw::new(weight(&[seed, 0x7461_6b65])).chance(500) { Takeover::Some } else { Takeover::All },
            starts: false,
            shares_hosts: false,
            has_stripes: false,
            planted: Planted::default(),
        }
    }

    /// Return the name of a tenant.
    pub(super) fn tenant(index: usize) -> String {
        format!("tenant{index}")
    }

    /// Return the controller's configuration in one of its incarnations.
    pub(super) fn config(&self, incarnation: u64) -> ControllerConfig {
        let tenants = (0..).zip(&self.quotas).map(|(index, quota)| (Self::tenant(index), *quota)).collect();
        ControllerConfig {
            fabric: self.fabric.as_ref().map(|text| Fabric::from_toml(text).expect("a fabric")),
            window_bytes: u32::from(self.window_chunks) * u32::from(self.chunk_len_bytes),
            chunk_max_bytes: self.chunk_len_bytes,
            multicast_results: false,
            lease: self.lease,
            quotas: Quotas { other: Quota::default(), tenants },
            started_ms: Some(1_000_000 + 10_000 * incarnation),
            limits: Limits { peer_output_bytes: PEER_OUTPUT_BYTES, stalled: STALLED, ..Limits::default() },
            ..ControllerConfig::new()
        }
    }

    /// Return when the last incident with a time of its own is over.
    pub(super) fn healed_at(&self) -> Duration {
        self.incidents.iter().map(|(at, incident)| *at + incident.len()).max().unwrap_or_default()
    }
}

/// Draw a fabric: levels of switches, each level wired to the one below; or none, where any device serves all ranks.
/// Also returns the number of devices and the names of hosts.
fn draw_fabric(draw: &mut Draw) -> (u32, Option<String>, usize, Vec<String>) {
    let large = draw.chance(25);
    if draw.chance(400) {
        let devices = if large { 64 } else { 1 + draw.below(5) as usize };
        return (1, None, devices, Vec::new());
    }
    // One level is one switch, as another one could not be reached.
    let levels = 1 + draw.below(4) as usize;
    // A tree of switches, doubling per level, has deeper trees than a fabric with two uplinks everywhere.
    let doubles = !large && draw.chance(400);
    let widths: Vec<usize> = match (large, levels) {
        _ if doubles => (0..levels).rev().map(|level| 1 << level).collect(),
        (true, 1 | 2) => vec![60, 4],
        (true, 3) => vec![48, 12, 4],
        (true, _) => vec![40, 16, 6, 2],
        (false, 1) => vec![1],
        _ => {
            let mut width = |level| if level == 0 { 2 + draw.below(3) } else { 1 + draw.below(2) };
            (0..levels).map(|level| width(level) as usize).collect()
        }
    };
    let mut text = String::new();
    let (mut hosts, mut below, mut devices) = (Vec::new(), Vec::new(), 0);
    for (level, width) in widths.iter().enumerate() {
        let here: Vec<usize> = (devices..devices + width).collect();
        devices += width;
        here.iter()
            .for_each(|device| text.push_str(&format!("[[switch]]\nname = \"d{device}\"\naggregation = true\n")));
        for device in &here {
            let count = if level > 0 { 0 } else { 1 + draw.below(if large { 2 } else { 4 }) };
            for _ in 0..count {
                let host = format!("h{}", hosts.len());
                text.push_str(&format!("[[host]]\nname = {host:?}\n[[link]]\nends = [{host:?}, \"d{device}\"]\n"));
                hosts.push(host);
            }
        }
        for (nth, low) in below.iter().enumerate() {
            // Two uplinks, if there are two switches above.
            let mut ups = [here[nth % width], here[(nth + 1) % width]].to_vec();
            ups.dedup();
            ups.truncate(if doubles { 0 } else { 2 });
            ups.extend(doubles.then(|| here[nth / 2]));
            ups.iter().for_each(|up| text.push_str(&format!("[[link]]\nends = [\"d{low}\", \"d{up}\"]\n")));
        }
        below = here;
    }
    (levels as u32, Some(text), devices, hosts)
}

fn draw_capacities(draw: &mut Draw, devices: usize, chunk: usize) -> Vec<DeviceCapacity> {
    let mut capacity = || DeviceCapacity {
        groups: 1 + draw.below(4) as usize,
        children: draw.one_of(&[8, 16, 40, 300]),
        slots: draw.one_of(&[8, 20, 32, 64]),
        bytes: chunk * draw.one_of(&[64, 200, 1_000, 5_000]),
    };
    let common = capacity();
    (0..devices).map(|_| if devices > 8 { common } else { capacity() }).collect()
}

fn draw_quota(draw: &mut Draw, chunk: u64) -> Quota {
    Quota {
        groups: draw.chance(300).then(|| draw.one_of(&[0, 1, 1, 2, 2, 3])),
        slots: draw.chance(200).then(|| draw.one_of(&[1, 8, 16, 24, 40])),
        memory_bytes: draw.chance(200).then(|| chunk * draw.one_of(&[1, 64, 200, 300])),
    }
}

/// Draw jobs of a few kinds, many alike, needing more than there is.
fn draw_jobs(
    draw: &mut Draw,
    tenants: usize,
    hosts: &[String],
    has_fabric: bool,
    chunk_len_bytes: u16,
) -> Vec<JobPlan> {
    let most = if has_fabric { hosts.len() } else { 12 };
    let count = if draw.chance(150) { 14 } else { 1 + draw.below(6) as usize };
    let large = draw.chance(15);
    let kinds: Vec<JobPlan> = (0..1 + draw.below(3))
        .map(|kind| {
            let world = match (large, has_fabric) {
                (true, false) => 256,
                (true, true) => most.min(256),
                _ => 1 + draw.below(most.min(if hosts.len() > 8 { 10 } else { 5 }) as u64) as usize,
            };
            let mut left = hosts.to_vec();
            let mut take = || left.swap_remove(draw.below(left.len() as u64) as usize);
            let hosts = if has_fabric { (0..world).map(|_| take()).collect() } else { Vec::new() };
            JobPlan {
                tenant: 0,
                at: Duration::ZERO,
                hosts,
                machines: Vec::new(),
                world,
                order: draw.one_of(&[Order::Arrival, Order::TreeFold, Order::TreePairwise]),
                wait_ms: draw.one_of(&[0, 0, 300, 5_000]),
                moves: draw.chance(800),
                ops: Vec::new(),
                by_ranks: Vec::new(),
                refuses: false,
                starts: None,
                think_max: Duration::ZERO,
                kind: kind as usize,
                trees: 0,
                stripe: None,
            }
        })
        .collect();
    let mut at = Duration::ZERO;
    let mut jobs = Vec::new();
    for _ in 0..if large { 2 } else { count } {
        let kind = &kinds[draw.below(kinds.len() as u64) as usize];
        at += Duration::from_millis(draw.one_of(&[0, 3, 200, 1_500]));
        // An offer takes effect some calls later, so only long jobs move.
        let is_long = kind.world < 9 && draw.chance(400);
        let rounds = if kind.world > 20 { 1 } else { 1 + draw.below(4) + if is_long { 12 } else { 0 } };
        let chunks = if is_long { 1 } else { (20 / kind.world as u64).clamp(1, 6) };
        let ops = (0..rounds).flat_map(|_| draw_ops(draw, kind.world, chunk_len_bytes, chunks)).collect();
        let think_max = if is_long { draw.one_of(&[5, 50, 150]) } else { draw.one_of(&[0, 5, 100, 700, 4_000]) };
        let think_max = Duration::from_millis(think_max);
        let (tenant, by_ranks) = (draw.below(tenants as u64) as usize, Vec::new());
        jobs.push(JobPlan { tenant, at, ops, by_ranks, think_max, ..kind.clone() });
    }
    jobs
}

/// Host collectives beside the tree, and refused calls: none in most runs.
fn draw_calls(draw: &mut Draw, jobs: &mut [JobPlan]) {
    let (is_on, refuses) = (draw.chance(400), draw.chance(400));
    for job in jobs {
        job.refuses = refuses;
        let mut by_ranks = || is_on && draw.chance(350);
        job.by_ranks = job.ops.iter().map(|_| [by_ranks(), by_ranks()]).collect();
    }
}

/// Each kind of incident is off in most runs.
fn draw_incidents(draw: &mut Draw, devices: usize, jobs: &[JobPlan]) -> Vec<(Duration, Incident)> {
    let mut incidents = Vec::new();
    let while_ = |draw: &mut Draw| Duration::from_millis(draw.one_of(&[100, 1_500, 7_000, 15_000]));
    let kinds: BTreeMap<u64, bool> = (0..7).map(|kind| (kind, draw.chance(250))).collect();
    for kind in kinds.into_iter().filter_map(|(kind, is_on)| is_on.then_some(kind)) {
        for _ in 0..1 + draw.below(3) {
            let scale = draw.one_of(&[3_000, 30_000, 500_000, 6_000_000]);
            let at = Duration::from_micros(draw.below(scale));
            let device = draw.below(devices as u64) as usize;
            let job = draw.below(jobs.len() as u64) as usize;
            let rank = draw.below(jobs[job].world as u64) as usize;
            let incident = match kind {
                0 => Incident::Die(device, while_(draw)),
                1 => Incident::Stall(device, while_(draw)),
                2 => Incident::Refuse(device, 1 + draw.below(3) as u32),
                3 => Incident::CutDevice(device),
                4 => Incident::Controller(while_(draw)),
                5 => Incident::Kill(job, rank),
                _ => Incident::CutRank(job, rank),
            };
            // It happens while the job exists.
            incidents.push((jobs[job].at + DEVICES_FIRST + at, incident));
        }
    }
    incidents.sort_by_key(|(at, _)| *at);
    incidents
}

/// A second controller: none in most runs; in the others a rank may die while its job is taken over.
fn draw_successor(draw: &mut Draw, jobs: &[JobPlan], incidents: &mut Vec<(Duration, Incident)>) {
    if !draw.chance(200) {
        return;
    }
    let job = draw.below(jobs.len() as u64) as usize;
    let at = jobs[job].at + DEVICES_FIRST + Duration::from_micros(draw.below(2_000_000));
    let len = Duration::from_millis(draw.one_of(&[300, 3_000, 15_000]));
    incidents.push((at, Incident::Succeed(len)));
    if draw.chance(300) {
        let rank = draw.below(jobs[job].world as u64) as usize;
        incidents.push((at + Duration::from_micros(draw.below(1_000_000)), Incident::Kill(job, rank)));
    }
    incidents.sort_by_key(|(at, _)| *at);
}

/// The loss of the controller right after a step of an offer: none in most runs, as not every job gets one.
fn draw_strike(draw: &mut Draw) -> Option<Strike> {
    if !draw.chance(350) {
        return None;
    }
    let after = draw.one_of(&[
        Step::Offered,
        Step::Promised,
        Step::Scheduled,
        Step::Scheduled,
        Step::Scheduled,
        Step::Voted,
        Step::Voted,
    ]);
    let nth = 1 + draw.below(if matches!(after, Step::Scheduled | Step::Voted) { 2 } else { 6 });
    let len = Duration::from_millis(draw.one_of(&[100, 1_500, 7_000, 15_000]));
    let incident = if draw.chance(700) { Incident::Controller(len) } else { Incident::Succeed(len) };
    Some(Strike { after, nth, incident })
}

/// Clients that do not read: none in most runs, and one or a few in the others.
fn draw_blocked(draw: &mut Draw, jobs: &[JobPlan], incidents: &mut Vec<(Duration, Incident)>) {
    if !draw.chance(200) {
        return;
    }
    for _ in 0..1 + draw.below(3) {
        let job = draw.below(jobs.len() as u64) as usize;
        let rank = draw.below(jobs[job].world as u64) as usize;
        let len = Duration::from_millis(draw.one_of(&[50, 2_000, 12_000]));
        let at = Duration::from_micros(draw.below(2_000_000));
        incidents.push((jobs[job].at + DEVICES_FIRST + at, Incident::Block(job, rank, len, draw.chance(500))));
    }
    incidents.sort_by_key(|(at, _)| *at);
}

/// Separates the draw of strikes from others; such that no seed kept as a regression is struck, so that all mean what
/// they did.
const STRIKES: u64 = 0x7374_728d;

/// The maximum number of bytes queued for a peer: fits the membership of the largest job twice.
pub(super) const PEER_OUTPUT_BYTES: usize = 16 * 1024;

/// How long a peer may read nothing.
pub(super) const STALLED: Duration = Duration::from_secs(5);
