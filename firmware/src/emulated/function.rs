//! One function: a rank's rings, its memory, its connection. What the rings bring is [`sumac_device::function`]'s.
//!
//! Invariant: what is heard from a rank at a time is bounded, and so is what is kept of it.

mod far;
mod memory;
#[cfg(test)]
mod tests;

pub(super) use memory::take_away;

use super::engine::BoardEngine;
use far::Far;
use memory::map;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use sumac_device::Node;
use sumac_device::function::{self, Backlog, FunctionEnd, Mappings};
use sumac_hal::dma::{Capabilities, RegionKey, RegionTable};
use sumac_hal::ids::{BootId, FunctionId};
use sumac_hal::mmio::{COMPLETION_WORDS, CompletionEntry, EntryStatus, Features, FunctionConfig, SUBMISSION_WORDS};
use sumac_hal::remote::CarrierError;
use sumac_hal::shm::{
    Bell, Bells, Connection, Function, FunctionQueue, FunctionRing, MemoryError, Message, Received, Region,
    SocketError, ring,
};
use sumac_hal::time::Instant;
use thiserror::Error;

/// The admin queue, and one for the board's shard.
const QUEUES: u32 = 2;

/// Places of each submission ring: runs of 16 chunks, so a gigabyte of contributions in flight at the usual length.
pub(super) const DEPTH: u32 = 1024;

/// Memory handed over and not yet registered.
const HANDED_OVER_MAX: usize = 16;

/// Messages taken from a connection before others get their turn; what is left is told again.
const MESSAGES_PER_TURN: usize = 2 * HANDED_OVER_MAX;

/// What can't be made for a rank.
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

/// Why a function is at its end.
#[derive(Debug, Error)]
pub(super) enum Ended {
    /// It has left, or died, or says what it should not.
    #[error(transparent)]
    Connection(#[from] SocketError),
    /// It has broken its rings' rules.
    #[error(transparent)]
    Rings(#[from] FunctionEnd),
    /// It hands over more memory than it registers.
    #[error("{HANDED_OVER_MAX} files of memory were handed over, and none registered")]
    Memory,
    /// Its process on another host has ended, or left.
    #[error("the rank has left")]
    Left,
    /// It talks where nothing is to be said any more.
    #[error("a message on the connection of the set-up")]
    Talks,
    /// Its link is at its end, or it does not keep the rules there.
    #[error(transparent)]
    Carrier(CarrierError),
}

/// What a rank has not taken yet. It grows with what is in it: most ranks leave nothing.
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

/// A rank's rings on this board.
pub(super) type Rings = function::Function<FunctionRing<SUBMISSION_WORDS>, FunctionRing<COMPLETION_WORDS>, Pending>;

/// What a rank hands over on its connection.
struct Hearing {
    connection: Connection,
    /// By its handle. `None`: there was no room for the descriptor.
    handed_over: BTreeMap<u64, Option<OwnedFd>>,
}

/// A rank that has attached.
pub(super) struct Attached {
    function: Function,
    way: Way,
    rings: Rings,
    queues: [FunctionQueue; 2],
    beat: u32,
}

/// How it is reached.
enum Way {
    /// It shares memory with the device.
    Near { hearing: Hearing, bells: [Bell; 2] },
    /// It is on another host.
    Far(Box<Far>),
}

/// The redo memory of the rank's group, and where the slots are in it: start, length of each, number.
pub(super) type Redo<'a> = (&'a Region, (u64, usize, usize));

impl Hearing {
    /// Take what the connection says; what rings a bell says nothing.
    fn hear(&mut self) -> Result<(), Ended> {
        for _ in 0..MESSAGES_PER_TURN {
            let (message, file) = match self.connection.receive(Duration::ZERO) {
                Ok(Received { message, file }) => (message, file),
                Err(SocketError::NoDescriptor { message }) => (message, None),
                Err(SocketError::Timeout(_)) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let Message::Memory { handle } = message else { return Err(SocketError::Malformed.into()) };
            if self.handed_over.len() == HANDED_OVER_MAX {
                return Err(Ended::Memory);
            }
            self.handed_over.insert(handle, file);
        }
        Ok(())
    }
}

/// A rank's memory as this board maps it: files that it has handed over, and the engine.
struct Files<'a> {
    hearing: &'a mut Hearing,
    engine: &'a mut BoardEngine,
}

impl Mappings for Files<'_> {
    type Memory = OwnedFd;
    type End = Ended;

