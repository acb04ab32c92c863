//! Jobs and their ranks: production endpoints, with the production decisions about calls and recoveries.
//!
//! A rank models what `sumac::comm` waits for: it calls one operation after the other, moves to offered trees, and
//! recovers from the loss of a tree together with all ranks of its job. Ranks of a job that loses one of them end.
//! Agreement while ranks die is tested by [`ScenarioKind::Ranks`](crate::sim::ScenarioKind::Ranks).

use super::TenantViolation as Violation;
use super::draw::{JobPlan, Tenancy};
use super::program::Program;
use super::recovery::Recovery;
use super::world::{Actor, World};
use crate::oracle::weight;
use crate::sim::faults::Faults;
use crate::sim::memory::{Memory, OpMemory};
use crate::sim::options::{GroupOptions, Options, Sharing};
use crate::sim::planted::Planted;
use crate::sim::reduce::shape_of;
use crate::sim::scenario::Scenario;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac::controller::proto::{Membership, QueuePosition};
use sumac::exec::JobSecret;
use sumac::harness::{Attempt, CallPaths, Calls, MigrationVote, Outcome, Plan, ViewMessage};
use sumac::plan::Child;
use sumac::transport::packets::Endpoint;
use sumac_hal::ids::Rank;
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
    /// A program of started operations waits for something.
    Waiting,
    /// The tree was lost as an operation was started: it starts on the next one.
    Starting,
    /// An operation runs in the tree.
    InTree,
    /// An operation runs as a host collective, once all ranks have entered.
    InHostCollective,
    /// Its tree is lost: waiting for the plan.
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
    /// About a view change, counted from 0.
    View(u32, Box<ViewMessage>),
    /// Chunks were sent.
    Given,
    /// A vote on the tree to migrate to at a call.
    Vote(u64, u64),
    /// The sender has entered this host collective.
    Entered(usize),
    Finished,
    Gone,
}

/// A rank of a job.
pub(super) struct Member {
    pub(super) phase: Phase,
    pub(super) conn: Option<ConnId>,
    /// Until when it does not read from its connection to the controller.
    pub(super) blocked_until: Instant,
    /// It asks for reports meanwhile.
    pub(super) asks: bool,
    /// Its job's last known queue position.
    pub(super) queue: Option<QueuePosition>,
    /// Number of assignments of its job that it knows of.
    pub(super) view: u32,
    /// What it tells the next controller, once its job has begun.
    pub(super) takeover: Takeover,
    /// The view that it has requested another tree for.
    pub(super) asked_view: u32,
    /// Number of view changes and moves, in the same order on all ranks as far as calls can tell.
    pub(super) epoch: u32,
    /// Number of view changes.
    pub(super) changes: u32,
    /// Number of trees that it has recovered or migrated from, as a communicator counts them.
    pub(super) trees: u32,
    pub(super) calls: Calls,
    /// Calls that keep the path of an earlier view: its epoch, and whether it had a tree.
    pub(super) paths: CallPaths<(u32, bool)>,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) has_tree: bool,
    pub(super) memory: Memory,
    /// The number of operations whose ends it knows, or does not wait for.
    pub(super) done: usize,
    pub(super) called: usize,
    /// Its program, if that starts several operations at once.
    pub(super) program: Option<Program>,
    /// Calls below this one have been refused once, or will not be.
    pub(super) tried: usize,
    /// The state to resume after a recovery.
    pub(super) resumes: Phase,
    pub(super) recovery: Option<Recovery>,
    /// The controller's reply.
    pub(super) answer: Option<(u32, Option<Box<Membership>>)>,
    pub(super) found: Option<Box<Membership>>,
    /// The view whose reply is too late.
    pub(super) given_up: Option<u32>,
    /// Its part in a move to an offered tree.
    pub(super) moving: Option<Moving>,
    pub(super) peers: PeerState,
}

