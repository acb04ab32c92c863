//! Programs that start several operations at once, drop some handles at any time, and wait in other orders than other
//! ranks do. What belongs to whom, what a rank that waits does next, and when buffers are freed is decided by the
//! production bookkeeping ([`sumac::harness::Operations`]).
//!
//! Handles count from 0, as operations do. Oracles: the tree never needs a buffer that has gone back or was freed;
//! results are exact, also of operations that were recovered or started again; nothing is held when all is over; where
//! a communicator ends, all its operations end with its error, and nothing begins.

use super::TenantViolation as Violation;
use super::draw::{Incident, Tenancy};
use super::job::{JobMessage, Member, Phase};
use super::world::{Actor, Alarm, DEVICES_FIRST, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use crate::sim::memory::{OpMemory, chunks};
use crate::sim::options::Draw;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;
use sumac::Error;
use sumac::harness::{Awaited, Launched, NextStep, Operations};
use sumac::schedule::Place;
use sumac::transport::packets::{Endpoint, Event, OpId};
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};

/// What a program does once it need not wait any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// Start the next operation.
    Start,
    /// Take the result of this handle.
    Take(u64),
    /// Move to the tree that is offered with a view, at a call.
    Move(u64, u32),
    /// Leave.
    Leave,
}

impl Goal {
    const fn awaited(self) -> Awaited {
        match self {
            Self::Start => Awaited::Room,
            Self::Take(handle) => Awaited::Operation(handle),
            Self::Move(..) | Self::Leave => Awaited::All,
        }
    }
}

impl Tenancy {
    /// Draw the parameters of a seed, for ranks that start several operations at once.
    pub fn draw_started(seed: u64) -> Self {
        let mut plan = Self { starts: true, ..Self::draw(seed) };
        let mut draw = Draw::new(weight(&[seed, 0x7374_6172]));
        let by_ranks = draw.one_of(&[0, 150, 350, 700]);
        for job in plan.jobs.iter_mut().filter(|job| job.world < 20) {
            job.starts = draw.chance(800).then(|| draw.one_of(&[1, 2, 4, 64]));
            job.by_ranks = job.ops.iter().map(|_| [draw.chance(by_ranks), draw.chance(by_ranks)]).collect();
        }
        if draw.chance(250) {
            let job = draw.below(plan.jobs.len() as u64) as usize;
            let rank = draw.below(plan.jobs[job].world as u64) as usize;
            let at = plan.jobs[job].at + DEVICES_FIRST + Duration::from_micros(draw.below(1_000_000));
            plan.incidents.push((at, Incident::Kill(job, rank)));
            plan.incidents.sort_by_key(|(at, _)| *at);
        }
        plan
    }
}

/// A program of started operations.
pub(super) struct Program {
    pub(super) operations: Operations,
    /// The handles that it has.
    handles: BTreeSet<u64>,
    /// The number of operations that it has started.
    started: usize,
    goal: Goal,
    /// Operations in the present tree that are not complete, by number there.
    in_tree: BTreeSet<OpId>,
    /// The next operation to complete in the present tree.
    next: OpId,
    /// Operations of the last tree are complete below this number.
    completed_below: OpId,
}

impl Program {
    pub(super) fn new(tenancy: &Tenancy, (job, rank): (usize, usize), capacity: usize) -> Self {
        let place = Place::new(Rank(rank as u32), tenancy.jobs[job].world as u32).expect("a rank");
        Self {
            operations: tenancy.planted.operations(Operations::new(place, capacity)),
            handles: BTreeSet::new(),
            started: 0,
            goal: Goal::Start,
            in_tree: BTreeSet::new(),
            next: OpId(0),
            completed_below: OpId(0),
        }
    }

    /// The rank continues with another tree, or without one.
    pub(super) fn enter_tree(&mut self) {
        self.completed_below = self.completed_below.max(self.next);
        (self.next, self.in_tree) = (OpId(0), BTreeSet::new());
    }

