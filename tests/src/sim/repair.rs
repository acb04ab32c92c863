//! Repair of a lost tree with the reports and plan of `sumac::comm`, over messages that take time.
//!
//! Freeze, exchange reports, compute the same plan, move or compute what is missing, request another tree from the
//! controller, agree, continue. Ranks between two operations, or done with all of them, are notified by the controller
//! and take part too.
//!
//! Messages between ranks arrive in order per pair, as over connections, with varying delays. All ranks survive here.
//! In [`super::ranks`], coordination and dead ranks replace [`Stage::Reports`] and [`Stage::Votes`]; nothing else here
//! depends on how ranks agree.
//!
//! Oracles: all ranks make the same decision; no chunk is computed that some rank has, or twice in one view; at most
//! twice the message size is moved per rank; an operation that has returned is not written to again.

use super::cluster::Cluster;
use super::controller::ControllerRequest;
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::memory::OpMemory;
use super::messages::Message;
use super::reduce::{reduce, tree};
use super::report::Violation;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::harness::{Chunk, Decision, Origin, RankReport};
use sumac::transport::packets::{Endpoint, EndpointError};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Path};

/// How a rank's operations run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// Through a tree; `None` is the initial tree of scenarios without repair.
    Tree(Option<usize>),
    /// As host collectives between the ranks.
    HostCollectives,
}

/// Progress of a rank in a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Waiting for the others' reports.
    Reports,
    /// Waiting for chunks.
    Chunks,
    /// Waiting for another tree.
    Tree,
    /// Waiting for the others' votes.
    Votes,
}

/// A rank's state in a repair.
#[derive(Debug)]
pub(super) struct Repair {
    stage: Stage,
    /// The report that this rank has sent.
    report: RankReport,
    decision: Decision,
    /// Chunks without a local result.
    missing: BTreeSet<u64>,
}

/// Messages of one repair, possibly received before this rank knew of it.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) reports: BTreeMap<usize, RankReport>,
    pub(super) contributions: BTreeMap<u64, BTreeMap<usize, Vec<u8>>>,
    pub(super) results: BTreeMap<u64, Vec<u8>>,
    pub(super) votes: BTreeMap<usize, Option<usize>>,
    pub(super) found: Option<Option<usize>>,
}

/// A message between ranks in a repair.
#[derive(Debug, Clone)]
pub(super) enum RepairMessage {
    RankReport(RankReport),
    Contribution(u64, Vec<u8>),
    Result(u64, Vec<u8>),
    Vote(Option<usize>),
}

/// Oracle state of one repair.
#[derive(Debug, Default)]
pub(super) struct Record {
    decision: Option<Decision>,
    computed: BTreeSet<u64>,
    bytes: u64,
}

impl Cluster<'_, '_> {
    /// Return the controller's reply about another tree, if there is one.
    pub(super) fn found(&self, rank: usize, group: usize) -> Option<Option<usize>> {
        let member = &self.members[rank][group];
        member.inboxes.get(&member.view).and_then(|inbox| inbox.found)
    }

    pub(super) fn inbox(&mut self, rank: usize, group: usize, view: u32) -> &mut Inbox {
        self.members[rank][group].inboxes.entry(view).or_default()
    }

    /// Send a message to all ranks of a group, this one included.
    fn broadcast(&mut self, (rank, group): (usize, usize), what: &RepairMessage) {
        let view = self.members[rank][group].view;
        for to in 0..self.options.ranks {
            self.send_message(Message::Repair { from: rank, to, group, view, what: what.clone() });
        }
    }

    /// Handle the failure of a rank's endpoint.
    pub(super) fn lose_tree(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let view = self.members[rank][group].view;
        self.seen.note(Mark::FrozenByLoss);
        self.send_message(Message::Request { rank, group, view, request: ControllerRequest::Suspect });
        self.schedule(self.now + RETRY_INTERVAL, Alarm::RepeatSuspicion { rank, group, view });
        if self.options.ranks_die() {
            return self.change_view((rank, group), true);
        }
        self.freeze(rank, group)
    }

    /// Repeat the suspicion while the repair lasts: the controller may have been away.
    pub(super) fn repeat_suspicion(&mut self, (rank, group): (usize, usize), view: u32) {
        let member = &self.members[rank][group];
        if member.view == view && member.repair.as_ref().is_some_and(|repair| repair.stage == Stage::Reports) {
            self.send_message(Message::Request { rank, group, view, request: ControllerRequest::Suspect });
            self.schedule(self.now + RETRY_INTERVAL, Alarm::RepeatSuspicion { rank, group, view });
        }
    }

