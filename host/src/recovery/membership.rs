//! What ranks tell each other outside of collectives: messages of view changes, queued for whoever changes the view,
//! and which results all ranks have. Replies need no call.
//!
//! Views are numbered, and every message names the view that it would change. A message about a later view is queued:
//! its sender knows of a commit that has not arrived here yet. The reply to a message about the previous view is the
//! commit that ended it.
//!
//! Rank 0 collects which results all ranks have, for ranks that leave: it asks the ranks that it lacks, and reports the
//! minimum to those that leave.

use super::ballot::{Authority, Dead, Message};
use super::decide::{Decision, RankReport};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// A message of a view change.
pub(crate) type ViewMessage = Message<RankReport, Decision>;

/// The rank that collects which results all ranks have.
const COORDINATOR: Rank = Membership::COORDINATOR;

/// How long rank 0 waits before it asks a rank again.
const ASK_INTERVAL: Duration = Duration::from_millis(15);

/// The chunk below which a rank has all results, in the latest of its trees; it has everything of earlier trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Watermark(u64);

impl Watermark {
    /// Below chunk `seq` in the tree of `view`. The fields hold 2^20 trees and 2^44 chunks, far more than occur.
    pub(crate) const fn new(view: u32, seq: u64) -> Self {
        Self((view as u64) << 44 | seq & ((1 << 44) - 1))
    }

    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) const fn to_bits(self) -> u64 {
        self.0
    }
}

/// A message between ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum MemberMessage {
    /// A message of a view change, and the view.
    View(u64, Box<ViewMessage>),
    /// To rank 0: the sender leaves once all ranks have the results that it has.
    Leaves(Watermark),
    /// From rank 0: report your results.
    Ask,
    /// The reply to `Ask`.
    Has(Watermark),
    /// From rank 0: all ranks have these results.
    Stable(Watermark),
}

/// What a rank learns from another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum MemberEvent {
    Message(Rank, Box<MemberMessage>),
    /// The connection is refused or closed: the process has ended.
    Gone(Rank),
    /// The rank does not respond.
    Silent(Rank),
}

/// What follows from an event.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Reaction {
    /// The view that a rank wants to change.
    pub(crate) requested_view: Option<u64>,
    /// The reply to the rank that the event is about.
    pub(crate) reply: Option<MemberMessage>,
    /// What is sent to others.
    pub(crate) sends: Vec<(Rank, MemberMessage)>,
    /// Whether waiters have something to look at.
    pub(crate) wakes: bool,
}

impl Reaction {
    fn reply(reply: Option<MemberMessage>) -> Self {
        Self { reply, ..Self::default() }
    }
}

/// What rank 0 knows about the results of each rank.
#[derive(Debug)]
struct KnownResults {
    has: Vec<Watermark>,
    asked: Vec<Option<Instant>>,
    /// Ranks that want to leave, and get reports.
    leaves: BTreeSet<Rank>,
}

/// Maximum number of queued events for each rank.
const EVENTS_PER_RANK_MAX: usize = 16;

/// An event for whoever changes the view.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PeerEvent {
    Message(Rank, Box<ViewMessage>),
    /// The connection is refused or closed: the process has ended.
    Gone(Rank),
    /// The rank does not respond.
    Silent(Rank),
}

/// What a rank knows about its membership, and what is needed to reply without involving a call.
#[derive(Debug)]
pub(crate) struct Membership {
    own: Rank,
    /// The current view.
    epoch: u64,
    events: VecDeque<(u64, PeerEvent)>,
    /// The commit that ended the previous view, and the ranks that are dead in it.
    last_commit: Option<(Dead, ViewMessage)>,
    /// Whether this rank has ended, and takes no further part.
    has_ended: bool,
    /// Whether this rank is about to leave; then disconnected ranks have left, and are not dead.
    is_leaving: bool,
    is_coordinator_gone: bool,
    /// The results that all ranks have.
    stable: Watermark,
    /// Used by rank 0 only.
    known: KnownResults,
    ranks: usize,
}