    /// The recovery from the loss of a tree has ended, where operations are complete below a number. Returns whether
    /// that has completed any.
    pub(super) fn recovered(&mut self, completed_below: OpId) -> bool {
        self.operations.restore();
        self.completed_below = completed_below;
        self.in_tree.first().is_some_and(|&op| op < completed_below)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { goal, started, in_tree, handles, .. } = self;
        write!(f, "{goal:?}, {started} started, {} in the tree, handles {handles:?}", in_tree.len())
    }
}

impl Member {
    /// Return the index of the next operation that it calls.
    pub(super) fn next_op(&self) -> usize {
        self.program.as_ref().map_or(self.done, |program| program.started)
    }

    /// Post a call in the tree, or announce it there as a host collective: as a communicator selects. `by_ranks` says
    /// which calls are host collectives in a view with a tree. Returns `None` if the tree is lost.
    fn post(&mut self, desc: &OpDesc, call: u64, by_ranks: [bool; 2]) -> Option<Launched> {
        let is_by_ranks = |&(epoch, has_tree): &(u32, bool)| !has_tree || by_ranks[epoch as usize % 2];
        let is_earlier = self.paths.select(call, |view| is_by_ranks(view).then_some(())).is_some();
        let path = if is_earlier || is_by_ranks(&(self.epoch, self.has_tree)) { Path::Ring } else { Path::Tree };
        let Some(endpoint) = self.endpoint.as_mut().filter(|_| self.has_tree && !is_earlier) else {
            return Some(Launched { path, op: None });
        };
        match endpoint.post(*desc, path, None) {
            Ok(op) => {
                self.memory.posted.push(call as usize);
                if let Some(program) = self.program.as_mut().filter(|_| path == Path::Tree) {
                    program.in_tree.insert(op);
                }
                Some(Launched { path, op: Some(op) })
            }
            Err(error) => {
                assert!(endpoint.error().is_some(), "{error:?}");
                (path != Path::Tree).then_some(Launched { path, op: None })
            }
        }
    }
}

impl World<'_, '_> {
    fn program(&mut self, at: (usize, usize)) -> &mut Program {
        self.member(at).program.as_mut().expect("it has one")
    }

    /// The program starts an operation, waits for one, tests one, or drops a handle.
    pub(super) fn take_step(&mut self, at: (usize, usize)) {
        let ops = self.plan.jobs[at.0].ops.len();
        let program = self.jobs[at.0].ranks[at.1].program.as_ref().expect("it has one");
        let handles: Vec<u64> = program.handles.iter().copied().collect();
        if program.started < ops && (handles.is_empty() || self.draw.chance(550)) {
            self.program(at).goal = Goal::Start;
            self.member(at).phase = Phase::Waiting;
        } else if handles.is_empty() {
            self.program(at).goal = Goal::Leave;
            self.member(at).phase = Phase::Waiting;
        } else {
            let handle = self.draw.one_of(&handles);
            if self.draw.chance(300) {
                self.drop_handle(at, handle);
                return self.think(at);
            }
            let is_tested = self.draw.chance(200);
            let program = self.program(at);
            // A test runs nothing here.
            if is_tested && program.operations.next_step(Awaited::Operation(handle)) != NextStep::Return {
                return self.think(at);
            }
            program.goal = Goal::Take(handle);
            self.member(at).phase = Phase::Waiting;
        }
    }

    /// The program computes for a while.
    fn think(&mut self, at: (usize, usize)) {
        let most = self.plan.jobs[at.0].think_max.as_nanos() as u64 / 3;
        let until = self.now + Duration::from_nanos(self.draw.below(most + 1));
        self.member(at).phase = Phase::Computing(until);
        self.schedule(until, Alarm::Rank(at.0, at.1));
    }

