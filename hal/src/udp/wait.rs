//! Sleeping until there is something to do, and being woken from another thread.
//!
//! A wake-up across cores costs some 20 us, so a wait first looks a little, then yields a few times (which is enough
//! when the peer shares the core), and only then sleeps in `ppoll`.
//!
//! Invariant: a wake is never lost. The flag is looked at before each sleep, and whoever raises it makes the eventfd
//! readable afterwards; an eventfd that is readable without the flag only costs one turn of the loop.

use super::UdpPort;
use crate::port::Wake;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a wait yields before it sleeps.
const YIELDS: u32 = 4;

/// A yield that took this long went to somebody who computes, not to a peer that answers.
const LONG_YIELD: Duration = Duration::from_micros(200);

struct Shared {
    raised: AtomicBool,
    event: OwnedFd,
}

/// Wakes the thread that waits on a port, from any thread.
#[derive(Clone)]
pub struct Waker {
    shared: Arc<Shared>,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { shared: Arc::new(Shared { raised: AtomicBool::new(false), event }) })
    }

    /// Make the port's current wait, or else its next one, return [`Wake::Woken`]. Wakes before that count as one.
    pub fn wake(&self) {
        if !self.shared.raised.swap(true, Ordering::AcqRel) {
            // It can fail only when the counter is full, and then it is readable.
            let _ = rustix::io::write(&self.shared.event, &1_u64.to_ne_bytes());
        }
    }

    /// Return what becomes readable with a wake.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Make it unreadable again if the wake that made it so has been taken.
    pub(crate) fn drain_unraised(&self) {
        if !self.shared.raised.load(Ordering::Acquire) {
            self.drain();
        }
    }

    /// Take the wake, if there is one.
    pub(crate) fn take(&self) -> bool {
        let raised = self.shared.raised.swap(false, Ordering::AcqRel);
        if raised {
            self.drain();
        }
        raised
    }

    fn drain(&self) {
        // Empty is fine: the waker has raised the flag and not yet written.
        let _ = rustix::io::read(&self.shared.event, &mut [0_u8; 8][..]);
    }
}

impl std::fmt::Debug for Waker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waker").finish_non_exhaustive()
    }
}

/// A port that can be waited on.
pub(crate) trait Sleeper {
    /// Return how long a wait looks for packets before it gives its processor away.
    fn spin(&self) -> Duration;

    /// Take a wake, if there is one.
    fn take_wake(&mut self) -> bool;

    /// Look for a packet without sleeping.
    fn find_packet(&mut self) -> bool;

    /// Sleep until there may be something, or time is up; return what is known of it.
    fn sleep(&mut self, timeout: Option<Duration>) -> Option<Wake>;
}

/// Wait for a packet or a wake: look a little, then yield a few times, and only then sleep.
pub(crate) fn wait_on(port: &mut impl Sleeper, timeout: Option<Duration>) -> Wake {
    if let Some(wake) = look(port) {
        return wake;
    }
    if timeout == Some(Duration::ZERO) {
        return Wake::Timeout;
    }
    let start = Instant::now();
    // A timeout beyond the clock's end is none.
    let deadline = timeout.and_then(|timeout| start.checked_add(timeout));
    let spin_until = start + port.spin();
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
            // Whoever took a whole slice will take the next: a sleeper is preferred when its packet comes.
            if now.elapsed() > LONG_YIELD {
                yields = YIELDS;
            }
        } else if let Some(wake) = port.sleep(deadline.map(|deadline| deadline - now)) {
            return wake;
        }
        if let Some(wake) = look(port) {
            return wake;
        }
    }
}

/// Look for a packet or a wake without sleeping.
pub(crate) fn look(port: &mut impl Sleeper) -> Option<Wake> {
    if port.take_wake() {
        Some(Wake::Woken)
    } else if port.find_packet() {
        Some(Wake::Packet)
    } else {
        None
    }
}

impl Sleeper for UdpPort {
    fn spin(&self) -> Duration {
        self.config.spin
    }

    fn take_wake(&mut self) -> bool {
        self.waker.take()
    }

    fn find_packet(&mut self) -> bool {
        self.fill()
    }

    /// Sleep until a socket or the waker has something, packets that the kernel refused can leave, or time is up. Woken:
    /// what is watched besides has something.
    fn sleep(&mut self, timeout: Option<Duration>) -> Option<Wake> {
        let unsent = !self.tx.is_empty();
        let events = if unsent { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let event = PollFd::from_borrowed_fd(self.waker.file(), PollFlags::IN);
        // With nothing joined or watched, the third and the fourth are the first once more.
        let all = PollFd::from_borrowed_fd(self.poll_fd(), PollFlags::IN);
        let watched = self.watched.as_ref().map_or(self.poll_fd(), AsFd::as_fd);
        let watched = PollFd::from_borrowed_fd(watched, PollFlags::IN);
        let mut fds = [PollFd::new(&self.socket, events), event, all, watched];
        // Out of the structure's range means never: 292 billion years.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return None; // Interrupted: the caller's loop looks again.
        }
        let [socket, event, _, watched] = fds.map(|fd| fd.revents());
        if event.contains(PollFlags::IN) {
            self.waker.drain_unraised();
        }
        if unsent && socket.contains(PollFlags::OUT) {
            self.tx.flush(self.socket.as_fd(), &mut self.stats);
        }
        (self.watched.is_some() && watched.contains(PollFlags::IN)).then_some(Wake::Woken)
    }
}
