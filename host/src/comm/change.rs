//! What a communicator does when its tree is lost under operations, or ranks are: it changes its view, together with all
//! ranks that live ([`crate::recovery`] says who agrees how, and what is done about which chunk).
//!
//! It is done by those that wait for an operation within their call, be it one that runs by a schedule or a message, and
//! by the others on a thread ([`super::lost`]). A schedule that is under way rests meanwhile, as other ranks may come to
//! it only when their earlier operations are repaired; so it shares neither connections nor numbers with this. In order:
//! 1. freeze: nothing is taken in from the tree any more, and the device no longer writes; what it had published is landed;
//! 2. accounts: everybody tells the coordinator what it has, and gets what all have;
//! 3. pieces: what is missing is moved or computed again, and landed, whole chunks at a time; over connections of this
//!    attempt alone, so that what is left of another can't be mistaken for it;
//! 4. another tree, if the controller has one, and all ranks are alive;
//! 5. commit: all have come so far, and all have the new tree or none.
//!
//! Until 5 no repaired operation returns. A rank that dies meanwhile has all others begin again at 2. Then the
//! communicator goes on, or, where ranks are dead, ends, at all that live with the same error; each chunk of a buffer is
//! wholly old or wholly new then, and the error says which.

use super::core::Core;
use super::error::{Error, Fresh};
use super::grace::Grace;
use super::lost::Lost;
use super::parley::{Inbox, Mail, authority};
use super::progress::{Deadline, InFlight, Lent};
use super::repair::Found;
use super::tree::Tree;
use crate::exec::{ExecError, Interrupt, JobToken};
use crate::recovery::{
    self, Account, Ballot, Dead, Decision, End, Event, Landed, Ledger, Message, Outcome, Unrepairable, View,
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

/// How often the pieces of a plan look whether they are still wanted.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What is left of this rank's operations: those of the tree, and where it is among its calls.
pub(super) struct Left<'t, 'c, 'b> {
    pub(super) tree: Option<&'t Tree>,
    pub(super) buffers: &'t mut InFlight<'c, 'b>,
    pub(super) landed: &'t mut Landed,
    /// The calls of operations of the tree.
    calls: BTreeMap<OpId, u64>,
    open: u64,
}

/// How a change went.
struct Settled {
    outcome: Outcome<Decision>,
    /// The tree to go on with.
    found: Option<Found>,
    /// Which tree it is the loss of, counted alike at all ranks.
    trees: u32,
}

/// A change on its way.
struct Talks {
    view: View<Account, Decision>,
    clock: Clock,
    inbox: Arc<Inbox>,
    /// Where connections are taken for the ballot that was promised last.
    bound: Option<(Ballot, TcpListener, SocketAddr)>,
    /// The tree that was found with the last plan that was done here.
    found: Option<Found>,
    /// Which tree the ranks of the last plan have lost.
    trees: u32,
    /// What they have found out about an offer, by its view.
    settled: Option<(u32, Option<u64>)>,
}