    /// A handle is dropped, unless it is waited for, by this thread of the program or another.
    pub(super) fn drop_handle(&mut self, at: (usize, usize), handle: u64) {
        let is_at_once = self.draw.chance(500);
        let member = self.member(at);
        let is_waited_for = |program: &Program| {
            let waits = |phase: &Phase| matches!(phase, Phase::Waiting | Phase::InHostCollective);
            let is_waiting = waits(&member.phase) || member.recovery.is_some() && waits(&member.resumes);
            is_waiting && program.goal == Goal::Take(handle)
        };
        if matches!(member.phase, Phase::Ended(_)) || member.program.as_ref().is_none_or(is_waited_for) {
            return;
        }
        let program = member.program.as_mut().expect("checked above");
        if !program.handles.remove(&handle) {
            return;
        }
        program.operations.drop_handle(handle);
        member.done += 1;
        let is_changing = member.recovery.is_some();
        if is_at_once {
            program.operations.reclaim_dropped();
        }
        self.report.dropped += 1;
        if is_changing {
            self.report.seen.note(Mark::DroppedInChange);
        }
        self.touched.insert(Actor::Rank(at.0, at.1));
    }

    /// Some handles may be dropped while the view changes.
    pub(super) fn drop_in_change(&mut self, at: (usize, usize)) {
        let handles: Vec<u64> = self.program(at).handles.iter().copied().collect();
        for handle in handles {
            if self.draw.chance(150) {
                let after = Duration::from_nanos(self.draw.below(300_000_000));
                self.schedule(self.now + after, Alarm::Drop(at.0, at.1, handle));
            }
        }
    }

    /// Process dropped handles, as a call does that drives the tree.
    pub(super) fn reclaim_dropped(&mut self, at: (usize, usize)) {
        let member = self.member(at);
        if let Some(program) = member.program.as_mut().filter(|_| member.recovery.is_none()) {
            program.operations.reclaim_dropped();
        }
    }

    /// Start the next operation, whose call begins.
    pub(super) fn start_call(&mut self, at: (usize, usize)) {
        let (plan, job) = (&self.plan.jobs[at.0], &mut self.jobs[at.0]);
        let member = &mut job.ranks[at.1];
        let op = member.next_op();
        if member.called == op {
            member.called += 1;
            *job.calls.entry(op).or_default() += 1;
        }
        let Some(launched) = member.post(&plan.ops[op], op as u64, plan.by_ranks[op]) else {
            member.phase = Phase::Starting;
            return;
        };
        let buffers = member.memory.ops[op].give();
        let program = member.program.as_mut().expect("it has one");
        let handle = program.operations.start(plan.ops[op], op as u64, launched, buffers);
        assert_eq!(handle, op as u64);
        program.started += 1;
        program.handles.insert(handle);
        self.touched.insert(Actor::Rank(at.0, at.1));
        if self.draw.chance(200) {
            let len = Duration::from_micros(self.draw.one_of(&[0, 100, 10_000, 1_000_000, 5_000_000]));
            let drop_at = self.now + Duration::from_nanos(self.draw.below(len.as_nanos() as u64 + 1));
            self.schedule(drop_at, Alarm::Drop(at.0, at.1, handle));
        }
        self.think(at);
    }

    /// All ranks migrate at this call: first, everything that was started before it ends.
    pub(super) fn drain_to_move(&mut self, at: (usize, usize), call: u64, view: u32) {
        self.program(at).goal = Goal::Move(call, view);
        self.member(at).phase = Phase::Waiting;
    }

    /// Do what a rank that waits does next. Returns false if it can do nothing.
    pub(super) fn go_on(&mut self, at: (usize, usize)) -> Result<bool, Violation> {
        let program = self.program(at);
        let goal = program.goal;
        let step = match goal {
            Goal::Start if program.operations.has_room() => NextStep::Return,
            _ => program.operations.next_step(goal.awaited()),
        };
        match step {
            NextStep::DriveTree => return Ok(false),
            NextStep::RunSchedule => {
                let Some(handle) = program.operations.begin_schedule() else { return Ok(false) };
                self.member(at).phase = Phase::InHostCollective;
                self.broadcast(at, &JobMessage::Entered(handle as usize));
            }
            NextStep::Return => match goal {
                Goal::Start => {
                    let member = self.member(at);
                    member.phase = Phase::Turn(member.calls.call());
                }
                Goal::Take(handle) => {
                    self.take_result(at, handle)?;
                    self.think(at);
                }
                Goal::Move(call, view) => {
                    self.member(at).phase = Phase::Turn(call);
                    self.move_to(at, call, view)?;
                }
                Goal::Leave => {
                    self.member(at).phase = Phase::Finishing;
                    self.broadcast(at, &JobMessage::Finished);
                }
            },
        }
        Ok(true)
    }

