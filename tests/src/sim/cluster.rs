//! The event loop of one run.
//!
//! Only components touched by an event (a packet, a call, a timer) are polled for output, in a fixed order: an event
//! costs little more with 256 ranks than with two.

mod poll;

use super::assignments::Assignment;
use super::attack::Attacker;
use super::clock::{Clock, ClockOwner};
use super::coverage::{Coverage, Mark, Slots};
use super::deaths::Deaths;
use super::incident::Alarm;
use super::loss::{Pending, Point};
use super::messages::Message;
use super::options::{Draw, Options};
use super::paths::Paths;
use super::report::{Report, Violation};
use super::route::Route;
use super::scenario::Scenario;
use super::serving::ControlPlane;
use super::setup::{Member, Tables, boot, draw_posts, install};
use super::trial::AttemptRecord;
use super::wiring::{EPOCH, Owner, Wiring, idle_endpoint, owner};
use super::zero_copy;
use crate::oracle::Shape;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac::harness::{Attempt, Outcome};
use sumac_device::Node;
use sumac_hal::ctrl::Counters;
use sumac_hal::emu::{Delivery, Fabric, NthPacket};
use sumac_hal::ids::Epoch;
use sumac_hal::op::Path;
use sumac_hal::time::Instant;

/// Pending calls: (time, number) to (rank, group, operation).
pub(super) type Posts = BTreeMap<(Instant, u64), (usize, usize, usize)>;

/// A sender of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Actor {
    Node {
        device: usize,
        shard: usize,
    },
    Rank {
        rank: usize,
        group: usize,
    },
    /// A rank that probes its path.
    Prober {
        rank: usize,
        group: usize,
    },
}

/// A device, and the memory of its next incarnation.
pub(super) struct Device<'m> {
    pub(super) shards: Vec<Node<'m>>,
    pub(super) spare: Vec<&'m mut Tables>,
    pub(super) alive: bool,
    /// Counts from 0.
    pub(super) incarnation: u64,
    /// Its connection to the controller.
    pub(super) conn: Option<ConnId>,
}

pub(super) struct Cluster<'o, 'm> {
    pub(super) options: &'o Options,
    pub(super) wirings: &'o [Wiring],
    pub(super) fabric: Fabric,
    pub(super) devices: Vec<Device<'m>>,
    /// By rank, then group.
    pub(super) members: Vec<Vec<Member>>,
    pub(super) posts: Posts,
    pub(super) alarms: BTreeMap<(Instant, u64), Alarm>,
    /// The number of pending [`Alarm::BeginAgain`].
    pub(super) pending_restarts: usize,
    pub(super) attacker: Attacker,
    pub(super) epoch: Epoch,
    /// How often all ranks have restarted.
    pub(super) incarnation: u64,
    /// Ranks that have called an operation in this incarnation, by group and operation.
    pub(super) called: BTreeMap<(usize, usize), usize>,
    pub(super) now: Instant,
    /// When ranks began to call.
    pub(super) began: Instant,
    pub(super) touched: BTreeSet<Actor>,
    timers: BTreeSet<(Instant, Actor)>,
    timer_of: BTreeMap<Actor, Instant>,
    pub(super) buffer: Vec<u8>,
    pub(super) ended_at: Instant,
    pub(super) in_flight_most: u64,
    /// Packets to shared addresses, and what became of them.
    pub(super) shared_sent: u64,
    pub(super) shared_copies: u64,
    /// Counters of earlier incarnations.
    pub(super) past: Counters,
    pub(super) seen: Coverage,
    /// By device and shard.
    pub(super) slots: BTreeMap<(usize, usize), Slots>,
    alarm_numbers: u64,
    pub(super) control: ControlPlane,
    /// The trees that the controller has requested from devices, past and present.
    pub(super) assignments: Vec<Assignment>,
    /// Devices, and the trees of which they have the group.
    pub(super) placed: BTreeSet<(usize, usize)>,
    /// By group: the shape of the first tree that the controller has planned.
    pub(super) shapes: BTreeMap<usize, Shape>,
    pub(super) pending: Vec<Pending>,
    /// Messages in flight between ranks, and on connections to the controller.
    pub(super) messages: BTreeMap<(Instant, u64), Message>,
    pub(super) message_numbers: u64,
    /// Maximum number of them in flight.
    pub(super) messages_max: u64,
    pub(super) message_last: BTreeMap<(u64, u64), Instant>,
    pub(super) message_draw: Draw,
    /// Expected results of operations, computed on demand.
    pub(super) results: BTreeMap<(usize, usize), Vec<Vec<u8>>>,
    pub(super) view_changes: u64,
    pub(super) recovery_bytes: u64,
    pub(super) deaths: Deaths,
    /// Oracle state of the attempts to change each group's views.
    pub(super) attempts: BTreeMap<(usize, u32, Attempt), AttemptRecord>,
    pub(super) outcomes: BTreeMap<(usize, u32), Outcome>,
    pub(super) paths: Paths,
}

