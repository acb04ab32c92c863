//! Stragglers on lossy links: ranks that are late for operations, or never arrive, in seeded clusters of the production
//! state machines.
//!
//! A run ends when every rank has an end. Whichever ranks are excluded:
//! - all ranks that complete an operation report the same members, and have exactly the sum over them, in the declared
//!   order with missing ranks skipped;
//! - an excluded rank completes nothing afterwards and gets an error; all others complete everything, or all of them
//!   fail at the same operation and name the same ranks;
//! - no operation fails without reason: one without a limit excludes nobody, and one that allows exclusion fails only
//!   if its root is missing;
//! - nothing remains on a device after the group's lease.

use super::options::{Draw, GroupOptions, Options, Sharing};
use super::scenario::ScenarioKind;
use super::setup::{Tables, boot, install};
use super::wiring::{EPOCH, LEASE_MS, Owner, Wiring, count_nodes, node_addr, owner, rank_addr, sharer};
use crate::oracle::{Shape, weight};
use std::time::Duration;
use sumac::transport::packets::{Buffers, CompletionInfo, Endpoint, EndpointError, Event, OpId};
use sumac_device::Node;
use sumac_hal::ctrl::{DropReason, Order};
use sumac_hal::emu::Fabric;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::time::Instant;
use sumac_hal::wire::{RankMask, StragglerLimit};

/// Counts of one run, or of several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stragglers {
    /// Exclusion decisions, as seen by the roots' ranks.
    pub decisions: u64,
    /// Excluded ranks.
    pub excluded: u64,
    /// Late ranks that were waited for.
    pub waited_for: u64,
    /// Runs in which all ranks failed, naming the missing ones.
    pub failed: u64,
    /// Dropped packets of ranks that were held back or excluded.
    pub dropped: u64,
    /// Operations completed by some ranks only.
    pub partial: u64,
}

impl Stragglers {
    /// Add another run's counts.
    pub fn merge(&mut self, other: &Self) {
        let Self { decisions, excluded, waited_for, failed, dropped, partial } = other;
        self.decisions += decisions;
        self.excluded += excluded;
        self.waited_for += waited_for;
        self.failed += failed;
        self.dropped += dropped;
        self.partial += partial;
    }
}

/// An operation and its straggler limit.
#[derive(Debug, Clone, Copy)]
struct Call {
    desc: OpDesc,
    limit: Option<StragglerLimit>,
}

/// When a rank calls an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrival {
    /// This long after it completed the previous one.
    After(Duration),
    /// Only once all other ranks have an end; until then it is inactive.
    Never,
}

struct Member {
    endpoint: Endpoint,
    memory: Memory,
    arrivals: Vec<Arrival>,
    /// When it posts its next operation.
    posts_at: Option<Instant>,
    posted: usize,
    completions: Vec<CompletionInfo>,
    error: Option<EndpointError>,
    is_asleep: bool,
}

/// One buffer per operation, for input and output.
struct Memory(Vec<Vec<u8>>);

impl Buffers for Memory {
    fn input(&self, op: OpId) -> &[u8] {
        &self.0[op.0 as usize]
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        &mut self.0[op.0 as usize]
    }
}

struct World<'o, 'm> {
    options: &'o Options,
    wiring: &'o Wiring,
    calls: Vec<Call>,
    fabric: Fabric,
    nodes: Vec<Node<'m>>,
    members: Vec<Member>,
    now: Instant,
}

/// Run the cluster of a seed.
///
/// # Errors
/// A description of the failure.
pub fn run_stragglers(seed: u64) -> Result<Stragglers, String> {
    let mut draw = Draw::new(weight(&[seed, 0x6c61_7465]));
    let (options, calls) = draw_cluster(seed, &mut draw);
    let count = count_nodes(&options.trees[0]);
    let wirings = [Wiring::new(&options, 0, count)];
    let mut tables: Vec<Tables> = (0..count).map(|device| Tables::new(&options, &wirings, device)).collect();
    let mut nodes = Vec::new();
    for (device, tables) in tables.iter_mut().enumerate() {
        let mut node = boot(&options, device, 0, 0, tables);
        install(&mut node, &options, &wirings, device, EPOCH, Instant::ZERO).map_err(|refused| refused.to_string())?;
        nodes.push(node);
    }
    let mut fabric = Fabric::new(seed, options.link);
    options.faults.apply(&mut fabric, |tree| wirings.get(tree), (1, 1), Instant::ZERO);
    let members = (0..options.ranks).map(|rank| draw_member(&options, &wirings[0], &calls, rank, &mut draw)).collect();
    let mut world = World { options: &options, wiring: &wirings[0], calls, fabric, nodes, members, now: Instant::ZERO };
    world.drive()?;
    world.check()
}

