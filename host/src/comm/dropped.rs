//! Handles that were dropped: noted without waiting for a call that runs on another thread, and seen to by it or by the
//! next one.

use crate::exec::message::Ticket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What nobody will wait for.
#[derive(Debug, Default)]
pub(super) struct Dropped {
    is_any: AtomicBool,
    handles: Mutex<(Vec<u64>, Vec<Ticket>)>,
}

impl Dropped {
    /// A started operation's handle is gone.
    pub(super) fn push(&self, handle: u64) {
        self.lock().0.push(handle);
        self.is_any.store(true, Ordering::Release);
    }

    /// A started message's handle is gone.
    pub(super) fn push_message(&self, ticket: Ticket) {
        self.lock().1.push(ticket);
        self.is_any.store(true, Ordering::Release);
    }

    /// Tell whether there is anything to see to.
    pub(super) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    /// Take all.
    pub(super) fn take(&self) -> (Vec<u64>, Vec<Ticket>) {
        let mut handles = self.lock();
        self.is_any.store(false, Ordering::Release);
        std::mem::take(&mut *handles)
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<u64>, Vec<Ticket>)> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
