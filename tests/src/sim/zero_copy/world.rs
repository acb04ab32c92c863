//! The event loop of a cluster with zero-copy ranks.

use super::agreement::Agreement;
use super::board::{Board, Tables, redo_len_bytes};
use super::draw::{CrashPoint, Mishap, When, ZeroCopy};
use super::driver::{Driver, op_of};
use crate::oracle::weight;
use crate::sim::coverage::Coverage;
use crate::sim::memory::{Memory, OpMemory};
use crate::sim::options::{Draw, Options};
use crate::sim::report::{Report, Violation};
use crate::sim::setup::draw_posts;
use crate::sim::wiring::{EPOCH, Owner, Wiring, owner};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use sumac::harness::{Landed, Plan, RankReport, TreeSource};
use sumac::transport::packets::Endpoint;
use sumac_hal::ctrl::Counters;
use sumac_hal::dma::RegionKey;
use sumac_hal::emu::dma::HeapMemory;
use sumac_hal::emu::{Delivery, Fabric, NthPacket};
use sumac_hal::ids::Epoch;
use sumac_hal::op::Path;
use sumac_hal::time::Instant;
use sumac_hal::uplink::HopTimers;

/// How a rank reaches its leaf device.
pub(super) enum Transport {
    Packets(Box<Endpoint>),
    ZeroCopy(Box<Driver>),
}

impl Transport {
    pub(super) fn tree_source(&self) -> TreeSource<'_> {
        match self {
            Self::Packets(endpoint) => TreeSource::Packets(endpoint),
            Self::ZeroCopy(driver) => TreeSource::References(&driver.endpoint, &driver.redo),
        }
    }
}

/// Progress of a rank in a change of its tree.
#[derive(Debug)]
pub(super) enum Stage {
    /// No change in progress.
    Running,
    /// Waiting for its device's fence.
    Fencing,
    /// It has this of its tree alone, and takes part in the agreement.
    Frozen(Box<RankReport>),
}

/// A rank.
pub(super) struct Member {
    pub(super) transport: Transport,
    pub(super) memory: Memory,
    pub(super) called: usize,
    pub(super) done: usize,
    pub(super) stage: Stage,
    /// Chunks stored by recoveries from the loss of this tree.
    pub(super) landed: Landed,
    pub(super) is_dead: bool,
    /// When it polls its rings.
    pub(super) wake: Option<Instant>,
    /// The first call that failed because of dead ranks, once known.
    pub(super) failed_from: Option<usize>,
}

/// A device, up or not.
pub(super) struct Device<'m> {
    pub(super) board: Option<Board<'m>>,
    pub(super) redo: Arc<HeapMemory>,
    pub(super) incarnations: u64,
    /// Its runtime is stalled until then.
    pub(super) stalled_until: Option<Instant>,
    /// The controller has given up on it.
    pub(super) is_lost: bool,
    /// When its loop runs next.
    pub(super) wake: Option<Instant>,
}

/// A scheduled event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alarm {
    /// A mishap at a fixed time.
    Mishap(usize),
    /// A device restarts.
    Boot {
        device: usize,
    },
    /// A rank's connection to its device has hung up, or its device has stalled for too long.
    HungUp {
        rank: usize,
        incarnation: u64,
    },
    Still {
        rank: usize,
        incarnation: u64,
    },
    /// A device detects that a rank is gone.
    Detach {
        device: usize,
        function: sumac_hal::ids::FunctionId,
    },
    /// A rank learns that the tree or another rank is lost.
    TreeLost {
        rank: usize,
        incarnation: u64,
    },
    /// A fence has timed out.
    FenceLimit {
        rank: usize,
        incarnation: u64,
    },
    /// The next piece of memory is copied, to sever it from a device.
    Sever {
        rank: usize,
        incarnation: u64,
    },
    /// All ranks are frozen.
    Settle {
        attempt: u64,
    },
    /// All ranks are done.
    Commit {
        attempt: u64,
    },
    /// The controller tries to find another tree.
    Replan,
}

