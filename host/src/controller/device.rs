//! A connected device: outgoing requests, matched to responses by number.
//!
//! A device executes requests in the order in which they were posted. Several can be posted before waiting for the
//! first response, and what a posted release frees can be reserved again at once. Posting never blocks: requests are
//! queued, and a device that stops reading or responding is disconnected.

use super::outbox::{Frames, MessageSink};
use super::resources::{DeviceKey, Resources};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{Announce, Envelope, Refusal, Request, Response, Stats};
use thiserror::Error;

/// Why a request to a device failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum DeviceError {
    /// The device refused.
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    /// The device is disconnected or does not respond.
    #[error("no response within {} s, or disconnected", REPLY_TIMEOUT.as_secs())]
    Unreachable,
    /// The response does not match the request.
    #[error("unexpected response")]
    UnexpectedResponse,
}

/// A connected device.
#[derive(Debug)]
pub(super) struct DeviceSession {
    pub(super) announce: Announce,
    calls: Mutex<Calls>,
    /// A request timed out, and nothing has been received since.
    is_unresponsive: AtomicBool,
}

/// A posted request whose response is outstanding.
#[derive(Debug)]
pub(super) struct PendingReply {
    id: u32,
    reply: Receiver<Response>,
}

#[derive(Debug)]
struct Calls {
    sink: Box<dyn MessageSink>,
    next_id: u32,
    waiting: BTreeMap<u32, Sender<Response>>,
    /// The first request for counters that timed out, until its response arrives.
    overdue_stats: Option<u32>,
    /// The request of [`DeviceSession::probe`] that counts, and when it was posted.
    probe: Option<(u32, Instant)>,
    is_closed: bool,
}

impl DeviceSession {
    /// Create a session that sends requests to `sink`.
    pub(super) fn new(announce: Announce, sink: Box<dyn MessageSink>) -> Self {
        let calls =
            Calls { sink, next_id: 0, waiting: BTreeMap::new(), overdue_stats: None, probe: None, is_closed: false };
        Self { announce, calls: Mutex::new(calls), is_unresponsive: AtomicBool::new(false) }
    }

    /// The device's name and incarnation.
    pub(super) fn key(&self) -> DeviceKey {
        DeviceKey { name: self.name().to_owned(), boot_id: self.announce.boot_id }
    }

    /// The resources that the device announced.
    pub(super) fn capacity(&self) -> Resources {
        let capabilities = &self.announce.capabilities;
        Resources {
            groups: u64::from(capabilities.groups),
            slots: u64::from(capabilities.slots),
            memory_bytes: capabilities.slot_memory_bytes,
            redo_memory_bytes: self.announce.attach.as_ref().map_or(0, |bus| bus.redo_memory_bytes),
        }
    }

    /// Whether the device is connected and its last request did not time out.
    pub(super) fn is_responsive(&self) -> bool {
        !self.is_unresponsive.load(Ordering::Acquire) && !self.lock().is_closed
    }