/// A clock that begins with the change.
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
    /// Tell whether an error is one that a change of the view may mend, or make the same at all ranks.
    pub(super) fn is_repairable(&self, error: &Error) -> bool {
        let is_loss = self.tree.is_some() && error.is_loss_of_tree() || matches!(error, Error::RankLost { .. });
        self.parley.is_some() && self.ended.is_none() && is_loss
    }

    /// Say why the view has to change, as others say so.
    pub(super) fn loss(&self) -> Error {
        let dead = || self.lost_rank().map_or(Error::PathLost, |rank| Error::RankLost { rank });
        self.lost.word().unwrap_or_else(dead)
    }

    /// Tell whether the view has to change; that a rank is gone which had left is no reason.
    pub(super) fn is_unsettled(&self) -> bool {
        let gone = self.gone();
        let had_left = !gone.is_empty() && self.lost.ranks().into_iter().all(|rank| gone.contains(rank));
        self.lost.is_unsettled(self.epoch) && (!had_left || self.lost.word().is_some())
    }

    /// Count a look at all that others have sent, if the view has to change; returns whether there were enough of them
    /// for that, and else how long until the next one counts.
    pub(super) fn look_in_grace(&mut self) -> ControlFlow<(), Option<Duration>> {
        if !self.is_unsettled() {
            return ControlFlow::Continue(None);
        }
        self.grace.look(Instant::now()).map_or(ControlFlow::Break(()), |wait| ControlFlow::Continue(Some(wait)))
    }

    /// Return what ends this communicator at all ranks, if it has come: who heard of it before may be gone since.
    fn word_of_others(&mut self) -> Option<Error> {
        self.pump(None);
        self.tree_error().filter(Error::is_word_of_tree).or_else(|| self.lost.word())
    }

    /// Make good what the loss of the tree, or of ranks, has left, with all other ranks. Afterwards operations of the
    /// lost tree with lower numbers than what is returned are complete, and started ones behind are on their new way; the
    /// buffers of the blocking call, `lent`, are not: it is for its caller to begin again.
    ///
    /// # Errors
    /// What the communicator ends with: `cause`, if nothing can be done about it. Operations below `completed_below` are
    /// complete all the same.
    pub(super) fn change_view(
        &mut self,
        lent: Option<Lent<'_, '_>>,
        cause: &Error,
        deadline: Deadline,
    ) -> Result<OpId, Error> {
        // Where ranks have left, results are over others than a change would complete them with.
        if self.parley.is_none() || self.ended.is_some() || !self.gone().is_empty() {
            return Err(cause.clone());
        }
        let (began, sent_before) = (Instant::now(), self.repaired_bytes);
        let (job, rank, view) = (self.config.job.clone(), self.config.rank, self.view);
        tracing::warn!(job, rank, view, %cause, "the view changes");
        let mut tree = self.tree.take();
        if tree.is_some() {
            if let Some(session) = self.session.as_ref().filter(|_| cause.is_loss_of_tree()) {
                session.suspect(self.job_view());
            }
            self.situation.tree = Err(format!("its tree was lost ({cause})"));
            self.forget_choices();
        }
        let (calls, open) = self.calls_left(lent.as_ref().map(|lent| lent.op));
        let (mut owned, mut landed) = (std::mem::take(&mut self.owned), Landed::default());
        let mut buffers = InFlight { owned: &mut owned, lent };
        tree.iter_mut().for_each(|tree| tree.salvage(&mut buffers));
        let mut left = Left { tree: tree.as_ref(), buffers: &mut buffers, landed: &mut landed, calls, open };
        let settled = self.settle_view(&mut left, deadline);
        self.parley.iter().for_each(|parley| parley.inbox().watch(Vec::new(), self.lost.has_controller()));
        (self.owned, self.landed) = (owned, landed);
        if let Some(stats) = tree.as_ref().map(Tree::stats) {
            self.past_bytes += stats.bytes_out;
            self.past_retransmits += stats.retransmits;
        }
        let first_above = |cut: u64| {
            let ops = tree.as_ref().map(|tree| tree.remains().ops());
            ops.map_or(OpId(0), |ops| ops.in_flight().find(|op| op.end() > cut).map_or(ops.next_id(), |op| op.id))
        };
        let mut is_behind = false;
        let (cut, result) = match settled {
            Ok(Settled { outcome, found, trees }) => {
                is_behind = self.view < trees;
                self.view = trees;
                (outcome.decision.cut, ended(&outcome, cause, began.elapsed()).map_or(Ok(found), Err))
            }
            // What the device had answered is here, whatever becomes of the others.
            Err(error) => (0, Err(error)),
        };
        // Of a tree that others have moved from already, everything is complete here.
        let completed_below = if is_behind { OpId(u64::MAX) } else { first_above(cut) };
        let (took, repair_bytes) = (began.elapsed(), self.repaired_bytes - sent_before);
        let took_ms = took.as_millis() as u64;
        match result {
            Ok(found) => {
                self.repaired = (self.repaired.0 + 1, self.repaired.1 + took);
                self.install(found);
                let on = self.tree.as_ref().map_or("schedules", |_| "another tree");
                tracing::warn!(job, rank, view, repair_bytes, took_ms, on, "repaired");
                self.relaunch(completed_below);
                Ok(completed_below)
            }
            Err(error) => {
                // What ends it is logged with what the buffer holds, which the call knows.
                tracing::warn!(job, rank, view, repair_bytes, took_ms, "the communicator can't go on");
                self.completed_below = self.completed_below.max(completed_below.0);
                self.tree = tree;
                Err(error.ending())
            }
        }
    }

    /// Change the view because others ask for it, outside of any call.
    pub(super) fn serve_change(&mut self) {
        let is_tree_lost = self.tree.is_some() && self.lost.repair_wanted() > self.job_view();
        let is_wanted = is_tree_lost || self.is_unsettled();
        if !is_wanted || self.has_ended() || self.parley.is_none() || self.lost.is_cancelled() {
            return;
        }
        if let Some(word) = self.word_of_others() {
            return self.note_untold_end(word);
        }
        let (limit, cause) = (self.config.deadline, if is_tree_lost { Error::PathLost } else { self.loss() });
        if let Err(error) = self.change_view(None, &cause, (Instant::now() + limit, limit)) {
            self.note_untold_end(error);
        }
    }

    /// Remember an error that ends the communicator, and that no call returns: the next one does, which has not begun.
    pub(super) fn note_untold_end(&mut self, error: Error) {
        self.note_end(&error.with_fresh(Fresh::Elements(Vec::new())));
        self.is_untold = true;
    }

    /// Return what the loss of a rank that a schedule has met is to all ranks.
    pub(super) fn after_loss(&mut self, error: Error, deadline: Deadline) -> Error {
        let is_told = matches!(error, Error::Schedule(ExecError::Interrupted { .. }));
        let is_loss = is_told && self.is_unsettled() && !self.lost.is_cancelled();
        if self.is_repairable(&error) || is_loss && self.parley.is_some() && self.ended.is_none() {
            if let Some(word) = self.word_of_others() {
                return word;
            }
            return self.change_view(None, &error, deadline).err().unwrap_or(error);
        }
        error
    }

    /// Return which elements of an operation's output are results by now.
    pub(super) fn fresh(&self, op: OpId) -> Fresh {
        let Some(remains) = self.tree.as_ref().map(Tree::remains) else { return Fresh::Unspecified };
        let left = self.landed.over(remains);
        if recovery::is_unknown(&left, op) { Fresh::Unspecified } else { Fresh::Elements(recovery::fresh(&left, op)) }
    }

    /// Tell whether memory was taken from a device that went on, and nobody knows what is in the caller's.
    pub(super) fn is_in_doubt(&self) -> bool {
        let Some(remains) = self.tree.as_ref().map(Tree::remains) else { return false };
        let left = self.landed.over(remains);
        remains.ops().in_flight().any(|op| recovery::is_unknown(&left, op.id))
    }

    /// Return the calls of operations in the tree, and the first call that is not complete and not there.
    fn calls_left(&self, lent: Option<OpId>) -> (BTreeMap<OpId, u64>, u64) {
        let unfinished = || self.started.values().filter(|started| started.finished.is_none());
        let in_tree = |started: &super::started::Started| started.tree_op.filter(|op| self.owned.contains_key(op));
        let mut calls: BTreeMap<OpId, u64> =
            unfinished().filter_map(|started| Some((in_tree(started)?, started.call))).collect();
        calls.extend(lent.zip(self.calling));
        let pending = self.calling.filter(|_| lent.is_none());
        let elsewhere = unfinished().filter(|started| in_tree(started).is_none()).map(|started| started.call);
        let open = elsewhere.chain(pending).chain(self.scheduling).chain([self.lost.offers.begun()]).min();
        (calls, open.unwrap_or(0))
    }

    /// Agree with all ranks that live, and do what was agreed.
    fn settle_view(&mut self, left: &mut Left<'_, '_, '_>, deadline: Deadline) -> Result<Settled, Error> {
        let Some(inbox) = self.parley.as_ref().map(|parley| Arc::clone(parley.inbox())) else {
            return Err(self.loss());
        };
        let (clock, own) = (Clock(Instant::now()), (Rank(self.config.rank), self.config.world));
        let view = View::new(own, Dead::new(), self.lost.has_controller(), clock.at(deadline.0));
        let mut talks = Talks { view, clock, inbox, bound: None, found: None, trees: self.view, settled: None };
        self.hear_of_deaths(&mut talks.view);
        if !talks.inbox.has_mail() {
            talks.view.begin();
        }
        talks.view.handle_timeout(talks.clock.now());
        loop {
            self.speak(&mut talks.view);
            if let Some(event) = talks.view.poll_event() {
                match self.on_event(event, &mut talks, left, deadline) {
                    Ok(None) => continue,
                    Ok(Some(settled)) => return Ok(settled),
                    Err(error) => {
                        talks.view.give_up();
                        self.speak(&mut talks.view);
                        return Err(error);
                    }
                }
            }
            if self.lost.is_cancelled() {
                talks.view.give_up();
                self.speak(&mut talks.view);
                return Err(Error::Cancelled);
            }
            if let Some(word) = self.lost.word() {
                talks.view.give_up();
                self.speak(&mut talks.view);
                return Err(word);
            }
            if self.hear_of_deaths(&mut talks.view) {
                continue;
            }
            let wait = talks.view.poll_timeout() - talks.clock.now();
            match talks.inbox.next(wait) {
                Some(Mail::Said(from, said)) => talks.view.handle(from, *said, talks.clock.now()),
                Some(Mail::Gone(rank)) => talks.view.rank_died(rank, authority(self.lost.has_controller())),
                Some(Mail::Silent(rank)) if !self.lost.has_controller() => {
                    talks.view.rank_died(rank, authority(false));
                }
                Some(Mail::Silent(_)) | None => {}
            }
            talks.view.handle_timeout(talks.clock.now());
        }
    }

    /// Do what the view wants; returns how it has changed, if it has.
    fn on_event(
        &mut self,
        event: Event<Account, Decision>,
        talks: &mut Talks,
        left: &mut Left<'_, '_, '_>,
        deadline: Deadline,
    ) -> Result<Option<Settled>, Error> {
        match event {
            Event::Promise { ballot } => {
                let bound = match talks.bound.take_if(|(of, ..)| *of == ballot) {
                    Some(bound) => bound,
                    None => self.bind(ballot)?,
                };
                let address = talks.bound.insert(bound).2;
                let offered = self.lost.offers.offered();
                talks.view.promise(ballot, Account { offered, ..account(left, address, self.view) });
                Ok(None)
            }
            Event::Run { ballot, accounts } => {
                talks.found = None;
                let (trees, accounts) = recovery::of_last_tree(&accounts);
                talks.trees = trees;
                let own = accounts.get(&Rank(self.config.rank)).and_then(|account| account.offered);
                let all = accounts.values().filter_map(|account| account.offered);
                talks.settled = own.and_then(|own| Some((own.view, recovery::settled(own, all)?)));
                let listener = talks.bound.take().map(|(_, listener, _)| listener);
                let attempt = (ballot, &accounts, listener);
                match self.carry_out(left, attempt, (talks.view.dead(), &talks.inbox), deadline) {
                    Ok((decision, found)) => {
                        let word = found.as_ref().map_or(0, |found: &Found| found.group);
                        talks.found = found;
                        talks.view.done(ballot, decision, word);
                    }
                    Err(error) => {
                        let (job, rank) = (&self.config.job, self.config.rank);
                        tracing::info!(job, rank, %error, "an attempt to repair fails");
                        talks.view.failed(ballot, talks.clock.now());
                    }
                }
                Ok(None)
            }
            Event::Committed(outcome) => {
                self.speak(&mut talks.view);
                let (commit, dead) = (outcome.clone(), talks.view.dead().clone());
                self.epoch += 1;
                self.grace = Grace::default();
                if let Some(parley) = &self.parley {
                    parley.settle(dead.clone(), Message::Commit { outcome: commit, dead });
                }
                let offered = talks.settled.and_then(|(view, call)| self.lost.offers.settle(view, call));
                self.answer_offer(offered);
                let found = talks.found.take().filter(|found| found.group == outcome.word);
                Ok(Some(Settled { outcome, found, trees: talks.trees }))
            }
            Event::Ended(end) => Err(self.out(end, talks.view.dead(), deadline.1)),
        }
    }

    /// Listen for the connections of an attempt.
    fn bind(&self, ballot: Ballot) -> Result<(Ballot, TcpListener, SocketAddr), Error> {
        let bound = super::join::listen(self.config.bind);
        let (listener, address) = bound.map_err(|error| Error::Argument(error.to_string()))?;
        Ok((ballot, listener, address))
    }

    /// Tell the view who is dead by the controller's word; true if that is news.
    fn hear_of_deaths(&self, view: &mut View<Account, Decision>) -> bool {
        let known = view.dead().len();
        for rank in self.lost.ranks() {
            if view.dead().get(&rank) != Some(&authority(true)) {
                view.rank_died(rank, authority(true));
            }
        }
        if !self.lost.has_controller() && view.controller_lost() {
            return true;
        }
        view.dead().len() > known
    }

    /// Send what there is to say, and watch those that have to answer.
    fn speak(&self, view: &mut View<Account, Decision>) {
        let Some(parley) = &self.parley else { return };
        while let Some((to, said)) = view.poll_transmit() {
            parley.say(to, &said);
        }
        parley.inbox().watch(view.awaited(), self.lost.has_controller());
    }

    /// Say what it is to the caller that this rank is out.
    fn out(&self, end: End, dead: &Dead, waited: Duration) -> Error {
        let (desc, fresh, ranks) = (OpDesc::barrier(), Fresh::default(), self.config.world);
        match end {
            End::Partitioned => Error::Partitioned { left: ranks - dead.len() as u32, ranks, fresh },
            End::Deadline => Error::Deadline { desc, waited },
            End::Unknown => Error::OutcomeUnknown { desc, waited, fresh },
        }
    }

    /// Do what all accounts together come to: move and compute what is missing, and find another tree.
    fn carry_out(
        &mut self,
        left: &mut Left<'_, '_, '_>,
        (ballot, accounts, listener): (Ballot, &BTreeMap<Rank, Account>, Option<TcpListener>),
        (dead, inbox): (&Dead, &Inbox),
        deadline: Deadline,
    ) -> Result<(Decision, Option<Found>), Error> {
        let unsound = |rank| Error::Schedule(ExecError::Protocol { rank, what: "its ledger makes no sense".into() });
        let is_behind = accounts.values().any(|account| account.trees > self.view);
        if let Some(ops) = left.tree.filter(|_| !is_behind).map(|tree| tree.remains().ops()) {
            let is_sound = |account: &Account| account.ledger.is_sound(self.config.world, |desc| ops.chunks(desc));
            let broken = accounts.iter().find(|(_, account)| !is_sound(account));
            broken.map_or(Ok(()), |(&rank, _)| Err(unsound(rank)))?;
        }
        let (plan, decision) = recovery::decide(accounts, self.config.world);
        if !plan.pieces.is_empty() {
            let listener = listener.ok_or_else(|| Error::Argument("an attempt without a listener".into()))?;
            let lost = Arc::clone(&self.lost);
            let mut urgent = Urgent::new(&lost, inbox, dead, Rank(self.config.rank));
            let mut lines = self.lines_of(ballot, accounts, listener)?;
            let ran =
                plan.pieces.iter().try_for_each(|piece| self.run_piece(left, piece, &mut lines, deadline, &mut urgent));
            self.repaired_bytes += lines.sent_bytes();
            ran?;
        }
        let all_live = accounts.len() == self.config.world as usize;
        let finds = all_live && left.tree.is_some() && decision.failure.is_none();
        Ok((decision, if finds { self.find_tree(deadline) } else { None }))
    }

    /// The name of an attempt on its connections.
    pub(super) fn token_of(&self, ballot: Ballot) -> JobToken {
        let parts = [self.epoch, ballot.attempt.into(), ballot.coordinator.0.into()];
        // SplitMix64's finalizer, over one part after the other.
        JobToken(parts.into_iter().fold(self.token.0, |token, part| {
            let mixed = (token ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ mixed >> 31
        }))
    }
}