/// Run a cluster to its end.
///
/// # Errors
/// The first [`Violation`].
pub fn run(options: &Options) -> Result<Report, Violation> {
    if options.zero_copy().is_some() {
        return zero_copy::run(options, false).0;
    }
    set_up(options, |cluster| cluster.finish())?
}

/// Run a cluster to its end, and return its link faults too. With these as [`Faults::script`](super::Faults::script)
/// the run repeats exactly.
pub fn record(options: &Options) -> (Result<Report, Violation>, Vec<NthPacket>) {
    if options.zero_copy().is_some() {
        return zero_copy::run(options, true);
    }
    let recorded = set_up(options, |cluster| {
        cluster.fabric.record_faults();
        let outcome = cluster.finish();
        (outcome, cluster.fabric.faults().to_vec())
    });
    recorded.unwrap_or_else(|refused| (Err(refused), Vec::new()))
}

/// Wire and boot a cluster, and pass it to `work`.
fn set_up<R>(options: &Options, work: impl FnOnce(&mut Cluster<'_, '_>) -> R) -> Result<R, Violation> {
    let count = options.devices();
    let wirings: Vec<Wiring> = (0..options.trees.len()).map(|tree| Wiring::new(options, tree, count)).collect();
    let shards = usize::from(options.shards);
    let mut tables: Vec<Tables> =
        (0..count * shards * 2).map(|i| Tables::new(options, &wirings, i / (2 * shards))).collect();
    let mut borrowed = tables.iter_mut();
    let mut devices = Vec::new();
    for device in 0..count {
        let mut booted = Vec::new();
        for shard in 0..options.shards {
            let mut node = boot(options, device, shard, 0, borrowed.next().expect("two incarnations each"));
            let now = Clock::draw(options.seed, ClockOwner::Device(device)).at(Instant::ZERO);
            if !options.recovers() {
                install(&mut node, options, &wirings, device, EPOCH, now)?;
            }
            booted.push(node);
        }
        let spare = borrowed.by_ref().take(shards).collect();
        devices.push(Device { shards: booted, spare, alive: true, incarnation: 0, conn: None });
    }
    let mut cluster = Cluster {
        options,
        wirings: &wirings,
        fabric: Fabric::new(options.seed, options.link),
        devices,
        members: Vec::new(),
        posts: BTreeMap::new(),
        alarms: BTreeMap::new(),
        pending_restarts: 0,
        attacker: Attacker::new(options.seed),
        epoch: EPOCH,
        incarnation: 0,
        called: BTreeMap::new(),
        now: Instant::ZERO,
        began: Instant::ZERO,
        touched: BTreeSet::new(),
        timers: BTreeSet::new(),
        timer_of: BTreeMap::new(),
        buffer: vec![0; 65_536],
        ended_at: Instant::ZERO,
        in_flight_most: 0,
        shared_sent: 0,
        shared_copies: 0,
        past: Counters::default(),
        seen: Coverage::default(),
        slots: BTreeMap::new(),
        alarm_numbers: 0,
        control: ControlPlane::new(options, &wirings),
        assignments: Vec::new(),
        placed: BTreeSet::new(),
        shapes: BTreeMap::new(),
        pending: Vec::new(),
        messages: BTreeMap::new(),
        message_numbers: 0,
        messages_max: 0,
        message_last: BTreeMap::new(),
        message_draw: Draw::new(options.seed ^ 0x6d61_696c),
        results: BTreeMap::new(),
        view_changes: 0,
        recovery_bytes: 0,
        deaths: Deaths::default(),
        attempts: BTreeMap::new(),
        outcomes: BTreeMap::new(),
        paths: Paths::default(),
    };
    Ok(work(&mut cluster))
}

