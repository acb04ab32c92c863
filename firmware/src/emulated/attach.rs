//! How ranks attach: listeners for ranks of this machine and of other hosts, which receive the attach requests and hand
//! them to the shard that serves them.

mod local;
mod remote;
#[cfg(test)]
mod tests;

pub(super) use local::{Arrival, LocalArrival};
pub(super) use remote::{RemoteArrival, RemoteListener};

use super::BoardError;
use local::PendingAttaches;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use sumac_hal::ctrl::{self, DeviceUser, Name};
use sumac_hal::dma::Profile;
use sumac_hal::ids::BootId;
use sumac_hal::shm::{DeviceUsers, Listener, machine};
use sumac_hal::udp::Waker;

/// Configuration of zero-copy contributions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroCopyConfig {
    /// The profile of the emulated engine.
    pub profile: Profile,
    /// The number of the engine's threads.
    pub threads: usize,
    /// Whether the engine is stricter than hardware.
    pub strict: bool,
    /// Memory for redo slots, in bytes.
    pub redo_memory_bytes: usize,
    /// The memory that one rank may register, in bytes; more is refused as [`EntryStatus::Quota`]. A rank registers
    /// separately in each group.
    ///
    /// [`EntryStatus::Quota`]: sumac_hal::mmio::EntryStatus::Quota
    pub rank_memory_bytes: u64,
}

impl Default for ZeroCopyConfig {
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

/// Ends a listener's thread, through an eventfd opened in advance: a connection would need a descriptor when none may
/// be left.
#[derive(Debug)]
struct Stop {
    is_set: AtomicBool,
    event: OwnedFd,
}

impl Stop {
    fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        // This fails only if the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// The listener for ranks of this machine. Dropping it ends its thread.
#[derive(Debug)]
pub(super) struct LocalListener {
    attach_point: ctrl::AttachPoint,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl LocalListener {
    /// Listen for ranks of this machine; `None` if the machine cannot be identified.
    pub(super) fn start(
        config: &ZeroCopyConfig,
        boot_id: BootId,
        arrivals: Sender<Arrival>,
        waker: Waker,
    ) -> Result<Option<Self>, BoardError> {
        let Some(machine) = machine() else { return Ok(None) };
        let name = format!("sumac-{:016x}", boot_id.0);
        // A rank proves its identity by its key. Which users may connect is the administrator's choice.
        let users = DeviceUsers::from_env()?;
        let user = DeviceUser { uid: users.own, serves_all: users.serve_all() };
        let listener = Listener::bind(&name).map_err(BoardError::Attach)?.serving_all(user.serves_all);
        let Ok(socket) = Name::try_from(name.as_str()) else { return Ok(None) };
        let redo_memory_bytes = config.redo_memory_bytes as u64;
        let attach_point = ctrl::AttachPoint { machine, socket, user, redo_memory_bytes, remote: None };
        let system =
            |source: rustix::io::Errno| BoardError::System { what: "create an eventfd", source: source.into() };
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(system)?;
        let stop = Arc::new(Stop { is_set: AtomicBool::new(false), event });
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("attach".into()).spawn(move || {
            let mut pending = PendingAttaches::new(listener);
            let mut is_served = true;
            // Stop when the shard that serves the ranks has ended.
            while is_served && !stopped.is_set.load(Ordering::Acquire) {
                pending.poll(&stopped.event, |arrival| {
                    is_served &= arrivals.send(Arrival::Local(arrival)).is_ok();
                    waker.wake();
                });
            }
        });
        let thread =
            thread.map_err(|source| BoardError::System { what: "start the thread that accepts ranks", source })?;
        Ok(Some(Self { attach_point, stop, thread: Some(thread) }))
    }

    pub(super) fn attach_point(&self) -> ctrl::AttachPoint {
        self.attach_point.clone()
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
