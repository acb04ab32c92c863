//! How the ranks of a job change the view together, with the state machine of a communicator: when a tree is lost, or
//! when a controller that offered one is gone and may have told some of them where to move. It agrees on what they have
//! and were told, plans, and agrees on the next tree. Also their vote on a tree that they move to, with its production
//! decisions: only the votes' way between ranks is a model.

use super::TenantViolation as Violation;
use super::draw::Step;
use super::job::{Job, JobMessage, Member, Moving, Phase};
use super::wire::Message;
use super::world::{Alarm, World};
use crate::sim::coverage::Mark;
use crate::sim::memory::{OpMemory, chunks};
use crate::sim::reduce::{reduce, tree};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::controller::proto::Membership;
use sumac::harness::{Action, Attempt, Change, Landed, Origin, Outcome, Plan, RankReport, Verdict};
use sumac::transport::packets::{Endpoint, OpId};
use sumac_hal::ids::Rank;

/// A rank's part in the recovery from the loss of a tree.
pub(super) struct Recovery {
    pub(super) change: Change,
    /// The report on the frozen endpoint.
    report: RankReport,
    landed: Landed,
    /// The call numbers of a program's operations.
    pending: Option<PendingCalls>,
    plan: Option<(Attempt, Plan)>,
    /// Chunks of the plan that have not arrived.
    pub(super) missing: BTreeSet<u64>,
}

impl Recovery {
    /// Return whether its plan asks for another tree.
    pub(super) fn finds_tree(&self) -> bool {
        self.plan.as_ref().is_some_and(|(_, plan)| plan.finds_tree)
    }
}

impl World<'_, '_> {
    /// The view must change: freeze, and take part; `begins` if no other rank has requested it.
    pub(super) fn freeze(&mut self, at: (usize, usize), begins: bool) -> Result<(), Violation> {
        let member = self.member(at);
        if member.recovery.is_some() || member.is_finding() || !member.is_there() {
            return Ok(());
        }
        let (had_tree, is_started) = (member.endpoint.is_some(), member.program.is_some());
        if had_tree {
            self.suspect(at);
            self.report.recoveries += 1;
            self.report.seen.note(Mark::FrozenByLoss);
        }
        let (now, ranks) = (self.now, self.plan.jobs[at.0].world as u32);
        self.member(at).endpoint.iter_mut().for_each(Endpoint::freeze);
        if is_started {
            self.collect_started(at)?;
        }
        let member = self.member(at);
        let pending = member.program.as_mut().map(|program| program.operations.freeze(member.calls.begun()));
        let report = report_of(member, &Landed::default(), pending.as_ref());
        let mut change = Change::new((Rank(at.1 as u32), ranks), member.trees, member.conn.is_some(), now + LIMIT);
        if begins {
            change.begin();
        }
        change.handle_timeout(now);
        let (landed, missing) = (Landed::default(), BTreeSet::new());
        member.recovery = Some(Recovery { change, report, landed, pending, plan: None, missing });
        member.resumes = std::mem::replace(&mut member.phase, Phase::Frozen);
        if is_started {
            self.drop_in_change(at);
        }
        self.collect(at)?;
        self.drive(at)
    }

    /// Handle the messages about the current view, also those that had arrived earlier.
    pub(super) fn take_view_messages(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        loop {
            let now = self.now;
            let member = self.member(at);
            let changes = member.changes;
            // Nothing is lost between ranks, so a commit reaches those that ask about an earlier view.
            member.peers.views.retain(|(of, ..)| *of >= changes);
            let due = member.peers.views.iter().position(|(of, ..)| *of == changes);
            let Some(due) = due.filter(|_| member.is_there() && !member.is_finding()) else { return Ok(()) };
            let (_, from, message) = member.peers.views.remove(due);
            self.freeze(at, false)?;
            if let Some(recovery) = &mut self.member(at).recovery {
                recovery.change.handle(Rank(from as u32), *message, now);
                recovery.change.handle_timeout(now);
            }
            self.drive(at)?;
        }
    }