    fn find(&mut self, handle: u64) -> Result<Result<OwnedFd, EntryStatus>, Ended> {
        if !self.hearing.handed_over.contains_key(&handle) {
            // It was sent before the entry, so it is there.
            self.hearing.hear()?;
        }
        let file = self.hearing.handed_over.remove(&handle);
        Ok(file.ok_or(EntryStatus::BadRegion).and_then(|file| file.ok_or(EntryStatus::NoRoom)))
    }

    fn map(&mut self, key: RegionKey, memory: OwnedFd, offset_bytes: u64, len_bytes: u64) -> Result<(), EntryStatus> {
        map(memory, key, (offset_bytes, len_bytes), self.engine)
    }

    fn unmap(&mut self, key: RegionKey) {
        self.engine.unmap(key);
    }
}

impl Attached {
    /// Make a function, and hand it over.
    pub(super) fn create(
        id: FunctionId,
        connection: Connection,
        device: (BootId, Capabilities),
        redo: Redo<'_>,
        bells: &Bells,
    ) -> Result<Self, (Connection, CreateError)> {
        let made = Self::make(device).and_then(|made| hand_over(&connection, &made, redo).map(|()| made));
        let Made { function, queues, bells: own } = match made {
            Ok(made) => made,
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
        let hearing = Hearing { connection, handed_over: BTreeMap::new() };
        Ok(Self { function, way: Way::Near { hearing, bells: own }, rings, queues, beat: 0 })
    }

    /// Make a function for a rank on another host, which the engine knows by a number.
    pub(super) fn create_far(
        id: FunctionId,
        (stream, peer): (TcpStream, u16),
        device: (BootId, Capabilities),
        bells: &Bells,
    ) -> Result<Self, CreateError> {
        let Made { function, queues, .. } = Self::make(device)?;
        let [admin, data] = queues.each_ref().map(|queue| (queue.submissions.clone(), queue.completions.clone()));
        let rings = Rings::new(id, admin, data, Pending::default());
        bells.add_connection(&stream, id.0.into())?;
        let way = Way::Far(Box::new(Far::new(stream, peer, &queues)));
        Ok(Self { function, way, rings, queues, beat: 0 })
    }

    /// Return the engine's number of it, if it is on another host.
    pub(super) const fn peer(&self) -> Option<u16> {
        match &self.way {
            Way::Near { .. } => None,
            Way::Far(far) => Some(far.peer),
        }
    }

    fn make((boot_id, dma): (BootId, Capabilities)) -> Result<Made, CreateError> {
        let features = Features::all() - Features::ARENA - Features::SILENT;
        let function = Function::create(&FunctionConfig { boot_id, features, queues: QUEUES, depth: DEPTH, dma })?;
        // A function has the queues that it was made with.
        let queues = [0, 1].map(|index| function.queue(index).expect("as many as asked for"));
        Ok(Made { function, queues, bells: [Bell::create()?, Bell::create()?] })
    }

    pub(super) const fn id(&self) -> FunctionId {
        self.rings.id()
    }

    const fn number(&self) -> u64 {
        self.id().0 as u64
    }

    pub(super) const fn is_number(&self, number: u64) -> bool {
        self.number() == number
    }

    /// Take what its connection says.
    pub(super) fn hear(&mut self) -> Result<(), Ended> {
        match &mut self.way {
            Way::Near { hearing, .. } => hearing.hear(),
            Way::Far(far) => far.hear(),
        }
    }

    /// Take what was submitted, as far as it can be; true if there was something.
    pub(super) fn take<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        engine: &mut BoardEngine,
        now: Instant,
    ) -> Result<bool, Ended> {
        match &mut self.way {
            Way::Near { hearing, .. } => self.rings.take(node, regions, &mut Files { hearing, engine }, now),
            Way::Far(far) => {
                far.carry(engine)?;
                self.rings.take(node, regions, &mut far.mappings(engine), now)
            }
        }
    }

