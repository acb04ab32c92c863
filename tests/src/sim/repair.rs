//! Ranks that lose their tree: what `sumac::comm` does about it, with its own ledgers and its own plan, over messages
//! that take a while.
//!
//! Freeze, tell everybody what is left, work out the same plan, move or compute what is missing, ask the controller for
//! another tree, agree, go on. Whoever is between two operations, or through with all of them, is told by the
//! controller and takes part like the others.
//!
//! Messages between ranks come, in order for each pair, as connections have them; they differ in how long they take.
//! Here all ranks live. Who leads a repair, and what becomes of a rank that dies in it, takes the place of
//! [`Stage::Accounts`] and [`Stage::Votes`] in [`super::ranks`]: nothing else here knows how ranks agree.
//!
//! Oracles: all ranks decide the same; nothing is computed that some rank has, and nothing twice in one view; what is
//! moved is no more than twice the message a rank; an operation that has returned is not written to again.

use super::cluster::Cluster;
use super::controller::Ask;
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::mail::Mail;
use super::memory::OpMemory;
use super::reduce::{reduce, tree};
use super::report::Violation;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::rehearsal::{Account, Chunk, Decision, Origin};
use sumac::transport::packets::{Endpoint, EndpointError};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Path};

/// How a rank's operations go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Through a tree; `None` is the one that it began with outside of such scenarios.
    Tree(Option<usize>),
    /// By a schedule between the ranks.
    Schedules,
}

/// How far a rank is with a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It waits for what the others have.
    Accounts,
    /// It waits for chunks.
    Chunks,
    /// It waits for another tree.
    Tree,
    /// It waits for the others to come so far.
    Votes,
}

/// A rank's part in a repair.
#[derive(Debug)]
pub(super) struct Repair {
    stage: Stage,
    /// What this rank has told the others.
    account: Account,
    decision: Decision,
    /// Chunks whose results are not here.
    missing: BTreeSet<u64>,
}

/// What came for one repair, perhaps before this rank knew of it.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) accounts: BTreeMap<usize, Account>,
    pub(super) contributions: BTreeMap<u64, BTreeMap<usize, Vec<u8>>>,
    pub(super) results: BTreeMap<u64, Vec<u8>>,
    pub(super) votes: BTreeMap<usize, Option<usize>>,
    pub(super) found: Option<Option<usize>>,
}

/// What goes from rank to rank in a repair.
#[derive(Debug, Clone)]
pub(super) enum Part {
    Account(Account),
    Contribution(u64, Vec<u8>),
    Result(u64, Vec<u8>),
    Vote(Option<usize>),
}

/// What the oracles know of one repair.
#[derive(Debug, Default)]
pub(super) struct Record {
    decision: Option<Decision>,
    computed: BTreeSet<u64>,
    bytes: u64,
}

impl Cluster<'_, '_> {
    /// What the controller has said of another tree, if it has.
    pub(super) fn found(&self, rank: usize, group: usize) -> Option<Option<usize>> {
        let member = &self.members[rank][group];
        member.inboxes.get(&member.view).and_then(|inbox| inbox.found)
    }

    pub(super) fn inbox(&mut self, rank: usize, group: usize, view: u32) -> &mut Inbox {
        self.members[rank][group].inboxes.entry(view).or_default()
    }

    /// Give something to all ranks of a group, this one too.
    fn tell_all(&mut self, (rank, group): (usize, usize), what: &Part) {
        let view = self.members[rank][group].view;
        for to in 0..self.options.ranks {
            self.mail(Mail::Peer { from: rank, to, group, view, what: what.clone() });
        }
    }

    /// A rank's endpoint has failed.
    pub(super) fn lose_tree(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let view = self.members[rank][group].view;
        self.seen.note(Mark::FrozenByLoss);
        self.mail(Mail::Ask { rank, group, view, ask: Ask::Suspect });
        self.schedule(self.now + ASK_AGAIN, Alarm::SuspectAgain { rank, group, view });
        if self.options.ranks_die() {
            return self.change_view((rank, group), true);
        }
        self.freeze(rank, group)
    }

