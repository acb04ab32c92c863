//! One attempt of a view change ([`super::ranks`]): moves and computes the plan's chunks among the survivors, and
//! requests another tree. Messages carry their attempt, like its connections, so that those of another attempt are
//! never confused with it.
//!
//! Oracles: all ranks execute the same plan; no chunk is computed that some rank has, or twice in an attempt, or twice
//! in a view where all ranks live; at most twice the message size is moved per rank.

use super::cluster::Cluster;
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::messages::Message;
use super::ranks::word_of;
use super::reduce::{reduce, tree};
use super::report::Violation;
use super::route::Route;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::harness::{Attempt, Chunk, Origin, Plan};
use sumac_hal::ids::Rank;
use sumac_hal::op::Collective;

/// A plan in progress.
pub(super) struct Trial {
    pub(super) attempt: Attempt,
    plan: Plan,
    missing: BTreeSet<u64>,
    /// Another tree was requested from the controller.
    wants_tree: bool,
}

#[derive(Default)]
pub(super) struct Pieces {
    contributions: BTreeMap<u64, BTreeMap<usize, Vec<u8>>>,
    results: BTreeMap<u64, Vec<u8>>,
}

/// A message between ranks in an attempt.
#[derive(Debug, Clone)]
pub(super) enum Piece {
    Contribution(u64, Vec<u8>),
    Result(u64, Vec<u8>),
}

/// Oracle state of one attempt.
pub(super) struct AttemptRecord {
    plan: Plan,
    computed: BTreeSet<u64>,
    bytes: u64,
}

impl Cluster<'_, '_> {
    /// All survivors have reported: execute the plan that follows, and send this rank's part.
    pub(super) fn run_plan(&mut self, at: (usize, usize), attempt: Attempt, plan: Plan) -> Result<(), Violation> {
        let (rank, group) = at;
        let view = self.members[rank][group].view;
        let lacks_tree = || (plan.len > plan.chunks.len() as u64).then(|| "a plan with chunks without a tree".into());
        if let Some(why) = plan.failure().or_else(lacks_tree) {
            return Err(Violation::Unrecoverable { group, rank, why });
        }
        match self.attempts.get(&(group, view, attempt)) {
            Some(record) if record.plan == plan => {}
            Some(_) => return Err(Violation::Disagreement { group, view }),
            None => {
                self.check_plan((group, view), &plan)?;
                let record = AttemptRecord { plan: plan.clone(), computed: BTreeSet::new(), bytes: 0 };
                self.attempts.insert((group, view, attempt), record);
            }
        }
        self.reach_by(Point::Decided, rank);
        if self.deaths.is_dead(rank) {
            return Ok(());
        }
        let (live, chunks) = (plan.live.clone(), plan.chunks.clone());
        let missing = chunks.iter().map(|chunk| chunk.seq).collect();
        let trial = Trial { attempt, plan, missing, wants_tree: false };
        self.members[rank][group].membership.changing.as_mut().expect("in a change").trial = Some(trial);
        for chunk in &chunks {
            let member = &mut self.members[rank][group];
            let Some(changing) = &member.membership.changing else { break };
            let own = Rank(rank as u32);
            let bytes = chunk.give(&member.endpoint, &changing.landed, own, &mut member.memory);
            match chunk.origin {
                Origin::Held(holder) if holder == own => {
                    self.seen.note(Mark::ChunkHeld);
                    self.send_to_all(at, (attempt, &live), chunk, &bytes)?;
                }
                Origin::Held(_) => {}
                Origin::Recompute => {
                    let to = live[chunk.seq as usize % live.len()].0 as usize;
                    self.count_piece((group, view, attempt), to != rank, bytes.len())?;
                    let piece = Piece::Contribution(chunk.seq, bytes);
                    self.send_message(Message::Piece { from: rank, to, group, view, attempt, piece });
                }
            }
        }
        self.schedule(self.now + PIECES_LIMIT, Alarm::PiecesLimit { rank, group, view, attempt });
        self.advance_trial(at)
    }