    /// Complete the host collective that is running, once all ranks have entered it. Returns false before that.
    pub(super) fn run_started(&mut self, at: (usize, usize)) -> Result<bool, Violation> {
        let world = self.plan.jobs[at.0].world;
        let op = self.program(at).operations.running().expect("one is running") as usize;
        let has_all = self.member(at).peers.entered.get(&op).is_some_and(|ranks| ranks.len() == world);
        if !has_all && !self.only_sends(at, op) {
            return Ok(false);
        }
        if has_all {
            self.check_called(at, op)?;
        }
        let after = self.after(at, op).give();
        self.program(at).operations.end_schedule(Ok(after));
        self.report.by_host_collectives += 1;
        self.member(at).phase = Phase::Waiting;
        Ok(true)
    }

    /// No operation ends before all ranks have called it.
    fn check_called(&self, at: (usize, usize), op: usize) -> Result<(), Violation> {
        let called = self.jobs[at.0].calls.get(&op).copied().unwrap_or(0);
        if called == self.plan.jobs[at.0].world {
            return Ok(());
        }
        let what = format!("job {} rank {} operation {op} when {called} ranks had called it", at.0, at.1);
        Err(Violation { oracle: "early completion", what })
    }

    /// An operation of the endpoint is complete.
    pub(super) fn complete_started(&mut self, at: (usize, usize), id: OpId) -> Result<(), Violation> {
        let op = self.member(at).memory.index(id);
        self.check_called(at, op)?;
        let program = self.program(at);
        if id != program.next {
            let what = format!("job {} rank {}: {id:?} instead of {:?}", at.0, at.1, program.next);
            return Err(Violation { oracle: "order of completions", what });
        }
        program.next = OpId(id.0 + 1);
        program.in_tree.remove(&id);
        program.operations.complete(id);
        Ok(())
    }

    /// Process what was complete when the tree was frozen.
    pub(super) fn collect_started(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        while let Some(event) = self.member(at).endpoint.as_mut().and_then(Endpoint::poll_event) {
            if let Event::Completed(id) = event {
                self.complete_started(at, id)?;
            }
        }
        Ok(())
    }

    /// Launch the operations again that the last tree has not completed.
    pub(super) fn relaunch(&mut self, at: (usize, usize)) {
        let plan = &self.plan.jobs[at.0];
        let member = self.member(at);
        let Some(mut program) = member.program.take() else { return };
        let mut posted = BTreeMap::new();
        program.operations.relaunch(program.completed_below, |desc, call| {
            // Nothing was received in the new tree, so it is not lost yet.
            let launched = member.post(desc, call, plan.by_ranks[call as usize]).expect("a new tree");
            posted.insert(call, launched);
            launched
        });
        program.completed_below = OpId(0);
        program.in_tree = posted.values().filter(|launched| launched.path == Path::Tree).filter_map(|l| l.op).collect();
        member.program = Some(program);
        self.touched.insert(Actor::Rank(at.0, at.1));
    }

    /// The tree has the buffers of all its operations.
    pub(super) fn check_held_buffers(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = self.member(at);
        let Some(program) = member.program.as_mut().filter(|_| member.endpoint.is_some()) else { return Ok(()) };
        let buffers = program.operations.buffers();
        match program.in_tree.iter().find(|op| !buffers.has(**op)) {
            Some(op) => {
                let what = format!("job {} rank {}: {op:?} is in the tree, and its buffers are not", at.0, at.1);
                Err(Violation { oracle: "freed too early", what })
            }
            None => Ok(()),
        }
    }