/// A cluster of a seed's shape and faults, with one group of reductions and barriers.
fn draw_cluster(seed: u64, draw: &mut Draw) -> (Options, Vec<Call>) {
    let mut options = Options::draw(seed, ScenarioKind::Mismatch);
    options.scenario = super::Scenario::Calm;
    options.shards = 1;
    options.sharing = draw.one_of(&[Sharing::Off, Sharing::All, Sharing::Some]);
    options.trees.truncate(1);
    options.faults.spells.clear();
    let us = draw.one_of(&[5_000, 60_000]);
    let cuts = draw.chance(800);
    let chunk = u64::from(options.chunk_len_bytes) / 4;
    let mut calls = Vec::new();
    // Large clusters have few operations, so that every seed costs about the same.
    for _ in 0..2 + draw.below(if options.ranks > 60 { 1 } else { 7 }) {
        let count = draw.one_of(&[1, chunk, 2 * chunk + 1, 5 * chunk]);
        let root = Rank(draw.below(options.ranks as u64) as u32);
        let desc = match draw.below(12) {
            0 | 1 => OpDesc::barrier(),
            2 => OpDesc::reduce(Dtype::F32, ReduceOp::Sum, root, count),
            3 | 4 => OpDesc::all_reduce(Dtype::F32, ReduceOp::Avg, count),
            _ => OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count),
        };
        calls.push(Call { desc, limit: draw.chance(700).then_some(StragglerLimit { us, cuts }) });
    }
    let order = draw.one_of(&[Order::Arrival, Order::TreeFold, Order::TreePairwise]);
    options.groups = vec![GroupOptions { tree: 0, order, ops: calls.iter().map(|call| call.desc).collect() }];
    (options, calls)
}

fn draw_member(options: &Options, wiring: &Wiring, calls: &[Call], rank: usize, draw: &mut Draw) -> Member {
    let memory = calls
        .iter()
        .enumerate()
        .map(|(op, call)| (0..call.desc.count).flat_map(|i| input(options, rank, op, i).to_le_bytes()).collect());
    // One or two ranks of a small cluster may be late.
    let is_late = draw.chance(if options.ranks < 30 { 300 } else { 40 });
    let arrivals = calls.iter().map(|call| {
        let us = u64::from(call.limit.map_or(1_000, |limit| limit.us));
        match draw.below(8) {
            0 if is_late => Arrival::After(Duration::from_micros(us + draw.below(3 * us))),
            // An operation without a limit waits forever.
            1 if is_late && call.limit.is_some() => Arrival::Never,
            _ => Arrival::After(Duration::from_micros(draw.below(us / 4))),
        }
    });
    Member {
        endpoint: Endpoint::new(wiring.endpoint(options, (rank, 0), 0, EPOCH)),
        memory: Memory(memory.collect()),
        arrivals: arrivals.collect(),
        posts_at: Some(Instant::ZERO),
        posted: 0,
        completions: Vec::new(),
        error: None,
        is_asleep: false,
    }
}

/// Under `Order::Arrival`, small integers: their sums are exact in any order.
fn input(options: &Options, rank: usize, op: usize, i: u64) -> f32 {
    let weight = weight(&[options.seed, rank as u64, op as u64, i]);
    match options.order(0) {
        Order::Arrival => (weight % 15) as f32 - 7.0,
        _ => ((weight >> 40) as f32 / (1 << 24) as f32 - 0.5) * 2_f32.powi((weight % 20) as i32 - 10),
    }
}

impl World<'_, '_> {
    fn has_ended(&self) -> bool {
        self.members.iter().all(|member| member.has_end(self.calls.len()))
    }

    fn drive(&mut self) -> Result<(), String> {
        while !self.has_ended() {
            let awake = |member: &&Member| !member.is_asleep;
            if self.members.iter().filter(awake).all(|member| member.has_end(self.calls.len())) {
                // Only inactive ranks are left.
                self.members.iter_mut().for_each(|member| member.is_asleep = false);
            }
            let next = self.next_event().ok_or_else(|| self.hang("nothing is left to happen"))?;
            if next - Instant::ZERO > TIME_LIMIT {
                return Err(self.hang("it takes too long"));
            }
            self.now = self.now.max(next);
            self.turn();
        }
        Ok(())
    }

    fn hang(&self, what: &str) -> String {
        let ends: Vec<_> = self.members.iter().map(|m| (m.posted, m.completions.len(), m.is_asleep, m.error)).collect();
        format!("{what} after {:?}; ranks have posted, completed, sleep, failed: {ends:?}", self.now - Instant::ZERO)
    }