    /// Check that no chunk is computed which a rank that takes part has.
    fn check_plan(&self, (group, view): (usize, u32), plan: &Plan) -> Result<(), Violation> {
        for chunk in plan.chunks.iter().filter(|chunk| chunk.origin == Origin::Recompute) {
            let holds = |rank: &Rank| {
                let member = &self.members[rank.0 as usize][group];
                let receives_all = chunk.desc.collective == Collective::AllReduce;
                receives_all && member.view == view && member.endpoint.holds(chunk.seq)
            };
            if plan.live.iter().any(holds) {
                return Err(Violation::Recomputed { group, view, seq: chunk.seq });
            }
        }
        Ok(())
    }

    fn send_to_all(
        &mut self,
        (rank, group): (usize, usize),
        (attempt, live): (Attempt, &[Rank]),
        chunk: &Chunk,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let view = self.members[rank][group].view;
        if bytes.len() != chunk.len_bytes {
            let why = format!("chunk {}: {} bytes where {} are due", chunk.seq, bytes.len(), chunk.len_bytes);
            return Err(Violation::Unrecoverable { group, rank, why });
        }
        for to in live.iter().map(|to| to.0 as usize) {
            self.count_piece((group, view, attempt), to != rank, bytes.len())?;
            let piece = Piece::Result(chunk.seq, bytes.to_vec());
            self.send_message(Message::Piece { from: rank, to, group, view, attempt, piece });
        }
        Ok(())
    }

    pub(super) fn take_piece(
        &mut self,
        (from, rank, group): (usize, usize, usize),
        (view, attempt): (u32, Attempt),
        piece: Piece,
    ) -> Result<(), Violation> {
        let member = &mut self.members[rank][group];
        if view < member.view || member.membership.end.is_some() {
            return Ok(());
        }
        let pieces = member.membership.pieces.entry((view, attempt)).or_default();
        match piece {
            Piece::Contribution(seq, bytes) => _ = pieces.contributions.entry(seq).or_default().insert(from, bytes),
            Piece::Result(seq, bytes) => _ = pieces.results.insert(seq, bytes),
        }
        self.advance_trial((rank, group))?;
        self.drive_change((rank, group))
    }

    /// Compute this rank's part, and store what has arrived.
    fn advance_trial(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let (rank, group) = at;
        let view = self.members[rank][group].view;
        let trial = self.members[rank][group].membership.changing.as_ref().and_then(|changing| changing.trial.as_ref());
        let Some((trial, false)) = trial.map(|trial| (trial, trial.wants_tree)) else { return Ok(()) };
        let (attempt, live, chunks) = (trial.attempt, trial.plan.live.clone(), trial.plan.chunks.clone());
        for chunk in &chunks {
            let pieces = self.members[rank][group].membership.pieces.entry((view, attempt)).or_default();
            let given = pieces.contributions.get(&chunk.seq).filter(|given| given.len() == live.len());
            if given.is_some() {
                let given = pieces.contributions.remove(&chunk.seq).expect("seen").into_values().collect::<Vec<_>>();
                let result = self.compute_piece(at, attempt, chunk, &given)?;
                self.send_to_all(at, (attempt, &live), chunk, &result)?;
            }
            let member = &mut self.members[rank][group];
            let pieces = member.membership.pieces.get_mut(&(view, attempt));
            let Some(result) = pieces.and_then(|pieces| pieces.results.remove(&chunk.seq)) else { continue };
            let changing = member.membership.changing.as_mut().expect("in a change");
            chunk.land_once(&member.endpoint, &mut changing.landed, &result, &mut member.memory);
            changing.trial.as_mut().expect("at it").missing.remove(&chunk.seq);
            self.reach_by(Point::Landed, rank);
            if self.deaths.is_dead(rank) {
                return Ok(());
            }
        }
        let member = &mut self.members[rank][group];
        let trial = member.membership.changing.as_mut().and_then(|changing| changing.trial.as_mut());
        let Some(trial) = trial.filter(|trial| trial.missing.is_empty()) else { return Ok(()) };
        trial.wants_tree = true;
        if matches!(member.route, Route::Tree(_)) && trial.plan.finds_tree && self.has_controller(at) {
            self.ask_for_tree(at, attempt);
            return Ok(());
        }
        self.finish_trial(at, None)
    }

