//! The board's end of the admission queue, by which the host's broker attaches and detaches ranks.
//!
//! Invariant: a request is taken only if there is room for its reply, and for one unsolicited `Detached` for each rank
//! slot.

use super::Ring;
use heapless::Deque;
use sumac_hal::mmio::admission::{ADMISSION_DEPTH, AdmissionReply, AdmissionRequest, RANK_SLOTS_MAX};
use sumac_hal::mmio::{Bar, COMPLETION_WORDS, DeviceStatus, Queue, SUBMISSION_WORDS};
use sumac_hal::ring::{Consumer, Producer};

/// The board's end of the admission queue.
#[derive(Debug)]
pub(super) struct AdmissionQueue {
    bar: Bar<'static>,
    requests: Consumer<Ring<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    answers: Producer<Ring<COMPLETION_WORDS>, COMPLETION_WORDS>,
    /// Room for the replies to all outstanding requests, and for one unsolicited `Detached` for each rank slot.
    pending: Deque<AdmissionReply, { 2 * RANK_SLOTS_MAX + ADMISSION_DEPTH as usize }>,
    has_failed: bool,
    heartbeat: u32,
}

impl AdmissionQueue {
    /// Open an empty queue.
    pub(super) fn new(bar: Bar<'static>, queue: Queue<'static>) -> Self {
        Self {
            bar,
            requests: Consumer::new(queue.submissions),
            answers: Producer::new(queue.completions),
            pending: Deque::new(),
            has_failed: false,
            heartbeat: 0,
        }
    }

    /// Show the host that the board is alive.
    pub(super) fn beat(&mut self) {
        self.heartbeat = self.heartbeat.wrapping_add(1);
        self.bar.set_heartbeat(self.heartbeat);
    }

    /// Return the next request, if there is room for its reply.
    pub(super) fn next_request(&mut self) -> Option<AdmissionRequest> {
        if self.has_failed || self.pending.iter().len() + RANK_SLOTS_MAX >= self.pending.capacity() {
            return None;
        }
        let request = self.requests.pop().ok().map(|words| words.map(|words| AdmissionRequest::parse(&words)));
        match request {
            Some(None) => None,
            Some(Some(Some(request))) => Some(request),
            _ => {
                self.end();
                None
            }
        }
    }

    /// Stop the admission queue, and show it in the function's status.
    pub(super) fn end(&mut self) {
        self.has_failed = true;
        self.bar.set_status(DeviceStatus::FAILED);
    }

    /// Queue a reply.
    pub(super) fn reply(&mut self, answer: AdmissionReply) {
        // `next_request` reserves room for replies, and for all rank slots.
        if self.pending.push_back(answer).is_err() {
            self.end();
        }
    }

    /// Hand the host the replies that its ring has room for.
    pub(super) fn publish(&mut self) {
        while let Some(answer) = self.pending.front() {
            match self.answers.push(&answer.emit()) {
                Ok(true) => drop(self.pending.pop_front()),
                Ok(false) => return,
                Err(_) => return self.end(),
            }
        }
    }
}