impl Cluster<'_, '_> {
    /// Run to the end and check. A panic is a violation like any other, so that its seed is reported; the cluster is
    /// not used afterwards.
    fn finish(&mut self) -> Result<Report, Violation> {
        let finished = catch_unwind(AssertUnwindSafe(|| {
            self.start()?;
            self.drive()?;
            self.check()?;
            Ok(self.report())
        }));
        finished.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Err(Violation::Panicked { message: message.unwrap_or_else(|| "without a message".to_owned()) })
        })
    }

    /// Assign the first trees, start all ranks' calls, and let faults begin.
    fn start(&mut self) -> Result<(), Violation> {
        if let Scenario::Paths { limits, .. } = &self.options.scenario {
            self.narrow_paths(limits);
        }
        if self.options.recovers() {
            self.join_all()?;
        }
        self.began = self.now;
        let options = self.options;
        let (wirings, assignments) = (self.wirings, &self.assignments);
        let planned = |tree| {
            let is_planned = |assignment: &&Assignment| options.tree(assignment.group) == tree;
            assignments.iter().find(is_planned).map(|assignment| &assignment.wiring)
        };
        let wiring = |tree: usize| if options.recovers() { planned(tree) } else { wirings.get(tree) };
        options.faults.apply(&mut self.fabric, wiring, (options.shards, options.all_groups()), self.began);
        self.seen.note(Mark::GroupCreated);
        self.begin();
        self.schedule_scenario();
        Ok(())
    }

    /// Return the tree that a rank's group is on.
    pub(super) fn wiring_of(&self, rank: usize, group: usize) -> Option<&Wiring> {
        match self.members[rank][group].route {
            Route::Tree(Some(tree)) => Some(&self.assignments[tree].wiring),
            Route::Tree(None) => Some(&self.wirings[self.options.tree(group)]),
            Route::HostCollectives => None,
        }
    }

    /// Return the last tree in which a device serves a group.
    pub(super) fn wiring_at(&self, device: usize, group: usize) -> Option<&Wiring> {
        if !self.options.recovers() {
            return Some(&self.wirings[self.options.tree(group)]);
        }
        let mut placed = self.placed.range((device, 0)..=(device, usize::MAX)).rev();
        let tree = placed.find(|(_, tree)| self.assignments[*tree].group == group)?.1;
        Some(&self.assignments[tree].wiring)
    }

    /// Return the shape of a group's trees: of the first one that the controller has planned, which fixes the
    /// expression, or as drawn.
    pub(super) fn shape(&self, group: usize) -> &Shape {
        self.shapes.get(&group).unwrap_or_else(|| &self.options.trees[self.options.tree(group)])
    }

    /// Start all ranks' calls in the current epoch.
    pub(super) fn begin(&mut self) {
        let (options, incarnation, epoch) = (self.options, self.incarnation, self.epoch);
        let groups = options.groups.len();
        let place = |(rank, group): (usize, usize)| {
            if !options.recovers() {
                let wiring = &self.wirings[options.tree(group)];
                return (wiring.endpoint(options, (rank, group), incarnation, epoch), Route::Tree(None));
            }
            match &self.control.sessions[rank][group].membership {
                Some((Some(tree), membership)) => {
                    (self.endpoint_on((rank, group), *tree, membership, 0), Route::Tree(Some(*tree)))
                }
                _ => (idle_endpoint(options, (rank, group)), Route::HostCollectives),
            }
        };
        let member = |rank, group| Member::new(options, (rank, group), incarnation, place((rank, group)));
        self.members = (0..options.ranks).map(|rank| (0..groups).map(|group| member(rank, group)).collect()).collect();
        self.called.clear();
        self.posts = draw_posts(options, self.now);
    }

    /// Run until every rank has an end and the cluster is quiet.
    fn drive(&mut self) -> Result<(), Violation> {
        // Ranks with all results may recover once more.
        while self.is_waiting() {
            while self.is_waiting() {
                let limit = if self.options.has_paths() { TIME_LIMIT_OF_PATHS } else { TIME_LIMIT };
                let Some(next) = self.next_event().filter(|&at| at - Instant::ZERO < limit) else {
                    return Err(self.hang());
                };
                self.turn(next)?;
            }
            self.ended_at = self.now;
            while let Some(next) = self.next_event().filter(|&at| at < self.settled_at()) {
                self.turn(next)?;
            }
        }
        Ok(())
    }

    /// Return when a finished run has settled: after partitions, as messages between partitioned ranks arrive later.
    fn settled_at(&self) -> Instant {
        self.deaths.split_until().map_or(self.ended_at, |until| until.max(self.ended_at)) + SETTLE
    }

    /// Advance the clock to the next event, and process everything that is due.
    pub(super) fn turn(&mut self, next: Instant) -> Result<(), Violation> {
        self.now = self.now.max(next);
        self.run_alarms()?;
        self.deliver_messages()?;
        self.post_due()?;
        self.deliver_due();
        self.time_out_due();
        self.poll_touched()?;
        self.serve()?;
        self.in_flight_most = self.in_flight_most.max(self.fabric.sent_in_flight());
        Ok(())
    }

    pub(super) fn schedule(&mut self, at: Instant, alarm: Alarm) {
        self.alarm_numbers += 1;
        self.pending_restarts += usize::from(alarm == Alarm::BeginAgain);
        self.alarms.insert((at, self.alarm_numbers), alarm);
    }

    pub(super) fn next_event(&self) -> Option<Instant> {
        let posts = self.posts.keys().next().map(|&(at, _)| at);
        let alarms = self.alarms.keys().next().map(|&(at, _)| at);
        let timers = self.timers.first().map(|&(at, _)| at);
        let messages = self.messages.keys().next().map(|&(at, _)| at);
        let others = [self.fabric.next_event(), self.control.next_event()];
        [posts, alarms, timers, messages].into_iter().chain(others).flatten().min()
    }

    fn post_due(&mut self) -> Result<(), Violation> {
        while let Some(entry) = self.posts.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (rank, group, op) = entry.remove();
            if self.deaths.is_dead(rank) || self.members[rank][group].membership.end.is_some() {
                continue;
            }
            let member = &mut self.members[rank][group];
            member.called += 1;
            *self.called.entry((group, op)).or_default() += 1;
            if member.route == Route::HostCollectives {
                self.enter_host_collective(rank, group)?;
                continue;
            }
            // If the tree is already lost, it is posted again on the next one.
            let posted = member.endpoint.post(self.options.call(group, rank, op), Path::Tree, None);
            assert!(posted.is_ok() || member.endpoint.error().is_some(), "{posted:?}");
            self.touched.insert(Actor::Rank { rank, group });
        }
        Ok(())
    }

    /// Deliver a burst, as a board's loop receives before it sends; the rest is delivered at the same time in the next
    /// turn.
    fn deliver_due(&mut self) {
        let (mut left, mut next) = (self.options.burst(), None);
        while left > 0 {
            let train;
            (train, next) = self.next_train(next, left);
            let Some(&Delivery { to, from, ecn, .. }) = train.first() else { return };
            left -= train.len();
            train.iter().for_each(|delivery| self.note_packet(delivery));
            let packets = train.iter().map(|delivery| &delivery.bytes[..]);
            let from = self.options.address(from);
            match owner(to) {
                Owner::Node { device, shard } => {
                    if self.devices[device].alive {
                        let now = self.device_time(device);
                        let node = &mut self.devices[device].shards[shard];
                        let before = node.counters().completed;
                        if let [delivery] = &train[..] {
                            node.handle(now, from, ecn, &delivery.bytes);
                        } else {
                            node.handle_train(now, from, ecn, packets);
                        }
                        for _ in before..node.counters().completed {
                            self.reach(Point::Completed, Some(device));
                        }
                        self.touched.insert(Actor::Node { device, shard });
                    }
                }
                Owner::Rank { rank, group } => {
                    let now = self.rank_time(rank);
                    // The attacker's own group has no members.
                    let is_dead = self.deaths.is_dead(rank);
                    train.iter().for_each(|delivery| self.deliver_to_prober((rank, group), from, &delivery.bytes));
                    let members = self.members.get_mut(rank);
                    if let Some(member) = members.and_then(|all| all.get_mut(group)).filter(|_| !is_dead) {
                        let Member { endpoint, memory, .. } = member;
                        if let [delivery] = &train[..] {
                            endpoint.handle(now, from, ecn, &delivery.bytes, memory);
                        } else {
                            endpoint.handle_train(now, from, ecn, packets, memory);
                        }
                        self.touched.insert(Actor::Rank { rank, group });
                    }
                }
                Owner::Attacker => {}
            }
            if self.options.scenario == Scenario::Hostile {
                train.into_iter().for_each(|delivery| self.attacker.record_packet(delivery));
            }
        }
    }

    /// Return the packets that are delivered next, at most `packets_max`, and the one behind them if it had to be taken
    /// to find their end: `next` of the following call. They are a train if the seed has ports return trains, and
    /// nothing is to be lost between two packets.
    fn next_train(&mut self, next: Option<Delivery>, packets_max: usize) -> (Vec<Delivery>, Option<Delivery>) {
        let mut train: Vec<_> = next.or_else(|| self.fabric.poll_delivery(self.now)).into_iter().collect();
        while self.options.has_trains() && self.pending.is_empty() && (1..packets_max).contains(&train.len()) {
            let Some(delivery) = self.fabric.poll_delivery(self.now) else { break };
            let first = &train[0];
            if (delivery.from, delivery.to, delivery.ecn) != (first.from, first.to, first.ecn) {
                return (train, Some(delivery));
            }
            train.push(delivery);
        }
        (train, None)
    }

    fn time_out_due(&mut self) {
        let due: Vec<Actor> =
            self.timers.iter().take_while(|(at, _)| *at <= self.now).map(|&(_, actor)| actor).collect();
        for actor in due {
            match actor {
                Actor::Node { device, shard } => {
                    let now = self.device_time(device);
                    self.devices[device].shards[shard].handle_timeout(now);
                }
                Actor::Rank { rank, group } => {
                    let now = self.rank_time(rank);
                    self.members[rank][group].endpoint.handle_timeout(now);
                }
                // Its time is looked at when it is polled.
                Actor::Prober { .. } => {}
            }
            self.touched.insert(actor);
        }
    }
}

/// No run of these sizes takes this long, whatever the faults.
const TIME_LIMIT: Duration = Duration::from_secs(600);

/// The same if paths change: a rank that waits probes its path often, and no seeded run has taken a third of this.
const TIME_LIMIT_OF_PATHS: Duration = Duration::from_secs(120);

/// Node timers beyond this are leases.
pub(super) const A_LEASE_AT_LEAST: Duration = Duration::from_secs(600);

/// Time after the last end, and after partitions, for packets in flight, last probes and their answers.
const SETTLE: Duration = Duration::from_secs(20);