impl Member {
    /// Return whether its operation runs in the tree, or did when the tree was lost.
    pub(super) fn resumes_in_tree(&self) -> bool {
        let is_in_tree = |phase: &Phase| *phase == Phase::InTree;
        is_in_tree(&self.phase) || self.recovery.is_some() && is_in_tree(&self.resumes)
    }

    /// Return whether all ranks have voted on the tree that it moves to.
    pub(super) fn has_all_votes(&self, world: usize) -> bool {
        let votes = self.moving.as_ref().and_then(|moving| self.peers.votes.get(&moving.call));
        self.recovery.is_none() && votes.is_some_and(|votes| votes.len() == world)
    }

    /// Return whether it waits for the tree to move to: it takes part in a view change only afterwards.
    pub(super) const fn is_finding(&self) -> bool {
        self.recovery.is_none() && matches!(self.phase, Phase::Replanning(_))
    }

    /// Return whether it is one of its job's ranks now.
    pub(super) const fn is_there(&self) -> bool {
        !matches!(self.phase, Phase::Disconnected | Phase::Joining(_) | Phase::Ended(_))
    }
}

/// A rank's part in a move to an offered tree, from the agreed call on.
pub(super) struct Moving {
    pub(super) call: u64,
    pub(super) vote: MigrationVote,
}

/// What a rank tells the next controller, and how far it has come with it.
#[derive(Default)]
pub(super) struct Takeover {
    pub(super) secret: Option<JobSecret>,
    pub(super) expression: Vec<Vec<Child>>,
    /// The latest view that it knows of.
    pub(super) view: u32,
    /// The controller has not replied yet, so only `Resume` and `Leave` are sent.
    pub(super) is_pending: bool,
    /// The incarnation of the controller that it asked last.
    pub(super) asked: u64,
    /// How often its place was still taken.
    pub(super) taken: u32,
    /// A controller has refused it: it continues without one.
    pub(super) is_refused: bool,
}

/// What a rank knows of the others.
#[derive(Default)]
pub(super) struct PeerState {
    /// Messages about view changes that it has not come to, or has not handled yet: the change and the sender.
    pub(super) views: Vec<(u32, usize, Box<ViewMessage>)>,
    /// Votes on trees to migrate to, by call.
    pub(super) votes: BTreeMap<u64, BTreeMap<usize, u64>>,
    pub(super) entered: BTreeMap<usize, BTreeSet<usize>>,
    pub(super) finished: BTreeSet<usize>,
    pub(super) has_lost_rank: bool,
}

/// Pieces of a chunk sent in a recovery.
#[derive(Default)]
pub(super) struct Piece {
    pub(super) contributions: BTreeMap<usize, Vec<u8>>,
    pub(super) result: Option<Vec<u8>>,
}

/// A job.
pub(super) struct Job {
    pub(super) index: usize,
    pub(super) ranks: Vec<Member>,
    /// The ranks that may join it, if it is a stripe.
    pub(super) released: BTreeSet<usize>,
    /// A rank of it was killed, or lost the controller.
    pub(super) is_disturbed: bool,
    pub(super) has_lost_controller: bool,
    /// The ranks that have come back to each controller.
    pub(super) came_back: BTreeMap<u64, BTreeSet<usize>>,
    /// Parameters of its oracle, once its ranks know the declared order.
    pub(super) options: Option<Options>,
    pub(super) results: BTreeMap<usize, Vec<Vec<u8>>>,
    /// By view change and attempt.
    pub(super) plans: BTreeMap<(u32, Attempt), Plan>,
    /// By view change.
    pub(super) outcomes: BTreeMap<u32, Outcome>,
    /// By view change, attempt and sequence number.
    pub(super) pieces: BTreeMap<(u32, Attempt, u64), Piece>,
    /// Number of ranks that have called each operation.
    pub(super) calls: BTreeMap<usize, usize>,
}

