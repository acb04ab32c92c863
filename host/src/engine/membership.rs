//! The membership channel: messages between ranks outside of collectives. [`Membership`] decides what follows from
//! them; this carries them, replies without involving a call, and wakes whoever changes the view ([`super::change`]), a
//! call or a thread, or waits to leave ([`super::leave`]).

use crate::exec::JobSecret;
use crate::exec::oob::{OobChannel, OobEvent, OobSender};
use crate::recovery::{Dead, MemberEvent, MemberMessage, Membership, PeerEvent, ViewMessage, Watermark};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// The longest report of one rank that is accepted. Inventories are runs of chunks, not single chunks.
const REPORT_MAX_BYTES: usize = 1 << 20;

/// A rank's membership, with its waiters.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<Membership>,
    changed: Condvar,
    sender: OnceLock<Arc<OobSender>>,
    /// The results that this rank has.
    watermark: AtomicU64,
}

impl Inbox {
    fn new(own: Rank, ranks: usize) -> Self {
        let (state, sender) = (Mutex::new(Membership::new(own, ranks)), OnceLock::new());
        Self { state, changed: Condvar::new(), sender, watermark: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Membership> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the current view.
    pub(super) fn epoch(&self) -> u64 {
        self.lock().epoch()
    }

    /// Wake waiters.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Monitor the connections to these ranks ([`Membership::monitored`]).
    pub(super) fn watch(&self, ranks: Vec<Rank>, has_controller: bool) {
        let monitored = self.lock().monitored(ranks, has_controller);
        self.sender.get().iter().for_each(|sender| sender.watch(monitored.iter().copied()));
    }

    /// Publish the results that this rank has. The watermark never decreases.
    pub(super) fn publish(&self, watermark: Watermark) {
        self.watermark.fetch_max(watermark.to_bits(), Ordering::Release);
    }

    fn watermark(&self) -> Watermark {
        Watermark::from_bits(self.watermark.load(Ordering::Acquire))
    }

    /// Return whether all ranks have these results.
    pub(super) fn is_stable(&self, wanted: Watermark) -> bool {
        self.lock().is_stable(wanted)
    }

    /// Wait until all ranks have these results, or a waiter is woken, for at most `timeout`.
    pub(super) fn wait_for_stable(&self, wanted: Watermark, timeout: Duration) {
        let state = self.lock();
        if !state.is_stable(wanted) {
            drop(self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// This rank does not leave yet: a disconnected rank counts as dead again.
    pub(super) fn cancel_leaving(&self) {
        self.lock().cancel_leaving();
    }

    /// Return whether rank 0, which collects the results, has disconnected.
    pub(super) fn is_coordinator_gone(&self) -> bool {
        self.lock().is_coordinator_gone()
    }

    fn send(&self, to: Rank, message: &MemberMessage) {
        match (postcard::to_allocvec(message), self.sender.get()) {
            (Ok(bytes), Some(sender)) => sender.send(to, bytes),
            (Ok(_), None) => {}
            (Err(error), _) => crate::log::error!(%error, "cannot encode a message to another rank"),
        }
    }

    fn send_all(&self, messages: Vec<(Rank, MemberMessage)>) {
        messages.into_iter().for_each(|(to, message)| self.send(to, &message));
    }

    /// Process an event of the channel. Returns the view that a rank wants to change, and the reply.
    fn handle(&self, event: OobEvent) -> (Option<u64>, Option<Vec<u8>>) {
        let event = match event {
            OobEvent::Gone(rank) => MemberEvent::Gone(rank),
            OobEvent::Silent(rank) => MemberEvent::Silent(rank),
            OobEvent::Message(from, bytes) => match postcard::from_bytes(&bytes) {
                Ok(message) => MemberEvent::Message(from, Box::new(message)),
                Err(error) => {
                    crate::log::warn!(%from, %error, "ignored a malformed message from another rank");
                    return (None, None);
                }
            },
        };
        let own = self.watermark();
        let reaction = self.lock().handle(event, own, Instant::now());
        if reaction.wakes {
            self.changed.notify_all();
        }
        self.send_all(reaction.sends);
        (reaction.requested_view, reaction.reply.and_then(|reply| postcard::to_allocvec(&reply).ok()))
    }

    /// Return the first event of this view, waiting for it, or for [`Inbox::wake`], for at most `timeout`.
    pub(super) fn next(&self, timeout: Duration) -> Option<PeerEvent> {
        let mut state = self.lock();
        if !state.has_event() {
            state = self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.next_event()
    }

    /// Return whether an event of this view is queued.
    pub(super) fn has_event(&self) -> bool {
        self.lock().has_event()
    }

    /// Return whether a queued event ends the execution of a plan ([`Membership::interrupts_plan`]).
    pub(super) fn interrupts_plan(&self, dead: &Dead, has_controller: bool) -> bool {
        self.lock().interrupts_plan(dead, has_controller)
    }
}

/// A rank's end of the channel.
#[derive(Debug)]
pub(super) struct MembershipChannel {
    own: Rank,
    notes: OobChannel,
    inbox: Arc<Inbox>,
}

impl MembershipChannel {
    /// Start the channel. It calls `on_view_change` with every view that a rank wants to change.
    pub(super) fn start(
        (rank, secret): (Rank, JobSecret),
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
        on_view_change: impl Fn(u64) + Send + 'static,
    ) -> std::io::Result<Self> {
        let ranks = addresses.len();
        let inbox = Arc::new(Inbox::new(rank, ranks));
        let to = Arc::clone(&inbox);
        let max_len_bytes = REPORT_MAX_BYTES.saturating_mul(ranks).min(u32::MAX as usize);
        let notes = OobChannel::start((rank, secret, max_len_bytes), listener, addresses, move |event| {
            let (view, answer) = to.handle(event);
            view.into_iter().for_each(&on_view_change);
            answer
        })?;
        inbox.sender.get_or_init(|| Arc::clone(notes.sender()));
        Ok(Self { own: rank, notes, inbox })
    }

    /// Return the inbox.
    pub(super) const fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Send a message about the current view.
    pub(super) fn send_view_message(&self, to: Rank, message: ViewMessage) {
        let message = self.inbox.lock().view_message(message);
        self.inbox.send(to, &message);
    }

    /// This rank wants to leave: find out whether all ranks have these results, as it has ([`Inbox::is_stable`]).
    pub(super) fn ask_for_stable(&self, wanted: Watermark) {
        let messages = self.inbox.lock().leave(wanted, Instant::now());
        if self.own != Membership::COORDINATOR {
            self.inbox.watch(vec![Membership::COORDINATOR], true);
        }
        self.inbox.send_all(messages);
    }

    /// This rank leaves, and all ranks have its results ([`Membership::departure`]).
    pub(super) fn announce_departure(&self) {
        let messages = self.inbox.lock().departure();
        self.inbox.send_all(messages);
    }

    /// The view has changed: from now on reply with `commit` to ranks that do not know yet.
    pub(super) fn install_view(&self, dead: Dead, commit: ViewMessage) {
        self.inbox.lock().install_view(dead, commit);
    }

    /// This rank ends, and takes no further part.
    pub(super) fn end(&self) {
        self.inbox.lock().end();
        self.notes.sender().watch([]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_message_is_ignored() {
        let inbox = Inbox::new(Rank(0), 3);
        assert_eq!(inbox.handle(OobEvent::Message(Rank(1), vec![0, 3, 77])), (None, None));
        assert_eq!(inbox.handle(OobEvent::Message(Rank(1), vec![99])), (None, None));
        assert!(!inbox.has_event());
    }

    #[test]
    fn ask_is_answered_with_the_highest_published_watermark() {
        let inbox = Inbox::new(Rank(0), 3);
        inbox.publish(Watermark::new(0, 7));
        inbox.publish(Watermark::new(0, 5));
        let ask = postcard::to_allocvec(&MemberMessage::Ask).expect("in memory");
        let answer = inbox.handle(OobEvent::Message(Rank(0), ask)).1.expect("an answer");
        assert_eq!(postcard::from_bytes::<MemberMessage>(&answer), Ok(MemberMessage::Has(Watermark::new(0, 7))));
        assert!(!inbox.has_event());
    }
}
