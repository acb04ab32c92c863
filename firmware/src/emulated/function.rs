//! One function: a rank's rings, its memory, its connection. What the rings bring is [`sumac_device::function`]'s.
//!
//! Invariant: what is heard from a rank at a time is bounded, and so is what is kept of it.

mod memory;
#[cfg(test)]
mod tests;

pub(super) use memory::take_away;

use memory::map;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use sumac_device::Node;
use sumac_device::function::{self, Backlog, FunctionEnd, Mappings};
use sumac_hal::dma::{Capabilities, RegionKey, RegionTable};
use sumac_hal::emu::dma::EmuEngine;
use sumac_hal::ids::{BootId, FunctionId};
use sumac_hal::mmio::{COMPLETION_WORDS, CompletionEntry, EntryStatus, Features, FunctionConfig, SUBMISSION_WORDS};
use sumac_hal::shm::{
    Bell, Bells, Connection, Function, FunctionQueue, FunctionRing, MemoryError, Message, Received, Region,
    SocketError, ring,
};
use sumac_hal::time::Instant;
use thiserror::Error;

/// The admin queue, and one for the board's shard.
const QUEUES: u32 = 2;

/// Places of each submission ring: runs of 16 chunks, so a gigabyte of contributions in flight at the usual length.
const DEPTH: u32 = 1024;

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
    hearing: Hearing,
    rings: Rings,
    queues: [FunctionQueue; 2],
    bells: [Bell; 2],
    beat: u32,
}

/// The redo memory, and where the group's slots are in it: start, length of each, number.
type Redo<'a> = (&'a Arc<Region>, (u64, usize, usize));

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
    engine: &'a mut EmuEngine,
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
        let hearing = Hearing { connection, handed_over: BTreeMap::new() };
        let attached = Self { function, hearing, rings, queues, bells: own, beat: 0 };
        let number = attached.number();
        let added = bells
            .add_connection(&attached.hearing.connection, number)
            .and_then(|()| attached.bells.iter().try_for_each(|bell| bells.add_bell(bell, number)));
        match added {
            Ok(()) => Ok(attached),
            Err(error) => Err((attached.hearing.connection, error.into())),
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
        self.hearing.hear()
    }

    /// Take what was submitted, as far as it can be; true if there was something.
    pub(super) fn take<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        engine: &mut EmuEngine,
        now: Instant,
    ) -> Result<bool, Ended> {
        let mut files = Files { hearing: &mut self.hearing, engine };
        self.rings.take(node, regions, &mut files, now)
    }

    /// Answer the commands whose time has come.
    pub(super) fn finish<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &RegionTable<N>,
        engine: &mut EmuEngine,
    ) {
        let mut files = Files { hearing: &mut self.hearing, engine };
        self.rings.finish(node, regions, &mut files);
    }

    /// Publish what is to be told; true if something was.
    pub(super) fn publish(&mut self) -> Result<bool, Ended> {
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
        self.rings.has_news()
    }

    /// Tell whether something waits for a place in its rings.
    pub(super) fn is_full(&self) -> bool {
        self.rings.is_full()
    }

    /// Show the rank that the board's shard goes on.
    pub(super) fn beat(&mut self) {
        self.beat = self.beat.wrapping_add(1);
        self.function.bar().set_heartbeat(self.beat);
    }

    pub(super) fn announce(&mut self) {
        self.queues.iter().for_each(|queue| queue.device_bell().announce());
    }

    pub(super) fn awake(&mut self) {
        self.queues.iter().for_each(|queue| queue.device_bell().awake());
    }

    /// Hang up.
    pub(super) fn leave(self, bells: &Bells) {
        self.function.bar().set_status(sumac_hal::mmio::DeviceStatus::FAILED);
        // The rank may still hold the bells, so that closing them here would not take them out.
        self.bells.iter().for_each(|bell| bells.remove(bell));
        bells.remove(&self.hearing.connection);
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
