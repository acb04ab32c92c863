//! Checks at the end of a run: results against the oracle, ends against the scenario, counters against each other,
//! queues against their limits.

use super::cluster::{A_LEASE_AT_LEAST, Cluster};
use super::memory::{OpMemory, chunks, results_over};
use super::options::Options;
use super::report::Violation;
use super::route::Route;
use super::scenario::Scenario;
use super::setup::Member;
use super::wiring::{LEASE_MS, Wiring};
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::transport::packets::EndpointError;
use sumac_hal::ctrl::{Counters, DropReason};
use sumac_hal::ids::ChunkNo;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::time::Instant;

impl Cluster<'_, '_> {
    pub(super) fn check(&mut self) -> Result<(), Violation> {
        self.check_results()?;
        self.check_ends()?;
        self.check_survivors()?;
        self.check_agreement()?;
        self.check_limits()?;
        self.check_manners()?;
        self.check_kept()?;
        self.check_scenario()?;
        self.check_leases()
    }

    fn check_scenario(&mut self) -> Result<(), Violation> {
        match self.options.scenario {
            Scenario::Calm => {
                self.check_devices_quiet()?;
                self.check_ranks_quiet()?;
                self.check_conservation()
            }
            // Devices may wait for chunks after the mismatch until the group is released.
            Scenario::Mismatch { .. } => self.check_ranks_quiet(),
            _ => Ok(()),
        }
    }

    /// Check the contents of every rank's buffers.
    pub(super) fn check_results(&self) -> Result<(), Violation> {
        for group in 0..self.options.groups.len() {
            for op in 0..self.options.groups[group].ops.len() {
                self.check_op(group, op)?;
            }
        }
        Ok(())
    }

    /// Check how each rank ended.
    fn check_ends(&self) -> Result<(), Violation> {
        for (rank, members) in self.members.iter().enumerate() {
            for (group, member) in members.iter().enumerate() {
                if let Some(expected) = self.unexpected_end(group, member) {
                    let (done, error) = (member.done, member.error);
                    return Err(Violation::End { group, rank, done, error, expected });
                }
            }
        }
        Ok(())
    }

    /// Return the expected end, if a member ended differently.
    fn unexpected_end(&self, group: usize, member: &Member) -> Option<String> {
        let all = self.options.groups[group].ops.len() as u64;
        let complete = member.error.is_none() && member.done == all;
        match &self.options.scenario {
            // Checked by `check_survivors`.
            Scenario::Ranks { .. } => None,
            Scenario::Mismatch { group: wrong, op, .. } if *wrong == group => {
                let is_expected = match member.error {
                    Some(EndpointError::Mismatch { .. }) => !self.options.scenario.is_unsupported(),
                    Some(EndpointError::Unsupported(_)) => self.options.scenario.is_unsupported(),
                    _ => false,
                };
                let is_expected = is_expected && member.done == *op as u64;
                (!is_expected).then(|| format!("a mismatch or unsupported operation after {op} operations"))
            }
            Scenario::Death { .. } | Scenario::Restart { again: false, .. } => {
                let lost = matches!(member.error, Some(EndpointError::PathLost | EndpointError::GroupLost));
                (!lost && !complete).then(|| "a lost path or group, or all results".to_owned())
            }
            _ => (!complete).then(|| format!("all {all} operations")),
        }
    }

    /// Compare an operation at every rank with the oracle: completed ones entirely, others chunk by chunk.
    fn check_op(&self, group: usize, op: usize) -> Result<(), Violation> {
        let options = self.options;
        let desc = options.groups[group].ops[op];
        let differs =
            matches!(&options.scenario, Scenario::Mismatch { group: g, op: at, .. } if (*g, *at) == (group, op));
        let chunks = chunks(&desc, options.ranks, options.chunk_len_bytes);
        // If calls differ, no rank has a result and no buffer is changed.
        let results =
            if differs { Vec::new() } else { results_over(self.shape(group), options, self.incarnation, group, op) };
        for (rank, members) in self.members.iter().enumerate() {
            let member = &members[group];
            let found = &member.memory.ops[op];
            let before = OpMemory::before(options, self.incarnation, group, rank, op);
            let mut after = before.after(&desc, options.ranks, rank, &results);
            let is_done = (op as u64) < member.done;
            if is_done && options.recovers() {
                // Already checked, and the caller has reused its buffers since.
                after.scribble();
            }
            if is_done || differs {
                if let Some((byte, [found, expected])) = found.first_difference(&after) {
                    return Err(Violation::Wrong { group, rank, op, byte, found, expected });
                }
            } else if let Some(chunk) = found.torn_chunk(&before, &after, &desc, &chunks) {
                return Err(Violation::Torn { group, rank, op, chunk });
            }
        }
        Ok(())
    }

