//! Host side of a queue pair of the function, wake-ups, and admin commands.
//!
//! Invariant: each completion on the admin queue answers exactly one open command.

use super::error::ProtocolViolation;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, EntryStatus, SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::ring::{Consumer, Poisoned, Producer};
use sumac_hal::shm::{Bell, FunctionQueue, FunctionRing, ring};

/// Host side of a queue pair: producer of submissions, consumer of completions.
#[derive(Debug)]
pub(super) struct HostQueue {
    pub(super) submissions: Producer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    pub(super) completions: Consumer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    pub(super) queue: FunctionQueue,
    bell: Bell,
}

impl HostQueue {
    pub(super) fn new(queue: FunctionQueue, bell: Bell) -> Self {
        let submissions = Producer::new(queue.submissions.clone());
        Self { submissions, completions: Consumer::new(queue.completions.clone()), queue, bell }
    }

    /// Submit as many entries as fit, and ring the device's doorbell. Returns how many.
    pub(super) fn submit(&mut self, entries: &[[u64; SUBMISSION_WORDS]]) -> Result<usize, Poisoned> {
        let count = self.submissions.push_batch(entries)?;
        self.bell.ring(self.queue.device_bell());
        Ok(count)
    }

    /// Ring the device's doorbell without a submission, so that its heartbeat moves.
    pub(super) fn ring_device(&self) {
        self.bell.ring(self.queue.device_bell());
    }

    /// Return whether a completion is available, or the ring is corrupt.
    pub(super) fn has_completions(&mut self) -> bool {
        self.completions.available().map_or(true, |count| count > 0)
    }
}

/// Wakes the thread that waits for the device, from any thread.
#[derive(Debug, Clone)]
pub struct Waker {
    queue: FunctionQueue,
    raised: Arc<AtomicBool>,
    /// An eventfd, for waits that poll file descriptors.
    event: Option<Arc<OwnedFd>>,
}

impl Waker {
    pub(super) fn new(queue: FunctionQueue, event: Option<Arc<OwnedFd>>) -> Self {
        Self { queue, raised: Arc::new(AtomicBool::new(false)), event }
    }

    /// End the current wait, or the next one if there is none.
    pub fn wake(&self) {
        self.raised.store(true, Ordering::Release);
        match &self.event {
            // Writing fails only when the counter is full, and then the descriptor is readable anyway.
            Some(event) => _ = rustix::io::write(event, &1_u64.to_ne_bytes()),
            None => ring(self.queue.host_bell()),
        }
    }

    pub(super) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Consume a pending wake-up.
    pub(super) fn take(&self) -> bool {
        self.raised.swap(false, Ordering::AcqRel)
    }
}

/// What to do with the reply to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A caller waits for it.
    Awaited,
    /// The caller gave up waiting; a region that it registered must be deregistered.
    Abandoned,
    /// It deregisters this region.
    Deregister(RegionKey),
}

/// The reply to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AdminReply {
    pub(super) cookie: u64,
    pub(super) purpose: Purpose,
    pub(super) status: EntryStatus,
    pub(super) value: u64,
}

/// The admin queue and its open commands.
#[derive(Debug)]
pub(super) struct Admin {
    pub(super) queue: HostQueue,
    next_cookie: u64,
    open: Vec<(u64, Purpose)>,
}

impl Admin {
    pub(super) const fn new(queue: HostQueue) -> Self {
        Self { queue, next_cookie: 0, open: Vec::new() }
    }

    /// Submit a command, and return its cookie; `None` if the ring is full.
    pub(super) fn submit(&mut self, command: AdminCommand, purpose: Purpose) -> Result<Option<u64>, ProtocolViolation> {
        let cookie = self.next_cookie;
        if self.queue.submit(&[SubmissionEntry::Admin { cookie, command }.emit()])? == 0 {
            return Ok(None);
        }
        self.next_cookie += 1;
        self.open.push((cookie, purpose));
        Ok(Some(cookie))
    }

    /// Return whether any command is open.
    pub(super) const fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Mark a command as no longer waited for.
    pub(super) fn abandon(&mut self, cookie: u64) {
        if let Some((_, purpose)) = self.open.iter_mut().find(|(open, _)| *open == cookie) {
            *purpose = Purpose::Abandoned;
        }
    }

    /// Return the next reply.
    pub(super) fn poll(&mut self) -> Result<Option<AdminReply>, ProtocolViolation> {
        let Some(words) = self.queue.completions.pop()? else { return Ok(None) };
        let misplaced = ProtocolViolation::UnexpectedEntry { queue: 0 };
        let CompletionEntry::Admin { status, cookie, value } = CompletionEntry::parse(&words)? else {
            return Err(misplaced);
        };
        let index = self.open.iter().position(|(open, _)| *open == cookie).ok_or(misplaced)?;
        let (_, purpose) = self.open.swap_remove(index);
        Ok(Some(AdminReply { cookie, purpose, status, value }))
    }
}
