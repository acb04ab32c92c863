//! What reaches a communicator while one of its calls waits: that a rank is lost, and that its own program wants no more.

use crate::reference;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use sumac_hal::ids::Rank;
use sumac_hal::udp::Waker;

/// What ends a communicator from outside of its calls: the first rank that the controller said is lost, and this rank's
/// own wish.
#[derive(Debug)]
pub(super) struct Lost {
    is_set: AtomicBool,
    is_cancelled: AtomicBool,
    rank: Mutex<Option<Rank>>,
    /// Wakes who waits for packets.
    waker: Waker,
    /// Wakes who waits for a device by reference, once there is one.
    reference: OnceLock<reference::Waker>,
}

impl Lost {
    pub(super) const fn new(waker: Waker) -> Self {
        let (is_set, is_cancelled) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { is_set, is_cancelled, rank: Mutex::new(None), waker, reference: OnceLock::new() }
    }

    /// Wake this from now on as well.
    pub(super) fn attach(&self, waker: reference::Waker) {
        // Attached once, when joining.
        let _ = self.reference.set(waker);
    }

    fn wake(&self) {
        self.waker.wake();
        self.reference.get().inspect(|waker| waker.wake());
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