    /// Do what a rank's state machine asks for.
    pub(super) fn drive(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        loop {
            let now = self.now;
            let member = &mut self.jobs[at.0].ranks[at.1];
            let changes = member.changes;
            let Some(recovery) = &mut member.recovery else { return Ok(()) };
            if let Some((to, message)) = recovery.change.poll_transmit() {
                let (to, body) = (Some(to.0 as usize), JobMessage::View(changes, Box::new(message)));
                self.send_message(Message::Mesh { job: at.0, from: at.1, to, body });
                continue;
            }
            match recovery.change.poll_action(member.endpoint.as_ref(), now) {
                None => {
                    let wake_at = recovery.change.poll_timeout();
                    self.schedule(wake_at, Alarm::Rank(at.0, at.1));
                    return Ok(());
                }
                Some(Action::Report(attempt)) => {
                    let (landed, pending) = (recovery.landed.clone(), recovery.pending.clone());
                    let report = report_of(member, &landed, pending.as_ref()).with_offer(&member.calls);
                    let recovery = member.recovery.as_mut().expect("seen above");
                    recovery.change.report(attempt, report);
                    (recovery.plan, member.phase) = (None, Phase::Frozen);
                }
                Some(Action::Execute(attempt, plan)) => self.execute(at, attempt, plan)?,
                Some(Action::Unsound(of)) => {
                    let what = format!("job {}: the chunk inventory of {of} is invalid", at.0);
                    return Err(Violation { oracle: "unrecoverable", what });
                }
                Some(Action::Commit(outcome)) => self.commit(at, &outcome)?,
                Some(Action::End(end)) => {
                    let what = format!("job {} rank {}: {end:?}, and all ranks live", at.0, at.1);
                    return Err(Violation { oracle: "left out", what });
                }
            }
        }
    }

    /// All ranks have reported: send this rank's part of the plan.
    fn execute(&mut self, at: (usize, usize), attempt: Attempt, plan: Plan) -> Result<(), Violation> {
        let job = &mut self.jobs[at.0];
        let member = &mut job.ranks[at.1];
        let changes = member.changes;
        if let Some(why) = plan.failure() {
            return Err(Violation { oracle: "unrecoverable", what: format!("job {}: {why}", at.0) });
        }
        let known = job.plans.entry((changes, attempt)).or_insert_with(|| plan.clone());
        if !is_same(known, &plan) {
            return Err(Violation { oracle: "disagreement", what: format!("job {} view change {changes}", at.0) });
        }
        let Some(recovery) = &mut member.recovery else { return Ok(()) };
        for (chunk, endpoint) in plan.chunks.iter().filter_map(|chunk| Some((chunk, member.endpoint.as_ref()?))) {
            let (landed, rank) = (&recovery.landed, Rank(at.1 as u32));
            let bytes = match &mut member.program {
                Some(program) => chunk.give(endpoint, landed, rank, &mut program.operations.buffers()),
                None => chunk.give(endpoint, landed, rank, &mut member.memory),
            };
            let piece = job.pieces.entry((changes, attempt, chunk.seq)).or_default();
            match chunk.origin {
                Origin::Held(holder) if holder.0 as usize == at.1 => piece.result = Some(bytes),
                Origin::Held(_) => {}
                Origin::Recompute => {
                    piece.contributions.insert(at.1, bytes);
                    if piece.contributions.len() == plan.live.len() {
                        let options = job.options.as_ref().expect("it has begun");
                        let given: Vec<Vec<u8>> = piece.contributions.values().cloned().collect();
                        let tree = tree(&options.trees[0], options.ranks, options.order(0));
                        piece.result = Some(reduce(&tree, &chunk.desc, &given));
                    }
                }
            }
        }
        recovery.missing = plan.chunks.iter().map(|chunk| chunk.seq).collect();
        recovery.plan = Some((attempt, plan));
        member.phase = Phase::Collecting;
        self.broadcast(at, &JobMessage::Given);
        Ok(())
    }

    /// Store received chunks. Returns whether any is missing.
    pub(super) fn land(&mut self, at: (usize, usize)) -> bool {
        let Job { ranks, pieces, .. } = &mut self.jobs[at.0];
        let Member { endpoint, memory, program, recovery, changes, .. } = &mut ranks[at.1];
        let (Some(endpoint), Some(recovery)) = (endpoint, recovery) else { return false };
        let Recovery { landed, plan: Some((attempt, plan)), missing, .. } = recovery else { return false };
        for chunk in &plan.chunks {
            let result = pieces.get(&(*changes, *attempt, chunk.seq)).and_then(|piece| piece.result.as_ref());
            if let Some(result) = result.filter(|_| missing.remove(&chunk.seq)) {
                match program {
                    Some(program) => {
                        chunk.land_once(&*endpoint, landed, result, &mut program.operations.buffers());
                    }
                    None => chunk.land_once(&*endpoint, landed, result, memory),
                }
            }
        }
        !missing.is_empty()
    }

