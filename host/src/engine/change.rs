//! The driver of a view change: what a communicator does when its tree or ranks are lost under operations.
//! [`crate::recovery`] decides; this carries messages, moves results and continues.
//!
//! Ranks that wait in a call, also for a host collective or a message, do it within that call; the others on a thread
//! ([`super::notices`]). A host collective in progress is paused meanwhile, because other ranks may reach it only after
//! their earlier operations are recovered. So recovery shares neither connections nor sequence numbers with it.
//!
//! No recovered operation returns before the commit. Then the communicator continues, or, if ranks are dead, ends with
//! the same error on all survivors. In that case each chunk of a buffer is either old or new, and the error says which.

use super::core::Core;
use super::data_path::{Deadline, Stop};
use super::error::{Error, OutputState};
use super::in_flight::{BorrowedBuffers, InFlight};
use super::join::listen;
use super::membership::Inbox;
use super::new_tree::NewTree;
use super::operations::{AfterLoss, Started};
use super::owned::Owned;
use super::pieces::{PendingOps, Survivors};
use super::tree::Tree;
use crate::deadline::after;
use crate::exec::ExecError;
use crate::recovery::{
    self, Action, Attempt, Ballot, Change, ChunkInventory, Commit, Dead, Decision, End, Landed, Migration, Outcome,
    PeerEvent, RankReport, Unrecoverable, authority,
};
use crate::transport::packets::OpId;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;
use sumac_hal::time;

/// A view change in progress, and what this rank holds for it.
struct ChangeDriver {
    change: Change,
    /// When it began.
    began: Instant,
    inbox: Arc<Inbox>,
    /// The listener for the connections of the ballot that was promised last.
    bound: Option<(Ballot, TcpListener, SocketAddr)>,
    /// The connections over which the last plan was executed here.
    survivors: Option<Survivors>,
    /// The tree that was found when the last plan was executed here.
    new_tree: Option<NewTree>,
}

impl ChangeDriver {
    fn at(&self, at: Instant) -> time::Instant {
        time::Instant::ZERO + at.saturating_duration_since(self.began)
    }

    fn now(&self) -> time::Instant {
        self.at(Instant::now())
    }
}

impl Core {
    /// Go on after the data path has stopped: change the view if it is in question. `None` if it did.
    ///
    /// # Errors
    /// The error that fails the call.
    pub(super) fn resume<R>(&mut self, result: Result<R, Stop>, deadline: Deadline) -> Result<Option<R>, Error> {
        match result {
            Ok(result) => Ok(Some(result)),
            Err(Stop::ViewInQuestion(cause)) => self.change_view(None, &cause, deadline).map(|_| None),
            Err(Stop::Failed(error)) => Err(error),
        }
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
        if !self.data.may_recover() || !self.data.tree.excluded_ranks().is_empty() {
            return Err(cause.clone());
        }
        let (began, sent_before) = (Instant::now(), self.data.host.recovery_bytes);
        let (job, rank, view) = (self.data.config.job.clone(), self.data.config.rank, self.data.tree.view());
        crate::log::info!(job, rank, view, %cause, "changing the view");
        let selected_by = self.data.selection.context().clone();
        let mut tree = self.data.tree.take();
        if tree.is_some() {
            if let Some(session) = self.members.session.as_ref().filter(|_| cause.is_loss_of_tree()) {
                let is_path_narrow = tree.as_ref().is_some_and(Tree::is_path_narrow);
                session.suspect_because(self.data.watch.job_view(), is_path_narrow);
            }
            self.data.selection.without_tree(format!("the tree was lost ({cause})"));
        }
        let agreed = self.recover_operations(borrowed, &mut tree, deadline);
        let first_above = |cut: u64| {
            let ops = tree.as_ref().map(|tree| tree.recovery_source().ops());
            ops.map_or(OpId(0), |ops| ops.in_flight().find(|op| op.end() > cut).map_or(ops.next_id(), |op| op.id))
        };
        let mut is_behind = false;
        let (cut, result) = match agreed {
            Ok((commit, new_tree)) => {
                is_behind = self.data.tree.catch_up(commit.trees);
                self.data.selection.view_changed(commit.outcome.decision.begun, selected_by, is_behind);
                let error = final_error(&commit.outcome, cause, began.elapsed());
                (commit.outcome.decision.cut, error.map_or(Ok(new_tree), Err))
            }
            // Results that the device had published are here, whatever happens to the others.
            Err(error) => (0, Err(error)),
        };
        // Everything of a tree that other ranks have already migrated from is complete here.
        let completed_below = if is_behind { OpId(u64::MAX) } else { first_above(cut) };
        let (took, recovery_bytes) = (began.elapsed(), self.data.host.recovery_bytes - sent_before);
        let took_ms = took.as_millis() as u64;
        match result {
            Ok(new_tree) => {
                self.recoveries = (self.recoveries.0 + 1, self.recoveries.1 + took);
                self.install(new_tree);
                let (on, why) = match self.data.tree.is_there() {
                    true => ("another tree", None),
                    false => ("host collectives", self.data.selection.no_tree()),
                };
                // The fault's one line, which also explains the fallback that follows from it.
                crate::log::warn!(job, rank, view, %cause, recovery_bytes, took_ms, on, why, "recovered");
                self.data.selection.set_fallback_logged(!self.data.tree.is_there());
                self.relaunch(completed_below);
                Ok(completed_below)
            }
            Err(error) => {
                // The call logs the error itself, which says what its buffer holds.
                crate::log::info!(
                    job,
                    rank,
                    view,
                    recovery_bytes,
                    took_ms,
                    "recovery failed: the communicator cannot continue"
                );
                self.data.tree.keep_lost(tree, completed_below);
                Err(error.ending())
            }
        }
    }