impl Membership {
    /// The rank that collects which results all ranks have.
    pub(crate) const COORDINATOR: Rank = Rank(0);

    pub(crate) fn new(own: Rank, ranks: usize) -> Self {
        Self {
            own,
            epoch: 0,
            events: VecDeque::new(),
            last_commit: None,
            has_ended: false,
            is_leaving: false,
            is_coordinator_gone: false,
            stable: Watermark::new(0, 0),
            known: KnownResults {
                has: vec![Watermark::new(0, 0); ranks],
                asked: vec![None; ranks],
                leaves: BTreeSet::new(),
            },
            ranks,
        }
    }

    /// Return the current view.
    pub(crate) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Return whether all ranks have these results.
    pub(crate) fn is_stable(&self, wanted: Watermark) -> bool {
        self.stable >= wanted
    }

    /// Return whether rank 0, which collects the results, has disconnected.
    pub(crate) const fn is_coordinator_gone(&self) -> bool {
        self.is_coordinator_gone
    }

    /// Return the ranks to monitor: those that are waited for. If there are none and no controller would report a
    /// death, it is the next rank, in a ring.
    pub(crate) fn monitored(&self, mut awaited: Vec<Rank>, has_controller: bool) -> Vec<Rank> {
        if awaited.is_empty() && !has_controller && !self.has_ended {
            awaited.push(Rank((self.own.0 + 1) % self.ranks as u32));
        }
        awaited
    }

    /// Return a message about the current view.
    pub(crate) fn view_message(&self, message: ViewMessage) -> MemberMessage {
        MemberMessage::View(self.epoch, Box::new(message))
    }

    /// This rank wants to leave: find out whether all ranks have these results, as it has. Returns what to send.
    pub(crate) fn leave(&mut self, wanted: Watermark, now: Instant) -> Vec<(Rank, MemberMessage)> {
        self.is_leaving = true;
        if self.own != COORDINATOR {
            return vec![(COORDINATOR, MemberMessage::Leaves(wanted))];
        }
        let reports = self.record_results(COORDINATOR, wanted, wanted);
        sends(reports, self.ranks_to_ask(wanted, now))
    }

    /// This rank does not leave yet: a disconnected rank counts as dead again.
    pub(crate) const fn cancel_leaving(&mut self) {
        self.is_leaving = false;
    }

    /// This rank leaves, and all ranks have its results. If it is rank 0, it reports that to all, because it cannot be
    /// asked later.
    pub(crate) fn departure(&self) -> Vec<(Rank, MemberMessage)> {
        if self.own != COORDINATOR || self.stable <= Watermark::new(0, 0) {
            return Vec::new();
        }
        (1..self.ranks as u32).map(|rank| (Rank(rank), MemberMessage::Stable(self.stable))).collect()
    }

    /// The view has changed: from now on reply with `commit` to ranks that do not know yet.
    pub(crate) fn install_view(&mut self, dead: Dead, commit: ViewMessage) {
        self.epoch += 1;
        self.last_commit = Some((dead, commit));
        let epoch = self.epoch;
        self.events.retain(|(of, event)| *of >= epoch && matches!(event, PeerEvent::Message(..)));
    }

    /// This rank ends, and takes no further part.
    pub(crate) const fn end(&mut self) {
        self.has_ended = true;
    }

