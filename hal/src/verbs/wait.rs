//! Sleeping until a packet arrives, and being woken from another thread.
//!
//! As in [`udp`](crate::udp), a wait first looks a little, then yields a few times, and only then sleeps, on the completion
//! channel. Where the hardware is emulated by this machine's own processors, yielding is what lets it work.
//!
//! Invariant: no packet is slept over. The queue is armed before the last look: what comes after that makes the channel
//! readable.

use super::VerbsPort;
use crate::port::Wake;
use crate::udp::wait::{Sleeper, look};
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

    /// Sleep until the channel or the waker has something, or time is up. Woken: what is watched besides has something.
    fn sleep(&mut self, timeout: Option<Duration>) -> Option<Wake> {
        self.rx.arm();
        if let Some(wake) = look(self) {
            return Some(wake);
        }
        let channel = self.channel.fd();
        // With nothing watched, the third is the first once more.
        let watched = self.watched.as_ref().map_or(channel, AsFd::as_fd);
        let mut fds = [channel, self.waker.file(), watched].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // Out of the structure's range means never: 292 billion years.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return None; // Interrupted: the caller's loop looks again.
        }
        let [channel, woken, watched] = fds.map(|fd| fd.revents().contains(PollFlags::IN));
        if woken {
            self.waker.drain_unraised();
        }
        if channel {
            self.channel.take_events();
        }
        (self.watched.is_some() && watched).then_some(Wake::Woken)
    }
}
