//! One function: a rank's rings, its memory, its connection.
//!
//! Invariants:
//! - what a rank makes a call do is bounded, and so is what is kept for it, whatever it sends and leaves unread;
//! - memory is mapped once the rank's share has room for it.

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
use sumac_hal::dma::{Capabilities, RegionError, RegionKey, RegionTable, RegisterError};
use sumac_hal::emu::dma::EmuEngine;
use sumac_hal::ids::{BootId, Epoch, FunctionId, GroupId};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryError, EntryStatus, Features, FunctionConfig,
    SUBMISSION_WORDS, SubmissionEntry,
};
use sumac_hal::ring::{Consumer, Memory, Poisoned, Producer};
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

/// Entries taken from a ring before others get their turn.
const ENTRIES_PER_TURN: usize = 64;

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
    /// It has broken a ring.
    #[error(transparent)]
    Ring(#[from] Poisoned),
    /// It submits what is none.
    #[error("{0}")]
    Entry(#[from] EntryError),
    /// It submits on a queue what that does not take.
    #[error("an entry on a queue that does not take it")]
    Queue,
    /// It hands over more memory than it registers.
    #[error("{HANDED_OVER_MAX} files of memory were handed over, and none registered")]
    Memory,
}

/// The ends of a queue that the device holds.
struct Ends {
    queue: FunctionQueue,
    bell: Bell,
    submissions: Consumer<FunctionRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    completions: Producer<FunctionRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    /// What is to be published.
    pending: VecDeque<CompletionEntry>,
    /// Chunks answered, modulo 2^32.
    answered: u32,
}

impl Ends {
    fn publish(&mut self) -> Result<bool, Poisoned> {
        let (mut told, mut urgent) = (false, false);
        while let Some(entry) = self.pending.front() {
            if !self.completions.push(&entry.emit())? {
                break;
            }
            let landed =
                matches!(entry, CompletionEntry::Answer { status: EntryStatus::Result | EntryStatus::Done, .. });
            if let CompletionEntry::Answer { count, .. } = entry {
                self.answered = self.answered.wrapping_add(u32::from(*count));
            }
            urgent |= !landed;
            self.pending.pop_front();
            told = true;
        }
        // Who waits for a whole operation is not woken for each of its chunks.
        if told && (urgent || self.queue.host_wants().is_reached(self.answered)) {
            ring(self.queue.host_bell());
        }
        Ok(told)
    }
}

/// A command that waits for something.
enum Waiting {
    Deregister { cookie: u64, key: RegionKey },
    Fence { cookie: u64, group: GroupId },
}

/// A rank that has attached.
pub(super) struct Attached {
    id: FunctionId,
    connection: Connection,
    function: Function,
    admin: Ends,
    data: Ends,
    /// By its handle. `None`: there was no room for the descriptor.
    handed_over: BTreeMap<u64, Option<OwnedFd>>,
    memory: Vec<RegionKey>,
    waiting: Vec<Waiting>,
    /// What the node's window does not let in yet.
    parked: Option<Contribution>,
    /// Chunks taken and not answered.
    owed: u32,
    beat: u32,
}

/// The redo memory, and where the group's slots are in it: start, length of each, number.
type Redo<'a> = (&'a Arc<Region>, (u64, usize, usize));

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
        let (function, [admin, data]) = match made {
            Ok(made) => made,
            Err(error) => return Err((connection, error)),
        };
        let attached = Self {
            id,
            connection,
            function,
            admin,
            data,
            handed_over: BTreeMap::new(),
            memory: Vec::new(),
            waiting: Vec::new(),
            parked: None,
            owed: 0,
            beat: 0,
        };
        let number = attached.number();
        let added = bells
            .add_connection(&attached.connection, number)
            .and_then(|()| bells.add_bell(&attached.admin.bell, number))
            .and_then(|()| bells.add_bell(&attached.data.bell, number));
        match added {
            Ok(()) => Ok(attached),
            Err(error) => Err((attached.connection, error.into())),
        }
    }

    fn make((boot_id, dma): (BootId, Capabilities)) -> Result<(Function, [Ends; 2]), CreateError> {
        let features = Features::all();
        let function = Function::create(&FunctionConfig { boot_id, features, queues: QUEUES, depth: DEPTH, dma })?;
        let ends = |index: u32| -> Result<Ends, CreateError> {
            // A function has the queues that it was made with.
            let queue = function.queue(index).expect("as many as asked for");
            let submissions = Consumer::new(queue.submissions.clone());
            let completions = Producer::new(queue.completions.clone());
            Ok(Ends { queue, bell: Bell::create()?, submissions, completions, pending: VecDeque::new(), answered: 0 })
        };
        let ends = [ends(0)?, ends(1)?];
        Ok((function, ends))
    }

    pub(super) const fn id(&self) -> FunctionId {
        self.id
    }

    const fn number(&self) -> u64 {
        self.id.0 as u64
    }

    pub(super) const fn is_number(&self, number: u64) -> bool {
        self.number() == number
    }

    /// Return what it has registered.
    pub(super) fn memory(&self) -> &[RegionKey] {
        &self.memory
    }

    /// Take what its connection says; what rings a bell says nothing.
    pub(super) fn hear(&mut self) -> Result<(), Ended> {
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

    /// Take what was submitted, as far as it can be; true if there was something.
    pub(super) fn take<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        engine: &mut EmuEngine,
        now: Instant,
    ) -> Result<bool, Ended> {
        let mut taken = false;
        for _ in 0..ENTRIES_PER_TURN {
            if !self.takes_commands() {
                break;
            }
            let Some(words) = self.admin.submissions.pop()? else { break };
            let SubmissionEntry::Admin { cookie, command } = SubmissionEntry::parse(&words)? else {
                return Err(Ended::Queue);
            };
            taken = true;
            if let Some((status, value)) = self.carry_out(cookie, command, node, regions, engine)? {
                self.admin.pending.push_back(CompletionEntry::Admin { status, cookie, value });
            }
        }
        for _ in 0..ENTRIES_PER_TURN {
            let entry = match self.parked.take() {
                Some(entry) => entry,
                None => match self.data.submissions.pop()? {
                    None => break,
                    Some(words) => match SubmissionEntry::parse(&words)? {
                        SubmissionEntry::Contribution(entry) => entry,
                        SubmissionEntry::Limit(limit) => {
                            node.announce(self.id, &limit);
                            taken = true;
                            continue;
                        }
                        _ => return Err(Ended::Queue),
                    },
                },
            };
            if !self.submit(entry, node, regions, now) {
                break;
            }
            taken = true;
        }
        Ok(taken)
    }

    /// Tell whether there is a place for another command's answer. A rank that takes none out gets none in.
    fn takes_commands(&self) -> bool {
        self.admin.pending.len() + self.waiting.len() < self.admin.queue.completions.capacity() as usize
    }

    /// Hand an entry to the node; false if it has to wait.
    fn submit<const N: usize>(
        &mut self,
        entry: Contribution,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        now: Instant,
    ) -> bool {
        let places = self.data.queue.completions.capacity() as usize;
        // One for each chunk, and one for what a failure names. A rank that takes nothing out gets nothing more in.
        if self.owed as usize + self.data.pending.len() + usize::from(entry.count) + 1 > places {
            self.parked = Some(entry);
            return false;
        }
        match node.submit(self.id, &entry, regions, now) {
            Ok(()) => {
                self.owed += u32::from(entry.count);
                true
            }
            Err(EntryStatus::Window) => {
                self.parked = Some(entry);
                false
            }
            Err(status) => {
                let Contribution { group, epoch, seq, count, .. } = entry;
                let (window, stable) = (0, sumac_hal::ids::ChunkNo(0));
                let slowest = None;
                let answer = CompletionEntry::Answer { status, group, epoch, seq, count, window, stable, slowest };
                self.owed += u32::from(count);
                self.tell(answer);
                true
            }
        }
    }

    /// Carry a command out; `None` if its answer has to wait.
    fn carry_out<const N: usize>(
        &mut self,
        cookie: u64,
        command: AdminCommand,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        engine: &mut EmuEngine,
    ) -> Result<Option<(EntryStatus, u64)>, Ended> {
        Ok(match command {
            AdminCommand::Register { handle, offset_bytes, len_bytes } => {
                if !self.handed_over.contains_key(&handle) {
                    // It was sent before the entry, so it is there.
                    self.hear()?;
                }
                Some(match self.register(handle, (offset_bytes, len_bytes), regions, engine) {
                    Ok(key) => (EntryStatus::Result, key.to_bits()),
                    Err(status) => (status, 0),
                })
            }
            AdminCommand::Deregister { region } => match regions.deregister(self.id, region) {
                Ok(gone) => {
                    // Its place may be given to the next one before this one's answer is out.
                    if gone {
                        engine.unmap(region);
                    }
                    self.waiting.push(Waiting::Deregister { cookie, key: region });
                    None
                }
                Err(RegionError::Stale { .. }) => Some((EntryStatus::StaleRegion, 0)),
                Err(_) => Some((EntryStatus::BadRegion, 0)),
            },
            AdminCommand::Fence { group, epoch } => self.fence(cookie, (group, epoch), node),
            // A command of a later version.
            _ => Some((EntryStatus::Malformed, 0)),
        })
    }

    /// Map what was handed over, and register it. This board's regions begin where their memory does.
    fn register<const N: usize>(
        &mut self,
        handle: u64,
        (offset_bytes, len_bytes): (u64, u64),
        regions: &mut RegionTable<N>,
        engine: &mut EmuEngine,
    ) -> Result<RegionKey, EntryStatus> {
        let file = self.handed_over.remove(&handle).ok_or(EntryStatus::BadRegion)?.ok_or(EntryStatus::NoRoom)?;
        let key = regions.register(self.id, len_bytes).map_err(|error| match error {
            RegisterError::Empty => EntryStatus::OutOfBounds,
            _ => EntryStatus::NoRoom,
        })?;
        if let Err(status) = map(file, key, (offset_bytes, len_bytes), engine) {
            // Nobody has used it.
            let _ = regions.deregister(self.id, key);
            return Err(status);
        }
        self.memory.push(key);
        Ok(key)
    }

    /// Let go of the rank's memory in a group. One that is gone touches nothing.
    fn fence(
        &mut self,
        cookie: u64,
        (group, epoch): (GroupId, Epoch),
        node: &mut Node<'_>,
    ) -> Option<(EntryStatus, u64)> {
        let known = node.withdraw(group, epoch, self.id) || node.holds(group, self.id);
        if !known && node.has_group(group) {
            return Some((EntryStatus::UnknownGroup, 0));
        }
        self.waiting.push(Waiting::Fence { cookie, group });
        None
    }

    /// Answer the commands whose time has come.
    pub(super) fn finish<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &RegionTable<N>,
        engine: &mut EmuEngine,
    ) {
        let id = self.id;
        let (memory, pending) = (&mut self.memory, &mut self.admin.pending);
        self.waiting.retain(|waiting| {
            let (waits, cookie) = match *waiting {
                Waiting::Deregister { cookie, key } => (regions.contains(key), (cookie, Some(key))),
                Waiting::Fence { cookie, group } => (node.holds(group, id), (cookie, None)),
            };
            if waits {
                return true;
            }
            let (cookie, key) = cookie;
            if let Some(key) = key {
                engine.unmap(key);
                memory.retain(|&other| other != key);
            }
            pending.push_back(CompletionEntry::Admin { status: EntryStatus::Result, cookie, value: 0 });
            false
        });
    }

    /// Note an entry for the rank; answers in a row become one.
    pub(super) fn tell(&mut self, entry: CompletionEntry) {
        if let CompletionEntry::Answer { count, .. } = entry {
            self.owed -= u32::from(count);
        }
        if let (
            Some(CompletionEntry::Answer { status: last, seq: first, count: many, window, stable, .. }),
            // What names a rank begins an operation, and speaks of that alone.
            CompletionEntry::Answer { status, seq, count, window: now, stable: newest, slowest: None, .. },
        ) = (self.data.pending.back_mut(), entry)
            && *last == status
            && first.0.checked_add((*many).into()) == Some(seq.0)
            && let Some(sum) = many.checked_add(count)
        {
            (*many, *window, *stable) = (sum, now, newest);
            return;
        }
        self.data.pending.push_back(entry);
    }

    /// Publish what is to be told; true if something was.
    pub(super) fn publish(&mut self) -> Result<bool, Ended> {
        let admin = self.admin.publish()?;
        Ok(self.data.publish()? || admin)
    }

    /// Tell whether its rings hold something that may be taken.
    pub(super) fn has_news(&mut self) -> bool {
        let news = |ends: &mut Ends| ends.submissions.available() != Ok(0);
        self.takes_commands() && news(&mut self.admin) || self.parked.is_none() && news(&mut self.data)
    }

    /// Tell whether something waits for a place in its rings.
    pub(super) fn is_full(&self) -> bool {
        !self.admin.pending.is_empty() || !self.data.pending.is_empty()
    }

    /// Show the rank that the board's shard goes on.
    pub(super) fn beat(&mut self) {
        self.beat = self.beat.wrapping_add(1);
        self.function.bar().set_heartbeat(self.beat);
    }

    pub(super) fn announce(&mut self) {
        self.admin.queue.device_bell().announce();
        self.data.queue.device_bell().announce();
    }

    pub(super) fn awake(&mut self) {
        self.admin.queue.device_bell().awake();
        self.data.queue.device_bell().awake();
    }

    /// Hang up.
    pub(super) fn leave(self, bells: &Bells) {
        self.function.bar().set_status(sumac_hal::mmio::DeviceStatus::FAILED);
        // The rank may still hold the bells, so that closing them here would not take them out.
        bells.remove(&self.admin.bell);
        bells.remove(&self.data.bell);
        bells.remove(&self.connection);
    }
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("id", &self.id).field("owed", &self.owed).finish_non_exhaustive()
    }
}

/// Hand over what a rank needs: its function, what wakes the device, and the redo slots.
fn hand_over(
    connection: &Connection,
    (function, ends): &(Function, [Ends; 2]),
    (redo, (offset_bytes, slot_len_bytes, slots)): Redo<'_>,
) -> Result<(), CreateError> {
    connection.send(&Message::Function, Some(function.file()))?;
    for (queue, ends) in (0..).zip(ends) {
        connection.send(&Message::Bell { queue }, Some(ends.bell.as_fd()))?;
    }
    let message = Message::Redo { offset_bytes, slot_len_bytes: slot_len_bytes as u32, slots: slots as u32 };
    connection.send(&message, Some(redo.read_only_file()?.as_fd()))?;
    Ok(())
}
