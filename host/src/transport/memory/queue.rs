//! Both ends of a queue that a host has, and commands on the admin queue.
//!
//! Invariant: each completion of the admin queue answers a command that is open, once.

use super::error::Breach;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, EntryStatus, SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::ring::{Consumer, Poisoned, Producer};
use sumac_hal::shm::{Bell, FunctionQueue, FunctionRing, ring};

/// A queue as its host has it.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) submissions: Producer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    pub(super) completions: Consumer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    pub(super) queue: FunctionQueue,
    bell: Bell,
}

impl Ends {
    pub(super) fn new(queue: FunctionQueue, bell: Bell) -> Self {
        let submissions = Producer::new(queue.submissions.clone());
        Self { submissions, completions: Consumer::new(queue.completions.clone()), queue, bell }
    }

    /// Submit as many entries as there is room for, and wake the device.
    pub(super) fn submit(&mut self, entries: &[[u64; SUBMISSION_WORDS]]) -> Result<usize, Poisoned> {
        let count = self.submissions.push_batch(entries)?;
        self.bell.ring(self.queue.device_bell());
        Ok(count)
    }

    /// Wake the device, if it sleeps, for nothing else than that it shows that it can be.
    pub(super) fn ask(&self) {
        self.bell.ring(self.queue.device_bell());
    }

    /// Tell whether there is anything to take in, or the ring is broken.
    pub(super) fn has_news(&mut self) -> bool {
        self.completions.available().map_or(true, |count| count > 0)
    }
}

/// Wakes the thread that waits for the device, from any thread.
#[derive(Debug, Clone)]
pub struct Waker {
    queue: FunctionQueue,
    raised: Arc<AtomicBool>,
    /// What wakes who sleeps on descriptors.
    event: Option<Arc<OwnedFd>>,
}

impl Waker {
    pub(super) fn new(queue: FunctionQueue, event: Option<Arc<OwnedFd>>) -> Self {
        Self { queue, raised: Arc::new(AtomicBool::new(false)), event }
    }

    /// Make the present wait end, or else the next one.
    pub fn wake(&self) {
        self.raised.store(true, Ordering::Release);
        match &self.event {
            // It can fail only when the counter is full, and then it is readable.
            Some(event) => _ = rustix::io::write(event, &1_u64.to_ne_bytes()),
            None => ring(self.queue.host_bell()),
        }
    }

    pub(super) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Take the wake, if there is one.
    pub(super) fn take(&self) -> bool {
        self.raised.swap(false, Ordering::AcqRel)
    }
}

/// What a command was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Somebody waits for its answer.
    Awaited,
    /// It registers memory that nobody wants any more.
    Unwanted,
    /// It takes this region back.
    Leaving(RegionKey),
}

/// The answer to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answered {
    pub(super) cookie: u64,
    pub(super) purpose: Purpose,
    pub(super) status: EntryStatus,
    pub(super) value: u64,
}

/// The admin queue.
#[derive(Debug)]
pub(super) struct Admin {
    pub(super) ends: Ends,
    next_cookie: u64,
    open: Vec<(u64, Purpose)>,
}

impl Admin {
    pub(super) const fn new(ends: Ends) -> Self {
        Self { ends, next_cookie: 0, open: Vec::new() }
    }

    /// Submit a command, and return its cookie; `None` if there is no room now.
    pub(super) fn submit(&mut self, command: AdminCommand, purpose: Purpose) -> Result<Option<u64>, Breach> {
        let cookie = self.next_cookie;
        if self.ends.submit(&[SubmissionEntry::Admin { cookie, command }.emit()])? == 0 {
            return Ok(None);
        }
        self.next_cookie += 1;
        self.open.push((cookie, purpose));
        Ok(Some(cookie))
    }

    /// Tell whether any command is open.
    pub(super) const fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// Nobody waits for a command any more.
    pub(super) fn abandon(&mut self, cookie: u64) {
        if let Some((_, purpose)) = self.open.iter_mut().find(|(open, _)| *open == cookie) {
            *purpose = Purpose::Unwanted;
        }
    }

    /// Take in the next answer.
    pub(super) fn poll(&mut self) -> Result<Option<Answered>, Breach> {
        let Some(words) = self.ends.completions.pop()? else { return Ok(None) };
        let misplaced = Breach::Misplaced { queue: 0 };
        let CompletionEntry::Admin { status, cookie, value } = CompletionEntry::parse(&words)? else {
            return Err(misplaced);
        };
        let index = self.open.iter().position(|(open, _)| *open == cookie).ok_or(misplaced)?;
        let (_, purpose) = self.open.swap_remove(index);
        Ok(Some(Answered { cookie, purpose, status, value }))
    }
}
