//! What has to hold at the end of a run: results against the oracle, ends against the scenario, counters against each
//! other, queues against their limits.

use super::cluster::{A_LEASE_AT_LEAST, Cluster};
use super::memory::{OpMemory, chunks, results};
use super::report::Violation;
use super::scenario::Scenario;
use super::setup::Member;
use sumac::endpoint::EndpointError;
use sumac_hal::ctrl::Counters;
use sumac_hal::op::OpDesc;

impl Cluster<'_, '_> {
    pub(super) fn check(&mut self) -> Result<(), Violation> {
        self.check_results()?;
        self.check_ends()?;
        self.check_agreement()?;
        self.check_limits()?;
        match self.options.scenario {
            Scenario::Calm => {
                self.check_devices_quiet()?;
                self.check_ranks_quiet()?;
                self.check_conservation()
            }
            // Devices may wait for chunks behind the mismatch, until the group is released.
            Scenario::Mismatch { .. } => self.check_ranks_quiet(),
            _ => Ok(()),
        }
    }

    /// Check what is in every rank's buffers.
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

    /// Return what was expected instead of how a member ended.
    fn unexpected_end(&self, group: usize, member: &Member) -> Option<String> {
        let all = self.options.groups[group].ops.len() as u64;
        let complete = member.error.is_none() && member.done == all;
        match &self.options.scenario {
            Scenario::Mismatch { group: wrong, op, .. } if *wrong == group => {
                let told = matches!(member.error, Some(EndpointError::Mismatch { .. })) && member.done == *op as u64;
                (!told).then(|| format!("a mismatch after {op} operations"))
            }
            Scenario::Death { .. } | Scenario::Restart { again: false, .. } => {
                let lost = matches!(member.error, Some(EndpointError::PathLost | EndpointError::GroupLost));
                (!lost && !complete).then(|| "a lost path or group, or all results".to_owned())
            }
            _ => (!complete).then(|| format!("all {all} operations")),
        }
    }

    /// Compare an operation at every rank with the oracle: completed ones whole, others chunk by chunk.
    fn check_op(&self, group: usize, op: usize) -> Result<(), Violation> {
        let options = self.options;
        let desc = options.groups[group].ops[op];
        let differs =
            matches!(&options.scenario, Scenario::Mismatch { group: g, op: at, .. } if (*g, *at) == (group, op));
        let chunks = chunks(&desc, options.ranks, options.chunk_len_bytes);
        // Where calls differ nobody has a result, and nothing is touched.
        let results = if differs { Vec::new() } else { results(options, group, op) };
        for (rank, members) in self.members.iter().enumerate() {
            let member = &members[group];
            let found = &member.memory.ops[op];
            let before = OpMemory::before(options, group, rank, op);
            let after = before.after(&desc, options.ranks, rank, &results);
            let is_done = (op as u64) < member.done;
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

    /// All ranks of a group that were told of a mismatch were told the same, and it is true.
    fn check_agreement(&self) -> Result<(), Violation> {
        let Scenario::Mismatch { group, op, .. } = self.options.scenario else { return Ok(()) };
        let told = |rank: usize| self.members[rank][group].error;
        let calls: Vec<OpDesc> = (0..self.options.ranks).map(|rank| self.options.call(group, rank, op)).collect();
        for rank in 0..self.options.ranks {
            let truth = match told(rank) {
                Some(EndpointError::Mismatch { first, other }) => {
                    first != other && calls.contains(&first) && calls.contains(&other)
                }
                _ => false,
            };
            if !truth || told(rank) != told(0) {
                let (done, error) = (self.members[rank][group].done, told(rank));
                let expected = format!("two of the calls made, as rank 0 has it: {:?}", told(0));
                return Err(Violation::End { group, rank, done, error, expected });
            }
        }
        Ok(())
    }

    /// Nothing is on its way, and no device has anything left to send or to wait for.
    fn check_devices_quiet(&mut self) -> Result<(), Violation> {
        if self.fabric.in_flight() > 0 {
            return Err(Violation::NotQuiet { who: "the fabric".to_owned() });
        }
        for (index, device) in self.devices.iter_mut().enumerate() {
            for node in &mut device.shards {
                let wakes = node.poll_timeout().is_some_and(|at| at < self.now + A_LEASE_AT_LEAST);
                if node.poll_destination().is_some() || wakes {
                    return Err(Violation::NotQuiet { who: format!("device {index}") });
                }
            }
        }
        Ok(())
    }

    /// No rank has anything left to send or to wait for.
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

    /// Each chunk completed once on each node, out of one contribution of each child, and was answered to each once.
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
        let fates = links.delivered + links.dropped_by_rule + links.dropped_by_queue;
        equal("fates of packets", fates, links.sent + links.duplicated)
    }

    /// However long a run takes, no more is on its way than windows and probes allow.
    fn check_limits(&self) -> Result<(), Violation> {
        let nodes = self.wirings.iter().flat_map(|wiring| &wiring.nodes);
        let links: u64 = nodes.map(|node| u64::from(node.children)).sum::<u64>() * self.options.groups.len() as u64;
        let limit = links * IN_FLIGHT_A_WINDOW * u64::from(self.options.window.max(8)) + self.attacker.sent();
        let found = self.in_flight_most();
        if found > limit { Err(Violation::Limit { what: "packets on their way", found, limit }) } else { Ok(()) }
    }
}

fn equal(what: &'static str, found: u64, expected: u64) -> Result<(), Violation> {
    if found == expected { Ok(()) } else { Err(Violation::Conservation { what, found, expected }) }
}

/// Up and down, each perhaps doubled, and once more as asked for by a probe.
const IN_FLIGHT_A_WINDOW: u64 = 8;