    /// Complete the operations of a lost tree, as all ranks agree.
    fn recover_operations(
        &mut self,
        borrowed: Option<BorrowedBuffers<'_, '_>>,
        tree: &mut Option<Tree>,
        deadline: Deadline,
    ) -> Result<(Commit, Option<NewTree>), Error> {
        let begun = self.notices().migration.begun();
        let (calls, open) = self.data.operations.pending_calls(borrowed.as_ref().map(|borrowed| borrowed.op), begun);
        let (mut owned, mut landed) = (self.data.operations.take_owned(), Landed::default());
        let mut buffers = InFlight { owned: &mut owned, borrowed };
        tree.iter_mut().for_each(|tree| tree.salvage(&mut buffers));
        let (lost, landing) = (tree.as_ref(), &mut landed);
        let mut pending = PendingOps { tree: lost, buffers: &mut buffers, landed: landing, calls, open, begun };
        let agreed = self.agree_on_view(&mut pending, deadline);
        let has_controller = self.notices().has_controller();
        self.data.inbox.iter().for_each(|inbox| inbox.watch(Vec::new(), has_controller));
        self.data.operations.restore(owned);
        self.data.tree.recovered(tree.as_ref(), landed);
        agreed
    }

    /// Change the view outside of any call, because other ranks request it.
    pub(super) fn change_view_if_requested(&mut self) {
        let is_tree_lost = self.data.tree.is_there() && self.data.watch.is_tree_lost();
        let is_wanted = is_tree_lost || self.data.needs_view_change();
        if !is_wanted || !self.data.may_recover() || self.notices().is_cancelled() {
            return;
        }
        if let Some(error) = self.data.group_error() {
            return self.note_unreported_end(error);
        }
        let cause = if is_tree_lost { Error::PathLost } else { self.data.loss_error() };
        let limit = self.data.config.deadline;
        if let Err(error) = self.change_view(None, &cause, (after(Instant::now(), limit), limit)) {
            self.note_unreported_end(error);
        }
    }

    /// Return the error that all ranks get for the loss of a rank that a host collective noticed.
    pub(super) fn agreed_loss_error(&mut self, error: Error, deadline: Deadline) -> Error {
        let was_interrupted = matches!(error, Error::Schedule(ExecError::Interrupted { .. }));
        let is_loss = was_interrupted && self.data.needs_view_change() && !self.notices().is_cancelled();
        if self.data.is_recoverable(&error) || is_loss && self.data.may_recover() {
            if let Some(error) = self.data.group_error() {
                return error;
            }
            return self.change_view(None, &error, deadline).err().unwrap_or(error);
        }
        error
    }

    /// Agree with all surviving ranks on a plan, and execute it.
    fn agree_on_view(
        &mut self,
        pending: &mut PendingOps<'_, '_, '_>,
        deadline: Deadline,
    ) -> Result<(Commit, Option<NewTree>), Error> {
        let Some(inbox) = self.data.inbox.clone() else { return Err(self.data.loss_error()) };
        let own = (Rank(self.data.config.rank), self.data.config.world);
        let began = Instant::now();
        let until = time::Instant::ZERO + deadline.0.saturating_duration_since(began);
        let change = Change::new(own, self.data.tree.view(), self.notices().has_controller(), until);
        let mut driver = ChangeDriver { change, began, inbox, bound: None, survivors: None, new_tree: None };
        self.report_deaths(&mut driver.change);
        if !driver.inbox.has_event() {
            driver.change.begin();
        }
        driver.change.handle_timeout(driver.now());
        let agreed = self.drive_change(&mut driver, pending, deadline);
        if agreed.is_err() {
            driver.change.give_up();
            self.transmit_all(&mut driver);
        }
        agreed
    }

