//! How the ranks of a job recover from the loss of a tree together, with the state machine of a communicator: it agrees
//! on what they have, plans, and agrees on the next tree. Also the vote on a tree that they migrate to.

use super::TenantViolation as Violation;
use super::job::{Job, JobMessage, Member, Phase};
use super::wire::Message;
use super::world::{Alarm, World};
use crate::sim::coverage::Mark;
use crate::sim::memory::{OpMemory, chunks};
use crate::sim::reduce::{reduce, tree};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::controller::proto::Membership;
use sumac::harness::{Action, Attempt, Calls, Change, Landed, Origin, Outcome, Plan, RankReport};
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

impl World<'_, '_> {
    /// The tree is lost: freeze, and change the view; `begins` if no other rank has requested it.
    pub(super) fn freeze(&mut self, at: (usize, usize), begins: bool) -> Result<(), Violation> {
        if self.is_busy(at) || !self.member(at).has_tree || self.member(at).endpoint.is_none() {
            return Ok(());
        }
        self.suspect(at);
        let (now, ranks) = (self.now, self.plan.jobs[at.0].world as u32);
        let member = self.member(at);
        let Some(endpoint) = &mut member.endpoint else { return Ok(()) };
        endpoint.freeze();
        let is_started = member.program.is_some();
        if is_started {
            self.collect_started(at)?;
        }
        let member = self.member(at);
        let pending = member.program.as_mut().map(|program| program.operations.freeze(member.calls.begun()));
        let Some(endpoint) = &member.endpoint else { return Ok(()) };
        let report = report_of(endpoint, &Landed::default(), &member.calls, member.epoch, pending.as_ref());
        let mut change = Change::new((Rank(at.1 as u32), ranks), member.epoch, member.conn.is_some(), now + LIMIT);
        if begins {
            change.begin();
        }
        change.handle_timeout(now);
        let (landed, missing) = (Landed::default(), BTreeSet::new());
        member.recovery = Some(Recovery { change, report, landed, pending, plan: None, missing });
        member.resumes = std::mem::replace(&mut member.phase, Phase::Frozen);
        self.report.recoveries += 1;
        self.report.seen.note(Mark::FrozenByLoss);
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
            let epoch = member.epoch;
            // Nothing is lost between ranks, so a commit reaches those that ask about an earlier view.
            member.peers.views.retain(|(of, ..)| *of >= epoch);
            let due = member.peers.views.iter().position(|(of, ..)| *of == epoch);
            let Some(due) = due.filter(|_| member.is_there()) else { return Ok(()) };
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
            let epoch = member.epoch;
            let Some(recovery) = &mut member.recovery else { return Ok(()) };
            if let Some((to, message)) = recovery.change.poll_transmit() {
                let (to, body) = (Some(to.0 as usize), JobMessage::View(epoch, Box::new(message)));
                self.send_message(Message::Mesh { job: at.0, from: at.1, to, body });
                continue;
            }
            let endpoint = member.endpoint.as_ref().expect("of the lost tree");
            match recovery.change.poll_action(Some(endpoint), now) {
                None => {
                    let wake_at = recovery.change.poll_timeout();
                    self.schedule(wake_at, Alarm::Rank(at.0, at.1));
                    return Ok(());
                }
                Some(Action::Report(attempt)) => {
                    let pending = recovery.pending.as_ref();
                    let report = report_of(endpoint, &recovery.landed, &member.calls, epoch, pending);
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
        let epoch = member.epoch;
        if let Some(why) = plan.failure() {
            return Err(Violation { oracle: "unrecoverable", what: format!("job {}: {why}", at.0) });
        }
        if *job.plans.entry((epoch, attempt)).or_insert_with(|| plan.clone()) != plan {
            return Err(Violation { oracle: "disagreement", what: format!("job {} epoch {epoch}", at.0) });
        }
        let (Some(endpoint), Some(recovery)) = (&member.endpoint, &mut member.recovery) else { return Ok(()) };
        for chunk in &plan.chunks {
            let (landed, rank) = (&recovery.landed, Rank(at.1 as u32));
            let bytes = match &mut member.program {
                Some(program) => chunk.give(endpoint, landed, rank, &mut program.operations.buffers()),
                None => chunk.give(endpoint, landed, rank, &mut member.memory),
            };
            let piece = job.pieces.entry((epoch, attempt, chunk.seq)).or_default();
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
        let Member { endpoint, memory, program, recovery, epoch, .. } = &mut ranks[at.1];
        let (Some(endpoint), Some(recovery)) = (endpoint, recovery) else { return false };
        let Recovery { landed, plan: Some((attempt, plan)), missing, .. } = recovery else { return false };
        for chunk in &plan.chunks {
            let result = pieces.get(&(*epoch, *attempt, chunk.seq)).and_then(|piece| piece.result.as_ref());
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
        let epoch = member.epoch;
        member.phase = Phase::Votes;
        let plan = member.recovery.as_mut().and_then(|recovery| Some((recovery.plan.take()?.0, &mut recovery.change)));
        let Some((attempt, change)) = plan else {
            self.broadcast(at, &JobMessage::Vote(epoch, group));
            return Ok(());
        };
        change.executed(attempt, group);
        self.drive(at)
    }

    /// All ranks have executed the plan: operations return, and the job continues on the next tree, or without one.
    fn commit(&mut self, at: (usize, usize), outcome: &Outcome) -> Result<(), Violation> {
        let job = &mut self.jobs[at.0];
        let member = &mut job.ranks[at.1];
        let epoch = member.epoch;
        if job.outcomes.entry(epoch).or_insert_with(|| outcome.clone()) != outcome || !outcome.dead.is_empty() {
            return Err(Violation { oracle: "disagreement", what: format!("job {} epoch {epoch}: {outcome:?}", at.0) });
        }
        let recovery = member.recovery.take().expect("in a recovery");
        let endpoint = member.endpoint.as_ref().expect("of the lost tree");
        let pending = recovery.pending.as_ref();
        if report_of(endpoint, &Landed::default(), &member.calls, epoch, pending) != recovery.report {
            return Err(Violation { oracle: "not fenced", what: format!("job {} rank {}", at.0, at.1) });
        }
        // Announcements are complete, too, but nobody waits for them.
        let completed_below = endpoint.first_behind(outcome.cut);
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
        let member = self.member(at);
        if !forgets_paths {
            member.paths.view_changed(outcome.begun, (member.epoch, member.has_tree));
        }
        let found = self.member(at).found.take().filter(|_| outcome.vote != 0);
        self.report.seen.note(if outcome.vote == 0 { Mark::CommitSchedules } else { Mark::CommitTree });
        self.resume(at, found)
    }

    /// All votes on the tree to migrate to are in.
    pub(super) fn migrate(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = self.member(at);
        let votes: BTreeSet<u64> = member.peers.votes[&member.epoch].values().copied().collect();
        let all_alike = votes.len() == 1 && !votes.contains(&0);
        let found = member.found.take();
        if found.is_some() && !all_alike {
            self.decline(at, "a rank is not in it");
        }
        self.report.seen.note(if all_alike { Mark::MovedBack } else { Mark::OfferDeclined });
        self.resume(at, found.filter(|_| all_alike))
    }

    /// Enter the next view, with this tree or without one.
    fn resume(&mut self, at: (usize, usize), found: Option<Box<Membership>>) -> Result<(), Violation> {
        let now = self.now;
        let member = self.member(at);
        member.epoch += 1;
        member.endpoint = None;
        // As a communicator does, with or without a tree.
        member.calls.enter_view(member.view);
        let (moved, resumes) = (std::mem::take(&mut member.moves), member.resumes.clone());
        let offered = if moved { member.calls.moved() } else { None };
        let begins = match member.program {
            Some(_) => moved || resumes == Phase::Starting,
            None => resumes != Phase::InHostCollective && (moved || member.called > member.done),
        };
        member.phase = if resumes == Phase::InTree { Phase::Computing(now) } else { resumes };
        self.pause(at, offered);
        self.install(at, found);
        self.relaunch(at);
        match self.member(at).program {
            Some(_) if begins => self.start_call(at),
            None if begins => self.call(at)?,
            _ => {}
        }
        self.schedule(now, Alarm::Rank(at.0, at.1));
        self.catch_up(at)
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

/// Return what a rank has of its lost tree. No rank is dead, so calls in the tree need no numbers.
fn report_of(
    endpoint: &Endpoint,
    landed: &Landed,
    calls: &Calls,
    epoch: u32,
    pending: Option<&PendingCalls>,
) -> RankReport {
    let report = RankReport::of(endpoint, landed, 0, epoch).with_begun(calls.begun());
    match pending {
        Some(pending) => report.with_calls(endpoint, pending),
        None => report,
    }
}

/// Limit of a recovery: longer than any wait for the controller.
const LIMIT: Duration = Duration::from_secs(90);
