//! One function: a rank's rings, memory and connection. [`sumac_device::function`] processes the entries of the rings.
//!
//! Invariant: the work done for a rank in a turn is bounded, and so is the state kept for it.

mod memory;
mod remote;
#[cfg(test)]
mod tests;

pub(super) use memory::unregister;

use super::engine::BoardEngine;
use memory::map;
use remote::RemoteRank;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use sumac_device::Node;
use sumac_device::function::{self, Backlog, FunctionError, Mappings};
use sumac_hal::dma::{Capabilities, RegionKey, RegionTable};
use sumac_hal::ids::{BootId, FunctionId};
use sumac_hal::mmio::{COMPLETION_WORDS, CompletionEntry, EntryStatus, Features, FunctionConfig, SUBMISSION_WORDS};
use sumac_hal::remote::CarrierError;
use sumac_hal::shm::{
    Bell, BellSet, Connection, Function, FunctionQueue, FunctionRing, MemoryError, Message, Received, Region,
    SocketError, ring,
};
use sumac_hal::time::Instant;
use thiserror::Error;

/// The admin queue, and a data queue for the board's shard.
const QUEUES: u32 = 2;

/// The depth of each submission ring: with runs of 16 chunks, a gigabyte of contributions in flight at the usual chunk
/// length.
pub(super) const DEPTH: u32 = 1024;

/// The maximum number of memory files handed over and not yet registered.
const HANDED_OVER_MAX: usize = 16;

/// Messages received from a connection in a turn; the rest is reported again.
const MESSAGES_PER_TURN: usize = 2 * HANDED_OVER_MAX;