    /// Process an event; `own` are the results that this rank has.
    pub(crate) fn handle(&mut self, event: MemberEvent, own: Watermark, now: Instant) -> Reaction {
        let (epoch, event) = match event {
            MemberEvent::Gone(rank) | MemberEvent::Silent(rank) if self.is_leaving => {
                self.is_coordinator_gone |= rank == COORDINATOR && matches!(event, MemberEvent::Gone(_));
                return Reaction::default();
            }
            MemberEvent::Gone(rank) => (self.epoch, PeerEvent::Gone(rank)),
            MemberEvent::Silent(rank) => (self.epoch, PeerEvent::Silent(rank)),
            MemberEvent::Message(from, message) => match *message {
                MemberMessage::View(epoch, message) => (epoch, PeerEvent::Message(from, message)),
                results => return self.on_results(from, &results, own, now),
            },
        };
        if let PeerEvent::Message(from, message) = &event {
            let asks = matches!(**message, Message::Call { .. } | Message::Prepare { .. } | Message::Promise { .. });
            let answer = match &self.last_commit {
                Some((dead, _)) if asks && epoch < self.epoch && dead.contains_key(from) => Some(Message::Excluded),
                Some((_, last_commit)) if asks && epoch + 1 == self.epoch => Some(last_commit.clone()),
                _ if asks && epoch >= self.epoch && self.has_ended => Some(Message::Farewell),
                _ => None,
            };
            if answer.is_some() || epoch < self.epoch {
                return Reaction::reply(answer.map(|message| MemberMessage::View(epoch, Box::new(message))));
            }
        }
        if self.has_ended {
            return Reaction::default();
        }
        if self.events.len() >= EVENTS_PER_RANK_MAX * self.ranks {
            // Senders repeat what matters.
            self.events.pop_front();
        }
        self.events.push_back((epoch, event));
        Reaction { requested_view: Some(epoch), wakes: true, ..Reaction::default() }
    }

    /// Process a message about results.
    fn on_results(&mut self, from: Rank, message: &MemberMessage, own: Watermark, now: Instant) -> Reaction {
        let is_coordinator = self.own == COORDINATOR;
        let sends = match *message {
            MemberMessage::Ask => return Reaction::reply(Some(MemberMessage::Has(own))),
            MemberMessage::Stable(stable) if from == COORDINATOR => {
                self.stable = self.stable.max(stable);
                Vec::new()
            }
            MemberMessage::Has(has) if is_coordinator => sends(self.record_results(from, has, own), Vec::new()),
            MemberMessage::Leaves(has) if is_coordinator => {
                let mut reports = self.record_results(from, has, own);
                self.known.leaves.insert(from);
                if self.stable >= has {
                    reports.push((from, self.stable));
                    sends(reports, Vec::new())
                } else {
                    sends(reports, self.ranks_to_ask(has, now))
                }
            }
            _ => return Reaction::default(),
        };
        Reaction { sends, wakes: true, ..Reaction::default() }
    }

    /// Return the first event of this view.
    pub(crate) fn next_event(&mut self) -> Option<PeerEvent> {
        let at = self.events.iter().position(|(epoch, _)| *epoch <= self.epoch)?;
        self.events.remove(at).map(|(_, event)| event)
    }

    /// Return whether an event of this view is queued.
    pub(crate) fn has_event(&self) -> bool {
        self.events.iter().any(|(epoch, _)| *epoch <= self.epoch)
    }

    /// Return whether a queued event ends the execution of a plan: a higher ballot, or a dead rank that is not in
    /// `dead`. A silent rank is dead only if no controller would report that.
    pub(crate) fn interrupts_plan(&self, dead: &Dead, has_controller: bool) -> bool {
        let is_news = |rank: &Rank| !dead.contains_key(rank);
        self.events.iter().filter(|(epoch, _)| *epoch <= self.epoch).any(|(_, event)| match event {
            PeerEvent::Gone(rank) => is_news(rank),
            PeerEvent::Silent(rank) => !has_controller && is_news(rank),
            PeerEvent::Message(from, message) => match &**message {
                Message::Call { dead } => dead.keys().any(is_news),
                Message::Farewell => is_news(from),
                message => matches!(
                    message,
                    Message::Prepare { .. } | Message::Refuse { .. } | Message::Commit { .. } | Message::Excluded
                ),
            },
        })
    }

    /// Record the results that a rank reported to rank 0, whose own are `own`. Returns the reports to send.
    fn record_results(&mut self, from: Rank, has: Watermark, own: Watermark) -> Vec<(Rank, Watermark)> {
        let own = (COORDINATOR, own);
        for (rank, watermark) in [(from, has), own] {
            if let Some(known) = self.known.has.get_mut(rank.0 as usize) {
                *known = watermark.max(*known);
            }
        }
        let stable = self.known.has.iter().copied().min().unwrap_or(own.1);
        if stable <= self.stable {
            return Vec::new();
        }
        self.stable = stable;
        self.known.leaves.iter().map(|&rank| (rank, stable)).collect()
    }