    /// Return the results of an operation, computed once per run.
    pub(super) fn results_of(&mut self, group: usize, op: usize) -> &[Vec<u8>] {
        if !self.results.contains_key(&(group, op)) {
            let results = results_over(self.shape(group), self.options, self.incarnation, group, op);
            self.results.insert((group, op), results);
        }
        &self.results[&(group, op)]
    }

    /// Compare an operation that returns now with the oracle.
    pub(super) fn check_op_at(&mut self, rank: usize, group: usize, op: usize) -> Result<(), Violation> {
        let options = self.options;
        let desc = options.groups[group].ops[op];
        let before = OpMemory::before(options, self.incarnation, group, rank, op);
        let after = before.after(&desc, options.ranks, rank, self.results_of(group, op));
        match self.members[rank][group].memory.ops[op].first_difference(&after) {
            Some((byte, [found, expected])) => Err(Violation::Wrong { group, rank, op, byte, found, expected }),
            None => Ok(()),
        }
    }

    /// All ranks of a group with a mismatch got the same error, and it is correct.
    fn check_agreement(&self) -> Result<(), Violation> {
        let Scenario::Mismatch { group, op, .. } = self.options.scenario else { return Ok(()) };
        let error_of = |rank: usize| self.members[rank][group].error;
        let calls: Vec<OpDesc> = (0..self.options.ranks).map(|rank| self.options.call(group, rank, op)).collect();
        for rank in 0..self.options.ranks {
            let truth = match error_of(rank) {
                Some(EndpointError::Mismatch { first, other }) => {
                    first != other && calls.contains(&first) && calls.contains(&other)
                }
                Some(EndpointError::Unsupported(desc)) => calls.contains(&desc),
                _ => false,
            };
            if !truth || error_of(rank) != error_of(0) {
                let (done, error) = (self.members[rank][group].done, error_of(rank));
                let expected = format!("two of the calls, the same as rank 0: {:?}", error_of(0));
                return Err(Violation::End { group, rank, done, error, expected });
            }
        }
        Ok(())
    }

    /// Nothing is in flight, and no device has anything to send or wait for.
    fn check_devices_quiet(&mut self) -> Result<(), Violation> {
        if self.fabric.in_flight() > 0 {
            return Err(Violation::NotQuiet { who: "the fabric".to_owned() });
        }
        for index in 0..self.devices.len() {
            let now = self.device_time(index);
            for node in &mut self.devices[index].shards {
                let wakes = node.poll_timeout().is_some_and(|at| at < now + A_LEASE_AT_LEAST);
                if node.poll_destination().is_some() || wakes {
                    return Err(Violation::NotQuiet { who: format!("device {index}") });
                }
            }
        }
        Ok(())
    }

    /// No rank has anything to send or wait for.
    fn check_ranks_quiet(&mut self) -> Result<(), Violation> {
        for (rank, members) in self.members.iter_mut().enumerate() {
            for (group, member) in members.iter_mut().enumerate() {
                if member.endpoint.poll_destination().is_some() || member.endpoint.poll_timeout().is_some() {
                    return Err(Violation::NotQuiet { who: format!("rank {rank} in group {group}") });
                }
            }
        }
        Ok(())
    }

