//! The board's side of the bus: who connects is heard out here, and handed to the shard that serves it.

use super::BoardError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;
use sumac_hal::ctrl::{self, Name};
use sumac_hal::dma::Profile;
use sumac_hal::ids::{BootId, ChildIndex, GroupId};
use sumac_hal::shm::{Connection, Listener, Message, SocketError, machine};
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
}

impl Default for BusConfig {
    fn default() -> Self {
        Self { profile: Profile::Full, threads: 2, strict: false, redo_memory_bytes: 32 << 20 }
    }
}

/// How long who has connected may take to say who it is; others wait meanwhile.
const HELLO_LIMIT: Duration = Duration::from_secs(1);

/// How long the listener sleeps; a connection ends that.
const IDLE: Duration = Duration::from_secs(3600);

/// Somebody who wants to attach.
pub(super) struct Arrival {
    pub(super) connection: Connection,
    pub(super) group: GroupId,
    pub(super) child: ChildIndex,
    pub(super) key: u64,
}

/// The listening thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Bus {
    announced: ctrl::Bus,
    stop: Arc<AtomicBool>,
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
        let listener = Listener::bind(&name).map_err(BoardError::Bus)?;
        let Ok(socket) = Name::try_from(name.as_str()) else { return Ok(None) };
        let announced = ctrl::Bus { machine, socket, redo_memory_bytes: config.redo_memory_bytes as u64 };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("bus".into()).spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                match hear(&listener) {
                    Ok(Some(arrival)) => {
                        // A shard that has ended takes nobody any more, and neither does this.
                        if arrivals.send(arrival).is_err() {
                            return;
                        }
                        waker.wake();
                    }
                    Ok(None) => {}
                    Err(error) => tracing::warn!(%error, "somebody can't attach"),
                }
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
        self.stop.store(true, Ordering::Release);
        // A connection ends the thread's sleep; if that fails, there is nobody to wake.
        let _ = Connection::open(&self.announced.socket, HELLO_LIMIT);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Wait for the next rank, and hear who it is.
fn hear(listener: &Listener) -> Result<Option<Arrival>, SocketError> {
    let Some(connection) = listener.accept(IDLE)? else { return Ok(None) };
    match connection.receive(HELLO_LIMIT) {
        Ok(received) => match received.message {
            Message::Attach { group, child, key } => Ok(Some(Arrival { connection, group, child, key })),
            _ => Err(SocketError::Malformed),
        },
        // It has thought better of it.
        Err(SocketError::Closed) => Ok(None),
        Err(error) => Err(error),
    }
}
