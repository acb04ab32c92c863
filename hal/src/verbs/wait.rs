//! Waits for packets, and wake-ups from other threads.
//!
//! As in [`udp`](crate::udp), a wait first spins, then yields a few times, and only then sleeps, on the completion
//! channel. Where processors of this machine emulate the hardware, yielding lets them work.
//!
//! Invariant: no wake-up is lost. The queue is armed before the last check, so a packet that arrives later makes the
//! channel readable.

use super::VerbsPort;
use crate::port::Wake;
use crate::udp::wait::{Sleeper, check};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::time::Duration;

impl Sleeper for VerbsPort {
    fn spin(&self) -> Duration {
        self.spin
    }

    fn take_wake(&mut self) -> bool {
        self.waker.take()
    }

    fn find_packet(&mut self) -> bool {
        self.fill()
    }

    /// Sleep until the channel or the waker is ready, the device has an event, or the timeout has passed. `Woken` if
    /// the watched descriptor is readable, or the device has failed.
    fn sleep(&mut self, timeout: Option<Duration>) -> Option<Wake> {
        self.rx.arm();
        if let Some(wake) = check(self) {
            return Some(wake);
        }
        let channel = self.channel.fd();
        // Without a watched descriptor, the third repeats the first.
        let watched = self.watched.as_ref().map_or(channel, AsFd::as_fd);
        let fds = [channel, self.waker.file(), watched, self.context.event_file()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // A duration out of the structure's range (292 billion years) means no timeout.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return None; // Interrupted: the caller's loop checks again.
        }
        let [channel, woken, watched, has_events] = fds.map(|fd| !fd.revents().is_empty());
        if woken {
            self.waker.drain_unraised();
        }
        if channel {
            self.channel.take_events();
        }
        let mut has_failed_now = false;
        if has_events {
            self.poll_events();
            has_failed_now = self.has_failed() && !std::mem::replace(&mut self.has_reported, true);
        }
        (has_failed_now || self.watched.is_some() && watched).then_some(Wake::Woken)
    }
}
