//! Notices: events that reach a communicator while one of its calls blocks. A rank or a tree is lost, the job is
//! aborted, another rank requests a view change, the controller disconnects, or the program cancels.
//!
//! State is published before waiters wake; waiters re-check it after they register ([`Notices::set_wakers`]). So no
//! notice is missed, whichever comes first.

use super::dropped::Dropped;
use super::error::Error;
use super::membership::Inbox;
use super::migration_gate::MigrationGate;
use super::submissions::Submissions;
use crate::controller::proto::{AbortReason, QueuePosition};
use crate::recovery::Migration;
use crate::transport::memory;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use sumac_hal::ids::Rank;
use sumac_hal::shm::ProcessMark;
use sumac_hal::udp::Waker;

/// Events from outside of the communicator's calls, and who is woken by them.
#[derive(Debug)]
pub(crate) struct Notices {
    /// How often anything has changed that a call looks at before it begins.
    changes: AtomicU64,
    /// Whether `peers` holds any news.
    has_news: AtomicBool,
    is_cancelled: AtomicBool,
    /// The process that joined.
    process: ProcessMark,
    peers: Mutex<PeerState>,
    /// One more than the last view whose tree is lost; 0 if none is.
    views_lost: AtomicU32,
    /// The job's view according to the controller that took the job over last.
    job_view: AtomicU32,
    wakers: Mutex<Wakers>,
    /// Where among the calls the job migrates to another tree.
    pub(super) migration: MigrationGate,
    /// Dropped handles.
    pub(crate) dropped: Dropped,
    /// The job's position in the queue for a tree.
    queue: Mutex<Queue>,
    /// Whether the job has a position there. Calls look at it instead of locking.
    is_queued: AtomicBool,
    /// Changes the view if no call does.
    on_question: OnceLock<OnQuestion>,
    /// Threads that change the view, and the progress thread.
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// What the progress thread waits on.
    submissions: OnceLock<Arc<Submissions>>,
}

/// What is done on a thread of its own when the view is in question.
struct OnQuestion(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for OnQuestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnQuestion")
    }
}

/// The state of the connection to the controller.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ControllerState {
    /// Connected.
    #[default]
    Connected,
    /// The controller is unreachable. Operations continue; the next controller at its address takes the job over.
    Disconnected,
    /// A new controller refused this rank. Operations continue without a controller for good: the job gets no other
    /// tree, and survivors of a failure need a majority.
    Refused {
        /// The reason for the refusal.
        reason: String,
    },
}

/// What is known about the other ranks.
#[derive(Debug, Default)]
struct PeerState {
    /// Ranks that the controller reported lost, in the order of the reports.
    dead: Vec<Rank>,
    /// One more than the last view that another rank wants to change; 0 if none does.
    view_changes_requested: u64,
    controller: ControllerState,
    /// Why the job was aborted, on another rank or this one.
    abort_reason: Option<AbortReason>,
}

/// The job's position in the controller's queue.
#[derive(Debug)]
struct Queue {
    position: Option<QueuePosition>,
    /// A notice has updated it since the rank joined.
    is_updated: bool,
}

/// Wakers of threads that wait.
#[derive(Debug)]
struct Wakers {
    /// Waits for packets.
    port: Option<Waker>,
    /// Waits for a zero-copy device.
    reference: Option<memory::Waker>,
    /// Waits for messages of a view change.
    inbox: Option<Arc<Inbox>>,
}

impl Notices {
    pub(super) fn new(waker: Waker) -> Self {
        let (has_news, is_cancelled) = (AtomicBool::new(false), AtomicBool::new(false));
        let wakers = Mutex::new(Wakers { port: Some(waker), reference: None, inbox: None });
        let queue = Mutex::new(Queue { position: None, is_updated: false });
        Self {
            queue,
            is_queued: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            has_news,
            is_cancelled,
            process: ProcessMark::new(),
            peers: Mutex::default(),
            views_lost: AtomicU32::new(0),
            job_view: AtomicU32::new(0),
            wakers,
            migration: MigrationGate::new(),
            dropped: Dropped::default(),
            on_question: OnceLock::new(),
            threads: Mutex::default(),
            submissions: OnceLock::new(),
        }
    }