    /// Answer the commands whose time has come.
    pub(super) fn finish<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &RegionTable<N>,
        engine: &mut BoardEngine,
    ) {
        match &mut self.way {
            Way::Near { hearing, .. } => self.rings.finish(node, regions, &mut Files { hearing, engine }),
            Way::Far(far) => self.rings.finish(node, regions, &mut far.mappings(engine)),
        }
    }

    /// Publish what is to be told; true if something was.
    pub(super) fn publish(&mut self, engine: &mut BoardEngine) -> Result<bool, Ended> {
        if let Way::Far(far) = &mut self.way {
            let told = self.rings.publish(|_| {})?;
            return Ok(far.carry(engine)? || told);
        }
        let queues = &self.queues;
        let any = self.rings.publish(|told| {
            let queue = &queues[told.queue as usize];
            // Who waits for a whole operation is not woken for each of its chunks.
            if told.urgent || queue.host_wants().is_reached(told.answered) {
                ring(queue.host_bell());
            }
        })?;
        Ok(any)
    }

    /// Tell whether its rings hold something that may be taken.
    pub(super) fn has_news(&mut self) -> bool {
        let is_carried = if let Way::Far(far) = &mut self.way { far.has_news() } else { false };
        is_carried || self.rings.has_news()
    }

    /// Tell whether something waits for a place in its rings.
    pub(super) fn is_full(&self) -> bool {
        self.rings.is_full()
    }

    /// Show the rank that the board's shard goes on.
    pub(super) fn beat(&mut self) {
        self.beat = self.beat.wrapping_add(1);
        self.function.bar().set_heartbeat(self.beat);
        if let Way::Far(far) = &mut self.way {
            far.beat();
        }
    }

    pub(super) fn announce(&mut self) {
        self.queues.iter().for_each(|queue| queue.device_bell().announce());
    }

    pub(super) fn awake(&mut self) {
        self.queues.iter().for_each(|queue| queue.device_bell().awake());
    }

    /// Hang up. The link of a rank on another host is the engine's to end.
    pub(super) fn leave(self, bells: &Bells) {
        self.function.bar().set_status(sumac_hal::mmio::DeviceStatus::FAILED);
        match self.way {
            Way::Near { hearing, bells: own } => {
                // The rank may still hold the bells, so that closing them here would not take them out.
                own.iter().for_each(|bell| bells.remove(bell));
                bells.remove(&hearing.connection);
            }
            Way::Far(far) => bells.remove(&far.stream),
        }
    }
}

impl AsMut<Rings> for Attached {
    fn as_mut(&mut self) -> &mut Rings {
        &mut self.rings
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("id", &self.id()).field("owed", &self.rings.owed()).finish_non_exhaustive()
    }
}

/// What a rank is to be given.
struct Made {
    function: Function,
    queues: [FunctionQueue; 2],
    bells: [Bell; 2],
}

/// Hand over what a rank needs: its function, what wakes the device, and the redo slots.
fn hand_over(
    connection: &Connection,
    made: &Made,
    (redo, (offset_bytes, slot_len_bytes, slots)): Redo<'_>,
) -> Result<(), CreateError> {
    connection.send(&Message::Function, Some(made.function.file()))?;
    for (queue, bell) in (0..).zip(&made.bells) {
        connection.send(&Message::Bell { queue }, Some(bell.as_fd()))?;
    }
    let message = Message::Redo { offset_bytes, slot_len_bytes: slot_len_bytes as u32, slots: slots as u32 };
    connection.send(&message, Some(redo.read_only_file()?.as_fd()))?;
    Ok(())
}
