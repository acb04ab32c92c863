//! One rank's part in a view change, from the reports to what is done about each chunk: [`View`] agrees, and this
//! plans.
//!
//! The steps of an attempt:
//! 1. Freeze and report ([`Action::Report`]): this rank takes in nothing more from the tree, and the device writes
//!    nothing more. It gets the reports of all.
//! 2. Execute ([`Action::Execute`]): missing results are moved or recomputed, and written in whole chunks, over
//!    connections of this attempt only, so that leftovers of another attempt cannot be mistaken for them. Then another
//!    tree, if the controller has one and all ranks are alive.
//! 3. Commit ([`Action::Commit`]): all ranks have come this far, and either all have the new tree or none.
//!
//! No recovered operation returns before step 3. If a rank dies meanwhile, the others start again at step 1.

#[cfg(feature = "snapshot")]
mod snapshot;

use super::ballot::{Authority, Ballot, Dead, Message, Outcome};
use super::decide::{Decision, RankReport, agreed_migration, decide, in_latest_tree};
use super::plan::{Piece, Plan};
use super::view::{End, Event, View};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::time::Instant;

/// What the driver must do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Freeze, and report by [`Change::report`] what this rank has. Stop executing any earlier plan.
    Report(Ballot),
    /// Execute this plan, and report that by [`Change::executed`] or [`Change::failed`].
    Execute(Ballot, Attempt),
    /// The plan of an attempt would be unsound: this rank sent an invalid chunk inventory. The attempt has failed.
    Unsound(Rank),
    /// All surviving ranks have executed the plan.
    Commit(Box<Commit>),
    /// This rank is not part of the outcome.
    End(End),
}

/// The plan of an attempt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Attempt {
    /// The surviving ranks, and where they accept connections.
    pub(crate) live: BTreeMap<Rank, SocketAddr>,
    /// What is moved or recomputed, in order.
    pub(crate) pieces: Vec<Piece>,
    /// Whether to ask for another tree then.
    pub(crate) finds_tree: bool,
}

/// A committed view change.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Commit {
    pub(crate) outcome: Outcome<Decision>,
    /// The ranks that are dead in the new view.
    pub(crate) dead: Dead,
    /// Which tree was lost, counted alike on all ranks.
    pub(crate) trees: u32,
    /// What the ranks have agreed on about an offer, by its view.
    pub(crate) settled: Option<(u32, Option<u64>)>,
}

impl Commit {
    /// Return the reply to ranks that do not know yet.
    pub(crate) fn message(&self) -> Message<RankReport, Decision> {
        Message::Commit { outcome: self.outcome.clone(), dead: self.dead.clone() }
    }
}

/// Compute the number of chunks of an operation in this rank's tree.
pub(crate) type ChunksOf<'c> = &'c dyn Fn(&OpDesc) -> u64;

/// Decide from the reports of `ranks` ranks, which are about the same tree. `chunks_of` is of a rank that has that
/// tree.
///
/// # Errors
/// The rank whose report is invalid.
pub(crate) fn settle(
    reports: &BTreeMap<Rank, RankReport>,
    ranks: u32,
    chunks_of: Option<ChunksOf<'_>>,
) -> Result<(Plan, Decision), Rank> {
    let is_valid = |report: &RankReport| chunks_of.is_none_or(|chunks| report.inventory.is_valid(ranks, chunks));
    match reports.iter().find(|(_, report)| !is_valid(report)) {
        Some((&rank, _)) => Err(rank),
        None => Ok(decide(reports, ranks)),
    }
}

/// One rank's part in the change of one view.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Change {
    view: View<RankReport, Decision>,
    own: (Rank, u32),
    /// The number of trees that this rank has recovered or migrated from, and that the ranks of the last plan have.
    trees: u32,
    agreed_trees: u32,
    settled: Option<(u32, Option<u64>)>,
    /// What follows from the plan in execution.
    decision: Option<(Ballot, Decision)>,
}

impl Change {
    /// Take part as `rank` of `ranks`, which has recovered or migrated from this many trees, until `deadline`.
    pub(crate) fn new(own: (Rank, u32), trees: u32, has_controller: bool, deadline: Instant) -> Self {
        let view = View::new(own, Dead::new(), has_controller, deadline);
        Self { view, own, trees, agreed_trees: trees, settled: None, decision: None }
    }

    /// The view must change: tell the coordinator, or become it.
    pub(crate) fn begin(&mut self) {
        self.view.begin();
    }