    fn next_event(&self) -> Option<Instant> {
        let nodes = self.nodes.iter().filter_map(Node::poll_timeout);
        let awake = self.members.iter().filter(|member| !member.is_asleep);
        let members = awake.flat_map(|member| [member.posts_at, member.endpoint.poll_timeout()]).flatten();
        nodes.chain(members).chain(self.fabric.next_event()).min()
    }

    fn turn(&mut self) {
        for rank in 0..self.members.len() {
            self.members[rank].post_due(&self.calls, self.now);
        }
        while let Some(delivery) = self.fabric.poll_delivery(self.now) {
            match owner(delivery.to) {
                Owner::Node { device, .. } => {
                    self.nodes[device].handle(self.now, delivery.from, delivery.ecn, &delivery.bytes);
                }
                Owner::Rank { rank, .. } => {
                    let Member { endpoint, memory, is_asleep, .. } = &mut self.members[rank];
                    if !*is_asleep {
                        endpoint.handle(self.now, delivery.from, delivery.ecn, &delivery.bytes, memory);
                    }
                }
                Owner::Attacker => {}
            }
        }
        let mut buffer = vec![0; 65_536];
        for (device, node) in self.nodes.iter_mut().enumerate() {
            if node.poll_timeout().is_some_and(|at| at <= self.now) {
                node.handle_timeout(self.now);
            }
            while let Some(sent) = node.poll_transmit(self.now) {
                let bytes = sent.write(node.payload(&sent), &mut buffer);
                let to = match sharer(sent.to) {
                    Some(sharer) => self.wiring.listeners(self.options, sharer),
                    None => vec![sent.to],
                };
                to.iter().for_each(|&to| self.fabric.send(self.now, node_addr(device, 0), to, bytes));
            }
        }
        for (rank, member) in self.members.iter_mut().enumerate().filter(|(_, member)| !member.is_asleep) {
            if member.endpoint.poll_timeout().is_some_and(|at| at <= self.now) {
                member.endpoint.handle_timeout(self.now);
            }
            while let Some(sent) = member.endpoint.poll_transmit(self.now, &member.memory) {
                let bytes = sent.write(sent.payload, &mut buffer);
                self.fabric.send(self.now, rank_addr(rank, 0), sent.to, bytes);
            }
            member.take_events(self.now);
        }
    }

    /// Check the final state of all ranks.
    fn check(&mut self) -> Result<Stragglers, String> {
        let mut report = Stragglers::default();
        let mut excluded_ranks = RankMask::EMPTY;
        for op in 0..self.calls.len() {
            let done = self.members.iter().enumerate().filter(|(_, member)| member.completions.len() > op);
            let of: Vec<_> = done.map(|(rank, member)| (Rank(rank as u32), member.completions[op])).collect();
            let Some(&(_, CompletionInfo { missing, .. })) = of.first() else { break };
            if let Some((rank, other)) = of.iter().find(|(_, verdict)| verdict.missing != missing) {
                return Err(format!("operation {op}: {rank} is without {}, others without {missing}", other.missing));
            }
            if let Some((rank, _)) = of.iter().find(|(rank, _)| missing.contains(*rank)) {
                return Err(format!("operation {op} is without {rank}, which has completed it"));
            }
            if excluded_ranks.union(&missing) != missing {
                return Err(format!("operation {op} is without {missing}, an earlier one without {excluded_ranks}"));
            }
            if missing != excluded_ranks && !self.calls[op].limit.is_some_and(|limit| limit.cuts) {
                return Err(format!("operation {op} has lost {missing} and may not"));
            }
            report.decisions += u64::from(missing != excluded_ranks);
            report.partial += u64::from(!missing.is_empty());
            excluded_ranks = missing;
            self.check_values(op, &missing)?;
        }
        self.check_ends(&excluded_ranks, &mut report)?;
        let counters = self.nodes.iter().map(|node| node.counters().dropped(DropReason::Late));
        report.dropped = counters.sum();
        let late = |member: &&Member| member.error.is_none() && member.arrivals.iter().any(Arrival::is_late);
        report.waited_for = self.members.iter().filter(late).count() as u64;
        let end = self.now + Duration::from_millis(u64::from(LEASE_MS) + 1);
        for node in &mut self.nodes {
            node.handle_timeout(end);
            let stats = node.stats();
            if (stats.groups, stats.slots_used, stats.slot_memory_used_bytes) != (0, 0, 0) {
                return Err(format!("something stays behind the lease: {stats:?}"));
            }
        }
        Ok(report)
    }

