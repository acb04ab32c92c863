//! Checks when an operation returns, and at the end of a run.

use super::draw::Mishap;
use super::world::{Transport, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use crate::sim::memory::{OpMemory, chunks, results};
use crate::sim::report::{Report, Violation};
use crate::sim::wiring::{LEASE_MS, count_nodes, group_id};
use std::time::Duration;
use sumac_hal::ctrl::{Counters, Request};
use sumac_hal::op::Collective;

impl World<'_, '_> {
    /// An operation returns at a rank: its contents must be right, and from now on the caller may overwrite and
    /// deregister its buffers.
    pub(super) fn return_op(&mut self, rank: usize) -> Result<(), Violation> {
        let options = self.options;
        let op = self.members[rank].done;
        let desc = options.call(0, rank, op);
        let called = self.called.get(&op).copied().unwrap_or(0);
        // Operations that need a dead rank need not complete.
        let has_dead = self.members.iter().any(|member| member.is_dead);
        let may_do_without = has_dead && desc.count > 0 && desc.collective != Collective::AllReduce;
        if called < options.ranks && !may_do_without {
            return Err(Violation::Early { group: 0, rank, op, called });
        }
        let results = self.results.entry(op).or_insert_with(|| results(options, 0, 0, op));
        let after = OpMemory::before(options, 0, 0, rank, op).after(&desc, options.ranks, rank, results);
        let member = &mut self.members[rank];
        if let Some((byte, [found, expected])) = member.memory.ops[op].first_difference(&after) {
            return Err(Violation::Wrong { group: 0, rank, op, byte, found, expected });
        }
        if let Transport::ZeroCopy(driver) = &member.transport
            && let Some(op) = driver.stray_write(&member.memory)
        {
            return Err(Violation::UnexpectedChange { rank, op });
        }
        member.memory.ops[op].scribble();
        member.done += 1;
        self.take_back(rank, op);
        Ok(())
    }

    /// The caller drops the buffers of an operation, and the device releases them.
    fn take_back(&mut self, rank: usize, op: usize) {
        let member = &mut self.members[rank];
        let Transport::ZeroCopy(driver) = &mut member.transport else { return };
        driver.sync(&member.memory, op);
        let device = &mut self.devices[driver.device];
        let Some(board) = device.board.as_mut().filter(|_| device.stalled_until.is_none()) else { return };
        let (function, seen) = (driver.function, &mut self.seen);
        driver.regions.retain(|&key, registered| {
            let is_gone = registered.op == op && board.deregister(function, key);
            if is_gone {
                seen.note(Mark::RefDeregistered);
            }
            !is_gone
        });
    }

    /// Run all final checks.
    pub(super) fn check(&mut self) -> Result<Report, Violation> {
        (0..self.members.len()).try_for_each(|rank| self.check_rank(rank))?;
        if self.happened.is_empty() {
            self.check_quiet()?;
            self.check_counts()?;
        }
        self.check_links()?;
        self.check_devices()?;
        Ok(self.report())
    }

    /// Completed operations were checked when they returned, and their buffers must be unchanged since; in others each
    /// chunk is entirely old or new.
    fn check_rank(&mut self, rank: usize) -> Result<(), Violation> {
        let options = self.options;
        let member = &self.members[rank];
        if member.is_dead {
            return Ok(());
        }
        if let Transport::ZeroCopy(driver) = &member.transport
            && let Some(op) = driver.stray_write(&member.memory)
        {
            return Err(Violation::UnexpectedChange { rank, op });
        }
        for op in 0..member.done {
            let mut after = OpMemory::before(options, 0, 0, rank, op);
            after.scribble();
            if let Some((byte, [found, expected])) = member.memory.ops[op].first_difference(&after) {
                return Err(Violation::Wrong { group: 0, rank, op, byte, found, expected });
            }
        }
        let open = self.members[rank].done..options.groups[0].ops.len();
        open.clone().try_for_each(|op| self.check_whole(rank, op))
    }

    /// Check that each chunk of an operation is entirely unchanged or entirely the result: at the end, and whenever a
    /// rank has fenced its device.
    pub(super) fn check_whole(&mut self, rank: usize, op: usize) -> Result<(), Violation> {
        if self.is_in_doubt(rank, op) {
            // A device wrote to it while it was copied, and the rank knows.
            return Ok(());
        }
        let (options, found) = (self.options, &self.members[rank].memory.ops[op]);
        let desc = options.call(0, rank, op);
        let results = self.results.entry(op).or_insert_with(|| results(options, 0, 0, op));
        let before = OpMemory::before(options, 0, 0, rank, op);
        let after = before.after(&desc, options.ranks, rank, results);
        let chunks = chunks(&desc, options.ranks, options.chunk_len_bytes);
        match found.torn_chunk(&before, &after, &desc, &chunks) {
            Some(chunk) => Err(Violation::Torn { group: 0, rank, op, chunk }),
            None => Ok(()),
        }
    }

    /// Without losses: nothing is in flight, and nothing is left to send.
    fn check_quiet(&mut self) -> Result<(), Violation> {
        let quiet = |is_quiet: bool, who: String| if is_quiet { Ok(()) } else { Err(Violation::NotQuiet { who }) };
        quiet(self.fabric.in_flight() == 0, "the fabric".to_owned())?;
        for (index, device) in self.devices.iter_mut().enumerate() {
            let Some(board) = &mut device.board else { continue };
            quiet(board.node.poll_destination().is_none() && board.engine.in_flight() == 0, format!("device {index}"))?;
        }
        for (rank, member) in self.members.iter_mut().enumerate() {
            let is_quiet = match &mut member.transport {
                Transport::Packets(endpoint) => {
                    endpoint.poll_destination().is_none() && endpoint.poll_timeout().is_none()
                }
                Transport::ZeroCopy(driver) => !driver.endpoint.is_in_flight(),
            };
            quiet(is_quiet, format!("rank {rank}"))?;
        }
        Ok(())
    }

    /// Traffic in flight is bounded by windows and probes, however long a run takes.
    fn check_links(&self) -> Result<(), Violation> {
        let links: u64 = self.wiring.nodes.iter().map(|node| u64::from(node.children)).sum();
        let limit = links * IN_FLIGHT_PER_WINDOW * u64::from(self.options.window.max(8)) * (self.incarnation + 1);
        let (what, found) = ("packets in flight", self.report.in_flight_most);
        if found > limit { Err(Violation::Limit { what, found, limit }) } else { Ok(()) }
    }

    fn counters(&self) -> Counters {
        let mut counters = self.past;
        let boards = self.devices.iter().filter_map(|device| device.board.as_ref());
        boards.for_each(|board| counters.merge(board.node.counters()));
        counters
    }

    /// Without losses: each chunk completed once on each node, from one contribution per child.
    fn check_counts(&self) -> Result<(), Violation> {
        let (options, counters) = (self.options, self.counters());
        let lens = options.groups[0].ops.iter().map(|op| chunks(op, options.ranks, options.chunk_len_bytes).len());
        let total: u64 = lens.map(|chunks| chunks.max(1) as u64).sum();
        let children: u64 = self.wiring.nodes.iter().map(|node| u64::from(node.children)).sum();
        equal("chunks completed", counters.completed, total * count_nodes(&options.trees[0]) as u64)?;
        equal("contributions", counters.contributions, total * children)?;
        self.members.iter().try_for_each(|member| {
            let have = match &member.transport {
                Transport::Packets(endpoint) => endpoint.have(),
                Transport::ZeroCopy(driver) => driver.endpoint.have(),
            };
            equal("have of a rank", have.0, total)
        })
    }

    /// Once the group is released or its lease has expired, and ranks have left, devices have no slots, chains or
    /// regions of it left.
    fn check_devices(&mut self) -> Result<(), Violation> {
        let is_revoked = |mishap: &Mishap| matches!(mishap, Mishap::Rank { is_revoked: true, .. });
        let may_be_stale = self.happened.iter().any(|&index| is_revoked(&self.by.mishaps[index]));
        for index in 0..self.devices.len() {
            let device = &mut self.devices[index];
            let Some(board) = device.board.as_mut().filter(|_| device.stalled_until.is_none()) else { continue };
            if board.node.has_group(group_id(0)) {
                if self.options.seed.is_multiple_of(2) {
                    board.node.control(&Request::ReleaseGroup(group_id(0)), self.now);
                } else {
                    board.node.handle_timeout(self.now + Duration::from_millis(u64::from(LEASE_MS) + 1));
                }
            }
            for (function, _) in board.attached() {
                board.detach(function);
            }
            for _ in 0..DRAIN_TURNS {
                board.serve(self.now, &mut |_| false);
                let Some(due) = board.engine.next_due() else { continue };
                self.now = self.now.max(due);
                board.engine.advance(self.now, &mut |_| false);
            }
            let stats = board.node.stats();
            equal("chains in flight behind the group", board.engine.in_flight() as u64, 0)?;
            equal("groups behind their release", stats.groups.into(), 0)?;
            equal("slots behind their release", stats.slots_used.into(), 0)?;
            equal("slot memory behind its release", stats.slot_memory_used_bytes, 0)?;
            equal("regions behind their functions", board.regions_left() as u64, 0)?;
            if !may_be_stale {
                equal("steps that name memory that is gone", board.engine.stale, 0)?;
            }
        }
        Ok(())
    }

    fn report(&self) -> Report {
        let links = self.fabric.counters();
        let hashes = self.devices.iter().filter_map(|device| device.board.as_ref()).map(|board| board.engine.hash);
        let hash = hashes.fold(weight(&[self.fabric.log_hash(), self.hash]), |hash, other| weight(&[hash, other]));
        let mut report = Report {
            log_hash: hash,
            took: Duration::from_nanos(self.ended_at.as_nanos()),
            packets: links.sent,
            incast_drops: links.dropped_by_queue,
            marked: links.marked,
            counters: self.counters(),
            seen: self.seen,
            recoveries: self.seen.count(Mark::OpRecovered),
            ..self.report
        };
        for member in self.members.iter().filter(|member| !member.is_dead) {
            if let Transport::Packets(endpoint) = &member.transport {
                let stats = endpoint.stats();
                report.retransmits += stats.retransmits;
                report.probes += stats.probes;
                report.rank_drops += stats.dropped;
                report.shared_results += stats.shared_results;
            }
            match member.failed_from {
                None => report.completed += 1,
                Some(_) => report.ranks_failed += 1,
            }
        }
        report
    }
}

fn equal(what: &'static str, found: u64, expected: u64) -> Result<(), Violation> {
    if found == expected { Ok(()) } else { Err(Violation::Conservation { what, found, expected }) }
}

/// Up and down, each possibly duplicated, and once more as requested by a probe.
const IN_FLIGHT_PER_WINDOW: u64 = 8;

/// More turns than all chains of a device take together.
const DRAIN_TURNS: usize = 5_000;