    fn drive_change(
        &mut self,
        driver: &mut ChangeDriver,
        pending: &mut PendingOps<'_, '_, '_>,
        deadline: Deadline,
    ) -> Result<(Commit, Option<NewTree>), Error> {
        let ops = pending.tree.map(|tree| tree.recovery_source().ops());
        let chunks_of = |desc: &OpDesc| ops.map_or(0, |ops| ops.chunks(desc));
        let chunks_of: Option<&dyn Fn(&OpDesc) -> u64> = if ops.is_some() { Some(&chunks_of) } else { None };
        loop {
            self.transmit_all(driver);
            if self.notices().is_cancelled() {
                return Err(Error::Cancelled);
            }
            // After the deaths: the controller reports them behind the abort that ended those ranks.
            if let Some(error) = self.notices().job_error() {
                return Err(error);
            }
            let now = driver.now();
            if let Some(action) = driver.change.poll_action(chunks_of, now) {
                match self.carry_out(action, driver, pending, deadline)? {
                    None => continue,
                    Some(agreed) => return Ok(agreed),
                }
            }
            if self.report_deaths(&mut driver.change) {
                continue;
            }
            let wait = driver.change.poll_timeout() - driver.now();
            let event = driver.inbox.next(wait);
            let (now, has_controller) = (driver.now(), self.notices().has_controller());
            match event {
                Some(PeerEvent::Message(from, message)) => driver.change.handle(from, *message, now),
                Some(PeerEvent::Gone(rank)) => driver.change.rank_died(rank, authority(has_controller)),
                Some(PeerEvent::Silent(rank)) if !has_controller => driver.change.rank_died(rank, authority(false)),
                Some(PeerEvent::Silent(_)) | None => {}
            }
            driver.change.handle_timeout(driver.now());
        }
    }

    /// Do what the view change asks for. Returns the committed change, if there is one.
    fn carry_out(
        &mut self,
        action: Action,
        driver: &mut ChangeDriver,
        pending: &mut PendingOps<'_, '_, '_>,
        deadline: Deadline,
    ) -> Result<Option<(Commit, Option<NewTree>)>, Error> {
        match action {
            Action::Report(ballot) => {
                let bound = match driver.bound.take_if(|(of, ..)| *of == ballot) {
                    Some(bound) => bound,
                    None => self.bind(ballot)?,
                };
                let address = driver.bound.insert(bound).2;
                driver.change.report(ballot, self.report(pending, address));
            }
            Action::Execute(ballot, attempt) => {
                driver.new_tree = None;
                match self.execute(pending, (ballot, &attempt), driver, deadline) {
                    Ok(()) => {
                        let vote = driver.new_tree.as_ref().map_or(0, |new_tree| new_tree.group);
                        driver.change.executed(ballot, vote);
                    }
                    Err(error) => {
                        self.log_failed_attempt(&error);
                        driver.change.failed(ballot, driver.now());
                    }
                }
            }
            Action::Unsound(rank) => {
                driver.new_tree = None;
                let what = "it sent an invalid chunk inventory".into();
                self.log_failed_attempt(&Error::Schedule(ExecError::Protocol { rank, what }));
            }
            Action::Commit(commit) => {
                self.transmit_all(driver);
                self.data.watch.view_changed();
                if let Some(channel) = &self.members.channel {
                    channel.install_view(commit.dead.clone(), commit.message());
                }
                let settle = |migration: &mut Migration, begun| migration.commit(commit.settled, begun);
                let (promise, is_in_doubt) = self.notices().migration.update(settle);
                self.reply_to_offer(promise);
                if is_in_doubt && commit.outcome.dead.is_empty() {
                    self.notices().view_change_requested(self.data.watch.epoch());
                }
                let new_tree = driver.new_tree.take().filter(|new_tree| new_tree.group == commit.outcome.vote);
                return Ok(Some((*commit, new_tree)));
            }
            Action::End(end) => return Err(self.end_error(end, driver.change.dead(), deadline.1)),
        }
        Ok(None)
    }

    fn log_failed_attempt(&self, error: &Error) {
        let (job, rank) = (&self.data.config.job, self.data.config.rank);
        crate::log::info!(job, rank, %error, "a recovery attempt failed");
    }

    /// Execute a plan: move and compute what is missing, and find another tree.
    fn execute(
        &mut self,
        pending: &mut PendingOps<'_, '_, '_>,
        (ballot, attempt): (Ballot, &Attempt),
        driver: &mut ChangeDriver,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let listener = driver.bound.take().map(|(_, listener, _)| listener);
        driver.survivors = None;
        let known = (driver.change.dead(), &*driver.inbox);
        driver.survivors = self.run_pieces(pending, (ballot, attempt, listener), known, deadline)?;
        driver.new_tree = if attempt.finds_tree { self.find_tree(deadline) } else { None };
        Ok(())
    }