    /// All chunks are here, and the controller has replied or is late: vote for the next tree, as `group` names it.
    pub(super) fn vote(&mut self, at: (usize, usize), group: u64) -> Result<(), Violation> {
        let member = self.member(at);
        member.phase = Phase::Votes;
        if let Some(recovery) = &mut member.recovery {
            let Some((attempt, _)) = recovery.plan.take() else { return Ok(()) };
            recovery.change.executed(attempt, group);
            return self.drive(at);
        }
        if let Some(Moving { call, vote }) = &mut member.moving {
            vote.cast(group, member.view);
            let body = JobMessage::Vote(*call, vote.own());
            self.broadcast(at, &body);
            self.reach(Step::Voted);
        }
        // Others may have begun to change the view before this rank could take part.
        self.take_view_messages(at)
    }

    /// All ranks have executed the plan: operations return, and the job continues on the next tree, or without one.
    fn commit(&mut self, at: (usize, usize), outcome: &Outcome) -> Result<(), Violation> {
        let job = &mut self.jobs[at.0];
        let member = &mut job.ranks[at.1];
        let changes = member.changes;
        if job.outcomes.entry(changes).or_insert_with(|| outcome.clone()) != outcome || !outcome.dead.is_empty() {
            let what = format!("job {} view change {changes}: {outcome:?}", at.0);
            return Err(Violation { oracle: "disagreement", what });
        }
        let recovery = member.recovery.take().expect("in a recovery");
        if report_of(member, &Landed::default(), recovery.pending.as_ref()) != recovery.report {
            return Err(Violation { oracle: "not fenced", what: format!("job {} rank {}", at.0, at.1) });
        }
        let (agreed_trees, (promise, is_in_doubt)) =
            (recovery.change.agreed_trees(), member.calls.commit(&recovery.change));
        let is_behind = member.trees < agreed_trees;
        // Announcements are complete, too, but nobody waits for them. As a communicator does, a rank that is behind
        // takes everything for complete: the others have moved from its tree.
        let completed_below = match &member.endpoint {
            _ if is_behind => OpId(u64::MAX),
            Some(endpoint) => endpoint.first_behind(outcome.cut),
            None => OpId(0),
        };
        let below = completed_below.0 as usize;
        let is_complete = member.memory.posted[..below.min(member.memory.posted.len())].contains(&member.done);
        if member.resumes == Phase::InTree && is_complete {
            self.report.seen.note(Mark::OpRecovered);
            self.finish_op(at)?;
        }
        if let Some(program) = &mut self.member(at).program
            && program.recovered(completed_below)
        {
            self.report.seen.note(Mark::OpRecovered);
        }
        let forgets_paths = self.plan.planted.forgets_paths();
        self.pause(at, promise);
        let member = self.member(at);
        // A rank that is behind is moving to the tree that the others select by.
        let selected_by = match &member.found {
            Some(_) if is_behind => (member.epoch + 1, true),
            _ => (member.epoch, member.has_tree),
        };
        if !forgets_paths {
            member.paths.view_changed(outcome.begun, selected_by);
        }
        (member.trees, member.changes) = (agreed_trees, member.changes + 1);
        let found = member.found.take().filter(|_| outcome.vote != 0);
        self.report.seen.note(if outcome.vote == 0 { Mark::CommitSchedules } else { Mark::CommitTree });
        let (resumes, has_program) = (self.member(at).resumes.clone(), self.member(at).program.is_some());
        let begins = match has_program {
            true => resumes == Phase::Starting,
            false => {
                let member = self.member(at);
                resumes != Phase::InHostCollective && member.moving.is_none() && member.called > member.done
            }
        };
        let phase = if resumes == Phase::InTree { Phase::Computing(self.now) } else { resumes };
        self.enter_tree(at, found, phase);
        if begins {
            self.begin_call(at)?;
        }
        self.schedule(self.now, Alarm::Rank(at.0, at.1));
        if is_in_doubt {
            self.freeze(at, true)?;
        }
        self.catch_up(at)
    }