    fn compute_piece(
        &mut self,
        (rank, group): (usize, usize),
        attempt: Attempt,
        chunk: &Chunk,
        given: &[Vec<u8>],
    ) -> Result<Vec<u8>, Violation> {
        let (options, view, seq) = (self.options, self.members[rank][group].view, chunk.seq);
        let is_repeated = self.records((group, view, attempt)).any(|record| record.computed.contains(&seq));
        if given.len() < options.ranks || is_repeated {
            return Err(Violation::Recomputed { group, view, seq });
        }
        self.attempts.get_mut(&(group, view, attempt)).expect("it is planned").computed.insert(seq);
        self.seen.note(Mark::ChunkComputed);
        let tree = tree(self.shape(group), options.ranks, options.order(group));
        Ok(reduce(&tree, &chunk.desc, given))
    }

    /// The plan is executed, and the controller has found a tree, or there is none.
    pub(super) fn finish_trial(&mut self, at: (usize, usize), found: Option<usize>) -> Result<(), Violation> {
        let (rank, group) = at;
        let Some(changing) = &mut self.members[rank][group].membership.changing else { return Ok(()) };
        if self.deaths.is_dead(rank) {
            return Ok(());
        }
        let Some(trial) = changing.trial.take_if(|trial| trial.wants_tree) else { return Ok(()) };
        changing.found = found;
        changing.change.executed(trial.attempt, word_of(found));
        self.speak(at);
        self.reach_by(Point::Done, rank);
        self.drive_change(at)
    }

    /// The controller takes too long to find another tree.
    pub(super) fn replan_limit(&mut self, at: (usize, usize), view: u32, attempt: Attempt) -> Result<(), Violation> {
        let member = &self.members[at.0][at.1];
        let trial = member.membership.changing.as_ref().and_then(|changing| changing.trial.as_ref());
        let is_waiting = trial.is_some_and(|trial| trial.attempt == attempt && trial.wants_tree);
        if member.view != view || self.deaths.is_dead(at.0) || !is_waiting {
            return Ok(());
        }
        self.give_up_tree(at)
    }

    /// A piece was lost with its connection: this attempt fails here.
    pub(super) fn pieces_limit(&mut self, at: (usize, usize), view: u32, attempt: Attempt) -> Result<(), Violation> {
        let (rank, group) = at;
        let now = self.rank_time(rank);
        let member = &mut self.members[rank][group];
        let Some(changing) = member.membership.changing.as_mut().filter(|_| member.view == view) else { return Ok(()) };
        let waits = |trial: &mut Trial| trial.attempt == attempt && !trial.wants_tree;
        if self.deaths.is_dead(rank) || changing.trial.take_if(waits).is_none() {
            return Ok(());
        }
        self.seen.note(Mark::AttemptFailed);
        self.advance_change(at, |change| change.failed(attempt, now))
    }

    /// Check that at most twice the message size is moved per rank.
    fn count_piece(&mut self, of: (usize, u32, Attempt), is_sent: bool, bytes: usize) -> Result<(), Violation> {
        let sent = if is_sent { bytes as u64 } else { 0 };
        let record = self.attempts.get_mut(&of).expect("it is planned");
        record.bytes += sent;
        let message: u64 = record.plan.chunks.iter().map(|chunk| chunk.len_bytes as u64).sum();
        self.recovery_bytes += sent;
        let found = self.records(of).map(|record| record.bytes).sum();
        let limit = 2 * message * self.options.ranks as u64;
        if found > limit {
            return Err(Violation::Limit { what: "bytes that a recovery moves", found, limit });
        }
        Ok(())
    }

    /// Return the attempts whose work counts together: where all ranks live, those of a view; otherwise each by itself.
    fn records(&self, (group, view, attempt): (usize, u32, Attempt)) -> impl Iterator<Item = &AttemptRecord> {
        let counts = move |(of, in_view, other): &(usize, u32, Attempt)| {
            (*of, *in_view) == (group, view) && (!self.options.ranks_die() || *other == attempt)
        };
        self.attempts.iter().filter(move |(key, _)| counts(key)).map(|(_, record)| record)
    }
}

/// Limit for the arrival of pieces.
const PIECES_LIMIT: Duration = Duration::from_secs(1);