    /// Every rank that completed `op` and receives its result has the sum over all but the missing ranks.
    fn check_values(&self, op: usize, missing: &RankMask) -> Result<(), String> {
        let Call { desc, .. } = self.calls[op];
        let order = self.options.order(0);
        let members = self.options.ranks as u32 - missing.len();
        let receives = |rank: usize| desc.collective == Collective::AllReduce || desc.root.0 as usize == rank;
        for i in 0..desc.count {
            let value = |rank: usize| (!missing.contains(Rank(rank as u32))).then(|| input(self.options, rank, op, i));
            let sum = over(&self.options.trees[0], order, &value).unwrap_or(f32::NAN);
            let expected = if desc.op == Some(ReduceOp::Avg) { sum / members as f32 } else { sum };
            for (rank, member) in self.members.iter().enumerate() {
                let bytes = &member.memory.0[op][4 * i as usize..][..4];
                let found = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
                let right = if receives(rank) { expected } else { input(self.options, rank, op, i) };
                if member.completions.len() > op && found.to_bits() != right.to_bits() {
                    return Err(format!("operation {op}, element {i} at rank {rank}: {found}, not {right}"));
                }
            }
        }
        Ok(())
    }

    /// Excluded ranks have an error; the others completed everything, or failed together.
    fn check_ends(&self, excluded_ranks: &RankMask, report: &mut Stragglers) -> Result<(), String> {
        let mut common = None;
        for (rank, member) in self.members.iter().enumerate() {
            let rank = Rank(rank as u32);
            let done = member.completions.len();
            if excluded_ranks.contains(rank) {
                report.excluded += 1;
                if member.error != Some(EndpointError::Excluded) {
                    return Err(format!("{rank} was left out and ends with {:?}", member.error));
                }
                continue;
            }
            let end = (done, member.error);
            if *common.get_or_insert(end) != end {
                return Err(format!("{rank} ends with {end:?}, others with {common:?}"));
            }
        }
        match common {
            Some((done, Some(EndpointError::Stragglers { missing }))) => {
                report.failed += 1;
                let call = self.calls[done];
                let fails = call.limit.is_some_and(|limit| !limit.cuts);
                let without_root = call.desc.collective.is_rooted() && missing.contains(call.desc.root);
                (fails || without_root).then_some(()).ok_or_else(|| format!("{} fails for {missing}", call.desc))
            }
            Some((_, None)) => Ok(()),
            // If no rank remains, some rank must have completed the operation that excluded the others.
            None => Err("everybody was left out".into()),
            Some((_, Some(error))) => Err(format!("unexpected error: {error}")),
        }
    }
}

impl Arrival {
    fn is_late(&self) -> bool {
        matches!(self, Self::After(after) if *after >= Duration::from_millis(5))
    }
}

impl Member {
    fn has_end(&self, calls: usize) -> bool {
        self.error.is_some() || self.completions.len() == calls
    }

    /// Post due operations, or become inactive where the rank never calls.
    fn post_due(&mut self, calls: &[Call], now: Instant) {
        if self.is_asleep || self.error.is_some() || self.posts_at.is_none_or(|at| at > now) {
            return;
        }
        self.posts_at = None;
        let Some(call) = calls.get(self.posted) else { return };
        if self.arrivals[self.posted] == Arrival::Never {
            self.arrivals[self.posted] = Arrival::After(Duration::ZERO);
            self.posts_at = Some(now);
            self.is_asleep = true;
            return;
        }
        self.posted += 1;
        if let Err(error) = self.endpoint.post(call.desc, Path::Tree, call.limit) {
            assert!(self.endpoint.error().is_some(), "{error}");
        }
    }

    fn take_events(&mut self, now: Instant) {
        while let Some(event) = self.endpoint.poll_event() {
            match event {
                Event::Completed(_) => {
                    self.completions.push(self.endpoint.completion_info());
                    let after = match self.arrivals.get(self.posted) {
                        Some(Arrival::After(after)) => *after,
                        _ => Duration::ZERO,
                    };
                    self.posts_at = Some(now + after);
                }
                Event::Failed(error) => (self.error, self.posts_at) = (Some(error), None),
                other => panic!("unknown event {other:?}"),
            }
        }
    }
}

/// Evaluate the declared expression of a sum, skipping ranks without a value.
fn over(shape: &Shape, order: Order, value: &dyn Fn(usize) -> Option<f32>) -> Option<f32> {
    match shape {
        Shape::Rank(rank) => value(*rank),
        Shape::Node(children) => {
            let values: Vec<Option<f32>> = children.iter().map(|child| over(child, order, value)).collect();
            if order == Order::TreePairwise { halves(&values) } else { values.into_iter().fold(None, plus) }
        }
    }
}

fn halves(values: &[Option<f32>]) -> Option<f32> {
    if let [value] = values {
        return *value;
    }
    let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
    plus(halves(left), halves(right))
}

fn plus(a: Option<f32>, b: Option<f32>) -> Option<f32> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// No run of these sizes takes this long, whatever the faults.
const TIME_LIMIT: Duration = Duration::from_secs(120);
