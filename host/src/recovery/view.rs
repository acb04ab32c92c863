//! The view change (PROTOCOL 8): how ranks agree on which ranks are dead and what happens to their operations, while
//! further ranks may die.
//!
//! ```text
//!   a rank          coordinator: the lowest surviving rank
//!     | -- Call ------> |    the tree or a rank is lost
//!     | <-- Prepare --- |    to all survivors: freeze, and report what you have
//!     | --- Promise --> |
//!     | <-- Plan ------ |    all reports; each rank computes the same plan, and executes it
//!     | --- Done -----> |
//!     | <-- Commit ---- |
//! ```
//!
//! Invariants:
//! - a rank takes part in no ballot that is lower than one it has promised;
//! - a rank that is dead to another stays dead, and its messages are ignored; commits as well, because the ranks that
//!   continue may not know of them;
//! - a ballot is for all ranks except the dead: it is planned when all of them have promised, and committed when all
//!   have executed the plan. So whatever a ballot committed has been executed by every rank of any later ballot;
//! - **so a later ballot adopts an outcome that may have been committed**: if a rank knows of the commit, or if all
//!   have executed the same ballot. Otherwise no earlier ballot was committed or ever will be, and it makes a new plan;
//! - a ballot in which a rank is dead by suspicion alone needs a strict majority of the view.
//!
//! Like all state machines here it has no clock, no connection and no buffer. It takes the messages of one view only,
//! each once and in order of sending. Messages may be lost with their connection, for which there is
//! [`View::handle_timeout`].

mod coordinator;
mod flaw;
#[cfg(test)]
mod search;
#[cfg(test)]
mod tests;

use super::ballot::{Authority, Ballot, Dead, Done, Message, Outcome};
use coordinator::Coordinator;
#[cfg(feature = "snapshot")]
pub use flaw::Flaw;
#[cfg(not(feature = "snapshot"))]
use flaw::Flaw;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// How long a coordinator waits before the next attempt if one failed and no rank is known to be dead: a death that
/// caused the failure is known by then.
const RETRY: Duration = Duration::from_millis(300);

/// The interval at which unanswered messages are repeated, because they may be lost with a connection.
const RESEND: Duration = Duration::from_secs(1);

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Event<P, D> {
    /// Freeze, and report by [`View::promise`] what this rank has. Stop executing any earlier plan.
    Promise { ballot: Ballot },
    /// Compute the plan from these reports, execute it, and report that by [`View::done`] or [`View::failed`].
    Run { ballot: Ballot, reports: BTreeMap<Rank, P> },
    /// All surviving ranks have executed the plan.
    Committed(Outcome<D>),
    /// This rank is not part of the outcome.
    Ended(End),
}

/// How a view change ends for a rank that is not part of the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum End {
    /// Too few ranks are left and no controller confirms that the others are dead, or the others continue without this
    /// one.
    Partitioned,
    /// The deadline passed; nothing was committed here, nor can it have been elsewhere.
    Deadline,
    /// The deadline passed; other ranks may have committed.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum State<D> {
    Open,
    Committed(Outcome<D>),
    Ended,
}

/// One rank's part in the change of one view.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct View<P, D> {
    rank: Rank,
    ranks: u32,
    /// Whether a controller would report dead ranks.
    has_controller: bool,
    dead: Dead,
    /// The highest promised ballot, and whether the report was given.
    promised: Option<(Ballot, bool)>,
    /// The highest attempt seen.
    highest: u32,
    /// The plan in execution.
    plan: Option<(Ballot, Vec<Rank>)>,
    done: Option<Done<D>>,
    coordinating: Option<Coordinator<P, D>>,
    state: State<D>,
    deadline: Instant,
    retry_at: Option<Instant>,
    resend_at: Option<Instant>,
    transmit: VecDeque<(Rank, Message<P, D>)>,
    events: VecDeque<Event<P, D>>,
    #[cfg(any(test, feature = "snapshot"))]
    flaw: Option<Flaw>,
}