    /// Each chunk completed once on each node, from one contribution per child, and was answered once per child.
    fn check_conservation(&self) -> Result<(), Violation> {
        let mut counters = Counters::default();
        self.devices.iter().flat_map(|device| &device.shards).for_each(|node| counters.merge(node.counters()));
        let (mut completed, mut contributions) = (0, 0);
        for (group, described) in self.options.groups.iter().enumerate() {
            let (ranks, chunk_len) = (self.options.ranks, self.options.chunk_len_bytes);
            // An operation without elements is one chunk.
            let chunks = described.ops.iter().map(|op| chunks(op, ranks, chunk_len).len().max(1) as u64).sum::<u64>();
            let nodes = &self.wirings[described.tree].nodes;
            completed += chunks * nodes.len() as u64;
            contributions += chunks * nodes.iter().map(|node| u64::from(node.children)).sum::<u64>();
            for members in &self.members {
                equal("have of a rank", members[group].endpoint.have().0, chunks)?;
            }
        }
        equal("chunks completed", counters.completed, completed)?;
        equal("contributions", counters.contributions, contributions)?;
        equal("answers", counters.answers, contributions)?;
        let ranks = self.members.iter().flatten().map(|member| *member.endpoint.stats());
        let (sent, taken) = ranks.fold((0, 0), |sum, rank| (sum.0 + rank.packets_out, sum.1 + rank.packets_in));
        let links = self.fabric.counters();
        equal("packets shared", counters.answers_shared, self.shared_sent)?;
        equal("packets sent", counters.packets_out + sent - self.shared_sent + self.shared_copies, links.sent)?;
        equal("packets delivered", counters.packets_in + taken, links.delivered)?;
        let fates = links.delivered + links.dropped_by_rule + links.dropped_by_queue + links.dropped_by_length;
        equal("fates of packets", fates, links.sent + links.duplicated)
    }

    /// Trees are bounded by faults: a job whose trees fail again and again is not one that recovers.
    pub(super) fn check_trees(&self) -> Result<(), Violation> {
        let limit = TREES_PER_GROUP * self.options.groups.len() as u64;
        within("trees planned", self.assignments.len() as u64, limit)
    }

    /// Traffic in flight is bounded by windows and probes, however long a run takes.
    fn check_limits(&self) -> Result<(), Violation> {
        let links = |wiring: &Wiring| wiring.nodes.iter().map(|node| u64::from(node.children)).sum::<u64>();
        let fixed = self.wirings.iter().filter(|_| !self.options.recovers()).map(links).sum::<u64>();
        let planned = self.assignments.iter().map(|assignment| links(&assignment.wiring)).max().unwrap_or(0);
        let links = (fixed + planned) * self.options.groups.len() as u64;
        let window = self.assignments.iter().map(|assignment| assignment.window).fold(self.options.window, u16::max);
        let limit = links * IN_FLIGHT_PER_WINDOW * u64::from(window.max(8)) + self.attacker.sent();
        within("packets in flight", self.in_flight_most, limit)?;
        // Waiting components probe with backoff; lost packets are resent and requested.
        let least = self.assignments.iter().map(|assignment| assignment.chunk_len_bytes);
        let least = least.fold(self.options.chunk_len_bytes, u16::min);
        let of_group = |group| ends(self.options, (group, 0), least).last();
        let chunks: u64 = (0..self.options.groups.len()).filter_map(of_group).sum();
        let ranks = self.options.ranks as u64;
        let each = |group| {
            let chunks = of_group(group).unwrap_or(0);
            // To and from the controller; reports, votes and host collectives; contributions and results.
            MESSAGES_PER_PAIR * ranks * ranks + 2 * ranks * chunks
        };
        let to_devices = MESSAGES_PER_NODE * (self.devices.len() * self.options.groups.len()) as u64;
        let limit = to_devices + (0..self.options.groups.len()).map(each).sum::<u64>();
        within("messages in flight", self.messages_max, limit)?;
        let asked = (self.now - Instant::ZERO).as_millis() as u64 / 25;
        let incarnations = self.incarnation + 1 + self.view_changes;
        let limit = links * (PACKETS_PER_CHUNK * chunks + PACKETS_PER_PROBE * (asked + 16)) * incarnations;
        let of_paths = 2 * self.paths.probes_sent();
        within("packets sent", self.fabric.counters().sent, limit + of_paths + 4 * self.attacker.sent())
    }

