//! Waits for packets, and wake-ups from other threads.
//!
//! A wake-up across cores costs about 20 us, so a wait first spins, then yields a few times (which suffices when the
//! peer shares the core), and only then sleeps in `ppoll`.
//!
//! Invariant: no wake is lost. The flag is checked before each sleep, and it is raised before the eventfd is made
//! readable; a readable eventfd without the flag costs only one turn of the loop.

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

/// A yield that takes this long went to a thread that computes, not to a peer about to answer.
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

    /// Make the port's current or next wait return [`Wake::Woken`]. Several wakes before it count as one.
    pub fn wake(&self) {
        if !self.shared.raised.swap(true, Ordering::AcqRel) {
            // This fails only if the counter is full, and then it is readable.
            let _ = rustix::io::write(&self.shared.event, &1_u64.to_ne_bytes());
        }
    }

    /// Return the descriptor that a wake makes readable.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Reset the descriptor, unless a wake is pending.
    pub(crate) fn drain_unraised(&self) {
        if !self.shared.raised.load(Ordering::Acquire) {
            self.drain();
        }
    }

    /// Consume a pending wake; return whether there was one.
    pub(crate) fn take(&self) -> bool {
        let raised = self.shared.raised.swap(false, Ordering::AcqRel);
        if raised {
            self.drain();
        }
        raised
    }

    fn drain(&self) {
        // It may be empty: the waker raises the flag before it writes.
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
    /// Return how long a wait spins before it yields.
    fn spin(&self) -> Duration;

    /// Consume a pending wake; return whether there was one.
    fn take_wake(&mut self) -> bool;

    /// Fetch a packet without sleeping; return whether there is one.
    fn find_packet(&mut self) -> bool;

    /// Sleep until something may have arrived or the timeout has passed; return the cause, if known.
    fn sleep(&mut self, timeout: Option<Duration>) -> Option<Wake>;
}

/// Wait for a packet or a wake: spin, then yield a few times, then sleep.
pub(crate) fn wait_on(port: &mut impl Sleeper, timeout: Option<Duration>) -> Wake {
    if let Some(wake) = check(port) {
        return wake;
    }
    if timeout == Some(Duration::ZERO) {
        return Wake::Timeout;
    }
    let start = Instant::now();
    // A timeout beyond the clock's range means no deadline.
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
            // A thread that used a whole time slice will use the next one too; a sleeping thread is preferred when its
            // packet arrives.
            if now.elapsed() > LONG_YIELD {
                yields = YIELDS;
            }
        } else if let Some(wake) = port.sleep(deadline.map(|deadline| deadline - now)) {
            return wake;
        }
        if let Some(wake) = check(port) {
            return wake;
        }
    }
}

/// Check for a packet or a wake without sleeping.
pub(crate) fn check(port: &mut impl Sleeper) -> Option<Wake> {
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

    /// Sleep until a socket or the waker is ready, packets that the kernel refused can be sent, or the timeout has
    /// passed. `Woken` if the watched descriptor is readable.
    fn sleep(&mut self, timeout: Option<Duration>) -> Option<Wake> {
        let unsent = !self.tx.is_empty();
        let events = if unsent { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let event = PollFd::from_borrowed_fd(self.waker.file(), PollFlags::IN);
        // Without groups or a watched descriptor, the third and fourth repeat the first.
        let all = PollFd::from_borrowed_fd(self.poll_fd(), PollFlags::IN);
        let watched = self.watched.as_ref().map_or(self.poll_fd(), AsFd::as_fd);
        let watched = PollFd::from_borrowed_fd(watched, PollFlags::IN);
        let mut fds = [PollFd::new(&self.socket, events), event, all, watched];
        // A duration out of the structure's range (292 billion years) means no timeout.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            return None; // Interrupted: the caller's loop checks again.
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
