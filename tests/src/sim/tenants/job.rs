//! Jobs and their ranks: production endpoints, with the production decisions about calls and repairs.
//!
//! A rank models what `sumac::comm` waits for: it calls one operation after the other, moves to offered trees, and
//! repairs a lost tree together with all ranks of its job. Ranks of a job that loses one of them end. Agreement while
//! ranks die is tested by [`ScenarioKind::Ranks`](crate::sim::ScenarioKind::Ranks).

use super::TenantViolation as Violation;
use super::draw::{JobPlan, Tenancy};
use super::world::{Actor, Alarm, World};
use crate::oracle::{Shape, weight};
use crate::sim::coverage::Mark;
use crate::sim::faults::Faults;
use crate::sim::memory::{Memory, OpMemory, chunks, results};
use crate::sim::options::{GroupOptions, Options, Sharing};
use crate::sim::reduce::{reduce, tree};
use crate::sim::scenario::Scenario;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::comm::harness::{CallStart, Calls};
use sumac::controller::machine::ConnId;
use sumac::controller::proto::{Membership, QueuePosition};
use sumac::harness::{Decision, Origin, RankReport};
use sumac::plan::Child;
use sumac::transport::packets::{Endpoint, Event};
use sumac_hal::emu::Delivery;
use sumac_hal::ids::Rank;
use sumac_hal::op::Path;
use sumac_hal::time::Instant;

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It has all results.
    Done,
    /// The scenario killed it.
    Killed,
    /// A rank of its job died.
    RanksFailed,
    /// It could not join: a rank of its job, or the controller, is gone.
    NotJoined,
}

/// The state of a rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Phase {
    /// Not connected: it dials next.
    Disconnected,
    /// Waiting for the others, and perhaps for a tree, until this time at most.
    Joining(Instant),
    /// Its program computes, until this time.
    Computing(Instant),
    /// Waiting for its turn; the number of the call.
    Turn(u64),
    /// An operation runs in the tree.
    InTree,
    /// An operation runs as a host collective, once all ranks have entered.
    InHostCollective,
    /// Its tree is lost: waiting for the others' reports.
    Frozen,
    /// Waiting for missing chunks.
    Collecting,
    /// It has requested another tree, and waits until this time.
    Replanning(Instant),
    /// Waiting for the others' votes.
    Votes,
    /// It has all results, and waits for the others.
    Finishing,
    Ended(End),
}

/// A message between the ranks of a job.
#[derive(Debug, Clone)]
pub(super) enum JobMessage {
    /// The tree of an epoch is lost.
    Lost(u32),
    /// The sender's report on it.
    RankReport(u32, RankReport),
    /// Chunks were sent.
    Given,
    /// A vote: the group found plus one; 0 for none.
    Vote(u32, u64),
    /// The sender has entered this host collective.
    Entered(usize),
    Finished,
    Gone,
}

/// A rank of a job.
pub(super) struct Member {
    pub(super) phase: Phase,
    pub(super) conn: Option<ConnId>,
    /// Its job's last known queue position.
    pub(super) queue: Option<QueuePosition>,
    /// Number of assignments of its job that it knows of.
    pub(super) view: u32,
    /// Number of changes of its tree.
    pub(super) epoch: u32,
    pub(super) calls: Calls,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) has_tree: bool,
    pub(super) memory: Memory,
    pub(super) done: usize,
    pub(super) called: usize,
    /// The state to resume after a repair.
    pub(super) resumes: Phase,
    pub(super) sent_report: Option<RankReport>,
    pub(super) decision: Option<Decision>,
    pub(super) missing: BTreeSet<u64>,
    /// The controller's reply.
    pub(super) answer: Option<(u32, Option<Box<Membership>>)>,
    pub(super) found: Option<Box<Membership>>,
    /// The view whose reply is too late.
    pub(super) given_up: Option<u32>,
    /// It accepts offered trees.
    pub(super) moves: bool,
    pub(super) peers: PeerState,
}

/// What a rank knows of the others.
#[derive(Default)]
pub(super) struct PeerState {
    lost: Option<u32>,
    reports: BTreeMap<u32, BTreeMap<usize, RankReport>>,
    votes: BTreeMap<u32, BTreeMap<usize, u64>>,
    entered: BTreeMap<usize, BTreeSet<usize>>,
    finished: BTreeSet<usize>,
    pub(super) has_lost_rank: bool,
}

