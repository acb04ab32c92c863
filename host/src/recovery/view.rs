//! The view change (PROTOCOL 8): how ranks agree on who is dead and on what becomes of their operations, whatever else
//! dies meanwhile.
//!
//! ```text
//!   a rank          coordinator: the lowest that lives
//!     | -- Call ------> |    the tree is lost, or a rank is
//!     | <-- Prepare --- |    to all that live: freeze, and say what you have
//!     | --- Promise --> |
//!     | <-- Plan ------ |    what all have; each works out the same, and does it
//!     | --- Done -----> |
//!     | <-- Commit ---- |
//! ```
//!
//! Invariants:
//! - a rank takes part in no ballot that is lower than one it has promised;
//! - who is dead to a rank stays so, and is not heard by it: not of a commit either, as those that go on may know less;
//! - a ballot is for all ranks but the dead: it is planned when all of them have promised, and committed when all have
//!   done it. So what was committed in a ballot has been done by every rank of any later one;
//! - **so a later ballot adopts an outcome that may have been committed**: where a rank knows of the commit, or where all
//!   have done the same ballot. Otherwise no earlier ballot was committed or will be, and it plans anew;
//! - a ballot in which a rank is dead by suspicion alone is for a strict majority of the view.
//!
//! Like all state machines here it has no clock, no connection and no buffer. It takes messages of one view only, each
//! once and in the order of sending; a message may be lost with its connection, for which there is
//! [`View::handle_timeout`].

mod flaw;
mod lead;
#[cfg(test)]
mod search;
#[cfg(test)]
mod tests;

use super::ballot::{Authority, Ballot, Dead, Done, Message, Outcome};
#[cfg(feature = "snapshot")]
pub use flaw::Flaw;
#[cfg(not(feature = "snapshot"))]
use flaw::Flaw;
use lead::Leading;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// How long a coordinator waits with the next attempt where one came to nothing, and nobody has died: a death that was
/// its cause is known by then.
const RETRY: Duration = Duration::from_millis(300);

/// How often what was not answered is said again, as a connection may have taken it along.
const RESEND: Duration = Duration::from_secs(1);

/// What the driver has to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Event<P, D> {
    /// Freeze, and say by [`View::promise`] what there is. Nothing of an earlier plan goes on.
    Promise { ballot: Ballot },
    /// Work out the plan of these ranks' accounts, do it, and say so by [`View::done`] or [`View::failed`].
    Run { ballot: Ballot, accounts: BTreeMap<Rank, P> },
    /// All that live are through.
    Committed(Outcome<D>),
    /// This rank is out.
    Ended(End),
}

