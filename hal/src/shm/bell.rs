//! What wakes a device that sleeps on more than doorbells: on sockets, on other ranks, on its engine.
//!
//! A futex wakes who waits for nothing else. A device waits for packets, connections and many ranks at a time, so what
//! wakes it is an eventfd, as an interrupt is to a program that drives a card (VFIO, ivshmem): each rank has one of its
//! own for each queue, so that it can disturb nobody's but its own. The doorbell's word still says whether anybody
//! sleeps, and the rule of [`Doorbell`] still holds: announce, look once more, sleep.

use crate::ring::Doorbell;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;

/// How many events are taken at a time.
const EVENTS: usize = 32;

/// An eventfd that wakes a device.
#[derive(Debug)]
pub struct Bell {
    event: OwnedFd,
}

impl Bell {
    /// Make one, as the device.
    ///
    /// # Errors
    /// The system's, if it has none to give.
    pub fn create() -> Result<Self, Errno> {
        Ok(Self { event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)? })
    }

    /// Take what a device has handed over.
    pub fn open(file: OwnedFd) -> Self {
        Self { event: file }
    }

    /// Wake the device if it sleeps, after something was published for it.
    pub fn ring(&self, doorbell: Doorbell<&AtomicU32>) {
        if doorbell.ring() {
            // It can fail only when the counter is full, and then the device was told before.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }
}

impl AsFd for Bell {
    /// To hand over.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// What a device sleeps on besides its port: bells and connections, each under a number.
#[derive(Debug)]
pub struct Bells {
    epoll: OwnedFd,
}

impl Bells {
    /// Make an empty set.
    ///
    /// # Errors
    /// The system's, if it has none to give.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    /// Add a bell: each ring is told once, and nothing has to be read.
    ///
    /// # Errors
    /// The system's.
    pub fn add_bell(&self, bell: &Bell, number: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, bell, EventData::new_u64(number), EventFlags::IN | EventFlags::ET)
    }

    /// Add a connection: it is told as long as there is a message, or the other side is gone.
    ///
    /// # Errors
    /// The system's.
    pub fn add_connection(&self, connection: impl AsFd, number: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, connection, EventData::new_u64(number), EventFlags::IN | EventFlags::RDHUP)
    }

    /// Take out what was added. What is closed everywhere goes by itself.
    pub fn remove(&self, file: impl AsFd) {
        // What is not in need not go out.
        let _ = epoll::delete(&self.epoll, file);
    }

    /// Call `each` with the number of whatever has something, without waiting.
    pub fn poll(&self, mut each: impl FnMut(u64)) {
        let mut events = [const { Event { flags: EventFlags::empty(), data: EventData::new_u64(0) } }; EVENTS];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // It fails only for sets that are none. What does not fit is told the next time.
        let count = epoll::wait(&self.epoll, &mut events[..], Some(&now)).unwrap_or(0);
        events[..count].iter().for_each(|event| each(event.data.u64()));
    }
}

impl AsFd for Bells {
    /// Readable when [`Bells::poll`] has something to tell.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
