//! A connected device: requests out, responses in, paired by number.
//!
//! A device does what it is told in the order of telling. So several requests are posted before the first answer is waited
//! for, and what a posted release frees can be given out again at once. Posting does not wait: it queues, and a device that
//! does not read or not answer is hung up on.

use super::books::{Amount, DeviceKey};
use super::line::{Frames, Line};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{Announce, Envelope, Refusal, Request, Response, Stats};
use thiserror::Error;

/// Why a device did not do what it was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum DeviceError {
    /// It said so.
    #[error("it refused: {0}")]
    Refused(#[from] Refusal),
    /// It is gone, or does not answer.
    #[error("it is gone, or did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
    Gone,
    /// It answered something else.
    #[error("it answered what was not asked")]
    Answer,
}

/// A connected device.
#[derive(Debug)]
pub(super) struct DeviceSession {
    pub(super) announce: Announce,
    calls: Mutex<Calls>,
    /// It has let somebody wait in vain, and said nothing since.
    is_silent: AtomicBool,
}

/// What was asked, until it is answered.
#[derive(Debug)]
pub(super) struct Asked {
    id: u32,
    answer: Receiver<Response>,
}

#[derive(Debug)]
struct Calls {
    line: Box<dyn Line>,
    next_id: u32,
    waiting: BTreeMap<u32, Sender<Response>>,
    /// The first question for counters that somebody has waited for in vain, until it is answered.
    late_stats: Option<u32>,
    ended: bool,
}

impl DeviceSession {
    /// Describe a device that is told over this line.
    pub(super) fn on(announce: Announce, line: Box<dyn Line>) -> Self {
        let calls = Calls { line, next_id: 0, waiting: BTreeMap::new(), late_stats: None, ended: false };
        Self { announce, calls: Mutex::new(calls), is_silent: AtomicBool::new(false) }
    }

    /// Return which life of which device it is.
    pub(super) fn key(&self) -> DeviceKey {
        DeviceKey { name: self.name().to_owned(), boot_id: self.announce.boot_id }
    }

    /// Return what it has.
    pub(super) fn room(&self) -> Amount {
        let capabilities = &self.announce.capabilities;
        Amount {
            groups: u64::from(capabilities.groups),
            slots: u64::from(capabilities.slots),
            memory_bytes: capabilities.slot_memory_bytes,
            redo_memory_bytes: self.announce.bus.as_ref().map_or(0, |bus| bus.redo_memory_bytes),
        }
    }

    /// Tell whether it answered when it was last asked.
    pub(super) fn answers(&self) -> bool {
        !self.is_silent.load(Ordering::Acquire) && !self.lock().ended
    }

    pub(super) fn name(&self) -> &str {
        self.announce.name.as_str()
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Welcome the device; its answer repeats what it announced and is not waited for.
    pub(super) fn hello(&self) {
        if let Ok(frames) = Frames::of(&Envelope { id: u32::MAX, message: Request::Hello }) {
            self.lock().line.put(&[frames]);
        }
    }

    /// Hand a response to who waits for it.
    pub(super) fn take(&self, response: Envelope<Response>) {
        self.is_silent.store(false, Ordering::Release);
        let mut calls = self.lock();
        calls.late_stats = calls.late_stats.filter(|late| *late != response.id);
        if let Some(waiter) = calls.waiting.remove(&response.id) {
            // Who waited may have given up.
            let _ = waiter.send(response.message);
        }
    }

    /// The connection has ended, and with it every wait.
    pub(super) fn end(&self) {
        let mut calls = self.lock();
        calls.ended = true;
        calls.waiting.clear();
    }

    /// End the connection: the device dials again.
    pub(super) fn hang_up(&self) {
        self.lock().line.hang_up();
    }

    /// Tell whether nothing more has to be waited for.
    #[cfg(feature = "snapshot")]
    pub(super) fn is_answered(&self, asked: &Asked) -> bool {
        !self.lock().waiting.contains_key(&asked.id)
    }

    /// Ask for something; the answer is waited for by [`DeviceSession::done`] or [`DeviceSession::counted`], or by nobody.
    pub(super) fn post(&self, message: Request) -> Result<Asked, DeviceError> {
        let (sender, receiver) = channel();
        let mut calls = self.lock();
        if calls.ended {
            return Err(DeviceError::Gone);
        }
        let id = calls.next_id;
        calls.next_id = id.wrapping_add(1) % u32::MAX;
        calls.waiting.insert(id, sender);
        // Renewals come one a group.
        let most = UNANSWERED_MAX + 4 * usize::from(self.announce.capabilities.groups).min(UNANSWERED_GROUPS_MAX);
        let is_told = || Frames::of(&Envelope { id, message }).is_ok_and(|frames| calls.line.put(&[frames]));
        if calls.waiting.len() > most || !is_told() {
            calls.ended = true;
            calls.line.hang_up();
            return Err(DeviceError::Gone);
        }
        Ok(Asked { id, answer: receiver })
    }

    fn answer(&self, asked: &Asked, deadline: Instant) -> Result<Response, DeviceError> {
        let answer = self.hear(asked, deadline);
        if matches!(answer, Err(DeviceError::Gone)) {
            self.is_silent.store(true, Ordering::Release);
        }
        answer
    }

    fn hear(&self, asked: &Asked, deadline: Instant) -> Result<Response, DeviceError> {
        match asked.answer.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Response::Refused(refusal)) => Err(refusal.into()),
            Ok(response) => Ok(response),
            Err(_) => Err(DeviceError::Gone),
        }
    }

    /// Wait for the answer to something that is either done or refused.
    pub(super) fn done(&self, asked: &Asked, deadline: Instant) -> Result<(), DeviceError> {
        match self.answer(asked, deadline)? {
            Response::Done => Ok(()),
            _ => Err(DeviceError::Answer),
        }
    }

    /// Wait for the answer to [`Request::Stats`].
    pub(super) fn counted(&self, asked: &Asked, deadline: Instant) -> Result<Stats, DeviceError> {
        match self.answer(asked, deadline)? {
            Response::Stats(stats) => Ok(stats),
            _ => Err(DeviceError::Answer),
        }
    }

    /// The same for a report, which waits less: a device that is late counts as there for all others.
    pub(super) fn counted_soon(&self, asked: &Asked, deadline: Instant) -> Result<Stats, DeviceError> {
        match self.hear(asked, deadline) {
            Ok(Response::Stats(stats)) => Ok(stats),
            Ok(_) => Err(DeviceError::Answer),
            Err(error) => {
                let mut calls = self.lock();
                // It may have come since.
                if matches!(error, DeviceError::Gone) && calls.waiting.contains_key(&asked.id) {
                    calls.late_stats.get_or_insert(asked.id);
                }
                Err(error)
            }
        }
    }

    /// Tell whether it owes an answer about its counters that was waited for long enough: nobody waits for the next one.
    pub(super) fn owes_stats(&self) -> bool {
        self.lock().late_stats.is_some()
    }
}

/// Return until when a device that is asked now may answer.
pub(super) fn answer_due() -> Instant {
    Instant::now() + ANSWER_TIMEOUT
}

/// The most requests that a device may leave unanswered, beside some for each group.
const UNANSWERED_MAX: usize = 256;

/// For so many groups at most, whatever the device says.
const UNANSWERED_GROUPS_MAX: usize = 4096;

/// How long a device may take to answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