    /// No component sends packets that violate the protocol: only an attacker does.
    fn check_manners(&self) -> Result<(), Violation> {
        if self.options.scenario == Scenario::Hostile {
            return Ok(());
        }
        let mut counters = self.past;
        self.devices.iter().flat_map(|device| &device.shards).for_each(|node| counters.merge(node.counters()));
        // A node refuses a chunk as soon as two children disagree, while another may lack one from a window earlier.
        let early = matches!(self.options.scenario, Scenario::Mismatch { .. });
        let is_forged = self.options.has_stranger();
        let rude = ATTACKER_ONLY.iter().filter(|(reason, _)| {
            !(early && *reason == DropReason::OverWindow
                || is_forged && matches!(reason, DropReason::BadKey | DropReason::BadChild))
        });
        rude.into_iter().try_for_each(|&(reason, what)| equal(what, counters.dropped(reason), 0))
    }

    /// `stable`, as a rank knows it, is held by every rank.
    pub(super) fn check_stable(&self, group: usize, rank: usize) -> Result<(), Violation> {
        let Member { endpoint, view, .. } = &self.members[rank][group];
        let stable = endpoint.stable().0;
        // Ranks that have not entered this view have nothing of it.
        let have = |member: &Member| if member.view == *view { member.endpoint.have().0 } else { 0 };
        let have = self.members.iter().map(|members| have(&members[group])).min().unwrap_or(0);
        within("stable chunks", stable, have)
    }

    /// Results that every rank is known to have are not kept (PROTOCOL 5). Ranks with host collectives still have the
    /// endpoint of the tree that they lost: it is not told more, and `first` is not that of its operations.
    fn check_kept(&self) -> Result<(), Violation> {
        let mut kept = 0;
        for (rank, members) in self.members.iter().enumerate() {
            for (group, member) in members.iter().enumerate() {
                if member.route == Route::HostCollectives {
                    continue;
                }
                let (of, chunk) = ((group, rank), member.chunk_len_bytes);
                let before = before(self.options, of, chunk, member.first);
                let ends = ends(self.options, of, chunk).skip(member.first).map(|end| end - before);
                let ends = ends.take_while(|&end| end <= member.endpoint.stable().0);
                kept += ends.filter(|end| member.endpoint.kept(ChunkNo(end - 1)).is_some()).count() as u64;
            }
        }
        equal("operations kept that every rank has", kept, 0)
    }

    /// Abandoned groups are gone once their lease has expired, with all their resources.
    fn check_leases(&mut self) -> Result<(), Violation> {
        let lease = Duration::from_millis(u64::from(LEASE_MS) + 1);
        let ends: Vec<Instant> = (0..self.devices.len()).map(|device| self.device_time(device) + lease).collect();
        let alive = self.devices.iter_mut().zip(ends).filter(|(device, _)| device.alive);
        for (node, end) in alive.flat_map(|(device, end)| device.shards.iter_mut().map(move |node| (node, end))) {
            node.handle_timeout(end);
            while let Some(event) = node.poll_event() {
                self.seen.device_event(event);
            }
            let stats = node.stats();
            equal("groups behind their lease", stats.groups.into(), 0)?;
            equal("slots behind their lease", stats.slots_used.into(), 0)?;
            equal("bytes behind their lease", stats.slot_memory_used_bytes, 0)?;
        }
        Ok(())
    }
}

/// Check a rank's queues before it sends, when they are longest: headers, chunks to resend, kept results.
pub(super) fn check_queues(options: &Options, member: &Member) -> Result<(), Violation> {
    let progress = member.endpoint.progress();
    let window = u64::from(member.window);
    // One request per gap at a time, and one probe per shard; and two about its path.
    let probes = if options.has_paths() { 3 } else { 1 } * u64::from(options.shards);
    within("headers to be sent by a rank", progress.replies as u64, 2 * window + probes)?;
    within("chunks to be sent again by a rank", progress.again as u64, window)?;
    // Sent chunks are less than a window ahead of what all have; operations are released as a whole.
    let kept = 2 * window * u64::from(member.chunk_len_bytes);
    within("bytes kept by a rank", progress.kept_bytes as u64, kept)
}