    /// Listen for the connections of an attempt.
    fn bind(&self, ballot: Ballot) -> Result<(Ballot, TcpListener, SocketAddr), Error> {
        let bound = listen(&self.data.config);
        let (listener, address) = bound.map_err(|error| Error::Argument(error.to_string()))?;
        Ok((ballot, listener, address))
    }

    /// Report the ranks that the controller says are dead; returns whether that is news.
    fn report_deaths(&self, change: &mut Change) -> bool {
        change.report_deaths(&self.notices().lost_ranks(), self.notices().has_controller())
    }

    /// Send the queued messages, and monitor the ranks that must reply.
    fn transmit_all(&self, driver: &mut ChangeDriver) {
        let Some(channel) = &self.members.channel else { return };
        while let Some((to, message)) = driver.change.poll_transmit() {
            channel.send_view_message(to, message);
        }
        driver.inbox.watch(driver.change.awaited(), self.notices().has_controller());
    }

    /// Report what this rank has.
    fn report(&self, pending: &PendingOps<'_, '_, '_>, address: SocketAddr) -> RankReport {
        let source = pending.tree.map(Tree::recovery_source);
        let inventory =
            source.map_or_else(|| ChunkInventory::new(0), |source| recovery::inventory(&pending.landed.over(source)));
        let in_flight = source.into_iter().flat_map(|source| source.ops().in_flight());
        let calls = in_flight.filter_map(|op| Some((op.end(), *pending.calls.get(&op.id)?))).collect();
        let (trees, offered) = (self.data.tree.view(), self.notices().migration.offered());
        RankReport { inventory, calls, open: pending.open, begun: pending.begun, address, trees, offered }
    }

    /// Convert the way in which this rank was left out of the change into an error.
    fn end_error(&self, end: End, dead: &Dead, waited: Duration) -> Error {
        let (desc, output, ranks) = (OpDesc::barrier(), OutputState::default(), self.data.config.world);
        match end {
            End::Partitioned => Error::Partitioned { reachable: ranks - dead.len() as u32, ranks, output },
            End::Deadline => Error::Deadline { desc, waited },
            End::Unknown => Error::OutcomeUnknown { desc, waited, output },
        }
    }

    /// Finish or launch again the started operations of the lost tree: those below `completed_below` are complete, the
    /// others start again in the order of posting.
    pub(super) fn relaunch(&mut self, completed_below: OpId) {
        for handle in self.data.operations.handles() {
            let Some(mut started) = self.data.operations.take(handle) else { continue };
            match self.data.operations.leave_tree(&mut started, completed_below) {
                AfterLoss::Unaffected => {}
                AfterLoss::Complete => {
                    let outcome = self.data.outcome(&started.chosen, started.transfer, started.begun);
                    started.finished.get_or_insert(Ok(outcome));
                }
                AfterLoss::Pending(buffers) => self.launch_again(handle, &mut started, buffers),
            }
            self.data.operations.put_back(handle, started);
        }
        self.data.reclaim_detached();
    }

    fn launch_again(&mut self, handle: u64, started: &mut Started, buffers: Owned) {
        let chosen = self.data.choose_by((started.call, started.desc, started.algo)).map_err(Stop::from);
        let launched = chosen.and_then(|chosen| {
            started.chosen = chosen;
            self.data.launch(handle, started, buffers).map_err(|refused| refused.0)
        });
        let Err(Stop::ViewInQuestion(error) | Stop::Failed(error)) = launched else { return };
        if error.is_rejection() {
            // No rank has a path for it, and ranks that have not called it yet will be rejected, so it never counted.
            self.uncount_call(started.call);
        } else {
            self.note_unreported_end(error.clone());
        }
        started.finished = Some(Err(error));
    }
}

/// Return the error that the communicator ends with; `None` if it continues.
fn final_error(outcome: &Outcome<Decision>, cause: &Error, waited: Duration) -> Option<Error> {
    match outcome.decision.failure {
        Some(Unrecoverable::Mismatch { first, other }) => return Some(Error::mismatch(first, other)),
        Some(why @ Unrecoverable::ChunkLost { .. }) => {
            crate::log::info!(%why, %cause, "recovery is not possible");
            // Some rank had the result, and has it no longer.
            return Some(Error::OutcomeUnknown { desc: OpDesc::barrier(), waited, output: OutputState::default() });
        }
        None => {}
    }
    let (ranks, operation) = (outcome.dead.clone(), outcome.decision.operation);
    (!ranks.is_empty()).then(|| Error::RanksFailed { ranks, operation, output: OutputState::default() })
}
