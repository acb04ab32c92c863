//! The driver of a view change: what a communicator does when its tree or ranks are lost under operations. Together
//! with all surviving ranks it changes its view; [`crate::recovery`] decides how ranks agree, and what is done about
//! each chunk.
//!
//! Ranks that wait in a call, also for a host collective or a message, do it within that call; the others on a thread
//! ([`super::notices`]). A host collective in progress is suspended meanwhile, because other ranks may reach it only
//! after their earlier operations are recovered. So recovery shares neither connections nor sequence numbers with it.
//! The steps:
//! 1. Freeze: this rank takes in nothing more from the tree, and the device writes nothing more. Results that the
//!    device has published are copied.
//! 2. Reports: each rank sends the coordinator what it has, and gets the reports of all.
//! 3. Pieces: missing results are moved or recomputed, and written in whole chunks, over connections of this attempt
//!    only, so that leftovers of another attempt cannot be mistaken for them.
//! 4. Another tree, if the controller has one and all ranks are alive.
//! 5. Commit: all ranks have come this far, and either all have the new tree or none.
//!
//! No recovered operation returns before step 5. If a rank dies meanwhile, the others start again at step 2. Then the
//! communicator continues, or, if ranks are dead, ends with the same error on all survivors. In that case each chunk of
//! a buffer is either old or new, and the error says which.

use super::core::Core;
use super::error::{Error, OutputState};
use crate::recovery::GracePeriod;
use super::membership::{Inbox, PeerEvent, authority};
use super::notices::Notices;
use super::progress::{BorrowedBuffers, Deadline, InFlight};
use super::recover::NewTree;
use super::tree::Tree;
use crate::exec::{ExecError, Interrupt, JobToken};
use crate::recovery::{
    self, Ballot, ChunkInventory, Dead, Decision, End, Event, Landed, Message, Outcome, RankReport, Unrecoverable, View,
};
use crate::transport::packets::OpId;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::time;

/// How often the execution of a plan checks whether it is still wanted.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// This rank's pending operations: those in the tree, and its position among the calls.
pub(super) struct PendingOps<'t, 'c, 'b> {
    pub(super) tree: Option<&'t Tree>,
    pub(super) buffers: &'t mut InFlight<'c, 'b>,
    pub(super) landed: &'t mut Landed,
    /// The call numbers of operations in the tree.
    calls: BTreeMap<OpId, u64>,
    open: u64,
}

/// A committed view change.
struct AgreedChange {
    outcome: Outcome<Decision>,
    /// The tree to continue with.
    new_tree: Option<NewTree>,
    /// Which tree was lost, counted alike on all ranks.
    trees: u32,
}

/// A view change in progress.
struct ViewChange {
    view: View<RankReport, Decision>,
    clock: Clock,
    inbox: Arc<Inbox>,
    /// The listener for the connections of the ballot that was promised last.
    bound: Option<(Ballot, TcpListener, SocketAddr)>,
    /// The tree that was found when the last plan was executed here.
    new_tree: Option<NewTree>,
    /// The tree that the ranks of the last plan have lost.
    trees: u32,
    /// What they have agreed on about an offer, by its view.
    settled: Option<(u32, Option<u64>)>,
}

/// A clock that starts with the view change.
struct Clock(Instant);

impl Clock {
    fn at(&self, at: Instant) -> time::Instant {
        time::Instant::ZERO + at.saturating_duration_since(self.0)
    }

    fn now(&self) -> time::Instant {
        self.at(Instant::now())
    }
}

impl Core {
    /// Return whether a view change may recover from an error, or make it the same on all ranks.
    pub(super) fn is_recoverable(&self, error: &Error) -> bool {
        let is_loss = self.tree.is_some() && error.is_loss_of_tree() || matches!(error, Error::RankLost { .. });
        self.channel.is_some() && self.ended.is_none() && is_loss
    }

    /// Return why the view must change, as reported by the controller.
    pub(super) fn loss_error(&self) -> Error {
        let dead = || self.lost_rank().map_or(Error::PathLost, |rank| Error::RankLost { rank });
        self.notices.job_error().unwrap_or_else(dead)
    }