    /// Ranks are dead for certain, and there may be no controller any more. Returns whether that is news.
    pub(crate) fn report_deaths(&mut self, lost: &[Rank], has_controller: bool) -> bool {
        let known = self.view.dead().len();
        for &rank in lost {
            if self.view.dead().get(&rank) != Some(&Authority::Confirmed) {
                self.view.rank_died(rank, Authority::Confirmed);
            }
        }
        if !has_controller && self.view.controller_lost() {
            return true;
        }
        self.view.dead().len() > known
    }

    /// A rank's process has ended, or it does not respond.
    pub(crate) fn rank_died(&mut self, rank: Rank, authority: Authority) {
        self.view.rank_died(rank, authority);
    }

    /// Process a message from another rank.
    pub(crate) fn handle(&mut self, from: Rank, message: Message<RankReport, Decision>, now: Instant) {
        self.view.handle(from, message, now);
    }

    /// Process timeouts.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        self.view.handle_timeout(now);
    }

    /// Return when [`Change::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self) -> Instant {
        self.view.poll_timeout()
    }

    /// Return the next message to send, and its receiver.
    pub(crate) fn poll_transmit(&mut self) -> Option<(Rank, Message<RankReport, Decision>)> {
        self.view.poll_transmit()
    }

    /// Return what the driver must do next. `chunks_of` is of the rank's lost tree.
    pub(crate) fn poll_action(&mut self, chunks_of: Option<ChunksOf<'_>>, now: Instant) -> Option<Action> {
        Some(match self.view.poll_event()? {
            Event::Promise { ballot } => Action::Report(ballot),
            Event::Run { ballot, reports } => self.plan(ballot, &reports, chunks_of, now),
            Event::Committed(outcome) => Action::Commit(Box::new(Commit {
                outcome,
                dead: self.view.dead().clone(),
                trees: self.agreed_trees,
                settled: self.settled,
            })),
            Event::Ended(end) => Action::End(end),
        })
    }

    fn plan(
        &mut self,
        ballot: Ballot,
        reports: &BTreeMap<Rank, RankReport>,
        chunks_of: Option<ChunksOf<'_>>,
        now: Instant,
    ) -> Action {
        let (trees, reports) = in_latest_tree(reports);
        self.agreed_trees = trees;
        let own = reports.get(&self.own.0).and_then(|report| report.offered);
        let all = reports.values().filter_map(|report| report.offered);
        self.settled = own.and_then(|own| Some((own.view, agreed_migration(own, all)?)));
        // A rank that is behind knows nothing of the latest tree.
        let known = chunks_of.filter(|_| trees <= self.trees);
        let (plan, decision) = match settle(&reports, self.own.1, known) {
            Ok(settled) => settled,
            Err(rank) => {
                self.view.failed(ballot, now);
                return Action::Unsound(rank);
            }
        };
        let all_live = reports.len() == self.own.1 as usize;
        let finds_tree = all_live && chunks_of.is_some() && decision.failure.is_none();
        self.decision = Some((ballot, decision));
        let live = reports.iter().map(|(&rank, report)| (rank, report.address)).collect();
        Action::Execute(ballot, Attempt { live, pieces: plan.pieces, finds_tree })
    }

    /// Report what this rank has, in reply to [`Action::Report`].
    pub(crate) fn report(&mut self, ballot: Ballot, report: RankReport) {
        self.view.promise(ballot, report);
    }

    /// A ballot's plan has been executed here. `vote` is a value that is committed if all ranks agree on it.
    pub(crate) fn executed(&mut self, ballot: Ballot, vote: u64) {
        if let Some((_, decision)) = self.decision.take_if(|(planned, _)| *planned == ballot) {
            self.view.done(ballot, decision, vote);
        }
    }

    /// A ballot's plan failed here.
    pub(crate) fn failed(&mut self, ballot: Ballot, now: Instant) {
        self.view.failed(ballot, now);
    }

    /// This rank gives up for a reason of its own.
    pub(crate) fn give_up(&mut self) {
        self.view.give_up();
    }

    /// Return the ranks that are known here to be dead.
    pub(crate) const fn dead(&self) -> &Dead {
        self.view.dead()
    }

    /// Return the ranks that this one waits for, whose silence matters.
    pub(crate) fn awaited(&self) -> Vec<Rank> {
        self.view.awaited()
    }
}