/// Pieces of a chunk sent in a repair.
#[derive(Default)]
struct Piece {
    contributions: BTreeMap<usize, Vec<u8>>,
    result: Option<Vec<u8>>,
}

/// A job.
pub(super) struct Job {
    pub(super) index: usize,
    pub(super) ranks: Vec<Member>,
    /// A rank of it was killed, or lost the controller.
    pub(super) is_disturbed: bool,
    pub(super) has_lost_controller: bool,
    /// Parameters of its oracle, once its ranks know the declared order.
    options: Option<Options>,
    results: BTreeMap<usize, Vec<Vec<u8>>>,
    decisions: BTreeMap<u32, Decision>,
    pieces: BTreeMap<(u32, u64), Piece>,
    /// Number of ranks that have called each operation.
    calls: BTreeMap<usize, usize>,
}

impl Job {
    pub(super) fn new(index: usize, plan: &JobPlan) -> Self {
        let member = || Member {
            phase: Phase::Disconnected,
            conn: None,
            queue: None,
            view: 0,
            epoch: 0,
            calls: Calls::new(),
            endpoint: None,
            has_tree: false,
            memory: Memory { first: 0, ops: Vec::new() },
            done: 0,
            called: 0,
            resumes: Phase::Disconnected,
            sent_report: None,
            decision: None,
            missing: BTreeSet::new(),
            answer: None,
            found: None,
            given_up: None,
            moves: false,
            peers: PeerState::default(),
        };
        Self {
            index,
            ranks: (0..plan.world).map(|_| member()).collect(),
            is_disturbed: false,
            has_lost_controller: false,
            options: None,
            results: BTreeMap::new(),
            decisions: BTreeMap::new(),
            pieces: BTreeMap::new(),
            calls: BTreeMap::new(),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ranks.iter().all(|rank| matches!(rank.phase, Phase::Ended(_)))
    }
}

/// Describe a job as a cluster, for the oracle of results.
fn options_of(tenancy: &Tenancy, index: usize, expression: &[Vec<Child>]) -> Options {
    let plan = &tenancy.jobs[index];
    Options {
        seed: weight(&[tenancy.seed, index as u64]),
        trees: vec![shape_of(expression, 0)],
        ranks: plan.world,
        groups: vec![GroupOptions { tree: 0, order: plan.order, ops: plan.ops.clone() }],
        shards: 1,
        window: 8,
        chunk_len_bytes: tenancy.chunk_len_bytes,
        link: tenancy.link,
        sharing: Sharing::Off,
        spares: 0,
        faults: Faults::default(),
        skew_max: Duration::ZERO,
        scenario: Scenario::Calm,
        planted: tenancy.planted,
    }
}

fn shape_of(expression: &[Vec<Child>], node: usize) -> Shape {
    let child = |child: &Child| match child {
        Child::Rank(rank) => Shape::Rank(rank.0 as usize),
        Child::Node(below) => shape_of(expression, *below),
    };
    Shape::Node(expression[node].iter().map(child).collect())
}

impl World<'_, '_> {
    fn member(&mut self, at: (usize, usize)) -> &mut Member {
        &mut self.jobs[at.0].ranks[at.1]
    }

    /// All ranks of the job have joined: start.
    pub(super) fn begin(&mut self, at: (usize, usize), membership: Box<Membership>) -> Result<(), Violation> {
        let (tenancy, now) = (self.plan, self.now);
        let job = &mut self.jobs[at.0];
        let options = options_of(tenancy, at.0, &membership.expression);
        let known = job.options.get_or_insert(options);
        if shape_of(&membership.expression, 0) != known.trees[0] {
            return Err(Violation {
                oracle: "disagreement",
                what: format!("ranks of job {} got different expressions", at.0),
            });
        }
        let ops = 0..tenancy.jobs[at.0].ops.len();
        let memory = Memory { first: 0, ops: ops.map(|op| OpMemory::before(known, 0, 0, at.1, op)).collect() };
        let member = &mut job.ranks[at.1];
        member.memory = memory;
        member.queue = membership.queue;
        member.phase = Phase::Computing(now);
        self.install(at, Some(membership));
        self.catch_up(at)
    }