/// How a view change ends for a rank that is out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum End {
    /// Too few ranks are left, and the controller does not say that the others are dead; or the others go on without
    /// this one.
    Partitioned,
    /// It took too long; nothing was committed here, nor could it be elsewhere.
    Deadline,
    /// It took too long; the others may have committed.
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
    /// Whether the controller would say who is dead.
    has_controller: bool,
    dead: Dead,
    /// The highest ballot that was promised, and whether the account was given.
    promised: Option<(Ballot, bool)>,
    /// The highest attempt that was heard of.
    highest: u32,
    /// The plan that is being done.
    plan: Option<(Ballot, Vec<Rank>)>,
    done: Option<Done<D>>,
    leading: Option<Leading<P, D>>,
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
    /// Take part, as `rank` of `ranks`, until `deadline` at most. `dead` is who is known to be.
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
            leading: None,
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

    /// The view has to change: let the coordinator know, or be it.
    pub(crate) fn begin(&mut self) {
        self.urge();
    }

    /// A rank is dead.
    pub(crate) fn rank_died(&mut self, rank: Rank, authority: Authority) {
        if rank == self.rank || rank.0 >= self.ranks || !self.is_open() {
            return;
        }
        let was_entitled = self.is_entitled(&self.dead);
        if self.bury(&Dead::from([(rank, authority)])) || !was_entitled {
            self.urge();
        }
    }

    /// Nobody says any more who is dead; tells whether that changes anything.
    pub(crate) fn controller_lost(&mut self) -> bool {
        self.has_controller = false;
        let ends = self.is_open() && !self.is_entitled(&self.dead);
        if ends {
            self.end(End::Partitioned);
        }
        ends
    }

    /// Take in what another rank says.
    pub(crate) fn handle(&mut self, from: Rank, message: Message<P, D>, now: Instant) {
        if let State::Committed(outcome) = &self.state {
            // Who has not heard of it hears of it now.
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
            // Those that go on without it may adopt another word than it has committed: what it alone knew is lost with it.
            Message::Commit { outcome, dead } if !self.dead.contains_key(&from) => {
                self.bury(&dead);
                return self.commit(outcome);
            }
            Message::Farewell => return self.rank_died(from, Authority::Word),
            Message::Excluded => return self.end(End::Partitioned),
            _ if self.dead.contains_key(&from) && !self.breaks(Flaw::TheDead) => {
                // Only what is planned is entitled to say so.
                if self.plan.is_some() || self.done.is_some() {
                    self.transmit.push_back((from, Message::Excluded));
                }
                return;
            }
            _ => {}
        }
        match message {
            Message::Call { dead } => {
                let is_new = self.bury(&dead);
                if is_new || self.coordinator() == self.rank && self.leading.is_none() {
                    self.urge();
                }
            }
            Message::Prepare { ballot, dead } => self.on_prepare(from, ballot, &dead),
            Message::Promise { ballot, dead, done, account } => self.on_promise(from, ballot, &dead, done, account),
            Message::Refuse { ballot } => self.on_refuse(ballot),
            Message::Plan { ballot, dead, accounts } => self.on_plan(from, ballot, dead, accounts),
            Message::Done { ballot, word } => self.on_done(from, ballot, word),
            Message::Failed { ballot } => self.on_failed(ballot, now),
            Message::Commit { .. } | Message::Farewell | Message::Excluded => {}
        }
    }

    /// Do what is due.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if !self.is_open() {
            return;
        }
        if now >= self.deadline {
            return self.end(if self.done.is_some() { End::Unknown } else { End::Deadline });
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            self.urge();
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

    /// Return when [`View::handle_timeout`] has something to do.
    pub(crate) fn poll_timeout(&self) -> Instant {
        [self.retry_at, self.resend_at].into_iter().flatten().fold(self.deadline, Instant::min)
    }

    /// Return what is to be said to whom next.
    pub(crate) fn poll_transmit(&mut self) -> Option<(Rank, Message<P, D>)> {
        self.transmit.pop_front()
    }

    /// Return what is to be done next.
    pub(crate) fn poll_event(&mut self) -> Option<Event<P, D>> {
        self.events.pop_front()
    }

    /// Say what there is: the answer to [`Event::Promise`].
    pub(crate) fn promise(&mut self, ballot: Ballot, account: P) {
        if !self.is_open() || self.promised.is_none_or(|(promised, _)| promised != ballot) {
            return;
        }
        self.promised = Some((ballot, true));
        let (dead, done) = (self.dead.clone(), self.done.clone());
        if ballot.coordinator == self.rank {
            self.on_promise(self.rank, ballot, &dead, done, account);
        } else {
            self.transmit.push_back((ballot.coordinator, Message::Promise { ballot, dead, done, account }));
        }
    }

    /// A ballot's plan is done here: `decision` is what it comes to, and `word` whatever ranks have to have in common.
    pub(crate) fn done(&mut self, ballot: Ballot, decision: D, word: u64) {
        let Some((_, dead)) = self.plan.take_if(|(planned, _)| *planned == ballot) else { return };
        self.done = Some(Done { ballot, outcome: Outcome { dead, decision, word } });
        if ballot.coordinator == self.rank {
            self.on_done(self.rank, ballot, word);
        } else {
            self.transmit.push_back((ballot.coordinator, Message::Done { ballot, word }));
        }
    }

    /// A ballot's plan came to nothing here.
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

    /// This rank has to give up, for a reason of its own.
    pub(crate) fn give_up(&mut self) {
        if self.is_open() {
            self.end(End::Deadline);
        }
    }

    /// Return who is dead as far as is known here.
    pub(crate) const fn dead(&self) -> &Dead {
        &self.dead
    }

    /// Return whose silence matters: those that something is waited for from.
    pub(crate) fn awaited(&self) -> Vec<Rank> {
        match &self.leading {
            _ if !self.is_open() => Vec::new(),
            Some(leading) => self.live().filter(|&rank| rank != self.rank && leading.awaits(rank)).collect(),
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

    /// Tell whether ranks may go on without these.
    fn is_entitled(&self, dead: &Dead) -> bool {
        let ranks = self.ranks as usize;
        let is_majority = 2 * ranks.saturating_sub(dead.len()) > ranks;
        is_majority || dead.values().all(|&authority| authority == Authority::Word) || self.breaks(Flaw::AnyMinority)
    }

    /// Note who is dead; tells whether that is news.
    fn bury(&mut self, dead: &Dead) -> bool {
        let before = self.dead.len();
        for (&rank, &authority) in dead.iter().filter(|(rank, _)| **rank != self.rank && rank.0 < self.ranks) {
            let known = self.dead.entry(rank).or_insert(authority);
            *known = authority.max(*known);
        }
        self.dead.len() > before
    }

    /// Bring the change on, with who is known to be dead.
    fn urge(&mut self) {
        if !self.is_open() {
        } else if !self.is_entitled(&self.dead) {
            self.leading = None;
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
        if from != ballot.coordinator || dead.contains_key(&self.rank) || !self.is_entitled(dead) {
            return;
        }
        self.highest = self.highest.max(ballot.attempt);
        if let Some((promised, _)) =
            self.promised.filter(|(promised, _)| *promised > ballot && !self.breaks(Flaw::LowerBallots))
        {
            return self.transmit.push_back((from, Message::Refuse { ballot: promised }));
        }
        self.bury(dead);
        self.leading = None;
        self.enter(ballot);
    }

    /// Take part in a ballot; what an earlier one has begun ends.
    fn enter(&mut self, ballot: Ballot) {
        self.promised = Some((ballot, false));
        self.plan = None;
        self.events.retain(|event| !matches!(event, Event::Promise { .. } | Event::Run { .. }));
        self.events.push_back(Event::Promise { ballot });
    }

    fn on_plan(&mut self, from: Rank, ballot: Ballot, dead: Dead, accounts: BTreeMap<Rank, P>) {
        if from != ballot.coordinator || self.promised != Some((ballot, true)) && !self.breaks(Flaw::LowerBallots) {
            return;
        }
        // Said again, as it may have been lost.
        if let Some(done) = self.done.as_ref().filter(|done| done.ballot == ballot) {
            let word = done.outcome.word;
            return self.transmit.push_back((from, Message::Done { ballot, word }));
        }
        if self.plan.as_ref().is_none_or(|(planned, _)| *planned != ballot) {
            self.run(ballot, dead, accounts);
        }
    }

    /// Do a plan. Nothing that was done before has been committed or will be, or it would have been adopted.
    fn run(&mut self, ballot: Ballot, dead: Dead, accounts: BTreeMap<Rank, P>) {
        self.done = None;
        self.plan = Some((ballot, dead.into_keys().collect()));
        self.events.push_back(Event::Run { ballot, accounts });
    }

    fn on_refuse(&mut self, ballot: Ballot) {
        self.highest = self.highest.max(ballot.attempt);
        if self.leading.as_ref().is_some_and(|leading| leading.ballot() < ballot) {
            self.urge();
        }
    }

    fn commit(&mut self, outcome: Outcome<D>) {
        if self.leading.take().is_some() {
            self.tell_all(&Message::Commit { outcome: outcome.clone(), dead: self.dead.clone() });
            // One that only seemed to be dead need not wait until its deadline.
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
        self.leading = None;
        self.tell_all(&Message::Farewell);
        self.events.clear();
        self.events.push_back(Event::Ended(end));
    }

    fn tell_all(&mut self, message: &Message<P, D>) {
        let others: Vec<Rank> = self.live().filter(|&rank| rank != self.rank).collect();
        self.transmit.extend(others.into_iter().map(|rank| (rank, message.clone())));
    }
}