    /// Freeze: accept nothing more from the tree, and send everybody the report.
    pub(super) fn freeze(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        // Accept what has arrived so far.
        self.collect(rank, group)?;
        let member = &mut self.members[rank][group];
        member.endpoint.freeze();
        let decision = Decision { cut: 0, chunks: Vec::new() };
        let report = RankReport::of(&member.endpoint);
        let sent_report = report.clone();
        member.repair = Some(Repair { stage: Stage::Reports, report: sent_report, decision, missing: BTreeSet::new() });
        self.broadcast((rank, group), &RepairMessage::RankReport(report));
        self.reach(Point::Frozen, None);
        self.touch_rank(rank, group);
        self.advance(rank, group)
    }

    /// Advance as far as received messages allow.
    pub(super) fn advance(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        while let Some(stage) = self.members[rank][group].repair.as_ref().map(|repair| repair.stage) {
            let has_moved = match stage {
                Stage::Reports => self.decide(rank, group)?,
                Stage::Chunks => self.move_chunks(rank, group)?,
                Stage::Tree => self.take_tree(rank, group, false),
                Stage::Votes => self.commit(rank, group)?,
            };
            if !has_moved {
                break;
            }
        }
        Ok(())
    }

    fn set_stage(&mut self, rank: usize, group: usize, stage: Stage) {
        self.members[rank][group].repair.as_mut().expect("in a repair").stage = stage;
    }

    /// With all reports: compute the plan, and send this rank's part.
    fn decide(&mut self, rank: usize, group: usize) -> Result<bool, Violation> {
        let ranks = self.options.ranks;
        let view = self.members[rank][group].view;
        if self.inbox(rank, group, view).reports.len() < ranks {
            return Ok(false);
        }
        let reports: Vec<RankReport> = self.inbox(rank, group, view).reports.values().cloned().collect();
        let endpoint = &self.members[rank][group].endpoint;
        let decision = Decision::of(&reports, endpoint).map_err(|why| Violation::Unrepairable { group, rank, why })?;
        self.check_decision((group, view), &decision)?;
        self.reach(Point::Decided, None);
        for chunk in &decision.chunks {
            let member = &mut self.members[rank][group];
            let own = Rank(rank as u32);
            let bytes = chunk.give(&member.endpoint, own, &mut member.memory);
            match chunk.origin {
                Origin::Held(holder) if holder == own => {
                    self.seen.note(Mark::ChunkHeld);
                    self.send_result((rank, group), chunk, &bytes)?;
                }
                Origin::Held(_) => {}
                Origin::Recompute => {
                    let to = chunk.seq as usize % ranks;
                    self.count_bytes((group, view), to != rank, bytes.len())?;
                    let what = RepairMessage::Contribution(chunk.seq, bytes);
                    self.send_message(Message::Repair { from: rank, to, group, view, what });
                }
            }
        }
        let repair = self.members[rank][group].repair.as_mut().expect("in a repair");
        repair.missing = decision.chunks.iter().map(|chunk| chunk.seq).collect();
        repair.decision = decision;
        repair.stage = Stage::Chunks;
        Ok(true)
    }

    /// Send a result to all ranks.
    fn send_result(&mut self, (rank, group): (usize, usize), chunk: &Chunk, bytes: &[u8]) -> Result<(), Violation> {
        let view = self.members[rank][group].view;
        if bytes.len() != chunk.len_bytes {
            let why = format!("chunk {}: {} bytes where {} are due", chunk.seq, bytes.len(), chunk.len_bytes);
            return Err(Violation::Unrepairable { group, rank, why });
        }
        for _ in 1..self.options.ranks {
            self.count_bytes((group, view), true, bytes.len())?;
        }
        self.broadcast((rank, group), &RepairMessage::Result(chunk.seq, bytes.to_vec()));
        Ok(())
    }

