//! The membership channel: messages between ranks outside of collectives. It queues view-change messages for whoever
//! changes the view ([`super::change`]), a call or a thread, and replies to ranks that are behind without involving
//! either.
//!
//! Views are numbered, and every message names the view that it would change. A message about a later view is queued:
//! its sender knows of a commit that has not arrived here yet. The reply to a message about the previous view is the
//! commit that ended it.
//!
//! The channel also collects which results all ranks have, for ranks that leave ([`super::leave`]): rank 0 asks the
//! ranks that it lacks, and reports the minimum to those that leave. Replies need no call.

use crate::exec::JobToken;
use crate::exec::oob::{OobChannel, OobEvent, OobSender};
use crate::recovery::{Authority, Dead, Decision, Message, RankReport};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// A message of a view change.
pub(super) type ViewMessage = Message<RankReport, Decision>;

/// The rank that collects which results all ranks have.
const COORDINATOR: Rank = Rank(0);

/// How long rank 0 waits before it asks a rank again.
const ASK_INTERVAL: Duration = Duration::from_millis(15);

/// The chunk below which a rank has all results, in the latest of its trees; it has everything of earlier trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Watermark(u64);

impl Watermark {
    /// Below chunk `seq` in the tree of `view`. The fields hold 2^20 trees and 2^44 chunks, far more than occur.
    pub(super) const fn new(view: u32, seq: u64) -> Self {
        Self((view as u64) << 44 | seq & ((1 << 44) - 1))
    }
}

/// A message on the channel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum ChannelMessage<S> {
    /// A message of a view change, and the view.
    View(u64, S),
    /// To rank 0: the sender leaves once all ranks have the results that it has.
    Leaves(Watermark),
    /// From rank 0: report your results.
    Ask,
    /// The reply to `Ask`.
    Has(Watermark),
    /// From rank 0: all ranks have these results.
    Stable(Watermark),
}

/// What rank 0 knows about the results of each rank.
#[derive(Debug)]
struct KnownResults {
    has: Vec<Watermark>,
    asked: Vec<Option<Instant>>,
    /// Ranks that want to leave, and get reports.
    leaves: BTreeSet<Rank>,
}

/// The longest report of one rank that is accepted. Inventories are runs of chunks, not single chunks.
const REPORT_MAX_BYTES: usize = 1 << 20;

/// Maximum number of queued events for each rank.
const EVENTS_PER_RANK_MAX: usize = 16;

/// An event for whoever changes the view.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum PeerEvent {
    Message(Rank, Box<ViewMessage>),
    /// The connection is refused or closed: the process has ended.
    Gone(Rank),
    /// The rank does not respond.
    Silent(Rank),
}