impl<P: Clone, D: Clone + PartialEq> View<P, D> {
    /// Take part as `rank` of `ranks` until `deadline`. `dead` are the ranks that are known to be dead.
    pub(crate) fn new((rank, ranks): (Rank, u32), dead: Dead, has_controller: bool, deadline: Instant) -> Self {
        Self {
            rank,
            ranks,
            has_controller,
            dead,
            promised: None,
            highest: 0,
            plan: None,
            done: None,
            coordinating: None,
            state: State::Open,
            deadline,
            retry_at: None,
            resend_at: None,
            transmit: VecDeque::new(),
            events: VecDeque::new(),
            #[cfg(any(test, feature = "snapshot"))]
            flaw: None,
        }
    }

    /// The view must change: tell the coordinator, or become it.
    pub(crate) fn begin(&mut self) {
        self.try_advance();
    }

    /// A rank is dead.
    pub(crate) fn rank_died(&mut self, rank: Rank, authority: Authority) {
        if rank == self.rank || rank.0 >= self.ranks || !self.is_open() {
            return;
        }
        let could_continue = self.may_continue(&self.dead);
        if self.add_dead(&Dead::from([(rank, authority)])) || !could_continue {
            self.try_advance();
        }
    }

    /// There is no controller any more that reports dead ranks. Returns whether that ends the change.
    pub(crate) fn controller_lost(&mut self) -> bool {
        self.has_controller = false;
        let ends = self.is_open() && !self.may_continue(&self.dead);
        if ends {
            self.end(End::Partitioned);
        }
        ends
    }

    /// Process a message from another rank.
    pub(crate) fn handle(&mut self, from: Rank, message: Message<P, D>, now: Instant) {
        if let State::Committed(outcome) = &self.state {
            // Tell ranks that do not know of the commit yet.
            let tells = matches!(message, Message::Call { .. } | Message::Prepare { .. } | Message::Promise { .. });
            let commit = Message::Commit { outcome: outcome.clone(), dead: self.dead.clone() };
            if tells {
                self.transmit.push_back((from, if self.dead.contains_key(&from) { Message::Excluded } else { commit }));
            }
            return;
        }
        if !self.is_open() {
            return;
        }
        match message {
            Message::Commit { dead, .. } if dead.contains_key(&self.rank) => return self.end(End::Partitioned),
            // Ranks that continue without the sender may adopt a different vote than it has committed; what only the
            // sender knew is lost with it.
            Message::Commit { outcome, dead } if !self.dead.contains_key(&from) => {
                self.add_dead(&dead);
                return self.commit(outcome);
            }
            Message::Farewell => return self.rank_died(from, Authority::Confirmed),
            Message::Excluded => return self.end(End::Partitioned),
            _ if self.dead.contains_key(&from) && !self.breaks(Flaw::MessagesFromDead) => {
                // Only ranks with a plan know that they will continue.
                if self.plan.is_some() || self.done.is_some() {
                    self.transmit.push_back((from, Message::Excluded));
                }
                return;
            }
            _ => {}
        }
        match message {
            Message::Call { dead } => {
                let is_new = self.add_dead(&dead);
                if is_new || self.coordinator() == self.rank && self.coordinating.is_none() {
                    self.try_advance();
                }
            }
            Message::Prepare { ballot, dead } => self.on_prepare(from, ballot, &dead),
            Message::Promise { ballot, dead, done, report } => self.on_promise(from, ballot, &dead, done, report),
            Message::Refuse { ballot } => self.on_refuse(ballot),
            Message::Plan { ballot, dead, reports } => self.on_plan(from, ballot, dead, reports),
            Message::Done { ballot, vote } => self.on_done(from, ballot, vote),
            Message::Failed { ballot } => self.on_failed(ballot, now),
            Message::Commit { .. } | Message::Farewell | Message::Excluded => {}
        }
    }