    /// Return the ranks that rank 0 must ask to find out whether all have these results.
    fn ranks_to_ask(&mut self, wanted: Watermark, now: Instant) -> Vec<Rank> {
        let KnownResults { has, asked, .. } = &mut self.known;
        let ranks = (0_u32..).zip(has.iter().zip(asked)).skip(1);
        let due = ranks.filter(|(_, (has, asked))| {
            **has < wanted && asked.is_none_or(|at| now.saturating_duration_since(at) >= ASK_INTERVAL)
        });
        due.map(|(rank, (_, asked))| {
            *asked = Some(now);
            Rank(rank)
        })
        .collect()
    }
}

fn sends(reports: Vec<(Rank, Watermark)>, to_ask: Vec<Rank>) -> Vec<(Rank, MemberMessage)> {
    let reports = reports.into_iter().map(|(to, stable)| (to, MemberMessage::Stable(stable)));
    reports.chain(to_ask.into_iter().map(|to| (to, MemberMessage::Ask))).collect()
}

/// Return the authority by which a rank is dead whose process has ended, or that does not respond.
pub(crate) const fn authority(has_controller: bool) -> Authority {
    // A rank that reaches the controller is not cut off, so what the other rank's host reports is true.
    if has_controller { Authority::Confirmed } else { Authority::Suspicion }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::{Ballot, Outcome};

    /// A rank with the results that it has.
    struct Member(Membership, Watermark);

    impl Member {
        fn handle(&mut self, event: MemberEvent) -> Reaction {
            self.0.handle(event, self.1, Instant::now())
        }

        /// Return the view that an event requests to change, and the reply.
        fn request(&mut self, event: MemberEvent) -> (Option<u64>, Option<MemberMessage>) {
            let Reaction { requested_view, reply, .. } = self.handle(event);
            (requested_view, reply)
        }
    }

    fn member() -> Member {
        let mut membership = Membership::new(Rank(0), 3);
        membership.epoch = 3;
        Member(membership, Watermark::new(0, 0))
    }

    fn event(from: u32, message: MemberMessage) -> MemberEvent {
        MemberEvent::Message(Rank(from), Box::new(message))
    }

    fn note(from: u32, epoch: u64, message: &ViewMessage) -> MemberEvent {
        event(from, MemberMessage::View(epoch, Box::new(message.clone())))
    }

    fn call() -> ViewMessage {
        Message::Call { dead: Dead::new() }
    }

    fn answered(member: &mut Member, event: MemberEvent) -> Option<(u64, ViewMessage)> {
        member.handle(event).reply.map(|reply| match reply {
            MemberMessage::View(epoch, message) => (epoch, *message),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn message_of_a_later_view_is_queued_until_then() {
        let mut member = member();
        assert_eq!(member.request(note(1, 4, &call())), (Some(4), None));
        assert!(!member.0.has_event());
        assert_eq!(member.0.next_event(), None);
        assert_eq!(member.request(note(2, 3, &Message::Farewell)), (Some(3), None));
        assert_eq!(member.0.next_event(), Some(PeerEvent::Message(Rank(2), Box::new(Message::Farewell))));
        member.0.epoch = 4;
        assert_eq!(member.0.next_event(), Some(PeerEvent::Message(Rank(1), Box::new(call()))));
    }

    #[test]
    fn rank_that_is_behind_gets_the_commit_as_reply() {
        let mut member = member();
        let decision = Decision { cut: 7, operation: 1, begun: 2, failure: None };
        let dead = Dead::from([(Rank(2), Authority::Suspicion)]);
        let outcome = Outcome { dead: vec![Rank(2)], decision, vote: 0 };
        let commit = Message::Commit { outcome, dead: dead.clone() };
        member.0.last_commit = Some((dead, commit.clone()));
        assert_eq!(answered(&mut member, note(1, 2, &call())), Some((2, commit)));
        assert_eq!(answered(&mut member, note(2, 2, &call())), Some((2, Message::Excluded)));
        assert_eq!(answered(&mut member, note(1, 1, &call())), None);
        let ballot = Ballot { attempt: 1, coordinator: Rank(1) };
        // A late message that asks for nothing gets no reply.
        assert_eq!(member.request(note(1, 2, &Message::Done { ballot, vote: 0 })), (None, None));
        member.0.has_ended = true;
        assert_eq!(answered(&mut member, note(1, 3, &call())), Some((3, Message::Farewell)));
        assert!(!member.0.has_event());
    }

    /// Rank 0 counts itself as well; views count before chunks.
    #[test]
    fn results_are_stable_when_the_last_rank_has_them() {
        let mut member = member();
        let wanted = Watermark::new(1, 40);
        member.handle(event(1, MemberMessage::Leaves(wanted)));
        member.1 = Watermark::new(1, 44);
        member.handle(event(2, MemberMessage::Has(Watermark::new(0, 1 << 40))));
        assert!(!member.0.is_stable(wanted));
        member.handle(event(2, MemberMessage::Has(Watermark::new(1, 39))));
        assert!(!member.0.is_stable(wanted) && member.0.is_stable(Watermark::new(1, 39)));
        member.handle(event(2, MemberMessage::Has(Watermark::new(1, 44))));
        assert!(member.0.is_stable(wanted) && !member.0.is_stable(Watermark::new(1, 41)));
        // Reports of other ranks and of unknown ranks are ignored.
        member.handle(event(2, MemberMessage::Stable(Watermark::new(1, 44))));
        member.handle(event(7, MemberMessage::Has(Watermark::new(9, 0))));
        assert!(!member.0.is_stable(Watermark::new(1, 41)));
    }

    #[test]
    fn ask_is_answered_with_the_rank_s_own_results() {
        let mut member = member();
        member.1 = Watermark::new(0, 7);
        assert_eq!(
            member.request(event(0, MemberMessage::Ask)),
            (None, Some(MemberMessage::Has(Watermark::new(0, 7))))
        );
        assert!(!member.0.has_event());
    }

    #[test]
    fn disconnect_while_leaving_is_no_death() {
        let mut member = member();
        member.0.is_leaving = true;
        assert_eq!(member.request(MemberEvent::Gone(COORDINATOR)), (None, None));
        assert!(member.0.is_coordinator_gone() && !member.0.has_event());
    }

    /// Messages that belong to the plan, and deaths that are known, do not interrupt it.
    #[test]
    fn higher_ballots_and_new_deaths_interrupt_a_plan() {
        let known = Dead::from([(Rank(2), Authority::Confirmed)]);
        let ballot = Ballot { attempt: 2, coordinator: Rank(0) };
        let interrupts_plan = |event, has_controller| {
            let mut member = member();
            member.handle(event);
            member.0.interrupts_plan(&known, has_controller)
        };
        let newly = Dead::from([(Rank(1), Authority::Confirmed)]);
        assert!(interrupts_plan(note(1, 3, &Message::Call { dead: newly }), true));
        assert!(interrupts_plan(note(0, 3, &Message::Prepare { ballot, dead: Dead::new() }), true));
        assert!(
            interrupts_plan(MemberEvent::Gone(Rank(1)), true) && interrupts_plan(MemberEvent::Silent(Rank(1)), false)
        );
        assert!(
            !interrupts_plan(MemberEvent::Gone(Rank(2)), true) && !interrupts_plan(MemberEvent::Silent(Rank(1)), true)
        );
        assert!(!interrupts_plan(note(1, 3, &Message::Done { ballot, vote: 0 }), true));
        assert!(!interrupts_plan(note(1, 3, &Message::Call { dead: known.clone() }), true));
        assert!(!interrupts_plan(note(0, 4, &Message::Prepare { ballot, dead: Dead::new() }), true));
    }
}