    /// Continue with the tree of a membership, or without one.
    fn install(&mut self, at: (usize, usize), membership: Option<Box<Membership>>) {
        let (tenancy, world) = (self.plan, self.plan.jobs[at.0].world as u32);
        let member = self.member(at);
        let tree = membership.as_ref().and_then(|membership| membership.tree.as_ref().ok());
        member.has_tree = tree.is_some();
        member.memory.first = member.done;
        if let Some((tree, membership)) = tree.zip(membership.as_ref()) {
            let mut config = tree.endpoint((Rank(at.1 as u32), world), None, membership.table.version);
            config.salt = weight(&[tenancy.seed, tree.key]) as u32;
            member.endpoint = Some(tenancy.planted.endpoint(Endpoint::new(config)));
        }
        self.touched.insert(Actor::Rank(at.0, at.1));
    }

    /// Others may have reported the loss before this rank got here.
    fn catch_up(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = self.member(at);
        if member.peers.has_lost_rank {
            return self.end(at, End::RanksFailed);
        }
        if member.has_tree && member.peers.lost == Some(member.epoch) { self.freeze(at) } else { Ok(()) }
    }

    pub(super) fn on_job_message(
        &mut self,
        at: (usize, usize),
        from: usize,
        body: JobMessage,
    ) -> Result<(), Violation> {
        let member = self.member(at);
        let peers = &mut member.peers;
        match body {
            JobMessage::Lost(epoch) => peers.lost = peers.lost.max(Some(epoch)),
            JobMessage::RankReport(epoch, report) => _ = peers.reports.entry(epoch).or_default().insert(from, report),
            JobMessage::Given => {}
            JobMessage::Vote(epoch, group) => _ = peers.votes.entry(epoch).or_default().insert(from, group),
            JobMessage::Entered(op) => _ = peers.entered.entry(op).or_default().insert(from),
            JobMessage::Finished => _ = peers.finished.insert(from),
            // A rank that had finished has left.
            JobMessage::Gone if peers.finished.contains(&from) => {}
            JobMessage::Gone => peers.has_lost_rank = true,
        }
        let is_there = !matches!(member.phase, Phase::Disconnected | Phase::Joining(_) | Phase::Ended(_));
        if is_there && !self.is_busy(at) {
            self.catch_up(at)?;
        } else if is_there && self.member(at).peers.has_lost_rank {
            self.end(at, End::RanksFailed)?;
        }
        self.advance(at)
    }

    fn have_all_finished(&self, (job, rank): (usize, usize)) -> bool {
        self.jobs[job].ranks[rank].peers.finished.len() == self.plan.jobs[job].world
    }

    /// Return whether a rank is in a repair or a move.
    fn is_busy(&self, at: (usize, usize)) -> bool {
        let phase = &self.jobs[at.0].ranks[at.1].phase;
        matches!(phase, Phase::Frozen | Phase::Collecting | Phase::Replanning(_) | Phase::Votes)
    }

    /// Advance as far as received messages allow.
    pub(super) fn advance(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let (world, ops) = (self.plan.jobs[at.0].world, self.plan.jobs[at.0].ops.len());
        loop {
            let now = self.now;
            // All ranks have all results: finished ranks may be gone, and no repair is needed.
            if self.is_busy(at) && self.member(at).resumes == Phase::Finishing && self.have_all_finished(at) {
                return self.end(at, End::Done);
            }
            let member = self.member(at);
            let epoch = member.epoch;
            match member.phase.clone() {
                Phase::Disconnected => return self.dial(at),
                Phase::Joining(until) if now >= until => return self.end(at, End::NotJoined),
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
                    CallStart::Begin => self.call(at)?,
                    CallStart::Migrate(view) => self.move_to(at, view),
                },
                Phase::InHostCollective => {
                    let op = member.done;
                    if member.peers.entered.get(&op).is_none_or(|ranks| ranks.len() < world) {
                        return Ok(());
                    }
                    self.run_schedule(at)?;
                }
                Phase::Frozen if member.peers.reports.get(&epoch).is_some_and(|all| all.len() == world) => {
                    self.decide(at)?;
                }
                Phase::Collecting => {
                    self.land(at);
                    if !self.member(at).missing.is_empty() {
                        return Ok(());
                    }
                    self.ask_for_tree(at);
                }
                Phase::Replanning(until) => {
                    if !self.take_answer(at, until) {
                        return Ok(());
                    }
                }
                Phase::Votes if member.peers.votes.get(&epoch).is_some_and(|all| all.len() == world) => {
                    self.commit(at)?;
                }
                Phase::Finishing if self.have_all_finished(at) => return self.end(at, End::Done),
                _ => return Ok(()),
            }
        }
    }