pub(super) struct World<'o, 'm> {
    pub(super) options: &'o Options,
    pub(super) by: &'o ZeroCopy,
    pub(super) fabric: Fabric,
    pub(super) devices: Vec<Device<'m>>,
    pub(super) spare: Vec<&'m mut Tables>,
    pub(super) members: Vec<Member>,
    pub(super) wiring: Wiring,
    pub(super) incarnation: u64,
    pub(super) epoch: Epoch,
    pub(super) posts: BTreeMap<(Instant, u64), (usize, usize, usize)>,
    pub(super) alarms: BTreeMap<(Instant, u64), Alarm>,
    numbers: u64,
    turns: u64,
    pub(super) now: Instant,
    pub(super) draw: Draw,
    pub(super) seen: Coverage,
    /// How often each device reached each point.
    pub(super) points: BTreeMap<(usize, CrashPoint), u64>,
    /// Mishaps that have happened.
    pub(super) happened: BTreeSet<usize>,
    /// Number of ranks that have called each operation.
    pub(super) called: BTreeMap<usize, usize>,
    pub(super) results: BTreeMap<usize, Vec<Vec<u8>>>,
    pub(super) agreement: Agreement,
    /// The plan that all ranks have executed.
    pub(super) plan: Option<Plan>,
    pub(super) attempt: u64,
    pub(super) past: Counters,
    /// Memory fenced in earlier incarnations of the group, by device, device incarnation and region; with its rank.
    pub(super) closed: BTreeMap<(usize, u64, RegionKey), usize>,
    pub(super) hash: u64,
    pub(super) ended_at: Instant,
    pub(super) report: Report,
    pub(super) buffer: Vec<u8>,
}

/// Run a cluster to its end; with `records`, return its link faults too.
pub(in crate::sim) fn run(options: &Options, records: bool) -> (Result<Report, Violation>, Vec<NthPacket>) {
    let by = options.zero_copy().expect("a zero-copy scenario");
    let count = options.devices();
    let losses = by.mishaps.iter().filter(|mishap| matches!(mishap, Mishap::Device { .. })).count();
    let mut tables: Vec<Tables> = (0..count + losses).map(|_| Tables::new(options)).collect();
    let redo = || Arc::new(HeapMemory::new(redo_len_bytes(options)));
    let device =
        |_| Device { board: None, redo: redo(), incarnations: 0, stalled_until: None, is_lost: false, wake: None };
    let wiring = Wiring::new(options, 0, count);
    let mut fabric = Fabric::new(options.seed, options.link);
    options.faults.apply(&mut fabric, |_| Some(&wiring), (1, 1), Instant::ZERO);
    if records {
        fabric.record_faults();
    }
    let mut world = World {
        options,
        by,
        fabric,
        devices: (0..count).map(device).collect(),
        spare: tables.iter_mut().collect(),
        members: Vec::new(),
        wiring,
        incarnation: 0,
        epoch: EPOCH,
        posts: draw_posts(options, Instant::ZERO),
        alarms: BTreeMap::new(),
        numbers: 0,
        turns: 0,
        now: Instant::ZERO,
        draw: Draw::new(weight(&[options.seed, 0x7265_6673])),
        seen: Coverage::default(),
        points: BTreeMap::new(),
        happened: BTreeSet::new(),
        called: BTreeMap::new(),
        results: BTreeMap::new(),
        agreement: Agreement::default(),
        plan: None,
        attempt: 0,
        past: Counters::default(),
        closed: BTreeMap::new(),
        hash: options.seed,
        ended_at: Instant::ZERO,
        report: Report::default(),
        buffer: vec![0; 65_536],
    };
    let finished = catch_unwind(AssertUnwindSafe(|| world.finish()));
    let outcome = finished.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Violation::Panicked { message: message.unwrap_or_else(|| "without a message".to_owned()) })
    });
    (outcome, world.fabric.faults().to_vec())
}