    /// Return whether the view must change. The loss of ranks that were excluded before is no reason.
    pub(super) fn needs_view_change(&self) -> bool {
        let excluded = self.excluded_ranks();
        let were_excluded =
            !excluded.is_empty() && self.notices.lost_ranks().into_iter().all(|rank| excluded.contains(rank));
        self.notices.needs_view_change(self.epoch) && (!were_excluded || self.notices.job_error().is_some())
    }

    /// If the view must change, count a poll of everything that other ranks have sent. Breaks when the grace period is
    /// over; otherwise returns how long until the next poll counts.
    pub(super) fn check_grace_period(&mut self) -> ControlFlow<(), Option<Duration>> {
        if !self.needs_view_change() {
            return ControlFlow::Continue(None);
        }
        self.grace.poll(Instant::now()).map_or(ControlFlow::Break(()), |wait| ControlFlow::Continue(Some(wait)))
    }

    /// Return the error that ends this communicator on all ranks, if it has arrived. The rank that reported it may be
    /// gone.
    fn group_error(&mut self) -> Option<Error> {
        self.pump(None);
        self.tree_error().filter(Error::is_group_error).or_else(|| self.notices.job_error())
    }

    /// Recover from the loss of the tree or of ranks, together with all surviving ranks. Afterwards, operations of the
    /// lost tree with lower numbers than the returned one are complete, and later started ones are launched again. The
    /// blocking call whose buffers are `borrowed` starts its own operation again.
    ///
    /// # Errors
    /// The error that the communicator ends with: `cause` if recovery is not possible. Operations below
    /// `completed_below` are complete all the same.
    pub(super) fn change_view(
        &mut self,
        borrowed: Option<BorrowedBuffers<'_, '_>>,
        cause: &Error,
        deadline: Deadline,
    ) -> Result<OpId, Error> {
        // Where ranks were excluded, recovery would complete results over different members.
        if self.channel.is_none() || self.ended.is_some() || !self.excluded_ranks().is_empty() {
            return Err(cause.clone());
        }
        let (began, sent_before) = (Instant::now(), self.recovery_bytes);
        let (job, rank, view) = (self.config.job.clone(), self.config.rank, self.view);
        tracing::warn!(job, rank, view, %cause, "changing the view");
        let mut tree = self.tree.take();
        if tree.is_some() {
            if let Some(session) = self.session.as_ref().filter(|_| cause.is_loss_of_tree()) {
                session.suspect(self.job_view());
            }
            self.selection.tree = Err(format!("the tree was lost ({cause})"));
            self.clear_selection_cache();
        }
        let (calls, open) = self.pending_calls(borrowed.as_ref().map(|borrowed| borrowed.op));
        let (mut owned, mut landed) = (std::mem::take(&mut self.owned), Landed::default());
        let mut buffers = InFlight { owned: &mut owned, borrowed };
        tree.iter_mut().for_each(|tree| tree.salvage(&mut buffers));
        let mut pending = PendingOps { tree: tree.as_ref(), buffers: &mut buffers, landed: &mut landed, calls, open };
        let settled = self.agree_on_view(&mut pending, deadline);
        self.channel.iter().for_each(|channel| channel.inbox().watch(Vec::new(), self.notices.has_controller()));
        (self.owned, self.landed) = (owned, landed);
        if let Some(stats) = tree.as_ref().map(Tree::stats) {
            self.past_bytes += stats.bytes_out;
            self.past_retransmits += stats.retransmits;
        }
        let first_above = |cut: u64| {
            let ops = tree.as_ref().map(|tree| tree.recovery_source().ops());
            ops.map_or(OpId(0), |ops| ops.in_flight().find(|op| op.end() > cut).map_or(ops.next_id(), |op| op.id))
        };
        let mut is_behind = false;
        let (cut, result) = match settled {
            Ok(AgreedChange { outcome, new_tree, trees }) => {
                is_behind = self.view < trees;
                self.view = trees;
                (outcome.decision.cut, final_error(&outcome, cause, began.elapsed()).map_or(Ok(new_tree), Err))
            }
            // Results that the device had published are here, whatever happens to the others.
            Err(error) => (0, Err(error)),
        };
        // Everything of a tree that other ranks have already migrated from is complete here.
        let completed_below = if is_behind { OpId(u64::MAX) } else { first_above(cut) };
        let (took, repair_bytes) = (began.elapsed(), self.recovery_bytes - sent_before);
        let took_ms = took.as_millis() as u64;
        match result {
            Ok(new_tree) => {
                self.recoveries = (self.recoveries.0 + 1, self.recoveries.1 + took);
                self.install(new_tree);
                let on = self.tree.as_ref().map_or("host collectives", |_| "another tree");
                tracing::warn!(job, rank, view, repair_bytes, took_ms, on, "recovered");
                self.relaunch(completed_below);
                Ok(completed_below)
            }
            Err(error) => {
                // The call logs the error itself, which says what its buffer holds.
                tracing::warn!(
                    job,
                    rank,
                    view,
                    repair_bytes,
                    took_ms,
                    "recovery failed: the communicator cannot continue"
                );
                self.completed_below = self.completed_below.max(completed_below.0);
                self.tree = tree;
                Err(error.ending())
            }
        }
    }

