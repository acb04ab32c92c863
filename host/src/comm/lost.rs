//! What reaches a communicator while one of its calls waits: that a rank is lost, that the job is over, that a rank's tree
//! is lost, that another rank wants the view to change, that the controller is gone, and that its own program wants no more.
//!
//! Whatever it is, it is noted before who waits is woken, and who waits looks after it was made known to be woken
//! ([`Lost::set_wakers`]): nothing is missed, whichever came first.

use super::core::Core;
use super::dropped::Dropped;
use super::error::Error;
use super::offer::Offers;
use super::parley::Inbox;
use crate::controller::proto::{Over, QueuePlace};
use crate::transport::memory;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use sumac_hal::ids::Rank;
use sumac_hal::shm::ProcessMark;
use sumac_hal::udp::Waker;

/// What reaches a communicator from outside of its calls.
#[derive(Debug)]
pub(super) struct Lost {
    /// Whether there is any news of `news`.
    is_set: AtomicBool,
    is_cancelled: AtomicBool,
    /// The process that joined.
    process: ProcessMark,
    news: Mutex<News>,
    /// The last view whose tree is lost, and one; 0: none is.
    repairs: AtomicU32,
    /// The job's view as the controller of the moment has said when it took the job over.
    job_view: AtomicU32,
    wakers: Mutex<Wakers>,
    /// Where to move, among calls.
    pub(super) offers: Offers,
    /// Handles that nobody has any more.
    pub(super) dropped: Dropped,
    /// The job's place in the queue for a tree, as the controller said last; what it said on joining until it says more.
    queue: Mutex<Queue>,
    /// Whom to repair if none of its calls does.
    core: OnceLock<Weak<Mutex<Core>>>,
    /// Those that do.
    serving: Mutex<Vec<JoinHandle<()>>>,
}

/// Whether a controller stands behind a job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ControllerState {
    /// It does.
    #[default]
    Present,
    /// It is gone. The next one at its address takes the job over; operations go on meanwhile.
    Away,
    /// The one that is there does not take this rank in. Operations go on without, for good: no other tree is found for
    /// them, and nobody says who is left.
    Refused {
        /// Why.
        reason: String,
    },
}

/// What is known of the other ranks.
#[derive(Debug, Default)]
struct News {
    /// Those that the controller said are lost, in the order of its saying so.
    dead: Vec<Rank>,
    /// The last view that another rank wants to change, and one; 0: none does.
    called: u64,
    controller: ControllerState,
    /// What has ended the job at another rank, or at this one.
    over: Option<Over>,
}

/// Where the job stands in the controller's queue.
#[derive(Debug)]
struct Queue {
    place: Option<QueuePlace>,
    is_told: bool,
}

/// Who is woken.
#[derive(Debug)]
struct Wakers {
    /// Who waits for packets.
    port: Option<Waker>,
    /// Who waits for a device by reference.
    reference: Option<memory::Waker>,
    /// Who changes the view.
    inbox: Option<Arc<Inbox>>,
}

impl Lost {
    pub(super) fn new(waker: Waker) -> Self {
        let (is_set, is_cancelled) = (AtomicBool::new(false), AtomicBool::new(false));
        let wakers = Mutex::new(Wakers { port: Some(waker), reference: None, inbox: None });
        let queue = Mutex::new(Queue { place: None, is_told: false });
        Self {
            queue,
            is_set,
            is_cancelled,
            process: ProcessMark::new(),
            news: Mutex::default(),
            repairs: AtomicU32::new(0),
            job_view: AtomicU32::new(0),
            wakers,
            offers: Offers::new(),
            dropped: Dropped::default(),
            core: OnceLock::new(),
            serving: Mutex::default(),
        }
    }