    /// Compute this rank's part, and store what has arrived.
    fn move_chunks(&mut self, rank: usize, group: usize) -> Result<bool, Violation> {
        let ranks = self.options.ranks;
        let view = self.members[rank][group].view;
        let chunks = self.members[rank][group].repair.as_ref().expect("in a repair").decision.chunks.clone();
        for chunk in &chunks {
            let inbox = self.inbox(rank, group, view);
            if inbox.contributions.get(&chunk.seq).is_some_and(|given| given.len() == ranks) {
                let given: Vec<Vec<u8>> = inbox.contributions.remove(&chunk.seq).expect("seen").into_values().collect();
                self.compute((rank, group), chunk, &given)?;
            }
            let Some(result) = self.inbox(rank, group, view).results.remove(&chunk.seq) else { continue };
            let member = &mut self.members[rank][group];
            chunk.land(&member.endpoint, &result, &mut member.memory);
            member.repair.as_mut().expect("in a repair").missing.remove(&chunk.seq);
            self.reach(Point::Landed, None);
        }
        if !self.members[rank][group].repair.as_ref().expect("in a repair").missing.is_empty() {
            return Ok(false);
        }
        self.set_stage(rank, group, Stage::Tree);
        let lost = match self.members[rank][group].route {
            Route::Tree(tree) => tree,
            Route::HostCollectives => None,
        };
        self.send_message(Message::Request { rank, group, view, request: ControllerRequest::Replan { lost } });
        self.schedule(self.now + REPLAN_LIMIT, Alarm::ReplanLimit { rank, group, view });
        Ok(true)
    }

    fn compute(&mut self, at: (usize, usize), chunk: &Chunk, given: &[Vec<u8>]) -> Result<(), Violation> {
        let (rank, group) = at;
        let (options, view) = (self.options, self.members[rank][group].view);
        let record = self.records.entry((group, view)).or_default();
        if !record.computed.insert(chunk.seq) {
            return Err(Violation::Recomputed { group, view, seq: chunk.seq });
        }
        self.seen.note(Mark::ChunkComputed);
        let tree = tree(&options.trees[options.tree(group)], options.ranks, options.order(group));
        let result = reduce(&tree, &chunk.desc, given);
        self.send_result(at, chunk, &result)
    }

    /// Handle the controller's reply, or its timeout.
    pub(super) fn take_tree(&mut self, rank: usize, group: usize, is_late: bool) -> bool {
        let member = &self.members[rank][group];
        let (view, waits) = (member.view, member.repair.as_ref().is_some_and(|repair| repair.stage == Stage::Tree));
        let found = self.inbox(rank, group, view).found;
        if !waits || (found.is_none() && !is_late) {
            return false;
        }
        if found.is_none() {
            self.seen.note(Mark::ControllerLate);
        }
        self.set_stage(rank, group, Stage::Votes);
        self.broadcast((rank, group), &RepairMessage::Vote(found.flatten()));
        true
    }

    pub(super) fn replan_limit(&mut self, (rank, group): (usize, usize), view: u32) -> Result<(), Violation> {
        if self.members[rank][group].view != view {
            return Ok(());
        }
        if self.take_tree(rank, group, true) {
            self.advance(rank, group)?;
        }
        self.finish_trial((rank, group), true)
    }

    /// All votes are in: operations of the lost tree return, the others restart.
    fn commit(&mut self, rank: usize, group: usize) -> Result<bool, Violation> {
        let view = self.members[rank][group].view;
        let votes = self.inbox(rank, group, view).votes.clone();
        if votes.len() < self.options.ranks {
            return Ok(false);
        }
        let all_alike = votes.values().all(|vote| *vote == votes[&0]);
        let tree = votes[&0].filter(|_| all_alike);
        let member = &mut self.members[rank][group];
        let repair = member.repair.take().expect("in a repair");
        if RankReport::of(&member.endpoint) != repair.report {
            return Err(Violation::NotFenced { group, rank, view });
        }
        let below = member.first as u64 + repair.decision.completed_below(&member.endpoint).0;
        member.inboxes.remove(&view);
        member.view += 1;
        while self.members[rank][group].done < below {
            self.seen.note(Mark::OpRepaired);
            self.finish_op(rank, group)?;
        }
        let member = &mut self.members[rank][group];
        if member.done < member.called as u64 {
            self.seen.note(Mark::OpRestarted);
        }
        self.seen.note(if tree.is_some() { Mark::CommitTree } else { Mark::CommitSchedules });
        self.view_changes += u64::from(rank == 0);
        self.install(rank, group, tree);
        self.reach(Point::Committed, None);
        if tree.is_none() {
            self.enter_host_collective(rank, group)?;
        }
        Ok(false)
    }

    /// Continue with this tree, or with host collectives.
    pub(super) fn install(&mut self, rank: usize, group: usize, found: Option<usize>) {
        let member = &mut self.members[rank][group];
        member.first = member.done as usize;
        member.memory.first = member.first;
        member.route = found.map_or(Route::HostCollectives, |tree| Route::Tree(Some(tree)));
        let Some(found) = found else { return };
        let assignment = &self.assignments[found];
        let incarnation = u64::from(member.view);
        let config = assignment.wiring.endpoint(self.options, (rank, group), incarnation, assignment.epoch);
        member.endpoint = self.options.planted.endpoint(Endpoint::new(config));
        member.progress = member.endpoint.progress();
        for op in member.first..member.called {
            let posted = member.endpoint.post(self.options.call(group, rank, op), Path::Tree, None);
            assert!(posted.is_ok(), "{posted:?}");
        }
        self.touch_rank(rank, group);
    }

