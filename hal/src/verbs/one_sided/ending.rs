//! The end of a connection: by a fence, or because the device has failed.

use super::OneSided;
use crate::remote::LinkError;
use crate::verbs::config::VerbsError;
use crate::verbs::pair::QueuePair;
use crate::verbs::region::ExposedRegion;
use std::time::{Duration, Instant};

/// How long to wait until a stopped connection has completed everything; beyond, it is destroyed, which waits for the
/// device. Soft-RoCE does not report the last buffer of a shared queue.
const STOP_LIMIT: Duration = Duration::from_millis(20);

/// Polls between two checks of the device, each a system call.
const POLLS_PER_CHECK: u32 = 256;

/// How long operations may be in flight without a completion before the device is considered failed: several times as
/// long as it retries (`connection::TIMEOUT`).
const STALL_LIMIT: Duration = Duration::from_secs(15);

impl OneSided {
    /// From time to time, read the device's events, and check that it completes what was posted: every operation ends,
    /// if only because the peer does not respond.
    pub(in crate::verbs) fn check_device(&mut self, has_completed: bool) {
        if has_completed || self.returned >= self.posted {
            self.stalled = None;
        }
        self.idle_polls = self.idle_polls.wrapping_add(1);
        if self.idle_polls.is_multiple_of(POLLS_PER_CHECK) {
            self.poll_events();
            if self.returned < self.posted && self.stalled.get_or_insert_with(Instant::now).elapsed() > STALL_LIMIT {
                self.context.events.fail();
            }
        }
        if self.error.is_none() && self.context.events.has_failed() {
            self.error = Some(LinkError::DeviceFailed);
        }
    }

    /// Read the device's events.
    pub(in crate::verbs) fn poll_events(&self) {
        self.context.poll_events();
    }

    /// End the connection. Afterwards no operation that the peer has begun takes effect in local memory, and every
    /// local operation has completed or never will. The given regions, whose keys the peer has, are revoked, so that no
    /// other connection can access them either.
    ///
    /// # Errors
    /// [`VerbsError`]: the peer may still access the regions, and their contents must not be trusted.
    pub fn fence<'a>(&mut self, regions: impl IntoIterator<Item = &'a mut ExposedRegion>) -> Result<(), VerbsError> {
        if !self.stop()? {
            self.destroy();
        }
        regions.into_iter().try_for_each(ExposedRegion::revoke)
    }

    /// Stop the connection, and wait for a limited time until everything that either side has begun has taken effect
    /// or never will; false if that is not known, so that the connection has to be destroyed. Unread arrivals are lost
    /// with a connection that is destroyed.
    ///
    /// # Errors
    /// [`VerbsError`]: it has to be destroyed as well.
    pub(in crate::verbs) fn stop(&mut self) -> Result<bool, VerbsError> {
        let stopped = self.stop_and_settle();
        self.error = self.error.or(Some(LinkError::Fenced));
        stopped
    }

    fn stop_and_settle(&mut self) -> Result<bool, VerbsError> {
        let Some(pair) = &mut self.pair else { return Ok(true) };
        pair.stop()?;
        let is_sharing = pair.is_sharing();
        if !is_sharing && !self.is_settled {
            pair.post_barrier();
        }
        let until = Instant::now() + STOP_LIMIT;
        loop {
            self.poll();
            let has_reached = || self.pair.as_ref().is_some_and(QueuePair::take_reached);
            self.is_settled |= is_sharing && has_reached();
            let has_stopped = self.is_settled && self.returned >= self.posted;
            if has_stopped || Instant::now() >= until {
                return Ok(has_stopped);
            }
            std::thread::yield_now();
        }
    }

    /// Destroy the queue pair: afterwards the device performs nothing for it.
    pub(in crate::verbs) fn destroy(&mut self) {
        self.pair = None;
    }
}