    /// Process timeouts.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if !self.is_open() {
            return;
        }
        if now >= self.deadline {
            return self.end(if self.done.is_some() { End::Unknown } else { End::Deadline });
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            self.try_advance();
        }
        match self.resend_at {
            Some(at) if at > now => {}
            None => self.resend_at = Some(now + RESEND),
            Some(_) => {
                self.resend_at = Some(now + RESEND);
                self.resend();
            }
        }
    }

    /// Return when [`View::handle_timeout`] must be called.
    pub(crate) fn poll_timeout(&self) -> Instant {
        [self.retry_at, self.resend_at].into_iter().flatten().fold(self.deadline, Instant::min)
    }

    /// Return the next message to send, and its receiver.
    pub(crate) fn poll_transmit(&mut self) -> Option<(Rank, Message<P, D>)> {
        self.transmit.pop_front()
    }

    /// Return the next event for the driver.
    pub(crate) fn poll_event(&mut self) -> Option<Event<P, D>> {
        self.events.pop_front()
    }

    /// Report what this rank has, in reply to [`Event::Promise`].
    pub(crate) fn promise(&mut self, ballot: Ballot, report: P) {
        if !self.is_open() || self.promised.is_none_or(|(promised, _)| promised != ballot) {
            return;
        }
        self.promised = Some((ballot, true));
        let (dead, done) = (self.dead.clone(), self.done.clone());
        if ballot.coordinator == self.rank {
            self.on_promise(self.rank, ballot, &dead, done, report);
        } else {
            self.transmit.push_back((ballot.coordinator, Message::Promise { ballot, dead, done, report }));
        }
    }

    /// A ballot's plan has been executed here. `decision` is its result, and `vote` a value that is committed if all
    /// ranks agree on it.
    pub(crate) fn done(&mut self, ballot: Ballot, decision: D, vote: u64) {
        let Some((_, dead)) = self.plan.take_if(|(planned, _)| *planned == ballot) else { return };
        self.done = Some(Done { ballot, outcome: Outcome { dead, decision, vote } });
        if ballot.coordinator == self.rank {
            self.on_done(self.rank, ballot, vote);
        } else {
            self.transmit.push_back((ballot.coordinator, Message::Done { ballot, vote }));
        }
    }

    /// A ballot's plan failed here.
    pub(crate) fn failed(&mut self, ballot: Ballot, now: Instant) {
        if self.plan.take_if(|(planned, _)| *planned == ballot).is_none() {
            return;
        }
        if ballot.coordinator == self.rank {
            self.on_failed(ballot, now);
        } else {
            self.transmit.push_back((ballot.coordinator, Message::Failed { ballot }));
        }
    }

    /// This rank gives up for a reason of its own.
    pub(crate) fn give_up(&mut self) {
        if self.is_open() {
            self.end(End::Deadline);
        }
    }

    /// Return the ranks that are known here to be dead.
    pub(crate) const fn dead(&self) -> &Dead {
        &self.dead
    }

    /// Return the ranks that this one waits for, whose silence matters.
    pub(crate) fn awaited(&self) -> Vec<Rank> {
        match &self.coordinating {
            _ if !self.is_open() => Vec::new(),
            Some(coordinating) => self.live().filter(|&rank| rank != self.rank && coordinating.awaits(rank)).collect(),
            None => vec![self.promised.map_or_else(|| self.coordinator(), |(ballot, _)| ballot.coordinator)],
        }
    }

    const fn is_open(&self) -> bool {
        matches!(self.state, State::Open)
    }

    fn live(&self) -> impl Iterator<Item = Rank> + use<'_, P, D> {
        (0..self.ranks).map(Rank).filter(|rank| !self.dead.contains_key(rank))
    }

    fn coordinator(&self) -> Rank {
        self.live().next().unwrap_or(self.rank)
    }

    /// Return whether the surviving ranks may continue without these.
    fn may_continue(&self, dead: &Dead) -> bool {
        let ranks = self.ranks as usize;
        let is_majority = 2 * ranks.saturating_sub(dead.len()) > ranks;
        is_majority
            || dead.values().all(|&authority| authority == Authority::Confirmed)
            || self.breaks(Flaw::AnyMinority)
    }

    /// Add dead ranks. Returns whether any was new.
    fn add_dead(&mut self, dead: &Dead) -> bool {
        let before = self.dead.len();
        for (&rank, &authority) in dead.iter().filter(|(rank, _)| **rank != self.rank && rank.0 < self.ranks) {
            let known = self.dead.entry(rank).or_insert(authority);
            *known = authority.max(*known);
        }
        self.dead.len() > before
    }

    /// Advance the change with the ranks that are known to be dead.
    fn try_advance(&mut self) {
        if !self.is_open() {
        } else if !self.may_continue(&self.dead) {
            self.coordinating = None;
            if !self.has_controller {
                self.end(End::Partitioned);
            }
        } else if self.coordinator() == self.rank {
            self.lead();
        } else {
            self.transmit.push_back((self.coordinator(), Message::Call { dead: self.dead.clone() }));
        }
    }

    fn on_prepare(&mut self, from: Rank, ballot: Ballot, dead: &Dead) {
        if from != ballot.coordinator || dead.contains_key(&self.rank) || !self.may_continue(dead) {
            return;
        }
        self.highest = self.highest.max(ballot.attempt);
        if let Some((promised, _)) =
            self.promised.filter(|(promised, _)| *promised > ballot && !self.breaks(Flaw::LowerBallots))
        {
            return self.transmit.push_back((from, Message::Refuse { ballot: promised }));
        }
        self.add_dead(dead);
        self.coordinating = None;
        self.enter(ballot);
    }

    /// Take part in a ballot. Ends the execution of any earlier one.
    fn enter(&mut self, ballot: Ballot) {
        self.promised = Some((ballot, false));
        self.plan = None;
        self.events.retain(|event| !matches!(event, Event::Promise { .. } | Event::Run { .. }));
        self.events.push_back(Event::Promise { ballot });
    }

    fn on_plan(&mut self, from: Rank, ballot: Ballot, dead: Dead, reports: BTreeMap<Rank, P>) {
        if from != ballot.coordinator || self.promised != Some((ballot, true)) && !self.breaks(Flaw::LowerBallots) {
            return;
        }
        // Repeat it, because it may have been lost.
        if let Some(done) = self.done.as_ref().filter(|done| done.ballot == ballot) {
            let vote = done.outcome.vote;
            return self.transmit.push_back((from, Message::Done { ballot, vote }));
        }
        if self.plan.as_ref().is_none_or(|(planned, _)| *planned != ballot) {
            self.run(ballot, dead, reports);
        }
    }

    /// Execute a plan. No earlier plan has been committed or will be, otherwise its outcome would have been adopted.
    fn run(&mut self, ballot: Ballot, dead: Dead, reports: BTreeMap<Rank, P>) {
        self.done = None;
        self.plan = Some((ballot, dead.into_keys().collect()));
        self.events.push_back(Event::Run { ballot, reports });
    }

    fn on_refuse(&mut self, ballot: Ballot) {
        self.highest = self.highest.max(ballot.attempt);
        if self.coordinating.as_ref().is_some_and(|coordinating| coordinating.ballot() < ballot) {
            self.try_advance();
        }
    }

    fn commit(&mut self, outcome: Outcome<D>) {
        if self.coordinating.take().is_some() {
            self.broadcast(&Message::Commit { outcome: outcome.clone(), dead: self.dead.clone() });
            // A rank that is wrongly suspected need not wait until its deadline.
            let suspected = self.dead.iter().filter(|(_, authority)| **authority == Authority::Suspicion);
            self.transmit.extend(suspected.map(|(&rank, _)| (rank, Message::Excluded)));
        }
        self.plan = None;
        self.state = State::Committed(outcome.clone());
        self.events.clear();
        self.events.push_back(Event::Committed(outcome));
    }

    fn end(&mut self, end: End) {
        self.state = State::Ended;
        self.coordinating = None;
        self.broadcast(&Message::Farewell);
        self.events.clear();
        self.events.push_back(Event::Ended(end));
    }

    fn broadcast(&mut self, message: &Message<P, D>) {
        let others: Vec<Rank> = self.live().filter(|&rank| rank != self.rank).collect();
        self.transmit.extend(others.into_iter().map(|rank| (rank, message.clone())));
    }
}