impl World<'_, '_> {
    fn finish(&mut self) -> Result<Report, Violation> {
        (0..self.devices.len()).for_each(|device| self.boot(device));
        let ops = 0..self.options.groups[0].ops.len();
        for rank in 0..self.options.ranks {
            let ops = ops.clone().map(|op| OpMemory::before(self.options, 0, 0, rank, op)).collect();
            let endpoint = Endpoint::new(self.wiring.endpoint(self.options, (rank, 0), 0, self.epoch));
            self.members.push(Member {
                transport: Transport::Packets(Box::new(endpoint)),
                memory: Memory { first: 0, posted: Vec::new(), ops },
                called: 0,
                done: 0,
                stage: Stage::Running,
                landed: Landed::default(),
                is_dead: false,
                wake: None,
                failed_from: None,
            });
        }
        self.install()?;
        for (index, mishap) in self.by.mishaps.iter().enumerate() {
            let (Mishap::Device { when, .. } | Mishap::Rank { when, .. }) = mishap else { continue };
            if let When::After(after) = when {
                self.schedule(*after, Alarm::Mishap(index));
            }
        }
        self.drive()?;
        self.check()
    }

    /// Run until every rank has an end, and for a while longer.
    fn drive(&mut self) -> Result<(), Violation> {
        while self.open().is_some() {
            let Some(next) = self.next_event().filter(|&at| at - Instant::ZERO < TIME_LIMIT) else {
                return Err(self.hang());
            };
            self.turn(next)?;
        }
        self.ended_at = self.now;
        let end = self.now + SETTLE;
        while let Some(next) = self.next_event().filter(|&at| at < end) {
            self.turn(next)?;
        }
        Ok(())
    }

    /// Return the first rank without an end.
    fn open(&self) -> Option<usize> {
        let ops = self.options.groups[0].ops.len();
        self.members.iter().position(|member| {
            let has_end = member.done == ops && matches!(member.stage, Stage::Running);
            !member.is_dead && member.failed_from.is_none() && !has_end
        })
    }

    fn hang(&self) -> Violation {
        let rank = self.open().unwrap_or(0);
        let waiting = self.members.iter().filter(|member| !member.is_dead && member.failed_from.is_none()).count();
        Violation::Hang { at: self.now - Instant::ZERO, waiting, group: 0, rank, done: self.members[rank].done as u64 }
    }

    pub(super) fn schedule(&mut self, after: Duration, alarm: Alarm) {
        self.numbers += 1;
        self.alarms.insert((self.now + after, self.numbers), alarm);
    }

    /// Draw a duration of up to `most`.
    pub(super) fn random_delay(&mut self, most: Duration) -> Duration {
        Duration::from_nanos(self.draw.below(most.as_nanos() as u64 + 1))
    }

    fn next_event(&self) -> Option<Instant> {
        let alarms = self.alarms.keys().next().map(|&(at, _)| at);
        let posts = self.posts.keys().next().map(|&(at, _)| at);
        let devices = self.devices.iter().filter_map(|device| {
            let board = device.board.as_ref()?;
            let runs = device.stalled_until.is_none();
            let node = [board.node.poll_timeout().filter(|&at| at < self.now + LEASE_MIN), device.wake];
            let node = node.into_iter().flatten().filter(|_| runs).min();
            [node, board.engine.next_due(), device.stalled_until].into_iter().flatten().min()
        });
        let live = |member: &&Member| !member.is_dead && member.failed_from.is_none();
        let ranks = self.members.iter().filter(live).filter_map(|member| match &member.transport {
            Transport::Packets(endpoint) => [endpoint.poll_timeout(), member.wake].into_iter().flatten().min(),
            Transport::ZeroCopy(_) => member.wake,
        });
        let all = [alarms, posts, self.fabric.next_event()].into_iter().flatten();
        all.chain(devices).chain(ranks).min()
    }