    /// Return whether this process was forked from the one that joined.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.process.is_forked()
    }

    fn peers(&self) -> MutexGuard<'_, PeerState> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wakers(&self) -> MutexGuard<'_, Wakers> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Also wake this waker from now on.
    pub(super) fn set_memory_waker(&self, waker: memory::Waker) {
        self.wakers().reference = Some(waker);
    }

    /// Replace the wakers of the tree, because the tree has changed. Check the published state before you wait on them.
    pub(super) fn set_wakers(&self, port: Option<Waker>, reference: Option<memory::Waker>) {
        let mut wakers = self.wakers();
        (wakers.port, wakers.reference) = (port, reference);
    }

    /// Return the wakers of the tree.
    pub(super) fn tree_wakers(&self) -> (Option<Waker>, Option<memory::Waker>) {
        let wakers = self.wakers();
        (wakers.port.clone(), wakers.reference.clone())
    }

    /// Also wake this inbox from now on.
    pub(super) fn set_inbox(&self, inbox: Arc<Inbox>) {
        self.wakers().inbox = Some(Arc::clone(&inbox));
        if !self.has_controller() {
            inbox.watch(Vec::new(), false);
        }
    }

    /// Return a number that changes whenever anything has changed that a call looks at before it begins, but for the
    /// limit of the [`MigrationGate`]. Read it before that: what changes later changes the number, too.
    #[inline]
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Something that calls look at has changed, and is published.
    fn count_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Queue a dropped handle.
    pub(super) fn push_dropped(&self, push: impl FnOnce(&Dropped)) {
        push(&self.dropped);
        self.count_change();
    }

    /// Something has changed, and is published: wake whoever waits.
    pub(super) fn wake(&self) {
        self.count_change();
        self.submissions.get().into_iter().for_each(|submissions| submissions.ring());
        self.migration.wake();
        let wakers = self.wakers();
        wakers.port.iter().for_each(Waker::wake);
        wakers.reference.iter().for_each(memory::Waker::wake);
        wakers.inbox.iter().for_each(|inbox| inbox.wake());
    }

    /// Set what changes the view in the background, once the rank has joined. It blocks while a call runs, which then
    /// has changed the view. It must not drop the last share of a communicator, because that waits for its thread.
    pub(super) fn set_on_question(&self, change_view: impl Fn() + Send + Sync + 'static) {
        // Set only once.
        let _ = self.on_question.set(OnQuestion(Arc::new(change_view)));
        // Notices from before found nothing to call.
        if self.first_usable_view() > 0 || self.has_news.load(Ordering::Acquire) {
            self.spawn_view_change();
        }
    }

    /// The controller reports that the tree of a view is lost.
    pub(super) fn tree_lost(&self, view: u32) {
        self.views_lost.fetch_max(view.saturating_add(1), Ordering::Release);
        self.wake();
        self.spawn_view_change();
    }

    /// Change the view on a thread, unless a call does it.
    fn spawn_view_change(&self) {
        let Some(OnQuestion(change_view)) = self.on_question.get() else { return };
        // The caller's thread cannot do this, because it has more notices to read.
        let change_view = Arc::clone(change_view);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_cancelled() {
            // Nothing may join a new thread any more.
            return;
        }
        let served = thread::Builder::new().name("recovery".into()).spawn(move || change_view());
        threads.retain(|thread| !thread.is_finished());
        match served {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                crate::log::error!(%error, "cannot start a recovery thread: this rank takes part in its next call");
            }
        }
    }

    /// Also wake the progress thread from now on, and wait for its end with that of the others.
    pub(super) fn set_progress(&self, submissions: Arc<Submissions>, thread: JoinHandle<()>) {
        self.submissions.get_or_init(|| submissions);
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
    }

    /// Wait for the threads that change the view and make progress. One of them may be the caller, if what a buffer was
    /// kept alive by held the last share of the communicator.
    pub(super) fn join_threads(&self) {
        self.submissions.get().into_iter().for_each(|submissions| submissions.shut_down());
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let own = thread::current().id();
        for thread in threads.into_iter().filter(|thread| thread.thread().id() != own) {
            // A panic there has already been reported.
            let _ = thread.join();
        }
    }

    /// Return the first view whose tree is not known to be lost: one more than the last lost one, or 0. A communicator
    /// at a lower view must ask for another tree.
    pub(super) fn first_usable_view(&self) -> u32 {
        self.views_lost.load(Ordering::Acquire)
    }

    /// The controller reports the job's position in its queue.
    pub(super) fn set_queue_position(&self, position: Option<QueuePosition>) {
        let mut queue = self.queue();
        *queue = Queue { position, is_updated: true };
        self.is_queued.store(position.is_some(), Ordering::Release);
        self.count_change();
    }

    /// Set the position reported on joining, unless a notice has updated it already: notices are newer, but may be read
    /// first.
    pub(super) fn init_queue_position(&self, position: Option<QueuePosition>) {
        let mut queue = self.queue();
        if !queue.is_updated {
            queue.position = position;
            self.is_queued.store(position.is_some(), Ordering::Release);
            self.count_change();
        }
    }

    #[inline]
    pub(crate) fn queue_position(&self) -> Option<QueuePosition> {
        if self.is_queued.load(Ordering::Acquire) { self.queue().position } else { None }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The controller reports that a rank is lost.
    pub(super) fn rank_lost(&self, rank: Rank) {
        let mut peers = self.peers();
        peers.dead.push(rank);
        self.has_news.store(true, Ordering::Release);
        drop(peers);
        self.wake();
        self.spawn_view_change();
    }

    /// The controller reports that the job is aborted.
    pub(super) fn job_aborted(&self, reason: AbortReason) {
        self.peers().abort_reason.get_or_insert(reason);
        self.has_news.store(true, Ordering::Release);
        self.wake();
        self.spawn_view_change();
    }

    /// Return the error that the controller aborted the job with.
    pub(super) fn job_error(&self) -> Option<Error> {
        if !self.has_news.load(Ordering::Acquire) {
            return None;
        }
        self.peers().abort_reason.clone().map(Error::from)
    }

    /// Another rank requests a change of this view.
    pub(super) fn view_change_requested(&self, epoch: u64) {
        let mut peers = self.peers();
        if peers.view_changes_requested > epoch {
            return;
        }
        peers.view_changes_requested = epoch + 1;
        self.has_news.store(true, Ordering::Release);
        drop(peers);
        self.wake();
        self.spawn_view_change();
    }

    /// The controller disconnected: nothing reports lost ranks or the call to migrate at. If it may have told some
    /// ranks that call, start a view change, in which all ranks find out.
    pub(super) fn controller_lost(&self) {
        let in_doubt = self.migration.update(|migration, _| migration.controller_lost());
        self.set_controller(ControllerState::Disconnected);
        let inbox = self.wakers().inbox.clone();
        match inbox.filter(|_| in_doubt) {
            Some(inbox) => self.view_change_requested(inbox.epoch()),
            None if in_doubt => _ = self.migration.update(Migration::moved),
            None => {}
        }
    }

    /// A controller has taken the job over in this view, and reports lost ranks again.
    pub(super) fn controller_back(&self, view: u32) {
        self.job_view.fetch_max(view, Ordering::Release);
        self.set_controller(ControllerState::Connected);
    }

    /// A controller refused to take this rank over.
    pub(super) fn rejoin_refused(&self, reason: String) {
        self.set_controller(ControllerState::Refused { reason });
    }

    fn set_controller(&self, state: ControllerState) {
        let is_there = state == ControllerState::Connected;
        self.peers().controller = state;
        let inbox = self.wakers().inbox.clone();
        inbox.iter().for_each(|inbox| inbox.watch(Vec::new(), is_there));
        self.wake();
    }

    pub(crate) fn controller(&self) -> ControllerState {
        self.peers().controller.clone()
    }

    pub(super) fn has_controller(&self) -> bool {
        self.peers().controller == ControllerState::Connected
    }

    /// Return a lower bound of the job's view.
    pub(super) fn job_view(&self) -> u32 {
        self.job_view.load(Ordering::Acquire)
    }

    /// Return whether anything was reported that may call the view into question.
    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.has_news.load(Ordering::Acquire)
    }

    /// Return whether this view must change, because ranks are lost, another rank requests it or the job is aborted.
    pub(super) fn needs_view_change(&self, epoch: u64) -> bool {
        if !self.has_news() {
            return false;
        }
        let peers = self.peers();
        !peers.dead.is_empty() || peers.view_changes_requested > epoch || peers.abort_reason.is_some()
    }

    /// This rank's own program cancels the communicator.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.wake();
    }

    #[inline]
    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    /// Return the lost ranks, in the order in which they were reported.
    pub(super) fn lost_ranks(&self) -> Vec<Rank> {
        self.peers().dead.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::time::Duration;
    use sumac_hal::port::{WaitPort, Wake};
    use sumac_hal::udp::{UdpConfig, UdpPort};

    fn port() -> UdpPort {
        UdpPort::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), &UdpConfig::default()).expect("a port")
    }

    #[test]
    fn tree_loss_wakes_and_keeps_the_highest_view() {
        let mut port = port();
        let notices = Notices::new(port.waker());
        assert_eq!(notices.first_usable_view(), 0);
        for (view, wanted) in [(0, 1), (4, 5), (2, 5)] {
            notices.tree_lost(view);
            assert_eq!((notices.first_usable_view(), port.wait(Some(Duration::ZERO))), (wanted, Wake::Woken));
        }
        assert_eq!((notices.lost_ranks(), notices.is_cancelled()), (vec![], false));
    }

    #[test]
    fn set_wakers_replaces_the_wakers_of_the_first_tree() {
        let (mut first, mut second) = (port(), port());
        let notices = Notices::new(first.waker());
        notices.set_wakers(Some(second.waker()), None);
        notices.rank_lost(Rank(1));
        let woken = [&mut first, &mut second].map(|port| port.wait(Some(Duration::ZERO)));
        assert_eq!(woken, [Wake::Timeout, Wake::Woken]);
        notices.set_wakers(None, None);
        notices.cancel();
        let woken = [&mut first, &mut second].map(|port| port.wait(Some(Duration::ZERO)));
        assert_eq!((woken, notices.is_cancelled()), ([Wake::Timeout; 2], true));
    }

    /// A prepared operation relies on it: it looks at nothing else while the number stays.
    #[test]
    fn everything_that_calls_look_at_changes_the_number() {
        let notices = Notices::new(port().waker());
        let (place, mut last) = (QueuePosition { position: 1, of: 2 }, notices.changes());
        for (what, notify) in [
            ("a place", &(|| notices.init_queue_position(Some(place))) as &dyn Fn()),
            ("another place", &|| notices.set_queue_position(Some(QueuePosition { position: 0, ..place }))),
            ("no place", &|| notices.set_queue_position(None)),
            ("a lost tree", &|| notices.tree_lost(0)),
            ("a lost rank", &|| notices.rank_lost(Rank(1))),
            ("a view change", &|| notices.view_change_requested(3)),
            ("an abort", &|| notices.job_aborted(AbortReason::Stragglers { missing: vec![Rank(1)] })),
            ("a dropped handle", &|| notices.push_dropped(|dropped| dropped.push(7))),
            ("a cancellation", &|| notices.cancel()),
        ] {
            notify();
            assert!(notices.changes() > last, "{what}");
            last = notices.changes();
        }
        notices.view_change_requested(2);
        notices.init_queue_position(Some(place));
        assert_eq!(notices.changes(), last, "known before");
    }

    #[test]
    fn view_change_is_needed_once_requested_and_for_good_once_a_rank_is_lost() {
        let mut port = port();
        let notices = Notices::new(port.waker());
        assert!(!notices.needs_view_change(0));
        notices.view_change_requested(0);
        assert_eq!(port.wait(Some(Duration::ZERO)), Wake::Woken);
        assert!(notices.needs_view_change(0) && !notices.needs_view_change(1));
        // A repeated request does not wake.
        notices.view_change_requested(0);
        assert_eq!(port.wait(Some(Duration::ZERO)), Wake::Timeout);
        notices.rank_lost(Rank(2));
        notices.rank_lost(Rank(0));
        assert!(notices.needs_view_change(9));
        assert_eq!(notices.lost_ranks(), [Rank(2), Rank(0)]);
        assert!(notices.has_controller());
        notices.controller_lost();
        assert!(!notices.has_controller());
        notices.controller_back(3);
        assert!(notices.has_controller());
        assert_eq!(notices.job_view(), 3);
        notices.controller_lost();
        notices.rejoin_refused("another job has its name".into());
        assert!(!notices.has_controller());
        assert_eq!(notices.controller(), ControllerState::Refused { reason: "another job has its name".into() });
    }
}