    /// Who is not told is told again, as long as the repair takes: the controller may have been away.
    pub(super) fn suspect_again(&mut self, (rank, group): (usize, usize), view: u32) {
        let member = &self.members[rank][group];
        if member.view == view && member.repair.as_ref().is_some_and(|repair| repair.stage == Stage::Accounts) {
            self.mail(Mail::Ask { rank, group, view, ask: Ask::Suspect });
            self.schedule(self.now + ASK_AGAIN, Alarm::SuspectAgain { rank, group, view });
        }
    }

    /// Take nothing more in from the tree, and tell everybody what is here.
    pub(super) fn freeze(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        // What has landed by now has landed.
        self.collect(rank, group)?;
        let member = &mut self.members[rank][group];
        member.endpoint.freeze();
        let decision = Decision { cut: 0, chunks: Vec::new() };
        let account = Account::of(&member.endpoint);
        let told = account.clone();
        member.repair = Some(Repair { stage: Stage::Accounts, account: told, decision, missing: BTreeSet::new() });
        self.tell_all((rank, group), &Part::Account(account));
        self.reach(Point::Frozen, None);
        self.touch_rank(rank, group);
        self.advance(rank, group)
    }

    /// Go as far as what has come allows.
    pub(super) fn advance(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        while let Some(stage) = self.members[rank][group].repair.as_ref().map(|repair| repair.stage) {
            let has_moved = match stage {
                Stage::Accounts => self.decide(rank, group)?,
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

    /// With everybody's account: work out the plan, and give away what is this rank's to give.
    fn decide(&mut self, rank: usize, group: usize) -> Result<bool, Violation> {
        let ranks = self.options.ranks;
        let view = self.members[rank][group].view;
        if self.inbox(rank, group, view).accounts.len() < ranks {
            return Ok(false);
        }
        let accounts: Vec<Account> = self.inbox(rank, group, view).accounts.values().cloned().collect();
        let endpoint = &self.members[rank][group].endpoint;
        let decision = Decision::of(&accounts, endpoint).map_err(|why| Violation::Unrepairable { group, rank, why })?;
        self.check_decision((group, view), &decision)?;
        self.reach(Point::Decided, None);
        for chunk in &decision.chunks {
            let member = &mut self.members[rank][group];
            let own = Rank(rank as u32);
            let bytes = chunk.give(&member.endpoint, own, &mut member.memory);
            match chunk.origin {
                Origin::Held(holder) if holder == own => {
                    self.seen.note(Mark::ChunkHeld);
                    self.give_result((rank, group), chunk, &bytes)?;
                }
                Origin::Held(_) => {}
                Origin::Recompute => {
                    let to = chunk.seq as usize % ranks;
                    self.count_bytes((group, view), to != rank, bytes.len())?;
                    let what = Part::Contribution(chunk.seq, bytes);
                    self.mail(Mail::Peer { from: rank, to, group, view, what });
                }
            }
        }
        let repair = self.members[rank][group].repair.as_mut().expect("in a repair");
        repair.missing = decision.chunks.iter().map(|chunk| chunk.seq).collect();
        repair.decision = decision;
        repair.stage = Stage::Chunks;
        Ok(true)
    }

    /// Give a result to all ranks.
    fn give_result(&mut self, (rank, group): (usize, usize), chunk: &Chunk, bytes: &[u8]) -> Result<(), Violation> {
        let view = self.members[rank][group].view;
        if bytes.len() != chunk.len_bytes {
            let why = format!("chunk {}: {} bytes where {} are due", chunk.seq, bytes.len(), chunk.len_bytes);
            return Err(Violation::Unrepairable { group, rank, why });
        }
        for _ in 1..self.options.ranks {
            self.count_bytes((group, view), true, bytes.len())?;
        }
        self.tell_all((rank, group), &Part::Result(chunk.seq, bytes.to_vec()));
        Ok(())
    }

    /// Compute what is this rank's to compute, and land what has come.
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
        let lost = match self.members[rank][group].way {
            Way::Tree(tree) => tree,
            Way::Schedules => None,
        };
        self.mail(Mail::Ask { rank, group, view, ask: Ask::Replan { lost } });
        self.schedule(self.now + REPLAN_LIMIT, Alarm::ReplanLimit { rank, group, view });
        Ok(true)
    }

    fn compute(&mut self, at: (usize, usize), chunk: &Chunk, given: &[Vec<u8>]) -> Result<(), Violation> {
        let (rank, group) = at;
        let (options, view) = (self.options, self.members[rank][group].view);
        let record = self.records.entry((group, view)).or_default();
        if !record.computed.insert(chunk.seq) {
            return Err(Violation::Again { group, view, seq: chunk.seq });
        }
        self.seen.note(Mark::ChunkComputed);
        let tree = tree(&options.trees[options.tree(group)], options.ranks, options.order(group));
        let result = reduce(&tree, &chunk.desc, given);
        self.give_result(at, chunk, &result)
    }

    /// The controller's answer is here, or too late.
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
        self.tell_all((rank, group), &Part::Vote(found.flatten()));
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

    /// All have come so far: operations of the lost tree return, the others begin again.
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
        if Account::of(&member.endpoint) != repair.account {
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
            self.seen.note(Mark::OpBegunAgain);
        }
        self.seen.note(if tree.is_some() { Mark::CommitTree } else { Mark::CommitSchedules });
        self.view_changes += u64::from(rank == 0);
        self.install(rank, group, tree);
        self.reach(Point::Committed, None);
        if tree.is_none() {
            self.enter_schedule(rank, group)?;
        }
        Ok(false)
    }

    /// Go on by this tree, or by schedules.
    pub(super) fn install(&mut self, rank: usize, group: usize, found: Option<usize>) {
        let member = &mut self.members[rank][group];
        member.first = member.done as usize;
        member.memory.first = member.first;
        member.way = found.map_or(Way::Schedules, |tree| Way::Tree(Some(tree)));
        let Some(found) = found else { return };
        let assignment = &self.assignments[found];
        let life = u64::from(member.view);
        let config = assignment.wiring.endpoint(self.options, (rank, group), life, assignment.epoch);
        member.endpoint = self.options.planted.endpoint(Endpoint::new(config));
        member.progress = member.endpoint.progress();
        for op in member.first..member.called {
            let posted = member.endpoint.post(self.options.call(group, rank, op), Path::Tree);
            assert!(posted.is_ok(), "{posted:?}");
        }
        self.touch_rank(rank, group);
    }

    /// An operation returns: what is there has to be right, and from here on it is the caller's to overwrite.
    pub(super) fn finish_op(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let op = self.members[rank][group].done as usize;
        let called = self.called.get(&(group, op)).copied().unwrap_or(0);
        let desc = self.options.call(group, rank, op);
        // Nothing has to come of a dead rank for what only others have, or want.
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

    /// A rank comes to an operation that runs by a schedule.
    pub(super) fn enter_schedule(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let member = &mut self.members[rank][group];
        let op = member.done as usize;
        if member.membership.is_frozen() {
            return Ok(());
        }
        if member.way == Way::Schedules && op < member.called && member.entered_below <= op {
            member.entered_below = op + 1;
            for to in 0..self.options.ranks {
                self.mail(Mail::Entered { to, group, op, from: rank });
            }
        }
        self.run_schedules(rank, group)
    }

    /// What a schedule does once all ranks have come to it is the schedules' own business: here it is done at once.
    pub(super) fn run_schedules(&mut self, rank: usize, group: usize) -> Result<(), Violation> {
        let member = &self.members[rank][group];
        let op = member.done as usize;
        let is_there = member.way == Way::Schedules && member.entered_below > op && !member.membership.is_frozen();
        if !is_there || member.entered.get(&op).is_none_or(|ranks| ranks.len() < self.options.ranks) {
            return Ok(());
        }
        let desc = self.options.call(group, rank, op);
        let before = OpMemory::before(self.options, self.life, group, rank, op);
        let after = before.after(&desc, self.options.ranks, rank, self.results_of(group, op));
        self.members[rank][group].memory.ops[op] = after;
        self.seen.note(Mark::OpScheduled);
        self.finish_op(rank, group)?;
        self.enter_schedule(rank, group)
    }

    /// All ranks decide the same; nobody computes what somebody has, and only what was called by all and is not complete
    /// everywhere is touched.
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
                return Err(Violation::Again { group, view, seq: chunk.seq });
            }
        }
        Ok(())
    }

    /// A repair moves at most twice the message a rank: the message is what the operations that it completes are long.
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

/// Tell whether an error is one that a repair mends.
pub(super) fn is_loss_of_tree(error: EndpointError) -> bool {
    matches!(error, EndpointError::PathLost | EndpointError::GroupLost)
}

/// How long a rank waits before it tells the controller again.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// How long the controller may take for another tree.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);
