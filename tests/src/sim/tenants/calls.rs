//! What a rank's program does: one operation after the other, in the tree or as a host collective.

use super::TenantViolation as Violation;
use super::job::{End, Job, JobMessage, Phase};
use super::recovery::Recovery;
use super::world::{Actor, Alarm, World};
use crate::oracle::weight;
use crate::sim::memory::{OpMemory, results};
use std::time::Duration;
use sumac::harness::CallStart;
use sumac::transport::packets::{Endpoint, EndpointError, Event};
use sumac_hal::emu::Delivery;
use sumac_hal::op::{Collective, Path};

impl World<'_, '_> {
    pub(super) fn have_all_finished(&self, (job, rank): (usize, usize)) -> bool {
        self.jobs[job].ranks[rank].peers.finished.len() == self.plan.jobs[job].world
    }

    /// Return whether a rank is in a recovery or a move.
    pub(super) fn is_busy(&self, at: (usize, usize)) -> bool {
        let phase = &self.jobs[at.0].ranks[at.1].phase;
        matches!(phase, Phase::Frozen | Phase::Collecting | Phase::Replanning(_) | Phase::Votes)
    }

    /// Advance as far as received messages allow.
    pub(super) fn advance(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let (world, ops) = (self.plan.jobs[at.0].world, self.plan.jobs[at.0].ops.len());
        loop {
            let now = self.now;
            // All ranks have all results: finished ranks may be gone, and no recovery is needed.
            if self.is_busy(at) && self.member(at).resumes == Phase::Finishing && self.have_all_finished(at) {
                return self.end(at, End::Done);
            }
            let member = self.member(at);
            if let Some(recovery) = member.recovery.as_mut().filter(|recovery| recovery.change.poll_timeout() <= now) {
                recovery.change.handle_timeout(now);
                self.drive(at)?;
            }
            if matches!(self.member(at).phase, Phase::Computing(_)) && self.joins_stripes(at) {
                return Ok(());
            }
            let member = self.member(at);
            let has_program = member.program.is_some();
            match member.phase.clone() {
                Phase::Disconnected => return self.dial(at),
                Phase::Joining(until) if now >= until => return self.end(at, End::NotJoined),
                Phase::Computing(until) if now >= until && has_program => self.take_step(at),
                Phase::Computing(until) if now >= until => {
                    if member.done == ops {
                        self.member(at).phase = Phase::Finishing;
                        self.broadcast(at, &JobMessage::Finished);
                        return Ok(());
                    }
                    member.phase = Phase::Turn(member.calls.call());
                }
                Phase::Turn(call) => match member.calls.begin(call) {
                    CallStart::Wait => return Ok(()),
                    CallStart::Begin if self.is_refused(at) => self.refuse(at),
                    CallStart::Begin if has_program => self.start_call(at),
                    CallStart::Begin => self.call(at)?,
                    CallStart::Migrate(view) if has_program => self.drain_to_move(at, call, view),
                    CallStart::Migrate(view) => self.move_to(at, call, view)?,
                },
                Phase::Waiting => {
                    if !self.go_on(at)? {
                        return Ok(());
                    }
                }
                Phase::InHostCollective if has_program => {
                    if !self.run_started(at)? {
                        return Ok(());
                    }
                }
                Phase::InHostCollective => {
                    let op = member.done;
                    let has_all = member.peers.entered.get(&op).is_some_and(|ranks| ranks.len() == world);
                    if !has_all && !self.only_sends(at, op) {
                        return Ok(());
                    }
                    self.run_schedule(at)?;
                }
                Phase::Collecting => {
                    if self.land(at) {
                        return Ok(());
                    }
                    if self.member(at).recovery.as_ref().is_some_and(Recovery::finds_tree) {
                        self.ask_for_tree(at);
                    } else {
                        self.vote(at, 0)?;
                    }
                }
                Phase::Replanning(until) => {
                    if !self.take_answer(at, until)? {
                        return Ok(());
                    }
                }
                Phase::Votes if member.has_all_votes(world) => {
                    self.migrate(at)?;
                }
                Phase::Finishing if self.have_all_finished(at) => return self.end(at, End::Done),
                _ => return Ok(()),
            }
        }
    }

    /// Return whether a rank's next call is refused, as for a wrong argument, so that the program corrects it.
    fn is_refused(&self, (job, rank): (usize, usize)) -> bool {
        let member = &self.jobs[job].ranks[rank];
        let op = member.next_op();
        let parts = [self.plan.seed, job as u64, rank as u64, op as u64];
        self.plan.jobs[job].refuses && member.tried <= op && weight(&parts).is_multiple_of(8)
    }

    /// The other ranks do not know of a refused call, so the corrected one gets its number.
    fn refuse(&mut self, at: (usize, usize)) {
        let (now, keeps_number) = (self.now, self.plan.planted.counts_refused_calls());
        let member = self.member(at);
        member.tried = member.next_op() + 1;
        if !keeps_number {
            member.calls.refused();
        }
        member.phase = Phase::Computing(now);
        self.report.refused += 1;
    }