/// Queued events, and what is needed to reply without involving a call.
#[derive(Debug)]
struct InboxState {
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

impl InboxState {
    fn new(ranks: usize) -> Self {
        Self {
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

/// The queue of events, with its waiters.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
    sender: OnceLock<Arc<OobSender>>,
    own: Rank,
    /// The next rank, in a ring.
    next: Rank,
    /// The results that this rank has.
    watermark: AtomicU64,
}

impl Inbox {
    fn new(own: Rank, ranks: usize) -> Self {
        let next = Rank((own.0 + 1) % ranks as u32);
        let (state, sender) = (Mutex::new(InboxState::new(ranks)), OnceLock::new());
        Self { state, changed: Condvar::new(), sender, own, next, watermark: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the current view.
    pub(super) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    /// Wake waiters.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Monitor the connections to these ranks. If there are none and no controller would report a death, monitor the
    /// next rank.
    pub(super) fn watch(&self, ranks: Vec<Rank>, has_controller: bool) {
        let next = (ranks.is_empty() && !has_controller && !self.lock().has_ended).then_some(self.next);
        self.sender.get().iter().for_each(|sender| sender.watch(ranks.iter().copied().chain(next)));
    }

    /// Publish the results that this rank has. The watermark never decreases.
    pub(super) fn publish(&self, watermark: Watermark) {
        self.watermark.fetch_max(watermark.0, Ordering::Release);
    }

    fn watermark(&self) -> Watermark {
        Watermark(self.watermark.load(Ordering::Acquire))
    }

    /// Return whether all ranks have these results.
    pub(super) fn is_stable(&self, wanted: Watermark) -> bool {
        self.lock().stable >= wanted
    }

    /// Wait until all ranks have these results, or a waiter is woken, for at most `timeout`.
    pub(super) fn wait_for_stable(&self, wanted: Watermark, timeout: Duration) {
        let state = self.lock();
        if state.stable < wanted {
            drop(self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// This rank does not leave yet: a disconnected rank counts as dead again.
    pub(super) fn cancel_leaving(&self) {
        self.lock().is_leaving = false;
    }

    /// Return whether rank 0, which collects the results, has disconnected.
    pub(super) fn is_coordinator_gone(&self) -> bool {
        self.lock().is_coordinator_gone
    }

    fn send(&self, to: Rank, note: &ChannelMessage<ViewMessage>) {
        match (postcard::to_allocvec(note), self.sender.get()) {
            (Ok(note), Some(sender)) => sender.send(to, note),
            (Ok(_), None) => {}
            (Err(error), _) => tracing::error!(%error, "cannot encode a message to another rank"),
        }
    }

    /// Process a message about results. Returns the reply.
    fn on_results(&self, from: Rank, note: &ChannelMessage<ViewMessage>) -> Option<ChannelMessage<ViewMessage>> {
        let (own, is_coordinator) = (self.watermark(), self.own == COORDINATOR);
        let mut state = self.lock();
        let (reports, to_ask) = match *note {
            ChannelMessage::Ask => return Some(ChannelMessage::Has(own)),
            ChannelMessage::Stable(stable) if from == COORDINATOR => {
                state.stable = state.stable.max(stable);
                drop(state);
                self.changed.notify_all();
                return None;
            }
            ChannelMessage::Has(has) if is_coordinator => (state.record_results(from, has, own), Vec::new()),
            ChannelMessage::Leaves(has) if is_coordinator => {
                let reports = state.record_results(from, has, own);
                state.known.leaves.insert(from);
                if state.stable >= has {
                    (reports.into_iter().chain([(from, state.stable)]).collect(), Vec::new())
                } else {
                    (reports, state.ranks_to_ask(has, Instant::now()))
                }
            }
            _ => return None,
        };
        drop(state);
        self.changed.notify_all();
        reports.into_iter().for_each(|(to, stable)| self.send(to, &ChannelMessage::Stable(stable)));
        to_ask.into_iter().for_each(|to| self.send(to, &ChannelMessage::Ask));
        None
    }

    /// Process an event of the channel. Returns the view that a rank wants to change, and the reply.
    fn handle(&self, event: OobEvent) -> (Option<u64>, Option<Vec<u8>>) {
        if let OobEvent::Message(from, bytes) = &event
            && let Ok(
                note @ (ChannelMessage::Leaves(_)
                | ChannelMessage::Ask
                | ChannelMessage::Has(_)
                | ChannelMessage::Stable(_)),
            ) = postcard::from_bytes(bytes)
        {
            let answer = self.on_results(*from, &note);
            return (None, answer.and_then(|note| postcard::to_allocvec(&note).ok()));
        }
        let mut state = self.lock();
        if let OobEvent::Gone(rank) | OobEvent::Silent(rank) = event
            && state.is_leaving
        {
            state.is_coordinator_gone |= rank == COORDINATOR && matches!(event, OobEvent::Gone(_));
            return (None, None);
        }
        let (epoch, event) = match event {
            OobEvent::Gone(rank) => (state.epoch, PeerEvent::Gone(rank)),
            OobEvent::Silent(rank) => (state.epoch, PeerEvent::Silent(rank)),
            OobEvent::Message(from, bytes) => match postcard::from_bytes::<ChannelMessage<ViewMessage>>(&bytes) {
                Ok(ChannelMessage::View(epoch, message)) => (epoch, PeerEvent::Message(from, Box::new(message))),
                Ok(_) => return (None, None),
                Err(error) => {
                    tracing::warn!(%from, %error, "ignored a malformed message from another rank");
                    return (None, None);
                }
            },
        };
        if let PeerEvent::Message(from, message) = &event {
            let asks = matches!(**message, Message::Call { .. } | Message::Prepare { .. } | Message::Promise { .. });
            let answer = match &state.last_commit {
                Some((dead, _)) if asks && epoch < state.epoch && dead.contains_key(from) => Some(Message::Excluded),
                Some((_, last_commit)) if asks && epoch + 1 == state.epoch => Some(last_commit.clone()),
                _ if asks && epoch >= state.epoch && state.has_ended => Some(Message::Farewell),
                _ => None,
            };
            if answer.is_some() || epoch < state.epoch {
                return (
                    None,
                    answer.and_then(|message| postcard::to_allocvec(&ChannelMessage::View(epoch, message)).ok()),
                );
            }
        }
        if state.has_ended {
            return (None, None);
        }
        if state.events.len() >= EVENTS_PER_RANK_MAX * state.ranks {
            // Senders repeat what matters.
            state.events.pop_front();
        }
        state.events.push_back((epoch, event));
        drop(state);
        self.changed.notify_all();
        (Some(epoch), None)
    }

    /// Return the first event of this view, waiting for it, or for [`Inbox::wake`], for at most `timeout`.
    pub(super) fn next(&self, timeout: Duration) -> Option<PeerEvent> {
        let mut state = self.lock();
        if state.events.iter().all(|(epoch, _)| *epoch > state.epoch) {
            state = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0;
        }
        let at = state.events.iter().position(|(epoch, _)| *epoch <= state.epoch)?;
        state.events.remove(at).map(|(_, event)| event)
    }

    /// Return whether an event of this view is queued.
    pub(super) fn has_event(&self) -> bool {
        let state = self.lock();
        state.events.iter().any(|(epoch, _)| *epoch <= state.epoch)
    }

    /// Return whether a queued event ends the execution of a plan: a higher ballot, or a dead rank that is not in
    /// `dead`. A silent rank is dead only if no controller would report that.
    pub(super) fn interrupts_plan(&self, dead: &Dead, has_controller: bool) -> bool {
        let state = self.lock();
        let is_news = |rank: &Rank| !dead.contains_key(rank);
        state.events.iter().filter(|(epoch, _)| *epoch <= state.epoch).any(|(_, event)| match event {
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
}

/// A rank's end of the channel.
#[derive(Debug)]
pub(super) struct MembershipChannel {
    notes: OobChannel,
    inbox: Arc<Inbox>,
}

impl MembershipChannel {
    /// Start the channel. It calls `on_view_change` with every view that a rank wants to change.
    pub(super) fn start(
        (rank, token): (Rank, JobToken),
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
        on_view_change: impl Fn(u64) + Send + 'static,
    ) -> std::io::Result<Self> {
        let ranks = addresses.len();
        let inbox = Arc::new(Inbox::new(rank, ranks));
        let to = Arc::clone(&inbox);
        let max_len_bytes = REPORT_MAX_BYTES.saturating_mul(ranks).min(u32::MAX as usize);
        let notes = OobChannel::start((rank, token, max_len_bytes), listener, addresses, move |event| {
            let (view, answer) = to.handle(event);
            view.into_iter().for_each(&on_view_change);
            answer
        })?;
        inbox.sender.get_or_init(|| Arc::clone(notes.sender()));
        Ok(Self { notes, inbox })
    }

    /// Return the inbox.
    pub(super) const fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Send a message about the current view.
    pub(super) fn send_view_message(&self, to: Rank, message: &ViewMessage) {
        let epoch = self.inbox.lock().epoch;
        self.inbox.send(to, &ChannelMessage::View(epoch, message.clone()));
    }

    /// This rank wants to leave: find out whether all ranks have these results, as it has ([`Inbox::is_stable`]).
    pub(super) fn ask_for_stable(&self, wanted: Watermark) {
        let inbox = &self.inbox;
        let mut state = inbox.lock();
        state.is_leaving = true;
        if inbox.own != COORDINATOR {
            drop(state);
            inbox.watch(vec![COORDINATOR], true);
            return inbox.send(COORDINATOR, &ChannelMessage::Leaves(wanted));
        }
        let reports = state.record_results(COORDINATOR, wanted, wanted);
        let to_ask = state.ranks_to_ask(wanted, Instant::now());
        drop(state);
        reports.into_iter().for_each(|(to, stable)| inbox.send(to, &ChannelMessage::Stable(stable)));
        to_ask.into_iter().for_each(|to| inbox.send(to, &ChannelMessage::Ask));
    }

    /// This rank leaves, and all ranks have its results. If it is rank 0, it reports that to all, because it cannot be
    /// asked later.
    pub(super) fn announce_departure(&self) {
        let (ranks, stable) = {
            let state = self.inbox.lock();
            (state.ranks as u32, state.stable)
        };
        if self.inbox.own == COORDINATOR && stable > Watermark::new(0, 0) {
            (1..ranks).for_each(|rank| self.inbox.send(Rank(rank), &ChannelMessage::Stable(stable)));
        }
    }

    /// The view has changed: from now on reply with `commit` to ranks that do not know yet.
    pub(super) fn install_view(&self, dead: Dead, commit: ViewMessage) {
        let mut state = self.inbox.lock();
        state.epoch += 1;
        state.last_commit = Some((dead, commit));
        let epoch = state.epoch;
        state.events.retain(|(of, event)| *of >= epoch && matches!(event, PeerEvent::Message(..)));
    }

    /// This rank ends, and takes no further part.
    pub(super) fn end(&self) {
        self.inbox.lock().has_ended = true;
        self.notes.sender().watch([]);
    }
}

/// Return the authority by which a rank is dead whose process has ended, or that does not respond.
pub(super) const fn authority(has_controller: bool) -> Authority {
    // A rank that reaches the controller is not cut off, so what the other rank's host reports is true.
    if has_controller { Authority::Confirmed } else { Authority::Suspicion }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::{Ballot, Outcome};

    fn inbox() -> Inbox {
        let inbox = Inbox::new(Rank(0), 3);
        inbox.lock().epoch = 3;
        inbox
    }

    fn note(from: u32, epoch: u64, message: &ViewMessage) -> OobEvent {
        OobEvent::Message(Rank(from), postcard::to_allocvec(&ChannelMessage::View(epoch, message)).expect("in memory"))
    }

    fn call() -> ViewMessage {
        Message::Call { dead: Dead::new() }
    }

    fn answered(inbox: &Inbox, event: OobEvent) -> Option<(u64, ViewMessage)> {
        inbox.handle(event).1.map(|note| match postcard::from_bytes(&note).expect("as it was") {
            ChannelMessage::View(epoch, message) => (epoch, message),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn message_of_a_later_view_is_queued_until_then() {
        let inbox = inbox();
        assert_eq!(inbox.handle(note(1, 4, &call())), (Some(4), None));
        assert!(!inbox.has_event());
        assert_eq!(inbox.next(Duration::ZERO), None);
        assert_eq!(inbox.handle(note(2, 3, &Message::Farewell)), (Some(3), None));
        assert_eq!(inbox.next(Duration::ZERO), Some(PeerEvent::Message(Rank(2), Box::new(Message::Farewell))));
        inbox.lock().epoch = 4;
        assert_eq!(inbox.next(Duration::ZERO), Some(PeerEvent::Message(Rank(1), Box::new(call()))));
    }

    #[test]
    fn rank_that_is_behind_gets_the_commit_as_reply() {
        let inbox = inbox();
        let decision = Decision { cut: 7, operation: 1, failure: None };
        let dead = Dead::from([(Rank(2), Authority::Suspicion)]);
        let outcome = Outcome { dead: vec![Rank(2)], decision, vote: 0 };
        let commit = Message::Commit { outcome, dead: dead.clone() };
        inbox.lock().last_commit = Some((dead, commit.clone()));
        assert_eq!(answered(&inbox, note(1, 2, &call())), Some((2, commit)));
        assert_eq!(answered(&inbox, note(2, 2, &call())), Some((2, Message::Excluded)));
        assert_eq!(answered(&inbox, note(1, 1, &call())), None);
        let ballot = Ballot { attempt: 1, coordinator: Rank(1) };
        // A late message that asks for nothing gets no reply.
        assert_eq!(inbox.handle(note(1, 2, &Message::Done { ballot, vote: 0 })), (None, None));
        inbox.lock().has_ended = true;
        assert_eq!(answered(&inbox, note(1, 3, &call())), Some((3, Message::Farewell)));
        assert!(!inbox.has_event());
    }

    #[test]
    fn malformed_message_is_ignored() {
        let inbox = inbox();
        assert_eq!(inbox.handle(OobEvent::Message(Rank(1), vec![0, 3, 77])), (None, None));
        assert_eq!(inbox.handle(OobEvent::Message(Rank(1), vec![99])), (None, None));
        assert!(!inbox.has_event());
    }

    fn event(from: u32, note: &ChannelMessage<ViewMessage>) -> OobEvent {
        OobEvent::Message(Rank(from), postcard::to_allocvec(note).expect("in memory"))
    }

    /// Rank 0 counts itself as well; views count before chunks.
    #[test]
    fn results_are_stable_when_the_last_rank_has_them() {
        let inbox = inbox();
        let wanted = Watermark::new(1, 40);
        inbox.handle(event(1, &ChannelMessage::Leaves(wanted)));
        inbox.publish(Watermark::new(1, 44));
        inbox.handle(event(2, &ChannelMessage::Has(Watermark::new(0, 1 << 40))));
        assert!(!inbox.is_stable(wanted));
        inbox.handle(event(2, &ChannelMessage::Has(Watermark::new(1, 39))));
        assert!(!inbox.is_stable(wanted) && inbox.is_stable(Watermark::new(1, 39)));
        inbox.handle(event(2, &ChannelMessage::Has(Watermark::new(1, 44))));
        assert!(inbox.is_stable(wanted) && !inbox.is_stable(Watermark::new(1, 41)));
        // Reports of other ranks and of unknown ranks are ignored.
        inbox.handle(event(2, &ChannelMessage::Stable(Watermark::new(1, 44))));
        inbox.handle(event(7, &ChannelMessage::Has(Watermark::new(9, 0))));
        assert!(!inbox.is_stable(Watermark::new(1, 41)));
    }

    #[test]
    fn ask_is_answered_with_the_highest_published_watermark() {
        let inbox = inbox();
        inbox.publish(Watermark::new(0, 7));
        inbox.publish(Watermark::new(0, 5));
        let answer = inbox.handle(event(0, &ChannelMessage::Ask)).1.expect("an answer");
        assert_eq!(
            postcard::from_bytes::<ChannelMessage<ViewMessage>>(&answer),
            Ok(ChannelMessage::Has(Watermark::new(0, 7)))
        );
        assert!(!inbox.has_event());
    }

    #[test]
    fn disconnect_while_leaving_is_no_death() {
        let inbox = inbox();
        inbox.lock().is_leaving = true;
        assert_eq!(inbox.handle(OobEvent::Gone(COORDINATOR)), (None, None));
        assert!(inbox.is_coordinator_gone() && !inbox.has_event());
    }

    /// Messages that belong to the plan, and deaths that are known, do not interrupt it.
    #[test]
    fn higher_ballots_and_new_deaths_interrupt_a_plan() {
        let known = Dead::from([(Rank(2), Authority::Confirmed)]);
        let ballot = Ballot { attempt: 2, coordinator: Rank(0) };
        let interrupts_plan = |event, has_controller| {
            let inbox = inbox();
            inbox.handle(event);
            inbox.interrupts_plan(&known, has_controller)
        };
        let newly = Dead::from([(Rank(1), Authority::Confirmed)]);
        assert!(interrupts_plan(note(1, 3, &Message::Call { dead: newly }), true));
        assert!(interrupts_plan(note(0, 3, &Message::Prepare { ballot, dead: Dead::new() }), true));
        assert!(interrupts_plan(OobEvent::Gone(Rank(1)), true) && interrupts_plan(OobEvent::Silent(Rank(1)), false));
        assert!(!interrupts_plan(OobEvent::Gone(Rank(2)), true) && !interrupts_plan(OobEvent::Silent(Rank(1)), true));
        assert!(!interrupts_plan(note(1, 3, &Message::Done { ballot, vote: 0 }), true));
        assert!(!interrupts_plan(note(1, 3, &Message::Call { dead: known.clone() }), true));
        assert!(!interrupts_plan(note(0, 4, &Message::Prepare { ballot, dead: Dead::new() }), true));
    }
}