    /// Start the operation of a call, in the tree or as a host collective.
    fn call(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let ops = &self.plan.jobs[at.0].ops;
        let job = &mut self.jobs[at.0];
        let member = &mut job.ranks[at.1];
        let op = member.done;
        if member.called == op {
            member.called += 1;
            *job.calls.entry(op).or_default() += 1;
        }
        if member.has_tree {
            member.phase = Phase::InTree;
            if let Some(endpoint) = &mut member.endpoint {
                // If the tree is already lost, it restarts on the next one.
                let posted = endpoint.post(ops[op], Path::Tree);
                assert!(posted.is_ok() || endpoint.error().is_some(), "{posted:?}");
            }
            self.touched.insert(Actor::Rank(at.0, at.1));
        } else {
            member.phase = Phase::InHostCollective;
            self.broadcast(at, &JobMessage::Entered(op));
        }
        Ok(())
    }

    /// Host collectives have their own tests: here they complete at once when all ranks have entered.
    fn run_schedule(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let op = self.member(at).done;
        let after = self.after(at, op);
        self.member(at).memory.ops[op] = after;
        self.report.by_host_collectives += 1;
        self.finish_op(at)
    }

    /// Return the expected buffers of an operation after it has returned.
    fn after(&mut self, (job, rank): (usize, usize), op: usize) -> OpMemory {
        let Job { options, results: known, .. } = &mut self.jobs[job];
        let options = options.as_ref().expect("it has begun");
        let results = known.entry(op).or_insert_with(|| results(options, 0, 0, op));
        OpMemory::before(options, 0, 0, rank, op).after(&options.groups[0].ops[op], options.ranks, rank, results)
    }

    /// An operation returns: its contents must be right.
    fn finish_op(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let (now, plan) = (self.now, &self.plan.jobs[at.0]);
        let op = self.member(at).done;
        let called = self.jobs[at.0].calls.get(&op).copied().unwrap_or(0);
        if called < plan.world {
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

    pub(super) fn deliver_to_rank(&mut self, at: (usize, usize), view: u32, delivery: &Delivery) {
        let now = self.rank_time(at);
        let member = self.member(at);
        let is_there = !matches!(member.phase, Phase::Ended(_)) && member.epoch % 64 == view;
        if let Some(endpoint) = member.endpoint.as_mut().filter(|_| is_there) {
            endpoint.handle(delivery.from, &delivery.bytes, &mut member.memory, now);
            self.touched.insert(Actor::Rank(at.0, at.1));
        }
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
                Event::Completed(id) if member.memory.first + id.0 as usize == member.done => self.finish_op(at)?,
                Event::Failed(error) if member.has_tree => {
                    self.report.seen.endpoint_error(error);
                    self.freeze(at)?;
                }
                Event::Failed(_) => {}
                other => {
                    let what = format!("job {} rank {}: {other:?} after {} operations", at.0, at.1, member.done);
                    return Err(Violation { oracle: "order of completions", what });
                }
            }
        }
    }

    /// The tree is lost: freeze, and send the report to all.
    pub(super) fn freeze(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if self.is_busy(at) || !self.member(at).has_tree {
            return Ok(());
        }
        self.suspect(at);
        let member = self.member(at);
        let epoch = member.epoch;
        let Some(endpoint) = &mut member.endpoint else { return Ok(()) };
        endpoint.freeze();
        let report = RankReport::of(endpoint);
        member.sent_report = Some(report.clone());
        member.resumes = std::mem::replace(&mut member.phase, Phase::Frozen);
        self.report.repairs += 1;
        self.report.seen.note(Mark::FrozenByLoss);
        self.broadcast(at, &JobMessage::Lost(epoch));
        self.broadcast(at, &JobMessage::RankReport(epoch, report));
        self.collect(at)
    }