/// Why a rank's function could not be created.
#[derive(Debug, Error)]
pub(super) enum CreateError {
    #[error(transparent)]
    Function(#[from] sumac_hal::shm::FunctionError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("bell: {0}")]
    Bell(#[from] rustix::io::Errno),
    #[error(transparent)]
    Socket(#[from] SocketError),
}

/// Why a rank is detached.
#[derive(Debug, Error)]
pub(super) enum DetachReason {
    /// Its connection was closed, or carried an invalid message.
    #[error(transparent)]
    Connection(#[from] SocketError),
    /// It corrupted a ring, or submitted a malformed entry.
    #[error(transparent)]
    Rings(#[from] FunctionError),
    /// It hands over memory without registering it.
    #[error("{HANDED_OVER_MAX} memory files were handed over without being registered")]
    Memory,
    /// Its process on another host has closed the connection.
    #[error("the rank has left")]
    Left,
    /// It sent data on the connection of the handshake.
    #[error("unexpected data on the connection of the handshake")]
    UnexpectedData,
    /// Its link has ended, or it violates the link's protocol.
    #[error(transparent)]
    Carrier(CarrierError),
}

/// Completions that wait for room in the rank's ring. Grows on demand: most ranks never need it.
#[derive(Debug, Default)]
pub(super) struct Pending(VecDeque<CompletionEntry>);

impl Backlog for Pending {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn first(&self) -> Option<&CompletionEntry> {
        self.0.front()
    }

    fn last_mut(&mut self) -> Option<&mut CompletionEntry> {
        self.0.back_mut()
    }

    fn push(&mut self, entry: CompletionEntry) -> bool {
        self.0.push_back(entry);
        true
    }

    fn pop(&mut self) {
        self.0.pop_front();
    }
}

/// The device's ends of a rank's rings.
pub(super) type Rings = function::Function<FunctionRing<SUBMISSION_WORDS>, FunctionRing<COMPLETION_WORDS>, Pending>;

/// A rank on this machine: its connection, and memory that it handed over.
struct LocalRank {
    connection: Connection,
    /// Files by handle. `None`: the descriptor could not be received.
    handed_over: BTreeMap<u64, Option<OwnedFd>>,
}

/// An attached rank.
pub(super) struct AttachedRank {
    function: Function,
    transport: Transport,
    rings: Rings,
    queues: [FunctionQueue; 2],
    heartbeat: u32,
}

/// How the rank is attached.
enum Transport {
    /// Through shared memory.
    Shm { local: LocalRank, bells: [Bell; 2] },
    /// On another host, through RDMA.
    Rdma(Box<RemoteRank>),
}

/// The redo memory of the rank's group, and the slots in it: offset, length of each, count.
pub(super) type Redo<'a> = (&'a Region, (u64, usize, usize));

impl LocalRank {
    /// Receive messages; returns without waiting if there are none.
    fn poll_connection(&mut self) -> Result<(), DetachReason> {
        for _ in 0..MESSAGES_PER_TURN {
            let (message, file) = match self.connection.receive(Duration::ZERO) {
                Ok(Received { message, file }) => (message, file),
                Err(SocketError::NoDescriptor { message }) => (message, None),
                Err(SocketError::Timeout(_)) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let Message::Memory { handle } = message else { return Err(SocketError::Malformed.into()) };
            if self.handed_over.len() == HANDED_OVER_MAX {
                return Err(DetachReason::Memory);
            }
            self.handed_over.insert(handle, file);
        }
        Ok(())
    }
}

/// Maps the files that a rank handed over into the engine.
struct Files<'a> {
    local: &'a mut LocalRank,
    engine: &'a mut BoardEngine,
}

impl Mappings for Files<'_> {
    type Memory = OwnedFd;
    type Error = DetachReason;

    fn find(&mut self, handle: u64) -> Result<Result<OwnedFd, EntryStatus>, DetachReason> {
        if !self.local.handed_over.contains_key(&handle) {
            // The message was sent before the entry, so it has arrived.
            self.local.poll_connection()?;
        }
        let file = self.local.handed_over.remove(&handle);
        Ok(file.ok_or(EntryStatus::BadRegion).and_then(|file| file.ok_or(EntryStatus::NoResources)))
    }

    fn map(&mut self, key: RegionKey, memory: OwnedFd, offset_bytes: u64, len_bytes: u64) -> Result<(), EntryStatus> {
        map(memory, key, (offset_bytes, len_bytes), self.engine)
    }

    fn unmap(&mut self, key: RegionKey) {
        self.engine.unmap(key);
    }
}

impl AttachedRank {
    /// Create a function and hand it over.
    pub(super) fn create(
        id: FunctionId,
        connection: Connection,
        device: (BootId, Capabilities),
        redo: Redo<'_>,
        bells: &BellSet,
    ) -> Result<Self, (Connection, CreateError)> {
        let parts = Self::new_parts(device).and_then(|parts| hand_over(&connection, &parts, redo).map(|()| parts));
        let FunctionParts { function, queues, bells: own } = match parts {
            Ok(parts) => parts,
            Err(error) => return Err((connection, error)),
        };
        let [admin, data] = &queues;
        let [admin, data] = [admin, data].map(|queue| (queue.submissions.clone(), queue.completions.clone()));
        let rings = Rings::new(id, admin, data, Pending::default());
        let number = u64::from(id.0);
        let added = bells
            .add_connection(&connection, number)
            .and_then(|()| own.iter().try_for_each(|bell| bells.add_bell(bell, number)));
        if let Err(error) = added {
            return Err((connection, error.into()));
        }
        let local = LocalRank { connection, handed_over: BTreeMap::new() };
        Ok(Self { function, transport: Transport::Shm { local, bells: own }, rings, queues, heartbeat: 0 })
    }

    /// Create a function for a rank on another host, whose id in the engine is `peer`.
    pub(super) fn create_remote(
        id: FunctionId,
        (stream, peer): (TcpStream, u16),
        device: (BootId, Capabilities),
        bells: &BellSet,
    ) -> Result<Self, CreateError> {
        let FunctionParts { function, queues, .. } = Self::new_parts(device)?;
        let [admin, data] = queues.each_ref().map(|queue| (queue.submissions.clone(), queue.completions.clone()));
        let rings = Rings::new(id, admin, data, Pending::default());
        bells.add_connection(&stream, id.0.into())?;
        let transport = Transport::Rdma(Box::new(RemoteRank::new(stream, peer, &queues)));
        Ok(Self { function, transport, rings, queues, heartbeat: 0 })
    }

    /// Return the engine's peer number, if the rank is on another host.
    pub(super) const fn peer(&self) -> Option<u16> {
        match &self.transport {
            Transport::Shm { .. } => None,
            Transport::Rdma(remote) => Some(remote.peer),
        }
    }

    fn new_parts((boot_id, dma): (BootId, Capabilities)) -> Result<FunctionParts, CreateError> {
        let features = Features::all() - Features::ARENA - Features::POLL_ONLY;
        let function = Function::create(&FunctionConfig { boot_id, features, queues: QUEUES, depth: DEPTH, dma })?;
        // A function has the queues that it was created with.
        let queues = [0, 1].map(|index| function.queue(index).expect("as many as asked for"));
        Ok(FunctionParts { function, queues, bells: [Bell::create()?, Bell::create()?] })
    }

    pub(super) const fn id(&self) -> FunctionId {
        self.rings.id()
    }

    const fn number(&self) -> u64 {
        self.id().0 as u64
    }

    pub(super) const fn has_number(&self, number: u64) -> bool {
        self.number() == number
    }

    /// Receive messages on its connection.
    pub(super) fn poll_connection(&mut self) -> Result<(), DetachReason> {
        match &mut self.transport {
            Transport::Shm { local, .. } => local.poll_connection(),
            Transport::Rdma(remote) => remote.poll_connection(),
        }
    }

    /// Process submissions, as many as can be admitted; true if there were any.
    pub(super) fn poll_submissions<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        engine: &mut BoardEngine,
        now: Instant,
    ) -> Result<bool, DetachReason> {
        match &mut self.transport {
            Transport::Shm { local, .. } => {
                self.rings.poll_submissions(node, regions, &mut Files { local, engine }, now)
            }
            Transport::Rdma(remote) => {
                remote.carry(engine)?;
                self.rings.poll_submissions(node, regions, &mut remote.mappings(engine), now)
            }
        }
    }

    /// Complete the commands whose memory is no longer in use.
    pub(super) fn complete_commands<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &RegionTable<N>,
        engine: &mut BoardEngine,
    ) {
        match &mut self.transport {
            Transport::Shm { local, .. } => self.rings.complete_commands(node, regions, &mut Files { local, engine }),
            Transport::Rdma(remote) => self.rings.complete_commands(node, regions, &mut remote.mappings(engine)),
        }
    }

    /// Publish completions; true if there were any.
    pub(super) fn publish(&mut self, engine: &mut BoardEngine) -> Result<bool, DetachReason> {
        if let Transport::Rdma(remote) = &mut self.transport {
            let published = self.rings.publish(|_| {})?;
            return Ok(remote.carry(engine)? || published);
        }
        let queues = &self.queues;
        let any = self.rings.publish(|notice| {
            let queue = &queues[notice.queue as usize];
            // A rank that waits for a whole operation is not woken for each of its chunks.
            if notice.urgent || queue.host_threshold().is_reached(notice.answered) {
                ring(queue.host_bell());
            }
        })?;
        Ok(any)
    }

    /// Return whether its rings have entries to process.
    pub(super) fn has_work(&mut self) -> bool {
        let is_carried = if let Transport::Rdma(remote) = &mut self.transport { remote.has_work() } else { false };
        is_carried || self.rings.has_work()
    }

    /// Return whether completions wait for room in its rings.
    pub(super) fn is_full(&self) -> bool {
        self.rings.has_backlog()
    }

    /// Advance the heartbeat, by which the rank detects a stalled shard.
    pub(super) fn advance_heartbeat(&mut self) {
        self.heartbeat = self.heartbeat.wrapping_add(1);
        self.function.bar().set_heartbeat(self.heartbeat);
        if let Transport::Rdma(remote) = &mut self.transport {
            remote.advance_heartbeat();
        }
    }

    pub(super) fn arm(&mut self) {
        self.queues.iter().for_each(|queue| queue.device_bell().arm());
    }

    pub(super) fn disarm(&mut self) {
        self.queues.iter().for_each(|queue| queue.device_bell().disarm());
    }

    /// Close the connection. The link of a rank on another host is closed by the engine.
    pub(super) fn leave(self, bells: &BellSet) {
        self.function.bar().set_status(sumac_hal::mmio::DeviceStatus::FAILED);
        match self.transport {
            Transport::Shm { local, bells: own } => {
                // The rank may still hold the bells, so closing them here would not remove them from the set.
                own.iter().for_each(|bell| bells.remove(bell));
                bells.remove(&local.connection);
            }
            Transport::Rdma(remote) => bells.remove(&remote.stream),
        }
    }
}

impl AsMut<Rings> for AttachedRank {
    fn as_mut(&mut self) -> &mut Rings {
        &mut self.rings
    }
}

impl fmt::Debug for AttachedRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachedRank")
            .field("id", &self.id())
            .field("outstanding", &self.rings.outstanding())
            .finish_non_exhaustive()
    }
}

/// The parts of a new function.
struct FunctionParts {
    function: Function,
    queues: [FunctionQueue; 2],
    bells: [Bell; 2],
}

/// Hand over a rank's function, the bells that wake the device, and the redo slots.
fn hand_over(
    connection: &Connection,
    parts: &FunctionParts,
    (redo, (offset_bytes, slot_len_bytes, slots)): Redo<'_>,
) -> Result<(), CreateError> {
    connection.send(&Message::Function, Some(parts.function.file()))?;
    for (queue, bell) in (0..).zip(&parts.bells) {
        connection.send(&Message::Bell { queue }, Some(bell.as_fd()))?;
    }
    let message = Message::Redo { offset_bytes, slot_len_bytes: slot_len_bytes as u32, slots: slots as u32 };
    connection.send(&message, Some(redo.read_only_file()?.as_fd()))?;
    Ok(())
}