impl Job {
    pub(super) fn new(index: usize, plan: &JobPlan, planted: Planted) -> Self {
        let member = || Member {
            phase: Phase::Disconnected,
            conn: None,
            blocked_until: Instant::ZERO,
            asks: false,
            queue: None,
            view: 0,
            takeover: Takeover::default(),
            asked_view: 0,
            epoch: 0,
            changes: 0,
            trees: 0,
            calls: planted.calls(Calls::new()),
            paths: CallPaths::default(),
            endpoint: None,
            has_tree: false,
            memory: Memory { first: 0, posted: Vec::new(), ops: Vec::new() },
            done: 0,
            called: 0,
            program: None,
            tried: 0,
            resumes: Phase::Disconnected,
            recovery: None,
            answer: None,
            found: None,
            given_up: None,
            moving: None,
            peers: PeerState::default(),
        };
        Self {
            index,
            ranks: (0..plan.world).map(|_| member()).collect(),
            released: BTreeSet::new(),
            is_disturbed: false,
            has_lost_controller: false,
            came_back: BTreeMap::new(),
            options: None,
            results: BTreeMap::new(),
            plans: BTreeMap::new(),
            outcomes: BTreeMap::new(),
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

impl World<'_, '_> {
    pub(super) fn member(&mut self, at: (usize, usize)) -> &mut Member {
        &mut self.jobs[at.0].ranks[at.1]
    }

    /// All ranks of the job have joined: start.
    pub(super) fn begin(&mut self, at: (usize, usize), membership: Box<Membership>) -> Result<(), Violation> {
        let (tenancy, now) = (self.plan, self.now);
        if membership.tree.is_err() && self.leaves_stripe(at)? {
            return Ok(());
        }
        self.check_stripe(at, &membership)?;
        self.join_stripes(at, &membership)?;
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
        let ops = ops.map(|op| OpMemory::before(known, 0, 0, at.1, op)).collect();
        let memory = Memory { first: 0, posted: Vec::new(), ops };
        let member = &mut job.ranks[at.1];
        member.memory = memory;
        member.program = tenancy.jobs[at.0].starts.map(|capacity| Program::new(tenancy, at, capacity));
        member.queue = membership.queue;
        member.takeover.secret = Some(membership.secret.clone());
        member.takeover.expression = membership.expression.clone();
        member.phase = Phase::Computing(now);
        self.install(at, Some(membership));
        self.catch_up(at)
    }

    /// Continue with the tree of a membership, or without one.
    pub(super) fn install(&mut self, at: (usize, usize), membership: Option<Box<Membership>>) {
        let (tenancy, world) = (self.plan, self.plan.jobs[at.0].world as u32);
        let member = self.member(at);
        let tree = membership.as_ref().and_then(|membership| membership.tree.as_ref().ok());
        member.has_tree = tree.is_some();
        member.program.iter_mut().for_each(Program::enter_tree);
        member.memory.first = member.done;
        member.memory.posted.clear();
        if let Some((tree, membership)) = tree.zip(membership.as_ref()) {
            let mut config = tree.endpoint((Rank(at.1 as u32), world), None, membership.table.version);
            config.salt = weight(&[tenancy.seed, tree.key]) as u32;
            member.endpoint = Some(tenancy.planted.endpoint(Endpoint::new(config)));
        }
        self.touched.insert(Actor::Rank(at.0, at.1));
    }

    /// Others may have begun to change the view before this rank got here.
    pub(super) fn catch_up(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if self.member(at).peers.has_lost_rank { self.end(at, End::RanksFailed) } else { self.take_view_messages(at) }
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
            JobMessage::View(change, message) => peers.views.push((change, from, message)),
            JobMessage::Given => {}
            JobMessage::Vote(call, group) => _ = peers.votes.entry(call).or_default().insert(from, group),
            JobMessage::Entered(op) => _ = peers.entered.entry(op).or_default().insert(from),
            JobMessage::Finished => _ = peers.finished.insert(from),
            // A rank that had finished has left.
            JobMessage::Gone if peers.finished.contains(&from) => {}
            JobMessage::Gone => peers.has_lost_rank = true,
        }
        if member.is_there() {
            self.catch_up(at)?;
        }
        self.advance(at)
    }
}