    /// With all reports: compute the plan, and send this rank's part.
    fn decide(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let job = &mut self.jobs[at.0];
        let member = &mut job.ranks[at.1];
        let epoch = member.epoch;
        let reports: Vec<RankReport> = member.peers.reports[&epoch].values().cloned().collect();
        let Some(endpoint) = &member.endpoint else { return Ok(()) };
        let failed = |why: String| Violation { oracle: "unrepairable", what: format!("job {}: {why}", at.0) };
        let decision = Decision::of(&reports, endpoint).map_err(failed)?;
        if *job.decisions.entry(epoch).or_insert_with(|| decision.clone()) != decision {
            return Err(Violation { oracle: "disagreement", what: format!("job {} epoch {epoch}", at.0) });
        }
        for chunk in &decision.chunks {
            let bytes = chunk.give(endpoint, Rank(at.1 as u32), &mut member.memory);
            let piece = job.pieces.entry((epoch, chunk.seq)).or_default();
            match chunk.origin {
                Origin::Held(holder) if holder.0 as usize == at.1 => piece.result = Some(bytes),
                Origin::Held(_) => {}
                Origin::Recompute => {
                    piece.contributions.insert(at.1, bytes);
                    if piece.contributions.len() == reports.len() {
                        let options = job.options.as_ref().expect("it has begun");
                        let given: Vec<Vec<u8>> = piece.contributions.values().cloned().collect();
                        let tree = tree(&options.trees[0], options.ranks, options.order(0));
                        piece.result = Some(reduce(&tree, &chunk.desc, &given));
                    }
                }
            }
        }
        member.missing = decision.chunks.iter().map(|chunk| chunk.seq).collect();
        member.decision = Some(decision);
        member.phase = Phase::Collecting;
        self.broadcast(at, &JobMessage::Given);
        Ok(())
    }

    /// Store received chunks.
    fn land(&mut self, at: (usize, usize)) {
        let Job { ranks, pieces, .. } = &mut self.jobs[at.0];
        let Member { endpoint, memory, missing, decision, epoch, .. } = &mut ranks[at.1];
        let (Some(endpoint), Some(decision)) = (endpoint, decision) else { return };
        for chunk in &decision.chunks {
            let result = pieces.get(&(*epoch, chunk.seq)).and_then(|piece| piece.result.as_ref());
            if let Some(result) = result.filter(|_| missing.remove(&chunk.seq)) {
                chunk.land(endpoint, result, memory);
            }
        }
    }

    /// Continue with the result of the vote.
    fn commit(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = self.member(at);
        let votes: BTreeSet<u64> = member.peers.votes[&member.epoch].values().copied().collect();
        let all_alike = votes.len() == 1 && !votes.contains(&0);
        let found = member.found.take();
        if let Some(decision) = member.decision.take() {
            let endpoint = member.endpoint.as_ref().expect("of the lost tree");
            if Some(RankReport::of(endpoint)) != member.sent_report {
                return Err(Violation { oracle: "not fenced", what: format!("job {} rank {}", at.0, at.1) });
            }
            let below = member.memory.first + decision.completed_below(endpoint).0 as usize;
            while self.member(at).done < below {
                self.report.seen.note(Mark::OpRepaired);
                self.finish_op(at)?;
            }
        } else if found.is_some() && !all_alike {
            self.decline(at, "a rank is not in it");
        }
        let moves = self.member(at).moves;
        self.report.seen.note(match (moves, all_alike) {
            (true, true) => Mark::MovedBack,
            (true, false) => Mark::OfferDeclined,
            (false, true) => Mark::CommitTree,
            (false, false) => Mark::CommitSchedules,
        });
        let now = self.now;
        let member = self.member(at);
        member.epoch += 1;
        (member.sent_report, member.endpoint) = (None, None);
        member.missing.clear();
        // As `sumac::comm` does, with or without a tree.
        member.calls.enter_view(member.view);
        let (moved, resumes) = (std::mem::take(&mut member.moves), member.resumes.clone());
        let offered = if moved { member.calls.moved() } else { None };
        let begins = moved || member.called > member.done;
        member.phase = if resumes == Phase::InTree { Phase::Computing(now) } else { resumes };
        self.pause(at, offered);
        self.install(at, found.filter(|_| all_alike));
        if begins {
            self.call(at)?;
        }
        self.schedule(now, Alarm::Rank(at.0, at.1));
        self.catch_up(at)
    }

    /// Check the buffers of a failed operation: each chunk is entirely old or new.
    pub(super) fn check_torn(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let op = self.member(at).done;
        if self.jobs[at.0].options.is_none() || op >= self.plan.jobs[at.0].ops.len() {
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