/// Return what a communicator ends with; `None`: it goes on.
fn ended(outcome: &Outcome<Decision>, cause: &Error, waited: Duration) -> Option<Error> {
    match outcome.decision.failure {
        Some(Unrepairable::Mismatch { first, other }) => return Some(Error::mismatch(first, other)),
        Some(why @ Unrepairable::Forgotten { .. }) => {
            tracing::error!(%why, %cause, "nothing can be repaired");
            // Somebody has had the result, and does not have it any more.
            return Some(Error::OutcomeUnknown { desc: OpDesc::barrier(), waited, fresh: Fresh::default() });
        }
        None => {}
    }
    let (ranks, operation) = (outcome.dead.clone(), outcome.decision.operation);
    (!ranks.is_empty()).then(|| Error::RanksFailed { ranks, operation, fresh: Fresh::default() })
}

fn account(left: &Left<'_, '_, '_>, address: SocketAddr, trees: u32) -> Account {
    let remains = left.tree.map(Tree::remains);
    let ledger = remains.map_or_else(|| Ledger::new(0), |remains| recovery::ledger(&left.landed.over(remains)));
    let in_flight = remains.into_iter().flat_map(|remains| remains.ops().in_flight());
    let calls = in_flight.filter_map(|op| Some((op.end(), *left.calls.get(&op.id)?))).collect();
    Account { ledger, calls, open: left.open, address, trees, offered: None }
}

/// Ends the pieces of a plan that is not wanted any more.
pub(super) struct Urgent<'c> {
    lost: &'c Lost,
    inbox: &'c Inbox,
    dead: &'c Dead,
    rank: Rank,
    checked: Instant,
}

impl<'c> Urgent<'c> {
    fn new(lost: &'c Lost, inbox: &'c Inbox, dead: &'c Dead, rank: Rank) -> Self {
        Self { lost, inbox, dead, rank, checked: Instant::now() }
    }
}

impl Interrupt for Urgent<'_> {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<(), ExecError> {
        self.checked = Instant::now();
        let has_died = self.lost.ranks().iter().any(|rank| !self.dead.contains_key(rank));
        if has_died || self.lost.is_cancelled() || self.inbox.is_pressing(self.dead, self.lost.has_controller()) {
            let reason = "another attempt takes the place of this one".into();
            return Err(ExecError::Interrupted { rank: self.rank, reason });
        }
        Ok(())
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.checked + LOOK_EVERY)
    }
}