    /// An operation returns: its contents must be right, and the caller may overwrite its buffers from now on.
    pub(super) fn finish_op(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let op = self.members[rank][group].done as usize;
        let called = self.called.get(&(group, op)).copied().unwrap_or(0);
        let desc = self.options.call(group, rank, op);
        // Operations that need a dead rank need not complete.
        let may_do_without = desc.count > 0 && desc.collective != Collective::AllReduce && self.options.ranks_die();
        if called < self.options.ranks && !may_do_without {
            return Err(Violation::Early { group, rank, op, called });
        }
        self.check_op_at(rank, group, op)?;
        let member = &mut self.members[rank][group];
        member.memory.ops[op].scribble();
        member.done += 1;
        Ok(())
    }

    /// A rank enters an operation that runs as a host collective.
    pub(super) fn enter_host_collective(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank][group];
        let op = member.done as usize;
        if member.membership.is_frozen() {
            return Ok(());
        }
        if member.route == Route::HostCollectives && op < member.called && member.entered_below <= op {
            member.entered_below = op + 1;
            for to in 0..self.options.ranks {
                self.send_message(Message::Entered { to, group, op, from: rank });
            }
        }
        self.run_host_collectives(rank, group)
    }

    /// Host collectives have their own tests: here they complete at once when all ranks have entered.
    pub(super) fn run_host_collectives(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let member = &self.members[rank][group];
        let op = member.done as usize;
        let is_there =
            member.route == Route::HostCollectives && member.entered_below > op && !member.membership.is_frozen();
        if !is_there || member.entered.get(&op).is_none_or(|ranks| ranks.len() < self.options.ranks) {
            return Ok(());
        }
        let desc = self.options.call(group, rank, op);
        let before = OpMemory::before(self.options, self.incarnation, group, rank, op);
        let after = before.after(&desc, self.options.ranks, rank, self.results_of(group, op));
        self.members[rank][group].memory.ops[op] = after;
        self.seen.note(Mark::OpByHost);
        self.finish_op(rank, group)?;
        self.enter_host_collective(rank, group)
    }

    /// Check that all ranks decide the same, that no chunk is computed which some rank has, and that only chunks are
    /// touched that all called and not all completed.
    fn check_decision(&mut self, (group, view): (usize, u32), decision: &Decision) -> Result<(), Violation> {
        let record = self.records.entry((group, view)).or_default();
        match &record.decision {
            Some(first) if first == decision => return Ok(()),
            Some(_) => return Err(Violation::Disagreement { group, view }),
            None => record.decision = Some(decision.clone()),
        }
        for chunk in decision.chunks.iter().filter(|chunk| chunk.origin == Origin::Recompute) {
            let holds = |rank: &usize| {
                let member = &self.members[*rank][group];
                let receives_all = chunk.desc.collective == Collective::AllReduce;
                receives_all && member.view == view && member.endpoint.holds(chunk.seq)
            };
            if (0..self.options.ranks).any(|rank| holds(&rank)) {
                return Err(Violation::Recomputed { group, view, seq: chunk.seq });
            }
        }
        Ok(())
    }

    /// Check that a repair moves at most twice the message size per rank, counting the operations that it completes.
    fn count_bytes(&mut self, at: (usize, u32), is_sent: bool, bytes: usize) -> Result<(), Violation> {
        let record = self.records.entry(at).or_default();
        record.bytes += if is_sent { bytes as u64 } else { 0 };
        let chunks = record.decision.iter().flat_map(|decision| &decision.chunks);
        let message: u64 = chunks.map(|chunk| chunk.len_bytes as u64).sum();
        self.repair_bytes += if is_sent { bytes as u64 } else { 0 };
        let limit = 2 * message * self.options.ranks as u64;
        if record.bytes > limit {
            return Err(Violation::Limit { what: "bytes that a repair moves", found: record.bytes, limit });
        }
        Ok(())
    }
}

/// Return whether an error is one that a repair handles.
pub(super) fn is_loss_of_tree(error: EndpointError) -> bool {
    matches!(error, EndpointError::PathLost | EndpointError::GroupLost)
}

/// Interval at which a rank repeats its suspicion.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Limit for the controller to provide another tree.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);