    /// All votes on the tree to migrate to are in.
    pub(super) fn migrate(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = self.member(at);
        let Some(Moving { call, vote }) = member.moving.take() else { return Ok(()) };
        let votes: Vec<u64> = member.peers.votes[&call].values().copied().collect();
        let (verdict, declines) = (vote.verdict(&votes, member.trees), vote.declines(&votes, member.view));
        let found = member.found.take();
        if let Some(why) = declines {
            self.decline(at, &why);
        }
        self.report.seen.note(if verdict == Verdict::Migrate { Mark::MovedBack } else { Mark::OfferDeclined });
        if verdict == Verdict::Superseded {
            // Its ranks have no tree: none of them asks for one in a view change.
            self.member(at).epoch += 1;
        } else {
            self.enter_tree(at, found.filter(|_| verdict == Verdict::Migrate), Phase::Turn(call));
        }
        let promise = self.member(at).calls.moved();
        self.pause(at, promise);
        self.begin_call(at)?;
        self.schedule(self.now, Alarm::Rank(at.0, at.1));
        self.catch_up(at)
    }

    /// Enter the next epoch in a phase, with this tree or without one.
    fn enter_tree(&mut self, at: (usize, usize), found: Option<Box<Membership>>, phase: Phase) {
        let member = self.member(at);
        (member.epoch, member.trees) = (member.epoch + 1, member.trees + 1);
        (member.endpoint, member.phase) = (None, phase);
        // As a communicator does, with or without a tree.
        member.calls.enter_view(member.view);
        self.install(at, found);
        self.relaunch(at);
    }

    /// Begin the call that had come to its turn, or again where the lost tree has not completed it.
    fn begin_call(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if self.member(at).program.is_some() {
            self.start_call(at);
            return Ok(());
        }
        self.call(at)
    }

    /// Check the buffers of a failed operation: each chunk is entirely old or new.
    pub(super) fn check_torn(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let op = self.member(at).done;
        let has_program = self.member(at).program.is_some();
        if has_program || self.jobs[at.0].options.is_none() || op >= self.plan.jobs[at.0].ops.len() {
            return Ok(());
        }
        let after = self.after(at, op);
        let job = &self.jobs[at.0];
        let options = job.options.as_ref().expect("checked above");
        let desc = &options.groups[0].ops[op];
        let before = OpMemory::before(options, 0, 0, at.1, op);
        let cut = chunks(desc, options.ranks, options.chunk_len_bytes);
        match job.ranks[at.1].memory.ops.get(op).and_then(|found| found.torn_chunk(&before, &after, desc, &cut)) {
            Some(chunk) => {
                let what = format!("job {} rank {} operation {op} chunk {chunk}", at.0, at.1);
                Err(Violation { oracle: "torn chunk", what })
            }
            None => Ok(()),
        }
    }
}

/// The call numbers of operations in a lost tree, and of the first incomplete call that is not there.
type PendingCalls = (BTreeMap<OpId, u64>, u64);

/// Return what a rank has of its tree, if it has one. No rank is dead, so calls in the tree need no numbers.
fn report_of(member: &Member, landed: &Landed, pending: Option<&PendingCalls>) -> RankReport {
    let report = match &member.endpoint {
        Some(endpoint) => RankReport::of(endpoint, landed, 0, member.trees),
        None => RankReport::without_tree(0, member.trees),
    };
    let report = report.with_begun(member.calls.begun());
    match (pending, &member.endpoint) {
        (Some(pending), Some(endpoint)) => report.with_calls(endpoint, pending),
        _ => report,
    }
}

/// Return whether two ranks have the same plan; one that is behind knows no chunks of the tree.
fn is_same(one: &Plan, other: &Plan) -> bool {
    let is_behind = one.chunks.is_empty() || other.chunks.is_empty();
    let same = (&one.live, one.len, one.cut()) == (&other.live, other.len, other.cut());
    same && (is_behind || one.chunks == other.chunks)
}

/// Limit of a recovery: longer than any wait for the controller.
const LIMIT: Duration = Duration::from_secs(90);