    /// Change the view outside of any call, because other ranks request it.
    pub(super) fn change_view_if_requested(&mut self) {
        let is_tree_lost = self.tree.is_some() && self.notices.first_usable_view() > self.job_view();
        let is_wanted = is_tree_lost || self.needs_view_change();
        if !is_wanted || self.has_ended() || self.channel.is_none() || self.notices.is_cancelled() {
            return;
        }
        if let Some(error) = self.group_error() {
            return self.note_unreported_end(error);
        }
        let (limit, cause) = (self.config.deadline, if is_tree_lost { Error::PathLost } else { self.loss_error() });
        if let Err(error) = self.change_view(None, &cause, (Instant::now() + limit, limit)) {
            self.note_unreported_end(error);
        }
    }

    /// Record an error that ends the communicator outside of a call. The next call returns it.
    pub(super) fn note_unreported_end(&mut self, error: Error) {
        self.note_end(&error.with_output(OutputState::Elements(Vec::new())));
        self.is_end_unreported = true;
    }

    /// Return the error that all ranks get for the loss of a rank that a host collective noticed.
    pub(super) fn agreed_loss_error(&mut self, error: Error, deadline: Deadline) -> Error {
        let was_interrupted = matches!(error, Error::Schedule(ExecError::Interrupted { .. }));
        let is_loss = was_interrupted && self.needs_view_change() && !self.notices.is_cancelled();
        if self.is_recoverable(&error) || is_loss && self.channel.is_some() && self.ended.is_none() {
            if let Some(error) = self.group_error() {
                return error;
            }
            return self.change_view(None, &error, deadline).err().unwrap_or(error);
        }
        error
    }

    /// Return which elements of an operation's output hold results.
    pub(super) fn output_state(&self, op: OpId) -> OutputState {
        let Some(source) = self.tree.as_ref().map(Tree::recovery_source) else { return OutputState::Unspecified };
        let pending = self.landed.over(source);
        if recovery::is_unknown(&pending, op) {
            OutputState::Unspecified
        } else {
            OutputState::Elements(recovery::completed_elements(&pending, op))
        }
    }

    /// Return whether a device kept writing while memory was taken from it, so that the contents of a caller's buffer
    /// are unknown.
    pub(super) fn is_output_unknown(&self) -> bool {
        let Some(source) = self.tree.as_ref().map(Tree::recovery_source) else { return false };
        let pending = self.landed.over(source);
        source.ops().in_flight().any(|op| recovery::is_unknown(&pending, op.id))
    }