/// Check an operation that returns now: every rank has called it (PROTOCOL 1), and the results of an all-reduce that
/// other ranks may lack are kept (PROTOCOL 5).
pub(super) fn check_return(
    options: &Options,
    member: &Member,
    (group, rank, op): (usize, usize, usize),
    called: &BTreeMap<(usize, usize), usize>,
) -> Result<(), Violation> {
    let called = called.get(&(group, op)).copied().unwrap_or(0);
    if called < options.ranks {
        return Err(Violation::Early { group, rank, op, called });
    }
    let desc = options.call(group, rank, op);
    if desc.collective != Collective::AllReduce || desc.count == 0 {
        return Ok(());
    }
    let (of, chunk_len) = ((group, rank), member.chunk_len_bytes);
    let first = before(options, of, chunk_len, op) - before(options, of, chunk_len, member.first);
    for (chunk, elements) in chunks(&desc, options.ranks, chunk_len).iter().enumerate() {
        let seq = ChunkNo(first + chunk as u64);
        let result = member.memory.ops[op].result(elements, desc.element_bytes());
        if seq >= member.endpoint.stable() && member.endpoint.kept(seq).as_deref() != Some(result) {
            return Err(Violation::NotKept { group, rank, op, chunk });
        }
    }
    Ok(())
}

/// Return the seqs of the operations of a rank in a group before operation `op`, with chunks of this length.
fn before(options: &Options, of: (usize, usize), chunk_len: u16, op: usize) -> u64 {
    op.checked_sub(1).and_then(|last| ends(options, of, chunk_len).nth(last)).unwrap_or(0)
}

/// Return the seq after each of a rank's operations, in order; one without elements is one chunk.
fn ends(options: &Options, (group, rank): (usize, usize), chunk_len: u16) -> impl Iterator<Item = u64> {
    let count = move |op| chunks(&options.call(group, rank, op), options.ranks, chunk_len).len().max(1);
    (0..options.groups[group].ops.len()).scan(0, move |end, op| {
        *end += count(op) as u64;
        Some(*end)
    })
}

fn within(what: &'static str, found: u64, limit: u64) -> Result<(), Violation> {
    if found > limit { Err(Violation::Limit { what, found, limit }) } else { Ok(()) }
}

fn equal(what: &'static str, found: u64, expected: u64) -> Result<(), Violation> {
    if found == expected { Ok(()) } else { Err(Violation::Conservation { what, found, expected }) }
}

/// Drop reasons that only a misbehaving sender causes, each with its name.
const ATTACKER_ONLY: [(DropReason, &str); 7] = [
    (DropReason::BadChild, "packets of no child"),
    (DropReason::BadKey, "packets with a wrong key"),
    (DropReason::BadShard, "packets to a wrong shard"),
    (DropReason::BadMark, "packets that claim what was never sent"),
    (DropReason::BadShape, "packets of a wrong shape"),
    (DropReason::OverWindow, "packets beyond the window"),
    (DropReason::SlotBusy, "packets for a slot in use"),
];

/// Contribution and answer, each sent a few times, with a Nak for each.
const PACKETS_PER_CHUNK: u64 = 40;

/// Between two ranks: all messages of a recovery, and repetitions.
const MESSAGES_PER_PAIR: u64 = 8;

/// Between the controller and a device, for each group: a reservation, a release, and their responses.
const MESSAGES_PER_NODE: u64 = 12;

/// A fault takes one tree, and an attempt to recover another. A few times what seeded runs take.
const TREES_PER_GROUP: u64 = 32;

/// Probe and Status.
const PACKETS_PER_PROBE: u64 = 4;

/// Up and down, each possibly duplicated, and once more as requested by a probe.
const IN_FLIGHT_PER_WINDOW: u64 = 8;
