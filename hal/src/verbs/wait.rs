//! Sleeping until a packet arrives, and being woken from another thread.
//!
//! As in [`udp`](crate::udp), a wait first looks a little, then yields a few times, and only then sleeps, on the completion
//! channel. Where the hardware is emulated by this machine's own processors, yielding is what lets it work.
//!
//! Invariant: no packet is slept over. The queue is armed before the last look: what comes after that makes the channel
//! readable.

use super::VerbsPort;
use crate::port::Wake;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How often a wait yields before it sleeps.
const YIELDS: u32 = 4;

impl VerbsPort {
    pub(super) fn wait_for(&mut self, timeout: Option<Duration>) -> Wake {
        if let Some(wake) = self.look() {
            return wake;
        }
        if timeout == Some(Duration::ZERO) {
            return Wake::Timeout;
        }
        let start = Instant::now();
        // A timeout beyond the clock's end is none.
        let deadline = timeout.and_then(|timeout| start.checked_add(timeout));
        let spin_until = start + self.spin;
        let mut yields = 0;
        loop {
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Wake::Timeout;
            }
            if now < spin_until {
                std::hint::spin_loop();
            } else if yields < YIELDS {
                yields += 1;
                std::thread::yield_now();
            } else {
                self.rx.arm();
                if let Some(wake) = self.look() {
                    return wake;
                }
                if self.sleep(deadline.map(|deadline| deadline - now)) {
                    return Wake::Woken;
                }
            }
            if let Some(wake) = self.look() {
                return wake;
            }
        }
    }

    /// Look for a packet or a wake without sleeping.
    fn look(&mut self) -> Option<Wake> {
        if self.waker.take() {
            Some(Wake::Woken)
        } else if self.fill() {
            Some(Wake::Packet)
        } else {
            None
        }
    }

    /// Sleep until the channel or the waker has something, or time is up. True: what is watched besides has something.
    fn sleep(&mut self, timeout: Option<Duration>) -> bool {
        let channel = self.channel.fd();
        // With nothing watched, the third is the first once more.
        let watched = self.watched.as_ref().map_or(channel, AsFd::as_fd);
        let mut fds = [channel, self.waker.file(), watched].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // Out of the structure's range means never: 292 billion years.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return false; // Interrupted: the caller's loop looks again.
        }
        let [channel, woken, watched] = fds.map(|fd| fd.revents().contains(PollFlags::IN));
        if woken {
            self.waker.drain_unraised();
        }
        if channel {
            self.channel.take_events();
        }
        self.watched.is_some() && watched
    }
}