    /// Return the call numbers of operations in the tree, and the first incomplete call that is not there.
    fn pending_calls(&self, borrowed: Option<OpId>) -> (BTreeMap<OpId, u64>, u64) {
        let unfinished = || self.started.values().filter(|started| started.finished.is_none());
        let in_tree = |started: &super::started::Started| started.tree_op.filter(|op| self.owned.contains_key(op));
        let mut calls: BTreeMap<OpId, u64> =
            unfinished().filter_map(|started| Some((in_tree(started)?, started.call))).collect();
        calls.extend(borrowed.zip(self.calling));
        let pending = self.calling.filter(|_| borrowed.is_none());
        let elsewhere = unfinished().filter(|started| in_tree(started).is_none()).map(|started| started.call);
        let open = elsewhere.chain(pending).chain(self.scheduling).chain([self.notices.migration.begun()]).min();
        (calls, open.unwrap_or(0))
    }

    /// Agree with all surviving ranks on a plan, and execute it.
    fn agree_on_view(
        &mut self,
        pending: &mut PendingOps<'_, '_, '_>,
        deadline: Deadline,
    ) -> Result<AgreedChange, Error> {
        let Some(inbox) = self.channel.as_ref().map(|channel| Arc::clone(channel.inbox())) else {
            return Err(self.loss_error());
        };
        let (clock, own) = (Clock(Instant::now()), (Rank(self.config.rank), self.config.world));
        let view = View::new(own, Dead::new(), self.notices.has_controller(), clock.at(deadline.0));
        let mut change =
            ViewChange { view, clock, inbox, bound: None, new_tree: None, trees: self.view, settled: None };
        self.report_deaths(&mut change.view);
        if !change.inbox.has_event() {
            change.view.begin();
        }
        change.view.handle_timeout(change.clock.now());
        loop {
            self.transmit_all(&mut change.view);
            if let Some(event) = change.view.poll_event() {
                match self.on_event(event, &mut change, pending, deadline) {
                    Ok(None) => continue,
                    Ok(Some(settled)) => return Ok(settled),
                    Err(error) => {
                        change.view.give_up();
                        self.transmit_all(&mut change.view);
                        return Err(error);
                    }
                }
            }
            if self.notices.is_cancelled() {
                change.view.give_up();
                self.transmit_all(&mut change.view);
                return Err(Error::Cancelled);
            }
            if let Some(error) = self.notices.job_error() {
                change.view.give_up();
                self.transmit_all(&mut change.view);
                return Err(error);
            }
            if self.report_deaths(&mut change.view) {
                continue;
            }
            let wait = change.view.poll_timeout() - change.clock.now();
            match change.inbox.next(wait) {
                Some(PeerEvent::Message(from, message)) => change.view.handle(from, *message, change.clock.now()),
                Some(PeerEvent::Gone(rank)) => change.view.rank_died(rank, authority(self.notices.has_controller())),
                Some(PeerEvent::Silent(rank)) if !self.notices.has_controller() => {
                    change.view.rank_died(rank, authority(false));
                }
                Some(PeerEvent::Silent(_)) | None => {}
            }
            change.view.handle_timeout(change.clock.now());
        }
    }