    fn turn(&mut self, next: Instant) -> Result<(), Violation> {
        self.now = self.now.max(next);
        self.turns += 1;
        if self.turns > TURNS_MAX {
            return Err(self.hang());
        }
        while let Some(entry) = self.alarms.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let alarm = entry.remove();
            self.on_alarm(alarm)?;
        }
        self.post_due();
        for _ in 0..self.options.burst() {
            let Some(delivery) = self.fabric.poll_delivery(self.now) else { break };
            self.deliver(&delivery);
        }
        for device in 0..self.devices.len() {
            self.advance_engine(device)?;
            self.serve_due(device)?;
        }
        let in_flight = self.fabric.sent_in_flight();
        self.report.in_flight_most = self.report.in_flight_most.max(in_flight);
        (0..self.members.len()).try_for_each(|rank| self.rank_due(rank))
    }

    fn post_due(&mut self) {
        while let Some(entry) = self.posts.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (rank, _, op) = entry.remove();
            let member = &mut self.members[rank];
            if member.is_dead || member.failed_from.is_some() {
                continue;
            }
            member.called += 1;
            *self.called.entry(op).or_default() += 1;
            if matches!(member.stage, Stage::Running) {
                self.post(rank, op);
            }
        }
    }

    /// Post an operation that a rank has called; if the tree is already lost, it is posted again on the next one.
    pub(super) fn post(&mut self, rank: usize, op: usize) {
        let desc = self.options.call(0, rank, op);
        self.register(rank, op);
        let member = &mut self.members[rank];
        let posted = match &mut member.transport {
            Transport::Packets(endpoint) => endpoint.post(desc, Path::Tree, None),
            Transport::ZeroCopy(driver) => {
                let places = driver.places(&member.memory, op, &desc);
                driver.endpoint.post(desc, Path::Tree, None, places)
            }
        };
        debug_assert!(posted.is_err() || posted.is_ok_and(|id| op_of(&member.memory, id) == op));
        member.wake = Some(self.now);
    }

    fn deliver(&mut self, delivery: &Delivery) {
        let (from, bytes) = (delivery.from, &delivery.bytes);
        match owner(delivery.to) {
            Owner::Node { device, .. } => {
                let device = &mut self.devices[device];
                let Some(board) = device.board.as_mut().filter(|_| device.stalled_until.is_none()) else { return };
                board.node.handle(self.now, from, delivery.ecn, bytes);
                device.wake = Some(self.now);
            }
            Owner::Rank { rank, .. } => {
                let member = &mut self.members[rank];
                if let Transport::Packets(endpoint) = &mut member.transport
                    && !member.is_dead
                {
                    endpoint.handle(self.now, from, delivery.ecn, bytes, &mut member.memory);
                    member.wake = Some(self.now);
                }
            }
            Owner::Attacker => {}
        }
    }

    pub(super) fn wake_device(&mut self, device: usize, after: Duration) {
        let at = self.now + after;
        let wake = &mut self.devices[device].wake;
        *wake = Some(wake.map_or(at, |before| before.min(at)));
    }

    pub(super) fn wake_rank(&mut self, rank: usize, after: Duration) {
        let at = self.now + after;
        let wake = &mut self.members[rank].wake;
        *wake = Some(wake.map_or(at, |before| before.min(at)));
    }
}

/// No run of these sizes takes this long, whatever the faults.
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// No run of these sizes has this many turns.
const TURNS_MAX: u64 = 500_000;

/// Node timers beyond this are leases.
pub(super) const LEASE_MIN: Duration = Duration::from_secs(600);

/// Time after the last end for packets in flight, stalled devices and last probes.
const SETTLE: Duration = Duration::from_secs(20);

/// How long a device may stall before it counts as dead.
pub(super) const DEAD: Duration = HopTimers::DEFAULT.dead;
