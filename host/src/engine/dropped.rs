//! Dropped handles: queued without waiting for a call that runs on another thread, and processed by it or by the next
//! one.

use crate::exec::message::Ticket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The queue of dropped handles.
#[derive(Debug, Default)]
pub(crate) struct Dropped {
    is_any: AtomicBool,
    handles: Mutex<(Vec<u64>, Vec<Ticket>)>,
}

impl Dropped {
    /// Queue a dropped handle of a started operation.
    pub(crate) fn push(&self, handle: u64) {
        self.lock().0.push(handle);
        self.is_any.store(true, Ordering::Release);
    }

    /// Queue a dropped handle of a started message.
    pub(crate) fn push_message(&self, ticket: Ticket) {
        self.lock().1.push(ticket);
        self.is_any.store(true, Ordering::Release);
    }

    /// Return whether the queue has entries.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }

    /// Drain the queue.
    pub(crate) fn take(&self) -> (Vec<u64>, Vec<Ticket>) {
        let mut handles = self.lock();
        self.is_any.store(false, Ordering::Release);
        std::mem::take(&mut *handles)
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<u64>, Vec<Ticket>)> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
