//! The board's side of the bus: who connects, from this machine or from another host, is heard out here, and handed to the
//! shard that serves it.

mod calls;
mod reception;
#[cfg(test)]
mod tests;

pub(super) use calls::{Caller, Calls};
pub(super) use reception::{Arrival, Neighbour};

use super::BoardError;
use reception::Reception;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use sumac_hal::ctrl::{self, BusUser, Name};
use sumac_hal::dma::Profile;
use sumac_hal::ids::BootId;
use sumac_hal::shm::{DeviceUsers, Listener, machine};
use sumac_hal::udp::Waker;

/// What a board's engine is, for contributions by reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BusConfig {
    /// What the engine plays.
    pub profile: Profile,
    /// Its threads.
    pub threads: usize,
    /// Whether it is pickier than hardware.
    pub strict: bool,
    /// Memory for redo slots, in bytes.
    pub redo_memory_bytes: usize,
    /// The memory that one rank may register, in bytes; more is refused as [`EntryStatus::Quota`]. A rank takes part in
    /// each group by a registration of its own.
    ///
    /// [`EntryStatus::Quota`]: sumac_hal::mmio::EntryStatus::Quota
    pub rank_memory_bytes: u64,
}

impl Default for BusConfig {
    fn default() -> Self {
        Self {
            profile: Profile::Full,
            threads: 2,
            strict: false,
            redo_memory_bytes: 32 << 20,
            rank_memory_bytes: 256 << 30,
        }
    }
}

/// What ends the thread: a descriptor of its own, as a connection takes room that there may not be.
#[derive(Debug)]
struct Stop {
    is_set: AtomicBool,
    event: OwnedFd,
}

impl Stop {
    fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        // It can fail only if the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// The listening thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Bus {
    announced: ctrl::Bus,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Bus {
    /// Listen for ranks of this machine; `None` if the machine does not tell which one it is.
    pub(super) fn start(
        config: &BusConfig,
        boot_id: BootId,
        arrivals: Sender<Arrival>,
        waker: Waker,
    ) -> Result<Option<Self>, BoardError> {
        let Some(machine) = machine() else { return Ok(None) };
        let name = format!("sumac-{:016x}", boot_id.0);
        // What proves a rank is its key. Who may dial is the administrator's choice.
        let users = DeviceUsers::from_env()?;
        let user = BusUser { uid: users.own, serves_all: users.serve_all() };
        let listener = Listener::bind(&name).map_err(BoardError::Bus)?.serving_all(user.serves_all);
        let Ok(socket) = Name::try_from(name.as_str()) else { return Ok(None) };
        let redo_memory_bytes = config.redo_memory_bytes as u64;
        let announced = ctrl::Bus { machine, socket, user, redo_memory_bytes, remote: None };
        let system = |source: rustix::io::Errno| BoardError::System { what: "an event", source: source.into() };
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(system)?;
        let stop = Arc::new(Stop { is_set: AtomicBool::new(false), event });
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("bus".into()).spawn(move || {
            let mut reception = Reception::new(listener);
            let mut somebody_serves = true;
            // A shard that has ended takes nobody any more, and neither does this.
            while somebody_serves && !stopped.is_set.load(Ordering::Acquire) {
                reception.turn(&stopped.event, |arrival| {
                    somebody_serves &= arrivals.send(Arrival::Near(arrival)).is_ok();
                    waker.wake();
                });
            }
        });
        let thread = thread.map_err(|source| BoardError::System { what: "start the bus's thread", source })?;
        Ok(Some(Self { announced, stop, thread: Some(thread) }))
    }

    pub(super) fn announced(&self) -> ctrl::Bus {
        self.announced.clone()
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