    /// Tell whether this process was forked from the one that joined.
    pub(super) fn is_forked(&self) -> bool {
        self.process.is_forked()
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wakers(&self) -> MutexGuard<'_, Wakers> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wake this from now on as well.
    pub(super) fn attach(&self, waker: memory::Waker) {
        self.wakers().reference = Some(waker);
    }

    /// Wake these from now on, and none else: the tree is another one. Look at what was noted before waiting on them.
    pub(super) fn set_wakers(&self, port: Option<Waker>, reference: Option<memory::Waker>) {
        let mut wakers = self.wakers();
        (wakers.port, wakers.reference) = (port, reference);
    }

    /// Return who is woken for the tree.
    pub(super) fn tree_wakers(&self) -> (Option<Waker>, Option<memory::Waker>) {
        let wakers = self.wakers();
        (wakers.port.clone(), wakers.reference.clone())
    }

    /// Wake who changes the view as well.
    pub(super) fn set_inbox(&self, inbox: Arc<Inbox>) {
        self.wakers().inbox = Some(Arc::clone(&inbox));
        if !self.has_controller() {
            inbox.watch(Vec::new(), false);
        }
    }

    fn wake(&self) {
        self.offers.wake();
        let wakers = self.wakers();
        wakers.port.iter().for_each(Waker::wake);
        wakers.reference.iter().for_each(memory::Waker::wake);
        wakers.inbox.iter().for_each(|inbox| inbox.wake());
    }

    /// Repair this communicator if none of its calls does.
    pub(super) fn serve(&self, core: &Arc<Mutex<Core>>) {
        // Set once, when it has joined.
        let _ = self.core.set(Arc::downgrade(core));
        // What was asked for before found nobody to do it.
        if self.repair_wanted() > 0 || self.is_set.load(Ordering::Acquire) {
            self.serve_aside();
        }
    }

    /// The controller says that the tree of a view is lost.
    pub(super) fn repair(&self, view: u32) {
        self.repairs.fetch_max(view.saturating_add(1), Ordering::Release);
        self.wake();
        self.serve_aside();
    }

    /// Let the view change if no call sees to that.
    fn serve_aside(&self) {
        let Some(core) = self.core.get().cloned() else { return };
        // Waits for a call that runs, which then has seen to it; the caller's thread has more to read. Nor may the last of
        // a communicator end there: it waits for that thread.
        let serve = move || {
            if let Some(core) = core.upgrade() {
                super::lock(&core).serve_change();
            }
        };
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_cancelled() {
            // Nobody may wait for it any more.
            return;
        }
        let served = thread::Builder::new().name("repair".into()).spawn(serve);
        serving.retain(|thread| !thread.is_finished());
        match served {
            Ok(thread) => serving.push(thread),
            Err(error) => {
                tracing::error!(%error, "no thread for a repair: this rank takes part with its next call");
            }
        }
    }

    /// Wait until nobody repairs any more what is over for this rank.
    pub(super) fn wait_for_served(&self) {
        let serving = std::mem::take(&mut *self.serving.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in serving {
            // A panic there has been reported.
            let _ = thread.join();
        }
    }

    /// Return the first view that needs no repair as far as is known: one more than the last view whose tree is lost, 0
    /// if no tree is. A communicator at a lower view is to ask for another tree.
    pub(super) fn repair_wanted(&self) -> u32 {
        self.repairs.load(Ordering::Acquire)
    }

    /// The controller says where the job stands in its queue.
    pub(super) fn set_queue_place(&self, place: Option<QueuePlace>) {
        *self.queue() = Queue { place, is_told: true };
    }

    /// It said so on joining; what it has said since is newer, though it may have been read before.
    pub(super) fn begin_queue(&self, place: Option<QueuePlace>) {
        let mut queue = self.queue();
        if !queue.is_told {
            queue.place = place;
        }
    }

    pub(super) fn queue_place(&self) -> Option<QueuePlace> {
        self.queue().place
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The controller says that a rank is lost.
    pub(super) fn set(&self, rank: Rank) {
        let mut news = self.news();
        news.dead.push(rank);
        self.is_set.store(true, Ordering::Release);
        drop(news);
        self.wake();
        self.serve_aside();
    }

    /// The controller says that the job is over.
    pub(super) fn over(&self, over: Over) {
        self.news().over.get_or_insert(over);
        self.is_set.store(true, Ordering::Release);
        self.wake();
        self.serve_aside();
    }

    /// Return what has ended the job, by the controller's word.
    pub(super) fn word(&self) -> Option<Error> {
        if !self.is_set.load(Ordering::Acquire) {
            return None;
        }
        self.news().over.clone().map(Error::from)
    }

    /// Another rank wants a view to change.
    pub(super) fn call(&self, epoch: u64) {
        let mut news = self.news();
        if news.called > epoch {
            return;
        }
        news.called = epoch + 1;
        self.is_set.store(true, Ordering::Release);
        drop(news);
        self.wake();
        self.serve_aside();
    }

    /// Nobody says any more who is lost, nor where to move: where it may have said that to some, all ranks find out.
    pub(super) fn controller_gone(&self) {
        let in_doubt = self.offers.lose_controller();
        self.set_controller(ControllerState::Away);
        let inbox = self.wakers().inbox.clone();
        match inbox.filter(|_| in_doubt) {
            Some(inbox) => self.call(inbox.epoch()),
            None if in_doubt => self.offers.alone(),
            None => {}
        }
    }

    /// A controller has taken the job over, in that view: who is lost is its word again.
    pub(super) fn controller_back(&self, view: u32) {
        self.job_view.fetch_max(view, Ordering::Release);
        self.set_controller(ControllerState::Present);
    }

    /// A controller does not take this rank in.
    pub(super) fn refused(&self, reason: String) {
        self.set_controller(ControllerState::Refused { reason });
    }

    fn set_controller(&self, state: ControllerState) {
        let is_there = state == ControllerState::Present;
        self.news().controller = state;
        let inbox = self.wakers().inbox.clone();
        inbox.iter().for_each(|inbox| inbox.watch(Vec::new(), is_there));
        self.wake();
    }

    pub(super) fn controller(&self) -> ControllerState {
        self.news().controller.clone()
    }

    pub(super) fn has_controller(&self) -> bool {
        self.news().controller == ControllerState::Present
    }

    /// Return the least that the job's view is.
    pub(super) fn job_view(&self) -> u32 {
        self.job_view.load(Ordering::Acquire)
    }

    /// Tell whether this view is to change, as others are lost or say so.
    pub(super) fn is_unsettled(&self, epoch: u64) -> bool {
        if !self.is_set.load(Ordering::Acquire) {
            return false;
        }
        let news = self.news();
        !news.dead.is_empty() || news.called > epoch || news.over.is_some()
    }

    /// This rank's own program wants no more of the communicator.
    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    /// Return all ranks that are lost, the first one first.
    pub(super) fn ranks(&self) -> Vec<Rank> {
        self.news().dead.clone()
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
    fn the_highest_repair_counts_and_wakes() {
        let mut port = port();
        let lost = Lost::new(port.waker());
        assert_eq!(lost.repair_wanted(), 0);
        for (view, wanted) in [(0, 1), (4, 5), (2, 5)] {
            lost.repair(view);
            assert_eq!((lost.repair_wanted(), port.wait(Some(Duration::ZERO))), (wanted, Wake::Woken));
        }
        assert_eq!((lost.ranks(), lost.is_cancelled()), (vec![], false));
    }

    #[test]
    fn the_wakers_of_another_tree_take_the_place_of_the_first() {
        let (mut first, mut second) = (port(), port());
        let lost = Lost::new(first.waker());
        lost.set_wakers(Some(second.waker()), None);
        lost.set(Rank(1));
        let woken = [&mut first, &mut second].map(|port| port.wait(Some(Duration::ZERO)));
        assert_eq!(woken, [Wake::Timeout, Wake::Woken]);
        lost.set_wakers(None, None);
        lost.cancel();
        let woken = [&mut first, &mut second].map(|port| port.wait(Some(Duration::ZERO)));
        assert_eq!((woken, lost.is_cancelled()), ([Wake::Timeout; 2], true));
    }

    #[test]
    fn a_view_is_unsettled_until_it_has_changed_and_for_good_if_ranks_are_dead() {
        let mut port = port();
        let lost = Lost::new(port.waker());
        assert!(!lost.is_unsettled(0));
        lost.call(0);
        assert_eq!(port.wait(Some(Duration::ZERO)), Wake::Woken);
        assert!(lost.is_unsettled(0) && !lost.is_unsettled(1));
        // Said again, it is no news.
        lost.call(0);
        assert_eq!(port.wait(Some(Duration::ZERO)), Wake::Timeout);
        lost.set(Rank(2));
        lost.set(Rank(0));
        assert!(lost.is_unsettled(9));
        assert_eq!(lost.ranks(), [Rank(2), Rank(0)]);
        assert!(lost.has_controller());
        lost.controller_gone();
        assert!(!lost.has_controller());
        lost.controller_back(3);
        assert!(lost.has_controller());
        assert_eq!(lost.job_view(), 3);
        lost.controller_gone();
        lost.refused("another job has its name".into());
        assert!(!lost.has_controller());
        assert_eq!(lost.controller(), ControllerState::Refused { reason: "another job has its name".into() });
    }
}