    /// Handle an event of the view change. Returns the committed change, if there is one.
    fn on_event(
        &mut self,
        event: Event<RankReport, Decision>,
        change: &mut ViewChange,
        pending: &mut PendingOps<'_, '_, '_>,
        deadline: Deadline,
    ) -> Result<Option<AgreedChange>, Error> {
        match event {
            Event::Promise { ballot } => {
                let bound = match change.bound.take_if(|(of, ..)| *of == ballot) {
                    Some(bound) => bound,
                    None => self.bind(ballot)?,
                };
                let address = change.bound.insert(bound).2;
                let offered = self.notices.migration.offered();
                change.view.promise(ballot, RankReport { offered, ..report(pending, address, self.view) });
                Ok(None)
            }
            Event::Run { ballot, reports } => {
                change.new_tree = None;
                let (trees, reports) = recovery::in_latest_tree(&reports);
                change.trees = trees;
                let own = reports.get(&Rank(self.config.rank)).and_then(|report| report.offered);
                let all = reports.values().filter_map(|report| report.offered);
                change.settled = own.and_then(|own| Some((own.view, recovery::agreed_migration(own, all)?)));
                let listener = change.bound.take().map(|(_, listener, _)| listener);
                let attempt = (ballot, &reports, listener);
                match self.run_plan(pending, attempt, (change.view.dead(), &change.inbox), deadline) {
                    Ok((decision, new_tree)) => {
                        let vote = new_tree.as_ref().map_or(0, |new_tree: &NewTree| new_tree.group);
                        change.new_tree = new_tree;
                        change.view.done(ballot, decision, vote);
                    }
                    Err(error) => {
                        let (job, rank) = (&self.config.job, self.config.rank);
                        tracing::info!(job, rank, %error, "a recovery attempt failed");
                        change.view.failed(ballot, change.clock.now());
                    }
                }
                Ok(None)
            }
            Event::Committed(outcome) => {
                self.transmit_all(&mut change.view);
                let (commit, dead) = (outcome.clone(), change.view.dead().clone());
                self.epoch += 1;
                self.grace = GracePeriod::default();
                if let Some(channel) = &self.channel {
                    channel.install_view(dead.clone(), Message::Commit { outcome: commit, dead });
                }
                let offered = change.settled.and_then(|(view, call)| self.notices.migration.update(|migration, begun| migration.settle(view, call, begun)));
                self.reply_to_offer(offered);
                let new_tree = change.new_tree.take().filter(|new_tree| new_tree.group == outcome.vote);
                Ok(Some(AgreedChange { outcome, new_tree, trees: change.trees }))
            }
            Event::Ended(end) => Err(self.end_error(end, change.view.dead(), deadline.1)),
        }
    }

    /// Listen for the connections of an attempt.
    fn bind(&self, ballot: Ballot) -> Result<(Ballot, TcpListener, SocketAddr), Error> {
        let bound = super::join::listen(self.config.bind);
        let (listener, address) = bound.map_err(|error| Error::Argument(error.to_string()))?;
        Ok((ballot, listener, address))
    }

    /// Report the ranks that the controller says are dead; returns whether that is news.
    fn report_deaths(&self, view: &mut View<RankReport, Decision>) -> bool {
        let known = view.dead().len();
        for rank in self.notices.lost_ranks() {
            if view.dead().get(&rank) != Some(&authority(true)) {
                view.rank_died(rank, authority(true));
            }
        }
        if !self.notices.has_controller() && view.controller_lost() {
            return true;
        }
        view.dead().len() > known
    }

    /// Send the queued messages, and monitor the ranks that must reply.
    fn transmit_all(&self, view: &mut View<RankReport, Decision>) {
        let Some(channel) = &self.channel else { return };
        while let Some((to, message)) = view.poll_transmit() {
            channel.send_view_message(to, &message);
        }
        channel.inbox().watch(view.awaited(), self.notices.has_controller());
    }

    /// Convert the way in which this rank was left out of the change into an error.
    fn end_error(&self, end: End, dead: &Dead, waited: Duration) -> Error {
        let (desc, output, ranks) = (OpDesc::barrier(), OutputState::default(), self.config.world);
        match end {
            End::Partitioned => Error::Partitioned { reachable: ranks - dead.len() as u32, ranks, output },
            End::Deadline => Error::Deadline { desc, waited },
            End::Unknown => Error::OutcomeUnknown { desc, waited, output },
        }
    }

