//! Waiting for the device: on its doorbell where memory is shared, on messages where it is on another host.
//!
//! A dead device wakes nobody, so a sleep is cut into slices, and between them the connection and the heartbeat are looked at.

use super::driver::{ReferenceDriver, YIELDS};
use super::far::Way;
use super::queue::{Ends, Waker};
use std::time::{Duration, Instant};
use sumac_hal::ring::Patience;
use sumac_hal::shm::Waiter;

/// So many chunks come soon enough to be looked for; for more, a wait sleeps at once.
const FEW_CHUNKS: u64 = 3;

/// Which queue is waited on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Admin,
    Data,
}

impl ReferenceDriver {
    /// Return what wakes a wait, from any thread.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Sleep until the device has something, the driver is woken or `timeout` has passed; it may return earlier, and
    /// does so often enough for [`ReferenceDriver::pump`] to see that the device is gone.
    pub fn wait(&mut self, timeout: Option<Duration>) {
        let deadline = Instant::now() + timeout.unwrap_or(self.slice).min(self.slice);
        if let Way::Far(_) = self.way {
            self.wait_far(deadline, Queue::Data);
            self.waker.take();
            return;
        }
        let Ends { completions, queue, .. } = &mut self.data;
        // Counted modulo 2^32 on both sides.
        queue.host_wants().set(self.endpoint.wanted() as u32);
        // Much to wait for takes long: the device and its engine want the cores meanwhile.
        let waiter = if self.endpoint.on_its_way() > FEW_CHUNKS { Waiter::new(Patience::NONE) } else { self.waiter };
        let waker = &self.waker;
        let news = || waker.is_raised() || completions.available().map_or(true, |count| count > 0);
        if let Err(error) = waiter.wait(&[queue.host_bell()], Some(deadline), news) {
            // Without futexes the rings are still there to look at.
            tracing::debug!(device = self.device, %error, "can't sleep on a doorbell");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.waker.take();
    }

    /// Sleep until an answer to a command is there, or the deadline has passed; true if one is.
    pub(super) fn wait_for_answer(&mut self, deadline: Instant) -> bool {
        if let Way::Far(_) = self.way {
            return self.wait_far(deadline, Queue::Admin);
        }
        let Ends { completions, queue, .. } = &mut self.admin.ends;
        let news = || completions.available().map_or(true, |count| count > 0);
        self.waiter.wait(&[queue.host_bell()], Some(deadline), news).unwrap_or(false)
    }

    /// Take in what a device on another host has sent, and send it what was submitted; true if there was anything.
    pub(super) fn carry(&mut self) -> bool {
        let Way::Far(far) = &mut self.way else { return false };
        let any = far.turn(&self.function);
        self.gone |= far.is_lost();
        any
    }

    /// Sleep until a device on another host has put something into this queue, this side is woken, or the deadline has passed;
    /// true if something is there.
    fn wait_far(&mut self, deadline: Instant, queue: Queue) -> bool {
        let mut yields = 0;
        loop {
            self.carry();
            let ends = if queue == Queue::Admin { &mut self.admin.ends } else { &mut self.data };
            let is_news = ends.has_news();
            let is_woken = queue == Queue::Data && self.waker.is_raised();
            if is_news || is_woken || self.gone || Instant::now() >= deadline {
                return is_news;
            }
            let Way::Far(far) = &mut self.way else { return false };
            if yields < YIELDS {
                yields += 1;
                std::thread::yield_now();
            } else {
                far.sleep(&self.function, deadline);
            }
        }
    }
}