    /// A handle returns: its result must be right.
    fn take_result(&mut self, at: (usize, usize), handle: u64) -> Result<(), Violation> {
        let op = handle as usize;
        let after = self.after(at, op);
        let found = self.program(at).operations.finish(handle);
        let wrong = |oracle, what: &str| {
            let what = format!("job {} rank {} operation {op}: {what}", at.0, at.1);
            Err(Violation { oracle, what })
        };
        let Some((buffers, result)) = found else { return wrong("lost operation", "it has no buffers") };
        if let Err(error) = result {
            return wrong("wrong end", &format!("{error}"));
        }
        let member = self.member(at);
        member.memory.ops[op].take(buffers);
        member.done += 1;
        self.jobs[at.0].ranks[at.1].program.as_mut().map(|program| program.handles.remove(&handle));
        if let Some((byte, [found, expected])) = self.member(at).memory.ops[op].first_difference(&after) {
            return wrong("wrong result", &format!("byte {byte} is {found:#x}, not {expected:#x}"));
        }
        if !self.only_sends(at, op) { self.check_called(at, op) } else { Ok(()) }
    }

    /// The communicator ends, because the job has lost a rank: all handles end with its error, in any order.
    pub(super) fn end_started(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if self.member(at).program.is_none() {
            return Ok(());
        }
        let ended = Error::RankLost { rank: Rank(0) };
        let program = self.program(at);
        program.operations.reclaim_dropped();
        program.operations.end(ended.clone());
        let mut handles: Vec<u64> = program.handles.iter().copied().collect();
        let wrong =
            |oracle, what: String| Err(Violation { oracle, what: format!("job {} rank {}: {what}", at.0, at.1) });
        while !handles.is_empty() {
            let handle = handles.swap_remove(self.draw.below(handles.len() as u64) as usize);
            let program = self.program(at);
            match program.operations.next_step(Awaited::Operation(handle)) {
                NextStep::Return => {}
                step => return wrong("begun after the end", format!("operation {handle}: {step:?}")),
            }
            let Some((buffers, result)) = program.operations.finish(handle) else {
                return wrong("lost operation", format!("operation {handle} has no buffers"));
            };
            match result {
                Err(error) if error != ended => {
                    return wrong("other error", format!("operation {handle}: {error}, not {ended}"));
                }
                _ => self.check_failed(at, handle as usize, |memory| memory.take(buffers))?,
            }
        }
        self.program(at).handles.clear();
        self.check_nothing_held(at)
    }

    /// Each chunk of a failed operation is entirely old or new.
    fn check_failed(
        &mut self,
        at: (usize, usize),
        op: usize,
        take: impl FnOnce(&mut OpMemory),
    ) -> Result<(), Violation> {
        let after = self.after(at, op);
        let job = &self.jobs[at.0];
        let options = job.options.as_ref().expect("it has begun");
        let desc = &options.groups[0].ops[op];
        let before = OpMemory::before(options, 0, 0, at.1, op);
        let mut found = before.clone();
        take(&mut found);
        match found.torn_chunk(&before, &after, desc, &chunks(desc, options.ranks, options.chunk_len_bytes)) {
            Some(chunk) => {
                let what = format!("job {} rank {} operation {op} chunk {chunk}", at.0, at.1);
                Err(Violation { oracle: "torn chunk", what })
            }
            None => Ok(()),
        }
    }

    /// A communicator whose operations have all ended holds nothing.
    pub(super) fn check_nothing_held(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let Some(program) = &mut self.member(at).program else { return Ok(()) };
        program.operations.reclaim_dropped();
        match program.operations.outstanding() {
            (0, 0) => Ok(()),
            (operations, bytes) => {
                let what = format!("job {} rank {}: {operations} operations of {bytes} bytes", at.0, at.1);
                Err(Violation { oracle: "held at the end", what })
            }
        }
    }
}