    /// Execute the plan that follows from all reports: move and compute what is missing, and find another tree.
    fn run_plan(
        &mut self,
        pending: &mut PendingOps<'_, '_, '_>,
        (ballot, reports, listener): (Ballot, &BTreeMap<Rank, RankReport>, Option<TcpListener>),
        (dead, inbox): (&Dead, &Inbox),
        deadline: Deadline,
    ) -> Result<(Decision, Option<NewTree>), Error> {
        let unsound =
            |rank| Error::Schedule(ExecError::Protocol { rank, what: "it sent an invalid chunk inventory".into() });
        let is_behind = reports.values().any(|report| report.trees > self.view);
        if let Some(ops) = pending.tree.filter(|_| !is_behind).map(|tree| tree.recovery_source().ops()) {
            let is_valid = |report: &RankReport| report.inventory.is_valid(self.config.world, |desc| ops.chunks(desc));
            let broken = reports.iter().find(|(_, report)| !is_valid(report));
            broken.map_or(Ok(()), |(&rank, _)| Err(unsound(rank)))?;
        }
        let (plan, decision) = recovery::decide(reports, self.config.world);
        if !plan.pieces.is_empty() {
            let listener = listener.ok_or_else(|| Error::Argument("a recovery attempt has no listener".into()))?;
            let notices = Arc::clone(&self.notices);
            let mut interrupt = PlanInterrupt::new(&notices, inbox, dead, Rank(self.config.rank));
            let mut attempt_connections = self.connect_survivors(ballot, reports, listener)?;
            let ran = plan.pieces.iter().try_for_each(|piece| {
                self.run_piece(pending, piece, &mut attempt_connections, deadline, &mut interrupt)
            });
            self.recovery_bytes += attempt_connections.sent_bytes();
            ran?;
        }
        let all_live = reports.len() == self.config.world as usize;
        let finds = all_live && pending.tree.is_some() && decision.failure.is_none();
        Ok((decision, if finds { self.find_tree(deadline) } else { None }))
    }

    /// Return the token that identifies an attempt on its connections.
    pub(super) fn token_of(&self, ballot: Ballot) -> JobToken {
        let parts = [self.epoch, ballot.attempt.into(), ballot.coordinator.0.into()];
        // SplitMix64's finalizer over each part in turn.
        JobToken(parts.into_iter().fold(self.token.0, |token, part| {
            let mixed = (token ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ mixed >> 31
        }))
    }
}

/// Return the error that the communicator ends with; `None` if it continues.
fn final_error(outcome: &Outcome<Decision>, cause: &Error, waited: Duration) -> Option<Error> {
    match outcome.decision.failure {
        Some(Unrecoverable::Mismatch { first, other }) => return Some(Error::mismatch(first, other)),
        Some(why @ Unrecoverable::ChunkLost { .. }) => {
            tracing::error!(%why, %cause, "recovery is not possible");
            // Some rank had the result, and has it no longer.
            return Some(Error::OutcomeUnknown { desc: OpDesc::barrier(), waited, output: OutputState::default() });
        }
        None => {}
    }
    let (ranks, operation) = (outcome.dead.clone(), outcome.decision.operation);
    (!ranks.is_empty()).then(|| Error::RanksFailed { ranks, operation, output: OutputState::default() })
}

fn report(pending: &PendingOps<'_, '_, '_>, address: SocketAddr, trees: u32) -> RankReport {
    let source = pending.tree.map(Tree::recovery_source);
    let inventory =
        source.map_or_else(|| ChunkInventory::new(0), |source| recovery::inventory(&pending.landed.over(source)));
    let in_flight = source.into_iter().flat_map(|source| source.ops().in_flight());
    let calls = in_flight.filter_map(|op| Some((op.end(), *pending.calls.get(&op.id)?))).collect();
    RankReport { inventory, calls, open: pending.open, address, trees, offered: None }
}

/// Interrupts the execution of a plan that another attempt replaces.
pub(super) struct PlanInterrupt<'c> {
    notices: &'c Notices,
    inbox: &'c Inbox,
    dead: &'c Dead,
    rank: Rank,
    checked: Instant,
}

impl<'c> PlanInterrupt<'c> {
    fn new(notices: &'c Notices, inbox: &'c Inbox, dead: &'c Dead, rank: Rank) -> Self {
        Self { notices, inbox, dead, rank, checked: Instant::now() }
    }
}

impl Interrupt for PlanInterrupt<'_> {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<(), ExecError> {
        self.checked = Instant::now();
        let has_died = self.notices.lost_ranks().iter().any(|rank| !self.dead.contains_key(rank));
        if has_died
            || self.notices.is_cancelled()
            || self.inbox.interrupts_plan(self.dead, self.notices.has_controller())
        {
            let reason = "replaced by another recovery attempt".into();
            return Err(ExecError::Interrupted { rank: self.rank, reason });
        }
        Ok(())
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.checked + CHECK_INTERVAL)
    }
}