    pub(super) fn name(&self) -> &str {
        self.announce.name.as_str()
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Confirm the registration. The response repeats the announcement and is ignored.
    pub(super) fn welcome(&self) {
        if let Ok(frames) = Frames::of(&Envelope { id: u32::MAX, message: Request::Identify }) {
            self.lock().sink.put(&[frames]);
        }
    }

    /// Hand a response to its waiter.
    pub(super) fn handle_response(&self, response: Envelope<Response>) {
        self.is_unresponsive.store(false, Ordering::Release);
        let mut calls = self.lock();
        calls.overdue_stats = calls.overdue_stats.filter(|late| *late != response.id);
        if let Some(waiter) = calls.waiting.remove(&response.id) {
            // The waiter may have given up.
            let _ = waiter.send(response.message);
        }
    }

    /// Fail all outstanding requests: the connection has ended.
    pub(super) fn mark_closed(&self) {
        let mut calls = self.lock();
        calls.is_closed = true;
        calls.waiting.clear();
    }

    /// Close the connection. The device will reconnect.
    pub(super) fn disconnect(&self) {
        self.lock().sink.disconnect();
    }

    /// Whether the response has arrived, or never will.
    #[cfg(feature = "snapshot")]
    pub(super) fn is_answered(&self, asked: &PendingReply) -> bool {
        !self.lock().waiting.contains_key(&asked.id)
    }

    /// Post a request. Wait for its response with [`DeviceSession::wait_done`] or [`DeviceSession::wait_stats`], or
    /// drop it.
    pub(super) fn post(&self, message: Request) -> Result<PendingReply, DeviceError> {
        let (sender, receiver) = channel();
        let mut calls = self.lock();
        if calls.is_closed {
            return Err(DeviceError::Unreachable);
        }
        let id = calls.next_id;
        calls.next_id = id.wrapping_add(1) % u32::MAX;
        calls.waiting.insert(id, sender);
        // Each round of renewals posts one request per group.
        let most = UNANSWERED_MAX + 4 * usize::from(self.announce.capabilities.groups).min(UNANSWERED_GROUPS_MAX);
        let is_queued = || Frames::of(&Envelope { id, message }).is_ok_and(|frames| calls.sink.put(&[frames]));
        if calls.waiting.len() > most || !is_queued() {
            calls.is_closed = true;
            calls.sink.disconnect();
            return Err(DeviceError::Unreachable);
        }
        Ok(PendingReply { id, reply: receiver })
    }

    /// Find out whether the device is alive: return whether it has answered an earlier probe, if that was a moment ago,
    /// and post another one. Posting also ends the connection of a machine that was reset.
    pub(super) fn probe(&self, now: Instant) -> bool {
        // The response is ignored. Too many missing responses also end the connection.
        let posted = self.post(Request::Identify);
        let mut calls = self.lock();
        let (is_pending, is_alive) = calls.probe.map_or((false, false), |(id, at)| {
            let is_pending = calls.waiting.contains_key(&id);
            (is_pending, !is_pending && now.saturating_duration_since(at) < PROBE_VALIDITY)
        });
        // Frequent probes must not replace one that the device has yet to answer.
        if let (false, Ok(asked)) = (is_pending, posted) {
            calls.probe = Some((asked.id, now));
        }
        is_alive
    }

    fn reply(&self, asked: &PendingReply, deadline: Instant) -> Result<Response, DeviceError> {
        let reply = self.recv(asked, deadline);
        if matches!(reply, Err(DeviceError::Unreachable)) {
            self.is_unresponsive.store(true, Ordering::Release);
        }
        reply
    }

    fn recv(&self, asked: &PendingReply, deadline: Instant) -> Result<Response, DeviceError> {
        match asked.reply.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Response::Refused(refusal)) => Err(refusal.into()),
            Ok(response) => Ok(response),
            Err(_) => Err(DeviceError::Unreachable),
        }
    }

    /// Wait for the response to a request that is answered with `Done` or a refusal.
    pub(super) fn wait_done(&self, asked: &PendingReply, deadline: Instant) -> Result<(), DeviceError> {
        match self.reply(asked, deadline)? {
            Response::Done => Ok(()),
            _ => Err(DeviceError::UnexpectedResponse),
        }
    }

    /// Wait for the response to [`Request::Stats`].
    pub(super) fn wait_stats(&self, asked: &PendingReply, deadline: Instant) -> Result<Stats, DeviceError> {
        match self.reply(asked, deadline)? {
            Response::Stats(stats) => Ok(stats),
            _ => Err(DeviceError::UnexpectedResponse),
        }
    }

    /// Wait for the response to [`Request::Stats`] with a report's shorter deadline. A timeout does not mark the device
    /// as unresponsive.
    pub(super) fn wait_report_stats(&self, asked: &PendingReply, deadline: Instant) -> Result<Stats, DeviceError> {
        match self.recv(asked, deadline) {
            Ok(Response::Stats(stats)) => Ok(stats),
            Ok(_) => Err(DeviceError::UnexpectedResponse),
            Err(error) => {
                let mut calls = self.lock();
                // The response may have arrived since.
                if matches!(error, DeviceError::Unreachable) && calls.waiting.contains_key(&asked.id) {
                    calls.overdue_stats.get_or_insert(asked.id);
                }
                Err(error)
            }
        }
    }

    /// Whether a request for counters timed out and is still unanswered. Reports do not query the device meanwhile.
    pub(super) fn has_overdue_stats(&self) -> bool {
        self.lock().overdue_stats.is_some()
    }
}

/// The deadline for the response to a request that is posted now.
pub(super) fn reply_deadline() -> Instant {
    Instant::now() + REPLY_TIMEOUT
}

/// How long an answered probe proves that a device is alive. Devices dial twice a second.
const PROBE_VALIDITY: Duration = Duration::from_secs(3);

/// Maximum number of unanswered requests, plus an allowance per group.
const UNANSWERED_MAX: usize = 256;

/// Maximum number of groups that count towards the allowance, whatever the device announces.
const UNANSWERED_GROUPS_MAX: usize = 4096;

/// How long a device may take to respond.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
