//! Waiting for the device: on its doorbell over shared memory, on messages for a device on another host.
//!
//! A dead device wakes nobody. Sleeps are therefore cut into intervals, between which the connection and the heartbeat
//! are checked.

use super::driver::{YIELDS, ZeroCopyDriver};
use super::queue::{HostQueue, Waker};
use super::remote::DeviceLink;
use std::time::{Duration, Instant};

/// Up to so many outstanding chunks arrive soon enough to spin for; for more, a wait is long.
const FEW_CHUNKS: u64 = 3;

/// The queue to wait on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Admin,
    Data,
}

impl ZeroCopyDriver {
    /// Return a handle that ends a wait from any thread.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Sleep until the device has posted a completion, the driver is woken, or `timeout` has passed. It may return
    /// earlier, and does so often enough for [`ZeroCopyDriver::pump`] to notice a lost device.
    pub fn wait(&mut self, timeout: Option<Duration>) {
        let deadline = Instant::now() + timeout.unwrap_or(self.poll_interval).min(self.poll_interval);
        if let DeviceLink::Remote(_) = self.device_link {
            self.wait_remote(deadline, Queue::Data);
            self.waker.take();
            return;
        }
        let HostQueue { completions, queue, .. } = &mut self.data;
        // Both sides count modulo 2^32.
        queue.host_threshold().set(self.endpoint.wake_threshold() as u32);
        // A long wait: leave the cores to the device and its engine.
        let waiter = if self.endpoint.unanswered() > FEW_CHUNKS { self.long_waiter } else { self.waiter };
        let waker = &self.waker;
        let is_ready = || waker.is_raised() || completions.available().map_or(true, |count| count > 0);
        if let Err(error) = waiter.wait(&[queue.host_bell()], Some(deadline), is_ready) {
            // Without futexes the rings can still be polled.
            crate::log::debug!(device = self.device, %error, "cannot sleep on a doorbell; polling instead");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.waker.take();
    }

    /// Sleep until a reply to a command has arrived or the deadline has passed; returns whether one has.
    pub(super) fn wait_for_answer(&mut self, deadline: Instant) -> bool {
        if let DeviceLink::Remote(_) = self.device_link {
            return self.wait_remote(deadline, Queue::Admin);
        }
        let HostQueue { completions, queue, .. } = &mut self.admin.queue;
        let is_ready = || completions.available().map_or(true, |count| count > 0);
        self.waiter.wait(&[queue.host_bell()], Some(deadline), is_ready).unwrap_or(false)
    }

    /// Exchange messages with a device on another host; returns whether there were any.
    pub(super) fn poll_link(&mut self) -> bool {
        let DeviceLink::Remote(remote) = &mut self.device_link else { return false };
        let any = remote.poll(&self.function);
        self.is_disconnected |= remote.is_lost();
        any
    }

    /// Sleep until a device on another host has posted to this queue, this side is woken, or the deadline has passed.
    /// Returns whether a completion is available.
    fn wait_remote(&mut self, deadline: Instant, queue: Queue) -> bool {
        let mut yields = 0;
        loop {
            self.poll_link();
            let host_queue = if queue == Queue::Admin { &mut self.admin.queue } else { &mut self.data };
            let is_ready = host_queue.has_completions();
            let is_woken = queue == Queue::Data && self.waker.is_raised();
            if is_ready || is_woken || self.is_disconnected || Instant::now() >= deadline {
                return is_ready;
            }
            let DeviceLink::Remote(remote) = &mut self.device_link else { return false };
            if yields < YIELDS {
                yields += 1;
                std::thread::yield_now();
            } else {
                remote.sleep(&self.function, deadline);
            }
        }
    }
}
