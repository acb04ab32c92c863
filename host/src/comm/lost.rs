//! What reaches a communicator while one of its calls waits: that a rank is lost, that a rank's tree is, and that its own
//! program wants no more.
//!
//! Whatever it is, it is noted before who waits is woken, and who waits looks after it was made known to be woken
//! ([`Lost::set_wakers`]): nothing is missed, whichever came first.

use super::core::Core;
use super::offer::Offers;
use crate::controller::proto::QueuePlace;
use crate::reference;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use sumac_hal::ids::Rank;
use sumac_hal::udp::Waker;

/// What reaches a communicator from outside of its calls: the first rank that the controller said is lost, the last view
/// whose tree is, and this rank's own wish.
#[derive(Debug)]
pub(super) struct Lost {
    is_set: AtomicBool,
    is_cancelled: AtomicBool,
    rank: Mutex<Option<Rank>>,
    /// The last view whose tree is lost, and one; 0: none is.
    repairs: AtomicU32,
    wakers: Mutex<Wakers>,
    /// Where to move, among calls.
    pub(super) offers: Offers,
    /// The job's place in the queue for a tree, as the controller said last; what it said on joining until it says more.
    queue: Mutex<Queue>,
    /// Whom to repair if none of its calls does.
    core: OnceLock<Weak<Mutex<Core>>>,
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
    reference: Option<reference::Waker>,
}

impl Lost {
    pub(super) const fn new(waker: Waker) -> Self {
        let (is_set, is_cancelled) = (AtomicBool::new(false), AtomicBool::new(false));
        let wakers = Mutex::new(Wakers { port: Some(waker), reference: None });
        let queue = Mutex::new(Queue { place: None, is_told: false });
        Self {
            queue,
            is_set,
            is_cancelled,
            rank: Mutex::new(None),
            repairs: AtomicU32::new(0),
            wakers,
            offers: Offers::new(),
            core: OnceLock::new(),
        }
    }

    fn wakers(&self) -> MutexGuard<'_, Wakers> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wake this from now on as well.
    pub(super) fn attach(&self, waker: reference::Waker) {
        self.wakers().reference = Some(waker);
    }

    /// Wake these from now on, and none else: the tree is another one. Look at what was noted before waiting on them.
    pub(super) fn set_wakers(&self, port: Option<Waker>, reference: Option<reference::Waker>) {
        *self.wakers() = Wakers { port, reference };
    }

    fn wake(&self) {
        self.offers.wake();
        let wakers = self.wakers();
        wakers.port.iter().for_each(Waker::wake);
        wakers.reference.iter().for_each(reference::Waker::wake);
    }

    /// Repair this communicator if none of its calls does.
    pub(super) fn serve(&self, core: &Arc<Mutex<Core>>) {
        // Set once, when it has joined.
        let _ = self.core.set(Arc::downgrade(core));
        // What was asked for before found nobody to do it.
        if let Some(view) = self.repair_wanted().checked_sub(1) {
            self.repair(view);
        }
    }

    /// The controller says that the tree of a view is lost.
    pub(super) fn repair(&self, view: u32) {
        self.repairs.fetch_max(view.saturating_add(1), Ordering::Release);
        self.wake();
        let Some(core) = self.core.get().cloned() else { return };
        // Waits for a call that runs, which then has repaired it; the caller's thread has more to read. Nor may the last of
        // a communicator end there: it waits for that thread.
        let serve = move || {
            if let Some(core) = core.upgrade() {
                super::lock(&core).serve_repair(view);
            }
        };
        let served = thread::Builder::new().name("repair".into()).spawn(serve);
        if let Err(error) = served {
            tracing::error!(%error, view, "no thread for a repair: this rank takes part with its next call");
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

    pub(super) fn set(&self, rank: Rank) {
        if let Ok(mut first) = self.rank.lock() {
            first.get_or_insert(rank);
        }
        self.is_set.store(true, Ordering::Release);
        self.wake();
    }

    /// This rank's own program wants no more of the communicator.
    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    pub(super) fn rank(&self) -> Option<Rank> {
        if !self.is_set.load(Ordering::Acquire) {
            return None;
        }
        self.rank.lock().ok().and_then(|rank| *rank)
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
        assert_eq!((lost.rank(), lost.is_cancelled()), (None, false));
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
}