    /// Start the operation of a call, in the tree or as a host collective.
    pub(super) fn call(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let ops = &self.plan.jobs[at.0].ops;
        let job = &mut self.jobs[at.0];
        let member = &mut job.ranks[at.1];
        let op = member.done;
        if member.called == op {
            member.called += 1;
            *job.calls.entry(op).or_default() += 1;
        }
        let by_ranks = &self.plan.jobs[at.0].by_ranks[op];
        let is_by_ranks = |&(epoch, has_tree): &(u32, bool)| !has_tree || by_ranks[epoch as usize % 2];
        // As a communicator selects and announces.
        let is_earlier = member.paths.select(op as u64, |view| is_by_ranks(view).then_some(())).is_some();
        let runs_by_ranks = is_earlier || is_by_ranks(&(member.epoch, member.has_tree));
        if let Some(endpoint) = member.endpoint.as_mut().filter(|_| member.has_tree && !is_earlier) {
            let path = if runs_by_ranks { Path::Ring } else { Path::Tree };
            match endpoint.post(ops[op], path, None) {
                Ok(_) => member.memory.posted.push(op),
                // If the tree is already lost, it restarts on the next one.
                Err(error) => assert!(endpoint.error().is_some(), "{error:?}"),
            }
            self.touched.insert(Actor::Rank(at.0, at.1));
        }
        if runs_by_ranks {
            member.phase = Phase::InHostCollective;
            self.broadcast(at, &JobMessage::Entered(op));
        } else {
            member.phase = Phase::InTree;
        }
        Ok(())
    }

    /// Return whether a rank may return from a host collective before the others call it.
    pub(super) fn only_sends(&self, (job, rank): (usize, usize), op: usize) -> bool {
        let desc = &self.plan.jobs[job].ops[op];
        desc.collective == Collective::Broadcast && desc.root.0 as usize == rank
    }

    /// Host collectives have their own tests: here they complete at once when all ranks have entered.
    pub(super) fn run_schedule(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let op = self.member(at).done;
        let after = self.after(at, op);
        self.member(at).memory.ops[op] = after;
        self.report.by_host_collectives += 1;
        self.finish_op(at)
    }

    /// Return the expected buffers of an operation after it has returned.
    pub(super) fn after(&mut self, (job, rank): (usize, usize), op: usize) -> OpMemory {
        let Job { options, results: known, .. } = &mut self.jobs[job];
        let options = options.as_ref().expect("it has begun");
        let results = known.entry(op).or_insert_with(|| results(options, 0, 0, op));
        OpMemory::before(options, 0, 0, rank, op).after(&options.groups[0].ops[op], options.ranks, rank, results)
    }

    /// An operation returns: its contents must be right.
    pub(super) fn finish_op(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let (now, plan) = (self.now, &self.plan.jobs[at.0]);
        let op = self.member(at).done;
        let called = self.jobs[at.0].calls.get(&op).copied().unwrap_or(0);
        let may_be_first = self.jobs[at.0].ranks[at.1].phase == Phase::InHostCollective && self.only_sends(at, op);
        if called < plan.world && !may_be_first {
            let what = format!("job {} rank {} operation {op} when {called} ranks had called it", at.0, at.1);
            return Err(Violation { oracle: "early completion", what });
        }
        let after = self.after(at, op);
        let think_max = self.draw.below(plan.think_max.as_nanos() as u64 + 1);
        let member = self.member(at);
        if let Some((byte, [found, expected])) = member.memory.ops[op].first_difference(&after) {
            let what =
                format!("job {} rank {} operation {op}: byte {byte} is {found:#x}, not {expected:#x}", at.0, at.1);
            return Err(Violation { oracle: "wrong result", what });
        }
        member.done += 1;
        let until = now + Duration::from_nanos(think_max);
        if !matches!(member.phase, Phase::Frozen | Phase::Collecting | Phase::Votes) {
            member.phase = Phase::Computing(until);
        }
        self.schedule(until, Alarm::Rank(at.0, at.1));
        Ok(())
    }

    pub(super) fn deliver_to_rank(
        &mut self,
        at: (usize, usize),
        view: u32,
        delivery: &Delivery,
    ) -> Result<(), Violation> {
        let now = self.rank_time(at);
        self.check_held_buffers(at)?;
        let member = self.member(at);
        let is_there = !matches!(member.phase, Phase::Ended(_)) && member.epoch % 64 == view;
        if let Some(endpoint) = member.endpoint.as_mut().filter(|_| is_there) {
            let (ecn, bytes) = (delivery.ecn, &delivery.bytes);
            match &mut member.program {
                Some(program) => {
                    endpoint.handle(now, delivery.from, ecn, bytes, &mut program.operations.buffers());
                }
                None => endpoint.handle(now, delivery.from, ecn, bytes, &mut member.memory),
            }
            self.touched.insert(Actor::Rank(at.0, at.1));
        }
        Ok(())
    }

    /// Process the events of a rank's endpoint.
    pub(super) fn collect(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        loop {
            let is_busy = self.is_busy(at);
            let member = self.member(at);
            let Some(event) = member.endpoint.as_mut().and_then(Endpoint::poll_event) else { return Ok(()) };
            if matches!(member.phase, Phase::Ended(_)) || is_busy && matches!(event, Event::Failed(_)) {
                continue;
            }
            match event {
                Event::Completed(id) if member.program.is_some() => self.complete_started(at, id)?,
                // An announcement, whose operation may have returned.
                Event::Completed(id) if member.memory.index(id) < member.done => {}
                Event::Completed(id) if member.memory.index(id) == member.done => {
                    if member.phase != Phase::InHostCollective && member.resumes_in_tree() {
                        self.finish_op(at)?;
                    }
                }
                Event::Failed(EndpointError::Mismatch { .. }) => {
                    let what = format!("job {} rank {}: {event:?} after {} operations", at.0, at.1, member.done);
                    return Err(Violation { oracle: "different operations", what });
                }
                Event::Failed(error) if member.has_tree => {
                    self.report.seen.endpoint_error(error);
                    self.freeze(at, true)?;
                }
                Event::Failed(_) => {}
                other => {
                    let what = format!("job {} rank {}: {other:?} after {} operations", at.0, at.1, member.done);
                    return Err(Violation { oracle: "order of completions", what });
                }
            }
        }
    }
}
