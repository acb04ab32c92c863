//! Event descriptors that wake a device which waits for more than doorbells: sockets, many ranks, its engine.
//!
//! A thread that sleeps on a futex can wait for nothing else, but a device waits for packets, connections and many
//! ranks at once. It is therefore woken by an eventfd, as VFIO and ivshmem deliver interrupts to user space. Each rank
//! has one eventfd per queue, so it can wake only its own device. The doorbell word still records whether the device
//! sleeps, and the rule of [`Doorbell`] holds: announce, check once more, sleep.

use crate::ring::Doorbell;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;

/// Events fetched in one call.
const EVENTS: usize = 32;

/// An eventfd that wakes a device.
#[derive(Debug)]
pub struct Bell {
    event: OwnedFd,
}

impl Bell {
    /// Create one, on the device's side.
    ///
    /// # Errors
    /// The system's error.
    pub fn create() -> Result<Self, Errno> {
        Ok(Self { event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)? })
    }

    /// Wrap the descriptor that a device has handed over.
    pub fn open(file: OwnedFd) -> Self {
        Self { event: file }
    }

    /// Wake the device if it sleeps, after something was published for it.
    #[inline]
    pub fn ring(&self, doorbell: Doorbell<&AtomicU32>) {
        if doorbell.ring() {
            // This fails only if the counter is full; the device then has a wake-up pending anyway.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Forget all rings so far, on the side that polls the descriptor level-triggered.
    pub fn clear(&self) {
        // This fails only if nobody has rung.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    /// The descriptor to hand over.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// The set of bells and connections that a device waits on besides its port, each identified by a number.
#[derive(Debug)]
pub struct BellSet {
    epoll: OwnedFd,
}

impl BellSet {
    /// Make an empty set.
    ///
    /// # Errors
    /// The system's error.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    /// Add a bell, edge-triggered: [`BellSet::poll`] reports each ring once, and nothing has to be read.
    ///
    /// # Errors
    /// The system's error.
    pub fn add_bell(&self, bell: &Bell, number: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, bell, EventData::new_u64(number), EventFlags::IN | EventFlags::ET)
    }

    /// Add a connection, level-triggered: it is reported for as long as a message is unread or the peer has closed.
    ///
    /// # Errors
    /// The system's error.
    pub fn add_connection(&self, connection: impl AsFd, number: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, connection, EventData::new_u64(number), EventFlags::IN | EventFlags::RDHUP)
    }

    /// Remove a bell or a connection. A descriptor that is closed everywhere is removed by the kernel.
    pub fn remove(&self, file: impl AsFd) {
        // A descriptor that is not in the set needs no removal.
        let _ = epoll::delete(&self.epoll, file);
    }

    /// Call `each` with the number of every descriptor that is ready, without waiting.
    pub fn poll(&self, mut each: impl FnMut(u64)) {
        let mut events = [const { Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; EVENTS];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // This fails only for an invalid set. Events that do not fit are reported by the next call.
        let count = epoll::wait(&self.epoll, &mut events[..], Some(&now)).unwrap_or(0);
        events[..count].iter().for_each(|event| each(event.data.u64()));
    }
}

impl AsFd for BellSet {
    /// Readable when [`BellSet::poll`] has something to report.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
