//! A device's asynchronous events: it fails, its addresses change, or a queue pair that stops has used its last buffer.
//!
//! Whoever uses the device polls them for all; a poll without events is one system call, so it is not part of every
//! turn.
//!
//! Invariant: every event is acknowledged in the call that reads it, as objects that have unacknowledged events cannot
//! be destroyed (ibv_get_async_event(3)).

use super::ibv;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// What the events of a device have reported.
#[derive(Debug, Default)]
pub(super) struct Events {
    has_failed: AtomicBool,
    changes: AtomicU32,
    /// Queue pairs whose last receive buffer was reached, until they are asked for or destroyed.
    reached: Mutex<Vec<u32>>,
}

impl Events {
    /// Read all pending events of a device.
    pub(super) fn poll(&self, context: NonNull<ibv::ibv_context>) {
        loop {
            let mut event = MaybeUninit::<ibv::ibv_async_event>::zeroed();
            // SAFETY: an open device, whose descriptor does not block, and room for an event.
            if unsafe { ibv::ibv_get_async_event(context.as_ptr(), event.as_mut_ptr()) } != 0 {
                let error = io::Error::last_os_error();
                if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                    // The kernel has removed the device.
                    self.has_failed.store(true, Ordering::Relaxed);
                }
                return;
            }
            // SAFETY: filled in, and all zeros would be valid too.
            let mut event = unsafe { event.assume_init() };
            self.take(&event);
            // SAFETY: read just now, and acknowledged once.
            unsafe { ibv::ibv_ack_async_event(&raw mut event) };
        }
    }

    fn take(&self, event: &ibv::ibv_async_event) {
        match event.event_type {
            ibv::IBV_EVENT_DEVICE_FATAL => self.has_failed.store(true, Ordering::Relaxed),
            ibv::IBV_EVENT_QP_LAST_WQE_REACHED => {
                // SAFETY: the event's queue pair, which is not destroyed before the event is acknowledged.
                let number = unsafe { (*event.element.qp).qp_num };
                self.reached().push(number);
            }
            ibv::IBV_EVENT_GID_CHANGE
            | ibv::IBV_EVENT_LID_CHANGE
            | ibv::IBV_EVENT_PKEY_CHANGE
            | ibv::IBV_EVENT_SM_CHANGE
            | ibv::IBV_EVENT_CLIENT_REREGISTER
            | ibv::IBV_EVENT_PORT_ACTIVE => _ = self.changes.fetch_add(1, Ordering::Relaxed),
            _ => {}
        }
    }

    fn reached(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        // A panic elsewhere leaves the list consistent.
        self.reached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return whether the last receive buffer of this queue pair was reached, and forget it.
    pub(super) fn take_reached(&self, number: u32) -> bool {
        let mut reached = self.reached();
        let before = reached.len();
        reached.retain(|known| *known != number);
        reached.len() < before
    }

    /// Return whether the device has failed: nothing on it makes progress again.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Consider the device failed, because it does not respond.
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Return how often addresses have changed, or a port has come up.
    pub(super) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }
}

/// Let reads of a device's events not block.
pub(super) fn set_nonblocking(context: NonNull<ibv::ibv_context>) -> io::Result<()> {
    let file = file_of(&context);
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// Return the descriptor that is readable while a device has events.
pub(super) fn file_of(context: &NonNull<ibv::ibv_context>) -> BorrowedFd<'_> {
    // SAFETY: an open device, whose descriptor is open as long as it.
    unsafe { BorrowedFd::borrow_raw(context.as_ref().async_fd) }
}
